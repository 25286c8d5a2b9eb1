//! `felt-cni gc [--dry-run]`: clears what dead pods left, without a runtime.
//!
//! What is alive is asked of the kernel: every namespace that a process is in or that has a name, and
//! the addresses configured there. A reservation whose address is in none of them, and which is older
//! than a minute (an ADD may be under way), belongs to a dead pod. Rules and state files of a
//! container go when all its reservations are dead and the runtime's cache names no living namespace.
//! Containers that neither a reservation nor the cache knows are left alone.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use felt_hostnet::netlink::{Family, Handle, TcHandle};
use felt_hostnet::netns::NetNs;

use crate::json::Value;
use crate::plugins;
use crate::types::error::{Error, Result};

/// Younger reservations may belong to an ADD under way.
const GRACE: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Options {
    dry_run: bool,
    data_dir: PathBuf,
    cache_dir: PathBuf,
    flannel_dir: PathBuf,
    grace: Duration,
}

/// Runs the command.
///
/// # Errors
/// A text for standard error.
pub fn run(args: &[String]) -> std::result::Result<String, String> {
    let mut options = Options {
        dry_run: false,
        data_dir: "/var/lib/cni/networks".into(),
        cache_dir: "/var/lib/cni/results".into(),
        flannel_dir: "/var/lib/cni/flannel".into(),
        grace: GRACE,
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let (name, inline) = match arg.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (arg.as_str(), None),
        };
        if name == "--dry-run" {
            options.dry_run = true;
            continue;
        }
        let value =
            inline.or_else(|| args.next().cloned()).ok_or_else(|| format!("gc: {name} needs a value"))?;
        match name {
            "--data-dir" => options.data_dir = value.into(),
            "--cache-dir" => options.cache_dir = value.into(),
            "--flannel-dir" => options.flannel_dir = value.into(),
            "--grace" => {
                let seconds = value
                    .trim_end_matches('s')
                    .parse()
                    .map_err(|_| format!("gc: {value:?} is no time in seconds"))?;
                options.grace = Duration::from_secs(seconds);
            }
            other => return Err(format!("gc: unknown argument {other:?}")),
        }
    }
    collect(&options).map_err(|err| format!("gc: {err}"))
}

/// One reservation on disk.
struct Reservation {
    path: PathBuf,
    network: String,
    id: String,
    dead: bool,
}

fn collect(options: &Options) -> Result<String> {
    let living = living_addresses()?;
    let cached = cached_attachments(&options.cache_dir);
    let reservations = reservations(options, &living)?;
    let mut said = String::new();
    let mut act = |what: String, work: &dyn Fn() -> Result<()>| -> Result<()> {
        said.push_str(&format!("{} {what}\n", if options.dry_run { "would remove" } else { "removed" }));
        if options.dry_run { Ok(()) } else { work() }
    };

    let mut known: BTreeMap<(String, String), bool> = BTreeMap::new();
    for r in &reservations {
        *known.entry((r.network.clone(), r.id.clone())).or_insert(false) |= !r.dead;
    }
    for ((network, id), alive) in &cached {
        *known.entry((network.clone(), id.clone())).or_insert(false) |= alive;
    }
    let dead: BTreeSet<&(String, String)> =
        known.iter().filter(|(_, alive)| !**alive).map(|(k, _)| k).collect();

    for (network, id) in &dead {
        for family in [Family::V4, Family::V6] {
            for rules in plugins::rules_of(family, network, id) {
                act(format!("{rules} of {network}/{id}"), &|| plugins::remove_rules(family, network, id))?;
            }
        }
        let file = options.flannel_dir.join(id);
        if file.is_file() {
            act(format!("{}", file.display()), &|| Ok(fs::remove_file(&file)?))?;
        }
    }
    for r in reservations.iter().filter(|r| r.dead && dead.contains(&(r.network.clone(), r.id.clone()))) {
        act(format!("{} ({})", r.path.display(), r.id), &|| Ok(fs::remove_file(&r.path)?))?;
    }
    for name in unused_shapers()? {
        act(format!("link {name}"), &|| Ok(Handle::new()?.link_del_by_name(&name)?))?;
    }
    for attachment in plugins::orphaned_spoof_rules(!options.dry_run)? {
        act(format!("MAC spoof rules of {attachment}"), &|| Ok(()))?;
    }
    if said.is_empty() {
        said.push_str("nothing to remove\n");
    }
    Ok(said)
}

