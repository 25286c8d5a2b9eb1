//! Encapsulation of a batch of 64 packets already in memory: `encap/<case>/<bytes>`.
//!
//! `outbound` is parse, lookup and push; `inbound` is pop. `plain_outbound` is the plain loop's
//! step, a linear table of 256 subnets.

#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::hint::black_box;
use std::net::Ipv4Addr;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use felt_benches::plain::{LinearTable, Route};
use felt_benches::{packets, table};
use felt_dataplane::encap::vxlan::{HEADERS_LEN, Vtep};
use felt_dataplane::encap::{Inner, udp};
use felt_dataplane::wire::{MacAddr, Vni};

const BATCH: usize = 64;

fn vtep(last: u8) -> Vtep {
    Vtep { vni: Vni::new(1).expect("fits"), mac: MacAddr([0x3a, 0, 0, 0, 0, last]), accept_gbp: false }
}

fn stages(c: &mut Criterion) {
    let mut group = c.benchmark_group("encap");
    group.throughput(Throughput::Elements(BATCH as u64));
    let fib = table::fib(256);
    for len in [64, 512, 1450] {
        let inner: Vec<Vec<u8>> = table::destinations(256, BATCH)
            .into_iter()
            .map(|dst| packets::udp_v4(Ipv4Addr::new(10, 0, 0, 5), dst, len, 1))
            .collect();
        group.bench_function(BenchmarkId::new("outbound_vxlan", len), |b| {
            let (ours, mut headers) = (vtep(1), [0; HEADERS_LEN]);
            b.iter(|| {
                let mut cursor = fib.cursor();
                for packet in black_box(&inner) {
                    let Ok(Inner::V4(packet)) = Inner::parse(packet) else { continue };
                    let Some(hop) = cursor.v4(packet.dst()) else { continue };
                    ours.push(hop.mac().unwrap_or_default(), false, &mut headers);
                    black_box((&headers, hop.endpoint()));
                }
            });
        });
        group.bench_function(BenchmarkId::new("outbound_udp", len), |b| {
            b.iter(|| {
                let mut cursor = fib.cursor();
                for packet in black_box(&inner) {
                    let Ok(Inner::V4(packet)) = Inner::parse(packet) else { continue };
                    black_box(cursor.v4(packet.dst()).map(|hop| hop.endpoint()));
                }
            });
        });
        let routes = (0..256).map(|i| {
            let endpoint = (Ipv4Addr::from(table::UNDERLAY + i), 8285).into();
            Route::new(Ipv4Addr::from(table::NETWORK + (i << 8)), 24, endpoint)
        });
        let linear = LinearTable::new(routes.collect());
        group.bench_function(BenchmarkId::new("plain_outbound", len), |b| {
            b.iter(|| {
                for packet in black_box(&inner) {
                    let dst = Ipv4Addr::new(packet[16], packet[17], packet[18], packet[19]);
                    black_box(linear.lookup(dst));
                }
            });
        });

        let datagrams: Vec<Vec<u8>> = inner
            .iter()
            .map(|packet| {
                let mut headers = [0; HEADERS_LEN];
                vtep(1).push(vtep(2).mac, false, &mut headers);
                [&headers[..], packet].concat()
            })
            .collect();
        group.bench_function(BenchmarkId::new("inbound_vxlan", len), |b| {
            let ours = vtep(2);
            b.iter(|| {
                for datagram in black_box(&datagrams) {
                    let _ = black_box(ours.pop(datagram));
                }
            });
        });
        group.bench_function(BenchmarkId::new("inbound_udp", len), |b| {
            b.iter(|| {
                for datagram in black_box(&inner) {
                    let _ = black_box(udp::pop(datagram));
                }
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1)).sample_size(20);
    targets = stages
}
criterion_main!(benches);
