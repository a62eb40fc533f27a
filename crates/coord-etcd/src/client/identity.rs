//! Which store this is: looked at in every transaction, for a store that is emptied or made anew while
//! processes run is another one.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};

use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::{ErrorKind, Result};

use super::{Client, Condition, Outcome, Step, writes};
use crate::error::Problem;

/// The identity that the backend was opened with.
#[derive(Default)]
pub(super) struct Identity {
    known: OnceLock<Known>,
    /// The greatest revision that was seen.
    newest: AtomicI64,
}

struct Known {
    key: String,
    value: Bytes,
    store: u64,
}

/// What was seen of the identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Same,
    /// The keys are gone, and the store is the same.
    Missing,
    Another,
}

impl Identity {
    fn look(&self, known: &Known, outcome: &Outcome, stored: Option<&Bytes>, newest: i64) -> Seen {
        match stored {
            Some(stored) if *stored == known.value => {
                self.newest.fetch_max(outcome.revision, Ordering::Relaxed);
                Seen::Same
            }
            // What counts from the beginning again was made anew: its terms do so, too.
            None if outcome.store == known.store && outcome.revision >= newest => Seen::Missing,
            _ => Seen::Another,
        }
    }
}

fn another(op: Op<'_>) -> Problem {
    let why = "the store was emptied or made anew and is another one now than when the backend was \
               opened; open it again";
    op.error(ErrorKind::Misconfigured).message(why).into()
}

impl Client {
    /// Lets every transaction from now on be for the store with this identity only.
    pub(crate) async fn stay_with(&self, op: Op<'_>, key: String, value: Bytes) -> Result<()> {
        let look = self.transact_anywhere(op, &[], &[Step::Get(key.clone())], &[]).await?;
        self.shared.identity.newest.fetch_max(look.revision, Ordering::Relaxed);
        // It is said once, when the backend is opened.
        let _ = self.shared.identity.known.set(Known { key, value, store: look.store });
        Ok(())
    }

    /// One atomic step: `then` if all conditions hold, else `otherwise`. Linearizable.
    ///
    /// If all keys of a store were deleted, the first handle that notices writes the identity again, so that
    /// all running processes continue together. Nothing is done in a store that is another one meanwhile.
    pub(crate) async fn transact(
        &self,
        op: Op<'_>,
        when: &[Condition],
        then: &[Step],
        otherwise: &[Step],
    ) -> Result<Outcome, Problem> {
        let Some(known) = self.shared.identity.known.get() else {
            return self.transact_anywhere(op, when, then, otherwise).await;
        };
        let is_write = then.iter().chain(otherwise).any(writes);
        let mut when = when.to_vec();
        if is_write {
            when.push(Condition::Holds(known.key.clone(), known.value.clone()));
        }
        let with_look = |steps: &[Step]| {
            let look = [Step::Get(known.key.clone())];
            steps.iter().cloned().chain(look).collect::<Vec<_>>()
        };
        let (then, otherwise) = (with_look(then), with_look(otherwise));
        let mut was_given_back = false;
        loop {
            let newest = self.shared.identity.newest.load(Ordering::Relaxed);
            let mut outcome = self.transact_anywhere(op, &when, &then, &otherwise).await?;
            let stored = outcome.found.pop().and_then(|mut found| found.entries.pop());
            let stored = stored.as_ref().map(|entry| &entry.value);
            match self.shared.identity.look(known, &outcome, stored, newest) {
                Seen::Same => return Ok(outcome),
                Seen::Another => return Err(another(op)),
                Seen::Missing if was_given_back => return Err(op.contended().into()),
                Seen::Missing => {}
            }
            match self.give_back(op, known).await {
                // What a read saw stands.
                Ok(()) if !is_write => return Ok(outcome),
                Ok(()) => was_given_back = true,
                // A handle that may only read leaves it to others.
                Err(Problem::Failed(error)) if !is_write && error.kind() == ErrorKind::Denied => {
                    return Ok(outcome);
                }
                Err(problem) => return Err(problem),
            }
        }
    }

    /// Writes the identity where there is none.
    async fn give_back(&self, op: Op<'_>, known: &Known) -> Result<(), Problem> {
        let (key, value) = (known.key.clone(), known.value.clone());
        let when = [Condition::Absent(key.clone())];
        let look = [Step::Get(key.clone())];
        let put = [Step::Put { key, value, lease: 0 }];
        let mut outcome = self.transact_anywhere(op, &when, &put, &look).await?;
        let is_ours =
            outcome.succeeded || outcome.take(0).is_some_and(|entry| entry.value == known.value);
        if is_ours { Ok(()) } else { Err(another(op)) }
    }

    /// How it stands with the stored identity.
    pub(crate) async fn look_at_identity(&self, op: Op<'_>) -> Result<Seen, Problem> {
        let Some(known) = self.shared.identity.known.get() else { return Ok(Seen::Same) };
        let newest = self.shared.identity.newest.load(Ordering::Relaxed);
        let look = [Step::Get(known.key.clone())];
        let mut outcome = self.transact_anywhere(op, &[], &look, &[]).await?;
        let stored = outcome.take(0).map(|entry| entry.value);
        Ok(self.shared.identity.look(known, &outcome, stored.as_ref(), newest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_counts_anew_is_another() {
        let identity = Identity::default();
        let known = Known { key: "id".to_owned(), value: "a".into(), store: 7 };
        let outcome = |revision, store| Outcome { succeeded: true, revision, store, found: vec![] };
        let look = |outcome: &Outcome, stored: Option<&'static str>| {
            let stored = stored.map(Bytes::from);
            let newest = identity.newest.load(Ordering::Relaxed);
            identity.look(&known, outcome, stored.as_ref(), newest)
        };
        assert_eq!(look(&outcome(50, 7), Some("a")), Seen::Same);
        assert_eq!(look(&outcome(51, 7), Some("b")), Seen::Another);
        assert_eq!(look(&outcome(52, 7), None), Seen::Missing);
        assert_eq!(look(&outcome(4, 7), None), Seen::Another);
        assert_eq!(look(&outcome(52, 8), None), Seen::Another);
    }
}
