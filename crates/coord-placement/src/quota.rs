//! Exact shares: how many places each node should fill.

/// What a node's share depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claimant {
    pub(crate) weight: u64,
    /// How many places it fills now.
    pub(crate) count: u64,
    /// How many it must fill at least, whatever its weight.
    pub(crate) least: u64,
    /// How many it may fill at most; not below `least`.
    pub(crate) most: u64,
}

/// How many places a node should fill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quota {
    /// Floor of its share.
    pub(crate) low: u64,
    /// Ceiling of its share.
    pub(crate) high: u64,
    /// What this plan aims at.
    pub(crate) goal: u64,
}

/// Shares `total` out by weight: floors and ceilings of the exact shares, clipped at what each may take
/// (water filling), and goals between them that add up to `total`, or to the sum of what all may take if
/// that is less. Of all such goals these need the fewest arrivals, since each goal stays as near to the
/// present count as floor, ceiling and sum allow; among those the largest remainder wins, then the lower
/// rank.
///
/// `tolerance` widens floor and ceiling by so many thousandths of the share.
pub(crate) fn quotas(claimants: &[Claimant], total: u64, tolerance: u16) -> Vec<Quota> {
    let room: u64 = claimants.iter().map(|one| one.most).sum();
    let shares = shares(claimants, total.min(room));
    let mut quotas: Vec<Quota> = claimants
        .iter()
        .zip(&shares)
        .map(|(one, share)| {
            let spread = u128::from(tolerance);
            let low = share.scaled(1000 - spread).0;
            let (high, rest) = share.scaled(1000 + spread);
            let low = low.clamp(one.least, one.most);
            let high = (high + u64::from(rest)).clamp(low, one.most.max(low));
            Quota { low, high, goal: one.count.clamp(low, high) }
        })
        .collect();
    settle(&mut quotas, &ideal(&shares, total.min(room)), &shares, total.min(room));
    quotas
}

/// As [`quotas`], where no zone may fill more than its limit; `zone_of[n]` is the zone of a claimant.
pub(crate) fn zoned_quotas(
    claimants: &[Claimant],
    zone_of: &[u16],
    limits: &[u64],
    total: u64,
    tolerance: u16,
) -> Vec<Quota> {
    let mut all = vec![Quota::default(); claimants.len()];
    let mut open: Vec<usize> = (0..claimants.len()).collect();
    let mut left = total;
    let pick = |members: &[usize]| members.iter().map(|&n| claimants[n]).collect::<Vec<_>>();
    // A zone above its limit gets exactly the limit. That leaves more for the others and never less, so
    // a zone that was cut once stays cut.
    loop {
        let mut sums = vec![(0_u64, 0_u128, 1_u128); limits.len()];
        for (&n, share) in open.iter().zip(shares(&pick(&open), left)) {
            let sum = &mut sums[usize::from(zone_of[n])];
            sum.0 += share.whole;
            sum.1 += share.rest;
            sum.2 = sum.2.max(share.parts);
        }
        let over = |zone: usize| {
            let (whole, rest, parts) = sums[zone];
            whole > limits[zone] || u128::from(limits[zone] - whole) * parts < rest
        };
        let cut: Vec<usize> = (0..limits.len()).filter(|&zone| over(zone)).collect();
        if cut.is_empty() {
            break;
        }
        for zone in cut {
            let (inside, outside): (Vec<usize>, Vec<usize>) =
                open.iter().partition(|&&n| usize::from(zone_of[n]) == zone);
            let members = pick(&inside);
            for (&n, quota) in inside.iter().zip(quotas(&members, limits[zone], tolerance)) {
                all[n] = quota;
            }
            left = left.saturating_sub(limits[zone]);
            open = outside;
        }
    }
    for (&n, quota) in open.iter().zip(quotas(&pick(&open), left, tolerance)) {
        all[n] = quota;
    }
    within_zones(&mut all, zone_of, limits);
    all
}

/// Moves single units of goals out of zones that rounding took above their limit.
fn within_zones(quotas: &mut [Quota], zone_of: &[u16], limits: &[u64]) {
    let mut sums = vec![0_u64; limits.len()];
    for (quota, &zone) in quotas.iter().zip(zone_of) {
        sums[usize::from(zone)] += quota.goal;
    }
    let mut spare = 0;
    for (quota, &zone) in quotas.iter_mut().zip(zone_of) {
        let sum = &mut sums[usize::from(zone)];
        let excess = sum.saturating_sub(limits[usize::from(zone)]);
        let cut = excess.min(quota.goal - quota.low);
        quota.goal -= cut;
        *sum -= cut;
        spare += cut;
    }
    for (quota, &zone) in quotas.iter_mut().zip(zone_of) {
        let sum = &mut sums[usize::from(zone)];
        let room = limits[usize::from(zone)].saturating_sub(*sum);
        let more = room.min(quota.high - quota.goal).min(spare);
        quota.goal += more;
        *sum += more;
        spare -= more;
    }
}

/// An exact share, as a fraction.
#[derive(Clone, Copy, Debug)]
struct Share {
    whole: u64,
    /// The remainder, over `parts`.
    rest: u128,
    parts: u128,
}

impl Share {
    fn of(total: u64, weight: u64, weights: u128) -> Self {
        let product = u128::from(total) * u128::from(weight);
        let (whole, rest) = divide(product, weights);
        Self { whole, rest, parts: weights }
    }

    fn exactly(whole: u64) -> Self {
        Self { whole, rest: 0, parts: 1 }
    }

