//! Processes that can't outlive a test, and their clocks.

use std::io::Write as _;
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use coord_integration::faults::Clock;
use coord_integration::servers::Process;
use coord_integration::{trial, until};
use libtest_mimic::{Failed, Trial};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(10);
/// Names the folder in which this program, started again, is to hold a process.
const HOLD: &str = "COORD_HARNESS_HOLD";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("process::goes_with_its_guard_and_its_children", goes_with_its_guard),
        Trial::test("process::goes_in_a_panic", goes_in_a_panic),
        Trial::test("process::goes_when_the_test_is_killed", goes_when_the_test_is_killed),
        Trial::test("process::stands_still_while_paused", stands_still_while_paused),
        trial("process::has_a_clock_of_its_own", &Clock::new().map(Arc::new), has_a_clock),
    ]
}

/// A shell with a child; both of their ids are in the log.
fn family(folder: &Path) -> std::io::Result<(Process, [u32; 2])> {
    let mut command = Command::new("sh");
    command.args(["-c", "sleep 600 & echo \"child $! of $$\"; wait"]);
    let mut process = Process::spawn(command, &folder.join("family.log"))?;
    let line = process.wait_for_line(" of ", LIMIT)?;
    let child = line.split(' ').nth(1).and_then(|id| id.parse().ok());
    let ids = [process.id(), child.ok_or_else(|| std::io::Error::other(line.clone()))?];
    Ok((process, ids))
}

fn goes_with_its_guard() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let (process, ids) = family(folder.path())?;
    assert!(ids.iter().all(|id| state(*id).is_some()), "both live");
    drop(process);
    all_go(&ids)
}

fn goes_in_a_panic() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let (process, ids) = family(folder.path())?;
    let caught = catch_unwind(move || {
        let _process = process;
        // Not `panic!`: its message would stand in the output as if a test had failed.
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    assert!(caught.is_err());
    all_go(&ids)
}

fn goes_when_the_test_is_killed() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.env(HOLD, folder.path());
    let mut test = Process::spawn(command, &folder.path().join("test.log"))?;
    let line = test.wait_for_line("holds ", LIMIT)?;
    let ids: Vec<u32> = line.split(' ').skip(1).map(str::parse).collect::<Result<_, _>>()?;
    assert!(ids.len() == 2 && ids.iter().all(|id| state(*id).is_some()), "both live: {line}");
    test.kill()?;
    all_go(&ids)
}

/// What [`goes_when_the_test_is_killed`] starts.
pub(crate) fn hold() -> Option<ExitCode> {
    let folder = std::env::var_os(HOLD)?;
    let Ok((mut process, [id, child])) = family(Path::new(&folder)) else {
        return Some(ExitCode::FAILURE);
    };
    let told = writeln!(std::io::stdout(), "holds {id} {child}");
    let ended = told.and_then(|()| process.wait(Duration::from_secs(600)));
    Some(if ended.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn stands_still_while_paused() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let (mut process, [id, _]) = family(folder.path())?;
    process.pause()?;
    until(LIMIT, || (state(id) == Some('T')).then_some(())).ok_or("it was not paused")?;
    process.resume()?;
    until(LIMIT, || (state(id) == Some('S')).then_some(())).ok_or("it did not go on")?;
    process.kill()?;
    assert!(process.pause().is_err(), "what has ended can't be paused");
    Ok(())
}

fn has_a_clock(clock: Arc<Clock>) -> Result<(), Failed> {
    let seconds = |moved: bool| -> Result<i64, Failed> {
        let mut command = Command::new("date");
        command.arg("+%s");
        if moved {
            clock.give(&mut command);
        }
        Ok(String::from_utf8(command.output()?.stdout)?.trim().parse()?)
    };
    for jump in [0, 3_600, -3_600] {
        clock.jump(jump)?;
        let difference = seconds(true)? - seconds(false)?;
        assert!((difference - jump).abs() <= 5, "asked for {jump} s, got {difference} s");
    }
    Ok(())
}

fn all_go(ids: &[u32]) -> Result<(), Failed> {
    let gone = || ids.iter().all(|id| state(*id).is_none()).then_some(());
    until(LIMIT, gone).ok_or_else(|| format!("some of {ids:?} are left").into())
}

/// The state of a process (`S`, `T`, …); none if it is gone or only not yet waited for.
pub(crate) fn state(id: u32) -> Option<char> {
    let output = Command::new("ps").args(["-o", "state=", "-p", &id.to_string()]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.chars().next().filter(|state| *state != 'Z')
}
