//! Source translation for what a container sends out of its subnet.
//!
//! Two backends, as in the reference: a chain per attachment in iptables' nat table, or a rule per
//! address in the nftables table `inet cni_plugins_masquerade`. Names and comments are the
//! reference's, so that each removes what the other made. Teardown looks in both, whatever the
//! configuration says now, and needs no address: the chain's name and the rule's comment suffice.

use felt_hostnet::netlink::Family;
use felt_hostnet::nft::{self, Batch, Chain, Expr, Hook, Nft, Rule};
use ipnet::IpNet;

use crate::json::Fields;
use crate::names;
use crate::skel::Call;
use crate::trace;
use crate::types::error::{Error, Result};
use crate::types::result::IpConfig;
use crate::xtables::{self, Entry, Mark, Place, Plan, Tool};

const TABLE: &str = "cni_plugins_masquerade";
const TABLE_COMMENT: &str = "Masquerading for plugins from github.com/containernetworking/plugins";
const CHECKS: &str = "masq_checks";
const CHECKS_COMMENT: &str =
    "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet";
const POSTROUTING: &str = "postrouting";

/// Reads `ipMasqBackend`.
pub(super) fn backend_key(f: &Fields<'_>) -> Result<Option<String>> {
    match f.string("ipMasqBackend")?.unwrap_or_default() {
        "" => Ok(None),
        known @ ("iptables" | "nftables") => Ok(Some(known.to_owned())),
        other => Err(Error::internal(format!("unknown ipmasq backend {other:?}"))),
    }
}

/// Makes the rules for these addresses.
pub(super) fn setup(call: &Call<'_>, backend: Option<&str>, ips: &[IpConfig]) -> Result<()> {
    let nets: Vec<IpNet> = ips.iter().map(|ip| ip.address).collect();
    let done = match backend {
        Some("nftables") => setup_nft(call, &nets),
        Some(_) => setup_iptables(call, &nets),
        None => setup_iptables(call, &nets).or_else(|err| {
            // As the reference chooses: nftables only where iptables cannot be used at all.
            let usable = Tool::find(Family::V4).is_some_and(|tool| tool.usable());
            if !usable && Nft::new().is_ok_and(|mut nft| nft.is_supported().unwrap_or(false)) {
                setup_nft(call, &nets)
            } else {
                Err(err)
            }
        }),
    };
    trace::step(|| "masquerade set".into());
    done.map_err(|err| err.context("failed to set up masquerade"))
}

fn setup_iptables(call: &Call<'_>, nets: &[IpNet]) -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let mine: Vec<&IpNet> = nets.iter().filter(|net| Family::of(net.addr()) == family).collect();
        if mine.is_empty() {
            continue;
        }
        let tool = Tool::find(family)
            .ok_or_else(|| Error::internal("exec: \"iptables\": executable file not found in $PATH"))?;
        tool.ensure(&plan(call, family, &mine))?;
    }
    Ok(())
}

fn plan(call: &Call<'_>, family: Family, nets: &[&IpNet]) -> Plan {
    let chain = names::masquerade_chain(&call.conf.name, &call.env.container_id);
    let comment = format!(
        "-m comment --comment \"{}\"",
        comment_text(&call.conf.name, &call.env.container_id).replace('"', "\\\"")
    );
    let multicast = match family {
        Family::V4 => "224.0.0.0/4",
        Family::V6 => "ff00::/8",
    };
    let mut rules: Vec<String> =
        nets.iter().map(|net| format!("-d {} {comment} -j ACCEPT", net.trunc())).collect();
    rules.push(format!("! -d {multicast} {comment} -j MASQUERADE"));
    let entries = nets
        .iter()
        .map(|net| Entry {
            chain: "POSTROUTING".into(),
            rule: format!("-s {} {comment} -j {chain}", IpNet::from(net.addr())),
            mark: Mark::Jump(chain.clone()),
            place: Place::Last,
        })
        .collect();
    Plan { table: "nat", chains: vec![(chain, rules)], entries, ..Plan::default() }
}

fn comment_text(network: &str, id: &str) -> String {
    format!("name: \"{network}\" id: \"{id}\"")
}

fn setup_nft(call: &Call<'_>, nets: &[IpNet]) -> Result<()> {
    let family = nft::Family::Inet;
    let mut nft = Nft::new()?;
    let mut batch = Batch::new();
    let base = base_rules();
    let present = nft.rules(family, TABLE, None)?;
    let in_base: Vec<_> = present.iter().filter(|rule| rule.chain == POSTROUTING).collect();
    if in_base.len() != base.len()
        || !in_base.iter().zip(&base).all(|(found, wanted)| found.exprs == wanted.exprs)
    {
        batch.add_table(family, TABLE, Some(TABLE_COMMENT));
        batch.add_chain(family, TABLE, &Chain::regular(CHECKS).comment(CHECKS_COMMENT));
        batch.add_chain(family, TABLE, &Chain::base(POSTROUTING, "nat", Hook::Postrouting, 100));
        batch.flush_chain(family, TABLE, POSTROUTING);
        for rule in &base {
            batch.add_rule(family, TABLE, rule);
        }
    }
    let prefix = names::nft_attachment(&call.conf.name, &call.env.ifname, &call.env.container_id);
    for rule in present.iter().filter(|rule| rule.chain == CHECKS && starts_with(rule, &prefix)) {
        batch.delete_rule(family, TABLE, CHECKS, rule.handle);
    }
    let comment =
        format!("{prefix}, net: {}, if: {}, id: {}", call.conf.name, call.env.ifname, call.env.container_id);
    for net in nets {
        let rule = Rule::new_inet(CHECKS)
            .saddr(IpNet::from(net.addr()))
            .daddr_not(net.trunc())
            .masquerade(false)
            .comment(&comment);
        batch.add_rule(family, TABLE, &rule);
    }
    Ok(nft.commit(batch)?)
}

