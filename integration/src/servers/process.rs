//! A child process that can't outlive the test.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

/// Waits for the end of its standard input, which comes when the test process is gone, however it went;
/// then it kills the group and removes the folder.
const GUARDIAN: &str =
    r#"trap "" INT TERM HUP; read -r _; kill -s KILL -- "-$1"; [ -z "$2" ] || rm -rf -- "$2""#;
const TAIL_LINES: usize = 40;

/// A child process in a group of its own, with its output in a log file: a server, or a program of ours
/// that a scenario pauses and kills. Dropped, it is killed with all its children. If the test process
/// itself is killed, a guardian does that.
#[derive(Debug)]
pub struct Process {
    child: Child,
    guardian: Child,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts it. Both its outputs are appended to the file `log`.
    ///
    /// # Errors
    /// The log can't be written, or there is no such program.
    pub fn spawn(command: Command, log: &Path) -> io::Result<Self> {
        Self::spawn_in(command, log, None)
    }

    /// The same, with a pipe to its standard input.
    ///
    /// # Errors
    /// As for [`spawn`](Self::spawn).
    pub fn spawn_piped(command: Command, log: &Path) -> io::Result<(Self, ChildStdin)> {
        let mut process = Self::spawn_with(command, log, None, Stdio::piped())?;
        let input = process.child.stdin.take();
        Ok((process, input.ok_or_else(|| io::Error::other("no pipe"))?))
    }

    /// The same as `spawn`; the guardian also removes `folder`.
    pub(super) fn spawn_in(
        command: Command,
        log: &Path,
        folder: Option<&Path>,
    ) -> io::Result<Self> {
        Self::spawn_with(command, log, folder, Stdio::null())
    }

    fn spawn_with(
        mut command: Command,
        log: &Path,
        folder: Option<&Path>,
        input: Stdio,
    ) -> io::Result<Self> {
        let out = OpenOptions::new().create(true).append(true).open(log)?;
        command.stdin(input).stdout(out.try_clone()?).stderr(out).process_group(0);
        let mut child = command.spawn()?;
        let guardian = Command::new("sh")
            .args(["-c", GUARDIAN, "guardian", &child.id().to_string()])
            .arg(folder.unwrap_or(Path::new("")))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        match guardian {
            Ok(guardian) => Ok(Self { child, guardian, log: log.to_owned(), ended: None }),
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(error)
            }
        }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it did.
    ///
    /// # Errors
    /// The system can't say.
    pub fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    /// Waits for its end, `limit` at most. Blocks the thread.
    ///
    /// # Errors
    /// It still runs, or the system can't say.
    pub fn wait(&mut self, limit: Duration) -> io::Result<ExitStatus> {
        crate::until(limit, || self.ended().transpose())
            .unwrap_or_else(|| Err(io::Error::new(io::ErrorKind::TimedOut, "it still runs")))
    }

    /// Stops it where it is (SIGSTOP), until [`resume`](Self::resume).
    ///
    /// # Errors
    /// It has ended.
    pub fn pause(&mut self) -> io::Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets it go on (SIGCONT).
    ///
    /// # Errors
    /// It has ended.
    pub fn resume(&mut self) -> io::Result<()> {
        self.signal(Signal::CONT)
    }

    /// Asks it to end (SIGTERM); [`wait`](Self::wait) sees whether it did.
    ///
    /// # Errors
    /// It has ended.
    pub fn terminate(&mut self) -> io::Result<()> {
        self.signal(Signal::TERM)
    }

    /// Kills it with all its children (SIGKILL) and waits until it is gone.
    ///
    /// # Errors
    /// The system refuses.
    pub fn kill(&mut self) -> io::Result<()> {
        if self.ended()?.is_none() {
            self.signal(Signal::KILL)?;
            self.ended = Some(self.child.wait()?);
        }
        Ok(())
    }

