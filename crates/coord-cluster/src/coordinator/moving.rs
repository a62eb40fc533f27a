//! How one shard gets from its owners to those that it is planned to have. Pure.
//!
//! ```text
//!   Exclusive           s: A ─► s: A, moving to B ─(A stopped)─► s: B
//!   MakeBeforeBreak     s: A ─► s: A, moving to B ─(B started)─► s: B, A leaving ─(A stopped)─► s: B
//!   Eager               s: A ─► s: B
//! ```
//!
//! An owner that hosts nothing any more is waited for in no mode. One that may still host and reports
//! nothing keeps its place until its time is up; only `Eager` does not wait for it.

use coord_core::{Motion, MotionPhase, Report, ShardId, Slot, Version};

use super::roster::HostingState;
use crate::handoff::Handoff;

/// What the moves of one table go by.
pub(super) struct Moves<'a> {
    pub(super) handoff: Handoff,
    /// Of each slot of the current map.
    pub(super) tenancy: &'a [HostingState],
    /// What the incarnation in each slot reports of this generation of the table.
    pub(super) reports: Vec<Option<&'a Report>>,
    /// The version that is being made.
    pub(super) next: Version,
}

/// The owners of a shard in the next version.
#[derive(Debug, PartialEq)]
pub(super) struct Resolved {
    pub(super) row: Vec<Slot>,
    pub(super) motions: Vec<Motion>,
    /// A move has yet to begin.
    pub(super) deferred: bool,
}

/// One shard in the current version, and where it is to go.
pub(super) struct Trip<'a> {
    pub(super) shard: ShardId,
    pub(super) row: &'a [Slot],
    pub(super) motions: &'a [Motion],
    pub(super) target: &'a [Slot],
    /// Whether a move may begin.
    pub(super) begin: bool,
}

