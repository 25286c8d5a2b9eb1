//! The engine over a real TUN device and real sockets, in a network namespace of each test's own.
//!
//! Needs root and `/dev/net/tun`: `cargo test -p felt-dataplane --test device -- --ignored`.

mod common;

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use common::packets::{self, Spec};
use felt_dataplane::config::{Encap, EngineConfig, SourceGuard};
use felt_dataplane::device::{TunDevice, TunError, TunOptions};
use felt_dataplane::engine::{Engine, Handle};
use felt_dataplane::fib::Fib;
use felt_dataplane::stats::DropReason;

/// Runs the body in this process if it is in a namespace of its own, else runs the test again in one.
fn in_namespace(name: &str, body: impl FnOnce()) {
    const MARK: &str = "FELT_TEST_IN_NAMESPACE";
    if std::env::var_os(MARK).is_some() {
        run("ip link set lo up");
        return body();
    }
    let test = std::env::current_exe().unwrap();
    let output = Command::new("unshare")
        .arg("--net")
        .arg(test)
        .args(["--ignored", "--exact", name, "--nocapture"])
        .env(MARK, "1")
        .output()
        .expect("unshare (util-linux)");
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "in its namespace: {}", String::from_utf8_lossy(&said));
}

fn run(command: &str) {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

fn output(command: &str) -> String {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits for a counter: a worker counts a batch when it is done with it, after its packets have arrived.
fn settles<T: PartialEq + std::fmt::Debug>(count: impl Fn() -> T, expected: T) {
    let end = Instant::now() + Duration::from_secs(2);
    while count() != expected && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(count(), expected);
}

fn node_endpoint(node: u8) -> SocketAddr {
    format!("127.0.0.{node}:8285").parse().unwrap()
}

/// Node 1 with a real device and the pod address 10.50.1.5; node 2 is a socket in the test's hands.
fn node(workers: usize) -> (Handle, UdpSocket) {
    let mut config = EngineConfig::new(Encap::Udp, node_endpoint(1), 1400);
    config.tunnel_v4 = Some("10.50.1.0".parse().unwrap());
    config.own_subnets = vec!["10.50.1.0/24".parse().unwrap()];
    config.workers = workers;
    config.source_guard = SourceGuard::Strict;
    let tun =
        TunDevice::open("felt0", workers, &TunOptions { persist: false, ..TunOptions::default() }).unwrap();
    assert_eq!((tun.name(), tun.queue_count()), ("felt0", workers));
    assert!(tun.ifindex() > 0);
    for command in [
        "ip addr add 10.50.1.0/32 dev felt0",
        "ip addr add 10.50.1.5/32 dev lo",
        "ip link set felt0 mtu 1400 up",
        "ip route add 10.50.0.0/16 dev felt0",
    ] {
        run(command);
    }
    let engine = Engine::start(config, tun).unwrap();
    let peer = common::peer(2, node_endpoint(2));
    engine.publish(Fib::from_entries([("10.50.2.0/24".parse().unwrap(), peer)]));
    let far = UdpSocket::bind(node_endpoint(2)).unwrap();
    far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    (engine, far)
}

fn pod() -> UdpSocket {
    let socket = UdpSocket::bind("10.50.1.5:7777").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn datagrams_cross_a_real_device_both_ways() {
    in_namespace("datagrams_cross_a_real_device_both_ways", || {
        let (engine, far) = node(1);
        let pod = pod();
        let state = engine.offload_state();
        assert!(state.tun_tso && state.udp_gso && state.tun_gro_tcp, "{state:?}");
        pod.send_to(b"there", "10.50.2.5:9").unwrap();
        let mut bytes = [0; 2000];
        let (len, from) = far.recv_from(&mut bytes).unwrap();
        assert_eq!(from, node_endpoint(1));
        let got = packets::parse(&bytes[..len]);
        assert_eq!((got.payload, got.ports, got.ttl), (b"there".to_vec(), (7777, 9), 63));
        // 4,000 bytes leave as fragments that fit, and come back as fragments.
        let long = packets::payload(4000);
        pod.send_to(&long, "10.50.2.5:9").unwrap();
        for expected in [1396, 1396, 1276] {
            let (len, _) = far.recv_from(&mut bytes).unwrap();
            assert_eq!(len, expected);
            let mut back = bytes[..len].to_vec();
            let (src, dst) = (back[12..16].to_vec(), back[16..20].to_vec());
            back[12..16].copy_from_slice(&dst);
            back[16..20].copy_from_slice(&src);
            if back[6] & 0x1f == 0 && back[7] == 0 {
                let (a, b) = (back[20..22].to_vec(), back[22..24].to_vec());
                back[20..22].copy_from_slice(&b);
                back[22..24].copy_from_slice(&a);
            }
            far.send_to(&back, node_endpoint(1)).unwrap();
        }
        let mut whole = [0; 5000];
        let (len, from) = pod.recv_from(&mut whole).unwrap();
        assert_eq!((&whole[..len], from), (&long[..], "10.50.2.5:9".parse().unwrap()));
        let counted = || {
            let counters = engine.counters();
            (counters.outbound.forwarded_packets, counters.inbound.forwarded_packets)
        };
        settles(counted, (4, 3));
    });
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_missing_destination_is_told_at_once() {
    in_namespace("a_missing_destination_is_told_at_once", || {
        let (engine, _far) = node(1);
        let start = Instant::now();
        let addr = "10.50.77.1:9".parse().unwrap();
        let error = TcpStream::connect_timeout(&addr, Duration::from_secs(10)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NetworkUnreachable, "{error}");
        assert!(start.elapsed() < Duration::from_secs(1));
        settles(|| engine.counters().outbound.answered.get(DropReason::NoRoute), 1);
    });
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn merged_datagrams_reach_the_pod_one_by_one_and_whole() {
    in_namespace("merged_datagrams_reach_the_pod_one_by_one_and_whole", || {
        let (engine, far) = node(1);
        let pod = pod();
        for round in 0..50u8 {
            for i in 0..20u8 {
                let spec = Spec {
                    src: "10.50.2.5".parse().unwrap(),
                    dst: "10.50.1.5".parse().unwrap(),
                    ports: (9, 7777),
                    ..Spec::udp(vec![round.wrapping_add(i); 200])
                };
                far.send_to(&spec.build(), node_endpoint(1)).unwrap();
            }
            for i in 0..20u8 {
                let mut bytes = [0; 2000];
                let (len, _) = pod.recv_from(&mut bytes).unwrap();
                assert_eq!(&bytes[..len], vec![round.wrapping_add(i); 200]);
            }
        }
        settles(|| engine.counters().inbound.forwarded_packets, 1000);
        assert_eq!(engine.counters().events.gro_fallbacks, 0);
    });
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_persistent_device_outlives_its_engine_and_takes_a_second_one_beside_the_first() {
    const NAME: &str = "a_persistent_device_outlives_its_engine_and_takes_a_second_one_beside_the_first";
    in_namespace(NAME, || {
        let options = TunOptions::default();
        let first = TunDevice::open("felt0", 2, &options).unwrap();
        run("ip link set felt0 up");
        run("ip route add 10.50.0.0/16 dev felt0");
        let second = TunDevice::open("felt0", 2, &options).unwrap();
        assert_eq!(first.ifindex(), second.ifindex());
        let config =
            |port: u16| EngineConfig::new(Encap::Udp, SocketAddr::from(([127, 0, 0, 1], port)), 1400);
        let old = Engine::start(config(8285), first).unwrap();
        // The same address: the new engine takes over before the old one leaves.
        let new = Engine::start(config(8285), second).unwrap();
        old.stop();
        assert!(new.is_alive());
        new.stop();
        assert!(output("ip route show dev felt0").contains("10.50.0.0/16"), "the device and its routes stay");
        let last = TunDevice::open("felt0", 1, &TunOptions { persist: false, ..options }).unwrap();
        drop(last);
        assert!(!output("ip link show").contains("felt0"));
    });
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_device_of_another_kind_is_refused_by_name() {
    in_namespace("a_device_of_another_kind_is_refused_by_name", || {
        run("ip link add felt0 type veth peer name other");
        let error = TunDevice::open("felt0", 1, &TunOptions::default()).unwrap_err();
        assert!(matches!(error, TunError::Attach { .. }));
        assert!(error.to_string().contains("felt0"), "{error}");
        let config = EngineConfig::new(Encap::Udp, node_endpoint(1), 1400);
        let tun =
            TunDevice::open("felt1", 1, &TunOptions { persist: false, ..TunOptions::default() }).unwrap();
        let taken = UdpSocket::bind(node_endpoint(1)).unwrap();
        let error = Engine::start(config, tun).unwrap_err();
        assert!(error.to_string().contains("127.0.0.1:8285"), "{error}");
        drop(taken);
    });
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_deleted_device_is_noticed() {
    in_namespace("a_deleted_device_is_noticed", || {
        let (engine, _far) = node(1);
        assert!(engine.is_alive());
        run("ip link del felt0");
        common::wait_for("a dead engine", || (!engine.is_alive()).then_some(()));
    });
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn four_workers_reorder_no_flow() {
    in_namespace("four_workers_reorder_no_flow", || {
        const FLOWS: u16 = 8;
        const EACH: u32 = 4000;
        let (engine, far) = node(4);
        let pods: Vec<_> = (0..FLOWS).map(|i| UdpSocket::bind(("10.50.1.5", 8000 + i)).unwrap()).collect();
        let mut next = vec![0; usize::from(FLOWS)];
        let mut bytes = [0; 2000];
        let (mut sent, mut received) = (0, 0);
        // Outbound: numbered datagrams of eight flows through four queues, in bursts.
        while received < u32::from(FLOWS) * EACH {
            for _ in 0..8 {
                if sent < EACH {
                    for pod in &pods {
                        pod.send_to(&u32::to_be_bytes(sent), "10.50.2.5:9").unwrap();
                    }
                    sent += 1;
                }
            }
            while received < u32::from(FLOWS) * sent {
                let (len, _) = far.recv_from(&mut bytes).expect("no loss");
                let got = packets::parse(&bytes[..len]);
                let flow = usize::from(got.ports.0 - 8000);
                assert_eq!(got.payload, u32::to_be_bytes(next[flow]), "flow {flow}");
                next[flow] += 1;
                received += 1;
            }
        }
        // Inbound: the same back.
        pods.iter().for_each(|pod| pod.set_read_timeout(Some(Duration::from_secs(10))).unwrap());
        for number in 0..EACH {
            for flow in 0..FLOWS {
                let spec = Spec {
                    src: "10.50.2.5".parse().unwrap(),
                    dst: "10.50.1.5".parse().unwrap(),
                    ports: (9, 8000 + flow),
                    ..Spec::udp(number.to_be_bytes().to_vec())
                };
                far.send_to(&spec.build(), node_endpoint(1)).unwrap();
            }
            if number % 8 == 7 {
                for pod in &pods {
                    for back in (0..8).rev() {
                        let len = pod.recv(&mut bytes).expect("no loss");
                        assert_eq!(bytes[..len], (number - back).to_be_bytes());
                    }
                }
            }
        }
        // A pod has its packets before the batch that brought them is counted.
        let total = u64::from(FLOWS) * u64::from(EACH);
        common::wait_for("all packets to be counted", || {
            let counters = engine.counters();
            let seen = (counters.outbound.forwarded_packets, counters.inbound.forwarded_packets);
            (seen == (total, total)).then_some(())
        });
    });
}
