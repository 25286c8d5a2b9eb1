//! The file registry: leases as files in a directory, for nodes without any server.
//!
//! `DIR/config` holds the network configuration, `DIR/subnets/10.244.1.0-24` one lease each, under the name and with the
//! JSON of flannel's etcd keys plus `"Expiration"` (RFC 3339). A file without it is a reservation: it never expires
//! and is renewed by nobody. Several daemons of one machine share a directory; network file systems are not
//! supported.
//!
//! Invariants: a lease appears by hard link, so only where none was, and changes by rename, so no reader sees half
//! a file. A file that is no lease is never written, removed or reported; it is logged once. A lease may be removed
//! by anyone [`GRACE`] after its expiration.

mod dir;
mod notify;
mod scan;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::dir::{Content, Directory};
use self::notify::{Change, DirWatch};
use self::scan::Scanner;
use super::alloc::{self, Step, same_node};
use super::published::Published;
use super::term::Term;
use super::{AcquireError, ConfigError, KeepError, KeepState, SubnetError, SubnetManager};
use crate::lease::{Lease, LeaseAttrs, SubnetKey, WatchResult};
use crate::netconfig::{NetworkConfig, NetworkConfigError, Source};

/// How long after its expiration a lease may be removed by others than its owner.
pub const GRACE: Duration = Duration::from_secs(60);

/// A full look at the directory happens at least this often, whatever inotify says.
const RESCAN: Duration = Duration::from_secs(10);
/// More time between full looks per known lease, which keeps their cost below a thousandth of a core.
const RESCAN_PER_LEASE: Duration = Duration::from_millis(2);
/// Shortest time between two repairs of an own lease that somebody else keeps writing.
const REPAIR_PAUSE: Duration = Duration::from_secs(10);
/// How often a create lost to another node is tried again with a new choice.
const TRIES: u32 = 100;

/// Leases in a directory.
#[derive(Debug, Clone)]
pub struct FileManager {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    root: PathBuf,
    dir: Directory,
    term: Term,
    published: Published,
}

impl FileManager {
    /// A registry in the directory `root`, which need not exist yet.
    pub fn new(root: &Path, term: Term) -> Self {
        let dir = Directory::new(root.join("subnets"));
        let shared = Shared { root: root.to_owned(), dir, term, published: Published::default() };
        FileManager { shared: Arc::new(shared) }
    }

    /// Runs `work`, which does file I/O, where it may block.
    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce(&Shared) -> T + Send + 'static) -> T {
        let shared = Arc::clone(&self.shared);
        match tokio::task::spawn_blocking(move || work(&shared)).await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // A blocking task is cancelled only when the runtime is gone, and this one with it.
                Err(_) => std::future::pending().await,
            },
        }
    }
}

/// What became of the own lease.
enum Held {
    /// It is ours, as given.
    Ours { lease: Lease, written: bool },
    /// Another node has it.
    Other(LeaseAttrs),
}

impl Shared {
    fn failed(&self, what: &str) -> impl Fn(io::Error) -> SubnetError + use<> {
        let what = format!("{what} in {}", self.dir.path().display());
        move |source| SubnetError::Failed { what: what.clone(), source: Box::new(source) }
    }

    fn expiration(&self) -> SystemTime {
        SystemTime::now() + self.term.ttl()
    }

