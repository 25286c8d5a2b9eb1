//! felt beside the kernel's own vxlan device, set up exactly as flannel's backend leaves it: every protocol both ways at
//! full segment size.

use felt_netns_tests::check::{self, ok, pod, up};
use felt_netns_tests::topology::{Lab, NodeKind, Registry, Spec};
use felt_netns_tests::traffic::{self, Tcp, Udp};

fn lab(args: &[&str]) -> Lab {
    let mut spec = Spec::new("t-interop", 3).kind(2, NodeKind::Kernel).pods(1);
    for a in args {
        spec = spec.arg(a);
    }
    up(spec)
}

#[test]
fn icmp_both_ways_at_full_size() {
    let lab = lab(&[]);
    for felt in ["p1-1", "p2-1"] {
        check::both_ways(pod(&lab, felt), pod(&lab, "p3-1"), lab.spec.pod_mtu());
    }
}

#[test]
fn tcp_both_ways_with_hash() {
    for args in [&[][..], &["--offload=off"][..]] {
        let lab = lab(args);
        let (felt, kernel) = (pod(&lab, "p1-1"), pod(&lab, "p3-1"));
        for (from, to) in [(felt, kernel), (kernel, felt)] {
            for how in [
                Tcp { bytes: 32 << 20, hash: true, ..Tcp::default() },
                Tcp { streams: 4, bytes: 4 << 20, hash: true, ..Tcp::default() },
            ] {
                let r = ok(traffic::tcp(&from.place, &to.place, ok(to.v4()), &how));
                assert_eq!(
                    r.bytes,
                    how.bytes * u64::from(how.streams),
                    "{args:?} {} to {}",
                    from.name,
                    to.name
                );
            }
        }
    }
}

#[test]
fn udp_both_ways_every_size() {
    let lab = lab(&[]);
    let (felt, kernel) = (pod(&lab, "p1-1"), pod(&lab, "p3-1"));
    let whole = lab.spec.pod_mtu() - 28;
    for (from, to) in [(felt, kernel), (kernel, felt)] {
        for size in [16, 64, 1000, whole - 1, whole, whole + 1, 9000] {
            let r = ok(traffic::udp(
                &from.place,
                &to.place,
                ok(to.v4()),
                &Udp { size, rate: 1000, seconds: 0.2 },
            ));
            let clean = r.received == r.sent && r.damaged + r.reordered + r.duplicates == 0;
            assert!(clean, "{} to {}, {size} bytes: {r:?}", from.name, to.name);
        }
    }
}

#[test]
fn ipv6_both_ways() {
    let lab = up(Spec::new("t-interop", 2).kind(1, NodeKind::Kernel).pods(1).dual_stack());
    let (felt, kernel) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
    check::both_ways(felt, kernel, lab.spec.pod_mtu());
    for (from, to) in [(felt, kernel), (kernel, felt)] {
        let how = Tcp { bytes: 16 << 20, hash: true, ..Tcp::default() };
        assert_eq!(ok(traffic::tcp(&from.place, &to.place, ok(to.v6()), &how)).bytes, how.bytes);
        let size = lab.spec.pod_mtu() - 48;
        let r =
            ok(traffic::udp(&from.place, &to.place, ok(to.v6()), &Udp { size, rate: 1000, seconds: 0.2 }));
        assert!(r.received == r.sent && r.damaged == 0, "{} to {}: {r:?}", from.name, to.name);
    }
}

#[test]
fn with_etcd_as_registry() {
    let lab = up(Spec::new("t-interop", 2).kind(1, NodeKind::Kernel).pods(1).registry(Registry::Etcd));
    check::both_ways(pod(&lab, "p1-1"), pod(&lab, "p2-1"), lab.spec.pod_mtu());
}

#[test]
fn underlay_without_offloads_as_on_a_wire() {
    let lab = lab(&[]);
    for node in &lab.nodes {
        // The names of ethtool(8); what a link does not have is not an error.
        ok(node.place.sh("for f in tso gso gro tx-udp-segmentation tx-udp_tnl-segmentation; do ethtool -K eth0 $f off >/dev/null 2>&1 || true; done"));
    }
    let (felt, kernel) = (pod(&lab, "p1-1"), pod(&lab, "p3-1"));
    for (from, to) in [(felt, kernel), (kernel, felt), (felt, pod(&lab, "p2-1"))] {
        let how = Tcp { bytes: 16 << 20, hash: true, ..Tcp::default() };
        assert_eq!(ok(traffic::tcp(&from.place, &to.place, ok(to.v4()), &how)).bytes, how.bytes);
    }
}
