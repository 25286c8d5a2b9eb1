//! The Kubernetes registry against a stub of the API in this process.

mod support;

use std::time::{Duration, Instant};

use felt_control::lease::{Event, Lease, LeaseAttrs, WatchResult};
use felt_control::subnet::kube::{KubeConfig, KubeConfigError, KubeManager};
use felt_control::subnet::{AcquireError, ConfigError, KeepError, SubnetManager};
use serde_json::json;

use self::support::kube_fixture::{
    DUAL, Fixture, V4, acquire, annotations, cidr, dual, key, keys, name, network, vxlan, write_kubeconfig,
};
use self::support::proxy::Proxy;
use self::support::{Keep, SOON, Watch, eventually};

#[tokio::test]
async fn annotations_and_condition_are_patched_as_flannel_does() {
    let fixture = Fixture::new(V4).await;
    fixture.add_own_node();
    let manager = fixture.manager();
    let lease = acquire(&manager, &vxlan(1)).await;
    assert_eq!((lease.key, lease.expiration), (key("10.244.1.0-24"), None));
    let requests = fixture.api.requests();
    let patch = requests.last().unwrap();
    assert_eq!((patch.method.as_str(), patch.path.as_str()), ("PATCH", "/api/v1/nodes/n1/status"));
    assert_eq!(patch.content_type, "application/strategic-merge-patch+json");
    assert_eq!(
        patch.body,
        r#"{"metadata":{"annotations":{"flannel.alpha.coreos.com/backend-data":"{\"VNI\":1,\"VtepMAC\":\"02:00:00:00:00:01\"}","flannel.alpha.coreos.com/backend-type":"vxlan","flannel.alpha.coreos.com/kube-subnet-manager":"true","flannel.alpha.coreos.com/public-ip":"198.18.0.1"}}}"#
    );
    // A restart changes nothing and finds its MAC.
    fixture.api.forget_requests();
    assert_eq!(manager.own_lease(&LeaseAttrs::default()).await.unwrap().unwrap().attrs, vxlan(1));
    acquire(&manager, &vxlan(1)).await;
    assert_eq!(fixture.api.patches(), Vec::<String>::new());
    // Only what changed is sent.
    let moved = LeaseAttrs { public_ip: Some([198, 18, 0, 9].into()), ..vxlan(1) };
    acquire(&manager, &moved).await;
    assert_eq!(
        fixture.api.patches(),
        [r#"{"metadata":{"annotations":{"flannel.alpha.coreos.com/public-ip":"198.18.0.9"}}}"#]
    );

    fixture.api.forget_requests();
    let keep = Keep::start(&manager, Lease { attrs: moved, ..lease });
    eventually("condition set", || fixture.api.network_unavailable("n1").as_deref() == Some("False")).await;
    let patches = fixture.api.patches();
    assert_eq!(patches.len(), 1, "{patches:?}");
    let time = &patches[0].split(r#""lastHeartbeatTime":""#).nth(1).unwrap()[..20];
    assert!(time.ends_with('Z') && time.parse::<jiff::Timestamp>().is_ok(), "{time}");
    assert_eq!(
        patches[0],
        format!(
            r#"{{"status":{{"conditions":[{{"type":"NetworkUnavailable","status":"False","lastHeartbeatTime":"{time}","lastTransitionTime":"{time}","reason":"FlannelIsUp","message":"Flannel is running on this node"}}]}}}}"#
        )
    );
    keep.stop().await;
}

#[tokio::test]
async fn overwrite_and_stored_addresses_are_honoured() {
    let fixture = Fixture::new(V4).await;
    let set = json!({
        name("public-ip-overwrite"): "203.0.113.7",
        name("node-public-ip"): "192.0.2.1",
        name("node-public-ipv6"): "2001:db8::1",
    });
    fixture.api.add_node("n1", cidr(1), set);
    let manager = fixture.manager();
    let stored = manager.stored_public_ips().await.unwrap();
    assert_eq!(stored, (Some([192, 0, 2, 1].into()), Some("2001:db8::1".parse().unwrap())));
    let lease = acquire(&manager, &vxlan(1)).await;
    assert_eq!(lease.attrs, vxlan(1));
    assert_eq!(fixture.api.annotation("n1", &name("public-ip")).unwrap(), "203.0.113.7");
    // The keeper does not fight the operator.
    let keep = Keep::start(&manager, lease);
    fixture.api.edit_node("n1", |node| {
        node["metadata"]["annotations"][name("public-ip-overwrite")] = "203.0.113.8".into();
    });
    eventually("published", || {
        fixture.api.annotation("n1", &name("public-ip")).as_deref() == Some("203.0.113.8")
    })
    .await;
    keep.stop().await;
    fixture.api.edit_node("n1", |node| {
        node["metadata"]["annotations"][name("node-public-ip")] = "nonsense".into();
    });
    let error = manager.stored_public_ips().await.unwrap_err().to_string();
    assert!(error.contains("node-public-ip") && error.contains("nonsense"), "{error}");
}

#[tokio::test]
async fn node_name_comes_from_the_environment_or_from_the_pod() {
    let fixture = Fixture::new(V4).await;
    fixture.api.add_node("node-7", cidr(7), json!({}));
    fixture.api.add_pod("kube-flannel", "felt-abc", "node-7");
    let with = |vars: &'static [(&str, &str)]| {
        let var =
            |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        fixture.config().with_environment(var)
    };
    let config = with(&[("POD_NAME", "felt-abc"), ("POD_NAMESPACE", "kube-flannel")]).unwrap();
    let manager = KubeManager::new(config).unwrap();
    assert_eq!(acquire(&manager, &vxlan(1)).await.key, key("10.244.7.0-24"));
    let asked = fixture.api.requests();
    assert_eq!(asked.iter().filter(|request| request.path.contains("/pods/")).count(), 1);

    let config = with(&[("NODE_NAME", "node-7"), ("EVENT_QUEUE_DEPTH", "5000")]).unwrap();
    assert_eq!(config.node_name.as_deref(), Some("node-7"));
    let config = with(&[("POD_NAME", "felt-abc"), ("POD_NAMESPACE", "")]).unwrap();
    assert_eq!(KubeManager::new(config).unwrap_err(), KubeConfigError::NoNodeName);
    assert!(matches!(with(&[("EVENT_QUEUE_DEPTH", "many")]), Err(KubeConfigError::QueueDepth(_))));
    let bad = KubeConfig { annotation_prefix: "org".to_owned(), ..fixture.config() };
    assert!(matches!(KubeManager::new(bad).unwrap_err(), KubeConfigError::Prefix(_)));
}

#[tokio::test]
async fn late_pod_cidr_is_waited_for() {
    let fixture = Fixture::new(V4).await;
    fixture.api.add_node("n1", json!({}), json!({}));
    let manager = fixture.manager();
    let net = network(&manager).await;
    let waiting = tokio::spawn(async move { manager.acquire(&net, &vxlan(1), None).await });
    eventually("asked twice", || fixture.api.requests().len() >= 2).await;
    assert!(!waiting.is_finished());
    fixture.api.edit_node("n1", |node| node["spec"] = cidr(3));
    let lease = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(lease.key, key("10.244.3.0-24"));
}

#[tokio::test]
async fn unfit_pod_cidr_is_an_error_before_anything_is_published() {
    for (net, spec, parts) in [
        (V4, json!({"podCIDR": "10.99.1.0/24"}), ["10.99.1.0/24", "Network"]),
        (V4, json!({"podCIDR": "10.0.0.0/8"}), ["10.0.0.0/8", "Network"]),
        (DUAL, cidr(1), ["IPv6", "podCIDR"]),
        (DUAL, json!({"podCIDRs": ["10.244.1.0/24", "fd01::/64"]}), ["fd01::/64", "IPv6Network"]),
        (V4, json!({"podCIDRs": ["10.244.1.0/24", "fd00::/64", "fd01::/64"]}), ["more than two", "n1"]),
    ] {
        let fixture = Fixture::new(net).await;
        fixture.api.add_node("n1", spec, json!({}));
        let manager = fixture.manager();
        let error = manager.acquire(&network(&manager).await, &dual(1), None).await.unwrap_err();
        assert!(matches!(error, AcquireError::Unassigned(_)), "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert_eq!(fixture.api.patches(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn dual_stack_takes_both_families_whatever_their_order() {
    let fixture = Fixture::new(DUAL).await;
    let spec = json!({"podCIDR": "fd00:244:0:1::/64", "podCIDRs": ["fd00:244:0:1::/64", "10.244.1.0/24"]});
    fixture.api.add_node("n1", spec, json!({}));
    let lease = acquire(&fixture.manager(), &dual(1)).await;
    assert_eq!(lease.key, key("10.244.1.0-24&fd00:244:0:1::-64"));
    assert_eq!(fixture.api.annotation("n1", &name("public-ipv6")).unwrap(), "fd77::1");
    assert_eq!(
        fixture.api.annotation("n1", &name("backend-v6-data")).unwrap(),
        r#"{"VNI":1,"VtepMAC":"02:06:00:00:00:01"}"#
    );
}

#[tokio::test]
async fn config_file_problems_name_the_file() {
    let fixture = Fixture::new("").await;
    let manager = fixture.manager();
    let path = fixture.net_config();
    for content in ["", "null", "[]", r#"{"EnableIPv6":true,"Network":"10.244.0.0/16"}"#] {
        std::fs::write(&path, content).unwrap();
        let error = manager.network_config().await.unwrap_err();
        assert!(matches!(error, ConfigError::Invalid { .. }), "{content}: {error}");
        assert!(error.to_string().contains("net-conf.json"), "{error}");
        assert!(!content.contains("IPv6") || error.to_string().contains("IPv6Network"), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(manager.network_config().await.unwrap_err(), ConfigError::Missing { .. }));
    std::fs::create_dir(&path).unwrap();
    assert!(manager.network_config().await.unwrap_err().to_string().contains("directory"));
}

#[tokio::test]
async fn watch_reports_nodes_and_passes_over_those_it_cannot_read() {
    let fixture = Fixture::new(V4).await;
    let api = &fixture.api;
    api.add_node("a", cidr(1), annotations(&vxlan(1)));
    api.add_node("plain", cidr(2), json!({}));
    let mut broken = annotations(&vxlan(3));
    broken[name("backend-data")] = "{VtepMAC:02:00}".into();
    api.add_node("broken", cidr(3), broken);
    let mut watch = Watch::start(&fixture.manager());
    let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
    assert_eq!(keys(&leases), ["10.244.1.0-24"]);
    assert_eq!(leases[0].attrs, vxlan(1));

    // Still unreadable, in other ways; then repaired.
    for (annotation, value) in [("public-ip", "not-an-ip"), ("backend-data", "{"), ("public-ip", "")] {
        api.edit_node("broken", |node| node["metadata"]["annotations"][name(annotation)] = value.into());
    }
    api.send_nonsense();
    api.edit_node("broken", |node| node["metadata"]["annotations"] = annotations(&vxlan(3)));
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!((added.key, added.attrs), (key("10.244.3.0-24"), vxlan(3)));

    // A node that becomes unreadable, or loses its annotations, keeps its lease; a heartbeat is no event.
    api.edit_node("a", |node| node["metadata"]["annotations"][name("backend-data")] = "{".into());
    api.edit_node("a", |node| node["metadata"]["annotations"] = json!({}));
    api.edit_node("broken", |node| {
        node["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}])
    });
    api.edit_node("plain", |node| node["metadata"]["annotations"] = annotations(&vxlan(2)));
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!(added.key, key("10.244.2.0-24"));

    // Another pod network under the same name.
    api.edit_node("plain", |node| node["spec"] = cidr(22));
    match watch.next().await {
        WatchResult::Events(events) => {
            let texts: Vec<String> = events
                .iter()
                .map(|event| match event {
                    Event::Added(lease) => format!("+{}", lease.key),
                    Event::Removed(lease) => format!("-{}", lease.key),
                })
                .collect();
            assert_eq!(texts, ["-10.244.2.0-24", "+10.244.22.0-24"]);
        }
        other => panic!("{other:?}"),
    }
    api.delete_node("a");
    let Event::Removed(removed) = watch.event().await else { panic!("not removed") };
    assert_eq!((removed.key, removed.attrs), (key("10.244.1.0-24"), vxlan(1)));
    watch.cancel.cancel();
}

#[tokio::test]
async fn update_of_one_family_is_noticed_in_dual_stack() {
    let fixture = Fixture::new(DUAL).await;
    let spec = json!({"podCIDRs": ["10.244.2.0/24", "fd00:244:0:2::/64"]});
    fixture.api.add_node("b", spec, annotations(&dual(2)));
    let mut watch = Watch::start(&fixture.manager());
    let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
    assert_eq!(keys(&leases), ["10.244.2.0-24&fd00:244:0:2::-64"]);
    fixture
        .api
        .edit_node("b", |node| node["metadata"]["annotations"][name("public-ip")] = "198.18.0.99".into());
    let Event::Added(added) = watch.event().await else { panic!("not added") };
    assert_eq!(added.attrs.public_ip, Some([198, 18, 0, 99].into()));
    assert_eq!(added.attrs.public_ipv6, dual(2).public_ipv6);
}

#[tokio::test]
async fn history_that_is_gone_is_made_up_for() {
    for as_event in [false, true] {
        let fixture = Fixture::new(V4).await;
        for n in 1..4 {
            fixture.api.add_node(&format!("n{n}"), cidr(n), annotations(&vxlan(n as u8)));
        }
        let mut watch = Watch::start(&fixture.manager());
        assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 3));
        // Nobody hears of the deletion: the watches end before it and find their version gone after it.
        fixture.api.fail("GET", "/api/v1/nodes", 500, 1);
        fixture.api.end_watches();
        fixture.api.delete_node("n2");
        fixture.api.compact(as_event);
        let WatchResult::Snapshot(leases) = watch.next().await else { panic!("no snapshot") };
        assert_eq!(keys(&leases), ["10.244.1.0-24", "10.244.3.0-24"]);
        fixture.api.add_node("n5", cidr(5), annotations(&vxlan(5)));
        assert!(matches!(watch.event().await, Event::Added(lease) if lease.attrs == vxlan(5)));
    }
}

#[tokio::test]
async fn bookmarks_move_the_watch_on() {
    let fixture = Fixture::new(V4).await;
    let mut watch = Watch::start(&fixture.manager());
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.is_empty()));
    let is_watch = |path: &str| path.contains("watch=true");
    eventually("watching", || fixture.api.requests().iter().any(|request| is_watch(&request.path))).await;
    let version = fixture.api.bookmark();
    // Another change, so that the bookmark has surely been read.
    fixture.api.add_node("b", cidr(2), annotations(&vxlan(2)));
    watch.event().await;
    fixture.api.forget_requests();
    fixture.api.end_watches();
    eventually("watching again", || fixture.api.requests().iter().any(|request| is_watch(&request.path)))
        .await;
    let request = fixture.api.requests().into_iter().find(|request| is_watch(&request.path)).unwrap();
    assert!(request.path.contains("allowWatchBookmarks=true"), "{}", request.path);
    assert!(request.path.contains(&format!("resourceVersion={}", version + 1)), "{}", request.path);
    assert!(fixture.api.requests().iter().all(|request| is_watch(&request.path)));
}

#[tokio::test]
async fn long_lists_come_in_pages() {
    let fixture = Fixture::new(r#"{"Network":"10.0.0.0/8"}"#).await;
    for n in 0..1100u16 {
        let cidr = format!("10.{}.{}.0/24", n / 256, n % 256);
        fixture.api.add_node(&format!("n{n}"), json!({ "podCIDR": cidr }), annotations(&vxlan(n as u8)));
    }
    let manager = fixture.manager();
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 1100));
    let pages = fixture.api.requests().into_iter().filter(|request| request.path.contains("limit=")).count();
    assert_eq!(pages, 6);
    assert_eq!(manager.list().await.unwrap().len(), 1100);
}

