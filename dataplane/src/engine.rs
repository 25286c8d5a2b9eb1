//! Starts the packet threads over a TUN device and hands out the [`Handle`] that controls them.
//!
//! ```text
//!  worker i    TUN queue i --> out thread --> socket i --> underlay
//!              TUN queue i <-- in thread  <-- socket i <-- underlay
//! ```
//!
//! Queues and sockets are many on machines with many cores. The kernel keeps a flow on one TUN queue and,
//! by SO_REUSEPORT, a sender's datagrams on one socket, and each is served by one thread: no flow is
//! reordered.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crate::answering::Answering;
use crate::config::{EngineConfig, OffloadMode};
use crate::device::{Device, TunDevice, TunError};
use crate::fib::Fib;
use crate::fib::publish::{self, Publisher};
use crate::inbound::Inbound;
use crate::offload::SharedOffloads;
use crate::outbound::{OLD_MAX_SEGMENTS, Outbound};
use crate::socket::answers::RawSockets;
use crate::socket::{Answers, Socket, UdpSocket};
use crate::stats::{CountersSnapshot, WorkerCounters};
use crate::sys::{self, wait};
use crate::table::Table;
use crate::worker::{self, Context, Running, Status};

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
    /// The device refused a setting.
    #[error(transparent)]
    Tun(#[from] TunError),
    /// A descriptor or thread could not be had.
    #[error("{what}: {source}")]
    Setup {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

fn setup(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Setup { what, source }
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

/// What one worker works on.
#[derive(Debug)]
pub struct Port<D, S, A> {
    /// The TUN queue.
    pub device: D,
    /// The underlay socket.
    pub socket: S,
    /// Where ICMP answers of the outbound and of the inbound thread go; `None`, nowhere.
    pub answers: Option<[A; 2]>,
}

/// The kernel's ends of one worker. They live as long as any process holds them, and with them the packets that wait
/// in them: an engine that goes on with them loses and reorders nothing.
#[derive(Debug)]
pub struct Ends {
    /// The TUN queue.
    pub queue: OwnedFd,
    /// The underlay socket.
    pub socket: OwnedFd,
}

/// Controls a running engine. Dropping it stops the engine.
pub struct Handle {
    publisher: Mutex<Publisher<Table>>,
    counters: Vec<Arc<WorkerCounters>>,
    offloads: Arc<SharedOffloads>,
    stop: Arc<OwnedFd>,
    stopping: Arc<AtomicBool>,
    statuses: Vec<Arc<Status>>,
    threads: Vec<JoinHandle<()>>,
    ends: Vec<Ends>,
}

impl Engine {
    /// Binds the sockets, probes offloads, starts the threads with an empty table. The device may be up or not.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: EngineConfig, tun: TunDevice) -> Result<Handle, StartError> {
        Self::start_with(config, tun, Fib::new())
    }

    /// As [`Engine::start`], with a table that the first packet sees already.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_with(config: EngineConfig, tun: TunDevice, fib: Fib) -> Result<Handle, StartError> {
        let wanted = config.offload == OffloadMode::Auto;
        let bind = |_| {
            UdpSocket::bind(config.bind, wanted)
                .map_err(|source| StartError::Bind { addr: config.bind, source })
        };
        let sockets = (0..tun.queue_count()).map(bind).collect::<Result<_, _>>()?;
        Self::start_over(config, tun, sockets, fib)
    }

    /// Goes on where another engine, of this or another process, was [released](Handle::release). The number of
    /// workers is that of `ends`, and the sockets stay bound where they are, whatever `config` says.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn resume(
        config: EngineConfig,
        device: &str,
        ends: Vec<Ends>,
        fib: Fib,
    ) -> Result<Handle, StartError> {
        let wanted = config.offload == OffloadMode::Auto;
        let (queues, sockets): (Vec<_>, Vec<_>) = ends.into_iter().map(|end| (end.queue, end.socket)).unzip();
        let adopt = |fd| UdpSocket::adopt(fd, wanted).map_err(setup("take over an underlay socket"));
        let sockets = sockets.into_iter().map(adopt).collect::<Result<_, _>>()?;
        Self::start_over(config, TunDevice::adopt(device, queues)?, sockets, fib)
    }

    /// One socket per queue of the device.
    fn start_over(
        config: EngineConfig,
        tun: TunDevice,
        sockets: Vec<UdpSocket>,
        fib: Fib,
    ) -> Result<Handle, StartError> {
        let (tso, uso) = tun.negotiate(config.offload == OffloadMode::Auto)?;
        let offloads = SharedOffloads::default();
        offloads.tun_tso.store(tso, Relaxed);
        offloads.tun_uso.store(uso, Relaxed);
        // Whoever takes super-packets from the TUN may write them to it.
        offloads.tun_gro_tcp.store(tso, Relaxed);
        offloads.tun_gro_udp.store(uso, Relaxed);
        offloads.udp_gso_segments.store(max_segments(), Relaxed);
        let mut ports = Vec::new();
        for (device, socket) in tun.into_queues().into_iter().zip(sockets) {
            offloads.udp_gso.store(socket.can_segment, Relaxed);
            offloads.udp_gro.store(socket.merges, Relaxed);
            let (v4, v6) = (config.tunnel_v4.is_some(), config.tunnel_v6.is_some());
            let open = || RawSockets::open(v4, v6).map_err(setup("open a raw socket for ICMP answers"));
            ports.push(Port { device, socket, answers: Some([open()?, open()?]) });
        }
        Self::run(config, ports, offloads, fib)
    }

    /// Starts an engine over any devices and sockets, one worker per port. Super-packets are merged and
    /// segmented sends are made if the configuration's offload mode is `Auto`.
    ///
    /// # Errors
    /// When the process has no descriptors or threads left.
    pub fn start_on<D: Device, S: Socket, A: Answers>(
        config: EngineConfig,
        ports: Vec<Port<D, S, A>>,
    ) -> Result<Handle, StartError> {
        let offloads = SharedOffloads::default();
        let on = config.offload == OffloadMode::Auto;
        for flag in [
            &offloads.tun_tso,
            &offloads.tun_uso,
            &offloads.tun_gro_tcp,
            &offloads.tun_gro_udp,
            &offloads.udp_gso,
            &offloads.udp_gro,
        ] {
            flag.store(on, Relaxed);
        }
        offloads.udp_gso_segments.store(OLD_MAX_SEGMENTS, Relaxed);
        Self::run(config, ports, offloads, Fib::new())
    }

    fn run<D: Device, S: Socket, A: Answers>(
        config: EngineConfig,
        ports: Vec<Port<D, S, A>>,
        offloads: SharedOffloads,
        fib: Fib,
    ) -> Result<Handle, StartError> {
        let (publisher, readers) = publish::channel(Table::new(fib), 2 * ports.len());
        let mut readers = readers.into_iter();
        let stop = wait::eventfd().map_err(setup("make an eventfd"))?;
        let mut handle = Handle {
            publisher: Mutex::new(publisher),
            counters: Vec::new(),
            offloads: Arc::new(offloads),
            stop: Arc::new(stop),
            stopping: Arc::default(),
            statuses: Vec::new(),
            threads: Vec::new(),
            ends: Vec::new(),
        };
        // Whatever fails below drops the handle, which ends the threads that run already.
        for (row, port) in ports.into_iter().enumerate() {
            let counters = Arc::new(WorkerCounters::default());
            handle.counters.push(counters.clone());
            let keep = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map_err(setup("duplicate a descriptor"));
            handle.ends.push(Ends { queue: keep(port.device.fd())?, socket: keep(port.socket.fd())? });
            let device = Arc::new(port.device);
            let socket = Arc::new(port.socket);
            let [out_answers, in_answers] = match port.answers {
                Some([a, b]) => [Some(a), Some(b)],
                None => [None, None],
            };
            let outbound = Outbound::new(
                &config,
                handle.offloads.clone(),
                Answering::new(&config, out_answers),
                counters.clone(),
                row,
            );
            let inbound = Inbound::new(
                &config,
                handle.offloads.clone(),
                Answering::new(&config, in_answers),
                counters.clone(),
                row,
            );
            let (out_device, out_socket) = (device.clone(), socket.clone());
            handle.spawn(format!("{}-out{row}", config.thread_name), readers.next(), move |context| {
                worker::outbound(outbound, &*out_device, &*out_socket, context);
            })?;
            handle.spawn(format!("{}-in{row}", config.thread_name), readers.next(), move |context| {
                worker::inbound(inbound, &*device, &*socket, &counters.inbound, context);
            })?;
        }
        Ok(handle)
    }
}

