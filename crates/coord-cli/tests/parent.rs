//! `coord lease run` as a parent process: what it and its command make of signals, of terminals and of
//! being the first process.

#![cfg(unix)]

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use coord_integration::{Missing, trial, until};
use libtest_mimic::{Arguments, Failed, Trial};

type Done = Result<(), Failed>;

const LIMIT: Duration = Duration::from_secs(20);
/// Says its id, what it hears, and goes on until it is told to stop.
const LISTENS: &str = "for s in 10 12 14 16 26 27 29; do trap \"echo got $s\" $s; done; \
    trap 'echo stopped; exit 3' 15; echo $$; while :; do sleep 0.05; done";

/// When something that is read never comes.
const HANGS: Duration = Duration::from_secs(240);

#[expect(clippy::print_stderr, reason = "nobody else is left to tell it")]
fn main() -> ExitCode {
    std::thread::spawn(|| {
        until(HANGS, || None::<()>);
        eprintln!("the trials hang");
        std::process::exit(101);
    });
    let arguments = Arguments::from_args();
    let here: Result<(), Missing> = Ok(());
    let namespaces = namespaces();
    let terminals = program("script");
    let nohup = program("nohup");
    let trials: Vec<Trial> = vec![
        trial("every_signal_is_passed_on_or_ends_the_command", &here, |()| every_signal()),
        trial("a_killed_coord_takes_its_command_along", &here, |()| killed()),
        trial("a_stopped_command_is_told", &here, |()| stopped()),
        trial("what_a_background_job_ignores_stays_ignored", &here, |()| background()),
        trial("nohup_stays_in_force", &nohup, |()| under_nohup()),
        trial("a_command_in_a_pipe_may_ask_on_the_terminal", &terminals, |()| asks()),
        trial("a_command_in_the_background_that_asks_is_ended", &terminals, |()| asks_in_vain()),
        trial("the_first_process_hears_signals", &namespaces, |()| first_hears()),
        trial("the_first_process_leaves_no_zombies", &namespaces, |()| first_reaps()),
        trial("the_first_process_hands_codes_on", &namespaces, |()| first_codes()),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn program(name: &'static str) -> Result<(), Missing> {
    let found = Command::new(name).arg("--version").output();
    found.map(drop).map_err(|error| Missing::absent(name, format!("it can't be run: {error}")))
}

fn namespaces() -> Result<(), Missing> {
    let made = Command::new("unshare").args(["--pid", "--fork", "true"]).output();
    match made {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(Missing::absent("pid namespaces", format!("this user may not make one: {why}")))
        }
        Err(error) => Err(Missing::absent("pid namespaces", format!("unshare: {error}"))),
    }
}

fn ensure(holds: bool, what: impl std::fmt::Debug) -> Done {
    if holds { Ok(()) } else { Err(format!("{what:?}").into()) }
}

fn lease_run(script: &str) -> Vec<String> {
    let coord = env!("CARGO_BIN_EXE_coord");
    let args =
        [coord, "--backend", "memory://parent", "lease", "run", "x", "--", "sh", "-c", script];
    args.map(str::to_owned).into()
}

/// A coord that runs a command which has said its first line.
struct Running {
    coord: Child,
    lines: BufReader<ChildStdout>,
    told: BufReader<ChildStderr>,
    /// What the command has said: its own id.
    command: i32,
}

impl Running {
    fn start(arguments: &[String]) -> Result<Self, Failed> {
        let [program, rest @ ..] = arguments else { return Err("no program".into()) };
        // A run of these tests under nohup or in the background ignores signals.
        let mut coord = Command::new("env")
            .args(["--default-signal=HUP,INT,QUIT", program])
            .args(rest)
            .env_remove("COORD_BACKEND_FILE")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(coord.stdout.take().ok_or("no output")?);
        let told = BufReader::new(coord.stderr.take().ok_or("no errors")?);
        let mut line = String::new();
        lines.read_line(&mut line)?;
        let command = line.trim().parse().map_err(|_| format!("not an id: {line:?}"))?;
        Ok(Self { coord, lines, told, command })
    }

    fn listening() -> Result<Self, Failed> {
        Self::start(&lease_run(LISTENS))
    }

    fn id(&self) -> i32 {
        i32::try_from(self.coord.id()).unwrap_or(0)
    }

    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// The next line of coord's own that holds this text.
    fn told(&mut self, text: &str) -> Result<String, Failed> {
        let mut all = String::new();
        loop {
            let mut line = String::new();
            if self.told.read_line(&mut line)? == 0 {
                return Err(format!("{text:?} was not told: {all}").into());
            }
            if line.contains(text) {
                return Ok(line);
            }
            all.push_str(&line);
        }
    }

    fn ended(&mut self) -> Result<ExitStatus, Failed> {
        let status = until(LIMIT, || self.coord.try_wait().transpose());
        Ok(status.ok_or("coord does not end")??)
    }

    /// Tells coord to end, and what was said until then on the standard error.
    fn end(mut self) -> Result<(ExitStatus, String), Failed> {
        send(15, self.id())?;
        let status = self.ended()?;
        let mut told = String::new();
        self.told.read_to_string(&mut told)?;
        Ok((status, told))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A trial that failed leaves nothing behind.
        let is_ours = std::fs::read_to_string(format!("/proc/{}/cmdline", self.command));
        if is_ours.is_ok_and(|line| line.contains("sleep")) {
            let _ = send(9, self.command);
        }
        let _ = self.coord.kill();
        let _ = self.coord.wait();
    }
}

fn send(signal: i32, process: i32) -> Done {
    let arguments = [format!("-{signal}"), process.to_string()];
    let sent = Command::new("kill").args(&arguments).stderr(Stdio::null()).status()?;
    ensure(sent.success(), (arguments, sent))
}

/// The letter of a process's state, such as `Z`; none if there is no such process.
fn state(process: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether the process does something, or may again. Nobody here reaps what init gets.
fn is_alive(process: i32) -> bool {
    state(process).is_some_and(|state| state != 'Z' && state != 'X')
}

fn is_gone(process: i32) -> Done {
    let gone = until(LIMIT, || (!is_alive(process)).then_some(()));
    gone.ok_or_else(|| format!("{process} is {:?}", state(process)).into())
}

fn every_signal() -> Done {
    // Left out: those that stop, continue or are ignored by default, and those of the C library.
    let ignored = [13, 17, 18, 19, 20, 21, 22, 23, 28, 32, 33];
    let signals: Vec<i32> = (1..=64).filter(|signal| !ignored.contains(signal)).collect();
    let failures: Vec<String> = std::thread::scope(|scope| {
        let parts: Vec<_> = signals
            .chunks(9)
            .map(|part| {
                scope.spawn(move || {
                    let failed = |signal: &i32| {
                        let failure = one_signal(*signal).err()?;
                        Some(format!("signal {signal}: {}", failure.message().unwrap_or_default()))
                    };
                    part.iter().filter_map(failed).collect::<Vec<_>>()
                })
            })
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap_or_default()).collect()
    });
    ensure(failures.is_empty(), failures)
}

fn one_signal(signal: i32) -> Done {
    let mut running = Running::listening()?;
    let command = running.command;
    send(signal, running.id())?;
    match signal {
        // For the command.
        10 | 12 | 14 | 16 | 26 | 27 | 29 => {
            let heard = running.line()?;
            ensure(heard == format!("got {signal}"), heard)?;
            let (status, told) = running.end()?;
            // The shell would say so if its own child had got the signal as well.
            ensure(status.code() == Some(3) && !told.contains("signal"), (status, told))?;
        }
        // These tell of a fault, of which Rust takes two for its own: coord may survive one that was
        // sent. If it ends, so does the command.
        4 | 5 | 6 | 7 | 8 | 11 | 31 => {
            if is_alive(running.id()) {
                // Whether or not it is about to end.
                let _ = send(9, running.id());
            }
            let status = running.ended()?;
            ensure(status.signal().is_some(), status)?;
        }
        9 => {
            let status = running.ended()?;
            ensure(status.signal() == Some(9), status)?;
        }
        _ => {
            let heard = running.line()?;
            let status = running.ended()?;
            ensure(heard == "stopped" && status.code() == Some(3), (heard, status))?;
        }
    }
    is_gone(command)
}

fn killed() -> Done {
    // A command that hears nothing and ends by nothing else.
    let mut running =
        Running::start(&lease_run("trap '' 1 2 15; echo $$; while :; do sleep 0.05; done"))?;
    send(9, running.id())?;
    running.ended()?;
    is_gone(running.command)
}

fn stopped() -> Done {
    let mut running = Running::listening()?;
    send(19, running.command)?;
    let line = running.told("stopped by SIGSTOP")?;
    ensure(line.contains("stays held"), line)?;
    send(18, running.command)?;
    running.told("goes on")?;
    let (status, told) = running.end()?;
    ensure(status.code() == Some(3), (status, told))
}

/// A shell without job control lets its background jobs ignore what the terminal's keys send.
fn background() -> Done {
    let job = "\"$@\" & wait";
    let arguments: Vec<String> = ["sh", "-c", job, "sh"].map(str::to_owned).into();
    let mut running = Running::start(&[arguments, lease_run("echo $$; exec sleep 60")].concat())?;
    let coord = parent_of(running.command)?;
    for signal in [2, 3] {
        ensure(ignores(coord, signal)? && ignores(running.command, signal)?, signal)?;
        send(signal, coord)?;
        send(signal, running.command)?;
    }
    // What was sent before is dealt with by then.
    send(15, coord)?;
    let status = running.ended()?;
    ensure(status.success(), status)?;
    is_gone(running.command)
}

fn under_nohup() -> Done {
    let arguments = [vec!["nohup".to_owned()], lease_run(LISTENS)].concat();
    let mut running = Running::start(&arguments)?;
    ensure(ignores(running.id(), 1)? && ignores(running.command, 1)?, "it does not ignore SIGHUP")?;
    send(1, running.id())?;
    send(10, running.id())?;
    let heard = running.line()?;
    ensure(heard == "got 10", heard)?;
    let (status, told) = running.end()?;
    ensure(status.code() == Some(3), (status, told))
}

fn parent_of(process: i32) -> Result<i32, Failed> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
    parent.ok_or_else(|| stat.into())
}

