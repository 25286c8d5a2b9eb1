//! Leases: who owns which subnet of the overlay network, and how changes of that are told.
//!
//! The text forms are flannel's to the byte (`pkg/lease/lease.go`, `pkg/subnet/subnet.go`), because flannel nodes read
//! what we write: [`SubnetKey`] is the last part of an etcd key, [`LeaseAttrs`] its JSON value. [`LeaseSet`] turns what a
//! registry's watch reports into the changes a backend has to apply.
//!
//! Invariant: a [`LeaseSet`] never reports the node's own subnet, and never reports a lease as added whose attributes
//! it has reported already.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::SystemTime;

use ipnet::{Ipv4Net, Ipv6Net};
use serde_json::value::RawValue;

use crate::gojson::{Object, push_compact};

/// What a node publishes about itself beside its subnet.
#[derive(Debug, Clone, Default)]
pub struct LeaseAttrs {
    /// Underlay IPv4 address; flannel writes `0.0.0.0` for none.
    pub public_ip: Option<Ipv4Addr>,
    /// Underlay IPv6 address; flannel writes `null` for none.
    pub public_ipv6: Option<Ipv6Addr>,
    /// `vxlan`, `host-gw`, ...; empty for `udp` and `alloc`.
    pub backend_type: String,
    /// The backend's own data for IPv4, any JSON value.
    pub backend_data: Option<Box<RawValue>>,
    /// The backend's own data for IPv6, any JSON value.
    pub backend_v6_data: Option<Box<RawValue>>,
}

/// Why a lease value could not be read.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The value is not one JSON object, or a member has the wrong type.
    #[error("lease value is no valid JSON object: {0}")]
    Json(#[from] serde_json::Error),
    /// An address does not parse.
    #[error("lease value has an invalid {field}: {value}")]
    Address {
        /// Name of the JSON member.
        field: &'static str,
        /// The JSON text found there.
        value: String,
    },
}

impl LeaseAttrs {
    /// The JSON text flannel writes: fixed member order, no spaces, `PublicIPv6` always present, empty members left
    /// out, and `< > &` and the two Unicode line separators escaped inside the backend data.
    pub fn encode(&self) -> String {
        let mut out = String::with_capacity(160);
        out.push_str("{\"PublicIP\":\"");
        let _ = write!(out, "{}", self.public_ip.unwrap_or(Ipv4Addr::UNSPECIFIED));
        out.push_str("\",\"PublicIPv6\":");
        match self.public_ipv6 {
            Some(ip) => drop(write!(out, "\"{ip}\"")),
            None => out.push_str("null"),
        }
        if !self.backend_type.is_empty() {
            out.push_str(",\"BackendType\":");
            let quoted = serde_json::Value::String(self.backend_type.clone()).to_string();
            push_compact(&mut out, &quoted);
        }
        for (name, data) in [("BackendData", &self.backend_data), ("BackendV6Data", &self.backend_v6_data)] {
            if let Some(data) = data {
                let _ = write!(out, ",\"{name}\":");
                push_compact(&mut out, data.get());
            }
        }
        out.push('}');
        out
    }

    /// Reads a value written by any flannel or felt node (keys without regard to case, last one wins, unknown ones
    /// ignored, a missing `PublicIP` reads as none).
    ///
    /// # Errors
    /// See [`DecodeError`]; the caller skips such an entry and says so once.
    pub fn decode(text: &str) -> Result<Self, DecodeError> {
        Self::from_object(&Object::parse(text)?)
    }

    /// As [`LeaseAttrs::decode`] for an object that is parsed already, so that a registry can read further members.
    ///
    /// # Errors
    /// See [`DecodeError`].
    pub fn from_object(object: &Object) -> Result<Self, DecodeError> {
        let public_ip: Option<Ipv4Addr> = match object.raw("PublicIP") {
            Some(raw) => Some(parse_address("PublicIP", raw)?),
            None => None,
        };
        let public_ipv6 = match object.raw("PublicIPv6") {
            Some(raw) if raw.get() != "null" => Some(parse_address("PublicIPv6", raw)?),
            _ => None,
        };
        Ok(Self {
            public_ip: public_ip.filter(|ip| !ip.is_unspecified()),
            public_ipv6,
            backend_type: object.field("BackendType")?.unwrap_or_default(),
            backend_data: object.raw("BackendData").map(ToOwned::to_owned),
            backend_v6_data: object.raw("BackendV6Data").map(ToOwned::to_owned),
        })
    }
}

