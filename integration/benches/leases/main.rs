//! Leases beside the plain clients, the servers' own tools and other crates, in one run on real servers. Prints
//! the tables of docs/benchmarks/history/leases.md.
//!
//! ```text
//! cargo xtask cargo bench -p coord-integration --features bench-lease-peers --bench leases --profile release
//!     [-- [--smoke] [--only PART] [--backend etcd|nats|redis|kube] [--nodes NUMBER]]
//! ```
//! `--smoke` does a little of everything, to see that it works; with the feature `bench-leases` alone the other
//! crates are left out.
#![expect(clippy::print_stdout, reason = "the tables are what it is for")]

mod contender;
mod coord_leases;
mod counters;
mod etcd;
mod kube;
#[cfg(feature = "bench-lease-peers")]
mod kube_peers;
#[cfg(feature = "bench-kubert")]
mod kubert;
mod measure;
mod nats;
#[cfg(feature = "bench-lease-peers")]
mod peers;
mod redis;
mod stats;
mod store;

use std::time::Duration;

use tokio_util::task::AbortOnDropHandle;

use self::store::{BACKENDS, Store};

/// How many leases of a fleet are acquired at once.
const SETUP_MAX: usize = 64;

/// How much is measured.
#[derive(Clone)]
struct Extent {
    /// Rounds that are not counted.
    warm_up: u32,
    acquires: u32,
    handovers: u32,
    /// How many rounds those take part in that take long.
    slow: u32,
    /// How many leases, and how often all are renewed.
    fleets: &'static [(usize, usize)],
    takeovers: u32,
    watchers: usize,
    fan_outs: u32,
    noleader: Option<Duration>,
}

const FULL: Extent = Extent {
    warm_up: 10,
    acquires: 300,
    handovers: 200,
    slow: 10,
    fleets: &[(1, 500), (64, 100), (10_000, 7)],
    takeovers: 6,
    watchers: 50,
    fan_outs: 30,
    noleader: Some(Duration::from_secs(240)),
};

impl Extent {
    /// The same, where a store allows no more than that.
    fn on(mut self, backend: &str) -> Self {
        match backend {
            "kube" => {
                self.acquires = self.acquires.min(100);
                self.handovers = self.handovers.min(60);
                self.takeovers = self.takeovers.min(4);
                self.fan_outs = self.fan_outs.min(10);
                if self.fleets.len() > 2 {
                    self.fleets = &[(1, 200), (64, 30), (1_000, 4)];
                }
            }
            // A watch of the client's leaves a consumer behind for 30 s, and the server takes so many only.
            "nats" => self.fan_outs = self.fan_outs.min(6),
            _ => {}
        }
        self
    }
}

const SMOKE: Extent = Extent {
    warm_up: 1,
    acquires: 3,
    handovers: 3,
    slow: 1,
    fleets: &[(1, 3), (64, 2)],
    takeovers: 1,
    watchers: 5,
    fan_outs: 2,
    noleader: None,
};

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("starts");
    let mut arguments = std::env::args().skip(1);
    let (mut extent, mut only, mut backend, mut nodes) = (FULL, None, None, 1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // From cargo.
            "--bench" => {}
            "--smoke" => extent = SMOKE,
            "--only" => only = arguments.next(),
            "--backend" => backend = arguments.next(),
            "--nodes" => {
                let number = arguments.next().and_then(|number| number.parse().ok());
                nodes = number.expect("--nodes NUMBER");
            }
            "--hold" => {
                let mut next = || arguments.next().expect("--hold BACKEND KIND LEASE");
                let store = Store::start(&next(), 1).expect("one that runs");
                return runtime.block_on(measure::hold(&store, &next(), &next()));
            }
            other => panic!("unknown argument {other:?}; --smoke, --only, --backend, --nodes"),
        }
    }
    for name in BACKENDS {
        if backend.as_deref().is_some_and(|wanted| wanted != *name) {
            continue;
        }
        if nodes > 1 && !["etcd", "nats"].contains(name) {
            println!("\n# {name} is measured on one server only");
            continue;
        }
        let store = match Store::start(name, nodes) {
            Ok(store) => store,
            // A bench that measured nothing would pass for one that found nothing wrong.
            Err(missing) => panic!("{missing}"),
        };
        println!("\n# {name}, {nodes} server(s) from {}; load {}", store.origin(), load());
        runtime.block_on(run(&store, &extent.clone().on(name), only.as_deref()));
        println!("\nload at the end {}", load());
    }
}

/// A task that ends with its handle.
fn spawn<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> AbortOnDropHandle<T> {
    AbortOnDropHandle::new(tokio::runtime::Handle::current().spawn(future))
}

/// The load of the last minute, 5 and 15.
fn load() -> String {
    std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim().to_owned()
}

async fn run(store: &Store, extent: &Extent, only: Option<&str>) {
    let wants = |part: &str| only.is_none_or(|only| only == part);
    if wants("acquire") {
        measure::acquire(store, extent).await;
    }
    if wants("handover") {
        measure::handover(store, extent).await;
    }
    if wants("renewals") {
        measure::renewals(store, extent).await;
    }
    if wants("fan-out") {
        measure::fan_out(store, extent).await;
    }
    if wants("takeover") {
        measure::takeover(store, extent).await;
    }
    #[cfg(feature = "bench-lease-peers")]
    if let Some(limit) = extent.noleader
        && store.backend() == "nats"
        && wants("noleader")
    {
        let (acquired, handed) = peers::noleader(store, limit).await;
        stats::head("nats: noleader 0.1.2", &["until it leads", "from its end to the next leader"]);
        let handed = handed.map_or_else(|| format!("> {} s", limit.as_secs()), stats::seconds);
        stats::row([stats::seconds(acquired), handed]);
    }
    #[cfg(not(feature = "bench-lease-peers"))]
    let _ = extent.noleader;
}
