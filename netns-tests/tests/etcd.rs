//! felt with a real etcd: what is written, what is survived, and that no two nodes ever get one subnet.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::{Duration, Instant};

use felt_netns_tests::check::{self, ok, pod, up};
use felt_netns_tests::cmd;
use felt_netns_tests::daemon;
use felt_netns_tests::netns::{Lifetime, NODE_BIN, NODE_SHARED, Process};
use felt_netns_tests::topology::{Backend, Lab, NodeKind, Registry, Spec};
use felt_netns_tests::traffic::{self, Udp, UdpFlow};

const SOON: Duration = Duration::from_secs(5);
const SUBNETS: &str = "/coreos.com/network/subnets/";

fn spec(nodes: usize) -> Spec {
    Spec::new("t-etcd", nodes).registry(Registry::Etcd).pods(1)
}

fn key(lab: &Lab, node: usize) -> String {
    format!("{SUBNETS}{}", check::lease(lab, node).subnet.replace('/', "-"))
}

fn etcd(lab: &Lab) -> &felt_netns_tests::etcd::Etcd {
    lab.etcd.as_ref().expect("etcd runs")
}

/// The subnets a daemon knows as peers.
fn peers(lab: &Lab, node: usize) -> BTreeSet<String> {
    let answer = ok(daemon::felt_json(&lab.nodes[node].place, &["peers"]));
    let list = answer["peers"].as_array().expect("a list");
    list.iter().filter_map(|p| p["key"].as_str().map(str::to_owned)).collect()
}

#[test]
fn three_nodes_write_what_flannel_writes() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(spec(3).backend(backend));
        let mut subnets = BTreeSet::new();
        for (i, node) in lab.nodes.iter().enumerate() {
            let lease = check::lease(&lab, i);
            assert!(subnets.insert(lease.subnet.clone()), "{subnets:?} twice {}", lease.subnet);
            let value = ok(etcd(&lab).get(&key(&lab, i))).expect("a value");
            let expected = match backend {
                Backend::Vxlan => format!(
                    r#"{{"PublicIP":"{}","PublicIPv6":null,"BackendType":"vxlan","BackendData":{{"VNI":1,"VtepMAC":"{}"}}}}"#,
                    node.ip,
                    lease.mac.expect("a MAC")
                ),
                Backend::Udp => format!(r#"{{"PublicIP":"{}","PublicIPv6":null}}"#, node.ip),
            };
            assert_eq!(value, expected);
            let raw = ok(etcd(&lab).ctl(&["get", "-w", "json", "--", &key(&lab, i)]));
            let json: serde_json::Value = serde_json::from_str(&raw).expect("JSON");
            assert!(json["kvs"][0]["lease"].is_number(), "the key carries an etcd lease: {json}");
        }
        let pods: Vec<_> = lab.pods().collect();
        for (a, b) in [(0, 1), (1, 2), (2, 0)] {
            check::both_ways(pods[a], pods[b], lab.spec.pod_mtu());
        }
    }
}

#[test]
fn a_lost_lease_is_taken_again_and_a_removed_one_is_followed() {
    let mut lab = up(spec(3));
    let before = check::lease(&lab, 1);
    let (a, b) = (pod(&lab, "p1-1").clone(), pod(&lab, "p2-1").clone());
    // Under the running daemon: back with the same subnet.
    let k = key(&lab, 1);
    let value = ok(etcd(&lab).get(&k)).expect("a value");
    assert!(ok(etcd(&lab).delete(&k)));
    ok(cmd::wait_for("the lease to be back", SOON, || etcd(&lab).get(&k).ok().flatten()));
    assert_eq!(check::lease(&lab, 1), before);
    check::eventually_reaches(&a.place, ok(b.v4()), SOON);
    // With the daemon gone: removed everywhere, and restored by putting it back unchanged.
    assert_eq!(ok(lab.nodes[1].daemon.take().expect("a daemon").stop()).code(), Some(0));
    assert!(ok(etcd(&lab).delete(&k)));
    check::eventually_unreachable(&a.place, ok(b.v4()), SOON);
    ok(etcd(&lab).put(&k, &value));
    let name = k.rsplit('/').next().expect("a name").to_owned();
    ok(cmd::wait_for("n1 to know n2 again", SOON, || peers(&lab, 0).contains(&name).then_some(())));
    ok(lab.start_node(1));
    check::eventually_reaches(&a.place, ok(b.v4()), SOON);
}

