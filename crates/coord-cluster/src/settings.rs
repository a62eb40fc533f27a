//! The settings of the runtime, validated together.

mod layers;

use std::sync::Arc;
use std::time::Duration;

use coord_core::kit::duration::{self, show};
use coord_core::session::default_margin;
use coord_core::{
    Error, NODES_MAX, ReplicationFactor, Result, SHARDS_MAX, ShardCount, TableHeader, Ttl,
};
use coord_placement::{
    Balanced, ConsistentHash, LoadAware, PlacementStrategy, Rendezvous, VIRTUAL_NODES_DEFAULT,
    VIRTUAL_NODES_MAX,
};
use serde::{Deserialize, Serialize};

use self::layers::{merge, put, scalar};
use crate::downing::{DowningSettings, Strategy};
use crate::poison::PoisonSettings;

/// What environment variables begin with: `COORD_CLUSTER_NODE_TTL=30s` sets `node_ttl`.
pub const ENV_PREFIX: &str = "COORD_CLUSTER_";
/// The most events that wait for a slow listener.
pub const EVENT_BUFFER_MAX: usize = 65_536;
/// The shortest interval at which the store may be asked for the same thing again and again.
const INTERVAL_MIN: Duration = Duration::from_millis(50);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(24 * 3_600);
/// The least share of nodes at which the mass failure brake may hold.
const BRAKE_MIN: f64 = 0.01;
/// The most crashes after which a shard is quarantined.
const POISON_CRASHES_MAX: u32 = 100;

