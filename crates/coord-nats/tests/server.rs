//! What the suite does not ask: servers and buckets that don't suit, restarts, and what is left
//! behind.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{ConnectOptions, HeaderMap};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64_URL;
use coord_core::{
    Acquire, AcquireRequest, Address, Answer, Answered, AttemptId, Backend, BackendUrl, Claim,
    ClaimRequest, Effect, ErrorKind, Fence, Grant, HealthStatus, Holder, Incarnation, LeaseEvent,
    LeaseName, LeaseRecord, NodeEvent, NodeId, NodeInfo, Origin, Page, Publish, Register, Release,
    Renew, Replace, Request, ShardCount, ShardMap, TableHeader, TableName, Term, Ttl,
};
use coord_integration::servers::{Nats, Server};
use coord_integration::{Missing, trial};
use coord_nats::NatsBackend;
use futures::StreamExt;
use libtest_mimic::{Arguments, Failed, Trial};
use nkeys::KeyPair;
use tokio::time::{Instant, sleep};

type Done = Result<(), Failed>;

/// The oldest and the newest server for which clients end the records.
const DEGRADED: [&str; 2] = ["2.10.26", "2.11.6"];
/// How often a condition is looked at.
const PAUSE: Duration = Duration::from_millis(50);
/// By how much what the server says of its clock may be off.
const CLOCK_SLACK: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let any = Nats::new().with_control().find();
    let mut trials = suite("", &any);
    trials.extend([
        on("the_documented_permissions_suffice", &any, documented_permissions),
        on("a_bucket_of_an_older_server_keeps_its_way", &any, older_bucket),
        on("a_record_that_ends_too_far_away_counts_anew", &any, far_end),
        on("a_far_end_that_nobody_watches_counts_anew", &any, unwatched_far_end),
        on("a_bucket_counts_from_the_servers_clock", &any, server_clock),
    ]);
    for version in DEGRADED {
        let old = Nats::new().with_version(version).with_control().find();
        let name = |name: &str| format!("{version}::{name}");
        trials.extend(suite(&name(""), &old));
        trials.extend([
            on(&name("the_documented_permissions_suffice"), &old, documented_permissions),
            on(&name("a_grant_ends_by_the_servers_clock"), &old, ends_by_clock),
            on(&name("who_may_only_read_sees_ends_too"), &old, reader_sees_ends),
            on(&name("nothing_is_left_of_what_ended"), &old, nothing_left),
            on(&name("an_answer_outlives_the_one_who_gave_it"), &old, answer_is_put_in_place),
        ]);
    }
    let old = Nats::new().with_version("2.11.6").with_control().find();
    trials.push(on("2.11.6::a_bucket_of_a_newer_server_is_refused", &old, newer_bucket));
    trials.push(Trial::test("a_port_where_nobody_listens_is_told_at_once", nobody));
    libtest_mimic::run(&arguments, trials).exit_code()
}

#[cfg(feature = "tls")]
const TLS: &str = "an_encrypted_connection_is_made";
#[cfg(not(feature = "tls"))]
const TLS: &str = "a_server_that_wants_tls_is_named";

/// What has to hold in the degraded mode as well.
fn suite(prefix: &str, nats: &Result<Nats, Missing>) -> Vec<Trial> {
    let name = |name: &str| format!("{prefix}{name}");
    vec![
        on(&name("a_server_without_jetstream_is_named"), nats, no_jetstream),
        on(&name("wrong_credentials_are_denied"), nats, wrong_credentials),
        on(&name("a_missing_permission_is_denied"), nats, missing_permission),
        on(&name("a_foreign_bucket_is_refused"), nats, foreign_bucket),
        on(&name("a_lease_shows_since_when_it_is_held"), nats, shows_renewal),
        on(&name("a_restart_loses_no_grant"), nats, restart),
        on(&name("a_kill_takes_nothing_and_brings_nothing_back"), nats, kills),
        on(&name("terms_rise_over_a_lost_bucket"), nats, lost_bucket),
        on(&name("a_bucket_that_is_made_again_is_another"), nats, bucket_made_again),
        on(&name("what_is_deleted_by_hand_is_no_farewell"), nats, deleted_by_hand),
        on(&name("a_token_logs_in"), nats, token),
        on(&name("an_nkey_logs_in"), nats, nkey),
        on(&name("credentials_log_in"), nats, credentials),
        on(&name("one_of_several_servers_is_enough"), nats, several),
        on(&name("old_chunks_are_removed"), nats, old_chunks),
        on(&name("a_watch_that_ends_takes_its_consumer_along"), nats, consumers),
        on(&name("a_cluster_outlives_its_leader"), nats, cluster),
        on(&name(TLS), nats, encrypted),
    ]
}

