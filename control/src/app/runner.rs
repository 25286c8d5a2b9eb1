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

impl Runner {
    /// Hands the backend to a thread of its own. It ends when `cancel` fires.
    pub(super) fn spawn(
        backend: Box<dyn Backend>,
        mailbox: mpsc::Receiver<WatchResult>,
        view: Arc<View>,
        cancel: CancellationToken,
    ) -> Result<Self, Exit> {
        let (done, left) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        std::thread::Builder::new()
            .name("backend".into())
            .spawn(move || {
                drive(backend, mailbox, &view, &cancel, &runtime);
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
    Tick,
    Leave,
}

fn drive(
    mut backend: Box<dyn Backend>,
    mut mailbox: mpsc::Receiver<WatchResult>,
    view: &View,
    cancel: &CancellationToken,
    runtime: &tokio::runtime::Handle,
) {
    let mut next_repair = Instant::now() + REPAIR_PERIOD;
    loop {
        view.beat();
        let wake = runtime.block_on(async {
            tokio::select! {
                () = cancel.cancelled() => Wake::Leave,
                delivery = mailbox.recv() => delivery.map_or(Wake::Leave, Wake::Delivery),
                () = tokio::time::sleep_until(next_repair.into()) => Wake::Tick,
            }
        });
        match wake {
            Wake::Leave => break,
            Wake::Tick => {
                for done in backend.repair() {
                    tracing::warn!("repaired {done}");
                    view.lock().repairs += 1;
                }
                next_repair = Instant::now() + REPAIR_PERIOD;
            }
            Wake::Delivery(first) => {
                let mut events = view.deliver(first);
                while let Ok(more) = mailbox.try_recv() {
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

fn log(events: &[Event]) {
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
    /// Waits for the end and leaves in order: watch and lease first, packets last.
    pub(super) async fn until_cancelled(mut self, cancel: &CancellationToken) -> Result<(), Exit> {
        let result = tokio::select! {
            // First: after a signal the lease's keeper and the backend's thread end too, perhaps sooner than this looks.
            biased;
            () = cancel.cancelled() => Ok(()),
            kept = &mut self.keeper => match kept {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(Exit::failure(error)),
                Err(error) => Err(Exit::failure(format!("keep the lease: {error}"))),
            },
            _ = &mut self.runner.left => Err(Exit::failure("the backend's thread ended")),
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
        result
    }
}
