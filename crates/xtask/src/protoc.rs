//! Where `protoc` comes from, in this order: what `PROTOC` names, one on the PATH that has its include
//! files beside it, else the one that the crate `protoc-bin-vendored` carries.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

/// Sets `PROTOC` and `PROTOC_INCLUDE` for a cargo that is about to start, where they are needed.
pub(crate) fn provide(command: &mut Command) -> Result<()> {
    if env::var_os("PROTOC").is_some() || on_path().is_some() {
        return Ok(());
    }
    let advice = "no protoc is on the PATH and none is carried for this platform; install protobuf's \
                  compiler with its include files, or set PROTOC and PROTOC_INCLUDE";
    let protoc = protoc_bin_vendored::protoc_bin_path().context(advice)?;
    let include = protoc_bin_vendored::include_path().context(advice)?;
    command.env("PROTOC", protoc).env("PROTOC_INCLUDE", include);
    Ok(())
}

/// A usable protoc on the PATH: Debian, for one, packs the well-known `.proto` files apart from the
/// program, and without them it is of no use to a build script.
fn on_path() -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .map(|folder| folder.join(format!("protoc{}", env::consts::EXE_SUFFIX)))
        .find(|program| program.is_file() && has_includes(program))
}

fn has_includes(program: &Path) -> bool {
    let root = program.parent().and_then(Path::parent);
    root.is_some_and(|root| root.join("include/google/protobuf/empty.proto").is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_carried_protoc_runs_and_has_its_includes() {
        let protoc = protoc_bin_vendored::protoc_bin_path().expect("carried for this platform");
        let output = Command::new(protoc).arg("--version").output().expect("it starts");
        assert!(String::from_utf8_lossy(&output.stdout).starts_with("libprotoc"));
        let include = protoc_bin_vendored::include_path().expect("carried for this platform");
        assert!(include.join("google/protobuf/empty.proto").is_file());
    }
}
