//! Answers that a real API server gives only when it is in trouble: everything is asked of a real one,
//! and one answer on the way back is another.
//!
//! | answer | where a real one comes from |
//! | --- | --- |
//! | 429 with `Retry-After` and a line of text | priority and fairness, when a flow's queue is full (`tooManyRequests` in `apiserver/pkg/server/filters`) |
//! | 403 to whatever is asked | one that has just started, and has not read the Roles yet |
//! | 504 `Timeout` after the write was applied | the request's deadline passes while etcd answers late (`timeout.go` in the same place) |
//! | 500 `InternalError` | etcd has no leader |
//! | 410 `Expired`, in a watch and instead of one | etcd was compacted past the version, or the watch cache began anew |
//! | a watch that ends, or says nothing | each ends after its `timeoutSeconds`; a load balancer that forgot the connection |

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use coord_core::{
    Acquire, Answer, Answered, Backend as _, Claim, ClaimRequest, Effect, ErrorKind, Grant,
    LeaseEvent, NodeId, NodeInfo, Register, Release, Replace, Request, ShardCount, TableHeader,
    TableName, Ttl,
};
use coord_integration::servers::ApiServer;
use coord_kube::KubeBackend;
use futures::StreamExt as _;
use http_body_util::BodyExt as _;
use kube::client::Body;
use libtest_mimic::Trial;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use super::setup::{
    File, SOON, acquire, admin, ask, cluster, lease, open, renew, shared, try_open,
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        shared("a_busy_server_is_left_alone", a_busy_server_is_left_alone),
        shared("a_busy_list_holds_back_no_renewal", a_busy_list_holds_back_no_renewal),
        shared("a_server_that_has_just_started_denies_nothing", just_started),
        shared("a_write_that_timed_out_is_found_again", a_write_that_timed_out_is_found_again),
        shared("a_failing_server_ends_nothing", a_failing_server_ends_nothing),
        shared("a_forgotten_version_is_read_anew", a_forgotten_version_is_read_anew),
        shared("a_watch_that_ends_goes_on", a_watch_that_ends_goes_on),
        shared("a_watch_is_long_where_bookmarks_come", a_watch_is_long_where_bookmarks_come),
        shared("a_silent_watch_ends_nobody", a_silent_watch_ends_nobody),
        shared("a_claim_ends_what_an_older_leader_began", a_claim_ends_what_an_older_leader_began),
    ]
}

