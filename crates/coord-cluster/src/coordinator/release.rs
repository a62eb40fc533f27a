//! How the versions of a service compare, so that a rolling update can tell newer from older.

use std::cmp::Ordering;

use coord_core::{Error, Label, Result};

/// A version of the service, as a node's label says it: numbers between points, after an optional `v`;
/// then perhaps `-` and a pre-release, and `+` and a build.
///
/// Numbers compare as numbers, and missing ones count as 0. A pre-release comes before its release; its
/// parts compare as numbers where both are, and a number comes before a word. The build says nothing.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    numbers: Vec<u64>,
    pre: Vec<Part>,
}

/// A part of a pre-release. A number comes before a word.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Number(u64),
    Word(String),
}

impl Release {
    /// Reads a label.
    ///
    /// # Errors
    /// `Invalid`, naming the label.
    pub(crate) fn parse(label: &Label) -> Result<Self> {
        let text = label.as_str();
        let bad = || {
            let why = format!(
                "the version {text:?} can't be compared; write numbers between points, such as 1.20.3 \
                 or v2.0.0-rc.1"
            );
            Error::invalid("start", why)
        };
        let plain = text.split_once('+').map_or(text, |(plain, _build)| plain);
        let (numbers, pre) = match plain.split_once('-') {
            Some((numbers, pre)) => (numbers, Some(pre)),
            None => (plain, None),
        };
        let numbers = numbers.strip_prefix('v').unwrap_or(numbers);
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse().ok()).flatten()
        };
        let numbers: Option<Vec<u64>> = numbers.split('.').map(number).collect();
        let part = |text: &str| match number(text) {
            Some(number) => Some(Part::Number(number)),
            None => (!text.is_empty()).then(|| Part::Word(text.to_owned())),
        };
        let pre: Option<Vec<Part>> =
            pre.map_or(Some(Vec::new()), |p| p.split('.').map(part).collect());
        Ok(Self { numbers: numbers.ok_or_else(bad)?, pre: pre.ok_or_else(bad)? })
    }
}

impl Ord for Release {
    fn cmp(&self, other: &Self) -> Ordering {
        let length = self.numbers.len().max(other.numbers.len());
        let padded = |release: &Self| {
            let mut numbers = release.numbers.clone();
            numbers.resize(length, 0);
            numbers
        };
        let pre = || match (self.pre.is_empty(), other.pre.is_empty()) {
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            _ => self.pre.cmp(&other.pre),
        };
        padded(self).cmp(&padded(other)).then_with(pre)
    }
}

impl PartialOrd for Release {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Release {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Release {}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(text: &str) -> Release {
        Release::parse(&Label::new(text).expect("label")).expect("a version")
    }

    #[test]
    fn they_rise_as_people_mean_them() {
        let rising = [
            "0.9",
            "1.0.0-alpha",
            "1.0.0-alpha.1",
            "1.0.0-alpha.2",
            "1.0.0-alpha.10",
            "1.0.0-alpha.x",
            "1.0.0-beta",
            "1.0.0-rc.1",
            "1.0.0",
            "1.2.9",
            "v1.2.10",
            "1.10",
            "2",
            "2026.11.30",
        ];
        for (index, older) in rising.iter().enumerate() {
            for newer in &rising[index + 1..] {
                assert!(release(older) < release(newer), "{older} is older than {newer}");
                assert!(release(newer) > release(older));
            }
        }
        for (one, other) in [("1", "1.0.0"), ("v1.2", "1.2"), ("1.2.3+7", "1.2.3+abc")] {
            assert_eq!(release(one), release(other));
        }
    }

    #[test]
    fn one_that_is_none_is_named() {
        for bad in ["main", "1..2", "1.x", "v", "-rc.1", "1.0-", "1.0-a..b", "99999999999999999999"]
        {
            let error = Release::parse(&Label::new(bad).expect("label")).expect_err(bad);
            assert!(error.to_string().contains(&format!("{bad:?}")), "{error}");
        }
    }
}
