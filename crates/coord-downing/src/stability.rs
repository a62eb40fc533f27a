//! Whether things have been quiet for long enough to decide. Pure: `now` is an argument.

use std::time::Duration;

use coord_core::Moment;

/// How quiet it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calm {
    /// Things changed a short while ago: look again then.
    NotYet(Moment),
    /// Nothing has changed since this moment, which is long enough ago.
    Since(Moment),
    /// There was no quiet moment for too long.
    Never,
}

/// What a member's change of sides says of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shift {
    /// Nodes were lost that were reached before, and none came back.
    Loss,
    /// A node is reached again, or was lost once more.
    Unrest,
}

/// From the first unreachable member on: when things changed last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stability {
    stable_after: Duration,
    unrest_limit: Option<Duration>,
    /// Whether the decision comes at the limit of unrest, whatever still changes.
    in_time: bool,
    trouble: Option<Trouble>,
}

#[derive(Clone, Copy, Debug)]
struct Trouble {
    /// When a member changed sides first.
    first: Moment,
    /// When there was unrest first, and last.
    unrest: Option<(Moment, Moment)>,
    /// When a member changed sides last.
    shifted: Moment,
    /// When anything changed last.
    last: Moment,
}

impl Trouble {
    fn new(now: Moment) -> Self {
        Self { first: now, unrest: None, shifted: now, last: now }
    }
}

impl Stability {
    pub(crate) fn new(stable_after: Duration, unrest_limit: Option<Duration>) -> Self {
        Self { stable_after, unrest_limit, in_time: false, trouble: None }
    }

    /// Nothing puts the decision off for longer than the limit of unrest: a lease is held for a while only,
    /// and the other side must not get it after all.
    pub(crate) fn in_time(self) -> Self {
        Self { in_time: true, ..self }
    }

    /// All members are reachable.
    pub(crate) fn on_quiet(&mut self) {
        self.trouble = None;
    }

    /// A member became reachable or unreachable, and at least one is unreachable. The wait begins anew. Members
    /// that are lost one after the other and stay lost are no unrest: that comes to an end.
    pub(crate) fn on_shift(&mut self, shift: Shift, now: Moment) {
        // After a long quiet it is another trouble.
        let recent = |since: Moment| now.since(since) < self.stable_after.saturating_mul(2);
        let before = self.trouble.filter(|trouble| recent(trouble.shifted));
        let unrest = before.and_then(|trouble| trouble.unrest).filter(|(_, last)| recent(*last));
        self.trouble = Some(Trouble {
            first: before.map_or(now, |trouble| trouble.first),
            unrest: match shift {
                Shift::Loss => unrest,
                Shift::Unrest => Some((unrest.map_or(now, |(first, _)| first), now)),
            },
            shifted: now,
            last: now,
        });
    }

    /// Members came or went, and at least one is unreachable. The wait begins anew, and it is no unrest: that
    /// comes to an end, and all nodes that decide see the same.
    pub(crate) fn on_members(&mut self, now: Moment) {
        self.trouble.get_or_insert(Trouble::new(now)).last = now;
    }

    /// If there is trouble, its wait begins anew.
    pub(crate) fn restart(&mut self, now: Moment) {
        self.trouble = self.trouble.map(|_| Trouble::new(now));
    }

    /// This process was stalled for so long, and saw nothing of what changed meanwhile.
    pub(crate) fn on_stall(&mut self, stalled: Duration) {
        if let Some(Trouble { first, unrest, shifted, last }) = &mut self.trouble {
            let unrest = unrest.iter_mut().flat_map(|(first, last)| [first, last]);
            for moment in unrest.chain([first, shifted, last]) {
                *moment = moment.plus(stalled);
            }
        }
    }

