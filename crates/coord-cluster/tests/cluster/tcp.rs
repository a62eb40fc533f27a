//! The transport over TCP, on loopback: real sockets and real time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_cluster::transport::{Incoming, TcpLimits};
use coord_cluster::{
    Cluster, Handler, Host, HostError, Mail, Settings, ShardFence, TcpTransport, Transport,
};
use coord_core::{
    Address, ClusterName, Effect, ErrorKind, NodeInfo, ShardCount, ShardId, TableHeader,
};
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use crate::common::{LIMIT, id, store, table, until};

fn anywhere() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn cluster(name: &str) -> ClusterName {
    ClusterName::new(name).expect("name")
}

async fn transport(name: &str) -> TcpTransport {
    TcpTransport::bind(anywhere(), cluster(name)).await.expect("binds")
}

fn of(transport: &TcpTransport) -> Address {
    transport.address().expect("address")
}

/// Answers with what it was sent, as soon as the test lets it.
#[derive(Debug)]
struct Echo {
    taken: AtomicUsize,
    answers: Semaphore,
}

#[async_trait]
impl Incoming for Echo {
    async fn answer(&self, request: Bytes) -> Bytes {
        self.taken.fetch_add(1, Ordering::SeqCst);
        self.answers.acquire().await.expect("open").forget();
        request
    }
}

fn echo(let_through: usize) -> Arc<Echo> {
    Arc::new(Echo { taken: AtomicUsize::new(0), answers: Semaphore::new(let_through) })
}

#[tokio::test]
async fn many_requests_share_a_connection() {
    let (near, far) = (transport("orders").await, transport("orders").await);
    far.serve(echo(Semaphore::MAX_PERMITS));
    let to = of(&far);
    let answers = join_all((0..5_000).map(|number: u32| {
        let (near, to) = (&near, &to);
        async move { near.call(to, Bytes::from(number.to_string())).await }
    }));
    for (answer, number) in answers.await.into_iter().zip(0..) {
        assert_eq!(answer.expect("answered"), number.to_string());
    }
    let large = Bytes::from(vec![7; 3 * 1024 * 1024]);
    assert_eq!(near.call(&to, large.clone()).await.expect("answered"), large);
    let too_large = Bytes::from(vec![7; 5 * 1024 * 1024]);
    let error = near.call(&to, too_large).await.expect_err("too large");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Invalid, Effect::None));
    near.close().await;
    far.close().await;
}

#[tokio::test]
async fn another_cluster_a_stranger_and_nobody_are_refused_with_nothing_sent() {
    let (near, far) = (transport("orders").await, transport("invoices").await);
    let listening = echo(Semaphore::MAX_PERMITS);
    far.serve(Arc::<Echo>::clone(&listening));
    let error = near.call(&of(&far), Bytes::new()).await.expect_err("another cluster");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None));
    assert!(error.to_string().contains("invoices"), "{error}");

    // A stranger, who speaks something else, is dropped.
    let mut stranger = tokio::net::TcpStream::connect(far.local_addr()).await.expect("connects");
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("writes");
    let mut answer = Vec::new();
    // Reset or closed: both are an end.
    let _reset = stranger.read_to_end(&mut answer).await;
    assert!(answer.len() < 100, "{answer:?}");
    assert_eq!(listening.taken.load(Ordering::SeqCst), 0, "nothing was handed over");

    let gone = of(&far);
    far.close().await;
    // The pause after the refusal may not be over: both are "not sent".
    let error = near.call(&gone, Bytes::new()).await.expect_err("nobody listens");
    assert_eq!(error.effect(), Effect::None, "{error}");
    near.close().await;
    let error = near.call(&gone, Bytes::new()).await.expect_err("closed");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Closed, Effect::None));
}

