//! The API server's client: all calls of the vendor's crate are made here and below.
//!
//! Objects go back and forth as they are, untyped, so that a field of a newer server or of another
//! writer survives. Each request is bounded in time, ends when the handle is closed, and is sent
//! once: the vendor's own retries are off, for a write that was sent twice conflicts with itself.
//! Only a request that was refused for its credentials (401) is sent again, with fresh ones.

mod connect;
mod object;
mod watch;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use coord_core::{BootClock, Clock as _, Effect, ErrorKind, Moment, Result};
use http::header::{ACCEPT, CONTENT_TYPE, DATE, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, Method, StatusCode};
use kube::client::Body;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use self::connect::Vendor;
pub(crate) use self::object::{Object, Resource};
pub(crate) use self::watch::{Topic, subscribe};
use crate::error::{Asked, Op, refused, request_error};
use crate::keys::{Kind, LABEL_CLUSTER, LABEL_KIND, LABEL_TABLE};

/// How many objects one page of a list holds.
const PAGE: u32 = 500;
/// How often a list is begun anew that became too old between two of its pages.
const LISTS_MAX: usize = 3;
/// The longest that a busy API server is left alone, whatever it asks for.
const BUSY_MAX: Duration = Duration::from_secs(30);
/// For how long an API server that refuses what it permitted before counts as one that has just
/// started: until then it knows of no rights at all, for about a second.
const STARTING_MAX: Duration = Duration::from_secs(30);
/// How long `close` waits for what tidies up.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// How many requests that read, and how many that write, are under way at once: each takes a
/// connection. Kept apart, since a renewal must not wait behind a thousand candidates' looks.
const REQUESTS_MAX: usize = 64;
/// The largest answer that is read, of a list's page say.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// One way to the API server.
#[derive(Clone)]
pub(crate) struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    vendor: Vendor,
    current: RwLock<kube::Client>,
    request_timeout: Duration,
    /// Who we say we are, in audit logs and as the manager of fields.
    agent: String,
    clock: BootClock,
    /// The sorts of requests that the API server wants to be left alone with.
    busy: Mutex<HashMap<Sort, Busy>>,
    /// The sorts of requests that it permitted once, and since when it has refused them all the same.
    permitted: Mutex<HashMap<Sort, Option<Moment>>>,
    reads: Semaphore,
    writes: Semaphore,
    closed: CancellationToken,
    tasks: TaskTracker,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

/// Which objects.
#[derive(Clone, Debug)]
pub(crate) enum Selector {
    /// The one with this name.
    Name(String),
    /// All of a kind in a cluster.
    Kind { cluster: String, kind: Kind },
    /// All chunks of a table.
    Chunks { cluster: String, table: String },
    /// All that no handle of ours has written yet: another program's.
    Unlabelled,
}

impl Selector {
    fn query(&self) -> String {
        let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        match self {
            Self::Name(name) => {
                format!("fieldSelector={}", encoded(&format!("metadata.name={name}")))
            }
            Self::Kind { cluster, kind } => {
                let kind = kind.as_str();
                let labels = format!("{LABEL_CLUSTER}={cluster},{LABEL_KIND}={kind}");
                format!("labelSelector={}", encoded(&labels))
            }
            Self::Chunks { cluster, table } => {
                let kind = Kind::Chunk.as_str();
                let labels =
                    format!("{LABEL_CLUSTER}={cluster},{LABEL_KIND}={kind},{LABEL_TABLE}={table}");
                format!("labelSelector={}", encoded(&labels))
            }
            Self::Unlabelled => format!("labelSelector={}", encoded(&format!("!{LABEL_KIND}"))),
        }
    }
}

/// How a deletion came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Deleted {
    Done,
    /// The object is another one by now.
    Conflict,
    /// There is none.
    Gone,
}

/// All objects that there are, as of one moment.
#[derive(Debug)]
pub(crate) struct List {
    pub(crate) objects: Vec<Object>,
    /// What a watch goes on from.
    pub(crate) version: String,
    /// When it was asked for, and answered.
    pub(crate) asked: Moment,
    pub(crate) answered: Moment,
}

