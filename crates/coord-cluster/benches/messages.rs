//! Messages to shards in one second, beside a bare echo over the same framing on the same machine.
//!
//! `cargo bench -p coord-cluster --bench messages`
//!
//! All of it is in one process: each figure has 256 callers that ask one after the other. The echo is what the
//! framing costs, with numbered frames on one connection and no shards, no owners and no order.

#![expect(clippy::print_stdout, reason = "it prints what it measured")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use coord_cluster::{
    Cluster, Handler, Host, HostError, Mail, Mailbox, Settings, ShardFence, Table, TcpTransport,
};
use coord_core::{ClusterName, MemoryBackend, NodeId, NodeInfo, ShardCount, ShardId, TableName};
use futures::{FutureExt, SinkExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

const CALLERS: u32 = 256;
const ASKS: u32 = 200;
const PAYLOAD: usize = 100;
const SHARDS: u32 = 2 * CALLERS;

#[derive(Debug)]
struct Echo;

#[async_trait]
impl Host for Echo {
    async fn start(&self, _shard: ShardId, _fence: ShardFence) -> Result<(), HostError> {
        Ok(())
    }

    async fn stop(&self, _shard: ShardId) {}
}

#[async_trait]
impl Handler for Echo {
    async fn handle(&self, mail: Mail) -> Bytes {
        mail.payload
    }
}

fn main() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(run());
}

async fn run() {
    let [near, far] = nodes().await;
    let mailbox = near.mailbox(&table()).expect("has one");
    let map = near.map(&table()).expect("a map");
    let of = |node: &Cluster| map.shards_of(node.node()).collect::<Vec<_>>();
    // Each figure twice: the first run warms up, and makes the connections.
    for report in [false, true] {
        let echo = echo().await;
        let remote = ask(&mailbox, &of(&far)).await;
        let local = ask(&mailbox, &of(&near)).await;
        let one = one_shard(&mailbox, of(&far)[0]).await;
        if report {
            println!("{:>28} {:>10}  {:>8}", "messages in one second", "", "to echo");
            for (what, rate) in [
                ("bare echo over TCP", echo),
                ("to shards of another node", remote),
                ("to shards of this node", local),
                ("to one shard elsewhere", one),
            ] {
                println!("{what:>28} {rate:>10.0}  {:>7.0} %", 100.0 * rate / echo);
            }
        }
    }
    near.abandon();
    far.abandon();
}

fn rate(count: u32, began: Instant) -> f64 {
    f64::from(count) / began.elapsed().as_secs_f64()
}

/// As many callers as shards, each with a shard of its own.
async fn ask(mailbox: &Mailbox, shards: &[ShardId]) -> f64 {
    let began = Instant::now();
    let mut callers = JoinSet::new();
    for &shard in shards {
        let mailbox = mailbox.clone();
        callers.spawn(async move {
            for _ in 0..ASKS {
                let asked = mailbox.ask_shard(shard, vec![7; PAYLOAD], Duration::from_secs(60));
                assert_eq!(asked.await.expect("answered").len(), PAYLOAD);
            }
        });
    }
    callers.join_all().await;
    rate(ASKS * u32::try_from(shards.len()).expect("few"), began)
}

/// All callers ask one shard, so that many messages wait for it at a time.
async fn one_shard(mailbox: &Mailbox, shard: ShardId) -> f64 {
    let began = Instant::now();
    let asks = ASKS / 10;
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let mailbox = mailbox.clone();
        callers.spawn(async move {
            for _ in 0..asks {
                let asked = mailbox.ask_shard(shard, vec![7; PAYLOAD], Duration::from_secs(60));
                asked.await.expect("answered");
            }
        });
    }
    callers.join_all().await;
    rate(asks * CALLERS, began)
}

/// A numbered frame for each caller goes out at once, and its next one when it has come back.
async fn echo() -> f64 {
    let listener = TcpListener::bind(anywhere()).await.expect("binds");
    let address = listener.local_addr().expect("bound");
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let (stream, _) = listener.accept().await.expect("accepts");
        let (mut writer, mut reader) = framed(stream).split();
        while let Some(frame) = reader.next().await {
            writer.feed(frame.expect("a frame").freeze()).await.expect("writes");
            while let Some(Some(frame)) = reader.next().now_or_never() {
                writer.feed(frame.expect("a frame").freeze()).await.expect("writes");
            }
            writer.flush().await.expect("writes");
        }
    });
    let stream = TcpStream::connect(address).await.expect("connects");
    let (mut writer, mut reader) = framed(stream).split();
    let mut left = [ASKS; CALLERS as usize];
    let began = Instant::now();
    for caller in 0..CALLERS {
        writer.feed(frame(caller)).await.expect("writes");
    }
    writer.flush().await.expect("writes");
    for answered in 0..CALLERS * ASKS {
        let mut answer = reader.next().await.expect("open").expect("a frame");
        let caller = answer.get_u32();
        let left = &mut left[caller as usize];
        *left -= 1;
        if *left > 0 {
            writer.feed(frame(caller)).await.expect("writes");
        }
        // As often as the transport, which flushes when nothing more is there to be written.
        if answered % 16 == 0 || answered + CALLERS >= CALLERS * ASKS {
            writer.flush().await.expect("writes");
        }
    }
    let rate = rate(CALLERS * ASKS, began);
    drop((writer, reader));
    serving.join_all().await;
    rate
}

fn frame(caller: u32) -> Bytes {
    let mut frame = BytesMut::with_capacity(4 + PAYLOAD);
    frame.put_u32(caller);
    frame.put_bytes(7, PAYLOAD);
    frame.freeze()
}

fn framed(stream: TcpStream) -> Framed<TcpStream, LengthDelimitedCodec> {
    stream.set_nodelay(true).expect("a socket");
    Framed::new(stream, LengthDelimitedCodec::new())
}

fn anywhere() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn table() -> TableName {
    TableName::new("echo").expect("name")
}

/// Two nodes, each with half of the shards.
async fn nodes() -> [Cluster; 2] {
    let cluster = ClusterName::new("bench").expect("name");
    let store = MemoryBackend::isolated(cluster.clone());
    let mut nodes = Vec::new();
    for name in ["near", "far"] {
        let transport = TcpTransport::bind(anywhere(), cluster.clone()).await.expect("binds");
        let address = transport.address().expect("address");
        let node = Cluster::builder(
            &store.reopen(),
            NodeInfo::new(NodeId::new(name).expect("name"), address),
        )
        .settings(Settings::demo())
        .table(
            Table::new(table())
                .shards(ShardCount::new(SHARDS).expect("count"))
                .handler(Arc::new(Echo)),
        )
        .transport(Arc::new(transport))
        .start()
        .await
        .expect("starts");
        nodes.push(node);
    }
    for node in &nodes {
        let settled = node.wait_for(|status| {
            status.is_settled()
                && status.members.iter().filter(|m| m.shards == CALLERS).count() == 2
        });
        settled.await.expect("runs");
    }
    nodes.try_into().expect("two")
}
