//! How a command fails, and with which exit code.

use std::fmt;

use coord::ErrorKind;

/// The exit codes, as `coord --help` lists them.
pub(crate) mod code {
    /// What was checked or wanted doesn't hold.
    pub(crate) const DID_NOT_HOLD: u8 = 1;
    /// Bad input; also what clap uses.
    pub(crate) const BAD_INPUT: u8 = 2;
    /// The store can't be reached, refuses, or holds something unreadable.
    pub(crate) const STORE: u8 = 3;
    /// A command was found and could not be started; the convention of shells.
    pub(crate) const NOT_STARTED: u8 = 126;
    /// A command was not found; the convention of shells.
    pub(crate) const NOT_FOUND: u8 = 127;
}

/// Why a command ends without having done its job: one line for the user, and an exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub(crate) fn input(message: impl Into<String>) -> Self {
        Self::new(code::BAD_INPUT, message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<coord::Error> for Failure {
    fn from(error: coord::Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Invalid | ErrorKind::Unsupported => code::BAD_INPUT,
            _ => code::STORE,
        };
        // The chain in one line: each cause adds what the one above it left out.
        let mut message = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            message.push_str(": ");
            message.push_str(&cause.to_string());
            source = cause.source();
        }
        Self { code, message }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        // Whoever reads the output has had enough (`coord … | head`): nothing is left to be said.
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::new(code::DID_NOT_HOLD, "");
        }
        Self::new(code::DID_NOT_HOLD, format!("can't write the output: {error}"))
    }
}
