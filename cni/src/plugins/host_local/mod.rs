//! `host-local`: addresses from ranges, reserved by files in a directory of this node.
//!
//! The directory is the reference's, byte for byte, so that both may use it at the same time: one
//! file per address holding container ID and interface name, `last_reserved_ip.<n>` for the
//! round-robin, `lock` for `flock`. felt writes a reservation under another name and links it into
//! place: a crash or a full disk leaves no file without an owner, and two writers that hold different
//! locks (somebody removed the lock file) still cannot take one address.

mod alloc;
mod config;
mod cooling;
mod resolv;
mod store;

use super::{Plugin, Result};
use crate::skel::Call;
use crate::types::error::{Error, code};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;
use alloc::Allocator;
use config::Config;
use store::Store;

pub(super) use config::parse_duration;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "host-local",
    versions: SpecVersion::ALL,
    add,
    del,
    check,
    gc,
    status,
    may_have_no_address: false,
};

/// Takes the lock of a directory of reservations; dropping the value gives it back.
pub(super) fn lock(dir: &std::path::Path) -> Result<impl Sized + use<>> {
    Store::open(dir)
}

fn add(call: &Call<'_>) -> Result<CniResult> {
    let config = Config::load(call)?;
    let dns = match &config.resolv_conf {
        Some(path) => resolv::load(path)?,
        None => Default::default(),
    };
    let store = Store::open(&config.directory())?;
    let ips = Allocator::new(&store, &config, &call.env.container_id, &call.env.ifname).allocate_all()?;
    Ok(CniResult { interfaces: Vec::new(), ips, routes: config.routes.clone(), dns })
}

fn del(call: &Call<'_>) -> Result<()> {
    let config = Config::load(call)?;
    let store = Store::open(&config.directory())?;
    let freed = store.release(&call.env.container_id, &call.env.ifname)?;
    if let Some(delay) = config.reuse_delay {
        cooling::note(&store, &freed, delay)?;
    }
    Ok(())
}

fn check(call: &Call<'_>) -> Result<()> {
    let config = Config::load(call)?;
    let store = Store::open(&config.directory())?;
    if store.owned_by(&call.env.container_id, &call.env.ifname)?.is_empty() {
        return Err(Error::internal(format!(
            "host-local: Failed to find address added by container {}",
            call.env.container_id
        )));
    }
    Ok(())
}

fn gc(call: &Call<'_>) -> Result<()> {
    let valid = call.conf.valid_attachments()?;
    let config = Config::load(call)?;
    if !config.directory().is_dir() {
        return Ok(());
    }
    let store = Store::open(&config.directory())?;
    store.retain(|owner| {
        valid.iter().any(|(id, ifname)| {
            owner.id == *id && owner.ifname.as_deref().is_none_or(|name| name == ifname.as_str())
        })
    })
}

fn status(call: &Call<'_>) -> Result<()> {
    let config = Config::load(call)?;
    if !config.directory().is_dir() {
        return Ok(());
    }
    let store = Store::open(&config.directory())?;
    for set in &config.sets {
        if !alloc::has_free_address(&store, &config, set)? {
            return Err(Error::new(
                code::UNAVAILABLE,
                format!("no IP addresses available in range set: {set}"),
                "",
            ));
        }
    }
    Ok(())
}