/// Segments that a send may have: 128 since Linux 6.9, 64 before; one less, since some kernels count headers.
fn max_segments() -> usize {
    match sys::kernel_version() {
        Some(version) if version >= (6, 9) => 127,
        _ => OLD_MAX_SEGMENTS,
    }
}

impl Handle {
    fn spawn(
        &mut self,
        name: String,
        table: Option<publish::Reader<Table>>,
        body: impl FnOnce(Context) + Send + 'static,
    ) -> Result<(), StartError> {
        let status = Arc::new(Status::default());
        let table = table.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
        let context = Context {
            table: table.map_err(setup("take a reader of the table"))?,
            stop: self.stop.clone(),
            stopping: self.stopping.clone(),
            status: status.clone(),
        };
        status.running.store(true, Relaxed);
        self.statuses.push(status.clone());
        let thread = thread::Builder::new().name(name).spawn(move || {
            let _running = Running(status);
            body(context);
        });
        self.threads.push(thread.map_err(setup("start a packet thread"))?);
        Ok(())
    }

    /// Replaces the forwarding table; each thread sees it at its next batch.
    pub fn publish(&self, fib: Fib) {
        let table = Table::new(fib);
        let mut publisher = self.publisher.lock().unwrap_or_else(PoisonError::into_inner);
        publisher.publish(table);
    }

