//! I1: one leader per term, and never two at a moment. Where somebody deletes a lease, its holder leads
//! on until its own deadline, and fencing alone keeps it from writing.

use std::collections::BTreeMap;
use std::time::Duration;

use coord_core::{AttemptId, LeaseName, Term};

use super::{Invariant, ProcessId, Seen};

pub(super) struct I1 {
    leader_ttl: Duration,
    /// Up to then a holder may not know that its lease was deleted.
    unknowing_until: Duration,
    granted: BTreeMap<(LeaseName, Term), AttemptId>,
    newest: BTreeMap<LeaseName, Term>,
    led: BTreeMap<Term, ProcessId>,
}

impl I1 {
    pub(super) fn new(leader_ttl: Duration) -> Self {
        Self {
            leader_ttl,
            unknowing_until: Duration::ZERO,
            granted: BTreeMap::new(),
            newest: BTreeMap::new(),
            led: BTreeMap::new(),
        }
    }
}

impl Invariant for I1 {
    fn name(&self) -> &'static str {
        "I1"
    }

    fn see(&mut self, seen: &Seen<'_>, now: Duration) -> Option<String> {
        match seen {
            Seen::Granted(grant) => {
                let key = (grant.lease.clone(), grant.term);
                let attempt = grant.holder.attempt;
                let known = self.granted.insert(key, attempt);
                if known.is_some_and(|known| known != attempt) {
                    return Some(format!("term {} was granted to two attempts", grant.term));
                }
                if known.is_none() {
                    let before = self.newest.insert(grant.lease.clone(), grant.term);
                    if before > Some(grant.term) {
                        return Some(format!("term {} comes after {before:?}", grant.term));
                    }
                }
                None
            }
            Seen::Leaders(leaders) => {
                if let [one, two, ..] = leaders
                    && now >= self.unknowing_until
                {
                    return Some(format!(
                        "{} leads in term {} and {} in term {}",
                        one.process, one.fence.term, two.process, two.fence.term
                    ));
                }
                for leading in *leaders {
                    let (term, process) = (leading.fence.term, leading.process);
                    let known = *self.led.entry(term).or_insert(process);
                    if known != process {
                        return Some(format!("{known} and {process} both led in term {term}"));
                    }
                }
                None
            }
            Seen::LeaseVanishes => {
                self.unknowing_until = now + self.leader_ttl;
                None
            }
            _ => None,
        }
    }
}
