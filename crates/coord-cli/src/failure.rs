//! How a command fails, and with which exit code.

use std::error::Error as StdError;
use std::fmt;

use coord::{BackendUrl, ErrorKind};

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
    /// Another holds the lease, or it was not had in time: try again later (`EX_TEMPFAIL`).
    pub(crate) const HELD: u8 = 75;
    /// The lease was lost while the command ran.
    pub(crate) const LOST: u8 = 76;
    /// The reader of the output is gone: 128 and the number of SIGPIPE, as shells say it.
    pub(crate) const NO_READER: u8 = 141;
    /// A command was found and could not be started; the convention of shells.
    pub(crate) const NOT_STARTED: u8 = 126;
    /// A command was not found; the convention of shells.
    pub(crate) const NOT_FOUND: u8 = 127;

    /// The exit code of a process that has ended with this one.
    pub(crate) fn of(code: Option<i32>) -> std::process::ExitCode {
        std::process::ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
    }
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
        // The reader of the output has had enough (`coord … | head`): there is nothing left to print.
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::new(code::NO_READER, "");
        }
        Self::new(code::OUTPUT, format!("input or output: {error}"))
    }
}

/// The text as it may be shown: wherever it repeats an argument, that one's secrets are hidden.
pub(crate) fn shown(text: &str) -> String {
    let given = std::env::args_os().skip(1).chain(std::env::var_os("COORD_BACKEND"));
    let given = given.map(|given| given.to_string_lossy().into_owned());
    given.fold(text.to_owned(), |text, given| hide(&text, &given))
}

/// Hides what `given` holds of secrets wherever the text repeats it, also as Rust quotes it.
fn hide(text: &str, given: &str) -> String {
    let hidden = redacted(given);
    if hidden == given {
        return text.to_owned();
    }
    let quoted = format!("{given:?}");
    text.replace(given, &hidden).replace(quoted.trim_matches('"'), &hidden)
}

/// Hides the secrets of everything in the text that looks like a URL.
pub(crate) fn without_secrets(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let behind = &rest[at + 3..];
        let is_end = |c: char| c.is_whitespace() || "'\"`".contains(c);
        let end = at + 3 + behind.find(is_end).unwrap_or(behind.len());
        let begin = rest[..at].rfind(is_end).map_or(0, |before| before + 1);
        shown.push_str(&rest[..begin]);
        shown.push_str(&redacted(&rest[begin..end]));
        rest = &rest[end..];
    }
    shown + rest
}

/// A text that may be a URL, however it is malformed, without what may be a secret in it: all before the
/// last `@`, and from the value of an option on that hides one.
fn redacted(url: &str) -> String {
    let (scheme, rest) = match url.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        // A user and a password alone.
        None if url.rsplit_once('@').is_some_and(|(user, _)| user.contains(':')) => {
            (String::new(), url)
        }
        None => return url.to_owned(),
    };
    let (place, options) = match rest.split_once('?') {
        Some((place, options)) => (place, Some(options)),
        None => (rest, None),
    };
    // Part of a password that holds a `?`, or of an option that holds an `@`.
    if options.is_some_and(|options| options.contains('@')) {
        return format!("{scheme}***");
    }
    let place = match place.rsplit_once('@') {
        Some((_, host)) => format!("***@{host}"),
        None => place.to_owned(),
    };
    let mut shown = scheme + &place;
    for (index, option) in options.into_iter().flat_map(|options| options.split('&')).enumerate() {
        shown.push(if index == 0 { '?' } else { '&' });
        let name = option.split_once('=').map_or(option, |(name, _)| name);
        if BackendUrl::hides(&name.to_ascii_lowercase()) {
            shown.push_str(name);
            shown.push_str("=***");
            break;
        }
        shown.push_str(option);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_stranger_sends_stays_in_one_line() {
        assert_eq!(printable("said 'é\r\n\u{1b}[2J'"), "said 'é\\r\\n\\u{1b}[2J'");
    }

    #[test]
    fn secrets_of_urls_are_hidden_wherever_they_stand() {
        let text = "unexpected 'nats://u:p@ss@h/c' and etcd://root:x@h, memory://orders?era=1";
        let shown = "unexpected 'nats://***@h/c' and etcd://***@h, memory://orders?era=1";
        assert_eq!(without_secrets(text), shown);
        for (url, right) in [
            (
                "redis://h/c?era=2&sentinel_password=hunter2&tls=on",
                "redis://h/c?era=2&sentinel_password=***",
            ),
            ("redis://h/c?SENTINEL_PASSWORD=hunter2", "redis://h/c?SENTINEL_PASSWORD=***"),
            ("redis://h/c?sentinel_password=a&hunter2", "redis://h/c?sentinel_password=***"),
            ("redis://h/c?sentinel_password=a@hunter2", "redis://***"),
            ("redis://u:hunter2?x@h/c", "redis://***"),
            ("redis://u:hunter2/x@h/c", "redis://***@h/c"),
            ("--store=redis://u:hunter2@h/c", "--store=redis://***@h/c"),
            ("u:hunter2@h/c", "***@h/c"),
            ("nats://h/c?token", "nats://h/c?token=***"),
            ("a@zone=3", "a@zone=3"),
            ("orders", "orders"),
        ] {
            assert_eq!(redacted(url), right);
            // What is hidden already stays as it is.
            assert_eq!(redacted(right), right);
        }
    }

    #[test]
    fn an_argument_is_hidden_also_where_it_is_quoted() {
        let given = "redis://u:hun\"ter 2@h/c";
        for text in [format!("unexpected '{given}' found"), format!("{given:?} is no name")] {
            let shown = hide(&text, given);
            assert!(!shown.contains("ter") && shown.contains("redis://***@h/c"), "{shown}");
        }
    }
}
