//! What the suite does not ask: servers and buckets that don't suit, restarts, and what is left
//! behind.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_nats::ConnectOptions;
use coord_core::{
    Acquire, AcquireRequest, AttemptId, Backend, BackendUrl, Claim, ClaimRequest, Effect,
    ErrorKind, Fence, Grant, HealthStatus, Holder, Incarnation, LeaseEvent, LeaseName, NodeId,
    Origin, Page, Publish, Release, Renew, ShardCount, ShardMap, TableHeader, TableName, Term, Ttl,
};
use coord_integration::servers::{Nats, Server};
use coord_integration::{Missing, trial};
use coord_nats::NatsBackend;
use futures::StreamExt;
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::time::{Instant, sleep};

type Done = Result<(), Failed>;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let any = Nats::new().with_control().find();
    let mut trials = vec![
        on("a_server_without_jetstream_is_named", &any, no_jetstream),
        on("wrong_credentials_are_denied", &any, wrong_credentials),
        on("a_missing_permission_is_denied", &any, missing_permission),
        on("the_documented_permissions_suffice", &any, documented_permissions),
        on("a_foreign_bucket_is_refused", &any, foreign_bucket),
        on("a_restart_loses_no_grant", &any, restart),
        on("terms_rise_over_a_lost_bucket", &any, lost_bucket),
        on("old_chunks_are_removed", &any, old_chunks),
        on("a_cluster_outlives_its_leader", &any, cluster),
    ];
    for version in ["2.10.26", "2.11.6"] {
        let old = Nats::new().with_version(version).find();
        trials.push(on(&format!("a_server_of_{version}_is_too_old"), &old, too_old));
    }
    #[cfg(feature = "tls")]
    trials.push(on("an_encrypted_connection_is_made", &any, encrypted));
    #[cfg(not(feature = "tls"))]
    trials.push(on("a_server_that_wants_tls_is_named", &any, encrypted));
    trials.push(Trial::test("a_port_where_nobody_listens_is_told_at_once", nobody));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A trial on a server of its own.
