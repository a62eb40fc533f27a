//! A key-value service whose keys are spread over the shards of a table.
//!
//! ```text
//!   client ── "add visits 1" ──► any member ── Mailbox::ask ──► the owner's Kv::handle
//!          ◄─ "ok 42" ──────────            ◄────────────────      │ its token with every write
//!                                                                  ▼
//!                                    Storage: a file for each shard, with the highest token seen
//! ```
//!
//! The protocol of clients is lines. `set KEY VALUE`, `get KEY` and `add KEY NUMBER` are answered with:
//! - `ok VALUE`, or `none` where a key has no value;
//! - `no WHY`: certainly nothing was done, and trying again is safe;
//! - `unknown WHY`: it may have been done.
//!
//! `leave` is answered with `ok`, and the member leaves in order: its shards move first. Send nothing to a
//! member from then on: a connection that ends before the answer has come leaves the outcome unknown.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use coord::cluster::{Handler, Host, HostError, Mail, Mailbox, ShardFence, ShardToken};
use coord::{Effect, Epoch, ShardId};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// A folder that all members share, which refuses a write whose token is older than the newest it has seen
/// of the shard. Without that check, a member that was paused for a while could overwrite what its
/// successor has written.
#[derive(Clone, Debug)]
pub struct Storage {
    folder: PathBuf,
}

/// Why a write was refused: its token is older than one that was seen before.
#[derive(Debug)]
struct Stale {
    shard: ShardId,
    old: Epoch,
    new: Epoch,
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shard, old, new } = self;
        write!(f, "refused: shard {shard} is in epoch {new}, and the write is of epoch {old}")
    }
}

impl std::error::Error for Stale {}

/// What the storage holds of one shard.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Stored {
    highest: Option<ShardToken>,
    values: BTreeMap<String, String>,
}

impl Storage {
    /// Keeps everything in this folder, which is made if it is missing.
    ///
    /// # Errors
    /// If it can't be made.
    pub fn open(folder: impl AsRef<Path>) -> anyhow::Result<Self> {
        fs::create_dir_all(&folder)?;
        Ok(Self { folder: folder.as_ref().to_owned() })
    }

    /// Changes the values of a shard, under this token. The answer is the change's own.
    ///
    /// # Errors
    /// If the token is stale, and as the file system says.
    pub fn write<T>(
        &self,
        token: &ShardToken,
        change: impl FnOnce(&mut BTreeMap<String, String>) -> T,
    ) -> anyhow::Result<T> {
        let name = format!("{}-{}", token.table, token.shard);
        // One at a time, among all processes: the check and the write belong together.
        let guard = File::create(self.folder.join(format!("{name}.lock")))?;
        guard.lock()?;
        let path = self.folder.join(format!("{name}.json"));
        let mut stored = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(error) if error.kind() == ErrorKind::NotFound => Stored::default(),
            Err(error) => return Err(error.into()),
        };
        if let Some(highest) = stored.highest.as_ref().filter(|highest| !token.passes(highest)) {
            let (shard, old, new) = (token.shard, token.epoch, highest.epoch);
            return Err(Stale { shard, old, new }.into());
        }
        stored.highest = Some(token.clone());
        let answer = change(&mut stored.values);
        let draft = self.folder.join(format!("{name}.new"));
        fs::write(&draft, serde_json::to_vec(&stored)?)?;
        fs::rename(&draft, &path)?;
        Ok(answer)
    }
}

/// What a member does with the shards that it hosts.
#[derive(Debug)]
pub struct Kv {
    storage: Storage,
}

impl Kv {
    /// Over this storage.
    #[must_use]
    pub fn new(storage: Storage) -> Self {
        Self { storage }
    }

    async fn under<T: Send + 'static>(
        &self,
        token: ShardToken,
        change: impl FnOnce(&mut BTreeMap<String, String>) -> T + Send + 'static,
    ) -> anyhow::Result<T> {
        let storage = self.storage.clone();
        tokio::task::spawn_blocking(move || storage.write(&token, change)).await?
    }
}

#[async_trait]
impl Host for Kv {
    async fn start(&self, _shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        // From here on nothing that an earlier owner still writes passes. Where the storage fails, the
        // shard is not hosted, and tried again.
        if let Some(token) = fence.token() {
            self.under(token, |_| ()).await?;
        }
        Ok(())
    }

    async fn stop(&self, _shard: ShardId) {}
}

