//! Who reaches whom through the tunnel, over both encapsulations and both families.

use std::time::Duration;

use felt_netns_tests::capture::{Capture, UDP};
use felt_netns_tests::check::{self, Counts, ok, ping, pod, up};
use felt_netns_tests::topology::{Backend, Lab, Spec};
use felt_netns_tests::traffic::Ping;

/// Every pod and every other pod, small and full-size packets.
fn mesh(lab: &Lab) {
    let pods: Vec<_> = lab.pods().collect();
    for (i, a) in pods.iter().enumerate() {
        for b in &pods[i + 1..] {
            check::both_ways(a, b, lab.spec.pod_mtu());
        }
    }
}

#[test]
fn vxlan_carries_every_pod_to_every_pod() {
    mesh(&up(Spec::new("t-reach", 3)));
}

#[test]
fn udp_carries_every_pod_to_every_pod() {
    mesh(&up(Spec::new("t-reach", 3).backend(Backend::Udp)));
}

#[test]
fn vxlan_carries_both_families() {
    mesh(&up(Spec::new("t-reach", 2).dual_stack()));
}

#[test]
fn udp_carries_both_families() {
    mesh(&up(Spec::new("t-reach", 2).backend(Backend::Udp).dual_stack()));
}

#[test]
fn nodes_reach_pods_of_other_nodes() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-reach", 2).backend(backend).pods(1));
        let to = ok(pod(&lab, "p2-1").v4());
        let r = ping(&lab.nodes[0].place, to, &Ping::default());
        assert_eq!(r.received, 1, "{backend:?}: {}", r.text);
    }
}

#[test]
fn hops_cost_what_they_cost_in_flannel() {
    // vxlan: the two nodes' forwarding. udp: each proxy takes one more.
    for (backend, ttl) in [(Backend::Vxlan, 62), (Backend::Udp, 60)] {
        let lab = up(Spec::new("t-reach", 2).backend(backend).pods(1));
        let r = ping(&pod(&lab, "p1-1").place, ok(pod(&lab, "p2-1").v4()), &Ping::default());
        assert!(r.text.contains(&format!(" ttl={ttl} ")), "{backend:?}: {}", r.text);
    }
}

#[test]
fn traceroute_ends_and_names_the_tunnel() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-reach", 2).backend(backend).pods(1));
        let to = ok(pod(&lab, "p2-1").v4()).to_string();
        let text =
            ok(pod(&lab, "p1-1").place.run(&["traceroute", "-n", "-q", "1", "-w", "1", "-m", "8", &to]));
        let last = text.lines().last().unwrap_or_default();
        assert!(last.contains(&to), "{backend:?}: {text}");
    }
}

#[test]
fn an_address_without_lease_gets_an_icmp_answer() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-reach", 2).backend(backend).pods(1));
        let from = &pod(&lab, "p1-1").place;
        let before = Counts::of(&lab.nodes[0].place);
        let line = check::eventually_unreachable(from, [10, 244, 250, 1].into(), Duration::from_secs(2));
        let tunnel = check::lease(&lab, 0).subnet.replace("/24", "");
        assert!(line.starts_with(&format!("From {tunnel} ")), "{backend:?}: {line}");
        let grown = Counts::of(&lab.nodes[0].place).since(&before);
        assert!(grown.get("events.icmp_answered_outbound_no_route") >= 1, "{backend:?}: {grown:?}");
    }
}

#[test]
fn outer_packets_look_as_flannels() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-reach", 2).backend(backend).pods(1));
        let file = lab.dir.join("outer.pcap");
        let capture = ok(Capture::start(&lab.underlay, "ul0", 256, "udp", &file));
        let r =
            ping(&pod(&lab, "p1-1").place, ok(pod(&lab, "p2-1").v4()), &Ping { count: 3, ..Ping::default() });
        assert_eq!(r.received, 3, "{}", r.text);
        let frames = ok(capture.finish());
        let leases = [check::lease(&lab, 0), check::lease(&lab, 1)];
        let mut seen = 0;
        for frame in &frames {
            let Some(packet) = frame.packet().filter(|p| p.protocol == UDP) else { continue };
            if packet.ports.is_none_or(|p| p.1 != backend.port()) {
                continue;
            }
            seen += 1;
            assert_eq!((packet.ttl, packet.tos), (64, 0), "{packet:?}");
            match backend {
                Backend::Vxlan => {
                    let (vni, inner) = frame.vxlan(8472).expect("VXLAN");
                    let (to, from) = if packet.source == lab.nodes[0].ip { (1, 0) } else { (0, 1) };
                    let hex = |b: &[u8]| b.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(":");
                    assert_eq!(vni, 1);
                    assert_eq!(Some(hex(&inner.bytes[..6])), leases[to].mac, "destination MAC");
                    assert_eq!(Some(hex(&inner.bytes[6..12])), leases[from].mac, "source MAC");
                    assert_eq!(packet.payload[1..4], [0; 3], "reserved bits");
                    assert_eq!(packet.payload[7], 0, "reserved byte");
                    assert!(!packet.dont_fragment, "the kernel's vxlan leaves DF clear");
                }
                Backend::Udp => assert_eq!(packet.payload[0], 0x45, "the bare inner packet"),
            }
        }
        assert_eq!(seen, 6, "{backend:?}: six packets in {} frames", frames.len());
    }
}