fn ignores(process: i32, signal: i32) -> Result<bool, Failed> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).ok_or("no mask")?;
    Ok(u64::from_str_radix(mask.trim(), 16)? >> (signal - 1) & 1 == 1)
}

/// Runs a shell's script at a terminal of its own, into which this line is typed: what the terminal shows,
/// and how the script ended. The script finds coord and the rest of its arguments in `$RUN`.
fn at_a_terminal(script: &str, run: &str, typed: &str) -> Result<(String, ExitStatus), Failed> {
    let run =
        format!("{} --backend memory://parent lease run x {run}", env!("CARGO_BIN_EXE_coord"));
    let script = script.replace("$RUN", &run);
    let mut terminal = Command::new("timeout")
        .args([
            "--kill-after=1",
            "20",
            "script",
            "--quiet",
            "--return",
            "--command",
            &script,
            "/dev/null",
        ])
        .env_remove("COORD_BACKEND_FILE")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    // It stays in the terminal until somebody reads it.
    let mut keys = terminal.stdin.take().ok_or("no input")?;
    std::io::Write::write_all(&mut keys, typed.as_bytes())?;
    let output = terminal.wait_with_output()?;
    drop(keys);
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), output.status))
}

fn asks() -> Done {
    let run = "--ttl 2s -- sh -c 'read piped; read typed < /dev/tty; echo \"<$piped $typed>\"'";
    let (shown, status) = at_a_terminal("echo piped | $RUN", run, "typed\n")?;
    ensure(shown.contains("<piped typed>") && status.success(), (shown, status))
}

