//! When a node tells how busy its shards of one table are, and what. Pure: `now` is an argument.

use std::time::Duration;

use coord_core::{Incarnation, LoadReport, Moment, ShardId, TableUid, Version};

/// How often the loads are asked for: a registration is rewritten for them at most once a minute.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_secs(60);

/// What is hosted at one moment.
pub(crate) struct Sample {
    pub(crate) run: Incarnation,
    pub(crate) uid: TableUid,
    /// The map that the node goes by.
    pub(crate) applied: Version,
    /// The version that brought the last of its shards.
    pub(crate) newest: Version,
    pub(crate) loads: Vec<(ShardId, f64)>,
}

/// Keeps the last report.
#[derive(Debug)]
pub(crate) struct Sampler {
    at: Moment,
    /// How many shards may be named.
    named: usize,
    told: Option<(Incarnation, LoadReport)>,
}

impl Sampler {
    /// Begins at a moment of its own within the second half minute to the first minute and a half, so
    /// that nodes which start together do not speak together.
    pub(crate) fn new(node_seed: u128, named: usize, now: Moment) -> Self {
        let phase = u64::try_from(node_seed % SAMPLE_EVERY.as_millis()).unwrap_or_default();
        let at = now.plus(SAMPLE_EVERY / 2).plus(Duration::from_millis(phase));
        Self { at, named, told: None }
    }

    pub(crate) fn at(&self) -> Moment {
        self.at
    }

    /// Nothing could be measured.
    pub(crate) fn put_off(&mut self, now: Moment) {
        self.at = now.plus(SAMPLE_EVERY);
    }

    /// What has to be reported anew, if anything.
    pub(crate) fn take(&mut self, sample: Sample, now: Moment) -> Option<&LoadReport> {
        self.at = now.plus(SAMPLE_EVERY);
        let Sample { run, uid, applied, newest, loads } = sample;
        let last = self.told.as_ref();
        let report = LoadReport::after(last.map(|(_, last)| last), uid, applied, loads, self.named);
        let silent = report.shards.is_empty() && report.rest.is_none();
        let same = match last {
            None => silent,
            Some((of, last)) => *of == run && report.says_as(last) && newest <= last.applied,
        };
        if same {
            return None;
        }
        self.told = Some((run, report));
        self.told.as_ref().map(|(_, report)| report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    fn sample(run: u128, version: u64, loads: &[f64]) -> Sample {
        Sample {
            run: Incarnation::from_u128(run),
            uid: TableUid::from_u128(1),
            applied: Version::new(version + 1),
            newest: Version::new(version),
            loads: (0..).map(ShardId::new).zip(loads.iter().copied()).collect(),
        }
    }

    #[test]
    fn it_speaks_once_a_minute_at_most_and_only_when_there_is_news() {
        let mut sampler = Sampler::new(61_000, 8, at(0));
        assert_eq!(sampler.at(), at(31));
        assert_eq!(sampler.take(sample(1, 3, &[]), at(31)), None, "nothing is measured");
        assert_eq!(sampler.at(), at(91));
        assert!(sampler.take(sample(1, 3, &[5.0, 80.0]), at(91)).is_some());
        assert_eq!(sampler.take(sample(1, 3, &[5.1, 81.0]), at(151)), None, "it wavers");
        assert!(sampler.take(sample(1, 3, &[5.1, 99.0]), at(211)).is_some());
        assert!(sampler.take(sample(1, 9, &[5.1, 99.0]), at(271)).is_some(), "a shard came");
        assert!(sampler.take(sample(2, 9, &[5.1, 99.0]), at(331)).is_some(), "another run");
        assert!(sampler.take(sample(2, 9, &[]), at(391)).is_some(), "they are gone");
        assert_eq!(sampler.take(sample(2, 9, &[]), at(451)), None);
    }
}
