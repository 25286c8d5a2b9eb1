//! A node's two directions over memory, with traffic of a kind.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use felt_dataplane::config::{Encap, EngineConfig, OffloadMode, SourceGuard};
use felt_dataplane::encap::vxlan::{HEADERS_LEN, Vtep};
use felt_dataplane::stage::Stage;
use felt_dataplane::wire::{MacAddr, Vni};

use crate::memory::{BenchDevice, BenchMessage, BenchSocket};
use crate::{packets, table};

/// Bytes of the virtio-net header.
pub const VNET_HDR_LEN: usize = felt_dataplane::device::VNET_HDR_LEN;

const OUR_MAC: MacAddr = MacAddr([0x3a, 0xff, 0, 0, 0, 1]);
/// A host behind us: outside the subnets of the table.
const OWN_HOST: Ipv4Addr = Ipv4Addr::new(10, 255, 1, 5);

fn vni() -> Vni {
    Vni::new(1).expect("24 bits")
}

/// What travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// UDP packets of this many bytes to as many peers as there are packets.
    Scattered(usize),
    /// UDP packets of this many bytes to one peer.
    Stream(usize),
    /// TCP super-packets of up to 64 KiB to one peer, of this many payload bytes per segment.
    Super(usize),
}

/// One node.
#[derive(Debug)]
pub struct Rig {
    /// Both directions.
    pub stage: Stage,
    /// Has the outbound packets.
    pub device: BenchDevice,
    /// Has the inbound messages.
    pub socket: BenchSocket,
    /// Inner packets, and their bytes, in one outbound batch.
    pub outbound: (u64, u64),
    /// Inner packets, and their bytes, in one inbound batch.
    pub inbound: (u64, u64),
}

/// The encapsulations.
pub fn encaps() -> [(&'static str, Encap); 2] {
    [("vxlan", Encap::Vxlan { vni: vni(), local_mac: OUR_MAC }), ("udp", Encap::Udp)]
}

impl Rig {
    /// A node with 256 peers.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(encap: Encap, offload: OffloadMode, traffic: Traffic) -> io::Result<Rig> {
        let mut config = EngineConfig::new(encap, SocketAddr::from(([198, 18, 0, 1], 8472)), 1450);
        config.offload = offload;
        config.source_guard = SourceGuard::Inner;
        let hosts: Vec<Ipv4Addr> = match traffic {
            Traffic::Scattered(_) => table::destinations(256, 64),
            Traffic::Stream(_) => vec![table::destinations(256, 1)[0]; 64],
            Traffic::Super(_) => vec![table::destinations(256, 1)[0]; 4],
        };
        let mut packets_out = Vec::new();
        let mut messages = Vec::new();
        let (mut count, mut bytes) = (0, 0);
        for (i, host) in hosts.into_iter().enumerate() {
            let index = (u32::from(host) - table::NETWORK) >> 8;
            let from = SocketAddr::from((Ipv4Addr::from(table::UNDERLAY + index), 8472));
            let (out, back) = match traffic {
                Traffic::Scattered(len) | Traffic::Stream(len) => {
                    let ident = i as u16;
                    let out = packets::udp_v4(OWN_HOST, host, len, ident);
                    (plain(&out), vec![packets::udp_v4(host, OWN_HOST, len, ident)])
                }
                Traffic::Super(mss) => {
                    let segments = (65_000 / mss).min(44);
                    let seq = (i * segments * mss) as u32;
                    let out = packets::tcp_super(OWN_HOST, host, seq, mss, segments);
                    let back = (0..segments)
                        .map(|s| {
                            let ident = (i * segments + s) as u16;
                            packets::tcp_v4(host, OWN_HOST, seq + (s * mss) as u32, mss, ident)
                        })
                        .collect();
                    (out, back)
                }
            };
            packets_out.push(out);
            count += back.len() as u64;
            bytes += back.iter().map(Vec::len).sum::<usize>() as u64;
            let datagrams: Vec<Vec<u8>> =
                back.into_iter().map(|inner| encapsulated(encap, index, &inner)).collect();
            let segment = (datagrams.len() > 1).then_some(datagrams[0].len() as u16);
            messages.push(BenchMessage { from, bytes: datagrams.concat(), segment });
        }
        // A receive call gives at most 32 messages.
        if messages.len() > 32 {
            messages.truncate(32);
            (count, bytes) = (count / 2, bytes / 2);
        }
        let outbound = match traffic {
            Traffic::Super(_) => (count, bytes),
            _ => (count * 2, bytes * 2),
        };
        Ok(Rig {
            stage: Stage::new(&config, table::fib(256)),
            device: BenchDevice::new(packets_out)?,
            socket: BenchSocket::new(messages)?,
            outbound,
            inbound: (count, bytes),
        })
    }

    /// One batch outbound.
    pub fn send(&mut self) {
        let sent = self.stage.outbound(&self.device, &self.socket);
        assert!(sent.is_ok_and(|reads| reads > 0));
        // A full batch ends without having seen that there is no more: let the device start anew.
        if self.outbound.0 == 64 {
            let _ = self.stage.outbound(&self.device, &self.socket);
        }
    }

    /// One batch inbound.
    pub fn receive(&mut self) {
        let received = self.stage.inbound(&self.device, &self.socket);
        assert!(received.is_ok_and(|messages| messages > 0));
    }
}

fn plain(packet: &[u8]) -> Vec<u8> {
    [&[0; VNET_HDR_LEN], packet].concat()
}

fn encapsulated(encap: Encap, peer: u32, inner: &[u8]) -> Vec<u8> {
    match encap {
        Encap::Vxlan { vni, local_mac } => {
            let mac = MacAddr([0x3a, 0, 0, (peer >> 16) as u8, (peer >> 8) as u8, peer as u8]);
            let mut headers = [0; HEADERS_LEN];
            Vtep { vni, mac, accept_gbp: false }.push(local_mac, false, &mut headers);
            [&headers[..], inner].concat()
        }
        Encap::Udp => inner.to_vec(),
    }
}
