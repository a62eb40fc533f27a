//! Placement beside the hashing crates, in one run: processor time of the thread (the minimum over
//! repetitions), peak of the heap, moves and balance. Prints the tables of docs/benchmarks/history/peers.md.
#![expect(clippy::print_stdout, reason = "the tables are what it is for")]

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use coord_core::{NodeId, ReplicationFactor, ShardCount, Version};
use coord_placement::{
    Assignment, Balanced, Candidate, ConsistentHash, PlacementStrategy, PlanSettings, Rendezvous,
};
use maglev::ConsistentHasher as _;
use peak_alloc::PeakAlloc;
use rustix::time::{ClockId, clock_gettime};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// How many points a node has on a ring.
const POINTS: u16 = 150;
/// How long repetitions of one measurement go on, in seconds.
const BUDGET: f64 = 0.25;
/// What would take longer than this, in seconds, is extrapolated from a sample.
const LONGEST: f64 = 2.0;
/// How many shards a strategy of ours that is too slow for all of them is measured with.
const SAMPLE: u32 = 4096;

fn main() {
    for (shards, nodes) in [(1024, 4), (1024, 100), (1024, 1000), (1 << 20, 1000)] {
        let case = Case::new(shards, nodes);
        let rows = [
            ours("**coord Balanced**", &Balanced::new(), &case, shards),
            ours("coord ConsistentHash, 150", &ConsistentHash::new(), &case, shards),
            ours("coord Rendezvous", &Rendezvous::new(), &case, shards.min(SAMPLE)),
            peer::<Modulo>(&case),
            peer::<HashRing>(&case),
            peer::<ConsistentHashRing>(&case),
            peer::<ConHash>(&case),
            peer::<HashRingOld>(&case),
            peer::<Coordinator>(&case),
            peer::<Ketama>(&case),
            peer::<StaticRing>(&case),
            peer::<JumpHash>(&case),
            peer::<JumpCh>(&case),
            peer::<Hrw>(&case),
            peer::<RendezvousHash>(&case),
            peer::<Anchor>(&case),
            peer::<MultiProbe>(&case),
            peer::<Maglev>(&case),
        ];
        print(&case, &rows);
    }
}

/// What all of one table's rows are measured with.
struct Case {
    shards: u32,
    nodes: u16,
    /// A key for each shard, and some more where there are few.
    keys: Vec<Key>,
}

/// The number of a shard as text.
type Key = [u8; 8];

impl Case {
    fn new(shards: u32, nodes: u16) -> Self {
        let key = |n: u32| format!("{n:08}").into_bytes().try_into().expect("8 digits");
        Self { shards, nodes, keys: (0..shards.max(1 << 14)).map(key).collect() }
    }

    /// A key for each shard.
    fn shard_keys(&self) -> &[Key] {
        &self.keys[..self.shards as usize]
    }

    fn all(&self) -> Vec<Node> {
        (0..self.nodes).map(Node::new).collect()
    }

    fn without(&self, gone: u16) -> Vec<Node> {
        (0..self.nodes).filter(|&n| n != gone).map(Node::new).collect()
    }

    fn with_one_more(&self) -> Vec<Node> {
        (0..=self.nodes).map(Node::new).collect()
    }
}

/// Cheap to copy, which spares the rings that clone their nodes what they would pay for strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Node {
    id: u16,
    name: [u8; 9],
}

impl Node {
    fn new(id: u16) -> Self {
        Self { id, name: format!("node-{id:04}").into_bytes().try_into().expect("9 letters") }
    }

    fn text(&self) -> &str {
        str::from_utf8(&self.name).expect("letters and digits")
    }
}

