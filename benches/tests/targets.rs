//! Gross bounds on the table's speed: twice the time that docs/performance.md promises, best of several tries,
//! so that a busy machine does not fail them but a lost order of magnitude does.

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use felt_benches::table;
use felt_dataplane::fib::{Fib, FibChange, NextHop, publish};

const KEYS: usize = 1 << 15;

fn best_of(tries: usize, mut f: impl FnMut()) -> Duration {
    let once = |_| {
        let start = Instant::now();
        f();
        start.elapsed()
    };
    (0..tries).map(once).min().unwrap_or_default()
}

fn touch(hop: &NextHop) -> u32 {
    let port = match hop.endpoint() {
        SocketAddr::V4(v4) => u32::from(*v4.ip()),
        SocketAddr::V6(_) => 0,
    };
    port ^ hop.mac().map_or(0, |mac| u32::from(mac.0[5]))
}

fn per_key(time: Duration) -> f64 {
    time.as_nanos() as f64 / KEYS as f64
}

#[test]
fn random_lookups_stay_fast_while_tables_are_published() {
    let keys: Vec<Ipv4Addr> = table::destinations(65_536, KEYS);
    let mut fib = table::fib(65_536);
    let (mut publisher, mut readers) = publish::channel(fib.clone(), 1);
    let reader = &mut readers[0];
    let mut id = 0;
    let best = best_of(100, || {
        id += 1;
        fib = fib.with_changes(&[FibChange::Set(table::subnet(id), table::peer(id))]);
        publisher.publish(fib.clone());
        let sum = keys.chunks(64).fold(0, |sum, batch| {
            let fib = reader.current();
            batch.iter().fold(sum, |sum, key| sum ^ fib.v4(*key).map_or(0, touch))
        });
        black_box(sum);
    });
    assert!(per_key(best) < 20.0, "{:.1} ns per lookup", per_key(best));
}

#[test]
fn lookups_of_one_destination_stay_fast() {
    let fib = table::fib(65_536);
    let keys = vec![table::destinations(65_536, 1)[0]; KEYS];
    let best = best_of(100, || {
        let mut cursor = fib.cursor();
        black_box(black_box(&keys).iter().fold(0, |sum, key| sum ^ cursor.v4(*key).map_or(0, touch)));
    });
    assert!(per_key(best) < 4.0, "{:.1} ns per lookup", per_key(best));
}

#[test]
fn a_hundred_thousand_subnets_load_in_a_tenth_of_a_second() {
    let entries: Vec<_> = (0..100_000).map(|i| (table::subnet(i), table::peer(i))).collect();
    let best = best_of(10, || assert_eq!(Fib::from_entries(entries.iter().cloned()).len(), 100_000));
    assert!(best < Duration::from_millis(100), "{best:?}");
}
