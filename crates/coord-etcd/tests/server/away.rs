//! Servers that are away for a while, and replies that get lost.

use std::sync::Arc;
use std::time::Duration;

use coord_core::{
    Acquire, Backend as _, Claim, ClaimRequest, Effect, ErrorKind, Heartbeat, NodeId, NodeInfo,
    Publish, Register, Renew, Replace, ShardCount, TableHeader, TableName, Ttl, Version,
};
use coord_integration::faults::{Direction, Proxy, Request};
use coord_integration::servers::{Etcd, Node, Server};
use libtest_mimic::Trial;
use tokio::time::{Instant, timeout};

use super::setup::{SOON, acquire, admin, ask, name, on, open, release, renew, until};

pub(crate) fn trials() -> Vec<Trial> {
    let plain = Etcd::new();
    let control = Etcd::new().with_control();
    let three = Etcd::new().with_nodes(3).with_control();
    vec![
        on("terms_rise_over_a_restart", &control, terms_rise_over_a_restart),
        on("a_lost_reply_is_ones_own_write", &plain, a_lost_reply_is_ones_own_write),
        on("a_black_hole_is_bounded", &plain, a_black_hole_is_bounded),
        on("a_dead_leader_ends_no_grant", &three, a_dead_leader_ends_no_grant),
        on("a_paused_leader_ends_no_grant", &three, a_paused_leader_ends_no_grant),
        on("a_paused_follower_holds_nothing_up", &three, a_paused_follower_holds_nothing_up),
        on("renewals_share_streams_and_reads", &control, renewals_share_streams_and_reads),
        on("only_a_first_try_writes_in_vain", &control, only_a_first_try_writes_in_vain),
    ]
}

async fn terms_rise_over_a_restart(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let backend = open(&format!("{}/orders", server.url())).await;
    let grant = acquire(&backend, &ask("jobs", "node-1", 30)).await;
    let node = &server.nodes()[0];
    node.kill().expect("dies");
    let error = backend.lease().renew(&grant).await.expect_err("the server is away");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    node.start().expect("starts again");
    until("the grant is renewed again", || async {
        matches!(backend.lease().renew(&grant).await, Ok(Renew::Renewed(_))).then_some(())
    })
    .await;
    release(&backend, &grant).await;
    let next = acquire(&backend, &ask("jobs", "node-1", 30)).await;
    assert!(next.term > grant.term, "{} after {}", next.term, grant.term);
    let again = open(&format!("{}/orders", server.url())).await;
    assert_eq!(again.info().origin, backend.info().origin, "a restarted store is the same one");
}

async fn a_lost_reply_is_ones_own_write(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let proxy = Proxy::to(&server).await.expect("stands");
    let backend = open(&format!("{}/lost-reply", server.url_via(proxy.addresses()))).await;
    let request = ask("jobs", "node-1", 30);
    // Only the write holds the attempt.
    let attempt = request.holder.attempt.to_string().into_bytes();
    proxy.lose_reply(Request::With(attempt));
    let error = backend.lease().try_acquire(&request).await.expect_err("the reply is lost");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown));
    assert_eq!(proxy.replies_lost(), 1);
    let direct = open(&format!("{}/lost-reply", server.url())).await;
    let record = direct.lease().get(&request.lease).await.expect("reads").expect("was applied");
    let grant = until("the connection is back", || async {
        match backend.lease().try_acquire(&request).await {
            Ok(Acquire::Acquired(grant)) => Some(grant),
            Ok(other) => panic!("its own grant is {other:?}"),
            Err(_) => None,
        }
    })
    .await;
    assert_eq!(grant.fence(), record.fence(), "a second grant");

    let (table, header) = (TableName::new("orders").expect("name"), TableHeader::default());
    let claim = ClaimRequest::new(table.clone(), grant.fence(), header);
    let claimed = backend.placement().claim(&claim).await.expect("claims");
    let Claim::Claimed(claimed) = claimed else { panic!("not claimed: {claimed:?}") };
    let mut edit = claimed.map.edit();
    edit.set_annex("something".into()).expect("small");
    let map = Arc::new(edit.finish(grant.fence()).expect("changed"));
    proxy.lose_reply(Request::With(b"manifest".to_vec()));
    let placement = backend.placement();
    let publish =
        || placement.publish(&table, map.writer().expect("a writer"), Version::ZERO, &map);
    let error = publish().await.expect_err("the reply is lost");
    assert_eq!(error.effect(), Effect::Unknown, "{error:?}");
    let published = until("the connection is back", || async { publish().await.ok() }).await;
    assert_eq!(published, Publish::Published(Version::new(1)));
}

