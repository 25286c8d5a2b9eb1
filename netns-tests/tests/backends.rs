//! Backends that leave the packets to the kernel: what they put into its tables, and that it comes back.

use std::net::IpAddr;
use std::time::Duration;

use felt_netns_tests::check::{self, ok, pod, up};
use felt_netns_tests::cmd::wait_for;
use felt_netns_tests::netns::Place;
use felt_netns_tests::topology::{Lab, NodeKind, Spec};

/// Repairs are due within this.
const SOON: Duration = Duration::from_secs(5);

fn kernel_vxlan(nodes: usize) -> Spec {
    Spec::new("t-back", nodes).pods(1).arg("--dataplane=kernel")
}

/// A lab of a backend the lab's own list does not have: `Type` is overwritten. Nothing is waited for but the daemons.
fn of_type(name: &str, nodes: usize) -> Spec {
    let mut spec = Spec::new("t-back", nodes).pods(1);
    spec.backend_keys.insert("Type".to_owned(), name.into());
    spec
}

fn text(place: &Place, command: &str) -> String {
    ok(place.sh(command))
}

/// Waits until the command's output on the node contains the words.
#[track_caller]
fn eventually(place: &Place, command: &str, words: &str) {
    ok(wait_for(&format!("{command:?} on {} to show {words:?}", place.name), SOON, || {
        place.sh(command).is_ok_and(|out| out.contains(words)).then_some(())
    }));
}

#[track_caller]
fn still_joined(lab: &Lab) {
    let (a, b) = (pod(lab, "p1-1"), pod(lab, "p2-1"));
    for to in b.addresses() {
        check::eventually_reaches(&a.place, to, SOON);
    }
}

#[test]
fn kernel_vxlan_puts_in_what_flannel_puts_in() {
    let lab = up(kernel_vxlan(2).dual_stack());
    let (me, peer) = (&lab.nodes[0].place, check::lease(&lab, 1));
    let link = text(me, "ip -d link show flannel.1");
    assert!(
        link.contains("vxlan id 1") && link.contains("nolearning") && link.contains("dstport 8472"),
        "{link}"
    );
    let gateway = peer.subnet.trim_end_matches("/24");
    let (mac, ip) = (peer.mac.as_deref().unwrap(), &peer.public_ip);
    let routes = text(me, "ip route show dev flannel.1");
    assert!(routes.contains(&format!("{} via {gateway} onlink", peer.subnet)), "{routes}");
    let neighbours = text(me, "ip neigh show dev flannel.1");
    assert!(neighbours.contains(&format!("{gateway} lladdr {mac} PERMANENT")), "{neighbours}");
    let fdb = text(me, "bridge fdb show dev flannel.1");
    assert!(fdb.contains(&format!("{mac} dst {ip} self permanent")), "{fdb}");
    check::both_ways(pod(&lab, "p1-1"), pod(&lab, "p2-1"), lab.spec.pod_mtu());
    // Two rounds of the periodic check find nothing to do.
    let repairs = || ok(felt_netns_tests::daemon::felt_json(me, &["status"]))["repairs"].as_u64();
    let before = repairs();
    std::thread::sleep(Duration::from_millis(4500));
    assert_eq!((before, repairs()), (Some(0), Some(0)));
}

#[test]
fn kernel_vxlan_speaks_with_a_node_set_up_by_hand() {
    let lab = up(kernel_vxlan(2).kind(1, NodeKind::Kernel));
    check::both_ways(pod(&lab, "p1-1"), pod(&lab, "p2-1"), lab.spec.pod_mtu());
}

#[test]
fn kernel_vxlan_comes_back_with_everything_on_it() {
    let lab = up(kernel_vxlan(2).dual_stack());
    let me = &lab.nodes[0].place;
    let before = check::lease(&lab, 0);
    for damage in [
        "ip link del flannel.1",
        "ip link del flannel-v6.1",
        "ip link set flannel.1 address 02:00:00:00:00:77",
        "ip link set flannel.1 down",
        "ip addr flush dev flannel.1",
        "ip route flush dev flannel.1",
        "ip -6 route flush dev flannel-v6.1 proto boot",
        "ip neigh flush all nud permanent dev flannel.1",
        "for m in $(bridge fdb show dev flannel.1 | cut -d' ' -f1); do bridge fdb del $m dev flannel.1; done",
    ] {
        let _ = me.sh(damage);
        still_joined(&lab);
        eventually(me, "ip link show flannel.1", before.mac.as_deref().unwrap());
    }
    assert_eq!(check::lease(&lab, 0), before);
}

