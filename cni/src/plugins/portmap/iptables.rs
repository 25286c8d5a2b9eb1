//! Port maps in iptables' nat table.

use felt_hostnet::netlink::Family;
use felt_hostnet::nft::{Expr, Nft};
use ipnet::IpNet;

use super::conf::Conf;
use super::{chains, endpoint, host_ip, remove_chain};
use crate::names;
use crate::skel::Call;
use crate::types::error::{Error, Result};
use crate::xtables::{self, Entry, Mark, Place, Plan, Tool};

const DNAT: &str = "CNI-HOSTPORT-DNAT";
const SET_MARK: &str = "CNI-HOSTPORT-SETMARK";
const MASQUERADE: &str = "CNI-HOSTPORT-MASQ";
/// Ports a multiport match holds.
const PORTS_PER_RULE: usize = 15;
/// Length up to which a comment is kept whole.
const COMMENT_LEN: usize = 255;

pub(super) fn set(call: &Call<'_>, conf: &Conf, address: IpNet) -> Result<()> {
    let family = Family::of(address.addr());
    let tool = Tool::find(family)
        .ok_or_else(|| Error::internal("exec: \"iptables\": executable file not found in $PATH"))?;
    tool.ensure(&plan(call, conf, address)).map(drop)
}

pub(super) fn check(call: &Call<'_>, conf: &Conf, address: IpNet) -> Result<()> {
    let tool = Tool::find(Family::of(address.addr()))
        .ok_or_else(|| Error::internal("exec: \"iptables\": executable file not found in $PATH"))?;
    let whole = plan(call, conf, address);
    // As the reference: the attachment's own chain and the entries that lead there.
    let own = names::portmap_chain(&call.conf.name, &call.env.container_id);
    tool.check(&Plan {
        table: "nat",
        chains: whole.chains.into_iter().filter(|(name, _)| *name == own).collect(),
        entries: whole.entries.into_iter().filter(|e| e.mark == Mark::Jump(own.clone())).collect(),
        ..Plan::default()
    })
}

pub(super) fn remove(family: Family, network: &str, id: &str) -> Result<()> {
    chains(network, id).iter().try_for_each(|(chain, holder)| remove_chain(family, chain, holder))
}

fn plan(call: &Call<'_>, conf: &Conf, address: IpNet) -> Plan {
    let own = names::portmap_chain(&call.conf.name, &call.env.container_id);
    let mut plan = Plan { table: "nat", ..Plan::default() };
    let mark = 1u32 << conf.mark_bit;
    let set_mark = conf.external_mark_chain.as_deref().unwrap_or(SET_MARK);
    if conf.snat && conf.external_mark_chain.is_none() {
        plan.chains.push((
            SET_MARK.into(),
            vec![format!(
                "-m comment --comment \"CNI portfwd masquerade mark\" -j MARK --set-xmark {mark:#x}/{mark:#x}"
            )],
        ));
        plan.chains
            .push((MASQUERADE.into(), vec![format!("-m mark --mark {mark:#x}/{mark:#x} -j MASQUERADE")]));
        plan.entries.push(Entry {
            chain: "POSTROUTING".into(),
            rule: format!("-m comment --comment \"CNI portfwd requiring masquerade\" -j {MASQUERADE}"),
            mark: Mark::Jump(MASQUERADE.into()),
            place: Place::First,
        });
        // Another network may use another bit: value and mask lie next to each other in both rules.
        let bytes = [mark.to_ne_bytes(), mark.to_ne_bytes()].concat();
        plan.proofs.push((SET_MARK.into(), bytes.clone()));
        plan.proofs.push((MASQUERADE.into(), bytes));
    }
    plan.chains.push((DNAT.into(), Vec::new()));
    for base in ["PREROUTING", "OUTPUT"] {
        plan.entries.push(Entry {
            chain: base.into(),
            rule: format!("-m addrtype --dst-type LOCAL -j {DNAT}"),
            mark: Mark::Jump(DNAT.into()),
            // Behind the jumps of services: they come first by design.
            place: Place::Last,
        });
    }
    plan.chains.push((own.clone(), rules(conf, address, set_mark)));
    // Inserted one by one at the head: the last of the list ends up first.
    plan.entries.extend(entries(call, conf, address.addr().is_ipv4(), &own).into_iter().rev());
    plan
}

/// The rules of the attachment's own chain, in the words of `iptables-save`.
fn rules(conf: &Conf, address: IpNet, set_mark: &str) -> Vec<String> {
    let v4 = address.addr().is_ipv4();
    let mut rules = Vec::new();
    for mapping in &conf.mappings {
        let Ok(host_ip) = host_ip(mapping, v4) else { continue };
        let dst = host_ip.map(|ip| format!("-d {} ", IpNet::from(ip))).unwrap_or_default();
        let proto = &mapping.protocol;
        let ports = format!("-p {proto} -m {proto} --dport {}", mapping.host_port);
        if conf.snat {
            let src = if conf.masq_all { String::new() } else { format!("-s {} ", address.trunc()) };
            rules.push(format!("{src}{dst}{ports} -j {set_mark}"));
            if v4 && !conf.masq_all {
                rules.push(format!("-s 127.0.0.1/32 {dst}{ports} -j {set_mark}"));
            }
        }
        let to = endpoint(address.addr(), mapping.container_port);
        rules.push(format!("{dst}{ports} -j DNAT --to-destination {to}"));
    }
    rules
}

/// The entries that lead to the attachment's chain: per protocol, fifteen ports a rule.
fn entries(call: &Call<'_>, conf: &Conf, v4: bool, own: &str) -> Vec<Entry> {
    let mut comment = format!("dnat name: \"{}\" id: \"{}\"", call.conf.name, call.env.container_id);
    if comment.len() > COMMENT_LEN {
        comment.truncate(COMMENT_LEN - 2);
        comment.push_str("...");
    }
    let comment = comment.replace('"', "\\\"");
    let mut protocols: Vec<&str> = conf.mappings.iter().map(|m| m.protocol.as_str()).collect();
    protocols.sort_unstable();
    protocols.dedup();
    let conditions: String = conf
        .conditions(v4)
        .iter()
        .filter_map(|text| xtables::word(text).ok())
        .map(|w| format!(" {w}"))
        .collect();
    let mut entries = Vec::new();
    for proto in protocols {
        let ports: Vec<String> =
            conf.mappings.iter().filter(|m| m.protocol == proto).map(|m| m.host_port.to_string()).collect();
        for ports in ports.chunks(PORTS_PER_RULE) {
            entries.push(Entry {
                chain: DNAT.into(),
                rule: format!(
                    "-p {proto} -m comment --comment \"{comment}\" -m multiport --dports {}{conditions} -j {own}",
                    ports.join(",")
                ),
                mark: Mark::Jump(own.to_owned()),
                place: Place::First,
            });
        }
    }
    entries
}

/// Containers of a network that have port maps, read from the comments of the entries.
pub(super) fn containers(family: Family, network: &str) -> Vec<String> {
    let Ok(mut nft) = Nft::new() else { return Vec::new() };
    let rules = nft.rules(xtables::nft_family(family), "nat", Some(DNAT)).unwrap_or_default();
    let before = format!("dnat name: \"{network}\" id: \"");
    let mut ids: Vec<String> = rules
        .iter()
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
