//! The state that planning with replicas, zones, pins and exclusions works on.

use crate::input::{Input, NOBODY};
use crate::rules::Rules;

use crate::quota::{Claimant, Quota, zone_limits, zoned_quotas};

/// Who owns what, by rank, while a plan is made.
#[derive(Debug)]
pub(super) struct Board<'a> {
    pub(super) input: &'a Input<'a>,
    pub(super) rules: &'a Rules,
    /// How many places each shard has.
    pub(super) replicas: usize,
    /// How many owners each shard is to have: as many as it has places, or as there are nodes.
    pub(super) owners: usize,
    /// How many owners of one shard each zone may hold.
    pub(super) zone_limits: Vec<u8>,
    /// The ranks of the nodes in each zone that accept new shards.
    pub(super) zone_nodes: Vec<Vec<u16>>,
    /// For each place the rank that may stay there, else `NOBODY`.
    pub(super) old: Vec<u16>,
    pub(super) next: Vec<u16>,
    /// How many places each rank fills in `next`.
    pub(super) loads: Vec<u64>,
    pub(super) quotas: Vec<Quota>,
    /// The fewest moves possible within the quotas.
    pub(super) lower_bound: u64,
    /// Shards that have to be looked at when the plan is written down; may hold one twice.
    pub(super) touched: Vec<u32>,
    /// Shards with two owners in one zone, where that may be too many.
    close: Vec<u32>,
}

/// Who may stay at a slot's places.
#[derive(Clone, Copy, Debug)]
struct Stay {
    /// `NOBODY` if nobody may.
    rank: u16,
    zone: u16,
}

impl<'a> Board<'a> {
    pub(super) fn new(input: &'a Input<'a>, rules: &'a Rules, owners: usize) -> Self {
        let mut zone_nodes = vec![Vec::new(); input.zones];
        for (rank, node) in (0..NOBODY).zip(&input.live) {
            if node.takes_new {
                zone_nodes[usize::from(node.zone)].push(rank);
            }
        }
        let sizes: Vec<usize> = zone_nodes.iter().map(Vec::len).collect();
        let mut board = Self {
            input,
            rules,
            replicas: usize::from(input.current.replicas().get()),
            owners,
            zone_limits: zone_limits(&sizes, owners),
            zone_nodes,
            old: Vec::new(),
            next: Vec::new(),
            loads: vec![0; input.live.len()],
            quotas: Vec::new(),
            lower_bound: 0,
            touched: Vec::new(),
            close: Vec::new(),
        };
        board.read();
        board.set_quotas();
        board.keep();
        board
    }

    pub(super) fn shards(&self) -> usize {
        self.input.current.shards().get() as usize
    }

    pub(super) fn zone(&self, rank: u16) -> usize {
        usize::from(self.input.live[usize::from(rank)].zone)
    }

    /// The places of a shard.
    pub(super) fn places(&self, shard: usize) -> std::ops::Range<usize> {
        shard * self.replicas..(shard + 1) * self.replicas
    }

