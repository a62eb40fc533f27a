//! The decisions of `coord lease run`, from the first signal to the end of the command. Pure.

use rustix::process::Signal;

use crate::signals::{Meant, meaning};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// coord got this signal.
    Signal(i32),
    /// The lease is held.
    Acquired,
    /// The lease can't be had.
    NotAcquired,
    /// The lease is lost.
    Lost,
    /// The command was stopped by this signal: it may go on later.
    Stopped(i32),
    /// The command goes on.
    Continued,
    /// The command has ended, and the lease is still held at this moment, or not.
    Ended { held: bool },
    /// The time in which the command may end by itself is over.
    BudgetSpent,
}

/// What the driver does, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Start the command.
    Start,
    /// Send the command, and its group if it has one of its own, this signal.
    Send(i32),
    /// Send this signal to the command alone: what it has started may not know it, and would end.
    PassOn(i32),
    /// Hand in `BudgetSpent` after the stop budget.
    StartBudget,
    /// Tell the user.
    Say(Note),
    /// Release the lease, or clean up what the acquire may have left, and end.
    End(End),
}

/// What the user is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// A signal for the command came while there is none.
    NoCommandYet(i32),
    /// The command was stopped (SIGSTOP, SIGTSTP), and keeps its lease.
    Stopped(i32),
    /// The command goes on.
    Continued,
    /// The command asks for a terminal that it can't have, and is ended.
    WantsTerminal(i32),
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// By this signal, before the command was started.
    Told(i32),
    /// The lease could not be had.
    NotAcquired,
    /// The command has ended: its exit code is handed on.
    Ended,
    /// The lease was lost; the command was stopped, or had ended by itself.
    Lost { stopped: bool },
}

/// One `lease run`.
#[derive(Debug)]
pub(super) struct Machine {
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No command runs yet.
    Waiting,
    /// The command runs.
    Running {
        own_group: bool,
        stopped: bool,
    },
    /// The command was told to end.
    Stopping,
    Over,
}

impl Machine {
    pub(super) fn new() -> Self {
        Self { phase: Phase::Waiting }
    }

    /// The command was started, in a group of its own or in coord's.
    pub(super) fn started(&mut self, own_group: bool) {
        self.phase = Phase::Running { own_group, stopped: false };
    }

    /// What follows from what happened.
    pub(super) fn on(&mut self, input: Input) -> Vec<Action> {
        match (self.phase, input) {
            (Phase::Over, _) => Vec::new(),
            (Phase::Waiting, Input::Signal(signal)) => match meaning(signal) {
                Meant::ToEnd => self.end(End::Told(signal)),
                Meant::ForTheCommand => vec![Action::Say(Note::NoCommandYet(signal))],
            },
            (Phase::Waiting, Input::Acquired) => vec![Action::Start],
            (Phase::Waiting, Input::NotAcquired) => self.end(End::NotAcquired),
            (Phase::Running { .. } | Phase::Stopping, Input::Signal(signal))
                if meaning(signal) == Meant::ForTheCommand =>
            {
                vec![Action::PassOn(signal)]
            }
            (Phase::Running { .. }, Input::Signal(_) | Input::Lost) => self.stop(),
            (Phase::Running { own_group: true, .. }, Input::Stopped(signal))
                if wants_terminal(signal) =>
            {
                // Its group is in the background for good, so that no terminal can let it go on.
                let mut actions = vec![Action::Say(Note::WantsTerminal(signal))];
                actions.extend(self.stop());
                actions
            }
            (Phase::Running { own_group, .. }, Input::Stopped(signal)) => {
                self.phase = Phase::Running { own_group, stopped: true };
                vec![Action::Say(Note::Stopped(signal))]
            }
            (Phase::Running { own_group, stopped: true }, Input::Continued) => {
                self.phase = Phase::Running { own_group, stopped: false };
                vec![Action::Say(Note::Continued)]
            }
            (Phase::Running { .. }, Input::Ended { held }) => self.ended(held, false),
            (Phase::Stopping, Input::Ended { held }) => self.ended(held, true),
            (Phase::Stopping, Input::BudgetSpent) => vec![Action::Send(Signal::KILL.as_raw())],
            _ => Vec::new(),
        }
    }

    fn stop(&mut self) -> Vec<Action> {
        self.phase = Phase::Stopping;
        // One that is stopped hears nothing else before it goes on.
        let [term, cont] = [Signal::TERM, Signal::CONT].map(|signal| Action::Send(signal.as_raw()));
        vec![term, cont, Action::StartBudget]
    }

    fn ended(&mut self, held: bool, stopped: bool) -> Vec<Action> {
        let end = if held { End::Ended } else { End::Lost { stopped } };
        let mut actions = vec![
            // What the command has left running must not go on without the lease.
            Action::Send(Signal::KILL.as_raw()),
        ];
        actions.extend(self.end(end));
        actions
    }

    fn end(&mut self, end: End) -> Vec<Action> {
        self.phase = Phase::Over;
        vec![Action::End(end)]
    }
}

