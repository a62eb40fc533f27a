//! The harness itself: processes and servers that go with their guard, and faults that do what they say.

mod harness {
    pub(crate) mod process;
    pub(crate) mod proxy;
    pub(crate) mod servers;
}

use std::process::ExitCode;

use libtest_mimic::Arguments;

fn main() -> ExitCode {
    if let Some(code) = harness::process::hold() {
        return code;
    }
    let arguments = Arguments::from_args();
    let mut trials = harness::process::trials();
    trials.extend(harness::proxy::trials());
    trials.extend(harness::servers::trials());
    libtest_mimic::run(&arguments, trials).exit_code()
}