#[test]
fn strangers_entries_are_left_alone_and_left_overs_go() {
    let mut lab = up(kernel_vxlan(2));
    let me = lab.nodes[0].place.clone();
    assert_eq!(ok(lab.nodes[0].daemon.take().expect("a daemon").stop()).code(), Some(0));
    ok(me.sh(
        "ip route add 192.0.2.0/24 via 198.18.0.77 dev eth0; ip route add 203.0.113.0/24 dev flannel.1; \
              ip neigh add 198.18.0.77 lladdr 02:00:00:00:00:99 dev eth0 nud permanent; \
              ip neigh add 10.244.99.0 lladdr 02:00:00:00:00:98 dev flannel.1 nud permanent; \
              bridge fdb add 02:00:00:00:00:98 dev flannel.1 dst 198.18.0.98; \
              ip route add 10.244.99.0/24 via 10.244.99.0 dev flannel.1 onlink",
    ));
    ok(lab.start_node(0));
    let mut last = String::new();
    let gone = wait_for("the left-overs to go", SOON, || {
        let all = me.sh("ip route; ip neigh; bridge fdb show dev flannel.1").ok()?;
        last.clone_from(&all);
        (!all.contains("10.244.99") && !all.contains("00:98")).then_some(())
    });
    assert!(gone.is_ok(), "still there: {last}");
    let kept = text(&me, "ip route; ip neigh");
    for foreign in ["192.0.2.0/24", "203.0.113.0/24", "198.18.0.77 dev eth0 lladdr"] {
        assert!(kept.contains(foreign), "{foreign} is gone: {kept}");
    }
    still_joined(&lab);
}

#[test]
fn host_gw_routes_come_back_after_a_flap_and_replace_wrong_ones() {
    let lab = up(of_type("host-gw", 2).dual_stack());
    let (me, peer) = (&lab.nodes[0].place, check::lease(&lab, 1));
    let route = format!("{} via {}", peer.subnet, peer.public_ip);
    eventually(me, "ip route", &route);
    check::both_ways(pod(&lab, "p1-1"), pod(&lab, "p2-1"), 1500);
    for damage in [
        format!("ip route del {}", peer.subnet),
        format!("ip route replace {} via 198.18.0.254 dev eth0", peer.subnet),
        "ip link set eth0 down; ip link set eth0 up; ip addr add $(cat /run/ip6)/64 dev eth0 nodad; true"
            .to_owned(),
    ] {
        let _ = me.sh(&format!("echo {} > /run/ip6; {damage}", lab.nodes[0].ip6));
        eventually(me, "ip route", &route);
    }
    let b: IpAddr = ok(pod(&lab, "p2-1").v4());
    check::eventually_reaches(&pod(&lab, "p1-1").place, b, SOON);
}

#[test]
fn direct_routing_goes_around_the_tunnel_in_both_data_planes() {
    for dataplane in ["kernel", "userspace"] {
        let mut spec = Spec::new("t-back", 2).pods(1).arg(&format!("--dataplane={dataplane}"));
        spec.backend_keys.insert("DirectRouting".to_owned(), true.into());
        let lab = up(spec);
        let (me, peer) = (&lab.nodes[0].place, check::lease(&lab, 1));
        eventually(me, "ip route", &format!("{} via {} dev eth0", peer.subnet, peer.public_ip));
        ok(me.sh(&format!("ip route del {}", peer.subnet)));
        eventually(me, "ip route", &format!("{} via {} dev eth0", peer.subnet, peer.public_ip));
        still_joined(&lab);
    }
}

#[test]
fn alloc_takes_a_lease_and_makes_nothing() {
    let mut lab = ok(Lab::build(of_type("alloc", 1).pods(0), felt_netns_tests::netns::Lifetime::Tied));
    ok(lab.start_registry());
    ok(lab.start_node(0));
    assert!(!text(&lab.nodes[0].place, "ip link").contains("flannel"));
    assert!(check::lease(&lab, 0).subnet.starts_with("10.244."));
}