/// What who reads has to publish to.
const READING: &str = "\"$JS.API.STREAM.INFO.KV_coord\", \"$JS.API.STREAM.MSG.GET.KV_coord\", \
                       \"$JS.API.CONSUMER.CREATE.KV_coord.>\", \
                       \"$JS.API.CONSUMER.DELETE.KV_coord.>\"";

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

/// Waits until the bucket has so many consumers. The limit is well below the time after which the
/// server deletes those that nobody reads.
async fn has_consumers(server: &Server, wanted: usize) -> Done {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let info = api(server, "STREAM.INFO.KV_coord", "").await?;
        if info.contains(&format!("\"consumer_count\":{wanted}}}"))
            || info.contains(&format!("\"consumer_count\":{wanted},"))
        {
            return Ok(());
        }
        ensure(Instant::now() < end, (wanted, info))?;
        sleep(Duration::from_millis(10)).await;
    }
}

async fn consumers(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let lease = LeaseName::new("jobs")?;
    let watch = async || {
        let mut watch = backend.lease().watch(&lease);
        watch.next().await.ok_or("no snapshot")??;
        Ok::<_, Failed>(watch)
    };
    let kept = watch().await?;
    for _ in 0..3 {
        let mut watches = Vec::new();
        for _ in 0..20 {
            watches.push(watch().await?);
        }
        has_consumers(&server, 21).await?;
        drop(watches);
        has_consumers(&server, 1).await?;
    }
    backend.close().await?;
    has_consumers(&server, 0).await?;
    drop(kept);
    Ok(())
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
    let users = format!(
        "authorization {{ users: [ {{ user: u, password: p, permissions: {{ publish: [ \
         \"$KV.coord.orders.>\", {READING}, \"$JS.API.STREAM.CREATE.KV_coord\", \
         \"$JS.API.STREAM.PURGE.KV_coord\" ], subscribe: \"_INBOX.>\" }} }} ] }}\nno_auth_user: u\n"
    );
    let server = nats.with_config(&users).start()?;
    let backend = open(&server, "").await?;
    let health = backend.check().await?;
    let permissions = health.points.iter().filter(|point| point.name == "permissions");
    ensure(permissions.map(|point| point.status).eq([HealthStatus::Good]), &health)?;
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
    let made = api(&server, "STREAM.CREATE.KV_coord", foreign).await?;
    let field = match made.contains("\"allow_msg_ttl\":true") {
        true => "has max_msgs_per_subject 5",
        // It does not know that field.
        false => "has allow_msg_ttl false",
    };
    refused(&server, "", ErrorKind::Misconfigured, field).await?;
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

async fn kills(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let mut highest = Vec::new();
    for round in 0..3 {
        let mut held = Vec::new();
        for number in 0..12 {
            let name = format!("jobs-{number}");
            let mut grant = acquire(&backend, &name, 60).await?;
            ensure(highest.get(number).is_none_or(|term| *term < grant.term), &grant)?;
            highest.resize(12, grant.term);
            highest[number] = grant.term;
            for _ in 0..number % 3 {
                grant = renewed(&backend, &grant).await?;
            }
            held.push(grant);
        }
        // Those that are released stay so, whatever was on the disk when the server died.
        let released = held.split_off(6);
        for grant in &released {
            let release = backend.lease().release(grant).await?;
            ensure(release == Release::Released, (round, release))?;
        }
        server.nodes()[0].restart()?;
        for grant in &held {
            let again = renewed(&backend, grant).await?;
            ensure(again.fence() == grant.fence(), (round, &again))?;
        }
        for grant in &released {
            let renewed = backend.lease().renew(grant).await?;
            ensure(renewed == Renew::Lost(None), (round, renewed))?;
        }
        let items = backend.lease().list(Page::first()).await?.items;
        let mut fences: Vec<_> = items.iter().map(LeaseRecord::fence).collect();
        let mut wanted: Vec<_> = held.iter().map(Grant::fence).collect();
        fences.sort_by_key(|fence| fence.term);
        wanted.sort_by_key(|fence| fence.term);
        ensure(fences == wanted, (round, fences))?;
        for grant in &held {
            backend.lease().release(grant).await?;
        }
    }
    Ok(())
}

async fn token(nats: Nats) -> Done {
    let server = nats.with_config("authorization { token: \"t0ken\" }\n").start()?;
    let url = format!("nats://t0ken@{}/orders", server.addresses()[0]);
    let backend = NatsBackend::open(&BackendUrl::parse(&url)?).await?;
    ensure(!format!("{backend:?}").contains("t0ken"), &backend)?;
    acquire(&backend, "jobs", 10).await.map(drop)
}

async fn nkey(nats: Nats) -> Done {
    let user = KeyPair::new_user();
    let users = format!("authorization {{ users: [ {{ nkey: {} }} ] }}\n", user.public_key());
    let server = nats.with_config(&users).start()?;
    logs_in(&server, "nkey", &user.seed()?).await?;
    let other = KeyPair::new_user();
    let error = logs_in(&server, "nkey", &other.seed()?).await.expect_err("a stranger");
    ensure(format!("{error:?}").contains("denied"), error)
}

/// As `nsc` makes them: an operator vouches for an account, and that for a user.
async fn credentials(nats: Nats) -> Done {
    let (operator, account, user) =
        (KeyPair::new_operator(), KeyPair::new_account(), KeyPair::new_user());
    let system = KeyPair::new_account();
    let limits = r#""limits":{"subs":-1,"data":-1,"payload":-1,"imports":-1,"exports":-1,
        "wildcards":true,"conn":-1,"leaf":-1,"mem_storage":-1,"disk_storage":-1,"streams":-1,
        "consumer":-1},"type":"account","version":2"#;
    let plain = r#""limits":{"subs":-1,"data":-1,"payload":-1,"imports":-1,"exports":-1,
        "wildcards":true,"conn":-1,"leaf":-1},"type":"account","version":2"#;
    let config = format!(
        "operator: {}\nsystem_account: {system}\nresolver: MEMORY\nresolver_preload: {{ {account}: \
         {}, {system}: {} }}\n",
        jwt(&operator, &operator, r#""type":"operator","version":2"#)?,
        jwt(&operator, &account, limits)?,
        jwt(&operator, &system, plain)?,
        account = account.public_key(),
        system = system.public_key(),
    );
    let server = nats.with_config(&config).start()?;
    let rights = r#""pub":{},"sub":{},"subs":-1,"data":-1,"payload":-1,"type":"user","version":2"#;
    let text = |by: &KeyPair| -> Result<String, Failed> {
        Ok(format!(
            "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n\
             -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
            jwt(by, &user, rights)?,
            user.seed()?
        ))
    };
    logs_in(&server, "creds", &text(&account)?).await?;
    let stranger = text(&KeyPair::new_account())?;
    let error = logs_in(&server, "creds", &stranger).await.expect_err("another account's");
    ensure(format!("{error:?}").contains("denied"), error)
}

