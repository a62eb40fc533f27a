//! The etcd client: all calls of the vendor's crate are made here and below.
//!
//! Each request is bounded in time, ends when the handle is closed, and fails with an [error of
//! ours](crate::error). It goes to one of the [endpoints], and to another one when that does not
//! answer: see there what is repeated.

mod endpoints;
mod identity;
mod keep_alive;
mod reads;
mod watch;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::{Effect, Error, ErrorKind, Result};
use etcd_client::proto::PbTxnOpResponse;
use etcd_client::{
    AlarmAction, AlarmType, Compare, CompareOp, ConnectOptions, DeleteOptions, GetOptions,
    PutOptions, Txn, TxnOp,
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::endpoints::{Connection, Endpoints};
use self::identity::Identity;
pub(crate) use self::identity::Seen;
use self::keep_alive::KeepAlive;
pub(crate) use self::keep_alive::Kept;
use self::reads::Reads;
pub(crate) use self::watch::{Batch, Change, Topic, subscribe};
use crate::config::Config;
use crate::error::{Problem, problem};
use crate::keys::{Mark, Range};

/// The largest answer that is taken: a page of records, or a batch of chunks.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// How many keys one page of a listing has.
const PAGE: i64 = 500;
/// How often an idle connection is looked at while something is under way on it. A server takes
/// more than one ping in 5 s for an attack.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// How often, and after what pause, an etcd lease is looked at whose last second runs.
const LAST_SECOND_LOOKS: u32 = 30;
const LAST_SECOND_PAUSE: Duration = Duration::from_millis(100);
/// How long `close` waits for its tasks to end.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// One connection to the servers.
#[derive(Clone)]
pub(crate) struct Client {
    endpoints: Endpoints,
    keep_alive: KeepAlive,
    reads: Reads,
    shared: Arc<Shared>,
}

struct Shared {
    request_timeout: Duration,
    identity: Identity,
    closed: CancellationToken,
    tasks: TaskTracker,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

/// A key as etcd holds it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) value: Bytes,
    pub(crate) created: i64,
    pub(crate) modified: i64,
    /// The etcd lease that it is bound to; 0 for none.
    pub(crate) lease: i64,
}

impl Entry {
    pub(crate) fn mark(&self) -> Mark {
        Mark { modified: self.modified, lease: self.lease }
    }
}

/// What must hold for a transaction's steps.
#[derive(Clone, Debug)]
pub(crate) enum Condition {
    Absent(String),
    /// The key was last written by this revision.
    At(String, i64),
    /// The key is bound to this etcd lease.
    Bound(String, i64),
    /// The key has this value.
    Holds(String, Bytes),
}

/// One step of a transaction.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Get(String),
    /// As it stood at a revision.
    GetAt(String, i64),
    /// The keys of a range, without values.
    Keys(Range),
    /// How many keys a range has.
    Count(Range),
    Put {
        key: String,
        value: Bytes,
        lease: i64,
    },
    Delete(String),
}

/// What a transaction did.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// Whether all conditions held.
    pub(crate) succeeded: bool,
    /// The store's revision after it.
    pub(crate) revision: i64,
    /// Which cluster of etcd it is, by etcd's own count.
    store: u64,
    /// What each step read.
    pub(crate) found: Vec<Found>,
}

/// What one step read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found {
    pub(crate) entries: Vec<Entry>,
    pub(crate) count: i64,
}

impl Outcome {
    /// The one key that a step read.
    pub(crate) fn take(&mut self, step: usize) -> Option<Entry> {
        self.found.get_mut(step).and_then(|found| found.entries.pop())
    }
}

/// What a server says of itself.
#[derive(Clone, Debug)]
pub(crate) struct Status {
    pub(crate) version: String,
    pub(crate) has_leader: bool,
    pub(crate) database_bytes: i64,
}

