//! A cluster of more nodes than stand for election.

use std::time::Duration;

use coord_cluster::{Cluster, Command, Role, Settings};
use coord_core::MemoryBackend;

use crate::common::{leader, node_with, shares, store, until};

const NAMES: [&str; 8] = ["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"];

fn three_stand() -> Settings {
    let mut settings = Settings::fast();
    settings.candidates = 3;
    settings
}

async fn start(store: &MemoryBackend) -> Vec<Cluster> {
    let mut nodes = Vec::new();
    for name in NAMES {
        nodes.push(node_with(store, name, three_stand()).await);
    }
    settled(&nodes).await;
    nodes
}

/// All shards are placed, one leads, and two more stand.
async fn settled(nodes: &[Cluster]) {
    let share = 1024 / u32::try_from(nodes.len()).expect("few");
    for node in nodes {
        until(node, |status| {
            let shares = shares(status);
            shares.len() == nodes.len() && shares[0] >= share
        })
        .await;
    }
    for _ in 0..100 {
        let mut roles: Vec<Role> = nodes.iter().map(|node| node.status().role).collect();
        roles.retain(|role| *role != Role::Follower);
        roles.sort_by_key(|role| *role == Role::Leader);
        if roles == [Role::Candidate, Role::Candidate, Role::Leader] {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{:?}", nodes.iter().map(|node| node.status().role).collect::<Vec<_>>());
}

fn take(nodes: &mut Vec<Cluster>, taken: impl Fn(Role) -> bool) -> Vec<Cluster> {
    nodes.extract_if(.., |node| taken(node.status().role)).collect()
}

#[tokio::test(start_paused = true)]
async fn few_stand_and_one_that_goes_is_replaced() {
    let store = store();
    let mut nodes = start(&store).await;
    let first = nodes.iter().position(|node| node.status().role == Role::Candidate);
    nodes.remove(first.expect("one stands")).shutdown().await.expect("ends");
    settled(&nodes).await;
    for leads in take(&mut nodes, |role| role == Role::Leader) {
        leads.abandon();
    }
    settled(&nodes).await;
}

#[tokio::test(start_paused = true)]
async fn where_all_who_stood_are_lost_the_others_do() {
    let store = store();
    let mut nodes = start(&store).await;
    let lost = take(&mut nodes, |role| role != Role::Follower);
    assert_eq!(lost.len(), 3);
    lost.iter().for_each(Cluster::abandon);
    settled(&nodes).await;
    assert_eq!(nodes[0].status().members.len(), 8, "three are failed");
}

#[tokio::test(start_paused = true)]
async fn one_that_does_not_stand_leads_when_it_is_named() {
    let store = store();
    let nodes = start(&store).await;
    for _ in 0..NAMES.len() {
        let named = nodes.iter().find(|node| node.status().role == Role::Follower);
        let to = named.expect("five follow").node().clone();
        let before = leader(&nodes);
        let command = Command::TransferLeadership { to: to.clone() };
        assert!(nodes[before].request(command).await.expect("asked").is_done());
        until(&nodes[before], |status| {
            status.leader.as_ref().is_some_and(|leader| leader.node == to)
        })
        .await;
        settled(&nodes).await;
        assert_eq!(*nodes[leader(&nodes)].node(), to, "nobody else led in between");
    }
}
