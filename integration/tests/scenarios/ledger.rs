//! What the service of the load writes to, in the scenario's own process: one log for each shard, that is
//! fenced by the token of whoever writes, and appends only behind the end that the writer knows.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use coord::ShardId;
use coord::cluster::ShardToken;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

/// What is asked of the ledger.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Where the shard's log ends; from now on older tokens are refused.
    Open,
    /// Append this request's number, if the log still ends there.
    Append { end: usize, number: u64 },
}

/// What it answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Told {
    /// The log has so many entries, the last of which is this one.
    Ends { end: usize, last: u64 },
    /// It has other entries than the writer knows.
    Conflict,
    /// Somebody showed a newer token.
    Stale,
}

#[derive(Debug, Default)]
struct Log {
    highest: Option<ShardToken>,
    numbers: Vec<u64>,
}

/// The logs, and what was refused.
#[derive(Debug, Default)]
pub(crate) struct Logs {
    logs: BTreeMap<ShardId, Log>,
    pub(crate) stale: usize,
    pub(crate) conflicts: usize,
}

impl Logs {
    fn ask(&mut self, token: &ShardToken, ask: &Ask) -> Told {
        let log = self.logs.entry(token.shard).or_default();
        if log.highest.as_ref().is_some_and(|highest| !token.passes(highest)) {
            self.stale += 1;
            return Told::Stale;
        }
        log.highest = Some(token.clone());
        if let Ask::Append { end, number } = ask {
            if *end != log.numbers.len() {
                self.conflicts += 1;
                return Told::Conflict;
            }
            log.numbers.push(*number);
        }
        Told::Ends { end: log.numbers.len(), last: log.numbers.last().copied().unwrap_or_default() }
    }

    /// The numbers that were served of a shard, in this order.
    pub(crate) fn of(&self, shard: ShardId) -> &[u64] {
        self.logs.get(&shard).map_or(&[], |log| &log.numbers)
    }
}

/// The server.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) address: SocketAddr,
    pub(crate) logs: Arc<Mutex<Logs>>,
    _serving: AbortOnDropHandle<()>,
}

impl Ledger {
    pub(crate) async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, logs) = (listener.local_addr()?, Arc::<Mutex<Logs>>::default());
        let served = Arc::clone(&logs);
        let serving = serve(listener, move |(token, ask): (ShardToken, Ask)| {
            let told = served.lock().unwrap_or_else(PoisonError::into_inner).ask(&token, &ask);
            async move { told }
        });
        let serving = AbortOnDropHandle::new(tokio::runtime::Handle::current().spawn(serving));
        Ok(Self { address, logs, _serving: serving })
    }
}

/// Answers each line of each connection with a line.
pub(crate) async fn serve<Q, A, F>(
    listener: TcpListener,
    answer: impl Fn(Q) -> F + Clone + Send + 'static,
) where
    Q: DeserializeOwned + Send + 'static,
    A: Serialize + Send + Sync + 'static,
    F: Future<Output = A> + Send + 'static,
{
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let answer = answer.clone();
        connections.spawn(async move {
            // A connection that breaks is its client's affair.
            let mut line = Lines::new(stream);
            while let Ok(question) = line.read().await {
                let answered = answer(question).await;
                if line.write(&answered).await.is_err() {
                    return;
                }
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// A connection that carries JSON lines.
#[derive(Debug)]
pub(crate) struct Lines(BufReader<TcpStream>);

impl Lines {
    fn new(stream: TcpStream) -> Self {
        // Only a matter of delay.
        let _ = stream.set_nodelay(true);
        Self(BufReader::new(stream))
    }

    pub(crate) async fn connect(address: &str) -> io::Result<Self> {
        TcpStream::connect(address).await.map(Self::new)
    }

    pub(crate) async fn ask<A: DeserializeOwned>(
        &mut self,
        question: &(impl Serialize + Sync),
    ) -> io::Result<A> {
        self.write(question).await?;
        self.read().await
    }

    async fn read<A: DeserializeOwned>(&mut self) -> io::Result<A> {
        let mut line = String::new();
        if self.0.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    async fn write(&mut self, answer: &(impl Serialize + Sync)) -> io::Result<()> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        self.0.write_all(&line).await
    }
}
