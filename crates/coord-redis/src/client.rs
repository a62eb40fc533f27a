//! The Redis client: all calls of the vendor's crate are made here and below.
//!
//! Each request is bounded in time by a limit of ours (the vendor's own, 500 ms, is turned off), ends
//! when the handle is closed, and fails with an [error of ours](crate::error). A request that the
//! server refused because it is not the one to ask goes once to the right one; so does a read whose
//! connection broke. No other is repeated.

mod link;
mod watch;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::{Effect, Error, ErrorKind, Result};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisResult, Value};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::link::{Link, Live};
pub(crate) use self::link::{Shape, Version};
use self::watch::Hub;
pub(crate) use self::watch::{Hint, Subject, Topic, subscribe};
use crate::config::Config;
use crate::error::{Way, is_unknown_script, problem, strange, way};
use crate::keys::{Keys, Kind};
use crate::scripts::Script;

/// How long `close` waits for its tasks to end.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// The way to the server that keeps the cluster's keys.
#[derive(Clone)]
pub(crate) struct Client(Arc<Shared>);

struct Shared {
    keys: Keys,
    request_timeout: Duration,
    min_replicas: u16,
    /// What takes no time on the server.
    main: Link,
    /// What waits for replicas, so that nothing else does.
    confirmed: Link,
    hub: Hub,
    closed: CancellationToken,
    tasks: TaskTracker,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

/// What a script or a command answered: a flat list of texts; nothing is an empty one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reply(Vec<Bytes>);

impl Reply {
    fn of(op: Op<'_>, value: Value) -> Result<Self> {
        let values = match value {
            Value::Array(values) | Value::Set(values) => values,
            single => vec![single],
        };
        let item = |value| match value {
            Value::Nil => Ok(Bytes::new()),
            Value::BulkString(bytes) => Ok(bytes.into()),
            Value::SimpleString(text) => Ok(text.into()),
            Value::Okay => Ok("OK".into()),
            Value::Int(number) => Ok(number.to_string().into()),
            other => Err(strange(op, &format!("{other:?}"))),
        };
        values.into_iter().map(item).collect::<Result<_>>().map(Self)
    }

    /// What came of it, in a word.
    pub(crate) fn outcome(&self) -> &str {
        self.text(0)
    }

    pub(crate) fn get(&self, place: usize) -> &[u8] {
        self.0.get(place).map_or(&[], |bytes| bytes)
    }

    /// The item, unless it is empty.
    pub(crate) fn some(&self, place: usize) -> Option<&Bytes> {
        self.0.get(place).filter(|bytes| !bytes.is_empty())
    }

    pub(crate) fn text(&self, place: usize) -> &str {
        std::str::from_utf8(self.get(place)).unwrap_or_default()
    }

    /// A number of microseconds.
    pub(crate) fn micros(&self, place: usize) -> Option<Duration> {
        self.text(place).parse().ok().map(Duration::from_micros)
    }

    pub(crate) fn items(&self) -> &[Bytes] {
        &self.0
    }
}

impl Client {
    /// Looks for the server that keeps the cluster's keys, and connects.
    pub(crate) async fn connect(config: &Config, keys: &Keys) -> Result<Self> {
        let op = Op::read("connect", &config.target);
        let link = Link::new(config, keys.slot())?;
        let client = Self(Arc::new(Shared {
            keys: keys.clone(),
            request_timeout: config.request_timeout,
            min_replicas: config.min_replicas,
            confirmed: link.another(),
            hub: Hub::new(link.another()),
            main: link,
            closed: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }));
        match timeout(config.request_timeout, client.0.main.live(op)).await {
            Ok(live) => live?,
            Err(_) => return Err(no_answer(op, config.request_timeout, Effect::None)),
        };
        Ok(client)
    }

    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.0.closed
    }

    pub(crate) fn keys(&self) -> &Keys {
        &self.0.keys
    }

    pub(crate) fn min_replicas(&self) -> u16 {
        self.0.min_replicas
    }

    /// Lets every connection from now on be to the store of this identity only, which is given back
    /// to a server that has lost it.
    pub(crate) fn stay_with(&self, identity: String) {
        self.0.main.stay_with(self.0.keys.of(Kind::Identity), identity);
    }

    /// The identity of the store that the backend was opened for; empty while it is being opened.
    pub(crate) fn identity(&self) -> &str {
        self.0.main.identity()
    }