/// What happens to the next requests of a method, or to watches.
#[derive(Clone, Debug)]
enum Alter {
    /// The next one is not passed on, and answered so.
    Instead(&'static str, Said),
    /// The next one is passed on, and answered so.
    After(&'static str, Said),
    /// The next one is passed on only when it may go.
    Held(&'static str, Arc<Notify>),
    /// The watches that are open get this event, and end.
    Event(&'static str),
    /// The watches that are open end.
    End,
    /// The watches that are open say nothing more.
    Silence,
}

#[derive(Clone, Copy, Debug)]
struct Said {
    status: &'static str,
    headers: &'static str,
    body: &'static str,
}

const BUSY: Said = Said {
    status: "429 Too Many Requests",
    headers: "Retry-After: 1\r\nContent-Type: text/plain\r\n",
    body: "Too many requests, please try again later.\n",
};
const BUSY_FOR_LONG: Said =
    Said { headers: "Retry-After: 30\r\nContent-Type: text/plain\r\n", ..BUSY };
const FORBIDDEN: Said = Said {
    status: "403 Forbidden",
    headers: "Content-Type: application/json\r\n",
    body: r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"leases.coordination.k8s.io is forbidden: User \"admin\" cannot do that with resource \"leases\" in API group \"coordination.k8s.io\" in the namespace \"default\"","reason":"Forbidden","code":403}"#,
};
const TIMEOUT: Said = Said {
    status: "504 Gateway Timeout",
    headers: "Content-Type: application/json\r\n",
    body: r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Timeout: request did not complete within the allotted timeout","reason":"Timeout","details":{},"code":504}"#,
};
const FAILED: Said = Said {
    status: "500 Internal Server Error",
    headers: "Content-Type: application/json\r\n",
    body: r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"etcdserver: no leader","reason":"InternalError","code":500}"#,
};
const EXPIRED: &str = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version: 1 (2)","reason":"Expired","code":410}}"#;
const BOOKMARK: &str = r#"{"type":"BOOKMARK","object":{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{}}}"#;
const GONE: Said = Said {
    status: "410 Gone",
    headers: "Content-Type: application/json\r\n",
    body: r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"The resourceVersion for the provided watch is too old.","reason":"Expired","code":410}"#,
};

/// Stands before an API server, without TLS.
struct Front {
    address: String,
    shared: Arc<Shared>,
    _tasks: tokio_util::task::AbortOnDropHandle<()>,
}

struct Shared {
    admin: kube::Client,
    /// Used up by the first request that it fits.
    next: Mutex<Vec<Alter>>,
    /// What befalls the open watches.
    watches: tokio::sync::watch::Sender<Option<Alter>>,
    /// The methods and paths of all requests.
    seen: Mutex<Vec<String>>,
}

impl Front {
    async fn new(server: &ApiServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let shared = Arc::new(Shared {
            admin: admin(server).await,
            next: Mutex::default(),
            watches: tokio::sync::watch::Sender::new(None),
            seen: Mutex::default(),
        });
        let serving = Arc::clone(&shared);
        let task = tokio::runtime::Handle::current().spawn(async move {
            let connections = TaskTracker::new();
            while let Ok((stream, _)) = listener.accept().await {
                let shared = Arc::clone(&serving);
                connections.spawn(async move {
                    // A client that goes away in the middle is no fault of the trial.
                    let _: std::io::Result<()> = shared.connection(stream).await;
                });
            }
        });
        let _tasks = tokio_util::task::AbortOnDropHandle::new(task);
        Self { address, shared, _tasks }
    }

    /// A backend that talks to the server through this.
    async fn open(&self, cluster: &str) -> KubeBackend {
        let kubeconfig = File::new(&format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\nclusters:\n- name: test\n  \
             cluster:\n    server: http://{}\nusers:\n- name: test\n  user: {{}}\ncontexts:\n- \
             name: test\n  context:\n    cluster: test\n    user: test\n    namespace: default\n",
            self.address
        ));
        try_open(&kubeconfig.path(), cluster).await.expect("opens")
    }

    fn alter(&self, alter: Alter) {
        match alter {
            Alter::Instead(..) | Alter::After(..) | Alter::Held(..) => {
                self.shared.next().push(alter);
            }
            watches => {
                self.shared.watches.send_replace(Some(watches));
            }
        }
    }

    /// How many requests of this method came, and how many of them watch.
    fn count(&self, method: &str) -> (usize, usize) {
        let seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let of_method = seen.iter().filter(|line| line.starts_with(method));
        let watches = of_method.clone().filter(|line| line.contains("watch=1"));
        (of_method.count(), watches.count())
    }
}

