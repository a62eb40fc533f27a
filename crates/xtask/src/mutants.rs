//! `cargo xtask mutants`: changes the files that safety rests on in one place at a time, and looks whether a test
//! notices. What no test notices must be explained in `mutants.toml`.
//!
//! cargo-mutants says which changes there are. All changes of a package are built together ([`woven`]), in a copy
//! of the workspace that stays where it is; what can't be built so is left to cargo-mutants itself.

#![expect(clippy::disallowed_methods, reason = "a command waits for another one, and runs no task")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::woven::{self, Mutant};

/// The version of cargo-mutants that is brought.
const VERSION: &str = "^27";
const EXPLAINED: &str = "crates/xtask/mutants.toml";
/// A test program may take so many times as long as it takes without a change, and at least this long; what never
/// ends is noticed.
const TIMES: u32 = 6;
const LIMIT_MIN: Duration = Duration::from_secs(20);
const UNCHANGED_MAX: Duration = Duration::from_secs(3600);
/// How long the tests may take for a change that cargo-mutants tries.
const APART_SECONDS: &str = "300";
/// The memory that a test program may have, in KiB: a change can make one that takes more and more.
const MEMORY_KIB: u32 = 8_000_000;

/// What is asked for.
#[derive(Debug)]
pub(crate) struct Ask {
    /// Which part of all changes, as `1/4` for the first of four.
    pub(crate) shard: Option<String>,
    /// After how long to end, with what is known by then.
    pub(crate) time: Option<Duration>,
    /// Only the changes whose name, as it is printed, matches one of these regular expressions.
    pub(crate) names: Vec<String>,
    /// Which of the files; all of them where none is named.
    pub(crate) files: Vec<String>,
}

/// `mutants.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Explained {
    packages: BTreeMap<String, Package>,
    /// What no test notices, and why that is right.
    #[serde(default)]
    accepted: Vec<Accepted>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Package {
    /// The files that are changed.
    files: Vec<String>,
    /// The test programs, in the order in which they are run: `lib`, or the name of one in `tests/`.
    programs: Vec<String>,
    /// How it is built while it is changed, where that is not as it is tested otherwise: with many changes in it,
    /// optimising takes long.
    opt_level: Option<u8>,
    /// Tests that take long: run only for a change that nothing else noticed, and whose file's name has this part.
    #[serde(default)]
    slow: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Accepted {
    file: String,
    change: String,
    why: String,
}

/// What became of one change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Caught,
    Missed,
    /// The tests did not end in time.
    Timeout,
    /// It does not compile.
    Unviable,
}

/// What became of the changes of a run.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    caught: usize,
    timeouts: usize,
    unviable: usize,
    /// File and change, without the line, which moves.
    missed: BTreeSet<(String, String)>,
    missed_count: usize,
    /// Changes for which there was no time.
    untried: usize,
}

impl Outcome {
    fn add(&mut self, name: &str, fate: Fate) -> Result<()> {
        match fate {
            Fate::Caught => self.caught += 1,
            Fate::Timeout => self.timeouts += 1,
            Fate::Unviable => self.unviable += 1,
            Fate::Missed => {
                self.missed.insert(named(name)?);
                self.missed_count += 1;
            }
        }
        Ok(())
    }

    fn and(&mut self, other: Self) {
        self.caught += other.caught;
        self.timeouts += other.timeouts;
        self.unviable += other.unviable;
        self.missed_count += other.missed_count;
        self.missed.extend(other.missed);
        self.untried += other.untried;
    }
}

/// Tries the changes of each package's files. Fails for a change that nothing notices and nobody explained.
pub(crate) fn run(root: &Path, ask: &Ask) -> Result<ExitCode> {
    let explained = read(root)?;
    let packages = chosen(&explained.packages, &ask.files)?;
    let shard = ask.shard.as_deref().map(shard).transpose()?;
    let until = ask.time.map(|time| Instant::now() + time);
    let work = root.join("target/mutants");
    fs::create_dir_all(&work).with_context(|| work.display().to_string())?;
    let lock = File::create(work.join("lock")).context("target/mutants/lock")?;
    if lock.try_lock().is_err() {
        bail!("another `cargo xtask mutants` runs in this folder; wait for it or end it");
    }
    let program = tool(root)?;
    let place = Place { root: root.to_owned(), tree: work.join("tree"), work, program };
    let mut total = Outcome::default();
    for (name, files) in packages {
        place.copy()?;
        let mut mutants = place.list(name, &files, &ask.names)?;
        if let Some((part, of)) = shard {
            let all = mutants.into_iter().enumerate();
            mutants = all.filter(|(at, _)| at % of == part).map(|(_, mutant)| mutant).collect();
        }
        if mutants.is_empty() {
            continue;
        }
        let found = place.package(name, &explained.packages[name], &mutants, until)?;
        println!("{name}: {}", rate(&found));
        total.and(found);
    }
    println!("all: {}", rate(&total));
    Ok(judge(&explained.accepted, &total))
}