    /// How quiet it is; none if all members are reachable.
    pub(crate) fn calm(&self, now: Moment) -> Option<Calm> {
        let Trouble { first, unrest, shifted, last } = self.trouble?;
        let stable = last.plus(self.stable_after);
        if now >= stable {
            return Some(Calm::Since(last));
        }
        let limit = |first: Moment, last: Moment| {
            let limit = first.plus(self.stable_after).plus(self.unrest_limit?);
            let settled = last.plus(self.stable_after);
            (limit < settled && now < settled).then_some(limit)
        };
        if self.in_time {
            return Some(match limit(first, shifted) {
                Some(limit) if now >= limit => Calm::Since(limit.minus(self.stable_after)),
                Some(limit) => Calm::NotYet(limit),
                None => Calm::NotYet(stable),
            });
        }
        Some(match unrest.and_then(|(first, last)| limit(first, last)) {
            Some(limit) if now >= limit => Calm::Never,
            Some(limit) => Calm::NotYet(limit),
            None => Calm::NotYet(stable),
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
        stability.on_shift(Shift::Loss, at(10));
        assert_eq!(stability.calm(at(10)), Some(Calm::NotYet(at(30))));
        stability.on_shift(Shift::Unrest, at(14));
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
                stability.on_shift(Shift::Unrest, at(second));
            }
            assert_eq!(stability.calm(at(35)), Some(end), "{limit:?}");
        }
    }

    #[test]
    fn losses_one_after_the_other_are_waited_for_and_are_no_unrest() {
        let mut stability = stability(Some(15));
        for second in [0, 17, 34, 51] {
            stability.on_shift(Shift::Loss, at(second));
            assert_eq!(stability.calm(at(second)), Some(Calm::NotYet(at(second + 20))));
        }
        assert_eq!(stability.calm(at(70)), Some(Calm::NotYet(at(71))));
        assert_eq!(stability.calm(at(71)), Some(Calm::Since(at(51))));
    }

    #[test]
    fn unrest_counts_from_the_first_return_and_not_from_a_loss_before_it() {
        let mut stability = stability(Some(15));
        stability.on_shift(Shift::Loss, at(0));
        stability.on_shift(Shift::Unrest, at(15));
        stability.on_shift(Shift::Unrest, at(32));
        assert_eq!(stability.calm(at(49)), Some(Calm::NotYet(at(50))));
        assert_eq!(stability.calm(at(50)), Some(Calm::Never));
    }

    #[test]
    fn where_the_decision_has_to_come_in_time_losses_do_not_put_it_off() {
        let mut stability = stability(Some(15)).in_time();
        for second in [0, 17, 34] {
            stability.on_shift(Shift::Loss, at(second));
        }
        assert_eq!(stability.calm(at(34)), Some(Calm::NotYet(at(35))));
        assert_eq!(stability.calm(at(35)), Some(Calm::Since(at(15))));
    }

    #[test]
    fn members_that_come_and_go_are_waited_for_and_are_no_unrest() {
        let mut stability = stability(Some(15));
        stability.on_shift(Shift::Unrest, at(0));
        for second in [10, 20, 30, 40, 50] {
            stability.on_members(at(second));
            assert_eq!(stability.calm(at(second)), Some(Calm::NotYet(at(second + 20))));
        }
        assert_eq!(stability.calm(at(70)), Some(Calm::Since(at(50))));
    }

    #[test]
    fn after_a_long_quiet_it_is_another_trouble() {
        let mut stability = stability(Some(15));
        stability.on_shift(Shift::Unrest, at(0));
        stability.on_shift(Shift::Unrest, at(40));
        assert_eq!(stability.calm(at(41)), Some(Calm::NotYet(at(60))));
    }

    #[test]
    fn a_stall_of_this_process_is_not_quiet() {
        let mut stability = stability(Some(15));
        stability.on_shift(Shift::Unrest, at(0));
        stability.on_stall(Duration::from_secs(100));
        assert_eq!(stability.calm(at(101)), Some(Calm::NotYet(at(120))));
    }
}
