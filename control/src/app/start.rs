//! The start, step by step.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use felt_hostnet::subnet_env::{FamilyNets, Previous, SubnetEnv};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::runner::{self, Inbox, Runner, Running};
use super::takeover::{self, Place};
use super::{Exit, LEAVE_LIMIT, registry};
use crate::api::Phase;
use crate::backend::{self, Backend, Context};
use crate::cli::{Handover, Options, ProcessEnv, Strings};
use crate::iface::{self, External, Machine, Stack, Wishes};
use crate::lease::{Lease, LeaseSet, SubnetKey};
use crate::netconfig::NetworkConfig;
use crate::state::NodeState;
use crate::subnet::{AcquireError, KeepState, SubnetManager};
use crate::traffic::{self, TrafficConfig};
use crate::view::View;
use crate::{health, notify};

/// Shortest and longest pause between two tries of the same thing.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));
/// How long a machine that boots may take to get its default route.
const INTERFACE_PATIENCE: Duration = Duration::from_secs(20);
/// Longest wait for the first list of leases.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(3);
/// Between two tries to get the health server's port from a predecessor.
const PORT_PAUSE: Duration = Duration::from_millis(10);
/// How often taking a lease is tried while the registry does not answer.
const ACQUIRE_TRIES: u32 = 5;

/// Brings everything up; returns when packets flow.
pub(super) async fn start(
    options: &Arc<Options>,
    view: &Arc<View>,
    cancel: &CancellationToken,
    env: &dyn Strings,
) -> Result<Running, Exit> {
    let tasks = TaskTracker::new();
    let state = NodeState::load(&options.state_dir).unwrap_or_else(|error| {
        tracing::warn!("{error}: the node forgets its id and VTEP addresses at the next start");
        NodeState::in_memory()
    });
    let previous = Previous::read(&options.subnet_file).unwrap_or_else(|error| {
        tracing::warn!("{error}: no previous subnet is known");
        Previous::default()
    });
    let registry = registry::open(options).await?;
    {
        let mut inner = view.lock();
        inner.registry = registry.name();
        inner.node_id = state.node_id().to_owned();
    }
    let predecessor = match takeover::find(options).await? {
        Place::Free(admin) => {
            tasks.spawn(admin.serve(Arc::clone(view), cancel.clone()));
            serve_health(options, view, &tasks, cancel, Instant::now()).await?;
            None
        }
        Place::Taken(predecessor) => Some(Arc::new(predecessor)),
    };

    let net = network_config(&*registry).await;
    for note in &net.notes {
        tracing::warn!("network configuration: {note}");
    }
    view.lock().net = Some(net.clone());
    let external = external(options, &net, &*registry).await?;
    view.lock().external = Some(external.clone());
    tracing::info!(
        "using interface {} (MTU {}), advertising {}",
        external.name,
        external.mtu,
        join(external.public_v4, external.public_v6)
    );

    let context = Context {
        options: Arc::clone(options),
        net: net.clone(),
        external,
        state,
        succeeds: predecessor.is_some(),
        previous_networks: previous.networks(),
    };
    let mut backend = blocking(move || backend::create(context)).await?.map_err(Exit::failure)?;
    let lease = acquire(&mut backend, &*registry, &net, previous_key(&previous, &net)).await?;
    tracing::info!("lease {} acquired from {}", lease.key, registry.name());
    {
        let mut inner = view.lock();
        inner.leases = LeaseSet::new(Some(lease.key));
        inner.keep.expiration = lease.expiration;
        inner.lease = Some(lease.clone());
    }
    let (deliveries, mut mailbox) = mpsc::channel(16);
    tasks.spawn({
        let (registry, cancel) = (Arc::clone(&registry), cancel.clone());
        async move { registry.watch(deliveries, cancel).await }
    });
    // The first packet shall find the other nodes; a registry that falls silent just now does not keep the node down.
    let pending = match timeout(SNAPSHOT_PATIENCE, mailbox.recv()).await {
        Ok(Some(snapshot)) => {
            let events = view.deliver(snapshot);
            runner::log(&events);
            backend.prepare(events)
        }
        _ => {
            tracing::warn!("the registry has not told the other nodes' leases within {SNAPSHOT_PATIENCE:?}");
            Vec::new()
        }
    };
    let (started, flags, from) = (lease.clone(), Arc::clone(options), predecessor.clone());
    let backend = blocking(move || {
        takeover::start_backend(&mut *backend, &started, &flags, from.as_deref())?;
        if !pending.is_empty() {
            backend.apply(pending);
        }
        Ok::<_, Exit>(backend)
    })
    .await??;
    view.lock().report = Some(backend.report());
    if let Some(predecessor) = &predecessor {
        let admin = predecessor.admin_socket()?;
        tasks.spawn(admin.serve(Arc::clone(view), cancel.clone()));
        // Its health server ends as it leaves.
        serve_health(options, view, &tasks, cancel, Instant::now() + LEAVE_LIMIT).await?;
    }

    install_rules(options, &net, &lease, &previous, view, &tasks, cancel).await?;
    write_subnet_file(options, &net, &lease, backend.mtu()).await?;
    {
        let mut inner = view.lock();
        inner.subnet_file_written = true;
        inner.phase = Some(Phase::Running);
    }
    let (offer, offers) = mpsc::channel(1);
    let inbox = Inbox { deliveries: mailbox, offers };
    let runner = Runner::spawn(backend, inbox, Arc::clone(view), cancel.clone())?;
    if options.handover != Handover::Refuse {
        view.lock().handover = Some(offer);
    }
    let (keep_state, keep_seen) =
        watch::channel(KeepState { expiration: lease.expiration, ..KeepState::default() });
    tasks.spawn(follow_keep(Arc::clone(view), keep_seen));
    let keeper = tokio::spawn({
        let (registry, cancel) = (Arc::clone(&registry), cancel.clone());
        async move { registry.keep(lease, cancel, keep_state).await }
    });
    let notified = if predecessor.is_some() { notify::succeeded(env) } else { notify::ready(env) };
    if let Err(error) = notified {
        tracing::warn!("tell the service manager that the node is ready: {error}");
    }
    let period = notify::watchdog_period(env);
    tasks.spawn({
        let (view, cancel) = (Arc::clone(view), cancel.clone());
        async move { notify::watchdog(period, &ProcessEnv, &view, cancel).await }
    });
    tracing::info!("running after {} ms", view.uptime().as_millis());
    Ok(Running { runner, keeper, tasks, view: Arc::clone(view) })
}

