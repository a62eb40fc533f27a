//! The transport over TCP, on loopback: real sockets and real time.

use std::fmt::{Debug, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_cluster::transport::{Incoming, Recipient, TcpLimits};
use coord_cluster::{
    AskError, Cluster, ClusterBuilder, Handler, Host, HostError, Mail, Settings, ShardFence, Table,
    TcpTransport, Transport,
};
use coord_core::{
    Address, ClusterName, Effect, ErrorKind, Incarnation, MemoryBackend, NodeId, NodeInfo,
    ShardCount, ShardId,
};
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata, span};

use crate::common::{LIMIT, id, map, store, table, until};

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

fn run(number: u128) -> Option<Incarnation> {
    Some(Incarnation::from_u128(number))
}

/// The fifth run of "far", at the address where this one listens.
fn far_at(transport: &TcpTransport) -> Recipient {
    Recipient::new(id("far"), Incarnation::from_u128(5), of(transport))
}

/// The fifth run of "far", which answers with what it was sent as soon as the test lets it.
#[derive(Debug)]
struct Echo {
    node: NodeId,
    run: watch::Sender<Option<Incarnation>>,
    taken: AtomicUsize,
    answers: Semaphore,
}

#[async_trait]
impl Incoming for Echo {
    fn node(&self) -> &NodeId {
        &self.node
    }

    fn incarnation(&self) -> Option<Incarnation> {
        *self.run.borrow()
    }

    async fn ended(&self, run: Incarnation) {
        self.run.subscribe().wait_for(|now| *now != Some(run)).await.expect("it is there");
    }

    async fn answer(&self, request: Bytes) -> Bytes {
        self.taken.fetch_add(1, Ordering::SeqCst);
        self.answers.acquire().await.expect("open").forget();
        request
    }
}

fn echo(let_through: usize) -> Arc<Echo> {
    let (taken, answers) = (AtomicUsize::new(0), Semaphore::new(let_through));
    Arc::new(Echo { node: id("far"), run: watch::Sender::new(run(5)), taken, answers })
}

#[tokio::test]
async fn many_requests_share_a_connection() {
    let (near, far) = (transport("orders").await, transport("orders").await);
    far.serve(echo(Semaphore::MAX_PERMITS));
    let to = far_at(&far);
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
    let error = near.call(&far_at(&far), Bytes::new()).await.expect_err("another cluster");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None));
    assert!(error.to_string().contains("invoices"), "{error}");

    // A stranger, who speaks something else, is dropped.
    let mut stranger = TcpStream::connect(far.local_addr()).await.expect("connects");
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("writes");
    let mut answer = Vec::new();
    // Reset or closed: both are an end.
    let _reset = stranger.read_to_end(&mut answer).await;
    assert!(answer.len() < 100, "{answer:?}");
    assert_eq!(listening.taken.load(Ordering::SeqCst), 0, "nothing was handed over");

    let gone = far_at(&far);
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
    let to = far_at(&far);
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
    let to = far_at(&far);
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

fn brief(in_flight_max: usize) -> TcpLimits {
    let mut limits = TcpLimits::default();
    (limits.in_flight_max, limits.silence) = (in_flight_max, Duration::from_millis(300));
    limits
}

async fn bind(limits: TcpLimits) -> TcpTransport {
    TcpTransport::bind_with(anywhere(), cluster("orders"), limits).await.expect("binds")
}

#[tokio::test]
async fn requests_that_wait_for_longer_than_the_silence_are_answered_all_the_same() {
    let (near, far) = (bind(brief(100)).await, bind(brief(4)).await);
    let serving = echo(0);
    far.serve(Arc::<Echo>::clone(&serving));
    let to = far_at(&far);
    let asked = join_all((0..20_u32).map(|number| near.call(&to, Bytes::from(number.to_string()))));
    let lets = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        serving.answers.add_permits(100);
    };
    let (answers, ()) = tokio::join!(asked, lets);
    for answer in answers {
        answer.expect("its connection lives");
    }
}

/// What a client begins with that asks for the fifth run of "far".
fn greeting() -> Vec<u8> {
    [frame(1, b"\0\x04orders"), frame(10, &[&5_u128.to_be_bytes()[..], b"far"].concat())].concat()
}

/// A welcome to it.
fn welcome() -> Vec<u8> {
    frame(2, &[&b"\x06orders\x03far"[..], &5_u128.to_be_bytes()].concat())
}

/// A frame as it goes over the wire.
fn frame(kind: u8, rest: &[u8]) -> Vec<u8> {
    let length = u32::try_from(rest.len() + 1).expect("short").to_be_bytes();
    [&length[..], &[kind], rest].concat()
}

