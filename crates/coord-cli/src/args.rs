//! The command line, as clap reads it.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

const AFTER_HELP: &str = "\
Exit codes:
  0   it worked, and what was checked held
  1   it didn't hold: an invariant broke, a check was bad, nobody holds the lease that was asked for
  2   bad input: an argument, a name, a URL, an option, no store
  3   the store could not be reached, refused, or holds something unreadable
  4   the output could not be written; 141 if nobody reads it any more
`lease run` hands the exit code of its command on, 128 and the signal's number if that was killed. Its own:
  75  another holds the lease, still so when the time is up; -E chooses another number
  76  the lease was lost while the command ran
  126 and 127 mean that the command could not be started, 128 and a number that coord was told to end by
  that signal before.

Where the store is named, the first that there is: --backend, --backend-file, COORD_BACKEND,
COORD_BACKEND_FILE. Other users of the machine can read the arguments of a process: a URL with a password
belongs in a file that only its owner can read, or in the environment. `lease run` does not hand
COORD_BACKEND on to its command.";

/// What `coord --version` says: what was built, of what, and with which stores.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let commit = option_env!("COORD_COMMIT").unwrap_or("unknown");
    let registry = coord::registry();
    let schemes: Vec<_> = registry.schemes().collect();
    let tls = if cfg!(feature = "tls") { "on" } else { "off" };
    let version = env!("CARGO_PKG_VERSION");
    format!("{version} (commit {commit}; backends: {}; tls: {tls})", schemes.join(", "))
});

/// Membership, leader election and shard placement.
#[derive(Debug, Parser)]
#[command(name = "coord", version = VERSION.as_str(), about, after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// The store and the cluster in it, e.g. nats://localhost/orders, or memory://orders, which lives in
    /// this one process. All users of the machine can see a password that is given here: see below.
    #[arg(long, global = true, env = "COORD_BACKEND", value_name = "URL", hide_env_values = true)]
    pub(crate) backend: Option<String>,

    /// A file that holds that URL.
    #[arg(long, global = true, env = "COORD_BACKEND_FILE", value_name = "PATH")]
    pub(crate) backend_file: Option<PathBuf>,

    /// For people, or one JSON value for each line.
    #[arg(long, global = true, value_enum, default_value_t = Output::Text)]
    pub(crate) output: Output,

    /// Show what goes on inside, on standard error; twice for more.
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people: live where standard output is a terminal, plain lines elsewhere.
    Text,
    /// For programs: one JSON value for each line.
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a cluster in this process, kill its leader and watch it recover.
    Demo(DemoArgs),
    /// Show what a rebalance would move, and why.
    Plan(Box<PlanArgs>),
    /// Look at leases, hold one around a command, end one.
    #[command(subcommand)]
    Lease(LeaseCommand),
    /// Check that the store is reachable, new enough, permitted and set up as needed.
    Check(CheckArgs),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Fail on a warning as well, and on a store whose failover may lose acknowledged writes.
    #[arg(long)]
    pub(crate) strict: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// How many nodes join.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    pub(crate) nodes: u16,

    /// How many shards there are.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) shards: u32,

    /// Short time limits and no pauses: for impatient people and scripts.
    #[arg(long)]
    pub(crate) fast: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The nodes that share the shards now: NAME, NAME=CAPACITY, NAME@ZONE or NAME=CAPACITY@ZONE.
    #[arg(long, value_delimiter = ',', required = true, value_name = "NODE")]
    pub(crate) nodes: Vec<String>,

    /// Nodes that join.
    #[arg(long, value_delimiter = ',', value_name = "NODE")]
    pub(crate) join: Vec<String>,

    /// Nodes that fail.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub(crate) fail: Vec<String>,

    /// Nodes that drain: they get nothing new and are emptied.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub(crate) drain: Vec<String>,

    /// Shards that must stay on a node.
    #[arg(long, value_delimiter = ',', value_name = "SHARD=NAME")]
    pub(crate) pin: Vec<String>,

    /// How many shards there are.
    #[arg(long, default_value_t = 1024)]
    pub(crate) shards: u32,

    /// How many owners each has.
    #[arg(long, default_value_t = 1)]
    pub(crate) replicas: u8,

    /// How the shards are placed.
    #[arg(long, value_enum, default_value_t = Strategy::Balanced)]
    pub(crate) strategy: Strategy,

    /// At most this many moves, those of orphans not counted.
    #[arg(long, value_name = "N")]
    pub(crate) max_moves: Option<u32>,

    /// List every single move.
    #[arg(long)]
    pub(crate) moves: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Strategy {
    /// Exact shares, fewest moves.
    Balanced,
    /// A ring with 150 virtual nodes.
    ConsistentHash,
    /// Weighted highest random weight.
    Rendezvous,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LeaseCommand {
    /// Run a command only while holding a lease; stop it when the lease is lost.
    ///
    /// The command, and what it has started, gets SIGTERM early enough to end before another can hold
    /// the lease, or when coord is told to end, and SIGKILL after the stop budget. Where coord itself is
    /// killed, the kernel kills the command with it (on Linux, unless the command changes its user). Other
    /// signals, such as SIGUSR1, are passed on to the command. What was ignored when coord began stays
    /// ignored.
    ///
    /// Not covered: what begins a session of its own; what the command has started in the foreground of a
    /// terminal, since it then shares coord's process group, or if coord is killed by SIGKILL; and
    /// everything while coord itself is stopped. Show the fence to whatever the command writes to: that
    /// covers these as well.
    ///
    /// A store that is not there is waited for as long as for the lease, with a line for each thing that
    /// is waited for. As the first process of a container coord passes signals on and reaps what others
    /// leave.
    Run(LeaseRunArgs),
    /// Show the holder of a lease.
    Get {
        /// The lease.
        name: String,
    },
    /// List the leases that are held.
    List,
    /// End another's tenure of a lease, whatever its holder is doing.
    Release {
        /// The lease.
        name: String,
        /// Don't ask.
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct LeaseRunArgs {
    /// The lease.
    pub(crate) name: String,

    /// How long the lease outlives a crash of this process.
    #[arg(long, default_value = "15s", allow_hyphen_values = true, value_parser = humantime::parse_duration)]
    pub(crate) ttl: Duration,

    /// Give up after this time if another holds the lease or the store is not there; 0s tries once. Waits
    /// for ever by default.
    #[arg(long, value_parser = humantime::parse_duration)]
    pub(crate) wait: Option<Duration>,

    /// The exit code where another holds the lease, also when the time is up; 75 by default.
    #[arg(long, short = 'E', value_name = "NUMBER")]
    pub(crate) conflict_exit_code: Option<u8>,

    /// Hand the store's URL on to the command, as COORD_BACKEND.
    #[arg(long)]
    pub(crate) pass_backend: bool,

    /// How long the command may take to end after SIGTERM before it is killed: below three tenths of the
    /// TTL, since the lease counts as lost this much earlier. By default a fifth of the TTL, at most 1s.
    #[arg(long, value_parser = humantime::parse_duration)]
    pub(crate) stop_budget: Option<Duration>,

    /// This process's node id; by default made of the host's name and the process id.
    #[arg(long, env = "COORD_NODE")]
    pub(crate) node: Option<String>,

    /// The command and its arguments. It finds the fence in COORD_LEASE, COORD_TERM, COORD_ATTEMPT and
    /// COORD_ORIGIN.
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<std::ffi::OsString>,
}
