//! What is measured. The contenders take turns in every measurement, A B C A B C, so that what else the
//! machine does falls on all of them alike.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use async_nats::jetstream::kv::{Operation, Store as Bucket};
use coord::LeaseEvent;
use etcd_client::EventType;
use futures::StreamExt as _;
use futures::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use crate::contender::{Contender, KINDS, Kind, connect};
use crate::coord_leases::Sessions;
use crate::counters::Counters;
use crate::stats::{Samples, head, row, seconds};
use crate::store::Store;
use crate::{Extent, etcd, kube, redis};

/// The TTL where none runs out.
const LONG: Duration = Duration::from_secs(300);
/// The TTL of a lease whose holder is killed.
const SHORT: Duration = Duration::from_secs(5);
/// How long what a release does in the background is given to end, so that the next one does not pay for it.
const PAUSE: Duration = Duration::from_millis(5);
/// How long a waiting candidate is given to begin waiting.
const SETTLE: Duration = Duration::from_millis(30);

fn kinds(store: &Store) -> impl Iterator<Item = Kind> + '_ {
    let fits = |kind: &Kind| {
        kind.backend == store.backend()
            && (!kind.name.starts_with("etcdctl") || etcd::etcdctl().is_some())
    };
    KINDS.iter().copied().filter(fits)
}

fn raw_of<T>(rows: &[(Kind, T)], value: impl Fn(&T) -> f64) -> f64 {
    rows.iter().find(|(kind, _)| kind.is_raw).map_or(f64::NAN, |(_, row)| value(row))
}

fn ratio(value: f64, raw: f64) -> String {
    format!("{:.2}", value / raw)
}

struct Entrant {
    kind: Kind,
    holder: Box<dyn Contender>,
    candidate: Box<dyn Contender>,
}

async fn entrants(store: &Store) -> Vec<Entrant> {
    let mut entrants = Vec::new();
    for kind in kinds(store).filter(|kind| !kind.only_renews) {
        let (holder, candidate) = (connect(kind, store).await, connect(kind, store).await);
        entrants.push(Entrant { kind, holder, candidate });
    }
    entrants
}

/// A free lease acquired, and released again.
pub(crate) async fn acquire(store: &Store, extent: &Extent) {
    acquire_each(store, extent, "a free lease acquired, and released", false).await;
    // The object of a lease outlives its holders.
    if store.backend() == "kube" {
        acquire_each(store, extent, "one acquired that had a holder before", true).await;
    }
}

async fn acquire_each(store: &Store, extent: &Extent, what: &str, is_same: bool) {
    let entrants = entrants(store).await;
    let mut rows: Vec<_> =
        entrants.iter().map(|it| (it.kind, (Samples::default(), Samples::default()))).collect();
    for round in 0..extent.warm_up + extent.acquires {
        for (place, entrant) in entrants.iter().enumerate() {
            if entrant.kind.is_slow && round >= extent.warm_up + extent.slow {
                continue;
            }
            let round_of = if is_same { 0 } else { round };
            let name = format!("acquire-{place}-{round_of}");
            let started = Instant::now();
            let held = entrant.holder.acquire(&name, LONG).await;
            let acquired = started.elapsed();
            let started = Instant::now();
            held.release().await;
            if round >= extent.warm_up {
                rows[place].1.0.add(acquired);
                rows[place].1.1.add(started.elapsed());
            }
            sleep(PAUSE).await;
        }
    }
    let raw = raw_of(&rows, |(acquired, _)| acquired.at(0.5));
    let raw_release = raw_of(&rows, |(_, released)| released.at(0.5));
    head(
        &format!("{}: {what}", store.backend()),
        &["who", "n", "acquire p50", "p99", "÷ raw", "release p50", "p99", "÷ raw"],
    );
    for (kind, (acquired, released)) in &rows {
        row([
            kind.name.to_owned(),
            acquired.count().to_string(),
            seconds(acquired.at(0.5)),
            seconds(acquired.at(0.99)),
            ratio(acquired.at(0.5), raw),
            seconds(released.at(0.5)),
            seconds(released.at(0.99)),
            ratio(released.at(0.5), raw_release),
        ]);
    }
}

