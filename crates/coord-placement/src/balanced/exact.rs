//! The exact pass: what the greedy step left over, and the proof that nothing is left to gain.
//!
//! A plan is a flow: each shard sends `owners` units through (shard, zone) to nodes, a zone takes at most
//! its limit of one shard, a node between floor and ceiling in all, and an owner that stays is worth 1.
//! In the residual graph of such a flow an augmenting path places what is left over, and a negative
//! cycle is an exchange that saves a move; a flow without a negative cycle is optimal (Klein 1967, "A
//! primal method for minimal cost flows"). Labels are corrected in the manner of Bellman, Ford and Moore.
//! Only arcs to nodes that lost a shard cost less than 0, so the search starts there, and it stays among
//! the shards that moved until a label falls to -2: that is why a proof costs little even when the map
//! is large.

use std::collections::VecDeque;

use crate::input::NOBODY;

use super::board::Board;

/// Up to this many shards the search covers the whole map.
const WHOLE_MAP_MAX: usize = 16_384;
/// How many shards that did not move the search covers in a larger map.
const SAMPLE: usize = 4096;
/// The most vertices of the graph: a bound of its memory, 48 MB.
const VERTICES_MAX: usize = 1 << 22;

/// Runs the pass: true if it is proved that no other plan within the quotas needs fewer moves. Places may
/// stay empty and nodes outside their quotas only where nothing else is possible, or the work is used up.
pub(super) fn run(board: &mut Board<'_>) -> bool {
    let mut pass = Pass::new(board);
    pass.fill(board);
    pass.lower(board);
    pass.raise(board);
    let feasible = pass.is_feasible(board);
    pass.improve(board) && feasible
}

struct Pass {
    /// The shards that the search covers, in order; their index here is k.
    shards: Vec<u32>,
    whole: bool,
    zones: usize,
    /// Vertices: the nodes by rank, then the sink, then for each k its zones and the shard itself.
    sink: u32,
    labels: Vec<i32>,
    /// The vertex before, plus one.
    parents: Vec<u32>,
    queued: Vec<bool>,
    /// Vertices with a label or a parent.
    dirty: Vec<u32>,
    queue: VecDeque<u32>,
    /// For each zone a bound that no label of its nodes exceeds.
    zone_tops: Vec<i32>,
    /// For each rank the k that it may hold: as of some earlier moment, to be checked.
    holdings: Option<Vec<Vec<u32>>>,
    /// For each rank the k that it got in this plan.
    arrivals: Vec<Vec<u32>>,
    work: u64,
    left_sample: bool,
}

impl Pass {
    fn new(board: &mut Board<'_>) -> Self {
        let zones = board.input.zones;
        let mut shards = board.take_touched();
        let count = board.shards();
        let fits = |k: usize| k.saturating_mul(zones + 1) <= VERTICES_MAX;
        let whole = count <= WHOLE_MAP_MAX && fits(count);
        if whole {
            shards = (0..).take(count).collect();
        } else {
            let step = count.div_ceil(SAMPLE).max(1);
            shards.extend((0..u32::try_from(count).unwrap_or(u32::MAX)).step_by(step));
            shards.sort_unstable();
            shards.dedup();
            if !fits(shards.len()) {
                shards.truncate(VERTICES_MAX / (zones + 1));
            }
        }
        let nodes = board.input.live.len();
        let vertices = nodes + 1 + shards.len() * (zones + 1);
        Self {
            shards,
            whole,
            zones,
            sink: u32::try_from(nodes).unwrap_or(u32::MAX),
            labels: vec![0; vertices],
            parents: vec![0; vertices],
            queued: vec![false; vertices],
            dirty: Vec::new(),
            queue: VecDeque::new(),
            zone_tops: vec![0; zones],
            holdings: None,
            arrivals: Vec::new(),
            work: board.input.settings.work_limit,
            left_sample: false,
        }
    }

    fn zone_vertex(&self, k: usize, zone: usize) -> u32 {
        let index = self.sink as usize + 1 + k * (self.zones + 1) + zone;
        u32::try_from(index).unwrap_or(u32::MAX)
    }

    fn shard_vertex(&self, k: usize) -> u32 {
        self.zone_vertex(k, self.zones)
    }

