//! Real servers, where this machine has some.

use std::net::TcpStream;
use std::time::Duration;

use coord_integration::servers::{Etcd, Nats, Origin, Server, versions};
use coord_integration::{trial, until};
use libtest_mimic::{Failed, Trial};

use super::process::state;

const LIMIT: Duration = Duration::from_secs(10);

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = vec![
        trial("servers::nats", &Nats::new().find(), |nats| answers(&nats.start()?)),
        trial("servers::etcd", &Etcd::new().find(), |etcd| answers(&etcd.start()?)),
    ];
    let nats = Nats::new().with_nodes(3).find();
    trials.push(trial("servers::nats_3", &nats, |nats| loses_one_of_three(&nats.start()?)));
    let etcd = Etcd::new().with_nodes(3).find();
    trials.push(trial("servers::etcd_3", &etcd, |etcd| loses_one_of_three(&etcd.start()?)));
    let nats = Nats::new().with_login("ann", "secret").find();
    trials.push(trial("servers::nats_with_a_login", &nats, |nats| {
        let server = nats.start()?;
        assert!(server.url().starts_with("nats://ann:secret@127.0.0.1:"), "{}", server.url());
        broken_and_mended(server)
    }));
    let etcd = Etcd::new().with_root_password("secret").find();
    trials.push(trial("servers::etcd_with_a_login", &etcd, |etcd| {
        let server = etcd.start()?;
        assert!(server.url().starts_with("etcd://root:secret@127.0.0.1:"), "{}", server.url());
        broken_and_mended(server)
    }));
    for (version, _) in versions("nats-server") {
        let nats = Nats::new().with_version(&version).find();
        let name = format!("servers::nats_{version}");
        trials.push(trial(name, &nats, |nats| broken_and_mended(nats.start()?)));
    }
    for (version, _) in versions("etcd") {
        let etcd = Etcd::new().with_version(&version).find();
        let name = format!("servers::etcd_{version}");
        trials.push(trial(name, &etcd, |etcd| broken_and_mended(etcd.start()?)));
    }
    #[cfg(feature = "tls")]
    trials.extend(tls_trials());
    trials
}

#[cfg(feature = "tls")]
fn tls_trials() -> [Trial; 2] {
    let speaks_tls = |server: Server| {
        assert!(server.authority().is_some_and(std::path::Path::is_file));
        broken_and_mended(server)
    };
    let nats = Nats::new().with_login("ann", "secret").with_tls().find();
    let etcd = Etcd::new().with_root_password("secret").with_tls().find();
    [
        trial("servers::nats_with_tls", &nats, move |nats| speaks_tls(nats.start()?)),
        trial("servers::etcd_with_tls", &etcd, move |etcd| speaks_tls(etcd.start()?)),
    ]
}

fn answers(server: &Server) -> Result<(), Failed> {
    for address in server.addresses() {
        TcpStream::connect(address)?;
    }
    assert_eq!(*server.origin() == Origin::Url, server.nodes().is_empty());
    Ok(())
}

fn broken_and_mended(server: Server) -> Result<(), Failed> {
    let node = server.nodes().first().ok_or("it was not started here")?;
    answers(&server)?;
    let id = node.id().ok_or("it runs")?;
    node.pause()?;
    until(LIMIT, || (state(id) == Some('T')).then_some(())).ok_or("it was not paused")?;
    node.resume()?;
    assert!(node.start().is_err(), "it runs already");
    node.kill()?;
    assert!(TcpStream::connect(&server.addresses()[0]).is_err(), "nothing listens any more");
    node.start()?;
    answers(&server)?;
    let id = node.id().ok_or("it runs again")?;
    let clone = server.clone();
    drop(server);
    answers(&clone)?;
    drop(clone);
    until(LIMIT, || state(id).is_none().then_some(())).ok_or("it outlived its guard")?;
    Ok(())
}

fn loses_one_of_three(server: &Server) -> Result<(), Failed> {
    let [first, ..] = server.nodes() else { return Err(Failed::from("it was not started here")) };
    assert_eq!(server.nodes().len(), 3);
    answers(server)?;
    first.restart()?;
    answers(server)
}
