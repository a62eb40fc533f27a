//! What this handle has seen of the objects of one kind, shared by its calls and its watches.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coord_core::{BootClock, Clock as _, Grant, Moment, Observations, Revision, Standing, Ttl};
use xxhash_rust::xxh3::xxh3_128;

use crate::client::Object;

/// How much longer than until a deadline a timer sleeps, so that it does not wake before it.
const ROUNDING: Duration = Duration::from_millis(1);

/// How many leases are remembered; the one of which nothing was heard for longest goes first, and is
/// then seen anew, which ends nothing early.
const LEASES_MAX: usize = 16_384;

/// Clones share what was seen.
#[derive(Clone)]
pub(crate) struct Seen(Arc<Mutex<State>>, BootClock);

struct State {
    observations: Observations<String>,
    entries: HashMap<String, Entry>,
    entries_max: usize,
    uses: u64,
}

/// What is known of an object beside how long it has not changed.
#[derive(Default)]
struct Entry {
    /// What this handle wrote last, whole, so that the next write needs no reading.
    own: Option<Object>,
    /// The highest term, which outlives a deletion.
    term: Option<u64>,
    /// The holder of the lease when it was seen last, and the uid of its object.
    holder: Option<(Grant, String)>,
    used: u64,
}

impl Seen {
    /// For leases, whose objects stay: bounded.
    pub(crate) fn of_leases() -> Self {
        Self::bounded(LEASES_MAX)
    }

    fn bounded(entries_max: usize) -> Self {
        let (observations, entries) = (Observations::default(), HashMap::new());
        let state = State { observations, entries, entries_max, uses: 0 };
        Self(Arc::new(Mutex::new(state)), BootClock::new())
    }

    pub(crate) fn now(&self) -> Moment {
        self.1.now()
    }

    /// Takes an object that has to be renewed within the TTL.
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

    /// Takes a lease's object, and the holder that it names.
    pub(crate) fn observe_held(
        &self,
        object: &Object,
        held: &Grant,
        asked: Moment,
        answered: Moment,
    ) -> Standing {
        self.state().entry(object.name()).holder = Some((held.clone(), object.uid().to_owned()));
        self.observe(object, held.ttl, asked, answered)
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
        state.entry(&key).own = Some(object.clone());
        state.observations.wrote(key, mark, ttl.get(), now);
    }

    /// The same for a lease's object, and this grant that it shows.
    pub(crate) fn wrote_held(&self, object: &Object, held: &Grant, now: Moment) {
        self.state().entry(object.name()).holder = Some((held.clone(), object.uid().to_owned()));
        self.wrote(object, held.ttl, now);
    }

    /// What this handle wrote last, unless it has run out since, by which time anybody may have
    /// taken it.
    pub(crate) fn own(&self, name: &str) -> Option<Object> {
        let (state, now) = (self.state(), self.now());
        let object = state.entries.get(name)?.own.as_ref()?;
        let standing = state.observations.standing(&name.to_owned(), now)?;
        (!standing.is_expired()).then(|| object.clone())
    }

    /// A lease has no object. That says nothing of the holder that was seen last: it may have renewed until
    /// another program deleted the object. It counts for its whole TTL from when the absence was noticed.
    pub(crate) fn gone(
        &self,
        name: &str,
        asked: Moment,
        answered: Moment,
    ) -> Option<(Grant, Standing)> {
        let mut state = self.state();
        let held = state.entries.get(name).and_then(|entry| entry.holder.clone());
        let Some((held, _)) = held else {
            state.forget(name);
            return None;
        };
        state.entry(name).own = None;
        // The absence is observed as the record was, and stands in its place.
        let (key, mark) = (name.to_owned(), Revision::from_bytes(Vec::new()));
        let standing = state.observations.observe(key, mark, held.ttl.get(), asked, answered);
        if standing.is_expired() {
            state.forget(name);
            return None;
        }
        Some((held, standing))
    }

    /// Takes in a lease's object that names no holder. That says that the holder let go only if it is
    /// the object by which it held the lease: one that was made since is as good as none.
    pub(crate) fn vacant(
        &self,
        object: &Object,
        asked: Moment,
        answered: Moment,
    ) -> Option<(Grant, Standing)> {
        let name = object.name();
        let is_other =
            |entry: &Entry| entry.holder.as_ref().is_some_and(|(_, of)| of != object.uid());
        if self.state().entries.get(name).is_some_and(is_other) {
            return self.gone(name, asked, answered);
        }
        self.forget(name);
        None
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
        if let Some(entry) = self.state().entries.get_mut(name) {
            entry.own = None;
        }
    }

    /// There is no such object, or nobody's.
    pub(crate) fn forget(&self, name: &str) {
        self.state().forget(name);
    }

    /// The grant is over, as its holder was told; nobody else's is forgotten.
    pub(crate) fn forget_held(&self, name: &str, over: &Grant) {
        let mut state = self.state();
        let is_same = |entry: &Entry| {
            entry.holder.as_ref().is_none_or(|(held, _)| held.fence() == over.fence())
        };
        if state.entries.get(name).is_none_or(is_same) {
            state.forget(name);
        }
    }

