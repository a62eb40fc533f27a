//! `coord-sim`: runs worlds, and says which seeds break something.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use clap::Parser;
use coord_core::{BootClock, Clock as _, Moment};
use coord_sim::invariants::Broken;
use coord_sim::{Kind, Kinds, Outcome, Plant, simulate};

/// Seeds that once broke something.
const REGRESSIONS: &str = include_str!("../regressions.txt");

/// Within so many seeds each planted bug has to be found.
const PLANT_SEEDS: u64 = 1_500;

/// A world takes a fraction of a second; one that takes so long stands at one moment and would never end.
const WORLD_MAX: Duration = Duration::from_secs(120);

/// Runs simulated clusters under faults, each from one seed. Without options: the regressions and 2,000
/// fixed seeds.
#[derive(Debug, Parser)]
#[command(name = "coord-sim", version)]
struct Options {
    /// Replay this seed, telling what happens.
    #[arg(long)]
    seed: Option<u64>,
    /// So many fixed seeds.
    #[arg(long, default_value_t = 2000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Random seeds, for so many seconds.
    #[arg(long = "for", value_name = "SECONDS")]
    seconds: Option<u64>,
    /// With this bug planted.
    #[arg(long)]
    plant: Option<Plant>,
    /// Plant each bug in turn: each has to be found within 1,500 seeds.
    #[arg(long)]
    plants: bool,
    /// Worlds of these kinds: all, plain, or some by name, with commas between them.
    #[arg(long, default_value_t)]
    kinds: Kinds,
    /// Run every seed twice: both have to be the same.
    #[arg(long)]
    twice: bool,
    /// Worlds at once; as many as there are processors unless said.
    #[arg(long)]
    jobs: Option<usize>,
    /// Go on after a seed that breaks something.
    #[arg(long)]
    keep_going: bool,
}

#[expect(clippy::print_stdout, reason = "this is what the command is for")]
fn say(text: &str) {
    println!("{text}");
}

/// The worlds that run now, and since when.
static UNDER_WAY: Mutex<Vec<(ThreadId, String, Moment)>> = Mutex::new(Vec::new());

fn main() -> ExitCode {
    let options = Options::parse();
    std::thread::spawn(end_the_endless);
    if !cfg!(tokio_unstable) {
        say("built without --cfg tokio_unstable: a seed may not repeat; use `cargo sim`");
    }
    let passed = if let Some(seed) = options.seed {
        replay(seed, &options)
    } else if options.plants {
        prove(&options)
    } else {
        many(&options)
    };
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Ends the program when a world does not end: no thread can be stopped from outside.
#[expect(clippy::disallowed_methods, reason = "it is a thread of its own")]
fn end_the_endless() {
    let clock = BootClock::new();
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let now = clock.now();
        let worlds = lock(&UNDER_WAY).clone();
        let endless = worlds.iter().find(|(_, _, since)| now.since(*since) >= WORLD_MAX);
        if let Some((_, world, _)) = endless {
            say(&format!(
                "seed {world} FAILED: it does not end\n  replay: cargo sim --seed {world}"
            ));
            std::process::exit(1);
        }
    }
}

/// Runs one world, watched.
fn run(seed: u64, kinds: &Kinds, plant: Option<Plant>, tracing: bool) -> Outcome {
    let plants = plant.map_or_else(String::new, |plant| format!(" --plant {plant}"));
    let world = format!("{seed} --kinds {kinds}{plants}");
    let thread = std::thread::current().id();
    lock(&UNDER_WAY).push((thread, world, BootClock::new().now()));
    let outcome = simulate(seed, kinds, plant, tracing);
    lock(&UNDER_WAY).retain(|(other, ..)| *other != thread);
    outcome
}

fn replay(seed: u64, options: &Options) -> bool {
    let kinds = options.plant.filter(|_| options.kinds == Kinds::All).map(Plant::kinds);
    let outcome = run(seed, &kinds.unwrap_or(options.kinds.clone()), options.plant, true);
    say(&describe(&outcome));
    outcome.broken.is_none()
}

fn describe(outcome: &Outcome) -> String {
    let Outcome { seed, kind, broken, digest, healed_after, terms, version, faults, .. } = outcome;
    let kind = kind.map_or("plain", Kind::as_str);
    match broken {
        Some(broken) => format!(
            "seed {seed}, {kind}, FAILED {broken}\n  replay: cargo sim --seed {seed} --kinds {kind}"
        ),
        None => format!(
            "seed {seed}, {kind}: {faults} faults, {terms} terms, {version} maps, in order after \
             {healed_after:?}, trace {digest:016x}"
        ),
    }
}

