//! What a test run came to: how many trials passed, failed and were not run, and what they lacked.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use anyhow::{Result, bail};

/// What tests may want: the backends, and tools.
const KNOWN: [&str; 7] = ["memory", "nats", "etcd", "kube", "redis", "containers", "libfaketime"];
/// The command that brings what the scripts of this repository fetch.
const SERVERS: &str = ".ci/servers && source target/servers/env";
/// How much of a reason is shown, in characters.
const REASON_MAX: usize = 100;

/// Refuses what `COORD_REQUIRE` can't name.
pub(crate) fn check_required(required: &str) -> Result<()> {
    let mut names = required.split(',').map(str::trim).filter(|name| !name.is_empty());
    match names.find(|name| !KNOWN.contains(name)) {
        Some(odd) => bail!("COORD_REQUIRE names {odd:?}; known are {}", KNOWN.join(", ")),
        None => Ok(()),
    }
}

/// How many trials there were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    programs: u64,
    passed: u64,
    failed: u64,
    not_run: u64,
}

impl Counts {
    /// Adds what the test programs whose output this is have said at their end.
    pub(crate) fn add(&mut self, output: &str) {
        let results = output.lines().filter_map(|line| line.split_once("test result: "));
        for (_, result) in results {
            self.programs += 1;
            let numbers = result.split([';', '.']).filter_map(|part| {
                let (number, what) = part.trim().split_once(' ')?;
                Some((number.parse::<u64>().ok()?, what))
            });
            for (number, what) in numbers {
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.not_run += number,
                    _ => {}
                }
            }
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { programs, passed, failed, not_run } = self;
        if *programs == 0 {
            return f.write_str("no test was run");
        }
        write!(f, "{passed} passed, {failed} failed, {not_run} not run")
    }
}

/// One line for each thing that was not there, with the one command that brings it. `told` is what the
/// tests have written: what it is, whether it is absent or broken, and the reason, between tabs.
pub(crate) fn lacking(told: &str) -> String {
    let mut things = BTreeMap::new();
    for line in told.lines() {
        let mut parts = line.splitn(3, '\t');
        let (Some(what), Some(how), Some(reason)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        // What is broken is told before what some test could not find.
        things.entry((what, how != "broken")).or_insert(reason);
    }
    let mut lines = String::new();
    for ((what, is_absent), reason) in things {
        let reason: String = reason.chars().take(REASON_MAX).collect();
        // Writing to a text can't fail.
        let _ = match (is_absent, brings(what)) {
            (false, _) => writeln!(lines, "broken: {what}: {reason}"),
            (true, Some(command)) => writeln!(lines, "not here: {what}; to bring it: {command}"),
            (true, None) => writeln!(lines, "not here: {what}: {reason}"),
        };
    }
    lines
}

fn brings(what: &str) -> Option<&'static str> {
    match what {
        "nats" | "nats-2.10" | "etcd" | "redis" | "libfaketime" => Some(SERVERS),
        "kube" => Some("export KUBEBUILDER_ASSETS=$(setup-envtest use --print path)"),
        "containers" => Some("sudo systemctl start docker"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_all_programs_are_added_up() {
        let mut counts = Counts::default();
        assert_eq!(counts.to_string(), "no test was run");
        counts.add(
            "running 3 tests\ntest a ... ok\n\
             test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured; 7 filtered out; finished in 0.01s\n",
        );
        counts.add(
            "test result: FAILED. 10 passed; 1 failed; 30 ignored; 0 measured; 0 filtered out; finished in 1.00s",
        );
        assert_eq!(counts.to_string(), "11 passed, 1 failed, 32 not run");
    }

    #[test]
    fn each_thing_that_is_not_there_has_one_line_with_its_command() {
        let told = format!(
            "nats\tabsent\tCOORD_TEST_NATS_URL is not set; {}\n\
             kube\tabsent\tnone of them is set\n\
             nats\tabsent\tanother reason\n\
             etcd\tbroken\tit does not start\n\
             a thing\tabsent\t{}\n",
            "x".repeat(400),
            "y".repeat(400),
        );
        let lines = lacking(&told);
        let lines: Vec<_> = lines.lines().collect();
        let [thing, etcd, kube, nats] = lines[..] else { panic!("{lines:?}") };
        assert!(thing.starts_with("not here: a thing: yyy") && thing.len() < 130, "{thing}");
        assert_eq!(etcd, "broken: etcd: it does not start");
        assert!(kube.contains("KUBEBUILDER_ASSETS"), "{kube}");
        assert_eq!(nats, "not here: nats; to bring it: .ci/servers && source target/servers/env");
        assert_eq!(lacking(""), "");
    }

    #[test]
    fn what_is_required_has_a_known_name() {
        assert!(check_required("").is_ok() && check_required("memory, etcd").is_ok());
        let error = check_required("etcd,zookeeper").expect_err("unknown").to_string();
        assert!(error.contains("\"zookeeper\"") && error.contains("redis"), "{error}");
    }
}
