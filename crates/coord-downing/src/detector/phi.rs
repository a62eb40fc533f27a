//! The φ accrual failure detector of Hayashibara, Défago, Yared and Katayama (2004, "The φ accrual
//! failure detector", SRDS).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use coord_core::{Error, Incarnation, Moment, NodeId, Result};

use super::FailureDetector;
use crate::Reach;

/// The largest threshold. Long before the tail of the distribution is too thin for an f64.
pub const PHI_MAX: f64 = 100.0;
/// The largest window.
const SAMPLES_MAX: usize = 10_000;

/// The settings of [`PhiAccrual`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PhiSettings {
    /// From which suspicion on a node is unreachable, above 0 and at most 100; 8, by which one in 10^8
    /// judgements would be wrong if the intervals were distributed as assumed.
    pub threshold: f64,
    /// How many intervals between heartbeats are remembered, 2 to 10,000; 1,000, as in the paper.
    pub samples_max: usize,
    /// The interval that is expected before any was seen.
    pub interval: Duration,
    /// The least standard deviation that is assumed: a very regular heartbeat must not make the detector
    /// jumpy; 100 ms.
    pub deviation_min: Duration,
    /// A pause that is always borne, on top of the usual interval; 3 s.
    pub pause: Duration,
}

impl PhiSettings {
    /// The defaults for heartbeats that come in this interval.
    #[must_use]
    pub const fn new(interval: Duration) -> Self {
        Self {
            threshold: 8.0,
            samples_max: 1000,
            interval,
            deviation_min: Duration::from_millis(100),
            pause: Duration::from_secs(3),
        }
    }

    /// Checks all of them together.
    ///
    /// # Errors
    /// `Invalid`, one error that names every fault.
    pub fn validate(&self) -> Result<()> {
        let mut faults = Vec::new();
        if !(self.threshold > 0.0 && self.threshold <= PHI_MAX) {
            faults.push(format!("threshold {} is not above 0 and at most 100", self.threshold));
        }
        if !(2..=SAMPLES_MAX).contains(&self.samples_max) {
            faults.push(format!("samples_max {} is not 2 to {SAMPLES_MAX}", self.samples_max));
        }
        for (name, value) in [("interval", self.interval), ("deviation_min", self.deviation_min)] {
            if value.is_zero() {
                faults.push(format!("{name} is 0"));
            }
        }
        if faults.is_empty() {
            return Ok(());
        }
        Err(Error::invalid("validate phi settings", faults.join("; ")))
    }
}

/// Suspicion φ = −log₁₀ P(a heartbeat comes even later than now), where the intervals between heartbeats
/// are taken as normally distributed with the mean and the deviation that were seen. It adapts itself to
/// the network: the rarer a silence like this was so far, the higher φ is.
#[derive(Clone, Debug)]
pub struct PhiAccrual {
    settings: PhiSettings,
    nodes: BTreeMap<NodeId, Rhythm>,
}

/// The heartbeats of one incarnation of a node. Sums are whole numbers, so they don't drift.
#[derive(Clone, Debug)]
struct Rhythm {
    incarnation: Incarnation,
    heard: Moment,
    intervals: VecDeque<u64>,
    sum: u128,
    squares: u128,
}

impl PhiAccrual {
    /// With these settings.
    ///
    /// # Errors
    /// As [`PhiSettings::validate`].
    pub fn new(settings: PhiSettings) -> Result<Self> {
        settings.validate()?;
        Ok(Self { settings, nodes: BTreeMap::new() })
    }

    /// The suspicion of a node, 0 or more, infinite beyond all measure; 0 for one that was never heard.
    #[must_use]
    pub fn phi(&self, node: &NodeId, now: Moment) -> f64 {
        self.nodes.get(node).map_or(0.0, |rhythm| self.suspicion(rhythm, now.since(rhythm.heard)))
    }

    fn suspicion(&self, rhythm: &Rhythm, silence: Duration) -> f64 {
        let (mean, deviation) = rhythm.distribution();
        let mean = mean + self.settings.pause.as_secs_f64();
        let deviation = deviation.max(self.settings.deviation_min.as_secs_f64());
        let later = 0.5 * libm::erfc((silence.as_secs_f64() - mean) / deviation / 2_f64.sqrt());
        // Rounding may take it below 0 by a hair.
        (-later.log10()).max(0.0)
    }

