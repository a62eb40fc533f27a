//! What the metrics say of a cluster.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// Takes in what is counted on this thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Metrics {
    /// Runs a test under paused time, on this thread alone.
    pub(crate) fn run(test: impl AsyncFnOnce(Self)) {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        let metrics = Self::default();
        metrics::with_local_recorder(&metrics, || {
            runtime.expect("a runtime").block_on(test(metrics.clone()));
        });
    }

    /// A counter by its name and labels: `name`, or `name{label}`.
    pub(crate) fn count(&self, name: &str) -> u64 {
        let all = self.0.lock().expect("not poisoned");
        all.get(name).map_or(0, |value| value.load(Ordering::Relaxed))
    }

    pub(crate) fn gauge(&self, name: &str) -> f64 {
        f64::from_bits(self.count(name))
    }

    fn place(&self, key: &Key) -> Arc<AtomicU64> {
        let labels: Vec<_> = key.labels().map(metrics::Label::value).collect();
        let name = match &labels[..] {
            [] => key.name().to_owned(),
            labels => format!("{}{{{}}}", key.name(), labels.join(",")),
        };
        Arc::clone(self.0.lock().expect("not poisoned").entry(name).or_default())
    }
}

impl Recorder for Metrics {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.place(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.place(key))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