/// One request.
struct Call<'a> {
    method: Method,
    /// As a Role names what is done and to what.
    verb: &'static str,
    what: &'static str,
    path: String,
    accept: &'static str,
    body: Option<&'a Value>,
}

/// What the API server admits and permits together: a verb on a resource.
type Sort = (&'static str, &'static str);

/// An API server that wants to be left alone.
#[derive(Clone, Copy, Debug)]
struct Busy {
    since: Moment,
    until: Moment,
}

impl Busy {
    /// For how long a request is held back that bears no more than this from the refusal on. The
    /// refusal counts and not the call, or a caller that gives up and comes again would never get
    /// through.
    fn left(self, now: Moment, bears: Option<Duration>) -> Duration {
        let until = bears.map_or(self.until, |bears| self.until.min(self.since.plus(bears)));
        until.since(now)
    }
}

const JSON: &str = "application/json";
/// The objects without what they hold.
const NAMES: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// What the API server said.
pub(crate) struct Reply {
    status: StatusCode,
    /// Its clock, in seconds since 1970.
    date: Option<i64>,
    retry_after: Option<u64>,
    body: Bytes,
}

#[derive(Deserialize)]
struct Page {
    #[serde(default)]
    metadata: PageMetadata,
    #[serde(default)]
    items: Option<Vec<Value>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMetadata {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    next: Option<String>,
}

impl Client {
    pub(crate) async fn open(
        op: Op<'_>,
        vendor: Vendor,
        request_timeout: Duration,
    ) -> Result<Self> {
        let current = vendor.client(op).await?;
        let shared = Shared {
            vendor,
            current: RwLock::new(current),
            request_timeout,
            agent: agent(host().as_deref()),
            clock: BootClock::new(),
            busy: Mutex::default(),
            permitted: Mutex::default(),
            reads: Semaphore::new(REQUESTS_MAX),
            writes: Semaphore::new(REQUESTS_MAX),
            closed: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    pub(crate) fn namespace(&self) -> &str {
        self.shared.vendor.namespace()
    }

    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.shared.closed
    }

    /// For what goes on after a call has answered.
    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.shared.tasks
    }

    /// Now, on the clock by which expiry is judged.
    pub(crate) fn now(&self) -> Moment {
        self.shared.clock.now()
    }

    /// One object; none if there is none.
    pub(crate) async fn get(
        &self,
        op: Op<'_>,
        resource: Resource,
        name: &str,
    ) -> Result<Option<Object>> {
        let call = self.object_call(Method::GET, "get", resource, Some(name), "", None);
        let reply = self.call(op.reading(), &call).await?;
        match reply.status.as_u16() {
            404 if is_status(&reply.body) => Ok(None),
            _ => self.object(op.reading(), &call, reply).map(Some),
        }
    }

    /// Creates an object; none if there is one of that name.
    pub(crate) async fn create(
        &self,
        op: Op<'_>,
        resource: Resource,
        object: &Object,
    ) -> Result<Option<Object>> {
        let body = Some(object.as_value());
        let call = self.object_call(Method::POST, "create", resource, None, "", body);
        let reply = self.call(op, &call).await?;
        if reply.status == StatusCode::CONFLICT {
            return Ok(None);
        }
        self.object(op, &call, reply).map(Some)
    }

    /// Writes an object over the version that was read; none if another one is there by now, or
    /// none at all.
    pub(crate) async fn replace(
        &self,
        op: Op<'_>,
        resource: Resource,
        object: &Object,
    ) -> Result<Option<Object>> {
        let (name, body) = (Some(object.name()), Some(object.as_value()));
        let call = self.object_call(Method::PUT, "update", resource, name, "", body);
        let reply = self.call(op, &call).await?;
        if matches!(reply.status.as_u16(), 404 | 409) && is_status(&reply.body) {
            return Ok(None);
        }
        self.object(op, &call, reply).map(Some)
    }

