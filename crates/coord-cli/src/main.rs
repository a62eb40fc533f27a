//! The coord command.
fn main() {}
