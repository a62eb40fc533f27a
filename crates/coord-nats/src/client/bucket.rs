//! The bucket: made if it is not there, and refused by the field's name where it is set up
//! otherwise.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::expiry::{MARKER_TTL, time_of};
use super::{Client, Condition, Expiry, Opened, Put};
use crate::config::{Config, Storage};
use crate::error::{NO_STREAM, Refusal, STREAM_DIFFERS, is_unanswerable};

/// How often a bucket is looked for that the servers have still to tell each other of.
const REACH_PAUSE: Duration = Duration::from_millis(50);
/// Servers of these versions, from the first to before the second, let records run out only when no
/// other record with a TTL was written for a while. Measured with 200 such writes a second: up to
/// 19 s late on 2.11.7, 2.11.8, 2.11.9 and 2.12.0, at most 0.3 s on 2.11.10, 2.12.1 and what came
/// later.
const LATE: [(Version, Version); 2] =
    [(Version(2, 11, 0), Version(2, 11, 10)), (Version(2, 12, 0), Version(2, 12, 1))];
/// Where in the stream's metadata its identity stands.
const IDENTITY: &str = "coord.id";
/// Where in the stream's metadata it stands that clients end its records.
const EXPIRY: &str = "coord.expiry";
const CLIENTS: &str = "clients";
/// The first server that has all that is needed in full: TTLs of single messages, and conditions on
/// another subject that are looked at every time (older ones take the header's name for that of the
/// condition itself, by chance, or know no such header).
const FULL: Version = Version(2, 11, 7);
/// The first server on which clients can end the records: it says what time it is, and keeps what a
/// bucket says of itself.
const OLDEST: Version = Version(2, 10, 0);
/// How often a bucket is looked for and made, where others do the same.
const TRIES: usize = 3;
/// Sequences begin with the microseconds since 1970; a stream that counts from 1 would let terms go
/// back once it is made again. This is the year 2020.
const FIRST_SEQUENCE_MIN: u64 = 1_577_836_800_000_000;
/// How far a bucket that was made by hand may be from the server's clock.
const CLOCK_SLACK: Duration = Duration::from_secs(60);

/// What was found out about the bucket when it was opened.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    /// Tells it from every other, also from one of the same name that is made later.
    pub(crate) identity: String,
    /// Whether several records can be written in one atomic step.
    pub(crate) atomic: bool,
    /// The party that ends its records. It is stored in the bucket and does not follow from the version of the
    /// server that a client happens to have reached, so all clients do the same.
    pub(crate) expiry: Expiry,
    pub(crate) storage: Storage,
    pub(crate) replicas: usize,
}

/// A server's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32, u32);

/// The fields of a stream's configuration that matter here, as JetStream names them.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Settings {
    name: String,
    #[serde(default)]
    subjects: Vec<String>,
    retention: String,
    storage: String,
    num_replicas: usize,
    discard: String,
    #[serde(default)]
    discard_new_per_subject: bool,
    max_msgs: i64,
    max_bytes: i64,
    max_msgs_per_subject: i64,
    #[serde(default)]
    max_msg_size: i64,
    max_consumers: i64,
    /// Nanoseconds, as the other durations.
    max_age: u64,
    #[serde(default)]
    duplicate_window: u64,
    #[serde(default)]
    no_ack: bool,
    #[serde(default)]
    sealed: bool,
    #[serde(default)]
    allow_rollup_hdrs: bool,
    #[serde(default)]
    allow_msg_ttl: bool,
    #[serde(default)]
    subject_delete_marker_ttl: u64,
    #[serde(default)]
    allow_atomic: bool,
    #[serde(default)]
    allow_msg_counter: bool,
    #[serde(default)]
    deny_delete: bool,
    #[serde(default)]
    deny_purge: bool,
    #[serde(default, rename = "first_seq")]
    first_sequence: u64,
    #[serde(default)]
    metadata: HashMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mirror: Option<serde_json::Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sources: Option<Vec<serde_json::Value>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subject_transform: Option<serde_json::Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    persist_mode: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct Info {
    config: Settings,
    /// What time it is, by the server's clock.
    #[serde(default)]
    pub(super) ts: Option<String>,
    #[serde(default)]
    created: String,
    #[serde(default)]
    state: State,
    #[serde(default)]
    total: usize,
}