/// A clock, and what it shows.
fn now() -> (BootClock, Moment) {
    let clock = BootClock::new();
    let now = clock.now();
    (clock, now)
}

/// Every planted bug is found.
fn prove(options: &Options) -> bool {
    let next = AtomicUsize::new(0);
    let all = AtomicBool::new(true);
    at_once(options, || {
        while let Some(plant) = Plant::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (clock, started) = now();
            let found = (1..=PLANT_SEEDS).find_map(|seed| {
                let kinds = plant.kinds();
                let broken = run(seed, &kinds, Some(*plant), false).broken?;
                // What breaks without the bug too proves nothing.
                run(seed, &kinds, None, false).broken.is_none().then_some((seed, broken))
            });
            let took = clock.now().since(started);
            let Some((seed, broken)) = found else {
                all.store(false, Ordering::Relaxed);
                say(&format!("{plant}: NOT FOUND within {PLANT_SEEDS} seeds in {took:.1?}"));
                continue;
            };
            let Broken { invariant, why, .. } = broken;
            say(&format!("{plant}: seed {seed} in {took:.1?}: {invariant}: {why}"));
        }
    });
    all.load(Ordering::Relaxed)
}

/// Runs this on each of the threads that the options ask for.
fn at_once(options: &Options, work: impl Fn() + Sync) {
    let jobs = options.jobs.or_else(|| std::thread::available_parallelism().ok().map(Into::into));
    std::thread::scope(|scope| {
        for _ in 0..jobs.unwrap_or(1) {
            scope.spawn(&work);
        }
    });
}

/// Each with its kind: `--kinds` says nothing of them.
fn regressions() -> impl Iterator<Item = (u64, Kinds)> {
    REGRESSIONS.lines().filter_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let seed = words.next()?.parse().ok()?;
        Some((seed, words.next()?.parse().ok()?))
    })
}

/// What all worlds amount to.
#[derive(Debug, Default)]
struct Totals {
    worlds: u64,
    faults: u64,
    terms: u64,
    maps: u64,
    slowest: Duration,
    failed: BTreeSet<u64>,
}

fn many(options: &Options) -> bool {
    let (clock, started) = now();
    let until = options.seconds.map(|seconds| started.plus(Duration::from_secs(seconds)));
    let fixed: Vec<(u64, Kinds)> = match until {
        None => {
            let seeds = options.from..options.from + options.seeds;
            regressions().chain(seeds.map(|seed| (seed, options.kinds.clone()))).collect()
        }
        Some(_) => Vec::new(),
    };
    let begin = if until.is_some() { random_seed() } else { 0 };
    let (next, drawn) = (AtomicUsize::new(0), AtomicU64::new(begin));
    let totals = Mutex::new(Totals::default());
    at_once(options, || {
        loop {
            let stop = !options.keep_going && !lock(&totals).failed.is_empty();
            let world = match until {
                Some(until) => (clock.now() < until).then(|| {
                    let seed = drawn.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
                    (seed, options.kinds.clone())
                }),
                None => fixed.get(next.fetch_add(1, Ordering::Relaxed)).cloned(),
            };
            let Some((seed, kinds)) = world.filter(|_| !stop) else { return };
            one(seed, &kinds, options, &totals);
        }
    });
    let totals = lock(&totals);
    let Totals { worlds, faults, terms, maps, slowest, failed } = &*totals;
    say(&format!(
        "{worlds} worlds in {:.1?}: {faults} faults, {terms} terms, {maps} maps, the slowest in order \
         after {slowest:?}; {} failed",
        clock.now().since(started),
        failed.len()
    ));
    failed.is_empty()
}

fn one(seed: u64, kinds: &Kinds, options: &Options, totals: &Mutex<Totals>) {
    let outcome = run(seed, kinds, options.plant, false);
    let again = options.twice.then(|| run(seed, kinds, options.plant, false));
    let differs = again.filter(|again| *again != outcome);
    let mut totals = lock(totals);
    totals.worlds += 1;
    totals.faults += u64::from(outcome.faults);
    totals.terms += u64::try_from(outcome.terms).unwrap_or(0);
    totals.maps += outcome.version;
    totals.slowest = totals.slowest.max(outcome.healed_after);
    if let Some(again) = differs {
        say(&format!("seed {seed} FAILED to repeat: {outcome:?}, then {again:?}"));
        totals.failed.insert(seed);
    } else if outcome.broken.is_some() {
        say(&describe(&outcome));
        totals.failed.insert(seed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Another one at each start.
fn random_seed() -> u64 {
    let bits = coord_core::AttemptId::random().as_u128();
    u64::try_from(bits >> 64).unwrap_or(0)
}
