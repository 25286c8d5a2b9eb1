//! The Kubernetes registry against a real kube-apiserver: what the stub of the other tests may get wrong.
//!
//! `make test-kube` runs these; they need the program.

mod support;

use std::time::{Duration, Instant};

use felt_control::lease::{Event, Lease, LeaseAttrs, WatchResult};
use felt_control::subnet::kube::{KubeConfig, KubeManager, Limits};
use felt_control::subnet::{KeepError, SubnetManager};
use serde_json::{Value, json};

use self::support::apiserver::ApiServer;
use self::support::{Keep, SOON, Watch};

const PREFIX: &str = "flannel.alpha.coreos.com";

fn attrs(n: u8) -> LeaseAttrs {
    let data = format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:00:00:{n:02x}"}}"#);
    LeaseAttrs {
        public_ip: Some([198, 18, 0, n].into()),
        backend_type: "vxlan".to_owned(),
        backend_data: Some(serde_json::value::RawValue::from_string(data).unwrap()),
        ..LeaseAttrs::default()
    }
}

fn annotations(n: u8) -> Value {
    json!({
        format!("{PREFIX}/kube-subnet-manager"): "true",
        format!("{PREFIX}/backend-type"): "vxlan",
        format!("{PREFIX}/backend-data"): attrs(n).backend_data.unwrap().get(),
        format!("{PREFIX}/public-ip"): format!("198.18.0.{n}"),
    })
}

fn spec(a: u16, b: u16) -> Value {
    let cidr = format!("10.{a}.{b}.0/24");
    json!({"podCIDR": cidr, "podCIDRs": [cidr]})
}

/// A manager of node `n1` with flannel's rights.
fn manager(server: &ApiServer) -> (KubeManager, tempfile::TempDir) {
    let dir = tempfile::TempDir::new().unwrap();
    let net_config = dir.path().join("net-conf.json");
    std::fs::write(&net_config, r#"{"Network":"10.0.0.0/8","Backend":{"Type":"vxlan"}}"#).unwrap();
    let config = KubeConfig {
        api_url: None,
        kubeconfig: Some(server.kubeconfig("felt")),
        annotation_prefix: PREFIX.to_owned(),
        net_config,
        set_node_network_unavailable: true,
        node_name: Some("n1".to_owned()),
        pod: None,
        limits: Limits::default(),
    };
    (KubeManager::new(config).unwrap(), dir)
}

async fn acquire(manager: &KubeManager, attrs: &LeaseAttrs) -> Lease {
    let net = manager.network_config().await.unwrap();
    manager.acquire(&net, attrs, None).await.unwrap()
}

/// Waits until the node is as wanted.
async fn node_becomes(server: &ApiServer, what: &str, test: impl Fn(&Value) -> bool) {
    let begin = Instant::now();
    while !test(&server.node("n1").await) {
        assert!(begin.elapsed() < SOON, "never {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn is_available(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|condition| {
        condition["type"] == "NetworkUnavailable"
            && condition["status"] == "False"
            && condition["reason"] == "FlannelIsUp"
    })
}

/// Events until one satisfies `test`; a snapshot counts as its leases added.
async fn reported(watch: &mut Watch, what: &str, test: impl Fn(&Event) -> bool) {
    let begin = Instant::now();
    loop {
        let events = match watch.next().await {
            WatchResult::Events(events) => events,
            WatchResult::Snapshot(leases) => leases.into_iter().map(Event::Added).collect(),
        };
        if events.iter().any(&test) {
            return;
        }
        assert!(begin.elapsed() < SOON, "never reported: {what}");
    }
}

#[tokio::test]
#[ignore = "needs a kube-apiserver: make test-kube"]
async fn a_node_lives_its_life_with_flannels_rights() {
    let mut server = ApiServer::start().await;
    server.add_node("n1", spec(244, 1), json!({"other": "kept"})).await;
    let (manager, _dir) = manager(&server);
    let lease = acquire(&manager, &attrs(1)).await;
    assert_eq!(lease.key.to_string(), "10.244.1.0-24");
    let node = server.node("n1").await;
    let mut wanted = annotations(1);
    wanted["other"] = "kept".into();
    assert_eq!(node["metadata"]["annotations"], wanted);

    let mut keep = Keep::start(&manager, lease);
    node_becomes(&server, "available", is_available).await;
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 1));
    server.add_node("n2", spec(244, 2), annotations(2)).await;
    reported(&mut watch, "n2", |event| matches!(event, Event::Added(lease) if lease.attrs == attrs(2))).await;
    server.edit_node("n2", json!({"metadata": {"annotations": annotations(22)}})).await;
    reported(
        &mut watch,
        "n2 moved",
        |event| matches!(event, Event::Added(lease) if lease.attrs == attrs(22)),
    )
    .await;
    server.delete_node("n2").await;
    reported(
        &mut watch,
        "n2 gone",
        |event| matches!(event, Event::Removed(lease) if lease.attrs == attrs(22)),
    )
    .await;

    // Somebody takes an annotation away.
    let name = format!("{PREFIX}/public-ip");
    server.edit_node("n1", json!({"metadata": {"annotations": {&name: null}}})).await;
    node_becomes(&server, "published again", |node| node["metadata"]["annotations"][&name] == "198.18.0.1")
        .await;

    // The API server goes away and comes back.
    server.stop();
    keep.until("in trouble", |state| state.failures > 0).await;
    server.start_again().await;
    keep.until("kept again", |state| state.failures == 0).await;
    server.add_node("n3", spec(244, 3), annotations(3)).await;
    reported(&mut watch, "n3", |event| matches!(event, Event::Added(lease) if lease.attrs == attrs(3))).await;

    // The node is registered anew, first with its old pod network, then with another.
    server.delete_node("n1").await;
    server.add_node("n1", spec(244, 1), json!({})).await;
    node_becomes(&server, "published again", |node| {
        node["metadata"]["annotations"][&name] == "198.18.0.1" && is_available(node)
    })
    .await;
    server.delete_node("n1").await;
    server.add_node("n1", spec(244, 9), json!({})).await;
    let error = tokio::time::timeout(SOON, keep.task).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, KeepError::Reassigned { .. }), "{error}");
}

#[tokio::test]
#[ignore = "needs a kube-apiserver: make test-kube"]
async fn many_nodes_come_in_pages_and_one_at_a_time() {
    let server = ApiServer::start().await;
    server.add_node("n1", spec(1, 0), json!({})).await;
    let (manager, _dir) = manager(&server);
    for n in 0..450u16 {
        server.add_node(&format!("m{n}"), spec(2 + n / 256, n % 256), annotations((n % 200) as u8)).await;
    }
    let mut watch = Watch::start(&manager);
    assert!(matches!(watch.next().await, WatchResult::Snapshot(leases) if leases.len() == 450));
    assert_eq!(manager.list().await.unwrap().len(), 450);
    for n in 0..20 {
        server.delete_node(&format!("m{n}")).await;
    }
    reported(
        &mut watch,
        "the last one gone",
        |event| matches!(event, Event::Removed(lease) if lease.key.to_string() == "10.2.19.0-24"),
    )
    .await;
    assert_eq!(manager.list().await.unwrap().len(), 430);
}
