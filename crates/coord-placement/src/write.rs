//! Writes a plan down: which owner follows which, why, and what the limit of moves leaves for later.

use coord_core::{ShardId, Slot};

use crate::input::{Input, NOBODY};
use crate::plan::{Move, Plan, Reason, Unsatisfied};
use crate::rules::Rules;

/// A plan by rank.
#[derive(Debug)]
pub(crate) struct Draft {
    /// How many owners each shard is to have.
    pub(crate) owners: usize,
    /// How many owners of one shard each zone may hold.
    pub(crate) zone_limits: Vec<u8>,
    /// For each place a rank, `NOBODY` where it is empty.
    pub(crate) next: Vec<u16>,
    /// The shards that may differ from the current map, in order.
    pub(crate) touched: Vec<u32>,
    pub(crate) lower_bound: u64,
    pub(crate) optimal: bool,
    pub(crate) problems: Vec<Unsatisfied>,
}

/// One place of a shard: who held it, and who follows.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The current owner's slot.
    from: u16,
    /// The next owner's rank; `NOBODY` if nobody follows.
    to: u16,
    reason: Option<Reason>,
}

pub(crate) fn write(input: Input<'_>, rules: &Rules, mut draft: Draft) -> Plan {
    let mut unsatisfied = std::mem::take(&mut draft.problems);
    let mut writer = Writer::new(&input, rules, &draft);
    let mut drafts: Vec<(u32, Vec<Place>)> =
        draft.touched.iter().map(|&shard| (shard, writer.pair(shard as usize))).collect();
    let limited = writer.limit(&mut drafts);
    for (shard, places) in &drafts {
        writer.put(*shard as usize, places);
    }
    let shared = writer.shared_zones(&draft.touched);
    unsatisfied.extend(writer.shortages(&draft.touched));
    if let ([], Some(shared)) = (&*limited, shared) {
        unsatisfied.push(shared);
    }
    let is_limited = !limited.is_empty();
    if !is_limited {
        unsatisfied.extend(writer.not_drained(&draft.touched));
    }
    unsatisfied.extend(limited);
    let Writer { owners, counts, changed, moves, .. } = writer;
    Plan {
        changed,
        next: input.current.with_parts(input.nodes, owners, counts),
        moves,
        unsatisfied,
        lower_bound: draft.lower_bound,
        optimal: draft.optimal && !is_limited,
    }
}

/// Who is followed, in this order.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Those who leave, by somebody of their zone.
    SameZone,
    /// Those who are gone.
    Holes,
    /// Those who leave, by anybody.
    Rest,
}

struct Writer<'a> {
    input: &'a Input<'a>,
    rules: &'a Rules,
    draft: &'a Draft,
    replicas: usize,
    owners: Vec<u16>,
    /// How many places each slot fills in `owners`; the last entry counts the empty ones.
    counts: Vec<u32>,
    changed: bool,
    moves: Vec<Move>,
}

impl<'a> Writer<'a> {
    fn new(input: &'a Input<'a>, rules: &'a Rules, draft: &'a Draft) -> Self {
        let replicas = usize::from(input.current.replicas().get());
        let owners = input.current.raw_owners().to_vec();
        let counts = input.counts();
        Self { input, rules, draft, replicas, owners, counts, changed: false, moves: Vec::new() }
    }

    fn rank(&self, slot: u16) -> Option<u16> {
        u16::try_from(self.input.rank(slot)?).ok()
    }

    fn zone(&self, rank: u16) -> Option<u16> {
        self.input.live.get(usize::from(rank)).map(|node| node.zone)
    }