impl Moves<'_> {
    fn tenancy(&self, slot: Slot) -> HostingState {
        let known = slot.index().map(|index| self.tenancy.get(index).copied());
        known.map_or(HostingState::Stopped, |known| known.unwrap_or(HostingState::Reporting))
    }

    /// Whether the place of this owner can be filled without asking it.
    fn is_free(&self, slot: Slot) -> bool {
        self.handoff == Handoff::Eager || self.tenancy(slot) == HostingState::Stopped
    }

    fn report(&self, slot: Slot, since: Version) -> Option<&Report> {
        let report = self.reports.get(slot.index()?).copied().flatten()?;
        (self.tenancy(slot) == HostingState::Reporting && report.applied >= since).then_some(report)
    }

    /// Whether an incarnation has stopped a shard after it was told to at this version.
    pub(super) fn stopped(&self, slot: Slot, shard: ShardId, since: Version) -> bool {
        self.report(slot, since).is_some_and(|report| !report.stopping.contains(&shard))
    }

    /// Whether an incarnation has started a shard after it was told to at this version.
    pub(super) fn started(&self, slot: Slot, shard: ShardId, since: Version) -> bool {
        self.report(slot, since).is_some_and(|report| report.started.contains(&shard))
    }

    /// The next version of a shard's places.
    pub(super) fn resolve(&self, trip: &Trip<'_>) -> Resolved {
        let Trip { shard, row, target, .. } = *trip;
        let leaving: Vec<Motion> = trip
            .motions
            .iter()
            .filter(|motion| motion.phase == MotionPhase::Leaving)
            .filter(|motion| {
                let other = Slot::from(motion.other);
                !self.is_free(other) && !self.stopped(other, shard, motion.since)
            })
            .cloned()
            .collect();
        let leaves =
            |place: usize| leaving.iter().any(|motion| usize::from(motion.replica) == place);
        // A place whose former owner has still to stop goes no further meanwhile.
        let target: Vec<Slot> = (0..row.len())
            .map(|place| match target[place] {
                _ if leaves(place) && !self.is_free(row[place]) => row[place],
                wanted => wanted,
            })
            .collect();
        let goes = self.going(trip, &target);
        let next: Vec<Slot> = (0..row.len())
            .map(|place| if goes[place] { target[place] } else { row[place] })
            .collect();
        let mut motions = leaving;
        let mut deferred = false;
        for (place, replica) in (0..row.len()).zip(0_u8..) {
            if goes[place] {
                let out = row[place];
                let gone =
                    self.is_free(out) || next.contains(&out) || target[place] == Slot::NOBODY;
                if self.handoff == Handoff::MakeBeforeBreak && !gone {
                    let phase = MotionPhase::Leaving;
                    motions.push(Motion::new(replica, out, phase, self.next));
                }
            } else if target[place] != row[place]
                && self.tenancy(row[place]) == HostingState::Reporting
            {
                // The owner itself replaces no other node.
                let to = if target[place] == Slot::NOBODY { row[place] } else { target[place] };
                match self.since(trip, replica, to) {
                    Some(since) => {
                        motions.push(Motion::new(replica, to, MotionPhase::MovingTo, since));
                    }
                    None => deferred = true,
                }
            }
        }
        motions.sort_by_key(|motion| motion.replica);
        Resolved { row: next, motions, deferred }
    }

    /// The version from which on reports of this move count; none if it must not begin yet.
    fn since(&self, trip: &Trip<'_>, replica: u8, to: Slot) -> Option<Version> {
        let begun = moving(trip.motions, replica);
        match begun {
            // The owner has been stopping since then, wherever the shard goes.
            Some(motion) if self.handoff == Handoff::Exclusive => Some(motion.since),
            Some(motion) if Slot::from(motion.other) == to => Some(motion.since),
            Some(_) => Some(self.next),
            None => trip.begin.then_some(self.next),
        }
    }

    /// Which places get their new owner now. Those that wait for each other go together.
    fn going(&self, trip: &Trip<'_>, target: &[Slot]) -> Vec<bool> {
        let row = trip.row;
        let mut goes: Vec<bool> = (0..row.len())
            .map(|place| target[place] != row[place] && !self.is_held(trip, target, place))
            .collect();
        loop {
            let stays = (0..row.len()).filter(|&place| goes[place]).find(|&place| {
                // No node fills two places, and no node that still runs the shard is without a place in
                // between.
                let twice = target[place] != Slot::NOBODY
                    && (0..row.len()).any(|q| q != place && !goes[q] && row[q] == target[place]);
                let dropped = promoted(target, row[place], place).is_some_and(|to| !goes[to]);
                twice || dropped
            });
            match stays {
                Some(place) => goes[place] = false,
                None => return goes,
            }
        }
    }

    /// Whether the owner of a place has still to stop, or the next one to start.
    fn is_held(&self, trip: &Trip<'_>, target: &[Slot], place: usize) -> bool {
        let (out, into) = (trip.row[place], target[place]);
        if self.is_free(out) || promoted(target, out, place).is_some() {
            return false;
        }
        if self.tenancy(out) != HostingState::Reporting {
            return true;
        }
        let replica = u8::try_from(place).unwrap_or(u8::MAX);
        let Some(motion) = moving(trip.motions, replica) else {
            return !(self.handoff == Handoff::MakeBeforeBreak && trip.row.contains(&into));
        };
        if self.handoff == Handoff::MakeBeforeBreak && into != Slot::NOBODY {
            let ready =
                Slot::from(motion.other) == into && self.started(into, trip.shard, motion.since);
            return !ready && !trip.row.contains(&into);
        }
        !self.stopped(out, trip.shard, motion.since)
    }
}

/// The move of a place that has not got its new owner yet.
pub(super) fn moving(motions: &[Motion], replica: u8) -> Option<&Motion> {
    let mut motions = motions.iter();
    motions.find(|motion| motion.replica == replica && motion.phase == MotionPhase::MovingTo)
}

/// The place nearer to the front that an owner moves to. It goes on running what it runs.
fn promoted(target: &[Slot], owner: Slot, place: usize) -> Option<usize> {
    if owner == Slot::NOBODY {
        return None;
    }
    (0..place).find(|&to| target[to] == owner)
}

#[cfg(test)]
mod tests {
    use coord_core::TableUid;

    use super::*;

    const A: Slot = Slot::new(0);
    const B: Slot = Slot::new(1);
    const C: Slot = Slot::new(2);
    const S: ShardId = ShardId::new(5);

    fn report(applied: u64) -> Report {
        Report::new(TableUid::from_u128(1), Version::new(applied))
    }

    fn resolve(
        handoff: Handoff,
        tenancy: &[HostingState],
        reports: &[Option<&Report>],
        row: &[Slot],
        motions: &[Motion],
        target: &[Slot],
    ) -> (Vec<Slot>, Vec<Motion>) {
        let next = Version::new(9);
        let moves = Moves { handoff, tenancy, reports: reports.to_vec(), next };
        let trip = Trip { shard: S, row, motions, target, begin: true };
        let Resolved { row, motions, deferred } = moves.resolve(&trip);
        assert!(!deferred);
        (row, motions)
    }