fn base_rules() -> Vec<Rule> {
    let net = |text: &str| text.parse::<IpNet>().unwrap_or_default();
    vec![
        Rule::new_inet(POSTROUTING).daddr(net("224.0.0.0/4")).returns(),
        Rule::new_inet(POSTROUTING).daddr(net("ff00::/8")).returns(),
        Rule::new_inet(POSTROUTING).goto(CHECKS),
    ]
}

fn starts_with(rule: &nft::FoundRule, prefix: &str) -> bool {
    rule.comment.as_ref().is_some_and(|comment| comment.starts_with(prefix))
}

/// Removes the rules of this attachment, in both backends and families.
pub(super) fn teardown(call: &Call<'_>) -> Result<()> {
    let prefix = names::nft_attachment(&call.conf.name, &call.env.ifname, &call.env.container_id);
    let by_nft = remove_nft(|comment| comment.starts_with(&prefix));
    let chain = names::masquerade_chain(&call.conf.name, &call.env.container_id);
    let by_iptables =
        [Family::V4, Family::V6].map(|family| xtables::remove_chain(family, "nat", &chain, &["POSTROUTING"]));
    trace::step(|| "masquerade removed".into());
    by_nft?;
    by_iptables.into_iter().collect()
}

/// Removes the rules of one container of a network, whatever its interfaces.
pub(super) fn remove(family: Family, network: &str, id: &str) -> Result<()> {
    remove_nft(|comment| is_of(comment, network, id))?;
    xtables::remove_chain(family, "nat", &names::masquerade_chain(network, id), &["POSTROUTING"])
}

/// Whether a container of a network has rules in nftables.
pub(super) fn has_nft_rules(network: &str, id: &str) -> bool {
    let rules = Nft::new().and_then(|mut nft| nft.rules(nft::Family::Inet, TABLE, Some(CHECKS)));
    rules.is_ok_and(|rules| {
        rules.iter().any(|r| r.comment.as_ref().is_some_and(|comment| is_of(comment, network, id)))
    })
}

fn is_of(comment: &str, network: &str, id: &str) -> bool {
    comment.starts_with(&format!("{}-", names::nft_network(network)))
        && comment.ends_with(&format!("id: {id}"))
}

fn remove_nft(gone: impl Fn(&str) -> bool) -> Result<()> {
    /// A rule that another process removed meanwhile makes the transaction fail: look again.
    const TRIES: usize = 4;
    let family = nft::Family::Inet;
    let Ok(mut nft) = Nft::new() else { return Ok(()) };
    for attempt in 1..=TRIES {
        let Ok(present) = nft.rules(family, TABLE, Some(CHECKS)) else { return Ok(()) };
        let mut batch = Batch::new();
        for rule in present.iter().filter(|rule| rule.comment.as_deref().is_some_and(&gone)) {
            batch.delete_rule(family, TABLE, CHECKS, rule.handle);
        }
        match nft.commit(batch) {
            Err(err) if err.is_not_found() && attempt < TRIES => {}
            other => return Ok(other?),
        }
    }
    Ok(())
}

/// Removes the rules of this network's attachments that are not in the list of valid ones.
pub(super) fn gc(call: &Call<'_>) -> Result<()> {
    let valid = call.conf.valid_attachments()?;
    let network = &call.conf.name;
    let keep: Vec<String> =
        valid.iter().map(|(id, ifname)| names::nft_attachment(network, ifname, id)).collect();
    let prefix = format!("{}-", names::nft_network(network));
    remove_nft(|comment| comment.starts_with(&prefix) && !keep.iter().any(|k| comment.starts_with(k)))?;
    let ids: Vec<&str> = valid.iter().map(|(id, _)| id.as_str()).collect();
    for family in [Family::V4, Family::V6] {
        for id in iptables_ids(family, network) {
            if !ids.contains(&id.as_str()) {
                let chain = names::masquerade_chain(network, &id);
                xtables::remove_chain(family, "nat", &chain, &["POSTROUTING"])?;
            }
        }
    }
    Ok(())
}

/// Containers of a network that have a chain, read from the comments of the jumps.
pub(super) fn iptables_ids(family: Family, network: &str) -> Vec<String> {
    let Ok(mut nft) = Nft::new() else { return Vec::new() };
    let rules = nft.rules(xtables::nft_family(family), "nat", Some("POSTROUTING")).unwrap_or_default();
    let before = format!("name: \"{network}\" id: \"");
    let mut ids: Vec<String> = rules
        .iter()
        .filter(|rule| xtables::jump_target(rule).is_some_and(|to| to.starts_with("CNI-")))
        .flat_map(|rule| &rule.exprs)
        .filter_map(|expr| match expr {
            Expr::Other { data, .. } => {
                let text = String::from_utf8_lossy(data);
                let (_, rest) = text.split_once(&before)?;
                rest.split_once('"').map(|(id, _)| id.to_owned())
            }
            _ => None,
        })
        .collect();
    ids.sort();
    ids.dedup();
    ids
}
