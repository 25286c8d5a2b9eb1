//! Table lookup: `fib/<case>/<subnets>`, time per lookup.
//!
//! `random`: keys from a list, so that lookups may overlap in the processor, as those of a batch do.
//! `dependent`: each key depends on what was found before, so that they may not: the whole latency.
//! Both read the endpoint and the MAC of the next hop. `.._peer` follows the pointer to the peer as well.

#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use felt_benches::table::{self, NETWORK};
use felt_dataplane::fib::{Fib, FibChange, NextHop, Prefix, publish};

/// Power of two, larger than any cache of keys would help with.
const KEYS: usize = 1 << 16;

/// What sending a packet needs.
fn touch(hop: &NextHop) -> u32 {
    let addr = match hop.endpoint() {
        SocketAddr::V4(v4) => u32::from(*v4.ip()),
        SocketAddr::V6(_) => 0,
    };
    addr ^ hop.mac().map_or(0, |mac| u32::from(mac.0[5]))
}

/// That, and the peer itself.
fn touch_peer(hop: &NextHop) -> u32 {
    touch(hop) ^ hop.peer().id.0
}

/// One lookup for each key.
fn sweep(fib: &Fib, keys: &[Ipv4Addr], touch: impl Fn(&NextHop) -> u32) -> u32 {
    keys.iter().fold(0, |sum, key| sum ^ fib.v4(*key).map_or(0, &touch))
}

/// Chains `count` lookups: each one's result leads to the next subnet (see [`table::ring`]).
fn chase(fib: &Fib, count: usize, mut at: u32, touch: impl Fn(&NextHop) -> u32) -> u32 {
    for _ in 0..count {
        at = fib.v4(Ipv4Addr::from(NETWORK + (at << 8) + 5)).map_or(0, &touch) ^ table::UNDERLAY;
    }
    at
}

fn lookups(c: &mut Criterion) {
    let mut group = c.benchmark_group("fib");
    group.throughput(Throughput::Elements(KEYS as u64));
    for subnets in [256, 65_536, 100_000] {
        let fib = table::fib(subnets);
        let keys = table::destinations(subnets, KEYS);
        let ring = table::ring(subnets);
        group.bench_function(BenchmarkId::new("random", subnets), |b| {
            b.iter(|| sweep(&fib, black_box(&keys), touch));
        });
        group.bench_function(BenchmarkId::new("random_peer", subnets), |b| {
            b.iter(|| sweep(&fib, black_box(&keys), touch_peer));
        });
        group.bench_function(BenchmarkId::new("dependent", subnets), |b| {
            b.iter(|| chase(&ring, KEYS, black_box(1), touch));
        });
        group.bench_function(BenchmarkId::new("dependent_peer", subnets), |b| {
            b.iter(|| chase(&ring, KEYS, black_box(1), touch_peer));
        });
    }
    let fib = table::fib(65_536);

    let misses: Vec<_> =
        table::destinations(65_536, KEYS).iter().map(|key| (u32::from(*key) | 1 << 31).into()).collect();
    group.bench_function("miss/65536", |b| b.iter(|| sweep(&fib, black_box(&misses), touch)));

    let one: Vec<_> = vec![table::destinations(65_536, 1)[0]; KEYS];
    group.bench_function("same_destination/65536", |b| {
        b.iter(|| {
            let mut cursor = fib.cursor();
            black_box(&one).iter().fold(0, |sum, key| sum ^ cursor.v4(*key).map_or(0, touch))
        });
    });

    // Four lengths in use, hosts first: each lookup probes up to four indexes.
    let mixed = fib.with_changes(&[(16, 0), (20, 3), (28, 77)].map(|(len, at)| {
        FibChange::Set(Prefix::v4((NETWORK + (at << 16)).into(), len).expect("fits"), table::peer(at))
    }));
    let keys = table::destinations(65_536, KEYS);
    group.bench_function("mixed_lengths/65536", |b| b.iter(|| sweep(&mixed, black_box(&keys), touch)));

    let v6 = Fib::from_entries((0..65_536u128).map(|i| {
        (Prefix::v6(((0xfd00 << 112) | (i << 64)).into(), 64).expect("fits"), table::peer(i as u32))
    }));
    let v6_keys: Vec<_> = table::Noise(2)
        .take(KEYS)
        .map(|noise| std::net::Ipv6Addr::from((0xfd00 << 112) | (u128::from(noise % 65_536) << 64) | 5))
        .collect();
    group.bench_function("random_v6/65536", |b| {
        b.iter(|| black_box(&v6_keys).iter().fold(0, |sum, key| sum ^ v6.v6(*key).map_or(0, touch)));
    });

    let scattered: Vec<_> = table::Noise(3)
        .take(65_536)
        .map(|noise| Prefix::v6((u128::from(noise) << 64).into(), 64).expect("fits"))
        .collect();
    let sparse = Fib::from_entries(scattered.iter().zip(0..).map(|(prefix, i)| (*prefix, table::peer(i))));
    let sparse_keys: Vec<_> = table::Noise(4)
        .take(KEYS)
        .filter_map(|noise| match scattered[noise as usize % scattered.len()].addr() {
            std::net::IpAddr::V6(addr) => Some(addr),
            std::net::IpAddr::V4(_) => None,
        })
        .collect();
    group.bench_function("scattered_v6/65536", |b| {
        b.iter(|| black_box(&sparse_keys).iter().fold(0, |sum, key| sum ^ sparse.v6(*key).map_or(0, touch)));
    });
    group.finish();
}

/// The same while a writer publishes a change 100 times a second, through the publication.
fn with_writer(c: &mut Criterion) {
    let mut group = c.benchmark_group("fib");
    group.throughput(Throughput::Elements(KEYS as u64));
    let subnets = 65_536;
    let keys = table::destinations(subnets, KEYS);
    let (mut publisher, mut readers) = publish::channel(table::fib(subnets), 1);
    let mut reader = readers.pop().expect("one was asked for");
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let stop = stop.clone();
        let mut fib = table::fib(subnets);
        move || {
            let mut next = Instant::now();
            for id in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                fib = fib.with_changes(&[FibChange::Set(table::subnet(id % subnets), table::peer(id))]);
                publisher.publish(fib.clone());
                next += Duration::from_millis(10);
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
        }
    });
    // 64 packets a batch: the snapshot is taken that often.
    group.bench_function("random_writer_publishing/65536", |b| {
        b.iter(|| {
            black_box(&keys).chunks(64).fold(0, |sum, batch| sum ^ sweep(reader.current(), batch, touch))
        });
    });
    stop.store(true, Ordering::Relaxed);
    writer.join().expect("the writer ends");
    group.finish();
}

/// Whole tables and single changes.
fn changes(c: &mut Criterion) {
    let mut group = c.benchmark_group("fib");
    group.sample_size(20);
    let entries: Vec<_> = (0..100_000).map(|i| (table::subnet(i), table::peer(i))).collect();
    group
        .bench_function("load/100000", |b| b.iter(|| Fib::from_entries(black_box(&entries).iter().cloned())));
    let fib = table::fib(65_536);
    let change = [FibChange::Set(table::subnet(777), table::peer(1))];
    group.bench_function("change_one/65536", |b| b.iter(|| fib.with_changes(black_box(&change))));
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(20);
    targets = lookups, with_writer, changes
}
criterion_main!(benches);