fn jwt(by: &KeyPair, of: &KeyPair, nats: &str) -> Result<String, Failed> {
    let (iss, sub) = (by.public_key(), of.public_key());
    let claims = format!(
        r#"{{"jti":"{sub}","iat":1700000000,"iss":"{iss}","name":"t","sub":"{sub}","nats":{{{nats}}}}}"#
    );
    let head = BASE64_URL.encode(r#"{"typ":"JWT","alg":"ed25519-nkey"}"#);
    let body = format!("{head}.{}", BASE64_URL.encode(claims));
    let signature = BASE64_URL.encode(by.sign(body.as_bytes())?);
    Ok(format!("{body}.{signature}"))
}

/// Opens a backend with what stands in a file, and uses it. No error shows any of that.
async fn logs_in(server: &Server, option: &str, text: &str) -> Done {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), text)?;
    let path = file.path().display().to_string().replace('/', "%2F");
    let url = format!("nats://{}/orders?{option}={path}", server.addresses()[0]);
    let shown = match NatsBackend::open(&BackendUrl::parse(&url)?).await {
        Ok(backend) => {
            acquire(&backend, "jobs", 10).await?;
            format!("{backend:?}")
        }
        Err(error) => return Err(format!("{error} {error:?}").into()),
    };
    let mut secrets = text.lines().filter(|line| line.len() > 40 && !line.starts_with('-'));
    ensure(!secrets.any(|secret| shown.contains(secret)), "a secret shows")
}

