//! The workspace's test programs, several at once: most of them mostly wait for servers.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::summary::Counts;

/// Those that take longest, by the names of their targets: they begin first, so that none of them is
/// waited for alone at the end.
const LONGEST: [&str; 5] = ["scenarios", "conformance", "server", "mixed", "harness"];

/// A test program that was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    package: String,
    target: String,
    /// The package's folder, in which cargo runs it too.
    folder: PathBuf,
    executable: PathBuf,
}

/// What is read of a line of cargo's `--message-format json`.
#[derive(Debug, Deserialize)]
struct Message {
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

/// The test programs that these messages of cargo tell of, the longest first, else as cargo has them.
pub(crate) fn read(messages: &str) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Message = serde_json::from_str(line).context("a message of cargo")?;
        let (Some(manifest), Some(target), Some(profile), Some(executable)) =
            (message.manifest_path, message.target, message.profile, message.executable)
        else {
            continue;
        };
        if !profile.test {
            continue;
        }
        let Some(folder) = manifest.parent() else { bail!("no folder: {}", manifest.display()) };
        let package = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folder = folder.to_owned();
        programs.push(Program { package, target: target.name, folder, executable });
    }
    let rank = |program: &Program| LONGEST.iter().position(|name| *name == program.target);
    programs.sort_by_key(|program| rank(program).unwrap_or(LONGEST.len()));
    Ok(programs)
}

/// What is known of those that have ended.
#[derive(Default)]
struct Ended {
    failed: Vec<String>,
    times: Vec<(Duration, String)>,
    counts: Counts,
}

/// Runs them, so many at once, each with its output in a file of the folder `outputs`, and prints each
/// one's output when it ends; the names of those that failed. Adds their trials to `counts`.
pub(crate) fn run(
    programs: Vec<Program>,
    at_once: usize,
    outputs: &Path,
    variables: &[(&str, &OsStr)],
    counts: &mut Counts,
) -> Result<Vec<String>> {
    fs::create_dir_all(outputs).with_context(|| format!("create {}", outputs.display()))?;
    let waiting = Mutex::new(VecDeque::from(programs));
    let ended = Mutex::new(Ended { counts: *counts, ..Ended::default() });
    let work = || -> Result<()> {
        loop {
            let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(program) = next else { return Ok(()) };
            let name = format!("{} {}", program.package, program.target);
            let output = outputs.join(format!("{}-{}", program.package, program.target));
            let (passed, took) = program.run(&output, variables)?;
            // One at a time, so that the outputs are apart.
            let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            println!("     Running {name} ({})", program.executable.display());
            ended.counts.add(&show(&output)?);
            println!("     {name}: {:.1} s", took.as_secs_f64());
            if !passed {
                ended.failed.push(name.clone());
            }
            ended.times.push((took, name));
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    let Ended { failed, mut times, counts: all } =
        ended.into_inner().unwrap_or_else(PoisonError::into_inner);
    *counts = all;
    times.sort();
    let longest = times.iter().rev().take(LONGEST.len());
    let longest: Vec<_> =
        longest.map(|(took, name)| format!("{name} {:.0} s", took.as_secs_f64())).collect();
    println!("\n{} test programs, {at_once} at once; longest: {}", times.len(), longest.join(", "));
    Ok(failed)
}

fn show(output: &Path) -> Result<String> {
    let said = fs::read(output).with_context(|| format!("read {}", output.display()))?;
    let mut to = io::stdout().lock();
    to.write_all(&said).and_then(|()| to.flush()).context("show a program's output")?;
    Ok(String::from_utf8_lossy(&said).into_owned())
}

impl Program {
    /// Runs it as cargo would; whether it passed, and how long it took.
    #[expect(clippy::disallowed_methods, reason = "for people, and nothing depends on it")]
    fn run(&self, output: &Path, variables: &[(&str, &OsStr)]) -> Result<(bool, Duration)> {
        let file = File::create(output).with_context(|| format!("create {}", output.display()))?;
        let begun = Instant::now();
        let status = Command::new(&self.executable)
            .envs(variables.iter().copied())
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .env("CARGO_MANIFEST_PATH", self.folder.join("Cargo.toml"))
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("share the output")?)
            .stderr(file)
            .status()
            .with_context(|| format!("start {}", self.executable.display()))?;
        Ok((status.success(), begun.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGES: &str = r#"
not a message
{"reason":"compiler-artifact","manifest_path":"/w/crates/a/Cargo.toml","target":{"name":"a"},"profile":{"test":true},"executable":"/t/a-1"}
{"reason":"compiler-artifact","manifest_path":"/w/crates/b/Cargo.toml","target":{"name":"b"},"profile":{"test":false},"executable":"/t/b"}
{"reason":"compiler-artifact","manifest_path":"/w/crates/b/Cargo.toml","target":{"name":"b"},"profile":{"test":true},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/w/crates/b/Cargo.toml","target":{"name":"conformance"},"profile":{"test":true},"executable":"/t/c-1"}
{"reason":"build-finished","success":true}
"#;

    fn program(package: &str, target: &str, executable: &str) -> Program {
        let folder = PathBuf::from(format!("/w/crates/{package}"));
        let (package, target) = (package.to_owned(), target.to_owned());
        Program { package, target, folder, executable: executable.into() }
    }

    #[test]
    fn only_test_programs_are_run_and_the_longest_first() {
        let programs = read(MESSAGES).expect("cargo's messages");
        assert_eq!(programs, [program("b", "conformance", "/t/c-1"), program("a", "a", "/t/a-1")]);
        assert!(read("{\"executable\":1}").is_err());
    }

    #[test]
    fn one_that_fails_is_named_and_the_others_run_all_the_same() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let outputs = here.join("../../target/xtask-programs");
        let named = |name: &str, executable: &str| Program {
            folder: here.to_owned(),
            ..program("xtask", name, executable)
        };
        let programs = vec![named("fails", "false"), named("passes", "true")];
        let mut counts = Counts::default();
        let failed = run(programs, 2, &outputs, &[], &mut counts).expect("both start");
        assert_eq!(failed, ["xtask fails"]);
        let none = vec![named("none", "/no/such/program")];
        assert!(run(none, 2, &outputs, &[], &mut counts).is_err());
    }
}