impl Hash for Node {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// A row of the tables. Times are in seconds, sizes in bytes.
struct Row {
    name: &'static str,
    build: f64,
    build_peak: usize,
    lookup: f64,
    leave: f64,
    leave_peak: usize,
    join: f64,
    /// Whether everything was measured with a smaller map.
    scaled: bool,
    /// Whether the times of leave and join are extrapolated.
    sampled: bool,
    owners: Option<Owners>,
}

/// The owner of each shard, before and after a change, and who left.
struct Owners {
    before: Vec<u16>,
    left: Vec<u16>,
    joined: Vec<u16>,
    gone: u16,
}

/// Measures a strategy of ours on `shards` shards, and scales to those of the case.
fn ours(name: &'static str, strategy: &dyn PlacementStrategy, case: &Case, shards: u32) -> Row {
    let gone = case.nodes / 2;
    let [all, less, more] = [case.all(), case.without(gone), case.with_one_more()].map(candidates);
    let settings = PlanSettings::default().with_version(Version::new(7));
    let plan = |from: &Assignment, to: &[Candidate]| {
        strategy.plan(black_box(from), to, &settings).expect("a plan")
    };
    let count = ShardCount::new(shards).expect("count");
    let empty = Assignment::empty(count, ReplicationFactor::default());
    let (full, build_peak) = peak(|| plan(&empty, &all).into_next());
    let (left, leave_peak) = peak(|| plan(&full, &less).into_next());
    let joined = plan(&full, &more).into_next();
    let scale = f64::from(case.shards) / f64::from(shards);
    let sampled = shards < case.shards;
    let owners = |map: &Assignment| {
        let id = |node: &NodeId| node.as_str()[5..].parse().expect("a number");
        let ids: Vec<u16> = map.nodes().iter().map(|node| node.as_ref().map_or(0, id)).collect();
        map.raw_owners().iter().map(|&slot| ids[usize::from(slot)]).collect()
    };
    Row {
        name,
        build: fastest(|| plan(&empty, &all)) * scale,
        build_peak,
        lookup: lookup(case, |key| {
            full.owner(coord_core::shard_of(key, count)).map_or(0, |id| id.as_str().len())
        }),
        leave: fastest(|| plan(&full, &less)) * scale,
        leave_peak,
        join: fastest(|| plan(&full, &more)) * scale,
        scaled: sampled,
        sampled,
        owners: (!sampled).then(|| Owners {
            before: owners(&full),
            left: owners(&left),
            joined: owners(&joined),
            gone,
        }),
    }
}

fn candidates(nodes: Vec<Node>) -> Vec<Candidate> {
    let candidate = |node: Node| Candidate::new(NodeId::new(node.text()).expect("id"));
    nodes.into_iter().map(candidate).collect()
}

/// Measures a peer. Its times of leave and join are those of finding the owner of each shard again: that
/// it changed its own state first is not counted.
fn peer<P: Peer>(case: &Case) -> Row {
    let gone = if P::LAST_LEAVES { case.nodes - 1 } else { case.nodes / 2 };
    let all = case.all();
    let build = |nodes: &[Node]| P::build(black_box(nodes), case.nodes + 1);
    let (full, build_peak) = peak(|| build(&all));
    let assign =
        |peer: &P| -> Vec<u16> { case.shard_keys().iter().map(|key| peer.owner(key)).collect() };
    let lookup = lookup(case, |key| full.owner(key));
    let mut row = Row {
        name: P::NAME,
        build: fastest(|| build(&all)),
        build_peak,
        lookup,
        leave: lookup * f64::from(case.shards),
        leave_peak: 0,
        join: lookup * f64::from(case.shards),
        scaled: false,
        sampled: true,
        owners: None,
    };
    if row.leave <= LONGEST {
        let (less, more) = (build(&case.without(gone)), build(&case.with_one_more()));
        let before = assign(&full);
        let (left, leave_peak) = peak(|| assign(&less));
        row.leave = fastest(|| assign(&less));
        row.join = fastest(|| assign(&more));
        row.leave_peak = leave_peak;
        row.sampled = false;
        row.owners = Some(Owners { before, left, joined: assign(&more), gone });
    }
    row
}

/// The time to look up one key.
fn lookup<T>(case: &Case, mut owner: impl FnMut(&Key) -> T) -> f64 {
    let mut each = |keys: &[Key]| {
        let all = fastest(|| {
            for key in keys {
                black_box(owner(black_box(key)));
            }
        });
        all / keys.len() as f64
    };
    // A slow peer is not asked for all of them.
    let first = each(&case.keys[..16]);
    if first * f64::from(1 << 14) > BUDGET {
        each(&case.keys[..512])
    } else {
        each(&case.keys[..1 << 14])
    }
}

/// The processor time of a call in seconds: the minimum over samples of some calls each, so that reading the
/// clock costs little beside them.
fn fastest<T>(mut run: impl FnMut() -> T) -> f64 {
    let mut time = |calls: u32| {
        let start = cpu();
        for _ in 0..calls {
            black_box(run());
        }
        (cpu() - start) / f64::from(calls)
    };
    let once = time(1);
    let calls = (1..1000).find(|&calls| once * f64::from(calls) > 100e-6).unwrap_or(1000);
    let samples = (1..50).take_while(|&n| once * f64::from(calls * n) < BUDGET);
    samples.map(|_| time(calls)).fold(once, f64::min)
}

fn cpu() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// How far the heap rises above what it was.
fn peak<T>(run: impl FnOnce() -> T) -> (T, usize) {
    HEAP.reset_peak_usage();
    let before = HEAP.current_usage();
    let result = run();
    (result, HEAP.peak_usage().saturating_sub(before))
}

fn print(case: &Case, rows: &[Row]) {
    let first = &rows[0];
    let even = first.owners.as_ref().expect("the owners of the first row");
    let leave = fewest(&even.before, case.nodes, Some(even.gone));
    let join = fewest(&even.before, case.nodes, None);
    println!("## {} shards, {} nodes\n", case.shards, case.nodes);
    println!("Time and memory; ÷ is beside coord's Balanced.\n");
    println!(
        "| who | build | lookup | leave | join | peak: build | peak: leave | lookup ÷ | leave ÷ | join ÷ |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for row in rows {
        let marks = [row.scaled, row.sampled].map(|mark| if mark { "~" } else { "" });
        let [scaled, sampled] = marks;
        let size = |unknown, size| if unknown { "-".to_owned() } else { bytes(size) };
        println!(
            "| {} | {scaled}{} | {scaled}{:.1} ns | {sampled}{} | {sampled}{} | {} | {} | {scaled}{:.1} | {sampled}{:.1} | {sampled}{:.1} |",
            row.name,
            seconds(row.build),
            row.lookup * 1e9,
            seconds(row.leave),
            seconds(row.join),
            size(row.scaled, row.build_peak),
            size(row.sampled, row.leave_peak),
            row.lookup / first.lookup,
            row.leave / first.leave,
            row.join / first.join,
        );
    }
    println!(
        "\nMoves and balance; the fewest from an even map to an even map: leave {leave}, join {join}.\n"
    );
    println!(
        "| who | max/mean | leave: moves (the node's own) | ÷ fewest | max/mean | join: moves | ÷ fewest | max/mean |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for row in rows {
        match &row.owners {
            Some(owners) => println!("| {} | {} |", row.name, moves(case, owners, leave, join)),
            None => println!("| {} | - | - | - | - | - | - | - |", row.name),
        }
    }
    println!();
}

/// The columns of moves and balance.
fn moves(case: &Case, owners: &Owners, leave: usize, join: usize) -> String {
    let changed = |to: &[u16]| owners.before.iter().zip(to).filter(|(a, b)| a != b).count();
    let own = owners.before.iter().filter(|&&owner| owner == owners.gone).count();
    let (left, joined) = (changed(&owners.left), changed(&owners.joined));
    let over = |moves: usize, fewest: usize| moves as f64 / fewest as f64;
    format!(
        "{:.3} | {left} ({own}) | {:.2} | {:.3} | {joined} | {:.2} | {:.3}",
        skew(&owners.before, case.nodes),
        over(left, leave),
        skew(&owners.left, case.nodes - 1),
        over(joined, join),
        skew(&owners.joined, case.nodes + 1),
    )
}

/// The largest load over the mean.
fn skew(owners: &[u16], nodes: u16) -> f64 {
    let most = counts(owners).into_iter().max().unwrap_or(0);
    most as f64 * f64::from(nodes) / owners.len() as f64
}

/// How many shards each node has.
fn counts(owners: &[u16]) -> Vec<usize> {
    let mut counts = vec![0; usize::from(u16::MAX) + 1];
    for &owner in owners {
        counts[usize::from(owner)] += 1;
    }
    counts
}

/// The fewest moves to an even map after a node left, or after one joined: whatever has no node or is above
/// a ceiling must move, and whatever is missing to a floor must arrive.
fn fewest(owners: &[u16], nodes: u16, gone: Option<u16>) -> usize {
    let live = if gone.is_some() { nodes - 1 } else { nodes + 1 };
    let floor = owners.len() / usize::from(live);
    let ceiling = owners.len().div_ceil(usize::from(live));
    let counts = counts(owners);
    let present = (0..=nodes).filter(|n| gone.is_none_or(|gone| *n != gone && *n != nodes));
    let (mut above, mut below) = (gone.map_or(0, |gone| counts[usize::from(gone)]), 0);
    for count in present.map(|n| counts[usize::from(n)]) {
        above += count.saturating_sub(ceiling);
        below += floor.saturating_sub(count);
    }
    above.max(below)
}

fn seconds(time: f64) -> String {
    match time {
        ..1e-6 => format!("{:.0} ns", time * 1e9),
        ..1e-3 => format!("{:.1} µs", time * 1e6),
        ..1.0 => format!("{:.2} ms", time * 1e3),
        _ => format!("{time:.2} s"),
    }
}

fn bytes(size: usize) -> String {
    match size as f64 / 1024.0 {
        ..1.0 => format!("{size} B"),
        kib @ ..1024.0 => format!("{kib:.1} KiB"),
        kib => format!("{:.1} MiB", kib / 1024.0),
    }
}

/// A way to find the owner of a key from the nodes alone.
trait Peer {
    const NAME: &'static str;
    /// Whether only the last node can leave without moving more than its shards.
    const LAST_LEAVES: bool = false;

