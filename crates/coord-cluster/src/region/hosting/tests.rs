//! One node's hosting, map by map.

use coord_core::{
    Address, AttemptId, LeaseName, NodeEntry, NodeStatus, Origin, ShardCount, TableHeader, Term,
    Version,
};

use super::*;

const BUDGET: Duration = Duration::from_secs(2);
const SLOW: Duration = Duration::from_secs(60);
const S: ShardId = ShardId::new(1);

fn at(seconds: u64) -> Moment {
    Moment::from_origin(Duration::from_secs(seconds))
}

fn run(number: u128) -> Incarnation {
    Incarnation::from_u128(number)
}

fn id(name: &str) -> NodeId {
    NodeId::new(name).expect("name")
}

fn fence() -> Fence {
    let attempt = AttemptId::from_u128(1);
    Fence::new(LeaseName::leader(), Term::from_u64(1), attempt, Origin::new("memory:1/c"))
}

fn held(number: u128, deadline: u64) -> Option<Standing> {
    Some(Standing { incarnation: run(number), deadline: at(deadline) })
}

fn hosting() -> Hosting {
    let times = Times { budget: BUDGET, grace: Duration::from_secs(1), slow: SLOW };
    let mut hosting = Hosting::new(id("a"), times, true);
    hosting.on_standing(held(1, 10));
    hosting
}

/// Nodes a and b; shard 1 of 2 has this owner, and moves to another.
fn map(
    base: Option<&Arc<ShardMap>>,
    handoff: Handoff,
    owner: &str,
    moving: Option<(&str, MotionPhase)>,
) -> Arc<ShardMap> {
    let header = TableHeader::new(ShardCount::new(2).expect("count"));
    let empty = ShardMap::empty(header, TableUid::from_u128(1));
    let base = base.map_or(&empty, |base| &**base);
    let mut edit = base.edit();
    let slots: BTreeMap<&str, Slot> = ["a", "b"]
        .map(|name| {
            let address = Address::new("localhost:1").expect("address");
            let entry = NodeEntry::new(id(name), run(1), address, NodeStatus::Active);
            (name, edit.put_node(entry).expect("room"))
        })
        .into();
    edit.set_owner(S, 0, slots[owner]).expect("in range");
    let since = base.version().next();
    let motion = moving.map(|(other, phase)| Motion::new(0, slots[other], phase, since));
    edit.set_motions(S, motion.into_iter().collect()).expect("in range");
    edit.set_annex(TableNote::new(handoff, None).write().expect("writes")).expect("fits");
    Arc::new(edit.finish(fence()).expect("changed"))
}

fn starts(turn: &Turn) -> bool {
    matches!(turn.orders[..], [Order::Start { shard: S, .. }])
}

fn report(turn: &Turn) -> Option<(u64, Vec<u32>, Vec<u32>)> {
    let (_, report) = turn.report.as_ref()?;
    let numbers = |shards: &BTreeSet<ShardId>| shards.iter().map(|shard| shard.get()).collect();
    Some((report.applied.get(), numbers(&report.stopping), numbers(&report.started)))
}

#[test]
fn a_shard_that_moves_is_stopped_and_only_then_reported() {
    let mut hosting = hosting();
    let first = map(None, Handoff::Exclusive, "a", None);
    hosting.on_map(Some(Arc::clone(&first)));
    let turn = hosting.next(at(1));
    assert!(starts(&turn), "{turn:?}");
    assert_eq!(report(&turn), Some((1, vec![], vec![])), "who hosts says of which life");
    hosting.on_started(S);
    let moving = map(Some(&first), Handoff::Exclusive, "a", Some(("b", MotionPhase::MovingTo)));
    hosting.on_map(Some(Arc::clone(&moving)));
    let turn = hosting.next(at(1));
    assert_eq!(turn.orders, [Order::Stop(S)]);
    assert_eq!(report(&turn), Some((2, vec![1], vec![])));
    // A map that is older than the one it has acted on is none.
    hosting.on_map(Some(first));
    assert_eq!(hosting.next(at(2)).orders, []);
    hosting.on_ended(S, None, at(2));
    assert_eq!(report(&hosting.next(at(2))), Some((2, vec![], vec![])));
    // The move is given up, so it runs again; a later one needs another report.
    let back = map(Some(&moving), Handoff::Exclusive, "a", None);
    hosting.on_map(Some(Arc::clone(&back)));
    assert!(starts(&hosting.next(at(3))));
    let again = map(Some(&back), Handoff::Exclusive, "a", Some(("b", MotionPhase::MovingTo)));
    hosting.on_map(Some(again));
    assert_eq!(report(&hosting.next(at(3))), Some((4, vec![1], vec![])));
}