    fn vertex(&self, index: u32) -> Vertex {
        if index < self.sink {
            return Vertex::Node(u16::try_from(index).unwrap_or(NOBODY));
        }
        if index == self.sink {
            return Vertex::Sink;
        }
        let at = (index - self.sink - 1) as usize;
        match (at / (self.zones + 1), at % (self.zones + 1)) {
            (k, zone) if zone == self.zones => Vertex::Shard(k),
            (k, zone) => Vertex::Zone(k, zone),
        }
    }

    fn shard(&self, k: usize) -> usize {
        self.shards[k] as usize
    }

    fn reset(&mut self) {
        for vertex in self.dirty.drain(..) {
            self.labels[vertex as usize] = 0;
            self.parents[vertex as usize] = 0;
            self.queued[vertex as usize] = false;
        }
        self.queue.clear();
        self.zone_tops.fill(0);
    }

    /// Uses up steps; false when there are none left.
    fn spend(&mut self, steps: usize) -> bool {
        let left = self.work.checked_sub(steps as u64);
        self.work = left.unwrap_or(0);
        left.is_some()
    }

    fn holdings(&mut self, board: &Board<'_>) -> &mut Vec<Vec<u32>> {
        let shards = &self.shards;
        self.holdings.get_or_insert_with(|| {
            let mut holdings = vec![Vec::new(); board.input.live.len()];
            for (k, &shard) in (0..).zip(shards) {
                for rank in board.members(shard as usize) {
                    holdings[usize::from(rank)].push(k);
                }
            }
            holdings
        })
    }

    // --- Augmenting paths ---------------------------------------------------------------------------

    /// Gives every shard the owners it misses.
    fn fill(&mut self, board: &mut Board<'_>) {
        for k in 0..self.shards.len() {
            for _ in 0..board.missing(self.shard(k)) {
                let start = [self.shard_vertex(k)];
                let open = |rank: usize| board.loads[rank] < board.quotas[rank].high;
                let Some(path) = self.path(board, &start, open) else { break };
                self.apply(board, &path);
            }
        }
    }

    /// Takes from every node what it has above its ceiling.
    fn lower(&mut self, board: &mut Board<'_>) {
        for rank in 0..board.loads.len() {
            while board.loads[rank] > board.quotas[rank].high {
                let start = [u32::try_from(rank).unwrap_or(u32::MAX)];
                let open = |rank: usize| board.loads[rank] < board.quotas[rank].high;
                let Some(path) = self.path(board, &start, open) else { break };
                self.apply(board, &path);
            }
        }
    }

    /// Gives every node what it lacks to its floor.
    fn raise(&mut self, board: &mut Board<'_>) {
        for rank in 0..board.loads.len() {
            while board.loads[rank] < board.quotas[rank].low {
                let above =
                    |rank: &u32| board.loads[*rank as usize] > board.quotas[*rank as usize].low;
                let start: Vec<u32> = (0..self.sink).filter(above).collect();
                let Some(path) = self.path(board, &start, |end| end == rank) else { break };
                self.apply(board, &path);
            }
        }
    }

    fn is_feasible(&self, board: &Board<'_>) -> bool {
        board.loads.iter().zip(&board.quotas).all(|(load, q)| (q.low..=q.high).contains(load))
            && self.shards.iter().all(|&shard| board.missing(shard as usize) == 0)
    }

    /// A path from one of the starts to a node that is an end, over as few owners that would stay
    /// otherwise as possible.
    fn path(
        &mut self,
        board: &Board<'_>,
        starts: &[u32],
        is_end: impl Fn(usize) -> bool,
    ) -> Option<Vec<u32>> {
        self.reset();
        self.holdings(board);
        self.collect_arrivals(board);
        for &start in starts {
            // A start is its own parent.
            self.parents[start as usize] = start + 1;
            self.dirty.push(start);
            self.queue.push_back(start);
        }
        let mut arcs = Vec::new();
        while let Some(from) = self.queue.pop_front() {
            if std::mem::replace(&mut self.queued[from as usize], true) {
                continue;
            }
            if from < self.sink && is_end(from as usize) && !starts.contains(&from) {
                return Some(self.trace(from));
            }
            arcs.clear();
            self.arcs(board, from, i32::MIN, &mut arcs);
            if !self.spend(arcs.len() + 1) {
                return None;
            }
            for &(to, cost) in &arcs {
                let label = self.labels[from as usize] + cost.max(0);
                let seen = self.parents[to as usize] != 0;
                if to == self.sink || seen && self.labels[to as usize] <= label {
                    continue;
                }
                self.labels[to as usize] = label;
                self.parents[to as usize] = from + 1;
                self.dirty.push(to);
                if cost > 0 { self.queue.push_back(to) } else { self.queue.push_front(to) }
            }
        }
        None
    }