/// Where the work is done.
struct Place {
    root: PathBuf,
    /// The copy that is changed.
    tree: PathBuf,
    work: PathBuf,
    program: PathBuf,
}

/// A test program that is built.
struct Program {
    name: String,
    path: PathBuf,
    /// How long its quick tests take without a change.
    takes: Duration,
    /// How long those of its tests take that take long, once that was needed.
    slow_takes: BTreeMap<Vec<String>, Duration>,
}

impl Place {
    /// Makes the copy the same as the workspace: what git knows, and what it would add. A file that is the same
    /// stays untouched, so that it is not built again.
    fn copy(&self) -> Result<()> {
        let mut git = Command::new("git");
        git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
        let listed = git.current_dir(&self.root).output().context("start git")?;
        let listed = String::from_utf8(listed.stdout).context("git ls-files")?;
        let mut wanted = BTreeSet::new();
        for name in listed.split('\0').filter(|name| !name.is_empty()) {
            let (from, to) = (self.root.join(name), self.tree.join(name));
            let Ok(text) = fs::read(&from) else { continue };
            wanted.insert(to.clone());
            if fs::read(&to).is_ok_and(|old| old == text) {
                continue;
            }
            let folder = to.parent().context("a folder")?;
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
            fs::write(&to, text).with_context(|| to.display().to_string())?;
        }
        remove_others(&self.tree, &wanted)
    }

    fn cargo(&self, mut command: Command) -> Command {
        command.env("CARGO_TARGET_DIR", self.work.join("build")).env("CARGO_INCREMENTAL", "1");
        command.env_remove(woven::VARIABLE).current_dir(&self.tree);
        command
    }

    /// The changes that there are.
    fn list(&self, package: &str, files: &[&str], names: &[String]) -> Result<Vec<Mutant>> {
        let mut command = self.cargo(Command::new(&self.program));
        command.args(["mutants", "--list", "--json", "--no-config", "--package", package]);
        files.iter().for_each(|file| _ = command.args(["--file", file]));
        names.iter().for_each(|name| _ = command.args(["--re", name]));
        let output = command.stderr(Stdio::inherit()).output().context("start cargo-mutants")?;
        if !output.status.success() {
            bail!("cargo-mutants can't list the changes: {}", output.status);
        }
        serde_json::from_slice(&output.stdout).context("the list of cargo-mutants")
    }

    fn package(
        &self,
        name: &str,
        package: &Package,
        mutants: &[Mutant],
        until: Option<Instant>,
    ) -> Result<Outcome> {
        println!("{name}: {} changes", mutants.len());
        let mut found = Outcome::default();
        let numbered: BTreeMap<u32, &Mutant> = (1..).zip(mutants).collect();
        let Built { programs, unviable, apart } = self.build(name, package, &numbered)?;
        let folder = self.tree.join("crates").join(name);
        let slow: Vec<&str> = package.slow.keys().map(String::as_str).collect();
        let mut timed = Vec::new();
        for mut program in programs {
            let begun = Instant::now();
            program.passes(&folder, &skipping(&slow))?;
            program.takes = begun.elapsed();
            timed.push(program);
        }
        let takes: Duration = timed.iter().map(|program| program.takes).sum();
        println!("{name}: built; the quick tests take {:.1} s", takes.as_secs_f64());
        for (at, (number, mutant)) in (1..).zip(&numbered) {
            if apart.contains(number) {
                continue;
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                found.untried += 1;
                continue;
            }
            let begun = Instant::now();
            let fate = if unviable.contains(number) {
                Fate::Unviable
            } else {
                tried(&mut timed, &folder, *number, package, mutant)?
            };
            told(fate, &mutant.name, (at, numbered.len()), begun);
            found.add(&mutant.name, fate)?;
        }
        let apart: Vec<&Mutant> = apart.iter().map(|number| numbered[number]).collect();
        if !apart.is_empty() {
            found.and(self.apart(name, package, &apart, until)?);
        }
        Ok(found)
    }

