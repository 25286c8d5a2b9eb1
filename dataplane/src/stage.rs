//! One worker without threads: each direction as a call, for benches and for tests that count allocations.
//!
//! The packet threads ([`crate::engine`]) make the same calls.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::answering::Answering;
use crate::config::{EngineConfig, OffloadMode};
use crate::device::Device;
use crate::fib::Fib;
use crate::inbound::Inbound;
use crate::offload::SharedOffloads;
use crate::outbound::Outbound;
use crate::socket::Socket;
use crate::socket::memory::MemoryAnswers;
use crate::stats::{CountersSnapshot, WorkerCounters};
use crate::table::Table;

/// Segments in one send, as for kernels before 6.9.
const MAX_SEGMENTS: usize = 63;

/// The two halves of a worker, with their table and counters.
#[derive(Debug)]
pub struct Stage {
    table: Table,
    counters: Arc<WorkerCounters>,
    inbound: Inbound<MemoryAnswers>,
    outbound: Outbound<MemoryAnswers>,
    answers: MemoryAnswers,
}

impl Stage {
    /// With this configuration and table. All offloads are on if the offload mode is `Auto`.
    pub fn new(config: &EngineConfig, fib: Fib) -> Stage {
        let offloads = Arc::new(SharedOffloads::default());
        let on = config.offload == OffloadMode::Auto;
        for offload in [&offloads.tun_gro_tcp, &offloads.tun_gro_udp, &offloads.udp_gso, &offloads.udp_gro] {
            offload.store(on, Relaxed);
        }
        offloads.udp_gso_segments.store(MAX_SEGMENTS, Relaxed);
        let counters = Arc::new(WorkerCounters::default());
        let answers = MemoryAnswers::default();
        let answering = || Answering::new(config, Some(answers.clone()));
        Stage {
            table: Table::new(fib),
            inbound: Inbound::new(config, offloads.clone(), answering(), counters.clone(), 0),
            outbound: Outbound::new(config, offloads.clone(), answering(), counters.clone(), 0),
            counters,
            answers,
        }
    }

    /// One batch from the device to the socket. Returns how many reads gave something.
    ///
    /// # Errors
    /// Of reading.
    pub fn outbound<D: Device, S: Socket>(&mut self, device: &D, socket: &S) -> io::Result<usize> {
        self.outbound.run(device, socket, &self.table)
    }

    /// One batch from the socket to the device. Returns how many messages came.
    ///
    /// # Errors
    /// Of receiving.
    pub fn inbound<D: Device, S: Socket>(&mut self, device: &D, socket: &S) -> io::Result<usize> {
        self.inbound.run(device, socket, &self.table)
    }

    /// What was counted.
    pub fn counters(&self) -> CountersSnapshot {
        CountersSnapshot::sum([&*self.counters])
    }

    /// ICMP answers.
    pub fn answers(&self) -> &MemoryAnswers {
        &self.answers
    }
}
