//! Text from outside inside our own: an error or a log line quotes it, and never grows with it.

use std::fmt;

/// How many bytes of a text are quoted.
const QUOTED_BYTES_MAX: usize = 128;
/// How many bytes an error's message or the text of its cause may have.
const MESSAGE_BYTES_MAX: usize = 2048;

/// A text from outside, in quotation marks and escaped; of a long one the beginning and its length.
#[must_use]
pub fn quoted(text: &str) -> impl fmt::Display + '_ {
    Quoted(text)
}

struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0;
        match beginning(text, QUOTED_BYTES_MAX) {
            begin if begin.len() == text.len() => write!(f, "{text:?}"),
            begin => write!(f, "{begin:?}… ({} bytes)", text.len()),
        }
    }
}

/// Cuts a text that may contain something long which was not quoted as above.
pub(crate) fn cut(text: &mut String) {
    let bytes = text.len();
    let kept = beginning(text, MESSAGE_BYTES_MAX).len();
    if kept < bytes {
        text.truncate(kept);
        text.push_str(&format!("… ({bytes} bytes)"));
    }
}

/// At most so many bytes of a text, whole characters.
fn beginning(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_long_is_cut_between_characters() {
        assert_eq!(quoted("a \"b\"").to_string(), "\"a \\\"b\\\"\"");
        let exact = "x".repeat(QUOTED_BYTES_MAX);
        assert_eq!(quoted(&exact).to_string(), format!("{exact:?}"));
        let long = format!("x{}", "ä".repeat(QUOTED_BYTES_MAX));
        let text = quoted(&long).to_string();
        assert!(text.ends_with("ä\"… (257 bytes)") && text.len() < 160, "{text}");
        let mut message = long.repeat(10);
        cut(&mut message);
        assert!(message.ends_with("ä… (2570 bytes)") && message.len() < 2080, "{message}");
        let mut short = "short".to_owned();
        cut(&mut short);
        assert_eq!(short, "short");
    }
}
