//! Packets of the wrong size: answered, fragmented, or carried, never silently lost.

use std::time::Duration;

use felt_netns_tests::check::{self, ok, ping, pod, up};
use felt_netns_tests::topology::{Backend, Lab, Spec};
use felt_netns_tests::traffic::{self, Ping, Tcp};

/// Gives a pod's link (both ends and the bridge) a larger MTU than the tunnel's.
fn widen(lab: &Lab, node: usize, pod_name: &str, mtu: u16) {
    let p = pod(lab, pod_name);
    let link = ok(p.place.ip_json("link show eth0"));
    let peer = link[0]["link_index"].as_u64().expect("the host end's index");
    let node = &lab.nodes[node].place;
    let name = ok(node.sh(&format!("ip -o link | sed -n 's/^{peer}: \\([^@:]*\\)[@:].*/\\1/p'")));
    ok(node.ip(&format!("link set {} mtu {mtu}", name.trim())));
    ok(node.ip(&format!("link set cni0 mtu {mtu}")));
    ok(p.place.ip(&format!("link set eth0 mtu {mtu}")));
}

#[test]
fn subnet_env_and_links_agree_on_the_mtu() {
    for (spec, mtu) in [
        (Spec::new("t-mtu", 1), 1450),
        (Spec::new("t-mtu", 1).backend(Backend::Udp), 1472),
        (Spec::new("t-mtu", 1).dual_stack(), 1430),
    ] {
        let lab = up(spec.pods(1));
        let env =
            std::fs::read_to_string(lab.nodes[0].place.path("/run/flannel/subnet.env")).expect("subnet.env");
        assert!(env.contains(&format!("FLANNEL_MTU={mtu}\n")), "{env}");
        let link = ok(pod(&lab, "p1-1").place.ip_json("link show eth0"));
        assert_eq!(link[0]["mtu"], mtu);
    }
}

#[test]
fn too_large_and_not_to_be_fragmented_is_answered() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-mtu", 2).backend(backend).pods(1));
        widen(&lab, 0, "p1-1", 1500);
        let to = ok(pod(&lab, "p2-1").v4());
        let r = ping(&pod(&lab, "p1-1").place, to, &Ping::full_size(1500, to));
        let mtu = lab.spec.pod_mtu();
        assert!(
            r.text.contains(&format!("mtu = {mtu}")) || r.text.contains(&format!("mtu={mtu}")),
            "{backend:?}: {}",
            r.text
        );
    }
}

#[test]
fn too_large_and_fragmentable_arrives() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-mtu", 2).backend(backend).pods(1));
        widen(&lab, 0, "p1-1", 1500);
        let to = ok(pod(&lab, "p2-1").v4());
        // `-M dont` clears DF; ping's own way to say it.
        let text = ok(pod(&lab, "p1-1").place.output(&[
            "ping",
            "-n",
            "-c1",
            "-W1",
            "-M",
            "dont",
            "-s",
            "1472",
            &to.to_string(),
        ]));
        assert!(text.stdout.contains("1 received"), "{backend:?}: {}", text.stdout);
    }
}

#[test]
fn a_smaller_underlay_is_survived() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-mtu", 2).backend(backend).pods(1));
        for node in &lab.nodes {
            ok(node.place.ip("link set eth0 mtu 1400"));
        }
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        let how = Tcp { bytes: 100 << 10, hash: true, deadline: Duration::from_secs(20), ..Tcp::default() };
        let r = ok(traffic::tcp(&a.place, &b.place, ok(b.v4()), &how));
        assert_eq!(r.bytes, how.bytes, "{backend:?}");
    }
}

#[test]
fn jumbo_frames_pass() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let mut spec = Spec::new("t-mtu", 2).backend(backend).pods(1);
        spec.underlay_mtu = 9000;
        let lab = up(spec);
        check::both_ways(pod(&lab, "p1-1"), pod(&lab, "p2-1"), 9000 - backend.overhead());
        let how = Tcp { bytes: 16 << 20, hash: true, ..Tcp::default() };
        let b = pod(&lab, "p2-1");
        assert_eq!(ok(traffic::tcp(&pod(&lab, "p1-1").place, &b.place, ok(b.v4()), &how)).bytes, how.bytes);
    }
}
