//! Port maps in nftables' table `cni_hostport`, one per family.

use std::io::Write;
use std::process::{Command, Stdio};

use felt_hostnet::netlink::Family;
use felt_hostnet::nft::{Batch, Chain, FoundRule, Hook, Nft, Rule, Transport};
use ipnet::IpNet;

use super::conf::Conf;
use super::host_ip;
use crate::skel::Call;
use crate::types::error::{Error, Result};
use crate::xtables::nft_family;

const TABLE: &str = "cni_hostport";
const COMMENT: &str = "CNI portmap plugin";
const HOSTPORTS: &str = "hostports";
const OLD_HOSTPORTS: &str = "hostip_hostports";
const ALL: &str = "hostports_all";
const MASQUERADING: &str = "masquerading";

/// Rules of one attachment, without the chains they go to.
struct Rules {
    ports: Vec<Rule>,
    masquerade: Vec<Rule>,
}

fn rules(call: &Call<'_>, conf: &Conf, address: IpNet) -> Result<Rules> {
    let v4 = address.addr().is_ipv4();
    let id = &call.env.container_id;
    let mut out = Rules { ports: Vec::new(), masquerade: Vec::new() };
    for mapping in &conf.mappings {
        let Ok(host_ip) = host_ip(mapping, v4) else { continue };
        let transport = match mapping.protocol.to_ascii_lowercase().as_str() {
            "tcp" => Transport::Tcp,
            "udp" => Transport::Udp,
            "sctp" => Transport::Sctp,
            other => return Err(Error::internal(format!("nftables backend: unknown protocol {other:?}"))),
        };
        let mut rule = Rule::new(HOSTPORTS);
        if let Some(ip) = host_ip {
            rule = rule.daddr(IpNet::from(ip));
        }
        rule = rule.dport(transport, mapping.host_port).dnat(address.addr(), Some(mapping.container_port));
        out.ports.push(rule.comment(id));
    }
    if conf.snat {
        let own = IpNet::from(address.addr());
        out.masquerade.push(Rule::new(MASQUERADING).saddr(own).daddr(own).masquerade(false).comment(id));
        if v4 {
            let local = IpNet::from(std::net::IpAddr::from([127, 0, 0, 1]));
            out.masquerade
                .push(Rule::new(MASQUERADING).saddr(local).daddr(own).masquerade(false).comment(id));
        }
    }
    Ok(out)
}

pub(super) fn set(call: &Call<'_>, conf: &Conf, address: IpNet) -> Result<()> {
    let family = nft_family(Family::of(address.addr()));
    let wanted = rules(call, conf, address)?;
    let mut nft = Nft::new()?;
    let present = nft.rules(family, TABLE, None)?;
    let mut batch = Batch::new();
    frame(&mut batch, family, &present, conf);
    // An ADD that is repeated must not leave two of each.
    let again = |found: &&FoundRule| wanted.ports.iter().chain(&wanted.masquerade).any(|rule| found.is(rule));
    for rule in present.iter().filter(again) {
        batch.delete_rule(family, TABLE, &rule.chain, rule.handle);
    }
    // Before older ones, so that a dead pod's rule does not win; the first of the list ends up first.
    for rule in wanted.ports.iter().rev() {
        batch.insert_rule(family, TABLE, rule);
    }
    for rule in &wanted.masquerade {
        batch.add_rule(family, TABLE, rule);
    }
    nft.commit(batch)?;
    let conditions = conf.conditions(address.addr().is_ipv4());
    if !conditions.is_empty() { set_conditions(&family.to_string(), conditions) } else { Ok(()) }
}

