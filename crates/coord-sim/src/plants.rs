//! Bugs to be found: each breaks one rule between the runtime and its store, on one side of the place
//! where the world keeps its books. No production code knows of them.

use std::fmt;
use std::str::FromStr;

use crate::kinds::{Kind, Kinds};

macro_rules! plants {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// A planted bug.
        #[non_exhaustive]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Plant {
            $($(#[$doc])* $name,)*
        }

        impl Plant {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its name on the command line.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

plants! {
    /// A publish does not check the fence.
    FenceUnchecked = "fence-unchecked",
    /// A fenced leader's map replaces what is stored, and the version stays.
    ChunkOverwritten = "chunk-overwritten",
    /// A claim does not fence the former leader.
    ClaimIgnored = "claim-ignored",
    /// A table is read before it is claimed, and claimed a while later.
    ReadBeforeClaim = "read-before-claim",
    /// The deadline counts from the reply: the client hears of a TTL as much longer as the reply took.
    DeadlineFromReply = "deadline-from-the-reply",
    /// A lease ends for the store before it ends for its holder.
    LeaseEndsEarly = "lease-ends-early",
    /// A grant has the term of the one before.
    TermRepeats = "term-repeats",
    /// A watch that lags is judged as an expiry of everybody.
    LagIsExpiry = "watch-lag-is-expiry",
    /// A heartbeat of what is gone creates it again.
    HeartbeatRecreates = "late-heartbeat-recreates",
    /// A record tells of a registration that lasts longer than it does.
    NodeEndsEarly = "node-ends-early",
    /// A run that was replaced is said to have left.
    SuccessorEarly = "successor-hosts-early",
    /// A verdict is written down without the time for which its node may run on.
    FailedMovesAtOnce = "failed-moves-at-once",
    /// The new owner is published in place of a move to it.
    GrantBeforeReport = "grant-before-the-report",
    /// The epoch of a shard stays when its owner changes.
    EpochStays = "epoch-not-raised",
    /// What a node reports counts as if it had stopped everything.
    ReportsNothingStopping = "reports-nothing-stopping",
    /// What a run has reported of one life of a table counts for the next one.
    AppliedAcrossLives = "applied-across-lives",
    /// The successor's reports are said to be its predecessor's.
    ReportOfAnother = "report-of-an-old-run",
    /// A handler returns, and what it has set off works on for its shard.
    HandlerGoesOn = "handler-goes-on",
    /// Once a node is lost, probes say that the others are gone as well.
    ProbesLie = "probes-lie",
    /// A node whose record has vanished is told as one that left.
    VanishedIsLeft = "vanished-is-left",
    /// A store that has lost its data grants its first terms once more.
    TermsStartAgain = "terms-start-again",
    /// Leases that a clock which was fast has prolonged stay so.
    LeasesStayLate = "leases-stay-late",
    /// A strategy that has panicked panics for ever.
    PanicStays = "panic-stays",
    /// A message that was answered is kept.
    LettersPileUp = "letters-pile-up",
    /// A process that takes the place of another one under its name is refused for ever.
    RestartRefused = "restart-refused",
    /// That the record of the members was lost is not written down, nor who is held for it.
    LossOverlooked = "loss-overlooked",
    /// A handle goes on in another store under the identity of the first.
    IdentityUnchecked = "identity-unchecked",
    /// What a clock that jumped has ended counts as if its time had passed.
    JumpCounts = "jump-counts",
}

impl Plant {
    /// In which kind of world it is to be found; plain ones where there is none.
    #[must_use]
    pub fn kinds(self) -> Kinds {
        let kind = match self {
            Self::HandlerGoesOn => Kind::Handlers,
            Self::ProbesLie => Kind::Losses,
            Self::VanishedIsLeft => Kind::Vanish,
            Self::TermsStartAgain => Kind::Wipe,
            Self::LeasesStayLate => Kind::Clocks,
            Self::PanicStays => Kind::Panics,
            Self::LettersPileUp => Kind::Hangs,
            Self::RestartRefused => Kind::Restarts,
            Self::LossOverlooked => Kind::Forget,
            Self::IdentityUnchecked => Kind::Replaced,
            Self::JumpCounts => Kind::Clocks,
            _ => return Kinds::PLAIN,
        };
        Kinds::Only(vec![kind])
    }
}

impl fmt::Display for Plant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Plant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.iter().copied().find(|plant| plant.as_str() == text);
        found.ok_or_else(|| {
            let all: Vec<_> = Self::ALL.iter().map(|plant| plant.as_str()).collect();
            format!("there is no planted bug {text:?}; there are {}", all.join(", "))
        })
    }
}
