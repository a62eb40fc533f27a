//! The one error of the workspace: few kinds, chosen by what the caller does next.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;

use crate::quote;

/// The result of every fallible call in coord.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Why a call could not tell, or could not proceed.
///
/// An expected race (held by another, conflict, fenced, gone) is not an error: it is an outcome of the
/// call. An error has a [kind](ErrorKind), which says what to do next, an [effect](Effect), which says
/// whether the request may have been applied, the operation and the resource it was about, and the
/// source where there is one. `Display` is one line without the source; print the chain for that.
pub struct Error(Box<Repr>);

struct Repr {
    kind: ErrorKind,
    effect: Effect,
    operation: &'static str,
    resource: Option<String>,
    message: Cow<'static, str>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// What went wrong, by what the caller does next.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Not reachable, no leader, throttled or timed out: retry with back-off.
    Unavailable,
    /// Authentication or permission: fix the credentials, do not retry.
    Denied,
    /// A bad URL, option, name, TTL or size: fix the caller.
    Invalid,
    /// Scheme or option unknown, feature compiled out, server too old.
    Unsupported,
    /// The store is set up in a way in which the promises cannot be kept: fix the named setting.
    Misconfigured,
    /// A record is damaged or from a newer format, or a term went back: stop, and let an operator look.
    Corrupt,
    /// The handle was closed.
    Closed,
    /// A bug of ours: a task panicked, an invariant broke.
    Internal,
}

/// Whether a failed request may have taken effect all the same.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Certainly nothing happened.
    None,
    /// It may have happened: only the same attempt, retried, can tell.
    Unknown,
}

impl Error {
    /// An error of `kind` in `operation` (a fixed word such as `"renew"`).
    ///
    /// Until said otherwise, what is `Unavailable` or `Internal` may have taken effect: that is the safe
    /// answer for a request that was sent. All other kinds are refusals, which have none. See
    /// [`effect_none`](Self::effect_none) for what only reads, and for what was never sent.
    #[must_use]
    pub fn new(kind: ErrorKind, operation: &'static str) -> Self {
        let effect = match kind {
            ErrorKind::Unavailable | ErrorKind::Internal => Effect::Unknown,
            _ => Effect::None,
        };
        Self(Box::new(Repr {
            kind,
            effect,
            operation,
            resource: None,
            message: Cow::Borrowed(""),
            source: None,
        }))
    }

    /// Shorthand for bad input found before any I/O.
    #[must_use]
    pub fn invalid(operation: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Invalid, operation).message(message)
    }

    /// Shorthand for a store that did not answer; the effect is [`Effect::Unknown`], which is the
    /// safe answer for everything that was sent.
    #[must_use]
    pub fn unavailable(operation: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unavailable, operation).message(message)
    }

    /// Shorthand for an unreadable record.
    #[must_use]
    pub fn corrupt(operation: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Corrupt, operation).message(message)
    }

    /// Says what happened: lower case, no full stop, variables at the end as `key=value`, no secret. It is
    /// cut at 2 KiB.
    #[must_use]
    pub fn message(mut self, message: impl Into<Cow<'static, str>>) -> Self {
        self.0.message = message.into();
        if let Cow::Owned(text) = &mut self.0.message {
            quote::cut(text);
        }
        self
    }

    /// Names the lease, table, node or URL it was about (without secrets).
    #[must_use]
    pub fn resource(mut self, resource: impl fmt::Display) -> Self {
        let mut text = resource.to_string();
        quote::cut(&mut text);
        self.0.resource = Some(text);
        self
    }

    /// Says that the request may have been applied.
    #[must_use]
    pub fn effect_unknown(mut self) -> Self {
        self.0.effect = Effect::Unknown;
        self
    }

    /// Says that nothing was applied for certain: the request only reads, or was never sent.
    #[must_use]
    pub fn effect_none(mut self) -> Self {
        self.0.effect = Effect::None;
        self
    }

    /// Keeps the cause, for the chain. One whose text is long (parsers quote what they read) is kept as
    /// the beginning of its text.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let source = source.into();
        let mut text = source.to_string();
        let bytes = text.len();
        quote::cut(&mut text);
        self.0.source = Some(if text.len() == bytes { source } else { text.into() });
        self
    }

    /// What to do next.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether it may have happened all the same.
    #[must_use]
    pub fn effect(&self) -> Effect {
        self.0.effect
    }

    /// The operation that failed, one fixed word.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// What it was about, if that is known.
    #[must_use]
    pub fn resource_name(&self) -> Option<&str> {
        self.0.resource.as_deref()
    }

    /// The message alone, without operation and resource.
    #[must_use]
    pub fn message_text(&self) -> &str {
        &self.0.message
    }

    /// True where trying again, unchanged, can succeed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Unavailable)
    }

    /// True where trying again at the usual pace would only fill the log: an operator has to act first.
    #[must_use]
    pub fn needs_operator(&self) -> bool {
        matches!(
            self.0.kind,
            ErrorKind::Denied
                | ErrorKind::Invalid
                | ErrorKind::Unsupported
                | ErrorKind::Misconfigured
                | ErrorKind::Corrupt
        )
    }
}

