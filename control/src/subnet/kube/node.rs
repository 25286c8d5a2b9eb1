//! The few fields of a Kubernetes node that matter here, and the lease they amount to.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::Deserialize;

use super::annotations::{Annotations, Prefix};
use crate::lease::{Lease, SubnetKey};

/// A node, as much of it as is used; the rest of its JSON is never kept.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Node {
    pub(super) metadata: Meta,
    pub(super) spec: Spec,
    pub(super) status: Status,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Meta {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) resource_version: String,
    pub(super) annotations: Option<Annotations>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Spec {
    #[serde(rename = "podCIDR")]
    pub(super) pod_cidr: String,
    #[serde(rename = "podCIDRs")]
    pub(super) pod_cidrs: Option<Vec<String>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) conditions: Option<Vec<Condition>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    pub(super) reason: String,
}

/// One page of a list.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct NodeList {
    pub(super) metadata: ListMeta,
    pub(super) items: Vec<Node>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ListMeta {
    pub(super) resource_version: String,
    #[serde(rename = "continue")]
    pub(super) next: Option<String>,
}

/// The pod networks of a node, by family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PodCidrs {
    pub(super) v4: Option<Ipv4Net>,
    pub(super) v6: Option<Ipv6Net>,
}

impl Node {
    pub(super) fn annotations(&self) -> &Annotations {
        static NONE: Annotations = Annotations::new();
        self.metadata.annotations.as_ref().unwrap_or(&NONE)
    }

    /// The pod networks, picked by family whatever their order; nothing while none is assigned.
    ///
    /// # Errors
    ///
    /// When one does not parse or there are more than two.
    pub(super) fn pod_cidrs(&self) -> Result<PodCidrs, String> {
        let several = self.spec.pod_cidrs.as_deref().unwrap_or_default();
        if several.len() > 2 {
            return Err(format!("node {} has more than two podCIDRs", self.metadata.name));
        }
        let one = std::slice::from_ref(&self.spec.pod_cidr);
        let texts = if several.is_empty() { one } else { several };
        let mut cidrs = PodCidrs::default();
        for text in texts.iter().filter(|text| !text.is_empty()) {
            match text.parse::<IpNet>() {
                Ok(IpNet::V4(net)) => cidrs.v4 = Some(net.trunc()),
                Ok(IpNet::V6(net)) => cidrs.v6 = Some(net.trunc()),
                Err(_) => return Err(format!("node {} has a bad podCIDR {text:?}", self.metadata.name)),
            }
        }
        Ok(cidrs)
    }

    /// The lease of a node of ours in a network of these families; `None` for a node without annotations.
    ///
    /// A family counts when the node has a pod network of it and published how it is reached.
    ///
    /// # Errors
    ///
    /// Says what is missing or unreadable.
    pub(super) fn lease(&self, prefix: &Prefix, v4: bool, v6: bool) -> Result<Option<Lease>, String> {
        if !prefix.is_managed(self.annotations()) {
            return Ok(None);
        }
        let attrs = prefix.read(self.annotations())?;
        let cidrs = self.pod_cidrs()?;
        // udp carries IPv6 over the IPv4 underlay where there is one.
        let reached_v6 =
            attrs.public_ipv6.is_some() || attrs.backend_type.is_empty() && attrs.public_ip.is_some();
        let key = SubnetKey::new(
            cidrs.v4.filter(|_| v4 && attrs.public_ip.is_some()),
            cidrs.v6.filter(|_| v6 && reached_v6),
        );
        let key = key.ok_or("it has no podCIDR and public address of an enabled family")?;
        Ok(Some(Lease { key, attrs, expiration: None }))
    }

    /// Whether a controller's note that the network is not there yet still stands.
    pub(super) fn network_unavailable(&self) -> bool {
        let conditions = self.status.conditions.as_deref().unwrap_or_default();
        let condition = conditions.iter().find(|condition| condition.kind == "NetworkUnavailable");
        condition.is_none_or(|condition| condition.status != "False" || condition.reason != "FlannelIsUp")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(spec: &str, annotations: &str) -> Node {
        let text = format!(
            r#"{{"kind":"Node","metadata":{{"name":"n1","labels":{{"a":"b"}},"annotations":{annotations}}},"spec":{spec},"status":{{"images":[]}}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    fn prefix() -> Prefix {
        "f.io".parse().unwrap()
    }

    const DUAL: &str = r#"{"f.io/kube-subnet-manager":"true","f.io/public-ip":"10.0.0.1","f.io/public-ipv6":"fd77::1","f.io/backend-type":"vxlan","f.io/backend-data":"null"}"#;

    #[test]
    fn pod_cidrs_are_picked_by_family() {
        let both = r#"{"podCIDR":"fd00:50:1::/64","podCIDRs":["fd00:50:1::/64","10.50.1.0/24"]}"#;
        let cidrs = node(both, "null").pod_cidrs().unwrap();
        assert_eq!(cidrs.v4.unwrap().to_string(), "10.50.1.0/24");
        assert_eq!(cidrs.v6.unwrap().to_string(), "fd00:50:1::/64");
        let one = node(r#"{"podCIDR":"10.50.1.0/24"}"#, "null").pod_cidrs().unwrap();
        assert_eq!((one.v4.is_some(), one.v6.is_some()), (true, false));
        assert_eq!(node("{}", "null").pod_cidrs().unwrap(), PodCidrs::default());
        assert_eq!(node(r#"{"podCIDRs":null}"#, "null").pod_cidrs().unwrap(), PodCidrs::default());
        for bad in [r#"{"podCIDRs":["10.0.0.0/8","fd00::/64","fd01::/64"]}"#, r#"{"podCIDR":"10.0.0/8"}"#] {
            node(bad, "null").pod_cidrs().unwrap_err();
        }
    }

    #[test]
    fn lease_has_the_families_that_are_complete() {
        let spec = r#"{"podCIDRs":["10.50.1.0/24","fd00:50:1::/64"]}"#;
        let key = |spec: &str, annotations: &str, v4, v6| {
            node(spec, annotations).lease(&prefix(), v4, v6).map(|lease| lease.unwrap().key.to_string())
        };
        assert_eq!(key(spec, DUAL, true, true).unwrap(), "10.50.1.0-24&fd00:50:1::-64");
        assert_eq!(key(spec, DUAL, true, false).unwrap(), "10.50.1.0-24");
        assert_eq!(key(spec, DUAL, false, true).unwrap(), "0.0.0.0-0&fd00:50:1::-64");
        let four = DUAL.replace(r#""f.io/public-ipv6":"fd77::1","#, "");
        assert_eq!(key(spec, &four, true, true).unwrap(), "10.50.1.0-24");
        key(spec, &four, false, true).unwrap_err();
        let udp = four.replace("vxlan", "");
        assert_eq!(key(spec, &udp, true, true).unwrap(), "10.50.1.0-24&fd00:50:1::-64");
        key("{}", DUAL, true, true).unwrap_err();
        let foreign = DUAL.replace("true", "yes");
        assert!(node(spec, &foreign).lease(&prefix(), true, true).unwrap().is_none());
        assert!(node(spec, "null").lease(&prefix(), true, true).unwrap().is_none());
    }
}