    /// Floor of so many thousandths of the share, and whether something remains.
    fn scaled(&self, thousandths: u128) -> (u64, bool) {
        if thousandths == 1000 {
            return (self.whole, self.rest != 0);
        }
        let value = (u128::from(self.whole) * self.parts + self.rest) * thousandths;
        let (whole, rest) = divide(value, self.parts * 1000);
        (whole, rest != 0)
    }
}

/// Division, with the short form where the numbers allow: it is several times faster.
fn divide(value: u128, by: u128) -> (u64, u128) {
    match (u64::try_from(value), u64::try_from(by)) {
        (Ok(value), Ok(by)) => (value / by, u128::from(value % by)),
        _ => (u64::try_from(value / by).unwrap_or(u64::MAX), value % by),
    }
}

/// The exact shares, clipped. A node that is clipped leaves the sharing with what it may take; what remains is
/// shared out again among the others. The side that is clipped in a round is the one that violates its bounds
/// by more in total, as in the CSS flexible box algorithm, so no node is clipped wrongly.
fn shares(claimants: &[Claimant], total: u64) -> Vec<Share> {
    let mut shares = vec![Share::exactly(0); claimants.len()];
    let mut open: Vec<usize> = (0..claimants.len()).collect();
    let mut left = total;
    loop {
        let weights: u128 = open.iter().map(|&n| u128::from(claimants[n].weight)).sum();
        let (mut over, mut under) = (0_u128, 0_u128);
        for &n in &open {
            let value = u128::from(left) * u128::from(claimants[n].weight);
            over += value.saturating_sub(u128::from(claimants[n].most) * weights);
            under += (u128::from(claimants[n].least) * weights).saturating_sub(value);
        }
        if over == 0 && under == 0 {
            for &n in &open {
                shares[n] = Share::of(left, claimants[n].weight, weights);
            }
            return shares;
        }
        open.retain(|&n| {
            let one = &claimants[n];
            let value = u128::from(left) * u128::from(one.weight);
            let clipped = if over >= under && value > u128::from(one.most) * weights {
                one.most
            } else if under >= over && value < u128::from(one.least) * weights {
                one.least
            } else {
                return true;
            };
            shares[n] = Share::exactly(clipped);
            false
        });
        left = total.saturating_sub(shares.iter().map(|share| share.whole).sum());
    }
}

/// Whole numbers that add up to `total`: the floors, and one more for the largest remainders.
fn ideal(shares: &[Share], total: u64) -> Vec<u64> {
    let mut goals: Vec<u64> = shares.iter().map(|share| share.whole).collect();
    let missing = usize::try_from(total.saturating_sub(goals.iter().sum())).unwrap_or(usize::MAX);
    let mut open: Vec<usize> = (0..shares.len()).filter(|&n| shares[n].rest > 0).collect();
    if missing > 0 && missing < open.len() {
        open.select_nth_unstable_by_key(missing, |&n| (std::cmp::Reverse(shares[n].rest), n));
    }
    for &n in open.iter().take(missing) {
        goals[n] += 1;
    }
    goals
}

/// Brings the goals to the right sum, towards the ideal ones and never past them. Those farthest from
/// the ideal change first.
fn settle(quotas: &mut [Quota], ideal: &[u64], shares: &[Share], total: u64) {
    let sum: u64 = quotas.iter().map(|quota| quota.goal).sum();
    let raise = sum < total;
    let mut wanted = sum.abs_diff(total);
    let gap = |quota: &Quota, ideal: u64| {
        if raise { ideal.saturating_sub(quota.goal) } else { quota.goal.saturating_sub(ideal) }
    };
    let gaps: Vec<u64> =
        quotas.iter().zip(ideal).map(|(quota, &ideal)| gap(quota, ideal)).collect();
    // The lowest level to which the gaps can be cut down without changing too much.
    let (mut low, mut high) = (0, gaps.iter().copied().max().unwrap_or(0));
    while low < high {
        let level = low.midpoint(high);
        let cut: u64 = gaps.iter().map(|gap| gap.saturating_sub(level)).sum();
        if cut <= wanted { high = level } else { low = level + 1 }
    }
    let mut change = |n: usize, by: u64| {
        let goal = &mut quotas[n].goal;
        *goal = if raise { *goal + by } else { *goal - by };
        wanted -= by;
    };
    for (n, gap) in gaps.iter().enumerate() {
        change(n, gap.saturating_sub(low));
    }
    // Fewer remain than there are gaps of exactly this level.
    let mut level: Vec<usize> = (0..gaps.len()).filter(|&n| low > 0 && gaps[n] >= low).collect();
    let rest = usize::try_from(wanted).unwrap_or(usize::MAX).min(level.len());
    let key = |&n: &usize| {
        let rest = if raise { shares[n].rest } else { u128::MAX - shares[n].rest };
        (std::cmp::Reverse(rest), n)
    };
    if rest > 0 && rest < level.len() {
        level.select_nth_unstable_by_key(rest, key);
    }
    for &n in &level[..rest] {
        let goal = &mut quotas[n].goal;
        *goal = if raise { *goal + 1 } else { *goal - 1 };
    }
}

/// How many owners of one shard each zone may hold: the smallest common limit with which all owners find
/// a place, and in a smaller zone as many as it has nodes.
pub(crate) fn zone_limits(sizes: &[usize], owners: usize) -> Vec<u8> {
    let room = |limit: usize| sizes.iter().map(|&size| size.min(limit)).sum::<usize>();
    let limit = (1..=owners).find(|&limit| room(limit) >= owners).unwrap_or(owners);
    sizes.iter().map(|&size| u8::try_from(size.min(limit)).unwrap_or(u8::MAX)).collect()
}
