//! flannel's node annotations: how a lease is written into and read from them.
//!
//! Invariant: the values are byte for byte what flannel writes, since its string parser for the stored MAC, and its
//! comparison of old and new values, depend on that.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde_json::value::RawValue;
use thiserror::Error;

use crate::gojson::push_compact;
use crate::lease::LeaseAttrs;

/// Annotations of a node.
pub(super) type Annotations = BTreeMap<String, String>;

/// A prefix that makes no valid annotation name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{given:?} is no annotation prefix (--kube-annotation-prefix); it has the form DOMAIN or DOMAIN/NAME in lower case, with a dot in DOMAIN"
)]
pub struct PrefixError {
    given: String,
}

/// What every annotation name starts with: ends with `/` or `-`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Prefix(String);

impl FromStr for Prefix {
    type Err = PrefixError;

    /// flannel's rules (pkg/subnet/kube/annotations.go).
    fn from_str(given: &str) -> Result<Self, PrefixError> {
        let error = || PrefixError { given: given.to_owned() };
        let mut text = given.to_owned();
        match text.matches('/').count() {
            0 => text.push('/'),
            1 => {}
            _ => return Err(error()),
        }
        if !text.ends_with(['/', '-']) {
            text.push('-');
        }
        let (domain, name) = text.split_once('/').ok_or_else(error)?;
        let is_word = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '_' | '-');
        // The end of the domain must be two words with a dot; what is before them does not matter.
        let (rest, last) = domain.rsplit_once('.').ok_or_else(error)?;
        let valid = !last.is_empty()
            && last.chars().all(is_word)
            && rest.ends_with(is_word)
            && name.chars().all(is_word)
            && name != "-";
        valid.then_some(Prefix(text)).ok_or_else(error)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Prefix {
    fn name(&self, key: &str) -> String {
        format!("{}{key}", self.0)
    }

    fn get<'a>(&self, annotations: &'a Annotations, key: &str) -> Option<&'a str> {
        annotations.get(&self.name(key)).map(String::as_str)
    }

    /// Whether the node is one of ours.
    pub(super) fn is_managed(&self, annotations: &Annotations) -> bool {
        self.get(annotations, "kube-subnet-manager") == Some("true")
    }

    /// The annotations that publish `attrs` on a node that has `present`.
    pub(super) fn published(&self, attrs: &LeaseAttrs, present: &Annotations) -> Annotations {
        let kind = attrs.backend_type.as_str();
        let mut wanted = Annotations::new();
        let mut set = |key: &str, value: String| drop(wanted.insert(self.name(key), value));
        set("kube-subnet-manager", "true".to_owned());
        set("backend-type", kind.to_owned());
        if kind != "vxlan" || attrs.backend_data.is_some() {
            set("backend-data", compact(attrs.backend_data.as_deref()));
            let own = attrs.public_ip.unwrap_or(Ipv4Addr::UNSPECIFIED).to_string();
            set("public-ip", self.overwritten(present, "public-ip-overwrite", own));
        }
        let with_v6 = match kind {
            "vxlan" => attrs.backend_v6_data.is_some(),
            "wireguard" => attrs.backend_v6_data.is_some() && attrs.public_ipv6.is_some(),
            // flannel does this for host-gw and extension only; its other types have no IPv6.
            _ => attrs.public_ipv6.is_some(),
        };
        if with_v6 {
            set("backend-v6-data", compact(attrs.backend_v6_data.as_deref()));
            let own = attrs.public_ipv6.map_or_else(String::new, |ip| ip.to_string());
            set("public-ipv6", self.overwritten(present, "public-ipv6-overwrite", own));
        }
        wanted
    }

    fn overwritten(&self, present: &Annotations, key: &str, own: String) -> String {
        self.get(present, key).filter(|value| !value.is_empty()).map_or(own, ToOwned::to_owned)
    }

    /// What a node publishes.
    ///
    /// # Errors
    ///
    /// Names the annotation that is not readable.
    pub(super) fn read(&self, annotations: &Annotations) -> Result<LeaseAttrs, String> {
        let public_ip: Option<Ipv4Addr> = self.address(annotations, "public-ip")?;
        Ok(LeaseAttrs {
            public_ip: public_ip.filter(|ip| !ip.is_unspecified()),
            public_ipv6: self.address(annotations, "public-ipv6")?,
            backend_type: self.get(annotations, "backend-type").unwrap_or_default().to_owned(),
            backend_data: self.data(annotations, "backend-data")?,
            backend_v6_data: self.data(annotations, "backend-v6-data")?,
        })
    }

    /// The addresses an operator set for the node, which win over flags.
    pub(super) fn node_public_ips(
        &self,
        annotations: &Annotations,
    ) -> Result<(Option<Ipv4Addr>, Option<Ipv6Addr>), String> {
        Ok((self.address(annotations, "node-public-ip")?, self.address(annotations, "node-public-ipv6")?))
    }

    fn address<A: FromStr>(&self, annotations: &Annotations, key: &str) -> Result<Option<A>, String> {
        let Some(text) = self.get(annotations, key).filter(|text| !text.is_empty()) else {
            return Ok(None);
        };
        text.parse().map(Some).map_err(|_| format!("annotation {} is no address: {text:?}", self.name(key)))
    }

    fn data(&self, annotations: &Annotations, key: &str) -> Result<Option<Box<RawValue>>, String> {
        let Some(text) = self.get(annotations, key).filter(|text| !matches!(*text, "" | "null")) else {
            return Ok(None);
        };
        RawValue::from_string(text.to_owned())
            .map(Some)
            .map_err(|e| format!("annotation {} is not JSON: {e}", self.name(key)))
    }
}

