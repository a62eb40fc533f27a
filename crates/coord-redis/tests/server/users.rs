//! Who may do what, encryption, and what is told to an operator.

use coord_core::{
    Backend, Claim, ClaimRequest, Consistency, Effect, ErrorKind, HealthPoint, HealthStatus,
    LeaseEvent, NodeId, NodeInfo, Page, Register, Release, Renew, Replace, ShardCount, TableHeader,
    Ttl,
};
use coord_integration::servers::Redis;
use futures::StreamExt;
use libtest_mimic::Trial;

use super::setup::{Done, acquire, ask, ensure, on, open, open_url, orders, said};

/// What docs/backends/redis.md names.
const COMMANDS: &[&str] = &[
    "evalsha",
    "eval",
    "get",
    "set",
    "hget",
    "hmget",
    "hset",
    "hsetnx",
    "hdel",
    "hkeys",
    "zadd",
    "zscore",
    "zcount",
    "zrange",
    "zrangebyscore",
    "zrangebylex",
    "zrem",
    "xadd",
    "xread",
    "xrange",
    "xrevrange",
    "pexpire",
    "time",
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = vec![
        on("the_documented_permissions_suffice", Redis::new(), documented_permissions),
        on("every_missing_permission_is_named", Redis::new(), missing_permissions),
        on("wrong_credentials_are_denied", Redis::new(), wrong_credentials),
        on("a_password_that_nobody_asked_for_is_told", Redis::new(), needless_password),
        on("a_forbidden_config_leaves_settings_unknown", Redis::new(), forbidden_config),
        on("settings_that_lose_data_are_told", Redis::new(), settings),
        on("best_effort_is_said_and_refused", Redis::new(), best_effort),
    ];
    #[cfg(feature = "tls")]
    trials.push(on("an_encrypted_connection_is_made", Redis::new().with_tls(), encrypted));
    trials.push(Trial::test("a_port_where_nobody_listens_is_told_at_once", nobody));
    trials
}

fn nobody() -> Done {
    let port = coord_integration::free_port()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let url = format!("redis://me:hunter2@127.0.0.1:{port}/orders");
    let error = runtime.block_on(open_url(&url)).expect_err("nobody is there");
    ensure(error.kind() == ErrorKind::Unavailable && error.effect() == Effect::None, &error)?;
    ensure(error.to_string().contains("is one up there?"), &error)?;
    ensure(!format!("{error} {error:?}").contains("hunter2"), &error)
}

fn allow(commands: &[&str]) -> Vec<String> {
    let rules = ["on", ">hunter2", "resetkeys", "~coord:{orders}:*", "-@all"];
    let rules = rules.into_iter().map(str::to_owned);
    rules.chain(commands.iter().map(|command| format!("+{command}"))).collect()
}

async fn documented_permissions(redis: Redis) -> Done {
    let server = redis.start()?;
    let rules = allow(COMMANDS);
    let mut command = vec!["ACL", "SETUSER", "u"];
    command.extend(rules.iter().map(String::as_str));
    server.nodes()[0].ask(&command)?;
    let backend = open_url(&format!("redis://u:hunter2@{}/orders", server.addresses()[0])).await?;
    let (status, detail) = said(&backend, "permissions").await?;
    ensure(status == HealthStatus::Good, detail)?;
    let grant = acquire(&backend, "jobs", 10).await?;
    let mut watch = backend.lease().watch(&grant.lease);
    let first = watch.next().await.ok_or("no snapshot")??;
    ensure(matches!(first, LeaseEvent::Snapshot(Some(_))), &first)?;
    ensure(matches!(backend.lease().renew(&grant).await?, Renew::Renewed(_)), "not renewed")?;
    let header = TableHeader::new(ShardCount::new(8)?);
    let claim = ClaimRequest::new(orders()?, grant.fence(), header);
    let claimed = backend.placement().claim(&claim).await?;
    ensure(matches!(claimed, Claim::Claimed(_)), &claimed)?;
    ensure(backend.placement().tables().await? == [orders()?], "no table")?;
    let node = NodeInfo::new(NodeId::new("node-1")?, "10.0.0.1:80".parse()?);
    let ttl = Ttl::from_secs(10)?;
    let registered = backend.discovery().register(&node, ttl, Replace::No).await?;
    ensure(matches!(registered, Register::Registered(_)), &registered)?;
    ensure(backend.discovery().nodes().await?.len() == 1, "one node")?;
    ensure(backend.lease().list(Page::first()).await?.items.len() == 1, "one lease")?;
    ensure(backend.lease().release(&grant).await? == Release::Released, "not released")?;
    let after = watch.next().await.ok_or("no event")??;
    ensure(matches!(after, LeaseEvent::Vacant), after)
}