/// The first of those that the URL names is not there.
async fn several(nats: Nats) -> Done {
    let server = nats.start()?;
    let gone = coord_integration::free_port()?;
    let url = format!("nats://127.0.0.1:{gone},{}/orders", server.addresses()[0]);
    let backend = NatsBackend::open(&BackendUrl::parse(&url)?).await?;
    let grant = acquire(&backend, "jobs", 20).await?;
    server.nodes()[0].restart()?;
    let again = renewed(&backend, &grant).await?;
    ensure(again.fence() == grant.fence(), &again)
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
    for refusal in [old.lease().renew(&grant).await.err(), old.discovery().nodes().await.err()] {
        let error = refusal.ok_or("it was done in another bucket")?;
        ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
        ensure(error.to_string().contains("deleted and made again"), &error)?;
    }
    ensure(new.discovery().nodes().await?.is_empty(), "nodes")
}

/// Handles that run notice that their bucket is gone, or another one, at their next call, and do nothing
/// in another one.
async fn bucket_made_again(nats: Nats) -> Done {
    let server = nats.start()?;
    let handles = [
        open(&server, "").await?,
        open(&server, "").await?,
        open(&server, "").await?,
        open(&server, "").await?,
    ];
    let [beating, renewing, idle, watching] = &handles;
    let grant = acquire(renewing, "jobs", 60).await?;
    let info = node()?;
    let ttl = Ttl::from_secs(60)?;
    let registered = beating.discovery().register(&info, ttl, Replace::No).await?;
    let Register::Registered(held) = registered else { return Err("not registered".into()) };
    api(&server, "STREAM.DELETE.KV_coord", "").await?;
    let error = beating.discovery().heartbeat(&held, &info).await.expect_err("it is gone");
    ensure(error.to_string().contains("the bucket is gone"), &error)?;
    // A second later, as a restarted process would.
    sleep(Duration::from_secs(1)).await;
    let new = open(&server, "").await?;
    ensure(new.info().origin != beating.info().origin, new.info())?;
    let watched = watching.discovery().watch().next().await.ok_or("no end")?;
    for refusal in [
        beating.discovery().heartbeat(&held, &info).await.err(),
        renewing.lease().renew(&grant).await.err(),
        idle.lease().try_acquire(&request("jobs", 60)?).await.err(),
        watched.err(),
    ] {
        let error = refusal.ok_or("it was done in another bucket")?;
        ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
        ensure(error.effect() == Effect::None, &error)?;
        ensure(error.to_string().contains("open it again"), &error)?;
    }
    for old in &handles {
        let health = old.check().await?;
        let is_said = |point: &coord_core::HealthPoint| {
            point.status == HealthStatus::Bad && point.detail.contains("made again")
        };
        ensure(health.points.iter().any(is_said), &health)?;
    }
    // Nothing of what they tried is left.
    let next = acquire(&new, "jobs", 60).await?;
    ensure(next.term > grant.term, (next.term, grant.term))
}

