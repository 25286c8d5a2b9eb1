//! The table against a slow and obvious model, and the promises about memory and sharing.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;

fn peer(id: u32) -> Arc<Peer> {
    Arc::new(Peer {
        id: PeerId(id),
        endpoint: SocketAddr::from(([198, 18, (id >> 8) as u8, id as u8], 8472)),
        mac: None,
        counters: Arc::new(PeerCounters::new(1)),
    })
}

fn prefix(text: &str) -> Prefix {
    text.parse().unwrap()
}

fn fib(entries: &[(&str, u32)]) -> Fib {
    Fib::from_entries(entries.iter().map(|(text, id)| (prefix(text), peer(*id))))
}

fn id_at(fib: &Fib, addr: &str) -> Option<u32> {
    fib.lookup(addr.parse().unwrap()).map(|peer| peer.id.0)
}

/// A map searched from end to end.
#[derive(Default)]
struct Model(BTreeMap<Prefix, Arc<Peer>>);

impl Model {
    fn lookup(&self, addr: IpAddr) -> Option<PeerId> {
        let holding = self.0.iter().filter(|(prefix, _)| prefix.contains(addr));
        holding.max_by_key(|(prefix, _)| prefix.prefix_len()).map(|(_, peer)| peer.id)
    }

    fn apply(&mut self, change: &FibChange) {
        match change {
            FibChange::Set(prefix, peer) => drop(self.0.insert(*prefix, peer.clone())),
            FibChange::Remove(prefix) => drop(self.0.remove(prefix)),
        }
    }
}

/// Few addresses, so that prefixes meet, mixed with any addresses at all.
fn any_addr() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        4 => (0u32..4, 0u32..4, any::<u8>())
            .prop_map(|(a, b, c)| Ipv4Addr::new(10, (a * 85) as u8, (b * 3) as u8, c).into()),
        1 => any::<u32>().prop_map(|a| Ipv4Addr::from(a).into()),
        4 => (0u128..4, 0u128..600, any::<u8>())
            .prop_map(|(a, b, c)| Ipv6Addr::from((0xfd00 << 112) | (a << 80) | (b << 64) | u128::from(c)).into()),
        1 => any::<u128>().prop_map(|a| Ipv6Addr::from(a).into()),
    ]
}

fn any_prefix() -> impl Strategy<Value = Prefix> {
    let len = prop_oneof![2 => Just(24u8), 2 => Just(64u8), 1 => Just(0u8), 3 => 0u8..=128];
    (any_addr(), len).prop_map(|(addr, len)| {
        let len = if addr.is_ipv4() { if len > 32 { len % 33 } else { len } } else { len };
        Prefix::new(addr, len).unwrap()
    })
}

fn any_change() -> impl Strategy<Value = FibChange> {
    (any_prefix(), any::<bool>(), 0u32..1000).prop_map(|(prefix, set, id)| {
        if set { FibChange::Set(prefix, peer(id)) } else { FibChange::Remove(prefix) }
    })
}

fn host(prefix: Prefix, noise: u128) -> IpAddr {
    match prefix.addr() {
        IpAddr::V4(addr) => {
            let mask = u32::MAX.checked_shr(prefix.prefix_len().into()).unwrap_or(0);
            Ipv4Addr::from(u32::from(addr) | (noise as u32 & mask)).into()
        }
        IpAddr::V6(addr) => {
            let mask = u128::MAX.checked_shr(prefix.prefix_len().into()).unwrap_or(0);
            Ipv6Addr::from(u128::from(addr) | (noise & mask)).into()
        }
    }
}

