//! Runs targets on damaged inputs, and tells of the first that a target goes wrong on.

#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command talks to a terminal, runs no task and measures its own time"
)]

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{Seek as _, Write as _};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use xxhash_rust::xxh3::xxh3_64;

use crate::mutation::mutate;
use crate::targets::Target;

/// How long one input may take; the limit is for a loaded machine.
const INPUT_TIME_MAX: Duration = Duration::from_secs(10);
/// The most inputs that are kept to be damaged further.
const CORPUS_MAX: usize = 4_096;

/// What the allocator of the process counts.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Meter {
    /// The bytes in use.
    pub current: fn() -> usize,
    /// The most bytes in use since the last reset.
    pub peak: fn() -> usize,
    /// Begins anew.
    pub reset: fn(),
}

impl Meter {
    /// A meter of its parts.
    #[must_use]
    pub fn new(current: fn() -> usize, peak: fn() -> usize, reset: fn()) -> Self {
        Self { current, peak, reset }
    }

    /// How many bytes more than before were in use at once.
    pub fn measure<T>(&self, what: impl FnOnce() -> T) -> (T, usize) {
        (self.reset)();
        let before = (self.current)();
        let result = what();
        (result, (self.peak)().saturating_sub(before))
    }
}

/// How long to run, from which seed, and where files are.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// For how long.
    pub time: Duration,
    /// What the damage is drawn from.
    pub seed: u64,
    /// Where each target has a folder of inputs that went wrong once.
    pub regressions: PathBuf,
    /// Where failing inputs are saved.
    pub failures: PathBuf,
}

impl Plan {
    /// A plan of its parts.
    #[must_use]
    pub fn new(time: Duration, seed: u64, regressions: PathBuf, failures: PathBuf) -> Self {
        Self { time, seed, regressions, failures }
    }
}

/// An input that a target went wrong on.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// Which target.
    pub target: &'static str,
    /// What went wrong.
    pub why: String,
    /// Where the input is saved.
    pub file: PathBuf,
    input: Vec<u8>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { target, why, file, input } = self;
        let (file, shown) = (file.display(), &input[..input.len().min(512)]);
        writeln!(f, "{target}: {why}")?;
        writeln!(f, "input of {} bytes: {}", input.len(), shown.escape_ascii())?;
        writeln!(f, "saved as {file}; run it again with")?;
        writeln!(f, "    cargo xtask fuzz {target} --replay {file}")?;
        write!(f, "and keep it in crates/coord-fuzz/regressions/{target}/")
    }
}

/// What was run of a target.
#[derive(Debug)]
struct Tally {
    inputs: u64,
    read: u64,
    corpus: usize,
    most: usize,
}

/// Runs each target on its regressions and seeds, and for its share of the time on damaged forms of them.
///
/// # Errors
/// Where a file can't be read or written.
pub fn fuzz(targets: &[Target], plan: &Plan, meter: Meter) -> Result<Vec<Failure>> {
    let runner = Runner::start(plan, meter)?;
    let mut failures = Vec::new();
    let until = Instant::now() + plan.time;
    for (index, target) in targets.iter().enumerate() {
        let left = u32::try_from(targets.len() - index).unwrap_or(u32::MAX);
        let share = until.saturating_duration_since(Instant::now()) / left;
        match runner.target(target, plan, share)? {
            Ok(Tally { inputs, read, corpus, most }) => println!(
                "{}: {inputs} inputs, {read} read, corpus of {corpus}, at most {most} bytes of memory at once",
                target.name
            ),
            Err(failure) => failures.push(failure),
        }
    }
    Ok(failures)
}

/// Runs one target on one file.
///
/// # Errors
/// Where the file can't be read.
pub fn replay(target: &Target, file: &Path, plan: &Plan, meter: Meter) -> Result<Option<Failure>> {
    let input = fs::read(file).with_context(|| file.display().to_string())?;
    match Runner::start(plan, meter)?.check(target, &input)? {
        Ok((said, taken)) => {
            let said = said.err().unwrap_or_else(|| "read".to_owned());
            println!("{}: {said}; {taken} bytes of memory", target.name);
            Ok(None)
        }
        Err(why) => {
            let (target, file) = (target.name, file.to_owned());
            Ok(Some(Failure { target, why, file, input }))
        }
    }
}

/// Whether an input was read, and the most bytes in use for it.
type Said = (std::result::Result<(), String>, usize);

struct Runner {
    meter: Meter,
    failures: PathBuf,
    /// The input that runs, for what ends the process.
    running: Mutex<File>,
    since: Arc<Mutex<Option<Instant>>>,
    panicked: Arc<Mutex<String>>,
}