    /// `most` is the largest number of nodes there will be.
    fn build(nodes: &[Node], most: u16) -> Self;

    /// The number of the node that owns a key.
    fn owner(&self, key: &Key) -> u16;
}

struct Modulo(Vec<Node>);

impl Peer for Modulo {
    const NAME: &'static str = "modulo (SipHash)";

    fn build(nodes: &[Node], _most: u16) -> Self {
        Self(nodes.to_vec())
    }

    fn owner(&self, key: &Key) -> u16 {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let at = hasher.finish() % self.0.len() as u64;
        self.0[usize::try_from(at).expect("an index")].id
    }
}

struct HashRing(hashring::HashRing<(Node, u16)>);

impl Peer for HashRing {
    const NAME: &'static str = "hashring 0.3.6, 150";

    fn build(nodes: &[Node], _most: u16) -> Self {
        let points = nodes.iter().flat_map(|node| (0..POINTS).map(|point| (*node, point)));
        let mut ring = hashring::HashRing::new();
        ring.batch_add(points.collect());
        Self(ring)
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.get(key).expect("an owner").0.id
    }
}

struct ConsistentHashRing(consistent_hash_ring::Ring<Node>);

impl Peer for ConsistentHashRing {
    const NAME: &'static str = "consistent_hash_ring 0.8, 150";