    /// After how long a silence the node becomes unreachable: the suspicion only grows with it.
    fn endures(&self, rhythm: &Rhythm) -> Duration {
        let (mean, deviation) = rhythm.distribution();
        let deviation = deviation.max(self.settings.deviation_min.as_secs_f64());
        // At 30 deviations the suspicion is about 200, above every threshold.
        let most = mean + self.settings.pause.as_secs_f64() + 30.0 * deviation;
        let (mut low, mut high) =
            (0_u64, nanos(Duration::try_from_secs_f64(most).unwrap_or(Duration::MAX)));
        while low < high {
            let middle = low.midpoint(high);
            let above =
                self.suspicion(rhythm, Duration::from_nanos(middle)) >= self.settings.threshold;
            if above { high = middle } else { low = middle + 1 }
        }
        Duration::from_nanos(low)
    }
}

impl Rhythm {
    fn new(incarnation: Incarnation, heard: Moment, interval: Duration) -> Self {
        let mut rhythm =
            Self { incarnation, heard, intervals: VecDeque::new(), sum: 0, squares: 0 };
        // Two samples a quarter below and above what is expected.
        for first in [interval * 3 / 4, interval * 5 / 4] {
            rhythm.push(first, 2);
        }
        rhythm
    }

    fn push(&mut self, interval: Duration, samples_max: usize) {
        // In microseconds, the sum of 10,000 squares fits by far.
        let interval = u64::try_from(interval.as_micros()).unwrap_or(u64::MAX).min(1 << 50);
        self.intervals.push_back(interval);
        self.sum += u128::from(interval);
        self.squares += u128::from(interval).pow(2);
        while self.intervals.len() > samples_max {
            if let Some(old) = self.intervals.pop_front() {
                self.sum -= u128::from(old);
                self.squares -= u128::from(old).pow(2);
            }
        }
    }