    /// Builds the test programs with all changes in them. Those that don't compile are taken out again.
    fn build(
        &self,
        name: &str,
        package: &Package,
        numbered: &BTreeMap<u32, &Mutant>,
    ) -> Result<Built> {
        let (mut unviable, mut apart) = (BTreeSet::new(), BTreeSet::new());
        let library = format!("crates/{name}/src/lib.rs");
        let text = fs::read_to_string(self.root.join(&library)).context(library.clone())?;
        fs::write(self.tree.join(&library), text + &woven::switch()).context(library)?;
        let files: BTreeSet<&str> = numbered.values().map(|mutant| mutant.file.as_str()).collect();
        loop {
            let mut texts = BTreeMap::new();
            for &file in &files {
                let source = fs::read_to_string(self.root.join(file)).context(file.to_owned())?;
                let left = numbered.iter().filter(|(number, mutant)| {
                    mutant.file == file && !unviable.contains(*number) && !apart.contains(*number)
                });
                let left: Vec<_> = left.map(|(number, mutant)| (*number, *mutant)).collect();
                let woven = woven::weave(&source, &left).with_context(|| file.to_owned())?;
                apart.extend(woven.apart.iter().copied());
                fs::write(self.tree.join(file), &woven.text).context(file.to_owned())?;
                texts.insert(file, woven);
            }
            let mut command = self.cargo(Command::new(cargo()));
            command.args(["test", "--no-run", "--quiet", "--profile", "mutants"]);
            command.args(["--message-format", "json", "--package", name]);
            if let Some(level) = package.opt_level {
                let set = format!("profile.mutants.package.{name}.opt-level={level}");
                command.args(["--config", &set]);
            }
            command.args(targets(&package.programs)).stderr(Stdio::null());
            let output = command.output().context("start cargo")?;
            let told = messages(&output.stdout);
            if output.status.success() {
                let mut programs = programs(&told);
                let place = |one: &Program| package.programs.iter().position(|n| *n == one.name);
                programs.sort_by_key(place);
                return Ok(Built { programs, unviable, apart });
            }
            let before = unviable.len();
            let mut text = String::new();
            for message in told.iter().filter(|message| message["message"]["level"] == "error") {
                let spans = message["message"]["spans"].as_array().into_iter().flatten();
                for span in spans.filter(|span| span["is_primary"] == true) {
                    let line = span["line_start"].as_u64().and_then(|line| line.try_into().ok());
                    let woven = span["file_name"].as_str().and_then(|file| texts.get(file));
                    let change = woven.zip(line).and_then(|(woven, line)| woven.change_at(line));
                    unviable.extend(change);
                }
                text.push_str(message["message"]["rendered"].as_str().unwrap_or_default());
            }
            if unviable.len() == before {
                bail!("{name} can't be built with its changes: {}\n{text}", output.status);
            }
        }
    }

    /// Leaves what can't be built together to cargo-mutants, in the same copy.
    fn apart(
        &self,
        name: &str,
        package: &Package,
        mutants: &[&Mutant],
        until: Option<Instant>,
    ) -> Result<Outcome> {
        self.copy()?;
        let mut found = Outcome { untried: mutants.len(), ..Outcome::default() };
        if until.is_some_and(|until| Instant::now() >= until) {
            return Ok(found);
        }
        println!("{name}: {} changes are tried each on its own", mutants.len());
        let output = self.work.join(name);
        fs::create_dir_all(&output).with_context(|| output.display().to_string())?;
        let mut command = self.cargo(Command::new(&self.program));
        command.args(["mutants", "--in-place", "--package", name, "--profile", "mutants"]);
        command.args(["--timeout", APART_SECONDS, "--no-config", "--baseline", "skip"]);
        command.args(["--colors", "never", "--caught", "--unviable", "--output"]).arg(&output);
        for mutant in mutants {
            command.args(["--re", &format!("^{}$", escaped(&mutant.name))]);
        }
        let targets = targets(&package.programs);
        targets.iter().for_each(|target| _ = command.arg(format!("--cargo-arg={target}")));
        ends(command, until)?;
        for (file, fate) in [
            ("caught.txt", Fate::Caught),
            ("missed.txt", Fate::Missed),
            ("timeout.txt", Fate::Timeout),
            ("unviable.txt", Fate::Unviable),
        ] {
            let path = output.join("mutants.out").join(file);
            for line in fs::read_to_string(path).unwrap_or_default().lines() {
                found.add(line, fate)?;
                found.untried = found.untried.saturating_sub(1);
            }
        }
        Ok(found)
    }
}

