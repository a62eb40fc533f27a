//! Who hosted which shard when, by what all members said, and whether that was right (I6).

use std::collections::BTreeMap;
use std::time::Duration;

use coord::{Epoch, Moment, ShardId};
use libtest_mimic::Trial;

use super::checks::Told;
use super::driver::Done;
use super::said::{Act, Line, Right, Said};

/// How many of the same kind are shown.
const SHOWN: usize = 3;

/// One process's time with one shard: from the call of `start` to the return of `stop`, or to the last
/// moment at which its fence allowed anything, or to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stay<'a> {
    who: &'a str,
    from: Moment,
    until: Moment,
}

/// All stays with each shard, in the order in which they began.
pub(crate) fn stays<'a>(members: &[Told<'a>]) -> BTreeMap<ShardId, Vec<Stay<'a>>> {
    let mut all = BTreeMap::<ShardId, Vec<Stay<'a>>>::new();
    for told in members {
        of_one(*told, &mut all);
    }
    for stays in all.values_mut() {
        stays.sort_by_key(|stay| stay.from);
    }
    all
}

/// What one process said, in its order.
fn of_one<'a>(told: Told<'a>, all: &mut BTreeMap<ShardId, Vec<Stay<'a>>>) {
    // Until when each shard that runs may be acted on, as far as it was said.
    let mut open = BTreeMap::<ShardId, (Moment, Moment)>::new();
    let mut close = |shard: ShardId, from: Moment, until: Moment| {
        all.entry(shard).or_default().push(Stay { who: told.name, from, until });
    };
    for line in told.lines {
        let at = line.at();
        match &line.said {
            Said::Starts { shard, right } => {
                if let Some((from, until)) = open.insert(*shard, (at, right.until())) {
                    close(*shard, from, until.min(at));
                }
            }
            Said::Acts(acts) => {
                for (right, shard) in each(acts) {
                    if let Some((_, until)) = open.get_mut(&shard) {
                        *until = (*until).max(right.until());
                    }
                }
            }
            Said::Stopped(shard) => {
                if let Some((from, until)) = open.remove(shard) {
                    close(*shard, from, until.min(at));
                }
            }
            Said::Lapsed(shards) => {
                for shard in shards {
                    if let Some((from, until)) = open.remove(shard) {
                        close(*shard, from, until.min(at));
                    }
                }
            }
            _ => {}
        }
    }
    for (shard, (from, until)) in open {
        close(shard, from, told.killed.map_or(until, |killed| until.min(killed)));
    }
}

/// Each shard that was acted on.
fn each(acts: &[Act]) -> impl Iterator<Item = (Right, ShardId)> {
    acts.iter().flat_map(|act| {
        let shards = act.shards.iter().flat_map(|(first, last)| *first..=*last);
        shards.map(move |shard| (act.right, ShardId::new(shard)))
    })
}

