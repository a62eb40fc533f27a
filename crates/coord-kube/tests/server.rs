//! What the suite does not look at: permissions, credentials, answers that a server gives when it is
//! in trouble, other programs' Leases, restarts, what stays behind, a pod's service account.

mod server {
    pub(crate) mod altered;
    pub(crate) mod away;
    pub(crate) mod interop;
    pub(crate) mod left;
    pub(crate) mod pod;
    pub(crate) mod rights;
    pub(crate) mod setup;
}

use libtest_mimic::Arguments;

fn main() -> std::process::ExitCode {
    if let Ok(cluster) = std::env::var(server::pod::INSIDE) {
        return server::pod::inside(&cluster);
    }
    let mut trials = server::rights::trials();
    trials.extend(server::altered::trials());
    trials.extend(server::away::trials());
    trials.extend(server::interop::trials());
    trials.extend(server::left::trials());
    trials.push(server::pod::trial());
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
