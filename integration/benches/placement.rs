//! How long placement takes, beside a copy of the map in the same run, and how many moves it makes beside
//! the fewest possible. Prints a table; the minimum over repetitions.

#![expect(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use coord_core::{Label, NodeId, ReplicationFactor, ShardCount, ShardId, Version};
use coord_placement::{
    Assignment, Balanced, Candidate, ConsistentHash, PlacementStrategy, Plan, PlanSettings,
    Rendezvous,
};

fn main() {
    println!(
        "| strategy | shards | nodes | zones | R | case | time | x copy | moves | fewest | optimal | max/mean |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (shards, nodes) in [(1024, 4), (1024, 100), (1024, 1000), (1 << 20, 1000)] {
        let large = shards > 1024;
        cases(&Balanced::new(), shards, nodes, 1, 1);
        cases(&ConsistentHash::new(), shards, nodes, 1, 1);
        if !large {
            cases(&Rendezvous::new(), shards, nodes, 1, 1);
        }
        if nodes >= 100 {
            for zones in [1, 3, 5] {
                cases(&Balanced::new(), shards, nodes, zones, 3);
            }
        }
    }
    lookup();
}

fn candidates(nodes: usize, zones: usize, gone: Option<usize>) -> Vec<Candidate> {
    (0..nodes)
        .filter(|n| Some(*n) != gone)
        .map(|n| {
            let zone = Label::new(format!("z{}", n % zones)).expect("label");
            let id = NodeId::new(format!("node-{n:05}")).expect("id");
            Candidate::new(id).with_zone(Some(zone))
        })
        .collect()
}

fn cases(strategy: &dyn PlacementStrategy, shards: u32, nodes: usize, zones: usize, replicas: u8) {
    let count = ShardCount::new(shards).expect("count");
    let factor = ReplicationFactor::new(replicas).expect("factor");
    let empty = Assignment::empty(count, factor);
    let all = candidates(nodes, zones, None);
    let less = candidates(nodes, zones, Some(nodes / 2));
    let more = candidates(nodes + 1, zones, None);
    let settings = PlanSettings::default().with_version(Version::new(7));
    let full = strategy.plan(&empty, &all, &settings).expect("a plan").into_next();
    let mut copied = full.raw_owners().to_vec();
    let copy = fastest(50, || copied.copy_from_slice(black_box(full.raw_owners())));
    for (case, from, to) in [
        ("fresh", &empty, &all),
        ("leave", &full, &less),
        ("join", &full, &more),
        ("nothing", &full, &all),
    ] {
        let plan = || strategy.plan(black_box(from), to, &settings).expect("a plan");
        let once = fastest(1, &plan);
        let repeats = (Duration::from_millis(150).as_nanos() / once.as_nanos().max(1)).clamp(1, 50);
        let time = fastest(usize::try_from(repeats).unwrap_or(1), &plan).min(once);
        row(strategy.name(), (shards, nodes, zones, replicas), case, time, copy, &plan(), to.len());
    }
}

fn row(
    name: &str,
    (shards, nodes, zones, replicas): (u32, usize, usize, u8),
    case: &str,
    time: Duration,
    copy: Duration,
    plan: &Plan,
    live: usize,
) {
    let ratio = time.as_secs_f64() / copy.as_secs_f64();
    let most = plan.next().counts().into_values().max().unwrap_or(0);
    let mean = f64::from(shards) * f64::from(replicas) / live as f64;
    println!(
        "| {name} | {shards} | {nodes} | {zones} | {replicas} | {case} | {time:.1?} | {ratio:.1} | {} | {} | {} | {:.3} |",
        plan.moves().len(),
        plan.lower_bound(),
        plan.is_optimal(),
        most as f64 / mean,
    );
}

/// Looking up the owner of a key: the hash and one load.
fn lookup() {
    let count = ShardCount::new(1 << 20).expect("count");
    let empty = Assignment::empty(count, ReplicationFactor::default());
    let all = candidates(1000, 1, None);
    let plan = Balanced::new().plan(&empty, &all, &PlanSettings::default()).expect("a plan");
    let map = plan.next();
    let keys: Vec<String> = (0..1 << 16).map(|n| format!("order-{n}")).collect();
    let time = fastest(20, || {
        let mut sum = 0_usize;
        for key in &keys {
            let shard: ShardId = coord_core::shard_of(key, count);
            sum += map.owner(shard).map_or(0, |id| id.as_str().len());
        }
        sum
    });
    let each = time.as_secs_f64() * 1e9 / keys.len() as f64;
    println!("\nlookup of a key's owner, 1,048,576 shards, 1000 nodes: {each:.1} ns");
    let parts = || (map.nodes().to_vec(), map.raw_owners().to_vec());
    let time = fastest(20, || {
        let (nodes, owners) = parts();
        Assignment::new(count, map.replicas(), nodes, owners).expect("valid")
    });
    println!("\nreading that map, which checks and counts its owners: {time:.1?}");
}

fn fastest<T>(repeats: usize, mut run: impl FnMut() -> T) -> Duration {
    (0..repeats)
        .map(|_| {
            #[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
            let start = Instant::now();
            black_box(run());
            start.elapsed()
        })
        .min()
        .unwrap_or_default()
}