#[tokio::test]
async fn rotated_token_is_read_again() {
    let fixture = Fixture::new(V4).await;
    fixture.add_own_node();
    let token = fixture.dir.path().join("token");
    std::fs::write(&token, "old").unwrap();
    let kubeconfig = fixture.dir.path().join("kubeconfig");
    write_kubeconfig(&kubeconfig, &fixture.api.url(), &token, None);
    let config = KubeConfig { api_url: None, kubeconfig: Some(kubeconfig), ..fixture.config() };
    fixture.api.require_token("old");
    let manager = KubeManager::new(config).unwrap();
    let lease = acquire(&manager, &vxlan(1)).await;
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 1));
    let mut keep = Keep::start(&manager, lease);
    eventually("condition set", || fixture.api.network_unavailable("n1").is_some()).await;

    fixture.api.require_token("new");
    keep.until("in trouble", |state| state.failures > 1).await;
    let error = keep.state.borrow().last_error.clone().unwrap();
    assert!(error.contains("Unauthorized"), "{error}");
    std::fs::write(&token, "new").unwrap();
    keep.until("kept again", |state| state.failures == 0).await;
    fixture.api.add_node("n2", cidr(2), annotations(&vxlan(2)));
    assert!(matches!(watch.event().await, Event::Added(lease) if lease.attrs == vxlan(2)));
    keep.stop().await;
}