    fn script<'a>(
        &'a self,
        script: &'a Script,
        and: &[String],
        arguments: &[&'a [u8]],
    ) -> Call<'a> {
        let Shared { keys, .. } = &*self.0;
        let own = script.keys.iter().map(|kind: &Kind| keys.of(*kind)).chain(and.iter().cloned());
        let keys = own.chain([keys.of(Kind::Identity)]).collect();
        let identity = self.identity().as_bytes();
        let arguments = arguments.iter().copied().chain([identity]).collect();
        Call::Script { script, keys, arguments }
    }

    fn hub(&self) -> &Hub {
        &self.0.hub
    }

    /// What the server said of itself when it was connected to.
    pub(crate) async fn server(&self, op: Op<'_>) -> Result<(Option<Version>, Shape)> {
        let live = self.bounded(op, Effect::None, &self.0.main, self.0.main.live(op)).await?;
        Ok((live.hello.version.clone(), live.hello.shape))
    }

    /// Does something in the background, until the handle is closed.
    pub(crate) fn tidy_up(&self, work: impl Future<Output = ()> + Send + 'static) {
        let closed = self.0.closed.clone();
        drop(self.0.tasks.spawn(async move {
            closed.run_until_cancelled(work).await;
        }));
    }

    /// Ends all calls and watches, and what tidies up.
    pub(crate) async fn close(&self) {
        self.0.closed.cancel();
        self.0.tasks.close();
        // What does not end in time is dropped with the last handle.
        let _ = timeout(CLOSE_LIMIT, self.0.tasks.wait()).await;
        self.0.main.cut();
        self.0.confirmed.cut();
        self.0.hub.cut();
    }

    /// Runs one atomic step.
    pub(crate) async fn run(
        &self,
        op: Op<'_>,
        script: &Script,
        arguments: &[&[u8]],
    ) -> Result<Reply> {
        self.run_on(op, script, &[], arguments).await
    }

    /// Runs one atomic step with these keys beside its own.
    pub(crate) async fn run_on(
        &self,
        op: Op<'_>,
        script: &Script,
        and: &[String],
        arguments: &[&[u8]],
    ) -> Result<Reply> {
        let effect = if script.writes { Effect::Unknown } else { Effect::None };
        let call = self.script(script, and, arguments);
        let value = self.call(op, effect, &call).await?;
        Reply::of(op, value)
    }

    /// Runs one atomic step, and waits until as many replicas have it as the URL wants: what it
    /// answered, and what is wrong if they are fewer.
    pub(crate) async fn run_and_wait(
        &self,
        op: Op<'_>,
        script: &Script,
        arguments: &[&[u8]],
    ) -> Result<(Reply, Option<Error>)> {
        let replicas = self.0.min_replicas;
        if replicas == 0 {
            return Ok((self.run(op, script, arguments).await?, None));
        }
        let call = self.script(script, &[], arguments);
        // Half of the limit, so that too few replicas are told as that and not as no answer.
        let within = self.0.request_timeout / 2;
        let link = &self.0.confirmed;
        let waiting = async {
            let (value, live) = self.attempts(op, Effect::Unknown, link, &call).await?;
            let too_few = confirm(op, link, live, replicas, within).await.err();
            Ok((Reply::of(op, value)?, too_few))
        };
        self.bounded(op, Effect::Unknown, link, waiting).await
    }

    /// The same where the step is not done unless they have it.
    pub(crate) async fn run_confirmed(
        &self,
        op: Op<'_>,
        script: &Script,
        arguments: &[&[u8]],
    ) -> Result<Reply> {
        let (reply, too_few) = self.run_and_wait(op, script, arguments).await?;
        too_few.map_or(Ok(reply), Err)
    }

    /// Sends one command.
    pub(crate) async fn send(&self, op: Op<'_>, effect: Effect, command: Cmd) -> Result<Reply> {
        let call = Call::Plain(command);
        let value = self.call(op, effect, &call).await?;
        Reply::of(op, value)
    }

    /// Sends one command whatever its answer looks like.
    pub(crate) async fn send_any(&self, op: Op<'_>, effect: Effect, command: Cmd) -> Result<()> {
        let call = Call::Plain(command);
        self.call(op, effect, &call).await.map(drop)
    }

    /// Sends one command whose refusal is an answer as well: none if the server does not know it or
    /// the user may not send it.
    pub(crate) async fn ask(&self, op: Op<'_>, command: Cmd) -> Result<Option<Reply>> {
        match self.send(op, Effect::None, command).await {
            Ok(reply) => Ok(Some(reply)),
            Err(error) if matches!(error.kind(), ErrorKind::Denied | ErrorKind::Unsupported) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn call(&self, op: Op<'_>, effect: Effect, call: &Call<'_>) -> Result<Value> {
        let link = &self.0.main;
        let attempts = async {
            let (value, _) = self.attempts(op, effect, link, call).await?;
            Ok(value)
        };
        self.bounded(op, effect, link, attempts).await
    }

    /// The answer, and the connection that it came on.
    async fn attempts(
        &self,
        op: Op<'_>,
        effect: Effect,
        link: &Link,
        call: &Call<'_>,
    ) -> Result<(Value, Live)> {
        let first = attempt(op, effect, link, call).await;
        match first {
            Err(Failed { error: _, again: true }) => {
                attempt(op, effect, link, call).await.map_err(|failed| failed.error)
            }
            first => first.map_err(|failed| failed.error),
        }
    }

    /// Ends a call at its limit and with the handle. A connection that gave no answer in time is not
    /// asked again: it may lead to where nobody is.
    async fn bounded<T>(
        &self,
        op: Op<'_>,
        effect: Effect,
        link: &Link,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let limit = self.0.request_timeout;
        tokio::select! {
            biased;
            () = self.0.closed.cancelled() => Err(op.closed()),
            answer = timeout(limit, call) => answer.unwrap_or_else(|_| {
                link.forget(link.current());
                Err(no_answer(op, limit, effect))
            }),
        }
    }
}

/// What is sent.
enum Call<'a> {
    Plain(Cmd),
    Script { script: &'a Script, keys: Vec<String>, arguments: Vec<&'a [u8]> },
}

