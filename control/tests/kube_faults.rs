//! The Kubernetes registry when the API refuses, hangs, falls silent, is restored or exchanged; and exactly what is sent.

mod support;

use std::time::{Duration, Instant};

use felt_control::lease::{Event, LeaseAttrs, WatchResult};
use felt_control::subnet::SubnetManager;
use felt_control::subnet::kube::{KubeConfig, KubeManager, Limits};
use serde_json::json;
use serde_json::value::RawValue;

use self::support::kube_api::{KubeApi, Tls};
use self::support::kube_fixture::{
    DUAL, Fixture, V4, acquire, annotations, cidr, dual, key, keys, name, network, vxlan, write_kubeconfig,
};
use self::support::{Keep, SOON, Watch, certs::Certs, eventually};

const SIX: &str =
    r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:244::/48","Backend":{"Type":"vxlan"}}"#;

fn watches(api: &KubeApi) -> usize {
    api.requests().iter().filter(|request| request.path.contains("watch=true")).count()
}

#[tokio::test]
async fn every_kind_of_node_is_patched_byte_for_byte() {
    let plain = |n| LeaseAttrs { backend_type: String::new(), backend_data: None, ..vxlan(n) };
    let host_gw = |attrs: LeaseAttrs| LeaseAttrs {
        backend_type: "host-gw".to_owned(),
        backend_data: None,
        backend_v6_data: None,
        ..attrs
    };
    let extension = LeaseAttrs {
        backend_type: "extension".to_owned(),
        backend_data: Some(RawValue::from_string(r#" "a < b & c" "#.to_owned()).unwrap()),
        ..vxlan(1)
    };
    let six = LeaseAttrs { public_ip: None, backend_data: None, ..dual(1) };
    for (net, attrs, body) in [
        (
            V4,
            plain(1),
            r#"P/backend-data":"null","P/backend-type":"","P/kube-subnet-manager":"true","P/public-ip":"198.18.0.1""#,
        ),
        (
            V4,
            host_gw(vxlan(1)),
            r#"P/backend-data":"null","P/backend-type":"host-gw","P/kube-subnet-manager":"true","P/public-ip":"198.18.0.1""#,
        ),
        (
            V4,
            extension,
            r#"P/backend-data":"\"a \\u003c b \\u0026 c\"","P/backend-type":"extension","P/kube-subnet-manager":"true","P/public-ip":"198.18.0.1""#,
        ),
        (
            DUAL,
            dual(1),
            r#"P/backend-data":"{\"VNI\":1,\"VtepMAC\":\"02:00:00:00:00:01\"}","P/backend-type":"vxlan","P/backend-v6-data":"{\"VNI\":1,\"VtepMAC\":\"02:06:00:00:00:01\"}","P/kube-subnet-manager":"true","P/public-ip":"198.18.0.1","P/public-ipv6":"fd77::1""#,
        ),
        (
            DUAL,
            host_gw(dual(1)),
            r#"P/backend-data":"null","P/backend-type":"host-gw","P/backend-v6-data":"null","P/kube-subnet-manager":"true","P/public-ip":"198.18.0.1","P/public-ipv6":"fd77::1""#,
        ),
        (
            SIX,
            six,
            r#"P/backend-type":"vxlan","P/backend-v6-data":"{\"VNI\":1,\"VtepMAC\":\"02:06:00:00:00:01\"}","P/kube-subnet-manager":"true","P/public-ipv6":"fd77::1""#,
        ),
    ] {
        let fixture = Fixture::new(net).await;
        let spec = json!({"podCIDRs": ["10.244.1.0/24", "fd00:244:0:1::/64"]});
        fixture.api.add_node("n1", spec, json!({}));
        let manager = fixture.manager();
        let lease = acquire(&manager, &attrs).await;
        let body = body.replace("P/", "flannel.alpha.coreos.com/");
        assert_eq!(fixture.api.patches(), [format!(r#"{{"metadata":{{"annotations":{{"{body}}}}}}}"#)]);
        // A second node reads what was written, and this one publishes nothing twice.
        assert_eq!(manager.list().await.unwrap()[0].key, lease.key);
        assert_eq!(manager.list().await.unwrap()[0].attrs.encode(), attrs.encode());
        fixture.api.forget_requests();
        acquire(&manager, &attrs).await;
        assert_eq!(fixture.api.patches(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn a_network_without_ipv4_takes_the_ipv6_pod_cidr_alone() {
    let fixture = Fixture::new(SIX).await;
    let spec = json!({"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:244:0:1::/64"]});
    fixture.api.add_node("n1", spec, json!({}));
    let manager = fixture.manager();
    let six = LeaseAttrs { public_ip: None, backend_data: None, ..dual(1) };
    let lease = acquire(&manager, &six).await;
    assert_eq!(lease.key, key("0.0.0.0-0&fd00:244:0:1::-64"));
    // The IPv4 pod network is of no interest, also when it changes.
    let mut keep = Keep::start(&manager, lease);
    eventually("condition set", || fixture.api.network_unavailable("n1").is_some()).await;
    fixture.api.edit_node("n1", |node| {
        node["spec"]["podCIDRs"] = json!(["10.244.9.0/24", "fd00:244:0:1::/64"]);
        node["metadata"]["annotations"] = json!({});
    });
    eventually("published again", || fixture.api.annotation("n1", &name("public-ipv6")).is_some()).await;
    keep.until("kept", |state| state.failures == 0).await;
    keep.stop().await;
}

#[tokio::test]
async fn each_refused_right_is_named_and_its_grant_noticed() {
    let fixture = Fixture::new(V4).await;
    fixture.add_own_node();
    fixture.api.add_pod("kube-flannel", "felt-abc", "n1");
    let manager = fixture.manager();
    let net = network(&manager).await;
    let fast =
        |begin: Instant| assert!(begin.elapsed() < Duration::from_secs(2), "retried: {:?}", begin.elapsed());

    fixture.api.fail("GET", "/api/v1/nodes/n1", 403, 1);
    let begin = Instant::now();
    let error = manager.stored_public_ips().await.unwrap_err().to_string();
    fast(begin);
    assert!(error.contains("get nodes (n1)") && error.contains("RBAC"), "{error}");

    let pod = Some(("kube-flannel".to_owned(), "felt-abc".to_owned()));
    let by_pod = KubeManager::new(KubeConfig { node_name: None, pod, ..fixture.config() }).unwrap();
    fixture.api.fail("GET", "/pods/", 403, 1);
    let begin = Instant::now();
    let error = by_pod.acquire(&net, &vxlan(1), None).await.unwrap_err().to_string();
    fast(begin);
    assert!(
        error.contains("get pods (felt-abc in namespace kube-flannel)") && error.contains("RBAC"),
        "{error}"
    );

    // Listing and watching go on being tried, since whoever forgot the right may grant it.
    let lease = acquire(&by_pod, &vxlan(1)).await;
    fixture.api.fail("GET", "watch=true", 403, usize::MAX);
    let mut keep = Keep::start(&manager, lease);
    keep.until("refused", |state| {
        state.last_error.as_ref().is_some_and(|error| error.contains("list and watch nodes (n1)"))
    })
    .await;
    let error = keep.state.borrow().last_error.clone().unwrap();
    assert!(error.contains("RBAC"), "{error}");
    fixture.api.heal();
    keep.until("kept", |state| state.failures == 0).await;
    keep.stop().await;
}

#[tokio::test]
async fn a_node_published_beforehand_needs_no_right_to_patch() {
    let fixture = Fixture::new(V4).await;
    fixture.api.add_node("n1", cidr(1), annotations(&vxlan(1)));
    fixture.api.fail("PATCH", "/status", 403, usize::MAX);
    let config = KubeConfig { set_node_network_unavailable: false, ..fixture.config() };
    let manager = KubeManager::new(config).unwrap();
    let lease = acquire(&manager, &vxlan(1)).await;
    let keep = Keep::start(&manager, lease);
    eventually("watching", || watches(&fixture.api) > 0).await;
    assert_eq!(fixture.api.patches(), Vec::<String>::new());
    keep.stop().await;
}

#[tokio::test]
async fn a_hanging_api_is_given_up_in_time_and_found_again() {
    let fixture = Fixture::new(V4).await;
    fixture.add_own_node();
    let limits = Limits { request: Duration::from_millis(400), ..Limits::default() };
    let manager = KubeManager::new(KubeConfig { limits, ..fixture.config() }).unwrap();
    fixture.api.hang(true);
    let begin = Instant::now();
    let error = manager.list().await.unwrap_err().to_string();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert!(error.contains("list nodes: no answer within 400ms"), "{error}");
    fixture.api.hang(false);
    acquire(&manager, &vxlan(1)).await;
    assert_eq!(Limits::default().request, Duration::from_secs(15));
}

#[tokio::test]
async fn a_watch_that_falls_silent_is_begun_again() {
    let fixture = Fixture::new(V4).await;
    let limits = Limits { silence: Duration::from_millis(500), ..Limits::default() };
    let manager = KubeManager::new(KubeConfig { limits, ..fixture.config() }).unwrap();
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.is_empty()));
    eventually("watching", || watches(&fixture.api) == 1).await;
    // The connection stands, and no event comes over it any more.
    fixture.api.mute(true);
    fixture.api.add_node("n2", cidr(2), annotations(&vxlan(2)));
    eventually("watching again", || watches(&fixture.api) > 1).await;
    fixture.api.mute(false);
    assert!(matches!(watch.event().await, Event::Added(lease) if lease.attrs == vxlan(2)));
}

#[tokio::test]
async fn an_api_restored_from_a_backup_is_listed_again() {
    let fixture = Fixture::new(V4).await;
    for n in 1..5 {
        fixture.api.add_node(&format!("n{n}"), cidr(n), annotations(&vxlan(n as u8)));
    }
    let mut watch = Watch::start(&fixture.manager());
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 4));
    // The backup is older than n4; watches from the lost future are accepted and would stay silent for long.
    fixture.api.delete_node("n4");
    assert!(matches!(watch.event().await, Event::Removed(_)));
    let before = watches(&fixture.api);
    fixture.api.restore_backup();
    eventually("watching again", || watches(&fixture.api) > before).await;
    fixture.api.bookmark();
    let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
    assert_eq!(keys(&leases), ["10.244.1.0-24", "10.244.2.0-24", "10.244.3.0-24"]);
    fixture.api.add_node("n5", cidr(5), annotations(&vxlan(5)));
    assert!(matches!(watch.event().await, Event::Added(lease) if lease.attrs == vxlan(5)));
}

#[tokio::test]
async fn a_rotated_authority_and_a_new_token_are_read_again() {
    let certs = Certs::get();
    let tls = Tls::new(&certs.path("server.pem"), &certs.path("server.key"));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let api = KubeApi::on(listener, Some(std::sync::Arc::clone(&tls)));
    let fixture = Fixture { api, ..Fixture::new(V4).await };
    fixture.add_own_node();
    let path = |name: &str| fixture.dir.path().join(name);
    std::fs::copy(certs.path("ca.pem"), path("ca.crt")).unwrap();
    std::fs::write(path("token"), "old").unwrap();
    fixture.api.require_token("old");
    let url = fixture.api.url().replace("http://", "https://");
    write_kubeconfig(&path("kubeconfig"), &url, &path("token"), Some(&path("ca.crt")));
    let config = KubeConfig { api_url: None, kubeconfig: Some(path("kubeconfig")), ..fixture.config() };
    let manager = KubeManager::new(config).unwrap();
    let lease = acquire(&manager, &vxlan(1)).await;
    let mut keep = Keep::start(&manager, lease);
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 1));
    eventually("condition set", || fixture.api.network_unavailable("n1").is_some()).await;

    // Another authority signs; the old connections end with the server's old process.
    tls.exchange(&certs.path("other-server.pem"), &certs.path("other-server.key"));
    fixture.api.require_token("new");
    keep.until("refused", |state| state.failures > 1).await;
    std::fs::write(path("token"), "new").unwrap();
    keep.until("distrusting", |state| {
        state.last_error.as_ref().is_some_and(|error| error.to_lowercase().contains("certificate"))
    })
    .await;
    std::fs::copy(certs.path("other-ca.pem"), path("ca.crt")).unwrap();
    keep.until("kept again", |state| state.failures == 0).await;
    fixture.api.add_node("n2", cidr(2), annotations(&vxlan(2)));
    assert!(matches!(watch.event().await, Event::Added(lease) if lease.attrs == vxlan(2)));
    keep.stop().await;
}

#[tokio::test]
async fn five_thousand_large_nodes_are_listed_in_pages_and_followed() {
    let fixture = Fixture::new(r#"{"Network":"10.0.0.0/8","Backend":{"Type":"vxlan"}}"#).await;
    // As large as real ones, whose images and labels nobody here needs.
    let images: Vec<_> = (0..50)
        .map(|n| json!({"names": [format!("registry.example/image-{n}@sha256:{}", "0".repeat(64))], "sizeBytes": n}))
        .collect();
    for n in 0..5000u16 {
        let node = format!("n{n}");
        fixture.api.add_node(
            &node,
            json!({"podCIDR": format!("10.{}.{}.0/24", n / 256, n % 256)}),
            annotations(&vxlan(n as u8)),
        );
        fixture.api.edit_node_quietly(&node, |node| node["status"]["images"] = json!(images));
    }
    let begin = Instant::now();
    let mut watch = Watch::start(&fixture.manager());
    let snapshot = tokio::time::timeout(SOON, watch.rx.recv()).await.expect("in time").unwrap();
    assert!(matches!(snapshot, WatchResult::Snapshot(leases) if leases.len() == 5000));
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    let pages =
        fixture.api.requests().into_iter().filter(|request| request.path.contains("limit=200")).count();
    assert_eq!(pages, 25);
    // A burst of heartbeats and one change in it.
    for n in 0..200 {
        fixture
            .api
            .edit_node(&format!("n{n}"), |node| node["status"]["conditions"][0]["status"] = "False".into());
    }
    fixture.api.edit_node("n77", |node| node["metadata"]["annotations"] = annotations(&vxlan(99)));
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!((added.key, added.attrs), (key("10.0.77.0-24"), vxlan(99)));
}
