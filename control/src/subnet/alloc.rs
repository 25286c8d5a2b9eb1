//! Which subnet a node takes: pure decisions over a list of leases, shared by the registries without a
//! central allocator.
//!
//! The order is flannel's (pkg/subnet/etcd/local_manager.go): the lease this node already holds, else the
//! subnet it had before, else one of the first free ones, chosen at random so that nodes starting together
//! seldom want the same. [`plan`] decides; the registry carries out, and plans again when another node was
//! faster.
//!
//! Invariant: a subnet that overlaps any known lease is never proposed, and finding the first free ones
//! takes time in proportion to the leases, not to the size of the network.

use ipnet::{Ipv4Net, Ipv6Net};
use rand::Rng;
use rand::seq::IndexedRandom;

use crate::gojson::Object;
use crate::lease::{Lease, LeaseAttrs, SubnetKey};
use crate::netconfig::{Ipv4Pool, Ipv6Pool, NetworkConfig};

/// How many free subnets the random choice is made from, as in flannel.
pub const CHOICES: usize = 100;

/// What to do to get a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Own leases that no longer fit the configuration, to be given up. Never a reservation.
    pub discard: Vec<Lease>,
    /// How to get a lease then.
    pub step: Step,
}

/// How to get a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Write the new attributes into this lease, which is this node's.
    Reuse(Lease),
    /// Create this key, which must not exist.
    Create(SubnetKey),
    /// Nothing is free.
    Exhausted,
}

/// Whether a lease with `theirs` belongs to the node that publishes `ours`: nodes are known by their public
/// address, IPv4 where there is one.
pub fn same_node(ours: &LeaseAttrs, theirs: &LeaseAttrs) -> bool {
    match ours.public_ip {
        Some(ip) => theirs.public_ip == Some(ip),
        None => ours.public_ipv6.is_some() && ours.public_ipv6 == theirs.public_ipv6,
    }
}

/// Whether both publish the same VTEP MAC, which each node makes up once and keeps: so it is the same node
/// under another address.
fn same_vtep(ours: &LeaseAttrs, theirs: &LeaseAttrs) -> bool {
    fn macs(attrs: &LeaseAttrs) -> [Option<String>; 2] {
        [&attrs.backend_data, &attrs.backend_v6_data].map(|data| {
            let object = Object::parse(data.as_ref()?.get()).ok()?;
            let mac: String = object.field("VtepMAC").ok()??;
            Some(mac.to_ascii_lowercase())
        })
    }
    let (ours, theirs) = (macs(ours), macs(theirs));
    ours.iter().zip(&theirs).any(|(a, b)| a.is_some() && a == b)
}

/// Whether `key` is one the configuration would lease: families as enabled, size and range as configured.
pub fn compatible(net: &NetworkConfig, key: &SubnetKey) -> bool {
    let v4 = match (net.ipv4_pool, key.v4) {
        (Some(pool), Some(subnet)) => pool.contains(subnet),
        (pool, subnet) => pool.is_none() && subnet.is_none(),
    };
    let v6 = match (net.ipv6_pool, key.v6) {
        (Some(pool), Some(subnet)) => pool.contains(subnet),
        (pool, subnet) => pool.is_none() && subnet.is_none(),
    };
    v4 && v6
}

/// As [`compatible`] for a reservation: it may lie outside the range that is for automatic choice, but
/// inside the network, with the configured size.
fn usable_reservation(net: &NetworkConfig, key: &SubnetKey) -> bool {
    let v4 = match (net.ipv4.zip(net.ipv4_pool), key.v4) {
        (Some((network, pool)), Some(subnet)) => {
            network.contains(&subnet) && subnet.prefix_len() == pool.subnet_len()
        }
        (pool, subnet) => pool.is_none() && subnet.is_none(),
    };
    let v6 = match (net.ipv6.zip(net.ipv6_pool), key.v6) {
        (Some((network, pool)), Some(subnet)) => {
            network.contains(&subnet) && subnet.prefix_len() == pool.subnet_len()
        }
        (pool, subnet) => pool.is_none() && subnet.is_none(),
    };
    v4 && v6
}