/// Sequences begin with the server's time, whatever a client's clock says: also where a bucket was made
/// by one whose clock was days behind. One whose clock was ahead is refused while nothing is lost yet.
async fn server_clock(nats: Nats) -> Done {
    let server = nats.start()?;
    open(&server, "").await?;
    let told = api(&server, "STREAM.INFO.KV_coord", "").await?;
    let info: serde_json::Value = serde_json::from_str(&told)?;
    let made = info["created"].as_str().and_then(|text| humantime::parse_rfc3339(text).ok());
    let made = made.ok_or("no time")?.duration_since(std::time::UNIX_EPOCH)?.as_micros();
    let first = u128::from(info["state"]["first_seq"].as_u64().ok_or("no first sequence")?);
    ensure(first >= made && first < made + 60_000_000, (first, made))?;
    api(&server, "STREAM.DELETE.KV_coord", "").await?;

    let day = 86_400_000_000;
    let newer = |first: u128| {
        format!(
            r#""metadata":{{"coord.id":"a"}},"allow_msg_ttl":true,"first_seq":{first},
            "subject_delete_marker_ttl":1000000000"#
        )
    };
    make_bucket(&server, &newer(made - 3 * day)).await?;
    let grant = acquire(&open(&server, "").await?, "jobs", 60).await?;
    ensure(u128::from(grant.term.store_part()) >= made, (grant.term, made))?;
    api(&server, "STREAM.DELETE.KV_coord", "").await?;

    make_bucket(&server, &newer(made + 3 * day)).await?;
    refused(&server, "", ErrorKind::Misconfigured, "by the server's clock").await.map(drop)
}

/// What `nats kv del` and `nats kv purge` remove is gone, and no farewell.
async fn deleted_by_hand(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let mut watch = backend.discovery().watch();
    watch.next().await.ok_or("no snapshot")??;
    let client = ConnectOptions::new().connect(server.addresses().to_vec()).await?;
    for operation in ["DEL", "PURGE"] {
        let info = node()?;
        let registered =
            backend.discovery().register(&info, Ttl::from_secs(60)?, Replace::No).await?;
        ensure(matches!(registered, Register::Registered(_)), registered)?;
        let joined = watch.next().await.ok_or("no event")??;
        ensure(matches!(joined, NodeEvent::Joined(_)), joined)?;
        let mut headers = HeaderMap::new();
        headers.insert("KV-Operation", operation);
        if operation == "PURGE" {
            headers.insert("Nats-Rollup", "sub");
        }
        let request = async_nats::Request::new().headers(headers).payload("".into());
        client.send_request("$KV.coord.orders.node.node-1", request).await?;
        let gone = watch.next().await.ok_or("no event")??;
        let (node, incarnation) = (info.id, info.incarnation);
        ensure(gone == NodeEvent::Expired { node, incarnation, judged: false }, gone)?;
    }
    Ok(())
}

/// A record whose end is hours away, as one that was written while the server's clock was fast, written
/// by hand: it ends a TTL after it should have.
async fn far_end(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 2).await?;
    lengthen(&server, "lease.jobs").await?;
    let mut watch = backend.lease().watch(&grant.lease);
    let first = watch.next().await.ok_or("no snapshot")??;
    ensure(matches!(first, LeaseEvent::Snapshot(Some(_))), &first)?;
    // A TTL and the patience of the watch, and a TTL from then on.
    let limit = Duration::from_secs(20);
    let next = tokio::time::timeout(limit, watch.next()).await?.ok_or("no event")??;
    ensure(matches!(next, LeaseEvent::Vacant), &next)?;
    acquire(&backend, "jobs", 2).await.map(drop)
}

