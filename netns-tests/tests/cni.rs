//! The plugins as a container runtime calls them: chains, repeated and late DELs, parallel ADDs, and a change of the
//! plugins between ADD and DEL. No daemon is needed: where the flannel plugin wants its file, the test writes it.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use felt_netns_tests::check::ok;
use felt_netns_tests::cmd;
use felt_netns_tests::netns::{Lifetime, Place};
use felt_netns_tests::pod::{self, Attachment, NODE_CNI_BIN, PluginError, REFERENCE_CNI_BIN, Runtime};
use felt_netns_tests::snapshot::{Scope, Snapshot};
use felt_netns_tests::topology::{Lab, NodeKind, Spec};
use felt_netns_tests::traffic;
use serde_json::json;

/// A node with felt's plugins and no daemon.
fn node() -> (Lab, Place) {
    let lab = ok(Lab::build(Spec::new("t-cni", 1).kind(0, NodeKind::Bare), Lifetime::Tied));
    let place = lab.nodes[0].place.clone();
    ok(pod::install(&place));
    (lab, place)
}

fn bridge() -> Runtime {
    Runtime::bridge(NODE_CNI_BIN, &["10.244.9.0/24"], 1450)
}

fn write_subnet_env(place: &Place) {
    fs::create_dir_all(place.path("/run/flannel")).expect("create");
    let text = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.9.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
    fs::write(place.path("/run/flannel/subnet.env"), text).expect("write");
}

/// The addresses host-local keeps for a network.
fn reserved(place: &Place) -> BTreeSet<String> {
    let dir = fs::read_dir(place.path("/var/lib/cni/networks/cbr0")).into_iter().flatten().flatten();
    let names = dir.map(|e| e.file_name().to_string_lossy().into_owned());
    names.filter(|n| n.starts_with("10.")).collect()
}

#[test]
fn flannels_conflist_attaches_and_detaches() {
    let (_lab, place) = node();
    write_subnet_env(&place);
    let runtime = Runtime::flannel(NODE_CNI_BIN);
    let (a, b) = (ok(runtime.attach(&place, "a")), ok(runtime.attach(&place, "b")));
    assert!(traffic::reaches(&a.place, ok(b.v4())) && traffic::reaches(&a.place, [10, 244, 9, 1].into()));
    let link = ok(a.place.ip_json("-d link show eth0"));
    assert_eq!(link[0]["mtu"], 1450);
    let route = ok(a.place.ip_json("route show 10.244.0.0/16"));
    assert_eq!(route[0]["gateway"], "10.244.9.1", "{route}");
    ok(runtime.check(&place, &Attachment::of("a")));
    ok(runtime.detach(&place, "a"));
    ok(runtime.detach(&place, "b"));
    assert!(reserved(&place).is_empty());
}

#[test]
fn flannel_without_its_file_says_so_and_del_still_works() {
    let (_lab, place) = node();
    let runtime = Runtime::flannel(NODE_CNI_BIN);
    let text = format!("{:#}", runtime.attach(&place, "a").expect_err("no subnet.env"));
    assert!(text.contains("subnet.env"), "{text}");
    write_subnet_env(&place);
    ok(runtime.attach(&place, "b"));
    fs::remove_file(place.path("/run/flannel/subnet.env")).expect("remove");
    ok(runtime.detach(&place, "b"));
    assert!(reserved(&place).is_empty());
}

#[test]
fn every_spec_version_of_a_list_works() {
    let (_lab, place) = node();
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let mut runtime = bridge();
        runtime.conflist["cniVersion"] = version.into();
        let pod = ok(runtime.attach(&place, "a"));
        assert_eq!(pod.result["cniVersion"], version);
        assert!(traffic::reaches(&pod.place, [10, 244, 9, 1].into()), "{version}");
        ok(runtime.detach(&place, "a"));
    }
}

#[test]
fn a_hundred_attachments_leave_what_one_leaves() {
    let (_lab, place) = node();
    let runtime = bridge();
    ok(runtime.attach(&place, "a"));
    ok(runtime.detach(&place, "a"));
    let once = ok(Snapshot::take(Scope::Node(&place)));
    for _ in 0..100 {
        ok(runtime.attach(&place, "a"));
        ok(runtime.detach(&place, "a"));
    }
    same(&place, &once);
}

#[test]
fn del_in_any_state_succeeds_and_frees_the_address() {
    let (_lab, place) = node();
    let runtime = bridge();
    let at = Attachment::of("a");
    // Never added.
    ok(runtime.del(&place, &at));
    // Twice.
    ok(runtime.attach(&place, "a"));
    ok(runtime.del(&place, &at));
    ok(runtime.del(&place, &at));
    ok(place.run(&["ip", "netns", "del", "a"]));
    // The namespace is gone, its path still given (a reboot), or no longer given.
    for netns in [at.netns.clone(), String::new()] {
        ok(runtime.attach(&place, "a"));
        assert_eq!(reserved(&place).len(), 1);
        ok(place.run(&["ip", "netns", "del", "a"]));
        ok(runtime.del(&place, &Attachment { netns, ..at.clone() }));
        assert!(reserved(&place).is_empty());
    }
}

