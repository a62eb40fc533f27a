//! The wall clock of one process, moved.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::Missing;

/// Moves the wall clock of the processes that it was [given to](Self::give), by `libfaketime`. Their
/// monotonic clock, and with it tokio's timers, goes on as it did.
///
/// The library is the one that `COORD_TEST_LIBFAKETIME` names, else the one in the servers' folder, else
/// Debian's. It has no effect on programs that ask the kernel without the C library: those in Go, for one.
#[derive(Debug)]
pub struct Clock {
    library: PathBuf,
    offset: PathBuf,
    _folder: TempDir,
}

impl Clock {
    /// A clock that is right until it [jumps](Self::jump).
    ///
    /// # Errors
    /// The library is not on this machine.
    pub fn new() -> Result<Self, Missing> {
        let library = library()?;
        let broken = |error: io::Error| Missing::broken("libfaketime", error.to_string());
        let folder = tempfile::Builder::new().prefix("coord-clock-").tempdir().map_err(broken)?;
        let clock = Self { library, offset: folder.path().join("offset"), _folder: folder };
        clock.jump(0).map_err(broken)?;
        Ok(clock)
    }

    /// Gives this clock to a process that is about to start.
    pub fn give(&self, command: &mut Command) {
        command.envs(self.variables());
    }

    /// The variables that a process with this clock is started with.
    #[must_use]
    pub fn variables(&self) -> [(OsString, OsString); 4] {
        [
            ("LD_PRELOAD".into(), self.library.clone().into()),
            ("FAKETIME_TIMESTAMP_FILE".into(), self.offset.clone().into()),
            ("FAKETIME_NO_CACHE".into(), "1".into()),
            ("FAKETIME_DONT_FAKE_MONOTONIC".into(), "1".into()),
        ]
    }

    /// Sets it to so many seconds after (or before) the real time, also for processes that run.
    ///
    /// # Errors
    /// The file that says so can't be written.
    pub fn jump(&self, seconds: i64) -> io::Result<()> {
        // In one step: a process reads it whenever it looks at its clock.
        let fresh = self.offset.with_extension("new");
        fs::write(&fresh, format!("{seconds:+}\n"))?;
        fs::rename(fresh, &self.offset)
    }
}

fn library() -> Result<PathBuf, Missing> {
    if let Some(path) = std::env::var_os("COORD_TEST_LIBFAKETIME") {
        return Ok(path.into());
    }
    let folder = crate::servers::folder();
    let debian =
        Path::new("/usr/lib").join(format!("{}-linux-gnu/faketime", std::env::consts::ARCH));
    let candidates = [&folder, &debian].map(|folder| folder.join("libfaketime.so.1"));
    candidates.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        let reason = "COORD_TEST_LIBFAKETIME is not set, and neither the servers' folder nor the \
                      system has it; .ci/servers brings it";
        Missing::absent("libfaketime", reason)
    })
}