/// Addresses on links of every namespace there is.
fn living_addresses() -> Result<HashSet<IpAddr>> {
    let mut seen = HashSet::new();
    let mut found = HashSet::new();
    let mut paths: Vec<PathBuf> = vec!["/proc/self/ns/net".into()];
    for dir in ["/run/netns", "/var/run/netns", "/run/docker/netns"] {
        paths.extend(fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()));
    }
    let processes = fs::read_dir("/proc")
        .map_err(Error::from)?
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit()));
    paths.extend(processes.map(|e| e.path().join("ns/net")));
    for path in paths {
        let Ok(meta) = fs::metadata(&path) else { continue };
        if !seen.insert((meta.dev(), meta.ino())) {
            continue;
        }
        let Ok(ns) = NetNs::open(&path) else { continue };
        let addresses = Handle::new_in(&ns).and_then(|mut inside| inside.addrs(None, None));
        found.extend(addresses?.into_iter().map(|a| a.net.addr()));
    }
    Ok(found)
}

/// Attachments in the runtime's cache: whether the namespace of any of them is there.
fn cached_attachments(dir: &Path) -> HashMap<(String, String), bool> {
    let mut out = HashMap::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Some(value) = fs::read(entry.path()).ok().and_then(|bytes| Value::parse(&bytes).ok()) else {
            continue;
        };
        let Some(object) = value.as_object() else { continue };
        let text = |key| object.get_folded(key).and_then(Value::as_str).map(str::to_owned);
        if let (Some(network), Some(id), Some(netns)) =
            (text("networkName"), text("containerId"), text("netns"))
        {
            *out.entry((network, id)).or_insert(false) |= NetNs::open(netns).is_ok();
        }
    }
    out
}

fn reservations(options: &Options, living: &HashSet<IpAddr>) -> Result<Vec<Reservation>> {
    let mut out = Vec::new();
    for network in fs::read_dir(&options.data_dir).into_iter().flatten().flatten() {
        if !network.path().is_dir() {
            continue;
        }
        // Held as every ADD and DEL holds it: what is read here is not being written.
        let _lock = plugins::lock_reservations(&network.path())?;
        for entry in fs::read_dir(network.path())?.flatten() {
            let Some(ip) = entry.file_name().to_str().and_then(|name| name.parse::<IpAddr>().ok()) else {
                continue;
            };
            let text = fs::read_to_string(entry.path()).unwrap_or_default();
            let id = text.lines().next().unwrap_or_default().trim().to_owned();
            let age =
                entry.metadata()?.modified().ok().and_then(|t| SystemTime::now().duration_since(t).ok());
            out.push(Reservation {
                path: entry.path(),
                network: network.file_name().to_string_lossy().into_owned(),
                id,
                dead: !living.contains(&ip) && age.is_some_and(|age| age >= options.grace),
            });
        }
    }
    Ok(out)
}

/// Devices of bandwidth limits to which no link sends any more.
fn unused_shapers() -> Result<Vec<String>> {
    let mut host = Handle::new()?;
    let links = host.links()?;
    let mut used = HashSet::new();
    for link in links.iter().filter(|l| l.is_kind("veth")) {
        for filter in host.filters(link.index, TcHandle::INGRESS_QDISC).unwrap_or_default() {
            used.extend(filter.redirects);
        }
    }
    let ours = |name: &str| {
        name.len() == 15 && name.strip_prefix("bwp").is_some_and(|h| h.bytes().all(|b| b.is_ascii_hexdigit()))
    };
    Ok(links
        .into_iter()
        .filter(|l| l.is_kind("ifb") && ours(&l.name) && !used.contains(&l.index))
        .map(|l| l.name)
        .collect())
}
