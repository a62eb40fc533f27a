//! A command that runs only while a lease is held.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use coord::session::LeaseGuard;
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
    let mut child = match start(&guard, args) {
        Ok(child) => child,
        Err(failure) => {
            guard.release().await?;
            return Err(failure);
        }
    };
    let (status, lost) = tokio::select! {
        status = child.wait() => (status?, None),
        lost = guard.lost() => (stop(&mut child, args.stop_budget).await?, Some(lost)),
        _ = interrupt.recv() => (stop(&mut child, args.stop_budget).await?, None),
        _ = terminate.recv() => (stop(&mut child, args.stop_budget).await?, None),
    };
    if let Some(lost) = lost {
        let message = format!("the lease {} was lost ({lost}); the command was stopped", args.name);
        return Err(Failure::new(code::DID_NOT_HOLD, message));
    }
    guard.release().await?;
    Ok(exit_code(status))
}

fn start(guard: &LeaseGuard, args: &LeaseRunArgs) -> Result<Child, Failure> {
    let Some((program, rest)) = args.command.split_first() else {
        return Err(Failure::input("no command is given after --"));
    };
    let fence = guard.fence();
    Command::new(program)
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
        })
}

/// Asks the command and all that it has started to end, and kills what is left after the budget.
async fn stop(child: &mut Child, budget: Duration) -> Result<ExitStatus, Failure> {
    let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    // A group that is gone already needs no signal.
    let tell = |signal| group.map(|group| kill_process_group(group, signal));
    tell(Signal::TERM);
    if let Ok(status) = timeout(budget, child.wait()).await {
        let status = status?;
        tell(Signal::KILL);
        return Ok(status);
    }
    tell(Signal::KILL);
    Ok(child.wait().await?)
}

/// The command's own exit code; 128 and the signal's number if it was killed, as shells say it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let number = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(number).unwrap_or(1))
}