/// No shard is hosted by two processes at one moment, and none is acted on under an epoch once there was
/// a greater one.
pub(crate) fn check(members: &[Told<'_>], wrong: &mut Vec<String>) {
    let mut overlaps = Vec::new();
    for (shard, stays) in stays(members) {
        let mut last: Option<Stay<'_>> = None;
        for stay in stays {
            if let Some(last) = last.filter(|last| stay.from < last.until) {
                let both = last.until.min(stay.until).since(stay.from);
                let who = format!("{} and {}", last.who, stay.who);
                overlaps.push(format!("shard {shard} was hosted by {who} for {both:?}"));
            }
            last = last.filter(|last| last.until > stay.until).or(Some(stay));
        }
    }
    few(overlaps, "breaks I6", wrong);
    few(stale_acts(members), "was not fenced", wrong);
}

fn stale_acts(members: &[Told<'_>]) -> Vec<String> {
    let mut lines = Vec::new();
    for told in members {
        lines.extend(told.lines.iter().map(|line| (line.at(), told.name, &line.said)));
    }
    lines.sort_by_key(|(at, ..)| *at);
    let mut highest = BTreeMap::<ShardId, (Epoch, &str)>::new();
    let mut stale = Vec::new();
    let mut acts = |who, right: Right, shard: ShardId| {
        let (epoch, other) = *highest.entry(shard).or_insert((right.epoch, who));
        if right.epoch < epoch {
            let epochs = format!("epoch {} after epoch {epoch} of {other}", right.epoch);
            stale.push(format!("{who} acted on shard {shard} in {epochs}"));
        } else {
            highest.insert(shard, (right.epoch, who));
        }
    };
    for (_, who, said) in lines {
        match said {
            Said::Starts { shard, right } => acts(who, *right, *shard),
            Said::Acts(all) => each(all).for_each(|(right, shard)| acts(who, right, shard)),
            _ => {}
        }
    }
    stale
}

fn few(found: Vec<String>, what: &str, wrong: &mut Vec<String>) {
    if !found.is_empty() {
        let some: Vec<_> = found.iter().take(SHOWN).map(String::as_str).collect();
        wrong.push(format!("{what}, {} times: {}", found.len(), some.join("; ")));
    }
}

/// The longest time that each shard had no host, between two that had it.
pub(crate) fn gaps(members: &[Told<'_>], from: Moment) -> Vec<Duration> {
    let longest = |stays: Vec<Stay<'_>>| {
        let gaps = stays.windows(2).filter(|pair| pair[1].from > from);
        gaps.map(|pair| pair[1].from.since(pair[0].until)).max().unwrap_or_default()
    };
    let mut gaps: Vec<_> = stays(members).into_values().map(longest).collect();
    gaps.sort_unstable();
    gaps
}

/// The check sees what it is for.
pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("checks::a_second_host_is_seen", a_second_host_is_seen),
        Trial::test("checks::a_stale_hosts_act_is_seen", a_stale_hosts_act_is_seen),
    ]
}

fn at(millis: u64) -> Moment {
    Moment::from_origin(Duration::from_millis(millis))
}

const SHARD: ShardId = ShardId::new(3);

fn right(epoch: u64, until: u64) -> Right {
    Right::new(Epoch::new(epoch), at(until))
}

fn starts(when: u64, epoch: u64, until: u64) -> Line {
    Line::new(at(when), Said::Starts { shard: SHARD, right: right(epoch, until) })
}

fn acts(when: u64, epoch: u64, until: u64) -> Line {
    let act = Act { right: right(epoch, until), shards: vec![(2, 4)] };
    Line::new(at(when), Said::Acts(vec![act]))
}

fn found(one: &[Line], killed: Option<u64>, two: &[Line]) -> String {
    let one = Told { name: "one", lines: one, killed: killed.map(at) };
    let mut wrong = Vec::new();
    check(&[one, Told { name: "two", lines: two, killed: None }], &mut wrong);
    wrong.join("\n")
}

fn a_second_host_is_seen() -> Done {
    let stopped = |when| Line::new(at(when), Said::Stopped(SHARD));
    let one = [starts(100, 1, 900), acts(200, 1, 900), stopped(300)];
    assert_eq!(found(&one, None, &[starts(300, 2, 900)]), "");
    let text = found(&one, None, &[starts(299, 2, 900)]);
    assert_eq!(text, "breaks I6, 1 times: shard 3 was hosted by one and two for 1ms");
    // One that never says that it has stopped has the shard to its deadline, or to its end.
    let hangs = [starts(100, 1, 500), acts(200, 1, 900)];
    assert!(found(&hangs, None, &[starts(800, 2, 2_000)]).contains("for 100ms"));
    assert_eq!(found(&hangs, None, &[starts(900, 2, 2_000)]), "");
    assert_eq!(found(&hangs, Some(700), &[starts(800, 2, 2_000)]), "");
    // What it says of its end after it was paused came too late to count.
    let late = [&hangs[..], &[Line::new(at(3_000), Said::Lapsed(vec![SHARD]))]].concat();
    assert_eq!(found(&late, None, &[starts(900, 2, 2_000)]), "");
    Ok(())
}

fn a_stale_hosts_act_is_seen() -> Done {
    let two = [starts(900, 2, 4_000), acts(950, 2, 4_000)];
    let paused = [starts(100, 1, 500), acts(200, 1, 500)];
    assert_eq!(found(&paused, None, &two), "");
    let resumed = [&paused[..], &[acts(1_000, 1, 500)]].concat();
    let text = found(&resumed, None, &two);
    assert!(text.contains("one acted on shard 3 in epoch 1 after epoch 2 of two"), "{text}");
    Ok(())
}