#[derive(Default, Deserialize)]
struct State {
    #[serde(default)]
    messages: u64,
    #[serde(default, rename = "last_seq")]
    last_sequence: u64,
    subjects: Option<HashMap<String, u64>>,
}

#[derive(Serialize)]
struct Nothing {}

/// The stream of a bucket.
pub(super) fn stream_name(bucket: &str) -> String {
    format!("KV_{bucket}")
}

impl Client {
    /// Connects, and makes sure that there is a bucket that suits.
    pub(crate) async fn open(op: Op<'_>, config: &Config) -> Result<(Self, Bucket)> {
        let mut client = Self::connect(op, config).await?;
        let version = check_version(op, &client.server_version())?;
        let bucket = client.await_bucket(op, config, version).await?;
        client.expiry = bucket.expiry;
        let info = client.stream_info(op).await?.map_err(|refusal| refusal.error(op))?;
        let from = info.state.last_sequence;
        let (newest, is_another) = (AtomicU64::new(from), AtomicBool::new(false));
        let opened = Opened { identity: bucket.identity.clone(), from, newest, is_another };
        // It is said once.
        let _ = client.shared.opened.set(opened);
        client.is_same(op, &info)?;
        Ok((client, bucket))
    }

    /// Fails if this is another bucket than the one that the handle was opened for, and lets everything
    /// fail from then on.
    pub(super) fn is_same(&self, op: Op<'_>, info: &Info) -> Result<()> {
        let Some(opened) = self.shared.opened.get() else { return Ok(()) };
        if info.config.metadata.get(IDENTITY) == Some(&opened.identity) {
            return Ok(());
        }
        opened.is_another.store(true, Ordering::Relaxed);
        Err(Self::another(op))
    }

