//! Where a server comes from: a URL that is given, a program, a container.

use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use coord_integration::servers::{Etcd, Nats, Origin, Process, Redis};
use coord_integration::{Missing, trial, until};
use libtest_mimic::{Failed, Trial};
use tempfile::TempDir;

use super::process::state;

const LIMIT: Duration = Duration::from_secs(60);
/// Names the backend of which this program, started again, is to get a server and tell where from.
const TELL: &str = "COORD_HARNESS_TELL";
/// The variables that choose a server.
const CHOOSING: [&str; 4] =
    ["COORD_TEST_SERVERS", "COORD_TEST_NATS_URL", "COORD_TEST_ETCD_URL", "COORD_TEST_REDIS_URL"];

pub(crate) fn trials() -> Vec<Trial> {
    let nats = Nats::new().with_control().find();
    let both = nats.and_then(|nats| Ok((nats, Etcd::new().with_control().find()?)));
    let all = both.and_then(|(nats, etcd)| Ok((nats, etcd, Redis::new().with_control().find()?)));
    vec![
        trial("sources::a_url_is_used", &all, a_url_is_used),
        trial("sources::a_wrong_url_is_refused", &all, a_wrong_url_is_refused),
        Trial::test("sources::only_the_one_allowed", only_the_one_allowed),
        trial("sources::a_container_goes_with_its_test", &container(), |()| {
            a_container_goes_with_its_test()
        }),
    ]
}

type All = (Nats, Etcd, Redis);

fn a_url_is_used((nats, etcd, redis): All) -> Result<(), Failed> {
    for server in [nats.start()?, etcd.start()?, redis.start()?] {
        let variable = format!("COORD_TEST_{}_URL", server.backend().to_uppercase());
        let told = told(server.backend(), &[(&variable, &server.url())])?;
        assert_eq!(told, format!("Url at {}", server.url()));
        // For whom it will not do: a test that is to break it.
        let told = told_of_its_own(server.backend(), &[(&variable, &server.url())])?;
        assert!(!told.contains("Url"), "{told}");
    }
    Ok(())
}

fn a_wrong_url_is_refused((nats, etcd, redis): All) -> Result<(), Failed> {
    let closed = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let servers = [nats.start()?, etcd.start()?, redis.start()?];
    for (index, server) in servers.iter().enumerate() {
        let (backend, foreign) = (server.backend(), &servers[(index + 1) % servers.len()]);
        let variable = format!("COORD_TEST_{}_URL", backend.to_uppercase());
        for (url, reason) in [
            (format!("http://{}", server.addresses()[0]), "has to begin with"),
            (format!("{backend}://{closed}"), "nothing answers at"),
            (format!("{backend}://{}", foreign.addresses()[0]), "answers at"),
        ] {
            let told = told(backend, &[(&variable, &url)])?;
            let broken = told.starts_with(&format!("fails: {backend} is broken: "));
            assert!(broken && told.contains(reason) && told.contains(&variable), "{url}: {told}");
        }
    }
    Ok(())
}

fn only_the_one_allowed() -> Result<(), Failed> {
    for (allowed, part) in [
        ("url", "ignored: nats is not here: COORD_TEST_NATS_URL is not set"),
        ("docker", "fails: nats is broken: COORD_TEST_SERVERS=\"docker\": it is url, programs or"),
    ] {
        let told = told("nats", &[("COORD_TEST_SERVERS", allowed)])?;
        assert!(told.starts_with(part), "{told}");
    }
    // The folder and the PATH have none.
    let nowhere = [
        ("COORD_TEST_SERVERS", "programs"),
        ("COORD_TEST_NATS_SERVER", ""),
        ("COORD_SERVERS_DIR", "/nowhere"),
        ("PATH", "/nowhere"),
    ];
    let absent = told("nats", &nowhere)?;
    assert!(absent.starts_with("ignored: nats is not here: "), "{absent}");
    let required = told("nats", &[&nowhere[..], &[("COORD_REQUIRE", "etcd,nats")]].concat())?;
    assert!(required.starts_with("fails: nats is not here: "), "{required}");
    Ok(())
}

