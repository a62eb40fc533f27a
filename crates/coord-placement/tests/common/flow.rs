//! An independent solver: the fewest moves by successive shortest paths with Bellman-Ford, written from
//! the definition and sharing nothing with the crate.

use std::collections::{BTreeMap, BTreeSet};

use coord_core::NodeId;
use coord_placement::{Assignment, Candidate};

use super::zone_limit;

struct Arc {
    to: usize,
    room: i64,
    cost: i64,
}

/// A flow network: arcs in pairs, the second of each the reverse of the first.
#[derive(Default)]
struct Network {
    arcs: Vec<Arc>,
    from: Vec<Vec<usize>>,
}

impl Network {
    fn vertex(&mut self) -> usize {
        self.from.push(Vec::new());
        self.from.len() - 1
    }

    fn arc(&mut self, from: usize, to: usize, room: i64, cost: i64) {
        self.from[from].push(self.arcs.len());
        self.arcs.push(Arc { to, room, cost });
        self.from[to].push(self.arcs.len());
        self.arcs.push(Arc { to: from, room: 0, cost: -cost });
    }

    /// The largest flow from one vertex to another and the least cost of such a flow.
    fn solve(&mut self, source: usize, sink: usize) -> (i64, i64) {
        let (mut flow, mut total) = (0, 0);
        loop {
            let mut costs = vec![i64::MAX; self.from.len()];
            let mut by = vec![usize::MAX; self.from.len()];
            let mut queue = std::collections::VecDeque::from([source]);
            let mut queued = vec![false; self.from.len()];
            costs[source] = 0;
            while let Some(at) = queue.pop_front() {
                queued[at] = false;
                for &index in &self.from[at] {
                    let arc = &self.arcs[index];
                    if arc.room > 0 && costs[at] + arc.cost < costs[arc.to] {
                        costs[arc.to] = costs[at] + arc.cost;
                        by[arc.to] = index;
                        if !queued[arc.to] {
                            queued[arc.to] = true;
                            queue.push_back(arc.to);
                        }
                    }
                }
            }
            if costs[sink] == i64::MAX {
                return (flow, total);
            }
            let mut amount = i64::MAX;
            let mut at = sink;
            while at != source {
                amount = amount.min(self.arcs[by[at]].room);
                at = self.arcs[by[at] ^ 1].to;
            }
            let mut at = sink;
            while at != source {
                self.arcs[by[at]].room -= amount;
                self.arcs[by[at] ^ 1].room += amount;
                at = self.arcs[by[at] ^ 1].to;
            }
            flow += amount;
            total += amount * costs[sink];
        }
    }
}

/// The fewest moves to a map in which every shard has `owners` owners on distinct candidates, zones hold
/// no more of a shard than necessary, and every candidate has a load within its bounds; `None` if there
/// is no such map. All candidates accept.
pub(crate) fn fewest_moves(
    current: &Assignment,
    open: &[&Candidate],
    bounds: &[(usize, usize)],
) -> Option<usize> {
    let shards = current.shards().get() as usize;
    let replicas = usize::from(current.replicas().get());
    let owners = replicas.min(open.len());
    let limit = i64::try_from(zone_limit(open, replicas)).expect("fits");
    let mut net = Network::default();
    let (source, middle, sink) = (net.vertex(), net.vertex(), net.vertex());
    let nodes: Vec<usize> = open.iter().map(|_| net.vertex()).collect();
    // Floors must be filled: they are worth more than any number of moves.
    const FLOOR: i64 = -1_000_000;
    let int = |n: usize| i64::try_from(n).expect("fits");
    for (vertex, &(low, high)) in nodes.iter().zip(bounds) {
        net.arc(*vertex, sink, int(low), FLOOR);
        net.arc(*vertex, middle, int(high - low), 0);
    }
    let floors: usize = bounds.iter().map(|(low, _)| low).sum();
    net.arc(middle, sink, int((shards * owners).checked_sub(floors)?), 0);
    for shard in current.shards().shards() {
        let had: BTreeSet<&NodeId> = current.owners(shard).collect();
        let vertex = net.vertex();
        net.arc(source, vertex, int(owners), 0);
        let mut zones = BTreeMap::new();
        for (n, candidate) in open.iter().enumerate() {
            let zone = *zones.entry(&candidate.zone).or_insert_with(|| {
                let zone = net.vertex();
                net.arc(vertex, zone, limit, 0);
                zone
            });
            net.arc(zone, nodes[n], 1, -i64::from(had.contains(&candidate.id)));
        }
    }
    let (flow, cost) = net.solve(source, sink);
    let kept = int(floors) * FLOOR - cost;
    let complete = flow == int(shards * owners) && (0..=flow).contains(&kept);
    complete.then(|| usize::try_from(flow - kept).expect("fits"))
}