    fn to(other: Slot, since: u64) -> Vec<Motion> {
        vec![Motion::new(0, other, MotionPhase::MovingTo, Version::new(since))]
    }

    fn leaving(other: Slot, since: u64) -> Vec<Motion> {
        vec![Motion::new(0, other, MotionPhase::Leaving, Version::new(since))]
    }

    const ALL: [HostingState; 3] = [HostingState::Reporting; 3];

    #[test]
    fn an_exclusive_move_waits_for_the_stop_of_this_move() {
        let go = |reports: &[Option<&Report>], motions: &[Motion]| {
            resolve(Handoff::Exclusive, &ALL, reports, &[A], motions, &[B])
        };
        assert_eq!(go(&[None; 3], &[]), (vec![A], to(B, 9)));
        let (older, stopped) = (report(6), report(7));
        let mut stopping = report(8);
        stopping.stopping.insert(S);
        assert_eq!(go(&[Some(&older), None, None], &to(B, 7)), (vec![A], to(B, 7)));
        assert_eq!(go(&[Some(&stopping), None, None], &to(B, 7)), (vec![A], to(B, 7)));
        assert_eq!(go(&[Some(&stopped), None, None], &to(B, 7)), (vec![B], vec![]));
        // Another target does not make it run again.
        assert_eq!(go(&[Some(&stopped), None, None], &to(C, 7)), (vec![B], vec![]));
        // And the stop that it was told to begin with still counts.
        assert_eq!(go(&[Some(&older), None, None], &to(C, 7)), (vec![A], to(B, 7)));
        // A report of the target says nothing.
        assert_eq!(go(&[None, Some(&stopped), None], &to(B, 7)), (vec![A], to(B, 7)));
    }

    #[test]
    fn an_owner_that_reports_nothing_is_waited_for_and_one_that_ended_is_not() {
        let stopped = report(7);
        let reports = [Some(&stopped), None, None];
        let lingers =
            [HostingState::MayStillRun(None), HostingState::Reporting, HostingState::Reporting];
        let go = |handoff, tenancy: &[HostingState]| {
            resolve(handoff, tenancy, &reports, &[A], &[], &[B])
        };
        for handoff in [Handoff::Exclusive, Handoff::MakeBeforeBreak] {
            assert_eq!(go(handoff, &lingers), (vec![A], vec![]));
            let ended = [HostingState::Stopped, HostingState::Reporting, HostingState::Reporting];
            assert_eq!(go(handoff, &ended), (vec![B], vec![]));
        }
        assert_eq!(go(Handoff::Eager, &lingers), (vec![B], vec![]));
        let late = resolve(Handoff::Exclusive, &lingers, &reports, &[A], &to(B, 7), &[B]);
        assert_eq!(late, (vec![A], vec![]), "what it said before its end counts for nothing");
    }

    #[test]
    fn a_run_that_reports_nothing_any_more_has_neither_stopped_nor_started() {
        let go =
            |tenancy: &[HostingState], reports: &[Option<&Report>], row, motions: &[Motion]| {
                resolve(Handoff::MakeBeforeBreak, tenancy, reports, &[row], motions, &[B])
            };
        let (stopped, mut started) = (report(9), report(9));
        started.started.insert(S);
        let lingers = HostingState::MayStillRun(None);
        // It was declared failed, or replaced, while it was to stop.
        let former = [lingers, HostingState::Reporting, HostingState::Reporting];
        let next = go(&former, &[Some(&stopped), None, None], B, &leaving(A, 8));
        assert_eq!(next, (vec![B], leaving(A, 8)));
        // And so was the one that was to start.
        let next_one = [HostingState::Reporting, lingers, HostingState::Reporting];
        let next = go(&next_one, &[None, Some(&started), None], A, &to(B, 8));
        assert_eq!(next, (vec![A], to(B, 8)));
    }