impl ErrorKind {
    /// The kind as one lower-case word, for logs, metrics and machine-readable output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Denied => "denied",
            Self::Invalid => "invalid",
            Self::Unsupported => "unsupported",
            Self::Misconfigured => "misconfigured",
            Self::Corrupt => "corrupt",
            Self::Closed => "closed",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.operation)?;
        if let Some(resource) = &self.0.resource {
            write!(f, " {resource}")?;
        }
        write!(f, ": {}", self.0.kind)?;
        if !self.0.message.is_empty() {
            write!(f, ": {}", self.0.message)?;
        }
        if self.0.effect == Effect::Unknown {
            f.write_str(" (it may have taken effect)")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Error");
        out.field("kind", &self.0.kind)
            .field("effect", &self.0.effect)
            .field("operation", &self.0.operation);
        if let Some(resource) = &self.0.resource {
            out.field("resource", resource);
        }
        out.field("message", &self.0.message);
        if let Some(source) = &self.0.source {
            out.field("source", source);
        }
        out.finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_one_pointer_and_one_line() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        let error = Error::unavailable("renew", "no answer after_ms=500").resource("scheduler");
        assert_eq!(
            error.to_string(),
            "renew scheduler: unavailable: no answer after_ms=500 (it may have taken effect)"
        );
        assert!(error.is_retryable());
        assert_eq!(error.effect(), Effect::Unknown);
    }

    #[test]
    fn what_may_have_been_sent_may_have_taken_effect() {
        use ErrorKind::{
            Closed, Corrupt, Denied, Internal, Invalid, Misconfigured, Unavailable, Unsupported,
        };
        for kind in [Unavailable, Internal] {
            let error = Error::new(kind, "renew");
            assert_eq!(error.effect(), Effect::Unknown, "{error}");
            assert_eq!(error.effect_none().effect(), Effect::None);
        }
        for kind in [Denied, Invalid, Unsupported, Misconfigured, Corrupt, Closed] {
            let error = Error::new(kind, "renew");
            assert_eq!(error.effect(), Effect::None, "{error}");
            assert_eq!(error.effect_unknown().effect(), Effect::Unknown);
        }
    }

    #[test]
    fn the_source_stays_out_of_the_line_and_in_the_chain() {
        let error =
            Error::new(ErrorKind::Denied, "check").with_source(std::io::Error::other("bad key"));
        assert_eq!(error.to_string(), "check: denied");
        assert_eq!(StdError::source(&error).map(ToString::to_string).as_deref(), Some("bad key"));
        assert!(error.needs_operator());
    }

    #[test]
    fn no_part_of_an_error_is_long() {
        let long = "x".repeat(1 << 20);
        let error = Error::invalid("parse", long.clone())
            .resource(&long)
            .with_source(std::io::Error::other(long));
        let source = StdError::source(&error).expect("kept").to_string();
        assert!(source.starts_with("xxx") && source.ends_with("… (1048576 bytes)"), "{source}");
        assert!(error.to_string().len() < 4500 && format!("{error:?}").len() < 8000);
        let short = error.with_source(std::io::Error::other("short"));
        let kept = StdError::source(&short).expect("kept");
        assert!(kept.is::<std::io::Error>(), "a short cause stays what it is");
    }
}
