//! What the registries' tests share: running watches and keepers, and servers to run them against.
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod apiserver;
pub(crate) mod certs;
pub(crate) mod etcd;
pub(crate) mod etcd_fixture;
pub(crate) mod kube_api;
pub(crate) mod kube_fixture;
pub(crate) mod proxy;

use std::time::{Duration, Instant};

use felt_control::lease::{Event, Lease, WatchResult};
use felt_control::subnet::{KeepError, KeepState, SubnetManager};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// For conditions that normally hold within milliseconds.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A watch whose results are collected.
pub(crate) struct Watch {
    pub(crate) rx: mpsc::Receiver<WatchResult>,
    pub(crate) cancel: CancellationToken,
}

impl Watch {
    pub(crate) fn start<M: SubnetManager + Clone + 'static>(manager: &M) -> Watch {
        let (tx, rx) = mpsc::channel(16);
        let cancel = CancellationToken::new();
        let (manager, token) = (manager.clone(), cancel.clone());
        tokio::spawn(async move { manager.watch(tx, token).await });
        Watch { rx, cancel }
    }

    pub(crate) async fn next(&mut self) -> WatchResult {
        tokio::time::timeout(SOON, self.rx.recv()).await.expect("nothing reported").expect("watch ended")
    }

    /// The next events, one at a time.
    pub(crate) async fn event(&mut self) -> Event {
        match self.next().await {
            WatchResult::Events(mut events) if events.len() == 1 => events.remove(0),
            other => panic!("not one event: {other:?}"),
        }
    }
}

/// A running `keep`.
pub(crate) struct Keep {
    pub(crate) cancel: CancellationToken,
    pub(crate) state: watch::Receiver<KeepState>,
    pub(crate) task: tokio::task::JoinHandle<Result<(), KeepError>>,
}

impl Keep {
    pub(crate) fn start<M: SubnetManager + Clone + 'static>(manager: &M, lease: Lease) -> Keep {
        let (tx, state) = watch::channel(KeepState::default());
        let cancel = CancellationToken::new();
        let (manager, token) = (manager.clone(), cancel.clone());
        let task = tokio::spawn(async move { manager.keep(lease, token, tx).await });
        Keep { cancel, state, task }
    }

    pub(crate) async fn until(&mut self, what: &str, test: impl Fn(&KeepState) -> bool) {
        tokio::time::timeout(SOON, self.state.wait_for(|state| test(state)))
            .await
            .unwrap_or_else(|_| panic!("never {what}"))
            .expect("keep ended");
    }

    pub(crate) async fn stop(self) {
        self.cancel.cancel();
        self.task.await.unwrap().unwrap();
    }
}

/// Waits for a condition that nobody announces.
pub(crate) async fn eventually(what: &str, test: impl Fn() -> bool) {
    let begin = Instant::now();
    while !test() {
        assert!(begin.elapsed() < SOON, "never {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
