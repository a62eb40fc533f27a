//! Whether things have been quiet for long enough to decide. Pure: `now` is an argument.

use std::time::Duration;

use coord_core::Moment;

/// How quiet it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Calm {
    /// Things changed a short while ago: look again then.
    NotYet(Moment),
    /// Nothing has changed since this moment, which is long enough ago.
    Since(Moment),
    /// There was no quiet moment for too long.
    Never,
}

/// From the first unreachable member on: when things changed last.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stability {
    stable_after: Duration,
    unrest_limit: Option<Duration>,
    trouble: Option<Trouble>,
}

#[derive(Clone, Copy, Debug)]
struct Trouble {
    /// When a member changed sides first, and last.
    first: Moment,
    shifted: Moment,
    /// When anything changed last.
    last: Moment,
}

impl Stability {
    pub(super) fn new(stable_after: Duration, unrest_limit: Option<Duration>) -> Self {
        Self { stable_after, unrest_limit, trouble: None }
    }

    /// Everybody is reachable.
    pub(super) fn on_quiet(&mut self) {
        self.trouble = None;
    }

    /// A member became reachable or unreachable, and somebody is unreachable.
    pub(super) fn on_shift(&mut self, now: Moment) {
        let first = match self.trouble {
            // After a long quiet it is another trouble.
            Some(trouble) if now.since(trouble.shifted) < self.stable_after * 2 => trouble.first,
            _ => now,
        };
        self.trouble = Some(Trouble { first, shifted: now, last: now });
    }

    /// Members came or went, and somebody is unreachable. The wait begins anew, and it is no unrest: there
    /// is an end to it, and all nodes that decide see the same.
    pub(super) fn on_members(&mut self, now: Moment) {
        let trouble = self.trouble.get_or_insert(Trouble { first: now, shifted: now, last: now });
        trouble.last = now;
    }

    /// If there is trouble, its wait begins anew.
    pub(super) fn restart(&mut self, now: Moment) {
        self.trouble = self.trouble.map(|_| Trouble { first: now, shifted: now, last: now });
    }

    /// This process was stalled for so long, and saw nothing of what changed meanwhile.
    pub(super) fn on_stall(&mut self, stalled: Duration) {
        if let Some(Trouble { first, shifted, last }) = &mut self.trouble {
            for moment in [first, shifted, last] {
                *moment = moment.plus(stalled);
            }
        }
    }

    /// How quiet it is; none if everybody is reachable.
    pub(super) fn calm(&self, now: Moment) -> Option<Calm> {
        let Trouble { first, shifted, last } = self.trouble?;
        let stable = last.plus(self.stable_after);
        if now >= stable {
            return Some(Calm::Since(last));
        }
        let settled = shifted.plus(self.stable_after);
        let limit = self.unrest_limit.map(|limit| first.plus(self.stable_after).plus(limit));
        Some(match limit.filter(|limit| *limit < settled) {
            Some(limit) if now < limit => Calm::NotYet(limit),
            Some(_) if now < settled => Calm::Never,
            _ => Calm::NotYet(stable),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    fn stability(limit: Option<u64>) -> Stability {
        Stability::new(Duration::from_secs(20), limit.map(Duration::from_secs))
    }

    #[test]
    fn a_change_starts_the_wait_anew() {
        let mut stability = stability(Some(15));
        assert_eq!(stability.calm(at(0)), None);
        stability.on_shift(at(10));
        assert_eq!(stability.calm(at(10)), Some(Calm::NotYet(at(30))));
        stability.on_shift(at(14));
        assert_eq!(stability.calm(at(30)), Some(Calm::NotYet(at(34))));
        assert_eq!(stability.calm(at(34)), Some(Calm::Since(at(14))));
        stability.on_quiet();
        assert_eq!(stability.calm(at(34)), None);
    }

    #[test]
    fn unrest_has_an_end_unless_it_is_off() {
        for (limit, end) in [(Some(15), Calm::Never), (None, Calm::NotYet(at(54)))] {
            let mut stability = stability(limit);
            for second in [0, 10, 20, 30, 34] {
                stability.on_shift(at(second));
            }
            assert_eq!(stability.calm(at(35)), Some(end), "{limit:?}");
        }
    }

    #[test]
    fn members_that_come_and_go_are_waited_for_and_are_no_unrest() {
        let mut stability = stability(Some(15));
        stability.on_shift(at(0));
        for second in [10, 20, 30, 40, 50] {
            stability.on_members(at(second));
            assert_eq!(stability.calm(at(second)), Some(Calm::NotYet(at(second + 20))));
        }
        assert_eq!(stability.calm(at(70)), Some(Calm::Since(at(50))));
    }

    #[test]
    fn after_a_long_quiet_it_is_another_trouble() {
        let mut stability = stability(Some(15));
        stability.on_shift(at(0));
        stability.on_shift(at(40));
        assert_eq!(stability.calm(at(41)), Some(Calm::NotYet(at(60))));
    }

    #[test]
    fn a_stall_of_this_process_is_not_quiet() {
        let mut stability = stability(Some(15));
        stability.on_shift(at(0));
        stability.on_stall(Duration::from_secs(100));
        assert_eq!(stability.calm(at(101)), Some(Calm::NotYet(at(120))));
    }
}
