//! Real servers, where this machine has some.

use std::env;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
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
    let nats = Nats::new().with_control().find();
    trials.push(trial("servers::nats_keeps_data", &nats, |nats| nats_keeps_data(&nats.start()?)));
    let etcd = Etcd::new().with_control().find();
    trials.push(trial("servers::etcd_keeps_data", &etcd, |etcd| etcd_keeps_data(&etcd.start()?)));
    let nats = Nats::new().with_control().find();
    trials.push(trial("servers::goes_in_a_panic", &nats, |nats| goes_in_a_panic(nats.start()?)));
    let nats = Nats::new().with_control().find();
    trials.push(trial("servers::notices_who_has_its_ports", &nats, |nats| {
        notices_who_has_its_ports(&nats.start()?)
    }));
    // Images are not chosen by their version, and their clocks can't be moved.
    let programs = ["", "programs"].contains(&&*env::var("COORD_TEST_SERVERS").unwrap_or_default());
    if programs {
        trials.extend(version_trials());
    }
    trials.extend(redis_trials());
    trials
}

fn version_trials() -> Vec<Trial> {
    let mut trials = Vec::new();
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
    for program in ["redis-server", "valkey-server"] {
        for (version, _) in versions(program) {
            let redis =
                Redis::new().with_version(&version).with_login("default", "a \"secret\"").find();
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

fn redis_trials() -> Vec<Trial> {
    vec![
        trial("servers::redis", &Redis::new().find(), |redis| answers(&redis.start()?)),
        trial(
            "servers::redis_with_sentinels",
            &Redis::new().with_login("ann", "secret").with_sentinels(1, 3).find(),
            |redis| fails_over(&redis.start()?),
        ),
        trial("servers::redis_cluster", &Redis::new().with_cluster(3, 1).find(), |redis| {
            covers_all_slots(&redis.start()?)
        }),
    ]
}

fn nats_keeps_data(server: &Server) -> Result<(), Failed> {
    let ask = |subject: &str, json: &str| {
        let (length, address) = (json.len(), &server.addresses()[0]);
        let text = format!(
            "CONNECT {{\"verbose\":false}}\r\nSUB answer 1\r\nPUB {subject} answer {length}\r\n\
             {json}\r\n"
        );
        converse(address, &text, |said| said.contains("MSG ") && said.ends_with("}\r\n"))
    };
    let made = ask("$JS.API.STREAM.CREATE.KEPT", r#"{"name":"KEPT","subjects":["kept"]}"#)?;
    assert!(made.contains("\"did_create\":true"), "{made}");
    let kept = ask("kept", "{}")?;
    assert!(kept.contains("\"seq\":1"), "{kept}");
    server.restart()?;
    let found = ask("$JS.API.STREAM.INFO.KEPT", "")?;
    assert!(found.contains("\"messages\":1"), "{found}");
    Ok(())
}

fn etcd_keeps_data(server: &Server) -> Result<(), Failed> {
    let ask = |step: &str, json: &str| {
        let text =
            format!("POST /v3/kv/{step} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{json}", json.len());
        converse(&server.addresses()[0], &text, |said| said.ends_with("}\n") || said.ends_with('}'))
    };
    // "key" and "kept" in base64.
    let put = ask("put", r#"{"key":"a2V5","value":"a2VwdA=="}"#)?;
    assert!(put.starts_with("HTTP/1.0 200"), "{put}");
    server.restart()?;
    let found = ask("range", r#"{"key":"a2V5"}"#)?;
    assert!(found.contains("\"value\":\"a2VwdA==\""), "{found}");
    Ok(())
}

/// Says something, and hears until that is all.
fn converse(address: &str, text: &str, is_all: impl Fn(&str) -> bool) -> Result<String, Failed> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(text.as_bytes())?;
    let (mut heard, mut buffer) = (String::new(), [0; 4096]);
    while !is_all(&heard) {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Err(format!("it hung up after {heard:?}").into());
        }
        heard.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    Ok(heard)
}

fn goes_in_a_panic(server: Server) -> Result<(), Failed> {
    let id = server.nodes()[0].id().ok_or("it runs")?;
    let caught = catch_unwind(AssertUnwindSafe(move || {
        let _server = server;
        resume_unwind(Box::new("on purpose"));
    }));
    assert!(caught.is_err());
    until(LIMIT, || state(id).is_none().then_some(())).ok_or("it outlived the panic".into())
}

/// Something that answers as a healthy server would has taken the ports while the server was down.
fn notices_who_has_its_ports(server: &Server) -> Result<(), Failed> {
    let node = &server.nodes()[0];
    node.kill()?;
    for port in [node.port(), node.http_port()] {
        let foreign = TcpListener::bind(("127.0.0.1", port))?;
        std::thread::spawn(move || {
            for mut stream in foreign.incoming().flatten() {
                let _ = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\n{\"status\":\"ok\"}");
            }
        });
    }
    let error = node.start().expect_err("the ports are not its own").to_string();
    assert!(error.contains("address already in use"), "{error}");
    Ok(())
}

fn keeps_data(server: &Server) -> Result<(), Failed> {
    let node = &server.nodes()[0];
    node.ask(&["SET", "key", "kept"])?;
    server.restart()?;
    assert_eq!(node.ask(&["GET", "key"])?, "kept\n");
    Ok(())
}

pub(crate) fn fails_over(server: &Server) -> Result<(), Failed> {
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

pub(crate) fn covers_all_slots(server: &Server) -> Result<(), Failed> {
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

fn answers(server: &Server) -> Result<(), Failed> {
    for address in server.addresses() {
        TcpStream::connect(address)?;
    }
    assert_eq!(*server.origin() == Origin::Url, server.nodes().is_empty());
    Ok(())
}

pub(crate) fn broken_and_mended(server: Server) -> Result<(), Failed> {
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