fn locked<T>(lock: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runner {
    fn start(plan: &Plan, meter: Meter) -> Result<Self> {
        let failures = plan.failures.clone();
        fs::create_dir_all(&failures).with_context(|| failures.display().to_string())?;
        let path = failures.join("running");
        let running = Mutex::new(File::create(&path).context("the file of the running input")?);
        let panicked = Arc::new(Mutex::new(String::new()));
        let told = Arc::clone(&panicked);
        panic::set_hook(Box::new(move |panic| *locked(&told) = panic.to_string()));
        let since: Arc<Mutex<Option<Instant>>> = Arc::default();
        let watched = Arc::clone(&since);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                if locked(&watched).is_some_and(|since| since.elapsed() > INPUT_TIME_MAX) {
                    eprintln!("an input takes more than {INPUT_TIME_MAX:?}: {}", path.display());
                    std::process::exit(1);
                }
            }
        });
        Ok(Self { meter, failures, running, since, panicked })
    }

    /// What the target said of the input and how much memory it took, or what went wrong.
    fn check(&self, target: &Target, input: &[u8]) -> Result<Result<Said, String>> {
        {
            let mut file = locked(&self.running);
            file.rewind()?;
            file.write_all(input)?;
            file.set_len(input.len() as u64)?;
        }
        *locked(&self.since) = Some(Instant::now());
        let prepared = panic::catch_unwind(|| (target.prepare)(input));
        let ran = prepared.and_then(|check| {
            let limit = check.limit();
            let run = || panic::catch_unwind(AssertUnwindSafe(check.run));
            let (said, taken) = self.meter.measure(run);
            said.map(|said| (said, taken, limit))
        });
        *locked(&self.since) = None;
        Ok(match ran {
            Err(_) => Err(std::mem::take(&mut *locked(&self.panicked))),
            Ok((_, taken, limit)) if taken > limit => {
                Err(format!("it took {taken} bytes of memory at once; at most {limit}"))
            }
            Ok((said, taken, _)) => Ok((said, taken)),
        })
    }

    fn target(
        &self,
        target: &Target,
        plan: &Plan,
        share: Duration,
    ) -> Result<Result<Tally, Failure>> {
        let failed = |why: String, input: &[u8]| {
            let folder = self.failures.join(target.name);
            fs::create_dir_all(&folder)?;
            let file = folder.join(format!("{:016x}", xxh3_64(input)));
            fs::write(&file, input)?;
            Ok(Err(Failure { target: target.name, why, file, input: input.to_vec() }))
        };
        let mut rng = StdRng::seed_from_u64(plan.seed ^ xxh3_64(target.name.as_bytes()));
        let mut tally = Tally { inputs: 0, read: 0, corpus: 0, most: 0 };
        let mut reasons = HashSet::new();
        let mut corpus = Vec::new();
        for input in files(&plan.regressions.join(target.name))? {
            if let Err(why) = self.check(target, &input)? {
                return failed(why, &input);
            }
            corpus.push(input);
        }
        for seed in (target.seeds)() {
            match self.check(target, &seed)? {
                Err(why) => return failed(why, &seed),
                Ok((Err(why), _)) => {
                    return failed(format!("a good input is refused: {why}"), &seed);
                }
                Ok((Ok(()), _)) => corpus.push(seed),
            }
        }
        let (good, from) = (corpus.len(), Instant::now());
        while from.elapsed() < share {
            // Every other time a good one: what is refused early keeps the rest from being looked at.
            let most = if rng.random() { good } else { corpus.len() };
            let mut input = corpus[rng.random_range(0..most)].clone();
            let other = rng.random_range(0..corpus.len());
            mutate(&mut rng, &mut input, &corpus[other]);
            tally.inputs += 1;
            let said = match self.check(target, &input)? {
                Err(why) => return failed(why, &input),
                Ok((said, taken)) => {
                    tally.most = tally.most.max(taken);
                    said
                }
            };
            match said {
                Ok(()) => tally.read += 1,
                // The same reason for another number is no news.
                Err(why) => {
                    if corpus.len() < CORPUS_MAX && reasons.insert(kind(&why)) {
                        corpus.push(input);
                    }
                }
            }
        }
        tally.corpus = corpus.len();
        Ok(Ok(tally))
    }
}

/// The reason without what it tells of the input: numbers, and what it quotes.
fn kind(why: &str) -> u64 {
    let plain = why.split(['"', '`']).step_by(2).flat_map(str::chars);
    let letters: String = plain.filter(char::is_ascii_alphabetic).collect();
    xxh3_64(letters.as_bytes())
}

/// The files of a folder, if there is one, in order.
fn files(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    paths.iter().map(|path| fs::read(path).with_context(|| path.display().to_string())).collect()
}