    fn config(&self) -> Result<NetworkConfig, ConfigError> {
        let path = self.root.join("config");
        let place = path.display().to_string();
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let hint = r#"write one, for example {"Network":"10.244.0.0/16","Backend":{"Type":"vxlan"}}"#;
                return Err(ConfigError::Missing { place, hint: hint.to_owned() });
            }
            Err(e) => {
                let what = format!("read {place}");
                return Err(SubnetError::Failed { what, source: Box::new(e) }.into());
            }
        };
        NetworkConfig::parse(&text, Source::Registry)
            .map_err(|e: NetworkConfigError| ConfigError::Invalid { place, reason: e.to_string() })
    }

    fn leases(&self) -> Result<Vec<Lease>, SubnetError> {
        Ok(self.dir.list().map_err(self.failed("list leases"))?.leases)
    }

    /// Removes what nobody has renewed for [`GRACE`]. The caller holds the lock.
    fn reap(&self, leases: &mut Vec<Lease>) {
        let now = SystemTime::now();
        leases.retain(|lease| {
            if !dir::is_abandoned(lease, now) {
                return true;
            }
            match self.dir.remove(&lease.key) {
                Ok(removed) => {
                    if removed {
                        info!(
                            "removed lease {}, not renewed since {}",
                            lease.key,
                            dir::rfc3339(lease.expiration)
                        );
                    }
                    false
                }
                Err(error) => {
                    warn!("cannot remove expired lease {}: {error}", lease.key);
                    true
                }
            }
        });
    }

    fn acquire(
        &self,
        net: &NetworkConfig,
        attrs: &LeaseAttrs,
        previous: Option<SubnetKey>,
    ) -> Result<Lease, AcquireError> {
        let failed = self.failed("take a lease");
        for attempt in 0..TRIES {
            let _lock = self.dir.lock().map_err(&failed)?;
            let mut found = self.dir.list_with_abandoned().map_err(&failed)?;
            self.reap(&mut found.leases);
            let rng = &mut rand::rng();
            let plan = alloc::plan(net, attrs, previous, &found.leases, &found.unreadable, attempt, rng);
            for lease in &plan.discard {
                info!("giving up lease {}, which does not fit the network configuration", lease.key);
                self.dir.remove(&lease.key).map_err(&failed)?;
            }
            match plan.step {
                Step::Reuse(old) => {
                    let expiration = old.expiration.map(|_| self.expiration());
                    let lease = Lease { key: old.key, attrs: attrs.clone(), expiration };
                    self.dir.replace(&lease).map_err(&failed)?;
                    self.published.set(&lease);
                    return Ok(lease);
                }
                Step::Create(key) => {
                    let lease = Lease { key, attrs: attrs.clone(), expiration: Some(self.expiration()) };
                    if self.dir.create(&lease).map_err(&failed)? {
                        self.published.set(&lease);
                        return Ok(lease);
                    }
                }
                Step::Exhausted => {
                    return Err(AcquireError::OutOfSubnets {
                        network: alloc::describe(net),
                        leases: found.leases.len(),
                    });
                }
            }
        }
        Err(AcquireError::Raced { tries: TRIES })
    }

    /// Looks at the own lease and writes it when it is due, missing, or was changed.
    fn hold(&self, lease: &Lease, may_repair: bool) -> io::Result<Held> {
        let peek = self.dir.read(&lease.key)?;
        if let Content::Lease(found) = &peek
            && found.attrs == self.published.attrs(lease)
            && !self.is_due(found)
        {
            return Ok(Held::Ours { lease: found.clone(), written: false });
        }

        let _lock = self.dir.lock()?;
        // Asked under the lock, which whoever publishes other attributes holds as well.
        let attrs = self.published.attrs(lease);
        let found = self.dir.read(&lease.key)?;
        match &found {
            Content::Lease(found) if !same_node(&attrs, &found.attrs) => {
                if !dir::is_abandoned(found, SystemTime::now()) {
                    return Ok(Held::Other(found.attrs.clone()));
                }
            }
            Content::Lease(found) if !self.is_due(found) && (found.attrs == attrs || !may_repair) => {
                return Ok(Held::Ours { lease: found.clone(), written: false });
            }
            Content::Lease(_) | Content::Unreadable(_) => {}
            Content::Missing => {
                let others = self.dir.list()?.leases;
                let taken = others
                    .iter()
                    .find(|other| other.key.overlaps(&lease.key) && !same_node(&attrs, &other.attrs));
                if let Some(other) = taken {
                    return Ok(Held::Other(other.attrs.clone()));
                }
            }
        }
        let reserved = matches!(&found, Content::Lease(found) if found.expiration.is_none());
        let expiration = (!reserved).then(|| self.expiration());
        let new = Lease { key: lease.key, attrs, expiration };
        if matches!(found, Content::Missing) {
            warn!("lease {} was deleted; taking it again", lease.key);
            if !self.dir.create(&new)? {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, "another node was faster"));
            }
        } else {
            self.dir.replace(&new)?;
        }
        Ok(Held::Ours { lease: new, written: true })
    }

    fn is_due(&self, lease: &Lease) -> bool {
        lease.expiration.is_some_and(|end| self.term.until_renewal(end, SystemTime::now()).is_zero())
    }
}

#[async_trait]
impl SubnetManager for FileManager {
    fn name(&self) -> String {
        format!("directory {}", self.shared.root.display())
    }

    async fn network_config(&self) -> Result<NetworkConfig, ConfigError> {
        self.blocking(Shared::config).await
    }

    async fn own_lease(&self, attrs: &LeaseAttrs) -> Result<Option<Lease>, SubnetError> {
        let leases = self.list().await?;
        Ok(leases.into_iter().find(|lease| same_node(attrs, &lease.attrs)))
    }

    async fn acquire(
        &self,
        net: &NetworkConfig,
        attrs: &LeaseAttrs,
        previous: Option<SubnetKey>,
    ) -> Result<Lease, AcquireError> {
        let (net, attrs) = (net.clone(), attrs.clone());
        self.blocking(move |shared| shared.acquire(&net, &attrs, previous)).await
    }