/// Decides how the node that publishes `attrs` gets its lease.
///
/// `leases` are all readable leases; `occupied` are further keys that exist with an unreadable value.
/// `attempt` counts from 0; later attempts choose from more candidates, since many nodes are choosing.
pub fn plan(
    net: &NetworkConfig,
    attrs: &LeaseAttrs,
    previous: Option<SubnetKey>,
    leases: &[Lease],
    occupied: &[SubnetKey],
    attempt: u32,
    rng: &mut impl Rng,
) -> Plan {
    let fits = |lease: &Lease| match lease.expiration {
        Some(_) => compatible(net, &lease.key),
        None => usable_reservation(net, &lease.key),
    };
    let mut own: Vec<&Lease> = leases.iter().filter(|lease| same_node(attrs, &lease.attrs)).collect();
    // The public address changed: what we held before is still ours.
    own.extend(leases.iter().filter(|lease| {
        Some(lease.key) == previous && !same_node(attrs, &lease.attrs) && same_vtep(attrs, &lease.attrs)
    }));
    // Of several own leases a reservation is meant, then the one in use before.
    own.sort_by_key(|lease| (lease.expiration.is_some(), Some(lease.key) != previous));
    let reuse = own.iter().find(|lease| fits(lease)).map(|&lease| lease.clone());
    let discard: Vec<Lease> = own
        .iter()
        .filter(|lease| lease.expiration.is_some() && !fits(lease))
        .map(|&lease| lease.clone())
        .collect();
    if let Some(lease) = reuse {
        return Plan { discard, step: Step::Reuse(lease) };
    }

    let taken: Vec<SubnetKey> = leases
        .iter()
        .filter(|lease| !discard.contains(lease))
        .map(|lease| lease.key)
        .chain(occupied.iter().copied())
        .collect();
    // Pods may still have addresses of what the node had before, so each family is kept if it can be.
    let preferred: Vec<SubnetKey> =
        previous.into_iter().chain(discard.iter().map(|lease| lease.key)).collect();
    let key = choose(net, &taken, &preferred, CHOICES << attempt.min(10), rng);
    Plan { discard, step: key.map_or(Step::Exhausted, Step::Create) }
}

/// The overlay networks, for messages.
pub fn describe(net: &NetworkConfig) -> String {
    match (net.ipv4, net.ipv6) {
        (Some(v4), Some(v6)) => format!("{v4} and {v6}"),
        (Some(v4), None) => v4.to_string(),
        (None, Some(v6)) => v6.to_string(),
        (None, None) => "no network".to_owned(),
    }
}

/// A node by its public address, for messages.
pub fn holder(attrs: &LeaseAttrs) -> String {
    match (attrs.public_ip, attrs.public_ipv6) {
        (Some(ip), _) => ip.to_string(),
        (None, Some(ip)) => ip.to_string(),
        (None, None) => "a node without public address".to_owned(),
    }
}

/// A free subnet of each enabled family: the first preferred one that is free and fits, else one chosen at random
/// from the first `choices` free ones.
pub fn choose(
    net: &NetworkConfig,
    taken: &[SubnetKey],
    preferred: &[SubnetKey],
    choices: usize,
    rng: &mut impl Rng,
) -> Option<SubnetKey> {
    let v4 = match &net.ipv4_pool {
        Some(pool) => {
            let taken = || taken.iter().filter_map(|key| key.v4);
            let is_free = |net: &Ipv4Net| !taken().any(|other| other.contains(net) || net.contains(&other));
            let mut kept = preferred.iter().filter_map(|key| key.v4);
            let kept = kept.find(|net| pool.contains(*net) && is_free(net));
            Some(kept.or_else(|| {
                let free: Vec<_> = free_ipv4(pool, taken()).take(choices).collect();
                free.choose(rng).copied()
            })?)
        }
        None => None,
    };
    let v6 = match &net.ipv6_pool {
        Some(pool) => {
            let taken = || taken.iter().filter_map(|key| key.v6);
            let is_free = |net: &Ipv6Net| !taken().any(|other| other.contains(net) || net.contains(&other));
            let mut kept = preferred.iter().filter_map(|key| key.v6);
            let kept = kept.find(|net| pool.contains(*net) && is_free(net));
            Some(kept.or_else(|| {
                let free: Vec<_> = free_ipv6(pool, taken()).take(choices).collect();
                free.choose(rng).copied()
            })?)
        }
        None => None,
    };
    SubnetKey::new(v4, v6)
}

/// The subnets of `pool` that overlap none of `taken`, in order.
pub fn free_ipv4(pool: &Ipv4Pool, taken: impl Iterator<Item = Ipv4Net>) -> impl Iterator<Item = Ipv4Net> {
    let len = pool.subnet_len();
    let ranges = taken.map(|net| (net.network().to_bits().into(), net.broadcast().to_bits().into()));
    let free = Free::new(
        pool.first().to_bits().into(),
        pool.last().to_bits().into(),
        1 << (32 - u32::from(len)),
        ranges.collect(),
    );
    free.filter_map(move |bits| Ipv4Net::new((bits as u32).into(), len).ok())
}

