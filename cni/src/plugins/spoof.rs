//! `macspoofchk` of the bridge plugin: a container sends with its own MAC only.
//!
//! nftables' bridge family, table `nat`: a jump per host end in PREROUTING, a chain per attachment, and
//! a chain of its MAC. Names and comments are the reference's.

use felt_hostnet::MacAddr;
use felt_hostnet::netlink::Handle;
use felt_hostnet::nft::{Batch, Chain, Expr, Family, Hook, Meta, Nft, Rule};

use crate::skel::Call;
use crate::types::error::{Context, Result};

const TABLE: &str = "nat";
const PREROUTING: &str = "PREROUTING";
/// Of base chains in the bridge family's prerouting hook.
const PRIORITY: i32 = -300;

/// Chain, chain of the MAC, and comment of an attachment (`<container ID>-<interface>`).
fn names(attachment: &str) -> (String, String, String) {
    let chain = format!("cni-br-iface-{attachment}");
    let mac_chain = format!("{chain}-mac");
    (chain, mac_chain, format!("macspoofchk-{attachment}"))
}

/// Makes the rules for a host end and the container's MAC.
pub(super) fn setup(call: &Call<'_>, host_end: &str, mac: MacAddr) -> Result<()> {
    teardown(call)?;
    let (chain, mac_chain, comment) = names(&attachment(call));
    let mut batch = Batch::new();
    batch.add_table(Family::Bridge, TABLE, None);
    batch.add_chain(Family::Bridge, TABLE, &Chain::base(PREROUTING, "filter", Hook::Prerouting, PRIORITY));
    batch.add_chain(Family::Bridge, TABLE, &Chain::regular(&chain));
    batch.add_chain(Family::Bridge, TABLE, &Chain::regular(&mac_chain));
    let rules = [
        Rule::new(PREROUTING).iifname(host_end).jump(&chain),
        Rule::new(&chain).jump(&mac_chain),
        Rule::new(&mac_chain).ether_saddr(mac).returns(),
        Rule::new(&mac_chain).drop(),
    ];
    for rule in rules {
        batch.add_rule(Family::Bridge, TABLE, &rule.comment(&comment));
    }
    Nft::new()?.commit(batch).context("failed to set up MAC spoof check")
}

/// Removes the rules of this attachment.
pub(super) fn teardown(call: &Call<'_>) -> Result<()> {
    remove(&attachment(call))
}

fn attachment(call: &Call<'_>) -> String {
    format!("{}-{}", call.env.container_id, call.env.ifname)
}

fn remove(attachment: &str) -> Result<()> {
    let (chain, mac_chain, comment) = names(attachment);
    let Ok(mut nft) = Nft::new() else { return Ok(()) };
    let mut batch = Batch::new();
    for rule in nft.rules(Family::Bridge, TABLE, Some(PREROUTING))? {
        if rule.comment.as_ref() == Some(&comment) {
            batch.delete_rule(Family::Bridge, TABLE, PREROUTING, rule.handle);
        }
    }
    let present = nft.chains(Family::Bridge, TABLE)?;
    for name in [&chain, &mac_chain] {
        if present.iter().any(|c| c.name == *name) {
            batch.flush_chain(Family::Bridge, TABLE, name);
        }
    }
    for name in [&chain, &mac_chain] {
        if present.iter().any(|c| c.name == *name) {
            batch.delete_chain(Family::Bridge, TABLE, name);
        }
    }
    if batch.is_empty() {
        return Ok(());
    }
    nft.commit(batch).context("failed to remove MAC spoof check")
}

/// Removes the rules of attachments that are not in the list of valid ones and whose host end is gone.
/// The comments name no network, so that a rule with a living host end may be another network's.
pub(super) fn gc(call: &Call<'_>) -> Result<()> {
    let valid: Vec<String> =
        call.conf.valid_attachments()?.iter().map(|(id, ifname)| format!("{id}-{ifname}")).collect();
    orphans(&|attachment| valid.iter().any(|v| v == attachment), true).map(drop)
}

/// Attachments that `keep` does not name and whose host end is gone; with `act`, their rules go.
pub(super) fn orphans(keep: &dyn Fn(&str) -> bool, act: bool) -> Result<Vec<String>> {
    let mut host = Handle::new()?;
    let Ok(mut nft) = Nft::new() else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for rule in nft.rules(Family::Bridge, TABLE, Some(PREROUTING))? {
        let Some(attachment) = rule.comment.as_deref().and_then(|c| c.strip_prefix("macspoofchk-")) else {
            continue;
        };
        let host_end = rule.exprs.windows(2).find_map(|pair| match pair {
            [Expr::Meta(Meta::IifName), Expr::Cmp { equal: true, value }] => {
                Some(String::from_utf8_lossy(value).trim_end_matches('\0').to_owned())
            }
            _ => None,
        });
        let gone = host_end.is_some_and(|name| host.link_by_name(&name).is_err_and(|err| err.is_not_found()));
        if gone && !keep(attachment) {
            found.push(attachment.to_owned());
            if act {
                remove(attachment)?;
            }
        }
    }
    Ok(found)
}