/// Writes a record once more, with an end that is eight hours away.
async fn lengthen(server: &Server, name: &str) -> Done {
    let subject = format!("$KV.coord.orders.{name}");
    let asked = format!(r#"{{"last_by_subj":"{subject}"}}"#);
    let told = api(server, "STREAM.MSG.GET.KV_coord", &asked).await?;
    let told: serde_json::Value = serde_json::from_str(&told)?;
    let data = told["message"]["data"].as_str().ok_or("no record")?;
    let record = base64::engine::general_purpose::STANDARD.decode(data)?;
    let client = ConnectOptions::new().connect(server.addresses().to_vec()).await?;
    let mut headers = HeaderMap::new();
    headers.insert("Nats-TTL", "28800s");
    let request = async_nats::Request::new().headers(headers).payload(record.into());
    client.send_request(subject, request).await?;
    Ok(())
}

/// The same where nobody watches: who asks is told no more than a TTL, and lets it count from then on.
async fn unwatched_far_end(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "looked-at", 5).await?;
    acquire(&backend, "wanted", 5).await?;
    // From its second write on a record holds its term, which else is the sequence of the first.
    ensure(matches!(backend.lease().renew(&grant).await?, Renew::Renewed(_)), "it was lost")?;
    let (info, ttl) = (node()?, Ttl::from_secs(5)?);
    let registered = backend.discovery().register(&info, ttl, Replace::No).await?;
    ensure(matches!(registered, Register::Registered(_)), registered)?;
    for name in ["lease.looked-at", "lease.wanted", "node.node-1"] {
        lengthen(&server, name).await?;
    }
    let record = backend.lease().get(&grant.lease).await?.ok_or("it is held")?;
    ensure(record.may_expire_in.is_some_and(|left| left <= ttl.get()), &record)?;
    ensure(record.fence() == grant.fence(), &record)?;
    // What the look wrote is a renewal to its holder.
    ensure(matches!(backend.lease().renew(&grant).await?, Renew::Renewed(_)), "it was lost")?;
    lengthen(&server, "lease.looked-at").await?;
    backend.lease().list(Page::first()).await?;
    let nodes = backend.discovery().nodes().await?;
    ensure(nodes[0].may_expire_in.is_some_and(|left| left <= ttl.get()), &nodes)?;
    let next = node()?;
    let limit = Duration::from_secs(60);
    tokio::time::timeout(limit, async {
        while backend.lease().get(&grant.lease).await?.is_some() {
            sleep(PAUSE).await;
        }
        while acquire(&backend, "wanted", 5).await.is_err() {
            sleep(PAUSE).await;
        }
        loop {
            let outcome = backend.discovery().register(&next, ttl, Replace::No).await?;
            if let Register::Registered(_) = outcome {
                return Done::Ok(());
            }
            sleep(PAUSE).await;
        }
    })
    .await?
}

/// `get` and `list` tell how long ago a lease was renewed, and how long it has still to live.
async fn shows_renewal(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let begun = Instant::now();
    let grant = acquire(&backend, "jobs", 60).await?;
    let told = async |begun: Instant| {
        let listed = backend.lease().list(Page::first()).await?.items.remove(0);
        let got = backend.lease().get(&grant.lease).await?.ok_or("it is held")?;
        let most = begun.elapsed() + CLOCK_SLACK;
        for record in [&listed, &got] {
            let (ago, left) = record.renewed_ago.zip(record.may_expire_in).ok_or("it tells")?;
            ensure(ago <= most && left <= grant.ttl.get(), record)?;
            ensure(left + most >= grant.ttl.get(), record)?;
        }
        Ok::<_, Failed>(got.renewed_ago.unwrap_or_default())
    };
    while told(begun).await? < Duration::from_secs(2) {
        ensure(begun.elapsed() < Duration::from_secs(30), "no time goes by")?;
        sleep(PAUSE).await;
    }
    let renewed = Instant::now();
    ensure(matches!(backend.lease().renew(&grant).await?, Renew::Renewed(_)), "it was lost")?;
    told(renewed).await.map(drop)
}

fn node() -> Result<NodeInfo, Failed> {
    Ok(NodeInfo::new(NodeId::new("node-1")?, Address::new("127.0.0.1:1")?))
}