#[tokio::test]
async fn a_client_that_takes_no_answers_is_given_up() {
    let far = bind(brief(64)).await;
    let serving = echo(Semaphore::MAX_PERMITS);
    far.serve(Arc::<Echo>::clone(&serving));
    let mut client = TcpStream::connect(far.local_addr()).await.expect("connects");
    client.write_all(&greeting()).await.expect("writes");
    let request = frame(4, &[&[0; 8][..], &vec![7; 1024 * 1024]].concat());
    let ended = async { while client.write_all(&request).await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(60), ended).await.expect("the server gives it up");
    let began = tokio::time::Instant::now();
    far.close().await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

/// The fifth run of "far", which a test plays.
fn far_behind(listener: &TcpListener) -> Recipient {
    let address = listener.local_addr().expect("known").to_string();
    Recipient::new(id("far"), Incarnation::from_u128(5), Address::new(address).expect("address"))
}

/// The next client that has greeted.
async fn greeted(listener: &TcpListener) -> TcpStream {
    let (mut server, _) = listener.accept().await.expect("accepts");
    let mut sent = vec![0; greeting().len()];
    server.read_exact(&mut sent).await.expect("a greeting");
    assert_eq!(sent, greeting());
    server
}

#[tokio::test]
async fn an_answer_over_a_slow_link_arrives() {
    let near = bind(brief(4)).await;
    let listener = TcpListener::bind(anywhere()).await.expect("listens");
    let to = far_behind(&listener);
    let serves = async {
        let mut server = greeted(&listener).await;
        server.write_all(&welcome()).await.expect("writes");
        let mut request = [0; 13];
        server.read_exact(&mut request).await.expect("a request");
        for byte in frame(5, b"\0\0\0\0\0\0\0\x01slowly") {
            server.write_all(&[byte]).await.expect("writes");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        server
    };
    let (answer, _server) = tokio::join!(near.call(&to, Bytes::new()), serves);
    assert_eq!(answer.expect("it comes byte by byte"), "slowly");
}

#[tokio::test]
async fn a_stranger_gets_neither_memory_nor_many_connections() {
    let mut limits = brief(4);
    limits.connections_per_address_max = 2;
    limits.silence = Duration::from_secs(30);
    limits.connect_timeout = Duration::from_secs(30);
    let far = bind(limits).await;
    far.serve(echo(Semaphore::MAX_PERMITS));
    let connect = || TcpStream::connect(far.local_addr());
    let ends = async |stream: &mut TcpStream| {
        let mut byte = [0; 1];
        let read = stream.read(&mut byte);
        let read = tokio::time::timeout(Duration::from_secs(10), read).await.expect("it ends");
        assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    };
    let mut first = connect().await.expect("connects");
    let mut second = connect().await.expect("connects");
    ends(&mut connect().await.expect("connects")).await;
    // Its length is enough to know.
    first.write_all(&(4_u32 * 1024 * 1024).to_be_bytes()).await.expect("writes");
    ends(&mut first).await;
    second.write_all(&greeting()).await.expect("writes");
    let mut answer = vec![0; welcome().len()];
    second.read_exact(&mut answer).await.expect("it is welcome");
    assert_eq!(answer, welcome());
}

#[tokio::test]
async fn a_server_that_greets_at_length_or_not_at_all_is_given_up() {
    let mut limits = brief(4);
    limits.connect_timeout = Duration::from_millis(300);
    // So that it is the time to connect that ends it.
    limits.silence = LIMIT;
    let near = bind(limits).await;
    let listener = TcpListener::bind(anywhere()).await.expect("listens");
    let to = far_behind(&listener);
    let long = async {
        let mut server = greeted(&listener).await;
        server.write_all(&(4_u32 * 1024 * 1024).to_be_bytes()).await.expect("writes");
        server
    };
    let (answer, _server) = tokio::join!(near.call(&to, Bytes::new()), long);
    let error = answer.expect_err("no greeting is that long");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None));
    // Another one, for whom no pause is under way.
    let mut later = to.clone();
    later.address =
        Address::new(to.address.as_str().replace("127.0.0.1", "localhost")).expect("it");
    let silent = async { greeted(&listener).await };
    let (answer, _server) = tokio::join!(near.call(&later, Bytes::new()), silent);
    let error = answer.expect_err("nothing came");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None));
    assert!(error.to_string().contains("in time"), "{error}");
}

