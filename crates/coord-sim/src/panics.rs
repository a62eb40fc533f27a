//! Panics of the tasks of a world. A runtime takes them for its own matter: without this, a task that is
//! gone would only be missed, if at all.

use std::cell::RefCell;
use std::panic;
use std::sync::Once;

/// What a panic says that the world wants.
struct Planned;

/// Panics, which is not to be told.
pub(crate) fn planned() -> ! {
    panic::panic_any(Planned)
}

thread_local! {
    static FIRST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Remembers from now on what panics, for the thread that it happens on: a world has one.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if info.payload().is::<Planned>() {
                return;
            }
            FIRST.with_borrow_mut(|first| {
                first.get_or_insert_with(|| info.to_string());
            });
            before(info);
        }));
    });
    take();
}

/// The first panic of this thread since it was asked last.
pub(crate) fn take() -> Option<String> {
    FIRST.take()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_that_panics_is_told() {
        watch();
        assert_eq!(take(), None);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let task = runtime.spawn(async { panic!("a task of the world") });
        assert!(runtime.block_on(task).is_err());
        assert!(take().is_some_and(|told| told.contains("a task of the world")));
        assert_eq!(take(), None);
    }
}