/// A bucket that somebody else made, with these fields besides.
async fn make_bucket(server: &Server, more: &str) -> Done {
    let config = format!(
        r#"{{"name":"KV_coord","subjects":["$KV.coord.>"],"retention":"limits","storage":"file",
        "num_replicas":1,"discard":"new","max_msgs":-1,"max_bytes":-1,"max_consumers":-1,
        "max_age":0,"max_msgs_per_subject":1,"allow_rollup_hdrs":true,{more}}}"#
    );
    let made = api(server, "STREAM.CREATE.KV_coord", &config).await?;
    ensure(made.contains("\"did_create\":true"), made)
}

/// Clients of one bucket do the same, whichever server each of them is connected to.
async fn older_bucket(nats: Nats) -> Done {
    let server = nats.start()?;
    let metadata = r#""metadata":{"coord.id":"a","coord.expiry":"clients"}"#;
    make_bucket(&server, metadata).await?;
    ended_by_clock(&server).await?;
    let grant = acquire(&open(&server, "").await?, "jobs", 60).await?;
    ensure(grant.term.store_part() > 1_577_836_800_000_000, grant.term)
}

async fn newer_bucket(nats: Nats) -> Done {
    let server = nats.start()?;
    let newer = r#""metadata":{"coord.id":"a"},"allow_msg_ttl":true,"first_seq":1795000000000000,
        "subject_delete_marker_ttl":1000000000"#;
    make_bucket(&server, newer).await?;
    refused(&server, "", ErrorKind::Unsupported, "was made for 2.11.7 or newer").await.map(drop)
}

async fn ends_by_clock(nats: Nats) -> Done {
    ended_by_clock(&nats.start()?).await
}

async fn ended_by_clock(server: &Server) -> Done {
    let (backend, other) = (open(server, "").await?, open(server, "").await?);
    let health = backend.check().await?;
    let degraded = |point: &coord_core::HealthPoint| {
        point.status == HealthStatus::Warning && point.detail.contains("degraded")
    };
    ensure(health.points.iter().any(degraded), &health)?;
    ensure(!backend.info().guarantees.publish_checks_lease, backend.info())?;

    // One that is watched.
    let begun = Instant::now();
    let grant = acquire(&backend, "jobs", 2).await?;
    let mut watch = other.lease().watch(&grant.lease);
    let first = watch.next().await.ok_or("no snapshot")??;
    ensure(matches!(first, LeaseEvent::Snapshot(Some(_))), &first)?;
    let next = tokio::time::timeout(Duration::from_secs(10), watch.next()).await?;
    ensure(matches!(next, Some(Ok(LeaseEvent::Vacant))), &next)?;
    ensure(begun.elapsed() >= grant.ttl.get(), begun.elapsed())?;
    ensure(backend.lease().renew(&grant).await? == Renew::Lost(None), "it was over")?;

    // One that nobody looks at.
    let grant = acquire(&backend, "alone", 1).await?;
    let unseen = acquire(&backend, "unseen", 1).await?;
    sleep(grant.ttl.get() + Duration::from_millis(50)).await;
    ensure(backend.lease().renew(&grant).await? == Renew::Lost(None), "a late one revives")?;
    ensure(backend.lease().release(&unseen).await? == Release::NotHeld, "it was over")?;
    ensure(other.lease().list(Page::first()).await?.items.is_empty(), "nothing is held")?;
    let next = acquire(&other, "alone", 1).await?;
    ensure(next.term > grant.term, (next.term, grant.term))
}