/// JSON as Go writes it, `null` for none.
fn compact(data: Option<&RawValue>) -> String {
    let mut out = String::new();
    push_compact(&mut out, data.map_or("null", RawValue::get));
    out
}

/// The members of `wanted` that `present` lacks or has with another value.
pub(super) fn changed(wanted: &Annotations, present: &Annotations) -> Annotations {
    let differs = |(key, value): &(&String, &String)| present.get(*key) != Some(*value);
    wanted.iter().filter(differs).map(|(key, value)| (key.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix() -> Prefix {
        "flannel.alpha.coreos.com".parse().unwrap()
    }

    fn raw(text: &str) -> Option<Box<RawValue>> {
        Some(RawValue::from_string(text.to_owned()).unwrap())
    }

    fn texts(annotations: &Annotations) -> Vec<String> {
        annotations
            .iter()
            .map(|(key, value)| format!("{}={value}", key.strip_prefix("flannel.alpha.coreos.com/").unwrap()))
            .collect()
    }

    #[test]
    fn prefix_rules() {
        for (given, used) in [
            ("flannel.alpha.coreos.com", "flannel.alpha.coreos.com/"),
            ("flannel.alpha.coreos.com/", "flannel.alpha.coreos.com/"),
            ("org.com/p", "org.com/p-"),
            ("org.com/p-", "org.com/p-"),
            ("Org.com", "Org.com/"),
        ] {
            assert_eq!(given.parse::<Prefix>().unwrap().to_string(), used);
        }
        for bad in
            ["org", "org/p", "org.COM", "org.com/P", "org.com/a/b", "", "/", ".com", "org.", "org.com/-"]
        {
            assert!(bad.parse::<Prefix>().is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn vxlan_annotations_are_flannels() {
        let mut attrs = LeaseAttrs {
            public_ip: Some([192, 168, 77, 2].into()),
            backend_type: "vxlan".to_owned(),
            backend_data: raw(r#"{"VNI":1, "VtepMAC":"ee:25:24:46:88:02"}"#),
            ..LeaseAttrs::default()
        };
        let none = Annotations::new();
        assert_eq!(
            texts(&prefix().published(&attrs, &none)),
            [
                r#"backend-data={"VNI":1,"VtepMAC":"ee:25:24:46:88:02"}"#,
                "backend-type=vxlan",
                "kube-subnet-manager=true",
                "public-ip=192.168.77.2",
            ]
        );
        attrs.public_ipv6 = Some("fd77::2".parse().unwrap());
        attrs.backend_v6_data = raw(r#"{"VNI":1,"VtepMAC":"72:ce:dc:28:82:8e"}"#);
        let dual = prefix().published(&attrs, &none);
        assert_eq!(dual.len(), 6);
        assert_eq!(prefix().read(&dual).unwrap().encode(), attrs.encode());
        // IPv6 alone leaves the IPv4 group out.
        attrs.backend_data = None;
        attrs.public_ip = None;
        let six = texts(&prefix().published(&attrs, &none));
        assert!(six.iter().all(|text| !text.starts_with("public-ip=") && !text.starts_with("backend-data")));
    }

    #[test]
    fn other_types_write_null_and_unspecified() {
        let attrs = LeaseAttrs { public_ip: Some([192, 168, 77, 2].into()), ..LeaseAttrs::default() };
        let udp = prefix().published(&attrs, &Annotations::new());
        assert_eq!(
            texts(&udp),
            ["backend-data=null", "backend-type=", "kube-subnet-manager=true", "public-ip=192.168.77.2"]
        );
        assert_eq!(prefix().read(&udp).unwrap(), attrs);
        let gw = LeaseAttrs {
            public_ipv6: Some("fd77::2".parse().unwrap()),
            backend_type: "host-gw".to_owned(),
            ..LeaseAttrs::default()
        };
        let gw = texts(&prefix().published(&gw, &Annotations::new()));
        assert!(
            gw.contains(&"public-ip=0.0.0.0".to_owned()) && gw.contains(&"public-ipv6=fd77::2".to_owned())
        );
    }

    #[test]
    fn overwrite_changes_what_is_published() {
        let attrs = LeaseAttrs { public_ip: Some([10, 0, 0, 1].into()), ..LeaseAttrs::default() };
        let present = Annotations::from([(prefix().name("public-ip-overwrite"), "203.0.113.7".to_owned())]);
        let published = prefix().published(&attrs, &present);
        assert_eq!(prefix().read(&published).unwrap().public_ip, Some([203, 0, 113, 7].into()));
        assert_eq!(changed(&published, &published), Annotations::new());
        assert_eq!(changed(&published, &present), published);
    }

    #[test]
    fn unreadable_annotations_are_named() {
        let with = |key: &str, value: &str| Annotations::from([(prefix().name(key), value.to_owned())]);
        for (key, value) in
            [("backend-data", "{VtepMAC:02:00}"), ("public-ip", "not-an-ip"), ("public-ipv6", "10.0.0.1")]
        {
            let error = prefix().read(&with(key, value)).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
        for nothing in ["null", ""] {
            assert_eq!(prefix().read(&with("backend-data", nothing)).unwrap(), LeaseAttrs::default());
        }
    }
}