impl Shared {
    fn next(&self) -> std::sync::MutexGuard<'_, Vec<Alter>> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, method: &str, is_watch: bool) -> Option<Alter> {
        let word = if is_watch { "WATCH" } else { method };
        let mut next = self.next();
        let fits = |alter: &Alter| match alter {
            Alter::Instead(of, _) | Alter::After(of, _) | Alter::Held(of, _) => *of == word,
            _ => false,
        };
        let index = next.iter().position(fits)?;
        Some(next.remove(index))
    }

    /// Serves the requests of one connection.
    async fn connection(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut stream = BufReader::new(stream);
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            let mut words = line.split(' ');
            let (method, path) =
                (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let (method, path) = (method.to_owned(), path.to_owned());
            let mut request = http::Request::builder().method(method.as_str()).uri(path.as_str());
            let mut length = 0;
            loop {
                let mut header = String::new();
                stream.read_line(&mut header).await?;
                let Some((name, value)) = header.trim().split_once(':') else { break };
                match name.to_ascii_lowercase().as_str() {
                    "content-length" => length = value.trim().parse().unwrap_or(0),
                    "accept" | "content-type" => request = request.header(name, value.trim()),
                    _ => {}
                }
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).await?;
            let is_watch = path.contains("watch=1");
            self.seen
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(format!("{method} {path}"));
            let alter = self.take(&method, is_watch);
            if let Some(Alter::Instead(_, said)) = alter {
                write(&mut stream, said).await?;
                continue;
            }
            if let Some(Alter::Held(_, gate)) = &alter {
                gate.notified().await;
            }
            let mut changes = self.watches.subscribe();
            let request = request.body(Body::from(body)).map_err(std::io::Error::other)?;
            let answer = self.admin.send(request).await.map_err(std::io::Error::other)?;
            if let Some(Alter::After(_, said)) = alter {
                answer.into_body().collect().await.map_err(std::io::Error::other)?;
                write(&mut stream, said).await?;
            } else if is_watch {
                pass_watch(&mut stream, answer, &mut changes).await?;
            } else {
                pass(&mut stream, answer).await?;
            }
        }
    }
}

async fn write(stream: &mut BufReader<TcpStream>, said: Said) -> std::io::Result<()> {
    let Said { status, headers, body } = said;
    let length = body.len();
    let text = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\n\r\n{body}");
    stream.get_mut().write_all(text.as_bytes()).await
}

async fn pass(
    stream: &mut BufReader<TcpStream>,
    answer: http::Response<Body>,
) -> std::io::Result<()> {
    let (parts, body) = answer.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let mut head = format!("HTTP/1.1 {}\r\nContent-Length: {}\r\n", parts.status, body.len());
    for name in ["date", "content-type"] {
        if let Some(value) = parts.headers.get(name).and_then(|value| value.to_str().ok()) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
    }
    stream.get_mut().write_all(format!("{head}\r\n").as_bytes()).await?;
    stream.get_mut().write_all(&body).await
}

/// Passes what is watched on as it comes, until something befalls it.
async fn pass_watch(
    stream: &mut BufReader<TcpStream>,
    answer: http::Response<Body>,
    changes: &mut tokio::sync::watch::Receiver<Option<Alter>>,
) -> std::io::Result<()> {
    let (parts, mut body) = answer.into_parts();
    let head = format!("HTTP/1.1 {}\r\nTransfer-Encoding: chunked\r\n\r\n", parts.status);
    stream.get_mut().write_all(head.as_bytes()).await?;
    let mut is_silent = false;
    loop {
        let chunk = tokio::select! {
            frame = body.frame() => match frame {
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
                Some(Err(error)) => return Err(std::io::Error::other(error)),
                None => Bytes::new(),
            },
            Ok(()) = changes.changed() => {
                let change = changes.borrow_and_update().clone();
                match change {
                    Some(Alter::Event(event)) => {
                        chunk(stream, format!("{event}\n").as_bytes()).await?;
                        Bytes::new()
                    }
                    Some(Alter::Silence) => {
                        is_silent = true;
                        continue;
                    }
                    _ => Bytes::new(),
                }
            }
        };
        if chunk.is_empty() {
            return stream.get_mut().write_all(b"0\r\n\r\n").await;
        }
        if !is_silent {
            self::chunk(stream, &chunk).await?;
        }
    }
}

async fn chunk(stream: &mut BufReader<TcpStream>, bytes: &[u8]) -> std::io::Result<()> {
    let head = format!("{:x}\r\n", bytes.len());
    stream.get_mut().write_all(head.as_bytes()).await?;
    stream.get_mut().write_all(bytes).await?;
    stream.get_mut().write_all(b"\r\n").await
}

