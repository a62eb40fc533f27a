//! Many changes in one build. Of each function that is changed, the body is repeated once for each change, and a
//! variable of the environment chooses which of the bodies is run. So each change is exactly the text that
//! cargo-mutants would write, and a package is built once instead of once for each change.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use anyhow::{Context as _, Result};
use serde::Deserialize;

/// Names the change that a test program runs with.
pub(crate) const VARIABLE: &str = "COORD_MUTANT";

/// What is appended to the `lib.rs` of a package whose files are changed.
pub(crate) fn switch() -> String {
    format!(
        "
mod mutant_switch {{
    static NOW: std::sync::LazyLock<u32> = std::sync::LazyLock::new(|| {{
        std::env::var(\"{VARIABLE}\").ok().and_then(|number| number.parse().ok()).unwrap_or(0)
    }});
    pub(crate) fn now() -> u32 {{
        *NOW
    }}
}}
"
    )
}

/// One change, as `cargo mutants --list --json` tells it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Mutant {
    pub(crate) file: String,
    /// File, place and change.
    pub(crate) name: String,
    replacement: String,
    span: Span,
    function: Option<Function>,
}

#[derive(Clone, Debug, Deserialize)]
struct Function {
    function_name: String,
    span: Span,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Span {
    start: Place,
    end: Place,
}

/// Both count from 1, the column in characters.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Place {
    line: usize,
    column: usize,
}

/// A file with all its changes.
#[derive(Debug)]
pub(crate) struct Woven {
    pub(crate) text: String,
    /// Which lines, counted from 1, belong to which change.
    lines: BTreeMap<usize, u32>,
    /// Changes that can't be put in this way.
    pub(crate) apart: BTreeSet<u32>,
}

impl Woven {
    /// The change that an error of the compiler at a line of the text is about.
    pub(crate) fn change_at(&self, line: usize) -> Option<u32> {
        self.lines.get(&line).copied()
    }
}

/// Puts all changes of one file in, each under its number.
pub(crate) fn weave(source: &str, mutants: &[(u32, &Mutant)]) -> Result<Woven> {
    let starts = line_starts(source);
    let mut apart = BTreeSet::new();
    let mut bodies: BTreeMap<(usize, usize), Vec<(u32, &Mutant)>> = BTreeMap::new();
    for &(number, mutant) in mutants {
        match body(source, &starts, mutant)? {
            Some(body) => bodies.entry((body.start, body.end)).or_default().push((number, mutant)),
            None => _ = apart.insert(number),
        }
    }
    let mut out = Out::default();
    let mut at = 0;
    for ((start, end), mutants) in bodies {
        // A function inside another one.
        if start < at {
            apart.extend(mutants.iter().map(|(number, _)| *number));
            continue;
        }
        out.push(&source[at..start], None);
        out.push("\nmatch crate::mutant_switch::now() {\n", None);
        for (number, mutant) in mutants {
            let change = range(&starts, source, mutant.span)?;
            let text = format!(
                "{number} => {{\n{}{}{}\n}}\n",
                &source[start..change.start],
                mutant.replacement,
                &source[change.end..end]
            );
            out.push(&text, Some(number));
        }
        out.push(&format!("_ => {{\n{}\n}}\n}}\n", &source[start..end]), None);
        at = end;
    }
    out.push(&source[at..], None);
    Ok(Woven { text: out.text, lines: out.lines, apart })
}

#[derive(Default)]
struct Out {
    text: String,
    line: usize,
    lines: BTreeMap<usize, u32>,
}

impl Out {
    fn push(&mut self, text: &str, number: Option<u32>) {
        self.text.push_str(text);
        let after = self.line + text.matches('\n').count();
        if let Some(number) = number {
            self.lines.extend((self.line + 1..=after).map(|line| (line, number)));
        }
        self.line = after;
    }
}

