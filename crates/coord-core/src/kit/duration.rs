//! Durations as people write them: `500ms`, `10s`, `5m`, `1h`. For `#[serde(with = "duration")]`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de};

use crate::quoted;

/// Reads a whole number and its unit.
fn parse(text: &str) -> Option<Duration> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number = number.parse::<u64>().ok()?;
    let millis = match unit.trim() {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    Some(Duration::from_millis(number.checked_mul(millis)?))
}

/// Writes whole milliseconds in the largest unit that holds them exactly.
#[must_use]
pub fn show(duration: Duration) -> String {
    let millis = duration.as_millis();
    match millis {
        0 => "0s".to_owned(),
        _ if millis.is_multiple_of(3_600_000) => format!("{}h", millis / 3_600_000),
        _ if millis.is_multiple_of(60_000) => format!("{}m", millis / 60_000),
        _ if millis.is_multiple_of(1_000) => format!("{}s", millis / 1_000),
        _ => format!("{millis}ms"),
    }
}

/// Writes a duration as [`show`] does.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<S: Serializer>(value: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&show(*value))
}

/// Reads a duration.
///
/// # Errors
/// What is not a whole number of `ms`, `s`, `m` or `h`.
pub fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(input)?;
    parse(&text).ok_or_else(|| {
        let text = quoted(&text);
        de::Error::custom(format!("duration {text} is not a whole number of ms, s, m or h"))
    })
}

/// The same for a duration that may be unset.
pub mod optional {
    use super::{Deserializer, Duration, Serializer};

    /// Writes a duration, or that there is none.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(value: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => super::serialize(value, out),
            None => out.serialize_none(),
        }
    }

    /// Reads a duration that is there.
    ///
    /// # Errors
    /// As without `optional`.
    pub fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Duration>, D::Error> {
        super::deserialize(input).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_back() {
        for text in ["0s", "1ms", "1500ms", "10s", "5m", "2h"] {
            assert_eq!(show(parse(text).expect(text)), text);
        }
        for bad in ["", "s", "10", "1.5s", "-1s", "1 day", "99999999999999999999s"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