async fn a_busy_server_is_left_alone(server: ApiServer) {
    let front = Front::new(&server).await;
    let backend = front.open(&cluster()).await;
    let grant = acquire(&backend, &ask("jobs", "a", 30)).await;
    let before = front.count("PUT").0;
    front.alter(Alter::Instead("PUT", BUSY));
    let error = backend.lease().renew(&grant).await.expect_err("it is busy");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None));
    assert!(error.to_string().contains("for 1 s"), "{error}");
    assert_eq!(front.count("PUT").0, before + 1, "it was sent once");
    let begun = tokio::time::Instant::now();
    renew(&backend, &grant).await;
    // At least that long; a loaded machine takes longer.
    assert!(begun.elapsed() > Duration::from_millis(500), "it was not left alone");
    assert_eq!(front.count("PUT").0, before + 2, "it was sent once");
}

async fn a_busy_list_holds_back_no_renewal(server: ApiServer) {
    let front = Front::new(&server).await;
    let backend = front.open(&cluster()).await;
    let grant = acquire(&backend, &ask("jobs", "a", 30)).await;
    let address = coord_core::Address::new("10.0.0.1:7000").expect("an address");
    let node = NodeInfo::new(NodeId::new("node-1").expect("a name"), address);
    let (discovery, ttl) = (backend.discovery(), Ttl::from_secs(10).expect("a ttl"));
    let held = match discovery.register(&node, ttl, Replace::No).await.expect("registers") {
        Register::Registered(held) => held,
        other => panic!("a duplicate: {other:?}"),
    };
    front.alter(Alter::Instead("GET", BUSY_FOR_LONG));
    discovery.nodes().await.expect_err("it is busy");
    let begun = tokio::time::Instant::now();
    renew(&backend, &grant).await;
    let beat = discovery.heartbeat(&held, &node).await.expect("told");
    assert!(matches!(beat, coord_core::Heartbeat::Renewed(_)), "{beat:?}");
    assert!(backend.lease().get(&grant.lease).await.expect("reads").is_some());
    let before = front.count("GET").0;
    let error = discovery.nodes().await.expect_err("it is left alone");
    assert!(error.to_string().contains("nothing was sent"), "{error}");
    assert_eq!((front.count("GET").0, error.effect()), (before, Effect::None));
    assert!(begun.elapsed() < Duration::from_secs(5), "held back for {:?}", begun.elapsed());

    // Where it is the renewals that it can't take, they come once a tenth of the TTL.
    let before = front.count("PUT").0;
    for _ in 0..2 {
        front.alter(Alter::Instead("PUT", BUSY_FOR_LONG));
        let error = discovery.heartbeat(&held, &node).await.expect_err("it is busy");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None));
        // The caller gives up before it is sent, and comes again.
        let gives_up = Duration::from_millis(300);
        let beat = tokio::time::timeout(gives_up, discovery.heartbeat(&held, &node)).await;
        assert!(beat.is_err(), "{beat:?}");
    }
    let begun = tokio::time::Instant::now();
    let beat = discovery.heartbeat(&held, &node).await.expect("told");
    assert!(matches!(beat, coord_core::Heartbeat::Renewed(_)), "{beat:?}");
    assert!(begun.elapsed() < Duration::from_secs(5), "held back for {:?}", begun.elapsed());
    assert_eq!(front.count("PUT").0, before + 3);
    // It was taken, so the others are sent at once.
    let begun = tokio::time::Instant::now();
    renew(&backend, &grant).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "held back for {:?}", begun.elapsed());
}

async fn just_started(server: ApiServer) {
    let front = Front::new(&server).await;
    let name = cluster();
    let backend = front.open(&name).await;
    let grant = acquire(&backend, &ask("jobs", "a", 30)).await;
    for method in ["PUT", "GET"] {
        front.alter(Alter::Instead(method, FORBIDDEN));
        let error = match method {
            "PUT" => backend.lease().renew(&grant).await.expect_err("it is refused"),
            _ => backend.lease().get(&grant.lease).await.expect_err("it is refused"),
        };
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None));
        assert!(error.to_string().contains("just started"), "{error}");
    }
    renew(&backend, &grant).await;
    // What was never permitted is denied, and so is what `check` asks for.
    front.alter(Alter::Instead("DELETE", FORBIDDEN));
    let health = backend.check().await.expect("checks");
    assert_eq!(health.status(), coord_core::HealthStatus::Bad, "{health:?}");
    let other = front.open(&name).await;
    front.alter(Alter::Instead("GET", FORBIDDEN));
    let error = other.discovery().nodes().await.expect_err("it is denied");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}