struct Built {
    programs: Vec<Program>,
    unviable: BTreeSet<u32>,
    apart: BTreeSet<u32>,
}

fn remove_others(folder: &Path, wanted: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, wanted)?;
        } else if !wanted.contains(&path) {
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}

fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn targets(programs: &[String]) -> Vec<String> {
    let target = |program: &String| match program.as_str() {
        "lib" => "--lib".to_owned(),
        test => format!("--test={test}"),
    };
    programs.iter().map(target).collect()
}

fn messages(output: &[u8]) -> Vec<Value> {
    let lines = output.split(|byte| *byte == b'\n');
    lines.filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// The test programs among what cargo says it has built.
fn programs(messages: &[Value]) -> Vec<Program> {
    let built = messages.iter().filter(|message| message["profile"]["test"] == true);
    let program = |message: &Value| {
        let path = PathBuf::from(message["executable"].as_str()?);
        let is_library = message["target"]["kind"][0] == "lib";
        let name = if is_library { "lib" } else { message["target"]["name"].as_str()? };
        Some(Program {
            name: name.to_owned(),
            path,
            takes: Duration::ZERO,
            slow_takes: BTreeMap::new(),
        })
    };
    built.filter_map(program).collect()
}

fn skipping(slow: &[&str]) -> Vec<String> {
    slow.iter().flat_map(|test| ["--skip", test]).map(str::to_owned).collect()
}

/// Runs the quick tests of all programs, and then those that take long, until one notices.
fn tried(
    programs: &mut [Program],
    folder: &Path,
    number: u32,
    package: &Package,
    mutant: &Mutant,
) -> Result<Fate> {
    let slow: Vec<&str> = package.slow.keys().map(String::as_str).collect();
    for program in programs.iter() {
        let limit = LIMIT_MIN.max(program.takes * TIMES);
        let fate = program.runs(folder, number, &skipping(&slow), limit)?;
        if fate != Fate::Missed {
            return Ok(fate);
        }
    }
    let matter = package.slow.iter().filter(|(_, part)| mutant.file.contains(part.as_str()));
    let mut tests: Vec<String> = matter.map(|(test, _)| test.clone()).collect();
    if !tests.is_empty() {
        tests.push("--exact".to_owned());
        for program in programs {
            let takes = program.slow_takes(folder, &tests)?;
            let fate = program.runs(folder, number, &tests, LIMIT_MIN.max(takes * TIMES))?;
            if fate != Fate::Missed {
                return Ok(fate);
            }
        }
    }
    Ok(Fate::Missed)
}

impl Program {
    /// Runs tests without any change.
    fn passes(&self, folder: &Path, arguments: &[String]) -> Result<()> {
        if self.runs(folder, 0, arguments, UNCHANGED_MAX)? != Fate::Missed {
            bail!("{}: its tests do not pass without any change", self.name);
        }
        Ok(())
    }

    fn slow_takes(&mut self, folder: &Path, tests: &[String]) -> Result<Duration> {
        if let Some(takes) = self.slow_takes.get(tests) {
            return Ok(*takes);
        }
        let begun = Instant::now();
        self.passes(folder, tests)?;
        let takes = begun.elapsed();
        self.slow_takes.insert(tests.to_vec(), takes);
        Ok(takes)
    }

    /// Runs tests with a change, until the first one fails.
    fn runs(
        &self,
        folder: &Path,
        number: u32,
        arguments: &[String],
        limit: Duration,
    ) -> Result<Fate> {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -v {MEMORY_KIB}; exec \"$0\" \"$@\"")]);
        command.arg(&self.path).args(arguments).current_dir(folder);
        command.env(woven::VARIABLE, number.to_string()).env("CARGO_MANIFEST_DIR", folder);
        // A function with many bodies has room for all of them on its stack. What fails needs no small example.
        command.env("RUST_MIN_STACK", "67108864").env("PROPTEST_MAX_SHRINK_ITERS", "0");
        command.env("PROPTEST_FAILURE_PERSISTENCE", "off").env_remove("RUST_BACKTRACE");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().with_context(|| self.path.display().to_string())?;
        let output = child.stdout.take().context("a pipe")?;
        let (tell, told) = mpsc::channel();
        let reader = thread::spawn(move || {
            let lines = BufReader::new(output).split(b'\n').map_while(Result::ok);
            for line in lines {
                let failed = line.starts_with(b"test ") && line.ends_with(b"FAILED");
                if failed && tell.send(()).is_err() {
                    return;
                }
            }
        });
        let fate = match told.recv_timeout(limit) {
            Ok(()) => Fate::Caught,
            Err(RecvTimeoutError::Timeout) => Fate::Timeout,
            Err(RecvTimeoutError::Disconnected) => {
                if child.wait()?.success() {
                    Fate::Missed
                } else {
                    Fate::Caught
                }
            }
        };
        ended(&mut child)?;
        _ = reader.join();
        Ok(fate)
    }
}

