//! The admin API's types: what `feltd` serves on its Unix socket and what `felt -o json` prints.
//!
//! One module for both ends, so that they cannot drift apart. Keys are snake_case, `version` is [`VERSION`], times are
//! RFC 3339 in UTC, absent values are left out. New keys may appear within a version; a key never changes its meaning.
//! Written down for users in `docs/api.md`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

/// Version of all documents below.
pub const VERSION: u32 = 1;

/// How far the daemon is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Before the subnet file is written.
    Starting,
    /// Packets flow.
    Running,
    /// Leaving.
    Stopping,
}

/// `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`VERSION`].
    pub version: u32,
    /// The program's own version.
    pub program: String,
    /// Process id.
    pub pid: u32,
    /// Start of the process.
    pub started_at: String,
    /// How far the daemon is.
    pub phase: Phase,
    /// What `/readyz` says.
    pub ready: bool,
    /// Why it is not ready, one reason each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_ready: Vec<String>,
    /// Where leases are kept.
    pub registry: String,
    /// This node's id, kept in its state directory.
    pub node_id: String,
    /// The overlay network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// The interface that carries the tunnel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<Interface>,
    /// The lease this node holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<OwnLease>,
    /// The backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<Backend>,
    /// The watch on the registry.
    pub watch: Watch,
    /// Other nodes whose lease is known.
    pub peers: usize,
    /// Path of the subnet file.
    pub subnet_file: String,
    /// Restorations of devices, addresses and routes since the start.
    pub repairs: u64,
}

/// The overlay network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// IPv4 network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<Ipv4Net>,
    /// IPv6 network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Net>,
}

/// The external interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name.
    pub name: String,
    /// Kernel's index.
    pub index: u32,
    /// MTU in bytes.
    pub mtu: u32,
    /// Its IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Addr>,
}

/// The own lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnLease {
    /// The registry's key text, `10.244.1.0-24`.
    pub key: String,
    /// IPv4 subnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<Ipv4Net>,
    /// IPv6 subnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Net>,
    /// Advertised IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_ip: Option<Ipv4Addr>,
    /// Advertised IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_ipv6: Option<Ipv6Addr>,
    /// End of the lease unless renewed; absent for a reservation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// Last successful write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewed_at: Option<String>,
    /// Failed renewals since then.
    pub failures: u32,
    /// Text of the last failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// The backend and its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backend {
    /// `vxlan`, `udp`, ...
    #[serde(rename = "type")]
    pub kind: String,
    /// `userspace`, `kernel`, or `none` for backends that move no packets themselves.
    pub dataplane: String,
    /// The MTU written to the subnet file.
    pub mtu: u32,
    /// Devices it made.
    pub devices: Vec<Device>,
}

/// One tunnel device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Name.
    pub name: String,
    /// Kernel's index.
    pub index: u32,
    /// MTU in bytes.
    pub mtu: u32,
    /// Addresses felt gave it.
    pub addresses: Vec<IpAddr>,
    /// VXLAN network identifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vni: Option<u32>,
    /// UDP port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Own VTEP MAC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vtep_mac: Option<String>,
    /// Packet workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<usize>,
    /// State of each offload as the data plane words it, in userspace.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub offload: BTreeMap<String, String>,
    /// Whether its packet workers make progress.
    pub alive: bool,
}

/// The watch on the registry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    /// Whether a first snapshot has arrived.
    pub synced: bool,
    /// Seconds since the last delivery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_event_age_seconds: Option<u64>,
    /// Deliveries so far.
    pub deliveries: u64,
}

/// `GET /v1/peers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peers {
    /// [`VERSION`].
    pub version: u32,
    /// Other nodes in key order.
    pub peers: Vec<Peer>,
}

