//! Daemons that stop, die and come back: same lease, same state, short gaps, nothing piled up.

use std::time::Duration;

use felt_netns_tests::check::{self, ok, pod, up};
use felt_netns_tests::snapshot::{Scope, Snapshot};
use felt_netns_tests::topology::{Backend, Spec};
use felt_netns_tests::traffic;

const SOON: Duration = Duration::from_secs(5);

#[test]
fn a_killed_daemon_comes_back_with_the_same_lease() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let mut lab = up(Spec::new("t-restart", 2).backend(backend).pods(1));
        let before = check::lease(&lab, 1);
        ok(lab.nodes[1].daemon.take().expect("a daemon").kill());
        ok(lab.start_node(1));
        assert_eq!(check::lease(&lab, 1), before, "subnet, address and MAC");
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        check::eventually_reaches(&a.place, ok(b.v4()), SOON);
        check::eventually_reaches(&b.place, ok(a.v4()), SOON);
    }
}

#[test]
fn sigterm_ends_with_code_zero_and_keeps_the_lease() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let mut lab = up(Spec::new("t-restart", 2).backend(backend).pods(1));
        let before = check::lease(&lab, 1);
        let mut daemon = lab.nodes[1].daemon.take().expect("a daemon");
        daemon.signal("TERM");
        let status = ok(daemon.wait_end(SOON));
        assert_eq!(status.code(), Some(0), "{backend:?}: {}", daemon.log_tail(15));
        assert_eq!(check::lease(&lab, 1), before, "the lease stays");
        ok(lab.start_node(1));
        assert_eq!(check::lease(&lab, 1), before);
        let b = pod(&lab, "p2-1");
        check::eventually_reaches(&pod(&lab, "p1-1").place, ok(b.v4()), SOON);
    }
}

#[test]
fn two_sigterms_at_once_during_traffic_end_cleanly() {
    let mut lab = up(Spec::new("t-restart", 2).pods(1));
    let (a, b) = (pod(&lab, "p1-1").clone(), pod(&lab, "p2-1").clone());
    let how = traffic::Udp { size: 200, rate: 5000, seconds: 1.0 };
    let flow = ok(traffic::UdpFlow::start(&a.place, &b.place, ok(b.v4()), &how));
    std::thread::sleep(Duration::from_millis(300));
    let mut daemon = lab.nodes[1].daemon.take().expect("a daemon");
    daemon.signal("TERM");
    daemon.signal("TERM");
    let status = ok(daemon.wait_end(SOON));
    // A second signal may end it at once, as flannel's does: by the signal, or by its own exit.
    assert!(matches!(status.code(), Some(0 | 143) | None), "{status:?}");
    assert!(!daemon.log_text().contains("panicked"), "{}", daemon.log_tail(20));
    ok(flow.finish());
}

#[test]
fn twenty_restarts_leave_what_one_start_leaves() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let mut lab = up(Spec::new("t-restart", 2).backend(backend).pods(1));
        let place = lab.nodes[1].place.clone();
        let once = ok(Snapshot::take(Scope::Node(&place)));
        for round in 0..20 {
            let daemon = lab.nodes[1].daemon.take().expect("a daemon");
            if round % 2 == 0 {
                ok(daemon.kill());
            } else {
                assert_eq!(ok(daemon.stop()).code(), Some(0));
            }
            ok(lab.start_node(1));
        }
        let again = ok(Snapshot::take(Scope::Node(&place)));
        let grown = once.difference(&again);
        assert!(grown.is_empty(), "{backend:?}: {grown:#?}");
        let b = pod(&lab, "p2-1");
        check::eventually_reaches(&pod(&lab, "p1-1").place, ok(b.v4()), SOON);
    }
}

#[test]
fn cleanup_removes_what_the_daemon_made() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = ok(felt_netns_tests::topology::Lab::build(
            Spec::new("t-restart", 1).backend(backend).pods(0).arg("--ip-masq"),
            felt_netns_tests::netns::Lifetime::Tied,
        ));
        let mut lab = lab;
        let before = ok(Snapshot::take(Scope::Node(&lab.nodes[0].place)));
        ok(lab.start_registry());
        ok(lab.start_node(0));
        let running = ok(Snapshot::take(Scope::Node(&lab.nodes[0].place)));
        assert!(!before.difference(&running).is_empty(), "a daemon that does nothing proves nothing");
        ok(lab.nodes[0].daemon.take().expect("a daemon").stop());
        ok(lab.nodes[0].place.run(&["/run/lab/bin/felt", "cleanup"]));
        let after = ok(Snapshot::take(Scope::Node(&lab.nodes[0].place)));
        let left = before.difference(&after);
        assert!(left.is_empty(), "{backend:?}: {left:#?}");
    }
}