fn on<F>(name: &str, nats: &Result<Nats, Missing>, body: fn(Nats) -> F) -> Trial
where
    F: Future<Output = Done> + 'static,
{
    trial(name, nats, move |nats| runtime()?.block_on(body(nats)))
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

async fn open(server: &Server, options: &str) -> coord_core::Result<NatsBackend> {
    let url = format!("{}/orders{options}", server.url());
    NatsBackend::open(&BackendUrl::parse(&url)?).await
}

/// A client of its own, as the `nats` command is.
async fn api(server: &Server, api: &str, request: &str) -> Result<String, Failed> {
    let client = ConnectOptions::new().connect(server.addresses().to_vec()).await?;
    let reply = client.request(format!("$JS.API.{api}"), request.to_owned().into()).await?;
    Ok(String::from_utf8(reply.payload.to_vec())?)
}

fn request(lease: &str, ttl: u64) -> Result<AcquireRequest, Failed> {
    let node = NodeId::new("node-1")?;
    let holder = Holder::new(node, Incarnation::random(), AttemptId::random());
    Ok(AcquireRequest::new(LeaseName::new(lease)?, holder, Ttl::from_secs(ttl)?))
}

async fn acquire(backend: &NatsBackend, lease: &str, ttl: u64) -> Result<Grant, Failed> {
    match backend.lease().try_acquire(&request(lease, ttl)?).await? {
        Acquire::Acquired(grant) => Ok(grant),
        other => Err(format!("not acquired: {other:?}").into()),
    }
}

fn ensure(holds: bool, what: impl std::fmt::Debug) -> Done {
    if holds { Ok(()) } else { Err(format!("{what:?}").into()) }
}

async fn refused(
    server: &Server,
    options: &str,
    kind: ErrorKind,
    part: &str,
) -> Result<String, Failed> {
    match open(server, options).await {
        Ok(_) => Err("it was opened".into()),
        Err(error) if error.kind() == kind && error.to_string().contains(part) => {
            Ok(format!("{error} {error:?}"))
        }
        Err(error) => Err(format!("refused otherwise: {error:?}").into()),
    }
}

fn nobody() -> Done {
    let port = coord_integration::free_port()?;
    let url = BackendUrl::parse(&format!("nats://me:hunter2@127.0.0.1:{port}/orders"))?;
    let begun = Instant::now();
    let error = runtime()?.block_on(NatsBackend::open(&url)).expect_err("nobody is there");
    ensure(error.kind() == ErrorKind::Unavailable, &error)?;
    ensure(error.to_string().contains("is one up there?"), &error)?;
    ensure(!format!("{error} {error:?}").contains("hunter2"), &error)?;
    ensure(begun.elapsed() < Duration::from_secs(3), begun.elapsed())
}

async fn too_old(nats: Nats) -> Done {
    let server = nats.start()?;
    refused(&server, "", ErrorKind::Unsupported, "2.11.7 or newer is needed").await.map(drop)
}

async fn no_jetstream(nats: Nats) -> Done {
    let accounts = "accounts: { PLAIN: { users: [ { user: plain, password: plain } ] } }\n\
                    no_auth_user: plain\n";
    let server = nats.with_config(accounts).start()?;
    refused(&server, "", ErrorKind::Misconfigured, "no JetStream").await.map(drop)
}

async fn wrong_credentials(nats: Nats) -> Done {
    let server = nats.with_login("me", "right").start()?;
    let address = &server.addresses()[0];
    for login in ["me:wrong-hunter2@", "wrong-hunter2@", ""] {
        let url = BackendUrl::parse(&format!("nats://{login}{address}/orders"))?;
        let error = NatsBackend::open(&url).await.expect_err("a wrong password");
        ensure(error.kind() == ErrorKind::Denied, &error)?;
        ensure(!format!("{error} {error:?}").contains("hunter2"), &error)?;
    }
    let backend = open(&server, "").await?;
    ensure(!format!("{backend:?}").contains("right"), &backend)
}

async fn missing_permission(nats: Nats) -> Done {
    let users = "authorization { users: [ { user: u, password: p, permissions: { publish: { \
                 deny: [ \"$KV.coord.*.lease.>\", \"$KV.coord.*.check.>\" ] } } } ] }\n\
                 no_auth_user: u\n";
    let server = nats.with_config(users).start()?;
    let backend = open(&server, "").await?;
    let begun = Instant::now();
    let error = backend.lease().try_acquire(&request("jobs", 10)?).await.expect_err("denied");
    ensure(error.kind() == ErrorKind::Denied && error.effect() == Effect::None, &error)?;
    ensure(error.to_string().contains("lease.jobs"), &error)?;
    ensure(begun.elapsed() < Duration::from_secs(1), begun.elapsed())?;
    let health = backend.check().await?;
    let point = health.points.iter().find(|point| point.name == "permissions");
    ensure(point.is_some_and(|point| point.status == HealthStatus::Bad), &health)
}

async fn documented_permissions(nats: Nats) -> Done {
    let users = "authorization { users: [ { user: u, password: p, permissions: { publish: [ \
                 \"$KV.coord.orders.>\", \"$JS.API.STREAM.INFO.KV_coord\", \
                 \"$JS.API.STREAM.CREATE.KV_coord\", \"$JS.API.STREAM.MSG.GET.KV_coord\", \
                 \"$JS.API.CONSUMER.CREATE.KV_coord.>\" ], subscribe: \"_INBOX.>\" } } ] }\n\
                 no_auth_user: u\n";
    let server = nats.with_config(users).start()?;
    let backend = open(&server, "").await?;
    let bad = |point: &coord_core::HealthPoint| point.status == HealthStatus::Bad;
    let health = backend.check().await?;
    ensure(!health.points.iter().any(bad), &health)?;
    let grant = acquire(&backend, "jobs", 10).await?;
    let mut watch = backend.lease().watch(&grant.lease);
    let first = watch.next().await.ok_or("no snapshot")??;
    ensure(matches!(first, LeaseEvent::Snapshot(Some(_))), &first)?;
    let header = TableHeader::new(ShardCount::new(8)?);
    let claim = ClaimRequest::new(TableName::new("orders")?, grant.fence(), header);
    let claimed = backend.placement().claim(&claim).await?;
    ensure(matches!(claimed, Claim::Claimed(_)), &claimed)?;
    ensure(backend.lease().list(Page::first()).await?.items.len() == 1, "one lease")?;
    ensure(backend.lease().release(&grant).await? == Release::Released, "not released")
}

async fn foreign_bucket(nats: Nats) -> Done {
    let server = nats.start()?;
    let foreign = r#"{"name":"KV_coord","subjects":["$KV.coord.>"],"retention":"limits",
        "storage":"file","num_replicas":1,"discard":"new","max_msgs":-1,"max_bytes":-1,
        "max_consumers":-1,"max_age":0,"max_msgs_per_subject":5,"allow_rollup_hdrs":true,
        "allow_msg_ttl":true,"subject_delete_marker_ttl":1000000000}"#;
    api(&server, "STREAM.CREATE.KV_coord", foreign).await?;
    refused(&server, "", ErrorKind::Misconfigured, "has max_msgs_per_subject 5").await?;
    // Another bucket is none of its business, and the next one finds that as it is.
    open(&server, "?bucket=other").await?;
    open(&server, "?bucket=other").await?;
    let wanted = "has num_replicas 1; it has to be 3";
    refused(&server, "?bucket=other&replicas=3", ErrorKind::Misconfigured, wanted).await?;
    refused(&server, "?bucket=other&storage=memory", ErrorKind::Misconfigured, "has storage file")
        .await
        .map(drop)
}

