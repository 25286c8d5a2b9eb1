//! Packets that should never have been sent, from another namespace's plain sockets: no crash, the right counter,
//! other people's traffic unharmed.

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use felt_netns_tests::check::{self, Counts, ok, pod};
use felt_netns_tests::cmd;
use felt_netns_tests::topology::{Backend, Lab, Spec};
use felt_netns_tests::traffic::{self, Udp, UdpFlow};

/// Inner packets from 10.50.2.5 to 10.50.1.5, and the inbound counter that must move in `udp`.
const PACKETS: [(&str, &str, &str); 5] = [
    // 19 bytes: a cut header.
    ("P1", "45000013000100004011636c0a3202050a3201", "inbound.drops.bad_ip"),
    // A header length of 16.
    ("P3", "44000014000100004011646b0a3202050a320105", "inbound.drops.bad_ip"),
    // A total length of 65535 in 28 bytes.
    ("P5", "4500ffff000100004011637f0a3202050a32010504d2162e00080000", "inbound.drops.bad_ip"),
    // TCP with two bytes of header: a tunnel that does not look into TCP hands it on.
    ("P7", "4500001600010000400663740a3202050a3201050050", "inbound.packets"),
    // TTL 1: used up by the proxy's own decrement in udp.
    ("P9", "4500001c000100000111a2630a3202050a32010504d2162e00080000", "events.icmp_answered_inbound_ttl"),
];

/// Two nodes whose subnets are 10.50.1.0/24 and 10.50.2.0/24, one pod each.
fn lab(backend: Backend) -> Lab {
    let mut spec = Spec::new("t-hostile", 3).backend(backend).pods(1);
    spec.config_keys =
        serde_json::from_value(serde_json::json!({"Network": "10.50.0.0/16", "SubnetLen": 24}))
            .expect("an object");
    let mut lab = ok(Lab::build(spec, felt_netns_tests::netns::Lifetime::Tied));
    ok(lab.start_registry());
    for (i, node) in lab.nodes.iter().enumerate() {
        // A lease of this public address that is there already is used again.
        let mut value = serde_json::json!({"PublicIP": node.ip.to_string(), "PublicIPv6": null, "Expiration": "2099-01-01T00:00:00Z"});
        if backend == Backend::Vxlan {
            value["BackendType"] = "vxlan".into();
            value["BackendData"] =
                serde_json::json!({"VNI": 1, "VtepMAC": format!("02:00:00:00:50:{:02x}", i + 1)});
        }
        ok(felt_netns_tests::kernel_node::write_lease(
            &lab,
            &format!("10.50.{}.0-24", i + 1),
            &value.to_string(),
        ));
    }
    ok(lab.start_nodes());
    ok(lab.attach_pods());
    ok(lab.wait_converged(Duration::from_secs(10)));
    for (i, name) in ["p1-1", "p2-1"].iter().enumerate() {
        let text = ok(pod(&lab, name).v4()).to_string();
        assert!(text.starts_with(&format!("10.50.{}.", i + 1)), "{name} has {text}");
    }
    lab
}

/// Sends datagrams from n2's namespace to n1's tunnel port.
fn send(lab: &Lab, datagrams: &[String]) {
    let to = format!("{}:{}", lab.nodes[0].ip, lab.spec.backend.port());
    let mut c = lab.nodes[1].place.command("/run/lab/bin/felt-lab");
    c.args(["gen", "send-hex", "--to", &to]);
    let text = datagrams.join("\n");
    ok(cmd::run_with(c, text.as_bytes(), Duration::from_secs(20)));
}

/// The VXLAN datagram around an inner frame. Each part can be bent by the caller.
fn vxlan(header: &str, frame: &str) -> String {
    format!("{header}{frame}")
}

const GOOD_HEADER: &str = "0800000000000100";

/// An Ethernet frame from n2 to n1.
fn frame(to: &str, kind: &str, inner: &str) -> String {
    format!("{to}020000005002{kind}{inner}")
}

const N1: &str = "020000005001";
const GOOD_INNER: &str = "4500001c00010000401163630a3202050a32010504d2162e00080000";

/// Sends one datagram and waits for the counter that must move; nothing else may be counted for it.
fn expect(lab: &Lab, name: &str, datagram: &str, counter: &str) {
    let place = &lab.nodes[0].place;
    let before = Counts::of(place);
    send(lab, &[datagram.to_owned()]);
    let moved = cmd::wait_for("the counter", Duration::from_secs(3), || {
        (Counts::of(place).get(counter) > before.get(counter)).then_some(())
    });
    let grown = Counts::of(place).since(&before);
    assert!(moved.is_ok(), "{name}: {counter} did not move, but {grown:?}");
    if counter != "inbound.packets" {
        assert_eq!(grown.get("inbound.packets"), 0, "{name} was let through as well: {grown:?}");
    }
}

/// A stream between n3 and n1 that must not notice.
fn bystander(lab: &Lab, seconds: f64) -> UdpFlow {
    let to = pod(lab, "p1-1");
    ok(UdpFlow::start(
        &pod(lab, "p3-1").place,
        &to.place,
        ok(to.v4()),
        &Udp { size: 100, rate: 500, seconds },
    ))
}

#[test]
fn malformed_packets_in_udp_have_their_counters() {
    let lab = lab(Backend::Udp);
    for (name, hex, counter) in PACKETS {
        expect(&lab, name, hex, counter);
    }
    expect(&lab, "empty datagram", "", "inbound.drops.bad_encap");
    expect(&lab, "version 7", "75000014000100004011646b0a3202050a320105", "inbound.drops.bad_ip");
    assert!(traffic::reaches(&pod(&lab, "p2-1").place, ok(pod(&lab, "p1-1").v4())));
}

