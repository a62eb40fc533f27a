//! Which strategy, and its times.

use std::time::Duration;

use coord_core::kit::duration::{self, show};
use coord_core::{Error, Label, NODES_MAX, NodeId, Result};
use serde::{Deserialize, Serialize};

use crate::detector::{FailureDetector, HeartbeatAge, PHI_MAX, PhiAccrual, PhiSettings};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);
/// The shortest time that makes sense between two probes.
const PROBE_EVERY_MIN: Duration = Duration::from_millis(50);

/// How a side of a partition finds out whether it goes on. The same on all nodes, or two sides may.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Strategy {
    /// The side with more members; of two equal ones the side of the lowest name. With three sides and no
    /// majority no side continues.
    #[default]
    KeepMajority,
    /// The side of the oldest member.
    KeepOldest {
        /// Unless the oldest is alone against two or more, which then go on without it; true.
        #[serde(default = "yes")]
        down_if_alone: bool,
    },
    /// A side with at least so many members. The strategy has no answer, and all nodes shut down, while there
    /// are more than 2 × quorum − 1 members. Until the quorum was there once, no node is downed.
    StaticQuorum {
        /// How many, 1 to 65,534.
        quorum: u32,
    },
    /// The side of this node. Without it no side continues.
    KeepReferee {
        /// The node.
        referee: NodeId,
    },
    /// The side that gets a lease. The side that [`Self::KeepMajority`] would keep asks first.
    LeaseMajority {
        /// How much later the other side asks; 2 s.
        #[serde(with = "duration", default = "minority_delay")]
        minority_delay: Duration,
        /// How long a side asks a store that gives no answer, before it shuts down; 10 s.
        #[serde(with = "duration", default = "patience")]
        patience: Duration,
        /// How long the winner keeps the lease, so that the other side does not get it after all; 40 s.
        #[serde(with = "duration", default = "release_after")]
        release_after: Duration,
    },
    /// No side. For networks whose failures can't be told apart.
    DownAll,
}

fn yes() -> bool {
    true
}

fn minority_delay() -> Duration {
    Duration::from_secs(2)
}

fn patience() -> Duration {
    Duration::from_secs(10)
}

fn release_after() -> Duration {
    Duration::from_secs(40)
}

impl Strategy {
    /// [`Self::KeepOldest`], which does not insist on an oldest that is alone.
    #[must_use]
    pub fn keep_oldest() -> Self {
        Self::KeepOldest { down_if_alone: true }
    }

    /// Its name in the settings.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::KeepMajority => "keep-majority",
            Self::KeepOldest { .. } => "keep-oldest",
            Self::StaticQuorum { .. } => "static-quorum",
            Self::KeepReferee { .. } => "keep-referee",
            Self::LeaseMajority { .. } => "lease-majority",
            Self::DownAll => "down-all",
        }
    }

    /// [`Self::LeaseMajority`] with its default times.
    #[must_use]
    pub fn lease_majority() -> Self {
        Self::LeaseMajority {
            minority_delay: minority_delay(),
            patience: patience(),
            release_after: release_after(),
        }
    }
}

/// What happens when reachability goes on changing, so that there is never a quiet moment to decide in.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unstable {
    /// All nodes shut down three quarters of `stable_after` after the first moment at which a decision was
    /// possible since a member came back, or was lost once more. Members that are lost one after the other and
    /// stay lost are waited for. With a lease, the side asks for it so much after the first loss.
    #[default]
    Auto,
    /// All nodes shut down so much after that moment.
    #[serde(with = "duration")]
    After(Duration),
    /// The decision waits as long as it takes.
    Off,
}

/// Which detector judges whether a node can be reached.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Detecting {
    /// [`HeartbeatAge`](crate::detector::HeartbeatAge).
    HeartbeatAge {
        /// How old the last sign of a node may be; five times `probe_every` where nodes are probed, else
        /// the node TTL.
        #[serde(with = "duration::optional", default, skip_serializing_if = "Option::is_none")]
        limit: Option<Duration>,
    },
    /// [`PhiAccrual`](crate::detector::PhiAccrual).
    PhiAccrual {
        /// From which suspicion on a node is unreachable; 8.
        #[serde(default = "threshold")]
        threshold: f64,
    },
}

impl Default for Detecting {
    fn default() -> Self {
        Self::HeartbeatAge { limit: None }
    }
}

fn threshold() -> f64 {
    8.0
}