/// The settings of the runtime.
///
/// They come from code, a TOML file or environment variables, in that order of strength: load the
/// weaker ones first ([`load`](Self::load)) and set fields afterwards. Durations are written as `500ms`,
/// `10s`, `5m` or `1h`. All of them are checked together at the start of a [`Cluster`](crate::Cluster).
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// TTL of the leader's lease, 1 s to 24 h; 10 s.
    #[serde(with = "duration")]
    pub leader_ttl: Duration,
    /// How often the leader renews it; 3 s, at least 50 ms.
    #[serde(with = "duration")]
    pub leader_renew: Duration,
    /// How often a candidate tries without being woken by the watch; 2 s, at least 50 ms.
    #[serde(with = "duration")]
    pub leader_retry: Duration,
    /// TTL of the leases that gate sharding and singletons, 1 s to 24 h; 30 s.
    #[serde(with = "duration")]
    pub sharding_ttl: Duration,
    /// How often they are tried for without being woken by the watch; 5 s, at least 50 ms.
    #[serde(with = "duration")]
    pub sharding_retry: Duration,
    /// How often a node renews its registration; 30 s, at least 50 ms and at most a third of `node_ttl`.
    #[serde(with = "duration")]
    pub heartbeat: Duration,
    /// TTL of a registration, 1 s to 24 h; 90 s.
    #[serde(with = "duration")]
    pub node_ttl: Duration,
    /// Time limit of one request to the store; 2 s, at least 50 ms and below a third of each TTL.
    #[serde(with = "duration")]
    pub request_timeout: Duration,
    /// How long a change of the topology waits for others, so that a burst of joins and failures makes
    /// one rebalance, at most 1 h; 500 ms.
    #[serde(with = "duration")]
    pub rebalance_delay: Duration,
    /// How often the balance is looked at without a change, 1 s to 24 h; 5 min.
    #[serde(with = "duration")]
    pub rebalance_check: Duration,
    /// After this, a failed node is forgotten, 1 s to 30 days; 10 min.
    #[serde(with = "duration")]
    pub remove_after: Duration,
    /// How long after its expiry a node that comes back under its id keeps its shards, at most `remove_after`; 0.
    #[serde(with = "duration")]
    pub restart_grace: Duration,
    /// The first assignment waits for this many active nodes, 1 to 65,534; 1.
    pub min_members: u32,
    /// The share of nodes that may vanish inside one node TTL before no more of them are declared failed,
    /// 0.01 to 1; 0.5. It applies from 5 nodes on, and to each node for three node TTLs at the most, or until
    /// [`Command::MarkNodeFailed`](crate::Command::MarkNodeFailed) gives it up at once.
    pub mass_failure_brake: f64,
    /// After so many crashes of its hosts in a row a shard is quarantined, 2 to 100, or 0 for never; 3.
    pub poison_crashes: u32,
    /// How long after the start of a shard a crash of its host still speaks against it, 1 s to 1 h; 10 s.
    #[serde(with = "duration")]
    pub poison_soon: Duration,
    /// Within which time those crashes come, `poison_soon` to 30 days; 1 h.
    #[serde(with = "duration")]
    pub poison_window: Duration,
    /// After this a quarantined shard is released, 1 s to 30 days; 6 h.
    #[serde(with = "duration")]
    pub poison_release: Duration,
    /// Shards of a table for which the code does not say it ([`Table`](crate::Table)), 1 to 2^24; 1024.
    pub shards: ShardCount,
    /// Owners of each shard of such a table, 1 to 7; 1.
    pub replicas: ReplicationFactor,
    /// What places the shards of such a table; balanced.
    pub strategy: Strategies,
    /// Virtual nodes of a node on the ring where such a table is placed by one, 1 to 4096; 150.
    pub virtual_nodes: u16,
    /// How many shards of a table may be in motion at once, 1 to 2^24; 10 % of them, at least 1, where it is unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub motions_max: Option<u32>,
    /// After this, a handoff is reported as stuck, and the start or the stop of a shard as slow, 1 s to 24 h;
    /// 60 s.
    #[serde(with = "duration")]
    pub handoff_timeout: Duration,
    /// How long a node takes at most to stop its shards, at least 50 ms; a sixth of the node TTL where it is
    /// unset.
    #[serde(with = "duration::optional", skip_serializing_if = "Option::is_none")]
    pub stop_budget: Option<Duration>,
    /// Whether the process ends where a shard still runs after the deadline of its registration although
    /// it was aborted, whatever of it runs, and also where it keeps all threads of the runtime busy; false. For
    /// work that can neither be aborted nor looks at its fence.
    pub exit_at_deadline: bool,
    /// Whether this node may be a candidate for election, if it has a candidate slot; true.
    pub candidate: bool,
    /// How many nodes are candidates for election and watch the registrations in a cluster of more, at least 3,
    /// and 0 for all; 5. The leader gives the candidate slots, in different zones as far as possible, and
    /// replaces a node that goes. If no node has led for a leader TTL, all are candidates.
    pub candidates: u32,
    /// A leader hands over to a candidate of the newest version, if that is newer than its own, once it has
    /// been active for this long; never where it is unset. So a rolling update changes leaders once. Versions
    /// ([`NodeInfo::version`](coord_core::NodeInfo::version)) compare by their numbers, `1.9` before `1.10`
    /// and `2.0-rc.1` before `2.0`; nodes without one are never preferred.
    ///
    /// Not by default: a newer version is not a better one while an update may still be rolled back.
    #[serde(with = "duration::optional", skip_serializing_if = "Option::is_none")]
    pub newer_leads_after: Option<Duration>,
    /// How many events wait for a slow listener before it misses some, 1 to 65,536; 1024.
    pub event_buffer: usize,
    /// Which side of a partition goes on; nothing is decided, and no node is probed, where it is unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downing: Option<DowningSettings>,
}

/// The strategies that can be chosen by a setting.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategies {
    /// [`Balanced`]: even shares with the fewest moves.
    #[default]
    Balanced,
    /// [`ConsistentHash`]: a ring with virtual nodes.
    ConsistentHash,
    /// [`Rendezvous`]: the highest random weight.
    Rendezvous,
    /// [`LoadAware`]: by how busy the shards are.
    LoadAware,
}