#[test]
fn the_target_of_an_exclusive_move_waits_and_one_that_makes_first_starts() {
    let moving = Some(("a", MotionPhase::MovingTo));
    let mut hosting = hosting();
    let exclusive = map(None, Handoff::Exclusive, "b", moving);
    hosting.on_map(Some(exclusive));
    assert_eq!(hosting.next(at(1)).orders, []);
    let mut hosting = self::hosting();
    let makes = map(None, Handoff::MakeBeforeBreak, "b", moving);
    hosting.on_map(Some(Arc::clone(&makes)));
    assert!(starts(&hosting.next(at(1))));
    hosting.on_started(S);
    assert_eq!(report(&hosting.next(at(1))), Some((1, vec![], vec![1])));
    let mine = map(Some(&makes), Handoff::MakeBeforeBreak, "a", Some(("b", MotionPhase::Leaving)));
    hosting.on_map(Some(Arc::clone(&mine)));
    let turn = hosting.next(at(1));
    assert!(matches!(turn.orders[..], [Order::Renew { epoch, .. }] if epoch == mine.epoch(S)));
}

/// As after a suspend: nothing was told to stop, and all is late.
#[test]
fn what_is_aborted_long_after_its_deadline_still_has_its_time_to_end() {
    let mut hosting = hosting();
    hosting.on_map(Some(map(None, Handoff::Exclusive, "a", None)));
    assert!(starts(&hosting.next(at(1))));
    let turn = hosting.next(at(100));
    assert_eq!(turn.orders, vec![Order::Stop(S), Order::Abort(S)]);
    assert_eq!((turn.overdue, turn.wake), (false, Some(at(101))));
    let turn = hosting.next(at(100));
    assert_eq!((turn.overdue, turn.wake), (false, Some(at(101))));
    assert!(hosting.next(at(101)).overdue);
}

#[test]
fn it_begins_to_stop_before_its_deadline_and_aborts_at_it() {
    let mut hosting = hosting();
    hosting.on_map(Some(map(None, Handoff::Exclusive, "a", None)));
    let turn = hosting.next(at(1));
    assert!(starts(&turn));
    assert_eq!(turn.wake, Some(at(8)));
    hosting.on_started(S);
    assert_eq!(hosting.next(at(7)).orders, []);
    let turn = hosting.next(at(8));
    assert_eq!((turn.orders, turn.wake), (vec![Order::Stop(S)], Some(at(10))));
    let turn = hosting.next(at(10));
    assert_eq!((turn.orders, turn.overdue), (vec![Order::Abort(S)], false));
    assert_eq!(turn.wake, Some(at(11)));
    assert_eq!(turn.faults, Some(BTreeMap::from([(S, HostFault::Aborted)])));
    assert!(hosting.next(at(11)).overdue);
    hosting.on_ended(S, None, at(11));
    // Its successor in this process starts what that one is given.
    hosting.on_standing(held(2, 30));
    let none = Some(BTreeMap::new());
    let quiet = Turn { wake: Some(at(28)), faults: none, ..Turn::default() };
    assert_eq!(hosting.next(at(11)), quiet);
}

#[test]
fn a_lost_run_stops_at_once_and_has_until_its_deadline() {
    let mut hosting = hosting();
    hosting.on_map(Some(map(None, Handoff::Exclusive, "a", None)));
    assert!(starts(&hosting.next(at(1))));
    hosting.on_standing(None);
    assert_eq!(hosting.next(at(2)).orders, [Order::Stop(S)]);
    hosting.on_standing(held(2, 30));
    assert_eq!(hosting.next(at(9)).orders, [], "the shards of run 1 are not those of run 2");
    assert_eq!(hosting.next(at(10)).orders, [Order::Abort(S)]);
}

#[test]
fn a_host_that_fails_is_asked_again_ever_later() {
    let mut hosting = hosting();
    hosting.on_standing(held(1, 1_000));
    hosting.on_map(Some(map(None, Handoff::Exclusive, "a", None)));
    assert!(starts(&hosting.next(at(1))));
    assert_eq!(hosting.on_ended(S, Some("no room".to_owned()), at(1)), 1);
    let turn = hosting.next(at(1));
    assert_eq!((turn.orders, turn.wake), (vec![], Some(at(2))));
    let failed = |times| HostFault::Failed { times, why: "no room".to_owned() };
    assert_eq!(turn.faults, Some(BTreeMap::from([(S, failed(1))])));
    let turn = hosting.next(at(2));
    assert!(starts(&turn));
    assert_eq!(turn.faults, None, "it has not yet come right");
    assert_eq!(hosting.on_ended(S, Some("no room".to_owned()), at(2)), 2);
    let turn = hosting.next(at(3));
    assert_eq!((turn.orders, turn.faults), (vec![], Some(BTreeMap::from([(S, failed(2))]))));
    assert!(starts(&hosting.next(at(4))));
    hosting.on_started(S);
    assert_eq!(hosting.next(at(4)).faults, Some(BTreeMap::new()));
}

