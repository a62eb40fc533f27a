//! Every split of small clusters, every strategy, and the course of single decisions.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coord_core::{Label, Moment, NodeId, NodeStatus, Version};
use proptest::prelude::{
    ProptestConfig, any, prop, prop_assert, prop_assert_eq, prop_assume, proptest,
};
use proptest::strategy::Strategy as Generator;

use super::sides::Sides;
use super::strategy::{Verdict, judge, keeps};
use super::*;

const NODES_MAX: usize = 9;

fn at(seconds: u64) -> Moment {
    Moment::from_origin(Duration::from_secs(seconds))
}

fn id(n: usize) -> NodeId {
    NodeId::new(format!("n{n}")).expect("name")
}

fn role() -> Label {
    Label::new("core").expect("label")
}

fn member(n: usize, age: u64) -> Member {
    Member::new(id(n), Version::new(age))
}

fn crowd(count: usize) -> Vec<Member> {
    (0..count).map(|n| member(n, n as u64)).collect()
}

fn strategies(nodes: usize) -> Vec<Strategy> {
    let mut all = vec![
        Strategy::KeepMajority,
        Strategy::keep_oldest(),
        Strategy::KeepOldest { down_if_alone: false },
        Strategy::DownAll,
    ];
    all.extend((1..=5).map(|quorum| Strategy::StaticQuorum { quorum }));
    all.extend((0..=nodes).map(|n| Strategy::KeepReferee { referee: id(n) }));
    all
}

fn verdict(settings: &DowningSettings, view: &View) -> Option<Verdict> {
    let sides = Sides::of(view, settings.role.as_ref(), keeps(&settings.strategy));
    sides.is_mine(view.me()).then(|| judge(settings, &sides))
}

/// What a node on `side` decides, when it reaches exactly that side.
fn decides(settings: &DowningSettings, members: &[Member], me: &NodeId, side: &[NodeId]) -> bool {
    let all = members.iter().map(|member| member.id.clone());
    let gone = all.filter(|id| !side.contains(id)).collect::<Vec<_>>();
    let view = View::new(me.clone(), members.to_vec()).with_unreachable(gone);
    verdict(settings, &view) == Some(Verdict::GoesOn)
}

/// Which side goes on, worked out by somebody who sees both: none, or its index.
fn arbiter(settings: &DowningSettings, members: &[Member], sides: &[Vec<NodeId>]) -> Option<usize> {
    let counted =
        |member: &&Member| settings.role.as_ref().is_none_or(|role| member.roles.contains(role));
    let voters: Vec<&Member> = members.iter().filter(counted).collect();
    let votes = |side: &Vec<NodeId>| voters.iter().filter(|m| side.contains(&m.id)).count();
    let side_of = |id: &NodeId| sides.iter().position(|side| side.contains(id));
    match &settings.strategy {
        Strategy::KeepMajority | Strategy::LeaseMajority { .. } => {
            let lowest = side_of(&voters.iter().min_by_key(|m| &m.id)?.id)?;
            (0..sides.len()).find(|&n| {
                votes(&sides[n]) * 2 > voters.len()
                    || votes(&sides[n]) * 2 == voters.len() && n == lowest
            })
        }
        Strategy::KeepOldest { down_if_alone } => {
            let oldest = side_of(&voters.iter().min_by_key(|m| (m.since, &m.id))?.id)?;
            let rest = voters.len() - votes(&sides[oldest]);
            if !(*down_if_alone && votes(&sides[oldest]) == 1 && rest >= 2) {
                return Some(oldest);
            }
            (0..sides.len()).find(|&n| n != oldest && votes(&sides[n]) == rest)
        }
        Strategy::StaticQuorum { quorum } => {
            let quorum = *quorum as usize;
            let fits = voters.len() < 2 * quorum;
            (0..sides.len()).find(|&n| fits && votes(&sides[n]) >= quorum)
        }
        Strategy::KeepReferee { referee } => side_of(referee),
        Strategy::DownAll => None,
    }
}

fn a_crowd() -> impl Generator<Value = Vec<Member>> {
    let one = (0_u64..6, any::<bool>());
    prop::collection::vec(one, 1..=NODES_MAX).prop_map(|ages| {
        let crowd = ages.into_iter().enumerate().map(|(n, (age, has_role))| {
            let roles = if has_role { BTreeSet::from([role()]) } else { BTreeSet::new() };
            member(n, age).with_roles(roles)
        });
        crowd.collect()
    })
}

fn settings(strategy: &Strategy, by_role: bool) -> DowningSettings {
    let settings = DowningSettings::new(strategy.clone());
    if by_role { settings.with_role(role()) } else { settings }
}