/// Equal when the published text is equal.
impl PartialEq for LeaseAttrs {
    fn eq(&self, other: &Self) -> bool {
        fn text(data: Option<&RawValue>) -> Option<&str> {
            data.map(RawValue::get)
        }
        self.public_ip == other.public_ip
            && self.public_ipv6 == other.public_ipv6
            && self.backend_type == other.backend_type
            && text(self.backend_data.as_deref()) == text(other.backend_data.as_deref())
            && text(self.backend_v6_data.as_deref()) == text(other.backend_v6_data.as_deref())
    }
}
impl Eq for LeaseAttrs {}

fn parse_address<A: FromStr>(field: &'static str, raw: &RawValue) -> Result<A, DecodeError> {
    serde_json::from_str::<String>(raw.get())
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| DecodeError::Address { field, value: raw.get().to_owned() })
}

/// The subnet or pair of subnets a lease covers; its text form is flannel's key, `10.5.34.0-24`,
/// `10.7.52.0-24&fd00:7:0:58::-64`, or for IPv6 alone `0.0.0.0-0&fd00:7:0:58::-64`.
///
/// At least one family is present and host bits are zero, so one key has exactly one text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SubnetKey {
    /// IPv4 subnet.
    pub v4: Option<Ipv4Net>,
    /// IPv6 subnet.
    pub v6: Option<Ipv6Net>,
}

impl SubnetKey {
    /// A key of the families given, masked to their network addresses; `None` when both are missing.
    pub fn new(v4: Option<Ipv4Net>, v6: Option<Ipv6Net>) -> Option<Self> {
        let key = Self { v4: v4.map(|net| net.trunc()), v6: v6.map(|net| net.trunc()) };
        (key.v4.is_some() || key.v6.is_some()).then_some(key)
    }

    /// Whether any address belongs to both keys.
    pub fn overlaps(&self, other: &Self) -> bool {
        let v4 = self.v4.zip(other.v4).is_some_and(|(a, b)| a.contains(&b) || b.contains(&a));
        let v6 = self.v6.zip(other.v6).is_some_and(|(a, b)| a.contains(&b) || b.contains(&a));
        v4 || v6
    }

    /// Whether both name the same subnet in at least one family; so the IPv4-only key a node held before it became
    /// dual-stack counts as the node's own.
    pub fn shares_subnet(&self, other: &Self) -> bool {
        self.v4.is_some() && self.v4 == other.v4 || self.v6.is_some() && self.v6 == other.v6
    }
}

impl fmt::Display for SubnetKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.v4 {
            Some(net) => write!(f, "{}-{}", net.addr(), net.prefix_len())?,
            None => f.write_str("0.0.0.0-0")?,
        }
        match self.v6 {
            Some(net) => write!(f, "&{}-{}", net.addr(), net.prefix_len()),
            None => Ok(()),
        }
    }
}

/// Why a text is no subnet key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{text}\" is no subnet key, expected ADDRESS-LENGTH or ADDRESS-LENGTH&ADDRESS6-LENGTH with host bits zero"
)]
pub struct ParseKeyError {
    text: String,
}

impl FromStr for SubnetKey {
    type Err = ParseKeyError;

    fn from_str(text: &str) -> Result<Self, ParseKeyError> {
        parse_key(text)
            .filter(|key| key.to_string() == text)
            .ok_or_else(|| ParseKeyError { text: text.chars().take(120).collect() })
    }
}

fn parse_key(text: &str) -> Option<SubnetKey> {
    fn net<A: FromStr>(part: &str) -> Option<(A, u8)> {
        let (addr, len) = part.rsplit_once('-')?;
        Some((addr.parse().ok()?, len.parse().ok()?))
    }
    let (part4, part6) = text.split_once('&').map_or((text, None), |(a, b)| (a, Some(b)));
    let v4 = match net::<Ipv4Addr>(part4)? {
        (Ipv4Addr::UNSPECIFIED, 0) => None,
        (addr, len) => Some(Ipv4Net::new(addr, len).ok()?),
    };
    let v6 = match part6 {
        Some(part) => net::<Ipv6Addr>(part).and_then(|(addr, len)| Ipv6Net::new(addr, len).ok()).map(Some)?,
        None => None,
    };
    // Masking here makes the caller's comparison with the canonical text refuse host bits.
    SubnetKey::new(v4, v6)
}

/// One node's claim on its subnet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// What is leased.
    pub key: SubnetKey,
    /// Who holds it and how to reach it.
    pub attrs: LeaseAttrs,
    /// When it ends unless renewed; `None` is a reservation that never ends.
    pub expiration: Option<SystemTime>,
}