impl Client {
    /// Connects, and authenticates where there is a user.
    pub(crate) async fn connect(config: &Config) -> Result<Self> {
        let op = Op::read("connect", &config.target);
        let options = connect_options(op, config)?;
        let endpoints = Endpoints::new(&config.endpoints, &options, config.request_timeout);
        let shared = Arc::new(Shared {
            request_timeout: config.request_timeout,
            identity: Identity::default(),
            closed: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        let keep_alive = KeepAlive::start(&endpoints, &shared);
        let client = Self { endpoints, keep_alive, reads: Reads::default(), shared };
        // A connection that has a user authenticates before anything else.
        client.call(op, Effect::None, |_| async { Ok(()) }).await?;
        Ok(client)
    }

    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.shared.closed
    }

    /// Does something in the background, until the handle is closed.
    pub(crate) fn tidy_up(&self, work: impl Future<Output = ()> + Send + 'static) {
        let closed = self.shared.closed.clone();
        drop(self.shared.tasks.spawn(async move {
            closed.run_until_cancelled(work).await;
        }));
    }

    /// Ends all calls and watches, and what tidies up: its time to live ends what is left.
    pub(crate) async fn close(&self) {
        self.shared.closed.cancel();
        self.shared.tasks.close();
        // What does not end in time is dropped with the last handle.
        let _ = timeout(CLOSE_LIMIT, self.shared.tasks.wait()).await;
    }

    /// Sends one request.
    async fn call<T, F>(
        &self,
        op: Op<'_>,
        effect: Effect,
        send: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<T, Problem>
    where
        T: Send,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
    {
        let limit = self.shared.request_timeout;
        let attempts = async {
            match effect {
                Effect::None => self.endpoints.race(send).await,
                _ => self.endpoints.once(send).await,
            }
        };
        tokio::select! {
            biased;
            () = self.shared.closed.cancelled() => Err(op.closed().into()),
            answer = timeout(limit, attempts) => match answer {
                Ok(answer) => answer.map_err(|error| problem(op, effect, error)),
                Err(_) => Err(no_answer(op, limit, effect).into()),
            },
        }
    }

    /// One atomic step, whichever store it is. See [`transact`](Self::transact).
    async fn transact_anywhere(
        &self,
        op: Op<'_>,
        when: &[Condition],
        then: &[Step],
        otherwise: &[Step],
    ) -> Result<Outcome, Problem> {
        let effect =
            if then.iter().chain(otherwise).any(writes) { Effect::Unknown } else { Effect::None };
        let send = |connection: Connection| {
            let mut kv = connection.kv();
            let ops = |steps: &[Step]| steps.iter().map(operation).collect::<Vec<_>>();
            let compare = when.iter().map(comparison).collect::<Vec<_>>();
            let txn = Txn::new().when(compare).and_then(ops(then)).or_else(ops(otherwise));
            async move { kv.txn(txn).await }
        };
        let answer = self.call(op, effect, send).await?.0;
        let (revision, store) =
            answer.header.map_or((0, 0), |header| (header.revision, header.cluster_id));
        let found = answer.responses.into_iter().map(|response| match response.response {
            Some(PbTxnOpResponse::ResponseRange(range)) => {
                let count = range.count;
                let entries = range.kvs.into_iter().map(|kv| entry(op, kv));
                Ok(Found { entries: entries.collect::<Result<_>>()?, count })
            }
            _ => Ok(Found::default()),
        });
        let found = found.collect::<Result<_>>()?;
        Ok(Outcome { succeeded: answer.succeeded, revision, store, found })
    }

    /// Reads some keys at one moment. Linearizable.
    pub(crate) async fn read(&self, op: Op<'_>, steps: &[Step]) -> Result<Outcome, Problem> {
        self.transact(op, &[], steps, &[]).await
    }

    /// Reads one key. Linearizable.
    pub(crate) async fn get(&self, op: Op<'_>, key: String) -> Result<Option<Entry>, Problem> {
        Ok(self.read(op, &[Step::Get(key)]).await?.take(0))
    }

    /// The first `limit` keys of a range, or all, as they stood at one moment, and its revision.
    pub(crate) async fn list(
        &self,
        op: Op<'_>,
        range: Range,
        limit: Option<i64>,
    ) -> Result<(Vec<Entry>, i64), Problem> {
        // That it is the same store is looked at beside it: a range is no transaction's.
        let same = self.read(op, &[]);
        let (listed, _) =
            futures::future::try_join(self.list_anywhere(op, range, limit), same).await?;
        Ok(listed)
    }

    async fn list_anywhere(
        &self,
        op: Op<'_>,
        range: Range,
        limit: Option<i64>,
    ) -> Result<(Vec<Entry>, i64), Problem> {
        let mut entries: Vec<Entry> = Vec::new();
        let (mut rest, mut revision) = (range, 0);
        loop {
            let page = limit.unwrap_or(PAGE);
            let send = |connection: Connection| {
                let mut kv = connection.kv();
                let options = GetOptions::new().with_range(rest.end.clone());
                let options = options.with_limit(page).with_revision(revision);
                let from = rest.from.clone();
                async move { kv.get(from, Some(options)).await }
            };
            let answer = self.call(op, Effect::None, send).await?.0;
            if revision == 0 {
                revision = answer.header.map_or(0, |header| header.revision);
            }
            let found = answer.kvs.into_iter().map(|kv| entry(op, kv));
            entries.extend(found.collect::<Result<Vec<_>>>()?);
            match entries.last() {
                Some(last) if answer.more && limit.is_none() => rest = rest.after(&last.key),
                _ => return Ok((entries, revision)),
            }
        }
    }

    /// A new etcd lease, and the seconds that the server gave it.
    pub(crate) async fn grant(&self, op: Op<'_>, seconds: u64) -> Result<(i64, u64), Problem> {
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        let send = |connection: Connection| {
            let mut lease = connection.vendor.lease_client();
            async move { lease.grant(seconds, None).await }
        };
        // A lease whose reply is lost holds no key and ends by itself: that is no effect.
        let granted = self.call(op, Effect::None, send).await?;
        Ok((granted.id(), u64::try_from(granted.ttl()).unwrap_or(0)))
    }

    /// Ends an etcd lease with all that is bound to it, and tells whether there was one.
    pub(crate) async fn revoke(&self, op: Op<'_>, id: i64) -> Result<bool, Problem> {
        let send = |connection: Connection| {
            let mut lease = connection.vendor.lease_client();
            async move { lease.revoke(id).await }
        };
        match self.call(op, Effect::Unknown, send).await {
            Ok(_) => Ok(true),
            Err(Problem::LeaseGone) => Ok(false),
            Err(problem) => Err(problem),
        }
    }

    /// Ends an etcd lease that nothing is bound to any more, whenever that may be.
    pub(crate) fn discard(&self, id: i64) {
        let client = self.clone();
        self.tidy_up(async move {
            // If it fails, the lease ends by itself.
            let _ = client.revoke(Op::write("revoke", "an unused etcd lease"), id).await;
        });
    }

    /// How long an etcd lease has still to live, at most; zero if it is gone.
    pub(crate) async fn time_to_live(&self, op: Op<'_>, id: i64) -> Result<Duration, Problem> {
        let Some((left, granted)) = self.seconds_left(op, id).await? else {
            return Ok(Duration::ZERO);
        };
        // The server cuts to whole seconds.
        let most = left.saturating_add(1).min(granted);
        Ok(Duration::from_secs(u64::try_from(most).unwrap_or(0)))
    }

    /// Whether an etcd lease has ended, for a key that went without a note; a lease whose last second
    /// runs has still to be seen to end, or to be kept alive.
    pub(crate) async fn has_ended(&self, op: Op<'_>, id: i64) -> Result<bool, Problem> {
        for _ in 0..LAST_SECOND_LOOKS {
            match self.seconds_left(op, id).await? {
                None => return Ok(true),
                Some((0, _)) => sleep(LAST_SECOND_PAUSE).await,
                Some(_) => return Ok(false),
            }
        }
        Ok(false)
    }

    /// The whole seconds that an etcd lease has still to live, and those that it was granted; none if
    /// it is gone.
    async fn seconds_left(&self, op: Op<'_>, id: i64) -> Result<Option<(i64, i64)>, Problem> {
        let send = |connection: Connection| {
            let mut lease = connection.vendor.lease_client();
            async move { lease.time_to_live(id, None).await }
        };
        match self.call(op, Effect::None, send).await {
            // -1 stands for a lease that the server does not know.
            Ok(answer) => Ok((answer.ttl() >= 0).then(|| (answer.ttl(), answer.granted_ttl()))),
            Err(Problem::LeaseGone) => Ok(None),
            Err(problem) => Err(problem),
        }
    }

    /// Lets an etcd lease begin its time to live anew.
    pub(crate) async fn keep_alive(&self, op: Op<'_>, id: i64) -> Result<Kept, Problem> {
        let limit = self.shared.request_timeout;
        tokio::select! {
            biased;
            () = self.shared.closed.cancelled() => Err(op.closed().into()),
            kept = timeout(limit, self.keep_alive.ask(op, id)) => match kept {
                Ok(kept) => kept,
                Err(_) => Err(no_answer(op, limit, Effect::Unknown).into()),
            },
        }
    }

    /// What one of the servers says of itself.
    pub(crate) async fn status(&self, op: Op<'_>) -> Result<Status, Problem> {
        let send = |connection: Connection| {
            let mut maintenance = connection.vendor.maintenance_client();
            async move { maintenance.status().await }
        };
        let status = self.call(op, Effect::None, send).await?;
        Ok(Status {
            version: status.version().to_owned(),
            has_leader: status.leader() != 0,
            database_bytes: status.db_size(),
        })
    }

    /// How many members the store has.
    pub(crate) async fn members(&self, op: Op<'_>) -> Result<usize, Problem> {
        let send = |connection: Connection| {
            let mut cluster = connection.vendor.cluster_client();
            async move { cluster.member_list().await }
        };
        Ok(self.call(op, Effect::None, send).await?.members().len())
    }

    /// The alarms that are raised, by name.
    pub(crate) async fn alarms(&self, op: Op<'_>) -> Result<Vec<&'static str>, Problem> {
        let send = |connection: Connection| {
            let mut maintenance = connection.vendor.maintenance_client();
            async move { maintenance.alarm(AlarmAction::Get, AlarmType::None, None).await }
        };
        let answer = self.call(op, Effect::None, send).await?;
        Ok(answer
            .0
            .alarms
            .iter()
            .map(|alarm| match alarm.alarm {
                1 => "NOSPACE",
                2 => "CORRUPT",
                _ => "unknown",
            })
            .collect())
    }
}

fn connect_options(op: Op<'_>, config: &Config) -> Result<ConnectOptions> {
    let mut options = ConnectOptions::new()
        .with_connect_timeout(config.connect_timeout)
        .with_keep_alive(PING_INTERVAL, PING_TIMEOUT)
        .with_keep_alive_while_idle(false)
        .with_require_leader(true)
        .with_auto_token_refresh(true);
    if let Some((user, password)) = &config.user {
        options = options.with_user(user.expose(), password.expose());
    }
    #[cfg(feature = "tls")]
    if let Some(tls) = &config.tls {
        options = options.with_tls(tls_options(op, tls)?);
    }
    // Without the feature there is none: the URL was refused.
    #[cfg(not(feature = "tls"))]
    let _ = (op, &config.tls);
    Ok(options)
}

/// Reads the files that the URL names.
#[cfg(feature = "tls")]
fn tls_options(op: Op<'_>, tls: &coord_core::kit::config::Tls) -> Result<etcd_client::TlsOptions> {
    let read = |what: &str, path: &std::path::Path| {
        std::fs::read(path).map_err(|source| {
            let why = format!("the file of option {what} can't be read path={}", path.display());
            op.error(ErrorKind::Invalid).message(why).with_source(source)
        })
    };
    let mut options = etcd_client::TlsOptions::new();
    options = match &tls.ca {
        Some(ca) => options.ca_certificate(etcd_client::Certificate::from_pem(read("ca", ca)?)),
        None => options.with_native_roots(),
    };
    if let Some((cert, key)) = &tls.identity {
        let identity = etcd_client::Identity::from_pem(read("cert", cert)?, read("key", key)?);
        options = options.identity(identity);
    }
    if let Some(name) = &tls.name {
        options = options.domain_name(name);
    }
    Ok(options)
}

fn no_answer(op: Op<'_>, limit: Duration, effect: Effect) -> Error {
    let why = format!("no answer after_ms={}", limit.as_millis());
    let error = op.error(ErrorKind::Unavailable).message(why);
    if effect == Effect::Unknown { error.effect_unknown() } else { error }
}

fn writes(step: &Step) -> bool {
    matches!(step, Step::Put { .. } | Step::Delete(_))
}

fn comparison(condition: &Condition) -> Compare {
    match condition {
        Condition::Absent(key) => Compare::create_revision(key.as_str(), CompareOp::Equal, 0),
        Condition::At(key, modified) => {
            Compare::mod_revision(key.as_str(), CompareOp::Equal, *modified)
        }
        Condition::Holds(key, value) => {
            Compare::value(key.as_str(), CompareOp::Equal, value.to_vec())
        }
        Condition::Bound(key, lease) => Compare::lease(key.as_str(), CompareOp::Equal, *lease),
    }
}

fn operation(step: &Step) -> TxnOp {
    match step {
        Step::Get(key) => TxnOp::get(key.as_str(), None),
        Step::GetAt(key, revision) => {
            TxnOp::get(key.as_str(), Some(GetOptions::new().with_revision(*revision)))
        }
        Step::Keys(range) => {
            let options = GetOptions::new().with_range(range.end.as_str()).with_keys_only();
            TxnOp::get(range.from.as_str(), Some(options))
        }
        Step::Count(range) => {
            let options = GetOptions::new().with_range(range.end.as_str()).with_count_only();
            TxnOp::get(range.from.as_str(), Some(options))
        }
        Step::Put { key, value, lease } => {
            let options = PutOptions::new().with_lease(*lease);
            TxnOp::put(key.as_str(), value.to_vec(), Some(options))
        }
        Step::Delete(key) => TxnOp::delete(key.as_str(), Some(DeleteOptions::new())),
    }
}

/// All keys of ours are UTF-8.
fn entry(op: Op<'_>, kv: etcd_client::proto::PbKeyValue) -> Result<Entry> {
    let key = String::from_utf8(kv.key).map_err(|_| {
        Error::corrupt(op.name, "a key is not UTF-8: it is none of ours").resource(op.resource)
    })?;
    Ok(Entry {
        key,
        value: kv.value.into(),
        created: kv.create_revision,
        modified: kv.mod_revision,
        lease: kv.lease,
    })
}