#[tokio::test]
async fn outage_of_the_api_loses_nothing() {
    let fixture = Fixture::new(V4).await;
    fixture.add_own_node();
    fixture.api.add_node("n2", cidr(2), annotations(&vxlan(2)));
    let proxy = Proxy::start(fixture.api.port()).await;
    let config = KubeConfig { api_url: Some(proxy.endpoint()), ..fixture.config() };
    let manager = KubeManager::new(config).unwrap();
    let lease = acquire(&manager, &vxlan(1)).await;
    let mut keep = Keep::start(&manager, lease);
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 2));
    eventually("condition set", || fixture.api.network_unavailable("n1").is_some()).await;
    proxy.cut();
    keep.until("in trouble", |state| state.failures > 2).await;
    fixture.api.delete_node("n2");
    fixture.api.add_node("n3", cidr(3), annotations(&vxlan(3)));
    proxy.mend();
    keep.until("kept again", |state| state.failures == 0).await;
    let mut seen = Vec::new();
    while seen.len() < 2 {
        match watch.next().await {
            WatchResult::Events(events) => seen.extend(events),
            WatchResult::Snapshot(_) => panic!("the history was still there"),
        }
    }
    assert!(matches!(&seen[0], Event::Removed(lease) if lease.attrs == vxlan(2)));
    assert!(matches!(&seen[1], Event::Added(lease) if lease.attrs == vxlan(3)));
    keep.stop().await;
}

