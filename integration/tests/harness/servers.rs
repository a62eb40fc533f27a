//! Real servers, where this machine has some.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use coord_integration::faults::Clock;
use coord_integration::servers::{Etcd, Nats, Node, Origin, Redis, Server, versions};
use coord_integration::{trial, until};
use libtest_mimic::{Failed, Trial};

use super::process::state;

const LIMIT: Duration = Duration::from_secs(10);
/// Until a replica has taken over, with the harness's settings.
const FAILOVER_LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = vec![
        trial("servers::nats", &Nats::new().find(), |nats| answers(&nats.start()?)),
        trial("servers::etcd", &Etcd::new().find(), |etcd| answers(&etcd.start()?)),
    ];
    let nats = Nats::new().with_nodes(3).find();
    trials.push(trial("servers::nats_3", &nats, |nats| {
        restarts_one_of_three_then_all(&nats.start()?)
    }));
    let etcd = Etcd::new().with_nodes(3).find();
    trials.push(trial("servers::etcd_3", &etcd, |etcd| {
        restarts_one_of_three_then_all(&etcd.start()?)
    }));
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
    trials.extend(redis_trials());
    #[cfg(feature = "tls")]
    trials.extend(tls_trials());
    trials
}

fn redis_trials() -> Vec<Trial> {
    let mut trials = vec![
        trial("servers::redis", &Redis::new().find(), |redis| answers(&redis.start()?)),
        trial(
            "servers::redis_with_sentinels",
            &Redis::new().with_login("ann", "it's \"secret\"").with_sentinels(1, 3).find(),
            |redis| fails_over(&redis.start()?),
        ),
        trial("servers::redis_cluster", &Redis::new().with_cluster(3, 1).find(), |redis| {
            covers_all_slots(&redis.start()?)
        }),
    ];
    for program in ["redis-server", "valkey-server"] {
        for (version, _) in versions(program) {
            let redis = Redis::new().with_version(&version).with_login("default", "secret").find();
            trials.push(trial(format!("servers::{program}_{version}"), &redis, |redis| {
                let server = redis.start()?;
                keeps_data(&server)?;
                broken_and_mended(server)
            }));
        }
    }
    let clock = Clock::new().map(Arc::new);
    let with = clock.and_then(|clock| Ok((Redis::new().with_clock(&clock).find()?, clock)));
    trials.push(trial("servers::redis_with_a_clock", &with, |(redis, clock)| {
        has_that_clock(&redis.start()?, &clock)
    }));
    trials
}

fn keeps_data(server: &Server) -> Result<(), Failed> {
    let node = &server.nodes()[0];
    node.ask(&["SET", "key", "kept"])?;
    server.restart()?;
    assert_eq!(node.ask(&["GET", "key"])?, "kept\n");
    Ok(())
}

fn fails_over(server: &Server) -> Result<(), Failed> {
    let [primary, replica, sentinel, ..] = server.nodes() else {
        return Err(Failed::from("it was not started here"));
    };
    assert_eq!((server.addresses().len(), server.sentinels().len()), (2, 3));
    primary.ask(&["SET", "key", "kept"])?;
    assert_eq!(primary.ask(&["WAIT", "1", "1000"])?, "1\n");
    primary.kill()?;
    let leads = |node: &Node| Some(()).filter(|()| role(node).is_ok_and(|role| role == "master"));
    until(FAILOVER_LIMIT, || leads(replica)).ok_or("the replica did not take over")?;
    assert_eq!(replica.ask(&["GET", "key"])?, "kept\n");
    primary.start()?;
    let follows = || Some(()).filter(|()| role(primary).is_ok_and(|role| role == "slave"));
    until(FAILOVER_LIMIT, follows).ok_or("the former primary does not follow")?;
    let address = sentinel.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "coord"])?;
    assert_eq!(address, format!("127.0.0.1\n{}\n", replica.port()));
    server.restart()?;
    assert_eq!(role(replica)?, "master", "what sentinels had decided holds");
    Ok(())
}

fn role(node: &Node) -> std::io::Result<String> {
    Ok(node.ask(&["ROLE"])?.lines().next().unwrap_or_default().to_owned())
}

fn covers_all_slots(server: &Server) -> Result<(), Failed> {
    let nodes = server.nodes();
    assert_eq!(nodes.len(), 6);
    assert!(nodes[0].ask(&["CLUSTER", "INFO"])?.contains("cluster_slots_ok:16384"));
    let moved = nodes.iter().filter_map(|node| node.ask(&["SET", "key", "1"]).err());
    let moved: Vec<_> = moved.map(|error| error.to_string()).collect();
    assert!(moved.len() == 5 && moved.iter().all(|error| error.starts_with("MOVED")), "{moved:?}");
    nodes[0].kill()?;
    let role = || Some(()).filter(|()| role(&nodes[3]).is_ok_and(|role| role == "master"));
    until(FAILOVER_LIMIT, role).ok_or("the replica did not take over")?;
    nodes[0].start()?;
    server.restart()?;
    Ok(())
}

fn has_that_clock(server: &Server, clock: &Clock) -> Result<(), Failed> {
    let now = || -> Result<i64, Failed> {
        let time = server.nodes()[0].ask(&["TIME"])?;
        Ok(time.lines().next().unwrap_or_default().parse()?)
    };
    let before = now()?;
    clock.jump(3_600)?;
    // It reads its clock once for all that it finds to do at one time.
    let jumps = || Some(()).filter(|()| now().is_ok_and(|now| now >= before + 3_600));
    until(LIMIT, jumps).ok_or("its clock stands where it stood")?;
    Ok(())
}

#[cfg(feature = "tls")]
fn tls_trials() -> Vec<Trial> {
    let speaks_tls = |server: Server| {
        assert!(server.authority().is_some_and(std::path::Path::is_file));
        broken_and_mended(server)
    };
    let nats = Nats::new().with_login("ann", "secret").with_tls().find();
    let etcd = Etcd::new().with_root_password("secret").with_tls().find();
    let redis = || Redis::new().with_login("ann", "secret").with_tls();
    vec![
        trial("servers::nats_with_tls", &nats, move |nats| speaks_tls(nats.start()?)),
        trial("servers::etcd_with_tls", &etcd, move |etcd| speaks_tls(etcd.start()?)),
        trial("servers::redis_with_tls", &redis().find(), move |redis| speaks_tls(redis.start()?)),
        trial(
            "servers::redis_with_sentinels_and_tls",
            &redis().with_sentinels(1, 3).find(),
            |redis| fails_over(&redis.start()?),
        ),
        trial("servers::redis_cluster_with_tls", &redis().with_cluster(3, 1).find(), |redis| {
            covers_all_slots(&redis.start()?)
        }),
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

fn restarts_one_of_three_then_all(server: &Server) -> Result<(), Failed> {
    let [first, ..] = server.nodes() else { return Err(Failed::from("it was not started here")) };
    assert_eq!(server.nodes().len(), 3);
    answers(server)?;
    first.restart()?;
    answers(server)?;
    server.restart()?;
    answers(server)
}