    fn trace(&self, end: u32) -> Vec<u32> {
        let mut path = vec![end];
        let mut at = end;
        while self.parents[at as usize] != at + 1 {
            at = self.parents[at as usize] - 1;
            path.push(at);
        }
        path.reverse();
        path
    }

    // --- The residual graph -------------------------------------------------------------------------

    fn collect_arrivals(&mut self, board: &Board<'_>) {
        self.arrivals.clear();
        self.arrivals.resize(board.input.live.len(), Vec::new());
        for (k, &shard) in (0..).zip(&self.shards) {
            let places = board.places(shard as usize);
            if board.next[places.clone()] == board.old[places] {
                continue;
            }
            for rank in board.members(shard as usize) {
                if !board.had(shard as usize, rank) {
                    self.arrivals[usize::from(rank)].push(k);
                }
            }
        }
    }

    /// The residual arcs from a vertex, with their costs. Arcs that can't improve a label, given the one
    /// of the vertex, may be left out.
    fn arcs(&mut self, board: &Board<'_>, from: u32, label: i32, arcs: &mut Vec<(u32, i32)>) {
        match self.vertex(from) {
            Vertex::Node(rank) => self.arcs_of_node(board, rank, label, arcs),
            Vertex::Sink => {
                let above =
                    |rank: &u32| board.loads[*rank as usize] > board.quotas[*rank as usize].low;
                arcs.extend((0..self.sink).filter(above).map(|rank| (rank, 0)));
            }
            Vertex::Shard(k) => {
                let zones = 0..self.zones;
                let open = zones.filter(|&zone| board.zone_has_room(self.shard(k), zone));
                arcs.extend(open.map(|zone| (self.zone_vertex(k, zone), 0)));
            }
            Vertex::Zone(k, zone) => self.arcs_of_zone(board, k, zone, label, arcs),
        }
    }

    fn arcs_of_node(
        &mut self,
        board: &Board<'_>,
        rank: u16,
        label: i32,
        arcs: &mut Vec<(u32, i32)>,
    ) {
        let n = usize::from(rank);
        let zone = board.zone(rank);
        if board.loads[n] < board.quotas[n].high {
            arcs.push((self.sink, 0));
        }
        let leaves = |k: u32| {
            let shard = self.shards[k as usize] as usize;
            (board.has(shard, rank) && !board.rules.is_pinned(shard, rank)).then_some(shard)
        };
        for &k in &self.arrivals[n] {
            if leaves(k).is_some() {
                arcs.push((self.zone_vertex(k as usize, zone), 0));
            }
        }
        // Giving up an owner that stays costs 1, which from a label of -1 leads nowhere below 0.
        if label <= -2 {
            self.left_sample |= !self.whole;
            self.holdings(board);
            for &k in self.holdings.iter().flat_map(|holdings| &holdings[n]) {
                let shard = self.shards[k as usize] as usize;
                let stays = board.has(shard, rank) && board.had(shard, rank);
                if stays && !board.rules.is_pinned(shard, rank) {
                    arcs.push((self.zone_vertex(k as usize, zone), 1));
                }
            }
        }
    }

    fn arcs_of_zone(
        &mut self,
        board: &Board<'_>,
        k: usize,
        zone: usize,
        label: i32,
        arcs: &mut Vec<(u32, i32)>,
    ) {
        let shard = self.shard(k);
        if board.in_zone(shard, zone) > 0 {
            arcs.push((self.shard_vertex(k), 0));
        }
        let back = |rank: u16| board.zone(rank) == zone && !board.has(shard, rank);
        for &rank in &board.old[board.places(shard)] {
            if rank != NOBODY && back(rank) {
                arcs.push((u32::from(rank), -1));
            }
        }
        // Where all nodes of the zone have this label or a lower one, only the arcs back count.
        if label != i32::MIN && self.zone_tops[zone] <= label {
            return;
        }
        let mut top = label;
        for &rank in &board.zone_nodes[zone] {
            if board.has(shard, rank) {
                top = top.max(self.labels[usize::from(rank)]);
            } else if !board.rules.excludes(shard, rank) && !board.had(shard, rank) {
                arcs.push((u32::from(rank), 0));
            } else {
                top = top.max(self.labels[usize::from(rank)]);
            }
        }
        self.zone_tops[zone] = top;
    }

