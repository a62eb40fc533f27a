//! What the members of a cluster did and saw, and whether it was right.
//!
//! A test records, on one clock, when who held which lease, what was published and what watches showed;
//! [`History::check`] then looks at all of it at once. It knows nothing of the store: only what its users
//! were told counts.
//!
//! ```
//! # use std::time::Duration;
//! # use coord_conformance::history::{Recorder, What};
//! # use coord_core::{AttemptId, Fence, LeaseName, Moment, Origin, Term, TokioClock};
//! # use std::sync::Arc;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> coord_core::Result<()> {
//! # let fence = |term| -> coord_core::Result<Fence> {
//! #     let origin = Origin::new("memory:1/orders");
//! #     Ok(Fence::new(LeaseName::new("jobs")?, Term::from_u64(term), AttemptId::random(), origin))
//! # };
//! let recorder = Recorder::new(Arc::new(TokioClock::new()));
//! let until = Moment::from_origin(Duration::from_secs(10));
//! recorder.record("node-1", What::Holds { fence: fence(7)?, until });
//! recorder.record("node-2", What::Holds { fence: fence(8)?, until });
//! let violations = recorder.history().check();
//! assert_eq!(violations[0].rule, "tenures overlap");
//! # Ok(())
//! # }
//! ```

mod check;

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use coord_core::{Clock, Fence, Moment, ShardMap, TableName, TableUid, Version};
use serde::{Deserialize, Serialize};

/// One thing that somebody did, saw or was told.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A holder may act until this moment: recorded when it was granted, and again as it goes on.
    Holds {
        /// Under which fence.
        fence: Fence,
        /// Its own deadline at this moment.
        #[serde(with = "moment")]
        until: Moment,
    },
    /// A holder saw that it may not act any more; as often as it looks.
    Lapsed {
        /// Which tenure.
        fence: Fence,
    },
    /// A holder was told that its tenure is over, or ended it.
    Ended {
        /// Which tenure.
        fence: Fence,
        /// How, for people.
        how: String,
    },
    /// A writer was told that its map is published.
    Published(Version, Written),
    /// A reader got this map.
    Read(Version, Written),
    /// A watch shows this state by now.
    Watched {
        /// Of what: `nodes`, `lease jobs`.
        subject: String,
        /// What there is, by name, and a mark that differs where it differs.
        state: BTreeMap<String, String>,
    },
    /// A look-up shows this state.
    Listed {
        /// Of what, in the same words as the watch.
        subject: String,
        /// As the watch's.
        state: BTreeMap<String, String>,
    },
}

/// Which map of which table it was.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// The table.
    pub table: TableName,
    /// Which life of it.
    pub uid: TableUid,
    /// Who wrote it; none at version 0.
    pub writer: Option<Fence>,
    /// A digest of the content.
    pub digest: u64,
}

impl What {
    /// That this map was published.
    #[must_use]
    pub fn published(table: &TableName, map: &ShardMap) -> Self {
        Self::Published(map.version(), Written::of(table, map))
    }

    /// That this map was read.
    #[must_use]
    pub fn read(table: &TableName, map: &ShardMap) -> Self {
        Self::Read(map.version(), Written::of(table, map))
    }
}

impl Written {
    fn of(table: &TableName, map: &ShardMap) -> Self {
        let mut hasher = DefaultHasher::new();
        map.raw_owners().hash(&mut hasher);
        map.annex().hash(&mut hasher);
        for node in map.nodes() {
            let node = node.as_ref();
            node.map(|node| (&node.id, node.incarnation, node.status.as_str())).hash(&mut hasher);
        }
        let (uid, writer) = (map.uid(), map.writer().cloned());
        Self { table: table.clone(), uid, writer, digest: hasher.finish() }
    }
}

/// Something recorded.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// When.
    #[serde(with = "moment")]
    pub at: Moment,
    /// By whom.
    pub who: String,
    /// What.
    pub what: What,
}

impl Entry {
    /// Something that another process recorded, on a clock that is also this one's: processes of one
    /// machine share their boot clock.
    #[must_use]
    pub fn new(at: Moment, who: impl Into<String>, what: What) -> Self {
        Self { at, who: who.into(), what }
    }
}

/// A moment as the time since its clock's origin.
mod moment {
    use std::time::Duration;

    use coord_core::Moment;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(moment: &Moment, to: S) -> Result<S::Ok, S::Error> {
        moment.since_origin().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Moment, D::Error> {
        Duration::deserialize(from).map(Moment::from_origin)
    }
}

/// Records entries on one clock; clones record into the same history.
#[derive(Clone, Debug)]
pub struct Recorder {
    clock: Arc<dyn Clock>,
    entries: Arc<Mutex<Vec<Entry>>>,
}

impl Recorder {
    /// An empty history on this clock, which all deadlines recorded must be of too.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, entries: Arc::default() }
    }

    /// Adds what happened now.
    pub fn record(&self, who: impl Into<String>, what: What) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock, so that the entries are in the order of their moments.
        entries.push(Entry { at: self.clock.now(), who: who.into(), what });
    }

    /// What was recorded so far.
    #[must_use]
    pub fn history(&self) -> History {
        History::new(self.entries.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// A recorded history, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History(Vec<Entry>);

impl History {
    /// The history of these entries, which it puts into the order of their moments.
    #[must_use]
    pub fn new(mut entries: Vec<Entry>) -> Self {
        entries.sort_by_key(|entry| entry.at);
        Self(entries)
    }

    /// The entries.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.0
    }

    /// What is wrong with it; empty if nothing is.
    ///
    /// - Tenures of one lease never overlap. A tenure lasts from its first [`What::Holds`] to the last
    ///   deadline recorded of it, or to its [`What::Ended`] if that is earlier.
    /// - Terms of one lease strictly rise from tenure to tenure, and no holder that was told of its end, or
    ///   saw that its deadline had passed, acts again.
    /// - Each tenure's end is told exactly once; not at all only while its deadline is still to come.
    /// - Each version of a table has one content, and its writers' terms never fall, so that no update
    ///   is lost; what is read is what was published, and the last read has the newest version.
    /// - What a watch showed last is what the last look-up shows.
    #[must_use]
    pub fn check(&self) -> Vec<Violation> {
        check::check(&self.0)
    }
}

/// A rule that a history breaks.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which, in a few fixed words.
    pub rule: &'static str,
    /// Who did what, and when.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.text)
    }
}
