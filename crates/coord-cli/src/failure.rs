//! How a command fails, and with which exit code.

use std::error::Error as StdError;
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
    /// The output can't be written.
    pub(crate) const OUTPUT: u8 = 4;
    /// Nobody reads the output any more: 128 and the number of SIGPIPE, as shells say it.
    pub(crate) const NO_READER: u8 = 141;
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
        // What coord says of it, and the first cause of all; what stands between repeats the two.
        let mut message = error.to_string();
        let first: &dyn StdError = &error;
        let root = std::iter::successors(Some(first), |&error| error.source()).last();
        let root = root.map(ToString::to_string).unwrap_or_default();
        if !message.contains(&root) {
            message.push_str(": ");
            message.push_str(&root);
        }
        Self { code, message: printable(&message) }
    }
}

/// In one line and without control characters: a part may be what a stranger sent.
fn printable(text: &str) -> String {
    let escaped = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(escaped).collect()
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        // Whoever reads the output has had enough (`coord … | head`): nothing is left to be said.
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::new(code::NO_READER, "");
        }
        Self::new(code::OUTPUT, format!("input or output: {error}"))
    }
}

/// The text with the part before the `@` of every URL hidden.
pub(crate) fn without_secrets(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        shown.push_str(before);
        shown.push_str("://");
        let end = after.find(|c: char| c.is_whitespace() || c == '\'').unwrap_or(after.len());
        let (url, behind) = after.split_at(end);
        match url.rsplit_once('@') {
            Some((_, host)) => {
                shown.push_str("***@");
                shown.push_str(host);
            }
            None => shown.push_str(url),
        }
        rest = behind;
    }
    shown + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_stranger_sends_stays_in_one_line() {
        assert_eq!(printable("said 'é\r\n\u{1b}[2J'"), "said 'é\\r\\n\\u{1b}[2J'");
    }

    #[test]
    fn what_stands_before_the_host_is_hidden() {
        let text = "unexpected 'nats://u:p@ss@h/c' and etcd://root:x@h, memory://orders";
        let shown = "unexpected 'nats://***@h/c' and etcd://***@h, memory://orders";
        assert_eq!(without_secrets(text), shown);
    }
}