/// A change of the set of leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A new lease, or new attributes of a known one.
    Added(Lease),
    /// The lease is gone; the attributes are those last known.
    Removed(Lease),
}

/// What a registry's watch delivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchResult {
    /// Changes since the last delivery. An empty list means nothing.
    Events(Vec<Event>),
    /// The whole truth, at start and after every gap.
    Snapshot(Vec<Lease>),
}

/// All leases of other nodes as far as reported.
#[derive(Debug, Clone, Default)]
pub struct LeaseSet {
    own: Option<SubnetKey>,
    known: BTreeMap<SubnetKey, Lease>,
}

impl LeaseSet {
    /// An empty set that leaves out `own`.
    pub fn new(own: Option<SubnetKey>) -> Self {
        Self { own, known: BTreeMap::new() }
    }

    /// Leases of other nodes, in key order.
    pub fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.known.values()
    }

    /// How many other nodes hold a lease.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether no other node holds a lease.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The lease of `key`, if known.
    pub fn get(&self, key: &SubnetKey) -> Option<&Lease> {
        self.known.get(key)
    }

    /// Takes in what a watch delivered and returns what changed by it.
    ///
    /// A lease whose attributes are unchanged (a renewal) is stored and not reported. A removal of something unknown
    /// is reported with the attributes delivered, so that left-overs of an earlier run can be taken away by it.
    pub fn apply(&mut self, result: WatchResult) -> Vec<Event> {
        match result {
            WatchResult::Events(events) => {
                events.into_iter().filter_map(|event| self.update(event)).collect()
            }
            WatchResult::Snapshot(leases) => self.reset(leases),
        }
    }

    fn is_own(&self, key: &SubnetKey) -> bool {
        self.own.is_some_and(|own| own.shares_subnet(key))
    }

    fn update(&mut self, event: Event) -> Option<Event> {
        match event {
            Event::Added(lease) | Event::Removed(lease) if self.is_own(&lease.key) => None,
            Event::Added(lease) => self.add(lease),
            Event::Removed(lease) => Some(Event::Removed(self.known.remove(&lease.key).unwrap_or(lease))),
        }
    }

    fn add(&mut self, lease: Lease) -> Option<Event> {
        let previous = self.known.insert(lease.key, lease.clone());
        let changed = previous.is_none_or(|previous| previous.attrs != lease.attrs);
        changed.then_some(Event::Added(lease))
    }

    fn reset(&mut self, snapshot: Vec<Lease>) -> Vec<Event> {
        let next: BTreeMap<_, _> = snapshot
            .into_iter()
            .filter(|lease| !self.is_own(&lease.key))
            .map(|lease| (lease.key, lease))
            .collect();
        let gone: Vec<_> = self.known.keys().filter(|key| !next.contains_key(key)).copied().collect();
        let mut events: Vec<_> =
            gone.iter().filter_map(|key| self.known.remove(key)).map(Event::Removed).collect();
        events.extend(next.into_values().filter_map(|lease| self.add(lease)));
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(text: &str) -> SubnetKey {
        text.parse().unwrap()
    }

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn lease(subnet: &str, ip: [u8; 4]) -> Lease {
        let attrs = LeaseAttrs { public_ip: Some(ip.into()), ..LeaseAttrs::default() };
        Lease { key: key(subnet), attrs, expiration: None }
    }

    #[test]
    fn writes_the_values_flannel_writes() {
        let mut attrs = LeaseAttrs { public_ip: Some([192, 168, 77, 2].into()), ..LeaseAttrs::default() };
        assert_eq!(attrs.encode(), r#"{"PublicIP":"192.168.77.2","PublicIPv6":null}"#);
        attrs.backend_type = "vxlan".into();
        attrs.backend_data = Some(raw(r#"{"VNI":1,"VtepMAC":"ee:25:24:46:88:02"}"#));
        assert_eq!(
            attrs.encode(),
            r#"{"PublicIP":"192.168.77.2","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"ee:25:24:46:88:02"}}"#
        );
        attrs.public_ipv6 = Some("fd77::2".parse().unwrap());
        attrs.backend_data = Some(raw(r#"{"VNI":7,"VtepMAC":"da:26:38:ca:3c:97"}"#));
        attrs.backend_v6_data = Some(raw(r#"{"VNI":7,"VtepMAC":"72:ce:dc:28:82:8e"}"#));
        assert_eq!(
            attrs.encode(),
            r#"{"PublicIP":"192.168.77.2","PublicIPv6":"fd77::2","BackendType":"vxlan","BackendData":{"VNI":7,"VtepMAC":"da:26:38:ca:3c:97"},"BackendV6Data":{"VNI":7,"VtepMAC":"72:ce:dc:28:82:8e"}}"#
        );
    }

    #[test]
    fn compacts_and_escapes_backend_data_like_go() {
        let attrs = LeaseAttrs {
            backend_type: "extension".into(),
            backend_data: Some(raw("{ \"a\" : \"x < y & \\\"z\\\" > \u{2028}\",\n\t\"b\": [1, 2] }")),
            ..LeaseAttrs::default()
        };
        assert_eq!(
            attrs.encode(),
            "{\"PublicIP\":\"0.0.0.0\",\"PublicIPv6\":null,\"BackendType\":\"extension\",\"BackendData\":{\"a\":\"x \\u003c y \\u0026 \\\"z\\\" \\u003e \\u2028\",\"b\":[1,2]}}"
        );
    }

    #[test]
    fn reads_values_as_go_does() {
        let attrs = LeaseAttrs::decode(
            r#"{"publicip":"10.0.0.1","PUBLICIP":"10.0.0.2","extra":[],"backendtype":"vxlan"}"#,
        )
        .unwrap();
        assert_eq!(attrs.public_ip, Some([10, 0, 0, 2].into()));
        assert_eq!(attrs.backend_type, "vxlan");
        assert_eq!(LeaseAttrs::decode("{}").unwrap(), LeaseAttrs::default());
        assert_eq!(
            LeaseAttrs::decode(r#"{"PublicIP":"0.0.0.0","PublicIPv6":null}"#).unwrap(),
            LeaseAttrs::default()
        );
        for bad in [
            "",
            "x",
            "[]",
            r#"{"PublicIP":null}"#,
            r#"{"PublicIP":"not-an-ip"}"#,
            r#"{"PublicIP":7}"#,
            r#"{"PublicIPv6":"::x"}"#,
            r#"{"BackendType":3}"#,
            r#"{"PublicIP":"1.2.3.4"} x"#,
        ] {
            assert!(LeaseAttrs::decode(bad).is_err(), "{bad} was accepted");
        }
    }

    #[test]
    fn keys_have_one_text_each() {
        for text in ["10.5.34.0-24", "10.7.52.0-24&fd00:7:0:58::-64", "0.0.0.0-0&fd00:7:0:58::-64"] {
            assert_eq!(key(text).to_string(), text);
        }
        for bad in [
            "",
            "foo",
            "10.5.34.0",
            "10.5.34.0-33",
            "10.5.34.1-24",
            "x10.5.34.0-24",
            "10.5.34.0-24 ",
            "10.5.34.0-024",
            "10.5.34.0-+24",
            "0.0.0.0-0",
            "10.5.34.0-24&",
            "10.5.34.0-24&FD00::-64",
            "10.5.34.0-24&fd00:0::-64",
            "10.5.34.0-24&fd00::1-64",
            "fd00::-64",
        ] {
            assert!(bad.parse::<SubnetKey>().is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn overlap_is_found_in_either_family() {
        assert!(key("10.5.0.0-16").overlaps(&key("10.5.34.0-24")));
        assert!(key("10.5.34.0-24&fd00:1::-64").overlaps(&key("10.6.0.0-24&fd00:1::-64")));
        assert!(!key("10.5.34.0-24").overlaps(&key("10.5.35.0-24&fd00:1::-64")));
        assert!(key("10.5.34.0-24").shares_subnet(&key("10.5.34.0-24&fd00:1::-64")));
        assert!(!key("0.0.0.0-0&fd00:2::-64").shares_subnet(&key("0.0.0.0-0&fd00:1::-64")));
    }

    #[test]
    fn own_lease_is_left_out_of_every_delivery() {
        let own = lease("10.5.1.0-24", [1, 1, 1, 1]);
        let peer = lease("10.5.2.0-24", [2, 2, 2, 2]);
        let mut set = LeaseSet::new(Some(own.key));
        let snapshot = || WatchResult::Snapshot(vec![own.clone(), peer.clone()]);
        assert_eq!(set.apply(snapshot()), [Event::Added(peer.clone())]);
        // The reference stores its own lease here and reports it as removed by a later snapshot without it.
        assert_eq!(set.apply(WatchResult::Snapshot(vec![peer.clone()])), []);
        assert_eq!(set.apply(WatchResult::Events(vec![Event::Added(own.clone()), Event::Removed(own)])), []);
    }

    #[test]
    fn snapshot_reports_changed_attributes() {
        let mut set = LeaseSet::new(None);
        set.apply(WatchResult::Snapshot(vec![lease("10.5.2.0-24", [2, 2, 2, 2])]));
        let moved = lease("10.5.2.0-24", [3, 3, 3, 3]);
        assert_eq!(set.apply(WatchResult::Snapshot(vec![moved.clone()])), [Event::Added(moved)]);
    }

    #[test]
    fn renewal_is_stored_and_not_reported() {
        let mut set = LeaseSet::new(None);
        let mut peer = lease("10.5.2.0-24", [2, 2, 2, 2]);
        set.apply(WatchResult::Events(vec![Event::Added(peer.clone())]));
        peer.expiration = Some(SystemTime::UNIX_EPOCH);
        assert_eq!(set.apply(WatchResult::Events(vec![Event::Added(peer.clone())])), []);
        assert_eq!(set.get(&peer.key), Some(&peer));
    }

    #[test]
    fn removal_carries_the_stored_attributes_and_empty_events_remove_nothing() {
        let mut set = LeaseSet::new(None);
        let peer = lease("10.5.2.0-24", [2, 2, 2, 2]);
        set.apply(WatchResult::Events(vec![Event::Added(peer.clone())]));
        assert_eq!(set.apply(WatchResult::Events(vec![])), []);
        let bare = Lease { attrs: LeaseAttrs::default(), ..peer.clone() };
        assert_eq!(
            set.apply(WatchResult::Events(vec![Event::Removed(bare.clone())])),
            [Event::Removed(peer)]
        );
        assert_eq!(
            set.apply(WatchResult::Events(vec![Event::Removed(bare.clone())])),
            [Event::Removed(bare)]
        );
    }

    fn any_result() -> impl Strategy<Value = WatchResult> {
        let any_lease =
            (0u8..12, 1u8..4).prop_map(|(net, ip)| lease(&format!("10.5.{net}.0-24"), [9, 9, 9, ip]));
        let event = (any_lease.clone(), any::<bool>())
            .prop_map(|(lease, add)| if add { Event::Added(lease) } else { Event::Removed(lease) });
        prop_oneof![
            proptest::collection::vec(event, 0..6).prop_map(WatchResult::Events),
            proptest::collection::vec(any_lease, 0..6).prop_map(WatchResult::Snapshot),
        ]
    }

    proptest! {
        /// A follower that applies only the reported events ends with exactly the set's content.
        #[test]
        fn reported_events_rebuild_the_set(results in proptest::collection::vec(any_result(), 0..40)) {
            let own = key("10.5.0.0-24");
            let mut set = LeaseSet::new(Some(own));
            let mut follower = BTreeMap::new();
            for result in results {
                for event in set.apply(result) {
                    match event {
                        Event::Added(lease) => {
                            let old = follower.insert(lease.key, lease.attrs.clone());
                            prop_assert_ne!(old, Some(lease.attrs));
                        }
                        Event::Removed(lease) => drop(follower.remove(&lease.key)),
                    }
                }
            }
            prop_assert!(!follower.contains_key(&own));
            let known: BTreeMap<_, _> = set.iter().map(|lease| (lease.key, lease.attrs.clone())).collect();
            prop_assert_eq!(follower, known);
        }

        /// What is encoded decodes to the same attributes.
        #[test]
        fn encoded_attributes_decode_to_themselves(ip in any::<u32>(), v6 in any::<Option<u128>>(), kind in "[a-z&<>\"é-]{0,8}") {
            let attrs = LeaseAttrs {
                public_ip: Some(Ipv4Addr::from(ip)).filter(|ip| !ip.is_unspecified()),
                public_ipv6: v6.map(Ipv6Addr::from),
                backend_type: kind,
                backend_data: Some(raw(r#"{"VNI":1}"#)),
                backend_v6_data: None,
            };
            prop_assert_eq!(LeaseAttrs::decode(&attrs.encode()).unwrap(), attrs);
        }

        /// Key texts survive a round trip.
        #[test]
        fn keys_round_trip(v4 in any::<u32>(), len in 1u8..=30, v6 in any::<Option<u128>>(), len6 in 1u8..=126) {
            let v4 = Ipv4Net::new(v4.into(), len).unwrap();
            let v6 = v6.map(|bits| Ipv6Net::new(bits.into(), len6).unwrap());
            let key = SubnetKey::new(Some(v4), v6).unwrap();
            prop_assert_eq!(key.to_string().parse::<SubnetKey>().unwrap(), key);
        }
    }
}