fn wants_terminal(signal: i32) -> bool {
    [Signal::TTIN, Signal::TTOU].map(Signal::as_raw).contains(&signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: i32 = Signal::TERM.as_raw();
    const CONT: i32 = Signal::CONT.as_raw();
    const KILL: i32 = Signal::KILL.as_raw();
    const USR1: i32 = Signal::USR1.as_raw();
    const TTIN: i32 = Signal::TTIN.as_raw();
    const STOP: i32 = Signal::STOP.as_raw();

    fn running(own_group: bool) -> Machine {
        let mut machine = Machine::new();
        assert_eq!(machine.on(Input::Acquired), [Action::Start]);
        machine.started(own_group);
        machine
    }

    fn stops() -> Vec<Action> {
        vec![Action::Send(TERM), Action::Send(CONT), Action::StartBudget]
    }

    #[test]
    fn a_run_that_waits_ends_at_once_and_never_starts_its_command() {
        let mut machine = Machine::new();
        assert_eq!(machine.on(Input::Signal(USR1)), [Action::Say(Note::NoCommandYet(USR1))]);
        assert_eq!(machine.on(Input::Signal(TERM)), [Action::End(End::Told(TERM))]);
        assert_eq!(machine.on(Input::Acquired), [], "too late");
        let mut machine = Machine::new();
        assert_eq!(machine.on(Input::NotAcquired), [Action::End(End::NotAcquired)]);
    }

    #[test]
    fn a_signal_to_end_or_a_loss_stops_the_command_and_then_kills_it() {
        for cause in [Input::Signal(TERM), Input::Signal(34), Input::Lost] {
            let mut machine = running(true);
            assert_eq!(machine.on(cause), stops());
            assert_eq!(machine.on(cause), [], "told once");
            assert_eq!(machine.on(Input::Stopped(STOP)), []);
            assert_eq!(machine.on(Input::Continued), []);
            assert_eq!(machine.on(Input::BudgetSpent), [Action::Send(KILL)]);
            let ended = machine.on(Input::Ended { held: true });
            assert_eq!(ended, [Action::Send(KILL), Action::End(End::Ended)]);
            assert_eq!(machine.on(cause), []);
        }
    }

    #[test]
    fn what_is_meant_for_the_command_is_passed_on() {
        let mut machine = running(false);
        assert_eq!(machine.on(Input::Signal(USR1)), [Action::PassOn(USR1)]);
        assert_eq!(machine.on(Input::Signal(TERM)), stops());
        assert_eq!(machine.on(Input::Signal(USR1)), [Action::PassOn(USR1)]);
    }

    #[test]
    fn a_lease_that_is_not_held_at_the_end_was_lost() {
        let lost = |stopped| [Action::Send(KILL), Action::End(End::Lost { stopped })];
        assert_eq!(running(true).on(Input::Ended { held: false }), lost(false));
        let mut machine = running(true);
        machine.on(Input::Lost);
        assert_eq!(machine.on(Input::Ended { held: false }), lost(true));
    }

    #[test]
    fn a_stopped_command_is_told_and_one_that_nobody_can_continue_is_ended() {
        let mut machine = running(true);
        assert_eq!(machine.on(Input::Continued), [], "it was not stopped");
        assert_eq!(machine.on(Input::Stopped(STOP)), [Action::Say(Note::Stopped(STOP))]);
        assert_eq!(machine.on(Input::Continued), [Action::Say(Note::Continued)]);
        let wants = machine.on(Input::Stopped(TTIN));
        assert_eq!(wants, [vec![Action::Say(Note::WantsTerminal(TTIN))], stops()].concat());
        // In the terminal's foreground its user can let it go on.
        assert_eq!(running(false).on(Input::Stopped(TTIN)), [Action::Say(Note::Stopped(TTIN))]);
    }

    /// Whatever comes in whatever order: one end, nothing after it, and no command without a lease.
    #[test]
    fn every_order_of_inputs_ends_once() {
        let inputs = [
            Input::Signal(TERM),
            Input::Signal(USR1),
            Input::Acquired,
            Input::NotAcquired,
            Input::Lost,
            Input::Stopped(TTIN),
            Input::Continued,
            Input::Ended { held: true },
            Input::BudgetSpent,
        ];
        for number in 0..inputs.len().pow(5) {
            let mut machine = Machine::new();
            let (mut starts, mut ends) = (0, 0);
            let mut rest = number;
            for _ in 0..5 {
                let input = inputs[rest % inputs.len()];
                rest /= inputs.len();
                for action in machine.on(input) {
                    assert_eq!(ends, 0, "{action:?} after the end");
                    match action {
                        Action::Start => {
                            starts += 1;
                            machine.started(true);
                        }
                        Action::End(end) => {
                            ends += 1;
                            assert_eq!(starts == 0, matches!(end, End::Told(_) | End::NotAcquired));
                        }
                        Action::Send(_) | Action::PassOn(_) | Action::StartBudget => {
                            assert_eq!(starts, 1);
                        }
                        Action::Say(_) => {}
                    }
                }
            }
            assert!(starts <= 1 && ends <= 1);
        }
    }
}
