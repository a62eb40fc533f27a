//! What a member tells the scenario, one JSON line each, and what the scenario asks of it.

use std::time::Duration;

use coord::cluster::{ClusterState, Command, Event, Leader, Member, Reply, Role, Status};
use coord::{Epoch, Fence, Incarnation, Moment, NodeStatus, ShardId, TableName, Version};
use coord_conformance::history::What;
use serde::{Deserialize, Serialize};

/// One line of a member's output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Line {
    /// Since the origin of the boot clock, which all processes of a machine share.
    at: Duration,
    pub(crate) said: Said,
}

impl Line {
    pub(crate) fn new(at: Moment, said: Said) -> Self {
        Self { at: at.since_origin(), said }
    }

    pub(crate) fn at(&self) -> Moment {
        Moment::from_origin(self.at)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    /// The node has joined.
    Started,
    /// The node could not join, or ended; its process ends too.
    Over(String),
    Event(Event),
    /// So many events passed the listener by.
    Missed(u64),
    View(View),
    /// For the history.
    Entry(What),
    Call(Call),
    /// The node says at this moment that it leads.
    Leads(Fence),
    /// It begins to host a shard.
    Starts {
        shard: ShardId,
        right: Right,
    },
    /// It acted on each of these shards, as far as their fences allowed it.
    Acts(Vec<Act>),
    /// Nothing of the shard runs here any more.
    Stopped(ShardId),
    /// The fences of these shards allow nothing any more.
    Lapsed(Vec<ShardId>),
    Answered {
        number: u32,
        answer: Answer,
    },
}

/// What a shard's fence allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Right {
    pub(crate) epoch: Epoch,
    until: Duration,
}

impl Right {
    pub(crate) fn new(epoch: Epoch, until: Moment) -> Self {
        Self { epoch, until: until.since_origin() }
    }

    /// As far as was known then: it moves with the registration.
    pub(crate) fn until(&self) -> Moment {
        Moment::from_origin(self.until)
    }
}

/// Something that was done to shards by the same right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Act {
    pub(crate) right: Right,
    /// From this one to that, both included.
    pub(crate) shards: Vec<(u32, u32)>,
}

/// The part of a [`Status`] that scenarios look at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct View {
    pub(crate) state: ClusterState,
    pub(crate) settled: bool,
    pub(crate) role: Role,
    pub(crate) leader: Option<Leader>,
    pub(crate) registered: Option<Incarnation>,
    pub(crate) members: Vec<Member>,
    pub(crate) tables: Vec<(TableName, Version)>,
    pub(crate) store_away: bool,
}

impl From<&Status> for View {
    fn from(status: &Status) -> Self {
        Self {
            state: status.state,
            settled: status.is_settled(),
            role: status.role,
            leader: status.leader.clone(),
            registered: status.registered,
            members: status.members.clone(),
            tables: status.tables.iter().map(|table| (table.name.clone(), table.version)).collect(),
            store_away: status.store_away,
        }
    }
}

impl View {
    /// How many shards each active member has, smallest first, once all is settled; empty before.
    pub(crate) fn shares(&self) -> Vec<u32> {
        if !self.settled {
            return Vec::new();
        }
        let active = self.members.iter().filter(|member| member.status == NodeStatus::Active);
        let mut shares: Vec<u32> = active.map(|member| member.shards).collect();
        shares.sort_unstable();
        shares
    }

    pub(crate) fn member(&self, node: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.id.as_str() == node)
    }
}

/// One call to the store that claims, writes or acquires.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Call {
    /// The trait's method.
    pub(crate) operation: String,
    /// The lease or the table.
    pub(crate) subject: String,
    /// Under which fence; for an acquire the one that was won.
    pub(crate) fence: Option<Fence>,
    /// When it was sent; the line says when it was answered.
    sent: Duration,
    pub(crate) outcome: Outcome,
}

impl Call {
    pub(crate) fn new(
        operation: &str,
        subject: impl ToString,
        fence: Option<Fence>,
        sent: Moment,
        outcome: Outcome,
    ) -> Self {
        let (operation, subject) = (operation.to_owned(), subject.to_string());
        Self { operation, subject, fence, sent: sent.since_origin(), outcome }
    }

    pub(crate) fn sent(&self) -> Moment {
        Moment::from_origin(self.sent)
    }
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// It did what it was to do.
    Done,
    Conflict,
    Fenced,
    /// The lease is another's, or lost.
    NotHeld,
    Other(String),
    Failed(String),
}

/// What the scenario asks of a member, as a JSON line on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ask {
    pub(crate) number: u32,
    pub(crate) question: Question,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Question {
    /// Prepare a write under the fence of now.
    Prepare,
    /// Write what was prepared, again and again until the store has answered.
    Write,
    /// What the wall clock shows, in seconds.
    Wall,
    /// Leave in order, and end.
    Leave,
    /// Ask the leader.
    Command(Command),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Prepared(Fence),
    Wrote(Outcome),
    Wall(u64),
    Left,
    Replied(Reply),
    Failed(String),
}