#[tokio::test]
async fn another_version_is_refused_and_said_on_either_side() {
    let near = transport("orders").await;
    let listener = TcpListener::bind(anywhere()).await.expect("listens");
    let to = far_behind(&listener);
    let former = async {
        let mut server = greeted(&listener).await;
        let why = b"it speaks version 3 of the protocol, not 4";
        server.write_all(&frame(3, why)).await.expect("writes");
    };
    let (answer, ()) = tokio::join!(near.call(&to, Bytes::new()), former);
    let error = answer.expect_err("another version");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unsupported, Effect::None));
    assert!(error.to_string().contains("it speaks version 3 of the protocol, not 4"), "{error}");

    let far = transport("orders").await;
    far.serve(echo(Semaphore::MAX_PERMITS));
    let mut former = TcpStream::connect(far.local_addr()).await.expect("connects");
    former.write_all(&frame(1, b"\0\x03orders")).await.expect("writes");
    let mut answer = Vec::new();
    // Its end of the connection stays open, and the answer comes all the same, and then the end.
    former.read_to_end(&mut answer).await.expect("it ends in order");
    assert_eq!(answer, frame(3, b"it speaks version 4 of the protocol, not 3"));
}

/// What is logged on this thread, from `info` on.
#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn count(&self, of: &[&str]) -> usize {
        let lines = self.0.lock().expect("not poisoned");
        lines.iter().filter(|line| of.iter().all(|of| line.contains(of))).count()
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").expect("a string");
    }
}

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.0.lock().expect("not poisoned").push(line.0);
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

#[tokio::test]
async fn another_node_at_the_address_is_told_and_logged_once_on_either_side() {
    let log = Log::default();
    let _logged = tracing::subscriber::set_default(log.clone());
    let (near, far) = (transport("orders").await, transport("orders").await);
    let listening = echo(Semaphore::MAX_PERMITS);
    far.serve(Arc::<Echo>::clone(&listening));
    let mut to = far_at(&far);
    to.node = id("other");
    for _ in 0..20 {
        let error = near.call(&to, Bytes::new()).await.expect_err("another node");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None));
        let text = error.to_string();
        assert!(text.contains("node far answers there, and not node other"), "{text}");
        assert!(text.contains(to.address.as_str()), "{text}");
        // Most of them while no connection is tried, and a few by a connection.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(log.count(&["WARN", "node=other", "node far answers there"]), 1, "{log:?}");
    assert_eq!(log.count(&["WARN", "it is for node other, and this is far"]), 1, "{log:?}");
    assert_eq!(listening.taken.load(Ordering::SeqCst), 0, "nothing was handed over");
    near.call(&far_at(&far), Bytes::new()).await.expect("it is another connection");
}

