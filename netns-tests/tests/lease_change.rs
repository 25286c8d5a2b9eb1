//! What happens in the registry happens in the data path, without a restart and without harm from strange entries.

use std::fs;
use std::time::Duration;

use felt_netns_tests::check::{self, ok, pod, up};
use felt_netns_tests::kernel_node;
use felt_netns_tests::topology::{Backend, Spec};
use felt_netns_tests::traffic;

const SOON: Duration = Duration::from_secs(5);

#[test]
fn a_released_lease_is_answered_by_icmp_and_comes_back() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let mut lab = up(Spec::new("t-lease", 2).backend(backend).pods(1));
        let (a, b) = (pod(&lab, "p1-1").clone(), pod(&lab, "p2-1").clone());
        let before = check::lease(&lab, 1);
        assert_eq!(ok(lab.nodes[1].daemon.take().expect("a daemon").stop()).code(), Some(0));
        let file = lab.lease_dir().join("subnets").join(before.subnet.replace('/', "-"));
        fs::remove_file(&file).expect("the lease's file");
        check::eventually_unreachable(&a.place, ok(b.v4()), SOON);
        ok(lab.start_node(1));
        assert_eq!(check::lease(&lab, 1).subnet, before.subnet);
        check::eventually_reaches(&a.place, ok(b.v4()), SOON);
    }
}

#[test]
fn a_running_daemon_takes_its_deleted_lease_again() {
    let mut lab = up(Spec::new("t-lease", 2).pods(1));
    let before = check::lease(&lab, 1);
    let file = lab.lease_dir().join("subnets").join(before.subnet.replace('/', "-"));
    fs::remove_file(&file).expect("the lease's file");
    ok(felt_netns_tests::cmd::wait_for("the lease to be back", SOON, || file.exists().then_some(())));
    assert_eq!(check::lease(&lab, 1), before);
    assert!(lab.nodes[1].daemon.as_mut().expect("a daemon").alive());
    let b = pod(&lab, "p2-1");
    check::eventually_reaches(&pod(&lab, "p1-1").place, ok(b.v4()), SOON);
}

#[test]
fn foreign_and_broken_entries_disturb_nobody() {
    let lab = up(Spec::new("t-lease", 2).pods(1));
    let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
    let dir = lab.lease_dir().join("subnets");
    for (name, text) in [
        ("foo", "{}"),
        ("10.244.77.0-24", "not json"),
        ("10.244.78.0-24", ""),
        ("10.244.79.0-24", r#"{"PublicIP":"300.1.1.1"}"#),
        ("10.244.80.0-99", r#"{"PublicIP":"198.18.0.99","BackendType":"vxlan"}"#),
        (
            "10.244.81.0-24",
            r#"{"PublicIP":"198.18.0.98","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"zz"}}"#,
        ),
    ] {
        fs::write(dir.join(name), text).expect("write");
    }
    fs::create_dir(dir.join("a-directory")).expect("create");
    std::thread::sleep(Duration::from_millis(500));
    for _ in 0..3 {
        assert!(traffic::reaches(&a.place, ok(b.v4())));
        assert!(traffic::reaches(&b.place, ok(a.v4())));
    }
    check::eventually_unreachable(&a.place, [10, 244, 77, 1].into(), SOON);
}

#[test]
fn a_peer_with_a_new_address_and_mac_is_followed() {
    // The lease of n2 moves to n3's address and back: what was reachable is then not, and again.
    let lab = up(Spec::new("t-lease", 3).pods(1));
    let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
    let lease = check::lease(&lab, 1);
    let value = |ip: String, mac: &str| {
        serde_json::json!({
            "PublicIP": ip, "PublicIPv6": null, "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": mac}, "Expiration": "2099-01-01T00:00:00Z",
        })
        .to_string()
    };
    // A stranger's lease on an unused subnet, first without anybody behind it, then answered by n2's address.
    let strange = "10.244.222.0-24";
    ok(kernel_node::write_lease(&lab, strange, &value("198.18.0.77".to_owned(), "02:00:00:00:00:77")));
    std::thread::sleep(Duration::from_millis(300));
    let before = check::Counts::of(&lab.nodes[1].place);
    ok(kernel_node::write_lease(
        &lab,
        strange,
        &value(lab.nodes[1].ip.to_string(), lease.mac.as_deref().expect("a MAC")),
    ));
    ok(felt_netns_tests::cmd::wait_for("packets to follow the lease", SOON, || {
        let _ = traffic::ping(
            &a.place,
            [10, 244, 222, 5].into(),
            &traffic::Ping { timeout: Duration::from_millis(100), ..traffic::Ping::default() },
        );
        let grown = check::Counts::of(&lab.nodes[1].place).since(&before);
        (grown.get("inbound.packets") > 0).then_some(())
    }));
    assert!(traffic::reaches(&a.place, ok(b.v4())));
}
