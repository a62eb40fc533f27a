//! What a member does with the shards that it hosts: it acts on each of them all the time, each time only
//! if its fence allows it, and says so.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coord::cluster::{Host, HostError, ShardFence};
use coord::{Moment, ShardId};

use super::member::{say, say_at};
use super::recording::now;
use super::said::{Act, Right, Said};

/// How often it acts on each of its shards.
const EVERY: Duration = Duration::from_millis(100);
/// What is said in one line was done within this time.
const PRECISION: Duration = Duration::from_millis(5);

/// The shards that run in this process.
#[derive(Debug, Default)]
pub(crate) struct Shards(Mutex<BTreeMap<ShardId, ShardFence>>);

#[async_trait]
impl Host for Shards {
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        let at = now();
        if let Some(right) = right(&fence) {
            say_at(at, Said::Starts { shard, right });
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(shard, fence);
        }
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&shard);
        say(Said::Stopped(shard));
    }
}

impl Shards {
    /// Acts on all shards, again and again.
    pub(crate) async fn act(&self) {
        loop {
            self.act_once();
            tokio::time::sleep(EVERY).await;
        }
    }

    fn act_once(&self) {
        let mut hosted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut began, mut acts, mut lapsed) = (now(), Vec::new(), Vec::new());
        hosted.retain(|shard, fence| {
            // Before the fence is asked: what it allows was done at this moment or later. A process that
            // stands still here finds its fence ended, for that is asked of the clock afterwards.
            let at = now();
            if at.since(began) > PRECISION {
                tell(began, std::mem::take(&mut acts));
                began = at;
            }
            match right(fence) {
                Some(right) => add(&mut acts, right, *shard),
                None => lapsed.push(*shard),
            }
            lapsed.last() != Some(shard)
        });
        tell(began, acts);
        if !lapsed.is_empty() {
            say(Said::Lapsed(lapsed));
        }
    }
}

fn right(fence: &ShardFence) -> Option<Right> {
    let token = fence.token()?;
    Some(Right::new(token.epoch, fence.deadline()?))
}

fn tell(at: Moment, acts: Vec<Act>) {
    if !acts.is_empty() {
        say_at(at, Said::Acts(acts));
    }
}

/// Shards come in order.
fn add(acts: &mut Vec<Act>, right: Right, shard: ShardId) {
    let shard = shard.get();
    let Some(act) = acts.iter_mut().find(|act| act.right == right) else {
        acts.push(Act { right, shards: vec![(shard, shard)] });
        return;
    };
    match act.shards.last_mut() {
        Some((_, last)) if *last + 1 == shard => *last = shard,
        _ => act.shards.push((shard, shard)),
    }
}