    #[test]
    fn the_new_owner_starts_before_the_old_one_stops() {
        let go = |reports: &[Option<&Report>], row, motions: &[Motion]| {
            resolve(Handoff::MakeBeforeBreak, &ALL, reports, &[row], motions, &[B])
        };
        let mut started = report(7);
        started.started.insert(S);
        let stopped = report(9);
        assert_eq!(go(&[None; 3], A, &[]), (vec![A], to(B, 9)));
        assert_eq!(go(&[Some(&stopped), None, None], A, &to(B, 7)), (vec![A], to(B, 7)));
        assert_eq!(go(&[None, Some(&started), None], A, &to(B, 7)), (vec![B], leaving(A, 9)));
        assert_eq!(
            go(&[Some(&report(8)), None, None], B, &leaving(A, 9)),
            (vec![B], leaving(A, 9))
        );
        assert_eq!(go(&[Some(&stopped), None, None], B, &leaving(A, 9)), (vec![B], vec![]));
        // A start that was meant for an earlier move of the shard is none.
        let other = resolve(
            Handoff::MakeBeforeBreak,
            &ALL,
            &[None, Some(&started), None],
            &[A],
            &to(C, 7),
            &[B],
        );
        assert_eq!(other, (vec![A], to(B, 9)));
    }

    #[test]
    fn a_place_goes_no_further_while_its_former_owner_has_still_to_stop() {
        let go = |tenancy: &[HostingState]| {
            resolve(Handoff::MakeBeforeBreak, tenancy, &[None; 3], &[B], &leaving(A, 8), &[C])
        };
        assert_eq!(go(&ALL), (vec![B], leaving(A, 8)));
        // Where its present owner has ended, somebody has to take it all the same.
        let ended = [HostingState::Reporting, HostingState::Stopped, HostingState::Reporting];
        assert_eq!(go(&ended), (vec![C], leaving(A, 8)));
    }

    #[test]
    fn an_owner_that_keeps_a_place_or_leaves_it_to_nobody_has_nothing_more_to_stop() {
        let mode = Handoff::MakeBeforeBreak;
        let swapped = resolve(mode, &ALL, &[None; 3], &[A, B], &[], &[B, A]);
        assert_eq!(swapped, (vec![B, A], vec![]));
        let stopped = report(9);
        let reports = [Some(&stopped), None, None];
        let left = resolve(mode, &ALL, &reports, &[A], &to(A, 9), &[Slot::NOBODY]);
        assert_eq!(left, (vec![Slot::NOBODY], vec![]));
    }

    #[test]
    fn a_place_that_nobody_takes_is_left_first() {
        let go = |reports: &[Option<&Report>], motions: &[Motion]| {
            resolve(Handoff::Exclusive, &ALL, reports, &[A], motions, &[Slot::NOBODY])
        };
        assert_eq!(go(&[None; 3], &[]), (vec![A], to(A, 9)));
        assert_eq!(go(&[Some(&report(9)), None, None], &to(A, 9)), (vec![Slot::NOBODY], vec![]));
    }

    #[test]
    fn a_replica_takes_the_place_of_a_primary_that_ended_without_stopping() {
        let ended = [HostingState::Stopped, HostingState::Reporting, HostingState::Reporting];
        let next = resolve(Handoff::Exclusive, &ended, &[None; 3], &[A, B], &[], &[B, C]);
        assert_eq!(next, (vec![B, C], vec![]));
        // While the primary runs, nothing of it is taken, and its replica runs on.
        let (row, motions) = resolve(Handoff::Exclusive, &ALL, &[None; 3], &[A, B], &[], &[B, C]);
        assert_eq!(row, [A, B]);
        assert_eq!(motions.first(), to(B, 9).first());
        let stopped = report(9);
        let reports = [Some(&stopped), None, None];
        let next = resolve(Handoff::Exclusive, &ALL, &reports, &[A, B], &motions, &[B, C]);
        assert_eq!(next, (vec![B, C], vec![]));
    }

    #[test]
    fn a_primary_and_its_replica_change_places_once_the_primary_has_stopped() {
        let (row, motions) = resolve(Handoff::Exclusive, &ALL, &[None; 3], &[A, B], &[], &[B, A]);
        assert_eq!(row, [A, B]);
        let stopped = report(9);
        let reports = [Some(&stopped), None, None];
        let next = resolve(Handoff::Exclusive, &ALL, &reports, &[A, B], &motions, &[B, A]);
        assert_eq!(next, (vec![B, A], vec![]));
    }

    #[test]
    fn nobody_has_two_places_of_a_shard() {
        // The replica has ended. The primary is to take its place, and has to leave its own first.
        let ended = [HostingState::Stopped, HostingState::Reporting, HostingState::Reporting];
        let next = resolve(Handoff::Exclusive, &ended, &[None; 3], &[B, A], &[], &[C, B]);
        assert_eq!(next, (vec![B, A], to(C, 9)));
    }
}