impl Default for Settings {
    fn default() -> Self {
        const MINUTE: Duration = Duration::from_secs(60);
        Self {
            leader_ttl: Duration::from_secs(10),
            leader_renew: Duration::from_secs(3),
            leader_retry: Duration::from_secs(2),
            sharding_ttl: Duration::from_secs(30),
            sharding_retry: Duration::from_secs(5),
            heartbeat: Duration::from_secs(30),
            node_ttl: Duration::from_secs(90),
            request_timeout: Duration::from_secs(2),
            rebalance_delay: Duration::from_millis(500),
            rebalance_check: 5 * MINUTE,
            remove_after: 10 * MINUTE,
            restart_grace: Duration::ZERO,
            min_members: 1,
            mass_failure_brake: 0.5,
            poison_crashes: 3,
            poison_soon: Duration::from_secs(10),
            poison_window: 60 * MINUTE,
            poison_release: 360 * MINUTE,
            shards: ShardCount::default(),
            replicas: ReplicationFactor::default(),
            strategy: Strategies::Balanced,
            virtual_nodes: VIRTUAL_NODES_DEFAULT,
            motions_max: None,
            handoff_timeout: MINUTE,
            stop_budget: None,
            exit_at_deadline: false,
            candidate: true,
            candidates: 5,
            newer_leads_after: None,
            event_buffer: 1024,
            downing: None,
        }
    }
}

impl Settings {
    /// Failures are noticed within 10 s: heartbeat 3 s, node TTL 10 s.
    #[must_use]
    pub fn fast() -> Self {
        Self {
            heartbeat: Duration::from_secs(3),
            node_ttl: Duration::from_secs(10),
            ..Self::default()
        }
    }

    /// For demonstrations and tests in one process: TTLs of 2 s. A real store wants longer ones.
    #[must_use]
    pub fn demo() -> Self {
        Self {
            leader_ttl: Duration::from_secs(2),
            leader_renew: Duration::from_millis(600),
            leader_retry: Duration::from_millis(400),
            heartbeat: Duration::from_millis(600),
            node_ttl: Duration::from_secs(2),
            request_timeout: Duration::from_millis(500),
            rebalance_delay: Duration::from_millis(200),
            ..Self::default()
        }
    }

    /// The defaults, changed by those of the variables that begin with [`ENV_PREFIX`], changed by the
    /// TOML text.
    ///
    /// ```
    /// # use coord_cluster::Settings;
    /// let variables = [("COORD_CLUSTER_NODE_TTL", "60s"), ("COORD_CLUSTER_MIN_MEMBERS", "3")];
    /// let settings = Settings::load(variables, "node_ttl = '30s'\nheartbeat = '10s'").unwrap();
    /// assert_eq!(settings.node_ttl.as_secs(), 30);
    /// assert_eq!(settings.min_members, 3);
    /// ```
    ///
    /// # Errors
    /// `Invalid`, naming the unknown setting or the value that does not fit.
    pub fn load<K: AsRef<str>, V: AsRef<str>>(
        variables: impl IntoIterator<Item = (K, V)>,
        toml: &str,
    ) -> Result<Self> {
        Self::default().with_variables(variables)?.with_toml(toml)
    }