/// A lease released while another waits for it: from the call to release to the next grant.
pub(crate) async fn handover(store: &Store, extent: &Extent) {
    let mut entrants = entrants(store).await;
    entrants.retain(|entrant| !entrant.kind.sleeps);
    let mut rows: Vec<_> = entrants.iter().map(|it| (it.kind, Samples::default())).collect();
    for round in 0..extent.warm_up + extent.handovers {
        for (place, entrant) in entrants.iter().enumerate() {
            if entrant.kind.is_slow && round >= extent.warm_up + extent.slow {
                continue;
            }
            let name = format!("handover-{place}-{round}");
            let held = entrant.holder.acquire(&name, LONG).await;
            let next = entrant.candidate.acquire(&name, LONG);
            let hand = async {
                // A process takes longer to begin.
                sleep(if entrant.kind.is_slow { SETTLE * 20 } else { SETTLE }).await;
                let started = Instant::now();
                held.release().await;
                started
            };
            let granted = async { (next.await, Instant::now()) };
            let (started, (next, granted)) = tokio::join!(hand, granted);
            if round >= extent.warm_up {
                rows[place].1.add(granted.saturating_duration_since(started));
            }
            next.release().await;
        }
    }
    let raw = raw_of(&rows, |samples| samples.at(0.5));
    head(
        &format!("{}: graceful handover, from the release to the next grant", store.backend()),
        &["who", "n", "p50", "p99", "÷ raw"],
    );
    for (kind, samples) in &rows {
        row([
            kind.name.to_owned(),
            samples.count().to_string(),
            seconds(samples.at(0.5)),
            seconds(samples.at(0.99)),
            ratio(samples.at(0.5), raw),
        ]);
    }
}

/// All leases of one process renewed once, as fast as it goes.
pub(crate) async fn renewals(store: &Store, extent: &Extent) {
    for &(size, rounds) in extent.fleets {
        let mut fleets = Vec::new();
        for (place, kind) in kinds(store).enumerate() {
            let contender = connect(kind, store).await;
            if let Some(fleet) = contender.fleet(&format!("fleet-{size}-{place}"), size, LONG).await
            {
                fleets.push((kind, fleet, Samples::default(), Counters::default(), contender));
            }
        }
        for round in 0..=rounds {
            for (_, fleet, samples, used, _) in &mut fleets {
                let before = Counters::of(store).await;
                let started = Instant::now();
                fleet.renew_all().await;
                let took = started.elapsed();
                if round > 0 {
                    samples.add(took);
                    *used = used.plus(&Counters::of(store).await.minus(&before));
                }
            }
        }
        let rows: Vec<_> =
            fleets.into_iter().map(|(kind, _, samples, used, _)| (kind, (samples, used))).collect();
        let per_second = |(samples, _): &(Samples, Counters)| size as f64 / samples.at(0.5);
        let raw = raw_of(&rows, per_second);
        head(
            &format!("{}: {size} lease(s) of one process renewed", store.backend()),
            &["who", "rounds", "renewals/s", "raw ÷", "messages each", "bytes each"],
        );
        for (kind, measured) in &rows {
            let renewals = (size * rounds) as f64;
            row([
                kind.name.to_owned(),
                rounds.to_string(),
                format!("{:.0}", per_second(measured)),
                ratio(raw, per_second(measured)),
                format!("{:.2}", measured.1.messages / renewals),
                format!("{:.0}", measured.1.bytes / renewals),
            ]);
        }
    }
}

