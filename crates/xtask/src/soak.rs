//! Test programs run again and again while others compete for the machine: what passes by luck fails once.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// What keeps a processor busy until whoever started it is gone.
const BUSY: &str = "while kill -0 $PPID 2>/dev/null; do :; done";

/// What to run, how often, and beside what.
pub(crate) struct Ask {
    pub(crate) times: u32,
    pub(crate) busy: u32,
    /// No run begins after this time.
    pub(crate) time: Option<Duration>,
    pub(crate) programs: Vec<PathBuf>,
    /// Passed on to each program.
    pub(crate) arguments: Vec<String>,
}

/// Processes that compete for the processors; they end when this is dropped.
struct Busy(Vec<Child>);

impl Busy {
    fn start(count: u32) -> Result<Self> {
        let mut busy = Self(Vec::new());
        for _ in 0..count {
            let mut command = Command::new("nice");
            command.args(["-n", "10", "sh", "-c", BUSY]).stdin(Stdio::null());
            busy.0.push(command.spawn().context("start a busy process")?);
        }
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for process in &mut self.0 {
            // One that has ended by itself is no trouble.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// What is known of one program.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sum {
    passed: u32,
    failed: u32,
    /// How often each trial failed.
    failures: BTreeMap<String, u32>,
    /// How often each trial ran once more, since the machine stood still under it.
    repeated: BTreeMap<String, u32>,
}

impl Sum {
    fn add(&mut self, output: &str, passed: bool) {
        *(if passed { &mut self.passed } else { &mut self.failed }) += 1;
        for line in output.lines() {
            if let Some((name, _)) = line.split_once(" runs once more: ") {
                *self.repeated.entry(name.to_owned()).or_default() += 1;
            }
            let trial = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix("FAILED"));
            if let Some((name, _)) = trial.and_then(|rest| rest.split_once(" ...")) {
                *self.failures.entry(name.trim().to_owned()).or_default() += 1;
            }
        }
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, failures, repeated } = self;
        write!(f, "{passed} runs passed, {failed} failed")?;
        for (what, trials) in [("failed", failures), ("ran once more", repeated)] {
            for (name, times) in trials {
                write!(f, "\n  {name} {what} {times} times")?;
            }
        }
        Ok(())
    }
}

/// Runs all programs beside each other, each so many times, and says what they came to; whether all passed.
/// The output of a run that failed stays in the folder `outputs`.
#[expect(clippy::disallowed_methods, reason = "for people, and nothing depends on it")]
pub(crate) fn run(ask: &Ask, outputs: &Path) -> Result<bool> {
    if ask.programs.is_empty() {
        bail!("name at least one test program, as `cargo test --no-run` prints it");
    }
    if let Some(odd) = ask.programs.iter().find(|program| !program.is_file()) {
        bail!("there is no program {}", odd.display());
    }
    fs::create_dir_all(outputs).with_context(|| format!("create {}", outputs.display()))?;
    let end = ask.time.map(|time| Instant::now() + time);
    let is_over = || end.is_some_and(|end| Instant::now() >= end);
    let _busy = Busy::start(ask.busy)?;
    let soak = |program: &PathBuf| -> Result<Sum> {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let mut sum = Sum::default();
        for number in 1..=ask.times {
            if is_over() {
                break;
            }
            let path = outputs.join(format!("{name}-{number}.log"));
            let passed = once(program, &ask.arguments, &path)?;
            let output = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            sum.add(&String::from_utf8_lossy(&output), passed);
            if passed {
                // What it said is of no use any more.
                let _ = fs::remove_file(&path);
            }
            let what = if passed { "passed" } else { "failed" };
            println!("{name}: run {number} {what}");
        }
        Ok(sum)
    };
    let sums = thread::scope(|scope| {
        let runs: Vec<_> = ask.programs.iter().map(|it| (it, scope.spawn(|| soak(it)))).collect();
        let ended = runs.into_iter().map(|(program, run)| match run.join() {
            Ok(sum) => sum.map(|sum| (program, sum)),
            Err(panic) => std::panic::resume_unwind(panic),
        });
        ended.collect::<Result<Vec<_>>>()
    })?;
    for (program, sum) in &sums {
        println!("\n{}: {sum}", program.display());
    }
    Ok(sums.iter().all(|(_, sum)| sum.failed == 0 && sum.passed > 0))
}

fn once(program: &Path, arguments: &[String], output: &Path) -> Result<bool> {
    let file = File::create(output).with_context(|| format!("create {}", output.display()))?;
    let status = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(file.try_clone().context("share the output")?)
        .stderr(file)
        .status()
        .with_context(|| format!("start {}", program.display()))?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_and_repetitions_are_counted() {
        let output = "lease::one runs once more: the machine stood still for 2s: late\n\
                      test lease::one                 ... ok\n\
                      test lease::two                 ... FAILED\n\
                      test result: FAILED. 1 passed; 1 failed";
        let mut sum = Sum::default();
        sum.add(output, false);
        sum.add(output, false);
        sum.add("test lease::one ... ok", true);
        assert_eq!((sum.passed, sum.failed), (1, 2));
        assert_eq!(sum.failures, BTreeMap::from([("lease::two".to_owned(), 2)]));
        assert_eq!(sum.repeated, BTreeMap::from([("lease::one".to_owned(), 2)]));
        assert!(sum.to_string().contains("lease::two failed 2 times"), "{sum}");
    }

    #[test]
    fn a_program_that_fails_once_fails_all_and_nothing_passes_unrun() {
        let outputs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/xtask-soak");
        let find = |name| ["/bin", "/usr/bin"].map(|dir| Path::new(dir).join(name));
        let of = |name| find(name).into_iter().find(|path| path.is_file()).expect(name);
        let ask = |programs| {
            let (times, busy, time, arguments) = (2, 1, None, Vec::new());
            Ask { times, busy, time, programs, arguments }
        };
        assert!(run(&ask(vec![of("true")]), &outputs).expect("it starts"));
        assert!(!run(&ask(vec![of("true"), of("false")]), &outputs).expect("both start"));
        assert!(run(&ask(Vec::new()), &outputs).is_err());
        assert!(run(&ask(vec!["/no/such/program".into()]), &outputs).is_err());
    }
}
