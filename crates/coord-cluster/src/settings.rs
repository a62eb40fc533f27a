//! The settings of the runtime, validated together.

mod layers;

use std::time::Duration;

use coord_core::{Error, ReplicationFactor, Result, ShardCount, TableHeader, Ttl};
use serde::{Deserialize, Serialize};

use self::layers::{merge, put, scalar};
use crate::downing::{DowningSettings, Strategy};
use crate::duration;
use crate::poison::PoisonSettings;

/// What environment variables begin with: `COORD_CLUSTER_NODE_TTL=30s` sets `node_ttl`.
pub const ENV_PREFIX: &str = "COORD_CLUSTER_";
/// The most events that wait for a slow listener.
pub const EVENT_BUFFER_MAX: usize = 65_536;

/// The settings of the runtime.
///
/// They come from code, a TOML file or environment variables, in that order of strength: load the
/// weaker ones first ([`load`](Self::load)) and set fields afterwards. Durations are written as `500ms`,
/// `10s`, `5m` or `1h`. All of them are checked together at the start of a [`Cluster`](crate::Cluster).
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// TTL of the leader's lease; 10 s.
    #[serde(with = "duration")]
    pub leader_ttl: Duration,
    /// How often the leader renews it; 3 s.
    #[serde(with = "duration")]
    pub leader_renew: Duration,
    /// How often a candidate tries without being woken by the watch; 2 s.
    #[serde(with = "duration")]
    pub leader_retry: Duration,
    /// TTL of the leases that gate sharding and singletons; 30 s.
    #[serde(with = "duration")]
    pub sharding_ttl: Duration,
    /// How often they are tried for without being woken by the watch; 5 s.
    #[serde(with = "duration")]
    pub sharding_retry: Duration,
    /// How often a node renews its registration; 30 s.
    #[serde(with = "duration")]
    pub heartbeat: Duration,
    /// TTL of a registration; 90 s.
    #[serde(with = "duration")]
    pub node_ttl: Duration,
    /// Time limit of one request to the store; 2 s.
    #[serde(with = "duration")]
    pub request_timeout: Duration,
    /// How long a change of the topology waits for others, so that a burst of joins and failures makes
    /// one rebalance; 500 ms.
    #[serde(with = "duration")]
    pub rebalance_delay: Duration,
    /// How often the balance is looked at without a change; 5 min.
    #[serde(with = "duration")]
    pub rebalance_check: Duration,
    /// After this, a failed node is forgotten; 10 min.
    #[serde(with = "duration")]
    pub remove_after: Duration,
    /// How long after its expiry a node that comes back under its id keeps its shards; 0.
    #[serde(with = "duration")]
    pub restart_grace: Duration,
    /// The first assignment waits for this many active nodes; 1.
    pub min_members: u32,
    /// The share of nodes that may vanish inside one node TTL before no more of them are declared failed,
    /// above 0 and at most 1; 0.5. It applies from 5 nodes on.
    pub mass_failure_brake: f64,
    /// After so many crashes of its hosts in a row a shard is parked, 2 or more, or 0 for never; 3.
    pub poison_crashes: u32,
    /// How long after the start of a shard a crash of its host still speaks against it; 10 s.
    #[serde(with = "duration")]
    pub poison_soon: Duration,
    /// Within which time those crashes come; 1 h.
    #[serde(with = "duration")]
    pub poison_window: Duration,
    /// After this a parked shard is given another try; 6 h.
    #[serde(with = "duration")]
    pub poison_release: Duration,
    /// Shards of a table, 1 to 2^24; 1024.
    pub shards: ShardCount,
    /// Owners of each shard, 1 to 7; 1.
    pub replicas: ReplicationFactor,
    /// Virtual nodes of the ring strategy, 1 to 10,000; 150.
    pub virtual_nodes: u32,
    /// How many shards of a table may be in motion at once; 10 % of them, at least 1, where it is unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub motions_max: Option<u32>,
    /// After this, a handoff is reported as stuck, and the start or the stop of a shard as slow; 60 s.
    #[serde(with = "duration")]
    pub handoff_timeout: Duration,
    /// How long a node takes at most to stop its shards; a sixth of the node TTL where it is unset.
    #[serde(with = "duration::optional", skip_serializing_if = "Option::is_none")]
    pub stop_budget: Option<Duration>,
    /// Whether the process ends where a shard still runs after the deadline of its registration although
    /// it was aborted; false. For work that can neither be aborted nor looks at its fence.
    pub exit_at_deadline: bool,
    /// Whether this node stands for election, if it has a place; true.
    pub candidate: bool,
    /// How many nodes stand for election and watch the registrations in a cluster of more, at least 3, and 0 for
    /// all; 5. The leader gives the places, in different zones as far as possible, and a node that goes is
    /// replaced. Where nobody has led for a leader TTL, all stand.
    pub candidates: u32,
    /// A leader hands over to a candidate of the newest version, if that is newer than its own, once it has
    /// been active for this long; never where it is unset. So a rolling update changes leaders once. Versions
    /// ([`NodeInfo::version`](coord_core::NodeInfo::version)) compare by their numbers, `1.9` before `1.10`
    /// and `2.0-rc.1` before `2.0`; nodes without one are never preferred.
    ///
    /// Not by default: a newer version is not a better one while an update may still be rolled back.
    #[serde(with = "duration::optional", skip_serializing_if = "Option::is_none")]
    pub newer_leads_after: Option<Duration>,
    /// How many events wait for a slow listener before it misses some; 1024.
    pub event_buffer: usize,
    /// Which side of a partition goes on; nothing is decided, and no node is probed, where it is unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downing: Option<DowningSettings>,
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
            virtual_nodes: 150,
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

    /// The header of a table with these settings.
    #[must_use]
    pub fn header(&self) -> TableHeader {
        TableHeader::new(self.shards).with_replicas(self.replicas)
    }

    /// How long a node takes at most to stop its shards.
    #[must_use]
    pub fn stop_budget(&self) -> Duration {
        self.stop_budget.unwrap_or(self.node_ttl / 6)
    }

    /// When shards are parked, if they ever are.
    pub(crate) fn poison(&self) -> Option<PoisonSettings> {
        (self.poison_crashes != 0).then(|| PoisonSettings {
            crashes: self.poison_crashes,
            soon: self.poison_soon,
            window: self.poison_window,
            release_after: self.poison_release,
            ..PoisonSettings::default()
        })
    }

    /// The time between a local deadline and the end of a TTL: a tenth of it, at least 100 ms.
    pub(crate) fn margin(ttl: Duration) -> Duration {
        (ttl / 10).max(Duration::from_millis(100))
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
        let usable = self.leader_ttl.saturating_sub(Self::margin(self.leader_ttl));
        must(
            second < usable,
            format!(
                "leader_renew {:?} and a tenth, request_timeout {:?} and a pause are not below \
                 leader_ttl less its margin, {usable:?}",
                self.leader_renew, self.request_timeout
            ),
        );
        let retries = [
            ("leader_renew", self.leader_renew),
            ("leader_retry", self.leader_retry),
            ("sharding_retry", self.sharding_retry),
            ("request_timeout", self.request_timeout),
        ];
        for (name, duration) in retries {
            must(!duration.is_zero(), format!("{name} is 0"));
        }
        if let Some(after) = self.newer_leads_after {
            let ttl = self.leader_ttl;
            must(after >= ttl, format!("newer_leads_after {after:?} is below leader_ttl {ttl:?}"));
        }
        let candidates = self.candidates;
        must(
            candidates == 0 || candidates >= 3,
            format!("candidates is {candidates}; it is at least 3, or 0 for all"),
        );
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
        must(!self.heartbeat.is_zero(), "heartbeat is 0".to_owned());
        must(
            self.heartbeat <= self.node_ttl / 3,
            format!(
                "heartbeat {:?} is above a third of node_ttl {:?}",
                self.heartbeat, self.node_ttl
            ),
        );
        let busy =
            self.heartbeat.saturating_add(self.request_timeout).saturating_add(self.stop_budget());
        let usable = self.node_ttl.saturating_sub(Self::margin(self.node_ttl));
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
        must(self.min_members >= 1, "min_members is 0; it is at least 1".to_owned());
        let brake = self.mass_failure_brake;
        must(
            brake > 0.0 && brake <= 1.0,
            format!("mass_failure_brake {brake} is not above 0 and at most 1"),
        );
        must(
            self.poison_crashes != 1,
            "poison_crashes is 1; one crash accuses nobody, so it is at least 2, or 0 for never"
                .to_owned(),
        );
        let poison = [
            ("poison_soon", self.poison_soon),
            ("poison_window", self.poison_window),
            ("poison_release", self.poison_release),
        ];
        for (name, duration) in poison {
            must(!duration.is_zero(), format!("{name} is 0"));
        }
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
        must(
            (1..=10_000).contains(&self.virtual_nodes),
            format!("virtual_nodes {} is not 1 to 10000", self.virtual_nodes),
        );
        must(self.motions_max != Some(0), "motions_max is 0; it is at least 1".to_owned());
        must(
            (1..=EVENT_BUFFER_MAX).contains(&self.event_buffer),
            format!("event_buffer {} is not 1 to {EVENT_BUFFER_MAX}", self.event_buffer),
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
        // It is the TTL of its lease: whoever wins and dies keeps the other side from winning after it.
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
            "poison_soon is 0",
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
