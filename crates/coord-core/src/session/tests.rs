mod fake;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{advance, sleep, timeout};

use self::fake::{Fake, Fault};
use super::*;
use crate::clock::{Clock, Moment, TokioClock};
use crate::error::{ErrorKind, Result};
use crate::lease::Release;
use crate::types::{Incarnation, NodeId, Ttl};

const TTL: Duration = Duration::from_secs(10);
const MARGIN: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(3_600);

struct World {
    clock: Arc<TokioClock>,
    fake: Arc<Fake>,
    leases: Leases,
}

impl World {
    fn new() -> Self {
        let clock = Arc::new(TokioClock::new());
        let fake = Fake::new(clock.clone());
        let leases = Self::leases_of(&clock, &fake, 1);
        Self { clock, fake, leases }
    }

    fn leases_of(clock: &Arc<TokioClock>, fake: &Arc<Fake>, number: u64) -> Leases {
        let node = NodeId::new(format!("node-{number}")).expect("id");
        Leases::new(fake.clone(), node, Incarnation::random())
            .with_clock(clock.clone())
            .with_seed(number)
    }

    fn node(&self, number: u64) -> Leases {
        Self::leases_of(&self.clock, &self.fake, number)
    }

    fn now(&self) -> Moment {
        self.clock.now()
    }

    async fn acquire(&self) -> LeaseGuard {
        session(&self.leases).acquire().await.expect("acquired")
    }
}

fn session(leases: &Leases) -> LeaseSession {
    leases.lease("scheduler").expect("name").ttl(TTL).build().expect("times")
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_kept_until_it_is_released() {
    let world = World::new();
    let guard = world.acquire().await;
    assert_eq!(guard.deadline(), world.now().plus(TTL - MARGIN));
    sleep(Duration::from_secs(1_000)).await;
    assert!(guard.is_held() && guard.ended().is_none());
    let renewals = world.fake.calls("renew");
    for pair in renewals.windows(2) {
        let apart = pair[1].since(pair[0]);
        assert!(apart >= TTL * 3 / 10 && apart <= TTL * 11 / 30 + Duration::from_millis(2));
    }
    assert!(renewals.len() >= 270 && renewals.len() <= 334, "{}", renewals.len());
    let tenure = guard.tenure();
    assert_eq!(guard.release().await.expect("released"), Release::Released);
    assert!(!tenure.is_held() && world.fake.holder().is_none());
    assert!(matches!(tenure.lost().await, Lost::Released));
    world.leases.idle().await;
}

#[tokio::test(start_paused = true)]
async fn the_next_candidate_is_woken_by_a_release() {
    let world = World::new();
    let guard = world.acquire().await;
    let waiting = tokio::spawn({
        let session = session(&world.node(2));
        async move { session.acquire().await }
    });
    sleep(Duration::from_secs(60)).await;
    let released = world.now();
    assert_eq!(guard.release().await.expect("released"), Release::Released);
    let next = waiting.await.expect("no panic").expect("acquired");
    assert!(world.now().since(released) <= Duration::from_millis(32));
    assert_eq!(next.fence().term.get(), 2);
}