    /// Numbers of all workers since the start.
    pub fn counters(&self) -> CountersSnapshot {
        CountersSnapshot::sum(self.counters.iter().map(AsRef::as_ref))
    }

    /// Offloads in use.
    pub fn offload_state(&self) -> OffloadState {
        let offloads = &self.offloads;
        OffloadState {
            tun_tso: offloads.tun_tso.load(Relaxed),
            tun_uso: offloads.tun_uso.load(Relaxed),
            tun_gro_tcp: offloads.tun_gro_tcp.load(Relaxed),
            tun_gro_udp: offloads.tun_gro_udp.load(Relaxed),
            udp_gso: offloads.udp_gso.load(Relaxed),
            udp_gro: offloads.udp_gro.load(Relaxed),
        }
    }

    /// Whether every packet thread runs. One ends by itself when the device was deleted.
    pub fn is_alive(&self) -> bool {
        self.statuses.iter().all(|status| status.running.load(Relaxed))
    }

    /// Signs of life.
    pub fn heartbeat(&self) -> Heartbeat {
        let counters = self.counters();
        Heartbeat {
            threads: self.statuses.len(),
            waiting: self.statuses.iter().filter(|status| status.waiting.load(Relaxed)).count(),
            batches: counters.outbound.batches.wrapping_add(counters.inbound.batches),
        }
    }

    /// Stops the threads, waits for them, and gives away what they worked on: packets wait in the kernel until
    /// somebody [goes on](Engine::resume), or are lost when the last holder drops it.
    pub fn release(mut self) -> Vec<Ends> {
        self.end_threads();
        std::mem::take(&mut self.ends)
    }

    fn end_threads(&mut self) {
        self.stopping.store(true, Relaxed);
        if let Ok(stop) = self.stop.try_clone() {
            // It fails only when the counter would overflow: then it has been raised.
            let _ = File::from(stop).write(&1u64.to_ne_bytes());
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so on stderr, and is_alive said it since.
            let _ = thread.join();
        }
    }

    /// Stops the threads and waits for them: some milliseconds. The TUN device stays if it is persistent.
    pub fn stop(self) {
        drop(self);
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.end_threads();
    }
}
