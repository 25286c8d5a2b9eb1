//! The documents of the API as text for people.

use std::fmt::Write as _;

use super::cleanup::Cleaned;
use super::lease::Removed;
use super::table::{Table, or_dash};
use crate::api::{self, Direction, LeaseEntry, PeerState, Phase};

fn both(v4: Option<impl ToString>, v6: Option<impl ToString>) -> String {
    match (v4, v6) {
        (Some(v4), Some(v6)) => format!("{}, {}", v4.to_string(), v6.to_string()),
        (Some(v4), None) => v4.to_string(),
        (None, v6) => or_dash(v6),
    }
}

pub(super) fn status(status: &api::Status) -> String {
    let mut table = Table::new(&[]);
    let mut line = |name: &str, text: String| table.line([name.to_owned(), text]);
    let phase = match status.phase {
        Phase::Starting => "starting",
        Phase::Running => "running",
        Phase::Stopping => "stopping",
    };
    let ready = if status.ready { "ready" } else { "not ready" };
    line(
        "feltd",
        format!("{} pid {}, {phase}, {ready}, since {}", status.program, status.pid, status.started_at),
    );
    for reason in &status.not_ready {
        line("", format!("not ready: {reason}"));
    }
    line("node", status.node_id.clone());
    line("registry", status.registry.clone());
    if let Some(network) = &status.network {
        line("network", both(network.ipv4, network.ipv6));
    }
    if let Some(lease) = &status.lease {
        line("lease", both(lease.ipv4, lease.ipv6));
        line("", format!("advertised as {}", both(lease.public_ip, lease.public_ipv6)));
        line(
            "",
            lease
                .expires_at
                .as_ref()
                .map_or_else(|| "reservation".into(), |end| format!("ends {end} unless renewed")),
        );
        if let Some(error) = &lease.last_error {
            line("", format!("{} failed renewals: {error}", lease.failures));
        }
    }
    if let Some(interface) = &status.interface {
        line("interface", format!("{} (MTU {})", interface.name, interface.mtu));
    }
    if let Some(backend) = &status.backend {
        line("backend", format!("{} ({}), MTU {}", backend.kind, backend.dataplane, backend.mtu));
        for device in &backend.devices {
            line("device", self::device(device));
            let offload: Vec<_> =
                device.offload.iter().map(|(name, state)| format!("{name} {state}")).collect();
            if !offload.is_empty() {
                line("", format!("offload: {}", offload.join(", ")));
            }
        }
    }
    let age =
        status.watch.last_event_age_seconds.map_or(String::new(), |age| format!(", last change {age} s ago"));
    line("peers", format!("{}{age}", status.peers));
    line("subnet file", status.subnet_file.clone());
    if status.repairs > 0 {
        line("repairs", status.repairs.to_string());
    }
    // The heading is empty here.
    table.render().trim_start().to_owned()
}

fn device(device: &api::Device) -> String {
    let mut text = format!("{} index {}", device.name, device.index);
    if let Some(vni) = device.vni {
        let _ = write!(text, ", VNI {vni}");
    }
    if let Some(port) = device.port {
        let _ = write!(text, ", port {port}");
    }
    if let Some(mac) = &device.vtep_mac {
        let _ = write!(text, ", MAC {mac}");
    }
    if let Some(workers) = device.workers {
        let _ = write!(text, ", {workers} worker{}", if workers == 1 { "" } else { "s" });
    }
    if !device.alive {
        text.push_str(", NOT MOVING PACKETS");
    }
    text
}

pub(super) fn peers(peers: &api::Peers) -> String {
    let mut table = Table::new(&[
        "SUBNET",
        "PUBLIC IP",
        "STATE",
        "OUT PKTS",
        "OUT BYTES",
        "IN PKTS",
        "IN BYTES",
        "DROPS",
        "NOTE",
    ]);
    for peer in &peers.peers {
        let state = match peer.state {
            PeerState::Tunnel => "tunnel",
            PeerState::Direct => "direct",
            PeerState::Ignored => "ignored",
        };
        let count = |value: fn(&api::PeerTraffic) -> u64| or_dash(peer.traffic.as_ref().map(value));
        table.line([
            both(peer.ipv4, peer.ipv6),
            both(peer.public_ip, peer.public_ipv6),
            state.to_owned(),
            count(|traffic| traffic.out_packets),
            count(|traffic| traffic.out_bytes),
            count(|traffic| traffic.in_packets),
            count(|traffic| traffic.in_bytes),
            count(|traffic| traffic.drops.values().sum()),
            peer.reason.clone().or_else(|| peer.hint.clone()).unwrap_or_default(),
        ]);
    }
    table.render()
}

pub(super) fn counters(counters: &api::Counters) -> String {
    let mut table = Table::new(&["DEVICE", "DIRECTION", "COUNTER", "VALUE"]);
    for engine in &counters.engines {
        let directions: [(&str, &Direction); 2] =
            [("outbound", &engine.outbound), ("inbound", &engine.inbound)];
        for (name, direction) in directions {
            let mut line = |counter: String, value: u64| {
                table.line([engine.device.clone(), name.to_owned(), counter, value.to_string()]);
            };
            line("packets".into(), direction.packets);
            line("bytes".into(), direction.bytes);
            line("batches".into(), direction.batches);
            for (reason, count) in direction.drops.iter().filter(|(_, count)| **count > 0) {
                line(format!("dropped {reason}"), *count);
            }
        }
        for (event, count) in engine.events.iter().filter(|(_, count)| **count > 0) {
            table.line([engine.device.clone(), "-".into(), event.clone(), count.to_string()]);
        }
    }
    table.render()
}

pub(super) fn config(config: &api::Config) -> String {
    let mut table = Table::new(&["FLAG", "VALUE"]);
    for (name, value) in &config.flags {
        let text = value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
        table.line([name.clone(), text]);
    }
    let network =
        config.network.as_ref().map(|network| format!("\nnetwork config {network}\n")).unwrap_or_default();
    table.render() + &network
}

fn lease_table(leases: &[LeaseEntry]) -> String {
    let mut table = Table::new(&["SUBNET", "PUBLIC IP", "BACKEND", "ENDS"]);
    for lease in leases {
        let backend = if lease.backend_type.is_empty() { "udp or alloc" } else { &lease.backend_type };
        table.line([
            both(lease.ipv4, lease.ipv6),
            both(lease.public_ip, lease.public_ipv6),
            backend.to_owned(),
            lease.expires_at.clone().unwrap_or_else(|| "never (reservation)".to_owned()),
        ]);
    }
    table.render()
}

pub(super) fn leases(leases: &api::Leases) -> String {
    lease_table(&leases.leases)
}

pub(super) fn removed(removed: &Removed) -> String {
    removed
        .removed
        .iter()
        .map(|lease| format!("removed lease {} from {}\n", lease.key, removed.registry))
        .collect()
}

pub(super) fn cleanup(done: &Cleaned) -> String {
    let verb = if done.dry_run { "would remove" } else { "removed" };
    let mut text: String =
        done.removed.iter().map(|item| format!("{verb} {} {}\n", item.kind, item.name)).collect();
    for item in &done.failed {
        let reason = item.error.as_deref().unwrap_or_default();
        let _ = writeln!(text, "failed to remove {} {}: {reason}", item.kind, item.name);
    }
    if text.is_empty() {
        text.push_str("nothing of felt is left on this node\n");
    }
    text
}
