//! `reuseDelay`: a released address rests before it is handed out again.
//!
//! The file `.felt-released` beside the reservations holds one line per resting address: the address
//! and the second of its release. The reference does not know the file and ignores it.

use std::collections::HashMap;
use std::fs;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::store::Store;
use crate::types::error::Result;

const FILE: &str = ".felt-released";

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Addresses that rest, with the second of their release.
fn read(store: &Store, delay: Duration) -> HashMap<IpAddr, u64> {
    let text = fs::read_to_string(store.dir().join(FILE)).unwrap_or_default();
    let now = now().as_secs();
    text.lines()
        .filter_map(|line| {
            let (ip, at) = line.split_once(' ')?;
            Some((ip.parse().ok()?, at.parse().ok()?))
        })
        // A time of release after now means that the clock was set back: nothing can be said.
        .filter(|(_, at): &(IpAddr, u64)| {
            now.checked_sub(*at).is_some_and(|age| age < delay.as_secs_f64().ceil() as u64)
        })
        .collect()
}

/// Addresses that must not be handed out yet.
pub(super) fn resting(store: &Store, delay: Duration) -> HashMap<IpAddr, u64> {
    read(store, delay)
}

/// Notes the release of `freed`.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn note(store: &Store, freed: &[IpAddr], delay: Duration) -> Result<()> {
    if freed.is_empty() {
        return Ok(());
    }
    let mut all = read(store, delay);
    let at = now().as_secs();
    all.extend(freed.iter().map(|ip| (*ip, at)));
    let text: String = all.iter().map(|(ip, at)| format!("{ip} {at}\n")).collect();
    let temp = store.dir().join(".felt-released.new");
    fs::write(&temp, text)?;
    fs::rename(&temp, store.dir().join(FILE))?;
    Ok(())
}
