//! Which process a registration is of, so that its successor on the same machine can prove it dead.

use std::fs;

use coord_core::ProcessMark;

/// The variable that holds the uid of the pod that a process runs in.
const POD_UID: &str = "COORD_POD_UID";

/// What is known of a former process of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Former {
    /// It runs on this machine.
    Alive,
    /// Nothing of it runs any more.
    Dead,
    /// It can't be seen from here.
    Unknown,
}

/// The mark of this process; none where the system does not tell.
pub(crate) fn this() -> Option<ProcessMark> {
    let mark = of(std::process::id())?;
    Some(match std::env::var(POD_UID) {
        Ok(uid) if !uid.is_empty() => mark.with_pod(uid),
        _ => mark,
    })
}

/// The mark of a process that this one sees.
pub(crate) fn of(pid: u32) -> Option<ProcessMark> {
    // The mounted /proc may be that of another namespace, where the same number is another process.
    let shown = fs::read_link("/proc/self").ok()?;
    if shown.to_str()?.parse() != Ok(std::process::id()) {
        return None;
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned();
    // In another time namespace the kernel shows the start of the same process as another time.
    let namespace = format!("{} {}", namespace("pid")?, namespace("time")?);
    let (_, started) = stat(pid)?;
    (!boot.is_empty()).then(|| ProcessMark::new(boot, namespace, pid, started))
}

/// A link like `pid:[4026531836]`.
fn namespace(kind: &str) -> Option<String> {
    Some(fs::read_link(format!("/proc/self/ns/{kind}")).ok()?.to_str()?.to_owned())
}

/// What this process, `me`, can tell of another one.
pub(crate) fn judge(me: &ProcessMark, other: &ProcessMark) -> Former {
    if me.boot != other.boot {
        // Another machine, or this one before it was started anew, which can't be told apart.
        return Former::Unknown;
    }
    if me.namespace == other.namespace {
        return match (stat(other.pid), shows_all()) {
            (Some((state, started)), _) if started == other.started => {
                match matches!(state, 'Z' | 'X') && is_single(other.pid) {
                    true => Former::Dead,
                    false => Former::Alive,
                }
            }
            (Some(_), _) | (None, true) => Former::Dead,
            (None, false) => Former::Unknown,
        };
    }
    // A pod's container is started again only once its last one is gone, and in another namespace.
    let pids = |mark: &ProcessMark| mark.namespace.split(' ').next().map(str::to_owned);
    match me.pod.is_some() && me.pod == other.pod && pids(me) != pids(other) {
        true => Former::Dead,
        false => Former::Unknown,
    }
}

/// The state of a process, and when it started, in ticks since the machine did.
fn stat(pid: u32) -> Option<(char, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold anything, parentheses too.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // The state is the third field, and the start the 22nd.
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// Whether no thread is left but the one that ended first.
fn is_single(pid: u32) -> bool {
    fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|tasks| tasks.count() <= 1)
}

/// Whether the processes of other users are shown as well.
fn shows_all() -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut proc = mounts.lines().filter(|line| line.split(' ').nth(4) == Some("/proc")).peekable();
    let hides = |line: &str| {
        let option = line.split([' ', ',']).find_map(|word| word.strip_prefix("hidepid="));
        option.is_some_and(|value| !matches!(value, "0" | "off"))
    };
    proc.peek().is_some() && !proc.any(hides)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_that_was_killed_is_dead_and_one_that_runs_is_not() {
        let me = this().expect("this system tells");
        assert_eq!(judge(&me, &me), Former::Alive);
        let mut child = Command::new("sleep").arg("600").spawn().expect("it starts");
        let other = of(child.id()).expect("it is seen");
        assert_eq!(judge(&me, &other), Former::Alive);
        child.kill().expect("it is there");
        child.wait().expect("it ended");
        assert_eq!(judge(&me, &other), Former::Dead);
    }

    #[test]
    fn another_process_with_the_same_number_is_not_the_same() {
        let me = this().expect("this system tells");
        let mut other = me.clone();
        other.started += 1;
        assert_eq!(judge(&me, &other), Former::Dead);
    }

    #[test]
    fn what_another_machine_or_container_runs_is_not_known() {
        let me = this().expect("this system tells");
        let elsewhere = ProcessMark::new("another", me.namespace.clone(), me.pid, me.started);
        assert_eq!(judge(&me, &elsewhere), Former::Unknown);
        let inside = ProcessMark::new(me.boot.clone(), "pid:[1]", 7, 7);
        assert_eq!(judge(&me, &inside), Former::Unknown);
        let before = inside.with_pod("pod-1");
        assert_eq!(judge(&me, &before), Former::Unknown);
        assert_eq!(judge(&me.clone().with_pod("pod-2"), &before), Former::Unknown);
        assert_eq!(judge(&me.with_pod("pod-1"), &before), Former::Dead);
    }
}
