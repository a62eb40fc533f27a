//! The signals that would end this process, taken so that it decides what becomes of its command.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

/// What a signal is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meant {
    /// It asks the process that receives it to end.
    ToEnd,
    /// It says something that only the command can know.
    ForTheCommand,
}

/// Every signal that ends a process which does not take it and that can be taken, with its meaning. Left
/// out are those that tell of a fault of this process itself, and SIGPIPE, which Rust ignores.
const TAKEN: &[(Signal, &str, Meant)] = &[
    (Signal::INT, "SIGINT", Meant::ToEnd),
    (Signal::TERM, "SIGTERM", Meant::ToEnd),
    (Signal::HUP, "SIGHUP", Meant::ToEnd),
    (Signal::QUIT, "SIGQUIT", Meant::ToEnd),
    (Signal::XCPU, "SIGXCPU", Meant::ToEnd),
    (Signal::XFSZ, "SIGXFSZ", Meant::ToEnd),
    #[cfg(target_os = "linux")]
    (Signal::POWER, "SIGPWR", Meant::ToEnd),
    (Signal::USR1, "SIGUSR1", Meant::ForTheCommand),
    (Signal::USR2, "SIGUSR2", Meant::ForTheCommand),
    (Signal::ALARM, "SIGALRM", Meant::ForTheCommand),
    (Signal::VTALARM, "SIGVTALRM", Meant::ForTheCommand),
    (Signal::PROF, "SIGPROF", Meant::ForTheCommand),
    #[cfg(target_os = "linux")]
    (Signal::IO, "SIGIO", Meant::ForTheCommand),
    #[cfg(target_os = "linux")]
    (Signal::STKFLT, "SIGSTKFLT", Meant::ForTheCommand),
];

/// The real-time signals. They can't be sent on by name, so they ask to end.
#[cfg(target_os = "linux")]
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;
#[cfg(not(target_os = "linux"))]
const REAL_TIME: std::ops::Range<i32> = 0..0;

/// What the signal with this number is for.
pub(crate) fn meaning(signal: i32) -> Meant {
    let taken = TAKEN.iter().find(|(taken, ..)| taken.as_raw() == signal);
    taken.map_or(Meant::ToEnd, |(.., meant)| *meant)
}

/// The signal's name, such as `SIGTERM`.
pub(crate) fn name(signal: i32) -> String {
    const STOPPING: [(Signal, &str); 4] = [
        (Signal::STOP, "SIGSTOP"),
        (Signal::TSTP, "SIGTSTP"),
        (Signal::TTIN, "SIGTTIN"),
        (Signal::TTOU, "SIGTTOU"),
    ];
    let taken = TAKEN.iter().map(|(taken, name, _)| (*taken, *name));
    let mut all = taken.chain(STOPPING);
    let known = all.find(|(known, _)| known.as_raw() == signal);
    known.map_or_else(|| format!("signal {signal}"), |(_, name)| name.to_owned())
}

/// The signals as they come.
#[derive(Debug)]
pub(crate) struct Signals(Vec<(i32, unix::Signal)>);

impl Signals {
    /// Takes them from now on. One that was ignored when this process began stays ignored, here and in
    /// the command: `nohup` and a shell's background jobs mean it so.
    pub(crate) fn take() -> io::Result<Self> {
        let ignored = ignored();
        let named = TAKEN.iter().map(|(signal, ..)| signal.as_raw());
        let taken = named.chain(REAL_TIME).filter(|signal| !is_among(*signal, ignored));
        let stream = |signal| Ok((signal, unix::signal(SignalKind::from_raw(signal))?));
        taken.map(stream).collect::<io::Result<_>>().map(Self)
    }

    /// The number of the next one.
    pub(crate) async fn next(&mut self) -> i32 {
        poll_fn(|context| {
            for (signal, stream) in &mut self.0 {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}

fn is_among(signal: i32, mask: u64) -> bool {
    u32::try_from(signal - 1)
        .ok()
        .and_then(|bit| mask.checked_shr(bit))
        .is_some_and(|bits| bits & 1 == 1)
}

/// The signals that this process ignores, as the kernel's mask: bit 0 is signal 1.
#[cfg(target_os = "linux")]
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_in(&status)
}

/// Nothing that is safe to call tells it there.
#[cfg(not(target_os = "linux"))]
fn ignored() -> u64 {
    0
}

#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux tells it"))]
fn ignored_in(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_is_read_from_the_kernel() {
        let mask =
            ignored_in("Name:\tcoord\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001003\n");
        for (signal, is) in [(1, true), (2, true), (3, false), (13, true), (15, false), (64, false)]
        {
            assert_eq!(is_among(signal, mask), is, "{signal}");
        }
        assert_eq!(ignored_in("Name:\tcoord\nSigIgn:\tx\n"), 0);
        assert_eq!(ignored_in(""), 0);
    }

    #[test]
    fn each_signal_has_a_name_and_a_meaning() {
        assert_eq!((name(15), meaning(15)), ("SIGTERM".to_owned(), Meant::ToEnd));
        assert_eq!((name(10), meaning(10)), ("SIGUSR1".to_owned(), Meant::ForTheCommand));
        assert_eq!((name(34), meaning(34)), ("signal 34".to_owned(), Meant::ToEnd));
        assert_eq!(name(Signal::TTIN.as_raw()), "SIGTTIN");
    }
}
