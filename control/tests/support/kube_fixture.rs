//! What the Kubernetes registry's tests begin with: an API stub, a configuration file, a manager, and names.

use std::path::Path;

use felt_control::lease::{Lease, LeaseAttrs, SubnetKey};
use felt_control::netconfig::NetworkConfig;
use felt_control::subnet::SubnetManager;
use felt_control::subnet::kube::{KubeConfig, KubeManager, Limits};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::SOON;
use super::kube_api::KubeApi;

pub(crate) const PREFIX: &str = "flannel.alpha.coreos.com";
pub(crate) const V4: &str = r#"{"Network":"10.244.0.0/16","Backend":{"Type":"vxlan"}}"#;
pub(crate) const DUAL: &str = r#"{"Network":"10.244.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:244::/48","Backend":{"Type":"vxlan"}}"#;

/// An API, a configuration file, and a manager for node `n1`.
pub(crate) struct Fixture {
    pub(crate) api: KubeApi,
    pub(crate) dir: TempDir,
}

impl Fixture {
    pub(crate) async fn new(net: &str) -> Fixture {
        let fixture = Fixture { api: KubeApi::start().await, dir: TempDir::new().unwrap() };
        std::fs::write(fixture.net_config(), net).unwrap();
        fixture
    }

    pub(crate) fn net_config(&self) -> std::path::PathBuf {
        self.dir.path().join("net-conf.json")
    }

    pub(crate) fn config(&self) -> KubeConfig {
        KubeConfig {
            api_url: Some(self.api.url()),
            kubeconfig: None,
            annotation_prefix: PREFIX.to_owned(),
            net_config: self.net_config(),
            set_node_network_unavailable: true,
            node_name: Some("n1".to_owned()),
            pod: None,
            limits: Limits::default(),
        }
    }

    pub(crate) fn manager(&self) -> KubeManager {
        KubeManager::new(self.config()).unwrap()
    }

    pub(crate) fn add_own_node(&self) {
        self.api.add_node(
            "n1",
            json!({"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]}),
            json!({}),
        );
    }
}

pub(crate) fn key(text: &str) -> SubnetKey {
    text.parse().unwrap()
}

pub(crate) fn name(key: &str) -> String {
    format!("{PREFIX}/{key}")
}

pub(crate) fn vtep(mac: &str) -> Option<Box<RawValue>> {
    Some(RawValue::from_string(format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#)).unwrap())
}

pub(crate) fn vxlan(n: u8) -> LeaseAttrs {
    LeaseAttrs {
        public_ip: Some([198, 18, 0, n].into()),
        backend_type: "vxlan".to_owned(),
        backend_data: vtep(&format!("02:00:00:00:00:{n:02x}")),
        ..LeaseAttrs::default()
    }
}

pub(crate) fn dual(n: u8) -> LeaseAttrs {
    LeaseAttrs {
        public_ipv6: Some([0xfd77, 0, 0, 0, 0, 0, 0, n.into()].into()),
        backend_v6_data: vtep(&format!("02:06:00:00:00:{n:02x}")),
        ..vxlan(n)
    }
}

/// The annotations of a flannel node.
pub(crate) fn annotations(attrs: &LeaseAttrs) -> Value {
    let mut all = json!({
        name("kube-subnet-manager"): "true",
        name("backend-type"): attrs.backend_type,
        name("backend-data"): attrs.backend_data.as_ref().map_or("null", |data| data.get()),
        name("public-ip"): attrs.public_ip.unwrap().to_string(),
        "volumes.kubernetes.io/controller-managed-attach-detach": "true",
    });
    if let Some(ip) = attrs.public_ipv6 {
        all[name("public-ipv6")] = ip.to_string().into();
        all[name("backend-v6-data")] = attrs.backend_v6_data.as_ref().unwrap().get().into();
    }
    all
}

pub(crate) fn cidr(n: u16) -> Value {
    let cidr = format!("10.244.{n}.0/24");
    json!({"podCIDR": cidr, "podCIDRs": [cidr]})
}

pub(crate) async fn network(manager: &KubeManager) -> NetworkConfig {
    manager.network_config().await.unwrap()
}

pub(crate) async fn acquire(manager: &KubeManager, attrs: &LeaseAttrs) -> Lease {
    let net = network(manager).await;
    tokio::time::timeout(SOON, manager.acquire(&net, attrs, None)).await.expect("in time").unwrap()
}

pub(crate) fn keys(leases: &[Lease]) -> Vec<String> {
    let mut keys: Vec<String> = leases.iter().map(|lease| lease.key.to_string()).collect();
    keys.sort();
    keys
}

/// A kubeconfig whose user has a token file and whose server may be known by an authority.
pub(crate) fn write_kubeconfig(path: &Path, server: &str, token: &Path, ca: Option<&Path>) {
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server, "certificate-authority": ca}}],
        "users": [{"name": "u", "user": {"tokenFile": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    std::fs::write(path, text.to_string()).unwrap();
}