#[async_trait]
impl Handler for Kv {
    async fn handle(&self, mail: Mail) -> Bytes {
        let Some(token) = mail.fence.token() else { return "no the shard has gone".into() };
        let line = String::from_utf8_lossy(&mail.payload).into_owned();
        let Some(op) = Op::parse(&line) else { return "no such command".into() };
        match self.under(token, move |values| op.apply(values)).await {
            Ok(reply) => reply.into(),
            // A refused write has changed nothing; of another error that is not certain.
            Err(error) if error.to_string().starts_with("refused") => {
                format!("no {error:#}").into()
            }
            Err(error) => format!("unknown {error:#}").into(),
        }
    }
}

/// What a client can ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Op {
    Set(String, String),
    Get(String),
    Add(String, i64),
}

impl Op {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(3, ' ');
        let (verb, key) = (words.next()?, words.next()?.to_owned());
        match (verb, words.next()) {
            ("set", Some(value)) => Some(Self::Set(key, value.to_owned())),
            ("get", None) => Some(Self::Get(key)),
            ("add", Some(number)) => Some(Self::Add(key, number.parse().ok()?)),
            _ => None,
        }
    }

    fn key(&self) -> &str {
        match self {
            Self::Set(key, _) | Self::Get(key) | Self::Add(key, _) => key,
        }
    }

    fn apply(self, values: &mut BTreeMap<String, String>) -> String {
        match self {
            Self::Set(key, value) => {
                let reply = format!("ok {value}");
                values.insert(key, value);
                reply
            }
            Self::Get(key) => {
                values.get(&key).map_or_else(|| "none".to_owned(), |value| format!("ok {value}"))
            }
            Self::Add(key, number) => {
                let old: i64 = values.get(&key).and_then(|old| old.parse().ok()).unwrap_or(0);
                let new = old.saturating_add(number);
                values.insert(key, new.to_string());
                format!("ok {new}")
            }
        }
    }
}

/// Answers one line of a client, wherever its key's shard is hosted.
pub async fn answer(mailbox: &Mailbox, line: &str) -> String {
    let Some(op) = Op::parse(line) else { return "no such command".to_owned() };
    match mailbox.ask(op.key(), line.to_owned()).await {
        Ok(reply) => String::from_utf8_lossy(&reply).into_owned(),
        Err(error) if error.effect() == Effect::None => format!("no {error}"),
        Err(error) => format!("unknown {error}"),
    }
}

/// Answers clients, one line after the other on each connection; `leave` is told to whoever waits for
/// that. Connections end with their clients.
///
/// # Errors
/// If no connection can be accepted any more.
pub async fn serve(
    listener: TcpListener,
    mailbox: Mailbox,
    leave: Arc<Notify>,
) -> anyhow::Result<()> {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (mailbox, leave) = (mailbox.clone(), Arc::clone(&leave));
                connections.spawn(connection(accepted?.0, mailbox, leave));
            }
            Some(_ended) = connections.join_next() => {}
        }
    }
}

async fn connection(stream: TcpStream, mailbox: Mailbox, leave: Arc<Notify>) {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let reply = if line == "leave" {
            leave.notify_one();
            "ok".to_owned()
        } else {
            answer(&mailbox, &line).await
        };
        if write.write_all(format!("{reply}\n").as_bytes()).await.is_err() {
            return;
        }
    }
}

/// A client of one member.
#[derive(Debug)]
pub struct Client(BufReader<TcpStream>);

impl Client {
    /// Connects to the member whose clients' port this is.
    ///
    /// # Errors
    /// If it is not reached.
    pub async fn connect(to: impl ToSocketAddrs) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends a line and waits for its answer.
    ///
    /// # Errors
    /// If the connection breaks: what was asked may have been done.
    pub async fn ask(&mut self, line: &str) -> anyhow::Result<String> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).await?;
        let mut reply = String::new();
        if self.0.read_line(&mut reply).await? == 0 {
            anyhow::bail!("the connection was closed");
        }
        Ok(reply.trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed_and_applied() {
        let mut values = BTreeMap::new();
        let mut ask = |line| Op::parse(line).map(|op| op.apply(&mut values));
        assert_eq!(ask("get a").as_deref(), Some("none"));
        assert_eq!(ask("set a two words").as_deref(), Some("ok two words"));
        assert_eq!(ask("get a").as_deref(), Some("ok two words"));
        assert_eq!(ask("add n 2").as_deref(), Some("ok 2"));
        assert_eq!(ask("add n 3").as_deref(), Some("ok 5"));
        for odd in ["", "get", "set a", "add n x", "drop a", "get a b"] {
            assert_eq!(ask(odd), None, "{odd:?}");
        }
    }
}