#[tokio::test]
async fn a_node_that_registers_again_ends_the_connections_to_its_former_run() {
    let (near, far) = (transport("orders").await, transport("orders").await);
    let serving = echo(1);
    far.serve(Arc::<Echo>::clone(&serving));
    let former = far_at(&far);
    near.call(&former, Bytes::new()).await.expect("answered");
    let mut client = TcpStream::connect(far.local_addr()).await.expect("connects");
    client.write_all(&greeting()).await.expect("writes");
    let mut answer = vec![0; welcome().len()];
    client.read_exact(&mut answer).await.expect("it is welcome");

    // What was taken is answered.
    let mut asked = std::pin::pin!(near.call(&former, Bytes::from_static(b"first")));
    let taken = async {
        while serving.taken.load(Ordering::SeqCst) < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        answer = &mut asked => panic!("nobody let it: {answer:?}"),
        taken = tokio::time::timeout(LIMIT, taken) => taken.expect("it is taken"),
    }
    serving.run.send_replace(None);
    serving.answers.add_permits(1);
    assert_eq!(asked.await.expect("answered"), "first");
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.expect("it ends in order");
    let goodbye = frame(9, &[0; 8]);
    assert!(rest.ends_with(&goodbye), "{rest:?}");

    // Not before the goodbye has come, and the pause after the last refusal is over.
    let named = async |now: &str| {
        let named = async {
            loop {
                let error = near.call(&former, Bytes::new()).await.expect_err("another run");
                assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None));
                if error.to_string().contains(now) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LIMIT, named).await.expect("it is told");
    };
    named("not registered").await;
    serving.run.send_replace(run(6));
    serving.answers.add_permits(1);
    let present = Recipient::new(id("far"), Incarnation::from_u128(6), of(&far));
    assert_eq!(near.call(&present, Bytes::from_static(b"new")).await.expect("answered"), "new");
    named(&format!("run {}", present.incarnation)).await;
    assert_eq!(serving.taken.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn an_address_that_means_all_is_no_address_of_a_node() {
    let all = SocketAddr::from(([0, 0, 0, 0], 0));
    let transport = TcpTransport::bind(all, cluster("orders")).await.expect("binds");
    let error = transport.address().expect_err("it is nobody's");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    for text in ["0.0.0.0:7000", "[::]:7000", "[::ffff:0.0.0.0]:7000", "0:7000", "010.0.0.1:7000"] {
        let info = NodeInfo::new(id("n1"), Address::new(text).expect("parses"));
        let error = Cluster::builder(&store(), info).start().await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(text), "{error}");
    }
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

/// Starts a node that says that it is reached there.
async fn node(store: &MemoryBackend, name: &str, at: Address, transport: TcpTransport) -> Cluster {
    named(store, name, at, transport).start().await.expect("starts")
}

fn named(
    store: &MemoryBackend,
    name: &str,
    at: Address,
    transport: TcpTransport,
) -> ClusterBuilder {
    Cluster::builder(&store.reopen(), NodeInfo::new(id(name), at))
        .settings(Settings::demo())
        .table(
            Table::new(table())
                .shards(ShardCount::new(12).expect("count"))
                .handler(Arc::new(Named(name.to_owned()))),
        )
        .transport(Arc::new(transport))
}

/// Waits until they share the shards evenly.
async fn shared(nodes: &[Cluster]) {
    let each = 12 / u32::try_from(nodes.len()).expect("few");
    for node in nodes {
        until(node, |status| {
            let even = status.members.iter().filter(|member| member.shards == each).count();
            status.is_settled() && even == nodes.len()
        })
        .await;
    }
}

/// A shard of this node.
fn shard_of(node: &Cluster) -> ShardId {
    map(node).shards_of(node.node()).next().expect("it has some")
}

#[tokio::test]
async fn an_address_that_leads_to_another_node_is_told_at_once_with_both_names() {
    for swapped in [false, true] {
        let store = store();
        let (one, two) = (transport("orders").await, transport("orders").await);
        let (at_one, at_two) = (of(&one), of(&two));
        // Both say the same address, or each that of the other.
        let says = if swapped { at_two } else { at_one.clone() };
        let nodes = [node(&store, "n1", says, one).await, node(&store, "n2", at_one, two).await];
        shared(&nodes).await;
        let shard = shard_of(&nodes[1]);
        let asked = nodes[0].mailbox(&table()).expect("has one").ask_shard(shard, "who?", LIMIT);
        let asked = tokio::time::timeout(LIMIT / 10, asked).await.expect("it is told at once");
        let error = asked.expect_err("it is another node");
        assert!(matches!(error, AskError::Misdirected { .. }), "{error:?}");
        assert_eq!(error.effect(), Effect::None);
        let text = error.to_string();
        assert!(text.contains("node n1 answers there, and not node n2"), "{text}");
        let error = coord_core::Error::from(error);
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        for node in nodes {
            node.shutdown().await.expect("ends");
        }
    }
}

#[tokio::test]
async fn a_node_that_is_restarted_at_its_address_is_asked_as_its_new_run() {
    let store = store();
    let (one, two) = (transport("orders").await, transport("orders").await);
    let (at_one, at_two) = (of(&one), of(&two));
    let port = two.local_addr();
    let mut nodes =
        vec![node(&store, "n1", at_one, one).await, node(&store, "n2", at_two.clone(), two).await];
    shared(&nodes).await;
    let asking = nodes[0].mailbox(&table()).expect("has one");
    let shard = shard_of(&nodes[1]);
    let answer = asking.ask_shard(shard, "who?", LIMIT).await.expect("answered");
    assert_eq!(answer, format!("n2 {shard}"));
    // As if it had crashed: its registration and the map's word stay.
    let dead = nodes.pop().expect("two");
    let former = map(&nodes[0]).owner(shard).expect("owned").incarnation;
    dead.abandon();
    let again = async {
        loop {
            match TcpTransport::bind(port, cluster("orders")).await {
                Ok(again) => return again,
                Err(_not_yet) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    let again = tokio::time::timeout(LIMIT, again).await.expect("the port is free again");
    let back = named(&store, "n2", at_two, again).predecessor_is_dead().start().await;
    let back = back.expect("starts");
    // Sent while the map still names the run before, it waits for the next owner.
    let answer = asking.ask_shard(shard, "who?", LIMIT).await.expect("answered");
    assert!(answer.ends_with(format!(" {shard}").as_bytes()), "{answer:?}");
    nodes.push(back);
    shared(&nodes).await;
    let shard = shard_of(&nodes[1]);
    assert_ne!(map(&nodes[0]).owner(shard).expect("owned").incarnation, former);
    let answer = asking.ask_shard(shard, "who?", LIMIT).await.expect("answered");
    assert_eq!(answer, format!("n2 {shard}"));
    for node in nodes {
        node.shutdown().await.expect("ends");
    }
}

#[tokio::test]
async fn a_cluster_asks_over_tcp_while_a_node_leaves() {
    let store = store();
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3"] {
        let transport = transport("orders").await;
        nodes.push(node(&store, name, of(&transport), transport).await);
    }
    shared(&nodes).await;
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