async fn unknown<T: std::fmt::Debug>(
    what: &str,
    call: impl Future<Output = coord_core::Result<T>>,
) {
    let error = call.await.expect_err(what);
    assert_eq!(
        (error.kind(), error.effect()),
        (ErrorKind::Unavailable, Effect::Unknown),
        "{error}"
    );
}

async fn a_write_that_timed_out_is_found_again(server: ApiServer) {
    let front = Front::new(&server).await;
    let name = cluster();
    let (backend, other) = (front.open(&name).await, open(&server, &name).await);
    let lease_of = backend.lease();
    // The creation, and then the write that acquires.
    let request = ask("jobs", "a", 30);
    front.alter(Alter::After("POST", TIMEOUT));
    unknown("the creation times out", lease_of.try_acquire(&request)).await;
    front.alter(Alter::After("PUT", TIMEOUT));
    unknown("the acquire times out", lease_of.try_acquire(&request)).await;
    let seen = other.lease().get(&request.lease).await.expect("reads").expect("it was applied");
    let grant = acquire(&backend, &request).await;
    assert_eq!(grant.fence(), seen.fence(), "the same attempt is the same grant");
    // A renewal conflicts with itself, and is recognised.
    front.alter(Alter::After("PUT", TIMEOUT));
    unknown("the renewal times out", lease_of.renew(&grant)).await;
    assert_eq!(renew(&backend, &grant).await.fence(), grant.fence(), "it conflicts with itself");
    front.alter(Alter::After("PUT", TIMEOUT));
    unknown("the release times out", lease_of.release(&grant)).await;
    assert!(other.lease().get(&request.lease).await.expect("reads").is_none());
    assert_eq!(lease_of.release(&grant).await.expect("told"), Release::NotHeld);
    let next = acquire(&other, &ask("jobs", "b", 30)).await;
    assert!(next.term > grant.term, "{} after {}", next.term, grant.term);

    let address = coord_core::Address::new("10.0.0.1:7000").expect("an address");
    let node = NodeInfo::new(NodeId::new("node-1").expect("a name"), address);
    let (discovery, ttl) = (backend.discovery(), Ttl::from_secs(30).expect("a ttl"));
    front.alter(Alter::After("POST", TIMEOUT));
    unknown("the registration", discovery.register(&node, ttl, Replace::No)).await;
    let held = match discovery.register(&node, ttl, Replace::No).await.expect("registers") {
        Register::Registered(held) => held,
        other => panic!("a node is a duplicate of itself: {other:?}"),
    };
    front.alter(Alter::After("PUT", TIMEOUT));
    unknown("the heartbeat", discovery.heartbeat(&held, &node)).await;
    let beat = discovery.heartbeat(&held, &node).await.expect("told");
    assert!(matches!(beat, coord_core::Heartbeat::Renewed(_)), "{beat:?}");
    front.alter(Alter::After("PUT", TIMEOUT));
    unknown("the departure", discovery.deregister(&held)).await;
    assert!(discovery.nodes().await.expect("lists").is_empty(), "it was applied");
    discovery.deregister(&held).await.expect("it may be repeated");
    // What is deleted after the farewell is not waited for.
    assert!(matches!(
        discovery.register(&node, ttl, Replace::No).await,
        Ok(Register::Registered(_))
    ));
    front.alter(Alter::Instead("DELETE", FAILED));
    discovery.deregister(&held).await.expect("it has left");
    assert!(discovery.nodes().await.expect("lists").is_empty());

    let header = TableHeader::new(ShardCount::new(8).expect("a count"));
    let table = TableName::new("orders").expect("a name");
    let claim = ClaimRequest::new(table, next.fence(), header);
    front.alter(Alter::After("POST", TIMEOUT));
    unknown("the claim", backend.placement().claim(&claim)).await;
    let claimed = backend.placement().claim(&claim).await.expect("claims");
    assert!(matches!(claimed, Claim::Claimed(_)), "{claimed:?}");
    let asked = Request::new(node.id, SOON, "drain").expect("a request");
    front.alter(Alter::After("POST", TIMEOUT));
    unknown("the request", backend.placement().request(&asked)).await;
    assert_eq!(backend.placement().request(&asked).await.expect("told"), asked.id);
}