    /// A bucket that suits, ready to be used. A bucket that is just being made on several servers may have no
    /// leader yet, and then there is no answer: everything here can be done again.
    async fn await_bucket(&self, op: Op<'_>, config: &Config, version: Version) -> Result<Bucket> {
        let end = Instant::now() + config.connect_timeout;
        loop {
            match self.ready_bucket(op, config, version).await {
                Err(error) if error.kind() == ErrorKind::Unavailable && Instant::now() < end => {
                    sleep(REACH_PAUSE).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn ready_bucket(&self, op: Op<'_>, config: &Config, version: Version) -> Result<Bucket> {
        let bucket = self.ensure_bucket(op, config, version).await?;
        match bucket.expiry {
            Expiry::Server if version < FULL => Err(too_old_for(op, config, version)),
            Expiry::Server => Ok(bucket),
            Expiry::Clients => self.sample_time(op).await.map(|()| bucket),
        }
    }

    /// The bucket as it is set up now.
    pub(crate) async fn look_at_bucket(&self, op: Op<'_>, config: &Config) -> Result<Bucket> {
        let info = self.stream_info(op).await?.map_err(|refusal| refusal.error(op))?;
        info.config.check(op, config)
    }

    /// The subjects under a filter that have a message. All of them are told by the stream's
    /// leader, in pages that the server makes.
    pub(crate) async fn subjects(&self, op: Op<'_>, filter: &str) -> Result<Vec<String>> {
        #[derive(Serialize)]
        struct Filter<'a> {
            subjects_filter: &'a str,
            offset: usize,
        }
        let api = format!("STREAM.INFO.{}", self.shared.stream);
        let mut subjects = Vec::new();
        loop {
            let request = Filter { subjects_filter: filter, offset: subjects.len() };
            let info: Info =
                self.api(op, &api, &request).await?.map_err(|refusal| refusal.error(op))?;
            self.is_same(op, &info)?;
            let page = info.state.subjects.unwrap_or_default();
            if page.is_empty() {
                return Ok(subjects);
            }
            subjects.extend(page.into_keys());
            if subjects.len() >= info.total {
                return Ok(subjects);
            }
        }
    }

    /// Waits until the server that this client is connected to knows of a bucket that was just made:
    /// the servers tell each other only then. Nothing is stored.
    pub(crate) async fn reach_bucket(
        &self,
        op: Op<'_>,
        subject: &str,
        limit: Duration,
    ) -> Result<()> {
        let end = Instant::now() + limit;
        loop {
            let (value, condition) = (Bytes::new(), Condition::At(u64::MAX));
            let put = Put { subject, value, ttl: None, condition };
            match self.put(op, put).await {
                Err(error) if is_unanswerable(&error) && Instant::now() < end => {
                    sleep(REACH_PAUSE).await;
                }
                // What is denied is for `check` to tell.
                Err(error) if error.kind() != ErrorKind::Denied => return Err(error),
                _ => return Ok(()),
            }
        }
    }

    async fn ensure_bucket(&self, op: Op<'_>, config: &Config, version: Version) -> Result<Bucket> {
        let expiry = if version < FULL { Expiry::Clients } else { Expiry::Server };
        let api = format!("STREAM.CREATE.{}", self.shared.stream);
        let mut last = None;
        for _ in 0..TRIES {
            let refusal = match self.stream_info(op).await? {
                Ok(info) => return self.accept(op, config, &info).await,
                Err(refusal) => refusal,
            };
            if refusal.err_code != NO_STREAM {
                return Err(refusal.error(op));
            }
            let settings = Settings::wanted(config, expiry, self.unique());
            match self.api::<Info>(op, &api, &settings).await? {
                Ok(info) => return self.accept(op, config, &info).await,
                // Another process was faster, with another first sequence.
                Err(refusal) if refusal.err_code == STREAM_DIFFERS => last = Some(refusal),
                Err(refusal) => return Err(refusal.error(op)),
            }
        }
        Err(last.map_or_else(|| op.contended(), |refusal| refusal.error(op)))
    }

    /// The bucket, if it suits, with sequences that begin with the time at which it was made, by the
    /// server's clock: no client's clock has a part in it, so terms go on rising whoever makes a bucket
    /// again that was lost.
    ///
    /// A server says what time it is only of a bucket that is there. So its sequences are moved on once
    /// it is, before anything is written; all who do that move them to the same place. Besides, NATS 2.10
    /// loses all messages of a stream with a first sequence of its own when it is killed.
    async fn accept(&self, op: Op<'_>, config: &Config, info: &Info) -> Result<Bucket> {
        let bucket = info.config.check(op, config)?;
        let last = info.state.last_sequence;
        let made = time_of(op, &info.created)?;
        let first = u64::try_from(made.as_micros()).unwrap_or(u64::MAX);
        match Beginning::of(last, first, info.state.messages) {
            Beginning::Good => Ok(bucket),
            Beginning::Behind => {
                self.purge(op, None, Some(first)).await?;
                let moved = self.stream_info(op).await?.map_err(|refusal| refusal.error(op))?;
                match Beginning::of(moved.state.last_sequence, first, 1) {
                    Beginning::Good => Ok(bucket),
                    _ => Err(unsuited(op, config, moved.state.last_sequence, first)),
                }
            }
            Beginning::Unsuited => Err(unsuited(op, config, last, first)),
        }
    }

    pub(super) async fn stream_info(&self, op: Op<'_>) -> Result<Result<Info, Refusal>> {
        let api = format!("STREAM.INFO.{}", self.shared.stream);
        match self.api(op, &api, &Nothing {}).await {
            // Nobody answers for JetStream at all.
            Err(error) if is_unanswerable(&error) => {
                let why =
                    "the server has no JetStream; start it with -js, or enable it for the account";
                Err(op.error(ErrorKind::Misconfigured).message(why).with_source(error))
            }
            answer => answer,
        }
    }
}

/// Where the sequences of a bucket stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beginning {
    Good,
    /// Nothing is written yet, and they have to be moved on.
    Behind,
    Unsuited,
}

impl Beginning {
    /// Of a bucket that is at this sequence, was made at that time in microseconds by the server's clock,
    /// and holds so many messages.
    fn of(last: u64, made: u64, messages: u64) -> Self {
        let slack = u64::try_from(CLOCK_SLACK.as_micros()).unwrap_or(u64::MAX);
        match messages {
            // Whoever made it by hand took another clock.
            0 if last > made.saturating_add(slack) => Self::Unsuited,
            0 if last < made.saturating_sub(slack) => Self::Behind,
            0 => Self::Good,
            _ if last < FIRST_SEQUENCE_MIN => Self::Unsuited,
            _ => Self::Good,
        }
    }
}

fn unsuited(op: Op<'_>, config: &Config, last: u64, made: u64) -> Error {
    let name = &config.bucket;
    let why = format!(
        "bucket {name:?} counts on from {last}; it has to count from the microseconds since 1970 at \
         which it was made, {made} by the server's clock, or be empty"
    );
    op.error(ErrorKind::Misconfigured).message(why)
}

impl Settings {
    fn wanted(config: &Config, expiry: Expiry, identity: String) -> Self {
        let is_full = expiry == Expiry::Server;
        let mut metadata = HashMap::from([(IDENTITY.to_owned(), identity)]);
        if !is_full {
            metadata.insert(EXPIRY.to_owned(), CLIENTS.to_owned());
        }
        Self {
            name: stream_name(&config.bucket),
            subjects: vec![format!("$KV.{}.>", config.bucket)],
            retention: "limits".to_owned(),
            storage: config.storage.as_str().to_owned(),
            num_replicas: config.replicas.unwrap_or(1),
            discard: "new".to_owned(),
            discard_new_per_subject: false,
            max_msgs: -1,
            max_bytes: -1,
            max_msgs_per_subject: 1,
            max_msg_size: -1,
            max_consumers: -1,
            max_age: 0,
            duplicate_window: nanos(Duration::from_secs(120)),
            no_ack: false,
            sealed: false,
            allow_rollup_hdrs: true,
            allow_msg_ttl: is_full,
            subject_delete_marker_ttl: if is_full { nanos(MARKER_TTL) } else { 0 },
            allow_atomic: is_full,
            allow_msg_counter: false,
            deny_delete: true,
            deny_purge: false,
            // From there it is moved on to the server's time.
            first_sequence: if is_full { FIRST_SEQUENCE_MIN } else { 0 },
            metadata,
            mirror: None,
            sources: None,
            subject_transform: None,
            persist_mode: None,
        }
    }

    /// Refuses a bucket in which the promises can't be kept, naming the field.
    fn check(&self, op: Op<'_>, config: &Config) -> Result<Bucket> {
        let fail = |field: &str, found: &dyn fmt::Display, wanted: &str| {
            let bucket = &config.bucket;
            let why = format!("bucket {bucket:?} has {field} {found}; it has to be {wanted}");
            Err(op.error(ErrorKind::Misconfigured).message(why))
        };
        let subject = format!("$KV.{}.>", config.bucket);
        if self.subjects != [subject.as_str()] {
            return fail("subjects", &self.subjects.join(","), &subject);
        }
        for (field, is_good, wanted) in [
            ("mirror", self.mirror.is_none(), "none"),
            ("sources", self.sources.as_ref().is_none_or(Vec::is_empty), "none"),
            ("subject_transform", self.subject_transform.is_none(), "none"),
        ] {
            if !is_good {
                return fail(field, &"set", wanted);
            }
        }
        // With a limit on all messages, the oldest would go to make room for others.
        let may_evict = self.max_msgs > 0 || self.max_bytes > 0;
        for (field, found, is_good, wanted) in [
            (
                "storage",
                &self.storage,
                self.storage == config.storage.as_str(),
                match config.storage {
                    Storage::File => "file (or say storage=memory and lose all at a restart)",
                    Storage::Memory => "memory, as the URL says",
                },
            ),
            ("retention", &self.retention, self.retention == "limits", "limits"),
            ("discard", &self.discard, self.discard == "new" || !may_evict, "new"),
        ] {
            if !is_good {
                return fail(field, found, wanted);
            }
        }
        if let Some(mode) = self.persist_mode.as_ref().filter(|mode| *mode != "default") {
            return fail("persist_mode", mode, "default");
        }
        let expiry = match self.metadata.get(EXPIRY).map(String::as_str) {
            None => Expiry::Server,
            Some(CLIENTS) => Expiry::Clients,
            Some(other) => {
                let found = format!("{EXPIRY}={other}");
                return fail("metadata", &found, &format!("without it, or {CLIENTS}"));
            }
        };
        if expiry == Expiry::Clients && self.deny_purge {
            return fail("deny_purge", &true, "false");
        }
        let allow_ttl = self.allow_msg_ttl || expiry == Expiry::Clients;
        for (field, found, wanted) in [
            ("discard_new_per_subject", self.discard_new_per_subject, false),
            ("no_ack", self.no_ack, false),
            ("sealed", self.sealed, false),
            ("allow_msg_counter", self.allow_msg_counter, false),
            ("allow_rollup_hdrs", self.allow_rollup_hdrs, true),
            ("allow_msg_ttl", allow_ttl, true),
        ] {
            if found != wanted {
                return fail(field, &found, &wanted.to_string());
            }
        }
        self.check_numbers(config, expiry, fail)
    }

    fn check_numbers(
        &self,
        config: &Config,
        expiry: Expiry,
        fail: impl Fn(&str, &dyn fmt::Display, &str) -> Result<Bucket>,
    ) -> Result<Bucket> {
        if self.max_msgs_per_subject != 1 {
            // When the newest of several runs out, the one before it comes back.
            return fail("max_msgs_per_subject", &self.max_msgs_per_subject, "1");
        }
        if self.max_age != 0 {
            return fail("max_age", &format!("{:?}", Duration::from_nanos(self.max_age)), "0");
        }
        let marker = self.subject_delete_marker_ttl;
        if expiry == Expiry::Server && (marker == 0 || marker > nanos(MARKER_TTL)) {
            return fail("subject_delete_marker_ttl", &format!("{marker}ns"), "1s");
        }
        if self.max_msg_size > 0 && self.max_msg_size < 1024 * 1024 {
            return fail("max_msg_size", &self.max_msg_size, "-1, or 1 MiB and more");
        }
        if expiry == Expiry::Clients && self.first_sequence > 1 {
            let wanted = "0: NATS 2.10 loses such a stream when it is killed";
            return fail("first_seq", &self.first_sequence, wanted);
        }
        if expiry == Expiry::Server && self.first_sequence < FIRST_SEQUENCE_MIN {
            let wanted = "the microseconds since 1970 when it was made";
            return fail("first_seq", &self.first_sequence, wanted);
        }
        if let Some(wanted) = config.replicas.filter(|wanted| *wanted != self.num_replicas) {
            return fail("num_replicas", &self.num_replicas, &format!("{wanted}, as the URL says"));
        }
        let Some(identity) = self.metadata.get(IDENTITY) else {
            return fail("metadata", &format!("without {IDENTITY}"), "a random one there");
        };
        Ok(Bucket {
            identity: identity.clone(),
            atomic: self.allow_atomic && expiry == Expiry::Server,
            expiry,
            storage: config.storage,
            replicas: self.num_replicas,
        })
    }
}

/// Whether a server of this version lets records run out late while others are written.
pub(crate) fn expires_late(text: &str) -> bool {
    let is_in = |version: Version| LATE.iter().any(|(from, to)| (from..to).contains(&&version));
    Version::parse(text).is_some_and(is_in)
}

/// Whether a server of this version has all that is needed in full.
pub(crate) fn is_full(text: &str) -> bool {
    Version::parse(text).is_some_and(|version| version >= FULL)
}

/// Refuses a server that is too old.
fn check_version(op: Op<'_>, text: &str) -> Result<Version, Error> {
    match Version::parse(text) {
        Some(version) if version >= OLDEST => Ok(version),
        _ => {
            let why = format!(
                "the server is NATS {text}; {OLDEST} or newer is needed, and {FULL} or newer is \
                 better"
            );
            Err(op.error(ErrorKind::Unsupported).message(why))
        }
    }
}

/// Refuses a bucket whose records only a newer server ends.
fn too_old_for(op: Op<'_>, config: &Config, version: Version) -> Error {
    let bucket = &config.bucket;
    let why = format!(
        "the server is NATS {version}; bucket {bucket:?} was made for {FULL} or newer, which end its \
         records; take such a server, or another bucket (bucket=…)"
    );
    op.error(ErrorKind::Unsupported).message(why)
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(major, minor, patch) = self;
        write!(f, "{major}.{minor}.{patch}")
    }
}

impl Version {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim_start_matches('v').splitn(3, '.');
        let mut number = || {
            let part = parts.next()?;
            let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part.get(..end)?.parse().ok()
        };
        Some(Self(number()?, number()?, number()?))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use coord_core::BackendUrl;

