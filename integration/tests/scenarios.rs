//! The failure scenarios of a whole cluster on real servers: each member is a process of its own, behind
//! a proxy of its own, and what the members did and saw is checked as one history.
//!
//! Run one store's with `cargo test -p coord-integration --test scenarios nats::`.

mod scenarios {
    pub(crate) mod backends;
    pub(crate) mod bounds;
    pub(crate) mod candidates;
    pub(crate) mod checks;
    pub(crate) mod driver;
    pub(crate) mod figures;
    pub(crate) mod host;
    pub(crate) mod hosted;
    pub(crate) mod kv;
    pub(crate) mod leaders;
    pub(crate) mod ledger;
    pub(crate) mod load;
    pub(crate) mod member;
    pub(crate) mod misled;
    pub(crate) mod nodes;
    pub(crate) mod recording;
    pub(crate) mod replies;
    pub(crate) mod rolling;
    pub(crate) mod said;
    pub(crate) mod service;
    pub(crate) mod stores;
}

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// The trials mostly wait. More of them at once would starve each other on two cores.
const TRIALS_AT_ONCE: usize = 4;

/// Puts the trials that need much of the machine among those that mostly wait.
fn spread(waiting: Vec<Trial>, busy: Vec<Trial>) -> Vec<Trial> {
    let every = waiting.len() / busy.len().max(1) + 1;
    let (mut trials, mut busy) = (Vec::new(), busy.into_iter());
    for (number, trial) in waiting.into_iter().enumerate() {
        if number % every == 0 {
            trials.extend(busy.next());
        }
        trials.push(trial);
    }
    trials.extend(busy);
    trials
}

fn main() -> ExitCode {
    if let Some(code) = scenarios::member::run() {
        return code;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(TRIALS_AT_ONCE);
    let mut trials = scenarios::checks::trials();
    trials.extend(scenarios::bounds::trials());
    trials.extend(scenarios::hosted::trials());
    trials.extend(scenarios::leaders::trials());
    trials.extend(scenarios::load::trials());
    trials.extend(scenarios::kv::trials());
    trials.extend(scenarios::misled::trials());
    trials.extend(scenarios::nodes::trials());
    trials.extend(scenarios::rolling::trials());
    trials.extend(scenarios::stores::trials());
    trials.extend(scenarios::replies::trials());
    let trials = spread(trials, scenarios::candidates::trials());
    let conclusion = libtest_mimic::run(&arguments, trials);
    scenarios::figures::tell();
    conclusion.exit_code()
}
