//! What the suite does not look at: authentication, encryption, restarts, lost replies, compaction,
//! a leader's death, what stays behind.

mod server {
    pub(crate) mod away;
    pub(crate) mod lost;
    pub(crate) mod maps;
    pub(crate) mod setup;
    pub(crate) mod users;
    pub(crate) mod watches;
}

use libtest_mimic::Arguments;

fn main() -> std::process::ExitCode {
    let mut trials = server::users::trials();
    trials.extend(server::away::trials());
    trials.extend(server::watches::trials());
    trials.extend(server::lost::trials());
    trials.extend(server::maps::trials());
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
