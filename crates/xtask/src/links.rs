//! The links of all pages, and the pages that code names: each file and each heading has to exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// What a page or a source file points at.
#[derive(Debug, PartialEq)]
struct Link {
    line: usize,
    /// The text that is shown; none for a page that is only named.
    label: Option<String>,
    /// As it is written, relative to the page.
    target: String,
}

/// The pages and sources of a repository, by their paths from its root.
pub(crate) type Texts = BTreeMap<PathBuf, String>;

/// All links that lead nowhere, each with the place where it stands.
fn faults(texts: &Texts, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut faults = Vec::new();
    for (path, text) in texts {
        let folder = path.parent().unwrap_or(Path::new(""));
        let links = if is_page(path) { links(text) } else { Vec::new() };
        let linked = links.into_iter().map(|link| (folder, link));
        let named = named_pages(text).into_iter().map(|link| (Path::new(""), link));
        for (base, link) in linked.chain(named) {
            if let Some(why) = fault(texts, &exists, path, base, &link) {
                faults.push(format!("{}:{}: {}: {why}", path.display(), link.line, link.target));
            }
        }
    }
    faults
}

/// Why a link leads nowhere; none if it does not.
fn fault(
    texts: &Texts,
    exists: &impl Fn(&Path) -> bool,
    page: &Path,
    base: &Path,
    link: &Link,
) -> Option<String> {
    if ["http://", "https://", "mailto:"].iter().any(|scheme| link.target.starts_with(scheme)) {
        return None;
    }
    let (path, anchor) = match link.target.split_once('#') {
        Some((path, anchor)) => (path, Some(anchor)),
        None => (link.target.as_str(), None),
    };
    let target = if path.is_empty() { page.to_owned() } else { normalized(&base.join(path)) };
    if !texts.contains_key(&target) && !exists(&target) {
        return Some(format!("there is no {}", target.display()));
    }
    let text = texts.get(&target).map_or("", String::as_str);
    if let Some(anchor) = anchor {
        let found = is_page(&target) && anchors(text).contains(anchor);
        return (!found).then(|| format!("{} has no heading #{anchor}", target.display()));
    }
    // A link from the name of a test to its file.
    let name = link.label.as_deref().and_then(|label| label.strip_prefix('`')?.strip_suffix('`'));
    let name =
        name.filter(|name| target.extension().is_some_and(|e| e == "rs") && is_name(name))?;
    let is_there = [format!("fn {name}("), format!("\"{name}\"")];
    let found = is_there.iter().any(|form| text.contains(form));
    (!found).then(|| format!("{} has no {name}", target.display()))
}

fn is_page(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

fn is_name(text: &str) -> bool {
    text.contains('_') && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The path without `.` and `..`.
fn normalized(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop();
            }
            other => normal.push(other),
        }
    }
    normal
}

/// The text with the blocks of code blanked out, and as many lines as before.
fn without_code_blocks(text: &str) -> String {
    let mut in_block = false;
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        if !in_block && !is_fence {
            out.push_str(line);
        }
        out.push('\n');
    }
    out
}

/// The links of a page: `[label](target)`, also over two lines.
fn links(page: &str) -> Vec<Link> {
    let text = without_code_blocks(page);
    let mut links = Vec::new();
    for (middle, _) in text.match_indices("](") {
        let rest = &text[middle + 2..];
        let Some(end) = rest.find(')') else { continue };
        let target = rest[..end].split_whitespace().next().unwrap_or_default();
        let label = text[..middle].rfind('[').map(|start| text[start + 1..middle].to_owned());
        let line = text[..middle].matches('\n').count() + 1;
        links.push(Link { line, label, target: target.to_owned() });
    }
    links
}

