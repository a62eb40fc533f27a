//! Pins and exclusions, checked against the live nodes.

use std::collections::BTreeMap;

use coord_core::{NodeId, ShardId};

use crate::input::Input;
use crate::plan::{PinProblem, Unsatisfied};

/// What is demanded of single shards, by rank. Both maps are empty in nearly every plan.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    pins: BTreeMap<usize, Vec<u16>>,
    exclusions: BTreeMap<usize, Vec<u16>>,
    /// How many pins each rank has.
    pub(crate) pinned: Vec<u64>,
}

impl Rules {
    /// Takes over every pin that can be followed, and tells of the others. Each shard is to have
    /// `owners` owners.
    pub(crate) fn new(input: &Input<'_>, owners: usize) -> (Self, Vec<Unsatisfied>) {
        let mut rules = Self { pinned: vec![0; input.live.len()], ..Self::default() };
        let settings = input.settings;
        let mut problems = Vec::new();
        if settings.pins.is_empty() && settings.exclusions.is_empty() {
            return (rules, problems);
        }
        let ranks: BTreeMap<&NodeId, u16> = (0..)
            .zip(&input.live)
            .filter_map(|(rank, node)| Some((input.id(node.slot)?, rank)))
            .collect();
        for (shard, nodes) in &settings.exclusions {
            let excluded = nodes.iter().filter_map(|id| ranks.get(id).copied()).collect();
            rules.exclusions.insert(shard.index(), excluded);
        }
        for (&shard, nodes) in &settings.pins {
            for node in nodes {
                let checked = match ranks.get(node) {
                    _ if !input.current.shards().contains(shard) => Err(PinProblem::UnknownShard),
                    None => Err(PinProblem::NotLive),
                    Some(&rank) => rules.check(input, shard, rank, owners).map(|()| rank),
                };
                match checked {
                    Ok(rank) => {
                        rules.pins.entry(shard.index()).or_default().push(rank);
                        rules.pinned[usize::from(rank)] += 1;
                    }
                    Err(problem) => {
                        problems.push(Unsatisfied::Pin { shard, node: node.clone(), problem });
                    }
                }
            }
        }
        (rules, problems)
    }

    fn check(
        &self,
        input: &Input<'_>,
        shard: ShardId,
        rank: u16,
        owners: usize,
    ) -> Result<(), PinProblem> {
        let node = &input.live[usize::from(rank)];
        let pins = self.pins(shard.index());
        if !node.takes_new {
            Err(PinProblem::Draining)
        } else if self.excludes(shard.index(), rank) {
            Err(PinProblem::Excluded)
        } else if pins.len() >= owners || pins.contains(&rank) {
            Err(PinProblem::TooMany)
        } else if self.pinned[usize::from(rank)] >= u64::from(node.max_shards) {
            Err(PinProblem::Full)
        } else {
            Ok(())
        }
    }

    /// Whether nothing at all is demanded.
    pub(crate) fn is_empty(&self) -> bool {
        self.pins.is_empty() && self.exclusions.is_empty()
    }

    /// The ranks that a shard is pinned to.
    pub(crate) fn pins(&self, shard: usize) -> &[u16] {
        self.pins.get(&shard).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn is_pinned(&self, shard: usize, rank: u16) -> bool {
        self.pins(shard).contains(&rank)
    }

    pub(crate) fn excludes(&self, shard: usize, rank: u16) -> bool {
        self.exclusions.get(&shard).is_some_and(|excluded| excluded.contains(&rank))
    }
}