    use super::*;

    fn config(url: &str) -> Config {
        Config::from_url(&BackendUrl::parse(url).expect("parses")).expect("good")
    }

    fn settings(config: &Config) -> Settings {
        Settings::wanted(config, Expiry::Server, "id".to_owned())
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let op = Op::read("connect", "nats://a/orders");
        for good in ["2.11.7", "2.12.0-RC.1", "2.12.0", "v2.15.1", "3.0.0"] {
            check_version(op, good).expect(good);
            assert!(is_full(good), "{good}");
        }
        for degraded in ["2.10.0", "2.10.26", "2.11.6"] {
            check_version(op, degraded).expect(degraded);
            assert!(!is_full(degraded), "{degraded}");
        }
        for bad in ["2.9.25", "1.4.1", "2.11", "", "new"] {
            let error = check_version(op, bad).expect_err(bad);
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("2.10.0 or newer is needed"), "{error}");
        }
    }

    #[test]
    fn a_bucket_counts_from_when_it_was_made() {
        use Beginning::{Behind, Good, Unsuited};
        const MADE: u64 = 1_790_000_000_000_000;
        const DAY: u64 = 86_400_000_000;
        for (last, messages, wanted) in [
            (MADE - 1, 0, Good),
            (MADE - 1_000_000, 0, Good),
            (0, 0, Behind),
            (FIRST_SEQUENCE_MIN - 1, 0, Behind),
            // By a client whose clock was days behind, or ahead.
            (MADE - 3 * DAY, 0, Behind),
            (MADE + 3 * DAY, 0, Unsuited),
            // What is in use goes on.
            (MADE - 3 * DAY, 7, Good),
            (MADE + 3 * DAY, 7, Good),
            (9, 7, Unsuited),
        ] {
            assert_eq!(Beginning::of(last, MADE, messages), wanted, "{last} {messages}");
        }
    }

