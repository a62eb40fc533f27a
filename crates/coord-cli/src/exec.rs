//! Between coord and its command: the child asks the kernel to end it with its parent, and becomes the
//! command. Only the child itself can ask for that.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use crate::failure::code;

/// The running program, also where its file was replaced meanwhile.
pub(crate) const SELF: &str = "/proc/self/exe";
/// The first argument of a child that becomes a command: the parent's id, the command and its arguments
/// follow.
const WORD: &str = "--become-the-command-of";

/// The command, to be run so that it ends with this process where the system can do that. It ends with
/// the thread that starts it, which has to be the main thread therefore.
pub(crate) fn command(program: &OsString, arguments: &[OsString]) -> Command {
    if cfg!(target_os = "linux") && Path::new(SELF).exists() {
        let mut command = Command::new(SELF);
        command.arg0("coord").arg(WORD).arg(std::process::id().to_string());
        command.arg(program).args(arguments);
        return command;
    }
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

/// Becomes the command if the arguments say so; returns only if they don't, or if it can't be started.
pub(crate) fn become_the_command() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|word| word != WORD) {
        return None;
    }
    let parent = arguments.next()?.to_str()?.parse().ok()?;
    let program = arguments.next()?;
    if !ends_with(parent) {
        return Some(ExitCode::from(code::NOT_STARTED));
    }
    let error = Command::new(&program).args(arguments).exec();
    // Nothing can be done about a standard error that can't be written to.
    let _ = writeln!(io::stderr(), "coord: {}", not_started(&program, &error));
    Some(ExitCode::from(code_of(&error)))
}

pub(crate) fn not_started(program: &OsString, error: &io::Error) -> String {
    format!("can't start {}: {error}", program.display())
}

pub(crate) fn code_of(error: &io::Error) -> u8 {
    match error.kind() {
        io::ErrorKind::NotFound => code::NOT_FOUND,
        _ => code::NOT_STARTED,
    }
}

/// Whether this process now ends when that parent does; false if the parent has ended already.
#[cfg(target_os = "linux")]
fn ends_with(parent: i32) -> bool {
    use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
    // Where the kernel refuses, the command runs as it would elsewhere.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    Pid::as_raw(getppid()) == parent
}

#[cfg(not(target_os = "linux"))]
fn ends_with(_parent: i32) -> bool {
    true
}
