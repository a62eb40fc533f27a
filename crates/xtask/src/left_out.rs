//! What a test run did not cover, and whether that was asked for.

use std::fmt;
use std::path::Path;

use anyhow::{Result, bail};

/// The backends that talk to a server.
const BACKENDS: [&str; 4] = ["nats", "etcd", "kube", "redis"];

/// What else tests may want.
const TOOLS: [&str; 2] = ["containers", "libfaketime"];

/// The backends whose tests could not run, with the reason for each.
#[derive(Debug)]
pub(crate) struct LeftOut(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    backend: &'static str,
    reason: String,
    required: bool,
}

impl LeftOut {
    /// Whether something was left out that `COORD_REQUIRE` names.
    pub(crate) fn fails(&self) -> bool {
        self.0.iter().any(|entry| entry.required)
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Entry { backend, reason, required } in &self.0 {
            let word = if *required { "FAILED (required)" } else { "left out" };
            writeln!(f, "{word}: {backend}: {reason}")?;
        }
        match self.0.len() {
            0 => f.write_str("nothing was left out"),
            n => write!(f, "{n} of {} backends left out, see above", BACKENDS.len()),
        }
    }
}

/// Finds what the workspace at `root` cannot test, and what of that is required.
pub(crate) fn find(root: &Path, required: &str) -> Result<LeftOut> {
    let required: Vec<&str> =
        required.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let known = [&["memory"], &BACKENDS[..], &TOOLS[..]].concat();
    if let Some(odd) = required.iter().find(|name| !known.contains(name)) {
        bail!("COORD_REQUIRE names {odd:?}; known are {}", known.join(", "));
    }
    let missing = BACKENDS.iter().filter(|name| {
        let manifest = root.join("crates").join(format!("coord-{name}")).join("Cargo.toml");
        !manifest.is_file()
    });
    let entry = |backend: &&'static str| Entry {
        backend,
        reason: format!("this workspace has no crate coord-{backend} yet"),
        required: required.contains(backend),
    };
    Ok(LeftOut(missing.map(entry).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_and_fails_only_if_required() {
        let nowhere = Path::new("no-such-folder");
        let left_out = find(nowhere, "").expect("nothing required");
        assert!(!left_out.fails());
        assert!(left_out.to_string().contains("left out: redis: this workspace has no crate"));
        let left_out = find(nowhere, "memory, etcd").expect("known names");
        assert!(left_out.fails());
        assert!(left_out.to_string().contains("FAILED (required): etcd"));
        assert!(find(nowhere, "zookeeper").is_err());
    }
}