    /// Changed by the variables that begin with [`ENV_PREFIX`]; others are left alone. Those of downing go
    /// on with `DOWNING_`: `COORD_CLUSTER_DOWNING_STABLE_AFTER=7s`, and for the strategy
    /// `COORD_CLUSTER_DOWNING_STRATEGY=static-quorum` with `COORD_CLUSTER_DOWNING_QUORUM=3`.
    ///
    /// # Errors
    /// `Invalid`, naming the unknown variable or the value that does not fit.
    pub fn with_variables<K: AsRef<str>, V: AsRef<str>>(
        self,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self> {
        let mut layer = toml::Table::new();
        for (name, text) in variables {
            if let Some(key) = name.as_ref().strip_prefix(ENV_PREFIX) {
                put(&mut layer, &key.to_ascii_lowercase(), scalar(text.as_ref()));
            }
        }
        self.with_layer(layer)
    }

    /// Changed by a TOML text that holds settings at its top level.
    ///
    /// # Errors
    /// `Invalid` for malformed TOML, an unknown setting or a value that does not fit.
    pub fn with_toml(self, text: &str) -> Result<Self> {
        let layer = text.parse::<toml::Table>().map_err(|e| bad_settings(&e))?;
        self.with_layer(layer)
    }

    fn with_layer(self, layer: toml::Table) -> Result<Self> {
        let mut all = toml::Table::try_from(&self).map_err(|e| bad_settings(&e))?;
        merge(&mut all, layer);
        all.try_into().map_err(|e| bad_settings(&e))
    }

    /// The header of a table whose header is not given in code.
    #[must_use]
    pub fn header(&self) -> TableHeader {
        TableHeader::new(self.shards).with_replicas(self.replicas)
    }

    /// What places the shards of a table for which that is not given in code.
    #[must_use]
    pub fn placement_strategy(&self) -> Arc<dyn PlacementStrategy> {
        match self.strategy {
            Strategies::Balanced => Arc::new(Balanced::default()),
            Strategies::ConsistentHash => {
                Arc::new(ConsistentHash::new().with_virtual_nodes(self.virtual_nodes))
            }
            Strategies::Rendezvous => Arc::new(Rendezvous::default()),
            Strategies::LoadAware => Arc::new(LoadAware::default()),
        }
    }

    /// How long a node takes at most to stop its shards.
    #[must_use]
    pub fn stop_budget(&self) -> Duration {
        self.stop_budget.unwrap_or(self.node_ttl / 6)
    }

    /// When shards are quarantined, if they ever are.
    pub(crate) fn poison(&self) -> Option<PoisonSettings> {
        (self.poison_crashes != 0).then(|| PoisonSettings {
            crashes: self.poison_crashes,
            soon: self.poison_soon,
            window: self.poison_window,
            release_after: self.poison_release,
            ..PoisonSettings::default()
        })
    }

    /// How long after it was aborted a shard counts as running on: half of the margin of the node TTL.
    pub(crate) fn grace(&self) -> Duration {
        default_margin(self.node_ttl) / 2
    }

    /// Checks all settings together.
    ///
    /// # Errors
    /// `Invalid`, one error that names every contradiction.
    pub fn validate(&self) -> Result<()> {
        let mut faults = Vec::new();
        let mut must = |good: bool, why: String| {
            if !good {
                faults.push(why);
            }
        };
        self.check_limits(&mut must);
        self.check_leases(&mut must);
        self.check_membership(&mut must);
        self.check_balance(&mut must);
        self.check_downing(&mut must);
        if faults.is_empty() {
            return Ok(());
        }
        Err(Error::invalid("validate settings", faults.join("; ")))
    }

    fn check_leases(&self, must: &mut impl FnMut(bool, String)) {
        let ttls = [
            ("leader_ttl", self.leader_ttl),
            ("sharding_ttl", self.sharding_ttl),
            ("node_ttl", self.node_ttl),
        ];
        for (name, ttl) in ttls {
            must(Ttl::new(ttl).is_ok(), format!("{name} {ttl:?} is not 1 s to 24 h"));
            let timeout = self.request_timeout;
            must(
                timeout < ttl / 3,
                format!("request_timeout {timeout:?} is not below a third of {name} {ttl:?}"),
            );
        }
        // A renewal may come a tenth late, and a second one has to fit in when the first one hangs.
        let second = self
            .leader_renew
            .saturating_mul(11)
            .checked_div(10)
            .unwrap_or_default()
            .saturating_add(self.request_timeout)
            .saturating_add(self.leader_ttl / 30);
        let usable = self.leader_ttl.saturating_sub(default_margin(self.leader_ttl));
        must(
            second < usable,
            format!(
                "leader_renew {:?} and a tenth, request_timeout {:?} and a pause are not below \
                 leader_ttl less its margin, {usable:?}",
                self.leader_renew, self.request_timeout
            ),
        );
        if let Some(after) = self.newer_leads_after {
            let ttl = self.leader_ttl;
            must(after >= ttl, format!("newer_leads_after {after:?} is below leader_ttl {ttl:?}"));
        }
        must(
            self.leader_retry < self.leader_ttl,
            format!(
                "leader_retry {:?} is not below leader_ttl {:?}",
                self.leader_retry, self.leader_ttl
            ),
        );
        must(
            self.sharding_retry < self.sharding_ttl,
            format!(
                "sharding_retry {:?} is not below sharding_ttl {:?}",
                self.sharding_retry, self.sharding_ttl
            ),
        );
    }

    fn check_membership(&self, must: &mut impl FnMut(bool, String)) {
        must(
            self.heartbeat <= self.node_ttl / 3,
            format!(
                "heartbeat {:?} is above a third of node_ttl {:?}",
                self.heartbeat, self.node_ttl
            ),
        );
        let busy =
            self.heartbeat.saturating_add(self.request_timeout).saturating_add(self.stop_budget());
        let usable = self.node_ttl.saturating_sub(default_margin(self.node_ttl));
        must(
            busy < usable,
            format!(
                "heartbeat {:?} + request_timeout {:?} + stop_budget {:?} is not below node_ttl less \
                 its margin, {usable:?}",
                self.heartbeat,
                self.request_timeout,
                self.stop_budget()
            ),
        );
        must(
            self.poison_soon <= self.poison_window,
            format!(
                "poison_soon {:?} is above poison_window {:?}: no crash but the last would count",
                self.poison_soon, self.poison_window
            ),
        );
        must(
            self.restart_grace <= self.remove_after,
            format!(
                "restart_grace {:?} is above remove_after {:?}",
                self.restart_grace, self.remove_after
            ),
        );
    }

    fn check_balance(&self, must: &mut impl FnMut(bool, String)) {
        must(
            self.rebalance_delay < self.rebalance_check,
            format!(
                "rebalance_delay {:?} is not below rebalance_check {:?}",
                self.rebalance_delay, self.rebalance_check
            ),
        );
        must(
            self.stop_budget() < self.handoff_timeout,
            format!(
                "stop_budget {:?} is not below handoff_timeout {:?}",
                self.stop_budget(),
                self.handoff_timeout
            ),
        );
    }

    /// Each setting by itself has a least and a most.
    fn check_limits(&self, must: &mut impl FnMut(bool, String)) {
        let durations = [
            ("leader_renew", Some(self.leader_renew), INTERVAL_MIN, DAY),
            ("leader_retry", Some(self.leader_retry), INTERVAL_MIN, DAY),
            ("sharding_retry", Some(self.sharding_retry), INTERVAL_MIN, DAY),
            ("heartbeat", Some(self.heartbeat), INTERVAL_MIN, DAY),
            ("request_timeout", Some(self.request_timeout), INTERVAL_MIN, DAY),
            ("rebalance_delay", Some(self.rebalance_delay), Duration::ZERO, HOUR),
            ("rebalance_check", Some(self.rebalance_check), SECOND, DAY),
            ("remove_after", Some(self.remove_after), SECOND, 30 * DAY),
            ("restart_grace", Some(self.restart_grace), Duration::ZERO, 30 * DAY),
            ("poison_soon", Some(self.poison_soon), SECOND, HOUR),
            ("poison_window", Some(self.poison_window), SECOND, 30 * DAY),
            ("poison_release", Some(self.poison_release), SECOND, 30 * DAY),
            ("handoff_timeout", Some(self.handoff_timeout), SECOND, DAY),
            ("stop_budget", self.stop_budget, INTERVAL_MIN, DAY),
            ("newer_leads_after", self.newer_leads_after, SECOND, 30 * DAY),
        ];
        for (name, duration, least, most) in durations {
            let Some(duration) = duration else { continue };
            must(
                (least..=most).contains(&duration),
                format!("{name} {duration:?} is not {} to {}", show(least), show(most)),
            );
        }
        let nodes_max = u64::try_from(NODES_MAX).unwrap_or(u64::MAX);
        let shards_max = u64::from(SHARDS_MAX);
        let buffer = u64::try_from(self.event_buffer).unwrap_or(u64::MAX);
        let buffer_max = u64::try_from(EVENT_BUFFER_MAX).unwrap_or(u64::MAX);
        let numbers = [
            ("min_members", self.min_members.into(), 1, nodes_max),
            ("virtual_nodes", self.virtual_nodes.into(), 1, VIRTUAL_NODES_MAX.into()),
            ("motions_max", self.motions_max.unwrap_or(1).into(), 1, shards_max),
            ("event_buffer", buffer, 1, buffer_max),
        ];
        for (name, number, least, most) in numbers {
            must(
                (least..=most).contains(&number),
                format!("{name} {number} is not {least} to {most}"),
            );
        }
        let candidates = self.candidates;
        must(
            candidates == 0 || (3..=nodes_max).contains(&candidates.into()),
            format!("candidates is {candidates}; it is 3 to {nodes_max}, or 0 for all"),
        );
        let crashes = self.poison_crashes;
        must(
            crashes == 0 || (2..=POISON_CRASHES_MAX).contains(&crashes),
            format!(
                "poison_crashes is {crashes}; one crash is no evidence against a shard, so it is 2 to \
                 {POISON_CRASHES_MAX}, or 0 for never"
            ),
        );
        let brake = self.mass_failure_brake;
        must(
            (BRAKE_MIN..=1.0).contains(&brake),
            format!("mass_failure_brake {brake} is not {BRAKE_MIN} to 1"),
        );
    }
}

impl Settings {
    fn check_downing(&self, must: &mut impl FnMut(bool, String)) {
        let Some(downing) = &self.downing else { return };
        for fault in downing.faults() {
            must(false, format!("downing: {fault}"));
        }
        let Strategy::LeaseMajority { patience, release_after, .. } = downing.strategy else {
            return;
        };
        // It is the TTL of the lease: a node that wins and dies keeps the other side from winning after it.
        must(
            Ttl::new(release_after).is_ok(),
            format!("downing: release_after {release_after:?} is not 1 s to 24 h"),
        );
        must(
            self.request_timeout < release_after / 3 && self.request_timeout < patience,
            format!(
                "downing: request_timeout {:?} is not below patience {patience:?} and a third of \
                 release_after {release_after:?}",
                self.request_timeout
            ),
        );
    }
}

fn bad_settings(error: &dyn std::error::Error) -> Error {
    Error::invalid("read settings", error.to_string().trim_end().replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use coord_placement::{Assignment, Candidate, PlanSettings};

    use super::*;
    use crate::downing::Detecting;

    #[test]
    fn the_presets_are_valid() {
        for settings in [Settings::default(), Settings::fast(), Settings::demo()] {
            settings.validate().expect("valid");
        }
    }

    #[test]
    fn one_error_names_every_contradiction() {
        let settings = Settings {
            leader_renew: Duration::from_secs(10),
            heartbeat: Duration::from_secs(40),
            min_members: 0,
            mass_failure_brake: f64::NAN,
            poison_crashes: 1,
            poison_soon: Duration::ZERO,
            node_ttl: Duration::from_millis(500),
            virtual_nodes: 0,
            event_buffer: 0,
            ..Settings::default()
        };
        let text = settings.validate().expect_err("contradictions").to_string();
        for name in [
            "leader_renew",
            "heartbeat 40s",
            "min_members",
            "mass_failure_brake",
            "poison_crashes is 1",
            "poison_soon 0ns is not 1s to 1h",
            "node_ttl 500ms is not 1 s",
            "request_timeout 2s is not below a third of node_ttl",
            "stop_budget",
            "virtual_nodes",
            "event_buffer",
        ] {
            assert!(text.contains(name), "{name} is missing in {text}");
        }
    }

    #[test]
    fn each_setting_has_a_least_and_a_most() {
        const AGES: Duration = Duration::MAX;
        let ms = Duration::from_millis;
        type Set = fn(&mut Settings, Duration);
        let durations: [(&str, Set, Duration); 15] = [
            ("leader_renew", |s, d| s.leader_renew = d, ms(49)),
            ("leader_retry", |s, d| s.leader_retry = d, ms(49)),
            ("sharding_retry", |s, d| s.sharding_retry = d, ms(49)),
            ("heartbeat", |s, d| s.heartbeat = d, ms(1)),
            ("request_timeout", |s, d| s.request_timeout = d, ms(1)),
            ("rebalance_delay", |s, d| s.rebalance_delay = d, AGES / 5 + ms(1)),
            ("rebalance_check", |s, d| s.rebalance_check = d, ms(999)),
            ("remove_after", |s, d| s.remove_after = d, ms(1)),
            ("restart_grace", |s, d| s.restart_grace = d, 31 * DAY),
            ("poison_soon", |s, d| s.poison_soon = d, ms(1)),
            ("poison_window", |s, d| s.poison_window = d, ms(1)),
            ("poison_release", |s, d| s.poison_release = d, Duration::ZERO),
            ("handoff_timeout", |s, d| s.handoff_timeout = d, Duration::ZERO),
            ("stop_budget", |s, d| s.stop_budget = Some(d), Duration::ZERO),
            ("newer_leads_after", |s, d| s.newer_leads_after = Some(d), Duration::ZERO),
        ];
        for (name, set, bad) in durations {
            for bad in [bad, AGES] {
                let mut settings = Settings::default();
                set(&mut settings, bad);
                let error = settings.validate().expect_err(name).to_string();
                assert!(error.contains(&format!("{name} {bad:?} is not ")), "{name}: {error}");
            }
        }
        type Count = fn(&mut Settings, u32);
        let counts: [(&str, Count, &[u32]); 6] = [
            ("min_members", |s, n| s.min_members = n, &[0, 65_535]),
            ("virtual_nodes", |s, n| s.virtual_nodes = n.try_into().expect("small"), &[0, 4097]),
            ("motions_max", |s, n| s.motions_max = Some(n), &[0, (1 << 24) + 1]),
            ("candidates", |s, n| s.candidates = n, &[1, 2, 65_535]),
            ("poison_crashes", |s, n| s.poison_crashes = n, &[1, 101]),
            ("event_buffer", |s, n| s.event_buffer = n as usize, &[0, 65_537]),
        ];
        for (name, set, all) in counts {
            for bad in all {
                let mut settings = Settings::default();
                set(&mut settings, *bad);
                let error = settings.validate().expect_err(name).to_string();
                let named = error.contains(name) && error.contains(&bad.to_string());
                assert!(named, "{name} {bad}: {error}");
            }
        }
        for bad in [1e-300, 0.0, -1.0, 1.01, f64::NAN, f64::INFINITY] {
            let settings = Settings { mass_failure_brake: bad, ..Settings::default() };
            let error = settings.validate().expect_err("a bad brake").to_string();
            assert!(error.contains("mass_failure_brake"), "{error}");
        }
        let mut settings = Settings { poison_window: 5 * SECOND, ..Settings::default() };
        let error = settings.validate().expect_err("a contradiction").to_string();
        assert!(error.contains("poison_soon 10s is above poison_window 5s"), "{error}");
        settings.poison_soon = 5 * SECOND;
        settings.validate().expect("valid");
    }

    #[test]
    fn no_duration_is_too_long_to_be_judged() {
        let ages = Duration::MAX;
        let downing = DowningSettings::default().with_stable_after(ages).with_probe_every(ages);
        let settings = Settings {
            leader_ttl: ages,
            leader_renew: ages,
            sharding_ttl: ages,
            node_ttl: ages,
            heartbeat: ages,
            request_timeout: ages,
            stop_budget: Some(ages),
            downing: Some(downing),
            ..Settings::default()
        };
        let error = settings.validate().expect_err("far too long").to_string();
        assert!(error.contains("downing: stable_after"), "{error}");
    }

    #[test]
    fn the_settings_of_tables_place_them() {
        let plan = |text: &str| {
            let settings = Settings::default().with_toml(text).expect("reads");
            settings.validate().expect("valid");
            let node = |n| coord_core::NodeId::new(format!("n{n}")).expect("a name");
            let nodes: Vec<_> = (1..=5).map(|n| Candidate::new(node(n))).collect();
            let header = settings.header();
            let none = Assignment::empty(header.shards, header.replicas);
            let strategy = settings.placement_strategy();
            let plan = strategy.plan(&none, &nodes, &PlanSettings::default()).expect("a plan");
            plan.into_next().raw_owners().to_vec()
        };
        assert_eq!(plan("").len(), 1024);
        assert_eq!(plan("shards = 64").len(), 64);
        assert_eq!(plan("replicas = 3").len(), 3 * 1024);
        let ring = plan("strategy = 'consistent-hash'");
        assert_ne!(ring, plan(""));
        assert_eq!(ring, plan("strategy = 'consistent-hash'\nvirtual_nodes = 150"));
        assert_ne!(ring, plan("strategy = 'consistent-hash'\nvirtual_nodes = 10"));
        assert_ne!(ring, plan("strategy = 'rendezvous'"));
        let error = Settings::default().with_toml("strategy = 'best'").expect_err("unknown");
        assert!(error.to_string().contains("best"), "{error}");
    }

    #[test]
    fn a_file_is_stronger_than_variables_and_code_than_both() {
        let variables = [("COORD_CLUSTER_HEARTBEAT", "5s"), ("COORD_CLUSTER_SHARDS", "64")];
        let mut settings =
            Settings::load(variables, "heartbeat = '4s'\nmass_failure_brake = 1.0").expect("loads");
        assert_eq!(settings.heartbeat, Duration::from_secs(4));
        assert_eq!(settings.shards.get(), 64);
        settings.heartbeat = Duration::from_secs(3);
        settings.validate().expect("valid");
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let error = Settings::load([("COORD_CLUSTER_NODE_TLL", "1s")], "").expect_err("unknown");
        assert!(error.to_string().contains("node_tll"), "{error}");
        let error = Settings::default().with_toml("node_ttl = 'soon'").expect_err("malformed");
        assert!(error.to_string().contains("soon"), "{error}");
        assert!(Settings::default().with_toml("shards = 0").is_err());
        assert!(Settings::default().with_toml("shards = ").is_err());
        assert!(Settings::load([("OTHER", "x")], "").is_ok());
    }

    #[test]
    fn downing_is_off_until_it_is_chosen_in_any_of_the_three_places() {
        assert_eq!(Settings::default().downing, None);
        let chosen = Settings::default().with_toml("[downing]").expect("reads");
        assert_eq!(chosen.downing, Some(DowningSettings::default()));

        let variables = [
            ("COORD_CLUSTER_DOWNING_STRATEGY", "static-quorum"),
            ("COORD_CLUSTER_DOWNING_QUORUM", "3"),
            ("COORD_CLUSTER_DOWNING_ROLE", "core"),
            ("COORD_CLUSTER_DOWNING_DETECTOR", "phi-accrual"),
            ("COORD_CLUSTER_DOWNING_THRESHOLD", "10"),
        ];
        let from_variables = Settings::load(variables, "").expect("reads").downing.expect("chosen");
        assert_eq!(from_variables.strategy, Strategy::StaticQuorum { quorum: 3 });
        assert_eq!(from_variables.detector, Detecting::PhiAccrual { threshold: 10.0 });
        // The file is stronger: another strategy replaces the first with its fields, the rest stays.
        let text = "[downing]\nstable_after = '7s'\nstrategy = { kind = 'lease-majority' }";
        let both = Settings::load(variables, text).expect("reads");
        both.validate().expect("valid");
        let both = both.downing.expect("chosen");
        assert_eq!(both.strategy, Strategy::lease_majority());
        assert_eq!(both.stable_after, Duration::from_secs(7));
        assert_eq!(both.role, from_variables.role);
        for bad in ["COORD_CLUSTER_DOWNING_QUORUMS", "COORD_CLUSTER_DOWNING"] {
            let error = Settings::load([(bad, "3")], "").expect_err(bad);
            assert!(error.to_string().contains("downing") || error.to_string().contains("quorums"));
        }
    }

    #[test]
    fn contradictions_of_downing_are_named_with_the_others() {
        let downing = DowningSettings::new(Strategy::LeaseMajority {
            minority_delay: Duration::from_secs(2),
            patience: Duration::from_millis(1500),
            release_after: Duration::from_secs(6),
        });
        let settings = Settings { min_members: 0, downing: Some(downing), ..Settings::default() };
        let text = settings.validate().expect_err("contradictions").to_string();
        for part in
            ["min_members", "downing: release_after 6s is not above", "downing: request_timeout"]
        {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn settings_survive_a_round_trip() {
        let downing = DowningSettings::new(Strategy::keep_oldest());
        let settings = Settings {
            stop_budget: Some(Duration::from_secs(9)),
            downing: Some(downing),
            ..Settings::fast()
        };
        let text = toml::to_string(&settings).expect("writes");
        assert_eq!(Settings::default().with_toml(&text).expect("reads"), settings);
    }
}
