//! Which server of a cluster leads it.

use std::io;
use std::time::Duration;

use super::{Node, Server, http};

const LEADER_LIMIT: Duration = Duration::from_secs(30);

impl Server {
    /// The server that leads: of etcd the one that its members elected, of NATS the one that they elected
    /// for the bucket `coord`. Blocks the thread until there is one.
    ///
    /// # Errors
    /// There is none for 30 s, or the servers were not started here.
    pub fn leader(&self) -> io::Result<&Node> {
        let ask = || self.nodes().iter().find_map(|node| self.leader_by(node));
        crate::until(LEADER_LIMIT, ask)
            .ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "the servers name no leader"))
    }

    /// The leader as this node names it.
    fn leader_by<'a>(&'a self, node: &'a Node) -> Option<&'a Node> {
        if self.backend() == "nats" {
            let (_, text) = http::get(
                &format!("127.0.0.1:{}", node.http_port()),
                "/jsz?accounts=true&streams=true",
            )
            .ok()?;
            let name = after(text.split_once("\"KV_coord\"")?.1, "leader")?.to_owned();
            return self.nodes().iter().find(|node| node.name() == name);
        }
        let (_, text) =
            http::post(&format!("127.0.0.1:{}", node.plain_port()), "/v3/maintenance/status", "{}")
                .ok()?;
        // It names the leader by a number, which is its own only if it leads itself.
        (after(&text, "member_id")? == after(&text, "leader")?).then_some(node)
    }
}

/// The text that stands under this name first in some JSON.
fn after<'a>(json: &'a str, name: &str) -> Option<&'a str> {
    let rest = json.split_once(&format!("\"{name}\""))?.1.trim_start().strip_prefix(':')?;
    rest.trim_start().strip_prefix('"')?.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_both_servers_json() {
        let etcd =
            r#"{"header":{"cluster_id":"1","member_id":"27"},"version":"3.4","leader":"27"}"#;
        assert_eq!((after(etcd, "member_id"), after(etcd, "leader")), (Some("27"), Some("27")));
        let nats = "{\n \"cluster\": {\n  \"leader\": \"nats-0\"\n }\n}";
        assert_eq!(after(nats, "leader"), Some("nats-0"));
        assert_eq!(after(nats, "member_id"), None);
    }
}
