//! What a watcher knows, and how events and snapshots change it. Pure.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use crate::discovery::NodeEvent;
use crate::lease::LeaseEvent;
use crate::placement::{PlacementEvent, RequestEvent};
use crate::types::{LeaseRecord, NodeId, NodeRecord, RequestId, RequestRecord, ShardMap};

/// How one kind of event adds up to a state. Sealed: the four watches have one each.
pub trait Follow: Debug + Send + Sized + 'static {
    /// All that the events so far amount to.
    type View: Debug + Default + Send;

    /// Takes the event into the view; what it changed goes to `out`, a snapshot as differences.
    fn apply(self, view: &mut Self::View, out: &mut Vec<Self>);

    /// The whole view as one event.
    fn snapshot(view: &Self::View) -> Self;
}

impl Follow for LeaseEvent {
    type View = Option<LeaseRecord>;

    fn apply(self, view: &mut Self::View, out: &mut Vec<Self>) {
        let now = match self {
            Self::Snapshot(record) => record,
            Self::Changed(record) => Some(record),
            Self::Vacant => None,
        };
        match &now {
            Some(record) if !view.as_ref().is_some_and(|old| same_lease_write(old, record)) => {
                out.push(Self::Changed(record.clone()));
            }
            None if view.is_some() => out.push(Self::Vacant),
            _ => {}
        }
        *view = now;
    }

    fn snapshot(view: &Self::View) -> Self {
        Self::Snapshot(view.clone())
    }
}

// The time left to live, and the time since, differ at each look and are no change.
fn same_lease_write(old: &LeaseRecord, new: &LeaseRecord) -> bool {
    let new = new.clone().with_may_expire_in(old.may_expire_in);
    *old == new.with_renewed_ago(old.renewed_ago)
}

impl Follow for NodeEvent {
    type View = BTreeMap<NodeId, NodeRecord>;

    fn apply(self, view: &mut Self::View, out: &mut Vec<Self>) {
        match self {
            Self::Snapshot(records) => {
                let mut old = std::mem::take(view);
                for record in records {
                    let before = old.remove(&record.info.id);
                    put_node(view, before, record, out);
                }
                // Nothing says how these ended, so nothing may rely on it.
                out.extend(old.into_values().map(|record| Self::Expired {
                    node: record.info.id,
                    incarnation: record.info.incarnation,
                    judged: false,
                }));
            }
            Self::Joined(record) | Self::Updated(record) => {
                let before = view.remove(&record.info.id);
                put_node(view, before, record, out);
            }
            Self::Left { ref node, incarnation } | Self::Expired { ref node, incarnation, .. } => {
                // A departure of an older run says nothing of the one that is there.
                if view.get(node).is_some_and(|known| known.info.incarnation == incarnation) {
                    view.remove(node);
                    out.push(self);
                }
            }
        }
    }

    fn snapshot(view: &Self::View) -> Self {
        Self::Snapshot(view.values().cloned().collect())
    }
}

fn put_node(
    view: &mut BTreeMap<NodeId, NodeRecord>,
    before: Option<NodeRecord>,
    record: NodeRecord,
    out: &mut Vec<NodeEvent>,
) {
    match before {
        Some(old) if old.info.incarnation == record.info.incarnation => {
            if old != record.clone().with_may_expire_in(old.may_expire_in) {
                out.push(NodeEvent::Updated(record.clone()));
            }
        }
        _ => out.push(NodeEvent::Joined(record.clone())),
    }
    view.insert(record.info.id.clone(), record);
}

impl Follow for PlacementEvent {
    type View = Option<Arc<ShardMap>>;

    fn apply(self, view: &mut Self::View, out: &mut Vec<Self>) {
        let now = match self {
            Self::Snapshot(map) => map,
            Self::Changed(map) => Some(map),
        };
        match (&*view, &now) {
            (Some(old), Some(new)) if old.uid() == new.uid() => {
                if new.version() <= old.version() {
                    return;
                }
                out.push(Self::Changed(new.clone()));
            }
            (None, None) => {}
            _ => out.push(Self::Snapshot(now.clone())),
        }
        *view = now;
    }

    fn snapshot(view: &Self::View) -> Self {
        Self::Snapshot(view.clone())
    }
}

impl Follow for RequestEvent {
    type View = BTreeMap<RequestId, RequestRecord>;

    fn apply(self, view: &mut Self::View, out: &mut Vec<Self>) {
        match self {
            Self::Snapshot(records) => {
                let mut old = std::mem::take(view);
                for record in records {
                    let before = old.remove(&record.request.id);
                    put_request(view, before, record, out);
                }
                out.extend(old.into_keys().map(Self::Gone));
            }
            Self::Submitted(request) => {
                let before = view.remove(&request.id);
                let answer = before.as_ref().and_then(|record| record.answer.clone());
                put_request(view, before, RequestRecord::new(request, answer), out);
            }
            Self::Answered(id, answer) => {
                // An answer to a request that is not known here can't be shown again by a snapshot.
                if let Some(known) = view.get_mut(&id)
                    && known.answer.as_ref() != Some(&answer)
                {
                    known.answer = Some(answer.clone());
                    out.push(Self::Answered(id, answer));
                }
            }
            Self::Gone(id) => {
                if view.remove(&id).is_some() {
                    out.push(Self::Gone(id));
                }
            }
        }
    }

    fn snapshot(view: &Self::View) -> Self {
        Self::Snapshot(view.values().cloned().collect())
    }
}

fn put_request(
    view: &mut BTreeMap<RequestId, RequestRecord>,
    before: Option<RequestRecord>,
    record: RequestRecord,
    out: &mut Vec<RequestEvent>,
) {
    let id = record.request.id;
    if before.is_none() {
        out.push(RequestEvent::Submitted(record.request.clone()));
    }
    if let Some(answer) = &record.answer
        && before.and_then(|old| old.answer).as_ref() != Some(answer)
    {
        out.push(RequestEvent::Answered(id, answer.clone()));
    }
    view.insert(id, record);
}