#[test]
fn a_slow_start_and_a_slow_stop_are_told_once_and_until_they_end() {
    let one = |fault| Some(BTreeMap::from([(S, fault)]));
    let mut hosting = hosting();
    hosting.on_standing(held(1, 1_000));
    let first = map(None, Handoff::Exclusive, "a", None);
    hosting.on_map(Some(Arc::clone(&first)));
    let turn = hosting.next(at(1));
    assert!(starts(&turn));
    assert_eq!((turn.wake, turn.faults), (Some(at(61)), None));
    assert_eq!(hosting.next(at(60)).faults, None);
    let turn = hosting.next(at(61));
    assert_eq!((turn.wake, turn.faults), (Some(at(998)), one(HostFault::StartSlow)));
    assert_eq!(hosting.next(at(62)).faults, None);
    hosting.on_started(S);
    assert_eq!(hosting.next(at(63)).faults, Some(BTreeMap::new()));
    let moving = Some(("b", MotionPhase::MovingTo));
    hosting.on_map(Some(map(Some(&first), Handoff::Exclusive, "a", moving)));
    assert_eq!(hosting.next(at(70)).orders, [Order::Stop(S)]);
    assert_eq!(hosting.next(at(130)).faults, one(HostFault::StopSlow));
    hosting.on_ended(S, None, at(131));
    assert_eq!(hosting.next(at(131)).faults, Some(BTreeMap::new()));
}

#[test]
fn a_node_that_hosts_nothing_reports_at_once() {
    let times = Times { budget: BUDGET, grace: Duration::from_secs(1), slow: SLOW };
    let mut hosting = Hosting::new(id("a"), times, false);
    hosting.on_standing(held(1, 10));
    let first = map(None, Handoff::Exclusive, "a", None);
    hosting.on_map(Some(Arc::clone(&first)));
    assert_eq!(hosting.next(at(1)), Turn { wake: Some(at(8)), ..Turn::default() });
    let moving = map(Some(&first), Handoff::Exclusive, "a", Some(("b", MotionPhase::MovingTo)));
    hosting.on_map(Some(Arc::clone(&moving)));
    assert_eq!(report(&hosting.next(at(1))), Some((2, vec![], vec![])));
    assert_eq!(moving.version(), Version::new(2));
    assert_eq!(report(&hosting.next(at(1))), None, "said once");
}

#[test]
fn another_life_of_the_table_is_hosted_anew() {
    let mut hosting = hosting();
    hosting.on_map(Some(map(None, Handoff::Exclusive, "a", None)));
    assert!(starts(&hosting.next(at(1))));
    hosting.on_started(S);
    let header = TableHeader::new(ShardCount::new(2).expect("count"));
    let reborn = Arc::new(ShardMap::empty(header, TableUid::from_u128(2)));
    hosting.on_map(Some(map(Some(&reborn), Handoff::Exclusive, "a", None)));
    assert_eq!(hosting.next(at(1)).orders, [Order::Stop(S)]);
    hosting.on_ended(S, None, at(1));
    let orders = hosting.next(at(1)).orders;
    assert!(matches!(orders[..], [Order::Start { uid, .. }] if uid == reborn.uid()), "{orders:?}");
}

#[test]
fn a_report_that_can_not_name_all_stopping_shards_is_not_made() {
    let count = u32::try_from(REPORT_SHARDS_MAX).expect("few") + 2;
    let header = TableHeader::new(ShardCount::new(count).expect("count"));
    let mut edit = ShardMap::empty(header, TableUid::from_u128(1)).edit();
    let address = Address::new("localhost:1").expect("address");
    let entry = NodeEntry::new(id("a"), run(1), address, NodeStatus::Active);
    let slot = edit.put_node(entry).expect("room");
    for shard in (0..count).map(ShardId::new) {
        edit.set_owner(shard, 0, slot).expect("in range");
    }
    edit.set_annex(TableNote::new(Handoff::Exclusive, None).write().expect("writes"))
        .expect("fits");
    let mut hosting = hosting();
    hosting.on_standing(held(1, 1_000));
    hosting.on_map(Some(Arc::new(edit.finish(fence()).expect("changed"))));
    // They start in batches.
    while hosting.shards.len() < usize::try_from(count).expect("few") {
        let orders = hosting.next(at(1)).orders;
        assert!(!orders.is_empty());
        for order in orders {
            let Order::Start { shard, .. } = order else { panic!("{order:?}") };
            hosting.on_started(shard);
        }
    }
    hosting.on_end(at(900));
    let turn = hosting.next(at(2));
    assert_eq!((turn.orders.len(), turn.report), (hosting.shards.len(), None));
    hosting.on_ended(ShardId::new(0), None, at(2));
    assert_eq!(hosting.next(at(2)).report, None, "one too many");
    hosting.on_ended(ShardId::new(1), None, at(2));
    let (_, report) = hosting.next(at(2)).report.expect("all can be named");
    assert_eq!(report.stopping.len(), REPORT_SHARDS_MAX);
    assert!(
        !report.stopping.contains(&ShardId::new(1)) && report.stopping.contains(&ShardId::new(2))
    );
}