#[test]
fn compaction_while_the_daemon_is_paused_loses_no_change() {
    let lab = up(spec(2));
    let etcd = etcd(&lab);
    let value = |n: u8| {
        format!(
            r#"{{"PublicIP":"198.18.0.{n}","PublicIPv6":null,"BackendType":"vxlan","BackendData":{{"VNI":1,"VtepMAC":"02:00:00:00:01:{n:02x}"}}}}"#
        )
    };
    ok(etcd.put(&format!("{SUBNETS}10.244.240.0-24"), &value(40)));
    ok(cmd::wait_for("n1 to know 10.244.240.0-24", SOON, || {
        peers(&lab, 0).contains("10.244.240.0-24").then_some(())
    }));
    let daemon = lab.nodes[0].daemon.as_ref().expect("a daemon");
    daemon.signal("STOP");
    ok(etcd.delete(&format!("{SUBNETS}10.244.240.0-24")).map(drop));
    ok(etcd.put(&format!("{SUBNETS}10.244.241.0-24"), &value(41)));
    ok(etcd.churn(&format!("{SUBNETS}junk"), 100));
    ok(etcd.compact());
    let cpu = ok(daemon.cpu_time());
    let log = daemon.log_text().lines().count();
    daemon.signal("CONT");
    let begun = Instant::now();
    ok(cmd::wait_for("n1 to catch up", SOON, || {
        let now = peers(&lab, 0);
        (now.contains("10.244.241.0-24") && !now.contains("10.244.240.0-24")).then_some(())
    }));
    assert!(begun.elapsed() < Duration::from_secs(3), "took {:?}", begun.elapsed());
    std::thread::sleep(Duration::from_secs(1));
    let used = ok(daemon.cpu_time()) - cpu;
    assert!(used < Duration::from_millis(500), "{used:?} of CPU for one re-list: a busy loop");
    let said = daemon.log_text().lines().count() - log;
    assert!(said < 130, "{said} log lines");
    // And the watch lives on.
    ok(etcd.put(&format!("{SUBNETS}10.244.242.0-24"), &value(42)));
    ok(cmd::wait_for("n1 to know a later lease", SOON, || {
        peers(&lab, 0).contains("10.244.242.0-24").then_some(())
    }));
    let b = pod(&lab, "p2-1");
    check::eventually_reaches(&pod(&lab, "p1-1").place, ok(b.v4()), SOON);
}

#[test]
fn an_outage_longer_than_the_lease_stops_no_traffic() {
    let lab = up(spec(2).arg("--subnet-lease-ttl=4s").arg("--subnet-lease-renew-margin=2s"));
    let before = [check::lease(&lab, 0), check::lease(&lab, 1)];
    let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
    let flow = ok(UdpFlow::start(&a.place, &b.place, ok(b.v4()), &Udp { size: 64, rate: 500, seconds: 9.0 }));
    // A stopped etcd answers nothing while its clocks run on: afterwards the leases are over.
    etcd(&lab).signal("STOP");
    std::thread::sleep(Duration::from_secs(8));
    etcd(&lab).signal("CONT");
    let report = ok(flow.finish());
    // Traffic flows all along. When etcd wakes it drops the leases that are over; until each node has taken its own
    // again, a moment later, the others rightly have no way to it.
    assert!(report.loss() < 0.02 && report.longest_gap < 0.3 && report.reordered == 0, "{report:?}");
    ok(cmd::wait_for("both leases to be back", Duration::from_secs(15), || {
        (ok(etcd(&lab).keys(SUBNETS)).len() == 2).then_some(())
    }));
    // Still there a lease time later: they are renewed.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!([check::lease(&lab, 0), check::lease(&lab, 1)], before);
    check::eventually_reaches(&a.place, ok(b.v4()), SOON);
    for node in &lab.nodes {
        assert!(node.daemon.as_ref().expect("a daemon").alive());
    }
}

#[test]
fn a_killed_etcd_comes_back_and_changes_flow_again() {
    let mut lab = up(spec(2));
    let (a, b) = (pod(&lab, "p1-1").clone(), pod(&lab, "p2-1").clone());
    let etcd = lab.etcd.as_mut().expect("etcd runs");
    etcd.kill();
    std::thread::sleep(Duration::from_secs(2));
    assert!(traffic::reaches(&a.place, ok(b.v4())), "traffic does not need etcd");
    ok(lab.etcd.as_mut().expect("etcd").resume());
    let value = r#"{"PublicIP":"198.18.0.50","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:01:50"}}"#;
    ok(lab.etcd.as_ref().expect("etcd").put(&format!("{SUBNETS}10.244.250.0-24"), value));
    ok(cmd::wait_for("n1 to follow again", Duration::from_secs(15), || {
        peers(&lab, 0).contains("10.244.250.0-24").then_some(())
    }));
}