async fn reader_sees_ends(nats: Nats) -> Done {
    let users = format!(
        "authorization {{ users: [ {{ user: writer, password: p }}, {{ user: reader, password: p, \
         permissions: {{ publish: [ {READING} ], subscribe: \"_INBOX.>\" }} }} ] }}\n\
         no_auth_user: writer\n"
    );
    let server = nats.with_config(&users).start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 2).await?;
    let url = format!("nats://reader:p@{}/orders", server.addresses()[0]);
    let reader = NatsBackend::open(&BackendUrl::parse(&url)?).await?;
    let mut watch = reader.lease().watch(&grant.lease);
    let first = watch.next().await.ok_or("no snapshot")??;
    ensure(matches!(first, LeaseEvent::Snapshot(Some(_))), &first)?;
    let next = tokio::time::timeout(Duration::from_secs(10), watch.next()).await?;
    ensure(matches!(next, Some(Ok(LeaseEvent::Vacant))), &next)?;
    ensure(reader.lease().get(&grant.lease).await?.is_none(), "it is over for readers")?;
    // What is denied is not taken for a loss.
    let error = reader.lease().renew(&grant).await.expect_err("denied");
    ensure(error.kind() == ErrorKind::Denied, &error)
}

/// Where the server ends no markers, clients take them away.
async fn nothing_left(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 10).await?;
    ensure(backend.lease().release(&grant).await? == Release::Released, "not released")?;
    acquire(&backend, "forgotten", 1).await?;
    // As a process leaves it that ends too soon.
    let client = ConnectOptions::new().connect(server.addresses().to_vec()).await?;
    let mut headers = HeaderMap::new();
    headers.insert("KV-Operation", "PURGE");
    let request = async_nats::Request::new().headers(headers).payload("".into());
    client.send_request("$KV.coord.orders.lease.left", request).await?;
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let held = backend.lease().list(Page::first()).await?.items;
        let filter = r#"{"subjects_filter":"$KV.coord.orders.>"}"#;
        let info = api(&server, "STREAM.INFO.KV_coord", filter).await?;
        if held.is_empty() && !info.contains("$KV.coord.orders.") {
            return Ok(());
        }
        ensure(Instant::now() < end, format!("left: {info}"))?;
        sleep(Duration::from_millis(100)).await;
    }
}

/// An answer that a leader gave, and did not live to put in its place, is put there by the next.
async fn answer_is_put_in_place(nats: Nats) -> Done {
    let server = nats.start()?;
    let backend = open(&server, "").await?;
    let placement = backend.placement();
    let origin = Origin::new("elsewhere:1/orders");
    let fence = |term| {
        let (lease, term) = (LeaseName::leader(), Term::from_u64(term));
        Fence::new(lease, term, AttemptId::random(), origin.clone())
    };
    let (first, second) = (fence(7), fence(8));
    let claim = |fence: &Fence| -> Result<ClaimRequest, Failed> {
        let header = TableHeader::new(ShardCount::new(1)?);
        Ok(ClaimRequest::new(TableName::cluster(), fence.clone(), header))
    };
    let asked = Request::new(NodeId::new("node-1")?, Duration::from_secs(60), "drain node-3")?;
    placement.request(&asked).await?;
    let claimed = placement.claim(&claim(&first)?).await?;
    ensure(matches!(claimed, Claim::Claimed(_)), &claimed)?;
    let answer = Answer::new("done")?;
    let recorded = placement.answer(&asked.id, &first, &answer).await?;
    ensure(recorded == Answered::Recorded, &recorded)?;
    // The answer stands with the head; now its own place is empty again, as if the leader had died
    // between the two.
    let place = format!("$KV.coord.orders.request.{}.answered", asked.id);
    api(&server, "STREAM.PURGE.KV_coord", &format!(r#"{{"filter":"{place}"}}"#)).await?;
    let claimed = placement.claim(&claim(&second)?).await?;
    ensure(matches!(claimed, Claim::Claimed(_)), &claimed)?;
    let late = placement.answer(&asked.id, &first, &answer).await?;
    ensure(late == Answered::Fenced(Some(second.clone())), &late)?;
    let other = placement.answer(&asked.id, &second, &Answer::new("no")?).await?;
    ensure(other == Answered::Already(answer), &other)
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
    // The version has its own say.
    let mut rest = health.points.iter().filter(|point| point.name != "version");
    ensure(rest.all(|point| point.status == HealthStatus::Good), &health)?;
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
