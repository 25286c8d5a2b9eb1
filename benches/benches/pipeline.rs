//! Whole batches over memory: `outbound/<encapsulation>/<traffic>`, `inbound/..`, in bytes of inner packets.
//!
//! Reading a packet and receiving a message is a copy, as in the kernel; sending and writing is nothing. The
//! super-packets of `super_..` are cut outbound and merged inbound; figures are per segment size. `plain/..`
//! is the plain loop, with its linear table of as many subnets.

#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use felt_benches::plain::{self, LinearTable, Route};
use felt_benches::rig::{Rig, Traffic, encaps};
use felt_benches::{packets, table};
use felt_dataplane::config::OffloadMode;

const TRAFFIC: [(&str, Traffic); 8] = [
    ("scattered_64", Traffic::Scattered(64)),
    ("scattered_1450", Traffic::Scattered(1450)),
    ("stream_64", Traffic::Stream(64)),
    ("stream_512", Traffic::Stream(512)),
    ("stream_1450", Traffic::Stream(1450)),
    ("super_536", Traffic::Super(536)),
    ("super_1398", Traffic::Super(1398)),
    ("super_8900", Traffic::Super(8900)),
];

fn directions(c: &mut Criterion) {
    for (name, traffic) in TRAFFIC {
        for (encap_name, encap) in encaps() {
            let mut rig = Rig::new(encap, OffloadMode::Auto, traffic).expect("descriptors");
            let mut group = c.benchmark_group("outbound");
            let (count, bytes) = rig.outbound;
            group.throughput(Throughput::ElementsAndBytes { elements: count, bytes });
            group.bench_function(format!("{encap_name}/{name}"), |b| b.iter(|| rig.send()));
            group.finish();
            let mut group = c.benchmark_group("inbound");
            let (count, bytes) = rig.inbound;
            group.throughput(Throughput::ElementsAndBytes { elements: count, bytes });
            group.bench_function(format!("{encap_name}/{name}"), |b| b.iter(|| rig.receive()));
            group.finish();
            let dropped = rig.stage.counters();
            assert_eq!(dropped.outbound.dropped.total() + dropped.inbound.dropped.total(), 0, "{dropped:?}");
        }
    }
}

fn plain_loop(c: &mut Criterion) {
    let mut group = c.benchmark_group("plain");
    let routes = (0..256).map(|i| {
        let endpoint = SocketAddr::from((Ipv4Addr::from(table::UNDERLAY + i), 8285));
        Route::new(Ipv4Addr::from(table::NETWORK + (i << 8)), 24, endpoint)
    });
    let linear = LinearTable::new(routes.collect());
    for len in [64, 1450] {
        let packets: Vec<_> = table::destinations(256, 1024)
            .into_iter()
            .map(|dst| packets::udp_v4(Ipv4Addr::new(10, 255, 1, 5), dst, len, 1))
            .collect();
        let bytes = (packets.len() * len) as u64;
        group.throughput(Throughput::ElementsAndBytes { elements: packets.len() as u64, bytes });
        group.bench_function(format!("outbound/scattered_{len}"), |b| {
            b.iter(|| {
                let mut rest = packets.iter();
                let read = |buf: &mut [u8]| {
                    let Some(packet) = rest.next() else { return Ok(0) };
                    buf[..packet.len()].copy_from_slice(packet);
                    Ok(packet.len())
                };
                plain::outbound(read, &linear, |packet, to| {
                    black_box((packet, to));
                    Ok(packet.len())
                })
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1)).sample_size(20);
    targets = directions, plain_loop
}
criterion_main!(benches);
