//! The embedded backend passes the suite.

use std::process::ExitCode;

fn main() -> ExitCode {
    coord_conformance::main(coord_conformance::MemoryFixture::new())
}