async fn a_failing_server_ends_nothing(server: ApiServer) {
    let front = Front::new(&server).await;
    let backend = front.open(&cluster()).await;
    let grant = acquire(&backend, &ask("jobs", "a", 30)).await;
    front.alter(Alter::Instead("PUT", FAILED));
    unknown("the renewal fails", backend.lease().renew(&grant)).await;
    front.alter(Alter::Instead("GET", FAILED));
    let error = backend.lease().get(&grant.lease).await.expect_err("it fails");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    front.alter(Alter::Instead("GET", FAILED));
    let error = backend.discovery().nodes().await.expect_err("failed is not empty");
    assert!(error.to_string().contains("no leader"), "{error}");
    renew(&backend, &grant).await;
}

/// Reads a lease's watch until the lease is held, or is not.
async fn held(
    watch: &mut (impl futures::Stream<Item = coord_core::Result<LeaseEvent>> + Unpin),
    right: bool,
    limit: Duration,
) {
    let reading = async {
        loop {
            let is_held = match watch.next().await.expect("it goes on").expect("no error") {
                LeaseEvent::Snapshot(record) => record.is_some(),
                LeaseEvent::Changed(_) => true,
                _ => false,
            };
            if is_held == right {
                return;
            }
        }
    };
    tokio::time::timeout(limit, reading)
        .await
        .unwrap_or_else(|_| panic!("not held={right} in time"));
}

/// Waits until the front has seen so many watches begin.
async fn watches(front: &Front, count: usize) {
    super::setup::until("the watch begins", SOON, || async {
        (front.count("GET").1 >= count).then_some(())
    })
    .await;
}

async fn a_forgotten_version_is_read_anew(server: ApiServer) {
    let front = Front::new(&server).await;
    let name = cluster();
    let (backend, other) = (front.open(&name).await, open(&server, &name).await);
    let mut watch = backend.lease().watch(&lease("jobs"));
    held(&mut watch, false, SOON).await;
    watches(&front, 1).await;
    // In the middle of a watch: what comes after it is still seen.
    front.alter(Alter::Event(EXPIRED));
    let grant = acquire(&other, &ask("jobs", "a", 60)).await;
    held(&mut watch, true, SOON).await;
    watches(&front, 2).await;
    // And when it is opened again.
    front.alter(Alter::Instead("WATCH", GONE));
    front.alter(Alter::End);
    other.lease().release(&grant).await.expect("releases");
    held(&mut watch, false, SOON).await;
    watches(&front, 4).await;
    // A list that began under a version that is gone is begun anew as a whole.
    acquire(&other, &ask("jobs", "b", 60)).await;
    held(&mut watch, true, SOON).await;
}

async fn a_watch_that_ends_goes_on(server: ApiServer) {
    let front = Front::new(&server).await;
    let name = cluster();
    let (backend, other) = (front.open(&name).await, open(&server, &name).await);
    let mut watch = backend.lease().watch(&lease("jobs"));
    held(&mut watch, false, SOON).await;
    for round in 1..=3 {
        watches(&front, round).await;
        let lists = front.count("GET").0 - front.count("GET").1;
        front.alter(Alter::End);
        let grant = acquire(&other, &ask("jobs", "a", 60)).await;
        held(&mut watch, true, SOON).await;
        other.lease().release(&grant).await.expect("releases");
        held(&mut watch, false, SOON).await;
        let after = front.count("GET").0 - front.count("GET").1;
        assert_eq!(after, lists, "it went on from where it was");
    }
}

