//! What `docs/scale.md` says of large clusters, on a small one: counts, which are the same on every machine.

use std::time::Duration;

use coord_core::{ShardCount, TableName};
use coord_sim::scale::{Phase, Scale, Versions, run, table};

/// What a version costs one watcher at most: the whole map, when deltas are folded into it.
const MAP_BYTES_MAX: u64 = 24 * 1_024;

#[tokio::test(start_paused = true)]
async fn a_hundred_nodes_cost_what_they_should() {
    let mut scale = Scale::new(100, ShardCount::new(10_000).expect("in range"));
    scale.restarts = 4;
    scale.at_once = 2;
    scale.idle = Duration::from_secs(600);
    let phases = run(&scale, |_| {}).await.expect("runs");
    let [start, idle, lost, stopped, restart] = &phases[..] else { panic!("{phases:?}") };
    let of = |phase: &Phase| phase.counts.table(&table().expect("name"));
    let members = |phase: &Phase| phase.counts.table(&TableName::cluster());

    // All shards are placed by one version, and everybody is told of it once.
    assert_eq!((members(start).versions, of(start).versions, of(start).moves), (1, 1, 0));
    assert_eq!(start.counts.calls("register"), 100);

    // Nothing happens, so nothing is written but heartbeats, renewals and the candidates' tries, and nobody
    // is told anything.
    let calls = &idle.counts.calls;
    let usual = ["heartbeat", "renew", "try_acquire", "load"];
    let other: Vec<_> = calls.iter().filter(|(name, _)| !usual.contains(*name)).collect();
    assert_eq!(other, [], "{calls:?}");
    let heartbeats = idle.counts.calls("heartbeat");
    assert!((1_800..=2_300).contains(&heartbeats), "one a node each 30 s ± 10 %: {heartbeats}");
    assert!(idle.counts.calls("renew") <= 230, "one each 3 s: {calls:?}");
    assert!(idle.counts.calls("try_acquire") <= 4 * 330, "one a candidate each 2 s: {calls:?}");
    assert!(idle.counts.calls("load") <= 4, "the periodic check: {calls:?}");
    assert_eq!(idle.counts.told.values().sum::<u64>(), 0, "{:?}", idle.counts.told);

    // Those of the zone run out one after the other, within one heartbeat of each other, and some of their
    // shards go to one that is missed later.
    assert!(of(lost).versions <= 11, "{:?}", of(lost));
    assert!(of(lost).moves >= lost.fewest_moves, "{:?}", of(lost));
    assert!(of(lost).moves * 10 <= lost.fewest_moves * 11, "{:?}", of(lost));
    // Only those that stand watch the nodes.
    assert_eq!(lost.counts.told("nodes"), u64::from(scale.candidates) * 10);
    assert_eq!(lost.counts.told("table"), 90 * of(lost).versions);

    // Where all are missed at once, all orphans are placed by one version, and nothing else moves.
    assert_eq!((members(stopped).versions, of(stopped).versions), (1, 1));
    assert_eq!(of(stopped).moves, stopped.fewest_moves);
    assert!(of(stopped).bytes_read <= MAP_BYTES_MAX, "{stopped:?}");

    // What leaves and comes back moves, and nothing else.
    assert_eq!(of(restart).moves, restart.fewest_moves);
    let Versions { versions, bytes_read, .. } = of(restart);
    assert!(versions <= 12, "{:?}", of(restart));
    assert!(bytes_read <= versions * MAP_BYTES_MAX, "{:?}", of(restart));
}
