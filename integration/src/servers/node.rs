//! One server process that can be broken and started again on the same data.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::Login;
use super::container::Container;
use super::process::{Process, last_lines, tail};

/// How long a server may take until it serves.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// One process of a [`Server`](super::Server), perhaps in a container. Its methods block the thread, for a moment (`pause`,
/// `resume`, `kill`) or until the server serves again (`start`): call `start` through `spawn_blocking`
/// where something else runs on the same thread.
#[derive(Debug)]
pub struct Node {
    program: Program,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
enum Running {
    Process(Process),
    Container(Container),
}

impl Running {
    fn has_ended(&mut self) -> io::Result<bool> {
        match self {
            Self::Process(process) => Ok(process.ended()?.is_some()),
            Self::Container(container) => container.has_ended(),
        }
    }

    fn id(&self) -> u32 {
        match self {
            Self::Process(process) => process.id(),
            Self::Container(container) => container.id(),
        }
    }

    fn pause(&mut self) -> io::Result<()> {
        match self {
            Self::Process(process) => process.pause(),
            Self::Container(container) => container.signal("SIGSTOP"),
        }
    }

    fn resume(&mut self) -> io::Result<()> {
        match self {
            Self::Process(process) => process.resume(),
            Self::Container(container) => container.signal("SIGCONT"),
        }
    }

    fn kill(&mut self) -> io::Result<()> {
        match self {
            Self::Process(process) => process.kill(),
            Self::Container(container) => container.kill(),
        }
    }

    fn listens_on(&self, port: u16) -> bool {
        match self {
            Self::Process(process) => process.listens_on(port),
            Self::Container(container) => container.listens_on(port),
        }
    }
}

/// Where a program comes from.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Program(PathBuf),
    /// The program of that name in this image.
    Image(String, &'static str),
}

/// How a server is started, and how it is seen to serve.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) name: String,
    pub(super) source: Source,
    pub(super) arguments: Vec<OsString>,
    pub(super) environment: Vec<(OsString, OsString)>,
    pub(super) log: PathBuf,
    pub(super) folder: PathBuf,
    /// Where clients connect.
    pub(super) port: u16,
    /// Where the harness itself connects without TLS.
    pub(super) plain_port: u16,
    pub(super) ready: Ready,
    /// It keeps no data, but watches those that do.
    pub(super) sentinel: bool,
}

/// When a server serves.
#[derive(Debug)]
pub(super) enum Ready {
    /// When it answers this under a path of its plain HTTP port.
    Http { port: u16, path: &'static str, answer: &'static str },
    /// When it answers all of these on its plain port.
    Redis { login: Option<Login>, asks: Vec<Ask> },
    /// When it answers this under a path of its own port, over TLS, whoever has this token.
    #[cfg(feature = "tls")]
    Https { path: &'static str, answer: &'static str, authority: PathBuf, token: &'static str },
}

/// A command of Redis, and a text that must be in its answer, or must not.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) command: &'static [&'static str],
    pub(super) text: String,
    pub(super) said: bool,
}

impl Ready {
    /// None if it serves; otherwise what it answered.
    fn lacks(&self, plain_port: u16) -> Option<String> {
        match self {
            Self::Http { port, path, answer } => match super::http::get(&local(*port), path) {
                Ok((200, body)) if body.contains(answer) => None,
                Ok((status, body)) => Some(format!("{path}: {status} {body}")),
                Err(error) => Some(format!("{path}: {error}")),
            },
            #[cfg(feature = "tls")]
            Self::Https { path, answer, authority, token } => {
                match super::https::ask(plain_port, authority, token, "GET", path, None) {
                    Ok((200, body)) if body.contains(answer) => None,
                    Ok((status, body)) => Some(format!("{path}: {status} {body}")),
                    Err(error) => Some(format!("{path}: {error}")),
                }
            }
            Self::Redis { login, asks } => asks.iter().find_map(|Ask { command, text, said }| {
                match super::resp::ask(&local(plain_port), login.as_ref(), command) {
                    Ok(answer) if answer.contains(text) == *said => None,
                    Ok(answer) => Some(format!("{}: {answer}", command.join(" "))),
                    Err(error) => Some(format!("{}: {error}", command.join(" "))),
                }
            }),
        }
    }
}