/// Another node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// The registry's key text.
    pub key: String,
    /// IPv4 subnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<Ipv4Net>,
    /// IPv6 subnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Net>,
    /// Advertised IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_ip: Option<Ipv4Addr>,
    /// Advertised IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_ipv6: Option<Ipv6Addr>,
    /// Backend type of the lease, empty for udp.
    pub backend_type: String,
    /// VTEP MAC for IPv4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vtep_mac: Option<String>,
    /// VTEP MAC for IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vtep_mac_v6: Option<String>,
    /// `tunnel`, `direct`, or `ignored`.
    pub state: PeerState,
    /// Why it is ignored, or why its kernel entries are not in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// End of its lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// Traffic, in userspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<PeerTraffic>,
    /// What looks wrong about it, for an operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// How packets reach a peer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerState {
    /// Encapsulated.
    #[default]
    Tunnel,
    /// By a plain route.
    Direct,
    /// Not at all.
    Ignored,
}

/// Packets to and from one peer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerTraffic {
    /// Inner packets sent to it.
    pub out_packets: u64,
    /// Their bytes.
    pub out_bytes: u64,
    /// Inner packets received from it.
    pub in_packets: u64,
    /// Their bytes.
    pub in_bytes: u64,
    /// Dropped packets by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drops: BTreeMap<String, u64>,
}

/// `GET /v1/counters`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// [`VERSION`].
    pub version: u32,
    /// One entry per tunnel device in userspace.
    pub engines: Vec<Engine>,
}

/// Counters of one packet engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    /// Device name.
    pub device: String,
    /// Sums from pods to the underlay.
    pub outbound: Direction,
    /// Sums from the underlay to pods.
    pub inbound: Direction,
    /// Further events by name: ICMP answers, offloads switched off, ...
    pub events: BTreeMap<String, u64>,
}

/// Counters of one direction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Direction {
    /// Inner packets taken in.
    pub received_packets: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Inner packets forwarded.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// System calls' worth of batches.
    pub batches: u64,
    /// Dropped packets by reason.
    pub drops: BTreeMap<String, u64>,
}

/// `GET /v1/config`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// [`VERSION`].
    pub version: u32,
    /// Every flag with the value in force, secrets blotted out.
    pub flags: BTreeMap<String, serde_json::Value>,
    /// The network configuration in force, absent before it is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<serde_json::Value>,
}

/// `felt lease list -o json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leases {
    /// [`VERSION`].
    pub version: u32,
    /// Where they are kept.
    pub registry: String,
    /// All leases in key order.
    pub leases: Vec<LeaseEntry>,
}

/// One lease of the registry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseEntry {
    /// The registry's key text.
    pub key: String,
    /// IPv4 subnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<Ipv4Net>,
    /// IPv6 subnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Net>,
    /// Advertised IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_ip: Option<Ipv4Addr>,
    /// Advertised IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_ipv6: Option<Ipv6Addr>,
    /// Backend type, empty for udp.
    pub backend_type: String,
    /// The backend's data for IPv4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_data: Option<serde_json::Value>,
    /// The backend's data for IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_v6_data: Option<serde_json::Value>,
    /// End of the lease; absent for a reservation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// Whether it is a reservation that never ends.
    pub reservation: bool,
}

/// Body of every answer that is not 200.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// [`VERSION`].
    pub version: u32,
    /// What went wrong.
    pub error: String,
}

/// RFC 3339 in UTC with whole seconds.
pub fn time_text(time: std::time::SystemTime) -> String {
    jiff::Timestamp::try_from(time)
        .and_then(|stamp| stamp.round(jiff::Unit::Second))
        .map_or_else(|_| "?".to_owned(), |stamp| stamp.to_string())
}

impl LeaseEntry {
    /// The entry that shows `lease`.
    pub fn of(lease: &crate::lease::Lease) -> Self {
        let json = |data: &Option<Box<serde_json::value::RawValue>>| {
            data.as_ref().and_then(|raw| serde_json::from_str(raw.get()).ok())
        };
        Self {
            key: lease.key.to_string(),
            ipv4: lease.key.v4,
            ipv6: lease.key.v6,
            public_ip: lease.attrs.public_ip,
            public_ipv6: lease.attrs.public_ipv6,
            backend_type: lease.attrs.backend_type.clone(),
            backend_data: json(&lease.attrs.backend_data),
            backend_v6_data: json(&lease.attrs.backend_v6_data),
            expires_at: lease.expiration.map(time_text),
            reservation: lease.expiration.is_none(),
        }
    }
}