#[test]
fn malformed_packets_in_vxlan_have_their_counters() {
    let lab = lab(Backend::Vxlan);
    for (name, hex, counter) in PACKETS {
        // vxlan leaves the TTL alone: P9 is handed on, the node's own forwarding ends it.
        let counter = if name == "P9" { "inbound.packets" } else { counter };
        expect(&lab, name, &vxlan(GOOD_HEADER, &frame(N1, "0800", hex)), counter);
    }
    let inner = PACKETS[3].1;
    for (name, datagram, counter) in [
        ("seven bytes of header", "08000000000001".to_owned(), "inbound.drops.bad_encap"),
        ("flag I not set", vxlan("0000000000000100", &frame(N1, "0800", inner)), "inbound.drops.bad_flags"),
        ("a reserved flag", vxlan("0900000000000100", &frame(N1, "0800", inner)), "inbound.drops.bad_flags"),
        ("wrong VNI", vxlan("0800000000000200", &frame(N1, "0800", inner)), "inbound.drops.bad_vni"),
        ("a frame of 13 bytes", vxlan(GOOD_HEADER, "02000000500102000000500208"), "inbound.drops.bad_encap"),
        ("ARP", vxlan(GOOD_HEADER, &frame(N1, "0806", inner)), "inbound.drops.bad_encap"),
        ("LLDP", vxlan(GOOD_HEADER, &frame(N1, "88cc", inner)), "inbound.drops.bad_encap"),
        (
            "a VLAN tag",
            vxlan(GOOD_HEADER, &frame(N1, "81000064", &format!("0800{inner}"))),
            "inbound.drops.bad_encap",
        ),
        (
            "another node's MAC",
            vxlan(GOOD_HEADER, &frame("020000005003", "0800", inner)),
            "inbound.drops.bad_mac",
        ),
        ("broadcast", vxlan(GOOD_HEADER, &frame("ffffffffffff", "0800", inner)), "inbound.drops.bad_mac"),
        (
            "our own MAC as source",
            vxlan(GOOD_HEADER, &format!("{N1}{N1}0800{inner}")),
            "inbound.drops.bad_mac",
        ),
        (
            "IPv6 announced, IPv4 inside",
            vxlan(GOOD_HEADER, &frame(N1, "86dd", inner)),
            "inbound.drops.bad_ip",
        ),
    ] {
        expect(&lab, name, &datagram, counter);
    }
    assert!(traffic::reaches(&pod(&lab, "p2-1").place, ok(pod(&lab, "p1-1").v4())));
}

#[test]
fn the_source_guard_drops_foreign_and_own_sources() {
    let lab = lab(Backend::Udp);
    // 28 bytes of UDP to 10.50.1.5, from an address no node has, and from n1's own subnet.
    expect(
        &lab,
        "unknown source",
        "4500001c00010000401102630a3263050a32010504d2162e00080000",
        "inbound.drops.spoof",
    );
    expect(
        &lab,
        "own source",
        "4500001c000100004011645f0a3201090a32010504d2162e00080000",
        "inbound.drops.own_source",
    );
}

/// Sends `count` hostile datagrams, half of them mutated good ones, while a bystander's stream runs, and balances the
/// books: sent = counted + what the socket's queue overflowed by.
fn flood(backend: Backend, count: u64) {
    let lab = lab(backend);
    let place = &lab.nodes[0].place;
    let before = Counts::of(place);
    let to = format!("{}:{}", lab.nodes[0].ip, backend.port());
    let flow = bystander(&lab, 3.0);
    let mut c = lab.nodes[1].place.command("/run/lab/bin/felt-lab");
    c.args(["gen", "hostile", "--to", &to, "--count", &count.to_string(), "--seed", "7"]);
    c.stdin(Stdio::piped());
    let golden = match backend {
        Backend::Udp => GOOD_INNER.to_owned(),
        Backend::Vxlan => vxlan(GOOD_HEADER, &frame(N1, "0800", GOOD_INNER)),
    };
    let out = ok(cmd::output(c, golden.as_bytes(), Duration::from_secs(300)));
    assert!(out.ok(), "{}", out.stderr);
    let sent: u64 = out.stdout.trim().parse().expect("a number");
    let report = ok(flow.finish());
    std::thread::sleep(Duration::from_millis(300));
    let grown = Counts::of(place).since(&before);
    assert!(lab.nodes[0].daemon.as_ref().expect("a daemon").alive());
    // The bystander's own packets arrive on the same socket.
    let counted = grown.get("inbound.packets")
        + grown.sum("inbound.drops.")
        + grown.sum("events.icmp_answered_inbound_")
        + grown.get("events.socket_overflow");
    let expected = sent + report.sent;
    let _ = writeln!(std::io::stderr(), "{backend:?}: {sent} hostile, bystander {report:?}, {grown:?}");
    assert!(counted.abs_diff(expected) <= expected / 10_000, "sent {expected}, counted {counted}: {grown:?}");
    assert!(report.loss() < 0.05 && report.damaged == 0, "{report:?}");
    for name in ["p2-1", "p3-1"] {
        check::eventually_reaches(&pod(&lab, name).place, ok(pod(&lab, "p1-1").v4()), Duration::from_secs(3));
    }
}

/// Datagrams for each encapsulation: half a million, or `FELT_HOSTILE` (`make test-long` sends five million).
fn count() -> u64 {
    std::env::var("FELT_HOSTILE").map_or(500_000, |n| n.parse().expect("FELT_HOSTILE is a number"))
}

#[test]
fn a_flood_of_hostile_datagrams_in_udp() {
    flood(Backend::Udp, count());
}

#[test]
fn a_flood_of_hostile_datagrams_in_vxlan() {
    flood(Backend::Vxlan, count());
}