#[tokio::test]
async fn node_deleted_and_registered_again_is_published_again() {
    let fixture = Fixture::new(V4).await;
    fixture.add_own_node();
    let manager = fixture.manager();
    let lease = acquire(&manager, &vxlan(1)).await;
    let keep = Keep::start(&manager, lease.clone());
    eventually("condition set", || fixture.api.network_unavailable("n1").is_some()).await;
    fixture.api.delete_node("n1");
    fixture.api.add_node("n1", json!({}), json!({}));
    fixture.api.edit_node("n1", |node| node["spec"] = cidr(1));
    eventually("published again", || fixture.api.annotation("n1", &name("public-ip")).is_some()).await;
    eventually("condition set", || fixture.api.network_unavailable("n1").is_some()).await;

    // With another pod network it is another lease.
    fixture.api.delete_node("n1");
    fixture.api.add_node("n1", cidr(9), json!({}));
    let error = tokio::time::timeout(SOON, keep.task).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, KeepError::Reassigned { .. }), "{error}");
    assert!(error.to_string().contains("10.244.9.0-24"), "{error}");
    assert_eq!(fixture.api.annotation("n1", &name("public-ip")), None);
}

#[tokio::test]
async fn annotations_and_condition_changed_by_others_are_put_right() {
    let fixture = Fixture::new(V4).await;
    fixture.add_own_node();
    let manager = fixture.manager();
    let lease = acquire(&manager, &vxlan(1)).await;
    let keep = Keep::start(&manager, lease);
    eventually("condition set", || fixture.api.network_unavailable("n1").as_deref() == Some("False")).await;
    fixture.api.edit_node("n1", |node| node["metadata"]["annotations"] = json!({"other": "kept"}));
    eventually("published again", || fixture.api.annotation("n1", &name("backend-data")).is_some()).await;
    assert_eq!(fixture.api.annotation("n1", "other").as_deref(), Some("kept"));
    fixture.api.edit_node("n1", |node| {
        node["status"]["conditions"] =
            json!([{"type": "NetworkUnavailable", "status": "True", "reason": "NoRouteCreated"}]);
    });
    eventually("condition set", || fixture.api.network_unavailable("n1").as_deref() == Some("False")).await;
    // New attributes published meanwhile are not written back.
    let moved = LeaseAttrs { public_ip: Some([198, 18, 0, 9].into()), ..vxlan(1) };
    acquire(&manager, &moved).await;
    fixture.api.edit_node("n1", |node| node["status"]["conditions"] = json!([]));
    eventually("condition set", || fixture.api.network_unavailable("n1").is_some()).await;
    assert_eq!(fixture.api.annotation("n1", &name("public-ip")).as_deref(), Some("198.18.0.9"));
    keep.stop().await;
}

