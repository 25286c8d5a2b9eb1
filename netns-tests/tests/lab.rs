//! The lab itself: without felt, with nodes that are the kernel's vxlan device, so that a failure here is the lab's.

use std::time::Duration;

use felt_netns_tests::capture::Capture;
use felt_netns_tests::cmd;
use felt_netns_tests::netns::{Lifetime, Pid};
use felt_netns_tests::snapshot::{Scope, Snapshot};
use felt_netns_tests::topology::{Lab, NodeKind, Spec};
use felt_netns_tests::traffic::{self, Ping, Tcp, Udp};

fn kernel_lab(nodes: usize) -> Lab {
    let mut spec = Spec::new("t-lab", nodes);
    spec.nodes = vec![NodeKind::Kernel; nodes];
    Lab::up(spec, Lifetime::Tied).expect("a lab of kernel nodes")
}

#[test]
fn kernel_nodes_carry_ping_tcp_and_udp() {
    let lab = kernel_lab(2);
    let (a, b) = (lab.pod("p1-1").expect("p1-1"), lab.pod("p2-1").expect("p2-1"));
    let to = b.v4().expect("IPv4");
    let full = traffic::ping(&a.place, to, &Ping::full_size(1450, to)).expect("ping");
    assert_eq!(full.received, 1, "{}", full.text);
    let big = traffic::ping(&a.place, to, &Ping::full_size(1451, to)).expect("ping");
    assert_eq!(big.received, 0, "1451 bytes do not fit: {}", big.text);
    let how = Tcp { bytes: 8 << 20, streams: 2, hash: true, ..Tcp::default() };
    let tcp = traffic::tcp(&a.place, &b.place, to, &how).expect("TCP");
    assert_eq!((tcp.bytes, tcp.hashes.len()), (16 << 20, 2));
    let udp = traffic::udp(&a.place, &b.place, to, &Udp { rate: 2000, seconds: 0.3, ..Udp::default() })
        .expect("UDP");
    assert_eq!((udp.sent, udp.damaged, udp.duplicates), (udp.received, 0, 0), "{udp:?}");
    assert!(udp.sent >= 600, "{udp:?}");
    let latency = traffic::latency(&a.place, &b.place, to, 0.1).expect("latency");
    assert!(latency.count > 10 && latency.p50_us > 0.0 && latency.p50_us <= latency.p99_us, "{latency:?}");
}

#[test]
fn kernel_nodes_carry_ipv6() {
    let mut spec = Spec::new("t-lab", 2).dual_stack().pods(1);
    spec.nodes = vec![NodeKind::Kernel; 2];
    let lab = Lab::up(spec, Lifetime::Tied).expect("a lab of kernel nodes");
    let (a, b) = (lab.pod("p1-1").expect("p1-1"), lab.pod("p2-1").expect("p2-1"));
    let to = b.v6().expect("IPv6");
    let full = traffic::ping(&a.place, to, &Ping::full_size(1430, to)).expect("ping");
    assert_eq!(full.received, 1, "{}", full.text);
}

#[test]
fn capture_sees_what_the_kernel_encapsulates() {
    let lab = kernel_lab(2);
    let (a, b) = (lab.pod("p1-1").expect("p1-1"), lab.pod("p2-2").expect("p2-2"));
    let file = lab.dir.join("capture.pcap");
    let capture = Capture::start(&lab.underlay, "ul0", 256, "", &file).expect("tcpdump");
    let r =
        traffic::ping(&a.place, b.v4().expect("IPv4"), &Ping { count: 3, ..Ping::default() }).expect("ping");
    assert_eq!(r.received, 3, "{}", r.text);
    let frames = capture.finish().expect("a capture");
    let inner: Vec<_> = frames.iter().filter_map(|f| f.vxlan(8472)).collect();
    assert_eq!(
        inner.iter().filter(|(vni, f)| *vni == 1 && f.packet().is_some_and(|p| p.protocol == 1)).count(),
        6
    );
}

#[test]
fn everything_vanishes_with_the_lab() {
    let lab = kernel_lab(2);
    let dir = lab.dir.clone();
    let mut pids: Vec<Pid> = lab.nodes.iter().map(|n| n.place.holder).collect();
    pids.push(lab.underlay.holder);
    assert!(dir.exists() && pids.iter().all(|p| p.alive()));
    drop(lab);
    assert!(!dir.exists() && !pids.iter().any(|p| p.alive()));
}

#[test]
fn nothing_is_made_in_the_hosts_namespace() {
    let lab = kernel_lab(1);
    let host = Snapshot::take(Scope::Host).expect("the host's state");
    let node = Snapshot::take(Scope::Node(&lab.nodes[0].place)).expect("the node's state");
    let here: Vec<String> = host
        .difference(&node)
        .into_iter()
        .filter(|l| l.contains("flannel.1") && l.contains(" link: "))
        .collect();
    assert!(here.iter().all(|l| l.starts_with('+')) && !here.is_empty(), "{here:?}");
}

#[test]
fn a_killed_maker_leaves_nothing() {
    for signal in ["KILL", "INT", "TERM"] {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_felt-lab"))
            .args(["gen", "hold"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("run felt-lab");
        let mut line = String::new();
        let mut out = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
        std::io::BufRead::read_line(&mut out, &mut line).expect("felt-lab's output");
        let dir = std::path::PathBuf::from(line.trim());
        assert!(dir.join("stage").exists(), "{line:?}");
        let guards: Vec<Pid> = cmd::children(child.id()).into_iter().filter_map(Pid::of).collect();
        assert!(!guards.is_empty());
        cmd::signal(child.id(), signal);
        let _ = child.wait();
        let gone = || (!dir.exists() && !guards.iter().any(|g| g.alive())).then_some(());
        cmd::wait_for("the lab to vanish", Duration::from_secs(5), gone).expect(signal);
    }
}
