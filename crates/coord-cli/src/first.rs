//! What coord does as the first process of a container or another process namespace: the kernel gives it
//! the orphans of all others, and no signal that it does not take. It runs itself as a child, passes
//! signals on to that and reaps what is left to it.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};
use tokio::signal::unix::{SignalKind, signal};

use crate::exec;
use crate::failure::code;
use crate::signals::Signals;

/// Runs coord as a child if this is the first process; none if it is not, or if that can't be done.
pub(crate) fn run() -> Option<ExitCode> {
    if std::process::id() != 1 || !Path::new(exec::SELF).exists() {
        return None;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    runtime.block_on(watch_over())
}

/// Starts coord once more with the same arguments.
fn start() -> Option<Child> {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| "coord".into());
    Command::new(exec::SELF).arg0(name).args(arguments).spawn().ok()
}

async fn watch_over() -> Option<ExitCode> {
    let mut signals = Signals::take().ok()?;
    let mut changes = signal(SignalKind::child()).ok()?;
    let child = Pid::from_child(&start()?);
    loop {
        tokio::select! {
            biased;
            told = signals.next() => {
                if let Some(signal) = Signal::from_named_raw(told).or(Some(Signal::TERM)) {
                    // One that has ended already needs no signal.
                    let _ = kill_process(child, signal);
                }
            }
            _ = changes.recv() => {
                while let Ok(Some((process, status))) = wait(WaitOptions::NOHANG) {
                    if process == child {
                        let killed = status.terminating_signal().map(|signal| 128 + signal);
                        return Some(code::of(status.exit_status().or(killed)));
                    }
                }
            }
        }
    }
}