async fn missing_permissions(redis: Redis) -> Done {
    let server = redis.start()?;
    let all = allow(COMMANDS);
    let mut command = vec!["ACL", "SETUSER", "u"];
    command.extend(all.iter().map(String::as_str));
    server.nodes()[0].ask(&command)?;
    let url = format!("redis://u:hunter2@{}/orders", server.addresses()[0]);
    let backend = open_url(&url).await?;
    for missing in COMMANDS {
        server.nodes()[0].ask(&["ACL", "SETUSER", "u", &format!("-{missing}")])?;
        if *missing == "eval" {
            // What the server has seen already goes on by EVALSHA.
            server.nodes()[0].ask(&["SCRIPT", "FLUSH"])?;
        }
        let (status, detail) = said(&backend, "permissions").await?;
        ensure(status == HealthStatus::Bad, format!("without {missing}: {detail}"))?;
        ensure(detail.to_lowercase().contains(missing), format!("without {missing}: {detail}"))?;
        server.nodes()[0].ask(&["ACL", "SETUSER", "u", &format!("+{missing}")])?;
    }
    server.nodes()[0].ask(&["ACL", "SETUSER", "u", "-zadd"])?;
    let error = backend.lease().try_acquire(&ask("jobs", 10)?).await.expect_err("denied");
    ensure(error.kind() == ErrorKind::Denied, &error)?;
    ensure(error.to_string().to_lowercase().contains("zadd"), &error)?;
    server.nodes()[0].ask(&["ACL", "SETUSER", "u", "resetkeys", "~other:*"])?;
    let error = open_url(&url).await.expect_err("other keys");
    ensure(error.kind() == ErrorKind::Denied, &error)?;
    ensure(error.to_string().contains("key"), &error)
}

async fn wrong_credentials(redis: Redis) -> Done {
    let server = redis.with_login("me", "right").start()?;
    let address = &server.addresses()[0];
    for login in ["me:wrong-hunter2@", ":wrong-hunter2@", ""] {
        let error = open_url(&format!("redis://{login}{address}/orders")).await.expect_err("wrong");
        ensure(error.kind() == ErrorKind::Denied, &error)?;
        ensure(error.effect() == Effect::None, &error)?;
        ensure(!format!("{error} {error:?}").contains("hunter2"), &error)?;
    }
    let backend = open(&server, "").await?;
    ensure(!format!("{backend:?}").contains("right"), &backend)
}

async fn needless_password(redis: Redis) -> Done {
    let server = redis.start()?;
    let url = format!("redis://:hunter2@{}/orders", server.addresses()[0]);
    let error = open_url(&url).await.expect_err("no password is wanted");
    ensure(matches!(error.kind(), ErrorKind::Misconfigured | ErrorKind::Denied), &error)?;
    ensure(!format!("{error} {error:?}").contains("hunter2"), &error)
}

async fn forbidden_config(redis: Redis) -> Done {
    let server = redis.with_config("rename-command CONFIG \"\"\n").start()?;
    let backend = open(&server, "").await?;
    let health = backend.check().await?;
    let is_unknown = |point: &HealthPoint| point.detail.contains("appendonly unknown");
    ensure(health.points.iter().any(is_unknown), health)?;
    acquire(&backend, "jobs", 10).await.map(drop)
}

async fn settings(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let told = async |status, part: &str| {
        let health = backend.check().await?;
        let is_told =
            health.points.iter().any(|point| point.status == status && point.detail.contains(part));
        ensure(is_told, (part, health))
    };
    told(HealthStatus::Good, "appendfsync always").await?;
    told(HealthStatus::Warning, "no replica").await?;
    for (name, value, status, part) in [
        ("appendfsync", "everysec", HealthStatus::Warning, "appendfsync everysec"),
        ("appendonly", "no", HealthStatus::Warning, "appendonly no"),
        ("maxmemory-policy", "allkeys-lru", HealthStatus::Bad, "noeviction"),
    ] {
        server.nodes()[0].ask(&["CONFIG", "SET", "maxmemory", "100mb"])?;
        server.nodes()[0].ask(&["CONFIG", "SET", name, value])?;
        told(status, part).await?;
    }
    Ok(())
}

async fn best_effort(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let guarantees = &backend.info().guarantees;
    ensure(guarantees.consistency == Consistency::BestEffort, guarantees)?;
    ensure(guarantees.terms_survive_loss && guarantees.publish_checks_lease, guarantees)?;
    let error = guarantees.require(Consistency::Linearizable).expect_err("best effort");
    ensure(error.kind() == ErrorKind::Unsupported, &error)?;
    let (_, detail) = said(&backend, "guarantee").await?;
    ensure(detail.contains("best effort"), detail)
}

#[cfg(feature = "tls")]
async fn encrypted(redis: Redis) -> Done {
    let server = redis.start()?;
    let authority = server.authority().ok_or("no authority")?.display().to_string();
    let address = &server.addresses()[0];
    let good = format!("rediss://{address}/orders?ca={}", authority.replace('/', "%2F"));
    let backend = open_url(&good).await?;
    ensure(backend.info().scheme == "rediss", backend.info())?;
    acquire(&backend, "jobs", 10).await?;
    // Nobody but its own authority vouches for it.
    let error = open_url(&format!("redis://{address}/orders?tls=on")).await.expect_err("stranger");
    ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
    // And one that does not speak TLS is told so.
    let error = open_url(&format!("redis://{address}/orders")).await.expect_err("plain");
    ensure(error.kind() == ErrorKind::Unavailable, &error)
}