fn ended(child: &mut Child) -> Result<()> {
    if child.try_wait()?.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(())
}

fn told(fate: Fate, name: &str, (at, of): (usize, usize), begun: Instant) {
    let word = match fate {
        Fate::Caught => "caught",
        Fate::Missed => "MISSED",
        Fate::Timeout => "timeout",
        Fate::Unviable => "unviable",
    };
    println!("{at}/{of} {word:<8} {name} ({:.1} s)", begun.elapsed().as_secs_f64());
}

/// A name as a regular expression that matches only it.
fn escaped(name: &str) -> String {
    let mut escaped = String::with_capacity(name.len());
    for letter in name.chars() {
        if letter.is_ascii_punctuation() {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

fn read(root: &Path) -> Result<Explained> {
    let text = fs::read_to_string(root.join(EXPLAINED)).context(EXPLAINED)?;
    let explained: Explained = toml::from_str(&text).context(EXPLAINED)?;
    for accepted in &explained.accepted {
        if accepted.why.trim().is_empty() {
            bail!("{EXPLAINED}: {}: {:?} has no explanation", accepted.file, accepted.change);
        }
    }
    for file in explained.packages.values().flat_map(|package| &package.files) {
        if !root.join(file).is_file() {
            bail!("{EXPLAINED}: there is no file {file}");
        }
    }
    Ok(explained)
}

/// The packages and files that are meant.
fn chosen<'a>(
    all: &'a BTreeMap<String, Package>,
    wanted: &[String],
) -> Result<Vec<(&'a str, Vec<&'a str>)>> {
    let known = |file: &&String| all.values().any(|package| package.files.contains(file));
    if let Some(odd) = wanted.iter().find(|file| !known(file)) {
        bail!("{odd} is not among the files of {EXPLAINED}; add it there, or name one of them");
    }
    let is_wanted = |file: &&str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == file);
    let of =
        |package: &'a Package| package.files.iter().map(String::as_str).filter(is_wanted).collect();
    let packages = all.iter().map(|(name, package)| (name.as_str(), of(package)));
    Ok(packages.filter(|(_, files): &(_, Vec<_>)| !files.is_empty()).collect())
}

/// `1/4` as the first part, 0, of 4.
fn shard(text: &str) -> Result<(usize, usize)> {
    let parts = text.split_once('/').and_then(|(part, of)| {
        let (part, of) = (part.parse().ok()?, of.parse().ok()?);
        (1..=of).contains(&part).then(|| (part - 1, of))
    });
    parts.with_context(|| format!("shard {text:?} is not I/N with I from 1 to N, such as 1/4"))
}

/// The program, brought if it is not there.
fn tool(root: &Path) -> Result<PathBuf> {
    let tools = root.join("target/tools");
    let program = tools.join("bin/cargo-mutants");
    if !program.is_file() {
        let mut install = Command::new(cargo());
        install.args(["install", "--quiet", "--locked", "--debug", "cargo-mutants"]);
        install.args(["--version", VERSION, "--root"]).arg(&tools);
        install.arg("--target-dir").arg(root.join("target/tools-build"));
        if !install.status().context("start cargo install")?.success() {
            bail!("cargo-mutants can't be installed");
        }
    }
    Ok(program)
}

/// Where the time is over it is interrupted, as by a terminal, so that it ends its tests and writes down what it
/// knows.
fn ends(mut command: Command, until: Option<Instant>) -> Result<()> {
    let mut child = command.spawn().context("start cargo-mutants")?;
    let mut ended_early = false;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if !ended_early && until.is_some_and(|until| Instant::now() >= until) {
            ended_early = true;
            let interrupt = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
            if !interrupt.is_ok_and(|status| status.success()) {
                child.kill()?;
            }
        }
        thread::sleep(Duration::from_millis(200));
    };
    // 0: all caught, 2: some missed, 3: some took too long.
    if !ended_early && !matches!(status.code(), Some(0 | 2 | 3)) {
        bail!("cargo-mutants failed: {status}");
    }
    Ok(())
}

