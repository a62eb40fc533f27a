//! The proxy, between a client and a server that counts what it was sent and says it back.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coord_conformance::faults::{Fault, Faults as _};
use coord_integration::faults::{Direction, Link, Proxy, Request};
use libtest_mimic::{Failed, Trial};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

const LIMIT: Duration = Duration::from_secs(10);
/// Long for a reply from this machine; it only shows that nothing comes.
const SILENCE: Duration = Duration::from_millis(300);

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    macro_rules! add {
        ($($name:ident)*) => {
            $(trials.push(Trial::test(concat!("proxy::", stringify!($name)), || run($name)));)*
        };
    }
    add!(carries cuts resets holds_requests holds_replies delays throttles);
    add!(loses_a_reply_and_not_the_request loses_only_the_reply_that_was_named);
    add!(waits_for_the_reply_that_it_loses);
    add!(ends_a_connection_when_one_side_does makes_the_faults_of_the_suite);
    trials
}

fn run<F: Future<Output = Result<(), Failed>>>(body: fn(Cx) -> F) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async { timeout(LIMIT, async { body(Cx::new().await?).await }).await? })
}

/// A server behind a proxy.
struct Cx {
    proxy: Proxy,
    /// The bytes that the server got.
    applied: Arc<AtomicU64>,
    _server: JoinSet<()>,
}

impl Cx {
    async fn new() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let proxy = Proxy::start(&[listener.local_addr()?.to_string()]).await?;
        let applied = Arc::new(AtomicU64::new(0));
        let mut server = JoinSet::new();
        let count = Arc::clone(&applied);
        server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(echo(stream, Arc::clone(&count)));
            }
        });
        Ok(Self { proxy, applied, _server: server })
    }

    async fn client(&self) -> io::Result<TcpStream> {
        TcpStream::connect(self.proxy.addresses()[0]).await
    }

    fn applied(&self) -> u64 {
        self.applied.load(Ordering::SeqCst)
    }

    async fn applies(&self, bytes: u64) {
        while self.applied() < bytes {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

async fn echo(mut stream: TcpStream, applied: Arc<AtomicU64>) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        applied.fetch_add(length as u64, Ordering::SeqCst);
        if stream.write_all(&buffer[..length]).await.is_err() {
            break;
        }
    }
}

async fn send(client: &mut TcpStream, text: &str) -> io::Result<()> {
    client.write_all(text.as_bytes()).await
}

async fn hear(client: &mut TcpStream, text: &str) -> io::Result<()> {
    let mut heard = vec![0; text.len()];
    client.read_exact(&mut heard).await?;
    assert_eq!(String::from_utf8_lossy(&heard), text);
    Ok(())
}

async fn say(client: &mut TcpStream, text: &str) -> io::Result<()> {
    send(client, text).await?;
    hear(client, text).await
}

async fn is_silent(client: &mut TcpStream) {
    let heard = timeout(SILENCE, client.read_u8()).await;
    assert!(heard.is_err(), "it is not silent: {heard:?}");
}

async fn is_reset(client: &mut TcpStream) {
    let error = client.read_u8().await.expect_err("the connection is reset");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

async fn carries(cx: Cx) -> Result<(), Failed> {
    let (mut one, mut other) = (cx.client().await?, cx.client().await?);
    say(&mut one, "first").await?;
    say(&mut other, "other").await?;
    say(&mut one, "second").await?;
    let traffic = cx.proxy.traffic();
    assert_eq!(
        (traffic.connections, traffic.bytes_to_server, traffic.bytes_to_client),
        (2, 16, 16)
    );
    Ok(())
}

async fn cuts(cx: Cx) -> Result<(), Failed> {
    let mut old = cx.client().await?;
    say(&mut old, "before").await?;
    cx.proxy.cut();
    is_reset(&mut old).await;
    let mut fresh = cx.client().await?;
    is_reset(&mut fresh).await;
    assert_eq!(cx.applied(), 6);
    cx.proxy.heal();
    say(&mut cx.client().await?, "after").await?;
    Ok(())
}

async fn resets(cx: Cx) -> Result<(), Failed> {
    let mut old = cx.client().await?;
    say(&mut old, "before").await?;
    cx.proxy.reset();
    is_reset(&mut old).await;
    say(&mut cx.client().await?, "after").await?;
    Ok(())
}

async fn holds_requests(cx: Cx) -> Result<(), Failed> {
    let mut client = cx.client().await?;
    say(&mut client, "before").await?;
    cx.proxy.hold(Direction::ToServer);
    send(&mut client, "held").await?;
    is_silent(&mut client).await;
    assert_eq!(cx.applied(), 6, "the request did not arrive");
    cx.proxy.heal();
    hear(&mut client, "held").await?;
    Ok(())
}

async fn holds_replies(cx: Cx) -> Result<(), Failed> {
    let mut client = cx.client().await?;
    cx.proxy.hold(Direction::ToClient);
    send(&mut client, "held").await?;
    cx.applies(4).await;
    is_silent(&mut client).await;
    cx.proxy.heal();
    hear(&mut client, "held").await?;
    Ok(())
}

async fn delays(cx: Cx) -> Result<(), Failed> {
    let mut client = cx.client().await?;
    cx.proxy.delay(Direction::ToClient, SILENCE);
    let begun = Instant::now();
    // Both are late by as much, not the second by twice as much.
    send(&mut client, "one").await?;
    cx.applies(3).await;
    send(&mut client, "two").await?;
    cx.applies(6).await;
    assert!(begun.elapsed() < SILENCE, "requests are not late");
    hear(&mut client, "onetwo").await?;
    let took = begun.elapsed();
    assert!(took >= SILENCE && took < 2 * SILENCE, "{took:?}");
    Ok(())
}

async fn throttles(cx: Cx) -> Result<(), Failed> {
    let mut client = cx.client().await?;
    cx.proxy.throttle(Direction::ToServer, 1_000);
    let begun = Instant::now();
    say(&mut client, &"x".repeat(500)).await?;
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(500), "{took:?} for 500 bytes at 1,000 a second");
    Ok(())
}

