//! The command that runs under a lease: how it is started, signalled and waited for.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use coord::Fence;
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process, kill_process_group, waitid,
};
use tokio::signal::unix::{self, SignalKind};

use super::machine::Input;
use crate::args::LeaseRunArgs;
use crate::exec;
use crate::failure::{Failure, code};

/// What a command may do without ending.
const CHANGED: WaitIdOptions = WaitIdOptions::STOPPED.union(WaitIdOptions::CONTINUED);

/// The command, and the process group that its signals go to.
pub(super) struct Child {
    id: Pid,
    pub(super) own_group: bool,
    /// Something has changed with a child of this process.
    changes: unix::Signal,
    /// What it ended with. It is not reaped before it is dropped, so that its id stays its own.
    ended: Option<i32>,
}

impl Child {
    /// Starts the command with the fence in its environment.
    pub(super) fn start(fence: &Fence, args: &LeaseRunArgs, url: &str) -> Result<Self, Failure> {
        let Some((program, rest)) = args.command.split_first() else {
            return Err(Failure::input("no command is given after --"));
        };
        let changes = unix::signal(SignalKind::child())?;
        let mut command = exec::command(program, rest);
        command
            .env("COORD_LEASE", fence.lease.as_str())
            .env("COORD_TERM", fence.term.to_string())
            .env("COORD_ATTEMPT", fence.attempt.to_string())
            .env("COORD_ORIGIN", fence.origin.as_str())
            // It may hold a password, and what the command starts would have it as well.
            .env_remove("COORD_BACKEND");
        if args.pass_backend {
            command.env("COORD_BACKEND", url);
        }
        // A group of its own, so that what the command has started is stopped with it. In the foreground
        // of a terminal it stays in this one: only then may it use the terminal, and the terminal's own
        // keys reach both.
        let own_group = !in_foreground();
        if own_group {
            command.process_group(0);
        }
        let child = command.spawn().map_err(|error| {
            Failure::new(exec::code_of(&error), exec::not_started(program, &error))
        })?;
        Ok(Self { id: Pid::from_child(&child), own_group, changes, ended: None })
    }

    /// The next change of the command. `held` tells, at the moment of its end, whether the lease is.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn changed(&mut self, held: impl Fn() -> bool) -> io::Result<Input> {
        loop {
            // Left to be waited for: until then a signal to its id can reach no other process.
            let any = WaitIdOptions::EXITED | CHANGED | WaitIdOptions::NOWAIT;
            match self.look(any)? {
                Some(status) if status.exited() || status.killed() || status.dumped() => {
                    let killed = status.terminating_signal().map(|signal| 128 + signal);
                    self.ended = status.exit_status().or(killed).or(Some(1));
                    return Ok(Input::Ended { held: held() });
                }
                Some(_) => match self.look(CHANGED) {
                    Ok(Some(status)) => {
                        return Ok(status
                            .stopping_signal()
                            .map_or(Input::Continued, Input::Stopped));
                    }
                    // It goes on or has ended since.
                    Ok(None) => continue,
                    Err(error) if error.raw_os_error() == Some(Errno::CHILD.raw_os_error()) => {
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                None => {}
            }
            self.changes.recv().await;
        }
    }

    fn look(&self, what: WaitIdOptions) -> io::Result<Option<WaitIdStatus>> {
        Ok(waitid(WaitId::Pid(self.id), what | WaitIdOptions::NOHANG)?)
    }

    /// Sends a signal to the whole group, or to the command alone where it has none.
    pub(super) fn send(&self, signal: i32) {
        self.signal(signal, if self.own_group { kill_process_group } else { kill_process });
    }

    /// Sends a signal to the command alone.
    pub(super) fn pass_on(&self, signal: i32) {
        self.signal(signal, kill_process);
    }

    /// What is gone already needs no signal.
    fn signal(&self, signal: i32, kill: fn(Pid, Signal) -> rustix::io::Result<()>) {
        let Some(signal) = Signal::from_named_raw(signal) else { return };
        match kill(self.id, signal) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => tracing::warn!(%error, "can't signal the command"),
        }
    }

    /// The command's own exit code once it has ended; 128 and the signal's number if it was killed, as
    /// shells say it.
    pub(super) fn code(&self) -> ExitCode {
        code::of(self.ended)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // An error left it running.
            self.send(Signal::KILL.as_raw());
        }
        // It has ended or is about to; if it can't be waited for here, it can't be waited for at all.
        let _ = waitid(WaitId::Pid(self.id), WaitIdOptions::EXITED);
    }
}

/// Whether this process is in the foreground of its terminal, as a shell's foreground job is.
#[cfg(target_os = "linux")]
fn in_foreground() -> bool {
    // Asked through /proc, since a group whose leader is outside this namespace has the id 0.
    std::fs::read_to_string("/proc/self/stat").is_ok_and(|stat| stat_in_foreground(&stat))
}

#[cfg(not(target_os = "linux"))]
fn in_foreground() -> bool {
    let terminal = std::fs::File::open("/dev/tty");
    terminal.is_ok_and(|terminal| {
        rustix::termios::tcgetpgrp(&terminal)
            .is_ok_and(|foreground| foreground == rustix::process::getpgrp())
    })
}

#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux has /proc/self/stat"))]
fn stat_in_foreground(stat: &str) -> bool {
    // The program's name stands in parentheses and may hold anything.
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let mut fields = fields.split_whitespace().skip(2);
    let (group, _session) = (fields.next(), fields.next());
    let (terminal, foreground) = (fields.next(), fields.next());
    terminal.is_some_and(|terminal| terminal != "0") && group.is_some() && group == foreground
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_foreground_is_told_by_the_terminal_and_not_by_the_input() {
        for (stat, is) in [
            ("7 (coord) S 1 7 7 34816 7 4194304 1", true),
            ("7 (a) b 0 ) S 1 7 7 34816 7 4194304 1", true),
            ("7 (coord) S 1 7 5 34816 5 4194304 1", false),
            ("7 (coord) S 1 7 7 0 -1 4194304 1", false),
            ("7 (coord) S 1 0 0 34816 0 4194304 1", true),
            ("", false),
            ("7 (coord) S", false),
        ] {
            assert_eq!(stat_in_foreground(stat), is, "{stat}");
        }
    }
}
