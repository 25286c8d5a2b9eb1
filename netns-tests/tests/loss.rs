//! Trouble on the underlay: loss, dead peers, a firewall that refuses sends. One peer's trouble is not another's.

use std::time::Duration;

use felt_netns_tests::check::{self, Counts, ok, pod, up};
use felt_netns_tests::topology::{Backend, Lab, Spec};
use felt_netns_tests::traffic::{self, Tcp, Udp};

fn drop_rule(lab: &Lab, node: usize, chain: &str, rule: &str) {
    let script = format!(
        "nft add table inet lab\n\
         nft 'add chain inet lab {chain} {{ type filter hook {chain} priority 0; }}'\n\
         nft 'add rule inet lab {chain} {rule}'"
    );
    ok(lab.nodes[node].place.sh(&script));
}

#[test]
fn tcp_survives_loss_on_the_underlay() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-loss", 2).backend(backend).pods(1));
        drop_rule(&lab, 1, "input", &format!("udp dport {} numgen random mod 100 < 2 drop", backend.port()));
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        let how = Tcp { bytes: 4 << 20, hash: true, ..Tcp::default() };
        assert_eq!(ok(traffic::tcp(&a.place, &b.place, ok(b.v4()), &how)).bytes, how.bytes, "{backend:?}");
    }
}

/// A stream to n2 and one to n3 at the same time; returns the reports.
fn two_streams(lab: &Lab) -> (traffic::UdpReport, traffic::UdpReport) {
    let a = pod(lab, "p1-1");
    let how = Udp { size: 64, rate: 1000, seconds: 1.5 };
    std::thread::scope(|s| {
        let run = |name: &'static str| {
            let to = pod(lab, name);
            traffic::udp(&a.place, &to.place, to.v4()?, &how)
        };
        let dead = s.spawn(move || run("p2-1"));
        let live = s.spawn(move || run("p3-1"));
        (ok(dead.join().expect("no panic")), ok(live.join().expect("no panic")))
    })
}

#[test]
fn a_peer_with_a_closed_port_disturbs_nobody() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let mut lab = up(Spec::new("t-loss", 3).backend(backend).pods(1));
        // Its kernel now answers each packet with "port unreachable"; its lease stays.
        ok(lab.nodes[1].daemon.take().expect("a daemon").kill());
        let (dead, live) = two_streams(&lab);
        assert_eq!(dead.received, 0, "{dead:?}");
        assert_eq!((live.received, live.reordered), (live.sent, 0), "{backend:?}: {live:?}");
    }
}

#[test]
fn a_peer_that_is_gone_disturbs_nobody() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-loss", 3).backend(backend).pods(1));
        // Nobody answers ARP for it: sends fail with EHOSTUNREACH after a while.
        ok(lab.underlay.ip("link set n2 down"));
        ok(lab.nodes[0].place.ip("neigh flush dev eth0"));
        let (dead, live) = two_streams(&lab);
        assert_eq!(dead.received, 0, "{dead:?}");
        assert_eq!((live.received, live.reordered), (live.sent, 0), "{backend:?}: {live:?}");
    }
}

#[test]
fn sends_refused_by_a_firewall_are_counted_and_disturb_nobody() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-loss", 3).backend(backend).pods(1));
        drop_rule(
            &lab,
            0,
            "output",
            &format!("ip daddr {} udp dport {} drop", lab.nodes[1].ip, backend.port()),
        );
        let before = Counts::of(&lab.nodes[0].place);
        let (dead, live) = two_streams(&lab);
        assert_eq!(dead.received, 0, "{dead:?}");
        assert_eq!((live.received, live.reordered), (live.sent, 0), "{backend:?}: {live:?}");
        let grown = Counts::of(&lab.nodes[0].place).since(&before);
        // nft's drop in the output hook makes sendmsg fail with EPERM.
        assert!(grown.get("outbound.drops.eperm") >= dead.sent / 2, "{backend:?}: {grown:?}");
    }
}

#[test]
fn traffic_returns_by_itself_after_an_outage() {
    let lab = up(Spec::new("t-loss", 2).pods(1));
    let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
    ok(lab.underlay.ip("link set n2 down"));
    std::thread::sleep(Duration::from_millis(300));
    assert!(!traffic::reaches(&a.place, ok(b.v4())));
    ok(lab.underlay.ip("link set n2 up"));
    check::eventually_reaches(&a.place, ok(b.v4()), Duration::from_secs(10));
}
