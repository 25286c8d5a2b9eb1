//! The packet threads: wait until there is something, run a batch, notice a stop.
//!
//! A worker has two threads, one per direction, so that each waits for one descriptor and neither direction
//! waits for the other. There are no timers: an idle thread sleeps in `poll`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::device::Device;
use crate::fib::publish::Reader;
use crate::inbound::Inbound;
use crate::outbound::Outbound;
use crate::socket::{Answers, Socket};
use crate::stats::Direction;
use crate::sys::wait::{self, Event};
use crate::table::Table;

/// Looks at an empty queue after a batch, giving others the core in between, before a thread sleeps: while
/// traffic flows, going to sleep and being woken costs more than anything else on small machines.
///
/// PERF: TCP over two cores gains a tenth to a fifth with 4 to 16 of them and loses that again with 48; request and
/// response gain up to a third with 16 (docs/performance.md).
const LOOKS: u32 = 16;

/// How long a thread leaves a descriptor alone that gives errors.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// Seen by the engine while a thread runs.
#[derive(Debug, Default)]
pub(crate) struct Status {
    pub(crate) running: AtomicBool,
    pub(crate) waiting: AtomicBool,
}

/// Marks a thread as not running, however it ends.
pub(crate) struct Running(pub(crate) Arc<Status>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.store(false, Relaxed);
    }
}

/// What a thread needs besides its direction.
pub(crate) struct Context {
    pub(crate) table: Reader<Table>,
    /// Readable once the thread is to end.
    pub(crate) stop: Arc<OwnedFd>,
    pub(crate) stopping: Arc<AtomicBool>,
    pub(crate) status: Arc<Status>,
}

impl Context {
    /// Waits for the descriptor, or for the stop.
    fn wait(&mut self, fd: BorrowedFd<'_>) {
        self.table.quiesce();
        self.status.waiting.store(true, Relaxed);
        // What woke us shows when the next batch is tried.
        let _ = wait::poll([(fd, Event::Readable), (self.stop.as_fd(), Event::Readable)], None);
        self.status.waiting.store(false, Relaxed);
    }

    /// Leaves a descriptor alone for a while that gives errors and would not let us sleep.
    fn pause(&mut self) {
        self.table.quiesce();
        self.status.waiting.store(true, Relaxed);
        let _ = wait::poll([(self.stop.as_fd(), Event::Readable)], Some(ERROR_PAUSE));
        self.status.waiting.store(false, Relaxed);
    }
}

/// Runs the outbound half until told to stop, or until the device is gone.
pub(crate) fn outbound<D: Device, S: Socket, A: Answers>(
    mut outbound: Outbound<A>,
    device: &D,
    socket: &S,
    mut context: Context,
) {
    let mut looks = 0;
    while !context.stopping.load(Relaxed) {
        match outbound.run(device, socket, context.table.current()) {
            Ok(0) if looks > 0 => {
                looks -= 1;
                thread::yield_now();
            }
            Ok(0) => context.wait(device.fd()),
            Ok(_) => looks = LOOKS,
            // The device was deleted: there is nothing left to serve, and the engine's owner sees it.
            Err(error) if error.raw_os_error() == Some(libc::EBADFD) => return,
            Err(_) => context.pause(),
        }
    }
}

/// Runs the inbound half until told to stop.
pub(crate) fn inbound<D: Device, S: Socket, A: Answers>(
    mut inbound: Inbound<A>,
    device: &D,
    socket: &S,
    counters: &impl AsRef<Direction>,
    mut context: Context,
) {
    let (mut errors, mut looks) = (0, 0);
    while !context.stopping.load(Relaxed) {
        match inbound.run(device, socket, context.table.current()) {
            Ok(0) if looks > 0 => {
                looks -= 1;
                thread::yield_now();
            }
            Ok(0) => {
                errors = 0;
                context.wait(socket.fd());
            }
            Ok(_) => (errors, looks) = (0, LOOKS),
            // Left over from a send: taken off the socket by this report. Only a socket that gives nothing
            // else is broken.
            Err(error) => {
                counters.as_ref().pending_errors.add(1);
                errors += 1;
                if errors > 64 || error.kind() == io::ErrorKind::InvalidInput {
                    context.pause();
                }
            }
        }
    }
}
