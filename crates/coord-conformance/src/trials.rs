//! The trials, one file for each part of the contract.

mod backend;
mod discovery;
mod lease;
mod placement;
mod requests;

use crate::case::Case;

/// All trials, group by group.
pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    [lease::CASES, discovery::CASES, placement::CASES, requests::CASES, backend::CASES]
        .into_iter()
        .flatten()
}
