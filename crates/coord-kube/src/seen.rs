//! What this handle has seen of the objects of one kind, shared by its calls and its watches.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coord_core::{BootClock, Clock as _, Moment, Observations, Revision, Standing, Ttl};
use xxhash_rust::xxh3::xxh3_128;

use crate::client::Object;

/// How much longer than until a deadline a timer sleeps, so that it does not wake before it.
const ROUNDING: Duration = Duration::from_millis(1);

/// Clones share what was seen.
#[derive(Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<State>>, BootClock);

#[derive(Default)]
struct State {
    observations: Observations<String>,
    /// What this handle wrote last, whole, so that the next write needs no reading.
    own: HashMap<String, Object>,
    /// The highest terms, which outlive a deletion.
    terms: HashMap<String, u64>,
}

impl Seen {
    pub(crate) fn now(&self) -> Moment {
        self.1.now()
    }

    /// Takes in an object that somebody has to renew within the TTL.
    pub(crate) fn observe(
        &self,
        object: &Object,
        ttl: Ttl,
        asked: Moment,
        answered: Moment,
    ) -> Standing {
        let (key, mark) = (object.name().to_owned(), mark(object));
        self.state().observations.observe(key, mark, ttl.get(), asked, answered)
    }

    /// Takes in an object that ends after so long, whatever is done to it.
    pub(crate) fn observe_fixed(&self, object: &Object, limit: Duration, now: Moment) -> Standing {
        let (key, mark) = (object.name().to_owned(), Revision::from_bytes(object.uid().to_owned()));
        self.state().observations.observe(key, mark, limit, now, now)
    }

    /// Takes in an object as this handle has just written it.
    pub(crate) fn wrote(&self, object: &Object, ttl: Ttl, now: Moment) {
        let (key, mark) = (object.name().to_owned(), mark(object));
        let mut state = self.state();
        state.observations.wrote(key.clone(), mark, ttl.get(), now);
        state.own.insert(key, object.clone());
    }

    /// What this handle wrote last, unless it has run out since, by which time anybody may have
    /// taken it.
    pub(crate) fn own(&self, name: &str) -> Option<Object> {
        let (state, now) = (self.state(), self.now());
        let object = state.own.get(name)?;
        let standing = state.observations.standing(&name.to_owned(), now)?;
        (!standing.is_expired()).then(|| object.clone())
    }

    /// How an object stands by what was seen last.
    pub(crate) fn standing(&self, name: &str) -> Option<Standing> {
        self.state().observations.standing(&name.to_owned(), self.now())
    }

    /// How long until a timer should look at an object again.
    pub(crate) fn remaining(&self, name: &str) -> Option<Duration> {
        self.standing(name).map(|standing| standing.remaining + ROUNDING)
    }

    pub(crate) fn unchanged_for(&self, name: &str) -> Option<Duration> {
        self.state().observations.unchanged_for(&name.to_owned(), self.now())
    }

    /// There is nothing that could run out.
    pub(crate) fn absent(&self, name: &str) {
        self.state().observations.absent(&name.to_owned());
    }

    /// It is another's by now.
    pub(crate) fn disown(&self, name: &str) {
        self.state().own.remove(name);
    }

    /// There is no such object, or nobody's.
    pub(crate) fn forget(&self, name: &str) {
        let mut state = self.state();
        state.observations.absent(&name.to_owned());
        state.own.remove(name);
    }

    /// These are all objects that there are.
    pub(crate) fn only(&self, objects: &[Object]) {
        let names: std::collections::HashSet<_> = objects.iter().map(Object::name).collect();
        self.state().observations.only(|name| names.contains(name.as_str()));
    }

    pub(crate) fn term(&self, name: &str) -> Option<u64> {
        self.state().terms.get(name).copied()
    }

    pub(crate) fn note_term(&self, name: &str, term: u64) {
        let mut state = self.state();
        match state.terms.get_mut(name) {
            Some(known) => *known = term.max(*known),
            None => {
                state.terms.insert(name.to_owned(), term);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one write of a Lease is told from another by. What an operator adds to its metadata is no
/// sign of life of the holder.
fn mark(object: &Object) -> Revision {
    let mut text = object.uid().to_owned();
    text.push_str(&object.spec().to_string());
    Revision::from_bytes(xxh3_128(text.as_bytes()).to_be_bytes().to_vec())
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seen").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(version: &str, spec: Value, note: &str) -> Object {
        let metadata = json!({
            "name": "jobs", "uid": "u", "resourceVersion": version, "annotations": { "n": note },
        });
        Object::parse(json!({ "metadata": metadata, "spec": spec }), None).expect("an object")
    }

    #[test]
    fn only_the_record_is_a_sign_of_life() {
        let first = object("1", json!({ "renewTime": "t1" }), "a");
        let noted = object("2", json!({ "renewTime": "t1" }), "b");
        let renewed = object("3", json!({ "renewTime": "t2" }), "b");
        assert_eq!(mark(&first), mark(&noted));
        assert_ne!(mark(&noted), mark(&renewed));
    }

    #[test]
    fn what_was_written_here_needs_no_reading() {
        let (seen, ttl) = (Seen::default(), Ttl::from_secs(9).expect("ttl"));
        let object = object("1", json!({ "renewTime": "t1" }), "a");
        assert!(seen.own("jobs").is_none());
        seen.wrote(&object, ttl, seen.now());
        assert_eq!(seen.own("jobs").expect("own").version(), "1");
        // As if it had been written long ago.
        let early = seen.now().minus(Duration::from_secs(10));
        if early.since_origin() > Duration::ZERO {
            seen.wrote(&object, ttl, early);
            assert!(seen.own("jobs").is_none(), "it has run out");
        }
        seen.note_term("jobs", 7);
        seen.note_term("jobs", 5);
        seen.forget("jobs");
        assert_eq!((seen.term("jobs"), seen.standing("jobs")), (Some(7), None));
    }
}