/// Renews until the store answers again; a failure is no loss.
async fn renewed(backend: &NatsBackend, grant: &Grant) -> Result<Grant, Failed> {
    let end = Instant::now() + grant.ttl.get();
    loop {
        match backend.lease().renew(grant).await {
            Ok(Renew::Renewed(grant)) => return Ok(grant),
            Ok(other) => return Err(format!("not renewed: {other:?}").into()),
            Err(error) if Instant::now() > end => return Err(error.into()),
            Err(error) => ensure(error.kind() == ErrorKind::Unavailable, error)?,
        }
        sleep(Duration::from_millis(20)).await;
    }
}

async fn restart(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 20).await?;
    server.nodes()[0].restart()?;
    let again = renewed(&backend, &grant).await?;
    ensure(again.fence() == grant.fence(), &again)?;
    ensure(backend.lease().release(&again).await? == Release::Released, "not released")?;
    let next = acquire(&backend, "jobs", 20).await?;
    ensure(next.term > grant.term, (next.term, grant.term))
}

async fn lost_bucket(nats: Nats) -> Done {
    let server = nats.start()?;
    let old = open(&server, "?storage=memory").await?;
    ensure(old.info().guarantees.terms_survive_loss, old.info())?;
    let grant = acquire(&old, "jobs", 60).await?;
    // What is kept in memory is gone.
    server.nodes()[0].restart()?;
    let new = open(&server, "?storage=memory").await?;
    ensure(new.info().origin != old.info().origin, new.info())?;
    let next = acquire(&new, "jobs", 60).await?;
    ensure(next.term > grant.term, (next.term, grant.term))?;
    let renewed = old.lease().renew(&grant).await?;
    ensure(matches!(renewed, Renew::Lost(Some(_))), renewed)?;
    let error = old.discovery().nodes().await.expect_err("another bucket");
    ensure(error.to_string().contains("deleted and made again"), &error)?;
    ensure(new.discovery().nodes().await?.is_empty(), "nodes")
}