impl Call<'_> {
    fn command(&self) -> Cmd {
        match self {
            Self::Plain(command) => command.clone(),
            Self::Script { script, keys, arguments } => {
                evaluation("EVALSHA", script.hash(hash_of), keys, arguments)
            }
        }
    }

    /// The same for a server that does not know the script.
    fn with_code(&self) -> Option<Cmd> {
        match self {
            Self::Plain(_) => None,
            Self::Script { script, keys, arguments } => {
                Some(evaluation("EVAL", script.code(), keys, arguments))
            }
        }
    }
}

/// A command with its arguments, as bytes.
pub(crate) fn command<A: AsRef<[u8]>>(name: &str, arguments: impl IntoIterator<Item = A>) -> Cmd {
    let mut command = redis::cmd(name);
    for argument in arguments {
        command.arg(argument.as_ref());
    }
    command
}

/// By what a server knows a script that it has seen.
fn hash_of(code: &str) -> String {
    redis::Script::new(code).get_hash().to_owned()
}

fn evaluation(name: &str, script: &str, keys: &[String], arguments: &[&[u8]]) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(script).arg(keys.len()).arg(keys).arg(arguments);
    command
}

struct Failed {
    error: Error,
    /// Nothing was done, and another connection may do better.
    again: bool,
}

async fn attempt(
    op: Op<'_>,
    effect: Effect,
    link: &Link,
    call: &Call<'_>,
) -> Result<(Value, Live), Failed> {
    let live = link.live(op).await;
    let mut live = live.map_err(|error| Failed { error, again: false })?;
    let command = call.command();
    let mut answer = live.connection.send_packed_command(&command).await.and_then(checked);
    if answer.as_ref().is_err_and(is_unknown_script)
        && let Some(command) = call.with_code()
    {
        answer = live.connection.send_packed_command(&command).await.and_then(checked);
    }
    let id = live.id;
    answer.map(|value| (value, live)).map_err(|error| {
        let way = way(&error);
        if way != Way::Good {
            link.forget(id);
        }
        let again = way == Way::Elsewhere || (way == Way::Lost && effect == Effect::None);
        Failed { error: problem(op, effect, error), again }
    })
}

/// Waits until so many replicas have all that was written on a connection.
async fn confirm(
    op: Op<'_>,
    link: &Link,
    mut live: Live,
    replicas: u16,
    within: Duration,
) -> Result<()> {
    let mut command = redis::cmd("WAIT");
    command.arg(replicas).arg(within.as_millis().to_string());
    let answer = live.connection.send_packed_command(&command).await.and_then(checked);
    let have = match answer {
        Ok(Value::Int(have)) => have,
        Ok(other) => return Err(strange(op, &format!("{other:?}")).effect_unknown()),
        Err(error) => {
            if way(&error) != Way::Good {
                link.forget(live.id);
            }
            return Err(problem(op, Effect::Unknown, error).effect_unknown());
        }
    };
    if have >= i64::from(replicas) {
        return Ok(());
    }
    let why = format!("{have} of {replicas} replicas confirmed the write within {within:?}");
    Err(Error::unavailable(op.name, why).resource(op.resource))
}

/// An answer that says that something failed, as that.
fn checked(value: Value) -> RedisResult<Value> {
    value.extract_error()
}

fn no_answer(op: Op<'_>, limit: Duration, effect: Effect) -> Error {
    let why = format!("no answer within {limit:?}");
    let error = op.error(ErrorKind::Unavailable).message(why);
    if effect == Effect::Unknown { error.effect_unknown() } else { error }
}

/// Numbers connections.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Sends a command on a connection that nothing else is sent on.
async fn exchange(
    op: Op<'_>,
    connection: &mut MultiplexedConnection,
    command: &Cmd,
    limit: Duration,
) -> Result<Value, Error> {
    match timeout(limit, connection.send_packed_command(command)).await {
        Ok(answer) => answer.and_then(checked).map_err(|error| problem(op, Effect::None, error)),
        Err(_) => Err(no_answer(op, limit, Effect::None)),
    }
}
