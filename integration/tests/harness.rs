//! The harness itself: processes and servers that go with their guard, and faults that do what they say.

mod harness {
    pub(crate) mod process;
    pub(crate) mod proxy;
    pub(crate) mod servers;
    pub(crate) mod sources;
    #[cfg(feature = "tls")]
    pub(crate) mod tls;
}

use std::process::ExitCode;

use libtest_mimic::Arguments;

fn main() -> ExitCode {
    if let Some(code) = harness::process::hold().or_else(harness::sources::tell) {
        return code;
    }
    let arguments = Arguments::from_args();
    let mut trials = harness::process::trials();
    trials.extend(harness::proxy::trials());
    trials.extend(harness::servers::trials());
    trials.extend(harness::sources::trials());
    #[cfg(feature = "tls")]
    trials.extend(harness::tls::trials());
    libtest_mimic::run(&arguments, trials).exit_code()
}