    #[test]
    fn servers_that_expire_late_are_known() {
        for version in ["2.11.7", "2.11.9", "2.12.0", "2.12.0-RC.1"] {
            assert!(expires_late(version), "{version}");
        }
        for version in ["2.11.10", "2.11.11", "2.12.1", "2.15.1", "new"] {
            assert!(!expires_late(version), "{version}");
        }
    }

    #[test]
    fn what_is_made_is_what_is_accepted() {
        for url in ["nats://a/orders", "nats://a/orders?storage=memory&replicas=3&bucket=b"] {
            let config = config(url);
            let bucket = settings(&config).check(Op::read("connect", url), &config).expect("good");
            assert_eq!((bucket.identity.as_str(), bucket.atomic), ("id", true));
            assert_eq!(bucket.expiry, Expiry::Server);
            let old = Settings::wanted(&config, Expiry::Clients, "id".to_owned());
            let bucket = old.check(Op::read("connect", url), &config).expect("good");
            assert_eq!((bucket.expiry, bucket.atomic), (Expiry::Clients, false));
        }
    }

    #[test]
    fn who_ends_the_records_is_read_from_the_bucket() {
        let config = config("nats://a/orders");
        let op = Op::read("connect", "x");
        let mut other = settings(&config);
        other.metadata.insert(EXPIRY.to_owned(), "nobody".to_owned());
        let error = other.check(op, &config).expect_err("unknown");
        assert!(error.to_string().contains("has metadata coord.expiry=nobody"), "{error}");
        let mut old = Settings::wanted(&config, Expiry::Clients, "id".to_owned());
        old.deny_purge = true;
        let error = old.check(op, &config).expect_err("markers would stay");
        assert!(error.to_string().contains("has deny_purge true"), "{error}");
        old.deny_purge = false;
        old.first_sequence = FIRST_SEQUENCE_MIN + 1;
        let error = old.check(op, &config).expect_err("2.10 would lose it");
        assert!(error.to_string().contains("has first_seq "), "{error}");
        old.first_sequence = 0;
        // A newer server may allow atomic batches there: nothing else of the bucket is theirs.
        old.allow_atomic = true;
        assert!(!old.check(op, &config).expect("good").atomic);
    }