/// The holder's process is killed: from then to the next grant.
pub(crate) async fn takeover(store: &Store, extent: &Extent) {
    let mut rows = Vec::new();
    let contenders: Vec<_> = kinds(store)
        .filter(|kind| {
            // `etcdctl elect` has a fixed TTL of 60 s; what is killed of etcdctl is etcdctl itself; and the
            // trait alone renews nothing.
            let is_process = kind.name.starts_with("etcdctl");
            !kind.only_renews && !is_process && kind.name != "coord, trait alone"
        })
        // It gives its leases no end: see there.
        .filter(|kind| kind.name != "async-nats KV")
        .collect();
    let all = contenders.into_iter().map(|kind| async move {
        let mut samples = Samples::default();
        for round in 0..extent.takeovers {
            let name = format!("takeover-{round}");
            let name = format!("{name}-{}", kind.name.replace([' ', '.', ','], "-"));
            let mut holder = Holder::start(store, kind, &name).await;
            let candidate = connect(kind, store).await;
            let next = candidate.acquire(&name, SHORT);
            let kill = async {
                // Somewhere between two renewals, elsewhere in each round.
                sleep(SHORT / 3 + SHORT.mul_f64(0.1) * round).await;
                holder.kill();
                Instant::now()
            };
            let granted = async { (next.await, Instant::now()) };
            let (killed, (held, granted)) = tokio::join!(kill, granted);
            samples.add(granted.saturating_duration_since(killed));
            held.release().await;
        }
        (kind, samples)
    });
    for row in join_all(all).await {
        rows.push(row);
    }
    head(
        &format!(
            "{}: the holder's process killed, TTL {} s: from then to the next grant",
            store.backend(),
            SHORT.as_secs()
        ),
        &["who", "n", "p50", "max", "max − TTL", "within TTL + 1 s"],
    );
    for (kind, samples) in &rows {
        let beyond = samples.max() - SHORT.as_secs_f64();
        row([
            kind.name.to_owned(),
            samples.count().to_string(),
            seconds(samples.at(0.5)),
            seconds(samples.max()),
            seconds(beyond),
            if beyond <= 1.0 { "yes" } else { "**no**" }.to_owned(),
        ]);
    }
}

/// Another process of this program that holds a lease until it is killed.
struct Holder(Child);

impl Holder {
    async fn start(store: &Store, kind: Kind, lease: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        let (variable, value) = store.variable();
        command.args(["--hold", kind.backend, kind.name, lease]).env(variable, value);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let start = move || {
            let mut child = command.spawn().expect("starts");
            let mut line = String::new();
            let output = child.stdout.take().expect("a pipe");
            BufReader::new(output).read_line(&mut line).expect("reads");
            assert_eq!(line.trim(), "held", "the holder failed");
            Self(child)
        };
        tokio::task::spawn_blocking(start).await.expect("no panic")
    }