/// The pages below docs that a text names by their paths from the root of the repository.
fn named_pages(text: &str) -> Vec<Link> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let mut pages = Vec::new();
    for (start, _) in text.match_indices("docs/") {
        if text[..start].ends_with(is_path) {
            continue;
        }
        let rest = &text[start..];
        let path = &rest[..rest.find(|c: char| !is_path(c)).unwrap_or(rest.len())];
        let path = path.trim_end_matches('.');
        if !path.ends_with(".md") {
            continue;
        }
        let anchor = rest[path.len()..].strip_prefix('#').map(|rest| {
            let is_anchor = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
            &rest[..rest.find(|c: char| !is_anchor(c)).unwrap_or(rest.len())]
        });
        let anchor = anchor.map(|anchor| format!("#{anchor}")).unwrap_or_default();
        let line = text[..start].matches('\n').count() + 1;
        pages.push(Link { line, label: None, target: format!("{path}{anchor}") });
    }
    pages
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for line in without_code_blocks(page).lines() {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let slug = slug(heading.trim());
        let again = (1..).map(|times| format!("{slug}-{times}"));
        let free = std::iter::once(slug.clone()).chain(again).find(|name| !anchors.contains(name));
        anchors.extend(free);
    }
    anchors
}

fn slug(heading: &str) -> String {
    let kept = heading.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c),
        _ => None,
    });
    kept.flat_map(char::to_lowercase).collect()
}

/// All pages and sources below a folder, but what is built or hidden.
pub(crate) fn read(root: &Path, folder: &Path, texts: &mut Texts) {
    for entry in fs::read_dir(root.join(folder)).expect("a folder") {
        let entry = entry.expect("an entry");
        let (name, path) = (entry.file_name(), folder.join(entry.file_name()));
        if name.to_string_lossy().starts_with('.') || name == "target" {
            continue;
        }
        if entry.file_type().expect("a type").is_dir() {
            read(root, &path, texts);
        } else if is_page(&path) || path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(root.join(&path)).expect("text");
            texts.insert(path, text);
        }
    }
}

#[test]
fn every_link_leads_to_a_file_and_a_heading_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts = Texts::new();
    read(&root, Path::new(""), &mut texts);
    // The examples of wrong links below.
    texts.remove(Path::new("crates/xtask/src/links.rs"));
    let pages = texts.iter().filter(|(path, _)| is_page(path));
    let found: usize = pages.map(|(_, text)| links(text).len()).sum();
    assert!(found > 100, "only {found} links were found");
    let faults = faults(&texts, |path| root.join(path).exists());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_link_that_leads_nowhere_is_named() {
    let page = "# A `page` of two\n[ok](b.md#the-end) [ok](#a-page-of-two) [ok](https://a.b/c#d)\n\
                [gone](c.md)\n[moved](b.md#an-end) [of\ntwo lines](#none)\n```\n[code](x.md)\n```\n\
                [`a_test_that_is_there`](../src/t.rs) [`a_test_that_is_not`](../src/t.rs)\n";
    let code = "// docs/b.md#the-end says why; docs/adr/*.md too, and ../docs/x.md does not count.\n\
                const RULE: &str = \"docs/b.md#an-end\"; // docs/gone.md.\n\
                fn a_test_that_is_there() {}\n";
    let texts = [("docs/a.md", page), ("docs/b.md", "## The end\n"), ("src/t.rs", code)];
    let texts = texts.map(|(path, text)| (PathBuf::from(path), text.to_owned())).into();
    let expected = [
        "docs/a.md:3: c.md: there is no docs/c.md",
        "docs/a.md:4: b.md#an-end: docs/b.md has no heading #an-end",
        "docs/a.md:5: #none: docs/a.md has no heading #none",
        "docs/a.md:9: ../src/t.rs: src/t.rs has no a_test_that_is_not",
        "src/t.rs:2: docs/b.md#an-end: docs/b.md has no heading #an-end",
        "src/t.rs:2: docs/gone.md: there is no docs/gone.md",
    ];
    assert_eq!(faults(&texts, |_| false), expected);
}

#[test]
fn anchors_are_those_of_github() {
    let page =
        "# Before 2.11.7: the degraded mode\n## P23b\n## `Lease`, and *more*\n## P23b\n#no\n";
    let expected = ["before-2117-the-degraded-mode", "lease-and-more", "p23b", "p23b-1"];
    assert_eq!(anchors(page), expected.map(str::to_owned).into());
}