    /// Pairs who leaves with who arrives. An arrival follows somebody of its own zone first: so each
    /// move keeps the zones as good as they are, whichever of the others is made.
    fn pair(&self, shard: usize) -> Vec<Place> {
        let range = shard * self.replicas..(shard + 1) * self.replicas;
        let now = &self.input.current.raw_owners()[range.clone()];
        let mut arrivals: Vec<u16> =
            self.draft.next[range].iter().copied().filter(|&rank| rank != NOBODY).collect();
        let mut places: Vec<Place> =
            now.iter().map(|&from| Place { from, to: NOBODY, reason: None }).collect();
        for place in &mut places {
            let rank = self.rank(place.from);
            if let Some(stays) = arrivals.iter().position(|&arrival| Some(arrival) == rank) {
                place.to = arrivals.swap_remove(stays);
            }
        }
        arrivals.sort_unstable();
        let lost = places.iter().all(|place| self.is_hole(shard, *place, now));
        let crowded = self.crowded_zones(shard, now);
        for turn in [Turn::SameZone, Turn::Holes, Turn::Rest] {
            for place in &mut places {
                let hole = self.is_hole(shard, *place, now);
                if place.to != NOBODY || (turn == Turn::Holes) != hole {
                    continue;
                }
                let old = self.rank(place.from);
                let zone = old.and_then(|old| self.zone(old));
                let found =
                    arrivals.iter().position(|&to| turn != Turn::SameZone || zone == self.zone(to));
                let Some(found) = found else { continue };
                place.to = arrivals.remove(found);
                place.reason = Some(match old {
                    _ if self.rules.is_pinned(shard, place.to) && !hole => Reason::Pin,
                    Some(old) if self.rules.excludes(shard, old) => Reason::Exclusion,
                    _ if hole && lost => Reason::Orphan,
                    Some(old) if !hole => self.reason(old, &crowded),
                    _ => Reason::MinReplicas,
                });
            }
        }
        self.keep_unfollowed(shard, &mut places, now);
        places
    }

    /// Whether a place has no live owner of its own.
    fn is_hole(&self, shard: usize, place: Place, now: &[u16]) -> bool {
        let Some(rank) = self.rank(place.from) else { return true };
        let twice = now.iter().filter(|&&slot| slot == place.from).count() > 1;
        self.rules.excludes(shard, rank) || (twice && place.to == NOBODY)
    }

    fn reason(&self, old: u16, crowded: &[u16]) -> Reason {
        let node = &self.input.live[usize::from(old)];
        if !node.takes_new {
            Reason::Drain
        } else if crowded.contains(&node.zone) {
            Reason::ZoneRepair
        } else {
            Reason::Balance
        }
    }

    /// The zones that hold too many of the current owners.
    fn crowded_zones(&self, shard: usize, now: &[u16]) -> Vec<u16> {
        let mut zones: Vec<u16> = now
            .iter()
            .filter_map(|&slot| self.rank(slot))
            .filter(|&rank| !self.rules.excludes(shard, rank))
            .filter_map(|rank| self.zone(rank))
            .collect();
        zones.sort_unstable();
        let count = |zone: u16| zones.iter().filter(|&&other| other == zone).count();
        let limit = |zone: u16| usize::from(self.draft.zone_limits[usize::from(zone)]);
        let mut crowded = zones.clone();
        crowded.retain(|&zone| count(zone) > limit(zone));
        crowded.dedup();
        crowded
    }

    /// A live owner whom nobody follows keeps its place, as far as the shard is to have so many owners.
    fn keep_unfollowed(&self, shard: usize, places: &mut [Place], now: &[u16]) {
        let pins = self.rules.pins(shard).len();
        for at in 0..places.len() {
            let filled = places.iter().filter(|place| place.to != NOBODY).count();
            let displaced = pins > 0 && filled >= self.draft.owners;
            if places[at].to == NOBODY && !displaced && !self.is_hole(shard, places[at], now) {
                places[at].to = self.rank(places[at].from).unwrap_or(NOBODY);
            }
        }
    }

    /// Takes back moves past the limit, and tells how many for each reason.
    fn limit(&self, drafts: &mut [(u32, Vec<Place>)]) -> Vec<Unsatisfied> {
        let Some(mut left) = self.input.settings.max_moves else { return Vec::new() };
        let first = self.input.first_shard();
        let split = drafts.partition_point(|(shard, _)| (*shard as usize) < first);
        let mut taken_back = Vec::new();
        for reason in Reason::ALL.into_iter().filter(|reason| reason.is_limited()) {
            let mut back = 0;
            for at in (split..drafts.len()).chain(0..split) {
                for place in drafts[at].1.iter_mut().filter(|p| p.reason == Some(reason)) {
                    if left > 0 {
                        left -= 1;
                        continue;
                    }
                    back += 1;
                    place.to = self.rank(place.from).unwrap_or(NOBODY);
                    place.reason = None;
                }
            }
            if back > 0 {
                taken_back.push(Unsatisfied::MovesLeft { reason, moves: back });
            }
        }
        taken_back
    }