async fn a_black_hole_is_bounded(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let proxy = Proxy::to(&server).await.expect("stands");
    let via = server.url_via(proxy.addresses());
    let backend = open(&format!("{via}/black-hole?request_timeout=500ms")).await;
    let grant = acquire(&backend, &ask("jobs", "node-1", 60)).await;
    // The stream of keep-alives is open by now.
    renew(&backend, &grant).await;
    proxy.hold(Direction::Both);
    let started = Instant::now();
    let error = backend.lease().renew(&grant).await.expect_err("no answer");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown));
    let looked = backend.lease().get(&grant.lease).await.expect_err("no answer");
    assert_eq!(looked.effect(), Effect::None, "{looked:?}");
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    proxy.heal();
    until("it renews again", || async {
        matches!(backend.lease().renew(&grant).await, Ok(Renew::Renewed(_))).then_some(())
    })
    .await;
}

async fn a_dead_leader_ends_no_grant(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let backend = open(&format!("{}/orders", server.url())).await;
    let grant = acquire(&backend, &ask("jobs", "node-1", 15)).await;
    renew(&backend, &grant).await;
    server.leader().expect("a leader").kill().expect("dies");
    let died = Instant::now();
    until("the grant is renewed at the next leader", || async {
        match backend.lease().renew(&grant).await {
            Ok(Renew::Renewed(renewed)) => {
                assert_eq!(renewed.term, grant.term);
                Some(())
            }
            Ok(lost) => panic!("a grant of 15 s is lost after {:?}: {lost:?}", died.elapsed()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
                None
            }
        }
    })
    .await;
    assert!(died.elapsed() < SOON, "{:?}", died.elapsed());
    // With one of three endpoints dead, every request has to find a living one.
    let table = TableName::new("orders").expect("name");
    let header = TableHeader::new(ShardCount::new(8).expect("a count"));
    let claim = ClaimRequest::new(table.clone(), grant.fence(), header);
    let claimed = backend.placement().claim(&claim).await.expect("claims");
    assert!(matches!(claimed, Claim::Claimed(_)), "{claimed:?}");
    for _ in 0..50 {
        backend.placement().load(&table).await.expect("loads");
    }
    release(&backend, &grant).await;
    let next = acquire(&backend, &ask("jobs", "node-2", 15)).await;
    assert!(next.term > grant.term, "{} after {}", next.term, grant.term);
}

/// How long a caller waits: less than the limit of a request, as a session with a short TTL does.
const CALL: Duration = Duration::from_secs(1);
const TTL_SECONDS: u64 = 10;

async fn a_paused_leader_ends_no_grant(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let leader = server.leader().expect("a leader");
    // The members go on forwarding to it until they have elected another: 1 to 2 s.
    goes_on_without(&server, leader, Duration::from_secs(3)).await;
}

async fn a_paused_follower_holds_nothing_up(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let leader = server.leader().expect("a leader").name().to_owned();
    let follower = server.nodes().iter().find(|node| node.name() != leader).expect("a follower");
    goes_on_without(&server, follower, Duration::ZERO).await;
}

