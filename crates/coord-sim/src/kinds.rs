//! What kinds of worlds there are besides the plain one, whose faults are those of processes, of the
//! network and of the store's answers. A world is of one kind at most, so that what it promises can be
//! stated; which one is drawn from the seed, by a generator of its own.

use std::fmt;
use std::str::FromStr;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// What goes wrong in a world besides what goes wrong in a plain one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Kind {
            $($(#[$doc])* $name,)*
        }

        impl Kind {
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

kinds! {
    /// Messages are on their way, and handlers and hosts work without yielding, past their deadlines.
    ///
    /// No code of a shard runs beside another host of it, handlers counted: until the deadline of the
    /// run that began it nobody else starts the shard, and the same process not before it has returned.
    Handlers = "handlers",
    /// One to three nodes are lost within 60 s, under any strategy of downing.
    ///
    /// A majority that reaches each other and the store goes on, where the strategy keeps it.
    Losses = "losses",
    /// Records vanish from the store: of a living node, of a lease, of a table.
    Vanish = "vanish",
    /// The store loses all that it holds while processes run and others start.
    ///
    /// Not promised is what nobody can know (docs/restart.md): a process that has never seen the cluster,
    /// and that leads in an empty store, knows nobody who is cut off from it. So none starts within one
    /// node TTL after the store has lost everything.
    Wipe = "wipe",
    /// The store's wall clock is hours fast and comes back, stands still, was never set, or jumps ahead
    /// and ends all records early.
    Clocks = "clocks",
    /// Strategies and hosts panic.
    Panics = "panics",
    /// Handlers never return.
    ///
    /// Other shards answer, and what waits at a node is bounded.
    Hangs = "hangs",
    /// Processes die and start again under the same name, at any moment.
    Restarts = "restarts",
    /// `_cluster` vanishes, alone or with all tables, while nodes are declared failed and leaders die.
    Forget = "forget",
    /// Another store takes the place of the store, under the next era.
    ///
    /// Who has opened the first one does nothing in the second. Nobody starts within one node TTL.
    Replaced = "replaced",
}

impl Kind {
    /// Whether nodes send messages to shards.
    #[must_use]
    pub const fn has_mail(self) -> bool {
        matches!(self, Self::Handlers | Self::Hangs | Self::Panics)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Of which kinds worlds are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kinds {
    /// Two of five are plain, and the others of any kind.
    #[default]
    All,
    /// These alone; plain where there are none.
    Only(Vec<Kind>),
}

/// Sets what is drawn for kinds apart from what is drawn for plain worlds.
const APART: u64 = 0x6b69_6e64_735f_6f66;

impl Kinds {
    /// Plain worlds alone.
    pub const PLAIN: Self = Self::Only(Vec::new());

    /// The kind of this seed's world, and what draws its faults.
    #[must_use]
    pub fn draw(&self, seed: u64) -> (Option<Kind>, StdRng) {
        let mut random = StdRng::seed_from_u64(seed ^ APART);
        let plain = random.random_range(0..5) < 2;
        let which: usize = random.random_range(0..Kind::ALL.len() * 1000);
        let kind = match self {
            Self::All if plain => None,
            Self::All => Kind::ALL.get(which % Kind::ALL.len()).copied(),
            Self::Only(kinds) => kinds.get(which % kinds.len().max(1)).copied(),
        };
        (kind, random)
    }
}

impl FromStr for Kinds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => return Ok(Self::All),
            "plain" => return Ok(Self::PLAIN),
            _ => {}
        }
        let kind = |name: &str| {
            let found = Kind::ALL.iter().copied().find(|kind| kind.as_str() == name);
            found.ok_or_else(|| {
                let all: Vec<_> = Kind::ALL.iter().map(|kind| kind.as_str()).collect();
                format!("there is no kind {name:?}; write all, plain, or some of {}", all.join(","))
            })
        };
        text.split(',').map(kind).collect::<Result<_, _>>().map(Self::Only)
    }
}

impl fmt::Display for Kinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.pad("all"),
            Self::Only(kinds) if kinds.is_empty() => f.pad("plain"),
            Self::Only(kinds) => {
                let kinds: Vec<_> = kinds.iter().map(|kind| kind.as_str()).collect();
                f.pad(&kinds.join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_as_they_are_shown() {
        for kinds in [Kinds::All, Kinds::PLAIN, Kinds::Only(vec![Kind::Wipe, Kind::Hangs])] {
            assert_eq!(kinds.to_string().parse::<Kinds>().as_ref(), Ok(&kinds));
        }
        assert!("wipe,floods".parse::<Kinds>().is_err_and(|why| why.contains("\"floods\"")));
    }

    #[test]
    fn every_kind_is_drawn() {
        let drawn = |kinds: &Kinds| -> Vec<_> { (0..200).map(|it| kinds.draw(it).0).collect() };
        let all = drawn(&Kinds::All);
        assert!(Kind::ALL.iter().all(|kind| all.contains(&Some(*kind))) && all.contains(&None));
        assert!(drawn(&Kinds::PLAIN).iter().all(Option::is_none));
        assert!(drawn(&Kinds::Only(vec![Kind::Wipe])).iter().all(|it| *it == Some(Kind::Wipe)));
    }
}
