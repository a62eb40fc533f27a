//! The command as its users meet it: output, exit codes, and what a mistake is answered with.

use std::process::{Command, Output};

use serde_json::Value;

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coord"));
    command.args(args).env_remove("COORD_BACKEND").env_remove("COORD_BACKEND_FILE");
    command
}

/// Runs coord on a store in its own memory, unless the arguments name another one.
fn coord(args: &[&str]) -> Output {
    command(args).env("COORD_BACKEND", "memory://tests").output().expect("the command starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("text")
}

/// A mistake is answered in one line that names it, without a panic or a backtrace.
fn is_refused(args: &[&str], code: i32, names: &[&str]) {
    let output = coord(args);
    let line = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {line}");
    for name in names {
        assert!(line.contains(name), "{args:?} does not name {name}: {line}");
    }
    assert!(!line.contains("panicked"), "{line}");
}

#[test]
fn the_demo_loses_its_leader_and_goes_on() {
    let output = coord(&["demo", "--fast", "--output", "json"]);
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let text = stdout(&output);
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("one value a line")).collect();
    let summary = lines.last().expect("a summary");
    assert_eq!(summary["type"], "summary");
    assert_eq!(summary["held"], true);
    assert_eq!(summary["moved"], serde_json::json!([0, 256, 256]));
    let terms: Vec<u64> =
        summary["terms"].as_array().expect("terms").iter().filter_map(Value::as_u64).collect();
    assert!(terms.len() == 2 && terms[0] < terms[1], "{terms:?}");
    let shares = |step: usize| {
        let done = lines.iter().filter(|line| line["type"] == "done").nth(step).expect("a step");
        let nodes = done["nodes"].as_array().expect("nodes").iter();
        let mut shares: Vec<u64> = nodes.filter_map(|node| node["shards"].as_u64()).collect();
        shares.sort_unstable();
        shares
    };
    assert_eq!(shares(0), [256; 4]);
    assert_eq!(shares(1), [0, 341, 341, 342]);
    assert_eq!(shares(2), [256; 4]);
}

