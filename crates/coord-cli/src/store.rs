//! Which store a command talks to.

use std::path::Path;

use clap::ArgMatches;
use clap::parser::ValueSource;

use crate::failure::Failure;

/// The URL of the store that the command line names, or else the environment. None if neither does.
pub(crate) fn named(matches: &ArgMatches) -> Result<Option<String>, Failure> {
    for source in [ValueSource::CommandLine, ValueSource::EnvVariable] {
        let from = |id| matches.value_source(id) == Some(source);
        let url = matches.get_one::<String>("backend").filter(|_| from("backend"));
        let file = matches.get_one::<std::path::PathBuf>("backend_file");
        match (url, file.filter(|_| from("backend_file"))) {
            (Some(_), Some(file)) => {
                let names = match source {
                    ValueSource::CommandLine => "--backend and --backend-file",
                    _ => "COORD_BACKEND and COORD_BACKEND_FILE",
                };
                let file = file.display();
                let why = format!("{names} ({file}) both name a store; leave one of them out");
                return Err(Failure::input(why));
            }
            (Some(url), None) => return Ok(Some(url.clone())),
            (None, Some(file)) => return read(file).map(Some),
            (None, None) => {}
        }
    }
    Ok(None)
}

/// The store, for a command that makes no sense without one that others share.
pub(crate) fn needed(named: Option<&str>) -> Result<&str, Failure> {
    named.ok_or_else(|| {
        Failure::input(
            "no store is named: pass --backend URL or set COORD_BACKEND or COORD_BACKEND_FILE; \
             memory://NAME is one that lives in this process alone",
        )
    })
}

/// The URL that a file holds, in one line.
fn read(file: &Path) -> Result<String, Failure> {
    let shown = file.display();
    let text = std::fs::read_to_string(file).map_err(|error| {
        Failure::input(format!("the store's file {shown} can't be read: {error}"))
    })?;
    match text.trim() {
        "" => Err(Failure::input(format!("the store's file {shown} is empty; write one URL"))),
        url if url.lines().count() > 1 => Err(Failure::input(format!(
            "the store's file {shown} has several lines; write one URL"
        ))),
        url => Ok(url.to_owned()),
    }
}
