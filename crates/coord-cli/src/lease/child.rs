//! A command that runs only while a lease is held.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use coord::session::LeaseGuard;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

use crate::args::LeaseRunArgs;
use crate::failure::{Failure, code};

/// Runs the command under the guard. The command has ended when this returns, and only then is the
/// lease released.
pub(super) async fn supervise(guard: LeaseGuard, args: &LeaseRunArgs) -> Result<ExitCode, Failure> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut command = match Supervised::start(&guard, args) {
        Ok(command) => command,
        Err(failure) => {
            guard.release().await?;
            return Err(failure);
        }
    };
    let (status, lost) = tokio::select! {
        status = command.child.wait() => (status?, None),
        lost = guard.lost() => (command.stop().await?, Some(lost)),
        _ = interrupt.recv() => (command.stop().await?, None),
        _ = terminate.recv() => (command.stop().await?, None),
    };
    // What the command has left running must not go on without the lease.
    command.tell(Signal::KILL);
    if let Some(lost) = lost {
        let message = format!("the lease {} was lost ({lost}); the command was stopped", args.name);
        return Err(Failure::new(code::DID_NOT_HOLD, message));
    }
    guard.release().await?;
    Ok(exit_code(status))
}

/// The command, and the process group that it leads.
struct Supervised {
    child: Child,
    group: Option<Pid>,
    stop_budget: Duration,
}

impl Supervised {
    fn start(guard: &LeaseGuard, args: &LeaseRunArgs) -> Result<Self, Failure> {
        let Some((program, rest)) = args.command.split_first() else {
            return Err(Failure::input("no command is given after --"));
        };
        let fence = guard.fence();
        let child = Command::new(program)
            .args(rest)
            .env("COORD_LEASE", fence.lease.as_str())
            .env("COORD_TERM", fence.term.to_string())
            .env("COORD_ATTEMPT", fence.attempt.to_string())
            .env("COORD_ORIGIN", fence.origin.as_str())
            // A group of its own, so that what the command has started is stopped with it.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| {
                let code = match error.kind() {
                    io::ErrorKind::NotFound => code::NOT_FOUND,
                    _ => code::NOT_STARTED,
                };
                Failure::new(code, format!("can't start {}: {error}", program.display()))
            })?;
        let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        Ok(Self { child, group, stop_budget: args.stop_budget })
    }

    /// Asks the command and all that it has started to end, and kills it after the budget.
    async fn stop(&mut self) -> io::Result<ExitStatus> {
        self.tell(Signal::TERM);
        if let Ok(status) = timeout(self.stop_budget, self.child.wait()).await {
            return status;
        }
        self.tell(Signal::KILL);
        self.child.wait().await
    }

    /// Sends a signal to the whole group. One that is gone already needs none.
    fn tell(&self, signal: Signal) {
        if let Some(group) = self.group
            && let Err(error) = kill_process_group(group, signal)
            && error != Errno::SRCH
        {
            tracing::warn!(%error, "can't signal the command");
        }
    }
}

/// The command's own exit code; 128 and the signal's number if it was killed, as shells say it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let number = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(number).unwrap_or(1))
}
