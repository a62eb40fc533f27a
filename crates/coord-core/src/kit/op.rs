//! What a request is for, and the errors of it.

use std::borrow::Cow;

use crate::error::{Effect, Error, ErrorKind};

/// What a request is for. It stands in every error of the request.
#[non_exhaustive]
#[derive(Clone, Copy, Debug)]
pub struct Op<'a> {
    /// The operation, one fixed word.
    pub name: &'static str,
    /// The lease, node, table or target that it is about.
    pub resource: &'a str,
    /// The effect of a failure that does not say whether the request was applied.
    pub effect: Effect,
}

impl<'a> Op<'a> {
    /// An operation that changes nothing.
    #[must_use]
    pub fn read(name: &'static str, resource: &'a str) -> Self {
        Self { name, resource, effect: Effect::None }
    }

    /// An operation that may change something.
    #[must_use]
    pub fn write(name: &'static str, resource: &'a str) -> Self {
        Self { name, resource, effect: Effect::Unknown }
    }

    /// The reading part of an operation that also writes.
    #[must_use]
    pub fn reading(self) -> Self {
        Self { effect: Effect::None, ..self }
    }

    /// The same under another name, for a part of the operation.
    #[must_use]
    pub fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// An error without effect. A caller that maps the failure of a sent write adds the effect.
    #[must_use]
    pub fn error(self, kind: ErrorKind) -> Error {
        Error::new(kind, self.name).effect_none().resource(self.resource)
    }

    /// For a missing answer, or one that does not say whether the request was applied.
    #[must_use]
    pub fn unclear(self, why: impl Into<Cow<'static, str>>) -> Error {
        let error = self.error(ErrorKind::Unavailable).message(why);
        if self.effect == Effect::Unknown { error.effect_unknown() } else { error }
    }

    /// For a call on a handle that was closed.
    #[must_use]
    pub fn closed(self) -> Error {
        self.error(ErrorKind::Closed).message("the handle was closed; open the backend again")
    }

    /// For a method that gave up after it lost the same race again and again.
    #[must_use]
    pub fn contended(self) -> Error {
        self.error(ErrorKind::Unavailable).message("others kept changing the record meanwhile")
    }

    /// For a record that can't be read.
    #[must_use]
    pub fn damaged(self, why: impl Into<Cow<'static, str>>) -> Error {
        self.error(ErrorKind::Corrupt).message(why)
    }

    /// For a record that was copied to a place where another one belongs. `place` is `"key"` or what the
    /// store calls it.
    #[must_use]
    pub fn misplaced(self, place: &str, name: &str) -> Error {
        self.damaged(format!("the record there is another's {place}={name}"))
    }

    /// Names the operation and the resource in an error of a decoder.
    #[must_use]
    pub fn corrupt(self, error: Error) -> Error {
        self.damaged(error.message_text().to_owned()).with_source(error)
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn an_unclear_write_may_have_taken_effect_and_its_reading_part_may_not() {
        let op = Op::write("renew", "scheduler");
        assert_eq!(op.unclear("no answer").effect(), Effect::Unknown);
        assert_eq!(op.reading().unclear("no answer").effect(), Effect::None);
        assert_eq!(Op::read("get", "scheduler").unclear("no answer").effect(), Effect::None);
        for refusal in [op.closed(), op.contended(), op.damaged("bad"), op.misplaced("key", "a")] {
            assert_eq!(refusal.effect(), Effect::None, "{refusal}");
            assert_eq!(refusal.operation(), "renew");
            assert_eq!(refusal.resource_name(), Some("scheduler"));
        }
    }

    #[test]
    fn an_error_of_a_decoder_gets_the_names_and_stays_the_source() {
        let decoder = Error::corrupt("decode", "field ttl is missing");
        let error = Op::read("get", "scheduler").corrupt(decoder);
        assert_eq!(error.to_string(), "get scheduler: corrupt: field ttl is missing");
        assert!(error.source().is_some_and(|source| source.to_string().contains("decode")));
    }
}