    /// These are all objects that there are.
    pub(crate) fn only(&self, objects: &[Object]) {
        let names: std::collections::HashSet<_> = objects.iter().map(Object::name).collect();
        self.state().observations.only(|name| names.contains(name.as_str()));
    }

    pub(crate) fn term(&self, name: &str) -> Option<u64> {
        self.state().entries.get(name)?.term
    }

    pub(crate) fn note_term(&self, name: &str, term: u64) {
        let mut state = self.state();
        let entry = state.entry(name);
        entry.term = entry.term.max(Some(term));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Seen {
    fn default() -> Self {
        Self::bounded(usize::MAX)
    }
}

impl State {
    /// What is known of an object, noted as used just now.
    fn entry(&mut self, name: &str) -> &mut Entry {
        if self.entries.len() >= self.entries_max && !self.entries.contains_key(name) {
            self.drop_oldest();
        }
        self.uses += 1;
        let entry = self.entries.entry(name.to_owned()).or_default();
        entry.used = self.uses;
        entry
    }

    /// Makes room for an eighth of all at once, since looking through them takes a while.
    fn drop_oldest(&mut self) {
        let mut uses: Vec<u64> = self.entries.values().map(|entry| entry.used).collect();
        let (_, last, _) = uses.select_nth_unstable(self.entries_max / 8);
        let last = *last;
        let observations = &mut self.observations;
        self.entries.retain(|name, entry| {
            let stays = entry.used > last;
            if !stays {
                observations.absent(name);
            }
            stays
        });
    }

    fn forget(&mut self, name: &str) {
        self.observations.absent(&name.to_owned());
        if let Some(entry) = self.entries.get_mut(name) {
            (entry.own, entry.holder) = (None, None);
            if entry.term.is_none() {
                self.entries.remove(name);
            }
        }
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
    use coord_core::{AttemptId, Era, Holder, Incarnation, LeaseName, NodeId, Origin, Term};
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

    fn grant(attempt: u128) -> Grant {
        let node = NodeId::new("a").expect("a name");
        let (run, attempt) = (Incarnation::from_u128(1), AttemptId::from_u128(attempt));
        let (lease, ttl) = (LeaseName::new("jobs").expect("a name"), Ttl::from_secs(9));
        let (origin, revision) = (Origin::new("kube:u/orders"), Revision::from_u64(1));
        let term = Term::new(Era::default(), 7).expect("small");
        let holder = Holder::new(node, run, attempt);
        Grant::new(lease, holder, term, ttl.expect("ttl"), origin, revision)
    }

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    #[test]
    fn a_holder_outlives_the_deletion_of_its_object_for_its_ttl() {
        let (seen, held) = (Seen::of_leases(), grant(1));
        let written = object("1", json!({ "holderIdentity": "a_1" }), "a");
        assert!(seen.gone("jobs", at(0), at(0)).is_none(), "nobody was seen");
        seen.observe_held(&written, &held, at(1), at(1));
        // Whatever it was seen last: it may have renewed until just before the deletion.
        let (holder, standing) = seen.gone("jobs", at(99), at(100)).expect("it may hold");
        assert_eq!((holder, standing.remaining), (held.clone(), Duration::from_secs(9)));
        // One that was made meanwhile, and names nobody, says nothing either.
        let metadata = json!({ "name": "jobs", "uid": "v", "resourceVersion": "2" });
        let blank = Object::parse(json!({ "metadata": metadata }), None).expect("an object");
        let (_, standing) = seen.vacant(&blank, at(108), at(108)).expect("it may hold");
        assert_eq!(standing.remaining, Duration::from_secs(1));
        assert!(seen.gone("jobs", at(109), at(109)).is_none(), "its TTL is over");
        assert!(seen.gone("jobs", at(110), at(110)).is_none(), "and stays so");

        // The object itself says that its holder let go.
        seen.observe_held(&written, &held, at(1), at(1));
        assert!(seen.vacant(&object("2", json!({}), "a"), at(2), at(2)).is_none());
        assert!(seen.gone("jobs", at(3), at(3)).is_none());
        // A holder that was told does not wait for itself; another does.
        seen.observe_held(&written, &held, at(1), at(1));
        seen.forget_held("jobs", &grant(2));
        assert!(seen.gone("jobs", at(2), at(2)).is_some());
        seen.forget_held("jobs", &held);
        assert!(seen.gone("jobs", at(3), at(3)).is_none());
    }

    #[test]
    fn the_lease_of_which_nothing_was_heard_for_longest_is_forgotten() {
        let seen = Seen::bounded(16);
        for number in 0..40 {
            seen.note_term(&format!("lease-{number}"), number);
            // Used all the time.
            seen.note_term("lease-0", 0);
        }
        assert!(seen.state().entries.len() <= 16);
        assert_eq!((seen.term("lease-0"), seen.term("lease-1")), (Some(0), None));
        assert_eq!(seen.term("lease-39"), Some(39));
    }
}