#[test]
fn one_unparsable_key_disturbs_nobody() {
    let lab = up(spec(2));
    let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
    for (name, value) in [("foo", "x"), ("10.244.9.0-24", "not json"), ("10.244.9.0-99", "{}"), ("", "y")] {
        ok(etcd(&lab).put(&format!("{SUBNETS}{name}"), value));
    }
    std::thread::sleep(Duration::from_millis(500));
    for _ in 0..3 {
        assert!(traffic::reaches(&a.place, ok(b.v4())));
    }
    assert_eq!(peers(&lab, 0).len(), 1);
}

#[test]
fn a_late_config_is_waited_for_and_its_key_named() {
    let mut lab = ok(Lab::build(spec(1).pods(0), Lifetime::Tied));
    ok(lab.start_registry());
    assert!(ok(etcd(&lab).delete("/coreos.com/network/config")));
    ok(lab.spawn_daemon(0));
    std::thread::sleep(Duration::from_secs(2));
    let daemon = lab.nodes[0].daemon.as_mut().expect("a daemon");
    assert!(daemon.alive());
    let log = daemon.log_text();
    assert!(log.contains("/coreos.com/network/config"), "{log}");
    assert!(log.lines().count() < 60, "{log}");
    let config = lab.spec.network_config().to_string();
    ok(etcd(&lab).put("/coreos.com/network/config", &config));
    ok(lab.nodes[0].daemon.as_mut().expect("a daemon").wait_ready(Duration::from_secs(15)));
}

#[test]
fn dead_endpoints_in_the_list_are_passed_over() {
    let mut lab = ok(Lab::build(spec(1).pods(0), Lifetime::Tied));
    ok(lab.start_registry());
    // A closed port, blanks, a trailing comma. The flag given last wins.
    lab.spec
        .daemon_args
        .push("--etcd-endpoints=http://198.18.0.254:4001, http://198.18.0.254:2379,".to_owned());
    ok(lab.start_node(0));
}

#[test]
fn twenty_daemons_at_once_get_twenty_subnets_fifty_times() {
    const DAEMONS: usize = 20;
    let mut s = spec(DAEMONS).pods(0);
    s.nodes = vec![NodeKind::Bare; DAEMONS];
    s.config_keys = serde_json::from_value(serde_json::json!({
        "Network": "10.99.0.0/19", "SubnetLen": 24, "SubnetMin": "10.99.0.0",
    }))
    .expect("an object");
    let mut lab = ok(Lab::build(s, Lifetime::Tied));
    ok(lab.start_registry());
    let go = lab.dir.join("shared/go");
    let args = lab.registry_args().join(" ");
    for round in 0..50 {
        let _ = fs::remove_file(&go);
        // Each node's shell waits at the barrier, then becomes the daemon. A fresh node: no file of an earlier round.
        let script = format!(
            "rm -rf /run/flannel /var/lib/felt; until [ -e {NODE_SHARED}/go ]; do sleep 0.005; done; exec {NODE_BIN}/feltd {args}"
        );
        let running: Vec<Process> = lab
            .nodes
            .iter()
            .map(|n| {
                let mut c = n.place.command("sh");
                c.args(["-c", &script]);
                ok(n.place.spawn(c, &lab.log(&format!("{}-race", n.name))))
            })
            .collect();
        fs::write(&go, "").expect("lift the barrier");
        ok(cmd::wait_for(&format!("round {round}: twenty leases"), Duration::from_secs(30), || {
            for (p, n) in running.iter().zip(&lab.nodes) {
                assert!(p.alive(), "round {round}: feltd on {} ended: {}", n.name, tail(&lab, &n.name));
            }
            (ok(etcd(&lab).keys(SUBNETS)).len() >= DAEMONS).then_some(())
        }));
        let mut owners: BTreeMap<String, String> = BTreeMap::new();
        let leases = ok(felt_netns_tests::kernel_node::leases(&lab));
        for l in leases {
            if let Some(other) = owners.insert(l.public_ip.clone(), l.subnet.clone()) {
                panic!("round {round}: {} owns {other} and {}", l.public_ip, l.subnet);
            }
        }
        assert_eq!(owners.len(), DAEMONS, "round {round}: {owners:?}");
        // The daemons agree with the registry: nobody believes in a subnet that another holds.
        for n in &lab.nodes {
            let env = n.place.path(daemon::SUBNET_ENV);
            let text = ok(cmd::wait_for("subnet.env", SOON, || fs::read_to_string(&env).ok()));
            let believed = text.lines().find_map(|l| l.strip_prefix("FLANNEL_SUBNET=")).expect("a subnet");
            let held = owners.get(&n.ip.to_string()).expect("a lease");
            assert_eq!(believed.replace(".1/24", ".0/24"), *held, "round {round}: {}", n.name);
        }
        drop(running);
        ok(etcd(&lab).ctl(&["del", "--prefix", SUBNETS]));
    }
}

fn tail(lab: &Lab, node: &str) -> String {
    let text = fs::read_to_string(lab.log(&format!("{node}-race"))).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}