fn asks_in_vain() -> Done {
    let run = "-- sh -c 'read typed < /dev/tty; echo \"<$typed>\"'";
    let script = "set -m; $RUN & wait $!; echo \"code $?\"";
    let (shown, status) = at_a_terminal(script, run, "typed\n")?;
    let told = shown.contains("asks for the terminal (SIGTTIN)") && shown.contains("code 143");
    ensure(told && !shown.contains("<typed>"), (shown, status))
}

/// Runs coord as the first process of a namespace; its id outside of that.
fn first(script: &str) -> Result<(Running, i32), Failed> {
    let unshare: Vec<String> = ["unshare", "--pid", "--fork"].map(str::to_owned).into();
    // Its id inside says nothing here.
    let script = format!("echo 0; {script}");
    let running = Running::start(&[unshare, lease_run(&script)].concat())?;
    let children = format!("/proc/{0}/task/{0}/children", running.id());
    let first = until(LIMIT, || std::fs::read_to_string(&children).ok()?.trim().parse().ok());
    Ok((running, first.ok_or("unshare has no child")?))
}

fn first_hears() -> Done {
    for signal in [15, 2, 1, 3, 10] {
        let (mut running, first) = first(&LISTENS.replace("echo $$", "echo up"))?;
        ensure(running.line()? == "up", "it does not begin")?;
        send(signal, first)?;
        let right = if signal == 10 { "got 10" } else { "stopped" };
        let heard = running.line()?;
        ensure(heard == right, (signal, heard))?;
        if signal == 10 {
            send(15, first)?;
        }
        let status = running.ended()?;
        ensure(status.code() == Some(3), (signal, status))?;
        is_gone(first)?;
    }
    Ok(())
}

fn first_reaps() -> Done {
    // Each orphan ends after its own parent has.
    let orphans =
        "for n in 1 2 3 4 5; do sh -c 'sleep 0.1 & echo orphan' ; done; echo done; exec sleep 60";
    let (mut running, first) = first(orphans)?;
    while running.line()? != "done" {}
    let children = format!("/proc/{first}/task/{first}/children");
    let left = || -> Option<Vec<i32>> {
        let children = std::fs::read_to_string(&children).ok()?;
        Some(children.split_whitespace().filter_map(|id| id.parse().ok()).collect())
    };
    // What is left is the one that coord runs itself as.
    let reaped = until(LIMIT, || left().filter(|left| left.len() == 1));
    ensure(
        reaped.is_some(),
        left().unwrap_or_default().into_iter().map(state).collect::<Vec<_>>(),
    )?;
    send(15, first)?;
    let status = running.ended()?;
    ensure(status.code() == Some(143), status)
}

fn first_codes() -> Done {
    for (script, code) in [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)] {
        let (mut running, _) = first(&format!("sleep 0.2; {script}"))?;
        let status = running.ended()?;
        ensure(status.code() == Some(code), (script, status))?;
    }
    Ok(())
}
