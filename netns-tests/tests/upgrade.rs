//! A new daemon beside the old one takes the packets over; a killed one leaves device and routes to the next.

use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use felt_netns_tests::check::{self, ok, pod, up};
use felt_netns_tests::cmd;
use felt_netns_tests::daemon::{Daemon, SUBNET_ENV, felt_json};
use felt_netns_tests::netns::{NODE_BIN, NODE_SHARED, Place};
use felt_netns_tests::topology::{Backend, Lab, Spec};
use felt_netns_tests::traffic::{self, Tcp, Udp};

const SOON: Duration = Duration::from_secs(10);

/// A counter of `/proc/net/netstat` or `/proc/net/snmp`, as `nstat` names it.
fn counter(place: &Place, name: &str) -> u64 {
    let text = ok(place.sh("nstat -asz"));
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name));
    let value = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in:\n{text}"))
}

/// Starts another daemon on node n2 and waits until it serves the node and the one before has ended.
fn upgrade(lab: &mut Lab, round: usize) {
    let mut args = lab.registry_args();
    args.extend(lab.spec.daemon_args.iter().cloned());
    let log = lab.log(&format!("n2-feltd-{round}"));
    let place = lab.nodes[1].place.clone();
    let mut new = ok(Daemon::start(&place, &args, &log));
    ok(new.wait_ready(SOON));
    let mut old = lab.nodes[1].daemon.replace(new).expect("a daemon");
    let status = ok(old.wait_end(SOON));
    assert_eq!(status.code(), Some(0), "{}", old.log_tail(20));
    assert!(old.log_text().contains("handed over to process"), "{}", old.log_tail(20));
    let now = ok(felt_json(&place, &["status"]));
    assert_eq!(now["phase"], "running", "{now}");
}

#[test]
fn a_tcp_stream_through_the_node_notices_nothing_of_twenty_upgrades() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let mut lab = up(Spec::new("t-upgrade", 2).backend(backend).pods(1));
        let lease = check::lease(&lab, 1);
        let (a, b) = (pod(&lab, "p1-1").clone(), pod(&lab, "p2-1").clone());
        let names = ["TcpExtTCPTimeouts", "TcpEstabResets", "TcpOutRsts", "TcpExtTCPAbortOnTimeout"];
        let look = || names.map(|name| counter(&a.place, name) + counter(&b.place, name));
        let before = look();
        std::thread::scope(|s| {
            let stream = s.spawn(|| {
                let how = Tcp { seconds: 12.0, ..Tcp::default() };
                (ok(traffic::tcp(&a.place, &b.place, ok(b.v4()), &how)), Instant::now())
            });
            for round in 0..20 {
                upgrade(&mut lab, round);
            }
            let upgraded = Instant::now();
            let (report, ended) = stream.join().expect("no panic");
            assert!(ended > upgraded, "the stream ended before the last upgrade");
            assert!(report.bytes > 0, "{report:?}");
        });
        assert_eq!(look(), before, "{backend:?}: {names:?}");
        assert_eq!(check::lease(&lab, 1), lease, "subnet, address and MAC");
    }
}

#[test]
fn an_upgrade_loses_and_reorders_no_datagram() {
    let mut lab = up(Spec::new("t-upgrade", 2).pods(1));
    let (a, b) = (pod(&lab, "p1-1").clone(), pod(&lab, "p2-1").clone());
    let how = Udp { size: 200, rate: 2000, seconds: 4.0 };
    let flow = ok(traffic::UdpFlow::start(&a.place, &b.place, ok(b.v4()), &how));
    for round in 0..3 {
        upgrade(&mut lab, round);
    }
    let r = ok(flow.finish());
    assert_eq!((r.received, r.reordered, r.duplicates), (r.sent, 0, 0), "{r:?}");
}