/// `file.rs:12:3: replace …` as the file and the change.
fn named(line: &str) -> Result<(String, String)> {
    let parts = line.split_once(": ").map(|(place, change)| {
        let file = place.split_once(':').map_or(place, |(file, _)| file);
        (file.to_owned(), change.to_owned())
    });
    parts.with_context(|| format!("cargo-mutants wrote {line:?}"))
}

fn rate(outcome: &Outcome) -> String {
    let Outcome { caught, timeouts, unviable, missed_count: missed, untried, .. } = outcome;
    let (noticed, all) = (caught + timeouts, caught + timeouts + missed);
    if all == 0 {
        return format!("nothing was tried, {unviable} do not compile, {untried} left");
    }
    format!(
        "{noticed} of {all} changes were noticed ({timeouts} of them by a timeout), {missed} were not: {:.1} %; \
         {unviable} do not compile, for {untried} there was no time",
        f64::from(u32::try_from(noticed).unwrap_or(u32::MAX)) * 100.0
            / f64::from(u32::try_from(all).unwrap_or(u32::MAX))
    )
}

fn judge(accepted: &[Accepted], found: &Outcome) -> ExitCode {
    let why = |missed: &(String, String)| {
        let explains = |known: &&Accepted| known.file == missed.0 && known.change == missed.1;
        accepted.iter().find(explains).map(|known| known.why.as_str())
    };
    let mut code = ExitCode::SUCCESS;
    for missed in &found.missed {
        let (file, change) = missed;
        match why(missed) {
            Some(why) => println!("accepted: {file}: {change}: {why}"),
            None => {
                println!("NOT NOTICED: {file}: {change}");
                code = ExitCode::FAILURE;
            }
        }
    }
    if code != ExitCode::SUCCESS {
        println!("write a test that notices it, or explain in {EXPLAINED} why none can");
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missed(line: &str) -> Outcome {
        let missed = BTreeSet::from([named(line).expect("a line")]);
        Outcome { caught: 2, timeouts: 1, missed, missed_count: 1, ..Outcome::default() }
    }

    #[test]
    fn only_what_is_explained_is_accepted() {
        let found = missed("crates/a/src/b.rs:12:7: replace < with <= in Machine::at");
        assert!(rate(&found).starts_with("3 of 4 changes were noticed"), "{}", rate(&found));
        assert!(rate(&found).contains("75.0 %"), "{}", rate(&found));
        assert_eq!(judge(&[], &found), ExitCode::FAILURE);
        let accept = |file: &str, change: &str| Accepted {
            file: file.to_owned(),
            change: change.to_owned(),
            why: "it is the same".to_owned(),
        };
        let change = "replace < with <= in Machine::at";
        assert_eq!(judge(&[accept("crates/a/src/b.rs", change)], &found), ExitCode::SUCCESS);
        assert_eq!(judge(&[accept("crates/a/src/c.rs", change)], &found), ExitCode::FAILURE);
    }

    #[test]
    fn the_file_is_read_and_its_files_are_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("a workspace");
        let explained = read(root).expect("reads");
        let all = chosen(&explained.packages, &[]).expect("all");
        assert_eq!(all.len(), explained.packages.len());
        let one = explained.packages["coord-core"].files[0].clone();
        let core = chosen(&explained.packages, std::slice::from_ref(&one)).expect("known");
        assert_eq!(core, [("coord-core", vec![one.as_str()])]);
        assert!(chosen(&explained.packages, &["crates/coord-core/src/lib.rs".to_owned()]).is_err());
    }

    #[test]
    fn shards_count_from_one() {
        assert_eq!(shard("1/4").expect("good"), (0, 4));
        assert_eq!(shard("4/4").expect("good"), (3, 4));
        for bad in ["0/4", "5/4", "1", "a/b", ""] {
            assert!(shard(bad).is_err(), "{bad}");
        }
    }
}