    /// Mean and standard deviation, in seconds.
    fn distribution(&self) -> (f64, f64) {
        let count = self.intervals.len() as u128;
        // n × Σx² − (Σx)² is exact and never negative.
        let spread = (count * self.squares).saturating_sub(self.sum * self.sum);
        let mean = self.sum as f64 / count as f64 / 1e6;
        (mean, (spread as f64).sqrt() / count as f64 / 1e6)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl FailureDetector for PhiAccrual {
    fn on_heartbeat(&mut self, node: &NodeId, incarnation: Incarnation, now: Moment) {
        let known = self.nodes.get(node).filter(|rhythm| rhythm.incarnation == incarnation);
        let interval = known.map(|rhythm| now.since(rhythm.heard));
        // A silence that made the node unreachable is an outage, not a part of its rhythm.
        let usual = known.zip(interval).is_some_and(|(rhythm, silence)| {
            self.suspicion(rhythm, silence) < self.settings.threshold
        });
        match (self.nodes.get_mut(node), interval) {
            (Some(rhythm), Some(interval)) => {
                if usual {
                    rhythm.push(interval, self.settings.samples_max);
                }
                rhythm.heard = rhythm.heard.max(now);
            }
            _ => {
                let rhythm = Rhythm::new(incarnation, now, self.settings.interval);
                self.nodes.insert(node.clone(), rhythm);
            }
        }
    }

    fn forget(&mut self, node: &NodeId) {
        self.nodes.remove(node);
    }

    fn excuse(&mut self, silence: Duration) {
        for rhythm in self.nodes.values_mut() {
            rhythm.heard = rhythm.heard.plus(silence);
        }
    }

    fn reach(&self, node: &NodeId, now: Moment) -> Reach {
        if self.phi(node, now) >= self.settings.threshold {
            Reach::Unreachable
        } else {
            Reach::Reachable
        }
    }

    fn next_change(&self, now: Moment) -> Option<Moment> {
        let ends = self.nodes.values().map(|rhythm| rhythm.heard.plus(self.endures(rhythm)));
        ends.filter(|end| *end > now).min()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(millis: u64) -> Moment {
        Moment::from_origin(Duration::from_millis(millis))
    }

    fn node() -> NodeId {
        NodeId::new("n1").expect("name")
    }

    fn detector(threshold: f64) -> PhiAccrual {
        let settings = PhiSettings {
            threshold,
            pause: Duration::ZERO,
            deviation_min: Duration::from_millis(200),
            ..PhiSettings::new(Duration::from_secs(1))
        };
        PhiAccrual::new(settings).expect("valid")
    }

    const RUN: Incarnation = Incarnation::from_u128(1);

    #[test]
    fn phi_is_the_logarithm_of_a_normal_tail() {
        let mut detector = detector(8.0);
        for beat in 0..=1002 {
            detector.on_heartbeat(&node(), RUN, after(beat * 1000));
        }
        // A mean of 1 s and the least deviation, 200 ms. The tails of the normal distribution at 0, 1, 2,
        // 3 and 6 deviations, from a table: 0.5, 0.158655, 0.0227501, 0.00134990, 9.86588e-10.
        let table = [
            (1000, std::f64::consts::LOG10_2),
            (1200, 0.79955),
            (1400, 1.64302),
            (1600, 2.86970),
            (2200, 9.00586),
        ];
        for (silence, expected) in table {
            let phi = detector.phi(&node(), after(1_002_000 + silence));
            assert!((phi - expected).abs() < 1e-4, "{silence} ms: {phi}, not {expected}");
        }
        assert_eq!(detector.phi(&node(), after(9_000_000)), f64::INFINITY);
    }

    #[test]
    fn a_rhythm_is_learnt_and_an_outage_is_not_part_of_it() {
        let mut detector = detector(8.0);
        let mut now = 0;
        for beat in 0..100 {
            now += if beat % 2 == 0 { 3000 } else { 1500 };
            detector.on_heartbeat(&node(), RUN, after(now));
            // The first interval is far above what was expected, and is not learnt from.
        }
        let end = detector.next_change(after(now)).expect("an end");
        assert_eq!(detector.reach(&node(), end), Reach::Unreachable);
        assert_eq!(detector.reach(&node(), end.minus(Duration::from_micros(1))), Reach::Reachable);
        let before = detector.clone();
        detector.on_heartbeat(&node(), RUN, after(now + 1_000_000));
        let later = Duration::from_secs(1000);
        assert_eq!(detector.next_change(after(now + 1_000_000)), Some(end.plus(later)));
        assert_eq!(before.next_change(end), None);
    }

    #[test]
    fn another_run_starts_anew_and_an_excuse_counts_for_all() {
        let mut detector = detector(8.0);
        for beat in 0..50 {
            detector.on_heartbeat(&node(), RUN, after(beat * 1300));
        }
        let restarted = Incarnation::from_u128(2);
        detector.on_heartbeat(&node(), restarted, after(1_000_000));
        let mut fresh = self::detector(8.0);
        fresh.on_heartbeat(&node(), restarted, after(1_000_000));
        assert_eq!(detector.next_change(after(1_000_000)), fresh.next_change(after(1_000_000)));
        let end = detector.next_change(after(1_000_000)).expect("an end");
        detector.excuse(Duration::from_secs(60));
        assert_eq!(detector.reach(&node(), end.plus(Duration::from_secs(59))), Reach::Reachable);
        detector.forget(&node());
        assert_eq!(detector.next_change(after(0)), None);
    }

    #[test]
    fn bad_settings_are_named() {
        let bad = PhiSettings {
            threshold: f64::NAN,
            samples_max: 1,
            interval: Duration::ZERO,
            ..PhiSettings::new(Duration::from_secs(1))
        };
        let why = PhiAccrual::new(bad).expect_err("three faults").to_string();
        for part in ["threshold NaN", "samples_max 1", "interval is 0"] {
            assert!(why.contains(part), "{why}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn suspicion_only_grows_and_crosses_the_threshold_once(
            gaps in prop::collection::vec(0_u64..20_000, 0..60),
            threshold in 0.1_f64..100.0,
        ) {
            let mut detector = detector(threshold);
            let mut now = 0;
            detector.on_heartbeat(&node(), RUN, after(now));
            for gap in gaps {
                now += gap;
                detector.on_heartbeat(&node(), RUN, after(now));
            }
            let mut last = 0.0;
            for silence in (0..60_000).step_by(500) {
                let phi = detector.phi(&node(), after(now + silence));
                prop_assert!(phi >= last, "{phi} after {last}");
                last = phi;
            }
            if let Some(end) = detector.next_change(after(now)) {
                prop_assert_eq!(detector.reach(&node(), end), Reach::Unreachable);
                let before = end.minus(Duration::from_nanos(1));
                prop_assert_eq!(detector.reach(&node(), before), Reach::Reachable);
            }
        }
    }
}