/// Whether there are containers, whatever other source there is.
fn container() -> Result<(), Missing> {
    match told("nats", &[("COORD_TEST_SERVERS", "containers")]) {
        Ok(told) if told.starts_with("Container") => Ok(()),
        Ok(told) if told.starts_with("ignored: ") => Err(Missing::absent("containers", told)),
        Ok(told) => Err(Missing::broken("containers", told)),
        Err(error) => Err(Missing::broken("containers", error.message().unwrap_or_default())),
    }
}

/// A test that is killed can't remove its container. The next one does.
fn a_container_goes_with_its_test() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let mut test = Process::spawn(
        command("nats", &[("COORD_TEST_SERVERS", "containers"), (HOLD, "1")])?,
        &folder.path().join("test.log"),
    )?;
    let line = test.wait_for_line("holds ", LIMIT)?;
    let mut words = line.split(' ').skip(1);
    let (id, data) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let id: u32 = id.parse()?;
    assert!(Path::new(data).is_dir(), "{line}");
    assert!(state(id).is_some(), "it runs");
    let meanwhile = told("nats", &[("COORD_TEST_SERVERS", "containers")])?;
    assert!(meanwhile.starts_with("Container") && state(id).is_some(), "it is somebody's");
    test.kill()?;
    assert!(state(id).is_some(), "nobody has removed it yet");
    told("nats", &[("COORD_TEST_SERVERS", "containers")])?;
    until(LIMIT, || state(id).is_none().then_some(())).ok_or("it was left")?;
    assert!(!Path::new(data).exists(), "{data} was left");
    Ok(())
}

/// With this the other program keeps its server, and tells its process's id.
const HOLD: &str = "COORD_HARNESS_KEEP";
/// With this it wants a server that it can break.
const OWN: &str = "COORD_HARNESS_OWN";

fn told(backend: &str, variables: &[(&str, &str)]) -> Result<String, Failed> {
    let output = command(backend, variables)?.output()?;
    let text = String::from_utf8(output.stdout)?;
    let line = text.lines().last().map(str::to_owned);
    line.ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned().into())
}

fn told_of_its_own(backend: &str, variables: &[(&str, &str)]) -> Result<String, Failed> {
    told(backend, &[variables, &[(OWN, "1")]].concat())
}

fn command(backend: &str, variables: &[(&str, &str)]) -> Result<Command, Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    for name in CHOOSING {
        command.env_remove(name);
    }
    // What it lacks is the point of a trial, and nothing that a test run lacks.
    command.env_remove("COORD_REQUIRE").env_remove("COORD_LEFT_OUT").env(TELL, backend);
    for (name, value) in variables {
        match value.is_empty() {
            true => command.env_remove(name),
            false => command.env(name, value),
        };
    }
    Ok(command)
}

/// What [`told`] starts.
pub(crate) fn tell() -> Option<ExitCode> {
    let backend = std::env::var(TELL).ok()?;
    let own = std::env::var_os(OWN).is_some();
    let server = match backend.as_str() {
        "nats" if own => Nats::new().with_control().start(),
        "nats" => Nats::new().start(),
        "etcd" if own => Etcd::new().with_control().start(),
        "etcd" => Etcd::new().start(),
        _ if own => Redis::new().with_control().start(),
        _ => Redis::new().start(),
    };
    let mut out = std::io::stdout();
    let told = match &server {
        Ok(server) => match server.origin() {
            Origin::Url => writeln!(out, "Url at {}", server.url()),
            other => writeln!(out, "{other:?}"),
        },
        Err(missing) if missing.fails() => writeln!(out, "fails: {missing}"),
        Err(missing) => writeln!(out, "ignored: {missing}"),
    };
    if let (Ok(server), Some(_)) = (&server, std::env::var_os(HOLD)) {
        let node = server.nodes().first().and_then(|node| Some((node.id()?, node.folder())));
        let (id, folder) = node.unwrap_or((0, Path::new("")));
        let _ = writeln!(out, "holds {id} {}", folder.display());
        // Until it is killed.
        loop {
            std::thread::park();
        }
    }
    Some(if told.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