/// What is between the braces of the function that a change is in. None where it can't be repeated: the bodies
/// of a constant function can't be chosen from, and those of one that returns an `impl` have different types.
fn body(source: &str, starts: &[usize], mutant: &Mutant) -> Result<Option<Range<usize>>> {
    let Some(function) = &mutant.function else { return Ok(None) };
    let whole = range(starts, source, function.span)?;
    let change = range(starts, source, mutant.span)?;
    let name = function.function_name.rsplit("::").next().unwrap_or_default();
    let name = name.split('<').next().unwrap_or_default();
    let text = &source[whole.clone()];
    let Some(named) = text.find(&format!("fn {name}")) else { return Ok(None) };
    let Some(open) = text[named..].find('{').map(|open| whole.start + named + open + 1) else {
        return Ok(None);
    };
    let before = text[..named].lines().next_back().unwrap_or_default();
    let returned = source[whole.start + named..open].split_once("->").map_or("", |(_, to)| to);
    let close = whole.end.saturating_sub(1);
    let fits = source.as_bytes().get(close) == Some(&b'}')
        && open <= change.start
        && change.end <= close
        && !before.contains("const ")
        && !returned.contains("impl ");
    Ok(fits.then_some(open..close))
}

fn line_starts(source: &str) -> Vec<usize> {
    let after = source.match_indices('\n').map(|(at, _)| at + 1);
    std::iter::once(0).chain(after).collect()
}

fn range(starts: &[usize], source: &str, span: Span) -> Result<Range<usize>> {
    let at = |place: Place| {
        let line = *starts.get(place.line.checked_sub(1)?)?;
        let rest = source.get(line..)?;
        let column = place.column.checked_sub(1)?;
        let ends = std::iter::once((rest.len(), ' '));
        rest.char_indices().chain(ends).nth(column).map(|(offset, _)| line + offset)
    };
    let range = at(span.start).zip(at(span.end)).map(|(start, end)| start..end);
    range.filter(|range| range.start <= range.end).with_context(|| format!("no place {span:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
/// Where – not fn at { – it is.
fn at(a: u32) -> bool {
    let ä = a; ä < 3
}

const fn fixed(a: u32) -> bool {
    a < 3
}
";

    fn mutant(name: &str, function: [usize; 4], at: [usize; 3], replacement: &str) -> Mutant {
        let span = |[a, b, c, d]: [usize; 4]| Span {
            start: Place { line: a, column: b },
            end: Place { line: c, column: d },
        };
        Mutant {
            file: "a.rs".to_owned(),
            name: format!("a.rs: {replacement}"),
            replacement: replacement.to_owned(),
            span: span([at[0], at[1], at[0], at[2]]),
            function: Some(Function { function_name: name.to_owned(), span: span(function) }),
        }
    }

    #[test]
    fn each_change_is_a_body_of_its_own_and_the_last_one_is_as_it_was() {
        let first = mutant("at", [2, 1, 4, 2], [3, 18, 19], ">");
        let second = mutant("at", [2, 1, 4, 2], [3, 5, 21], "true");
        let constant = mutant("fixed", [6, 1, 8, 2], [7, 7, 8], ">");
        let woven = weave(SOURCE, &[(1, &first), (2, &second), (3, &constant)]).expect("weaves");
        assert!(woven.text.contains("1 => {\n\n    let ä = a; ä > 3\n\n}"), "{}", woven.text);
        assert!(woven.text.contains("2 => {\n\n    true\n\n}"), "{}", woven.text);
        assert!(woven.text.contains("_ => {\n\n    let ä = a; ä < 3\n\n}"), "{}", woven.text);
        assert_eq!(woven.apart, BTreeSet::from([3]));
        let line = |text: &str| 1 + woven.text.lines().position(|l| l.contains(text)).expect("it");
        assert_eq!(woven.change_at(line("ä > 3")), Some(1));
        assert_eq!(woven.change_at(line("true")), Some(2));
        assert_eq!(woven.change_at(line("ä < 3")), None);
    }
}