/// The settings of downing. The same on all nodes.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DowningSettings {
    /// Which side goes on; `KeepMajority`.
    pub strategy: Strategy,
    /// For how long members and reachability must have been the same before a decision; 20 s. About 7 s
    /// is the least for 5 nodes, 30 s for 1,000.
    #[serde(with = "duration")]
    pub stable_after: Duration,
    /// What happens when that never comes.
    pub down_all_when_unstable: Unstable,
    /// If set, only members with this role count; those without it follow the side they are on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Label>,
    /// How often each member is probed, where the cluster is given a probe; 1 s.
    #[serde(with = "duration")]
    pub probe_every: Duration,
    /// The detector that judges which nodes are reachable, from their answers or from their heartbeats in
    /// Discovery.
    pub detector: Detecting,
}

impl Default for DowningSettings {
    fn default() -> Self {
        Self {
            strategy: Strategy::default(),
            stable_after: Duration::from_secs(20),
            down_all_when_unstable: Unstable::default(),
            role: None,
            probe_every: Duration::from_secs(1),
            detector: Detecting::default(),
        }
    }
}

impl DowningSettings {
    /// The defaults, with this strategy.
    #[must_use]
    pub fn new(strategy: Strategy) -> Self {
        Self { strategy, ..Self::default() }
    }

    /// With this time of quiet before a decision.
    #[must_use]
    pub fn with_stable_after(mut self, stable_after: Duration) -> Self {
        self.stable_after = stable_after;
        self
    }

    /// With this answer to unrest.
    #[must_use]
    pub fn with_down_all_when_unstable(mut self, unstable: Unstable) -> Self {
        self.down_all_when_unstable = unstable;
        self
    }

    /// Counting only members with this role.
    #[must_use]
    pub fn with_role(mut self, role: Label) -> Self {
        self.role = Some(role);
        self
    }

    /// Probing each member so often.
    #[must_use]
    pub fn with_probe_every(mut self, interval: Duration) -> Self {
        self.probe_every = interval;
        self
    }

    /// Judged by this detector.
    #[must_use]
    pub fn with_detector(mut self, detector: Detecting) -> Self {
        self.detector = detector;
        self
    }

    /// How long after `stable_after` unrest is borne, if there is an end to it.
    #[must_use]
    pub fn unrest_limit(&self) -> Option<Duration> {
        match self.down_all_when_unstable {
            Unstable::Auto => Some(self.stable_after - self.stable_after / 4),
            Unstable::After(limit) => Some(limit),
            Unstable::Off => None,
        }
    }

    /// Checks all of them together.
    ///
    /// # Errors
    /// `Invalid`, one error that names every contradiction.
    pub fn validate(&self) -> Result<()> {
        let faults = self.faults();
        if faults.is_empty() {
            return Ok(());
        }
        Err(Error::invalid("validate downing settings", faults.join("; ")))
    }

    /// The detector that these settings name, for heartbeats that come in this interval. `limit` is the silence
    /// after which a node counts as unreachable, where it goes by that and the settings name no other.
    ///
    /// # Errors
    /// `Invalid` for a threshold or an interval that is none.
    pub fn new_detector(
        &self,
        limit: Duration,
        interval: Duration,
    ) -> Result<Box<dyn FailureDetector>> {
        Ok(match self.detector {
            Detecting::HeartbeatAge { limit: named } => {
                Box::new(HeartbeatAge::new(named.unwrap_or(limit)))
            }
            Detecting::PhiAccrual { threshold } => {
                let settings = PhiSettings { threshold, ..PhiSettings::new(interval) };
                Box::new(PhiAccrual::new(settings)?)
            }
        })
    }

