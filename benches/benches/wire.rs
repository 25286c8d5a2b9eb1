//! Headers and checksums: `wire/<case>/<bytes>` and `checksum/<case>/<bytes>`.

#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use felt_benches::packets;
use felt_dataplane::encap::Inner;
use felt_dataplane::wire::{Ipv4Packet, checksum};

fn headers(c: &mut Criterion) {
    let mut group = c.benchmark_group("wire");
    group.throughput(Throughput::Elements(1));
    let v4 = packets::udp_v4([10, 50, 1, 5].into(), [10, 50, 2, 5].into(), 64, 1);
    let v6 = packets::udp_v6(1.into(), 2.into(), 64);
    group.bench_function("parse_v4/64", |b| {
        b.iter(|| Inner::parse(black_box(&v4)).map(|inner| (inner.dst(), inner.ttl())));
    });
    group.bench_function("parse_v6/64", |b| {
        b.iter(|| Inner::parse(black_box(&v6)).map(|inner| (inner.dst(), inner.ttl())));
    });
    group.bench_function("etherparse_v4/64", |b| {
        b.iter(|| {
            etherparse::Ipv4Slice::from_slice(black_box(&v4))
                .map(|ip| (ip.header().destination_addr(), ip.header().ttl()))
        });
    });
    let mut packet = v4.clone();
    group.bench_function("set_ttl/64", |b| {
        b.iter(|| Ipv4Packet::new_checked(black_box(&mut packet[..])).map(|mut packet| packet.set_ttl(63)));
    });
    group.finish();
}

fn checksums(c: &mut Criterion) {
    let mut group = c.benchmark_group("checksum");
    for len in [20, 64, 512, 1448, 9000, 65_000] {
        let bytes = packets::noise(len);
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_function(BenchmarkId::new("sum", len), |b| b.iter(|| checksum::sum(black_box(&bytes))));
        group.bench_function(BenchmarkId::new("scalar", len), |b| {
            b.iter(|| checksum::sum_scalar(black_box(&bytes)));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1)).sample_size(20);
    targets = headers, checksums
}
criterion_main!(benches);