    async fn watch(&self, tx: mpsc::Sender<WatchResult>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = tx.closed() => {}
            () = self.follow(&tx) => {}
        }
    }

    async fn keep(
        &self,
        lease: Lease,
        cancel: CancellationToken,
        state: watch::Sender<KeepState>,
    ) -> Result<(), KeepError> {
        tokio::select! {
            () = cancel.cancelled() => Ok(()),
            error = self.renew(lease, &state) => Err(error),
        }
    }

    async fn list(&self) -> Result<Vec<Lease>, SubnetError> {
        self.blocking(Shared::leases).await
    }

    async fn remove(&self, key: &SubnetKey) -> Result<bool, SubnetError> {
        let key = *key;
        self.blocking(move |shared| {
            let failed = shared.failed(&format!("remove lease {key}"));
            let _lock = shared.dir.lock().map_err(&failed)?;
            shared.dir.remove(&key).map_err(&failed)
        })
        .await
    }
}

impl FileManager {
    /// Reports the leases and every change of them; returns when nobody listens any more.
    async fn follow(&self, tx: &mpsc::Sender<WatchResult>) {
        let mut notify = DirWatch::new(self.shared.dir.path());
        let mut scanner = Scanner::default();
        let mut names = None;
        let mut first = true;
        let mut failing = false;
        loop {
            // Armed before looking, so that nothing falls between the two.
            notify.arm();
            let (back, result) = self
                .blocking(move |shared| {
                    let result = match names {
                        Some(names) => scanner.look_at(&shared.dir, names),
                        None => scanner.look_at_all(&shared.dir),
                    };
                    let abandoned = scanner.abandoned();
                    if !abandoned.is_empty()
                        && let Ok(Some(_lock)) = shared.dir.lock()
                        && let Ok(found) = shared.dir.list_with_abandoned()
                    {
                        // Read again under the lock: the owner may have renewed it just now.
                        let mut leases = found.leases;
                        leases.retain(|lease| abandoned.contains(&lease.key));
                        shared.reap(&mut leases);
                    }
                    (scanner, result)
                })
                .await;
            scanner = back;
            let failed = result.is_err();
            match result {
                Ok(_) if first => {
                    first = false;
                    if tx.send(WatchResult::Snapshot(scanner.leases())).await.is_err() {
                        return;
                    }
                }
                Ok(events) if !events.is_empty() => {
                    if tx.send(WatchResult::Events(events)).await.is_err() {
                        return;
                    }
                }
                Ok(_) => {}
                Err(error) if !failing => {
                    warn!("cannot read {}: {error}; keeping what is known", self.shared.dir.path().display());
                }
                Err(_) => {}
            }
            failing = failed;
            let pause = RESCAN + RESCAN_PER_LEASE * u32::try_from(scanner.len()).unwrap_or(u32::MAX);
            names = match notify.changed(pause).await {
                Change::Names(names) => Some(names),
                Change::Unknown => None,
            };
        }
    }

    /// Keeps the lease until another node holds it.
    async fn renew(&self, mut lease: Lease, state: &watch::Sender<KeepState>) -> KeepError {
        let term = self.shared.term;
        let mut notify = DirWatch::new(self.shared.dir.path());
        let name = lease.key.to_string();
        let mut repaired: Option<tokio::time::Instant> = None;
        state.send_modify(|state| {
            state.expiration = lease.expiration;
            state.renewed_at = Some(SystemTime::now());
        });
        loop {
            notify.arm();
            let may_repair = repaired.is_none_or(|at| at.elapsed() >= REPAIR_PAUSE);
            let held = {
                let lease = lease.clone();
                self.blocking(move |shared| shared.hold(&lease, may_repair)).await
            };
            let mut pause = RESCAN;
            match held {
                Ok(Held::Ours { lease: found, written }) => {
                    if written {
                        repaired = Some(tokio::time::Instant::now());
                    }
                    state.send_if_modified(|state| {
                        let before = state.clone();
                        state.expiration = found.expiration;
                        state.failures = 0;
                        state.last_error = None;
                        if written {
                            state.renewed_at = Some(SystemTime::now());
                        }
                        *state != before
                    });
                    if let Some(end) = found.expiration {
                        pause = pause.min(term.until_renewal(end, SystemTime::now()));
                    }
                    lease = found;
                }
                Ok(Held::Other(attrs)) => {
                    return KeepError::TakenByOther { key: lease.key, holder: alloc::holder(&attrs) };
                }
                Err(error) => {
                    pause = term.retry_pause().min(RESCAN);
                    let text = format!("renew lease {name} in {}: {error}", self.shared.dir.path().display());
                    state.send_modify(|state| {
                        if state.failures == 0 {
                            warn!("{text}; trying again every {pause:?}");
                        }
                        state.failures += 1;
                        state.last_error = Some(text);
                    });
                }
            }
            let deadline = tokio::time::Instant::now() + pause;
            loop {
                let left = deadline.saturating_duration_since(tokio::time::Instant::now());
                match notify.changed(left).await {
                    Change::Names(names) if !names.iter().any(|changed| changed == name.as_str()) => {}
                    _ => break,
                }
            }
        }
    }
}