async fn loses_a_reply_and_not_the_request(cx: Cx) -> Result<(), Failed> {
    let mut client = cx.client().await?;
    say(&mut client, "before").await?;
    cx.proxy.lose_reply(Request::Any);
    send(&mut client, "lost").await?;
    is_reset(&mut client).await;
    assert_eq!(cx.applied(), 10, "the request was applied");
    assert_eq!(cx.proxy.replies_lost(), 1);
    say(&mut cx.client().await?, "after").await?;
    assert_eq!(cx.proxy.replies_lost(), 1, "it happens once");
    Ok(())
}

async fn loses_only_the_reply_that_was_named(cx: Cx) -> Result<(), Failed> {
    let (mut one, mut other) = (cx.client().await?, cx.client().await?);
    say(&mut one, "publish").await?;
    cx.proxy.lose_reply(Request::With(b"publish".to_vec()));
    say(&mut one, "renew").await?;
    say(&mut other, "renew").await?;
    say(&mut one, "pub").await?;
    send(&mut one, "lish").await?;
    is_reset(&mut one).await;
    assert_eq!(cx.applied(), 7 + 5 + 5 + 7);
    say(&mut other, "publish").await?;
    cx.proxy.lose_reply(Request::Any);
    cx.proxy.heal();
    say(&mut other, "healed").await?;
    Ok(())
}

async fn waits_for_the_reply_that_it_loses(cx: Cx) -> Result<(), Failed> {
    let mut client = cx.client().await?;
    let writes = ["claim", "publish"].map(|write| write.as_bytes().to_vec());
    cx.proxy.lose_reply_with(Request::WithAny(writes.to_vec()), b"done".to_vec());
    say(&mut client, "renew").await?;
    send(&mut client, "publish").await?;
    is_silent(&mut client).await;
    assert_eq!(cx.proxy.replies_lost(), 0, "it was not said yet");
    send(&mut client, "do").await?;
    is_silent(&mut client).await;
    send(&mut client, "ne").await?;
    is_reset(&mut client).await;
    assert_eq!(cx.applied(), 5 + 7 + 2 + 2);
    Ok(())
}

async fn makes_the_faults_of_the_suite(cx: Cx) -> Result<(), Failed> {
    let Cx { proxy, applied, _server } = cx;
    let address = proxy.addresses()[0];
    let link = Link::new(proxy).with_request(Request::With(b"publish".to_vec()));
    assert!(!link.supports(Fault::Restart) && link.inject(Fault::Restart).await.is_err());
    let mut client = TcpStream::connect(address).await?;
    link.inject(Fault::DropReply).await?;
    say(&mut client, "ping").await?;
    send(&mut client, "publish").await?;
    is_reset(&mut client).await;
    assert_eq!(applied.load(Ordering::SeqCst), 11);
    let mut client = TcpStream::connect(address).await?;
    link.inject(Fault::Pause).await?;
    send(&mut client, "late").await?;
    is_silent(&mut client).await;
    link.heal().await?;
    hear(&mut client, "late").await?;
    for fault in [Fault::CutWatches, Fault::Cut] {
        link.inject(fault).await?;
        is_reset(&mut client).await;
        link.heal().await?;
        client = TcpStream::connect(address).await?;
        say(&mut client, "again").await?;
    }
    Ok(())
}

async fn ends_a_connection_when_one_side_does(cx: Cx) -> Result<(), Failed> {
    let mut client = cx.client().await?;
    send(&mut client, "last").await?;
    client.shutdown().await?;
    let mut heard = String::new();
    client.read_to_string(&mut heard).await?;
    assert_eq!(heard, "last");
    Ok(())
}
