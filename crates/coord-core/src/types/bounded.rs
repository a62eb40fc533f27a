//! Reading collections of which there is a most: they end at the first element too many, so that what is
//! refused for its number was never built.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// A list of at most so many; `what` names them in the error.
pub(crate) fn list<'de, D, T>(
    deserializer: D,
    what: &'static str,
    max: usize,
) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let mut list = Vec::new();
    let put = |item| {
        list.push(item);
        at_most(what, list.len(), max)
    };
    deserializer.deserialize_seq(Each { what, put, of: PhantomData })?;
    Ok(list)
}

/// A set of at most so many.
pub(crate) fn set<'de, D, T>(
    deserializer: D,
    what: &'static str,
    max: usize,
) -> Result<BTreeSet<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Ord,
{
    let mut set = BTreeSet::new();
    let put = |item| {
        set.insert(item);
        at_most(what, set.len(), max)
    };
    deserializer.deserialize_seq(Each { what, put, of: PhantomData })?;
    Ok(set)
}

/// A map of at most so much, as `size` counts its entries.
pub(crate) fn map<'de, D, K, V>(
    deserializer: D,
    what: &'static str,
    max: usize,
    size: impl Fn(&K, &V) -> usize,
) -> Result<BTreeMap<K, V>, D::Error>
where
    D: Deserializer<'de>,
    K: DeserializeOwned + Ord,
    V: DeserializeOwned,
{
    let (mut map, mut total) = (BTreeMap::new(), 0);
    let put = |key, value| {
        total += size(&key, &value);
        map.insert(key, value);
        at_most(what, total, max)
    };
    deserializer.deserialize_map(EachEntry { what, put, of: PhantomData })?;
    Ok(map)
}

fn at_most(what: &str, found: usize, max: usize) -> Result<(), String> {
    if found <= max { Ok(()) } else { Err(format!("too many {what} found={found} max={max}")) }
}

/// Hands over each element, until one is refused.
struct Each<T, F> {
    what: &'static str,
    put: F,
    of: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>, F: FnMut(T) -> Result<(), String>> Visitor<'de> for Each<T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of {}", self.what)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        while let Some(item) = seq.next_element()? {
            (self.put)(item).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}

/// As [`Each`], of a map.
struct EachEntry<K, V, F> {
    what: &'static str,
    put: F,
    of: PhantomData<(K, V)>,
}

impl<'de, K, V, F> Visitor<'de> for EachEntry<K, V, F>
where
    K: Deserialize<'de>,
    V: Deserialize<'de>,
    F: FnMut(K, V) -> Result<(), String>,
{
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a map of {}", self.what)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some((key, value)) = map.next_entry()? {
            (self.put)(key, value).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}
