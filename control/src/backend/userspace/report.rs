//! What the userspace backend tells the admin socket and the metrics.

use std::collections::BTreeMap;

use felt_dataplane::engine::{Handle as EngineHandle, OffloadState};
use felt_dataplane::stats::{CountersSnapshot, DirectionCounters, DropReason, EventCounters, PeerTotals};

use super::plane::{Plane, own_addresses};
use super::{Inner, Shared};
use crate::api;
use crate::backend::leases::Way;
use crate::backend::peers::Entry;
use crate::backend::{Report, peer_of};

impl Report for Shared {
    fn backend(&self) -> api::Backend {
        let inner = self.lock();
        let devices = inner.planes.iter().map(|plane| device(plane, &inner)).collect();
        api::Backend { kind: self.kind.into(), dataplane: "userspace".into(), mtu: self.mtu, devices }
    }

    fn peers(&self) -> Vec<api::Peer> {
        let inner = self.lock();
        inner.table.entries().map(|entry| peer(entry, &inner)).collect()
    }

    fn engines(&self) -> Vec<api::Engine> {
        let inner = self.lock();
        inner.planes.iter().filter_map(|plane| Some(engine(plane.device(), plane.engine()?))).collect()
    }

    fn alive(&self) -> Result<(), String> {
        let inner = self.lock();
        let dead = inner.planes.iter().find(|plane| !plane.engine().is_some_and(EngineHandle::is_alive));
        dead.map_or(Ok(()), |plane| Err(format!("the packet engine on {} makes no progress", plane.device())))
    }
}

fn device(plane: &Plane, inner: &Inner) -> api::Device {
    let spec = plane.spec();
    let engine = plane.engine();
    api::Device {
        name: spec.device.clone(),
        index: plane.ifindex(),
        mtu: spec.mtu,
        addresses: inner.lease.as_ref().map(|lease| own_addresses(spec, lease)).unwrap_or_default(),
        vni: spec.vtep.map(|vtep| vtep.vni),
        port: Some(spec.bind.port()),
        vtep_mac: spec.vtep.map(|vtep| vtep.mac.to_string()),
        workers: Some(plane.workers()),
        offload: engine.map(|engine| offload(engine.offload_state())).unwrap_or_default(),
        alive: engine.is_some_and(EngineHandle::is_alive),
    }
}

fn offload(state: OffloadState) -> BTreeMap<String, String> {
    let names = [
        ("tun_tso", state.tun_tso),
        ("tun_uso", state.tun_uso),
        ("tun_gro_tcp", state.tun_gro_tcp),
        ("tun_gro_udp", state.tun_gro_udp),
        ("udp_gso", state.udp_gso),
        ("udp_gro", state.udp_gro),
    ];
    names.into_iter().map(|(name, on)| (name.to_owned(), if on { "on" } else { "off" }.to_owned())).collect()
}

fn peer(entry: &Entry, inner: &Inner) -> api::Peer {
    let traffic = (!entry.peers.is_empty()).then(|| {
        entry.peers.values().map(|peer| PeerTotals::of(&peer.counters)).fold(api::PeerTraffic::default(), add)
    });
    let way = inner.direct.way(&entry.lease);
    let hint =
        traffic.as_ref().filter(|_| way == Way::Tunnel).and_then(|traffic| hint(traffic, &inner.planes));
    api::Peer {
        state: match (&entry.ignored, way) {
            (Some(_), _) => api::PeerState::Ignored,
            (None, Way::Tunnel) => api::PeerState::Tunnel,
            (None, Way::Direct) => api::PeerState::Direct,
        },
        reason: entry.ignored.clone(),
        traffic,
        hint,
        ..peer_of(&entry.lease)
    }
}

fn add(mut sum: api::PeerTraffic, totals: PeerTotals) -> api::PeerTraffic {
    sum.out_packets += totals.tx_packets;
    sum.out_bytes += totals.tx_bytes;
    sum.in_packets += totals.rx_packets;
    sum.in_bytes += totals.rx_bytes;
    let named = totals.tx_dropped.iter().chain(&totals.rx_dropped);
    let named = named.map(|(reason, count)| (reason.name(), *count));
    for (name, count) in named.chain([("other", totals.tx_dropped_other)]).filter(|(_, count)| *count > 0) {
        *sum.drops.entry(name.to_owned()).or_default() += count;
    }
    sum
}

/// Packets go there and none ever came: most often a firewall on the way that drops the tunnel's port.
fn hint(traffic: &api::PeerTraffic, planes: &[Plane]) -> Option<String> {
    let port = planes.first()?.spec().bind.port();
    (traffic.out_packets >= SILENT_AFTER && traffic.in_packets == 0)
        .then(|| format!("nothing was ever received from it; does UDP port {port} pass between the nodes?"))
}

/// Packets sent without any coming back that look like a fault.
const SILENT_AFTER: u64 = 10;

fn engine(device: &str, engine: &EngineHandle) -> api::Engine {
    let counters: CountersSnapshot = engine.counters();
    let mut events = events(&counters.events);
    for (name, direction) in [("outbound", &counters.outbound), ("inbound", &counters.inbound)] {
        for (reason, count) in direction.answered.iter().filter(|(_, count)| *count > 0) {
            events.insert(format!("icmp_answered_{name}_{}", reason.name()), count);
        }
        events.insert(format!("icmp_suppressed_{name}"), direction.answers_suppressed);
        events.insert(format!("reads_{name}"), direction.reads);
        events.insert(format!("writes_{name}"), direction.writes);
    }
    api::Engine {
        device: device.to_owned(),
        outbound: direction(&counters.outbound),
        inbound: direction(&counters.inbound),
        events,
    }
}

fn direction(counters: &DirectionCounters) -> api::Direction {
    let drop = |reason: &DropReason| (reason.name().to_owned(), counters.dropped.get(*reason));
    api::Direction {
        received_packets: counters.received_packets,
        received_bytes: counters.received_bytes,
        packets: counters.forwarded_packets,
        bytes: counters.forwarded_bytes,
        batches: counters.batches,
        drops: DropReason::ALL.iter().map(drop).collect(),
    }
}

fn events(counters: &EventCounters) -> BTreeMap<String, u64> {
    let list = [
        ("socket_overflow", counters.socket_overflow),
        ("gso_fallbacks", counters.gso_fallbacks),
        ("gro_fallbacks", counters.gro_fallbacks),
        ("partial_checksums", counters.partial_checksums),
        ("pending_errors", counters.pending_errors),
        ("would_drop_peers", counters.would_drop_peers),
        ("would_drop_strict", counters.would_drop_strict),
    ];
    list.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}