    /// Deletes an object, if it is this one, and in this version where one is given.
    pub(crate) async fn delete(
        &self,
        op: Op<'_>,
        resource: Resource,
        name: &str,
        uid: &str,
        version: Option<&str>,
    ) -> Result<Deleted> {
        let mut preconditions = json!({ "uid": uid });
        if let Some(version) = version {
            preconditions["resourceVersion"] = version.into();
        }
        self.delete_if(op, resource, name, "", &preconditions).await
    }

    async fn delete_if(
        &self,
        op: Op<'_>,
        resource: Resource,
        name: &str,
        query: &str,
        preconditions: &Value,
    ) -> Result<Deleted> {
        let body = json!({
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": preconditions,
            "propagationPolicy": "Background",
        });
        let call =
            self.object_call(Method::DELETE, "delete", resource, Some(name), query, Some(&body));
        let reply = self.call(op, &call).await?;
        match reply.status.as_u16() {
            200 | 202 => Ok(Deleted::Done),
            404 if is_status(&reply.body) => Ok(Deleted::Gone),
            409 => Ok(Deleted::Conflict),
            _ => Err(self.refused(op, &call, &reply)),
        }
    }

    /// All objects that are selected, page by page.
    pub(crate) async fn list(
        &self,
        op: Op<'_>,
        resource: Resource,
        selector: &Selector,
    ) -> Result<List> {
        self.list_as(op.reading(), resource, selector, JSON).await
    }

    /// The same without what the objects hold.
    pub(crate) async fn names(
        &self,
        op: Op<'_>,
        resource: Resource,
        selector: &Selector,
    ) -> Result<List> {
        self.list_as(op.reading(), resource, selector, NAMES).await
    }

    async fn list_as(
        &self,
        op: Op<'_>,
        resource: Resource,
        selector: &Selector,
        accept: &'static str,
    ) -> Result<List> {
        for _ in 0..LISTS_MAX {
            if let Some(list) = self.list_once(op, resource, selector, accept).await? {
                return Ok(list);
            }
        }
        Err(op.contended())
    }

    /// One list; none if the server forgot its version before the last page.
    async fn list_once(
        &self,
        op: Op<'_>,
        resource: Resource,
        selector: &Selector,
        accept: &'static str,
    ) -> Result<Option<List>> {
        let asked = self.now();
        let mut objects = Vec::new();
        let mut next = None::<String>;
        loop {
            let mut query = format!("?limit={PAGE}&{}", selector.query());
            if let Some(next) = &next {
                query.push_str("&continue=");
                query.extend(utf8_percent_encode(next, NON_ALPHANUMERIC));
            }
            let mut call = self.object_call(Method::GET, "list", resource, None, &query, None);
            call.accept = accept;
            let reply = self.call(op, &call).await?;
            if reply.status == StatusCode::GONE && next.is_some() {
                return Ok(None);
            }
            if !reply.status.is_success() {
                return Err(self.refused(op, &call, &reply));
            }
            let page: Page = serde_json::from_slice(&reply.body)
                .map_err(|source| unreadable(op).with_source(source))?;
            for item in page.items.unwrap_or_default() {
                objects.push(Object::parse(item, reply.date).ok_or_else(|| unreadable(op))?);
            }
            next = page.metadata.next.filter(|next| !next.is_empty());
            if next.is_none() {
                let version = page.metadata.resource_version;
                return Ok(Some(List { objects, version, asked, answered: self.now() }));
            }
        }
    }

    /// What the server says its version is.
    pub(crate) async fn server_version(&self, op: Op<'_>) -> Result<String> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Version {
            git_version: String,
        }
        let call = Call {
            method: Method::GET,
            verb: "get",
            what: "/version",
            path: "/version".to_owned(),
            accept: JSON,
            body: None,
        };
        let reply = self.call(op, &call).await?;
        if !reply.status.is_success() {
            return Err(self.refused(op, &call, &reply));
        }
        let version: Version = serde_json::from_slice(&reply.body)
            .map_err(|source| unreadable(op).with_source(source))?;
        Ok(version.git_version)
    }

