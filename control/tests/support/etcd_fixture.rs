//! What the etcd registry's tests begin with: a server with a configuration, managers, keys and leases of others.

use std::time::{Duration, Instant};

use etcd_client::{Client, PutOptions};
use felt_control::lease::{Lease, LeaseAttrs, SubnetKey, WatchResult};
use felt_control::netconfig::NetworkConfig;
use felt_control::subnet::SubnetManager;
use felt_control::subnet::etcd::{EtcdConfig, EtcdManager};
use felt_control::subnet::term::Term;
use serde_json::value::RawValue;

use super::etcd::EtcdServer;
use super::{SOON, Watch};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const PREFIX: &str = "/coreos.com/network";

pub(crate) fn config(endpoint: &str) -> EtcdConfig {
    EtcdConfig {
        endpoints: vec![endpoint.to_owned()],
        prefix: PREFIX.to_owned(),
        cafile: None,
        certfile: None,
        keyfile: None,
        user: None,
    }
}

pub(crate) fn manager(endpoint: &str) -> EtcdManager {
    with_term(endpoint, Term::default())
}

pub(crate) fn with_term(endpoint: &str, term: Term) -> EtcdManager {
    EtcdManager::new(config(endpoint), term).unwrap()
}

pub(crate) fn key(text: &str) -> SubnetKey {
    text.parse().unwrap()
}

pub(crate) fn name(key: impl std::fmt::Display) -> String {
    format!("{PREFIX}/subnets/{key}")
}

pub(crate) fn attrs(n: u8) -> LeaseAttrs {
    LeaseAttrs { public_ip: Some([198, 18, 0, n].into()), ..LeaseAttrs::default() }
}

pub(crate) fn vxlan(n: u8, mac: &str) -> LeaseAttrs {
    let data = format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#);
    LeaseAttrs {
        backend_type: "vxlan".to_owned(),
        backend_data: Some(RawValue::from_string(data).unwrap()),
        ..attrs(n)
    }
}

/// A server with a configuration of 31 leasable /24 subnets.
pub(crate) async fn server() -> (EtcdServer, Client) {
    let server = EtcdServer::start();
    let mut client = server.client().await;
    put(&mut client, &format!("{PREFIX}/config"), r#"{"Network":"10.50.0.0/19"}"#).await;
    (server, client)
}

pub(crate) async fn put(client: &mut Client, name: &str, value: &str) {
    client.put(name, value, None).await.unwrap();
}

/// Puts a lease of another node, as flannel does it.
pub(crate) async fn put_lease(client: &mut Client, key: &str, n: u8) {
    let granted = client.lease_grant(86_400, None).await.unwrap().id();
    let options = PutOptions::new().with_lease(granted);
    client.put(name(key), attrs(n).encode(), Some(options)).await.unwrap();
}

/// Value, etcd lease and mod revision of a lease key.
pub(crate) async fn stored(client: &mut Client, key: &SubnetKey) -> Option<(String, i64, i64)> {
    let answer = client.get(name(key), None).await.unwrap();
    let kv = answer.kvs().first()?;
    Some((kv.value_str().unwrap().to_owned(), kv.lease(), kv.mod_revision()))
}

pub(crate) async fn network(manager: &EtcdManager) -> NetworkConfig {
    manager.network_config().await.unwrap()
}

pub(crate) async fn acquire(manager: &EtcdManager, n: u8) -> Lease {
    manager.acquire(&network(manager).await, &attrs(n), None).await.unwrap()
}

/// Waits for the next result that satisfies `test`, passing over others.
pub(crate) async fn reported(watch: &mut Watch, what: &str, test: impl Fn(&WatchResult) -> bool) {
    let begin = Instant::now();
    while !test(&watch.next().await) {
        assert!(begin.elapsed() < SOON, "never reported: {what}");
    }
}
