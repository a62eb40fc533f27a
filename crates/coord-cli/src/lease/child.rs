//! A command that runs only while a lease is held.

use std::io::{self, IsTerminal as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use coord::session::LeaseGuard;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::process::{Child, Command};
use tokio::signal::unix::{self, SignalKind};
use tokio::time::timeout;

use crate::args::LeaseRunArgs;
use crate::failure::{Failure, code};

/// Runs the command under the guard. The command has ended when this returns, and only then is the
/// lease released.
pub(super) async fn supervise(
    guard: LeaseGuard,
    args: &LeaseRunArgs,
    stop_budget: Duration,
) -> Result<ExitCode, Failure> {
    let mut told = Told::new()?;
    let mut command = match Supervised::start(&guard, args, stop_budget) {
        Ok(command) => command,
        Err(failure) => {
            guard.release().await?;
            return Err(failure);
        }
    };
    let (status, how) = tokio::select! {
        biased;
        _ = guard.lost() => (command.stop().await?, "was stopped"),
        status = command.child.wait() => (status?, "ended by itself, too late"),
        () = told.stop_wanted() => (command.stop().await?, "was stopped"),
    };
    // What the command has left running must not go on without the lease.
    command.tell(Signal::KILL);
    // A process that was paused finds everything ready at once: the clock tells what came first.
    if !guard.is_held() {
        let lost = guard.lost().await;
        let message = format!("the lease {} was lost ({lost}); the command {how}", args.name);
        return Err(Failure::new(code::DID_NOT_HOLD, message));
    }
    if let Err(error) = guard.release().await {
        // The command has done its work all the same, and its code is the one that is wanted.
        let name = &args.name;
        let note =
            format!("coord: note: {name} could not be released and ends by its ttl: {error}");
        writeln!(io::stderr(), "{note}")?;
    }
    Ok(exit_code(status))
}

/// The signals by which this process is told to stop.
struct Told([unix::Signal; 4]);

impl Told {
    fn new() -> io::Result<Self> {
        let [interrupt, terminate, hangup, quit] = [
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
            SignalKind::quit(),
        ]
        .map(unix::signal);
        Ok(Self([interrupt?, terminate?, hangup?, quit?]))
    }

    async fn stop_wanted(&mut self) {
        let [interrupt, terminate, hangup, quit] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
            _ = quit.recv() => {}
        }
    }
}

/// The command, and whom its signals go to.
struct Supervised {
    child: Child,
    id: Option<Pid>,
    own_group: bool,
    stop_budget: Duration,
}

impl Supervised {
    fn start(
        guard: &LeaseGuard,
        args: &LeaseRunArgs,
        stop_budget: Duration,
    ) -> Result<Self, Failure> {
        let Some((program, rest)) = args.command.split_first() else {
            return Err(Failure::input("no command is given after --"));
        };
        let fence = guard.fence();
        let mut command = Command::new(program);
        command
            .args(rest)
            .env("COORD_LEASE", fence.lease.as_str())
            .env("COORD_TERM", fence.term.to_string())
            .env("COORD_ATTEMPT", fence.attempt.to_string())
            .env("COORD_ORIGIN", fence.origin.as_str())
            .kill_on_drop(true);
        // A group of its own, so that what the command has started is stopped with it. At a terminal it
        // stays in this one: only then may it read, and the terminal's own keys reach both.
        let own_group = !io::stdin().is_terminal();
        if own_group {
            command.process_group(0);
        }
        let child = command.spawn().map_err(|error| {
            let code = match error.kind() {
                io::ErrorKind::NotFound => code::NOT_FOUND,
                _ => code::NOT_STARTED,
            };
            Failure::new(code, format!("can't start {}: {error}", program.display()))
        })?;
        let id = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        Ok(Self { child, id, own_group, stop_budget })
    }

    /// Asks the command and all that it has started to end, and kills it after the budget.
    async fn stop(&mut self) -> io::Result<ExitStatus> {
        self.tell(Signal::TERM);
        // One that is stopped hears nothing else before it goes on.
        self.tell(Signal::CONT);
        if let Ok(status) = timeout(self.stop_budget, self.child.wait()).await {
            return status;
        }
        self.tell(Signal::KILL);
        self.child.wait().await
    }

    /// Sends a signal to the whole group, or to the command alone where it has none. What is gone
    /// already needs no signal.
    fn tell(&self, signal: Signal) {
        let Some(id) = self.id else { return };
        let sent = if self.own_group {
            kill_process_group(id, signal)
        } else if self.child.id().is_some() {
            kill_process(id, signal)
        } else {
            Ok(())
        };
        match sent {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => tracing::warn!(%error, "can't signal the command"),
        }
    }
}

/// The command's own exit code; 128 and the signal's number if it was killed, as shells say it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let number = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(number).unwrap_or(1))
}