/// Starts the health server, if there is to be one; its port may be taken until `deadline`.
async fn serve_health(
    options: &Options,
    view: &Arc<View>,
    tasks: &TaskTracker,
    cancel: &CancellationToken,
    deadline: Instant,
) -> Result<(), Exit> {
    if options.healthz_port == 0 {
        return Ok(());
    }
    loop {
        match health::bind(&options.healthz_ip, options.healthz_port).await {
            Ok(listener) => {
                tasks.spawn(health::serve(listener, Arc::clone(view), cancel.clone()));
                return Ok(());
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                sleep(PORT_PAUSE).await;
            }
            Err(error) => {
                let (ip, port) = (&options.healthz_ip, options.healthz_port);
                return Err(Exit::health(format!("health server on {ip}:{port}: {error}")));
            }
        }
    }
}

/// Runs `work` on a thread that may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Exit> {
    spawn_blocking(work).await.map_err(|error| Exit::failure(format!("start: {error}")))
}

/// Waits for a usable network configuration.
async fn network_config(registry: &dyn SubnetManager) -> NetworkConfig {
    let mut pause = PAUSE.0;
    loop {
        match registry.network_config().await {
            Ok(net) => return net,
            Err(error) => tracing::error!("{error} (waiting for it)"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

/// Chooses the interface; waits a while for a machine that is still booting.
async fn external(
    options: &Options,
    net: &NetworkConfig,
    registry: &dyn SubnetManager,
) -> Result<External, Exit> {
    let stack = Stack::new(net.ipv4.is_some(), net.ipv6.is_some())
        .ok_or_else(|| Exit::failure("neither IPv4 nor IPv6 is enabled in the network configuration"))?;
    let stored = registry.stored_public_ips().await.map_err(Exit::failure)?;
    let wishes = Wishes {
        iface: options.iface.clone(),
        iface_regex: options.iface_regex.clone(),
        can_reach: options.iface_can_reach.clone(),
        public_ip: stored.0.map_or_else(|| options.public_ip.clone(), |ip| ip.to_string()),
        public_ipv6: stored.1.map_or_else(|| options.public_ipv6.clone(), |ip| ip.to_string()),
    };
    let deadline = Instant::now() + INTERFACE_PATIENCE;
    loop {
        let wishes = wishes.clone();
        let machine = blocking(Machine::read).await?.map_err(Exit::failure)?;
        match iface::select(&wishes, stack, &machine) {
            Ok(external) => return Ok(external),
            Err(error) if error.may_pass() && Instant::now() < deadline => {
                tracing::warn!("{error}; trying again")
            }
            Err(error) => return Err(Exit::failure(error)),
        }
        sleep(PAUSE.0).await;
    }
}

async fn acquire(
    backend: &mut Box<dyn Backend>,
    registry: &dyn SubnetManager,
    net: &NetworkConfig,
    previous: Option<SubnetKey>,
) -> Result<Lease, Exit> {
    let mut pause = PAUSE.0;
    for left in (0..ACQUIRE_TRIES).rev() {
        match try_acquire(backend, registry, net, previous).await {
            Ok(lease) => return Ok(lease),
            Err(AcquireError::Registry(error)) if left > 0 => tracing::warn!("{error}; trying again"),
            Err(error) => return Err(Exit::failure(format!("acquire a lease: {error}"))),
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
    Err(Exit::failure("acquire a lease: no more tries"))
}

async fn try_acquire(
    backend: &mut Box<dyn Backend>,
    registry: &dyn SubnetManager,
    net: &NetworkConfig,
    previous: Option<SubnetKey>,
) -> Result<Lease, AcquireError> {
    let unusable = |error: backend::BackendError| AcquireError::Unusable(error.to_string());
    // Only who asks is of interest for finding an existing lease.
    let plain = backend.public_attrs();
    let existing = registry.own_lease(&plain).await?;
    let attrs = backend.attrs(existing.as_ref()).map_err(unusable)?;
    registry.acquire(net, &attrs, previous).await
}

/// The subnet of the earlier run, as far as it is of the families the network has now.
fn previous_key(previous: &Previous, net: &NetworkConfig) -> Option<SubnetKey> {
    SubnetKey::new(
        previous.subnet.filter(|_| net.ipv4.is_some()),
        previous.ipv6_subnet.filter(|_| net.ipv6.is_some()),
    )
}

/// Puts the traffic rules in and keeps them. A failure leaves the node up and not ready, and is tried again.
async fn install_rules(
    options: &Options,
    net: &NetworkConfig,
    lease: &Lease,
    previous: &Previous,
    view: &Arc<View>,
    tasks: &TaskTracker,
    cancel: &CancellationToken,
) -> Result<(), Exit> {
    let manager = traffic::Manager::new(TrafficConfig {
        mode: if net.nftables { traffic::Mode::Nftables } else { traffic::Mode::Iptables },
        v4: net.ipv4.zip(lease.key.v4),
        v6: net.ipv6.zip(lease.key.v6),
        masquerade: options.ip_masq,
        forward: options.iptables_forward_rules,
        fully_random: !options.ip_masq_fully_random_disable,
        blackhole: options.ip_blackhole_route.unwrap_or(true),
        previous: previous.subnets(),
    });
    view.lock().rules = Some(manager.counters());
    let first = manager.clone();
    if let Err(error) = blocking(move || first.start()).await? {
        tracing::error!("install traffic rules: {error}; the node works without them until they are in");
        view.lock().rules_missing = Some(error.to_string());
    }
    let (view, cancel, period) = (Arc::clone(view), cancel.clone(), options.iptables_resync);
    tasks.spawn(async move {
        let counters = manager.counters();
        let cleared = async {
            // The first round without a failure after a failed start means that the rules are in.
            let failures = counters.failures();
            tokio::time::sleep(period + Duration::from_secs(1)).await;
            let mut seen = failures;
            while view.lock().rules_missing.is_some() {
                let now = counters.failures();
                if now == seen {
                    view.lock().rules_missing = None;
                }
                seen = now;
                tokio::time::sleep(period + Duration::from_secs(1)).await;
            }
        };
        tokio::join!(manager.run(period, cancel.clone()), async {
            tokio::select! { () = cleared => {}, () = cancel.cancelled() => {} }
        });
    });
    Ok(())
}

async fn write_subnet_file(
    options: &Arc<Options>,
    net: &NetworkConfig,
    lease: &Lease,
    mtu: u32,
) -> Result<(), Exit> {
    let env = SubnetEnv {
        v4: net.ipv4.map(|network| FamilyNets { networks: vec![network], subnet: lease.key.v4 }),
        v6: net.ipv6.map(|network| FamilyNets { networks: vec![network], subnet: lease.key.v6 }),
        mtu,
        ip_masq: options.ip_masq,
    };
    let options = Arc::clone(options);
    blocking(move || env.write(&options.subnet_file)).await?.map_err(Exit::failure)
}

/// Copies the keeper's reports into the view.
async fn follow_keep(view: Arc<View>, mut seen: watch::Receiver<KeepState>) {
    loop {
        let state = seen.borrow_and_update().clone();
        view.lock().keep = state;
        if seen.changed().await.is_err() {
            return;
        }
    }
}

fn join(v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>) -> String {
    let v4 = v4.map(|ip| ip.to_string());
    let v6 = v6.map(|ip| ip.to_string());
    v4.into_iter().chain(v6).collect::<Vec<_>>().join(" and ")
}