#[test]
fn a_successor_that_serves_something_else_is_refused_and_nothing_stops() {
    let lab = up(Spec::new("t-upgrade", 2).pods(1));
    let place = &lab.nodes[1].place;
    for (extra, word) in [
        ("--workers=3", "workers"),
        ("--subnet-file=/run/flannel/other.env", "is served by another running feltd"),
        ("--handover=refuse", "is served by another running feltd"),
    ] {
        let mut args = lab.registry_args();
        args.extend(lab.spec.daemon_args.iter().cloned());
        args.push(extra.to_owned());
        let mut second = place.command(&format!("{NODE_BIN}/feltd"));
        second.args(&args);
        let out = ok(cmd::output(second, b"", SOON));
        assert_eq!(out.status.code(), Some(1), "{extra}: {}", out.stderr);
        assert!(out.stderr.contains(word), "{extra}: {}", out.stderr);
        let b = ok(pod(&lab, "p2-1").v4());
        assert!(traffic::reaches(&pod(&lab, "p1-1").place, b), "{extra}");
        assert_eq!(ok(felt_json(place, &["status"]))["phase"], "running", "{extra}");
    }
}

#[test]
fn after_a_kill_device_and_routes_stay_and_packets_flow_within_200_ms_of_the_start() {
    let mut lab = up(Spec::new("t-upgrade", 2).pods(1));
    let (a, b) = (pod(&lab, "p1-1").clone(), pod(&lab, "p2-1").clone());
    let place = lab.nodes[1].place.clone();
    let state = || ok(place.sh("ip -o link show flannel.1 | cut -d: -f1,2; ip route show dev flannel.1"));
    let before = state();
    ok(lab.nodes[1].daemon.take().expect("a daemon").kill());
    let routes =
        |text: &str| text.lines().map(|l| l.replace(" linkdown", "").trim().to_owned()).collect::<Vec<_>>();
    assert_eq!(routes(&state()), routes(&before), "device and routes after the kill");
    // Numbered datagrams every millisecond tell when the first one passes.
    let how = Udp { size: 64, rate: 1000, seconds: 3.0 };
    let flow = ok(traffic::UdpFlow::start(&a.place, &b.place, ok(b.v4()), &how));
    let received = || {
        let text = ok(place.sh("ip -j -s link show flannel.1"));
        let links: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        links[0]["stats64"]["rx"]["packets"].as_u64().expect("a count")
    };
    let earlier = received();
    let begun = Instant::now();
    ok(lab.spawn_daemon(1));
    let passed =
        ok(cmd::wait_for("a packet to pass", SOON, || (received() > earlier).then(|| begun.elapsed())));
    let report = ok(flow.finish());
    assert!(report.received > 0, "{report:?}");
    assert!(passed < Duration::from_millis(200), "{passed:?} after the start; {report:?}");
}

#[test]
fn the_service_manager_hears_ready_only_after_subnet_env_and_then_signs_of_life() {
    let mut lab = up(Spec::new("t-notify", 2).pods(1));
    ok(lab.nodes[1].daemon.take().expect("a daemon").stop());
    let place = lab.nodes[1].place.clone();
    let file = place.path(SUBNET_ENV);
    std::fs::remove_file(&file).expect("the file of the run before");
    let manager = UnixDatagram::bind(lab.dir.join("shared/notify")).expect("a socket");
    manager.set_read_timeout(Some(SOON)).expect("a time-out");
    let hear = || {
        let mut text = [0; 200];
        let len = manager.recv(&mut text).expect("a datagram");
        String::from_utf8_lossy(&text[..len]).into_owned()
    };
    let mut command = place.command(&format!("{NODE_BIN}/feltd"));
    command.args(lab.registry_args()).args(&lab.spec.daemon_args);
    command.env("NOTIFY_SOCKET", format!("{NODE_SHARED}/notify")).env("WATCHDOG_USEC", "400000");
    let daemon = ok(place.spawn(command, &lab.log("notify")));
    assert_eq!(hear(), "READY=1");
    assert!(file.exists(), "READY=1 came before {}", file.display());
    let begun = Instant::now();
    for _ in 0..3 {
        assert_eq!(hear(), "WATCHDOG=1");
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    drop(daemon);
}
