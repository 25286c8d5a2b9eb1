//! Hot stages allocate nothing.

use std::hint::black_box;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use felt_benches::alloc::{Counting, counted};
use felt_benches::rig::{Rig, Traffic, encaps};
use felt_benches::{packets, table};
use felt_dataplane::config::OffloadMode;
use felt_dataplane::encap::vxlan::{HEADERS_LEN, Vtep};
use felt_dataplane::encap::{Inner, udp};
use felt_dataplane::fib::{FibChange, publish};
use felt_dataplane::icmp::{Answerer, MAX_ANSWER_LEN, TokenBucket, Trouble};
use felt_dataplane::wire::{Ipv4Packet, MacAddr, Vni, checksum};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn assert_none<T>(stage: &str, f: impl FnOnce() -> T) {
    let (value, allocations) = counted(f);
    drop(black_box(value));
    assert_eq!(allocations, 0, "{stage}");
}

#[test]
fn the_counter_counts() {
    let (_, allocations) = counted(|| black_box(vec![1u8; 10]));
    assert_eq!(allocations, 1);
}

#[test]
fn lookup_and_snapshot_allocate_nothing() {
    let fib = table::fib(65_536);
    let keys = table::destinations(65_536, 10_000);
    assert_none("lookup", || keys.iter().filter(|key| fib.v4(**key).is_some()).count());
    assert_none("cursor", || {
        let mut cursor = fib.cursor();
        keys.iter().filter(|key| cursor.v4(**key).is_some()).count()
    });
    let (mut publisher, mut readers) = publish::channel(fib.clone(), 1);
    for id in 0..10 {
        publisher.publish(fib.with_changes(&[FibChange::Set(table::subnet(id), table::peer(id))]));
        assert_none("taking a snapshot", || readers[0].current().v4(keys[0]).is_some());
        assert_none("going quiet", || readers[0].quiesce());
    }
}

#[test]
fn headers_encapsulation_checksums_and_answers_allocate_nothing() {
    let mut packet = packets::udp_v4(Ipv4Addr::new(10, 50, 1, 5), Ipv4Addr::new(10, 50, 2, 5), 1450, 1);
    let vtep =
        |last| Vtep { vni: Vni::new(1).unwrap(), mac: MacAddr([0x3a, 0, 0, 0, 0, last]), accept_gbp: false };
    let mut headers = [0; HEADERS_LEN];
    assert_none("push", || vtep(1).push(vtep(2).mac, false, &mut headers));
    let datagram = [&headers[..], &packet].concat();
    assert_none("pop of vxlan", || vtep(2).pop(&datagram).is_ok());
    assert_none("pop of udp", || udp::pop(&packet).is_ok());
    assert_none("checksum", || checksum::sum(&packet));
    assert_none("TTL", || Ipv4Packet::new_checked(&mut packet[..]).map(|mut packet| packet.set_ttl(3)));

    let mut answerer =
        Answerer::new(Some(Ipv4Addr::new(10, 50, 1, 0)), None, TokenBucket::new(10, Duration::from_secs(1)));
    let mut out = [0; MAX_ANSWER_LEN];
    let now = Instant::now();
    let inner = Inner::parse(&packet).unwrap();
    assert_none("answer", || answerer.answer(&inner, Trouble::NoRoute, now, &mut out).unwrap());
}

#[test]
fn whole_batches_allocate_nothing() {
    for traffic in [Traffic::Scattered(64), Traffic::Stream(1450), Traffic::Super(1398), Traffic::Super(536)]
    {
        for (name, encap) in encaps() {
            for offload in [OffloadMode::Auto, OffloadMode::Off] {
                let mut rig = Rig::new(encap, offload, traffic).unwrap();
                for batch in 0..3 {
                    assert_none(&format!("outbound {name} {traffic:?} {offload:?}, batch {batch}"), || {
                        rig.send()
                    });
                    assert_none(&format!("inbound {name} {traffic:?} {offload:?}, batch {batch}"), || {
                        rig.receive()
                    });
                }
                let counters = rig.stage.counters();
                assert_eq!(
                    counters.outbound.forwarded_packets,
                    3 * rig.outbound.0,
                    "{name} {traffic:?} {offload:?}"
                );
                assert_eq!(
                    counters.inbound.forwarded_packets,
                    3 * rig.inbound.0,
                    "{name} {traffic:?} {offload:?}"
                );
            }
        }
    }
}