fn assert_same(fib: &Fib, model: &Model, probes: &[IpAddr]) -> Result<(), TestCaseError> {
    prop_assert_eq!(fib.len(), model.0.len());
    let entries: BTreeMap<_, _> = fib.iter().map(|(prefix, peer)| (prefix, peer.id)).collect();
    prop_assert_eq!(entries, model.0.iter().map(|(prefix, peer)| (*prefix, peer.id)).collect());
    let mut cursor = fib.cursor();
    let edges = model.0.keys().flat_map(|prefix| [host(*prefix, 0), host(*prefix, u128::MAX)]);
    for addr in edges.chain(probes.iter().copied()) {
        let expected = model.lookup(addr);
        prop_assert_eq!(fib.lookup(addr).map(|peer| peer.id), expected, "{}", addr);
        for _ in 0..2 {
            let found = match addr {
                IpAddr::V4(v4) => cursor.v4(v4),
                IpAddr::V6(v6) => cursor.v6(v6),
            };
            prop_assert_eq!(found.map(|peer| peer.id), expected, "cursor {}", addr);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn agrees_with_a_linear_search(
        batches in prop::collection::vec(prop::collection::vec(any_change(), 0..40), 1..6),
        probes in prop::collection::vec(any_addr(), 0..40),
    ) {
        let mut model = Model::default();
        let mut fib = Fib::new();
        for batch in &batches {
            let before = fib.clone();
            let (len, seen): (usize, Vec<_>) = (before.len(), before.iter().map(|(p, _)| p).collect());
            fib = fib.with_changes(batch);
            batch.iter().for_each(|change| model.apply(change));
            assert_same(&fib, &model, &probes)?;
            // The old snapshot is what it was.
            prop_assert_eq!(before.len(), len);
            prop_assert!(before.iter().map(|(p, _)| p).eq(seen));
        }
        let all: Vec<_> = model.0.keys().map(|prefix| FibChange::Remove(*prefix)).collect();
        prop_assert!(fib.with_changes(&all).is_empty());
    }
}

#[test]
fn longest_prefix_wins_and_the_default_comes_last() {
    let fib = fib(&[
        ("0.0.0.0/0", 1),
        ("10.0.0.0/8", 2),
        ("10.5.0.0/16", 3),
        ("10.5.34.0/24", 4),
        ("10.5.34.9/32", 5),
    ]);
    for (addr, id) in [("8.8.8.8", 1), ("10.6.0.1", 2), ("10.5.1.1", 3), ("10.5.34.1", 4), ("10.5.34.9", 5)] {
        assert_eq!(id_at(&fib, addr), Some(id), "{addr}");
    }
    assert_eq!(id_at(&fib, "fd00::1"), None);
}

#[test]
fn extreme_addresses_have_their_places() {
    let fib = fib(&[
        ("0.0.0.0/32", 1),
        ("255.255.255.255/32", 2),
        ("128.0.0.0/1", 3),
        ("::/128", 4),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128", 5),
        ("8000::/1", 6),
    ]);
    for (addr, id) in [
        ("0.0.0.0", Some(1)),
        ("0.0.0.1", None),
        ("255.255.255.255", Some(2)),
        ("255.255.255.254", Some(3)),
        ("::", Some(4)),
        ("::1", None),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some(5)),
        ("ffff::", Some(6)),
    ] {
        assert_eq!(id_at(&fib, addr), id, "{addr}");
    }
}

/// A generator good enough to scatter addresses (splitmix64).
fn noise(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn scattered_prefixes_take_memory_by_their_number_and_are_found() {
    let mut seed = 1;
    let shared = peer(7);
    for len in [48u8, 64, 100, 128] {
        let prefixes: Vec<Prefix> = (0..20_000)
            .map(|_| {
                Prefix::v6(((u128::from(noise(&mut seed)) << 64) | u128::from(noise(&mut seed))).into(), len)
                    .unwrap()
            })
            .collect();
        let fib = Fib::from_entries(prefixes.iter().map(|prefix| (*prefix, shared.clone())));
        assert!(prefixes.iter().all(|prefix| fib.lookup(host(*prefix, 12345)).is_some()));
        assert!(fib.bytes() < index::dense_budget(20_000), "{} bytes", fib.bytes());
    }
    let hosts: Vec<Prefix> =
        (0..20_000).map(|_| Prefix::v4((noise(&mut seed) as u32).into(), 32).unwrap()).collect();
    let fib = Fib::from_entries(hosts.iter().map(|prefix| (*prefix, shared.clone())));
    assert!(hosts.iter().all(|prefix| fib.lookup(prefix.addr()).is_some()));
    assert!(fib.bytes() < index::dense_budget(20_000), "{} bytes", fib.bytes());
}

#[test]
fn one_far_prefix_costs_a_network_nothing_but_it_goes_sparse_when_it_must() {
    let subnets = (0..256u32).map(|i| (Prefix::v4((0x0a32_0000 | (i << 8)).into(), 24).unwrap(), peer(i)));
    let network = Fib::from_entries(subnets);
    let far = network.with_changes(&[FibChange::Set(prefix("203.0.113.0/24"), peer(999))]);
    assert!(far.v4.indexes[0].is_dense());
    assert_eq!((id_at(&far, "10.50.77.1"), id_at(&far, "203.0.113.9")), (Some(77), Some(999)));

    let wild = Fib::from_entries([(prefix("fd00::/64"), peer(1)), (prefix("2001:db8::/64"), peer(2))]);
    assert!(!wild.v6.indexes[0].is_dense());
    assert_eq!(
        (id_at(&wild, "fd00::1"), id_at(&wild, "2001:db8::1"), id_at(&wild, "fd00:0:0:1::1")),
        (Some(1), Some(2), None)
    );
}

#[test]
fn sparse_table_goes_back_to_pages_when_it_grows_close_together() {
    let mut fib = fib(&[("fd00::/64", 1), ("2001:db8::/64", 2)]);
    assert!(!fib.v6.indexes[0].is_dense());
    fib = fib.with_changes(&[FibChange::Remove(prefix("2001:db8::/64"))]);
    let more: Vec<_> = (1..1000u128)
        .map(|i| {
            FibChange::Set(Prefix::v6(((0xfd00 << 112) | (i << 64)).into(), 64).unwrap(), peer(i as u32))
        })
        .collect();
    fib = fib.with_changes(&more);
    assert!(fib.v6.indexes[0].is_dense());
    assert_eq!(id_at(&fib, "fd00:0:0:3e7::1"), Some(999));
    assert_eq!(id_at(&fib, "fd00::1"), Some(1));
}

#[test]
fn a_change_copies_one_page_and_leaves_the_others_shared() {
    let entries = (0..4096u32).map(|i| (Prefix::v4((0x0a00_0000 | (i << 8)).into(), 24).unwrap(), peer(i)));
    let before = Fib::from_entries(entries);
    let after = before.with_changes(&[FibChange::Set(prefix("10.3.7.0/24"), peer(5000))]);
    let (shared, all) = before.v4.indexes[0].shared_pages(&after.v4.indexes[0]);
    assert_eq!((shared, all), (63, 64));
    assert_eq!((id_at(&before, "10.3.7.1"), id_at(&after, "10.3.7.1")), (Some(3 * 256 + 7), Some(5000)));
}

#[test]
fn dropped_tables_let_their_peers_go() {
    let one = peer(1);
    let before =
        Fib::from_entries([(prefix("10.0.0.0/24"), one.clone()), (prefix("fd00::/64"), one.clone())]);
    let after = before
        .with_changes(&[FibChange::Remove(prefix("10.0.0.0/24")), FibChange::Remove(prefix("fd00::/64"))]);
    assert!(after.is_empty());
    drop(before);
    assert_eq!(Arc::strong_count(&one), 1);
}