    fn kill(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("ends");
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // It has ended, unless this is a panic.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a [`Holder`]'s process does.
pub(crate) async fn hold(store: &Store, kind: &str, lease: &str) {
    let kind = kinds(store).find(|it| it.name == kind).expect("a contender");
    let contender = connect(kind, store).await;
    let _held = contender.acquire(lease, SHORT).await;
    println!("held");
    std::io::stdout().flush().expect("written");
    std::future::pending::<()>().await;
}

/// Many watchers of one lease, each with a connection of its own: from the release until each of them knows.
pub(crate) async fn fan_out(store: &Store, extent: &Extent) {
    let holder = Sessions::connect(store).await;
    let mut coords = Vec::new();
    for _ in 0..extent.watchers {
        coords.push(Sessions::connect(store).await);
    }
    let raws = RawWatchers::connect(store, extent.watchers).await;
    let mut rows = [
        ("raw client", Samples::default(), Samples::default()),
        ("coord", Samples::default(), Samples::default()),
    ];
    for round in 0..1 + extent.fan_outs {
        for (place, (_, each, last)) in rows.iter_mut().enumerate() {
            let name = format!("fan-out-{place}-{round}");
            let held = holder.acquire(&name, LONG).await;
            let watched = async {
                if place == 0 {
                    raws.vacant(&name).await
                } else {
                    let lease = coord::LeaseName::new(&name).expect("a good name");
                    let watch = |sessions: &Sessions| {
                        let mut events = sessions.lease().watch(&lease);
                        async move {
                            while !matches!(events.next().await, Some(Ok(LeaseEvent::Vacant))) {}
                            Instant::now()
                        }
                    };
                    join_all(coords.iter().map(watch)).await
                }
            };
            let release = async {
                sleep(SETTLE * 10).await;
                let started = Instant::now();
                held.release().await;
                started
            };
            let both = async { tokio::join!(watched, release) };
            let (seen, started) = timeout(LONG, both).await.expect("all watchers see it");
            if round > 0 {
                let delay = |at: &Instant| at.saturating_duration_since(started);
                seen.iter().for_each(|at| each.add(delay(at)));
                last.add(seen.iter().map(delay).max().unwrap_or_default());
            }
        }
    }
    head(
        &format!(
            "{}: {} watchers of one lease, from the release until they know",
            store.backend(),
            extent.watchers
        ),
        &["who", "n", "each p50", "each p99", "÷ raw", "the last one p50", "÷ raw"],
    );
    let raw = (rows[0].1.at(0.5), rows[0].2.at(0.5));
    for (name, each, last) in &rows {
        row([
            (*name).to_owned(),
            last.count().to_string(),
            seconds(each.at(0.5)),
            seconds(each.at(0.99)),
            ratio(each.at(0.5), raw.0),
            seconds(last.at(0.5)),
            ratio(last.at(0.5), raw.1),
        ]);
    }
}

/// Clients that watch the very key of coord's lease.
enum RawWatchers {
    Etcd(Vec<etcd_client::Client>),
    Nats(Vec<Bucket>),
    Redis(Vec<::redis::Client>),
    Kube(Vec<kube::Raw>),
}

impl RawWatchers {
    async fn connect(store: &Store, watchers: usize) -> Self {
        if store.backend() == "etcd" {
            let connect = |_| async {
                let connected = etcd_client::Client::connect(store.addresses(), None).await;
                connected.expect("connects")
            };
            return Self::Etcd(join_all((0..watchers).map(connect)).await);
        }
        if store.backend() == "redis" {
            let url = format!("redis://{}/", store.addresses()[0]);
            let client = ::redis::Client::open(url).expect("a URL");
            return Self::Redis(vec![client; watchers]);
        }
        if store.backend() == "kube" {
            let connect = |_| kube::Raw::connect(store.kubeconfig());
            return Self::Kube(join_all((0..watchers).map(connect)).await);
        }
        let url = format!("nats://{}", store.addresses().join(","));
        let connect = |_| async {
            let client = async_nats::connect(&url).await.expect("connects");
            let context = async_nats::jetstream::new(client);
            context.get_key_value("coord").await.expect("coord's bucket")
        };
        Self::Nats(join_all((0..watchers).map(connect)).await)
    }

    /// When each of them saw the lease end.
    async fn vacant(&self, lease: &str) -> Vec<Instant> {
        match self {
            Self::Etcd(clients) => {
                let watch = |client: &etcd_client::Client| {
                    let mut client = client.clone();
                    async move {
                        let key = format!("coord/bench/lease/{lease}");
                        let mut changes = client.watch(key, None).await.expect("watches");
                        loop {
                            let batch = changes.message().await.expect("watches").expect("goes on");
                            let ended = |event: &etcd_client::Event| {
                                event.event_type() == EventType::Delete
                            };
                            if batch.events().iter().any(ended) {
                                return Instant::now();
                            }
                        }
                    }
                };
                join_all(clients.iter().map(watch)).await
            }
            Self::Nats(stores) => {
                let watch = |store: &Bucket| {
                    let store = store.clone();
                    async move {
                        let key = format!("bench.lease.{lease}");
                        let mut entries = store.watch(key).await.expect("watches");
                        loop {
                            let entry = entries.next().await.expect("goes on").expect("an entry");
                            if entry.operation != Operation::Put {
                                return Instant::now();
                            }
                        }
                    }
                };
                join_all(stores.iter().map(watch)).await
            }
            Self::Redis(clients) => {
                let watch = |client: &::redis::Client| {
                    let client = client.clone();
                    async move {
                        redis::next_event(&client, lease).await;
                        Instant::now()
                    }
                };
                join_all(clients.iter().map(watch)).await
            }
            Self::Kube(clients) => {
                let name = &format!("coord.bench.lease.{lease}");
                let watch = |client: &kube::Raw| {
                    let client = client.clone();
                    async move {
                        client.see_vacant(name).await;
                        Instant::now()
                    }
                };
                join_all(clients.iter().map(watch)).await
            }
        }
    }
}