#[test]
fn check_notices_what_changed() {
    let (_lab, place) = node();
    let runtime = bridge();
    let pod = ok(runtime.attach(&place, "a"));
    let at = Attachment::of("a");
    ok(runtime.check(&place, &at));
    ok(pod.place.ip(&format!("addr del {}/24 dev eth0", ok(pod.v4()))));
    assert!(runtime.check(&place, &at).is_err(), "the address is gone");
    ok(pod.place.ip(&format!("addr add {}/24 dev eth0", ok(pod.v4()))));
    ok(pod.place.ip("link set eth0 down"));
    ok(pod.place.ip("link del eth0"));
    assert!(runtime.check(&place, &at).is_err(), "the link is gone");
}

#[test]
fn thirty_parallel_adds_on_a_fresh_bridge_all_succeed() {
    let (_lab, place) = node();
    let runtime = bridge();
    let addresses: BTreeSet<String> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..30)
            .map(|i| {
                let (runtime, place) = (&runtime, &place);
                s.spawn(move || ok(ok(runtime.attach(place, &format!("p{i}"))).v4()).to_string())
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    });
    assert_eq!(addresses.len(), 30, "{addresses:?}");
    std::thread::scope(|s| {
        for i in 0..30 {
            let (runtime, place) = (&runtime, &place);
            s.spawn(move || ok(runtime.detach(place, &format!("p{i}"))));
        }
    });
    assert!(reserved(&place).is_empty());
}

#[test]
fn a_failed_add_leaves_nothing() {
    let (_lab, place) = node();
    // Two usable addresses of a /30, one of them the gateway's.
    let runtime = Runtime::bridge(NODE_CNI_BIN, &["10.244.9.0/30"], 1450);
    ok(runtime.attach(&place, "a"));
    let before = ok(Snapshot::take(Scope::Node(&place)));
    let error = runtime.attach(&place, "b").expect_err("no address is left");
    let plugin = error.downcast_ref::<PluginError>().expect("a plugin's error");
    assert!(plugin.message.contains("no IP addresses available in range set"), "{plugin}");
    same(&place, &before);
}

#[test]
fn reference_and_felt_take_over_each_others_attachments() {
    let (_lab, place) = node();
    for (adder, deleter) in [
        (REFERENCE_CNI_BIN, REFERENCE_CNI_BIN),
        (NODE_CNI_BIN, REFERENCE_CNI_BIN),
        (REFERENCE_CNI_BIN, NODE_CNI_BIN),
    ] {
        let add = Runtime::bridge(adder, &["10.244.9.0/24"], 1450);
        let del = Runtime::bridge(deleter, &["10.244.9.0/24"], 1450);
        let pod = ok(add.attach(&place, "a"));
        assert!(traffic::reaches(&pod.place, [10, 244, 9, 1].into()), "{adder}");
        // The reference's CHECK refuses any route without gateway, its own ADD's too.
        if deleter == NODE_CNI_BIN {
            ok(del.check(&place, &Attachment::of("a")));
        }
        ok(del.detach(&place, "a"));
        assert!(reserved(&place).is_empty(), "{adder} then {deleter}");
        let ports = ok(place.ip_json("link show master cni0"));
        assert!(ports.as_array().is_none_or(Vec::is_empty), "{ports}");
    }
}

#[test]
fn a_later_plugins_failure_is_rolled_back_by_the_runtime() {
    let (_lab, place) = node();
    let mut runtime = bridge();
    ok(runtime.attach(&place, "first"));
    let before = ok(Snapshot::take(Scope::Node(&place)));
    runtime.conflist["plugins"].as_array_mut().expect("a list").push(json!({"type": "nope"}));
    assert!(runtime.attach(&place, "b").is_err());
    // DEL of the whole list fails at the plugin that does not exist, and the namespace is gone: a runtime that repairs
    // its conflist calls DEL once more.
    ok(bridge().del(&place, &Attachment::of("b")));
    same(&place, &before);
}

/// The node is as in `before`; the kernel may take a moment to remove a dead namespace's links.
fn same(place: &Place, before: &Snapshot) {
    let mut left = Vec::new();
    let gone = cmd::wait_for("the node to be as before", Duration::from_secs(3), || {
        left = before.difference(&ok(Snapshot::take(Scope::Node(place))));
        left.is_empty().then_some(())
    });
    assert!(gone.is_ok(), "{left:#?}");
}