    fn build(nodes: &[Node], _most: u16) -> Self {
        let ring = consistent_hash_ring::RingBuilder::default().vnodes(POINTS.into());
        Self(ring.nodes(nodes).build())
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.get(key).id
    }
}

struct ConHash(conhash::ConsistentHash<Node>);

impl conhash::Node for Node {
    fn name(&self) -> String {
        self.to_string()
    }
}

impl Peer for ConHash {
    const NAME: &'static str = "conhash 0.5.1, 150";

    fn build(nodes: &[Node], _most: u16) -> Self {
        let mut ring = conhash::ConsistentHash::new();
        for node in nodes {
            ring.add(node, POINTS.into());
        }
        Self(ring)
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.get(key).expect("an owner").id
    }
}

struct HashRingOld(hash_ring::HashRing<Node>);

impl Peer for HashRingOld {
    const NAME: &'static str = "hash_ring 0.2, 150";

    fn build(nodes: &[Node], _most: u16) -> Self {
        Self(hash_ring::HashRing::new(nodes.to_vec(), POINTS.try_into().expect("a small number")))
    }

    fn owner(&self, key: &Key) -> u16 {
        let text = str::from_utf8(key).expect("digits").to_owned();
        self.0.get_node(text).expect("an owner").id
    }
}

struct Coordinator(hashring_coordinator::HashRing<Node>);

impl Peer for Coordinator {
    const NAME: &'static str = "hashring_coordinator 0.3.3, 150";

    fn build(nodes: &[Node], _most: u16) -> Self {
        let mut ring = hashring_coordinator::HashRing::new(0, POINTS.into());
        ring.batch_add(nodes.to_vec());
        Self(ring)
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.get(key)[0].id
    }
}

struct Ketama(pingora_ketama::Continuum);

impl Peer for Ketama {
    const NAME: &'static str = "pingora-ketama 0.9.1, 160";

    /// Nodes are addresses here, so the port is the number.
    fn build(nodes: &[Node], _most: u16) -> Self {
        let address = |node: &Node| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), node.id);
        let bucket = |node| pingora_ketama::Bucket::new(address(node), 1);
        let buckets: Vec<pingora_ketama::Bucket> = nodes.iter().map(bucket).collect();
        Self(pingora_ketama::Continuum::new(&buckets))
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.node(key).expect("an owner").port()
    }
}