    /// Every contradiction.
    #[doc(hidden)]
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut within = |name: &str, duration: Duration, least: Duration, most: Duration| {
            if !(least..=most).contains(&duration) {
                let (least, most) = (show(least), show(most));
                faults.push(format!("{name} {duration:?} is not {least} to {most}"));
            }
        };
        within("stable_after", self.stable_after, SECOND, HOUR);
        within("probe_every", self.probe_every, PROBE_EVERY_MIN, HOUR);
        if let Unstable::After(limit) = self.down_all_when_unstable {
            within("down_all_when_unstable", limit, PROBE_EVERY_MIN, HOUR);
        }
        if let Detecting::HeartbeatAge { limit: Some(limit) } = self.detector {
            within("the detector's limit", limit, PROBE_EVERY_MIN, HOUR);
        }
        if let Strategy::LeaseMajority { minority_delay, patience, .. } = self.strategy {
            within("minority_delay", minority_delay, Duration::ZERO, HOUR);
            within("patience", patience, PROBE_EVERY_MIN, HOUR);
        }
        match self.detector {
            Detecting::HeartbeatAge { limit: Some(limit) } if limit <= self.probe_every => {
                faults.push(format!(
                    "the detector's limit {limit:?} is not above probe_every {:?}",
                    self.probe_every
                ));
            }
            Detecting::PhiAccrual { threshold } if !(threshold > 0.0 && threshold <= PHI_MAX) => {
                faults.push(format!("threshold {threshold} is not above 0 and at most {PHI_MAX}"));
            }
            _ => {}
        }
        match &self.strategy {
            Strategy::StaticQuorum { quorum }
                if !usize::try_from(*quorum).is_ok_and(|n| (1..=NODES_MAX).contains(&n)) =>
            {
                faults.push(format!("quorum is {quorum}; it is 1 to {NODES_MAX}"));
            }
            Strategy::LeaseMajority { minority_delay, patience, release_after } => {
                // The loser asks at the latest when its unrest and its patience are over. The winner may have
                // asked at once, and must still hold the lease then.
                match self.unrest_limit() {
                    None => faults.push(
                        "down_all_when_unstable is off: with a lease each side has to decide in time"
                            .to_owned(),
                    ),
                    Some(limit) => {
                        let latest = limit.saturating_add(*minority_delay).saturating_add(*patience);
                        if latest >= *release_after {
                            faults.push(format!(
                                "release_after {release_after:?} is not above down_all_when_unstable \
                                 {limit:?} + minority_delay {minority_delay:?} + patience {patience:?}"
                            ));
                        }
                    }
                }
            }
            _ => {}
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_of_all_strategies_are_valid() {
        for strategy in [
            Strategy::KeepMajority,
            Strategy::keep_oldest(),
            Strategy::StaticQuorum { quorum: 3 },
            Strategy::KeepReferee { referee: NodeId::new("n1").expect("name") },
            Strategy::lease_majority(),
            Strategy::DownAll,
        ] {
            let settings = DowningSettings::new(strategy);
            settings.validate().expect("valid");
            assert_eq!(settings.unrest_limit(), Some(Duration::from_secs(15)));
            let text = toml::to_string(&settings).expect("written");
            assert!(text.contains(settings.strategy.as_str()), "{text}");
            assert_eq!(toml::from_str::<DowningSettings>(&text).expect(&text), settings, "{text}");
        }
    }

    #[test]
    fn settings_are_read_from_toml_and_unknown_ones_refused() {
        let text = "stable_after = '7s'\nrole = 'core'\ndown_all_when_unstable = 'off'\n\
                    strategy = { kind = 'keep-oldest' }\ndetector = { kind = 'phi-accrual' }";
        let read: DowningSettings = toml::from_str(text).expect("valid");
        let role = Label::new("core").expect("label");
        let expected = DowningSettings::new(Strategy::keep_oldest())
            .with_stable_after(Duration::from_secs(7))
            .with_down_all_when_unstable(Unstable::Off)
            .with_role(role)
            .with_detector(Detecting::PhiAccrual { threshold: 8.0 });
        assert_eq!(read, expected);
        for bad in ["stabel_after = '7s'", "strategy = { kind = 'keep-youngest' }"] {
            assert!(toml::from_str::<DowningSettings>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_contradiction_is_named_in_one_error() {
        let settings = DowningSettings::new(Strategy::StaticQuorum { quorum: 0 })
            .with_stable_after(Duration::ZERO)
            .with_down_all_when_unstable(Unstable::After(Duration::ZERO))
            .with_probe_every(Duration::ZERO)
            .with_detector(Detecting::PhiAccrual { threshold: f64::NAN });
        let why = settings.validate().expect_err("five faults").to_string();
        for part in [
            "stable_after 0ns is not 1s to 1h",
            "down_all_when_unstable 0ns is not 50ms to 1h",
            "quorum is 0; it is 1 to 65534",
            "probe_every 0ns is not 50ms to 1h",
            "threshold NaN",
        ] {
            assert!(why.contains(part), "{why}");
        }
        let lease = DowningSettings::new(Strategy::lease_majority());
        let endless = lease.clone().with_down_all_when_unstable(Unstable::Off);
        assert!(endless.validate().is_err());
        let late = lease.with_stable_after(Duration::from_secs(60));
        let why = late.validate().expect_err("45 + 2 + 10 s is more than 40 s").to_string();
        assert!(why.contains("release_after 40s is not above"), "{why}");
    }
}