/// Both halves of the split that `mask` describes.
fn halves(nodes: usize, mask: usize) -> Vec<Vec<NodeId>> {
    let half = |side| (0..nodes).filter(|n| (mask >> n & 1 == 1) == side).map(id).collect();
    [half(true), half(false)].into_iter().filter(|side: &Vec<NodeId>| !side.is_empty()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Each node of each side of each split in two says what the arbiter says: so at most one side goes
    /// on, and both agree which.
    #[test]
    fn of_every_split_in_two_both_sides_say_the_same(members in a_crowd(), by_role in any::<bool>()) {
        let nodes = members.len();
        for strategy in strategies(nodes).into_iter().chain([Strategy::lease_majority()]) {
            let settings = settings(&strategy, by_role);
            for mask in 0..1_usize << (nodes - 1) {
                let sides = halves(nodes, mask);
                let expected = arbiter(&settings, &members, &sides);
                for (n, side) in sides.iter().enumerate() {
                    // A side's nodes share their view but for whose it is.
                    for me in [&side[0], &side[side.len() - 1]] {
                        let gone = members.iter().map(|m| m.id.clone());
                        let gone = gone.filter(|id| !side.contains(id)).collect::<Vec<_>>();
                        let view = View::new(me.clone(), members.clone()).with_unreachable(gone);
                        let found = match verdict(&settings, &view).expect("on its own side") {
                            Verdict::GoesOn => true,
                            Verdict::GoesDown => false,
                            Verdict::Lease { majority } => majority,
                        };
                        prop_assert_eq!(
                            found, expected == Some(n),
                            "{:?} of {:?}: {} of {:?}", strategy, members, me, sides
                        );
                    }
                }
            }
        }
    }

    /// Splits in any number of parts: at most one goes on, and it is the arbiter's.
    #[test]
    fn of_any_number_of_sides_at_most_one_goes_on(
        members in a_crowd(),
        parts in prop::collection::vec(0_usize..5, NODES_MAX),
        by_role in any::<bool>(),
    ) {
        let mut sides: BTreeMap<usize, Vec<NodeId>> = BTreeMap::new();
        for (n, member) in members.iter().enumerate() {
            sides.entry(parts[n]).or_default().push(member.id.clone());
        }
        let sides: Vec<Vec<NodeId>> = sides.into_values().collect();
        for strategy in strategies(members.len()) {
            let settings = settings(&strategy, by_role);
            let expected = arbiter(&settings, &members, &sides);
            for (n, side) in sides.iter().enumerate() {
                for me in side {
                    prop_assert_eq!(
                        decides(&settings, &members, me, side), expected == Some(n),
                        "{:?} of {:?}: {} of {:?}", strategy, members, me, sides
                    );
                }
            }
        }
    }

    /// The sides may have seen different things just before they parted: on the leader's side joining
    /// nodes became Active, and draining ones left. Nobody is sure, and still two never go on.
    #[test]
    fn changes_that_one_side_missed_never_make_two_survivors(
        members in a_crowd(),
        joining in prop::collection::vec(any::<bool>(), NODES_MAX),
        draining in prop::collection::vec(any::<bool>(), NODES_MAX),
        mask in 0_usize..1 << NODES_MAX,
        seen in prop::collection::vec(any::<bool>(), NODES_MAX),
        leads in 0_usize..2,
        by_role in any::<bool>(),
    ) {
        let sides = halves(members.len(), mask);
        for strategy in strategies(members.len()) {
            let settings = settings(&strategy, by_role);
            // The majority is taken of those who were there, the leaving ones included: who misses a
            // departure is cut off from the store, and downs nobody.
            let may_leave = strategy != Strategy::KeepMajority;
            let mut survivors = 0;
            for (s, side) in sides.iter().enumerate() {
                let known: Vec<Member> = members
                    .iter()
                    .enumerate()
                    .filter(|(n, _)| {
                        joining[*n] || !(draining[*n] && may_leave && s == leads && seen[*n])
                    })
                    .map(|(n, member)| {
                        let status = if joining[n] {
                            let promoted = s == leads && side.contains(&member.id) && seen[n];
                            if promoted { NodeStatus::Active } else { NodeStatus::Discovered }
                        } else if draining[n] {
                            NodeStatus::Draining
                        } else {
                            NodeStatus::Active
                        };
                        // Who becomes Active is younger than all who are.
                        let since = member.since.get() + if joining[n] { 100 } else { 0 };
                        Member { since: Version::new(since), ..member.clone().with_status(status) }
                    })
                    .collect();
                survivors += usize::from(side.iter().any(|me| decides(&settings, &known, me, side)));
            }
            prop_assert!(survivors <= 1, "{strategy:?}, {sides:?}");
        }
    }

    /// Any pattern of broken links, one-way ones too, where nodes tell whom they don't hear: whoever stays
    /// reaches all others who stay, and all who reach each other, directly or through others, say the
    /// same of everybody.
    #[test]
    fn whatever_links_are_broken_those_who_stay_reach_each_other(
        members in a_crowd(),
        broken in prop::collection::vec(prop::bool::weighted(0.3), NODES_MAX * NODES_MAX),
        by_role in any::<bool>(),
    ) {
        let nodes = members.len();
        let misses = |a: usize, b: usize| a != b && broken[a * NODES_MAX + b];
        let linked = |a: usize, b: usize| !misses(a, b) && !misses(b, a);
        let mut groups: Vec<BTreeSet<usize>> = Vec::new();
        for start in 0..nodes {
            if groups.iter().any(|group| group.contains(&start)) {
                continue;
            }
            let (mut group, mut open) = (BTreeSet::from([start]), vec![start]);
            while let Some(from) = open.pop() {
                for to in (0..nodes).filter(|&to| linked(from, to)) {
                    if group.insert(to) {
                        open.push(to);
                    }
                }
            }
            groups.push(group);
        }
        for strategy in strategies(nodes) {
            let settings = settings(&strategy, by_role);
            let mut staying: BTreeSet<usize> = BTreeSet::new();
            for group in &groups {
                let mut told = BTreeSet::new();
                for &me in group {
                    let mut view = View::new(id(me), members.clone());
                    // Whom it hears tells it, and passes on what others tell.
                    let (mut heard, mut open) = (BTreeSet::from([me]), vec![me]);
                    while let Some(by) = open.pop() {
                        open.extend((0..nodes).filter(|&n| !misses(by, n) && heard.insert(n)));
                    }
                    for n in heard {
                        view = view.with_row(id(n), (0..nodes).filter(|&to| misses(n, to)).map(id));
                    }
                    let sides = Sides::of(&view, settings.role.as_ref(), keeps(&strategy));
                    let names = |part: &[&Member]| part.iter().map(|m| m.id.clone()).collect();
                    let parts: [Vec<NodeId>; 3] =
                        [names(&sides.mine), names(&sides.cut), names(&sides.other)];
                    told.insert(parts);
                    if verdict(&settings, &view) == Some(Verdict::GoesOn) {
                        staying.insert(me);
                    }
                }
                prop_assert_eq!(told.len(), 1, "one group sees different sides: {:?}", told);
            }
            for &a in &staying {
                for &b in staying.iter().filter(|&&b| b != a) {
                    prop_assert!(linked(a, b), "{strategy:?}: {a} and {b} of {groups:?}");
                }
            }
        }
    }

    /// Nodes with clocks and a lease: of each split one side ends with the lease and downs the other,
    /// whoever is asked first.
    #[test]
    fn with_a_lease_exactly_one_side_goes_on(
        members in a_crowd(),
        mask in 0_usize..1 << NODES_MAX,
        late in prop::collection::vec(0_u64..4, NODES_MAX),
    ) {
        let sides = halves(members.len(), mask);
        prop_assume!(sides.len() == 2);
        let mut nodes: Vec<Downing> = members.iter().map(|_| machine(Strategy::lease_majority())).collect();
        let mut ends: Vec<Option<Step>> = vec![None; nodes.len()];
        let mut holder = None;
        for second in 0..60 {
            for (n, node) in nodes.iter_mut().enumerate() {
                let side = sides.iter().find(|side| side.contains(&id(n))).expect("a side");
                if second == late[n] {
                    let gone = (0..members.len()).map(id).filter(|id| !side.contains(id));
                    node.on_view(View::new(id(n), members.clone()).with_unreachable(gone), at(second));
                }
                if ends[n].is_some() {
                    continue;
                }
                match node.next(at(second)) {
                    Step::AskLease => {
                        let answer = match &holder {
                            None => LeaseAnswer::Acquired,
                            Some(other) => LeaseAnswer::HeldBy(id(*other)),
                        };
                        holder.get_or_insert(n);
                        node.on_lease(&answer, at(second));
                    }
                    Step::Stay | Step::Wait(_) => {}
                    end => ends[n] = Some(end),
                }
            }
        }
        let winner = holder.expect("somebody asked");
        for (n, end) in ends.into_iter().enumerate() {
            let side = sides.iter().find(|side| side.contains(&id(n))).expect("a side");
            let expected = if side.contains(&id(winner)) {
                Step::Down((0..members.len()).map(id).filter(|id| !side.contains(id)).collect())
            } else {
                Step::DownSelf(DownReason::LeaseHeld)
            };
            prop_assert_eq!(end, Some(expected), "node {} of {:?}", n, sides);
        }
        // All on time: the majority wins.
        if late[..members.len()].iter().all(|&second| second == late[0]) {
            let settings = DowningSettings::new(Strategy::KeepMajority);
            let kept = arbiter(&settings, &members, &sides).expect("one of two");
            prop_assert!(sides[kept].contains(&id(winner)));
        }
    }
}

/// Nodes in groups that don't reach each other, none of which reaches the store for a while.
struct Islands {
    members: Vec<Member>,
    groups: Vec<usize>,
    /// When each node notices that it does not reach the others, loses the store, and has it again.
    notices: Vec<u64>,
    loses: Vec<u64>,
    returns: Vec<u64>,
    nodes: Vec<Downing>,
    ends: Vec<Option<(u64, DownReason)>>,
    /// What the store holds: each node's row, who is no member any more, and who has the lease.
    rows: Vec<BTreeSet<usize>>,
    failed: BTreeSet<usize>,
    holder: Option<usize>,
}

/// How long a silence of the store is before it counts as away, and how long one's own row waits for
/// an answer.
const AWAY_AFTER: u64 = 30;
const MUTE_AFTER: u64 = 4;

impl Islands {
    fn row(&self, n: usize, second: u64) -> BTreeSet<usize> {
        let ended = |m: usize| self.ends[m].is_some_and(|(at, _)| at + 5 <= second);
        let apart = |m: usize| self.groups[m] != self.groups[n] && second >= self.notices[n];
        (0..self.members.len()).filter(|&m| m != n && (apart(m) || ended(m))).collect()
    }

    fn has_store(&self, n: usize, second: u64) -> bool {
        second < self.loses[n] || second >= self.returns[n]
    }

    fn view(&self, n: usize, second: u64) -> View {
        let names = |row: &BTreeSet<usize>| row.iter().copied().map(id).collect::<Vec<_>>();
        let connected = self.has_store(n, second);
        let status = |m: usize| {
            if connected && self.failed.contains(&m) {
                NodeStatus::Failed
            } else {
                NodeStatus::Active
            }
        };
        let members = self.members.iter().cloned().enumerate();
        let members = members.map(|(m, member)| member.with_status(status(m)));
        let view = View::new(id(n), members).with_unreachable(names(&self.row(n, second)));
        let told = (0..self.members.len()).filter(|&m| connected && m != n);
        told.fold(view, |view, m| view.with_row(id(m), names(&self.rows[m])))
    }

    fn step(&mut self, n: usize, second: u64) {
        let connected = self.has_store(n, second);
        let row = self.row(n, second);
        let silent = second.saturating_sub(self.loses[n]);
        let mute = second >= self.notices[n].max(self.loses[n]) + MUTE_AFTER;
        let away = !connected && (silent >= AWAY_AFTER || mute);
        if connected {
            self.rows[n] = row;
        }
        let store = if away { Reach::Unreachable } else { Reach::Reachable };
        self.nodes[n].on_store(store, at(second));
        let view = self.view(n, second);
        self.nodes[n].on_view(view, at(second));
        loop {
            match self.nodes[n].next(at(second)) {
                Step::AskLease if !connected => {
                    self.nodes[n].on_lease(&LeaseAnswer::Unknown, at(second));
                }
                Step::AskLease => {
                    let holder = *self.holder.get_or_insert(n);
                    let answer = match holder == n {
                        true => LeaseAnswer::Acquired,
                        false => LeaseAnswer::HeldBy(id(holder)),
                    };
                    self.nodes[n].on_lease(&answer, at(second));
                }
                Step::Down(losers) => {
                    self.failed
                        .extend((0..self.members.len()).filter(|&m| losers.contains(&id(m))));
                }
                Step::DownSelf(why) => {
                    self.ends[n] = Some((second, why));
                    if connected {
                        self.failed.insert(n);
                    }
                    return;
                }
                Step::ReleaseLease => self.nodes[n].on_lease_gone(),
                Step::Stay | Step::Wait(_) => return,
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Every order in which the nodes lose the store and have it again: what their rows then tell is no
    /// unrest, and an old row makes nobody believe that it is the one who reaches too few.
    #[test]
    fn a_store_that_comes_back_to_one_after_the_other_is_no_unrest(
        nodes in 2_usize..=6,
        groups in prop::collection::vec(0_usize..3, 6),
        alone in any::<bool>(),
        notices in prop::collection::vec(5_u64..9, 6),
        loses in prop::collection::vec(prop::sample::select(vec![0_u64, 1, 4, 7, 12]), 6),
        returns in prop::collection::vec(36_u64..88, 6),
        which in any::<prop::sample::Index>(),
    ) {
        let groups = if alone { (0..6).collect() } else { groups };
        prop_assume!(groups[..nodes].iter().any(|group| *group != groups[0]));
        // A quorum that never was decides nothing.
        let fits = |strategy: &Strategy| match strategy {
            Strategy::StaticQuorum { quorum } => *quorum as usize <= nodes,
            _ => true,
        };
        let lease = std::iter::repeat_n(Strategy::lease_majority(), 12);
        let all: Vec<_> = strategies(nodes).into_iter().filter(fits).chain(lease).collect();
        let strategy = which.get(&all).clone();
        let settings = DowningSettings::new(strategy.clone());
        let mut world = Islands {
            members: crowd(nodes),
            nodes: (0..nodes).map(|_| machine(strategy.clone())).collect(),
            ends: vec![None; nodes],
            rows: vec![BTreeSet::new(); nodes],
            failed: BTreeSet::new(),
            holder: None,
            groups, notices, loses, returns,
        };
        for second in 0..260 {
            for n in 0..nodes {
                if world.ends[n].is_none() {
                    world.step(n, second);
                }
            }
        }
        let mut sides: BTreeMap<usize, Vec<NodeId>> = BTreeMap::new();
        for n in 0..nodes {
            sides.entry(world.groups[n]).or_default().push(id(n));
        }
        let stays = match world.holder {
            Some(holder) => Some(world.groups[holder]),
            None => {
                let (groups, sides): (Vec<_>, Vec<_>) = sides.into_iter().unzip();
                arbiter(&settings, &world.members, &sides).map(|n| groups[n])
            }
        };
        for n in 0..nodes {
            let end = world.ends[n].map(|(_, why)| why);
            let wrong = matches!(end, Some(DownReason::Unstable | DownReason::PartlyConnected | DownReason::LeaseUnknown));
            prop_assert!(!wrong, "{n}: {:?}", world.ends);
            prop_assert_eq!(end.is_none(), Some(world.groups[n]) == stays, "{}: {:?}", n, world.ends);
        }
    }
}

/// A majority of nodes that reach each other and the store, and others that crash one after the other.
struct Crashes {
    nodes: usize,
    /// When each node that crashes does.
    at: BTreeMap<usize, u64>,
    /// How much later each node notices each crash, and its row reaches the others.
    notices: Vec<u64>,
    tells: u64,
    /// Who is no member any more, and since when each is known to be none.
    failed: BTreeMap<usize, u64>,
}

impl Crashes {
    fn row(&self, n: usize, second: u64) -> Vec<NodeId> {
        let noticed = |m: usize, at: u64| at + self.notices[n * NODES_MAX + m] <= second;
        let gone = self.at.iter().filter(|(m, at)| **m != n && noticed(**m, **at));
        gone.map(|(m, _)| id(*m)).collect()
    }

    fn view(&self, me: usize, second: u64) -> View {
        let members = crowd(self.nodes).into_iter().enumerate().map(|(n, member)| {
            let failed = self.failed.get(&n).is_some_and(|at| at + self.tells <= second);
            member.with_status(if failed { NodeStatus::Failed } else { NodeStatus::Active })
        });
        let view = View::new(id(me), members).with_unreachable(self.row(me, second));
        // One that crashed goes on telling what it told last, until it is no member any more.
        let told = |n: usize| self.at.get(&n).copied().unwrap_or(u64::MAX).min(second);
        (0..self.nodes).filter(|n| *n != me).fold(view, |view, n| {
            view.with_row(id(n), self.row(n, told(n).saturating_sub(self.tells)))
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// However two or three crashes follow each other: the majority that is left goes on, and downs the lost
    /// ones in time.
    #[test]
    fn crashes_one_after_the_other_take_nobody_else_down(
        nodes in 4_usize..=NODES_MAX,
        crashes in prop::collection::vec(0_u64..=60, 1..=3),
        notices in prop::collection::vec(0_u64..=4, NODES_MAX * NODES_MAX),
        tells in 0_u64..=2,
        which in any::<prop::sample::Index>(),
    ) {
        let quorum = nodes / 2 + 1;
        prop_assume!(nodes - crashes.len() >= quorum);
        // The oldest and the referee stay: their side is kept by design.
        let times: BTreeMap<usize, u64> =
            crashes.into_iter().enumerate().map(|(n, at)| (nodes - 1 - n, 10 + at)).collect();
        let strategies = [
            Strategy::KeepMajority,
            Strategy::keep_oldest(),
            Strategy::KeepOldest { down_if_alone: false },
            Strategy::StaticQuorum { quorum: u32::try_from(quorum).expect("small") },
            Strategy::KeepReferee { referee: id(0) },
            Strategy::lease_majority(),
        ];
        let strategy = which.get(&strategies).clone();
        let mut world = Crashes { nodes, at: times, notices, tells, failed: BTreeMap::new() };
        let mut machines: Vec<_> = (0..nodes).map(|_| machine(strategy.clone())).collect();
        for second in 0..150 {
            let now = at(second);
            for (n, machine) in machines.iter_mut().enumerate() {
                if world.at.get(&n).is_some_and(|at| *at <= second) {
                    continue;
                }
                machine.on_view(world.view(n, second), now);
                loop {
                    match machine.next(now) {
                        // Of those who stay: whoever wins it and dies keeps all others from winning.
                        Step::AskLease if n == 0 => machine.on_lease(&LeaseAnswer::Acquired, now),
                        Step::AskLease => machine.on_lease(&LeaseAnswer::HeldBy(id(0)), now),
                        Step::Down(losers) => {
                            for m in 0..nodes {
                                if losers.contains(&id(m)) {
                                    prop_assert!(
                                        world.at.contains_key(&m),
                                        "{n} downs {m}, which lives: {strategy:?} {:?}", world.at
                                    );
                                    world.failed.entry(m).or_insert(second);
                                }
                            }
                        }
                        Step::DownSelf(why) => prop_assert!(
                            false, "{n} goes down, {why:?} at {second}: {strategy:?} {:?}", world.at
                        ),
                        Step::ReleaseLease => machine.on_lease_gone(),
                        Step::Stay | Step::Wait(_) => break,
                    }
                }
            }
        }
        // The last one that is noticed, and what the verdict of an earlier one takes.
        let last = world.at.values().max().expect("one crashed") + 4 + 2 * tells + 20 + 1 + tells;
        for m in world.at.keys() {
            let failed = world.failed.get(m);
            prop_assert!(failed.is_some_and(|at| *at <= last), "{:?}, {:?}", world.at, world.failed);
        }
    }
}

#[test]
fn two_crashes_some_seconds_apart_down_both_of_them_and_nobody_else() {
    for second in 0..=60 {
        let mut node = machine(Strategy::KeepMajority);
        node.on_view(view(0, 7, &[6]), at(0));
        let both = second.max(20) + 20;
        let mut members = crowd(7);
        for now in 0..=both {
            if now == second {
                let view = View::new(id(0), members.clone());
                node.on_view(view.with_unreachable([id(5), id(6)]), at(now));
            }
            match node.next(at(now)) {
                Step::Down(losers) => members.retain(|member| !losers.contains(&member.id)),
                Step::Stay | Step::Wait(_) => {}
                other => panic!("{other:?} at {now}, {second} s after the first"),
            }
        }
        assert!(members.iter().all(|member| member.id != id(5)), "{second}");
        assert!(members.iter().all(|member| member.id != id(6)), "{second}");
    }
}

fn machine(strategy: Strategy) -> Downing {
    Downing::new(DowningSettings::new(strategy)).expect("valid settings")
}

fn view(me: usize, nodes: usize, unreachable: &[usize]) -> View {
    View::new(id(me), crowd(nodes)).with_unreachable(unreachable.iter().copied().map(id))
}

fn down(nodes: &[usize]) -> Step {
    Step::Down(nodes.iter().copied().map(id).collect())
}

#[test]
fn peers_and_store_there_is_business_as_usual() {
    let mut node = machine(Strategy::KeepMajority);
    node.on_view(view(0, 5, &[]), at(0));
    assert_eq!(node.partition_state(), PartitionState::Normal);
    assert_eq!(node.next(at(1000)), Step::Stay);
}

#[test]
fn the_store_away_freezes_the_view_and_downs_nobody() {
    let mut node = machine(Strategy::DownAll);
    node.on_view(view(0, 5, &[]), at(0));
    node.on_store(Reach::Unreachable, at(1));
    assert_eq!(node.partition_state(), PartitionState::Frozen);
    assert_eq!(node.next(at(1000)), Step::Stay);
}

#[test]
fn peers_away_and_the_store_there_is_decided_by_the_strategy() {
    let mut node = machine(Strategy::KeepMajority);
    node.on_view(view(0, 5, &[3, 4]), at(0));
    assert_eq!(node.partition_state(), PartitionState::Split);
    assert_eq!(node.next(at(0)), Step::Wait(at(20)));
    assert_eq!(node.next(at(20)), down(&[3, 4]));
    let mut node = machine(Strategy::KeepMajority);
    node.on_view(view(4, 5, &[0, 1, 2]), at(0));
    assert_eq!(node.next(at(20)), Step::DownSelf(DownReason::OtherSide));
}

#[test]
fn peers_and_store_away_is_a_node_that_downs_nobody_else() {
    let mut node = machine(Strategy::KeepMajority);
    node.on_store(Reach::Unreachable, at(0));
    node.on_view(view(0, 5, &[3, 4]), at(0));
    assert_eq!(node.partition_state(), PartitionState::Isolated);
    assert_eq!(node.next(at(20)), Step::Stay, "it can't write a verdict");
    // Back again, it looks first at what the others have written.
    node.on_store(Reach::Reachable, at(50));
    assert_eq!(node.next(at(50)), Step::Wait(at(70)));
    assert_eq!(node.next(at(70)), down(&[3, 4]));

    let mut node = machine(Strategy::KeepMajority);
    node.on_store(Reach::Unreachable, at(0));
    node.on_view(view(4, 5, &[0, 1, 2]), at(0));
    assert_eq!(
        node.next(at(20)),
        Step::DownSelf(DownReason::OtherSide),
        "that it can decide alone"
    );

    let mut node = machine(Strategy::lease_majority());
    node.on_store(Reach::Unreachable, at(0));
    node.on_view(view(4, 5, &[0, 1, 2]), at(0));
    assert_eq!(node.next(at(100)), Step::Stay, "there is no lease to ask for");
    let told: Vec<Member> = crowd(5)
        .into_iter()
        .map(|member| match member.id == id(4) {
            true => member.with_status(NodeStatus::Failed),
            false => member,
        })
        .collect();
    node.on_store(Reach::Reachable, at(101));
    assert_eq!(node.next(at(101)), Step::Wait(at(121)), "it does not ask at once");
    node.on_view(View::new(id(4), told), at(102));
    assert_eq!(node.next(at(102)), Step::DownSelf(DownReason::DeclaredFailed));
}

#[test]
fn what_heals_in_time_is_not_downed() {
    let mut node = machine(Strategy::DownAll);
    node.on_view(view(0, 5, &[3, 4]), at(0));
    node.on_view(view(0, 5, &[]), at(19));
    assert_eq!(node.next(at(20)), Step::Stay);
    node.on_view(view(0, 5, &[3]), at(21));
    assert_eq!(node.next(at(40)), Step::Wait(at(41)));
    assert_eq!(node.next(at(41)), Step::DownSelf(DownReason::OtherSide));
}

#[test]
fn unrest_ends_with_everybody_down_unless_it_is_off() {
    let settings = DowningSettings::new(Strategy::KeepMajority);
    let patient = settings.clone().with_down_all_when_unstable(Unstable::Off);
    for (settings, expected) in
        [(settings, Step::DownSelf(DownReason::Unstable)), (patient, Step::Wait(at(70)))]
    {
        let mut node = Downing::new(settings).expect("valid");
        // Three quarters of the wait after a decision would have been possible, from the first return on.
        let views: [(u64, &[usize]); 6] =
            [(0, &[4]), (10, &[3, 4]), (20, &[4]), (30, &[3]), (40, &[4]), (50, &[3])];
        for (second, gone) in views {
            node.on_view(view(0, 5, gone), at(second));
            assert!(matches!(node.next(at(second)), Step::Wait(_)), "{second}");
        }
        assert!(matches!(node.next(at(54)), Step::Wait(_)));
        assert_eq!(node.next(at(55)), expected);
    }
}

#[test]
fn a_joining_node_neither_decides_nor_disturbs() {
    let joins = |n| member(n, 9).with_status(NodeStatus::Discovered);
    let mut node = machine(Strategy::KeepMajority);
    node.on_view(View::new(id(5), crowd(5).into_iter().chain([joins(5)])), at(0));
    assert_eq!(node.next(at(100)), Step::Stay);

    let mut node = machine(Strategy::KeepMajority);
    node.on_view(view(0, 5, &[4]), at(0));
    let more = View::new(id(0), crowd(5).into_iter().chain([joins(5)])).with_unreachable([id(4)]);
    node.on_view(more, at(15));
    assert_eq!(node.next(at(20)), down(&[4]), "the wait did not begin anew");
}

#[test]
fn a_verdict_is_said_again_until_it_is_carried_out() {
    let mut node = machine(Strategy::KeepMajority);
    node.on_view(view(0, 5, &[3, 4]), at(0));
    assert_eq!(node.next(at(20)), down(&[3, 4]));
    assert_eq!(node.next(at(21)), Step::Wait(at(40)));
    let left = crowd(5).into_iter().filter(|member| member.id != id(3));
    node.on_view(View::new(id(0), left).with_unreachable([id(4)]), at(30));
    assert_eq!(node.next(at(40)), down(&[4]));
    node.on_view(view(0, 3, &[]), at(41));
    assert_eq!(node.next(at(41)), Step::Stay);
    node.on_view(view(0, 3, &[2]), at(50));
    assert_eq!(node.next(at(50)), Step::Wait(at(70)), "another one waits like the first");
}

#[test]
fn a_node_that_went_down_stays_down() {
    let mut node = machine(Strategy::KeepMajority);
    node.on_view(view(4, 5, &[0, 1, 2]), at(0));
    assert_eq!(node.next(at(20)), Step::DownSelf(DownReason::OtherSide));
    node.on_view(view(4, 5, &[]), at(21));
    assert_eq!(node.next(at(21)), Step::DownSelf(DownReason::OtherSide));
}

#[test]
fn a_stall_of_this_process_delays_its_decision() {
    let mut node = machine(Strategy::KeepMajority);
    node.on_view(view(4, 5, &[0, 1, 2]), at(0));
    node.on_stall(Duration::from_secs(300));
    assert_eq!(node.next(at(310)), Step::Wait(at(320)));
}

#[test]
fn a_quorum_downs_nobody_before_it_was_there() {
    let mut node = machine(Strategy::StaticQuorum { quorum: 3 });
    node.on_view(view(0, 2, &[1]), at(0));
    assert_eq!(node.next(at(100)), Step::Stay, "two of five have started");
    node.on_view(view(0, 5, &[1]), at(200));
    assert_eq!(node.next(at(220)), down(&[1]));
    node.on_view(view(0, 4, &[]), at(250));
    node.on_view(view(0, 2, &[1]), at(300));
    assert_eq!(node.next(at(320)), Step::DownSelf(DownReason::OtherSide), "it was there once");
}

#[test]
fn too_many_members_for_a_quorum_are_warned_of_and_all_go_down() {
    let mut node = machine(Strategy::StaticQuorum { quorum: 3 });
    node.on_view(view(0, 5, &[]), at(0));
    assert_eq!(node.warnings(), []);
    node.on_view(view(0, 6, &[5]), at(0));
    let warning = Warning::QuorumTooSmall { quorum: 3, members: 6 };
    let text = "6 members are too many for a quorum of 3; at most 5 can be told apart";
    assert_eq!((warning.to_string().as_str(), node.warnings()), (text, vec![warning]));
    assert_eq!(node.next(at(20)), Step::DownSelf(DownReason::OtherSide));
}

#[test]
fn an_absent_referee_and_a_role_of_nobody_are_warned_of() {
    let settings = DowningSettings::new(Strategy::KeepReferee { referee: id(7) }).with_role(role());
    let mut node = Downing::new(settings).expect("valid");
    node.on_view(view(0, 3, &[]), at(0));
    let expected = [Warning::NoMemberWithRole(role()), Warning::NoReferee(id(7))];
    assert_eq!(node.warnings(), expected);
}

#[test]
fn two_who_do_not_reach_each_other_lose_the_younger_one() {
    let settings = DowningSettings::new(Strategy::KeepMajority);
    for (me, expected) in
        [(0, down(&[2])), (1, down(&[2])), (2, Step::DownSelf(DownReason::PartlyConnected))]
    {
        let mut node = Downing::new(settings.clone()).expect("valid");
        let rows = [(0, &[2][..]), (1, &[]), (2, &[0])];
        let view = rows.into_iter().fold(view(me, 3, &[]), |view, (n, row)| {
            view.with_row(id(n), row.iter().copied().map(id))
        });
        node.on_view(view, at(0));
        assert_eq!(node.next(at(20)), expected, "node {me}");
    }
}

#[test]
fn one_whose_network_is_half_broken_goes_alone() {
    let mut node = machine(Strategy::KeepMajority);
    let view = (1..5).fold(view(0, 5, &[1, 2, 3]), |view, n| view.with_row(id(n), []));
    node.on_view(view, at(0));
    assert_eq!(node.next(at(20)), Step::Wait(at(110)), "the others' rows may be old");
    assert_eq!(
        node.next(at(110)),
        Step::DownSelf(DownReason::PartlyConnected),
        "though it is the oldest"
    );
}

#[test]
fn what_may_be_old_is_waited_for_once_also_where_a_lease_decides() {
    let mut node = machine(Strategy::lease_majority()).with_node_ttl(Duration::from_secs(30));
    // n1 reaches n2, or could do so before the store was lost to it.
    let rows = |me_misses: &[usize]| {
        let view = view(0, 3, me_misses);
        view.with_row(id(1), []).with_row(id(2), [])
    };
    node.on_view(rows(&[2]), at(0));
    assert_eq!(node.partition_state(), PartitionState::Split);
    assert_eq!(node.next(at(20)), Step::Wait(at(50)));
    assert_eq!(node.next(at(50)), Step::AskLease, "it is so");
    node.on_view(rows(&[2]), at(51));
    node.on_lease(&LeaseAnswer::Unknown, at(51));
    assert_eq!(node.next(at(51)), Step::Wait(at(52)));
    node.on_view(rows(&[1, 2]), at(52));
    assert_eq!(node.next(at(52)), Step::Wait(at(72)), "that is another question");
}

#[test]
fn the_minority_asks_two_seconds_later() {
    let mut node = machine(Strategy::lease_majority());
    node.on_view(view(0, 5, &[3, 4]), at(0));
    assert_eq!(node.next(at(20)), Step::AskLease);
    assert_eq!(node.next(at(20)), Step::Wait(at(30)), "one question at a time");
    let mut node = machine(Strategy::lease_majority());
    node.on_view(view(4, 5, &[0, 1, 2]), at(0));
    assert_eq!(node.next(at(20)), Step::Wait(at(22)));
    assert_eq!(node.next(at(22)), Step::AskLease);
    node.on_lease(&LeaseAnswer::HeldBy(id(3)), at(22));
    assert_eq!(node.next(at(22)), down(&[0, 1, 2]), "its neighbour won it for both");
}

#[test]
fn no_answer_is_asked_again_and_then_given_up() {
    let mut node = machine(Strategy::lease_majority());
    node.on_view(view(0, 5, &[3, 4]), at(0));
    for second in 20..30 {
        assert_eq!(node.next(at(second)), Step::AskLease, "{second}");
        node.on_lease(&LeaseAnswer::Unknown, at(second));
        assert_eq!(node.next(at(second)), Step::Wait(at(second + 1)));
    }
    assert_eq!(node.next(at(30)), Step::DownSelf(DownReason::LeaseUnknown));
}

#[test]
fn the_winner_keeps_the_lease_for_a_while_also_when_all_are_gone() {
    let mut node = machine(Strategy::lease_majority());
    node.on_view(view(0, 5, &[3, 4]), at(0));
    assert_eq!(node.next(at(20)), Step::AskLease);
    node.on_lease(&LeaseAnswer::Acquired, at(21));
    assert_eq!(node.next(at(22)), down(&[3, 4]));
    node.on_view(view(0, 3, &[]), at(23));
    assert_eq!(node.next(at(23)), Step::Wait(at(62)));
    assert_eq!(node.next(at(62)), Step::ReleaseLease);
    node.on_lease_gone();
    assert_eq!(node.next(at(62)), Step::Stay);
}

#[test]
fn a_lease_that_was_won_for_nothing_is_given_back_at_once() {
    let mut node = machine(Strategy::lease_majority());
    node.on_view(view(0, 5, &[3, 4]), at(0));
    assert_eq!(node.next(at(20)), Step::AskLease);
    node.on_view(view(0, 5, &[]), at(21));
    assert_eq!(node.next(at(21)), Step::Stay);
    node.on_lease(&LeaseAnswer::Acquired, at(22));
    assert_eq!(node.next(at(22)), Step::ReleaseLease);
    node.on_lease_gone();
    assert_eq!(node.next(at(22)), Step::Stay);
}

#[test]
fn a_lease_won_before_things_changed_still_counts() {
    let settings = DowningSettings::new(Strategy::lease_majority())
        .with_down_all_when_unstable(Unstable::After(Duration::from_secs(25)));
    let mut node = Downing::new(settings).expect("valid");
    node.on_view(view(0, 5, &[3, 4]), at(0));
    assert_eq!(node.next(at(20)), Step::AskLease);
    node.on_view(view(0, 5, &[4]), at(21));
    node.on_lease(&LeaseAnswer::Acquired, at(22));
    assert_eq!(node.next(at(22)), Step::Wait(at(41)));
    assert_eq!(node.next(at(41)), down(&[4]), "it does not ask again");
    node.on_view(view(0, 4, &[]), at(42));
    assert_eq!(node.next(at(62)), Step::Wait(at(81)), "and is kept from then on");
}
