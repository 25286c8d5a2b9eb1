//! The running daemon: lease events into the backend, repairs, and leaving.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Exit, LEAVE_LIMIT};
use crate::api::Phase;
use crate::backend::Backend;
use crate::cli::Handover;
use crate::handover::{self, Offer, Wish};
use crate::lease::{Event, WatchResult};
use crate::subnet::KeepError;
use crate::view::View;

/// Changes of the tables are coalesced to one publication per this time.
const PUBLISH_PERIOD: Duration = Duration::from_millis(10);
/// How often the machine is compared with what should be.
const REPAIR_PERIOD: Duration = Duration::from_secs(2);

/// The thread that owns the backend.
pub(super) struct Runner {
    left: oneshot::Receiver<()>,
}

/// What reaches the backend's thread.
pub(super) struct Inbox {
    /// Deliveries of the watch.
    pub(super) deliveries: mpsc::Receiver<WatchResult>,
    /// Successors.
    pub(super) offers: mpsc::Receiver<Offer>,
}

impl Runner {
    /// Hands the backend to a thread of its own. It ends when `cancel` fires.
    pub(super) fn spawn(
        backend: Box<dyn Backend>,
        inbox: Inbox,
        view: Arc<View>,
        cancel: CancellationToken,
    ) -> Result<Self, Exit> {
        let (done, left) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        std::thread::Builder::new()
            .name("backend".into())
            .spawn(move || {
                drive(backend, inbox, &view, &cancel, &runtime);
                // Nobody waits for it when start was given up.
                let _ = done.send(());
            })
            .map_err(|error| Exit::failure(format!("start the backend's thread: {error}")))?;
        Ok(Self { left })
    }
}

/// What the backend's thread woke up for.
enum Wake {
    Delivery(WatchResult),
    Offer(Offer),
    Tick,
    Leave,
}

fn drive(
    mut backend: Box<dyn Backend>,
    mut inbox: Inbox,
    view: &View,
    cancel: &CancellationToken,
    runtime: &tokio::runtime::Handle,
) {
    let mut next_repair = Instant::now() + REPAIR_PERIOD;
    let mut synced = false;
    loop {
        view.beat();
        // The first full answer may have come before this thread did.
        if !synced && view.lock().synced {
            synced = true;
            backend.synced();
        }
        let wake = runtime.block_on(async {
            tokio::select! {
                () = cancel.cancelled() => Wake::Leave,
                delivery = inbox.deliveries.recv() => delivery.map_or(Wake::Leave, Wake::Delivery),
                Some(offer) = inbox.offers.recv() => Wake::Offer(offer),
                () = tokio::time::sleep_until(next_repair.into()) => Wake::Tick,
            }
        });
        match wake {
            Wake::Leave => break,
            Wake::Offer(offer) => {
                if hand_over(&mut *backend, offer, view, runtime) {
                    break;
                }
            }
            Wake::Tick => {
                for done in backend.repair() {
                    tracing::warn!("repaired {done}");
                    view.lock().repairs += 1;
                }
                next_repair = Instant::now() + REPAIR_PERIOD;
            }
            Wake::Delivery(first) => {
                let mut events = view.deliver(first);
                while let Ok(more) = inbox.deliveries.try_recv() {
                    events.extend(view.deliver(more));
                }
                log(&events);
                if !events.is_empty() {
                    backend.apply(events);
                    std::thread::sleep(PUBLISH_PERIOD);
                }
            }
        }
    }
    backend.stop();
}

/// Longest wait for a successor's connection after the answer to its request.
const CONNECTION_LIMIT: Duration = Duration::from_secs(2);

/// Gives the packets to a successor; says whether it has them.
fn hand_over(backend: &mut dyn Backend, offer: Offer, view: &View, runtime: &tokio::runtime::Handle) -> bool {
    let successor = offer.wish.pid;
    let verdict = served(backend, view).admit(&offer.wish);
    if let Err(reason) = &verdict {
        tracing::warn!("process {successor} asks for this node's packets and does not get them: {reason}");
    }
    let refused = verdict.is_err();
    if offer.verdict.send(verdict).is_err() || refused {
        return false;
    }
    let stream = runtime.block_on(async { tokio::time::timeout(CONNECTION_LIMIT, offer.stream).await });
    let Ok(Ok(stream)) = stream else {
        tracing::warn!("process {successor} asked for this node's packets and went away");
        return false;
    };
    let begun = Instant::now();
    match handover::hand_over(&stream, || backend.release()) {
        Ok(()) => {
            // Before the successor hears that the connection ends.
            view.lock().handed_over = true;
            tracing::info!("handed over to process {successor} in {} ms", begun.elapsed().as_millis());
            true
        }
        Err((error, released)) => {
            tracing::warn!("handing over to process {successor} failed, going on: {error}");
            if let Some(released) = released {
                backend.take_back(released);
            }
            false
        }
    }
}

/// What this daemon serves.
fn served(backend: &dyn Backend, view: &View) -> Wish {
    let lease = view.lock().lease.as_ref().map(|lease| lease.key.to_string());
    Wish {
        version: crate::api::VERSION,
        pid: std::process::id(),
        subnet_file: view.options().subnet_file.display().to_string(),
        lease: lease.unwrap_or_default(),
        planes: backend.planes(),
    }
}

pub(super) fn log(events: &[Event]) {
    // A cluster that starts has thousands; the number says enough then.
    if events.len() > 20 {
        tracing::info!("{} leases changed", events.len());
        return;
    }
    for event in events {
        match event {
            Event::Added(lease) => tracing::info!("lease {} added or changed", lease.key),
            Event::Removed(lease) => tracing::info!("lease {} removed", lease.key),
        }
    }
}

/// A daemon in full swing.
pub(super) struct Running {
    pub(super) runner: Runner,
    pub(super) keeper: JoinHandle<Result<(), KeepError>>,
    pub(super) tasks: TaskTracker,
    pub(super) view: Arc<View>,
}

impl Running {
    /// Waits for the end and leaves in order: watch and lease first, packets last. `signal` fires at a signal, `cancel`
    /// ends the parts.
    pub(super) async fn until_cancelled(
        mut self,
        signal: &CancellationToken,
        cancel: &CancellationToken,
    ) -> Result<(), Exit> {
        let result = tokio::select! {
            // First: after a signal the lease's keeper and the backend's thread end too, perhaps sooner than this looks.
            biased;
            () = cancel.cancelled() => Ok(()),
            kept = &mut self.keeper => match kept {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(Exit::failure(error)),
                Err(error) => Err(Exit::failure(format!("keep the lease: {error}"))),
            },
            _ = &mut self.runner.left => {
                if self.view.lock().handed_over { Ok(()) } else { Err(Exit::failure("the backend's thread ended")) }
            }
        };
        self.view.lock().phase = Some(Phase::Stopping);
        cancel.cancel();
        self.tasks.close();
        let leave = async {
            self.tasks.wait().await;
            if !self.runner.left.is_terminated() {
                let _ = (&mut self.runner.left).await;
            }
        };
        if tokio::time::timeout(LEAVE_LIMIT, leave).await.is_err() {
            tracing::warn!("leaving took more than {} s, ending anyway", LEAVE_LIMIT.as_secs());
        }
        if self.view.lock().handed_over && self.view.options().handover == Handover::Wait {
            tracing::info!("waiting for a signal, as --handover=wait has it");
            signal.cancelled().await;
        }
        result
    }
}