#[test]
fn the_demo_without_a_terminal_is_plain_lines() {
    let output = coord(&["demo", "--fast", "--nodes", "3", "--shards", "10"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{text}");
    assert!(!text.contains('\u{1b}'), "escape codes in plain output: {text:?}");
    let last = text.lines().last().expect("a line");
    assert!(last.starts_with("every step came about and every invariant held"), "{text}");
}

#[test]
fn a_plan_says_what_moves_and_why() {
    let args = ["plan", "--nodes", "a,b,c,d", "--join", "e"];
    let output = coord(&args);
    let expected = "\
node    before     after    gained      lost
a          256       205         0        51
b          256       205         0        51
c          256       205         0        51
d          256       205         0        51
e            0       204       204         0

204 moves (204 balance)
proved: no plan with these shares moves fewer
";
    assert_eq!(stdout(&output), expected);
    let json = coord(&[&args[..], &["--output", "json"]].concat());
    let json: Value = serde_json::from_str(&stdout(&json)).expect("one value");
    assert_eq!((json["moves"].as_u64(), json["optimal"].as_bool()), (Some(204), Some(true)));
}

#[test]
fn a_plan_that_satisfies_not_everything_says_so() {
    let output = coord(&["plan", "--nodes", "a,b", "--replicas", "3"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stdout(&output).contains("not satisfied: "), "{}", stdout(&output));
}

#[test]
fn mistakes_are_named_in_one_line() {
    is_refused(&["plan", "--nodes", "a,b", "--fail", "x"], 2, &["\"x\"", "a, b"]);
    is_refused(&["plan", "--nodes", "a=NaN"], 2, &["NaN", "above 0"]);
    is_refused(&["plan", "--nodes", "a,b", "--pin", "17"], 2, &["\"17\"", "SHARD=NAME"]);
    is_refused(&["plan", "--nodes", "A"], 2, &["\"A\""]);
    is_refused(&["check", "--backend", "zookeeper://h/orders"], 2, &["zookeeper", "memory"]);
    is_refused(&["check", "--backend", "memory://orders?colour=red"], 2, &["colour", "era"]);
    is_refused(&["check", "--backend", "memory://Orders"], 2, &["\"Orders\""]);
    is_refused(&["check", "--backend", "orders"], 2, &["://"]);
    is_refused(&["check", "--backend", "kube://orders"], 2, &["three slashes", ":///"]);
    is_refused(&["lease", "run", "x", "--node", "Bad Node", "--", "true"], 2, &["Bad Node"]);
    is_refused(&["lease", "get", "Bad Name"], 2, &["Bad Name"]);
    is_refused(&["lease", "run", "x", "--ttl", "1ms", "--", "true"], 2, &["1 s to 24 h"]);
    is_refused(&["demo", "--nodes", "1"], 2, &["2..=64"]);
    is_refused(&["plan", "--nodes", "a,b", "--pin", "1=a,1=b"], 2, &["pinned twice"]);
    is_refused(&["plan", "--nodes", "a@z=3"], 2, &["NAME=CAPACITY@ZONE"]);
    let budget = ["lease", "run", "x", "--ttl", "1s", "--stop-budget", "5s", "--", "true"];
    is_refused(&budget, 2, &["--stop-budget 5s", "--ttl 1s", "300ms"]);
    let endless = ["lease", "run", "x", "--stop-budget", "18446744073709551615s", "--", "true"];
    is_refused(&endless, 2, &["--stop-budget"]);
}

#[test]
fn no_password_is_shown() {
    let output = coord(&["check", "--backend", "zookeeper://root:hunter2@h/orders"]);
    assert!(!stderr(&output).contains("hunter2"), "{}", stderr(&output));
    let output = coord(&["check", "nats://root:hunter2@h/orders"]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(!text.contains("hunter2") && text.contains("--backend"), "{text}");
}

/// Nothing says which argument holds a URL: whatever is quoted loses its secrets.
#[test]
fn no_secret_of_a_url_in_the_wrong_place_is_shown() {
    for url in [
        "redis://h/c?sentinel_password=hunter2",
        "redis://h/c?era=1&sentinel_password=a&hunter2",
        "redis://u:hun ter2@h/c",
        "redis://u:hunter2?x@h/c",
        "root:hunter2@h/orders",
    ] {
        for args in [
            &["check", url][..],
            &[url],
            &["lease", "get", url],
            &["lease", "run", url, "--", "true"],
            &["lease", "run", "x", "--node", url, "--", "true"],
            &["lease", "run", "x", "--ttl", url, "--", "true"],
            &["--output", url, "check"],
            &["check", "--backend-file", url],
        ] {
            let output = coord(args);
            let text = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
            assert!(!text.contains("hunter2") && !text.contains("ter2"), "{args:?}: {text}");
        }
    }
}

/// Two runs over the memory of two processes exclude nobody: that is never meant unless it is said.
#[test]
fn without_a_store_nothing_but_the_demo_and_plans_run() {
    let names = ["--backend", "COORD_BACKEND_FILE", "memory://"];
    for args in [
        &["check"][..],
        &["lease", "list"],
        &["lease", "get", "x"],
        &["lease", "release", "x", "--yes"],
        &["lease", "run", "x", "--", "true"],
    ] {
        let output = command(args).output().expect("it starts");
        let line = stderr(&output);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{args:?}: {line}");
        assert!(names.iter().all(|name| line.contains(name)), "{args:?}: {line}");
    }
    let demo = command(&["demo", "--fast", "--nodes", "2", "--shards", "4"]).output();
    assert!(demo.expect("it starts").status.success());
}

#[test]
fn a_file_names_the_store_and_the_command_line_goes_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("store");
    std::fs::write(&path, "memory://from-file\n").expect("written");
    let file = path.to_str().expect("text");
    let target = |command: &mut Command| {
        let output = command.args(["check", "--output", "json"]).output().expect("it starts");
        let text = stdout(&output);
        let json: Value =
            serde_json::from_str(&text).unwrap_or_else(|_| panic!("{}", stderr(&output)));
        json["target"].as_str().map(str::to_owned)
    };
    let by_file = Some("memory://from-file".to_owned());
    assert_eq!(target(command(&["--backend-file", file]).env("COORD_BACKEND", "x")), by_file);
    assert_eq!(target(command(&[]).env("COORD_BACKEND_FILE", file)), by_file);
    let by_line = target(command(&["--backend", "memory://said"]).env("COORD_BACKEND_FILE", file));
    assert_eq!(by_line.as_deref(), Some("memory://said"));

    let refused = |command: &mut Command, part: &str| {
        let output = command.arg("check").output().expect("it starts");
        let line = stderr(&output);
        assert!(output.status.code() == Some(2) && line.contains(part), "{part}: {line}");
    };
    let both = "COORD_BACKEND and COORD_BACKEND_FILE";
    refused(command(&[]).env("COORD_BACKEND_FILE", file).env("COORD_BACKEND", "memory://x"), both);
    refused(command(&["--backend-file", file, "--backend", "memory://x"]).env_clear(), "both name");
    refused(&mut command(&["--backend-file", "/no/such/file"]), "/no/such/file");
    std::fs::write(&path, " \n").expect("written");
    refused(&mut command(&["--backend-file", file]), "is empty");
    std::fs::write(&path, "memory://a\nmemory://b\n").expect("written");
    refused(&mut command(&["--backend-file", file]), "several lines");
}

#[test]
fn the_command_does_not_get_the_store_unless_that_is_asked() {
    let run = |more: &[&str]| {
        let args = [&["lease", "run", "x"], more, &["--", "sh", "-c", "echo \"<$COORD_BACKEND>\""]];
        stdout(&coord(&args.concat())).trim().to_owned()
    };
    assert_eq!(run(&[]), "<>");
    assert_eq!(run(&["--pass-backend"]), "<memory://tests>");
}

#[test]
fn the_version_names_the_commit_and_the_stores() {
    let text = stdout(&coord(&["--version"]));
    assert!(text.starts_with("coord ") && text.contains("backends: "), "{text}");
    assert!(text.contains("memory") && text.contains("commit "), "{text}");
    // These tests are run in the repository.
    assert!(!text.contains("unknown"), "{text}");
}

#[test]
fn no_colours_go_into_a_pipe() {
    let output = coord(&["-vv", "lease", "run", "x", "--", "true"]);
    let text = stderr(&output);
    assert!(text.contains("lease acquired") && !text.contains('\u{1b}'), "{text:?}");
}

#[test]
fn every_ttl_can_be_run_with() {
    for ttl in ["1s", "3s", "24h"] {
        let output = coord(&["lease", "run", "x", "--ttl", ttl, "--", "true"]);
        assert_eq!(output.status.code(), Some(0), "{ttl}: {}", stderr(&output));
    }
}

#[test]
fn help_tells_commands_and_exit_codes() {
    let output = coord(&["--help"]);
    let text = stdout(&output);
    assert!(output.status.success());
    for word in ["demo", "plan", "lease", "check", "Exit codes", "COORD_BACKEND"] {
        assert!(text.contains(word), "{word} is missing: {text}");
    }
}

#[test]
fn check_and_the_lease_commands_work() {
    let output = coord(&["check", "--output", "json"]);
    let json: Value = serde_json::from_str(&stdout(&output)).expect("one value");
    assert_eq!(json["status"], "good");
    assert_eq!(json["promises"]["consistency"], "linearizable");
    let keys = json["promises"].as_object().expect("an object").keys();
    for key in keys.chain(json.as_object().expect("an object").keys()) {
        assert!(key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{key}");
    }
    assert!(coord(&["check", "--strict"]).status.success());
    assert!(coord(&["lease", "list"]).status.success());
    assert_eq!(coord(&["lease", "get", "nightly"]).status.code(), Some(1));
    assert_eq!(coord(&["lease", "release", "nightly", "--yes"]).status.code(), Some(1));
}

#[cfg(unix)]
#[test]
fn lease_run_hands_on_exit_code_and_fence() {
    let run = |args: &[&str]| coord(&[&["lease", "run", "nightly", "--"], args].concat());
    let output = run(&["sh", "-c", "echo $COORD_LEASE $COORD_TERM; exit 7"]);
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    let text = stdout(&output);
    let (lease, term) = text.trim().split_once(' ').expect("two words");
    assert_eq!(lease, "nightly");
    assert!(term.parse::<u64>().expect("a number") > 0);
    assert_eq!(run(&["no-such-program-here"]).status.code(), Some(127));
    assert_eq!(run(&["/"]).status.code(), Some(126));
}

/// A process that was paused past the TTL finds everything ready at once, and says what came first.
#[cfg(unix)]
#[test]
fn lease_run_that_was_paused_past_its_ttl_says_that_the_lease_was_lost() {
    use std::io::Read as _;
    use std::process::Stdio;

    for _ in 0..3 {
        let mut running = Command::new(env!("CARGO_BIN_EXE_coord"))
            .args([
                "--backend",
                "memory://tests",
                "lease",
                "run",
                "x",
                "--ttl",
                "1s",
                "--",
                "sh",
                "-c",
                "echo up; sleep 1.2; echo ok",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let mut out = running.stdout.take().expect("piped");
        out.read_exact(&mut [0; 3]).expect("it says that it is up");
        let signal = |name: &str| {
            let id = running.id().to_string();
            assert!(Command::new("kill").args([name, &id]).status().expect("kill runs").success());
        };
        signal("-STOP");
        out.read_exact(&mut [0; 3]).expect("it ends, after the TTL");
        signal("-CONT");
        let output = running.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(76), "{}", stderr(&output));
        assert!(stderr(&output).contains("was lost"), "{}", stderr(&output));
    }
}

#[cfg(unix)]
#[test]
fn lease_run_stops_its_command_when_it_is_told_to_stop() {
    use std::io::Read as _;
    use std::process::Stdio;

    // The command says when it is there, and outlives its own shell unless the group is stopped.
    // A run of this test under nohup ignores the signal; coord is not to inherit that.
    let mut running = Command::new("env")
        .args([
            "--default-signal=HUP",
            env!("CARGO_BIN_EXE_coord"),
            "--backend",
            "memory://tests",
            "lease",
            "run",
            "nightly",
            "--",
            "sh",
            "-c",
            "trap 'echo stopped; exit 3' TERM; echo up; while :; do sleep 0.05; done",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut out = running.stdout.take().expect("piped");
    let mut up = [0; 3];
    out.read_exact(&mut up).expect("it says that it is up");
    let told =
        Command::new("kill").args(["-HUP", &running.id().to_string()]).status().expect("kill runs");
    assert!(told.success());
    let status = running.wait().expect("it ends");
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("text");
    assert_eq!((status.code(), rest.trim()), (Some(3), "stopped"));
}