    pub(super) fn members(&self, shard: usize) -> impl Iterator<Item = u16> + '_ {
        self.next[self.places(shard)].iter().copied().filter(|&rank| rank != NOBODY)
    }

    pub(super) fn has(&self, shard: usize, rank: u16) -> bool {
        self.next[self.places(shard)].contains(&rank)
    }

    pub(super) fn had(&self, shard: usize, rank: u16) -> bool {
        self.old[self.places(shard)].contains(&rank)
    }

    /// How many owners of a shard are in a zone.
    pub(super) fn in_zone(&self, shard: usize, zone: usize) -> usize {
        self.members(shard).filter(|&rank| self.zone(rank) == zone).count()
    }

    pub(super) fn zone_has_room(&self, shard: usize, zone: usize) -> bool {
        self.in_zone(shard, zone) < usize::from(self.zone_limits[zone])
    }

    /// Whether a node may become an owner of a shard, zones aside.
    pub(super) fn may_join(&self, shard: usize, rank: u16) -> bool {
        !self.has(shard, rank) && !self.rules.excludes(shard, rank)
    }

    pub(super) fn missing(&self, shard: usize) -> usize {
        self.owners.saturating_sub(self.members(shard).count())
    }

    pub(super) fn add(&mut self, shard: usize, rank: u16) {
        let places = self.places(shard);
        // Its own place, if it had one: then nothing moves.
        let own = places.clone().find(|&place| self.old[place] == rank);
        let own = own.filter(|&place| self.next[place] == NOBODY);
        let free = own.or_else(|| places.clone().find(|&place| self.next[place] == NOBODY));
        if let Some(place) = free {
            self.next[place] = rank;
            self.loads[usize::from(rank)] += 1;
            self.touched.push(u32::try_from(shard).unwrap_or(u32::MAX));
        }
    }

    pub(super) fn remove(&mut self, shard: usize, rank: u16) {
        if let Some(place) = self.places(shard).find(|&place| self.next[place] == rank) {
            self.next[place] = NOBODY;
            self.loads[usize::from(rank)] -= 1;
            self.touched.push(u32::try_from(shard).unwrap_or(u32::MAX));
        }
    }

    /// Takes back every change.
    pub(super) fn reset(&mut self) {
        self.next.clone_from(&self.old);
        self.loads.fill(0);
        for &rank in &self.next {
            if let Some(load) = self.loads.get_mut(usize::from(rank)) {
                *load += 1;
            }
        }
    }

    /// The shards that differ from the current map, each once, in order.
    pub(super) fn take_touched(&mut self) -> Vec<u32> {
        self.touched.sort_unstable();
        self.touched.dedup();
        self.touched.clone()
    }

    /// How many owners a shard has that it did not have.
    pub(super) fn arrivals(&self, shard: usize) -> usize {
        self.members(shard).filter(|&rank| !self.had(shard, rank)).count()
    }

    /// Which owners of the current map may stay: alive, accepting, named once, not excluded.
    fn read(&mut self) {
        let stays = |&rank: &u16| match self.input.live.get(usize::from(rank)) {
            Some(node) if node.takes_new => Stay { rank, zone: node.zone },
            _ => Stay { rank: NOBODY, zone: NOBODY },
        };
        let stays: Vec<Stay> = self.input.rank_of.iter().map(stays).collect();
        for (count, stay) in self.input.counts().into_iter().zip(&stays) {
            if let Some(load) = self.loads.get_mut(usize::from(stay.rank)) {
                *load = u64::from(count);
            }
        }
        match self.replicas {
            1 => self.read_each::<1>(&stays),
            2 => self.read_each::<2>(&stays),
            3 => self.read_each::<3>(&stays),
            4 => self.read_each::<4>(&stays),
            5 => self.read_each::<5>(&stays),
            6 => self.read_each::<6>(&stays),
            _ => self.read_each::<7>(&stays),
        }
        for at in 0..self.touched.len() {
            self.leave_out_repeated(self.touched[at] as usize);
        }
        let (settings, shards) = (self.input.settings, self.shards());
        for shard in settings.exclusions.keys().map(|shard| shard.index()) {
            if shard < shards {
                self.leave_out_excluded(shard);
            }
        }
        self.take_touched();
    }

    /// Reads the map with so many places for each shard, and notes the shards that need a closer look.
    fn read_each<const PLACES: usize>(&mut self, stays: &[Stay]) {
        let last = stays.len() - 1;
        let crowds = self.zone_limits.iter().any(|&limit| usize::from(limit) < self.owners);
        let (shards, _) = self.input.current.raw_owners().as_chunks::<PLACES>();
        self.old.reserve_exact(shards.len() * PLACES);
        for (shard, slots) in (0_u32..).zip(shards) {
            let stays = slots.map(|slot| stays[usize::from(slot).min(last)]);
            let ranks = stays.map(|stay| stay.rank);
            self.old.extend_from_slice(&ranks);
            let (mut odd, mut close) = (ranks.contains(&NOBODY), false);
            for (place, one) in stays.iter().enumerate() {
                for other in &stays[..place] {
                    odd |= one.rank == other.rank;
                    close |= one.zone == other.zone;
                }
            }
            if odd {
                self.touched.push(shard);
            }
            if close && crowds {
                self.close.push(shard);
            }
        }
    }

    /// Leaves out a node where a shard names it again.
    fn leave_out_repeated(&mut self, shard: usize) {
        let places = self.places(shard);
        let old = &mut self.old[places];
        for place in 1..old.len() {
            let rank = old[place];
            if rank != NOBODY && old[..place].contains(&rank) {
                old[place] = NOBODY;
                self.loads[usize::from(rank)] -= 1;
            }
        }
    }

    fn leave_out_excluded(&mut self, shard: usize) {
        for place in self.places(shard) {
            let rank = self.old[place];
            if rank != NOBODY && self.rules.excludes(shard, rank) {
                self.old[place] = NOBODY;
                self.loads[usize::from(rank)] -= 1;
                self.touched.push(u32::try_from(shard).unwrap_or(u32::MAX));
            }
        }
    }

    fn set_quotas(&mut self) {
        let shards = self.shards() as u64;
        let total = shards * self.owners as u64;
        let claim = |((node, &count), &least): ((&crate::input::Live, &u64), &u64)| {
            let most = if node.takes_new { u64::from(node.max_shards).min(shards) } else { 0 };
            Claimant { weight: node.weight, count, least: least.min(most), most }
        };
        let live = &self.input.live;
        let claimants: Vec<Claimant> =
            live.iter().zip(&self.loads).zip(&self.rules.pinned).map(claim).collect();
        let zone_of: Vec<u16> = live.iter().map(|node| node.zone).collect();
        let limits: Vec<u64> =
            self.zone_limits.iter().map(|&limit| shards * u64::from(limit)).collect();
        let tolerance = self.input.settings.tolerance;
        self.quotas = zoned_quotas(&claimants, &zone_of, &limits, total, tolerance);
        let (mut kept, mut above, mut below) = (0, 0, 0);
        for (quota, &count) in self.quotas.iter().zip(&self.loads) {
            kept += count;
            above += count.saturating_sub(quota.high);
            below += quota.low.saturating_sub(count);
        }
        self.lower_bound = below.max(total.saturating_sub(kept) + above);
    }

    /// Starts `next` with all that stays: pins first, then old owners as far as their zones allow. Where
    /// a zone has too many, those stay whose node has least above its goal.
    fn keep(&mut self) {
        self.next.clone_from(&self.old);
        let pinned: Vec<usize> =
            self.input.settings.pins.keys().map(|shard| shard.index()).collect();
        let mut close = std::mem::take(&mut self.close);
        for shard in pinned.into_iter().filter(|&shard| !self.rules.pins(shard).is_empty()) {
            self.keep_pinned(shard);
            close.push(u32::try_from(shard).unwrap_or(u32::MAX));
        }
        close.sort_unstable();
        close.dedup();
        for shard in close {
            if self.zones_overfull(shard as usize) {
                self.repair_zones(shard as usize);
            }
        }
    }

    fn keep_pinned(&mut self, shard: usize) {
        let olds: Vec<u16> = self.members(shard).collect();
        for &rank in &olds {
            self.remove(shard, rank);
        }
        let pins = self.rules.pins(shard);
        for &rank in pins {
            self.add(shard, rank);
        }
        for rank in olds.into_iter().filter(|rank| !pins.contains(rank)) {
            if self.missing(shard) > 0 {
                self.add(shard, rank);
            }
        }
    }

    fn zones_overfull(&self, shard: usize) -> bool {
        let members = &self.next[self.places(shard)];
        // With two owners in the same zone a closer look is due; else every zone has one at most.
        members.iter().enumerate().any(|(place, &rank)| {
            rank != NOBODY
                && members[..place].iter().any(|&o| o != NOBODY && self.zone(o) == self.zone(rank))
                && self.in_zone(shard, self.zone(rank))
                    > usize::from(self.zone_limits[self.zone(rank)])
        })
    }

    fn repair_zones(&mut self, shard: usize) {
        let mut members: Vec<u16> = self.members(shard).collect();
        members.sort_by_key(|&rank| {
            let n = usize::from(rank);
            let above = self.loads[n].saturating_sub(self.quotas[n].goal);
            (std::cmp::Reverse(above), std::cmp::Reverse(rank))
        });
        for rank in members {
            let zone = self.zone(rank);
            let full = self.in_zone(shard, zone) > usize::from(self.zone_limits[zone]);
            if full && !self.rules.is_pinned(shard, rank) {
                self.remove(shard, rank);
            }
        }
    }
}