/// The address of a port on this machine.
pub(super) fn local(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

impl Node {
    pub(super) fn new(program: Program) -> Self {
        Self { program, running: Mutex::new(None) }
    }

    /// The name that the server goes by in its cluster.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.program.name
    }

    /// The port for clients on 127.0.0.1; a restart keeps it.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.program.port
    }

    /// The port that takes etcd's JSON or Redis's commands without TLS; for NATS the same as
    /// [`port`](Self::port).
    #[must_use]
    pub fn plain_port(&self) -> u16 {
        self.program.plain_port
    }

    /// The port that answers plain HTTP without a login: NATS's monitoring, etcd's metrics. Redis has
    /// none; for that the same as [`plain_port`](Self::plain_port).
    #[must_use]
    pub fn http_port(&self) -> u16 {
        match self.program.ready {
            Ready::Http { port, .. } => port,
            Ready::Redis { .. } => self.plain_port(),
            #[cfg(feature = "tls")]
            Ready::Https { .. } => self.plain_port(),
        }
    }

    /// What Redis answers to a command that the server's own user sends, each string and number on a
    /// line of its own. Blocks the thread, for two seconds at most.
    ///
    /// # Errors
    /// It is no Redis, does not answer, or answers with this error.
    pub fn ask(&self, command: &[&str]) -> io::Result<String> {
        match &self.program.ready {
            Ready::Redis { login, .. } => {
                super::resp::ask(&local(self.plain_port()), login.as_ref(), command)
            }
            _ => Err(io::Error::new(io::ErrorKind::Unsupported, "it is no Redis")),
        }
    }

    /// The process's id while it lives.
    #[must_use]
    pub fn id(&self) -> Option<u32> {
        self.with(|running| Ok(running.id())).ok()
    }

    /// Stops the process where it is (SIGSTOP), until [`resume`](Self::resume).
    ///
    /// # Errors
    /// It does not run.
    pub fn pause(&self) -> io::Result<()> {
        self.with(Running::pause)
    }

    /// Lets it go on (SIGCONT).
    ///
    /// # Errors
    /// It does not run.
    pub fn resume(&self) -> io::Result<()> {
        self.with(Running::resume)
    }

    /// Kills it (SIGKILL) and waits until it is gone. Its data stay.
    ///
    /// # Errors
    /// The system refuses.
    pub fn kill(&self) -> io::Result<()> {
        match self.running.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(mut running) => running.kill(),
            None => Ok(()),
        }
    }

    /// Starts it on the data and the ports that it had, and waits until it serves.
    ///
    /// # Errors
    /// It runs already, or does not come to serve: with the end of its log.
    pub fn start(&self) -> io::Result<()> {
        self.spawn()?;
        self.serve()
    }

    /// Kills it, if it runs, and starts it on the same data.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn restart(&self) -> io::Result<()> {
        self.kill()?;
        self.start()
    }

    /// Where its data and its configuration are.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.program.folder
    }

    /// The last lines of its log, under its name.
    #[must_use]
    pub fn log_tail(&self) -> String {
        let said = match &*self.running.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Running::Container(container)) => last_lines(&container.log()),
            _ => tail(&self.program.log),
        };
        format!("--- {}\n{said}\n", self.program.name)
    }

    pub(super) fn is_sentinel(&self) -> bool {
        self.program.sentinel
    }

    pub(super) fn spawn(&self) -> io::Result<()> {
        let mut slot = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = slot.as_mut()
            && !running.has_ended()?
        {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it runs already"));
        }
        let Program { source, arguments, environment, log, folder, .. } = &self.program;
        *slot = Some(match source {
            Source::Program(path) => {
                let mut command = Command::new(path);
                command.args(arguments).envs(environment.iter().cloned()).current_dir(folder);
                Running::Process(Process::spawn_in(command, log, Some(folder))?)
            }
            Source::Image(image, name) => {
                Running::Container(Container::start(image, name, &self.program)?)
            }
        });
        Ok(())
    }

    /// Waits until it serves. What answers on the port has to be this process.
    pub(super) fn serve(&self) -> io::Result<()> {
        let ports = [self.port(), self.plain_port(), self.http_port()];
        let mut last = String::from("it does not listen");
        let served = crate::until(READY_LIMIT, || {
            match self.with(|running| Ok(ports.iter().all(|port| running.listens_on(*port)))) {
                Err(error) => return Some(Err(error)),
                Ok(false) => return None,
                Ok(true) => {}
            }
            match self.program.ready.lacks(self.plain_port()) {
                None => Some(Ok(())),
                Some(answer) => {
                    last = answer;
                    None
                }
            }
        });
        let failed = match served {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) => error.to_string(),
            None => last,
        };
        Err(io::Error::other(format!(
            "{} does not serve: {failed}\n{}",
            self.name(),
            self.log_tail()
        )))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Running) -> io::Result<T>) -> io::Result<T> {
        let mut slot = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = slot.as_mut()
            && !running.has_ended()?
        {
            return act(running);
        }
        Err(io::Error::new(io::ErrorKind::NotFound, "the server has ended"))
    }
}