    /// The file that its outputs go to.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Waits, `limit` at most, until a line of the log holds `text`, and returns that line. Blocks the
    /// thread.
    ///
    /// # Errors
    /// There is no such line, with what there is.
    pub fn wait_for_line(&mut self, text: &str, limit: Duration) -> io::Result<String> {
        let log = self.log.clone();
        let line = || {
            let lines = std::fs::read_to_string(&log).ok()?;
            lines.lines().find(|line| line.contains(text)).map(str::to_owned)
        };
        crate::until(limit, line).ok_or_else(|| {
            let said = tail(&self.log);
            io::Error::new(io::ErrorKind::TimedOut, format!("no line with {text:?} in:\n{said}"))
        })
    }

    /// Whether this very process listens on the port. Something else may: a server that another test
    /// started, or that runs on this machine anyway.
    pub(super) fn listens_on(&self, port: u16) -> bool {
        listening::socket(self.id(), port)
    }

    fn signal(&mut self, signal: Signal) -> io::Result<()> {
        // A child that was waited for has given its id back: another process may have it by now.
        if self.ended()?.is_some() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the process has ended"));
        }
        let id = i32::try_from(self.id()).ok().and_then(Pid::from_raw);
        let id = id.ok_or_else(|| io::Error::other("not a process id"))?;
        Ok(kill_process_group(id, signal)?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The child is waited for last: until then nobody else can get its id, which is the group's.
        let group = i32::try_from(self.id()).ok().and_then(Pid::from_raw);
        if let (None, Some(group)) = (self.ended, group) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.guardian.kill();
        let _ = self.guardian.wait();
        let _ = self.child.wait();
    }
}

/// The last lines of a log.
pub(super) fn tail(log: &Path) -> String {
    use std::io::{Read as _, Seek as _, SeekFrom};
    const TAIL_BYTES: u64 = 16 << 10;
    let read = || -> io::Result<String> {
        let mut file = File::open(log)?;
        let from = file.metadata()?.len().saturating_sub(TAIL_BYTES);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_else(|error| format!("{}: {error}", log.display()));
    last_lines(&text)
}

pub(super) fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(target_os = "linux")]
pub(super) mod listening {
    use std::fs;

    /// The state of a listening socket in `/proc/net/tcp`.
    const LISTEN: &str = "0A";

    pub(in crate::servers) fn socket(process: u32, port: u16) -> bool {
        let tables = ["tcp", "tcp6"].map(|name| format!("/proc/{process}/net/{name}"));
        let tables = tables.map(|table| fs::read_to_string(table).unwrap_or_default());
        let wanted: Vec<String> = tables
            .iter()
            .flat_map(|table| table.lines())
            .filter_map(|row| inode(row, port))
            .collect();
        let Ok(files) = fs::read_dir(format!("/proc/{process}/fd")) else { return false };
        files.flatten().filter_map(|file| fs::read_link(file.path()).ok()).any(|target| {
            target.to_str().is_some_and(|target| wanted.iter().any(|socket| socket == target))
        })
    }

    /// `socket:[inode]` of a row that listens on the port.
    fn inode(row: &str, port: u16) -> Option<String> {
        let columns: Vec<&str> = row.split_whitespace().collect();
        let (local, state, inode) = (columns.get(1)?, columns.get(3)?, columns.get(9)?);
        let (_, local_port) = local.rsplit_once(':')?;
        let fits = *state == LISTEN && u16::from_str_radix(local_port, 16) == Ok(port);
        fits.then(|| format!("socket:[{inode}]"))
    }
}

/// Where the system can't be asked, a process that lives on after its port was found free has it.
#[cfg(not(target_os = "linux"))]
pub(super) mod listening {
    pub(in crate::servers) fn socket(_process: u32, _port: u16) -> bool {
        true
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_belongs_to_the_process_that_listens() {
        let mine = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = mine.local_addr().expect("it is bound").port();
        assert!(listening::socket(std::process::id(), port));
        let log = tempfile::NamedTempFile::new().expect("a file");
        let mut sleep = Command::new("sleep");
        sleep.arg("600");
        let other = Process::spawn(sleep, log.path()).expect("it starts");
        assert!(!other.listens_on(port));
        drop(mine);
        assert!(!listening::socket(std::process::id(), port));
    }
}