struct StaticRing(consistent_hash::StaticHashRing<'static, Node, (), consistent_hash::DefaultHash>);

impl Peer for StaticRing {
    const NAME: &'static str = "consistent_hash 0.1.4, 150";

    fn build(nodes: &[Node], _most: u16) -> Self {
        let node = |node: &Node| consistent_hash::Node::new(*node).quantity(POINTS.into());
        let nodes = nodes.iter().map(node);
        Self(consistent_hash::StaticHashRing::new(consistent_hash::DefaultHash, nodes))
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.calc_candidates(key).next().expect("an owner").key.id
    }
}

struct JumpHash(jumphash::JumpHasher, Vec<Node>);

impl Peer for JumpHash {
    const NAME: &'static str = "jumphash 0.1.9";
    const LAST_LEAVES: bool = true;

    fn build(nodes: &[Node], _most: u16) -> Self {
        Self(jumphash::JumpHasher::new_with_keys(1, 2), nodes.to_vec())
    }

    fn owner(&self, key: &Key) -> u16 {
        let count = u32::try_from(self.1.len()).expect("few nodes");
        self.1[self.0.slot(key, count) as usize].id
    }
}

struct JumpCh(jumpch::JumpHasher, Vec<Node>);

impl Peer for JumpCh {
    const NAME: &'static str = "jumpch 2.0";
    const LAST_LEAVES: bool = true;

    fn build(nodes: &[Node], _most: u16) -> Self {
        let count = u32::try_from(nodes.len()).expect("few nodes");
        Self(jumpch::JumpHasher::new_with_hasher(count, DefaultHasher::new()), nodes.to_vec())
    }

    fn owner(&self, key: &Key) -> u16 {
        let mut hasher = self.0.clone();
        key.hash(&mut hasher);
        self.1[usize::try_from(hasher.finish()).expect("an index")].id
    }
}

struct Hrw(hrw_hash::HrwNodes<Node>);

impl hrw_hash::HrwNode for Node {}

impl Peer for Hrw {
    const NAME: &'static str = "hrw-hash 2.0.3";

    fn build(nodes: &[Node], _most: u16) -> Self {
        Self(hrw_hash::HrwNodes::new(nodes.iter().copied()))
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.sorted(key).next().expect("an owner").id
    }
}

type IdNodes = rendezvous_hash::RendezvousNodes<
    rendezvous_hash::IdNode<Node>,
    rendezvous_hash::DefaultNodeHasher,
>;

struct RendezvousHash(IdNodes);

impl Peer for RendezvousHash {
    const NAME: &'static str = "rendezvous_hash 0.3";

    fn build(nodes: &[Node], _most: u16) -> Self {
        let mut all = IdNodes::default();
        all.extend(nodes.iter().copied().map(rendezvous_hash::IdNode::new));
        Self(all)
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.calc_candidates(key).next().expect("an owner").id
    }
}

/// With a fixed hash, because the crate's default one differs from run to run.
struct Anchor(anchorhash::AnchorHash<Key, Node, BuildHasherDefault<DefaultHasher>>);

impl Peer for Anchor {
    const NAME: &'static str = "anchorhash 0.2.2";
    const LAST_LEAVES: bool = true;

    fn build(nodes: &[Node], most: u16) -> Self {
        let builder = anchorhash::Builder::with_hasher(BuildHasherDefault::default());
        Self(builder.with_resources(nodes.iter().copied()).build(most))
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.get_resource(*key).expect("an owner").id
    }
}

struct MultiProbe(mpchash::HashRing<Node>);

impl Peer for MultiProbe {
    const NAME: &'static str = "mpchash 2.0.10, 23 probes";

    fn build(nodes: &[Node], _most: u16) -> Self {
        let ring = mpchash::HashRing::new();
        for node in nodes {
            ring.add(*node);
        }
        Self(ring)
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.node(key).expect("an owner").node().id
    }
}

/// With a table of one size for all numbers of nodes: one that grows with them moves nearly everything.
struct Maglev(maglev::Maglev<Node>);

impl Peer for Maglev {
    const NAME: &'static str = "maglev 0.2.1, table 100 × nodes";

    fn build(nodes: &[Node], most: u16) -> Self {
        Self(maglev::Maglev::with_capacity(nodes.iter().copied(), 100 * usize::from(most)))
    }

    fn owner(&self, key: &Key) -> u16 {
        self.0.get(key).expect("an owner").id
    }
}
