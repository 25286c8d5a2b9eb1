//! One end of a tunnel without a daemon: opens the device, waits for it to be set up, carries packets until
//! standard input ends, then prints its counters.
//!
//! ```text
//! tunnel DEVICE vxlan|udp BIND MTU OWN-SUBNET TUNNEL-ADDRESS MAC [offload=off] [workers=N] PREFIX=ENDPOINT=MAC..
//! ```

use std::error::Error;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::sync::Arc;

use felt_dataplane::config::{Encap, EngineConfig, OffloadMode};
use felt_dataplane::device::{TunDevice, TunOptions};
use felt_dataplane::engine::Engine;
use felt_dataplane::fib::{Fib, Peer, PeerCounters, PeerId};
use felt_dataplane::stats::PeerTotals;
use felt_dataplane::wire::Vni;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [device, encap, bind, mtu, own, tunnel, mac, rest @ ..] = &args[..] else {
        return Err(
            "usage: tunnel DEVICE vxlan|udp BIND MTU OWN TUNNEL MAC [options] PREFIX=ENDPOINT=MAC..".into()
        );
    };
    let encap = match encap.as_str() {
        "vxlan" => Encap::Vxlan { vni: Vni::new(1).ok_or("vni")?, local_mac: mac.parse()? },
        _ => Encap::Udp,
    };
    let mut config = EngineConfig::new(encap, bind.parse()?, mtu.parse()?);
    match tunnel.parse()? {
        IpAddr::V4(addr) => config.tunnel_v4 = Some(addr),
        IpAddr::V6(addr) => config.tunnel_v6 = Some(addr),
    }
    config.own_subnets = vec![own.parse()?];
    config.workers = 1;
    let mut peers = Vec::new();
    for (option, value) in rest.iter().filter_map(|arg| arg.split_once('=')) {
        match option {
            "offload" => config.offload = if value == "off" { OffloadMode::Off } else { OffloadMode::Auto },
            "workers" => config.workers = value.parse()?,
            prefix => {
                let (endpoint, mac) = value.split_once('=').ok_or("PREFIX=ENDPOINT=MAC")?;
                peers.push((prefix.to_owned(), endpoint.to_owned(), mac.to_owned()));
            }
        }
    }
    let workers = config.worker_count();
    let tun = TunDevice::open(device, workers, &TunOptions { persist: false, ..TunOptions::default() })?;
    let engine = Engine::start(config, tun)?;
    let mut entries = Vec::new();
    for (i, (prefix, endpoint, mac)) in peers.iter().enumerate() {
        let peer = Peer {
            id: PeerId(i as u32),
            endpoint: endpoint.parse()?,
            mac: mac.parse().ok(),
            counters: Arc::new(PeerCounters::new(workers)),
        };
        entries.push((prefix.parse()?, Arc::new(peer)));
    }
    engine.publish(Fib::from_entries(entries.clone()));
    let mut out = std::io::stdout();
    writeln!(out, "{:?}", engine.offload_state())?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    writeln!(out, "{:#?}\n{:?}", engine.counters(), engine.offload_state())?;
    for (prefix, peer) in entries {
        writeln!(out, "{prefix}: {:?}", PeerTotals::of(&peer.counters))?;
    }
    engine.stop();
    Ok(())
}
