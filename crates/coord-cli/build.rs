//! Tells the program of which commit it is made, where that can be known.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // No commit is no error: the sources may come without their repository, the machine without git.
    if let Some(commit) = published().or_else(checked_out) {
        println!("cargo::rustc-env=COORD_COMMIT={commit}");
    }
}

/// The commit that a published package says it was made of.
fn published() -> Option<String> {
    let text = std::fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let (_, rest) = text.split_once("\"sha1\":")?;
    let commit = rest.trim_start().strip_prefix('"')?.get(..12)?;
    commit.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| commit.to_owned())
}

/// The commit that is checked out, if this package belongs to the repository around it.
fn checked_out() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "Cargo.toml"])?;
    for file in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", file])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
