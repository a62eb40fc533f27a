//! The programs of the servers on this machine.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program that `variable` names, else one on the PATH, else the newest in the servers' folder: the
/// first of them that `fits`. The error says where it was looked for.
pub(super) fn program(
    variable: &str,
    names: &[&str],
    fits: impl Fn(&Path) -> bool,
) -> Result<PathBuf, String> {
    let given = env::var_os(variable).map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = names.iter().flat_map(|name| {
        env::split_paths(&path).map(move |folder| folder.join(name)).filter(|path| path.is_file())
    });
    let in_folder = names.iter().flat_map(|name| versions(name).into_iter().rev());
    let mut all = given.into_iter().chain(on_path).chain(in_folder.map(|(_, program)| program));
    let mut any = false;
    let mut look = |program: &PathBuf| {
        any = true;
        fits(program)
    };
    let found = all.find(&mut look);
    found.ok_or_else(|| {
        let (names, folder) = (names.join(" or "), folder());
        let folder = folder.display();
        match any {
            false => format!(
                "{variable} is not set, and there is no {names} on the PATH nor in {folder}; \
                     .ci/servers brings one"
            ),
            true => format!(
                "no {names} from {variable}, the PATH or {folder} speaks TLS; .ci/servers \
                     brings one that does"
            ),
        }
    })
}

/// The program with this version in the servers' folder.
pub(super) fn exact(names: &[&str], version: &str) -> Result<PathBuf, String> {
    let folder = folder();
    let program = |name: &&str| folder.join(format!("{name}-{version}"));
    names.iter().map(program).find(|program| program.is_file()).ok_or_else(|| {
        let (names, folder) = (names.join(" or "), folder.display());
        format!("there is no {names} {version} in {folder}; .ci/servers brings some versions")
    })
}

/// All versions of a program (`nats-server`, `etcd`) in the servers' folder, the oldest first.
#[must_use]
pub fn versions(name: &str) -> Vec<(String, PathBuf)> {
    let Ok(entries) = std::fs::read_dir(folder()) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .flatten()
        .filter_map(|entry| {
            let file = entry.file_name().into_string().ok()?;
            let version = file.strip_prefix(name)?.strip_prefix('-')?.to_owned();
            Some((numbers(&version)?, version, entry.path()))
        })
        .collect();
    found.sort();
    found.into_iter().map(|(_, version, path)| (version, path)).collect()
}

/// What a program says its version is: the first three numbers with dots in its `--version`.
#[must_use]
pub fn version(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let word = |word: &str| {
        let word = word.trim_start_matches(|c: char| !c.is_ascii_digit());
        numbers(word).map(|_| word.to_owned())
    };
    text.split_whitespace().find_map(word)
}

fn numbers(version: &str) -> Option<[u32; 3]> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    let numbers = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(numbers)
}

/// Where `.ci/servers` puts programs.
pub(crate) fn folder() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/servers");
    env::var_os("COORD_SERVERS_DIR").map_or_else(default, PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_numbers_not_words() {
        assert_eq!(numbers("2.11.7"), Some([2, 11, 7]));
        assert!(numbers("2.9.10") < numbers("2.11.7"));
        assert_eq!(numbers("2.11.7.new"), None);
        assert_eq!(numbers("3.4"), None);
    }

    #[test]
    fn a_program_that_is_nowhere_is_missed_by_name() {
        let reason = program("COORD_TEST_NO_SUCH", &["no-such-server"], |_| true)
            .expect_err("it is nowhere");
        assert!(reason.contains("COORD_TEST_NO_SUCH") && reason.contains("no-such-server"));
    }
}
