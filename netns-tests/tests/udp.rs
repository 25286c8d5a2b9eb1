//! UDP through the tunnel: every size, no loss at a modest rate, no reordering within a flow.

use felt_netns_tests::check::{ok, pod, up};
use felt_netns_tests::topology::{Backend, Spec};
use felt_netns_tests::traffic::{self, Udp};

#[test]
fn every_size_arrives_whole() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-udp", 2).backend(backend).pods(1).dual_stack());
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        let mtu = lab.spec.pod_mtu();
        for addr in b.addresses() {
            let whole = mtu - if addr.is_ipv4() { 28 } else { 48 };
            // The last three travel in fragments.
            for size in [16, 17, 63, 64, 512, 1400.min(whole), whole - 1, whole, whole + 1, 4000, 65_000] {
                let how = Udp { size, rate: 500, seconds: 0.1 };
                let r = ok(traffic::udp(&a.place, &b.place, addr, &how));
                assert!(
                    r.sent >= 40 && r.received == r.sent && r.damaged + r.duplicates + r.reordered == 0,
                    "{backend:?} {addr} {size} bytes: {r:?}"
                );
            }
        }
    }
}

#[test]
fn a_flow_is_not_reordered_by_four_workers() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-udp", 2).backend(backend).pods(1).arg("--workers=4"));
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        let addr = ok(b.v4());
        std::thread::scope(|s| {
            // Four flows, so that more than one worker has something to do.
            let flows: Vec<_> = (0..4)
                .map(|_| {
                    s.spawn(|| {
                        traffic::udp(&a.place, &b.place, addr, &Udp { size: 200, rate: 4000, seconds: 1.0 })
                    })
                })
                .collect();
            for f in flows {
                let r = ok(f.join().expect("no panic"));
                assert_eq!((r.reordered, r.duplicates, r.damaged), (0, 0, 0), "{backend:?}: {r:?}");
                assert!(r.received > r.sent / 2, "{backend:?}: {r:?}");
            }
        });
    }
}

#[test]
fn a_modest_rate_loses_nothing() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-udp", 2).backend(backend).pods(1));
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        let r = ok(traffic::udp(&a.place, &b.place, ok(b.v4()), &Udp { size: 64, rate: 2000, seconds: 1.0 }));
        assert_eq!((r.received, r.send_errors), (r.sent, 0), "{backend:?}: {r:?}");
    }
}