    /// Carries out a path or cycle: an arc from (shard, zone) to a node adds an owner, one from a node
    /// to (shard, zone) removes one.
    fn apply(&mut self, board: &mut Board<'_>, path: &[u32]) {
        let pairs = || path.windows(2).map(|pair| (self.vertex(pair[0]), self.vertex(pair[1])));
        for pair in pairs() {
            if let (Vertex::Node(rank), Vertex::Zone(k, _)) = pair {
                board.remove(self.shard(k), rank);
            }
        }
        let mut added = Vec::new();
        for pair in pairs() {
            if let (Vertex::Zone(k, _), Vertex::Node(rank)) = pair {
                board.add(self.shard(k), rank);
                added.push((k, rank));
            }
        }
        if let Some(holdings) = &mut self.holdings {
            for (k, rank) in added {
                holdings[usize::from(rank)].push(u32::try_from(k).unwrap_or(u32::MAX));
            }
        }
    }

    // --- Negative cycles ----------------------------------------------------------------------------

    /// Cancels negative cycles until there is none: true if that is proved for the whole map.
    fn improve(&mut self, board: &mut Board<'_>) -> bool {
        loop {
            self.left_sample = false;
            let moves: usize = self.shards.iter().map(|&s| board.arrivals(s as usize)).sum();
            if moves as u64 <= board.lower_bound {
                return true;
            }
            match self.negative_cycle(board) {
                Search::Cycle(cycle) => self.apply(board, &cycle),
                Search::None => return !self.left_sample,
                Search::OutOfWork => return false,
            }
        }
    }

    fn negative_cycle(&mut self, board: &Board<'_>) -> Search {
        self.reset();
        self.collect_arrivals(board);
        for k in 0..self.shards.len() {
            self.start(board, k);
        }
        let mut arcs = Vec::new();
        while let Some(from) = self.queue.pop_front() {
            self.queued[from as usize] = false;
            let label = self.labels[from as usize];
            arcs.clear();
            self.arcs(board, from, label, &mut arcs);
            if !self.spend(arcs.len() + 1) {
                return Search::OutOfWork;
            }
            for &(to, cost) in &arcs {
                if label + cost >= self.labels[to as usize] {
                    continue;
                }
                if let Some(cycle) = self.cycle(from, to) {
                    return Search::Cycle(cycle);
                }
                self.labels[to as usize] = label + cost;
                self.parents[to as usize] = from + 1;
                self.dirty.push(to);
                if !std::mem::replace(&mut self.queued[to as usize], true) {
                    self.queue.push_back(to);
                }
            }
        }
        Search::None
    }

    /// Queues the vertices from which an owner can come back to a shard.
    fn start(&mut self, board: &Board<'_>, k: usize) {
        let places = board.places(self.shard(k));
        if board.next[places.clone()] == board.old[places.clone()] {
            return;
        }
        for &rank in &board.old[places] {
            if rank == NOBODY || board.has(self.shard(k), rank) {
                continue;
            }
            let vertex = self.zone_vertex(k, board.zone(rank));
            if !std::mem::replace(&mut self.queued[vertex as usize], true) {
                self.dirty.push(vertex);
                self.queue.push_back(vertex);
            }
        }
    }

    /// The cycle that an arc closes, if `to` is among the ancestors of `from`.
    fn cycle(&mut self, from: u32, to: u32) -> Option<Vec<u32>> {
        let mut path = vec![to, from];
        let mut at = from;
        while at != to {
            at = self.parents[at as usize].checked_sub(1)?;
            path.push(at);
        }
        path.reverse();
        Some(path)
    }
}

enum Search {
    Cycle(Vec<u32>),
    None,
    OutOfWork,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vertex {
    Node(u16),
    Sink,
    Shard(usize),
    Zone(usize, usize),
}
