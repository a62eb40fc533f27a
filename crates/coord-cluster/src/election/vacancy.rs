//! Whether no node has led for so long that all nodes have to be candidates, also those without a candidate
//! slot. Pure: `now` is an argument.

use std::time::Duration;

use coord_core::{Moment, Term};

/// After this many leader TTLs without a leader that stays, all nodes are candidates: those with a candidate
/// slot take the lease and can't lead, for example because their version can't read what is stored.
const UNSTEADY_TTLS: u32 = 3;

/// What one node has seen of the others' terms.
#[derive(Clone, Debug)]
pub(super) struct Vacancy {
    ttl: Duration,
    /// The term that is led, and since when that was seen.
    led: Option<(Term, Moment)>,
    vacant_since: Option<Moment>,
    /// Since when no node has led for a whole TTL.
    unsteady_since: Option<Moment>,
}

impl Vacancy {
    pub(super) fn new(leader_ttl: Duration) -> Self {
        Self { ttl: leader_ttl, led: None, vacant_since: None, unsteady_since: None }
    }

    /// Another node leads in this term now, or none does.
    pub(super) fn see(&mut self, term: Option<Term>, now: Moment) {
        let Some(term) = term else {
            self.led = None;
            self.vacant_since.get_or_insert(now);
            self.unsteady_since.get_or_insert(now);
            return;
        };
        self.vacant_since = None;
        let (_, since) = *self.led.insert(match self.led {
            Some((seen, since)) if seen == term => (seen, since),
            _ => (term, now),
        });
        if since.plus(self.ttl) <= now {
            self.unsteady_since = None;
        }
    }

    /// Whether all have to stand, by what was seen last.
    pub(super) fn is_long(&self, now: Moment) -> bool {
        self.ends().any(|end| end <= now)
    }

    /// When that may come out differently although nothing is heard.
    pub(super) fn wake(&self, now: Moment) -> Option<Moment> {
        let steady = self.led.filter(|_| self.unsteady_since.is_some());
        let steady = steady.map(|(_, since)| since.plus(self.ttl));
        self.ends().chain(steady).filter(|at| *at > now).min()
    }

    fn ends(&self) -> impl Iterator<Item = Moment> {
        let vacant = self.vacant_since.map(|since| since.plus(self.ttl));
        let unsteady = self.unsteady_since.map(|since| since.plus(self.ttl * UNSTEADY_TTLS));
        vacant.into_iter().chain(unsteady)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    fn term(number: u64) -> Option<Term> {
        Some(Term::from_u64(number))
    }

    #[test]
    fn all_stand_after_one_ttl_without_a_leader_and_no_longer_than_that() {
        let mut vacancy = Vacancy::new(TTL);
        vacancy.see(term(1), at(0));
        assert_eq!((vacancy.is_long(at(100)), vacancy.wake(at(100))), (false, None));
        vacancy.see(None, at(100));
        assert_eq!((vacancy.is_long(at(109)), vacancy.wake(at(109))), (false, Some(at(110))));
        vacancy.see(None, at(110));
        assert!(vacancy.is_long(at(110)));
        vacancy.see(term(2), at(111));
        assert!(!vacancy.is_long(at(111)));
        assert_eq!(vacancy.wake(at(111)), Some(at(121)), "whether it stays");
        vacancy.see(term(2), at(121));
        assert_eq!((vacancy.is_long(at(1000)), vacancy.wake(at(1000))), (false, None));
    }

    #[test]
    fn those_who_take_the_lease_and_cannot_lead_keep_nobody_from_standing() {
        let mut vacancy = Vacancy::new(TTL);
        let mut long_from = None;
        for second in 0..60 {
            // One second of each nine.
            let led = second % 9 == 8;
            vacancy.see(led.then(|| Term::from_u64(second)), at(second));
            if vacancy.is_long(at(second)) {
                long_from.get_or_insert(second);
            } else {
                assert_eq!(long_from, None, "also while the next one tries");
            }
        }
        assert_eq!(long_from, Some(30));
        vacancy.see(term(60), at(60));
        assert!(vacancy.is_long(at(60)));
        vacancy.see(term(60), at(70));
        assert!(!vacancy.is_long(at(70)), "it stays");
    }
}