    /// The uid of the namespace, which no other store and no later namespace of its name has.
    pub(crate) async fn namespace_uid(&self, op: Op<'_>) -> Result<String> {
        let namespace = self.namespace();
        let call = Call {
            method: Method::GET,
            verb: "get",
            what: "namespaces",
            path: format!("/api/v1/namespaces/{namespace}"),
            accept: JSON,
            body: None,
        };
        let reply = self.call(op, &call).await?;
        if reply.status == StatusCode::NOT_FOUND && is_status(&reply.body) {
            let why = format!("there is no namespace {namespace:?}; create it, or name another");
            return Err(op.error(ErrorKind::Misconfigured).message(why));
        }
        let object = self.object(op, &call, reply)?;
        match object.uid() {
            "" => Err(op.error(ErrorKind::Misconfigured).message("the namespace has no uid")),
            uid => Ok(uid.to_owned()),
        }
    }

    /// Asks for what is only meant to be permitted: nothing is changed by it.
    pub(crate) async fn try_verb(
        &self,
        op: Op<'_>,
        resource: Resource,
        verb: &'static str,
        probe: &Object,
        selector: &Selector,
    ) -> Result<()> {
        const DRY: &str = "?dryRun=All";
        let name = Some(probe.name());
        match verb {
            "get" => self.get(op, resource, probe.name()).await.map(drop),
            "list" => self.list(op, resource, selector).await.map(drop),
            "watch" => {
                let list = self.list(op, resource, selector).await;
                // Without the right to list it begins with what the server has at hand.
                let version = list.map_or_else(|_| "0".to_owned(), |list| list.version);
                self.open_watch(op, resource, selector, &version, 1).await.map(drop)
            }
            "create" => {
                let body = Some(probe.as_value());
                let call = self.object_call(Method::POST, verb, resource, None, DRY, body);
                self.accepted(op, &call, &[409]).await
            }
            "update" => {
                // One that there can't be, or the server would take it for a creation.
                let mut absent = probe.as_value().clone();
                absent["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000".into();
                absent["metadata"]["resourceVersion"] = "1".into();
                let call = self.object_call(Method::PUT, verb, resource, name, DRY, Some(&absent));
                self.accepted(op, &call, &[404, 409]).await
            }
            _ => {
                let none = json!({ "uid": "00000000-0000-0000-0000-000000000000" });
                self.delete_if(op, resource, probe.name(), DRY, &none).await.map(drop)
            }
        }
    }

    async fn accepted(&self, op: Op<'_>, call: &Call<'_>, also: &[u16]) -> Result<()> {
        let reply = self.call(op, call).await?;
        if reply.status.is_success() || also.contains(&reply.status.as_u16()) {
            return Ok(());
        }
        Err(self.refused(op, call, &reply))
    }

    /// Opens a watch from a version on; none if the server has forgotten it.
    async fn open_watch(
        &self,
        op: Op<'_>,
        resource: Resource,
        selector: &Selector,
        version: &str,
        seconds: u64,
    ) -> Result<Option<Body>> {
        let version = utf8_percent_encode(version, NON_ALPHANUMERIC);
        let query = format!(
            "?watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={version}&{}",
            selector.query()
        );
        let call = self.object_call(Method::GET, "watch", resource, None, &query, None);
        let sent = AtomicBool::new(false);
        let opening = async {
            let _turn = self.turn(op, &call).await?;
            let response = self.answered(op, &call, &sent).await?;
            match response.status() {
                StatusCode::GONE => Ok(None),
                StatusCode::OK => Ok(Some(response.into_body())),
                _ => {
                    let reply = self.read(op, response).await?;
                    Err(self.refused(op, &call, &reply))
                }
            }
        };
        self.bounded(op, &sent, opening).await
    }

    /// Ends everything of this handle.
    pub(crate) async fn close(&self, op: Op<'_>) -> Result<()> {
        self.shared.closed.cancel();
        self.shared.tasks.close();
        match timeout(CLOSE_LIMIT, self.shared.tasks.wait()).await {
            Ok(()) => Ok(()),
            Err(_) => Err(op.reading().unclear("what tidies up did not end in time")),
        }
    }

    fn object_call<'a>(
        &self,
        method: Method,
        verb: &'static str,
        resource: Resource,
        name: Option<&str>,
        query: &str,
        body: Option<&'a Value>,
    ) -> Call<'a> {
        let mut path = resource.path(self.namespace());
        if let Some(name) = name {
            path.push('/');
            path.push_str(name);
        }
        path.push_str(query);
        Call { method, verb, what: resource.name(), path, accept: JSON, body }
    }

    fn object(&self, op: Op<'_>, call: &Call<'_>, reply: Reply) -> Result<Object> {
        if !reply.status.is_success() {
            return Err(self.refused(op, call, &reply));
        }
        let value: Value = serde_json::from_slice(&reply.body)
            .map_err(|source| unreadable(op).with_source(source))?;
        Object::parse(value, reply.date).ok_or_else(|| unreadable(op))
    }

    fn refused(&self, op: Op<'_>, call: &Call<'_>, reply: &Reply) -> coord_core::Error {
        let is_starting = reply.status == StatusCode::FORBIDDEN
            && op.name != "check"
            && self.seems_to_start(call.sort());
        let (verb, what, namespace) = (call.verb, call.what, self.namespace());
        let asked = Asked { verb, what, namespace, is_starting };
        refused(op, asked, reply.status, reply.retry_after, &reply.body)
    }

    /// Whether the API server permitted this before, and has refused it for a short while only.
    fn seems_to_start(&self, sort: Sort) -> bool {
        let now = self.now();
        let mut permitted = self.permitted();
        let since = permitted.get_mut(&sort).map(|since| *since.get_or_insert(now));
        since.is_some_and(|since| now.since(since) < STARTING_MAX)
    }

    /// One request and its answer, within the time limit.
    async fn call(&self, op: Op<'_>, call: &Call<'_>) -> Result<Reply> {
        let sent = AtomicBool::new(false);
        let exchange = async {
            let _turn = self.turn(op, call).await?;
            let response = self.answered(op, call, &sent).await?;
            self.read(op, response).await
        };
        self.bounded(op, &sent, exchange).await
    }

    async fn bounded<T>(
        &self,
        op: Op<'_>,
        sent: &AtomicBool,
        exchange: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        if self.shared.closed.is_cancelled() {
            return Err(op.closed());
        }
        let ended = tokio::select! {
            biased;
            () = self.shared.closed.cancelled() => None,
            done = timeout(self.shared.request_timeout, exchange) => Some(done),
        };
        if let Some(Ok(done)) = ended {
            return done;
        }
        // What was sent may be applied all the same.
        let was_sent = sent.load(Ordering::Relaxed);
        let op = if was_sent { op } else { op.reading() };
        Err(match (ended, op.effect) {
            (None, Effect::None) => op.closed(),
            (None, _) => op.closed().effect_unknown(),
            _ if was_sent => op.unclear("no answer from the API server in time"),
            _ => op.unclear("too many requests are under way; it was not sent in time"),
        })
    }

    /// Waits until the API server may be asked.
    async fn turn(&self, op: Op<'_>, call: &Call<'_>) -> Result<SemaphorePermit<'_>> {
        self.wait_while_busy(op, call.sort()).await?;
        let is_read = call.method == Method::GET;
        let turns = if is_read { &self.shared.reads } else { &self.shared.writes };
        turns.acquire().await.map_err(|_| op.reading().closed())
    }

    /// Sends a request until its credentials are taken, twice at most.
    async fn answered(
        &self,
        op: Op<'_>,
        call: &Call<'_>,
        sent: &AtomicBool,
    ) -> Result<http::Response<Body>> {
        let vendor = self.current();
        sent.store(true, Ordering::Relaxed);
        let response = self.send(op, &vendor, call).await?;
        if response.status() != StatusCode::UNAUTHORIZED || !self.shared.vendor.can_renew() {
            return Ok(response);
        }
        // Nothing was done. A token is read once a minute, and may have been replaced since.
        let fresh = self.shared.vendor.client(op).await?;
        *self.shared.current.write().unwrap_or_else(PoisonError::into_inner) = fresh.clone();
        self.send(op, &fresh, call).await
    }

    fn current(&self) -> kube::Client {
        self.shared.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn send(
        &self,
        op: Op<'_>,
        vendor: &kube::Client,
        call: &Call<'_>,
    ) -> Result<http::Response<Body>> {
        let internal = |why: &'static str| op.error(ErrorKind::Internal).message(why);
        let mut request = http::Request::builder().method(call.method.clone()).uri(&call.path);
        request = request.header(ACCEPT, call.accept).header(USER_AGENT, &self.shared.agent);
        let body = match call.body {
            None => Body::empty(),
            Some(body) => {
                request = request.header(CONTENT_TYPE, JSON);
                let body = serde_json::to_vec(body)
                    .map_err(|source| internal("a request can't be written").with_source(source))?;
                Body::from(body)
            }
        };
        let request = request
            .body(body)
            .map_err(|source| internal("a request can't be made").with_source(source))?;
        let response = vendor.send(request).await.map_err(|error| request_error(op, error))?;
        self.note(call.sort(), response.status(), retry_after(response.headers()));
        Ok(response)
    }

    /// Takes in how the API server met this sort of request.
    fn note(&self, sort: Sort, status: StatusCode, retry_after: Option<u64>) {
        match (status, retry_after) {
            (StatusCode::TOO_MANY_REQUESTS, Some(seconds)) => {
                let since = self.now();
                let until = since.plus(Duration::from_secs(seconds).min(BUSY_MAX));
                self.busy().insert(sort, Busy { since, until });
            }
            _ if status.is_success() || matches!(status.as_u16(), 404 | 409) => {
                self.busy().remove(&sort);
                self.permitted().insert(sort, None);
            }
            _ => {}
        }
    }

    async fn read(&self, op: Op<'_>, response: http::Response<Body>) -> Result<Reply> {
        let (parts, body) = response.into_parts();
        let limited = http_body_util::Limited::new(body, ANSWER_BYTES_MAX);
        let collected = http_body_util::BodyExt::collect(limited).await;
        let body = collected
            .map_err(|source| {
                op.unclear("the connection broke, or the answer is too long").with_source(source)
            })?
            .to_bytes();
        let (date, retry_after) = (date(&parts.headers), retry_after(&parts.headers));
        Ok(Reply { status: parts.status, date, retry_after, body })
    }

    /// Leaves the API server alone with this sort of request as it asked for. One that would have to
    /// wait for long is not sent at all: its caller knows better what to do meanwhile.
    async fn wait_while_busy(&self, op: Op<'_>, sort: Sort) -> Result<()> {
        let busy = self.busy().get(&sort).copied();
        let Some(busy) = busy else { return Ok(()) };
        let left = busy.left(self.now(), op.bears);
        let most = self.shared.request_timeout / 2;
        if left > op.patience.map_or(most, |patience| patience.min(most)) {
            let why = format!(
                "the API server is busy and wants to be left alone for {} s more; nothing was sent",
                left.as_secs() + 1
            );
            return Err(op.reading().unclear(why));
        }
        if !left.is_zero() {
            tokio::time::sleep(left).await;
        }
        Ok(())
    }

    fn busy(&self) -> MutexGuard<'_, HashMap<Sort, Busy>> {
        self.shared.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn permitted(&self) -> MutexGuard<'_, HashMap<Sort, Option<Moment>>> {
        self.shared.permitted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Call<'_> {
    fn sort(&self) -> Sort {
        (self.what, self.verb)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("namespace", &self.namespace())
            .field("closed", &self.shared.closed.is_cancelled())
            .finish_non_exhaustive()
    }
}