async fn old_chunks(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let table = TableName::new("orders")?;
    let origin = Origin::new("elsewhere:1/orders");
    let fence = Fence::new(LeaseName::leader(), Term::from_u64(7), AttemptId::random(), origin);
    let header = TableHeader::new(ShardCount::new(1_000)?);
    let claim = ClaimRequest::new(table.clone(), fence.clone(), header);
    let Claim::Claimed(claimed) = backend.placement().claim(&claim).await? else {
        return Err("not claimed".into());
    };
    let mut map = claimed.map;
    for round in 0_u64..6 {
        let expected = map.version();
        map = next(&map, &fence, round)?;
        let publish = backend.placement().publish(&table, &fence, expected, &map).await?;
        ensure(publish == Publish::Published(map.version()), publish)?;
    }
    // Those of the two newest manifests stay; each of these maps is one chunk more than the annex.
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let filter = r#"{"subjects_filter":"$KV.coord.orders.chunk.orders.>"}"#;
        let info = api(&server, "STREAM.INFO.KV_coord", filter).await?;
        let chunks = info.matches(".chunk.orders.").count();
        if chunks <= 4 {
            break;
        }
        ensure(Instant::now() < end, format!("{chunks} chunks are left"))?;
        sleep(Duration::from_millis(100)).await;
    }
    let loaded = backend.placement().load(&table).await?;
    ensure(loaded.is_some_and(|table| *table.map == *map), "the newest map is there")
}

/// The next map, with an annex that fits into no head and shrinks under no compression.
fn next(map: &ShardMap, fence: &Fence, round: u64) -> Result<Arc<ShardMap>, Failed> {
    let mut state = round + 1;
    let mut noise = Vec::new();
    while noise.len() < 100_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        noise.extend_from_slice(&(state >> 16).to_le_bytes());
    }
    let mut edit = map.edit();
    edit.set_annex(noise.into())?;
    Ok(Arc::new(edit.finish(fence.clone()).ok_or("nothing changed")?))
}

async fn cluster(nats: Nats) -> Done {
    let server = nats.with_nodes(3).start()?;
    let backend = opened(&server, "?replicas=3").await?;
    let grant = acquire(&backend, "jobs", 30).await?;
    let health = backend.check().await?;
    ensure(health.status() == HealthStatus::Good, &health)?;
    let info = api(&server, "STREAM.INFO.KV_coord", "").await?;
    let leads = |name: &str| info.contains(&format!("\"leader\":\"{name}\""));
    let leader = server.nodes().iter().find(|node| leads(node.name())).ok_or("no leader")?;
    leader.kill()?;
    let again = renewed(&backend, &grant).await?;
    ensure(again.fence() == grant.fence(), &again)?;
    ensure(backend.lease().release(&again).await? == Release::Released, "not released")?;
    let next = acquire(&backend, "jobs", 30).await?;
    ensure(next.term > grant.term, (next.term, grant.term))
}

/// Opens a backend on servers that may not have a leader of their own yet.
async fn opened(server: &Server, options: &str) -> Result<NatsBackend, Failed> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match open(server, options).await {
            Ok(backend) => return Ok(backend),
            Err(error) if Instant::now() > end => return Err(error.into()),
            Err(_) => sleep(Duration::from_millis(200)).await,
        }
    }
}

#[cfg(feature = "tls")]
async fn encrypted(nats: Nats) -> Done {
    let server = nats.with_tls().start()?;
    let authority = server.authority().ok_or("no authority")?.display().to_string();
    let address = &server.addresses()[0];
    let good = format!("nats://{address}/orders?tls=on&ca={}", authority.replace('/', "%2F"));
    let backend = NatsBackend::open(&BackendUrl::parse(&good)?).await?;
    acquire(&backend, "jobs", 10).await?;
    // Nobody but its own authority vouches for it.
    let strange = BackendUrl::parse(&format!("nats://{address}/orders"))?;
    let error = NatsBackend::open(&strange).await.expect_err("a stranger");
    ensure(matches!(error.kind(), ErrorKind::Misconfigured | ErrorKind::Unavailable), &error)
}

#[cfg(not(feature = "tls"))]
async fn encrypted(nats: Nats) -> Done {
    let server = nats.with_tls().start()?;
    let address = &server.addresses()[0];
    let url = BackendUrl::parse(&format!("nats://{address}/orders"))?;
    let error = NatsBackend::open(&url).await.expect_err("no TLS in this build");
    ensure(error.kind() == ErrorKind::Unsupported, &error)?;
    ensure(error.to_string().contains("cargo feature \"tls\""), &error)
}