    #[test]
    fn a_foreign_bucket_is_refused_by_its_field() {
        type Change = fn(&mut Settings);
        let cases: [(&str, Change); 20] = [
            ("subjects", |s| s.subjects.push("more".to_owned())),
            ("storage", |s| s.storage = "memory".to_owned()),
            ("retention", |s| s.retention = "workqueue".to_owned()),
            ("mirror", |s| s.mirror = Some(serde_json::Value::Bool(true))),
            ("sources", |s| s.sources = Some(vec![serde_json::Value::Bool(true)])),
            ("subject_transform", |s| s.subject_transform = Some(serde_json::Value::Bool(true))),
            ("persist_mode", |s| s.persist_mode = Some("async".to_owned())),
            ("discard", |s| (s.max_bytes, s.discard) = (1 << 30, "old".to_owned())),
            ("discard_new_per_subject", |s| s.discard_new_per_subject = true),
            ("no_ack", |s| s.no_ack = true),
            ("sealed", |s| s.sealed = true),
            ("allow_msg_counter", |s| s.allow_msg_counter = true),
            ("allow_rollup_hdrs", |s| s.allow_rollup_hdrs = false),
            ("allow_msg_ttl", |s| s.allow_msg_ttl = false),
            ("max_msgs_per_subject", |s| s.max_msgs_per_subject = 5),
            ("max_age", |s| s.max_age = 1),
            ("subject_delete_marker_ttl", |s| s.subject_delete_marker_ttl = 60_000_000_000),
            ("max_msg_size", |s| s.max_msg_size = 1_000),
            ("first_seq", |s| s.first_sequence = 1),
            ("metadata", |s| s.metadata.clear()),
        ];
        let config = config("nats://a/orders");
        for (field, change) in cases {
            let mut foreign = settings(&config);
            change(&mut foreign);
            let error = foreign.check(Op::read("connect", "x"), &config).expect_err(field);
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
            assert!(error.to_string().contains(&format!("has {field} ")), "{error}");
        }
        let three = self::config("nats://a/orders?replicas=3");
        let error = settings(&config).check(Op::read("connect", "x"), &three).expect_err("one");
        assert!(error.to_string().contains("has num_replicas 1"), "{error}");
    }
}
