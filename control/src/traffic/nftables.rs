//! The rules in tables of our own: `ip flannel-ipv4` and `ip6 flannel-ipv6`, with a chain `postrtg` at
//! postrouting and a chain `forward` at forward.
//!
//! The tables are ours alone, so they are compared whole and, where they differ, replaced in one
//! transaction: no packet ever meets a part of them. Names and comments are flannel's.

use felt_hostnet::Error;
use felt_hostnet::netlink::Family;
use felt_hostnet::nft::{self, Batch, Chain, Hook, Nft, Rule};

use super::rules::{Action, KUBE_MARK, Match, RuleSpec};
use super::{FAMILIES, TrafficConfig};

const MASQUERADE_CHAIN: &str = "postrtg";
const FORWARD_CHAIN: &str = "forward";
/// Priority `srcnat`.
const SOURCE_NAT: i32 = 100;
/// Priority `filter`.
const FILTER: i32 = 0;

fn place(family: Family) -> (nft::Family, &'static str) {
    match family {
        Family::V4 => (nft::Family::Ip, "flannel-ipv4"),
        Family::V6 => (nft::Family::Ip6, "flannel-ipv6"),
    }
}

/// A rule as expressions.
pub fn render(rule: &RuleSpec, chain: &str, fully_random: bool) -> Rule {
    let mut rendered = Rule::new(chain);
    for condition in &rule.matches {
        rendered = match condition {
            // Under its mask: other bits of the mark belong to others.
            Match::KubeMark => rendered.mark(KUBE_MARK, KUBE_MARK),
            Match::From(net) => rendered.saddr(*net),
            Match::NotFrom(net) => rendered.saddr_not(*net),
            Match::To(net) => rendered.daddr(*net),
            Match::NotTo(net) => rendered.daddr_not(*net),
        };
    }
    match rule.action {
        Action::Return => rendered.returns(),
        Action::Accept => rendered.accept(),
        Action::Masquerade => rendered.masquerade(fully_random),
    }
}

/// The chains of a family's table with their rules.
fn wanted(config: &TrafficConfig, family: Family) -> Vec<(Chain, Vec<Rule>)> {
    let render_all = |rules: Vec<RuleSpec>, chain: &str| {
        rules.iter().map(|rule| render(rule, chain, config.fully_random)).collect()
    };
    let mut chains = Vec::new();
    chains.extend(config.masquerade_rules(family).map(|rules| {
        let chain = Chain::base(MASQUERADE_CHAIN, "nat", Hook::Postrouting, SOURCE_NAT)
            .comment("chain to manage traffic masquerading by flannel");
        (chain, render_all(rules, MASQUERADE_CHAIN))
    }));
    chains.extend(config.forward_rules(family).map(|rules| {
        let chain = Chain::base(FORWARD_CHAIN, "filter", Hook::Forward, FILTER)
            .comment("chain to accept flannel traffic");
        (chain, render_all(rules, FORWARD_CHAIN))
    }));
    chains
}

/// Makes both tables hold what is configured; says whether anything had to be written.
pub(super) fn ensure(config: &TrafficConfig) -> Result<bool, Error> {
    let mut nft = Nft::new()?;
    let tables = nft.tables()?;
    let mut batch = Batch::new();
    for family in FAMILIES {
        let (table_family, table) = place(family);
        let present = tables.iter().any(|found| found.family == table_family && found.name == table);
        let chains = wanted(config, family);
        if chains.is_empty() {
            if present {
                batch.delete_table(table_family, table);
            }
            continue;
        }
        if present && holds(&mut nft, table_family, table, &chains)? {
            continue;
        }
        batch.delete_table(table_family, table);
        batch.add_table(table_family, table, Some(&format!("rules for {table}")));
        for (chain, rules) in &chains {
            batch.add_chain(table_family, table, chain);
            for rule in rules {
                batch.add_rule(table_family, table, rule);
            }
        }
    }
    let changed = !batch.is_empty();
    nft.commit(batch)?;
    Ok(changed)
}

/// Whether a table holds exactly these chains and rules. Comments of chains do not count: kernels
/// before 5.10 do not keep them.
fn holds(
    nft: &mut Nft,
    family: nft::Family,
    table: &str,
    chains: &[(Chain, Vec<Rule>)],
) -> Result<bool, Error> {
    let found = nft.chains(family, table)?;
    let same_chains = found.len() == chains.len()
        && chains
            .iter()
            .all(|(chain, _)| found.iter().any(|found| found.name == chain.name && found.base == chain.base));
    if !same_chains {
        return Ok(false);
    }
    for (chain, rules) in chains {
        let found = nft.rules(family, table, Some(&chain.name))?;
        if found.len() != rules.len() || !found.iter().zip(rules).all(|(found, rule)| found.is(rule)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes both tables; says whether there was one. A kernel without nftables has none.
pub(super) fn remove() -> Result<bool, Error> {
    let mut nft = match Nft::new() {
        Ok(nft) => nft,
        Err(error) if error.is_unsupported() => return Ok(false),
        Err(error) => return Err(error),
    };
    if !nft.is_supported()? {
        return Ok(false);
    }
    let tables = nft.tables()?;
    let mut batch = Batch::new();
    for family in FAMILIES {
        let (family, table) = place(family);
        if tables.iter().any(|found| found.family == family && found.name == table) {
            batch.delete_table(family, table);
        }
    }
    let changed = !batch.is_empty();
    nft.commit(batch)?;
    Ok(changed)
}
