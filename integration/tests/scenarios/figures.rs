//! What was measured by the way.

use std::sync::{Mutex, PoisonError};

static FIGURES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps a figure for the end.
pub(crate) fn note(text: String) {
    FIGURES.lock().unwrap_or_else(PoisonError::into_inner).push(text);
}

/// Tells all of them.
#[expect(clippy::print_stdout, reason = "they are for whoever runs the scenarios")]
pub(crate) fn tell() {
    let mut figures = FIGURES.lock().unwrap_or_else(PoisonError::into_inner);
    figures.sort();
    for figure in figures.iter() {
        println!("figure: {figure}");
    }
}