#[tokio::test]
async fn condition_is_tried_again_and_can_be_left_alone() {
    let fixture = Fixture::new(V4).await;
    fixture.add_own_node();
    let manager = fixture.manager();
    let lease = acquire(&manager, &vxlan(1)).await;
    fixture.api.fail("PATCH", "/status", 500, 3);
    let mut keep = Keep::start(&manager, lease.clone());
    keep.until("in trouble", |state| state.failures > 1).await;
    eventually("condition set", || fixture.api.network_unavailable("n1").is_some()).await;
    keep.until("kept", |state| state.failures == 0).await;
    keep.stop().await;

    fixture.api.forget_requests();
    let config = KubeConfig { set_node_network_unavailable: false, ..fixture.config() };
    let quiet = KubeManager::new(config).unwrap();
    fixture.api.edit_node("n1", |node| node["status"]["conditions"] = json!([]));
    let keep = Keep::start(&quiet, lease);
    eventually("watching", || {
        fixture.api.requests().iter().any(|request| request.path.contains("watch=true"))
    })
    .await;
    keep.stop().await;
    assert_eq!(fixture.api.patches(), Vec::<String>::new());
}

#[tokio::test]
async fn missing_rights_are_named() {
    let fixture = Fixture::new(V4).await;
    fixture.add_own_node();
    let manager = fixture.manager();
    let net = network(&manager).await;
    fixture.api.fail("PATCH", "/status", 403, 1);
    let begin = Instant::now();
    let error = manager.acquire(&net, &vxlan(1), None).await.unwrap_err().to_string();
    assert!(begin.elapsed() < Duration::from_secs(2), "retried what time does not heal");
    assert!(error.contains("patch nodes/status") && error.contains("RBAC"), "{error}");
    fixture.api.fail("GET", "/api/v1/nodes", 403, 1);
    let error = manager.list().await.unwrap_err().to_string();
    assert!(error.contains("list nodes") && error.contains("RBAC"), "{error}");

    // A condition that may not be set does not end anything.
    let lease = acquire(&manager, &vxlan(1)).await;
    fixture.api.fail("PATCH", "/status", 403, usize::MAX);
    let keep = Keep::start(&manager, lease);
    eventually("refused", || fixture.api.patches().iter().any(|body| body.contains("conditions"))).await;
    let refused = fixture.api.patches().len();
    fixture.api.edit_node("n1", |node| node["status"]["conditions"] = json!([]));
    eventually("watching", || {
        fixture.api.requests().iter().any(|request| request.path.contains("watch=true"))
    })
    .await;
    assert_eq!(keep.state.borrow().failures, 0);
    assert_eq!(fixture.api.patches().len(), refused);
    fixture.api.heal();
    keep.stop().await;
    let error = manager.remove(&key("10.244.1.0-24")).await.unwrap_err().to_string();
    assert!(error.contains("Kubernetes assigns"), "{error}");
}

#[tokio::test]
async fn unreachable_api_is_an_error_in_time() {
    let fixture = Fixture::new(V4).await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config = KubeConfig { api_url: Some(format!("http://{closed}")), ..fixture.config() };
    let manager = KubeManager::new(config).unwrap();
    let error = manager.list().await.unwrap_err().to_string();
    assert!(error.contains("list nodes") && error.contains("refused"), "{error}");
    assert!(manager.name().contains(&closed.to_string()));
}