/// Table, chains and the rules that lead to them, where they are not as they should be.
fn frame(batch: &mut Batch, family: felt_hostnet::nft::Family, present: &[FoundRule], conf: &Conf) {
    let of = |chain: &str| present.iter().filter(|r| r.chain == chain).collect::<Vec<_>>();
    let same = |found: &[&FoundRule], wanted: &[Rule]| {
        found.len() == wanted.len() && found.iter().zip(wanted).all(|(f, w)| f.exprs == w.exprs)
    };
    let all = [Rule::new(ALL).jump(OLD_HOSTPORTS), Rule::new(ALL).jump(HOSTPORTS)];
    let bases = [("prerouting", Hook::Prerouting), ("output", Hook::Output)];
    let whole = same(&of(ALL), &all)
        && bases.iter().all(|(name, _)| same(&of(name), &[Rule::new(name).daddr_local().jump(ALL)]));
    if !whole {
        batch.add_table(family, TABLE, Some(COMMENT));
        for chain in [HOSTPORTS, OLD_HOSTPORTS, ALL] {
            batch.add_chain(family, TABLE, &Chain::regular(chain));
        }
        batch.flush_chain(family, TABLE, ALL);
        for rule in &all {
            batch.add_rule(family, TABLE, rule);
        }
        for (name, hook) in bases {
            batch.add_chain(family, TABLE, &Chain::base(name, "nat", hook, -100));
            batch.flush_chain(family, TABLE, name);
            batch.add_rule(family, TABLE, &Rule::new(name).daddr_local().jump(ALL));
        }
    }
    if conf.snat && of(MASQUERADING).is_empty() {
        batch.add_table(family, TABLE, Some(COMMENT));
        batch.add_chain(family, TABLE, &Chain::base(MASQUERADING, "nat", Hook::Postrouting, 100));
    }
}

/// Conditions are text in nft's language, which only nft itself understands.
fn set_conditions(family: &str, conditions: &[String]) -> Result<()> {
    let conditions = conditions.join(" ");
    let mut text = String::new();
    for chain in ["prerouting", "output"] {
        text.push_str(&format!("flush chain {family} {TABLE} {chain}\n"));
        text.push_str(&format!(
            "add rule {family} {TABLE} {chain} {conditions} fib daddr type local jump {ALL}\n"
        ));
    }
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|err| Error::from(err).context("exec nft"))?;
    if let Some(mut pipe) = child.stdin.take() {
        let _ = pipe.write_all(text.as_bytes());
    }
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::internal(format!("nft: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

pub(super) fn check(call: &Call<'_>, conf: &Conf, address: IpNet) -> Result<()> {
    let family = nft_family(Family::of(address.addr()));
    let wanted = rules(call, conf, address)?;
    let present = Nft::new()?.rules(family, TABLE, None)?;
    for (chain, wanted) in [(HOSTPORTS, &wanted.ports), (MASQUERADING, &wanted.masquerade)] {
        if wanted.iter().any(|rule| !present.iter().any(|found| found.is(rule))) {
            return Err(Error::internal(format!("missing hostport rules in {chain:?} chain")));
        }
    }
    Ok(())
}

/// Whether a container has rules.
pub(super) fn has(family: Family, id: &str) -> bool {
    let rules = Nft::new().and_then(|mut nft| nft.rules(nft_family(family), TABLE, None));
    rules.is_ok_and(|rules| rules.iter().any(|r| r.comment.as_deref() == Some(id)))
}

/// Removes the rules of containers that `gone` names.
pub(super) fn remove(family: Family, gone: impl Fn(&str) -> bool) -> Result<()> {
    /// A rule that another process removed meanwhile makes the transaction fail: look again.
    const TRIES: usize = 4;
    let family = nft_family(family);
    let Ok(mut nft) = Nft::new() else { return Ok(()) };
    for attempt in 1..=TRIES {
        let Ok(present) = nft.rules(family, TABLE, None) else { return Ok(()) };
        let mut batch = Batch::new();
        for rule in present.iter().filter(|r| {
            [HOSTPORTS, OLD_HOSTPORTS, MASQUERADING].contains(&r.chain.as_str())
                && r.comment.as_deref().is_some_and(&gone)
        }) {
            batch.delete_rule(family, TABLE, &rule.chain, rule.handle);
        }
        match nft.commit(batch) {
            Err(err) if err.is_not_found() && attempt < TRIES => {}
            other => return Ok(other?),
        }
    }
    Ok(())
}