/// While one member hangs, handles that began at different endpoints renew, and acquire within two time
/// limits of a request.
async fn goes_on_without(server: &Server, member: &Node, election: Duration) {
    const LIMIT: Duration = Duration::from_secs(2);
    let url = format!("{}/orders?request_timeout=2s", server.url());
    let mut handles = Vec::new();
    for n in 0..6 {
        let backend = open(&url).await;
        let grant = acquire(&backend, &ask(&format!("jobs-{n}"), "node-1", TTL_SECONDS)).await;
        let node = NodeInfo::new(
            NodeId::new(format!("node-{n}")).expect("name"),
            "a:1".parse().expect("an address"),
        );
        let ttl = Ttl::from_secs(TTL_SECONDS).expect("a good ttl");
        let registered = backend.discovery().register(&node, ttl, Replace::No).await;
        let Ok(Register::Registered(held)) = registered else { panic!("{registered:?}") };
        renew(&backend, &grant).await;
        handles.push((n, backend, grant, node, held));
    }
    member.pause().expect("hangs");
    let paused = Instant::now();
    let limit = election + LIMIT;
    let each = handles.iter().map(|(n, backend, grant, node, held)| async move {
        let (lease, discovery) = (backend.lease(), backend.discovery());
        let goes_on = async {
            let (mut renewed, mut beat) = (paused, paused);
            while paused.elapsed() < Duration::from_secs(TTL_SECONDS) {
                let renewal = timeout(CALL, lease.renew(grant));
                match tokio::join!(renewal, timeout(CALL, discovery.heartbeat(held, node))) {
                    (Ok(Ok(Renew::Lost(by))), _) => panic!("lease {n} is lost to {by:?}"),
                    (_, Ok(Ok(Heartbeat::Gone))) => panic!("node {n} is gone"),
                    (renewal, heartbeat) => {
                        let now = Instant::now();
                        renewed = if matches!(renewal, Ok(Ok(_))) { now } else { renewed };
                        beat = if matches!(heartbeat, Ok(Ok(_))) { now } else { beat };
                    }
                }
                let (renewed, beat) = (renewed.elapsed(), beat.elapsed());
                assert!(renewed < limit, "lease {n} was not renewed for {renewed:?}");
                assert!(beat < limit, "node {n} had no heartbeat for {beat:?}");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        // As a session does: the same attempt until there is an answer.
        let acquires = async {
            let request = ask(&format!("more-{n}"), "node-1", TTL_SECONDS);
            let grant = until("a lease is acquired", || async {
                match lease.try_acquire(&request).await {
                    Ok(Acquire::Acquired(grant)) => Some(grant),
                    Ok(other) => panic!("its own attempt is {other:?}"),
                    Err(_) => None,
                }
            })
            .await;
            let after = paused.elapsed();
            assert!(after < limit + LIMIT, "a lease was acquired after {after:?}");
            assert_eq!(grant.holder, request.holder);
        };
        tokio::join!(goes_on, acquires);
    });
    futures::future::join_all(each).await;
    member.resume().expect("goes on");
}

async fn renewals_share_streams_and_reads(etcd: Etcd) {
    const LEASES: usize = 200;
    let server = etcd.start().expect("starts");
    let backend = open(&format!("{}/orders", server.url())).await;
    let mut grants = Vec::new();
    for n in 0..LEASES {
        grants.push(acquire(&backend, &ask(&format!("jobs-{n}"), "node-1", 60)).await);
    }
    let of = |metric, method| counted(server.nodes()[0].http_port(), metric, method);
    let reads = || of("grpc_server_started_total", "Txn");
    let before = reads();
    for _ in 0..2 {
        let lease = backend.lease();
        for renewed in futures::future::join_all(grants.iter().map(|it| lease.renew(it))).await {
            assert!(matches!(renewed, Ok(Renew::Renewed(_))), "{renewed:?}");
        }
    }
    let read = reads() - before;
    assert!(read < LEASES as u64 / 2, "{read} requests for {LEASES} leases, renewed twice");
    // One that is gone is found among the others.
    let mut root = admin(server.addresses(), None).await;
    root.delete(format!("coord/orders/lease/{}", name("jobs-7")), None).await.expect("deletes");
    let lease = backend.lease();
    let renewed = futures::future::join_all(grants[..20].iter().map(|it| lease.renew(it))).await;
    for (place, renewed) in renewed.into_iter().enumerate() {
        match renewed.expect("an answer") {
            Renew::Lost(None) if place == 7 => {}
            Renew::Renewed(_) if place != 7 => {}
            other => panic!("lease {place}: {other:?}"),
        }
    }
    assert_eq!(of("grpc_server_started_total", "LeaseKeepAlive"), 1);
    let sent = of("grpc_server_msg_received_total", "LeaseKeepAlive");
    assert_eq!(sent, LEASES as u64 * 2 + 20);
}

async fn only_a_first_try_writes_in_vain(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let holder = open(&format!("{}/orders", server.url())).await;
    let candidate = open(&format!("{}/orders", server.url())).await;
    let grant = acquire(&holder, &ask("jobs", "node-1", 60)).await;
    let of = |method| counted(server.nodes()[0].http_port(), "grpc_server_started_total", method);
    let before = of("LeaseGrant");
    let request = ask("jobs", "node-2", 60);
    for _ in 0..5 {
        let tried = candidate.lease().try_acquire(&request).await.expect("answers");
        assert!(matches!(tried, Acquire::Held(_)), "{tried:?}");
    }
    assert_eq!(of("LeaseGrant") - before, 1);
    release(&holder, &grant).await;
    let next = acquire(&candidate, &request).await;
    assert!(next.term > grant.term, "{} after {}", next.term, grant.term);
    release(&candidate, &next).await;
    // Free as far as it knows: no look before, neither here nor at the release.
    let before = of("Txn");
    let again = acquire(&candidate, &ask("jobs", "node-2", 60)).await;
    release(&candidate, &again).await;
    assert_eq!(of("Txn") - before, 2);
}

/// A counter of the server's for one method.
fn counted(port: u16, metric: &str, method: &str) -> u64 {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).expect("connects");
    let request = "GET /metrics HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("asks");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answers");
    let method = format!("grpc_method=\"{method}\"");
    let line = text.lines().find(|line| line.starts_with(metric) && line.contains(&method));
    let line = line.unwrap_or_else(|| panic!("no {metric} of {method}"));
    line.rsplit(' ').next().and_then(|number| number.parse().ok()).expect("a number")
}
