//! Expiry as an observer judges it: by how long a record stayed unchanged on its own clock.
//!
//! For stores that can't end a record by themselves. Wall clocks of two machines are never
//! compared, and a time that stands in a record is not looked at: only that the record changed
//! counts, and when this observer learned of it.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::time::Duration;

use crate::clock::Moment;
use crate::types::Revision;

/// What one observer has seen of the records under some keys. Pure: the time is an argument.
///
/// ```
/// # use std::time::Duration;
/// # use coord_core::{Moment, Observations, Revision};
/// let at = |seconds| Moment::from_origin(Duration::from_secs(seconds));
/// let (ttl, first) = (Duration::from_secs(15), Revision::from_u64(1));
/// let mut seen = Observations::default();
/// // However old the record is: it may have been written just now.
/// assert!(!seen.observe("jobs", first.clone(), ttl, at(3), at(3)).is_expired());
/// assert!(seen.observe("jobs", first, ttl, at(18), at(18)).is_expired());
/// // A heartbeat came through after all.
/// assert!(!seen.observe("jobs", Revision::from_u64(2), ttl, at(19), at(19)).is_expired());
/// ```
#[derive(Clone)]
pub struct Observations<K> {
    seen: HashMap<K, Seen>,
    /// Whether all records were looked at once, so that a new one was written since.
    is_complete: bool,
}

#[derive(Clone)]
struct Seen {
    mark: Revision,
    ttl: Duration,
    /// When this observer learned of it.
    since: Moment,
    is_judged: bool,
}

/// How a record stands for one observer.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// How long the record may stay unchanged until it has expired; zero if it has.
    pub remaining: Duration,
    /// Whether the observer knows that the record was written since it looked for the first time.
    /// False says that the writer may be long gone.
    pub judged: bool,
}

impl Standing {
    /// Whether the record stayed unchanged for its TTL.
    #[must_use]
    pub fn is_expired(self) -> bool {
        self.remaining.is_zero()
    }
}

impl<K: Eq + Hash> Observations<K> {
    /// Takes in a record as it was read. `mark` tells one write of it from another, `ttl` is the
    /// record's own. It was `asked` for, and `answered`, at these moments: between them it may have
    /// changed unseen, so what is unchanged is judged by the first, and what is new counts from the
    /// second.
    pub fn observe(
        &mut self,
        key: K,
        mark: Revision,
        ttl: Duration,
        asked: Moment,
        answered: Moment,
    ) -> Standing {
        match self.seen.get_mut(&key) {
            Some(seen) if seen.mark == mark => {
                seen.ttl = ttl;
                seen.standing(asked)
            }
            other => {
                let is_judged = other.is_some() || self.is_complete;
                let seen = Seen { mark, ttl, since: answered, is_judged };
                let standing = seen.standing(answered);
                self.seen.insert(key, seen);
                standing
            }
        }
    }

    /// Takes in a record that this observer wrote itself, as the store answered.
    pub fn wrote(&mut self, key: K, mark: Revision, ttl: Duration, now: Moment) {
        self.seen.insert(key, Seen { mark, ttl, since: now, is_judged: true });
    }

    /// How a record stands by what was seen last; none if nothing was.
    #[must_use]
    pub fn standing(&self, key: &K, now: Moment) -> Option<Standing> {
        self.seen.get(key).map(|seen| seen.standing(now))
    }

    /// Since when a record is known not to have changed; none if it was never seen.
    #[must_use]
    pub fn unchanged_for(&self, key: &K, now: Moment) -> Option<Duration> {
        self.seen.get(key).map(|seen| now.since(seen.since))
    }

    /// There is no such record.
    pub fn absent(&mut self, key: &K) {
        self.seen.remove(key);
    }

    /// All records were looked at, and these are there: what is not is forgotten, and what comes
    /// from now on was written since.
    pub fn only(&mut self, mut is_there: impl FnMut(&K) -> bool) {
        self.seen.retain(|key, _| is_there(key));
        self.is_complete = true;
    }
}

impl Seen {
    fn standing(&self, now: Moment) -> Standing {
        let remaining = self.ttl.saturating_sub(now.since(self.since));
        Standing { remaining, judged: self.is_judged }
    }
}

impl<K> Default for Observations<K> {
    fn default() -> Self {
        Self { seen: HashMap::new(), is_complete: false }
    }
}

impl<K> fmt::Debug for Observations<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observations")
            .field("seen", &self.seen.len())
            .field("is_complete", &self.is_complete)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn at(millis: u64) -> Moment {
        Moment::from_origin(Duration::from_millis(millis))
    }

    fn mark(number: u64) -> Revision {
        Revision::from_u64(number)
    }

    #[test]
    fn a_record_counts_from_when_it_was_learned_of() {
        let mut seen = Observations::default();
        let first = seen.observe("a", mark(1), TTL, at(1_000), at(1_500));
        assert_eq!((first.remaining, first.judged), (TTL, false));
        let later = seen.observe("a", mark(1), TTL, at(11_499), at(60_000));
        assert_eq!(later.remaining, Duration::from_millis(1), "judged by when it was asked for");
        assert!(seen.observe("a", mark(1), TTL, at(11_500), at(11_500)).is_expired());
        assert!(!seen.observe("a", mark(1), TTL * 2, at(11_500), at(11_500)).is_expired());
        assert_eq!(seen.unchanged_for(&"a", at(21_500)), Some(TTL * 2));
    }

    #[test]
    fn any_change_begins_anew_and_judges() {
        let mut seen = Observations::default();
        seen.observe("a", mark(2), TTL, at(0), at(0));
        // An older one, read late: it costs time and ends nothing early.
        let standing = seen.observe("a", mark(1), TTL, at(9_000), at(9_000));
        assert_eq!((standing.remaining, standing.judged), (TTL, true));
        assert!(!seen.standing(&"a", at(18_999)).expect("seen").is_expired());
        assert!(seen.standing(&"a", at(19_000)).expect("seen").is_expired());
    }

    #[test]
    fn what_came_after_a_whole_look_was_written_since() {
        let mut seen = Observations::default();
        assert!(!seen.observe("old", mark(1), TTL, at(0), at(0)).judged);
        seen.only(|key| *key == "old");
        assert!(!seen.observe("old", mark(1), TTL, at(1), at(1)).judged);
        assert!(seen.observe("new", mark(2), TTL, at(1), at(1)).judged);
        seen.only(|key| *key == "new");
        assert_eq!(seen.standing(&"old", at(1)), None);
        assert!(seen.observe("old", mark(1), TTL, at(2), at(2)).judged, "it was made again");
        seen.absent(&"new");
        assert_eq!(seen.standing(&"new", at(2)), None);
    }

    #[test]
    fn ones_own_write_is_known_to_be_new() {
        let mut seen = Observations::default();
        seen.wrote("a", mark(1), TTL, at(5_000));
        let standing = seen.standing(&"a", at(6_000)).expect("seen");
        assert_eq!((standing.remaining, standing.judged), (Duration::from_secs(9), true));
    }
}