/// `coord/VERSION (node)`. A pod's host name is the pod's, and a host's is its own.
fn agent(host: Option<&str>) -> String {
    let agent = concat!("coord/", env!("CARGO_PKG_VERSION"));
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    match host.map(str::trim) {
        Some(host) if !host.is_empty() && host.chars().all(is_good) => format!("{agent} ({host})"),
        _ => agent.to_owned(),
    }
}

fn host() -> Option<String> {
    let read = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    read.or_else(|| std::env::var("HOSTNAME").ok())
}

fn unreadable(op: Op<'_>) -> coord_core::Error {
    op.unclear("the API server's answer can't be read")
}

/// Whether it is the API server that answers, and not something on the way to it.
fn is_status(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Kind {
        kind: String,
    }
    serde_json::from_slice::<Kind>(body).is_ok_and(|answer| answer.kind == "Status")
}

fn date(headers: &HeaderMap) -> Option<i64> {
    let text = headers.get(DATE)?.to_str().ok()?;
    let date = jiff::fmt::rfc2822::parse(text).ok()?;
    Some(date.timestamp().as_second())
}

/// Whole seconds; the other form, a date, is sent by no API server.
fn retry_after(headers: &HeaderMap) -> Option<u64> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_servers_clock_is_read() {
        let mut headers = HeaderMap::new();
        assert_eq!((date(&headers), retry_after(&headers)), (None, None));
        headers.insert(DATE, HeaderValue::from_static("Sun, 29 Nov 2026 20:40:00 GMT"));
        headers.insert(RETRY_AFTER, HeaderValue::from_static("3"));
        assert_eq!((date(&headers), retry_after(&headers)), (Some(1_795_984_800), Some(3)));
    }

    #[test]
    fn a_request_is_held_back_from_the_refusal_on() {
        let at = |millis| Moment::from_origin(Duration::from_millis(millis));
        let busy = Busy { since: at(1_000), until: at(31_000) };
        assert_eq!(busy.left(at(1_000), None), Duration::from_secs(30));
        assert_eq!(busy.left(at(31_000), None), Duration::ZERO);
        // A renewal bears a tenth of its TTL, however often its caller gave up meanwhile.
        let bears = Some(Duration::from_secs(1));
        assert_eq!(busy.left(at(1_400), bears), Duration::from_millis(600));
        assert_eq!(busy.left(at(2_000), bears), Duration::ZERO);
        let short = Busy { since: at(1_000), until: at(1_500) };
        assert_eq!(short.left(at(1_400), bears), Duration::from_millis(100));
    }

    #[test]
    fn the_agent_says_where_it_runs() {
        let plain = format!("coord/{}", env!("CARGO_PKG_VERSION"));
        assert_eq!(agent(Some("orders-0\n")), format!("{plain} (orders-0)"));
        for odd in [None, Some(""), Some("a b"), Some("a\r\nX: y")] {
            assert_eq!(agent(odd), plain);
        }
    }

    #[test]
    fn only_the_api_server_says_that_there_is_nothing() {
        assert!(is_status(br#"{"kind":"Status","code":404}"#));
        assert!(!is_status(b"404 page not found"));
        assert!(!is_status(br#"{"error":"no such route"}"#));
    }

    #[test]
    fn selectors_are_encoded() {
        let kind = Selector::Kind { cluster: "orders".to_owned(), kind: Kind::Node };
        assert_eq!(kind.query(), "labelSelector=coord%2Fcluster%3Dorders%2Ccoord%2Fkind%3Dnode");
        let name = Selector::Name("coord.a".to_owned());
        assert_eq!(name.query(), "fieldSelector=metadata%2Ename%3Dcoord%2Ea");
    }
}