async fn a_watch_is_long_where_bookmarks_come(server: ApiServer) {
    let front = Front::new(&server).await;
    let backend = front.open(&cluster()).await;
    let mut watch = backend.lease().watch(&lease("jobs"));
    held(&mut watch, false, SOON).await;
    watches(&front, 1).await;
    assert_eq!(front.count("GET"), (3, 1), "the namespace, one list and one watch");
    front.alter(Alter::Event(BOOKMARK));
    watches(&front, 2).await;
    let seen = front.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let opened: Vec<_> = seen.iter().filter(|line| line.contains("watch=1")).collect();
    assert!(opened[0].contains("timeoutSeconds=30&"), "{opened:?}");
    assert!(opened[1].contains("timeoutSeconds=300&"), "{opened:?}");
}

async fn a_silent_watch_ends_nobody(server: ApiServer) {
    let front = Front::new(&server).await;
    let name = cluster();
    let (backend, other) = (front.open(&name).await, open(&server, &name).await);
    let request = ask("jobs", "a", 1);
    let mut grant = acquire(&other, &request).await;
    let mut watch = backend.lease().watch(&lease("jobs"));
    held(&mut watch, true, SOON).await;
    watches(&front, 1).await;
    // Nothing of the holder's renewals comes through any more.
    let mut rounds = 0;
    let renewing = async {
        while rounds < 16 {
            front.alter(Alter::Silence);
            tokio::time::sleep(Duration::from_millis(250)).await;
            grant = renew(&other, &grant).await;
            rounds += 1;
        }
    };
    let vacant = held(&mut watch, false, SOON * 2);
    tokio::select! {
        biased;
        () = renewing => {}
        () = vacant => panic!("the watch took silence for the holder's end"),
    }
    // The holder is gone for real, and the watch is as silent as before.
    held(&mut watch, false, SOON).await;
    let next = backend.lease().try_acquire(&ask("jobs", "b", 5)).await.expect("told");
    assert!(matches!(next, Acquire::Acquired(_)), "{next:?}");
}

/// A leader has read a request and that it leads, and pauses before it writes its answer.
async fn a_claim_ends_what_an_older_leader_began(server: ApiServer) {
    let front = Front::new(&server).await;
    let name = cluster();
    let (old, new) = (front.open(&name).await, open(&server, &name).await);
    let claim = |grant: &Grant| {
        let header = TableHeader::new(ShardCount::new(1).expect("a count"));
        ClaimRequest::new(TableName::cluster(), grant.fence(), header)
    };
    let first = acquire(&old, &ask("leader", "a", 60)).await;
    let claimed = old.placement().claim(&claim(&first)).await.expect("claims");
    assert!(matches!(claimed, Claim::Claimed(_)), "{claimed:?}");
    let asked = Request::new(NodeId::new("node-1").expect("a name"), SOON * 6, "drain");
    let asked = asked.expect("a request");
    new.placement().request(&asked).await.expect("asked");

    let gate = Arc::new(Notify::new());
    front.alter(Alter::Held("PUT", Arc::clone(&gate)));
    let before = front.count("PUT").0;
    let answer = Answer::new("by the old one").expect("an answer");
    let (placement, fence) = (old.placement(), first.fence());
    let answering = placement.answer(&asked.id, &fence, &answer);
    let succeeding = async {
        super::setup::until("the old one is about to write", SOON, || async {
            (front.count("PUT").0 > before).then_some(())
        })
        .await;
        // As an operator does it.
        let released = new.lease().release(&first).await.expect("releases");
        assert_eq!(released, Release::Released);
        let second = acquire(&new, &ask("leader", "b", 60)).await;
        let claimed = new.placement().claim(&claim(&second)).await.expect("claims");
        assert!(matches!(claimed, Claim::Claimed(_)), "{claimed:?}");
        gate.notify_one();
        second
    };
    let (answered, second) = tokio::join!(answering, succeeding);
    match answered.expect("told") {
        Answered::Fenced(Some(by)) => assert_eq!(by, second.fence()),
        other => panic!("the old leader's answer is {other:?}"),
    }
    let answer = Answer::new("by the new one").expect("an answer");
    let answered = new.placement().answer(&asked.id, &second.fence(), &answer).await;
    assert_eq!(answered.expect("told"), Answered::Recorded);
}