    fn put(&mut self, shard: usize, places: &[Place]) {
        let ordered = self.order(shard, places);
        for (replica, place) in (0_u8..).zip(&ordered) {
            let to = self.input.live.get(usize::from(place.to)).map_or(NOBODY, |node| node.slot);
            let owner = &mut self.owners[shard * self.replicas + usize::from(replica)];
            let before = std::mem::replace(owner, to);
            self.changed |= before != to;
            let last = self.counts.len() - 1;
            self.counts[usize::from(before).min(last)] -= 1;
            self.counts[usize::from(to).min(last)] += 1;
            if let Some(reason) = place.reason {
                let shard = ShardId::new(u32::try_from(shard).unwrap_or(u32::MAX));
                let (from, to) = (Slot::new(place.from), Slot::new(to));
                self.moves.push(Move { shard, replica, reason, from, to });
            }
        }
    }

    /// Pins come first. Where the primary is lost, an owner that has the shard already takes over; a
    /// primary that moves hands over to who follows. Empty places come last.
    fn order(&self, shard: usize, places: &[Place]) -> Vec<Place> {
        let pins = self.rules.pins(shard);
        let lost = places.first().is_some_and(|first| {
            first.to == NOBODY
                || matches!(
                    first.reason,
                    Some(Reason::Orphan | Reason::MinReplicas | Reason::Exclusion)
                )
        });
        let mut ordered = places.to_vec();
        ordered.sort_by_key(|place| {
            let pin = pins.iter().position(|&pin| pin == place.to).unwrap_or(pins.len());
            let unlimited = place.reason.is_some_and(|reason| !reason.is_limited());
            (place.to == NOBODY, pin, lost && unlimited)
        });
        ordered
    }

    /// Shards that share a zone more than necessary.
    fn shared_zones(&self, touched: &[u32]) -> Option<Unsatisfied> {
        let crowded = |&&shard: &&u32| {
            let at = shard as usize * self.replicas;
            !self.crowded_zones(shard as usize, &self.owners[at..at + self.replicas]).is_empty()
        };
        let shards: Vec<u32> = touched.iter().filter(crowded).copied().collect();
        let first = ShardId::new(*shards.first()?);
        Some(Unsatisfied::ZoneShared { shards: shards.len() as u64, first })
    }

    /// Too few nodes, zones or room.
    fn shortages(&self, touched: &[u32]) -> Vec<Unsatisfied> {
        let mut found = Vec::new();
        let replicas = self.input.current.replicas().get();
        let nodes = self.input.live.iter().filter(|node| node.takes_new).count();
        if nodes < self.replicas {
            found.push(Unsatisfied::TooFewNodes { replicas, nodes });
        }
        let zones = self.draft.zone_limits.iter().filter(|&&limit| limit > 0).count();
        if zones < self.replicas && self.input.zones > 1 {
            found.push(Unsatisfied::TooFewZones { replicas, zones });
        }
        let (mut places, mut first) = (0, None);
        for &shard in touched {
            let at = shard as usize * self.replicas;
            let owners = &self.owners[at..at + self.replicas];
            let filled = owners.iter().filter(|&&slot| slot != NOBODY).count();
            if filled < self.draft.owners {
                places += (self.draft.owners - filled) as u64;
                first.get_or_insert(ShardId::new(shard));
            }
        }
        found.extend(first.map(|first| Unsatisfied::Unplaced { places, first }));
        found
    }

    fn not_drained(&self, touched: &[u32]) -> Vec<Unsatisfied> {
        let mut kept = vec![0_u64; self.input.live.len()];
        for &shard in touched {
            let at = shard as usize * self.replicas;
            for rank in
                self.owners[at..at + self.replicas].iter().filter_map(|&s| self.input.rank(s))
            {
                kept[rank] += u64::from(!self.input.live[rank].takes_new);
            }
        }
        let nodes = self.input.live.iter().zip(kept).filter(|(_, places)| *places > 0);
        nodes
            .filter_map(|(node, places)| {
                let node = self.input.id(node.slot)?.clone();
                Some(Unsatisfied::NotDrained { node, places })
            })
            .collect()
    }
}