#[tokio::test]
async fn a_server_that_closes_answers_what_it_took_and_names_what_it_did_not() {
    let mut limits = TcpLimits::default();
    limits.in_flight_max = 4;
    let near = transport("orders").await;
    let far = TcpTransport::bind_with(anywhere(), cluster("orders"), limits).await.expect("binds");
    let serving = echo(0);
    far.serve(Arc::<Echo>::clone(&serving));
    let to = of(&far);
    let near = Arc::new(near);
    let mut asked = tokio::task::JoinSet::new();
    for number in 0..10_u32 {
        let (near, to) = (Arc::clone(&near), to.clone());
        asked.spawn(async move { near.call(&to, Bytes::from(number.to_string())).await });
    }
    // Four are taken; the others stand in the connection.
    let taken = async {
        while serving.taken.load(Ordering::SeqCst) < 4 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LIMIT, taken).await.expect("four are taken");
    let mut closing = std::pin::pin!(far.close());
    assert!(futures::poll!(closing.as_mut()).is_pending(), "four are not answered");
    serving.answers.add_permits(100);
    closing.await;
    let (mut answered, mut not_sent) = (0, 0);
    while let Some(ended) = asked.join_next().await {
        match ended.expect("no panic") {
            Ok(_) => answered += 1,
            Err(error) => {
                assert_eq!(error.effect(), Effect::None, "{error}");
                not_sent += 1;
            }
        }
    }
    assert_eq!((answered, not_sent), (4, 6));
    assert_eq!(serving.taken.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_connection_that_breaks_is_made_again() {
    let near = transport("orders").await;
    let far = transport("orders").await;
    let at = far.local_addr();
    far.serve(echo(Semaphore::MAX_PERMITS));
    let to = of(&far);
    near.call(&to, Bytes::new()).await.expect("answered");
    far.close().await;
    drop(far);
    assert_eq!(near.call(&to, Bytes::new()).await.expect_err("gone").effect(), Effect::None);
    let far = TcpTransport::bind(at, cluster("orders")).await.expect("the port is free again");
    far.serve(echo(Semaphore::MAX_PERMITS));
    let again = async {
        while near.call(&to, Bytes::new()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, again).await.expect("it is back");
}

/// Answers with its node's name.
#[derive(Debug)]
struct Named(String);

#[async_trait]
impl Host for Named {
    async fn start(&self, _shard: ShardId, _fence: ShardFence) -> Result<(), HostError> {
        Ok(())
    }

    async fn stop(&self, _shard: ShardId) {}
}

#[async_trait]
impl Handler for Named {
    async fn handle(&self, mail: Mail) -> Bytes {
        format!("{} {}", self.0, mail.shard).into()
    }
}

#[tokio::test]
async fn a_cluster_asks_over_tcp_while_a_node_leaves() {
    let store = store();
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3"] {
        let transport = transport("orders").await;
        let node = Cluster::builder(&store.reopen(), NodeInfo::new(id(name), of(&transport)))
            .settings(Settings::demo())
            .table(table(), TableHeader::new(ShardCount::new(12).expect("count")))
            .handler(table(), Arc::new(Named(name.to_owned())))
            .transport(Arc::new(transport))
            .start()
            .await
            .expect("starts");
        nodes.push(node);
    }
    for node in &nodes {
        until(node, |status| {
            status.is_settled() && status.members.iter().filter(|m| m.shards == 4).count() == 3
        })
        .await;
    }
    let asking = nodes[0].mailbox(&table()).expect("has one");
    let leaving = nodes.pop().expect("three");
    let left = leaving.leave();
    tokio::pin!(left);
    let mut done = false;
    while !done {
        tokio::select! {
            ended = &mut left => {
                ended.expect("leaves in order");
                done = true;
            }
            () = tokio::time::sleep(Duration::from_millis(1)) => {}
        }
        let asked = asking.shards().shards().map(|shard| {
            let answer = asking.ask_shard(shard, "who?", LIMIT);
            async move { answer.await.unwrap_or_else(|error| panic!("{shard}: {error}")) }
        });
        join_all(asked).await;
    }
    for shard in asking.shards().shards() {
        let answer = asking.ask_shard(shard, "who?", Duration::from_secs(10)).await;
        let answer = String::from_utf8(answer.expect("answered").to_vec()).expect("text");
        assert!(!answer.starts_with("n3"), "{answer}");
        assert!(answer.ends_with(&format!(" {shard}")), "{answer}");
    }
    for node in nodes {
        node.shutdown().await.expect("ends");
    }
}