/// The subnets of `pool` that overlap none of `taken`, in order.
pub fn free_ipv6(pool: &Ipv6Pool, taken: impl Iterator<Item = Ipv6Net>) -> impl Iterator<Item = Ipv6Net> {
    let len = pool.subnet_len();
    let ranges = taken.map(|net| (net.network().to_bits(), net.broadcast().to_bits()));
    let free = Free::new(
        pool.first().to_bits(),
        pool.last().to_bits(),
        1 << (128 - u32::from(len)),
        ranges.collect(),
    );
    free.filter_map(move |bits| Ipv6Net::new(bits.into(), len).ok())
}

/// Walks from the first to the last subnet and jumps over taken ranges.
struct Free {
    /// Next candidate; `None` after the last.
    next: Option<u128>,
    last: u128,
    /// Size of a subnet, a power of two that divides every candidate.
    size: u128,
    /// Taken address ranges, both ends included, by descending start.
    taken: Vec<(u128, u128)>,
}

impl Free {
    fn new(first: u128, last: u128, size: u128, mut taken: Vec<(u128, u128)>) -> Self {
        taken.sort_unstable_by(|a, b| b.cmp(a));
        Free { next: Some(first), last, size, taken }
    }
}

impl Iterator for Free {
    type Item = u128;

    fn next(&mut self) -> Option<u128> {
        loop {
            let start = self.next.filter(|&start| start <= self.last)?;
            let end = start + (self.size - 1);
            match self.taken.last() {
                Some(&(_, taken_end)) if taken_end < start => {
                    self.taken.pop();
                }
                Some(&(taken_start, taken_end)) if taken_start <= end => {
                    // The first candidate behind the taken range.
                    self.next = (taken_end - taken_end % self.size).checked_add(self.size);
                }
                _ => {
                    self.next = start.checked_add(self.size);
                    return Some(start);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant, SystemTime};

    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;
    use serde_json::value::RawValue;

    use super::*;
    use crate::netconfig::Source;

    fn config(text: &str) -> NetworkConfig {
        NetworkConfig::parse(text.as_bytes(), Source::Registry).unwrap()
    }

    fn small() -> NetworkConfig {
        config(r#"{"Network":"10.50.0.0/21"}"#)
    }

    fn key(text: &str) -> SubnetKey {
        text.parse().unwrap()
    }

    fn attrs(ip: u8) -> LeaseAttrs {
        LeaseAttrs { public_ip: Some([198, 18, 0, ip].into()), ..LeaseAttrs::default() }
    }

    fn vtep(ip: u8, mac: &str) -> LeaseAttrs {
        let data = format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#);
        LeaseAttrs { backend_data: Some(RawValue::from_string(data).unwrap()), ..attrs(ip) }
    }

    fn lease(text: &str, attrs: LeaseAttrs) -> Lease {
        Lease { key: key(text), attrs, expiration: Some(SystemTime::now() + Duration::from_secs(60)) }
    }

    fn reservation(text: &str, ip: u8) -> Lease {
        Lease { expiration: None, ..lease(text, attrs(ip)) }
    }

    fn decide(net: &NetworkConfig, ours: &LeaseAttrs, previous: Option<&str>, leases: &[Lease]) -> Plan {
        let mut rng = StdRng::seed_from_u64(7);
        plan(net, ours, previous.map(key), leases, &[], 0, &mut rng)
    }

    #[test]
    fn own_lease_is_used_again() {
        let leases = [lease("10.50.1.0-24", attrs(1)), lease("10.50.2.0-24", attrs(2))];
        let plan = decide(&small(), &attrs(2), Some("10.50.3.0-24"), &leases);
        assert_eq!(plan, Plan { discard: vec![], step: Step::Reuse(leases[1].clone()) });
    }

    #[test]
    fn own_lease_that_does_not_fit_is_discarded() {
        for old in ["10.51.2.0-24", "10.50.2.0-25", "10.50.0.0-24", "10.50.2.0-24&fd00:1::-64"] {
            let leases = [lease(old, attrs(2))];
            let plan = decide(&small(), &attrs(2), None, &leases);
            assert_eq!(plan.discard, leases, "{old}");
            assert!(matches!(plan.step, Step::Create(_)), "{old}");
        }
    }

    #[test]
    fn previous_subnet_is_taken_when_free() {
        let leases = [lease("10.50.1.0-24", attrs(1))];
        let step = |previous| decide(&small(), &attrs(2), Some(previous), &leases).step;
        assert_eq!(step("10.50.5.0-24"), Step::Create(key("10.50.5.0-24")));
        for unusable in ["10.50.1.0-24", "10.50.0.0-24", "10.60.0.0-24", "10.50.4.0-25"] {
            assert_ne!(step(unusable), Step::Create(key(unusable)), "{unusable}");
        }
    }

    #[test]
    fn previous_subnet_stays_ours_when_the_public_address_changed() {
        let leases = [lease("10.50.1.0-24", vtep(1, "02:00:00:00:00:01"))];
        let moved = vtep(9, "02:00:00:00:00:01");
        let plan = decide(&small(), &moved, Some("10.50.1.0-24"), &leases);
        assert_eq!(plan.step, Step::Reuse(leases[0].clone()));
        // A stranger with our old subnet keeps it.
        let stranger = vtep(9, "02:00:00:00:00:02");
        for ours in [stranger, attrs(9)] {
            let plan = decide(&small(), &ours, Some("10.50.1.0-24"), &leases);
            assert!(matches!(plan.step, Step::Create(free) if free != leases[0].key));
            assert!(plan.discard.is_empty());
        }
    }

    #[test]
    fn reservations_come_first_and_are_never_discarded() {
        let leases = [lease("10.50.1.0-24", attrs(1)), reservation("10.50.6.0-24", 1)];
        let plan = decide(&small(), &attrs(1), Some("10.50.1.0-24"), &leases);
        assert_eq!(plan.step, Step::Reuse(leases[1].clone()));
        // Outside the range for automatic choice, yet in the network.
        let outside = [reservation("10.50.0.0-24", 1)];
        let plan = decide(&small(), &attrs(1), None, &outside);
        assert_eq!(plan.step, Step::Reuse(outside[0].clone()));
        let foreign = [reservation("10.99.0.0-24", 1)];
        let plan = decide(&small(), &attrs(1), None, &foreign);
        assert!(plan.discard.is_empty());
        assert!(matches!(plan.step, Step::Create(_)));
    }

    #[test]
    fn nodes_without_ipv4_are_known_by_ipv6() {
        let six = |ip: u16| LeaseAttrs {
            public_ipv6: Some([0xfd77, 0, 0, 0, 0, 0, 0, ip].into()),
            ..LeaseAttrs::default()
        };
        let net = config(r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:50::/56"}"#);
        let leases =
            [lease("0.0.0.0-0&fd00:50:0:1::-64", six(1)), lease("0.0.0.0-0&fd00:50:0:2::-64", six(2))];
        let plan = decide(&net, &six(2), None, &leases);
        assert_eq!(plan.step, Step::Reuse(leases[1].clone()));
        let Step::Create(free) = decide(&net, &six(3), None, &leases).step else { panic!("not created") };
        assert!(free.v4.is_none() && !leases.iter().any(|lease| lease.key.overlaps(&free)));
    }

    #[test]
    fn out_of_subnets_is_said() {
        let leases: Vec<_> = (1..8).map(|n| lease(&format!("10.50.{n}.0-24"), attrs(100 + n))).collect();
        assert_eq!(decide(&small(), &attrs(1), None, &leases).step, Step::Exhausted);
        let mut rng = StdRng::seed_from_u64(1);
        let occupied = [key("10.50.7.0-24")];
        let plan = plan(&small(), &attrs(1), None, &leases[..6], &occupied, 0, &mut rng);
        assert_eq!(plan.step, Step::Exhausted);
    }

    #[test]
    fn dual_stack_needs_both_families() {
        let net = config(r#"{"Network":"10.50.0.0/21","EnableIPv6":true,"IPv6Network":"fd00:50::/62"}"#);
        let leases = [
            lease("10.50.1.0-24&fd00:50:0:1::-64", attrs(1)),
            lease("10.50.2.0-24&fd00:50:0:2::-64", attrs(2)),
        ];
        let Step::Create(free) = decide(&net, &attrs(3), None, &leases).step else { panic!("not created") };
        assert_eq!(free.v6.unwrap().to_string(), "fd00:50:0:3::/64");
        assert!(free.v4.is_some());
        // The pair counts: an IPv4 subnet that is free does not help when the IPv6 one is taken.
        let previous = Some("10.50.5.0-24&fd00:50:0:1::-64");
        assert_ne!(
            decide(&net, &attrs(3), previous, &leases).step,
            Step::Create(key("10.50.5.0-24&fd00:50:0:1::-64"))
        );
    }

    #[test]
    fn node_keeps_its_subnet_when_a_family_is_added_or_taken_away() {
        let dual = config(r#"{"Network":"10.50.0.0/21","EnableIPv6":true,"IPv6Network":"fd00:50::/62"}"#);
        let old = [lease("10.50.5.0-24", attrs(1)), lease("10.50.2.0-24&fd00:50:0:2::-64", attrs(2))];
        let plan = decide(&dual, &attrs(1), None, &old);
        assert_eq!(plan.discard, [old[0].clone()]);
        let Step::Create(key) = plan.step else { panic!("not created") };
        assert_eq!(key.v4, old[0].key.v4);
        assert!(key.v6.is_some() && key.v6 != old[1].key.v6);

        let plan = decide(&small(), &attrs(2), None, &old);
        assert_eq!(plan.step, Step::Create("10.50.2.0-24".parse().unwrap()));
        // One half of what was there before is taken: the other half is kept.
        let previous = Some("10.50.6.0-24&fd00:50:0:2::-64");
        let Step::Create(key) = decide(&dual, &attrs(3), previous, &old).step else { panic!("not created") };
        assert_eq!(key.v4.unwrap().to_string(), "10.50.6.0/24");
        assert_ne!(key.v6, old[1].key.v6);
    }

    #[test]
    fn choice_is_spread_over_the_first_hundred() {
        let net = config(r#"{"Network":"10.0.0.0/8"}"#);
        let mut rng = StdRng::seed_from_u64(3);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..2000 {
            seen.insert(choose(&net, &[], &[], CHOICES, &mut rng).unwrap());
        }
        assert_eq!(seen.len(), CHOICES);
        assert_eq!(seen.first().unwrap().to_string(), "10.0.1.0-24");
        assert_eq!(seen.last().unwrap().to_string(), "10.0.100.0-24");
    }

    #[test]
    fn huge_networks_and_many_leases_are_quick() {
        let net =
            config(r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"8000::/1","IPv6SubnetLen":126}"#);
        let mut rng = StdRng::seed_from_u64(3);
        // Everything but the last quarter of the network is one lease.
        let taken = ["0.0.0.0-0&8000::-2", "0.0.0.0-0&c000::-3"].map(key);
        let begin = Instant::now();
        let free = choose(&net, &taken, &[], CHOICES, &mut rng).unwrap();
        assert!(free.v6.unwrap().addr() >= "e000::".parse::<std::net::Ipv6Addr>().unwrap());
        let all = [key("0.0.0.0-0&8000::-1")];
        assert_eq!(choose(&net, &all, &[], CHOICES, &mut rng), None);

        let net = config(r#"{"Network":"10.0.0.0/8"}"#);
        let taken: Vec<_> = (1..65_536u32)
            .map(|n| SubnetKey::new(Ipv4Net::new((0x0a00_0000 + (n << 8)).into(), 24).ok(), None).unwrap())
            .collect();
        assert_eq!(choose(&net, &taken, &[], CHOICES, &mut rng), None);
        assert!(choose(&net, &taken[1..], &[], CHOICES, &mut rng).is_some());
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    }

    proptest! {
        #[test]
        fn free_subnets_are_those_of_a_plain_walk(
            nets in proptest::collection::vec((0u32..512, 23u8..=32), 0..24),
            len in 24u8..=28,
        ) {
            let network: Ipv4Net = "10.50.0.0/22".parse().unwrap();
            let pool = Ipv4Pool::derive(network, len.into(), None, None).unwrap();
            let taken: Vec<Ipv4Net> = nets.iter()
                .map(|&(n, len)| Ipv4Net::new((0x0a32_0000 + n * 4).into(), len).unwrap().trunc())
                .collect();
            let plain: Vec<Ipv4Net> = network.subnets(len).unwrap()
                .filter(|net| pool.contains(*net))
                .filter(|net| !taken.iter().any(|other| other.contains(net) || net.contains(other)))
                .collect();
            let ours: Vec<Ipv4Net> = free_ipv4(&pool, taken.iter().copied()).collect();
            prop_assert_eq!(ours, plain);
        }
    }
}
