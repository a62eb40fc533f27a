use coord_core::{Address, Label, ShardCount, TableHeader, TableUid, Ttl};

use super::*;
use crate::Settings;
use crate::member_view::Judging;

fn id(name: &str) -> NodeId {
    NodeId::new(name).expect("name")
}

fn seat(name: &str, status: NodeStatus) -> Seat {
    let address = Address::new("localhost:1").expect("address");
    let entry = NodeEntry::new(id(name), Incarnation::from_u128(1), address, status);
    let capacity = Capacity::default();
    Seat { entry, capacity, leaving: false, runs_on: false, frozen: false }
}

fn active(name: &str) -> Seat {
    seat(name, NodeStatus::Active)
}

fn roster<const N: usize>(seats: [Seat; N]) -> Roster {
    Roster(seats.map(|seat| (seat.entry.id.clone(), seat)).into())
}

/// What is told of n1, beside an n0 that stays as it is.
fn told(before: Option<Seat>, after: Option<Seat>) -> Option<String> {
    let with = |seat: Option<Seat>| {
        let mut roster = roster([active("n0")]);
        roster.0.extend(seat.map(|seat| (seat.entry.id.clone(), seat)));
        roster
    };
    with(after).difference(&with(before))
}

#[test]
fn what_happened_to_a_node_is_told_in_words() {
    let words = |before: Option<Seat>, after: Option<Seat>, words: &str| {
        assert_eq!(told(before, after).as_deref(), Some(words));
    };
    let failed = || seat("n1", NodeStatus::Failed);
    let discovered = || seat("n1", NodeStatus::Discovered);
    let draining = || seat("n1", NodeStatus::Draining);
    let frozen = || Seat { frozen: true, ..active("n1") };
    let restarted = |mut seat: Seat| {
        seat.entry.incarnation = Incarnation::from_u128(2);
        seat
    };
    words(None, Some(active("n1")), "n1 joined");
    words(Some(discovered()), Some(active("n1")), "n1 joined");
    words(Some(active("n1")), None, "n1 left");
    words(Some(active("n1")), Some(failed()), "n1 failed");
    words(Some(active("n1")), Some(discovered()), "n1 hosts nothing any more");
    words(Some(active("n1")), Some(draining()), "n1 is draining");
    words(Some(active("n1")), Some(frozen()), "n1 is absent");
    words(Some(frozen()), Some(active("n1")), "n1 is back");
    words(Some(active("n1")), Some(restarted(active("n1"))), "n1 restarted");
    words(Some(frozen()), Some(restarted(active("n1"))), "n1 restarted");
    let large = Seat { capacity: Capacity::new(2.0).expect("capacity"), ..active("n1") };
    words(Some(active("n1")), Some(large), "n1 changed");
    let mut elsewhere = active("n1");
    elsewhere.entry.zone = Some(Label::new("b").expect("zone"));
    words(Some(active("n1")), Some(elsewhere), "n1 changed");
}

#[test]
fn what_placement_does_not_depend_on_is_not_told() {
    let failed = || seat("n1", NodeStatus::Failed);
    for (before, after) in [
        (None, None),
        (Some(active("n1")), Some(active("n1"))),
        (Some(failed()), Some(failed())),
        (None, Some(failed())),
        (Some(failed()), None),
        (Some(seat("n1", NodeStatus::Discovered)), Some(failed())),
    ] {
        assert_eq!(told(before.clone(), after.clone()), None, "{before:?} {after:?}");
    }
}

#[test]
fn of_many_changes_three_are_named() {
    let four = || roster(["n1", "n2", "n3", "n4"].map(active));
    let three = roster(["n1", "n2", "n3"].map(active));
    let none = Roster::default();
    assert_eq!(three.difference(&none).as_deref(), Some("n1 joined, n2 joined, n3 joined"));
    let more = "n1 joined, n2 joined, n3 joined and 1 more";
    assert_eq!(four().difference(&none).as_deref(), Some(more));
    assert_eq!(four().difference(&three).as_deref(), Some("n4 joined"));
}

#[test]
fn only_who_is_active_and_present_takes_shards_and_may_lead() {
    let frozen = Seat { frozen: true, ..active("n2") };
    let draining = seat("n3", NodeStatus::Draining);
    let leaving = Seat { leaving: true, ..seat("n4", NodeStatus::Draining) };
    let failed = seat("n5", NodeStatus::Failed);
    let absent = Seat { frozen: true, ..draining.clone() };
    let all = [active("n1"), frozen.clone(), draining.clone(), leaving.clone(), failed.clone()];
    let leads = all.clone().map(|seat| seat.may_lead());
    assert_eq!(leads, [true, false, false, false, false]);
    let full = roster(all.clone());
    assert_eq!(full.active(), 1);
    let (takes, keeps) = (Some(Hosting::Takes), Some(Hosting::Keeps));
    let hosting = all.clone().map(|seat| full.hosting(&seat));
    assert_eq!(hosting, [takes, keeps, keeps, keeps, None]);
    assert_eq!(full.hosting(&absent), keeps);
    // Nobody is left who could take them.
    let rest = roster([frozen, draining.clone(), leaving.clone(), failed]);
    assert_eq!(rest.active(), 0);
    assert_eq!((rest.hosting(&leaving), rest.hosting(&draining)), (None, keeps));
    let before = roster([active("n4")]);
    let after = roster([leaving]);
    assert_eq!(after.difference(&before).as_deref(), Some("n4 leaves"));
}

#[test]
fn a_run_that_may_go_on_tells_until_when_and_no_moment_once_that_is_over() {
    let now = Moment::from_origin(Duration::from_secs(100));
    let (ttl, second) = (Ttl::from_secs(9).expect("ttl"), Duration::from_secs(1));
    let run = Incarnation::from_u128(1);
    let mut record = ClusterRecord::default();
    record.nodes.entry(id("n1")).or_default().former.insert(run, ttl);
    let mut timers = Timers::default();
    timers.runs_on.insert((id("n1"), run), now.plus(second));
    let judging = Judging { wait_ttl: false, from_heartbeat: false, evict: false };
    let header = TableHeader::new(ShardCount::new(1).expect("count"));
    let sources = Sources {
        me: &id("n0"),
        rules: &Rules::new(&Settings::fast(), judging),
        view: &View::default(),
        cluster: &ShardMap::empty(header, TableUid::from_u128(1)),
        published: &record,
        hosts: &[],
        record: &record,
        owns: &|_| false,
    };
    let at = |now| tenancy(&sources, &timers, (&id("n1"), run), now);
    assert_eq!(at(now), HostingState::MayStillRun(Some(now.plus(second))));
    assert_eq!(at(now.plus(second)), HostingState::MayStillRun(None));
}
