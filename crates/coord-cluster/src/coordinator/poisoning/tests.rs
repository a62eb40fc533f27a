use std::time::Duration;

use coord_core::{
    Address, AttemptId, Fence, LeaseName, NodeEntry, NodeStatus, Origin, ShardCount, TableHeader,
    TableUid, Term,
};

use super::*;
use crate::Settings;
use crate::member_view::Judging;
use crate::poison::PoisonSettings;

const JUDGING: Judging = Judging { wait_ttl: false, from_heartbeat: true, evict: false };

fn at(seconds: u64) -> Moment {
    Moment::from_origin(Duration::from_secs(seconds))
}

fn table() -> TableName {
    TableName::new("orders").expect("name")
}

fn id(number: u16) -> NodeId {
    NodeId::new(format!("n{number}")).expect("name")
}

fn run(number: u16) -> Incarnation {
    Incarnation::from_u128(number.into())
}

fn empty(shards: u32) -> ShardMap {
    let header = TableHeader::new(ShardCount::new(shards).expect("count"));
    ShardMap::empty(header, TableUid::from_u128(1))
}

/// The version after `base` in which all shards belong to this node.
fn after(base: &ShardMap, number: u16) -> ShardMap {
    let mut edit = base.edit();
    let address = Address::new("localhost:1").expect("address");
    let entry = NodeEntry::new(id(number), run(number), address, NodeStatus::Active);
    let slot = edit.put_node(entry).expect("room");
    for shard in base.header().shards.shards() {
        edit.set_owner(shard, 0, slot).expect("in range");
    }
    let (lease, attempt) = (LeaseName::leader(), AttemptId::from_u128(1));
    let fence = Fence::new(lease, Term::from_u64(1), attempt, Origin::new("memory:1/c"));
    edit.finish(fence).expect("changed")
}

fn rules() -> Rules {
    Rules::new(&Settings::fast(), JUDGING)
}

fn shard(number: u32) -> TableShard {
    TableShard::new(table(), ShardId::new(number))
}

#[test]
fn a_version_is_as_old_as_its_first_sight_and_what_was_there_before_is_older() {
    let mut seen = VersionTimes::default();
    let maps: Vec<_> = (1..=4_u16)
        .scan(empty(1), |base, number| {
            *base = after(base, number);
            Some(base.clone())
        })
        .collect();
    seen.note(&maps[0], at(10));
    seen.note(&maps[0], at(11));
    // The second one was never seen.
    seen.note(&maps[2], at(20));
    seen.note(&maps[1], at(25));
    assert_eq!(seen.at(Version::new(1)), None, "it may be much older");
    assert_eq!(seen.at(Version::new(2)), Some(at(20)));
    assert_eq!(seen.at(Version::new(3)), Some(at(20)));
    assert_eq!(seen.at(Version::new(4)), None);
    let header = empty(1).header().clone();
    let other = after(&ShardMap::empty(header, TableUid::from_u128(2)), 1);
    seen.note(&other, at(30));
    assert_eq!(seen.at(Version::new(1)), None, "another life");
}

/// The shards of a table go from one crashed host to the next, under one leader or under two.
fn parked_after_three(hands_over_after: Option<u16>, shards: u32) -> usize {
    let (rules, view) = (rules(), View::default());
    let (mut map, mut seen) = (empty(shards), VersionTimes::default());
    seen.note(&map, at(0));
    let mut record = ClusterRecord::default();
    let mut poison = Poisoning::resume(&rules, &record, &BTreeMap::new(), at(0)).expect("on");
    for number in 1..=3_u16 {
        let given = at(u64::from(number) * 100);
        map = after(&map, number);
        seen.note(&map, given);
        // It ran out one TTL after the last heartbeat, which came five seconds after the start.
        let from = given.plus(Duration::from_secs(5)).plus(rules.node_ttl);
        let now = from.plus(Duration::from_secs(1));
        let fall = fall(&rules, &view, &id(number), run(number), from);
        let hosted =
            [Hosted { name: &table(), map: &map, seen: &seen, handoff: Handoff::Exclusive }];
        poison.on_crashes(&[fall], &hosted, now);
        poison.remember(&mut record);
        if hands_over_after == Some(number) {
            let bytes = record.write().expect("writes");
            record = ClusterRecord::read(&bytes).expect("reads");
            let seen = BTreeMap::from([(table(), &seen)]);
            poison = Poisoning::resume(&rules, &record, &seen, now).expect("on");
        }
    }
    record.parked.get(&table()).map_or(0, BTreeMap::len)
}

#[test]
fn three_hosts_in_a_row_are_enough_also_where_leaders_change_between() {
    assert_eq!(parked_after_three(None, 4), 4);
    for number in 1..=3 {
        assert_eq!(parked_after_three(Some(number), 4), 4, "after {number}");
    }
    assert_eq!(parked_after_three(None, 64), 0, "too many to say which");
}

#[test]
fn a_deleted_table_is_forgotten_and_no_other() {
    let (rules, other) = (rules(), TableName::new("other").expect("name"));
    let mut record = ClusterRecord::default();
    for name in [table(), other.clone()] {
        let parked = Parked { hosts: vec![id(1)] };
        record.parked.entry(name.clone()).or_default().insert(ShardId::new(1), parked);
        let shards = [(name, BTreeSet::from([ShardId::new(2)]))].into();
        record.suspicions.groups.push(Suspicion { crashes: vec![0], shards });
    }
    let crashed = Crashed { node: id(1), incarnation: run(1), versions: BTreeMap::new() };
    record.suspicions.crashes.push(crashed);
    let mut poison = Poisoning::resume(&rules, &record, &BTreeMap::new(), at(0)).expect("on");
    poison.forget(&table());
    poison.remember(&mut record);
    assert_eq!(record.parked.keys().collect::<Vec<_>>(), [&other]);
    let suspect: Vec<_> = record.suspicions.groups.iter().flat_map(|g| g.shards.keys()).collect();
    assert_eq!(suspect, [&other]);
}

#[test]
fn a_leader_hears_of_the_most_suspect_shards_only() {
    let settings = PoisonSettings::default();
    let mut poison = Poison::new(settings, [], at(0)).expect("valid");
    let crash = |number| Crash { node: id(number), incarnation: run(number), at: at(5) };
    for number in 0..1_000 {
        poison.suspect(shard(number), vec![crash(1)]);
    }
    for number in 1_000..1_030 {
        poison.suspect(shard(number), vec![crash(1), crash(2)]);
    }
    let suspicions = suspicions(&poison, &Suspicions::default(), &BTreeMap::new());
    let groups = &suspicions.groups;
    assert_eq!(groups.len(), 1, "those of one crash are too many");
    assert_eq!(groups[0].shards[&table()].len(), 30);
    assert!(serde_json::to_vec(&suspicions).expect("writes").len() < 16 * 1024);
}

#[test]
fn a_run_that_was_given_nothing_lately_accuses_nobody() {
    let first = after(&empty(4), 1);
    let mut seen = VersionTimes::default();
    seen.note(&first, at(10));
    let name = table();
    let hosted = |map| Hosted { name: &name, map, seen: &seen, handoff: Handoff::Exclusive };
    // What was there before the first sight may be hosted for long.
    assert_eq!(hosted(&first).shards(&id(1), run(1)), []);
    assert_eq!(hosted(&first).shards(&id(1), run(2)), [], "another run of the node");
    assert_eq!(hosted(&first).shards(&id(2), run(2)), []);
}
