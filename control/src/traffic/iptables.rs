//! The rules through iptables: chains `FLANNEL-POSTRTG` (table nat) and `FLANNEL-FWD` (table filter),
//! reached by one jump each from POSTROUTING and FORWARD.

use std::time::{Duration, Instant};

use felt_hostnet::Error;
use felt_hostnet::iptables::{Iptables, Position, Rule, Variant, Wanted};
use felt_hostnet::netlink::Family;
use felt_hostnet::nft::Nft;

use super::rules::{Action, KUBE_MARK, Match, RuleSpec};
use super::{FAMILIES, TrafficConfig};

const MASQUERADE_CHAIN: &str = "FLANNEL-POSTRTG";
const MASQUERADE_COMMENT: &str = "flanneld masq";
const FORWARD_CHAIN: &str = "FLANNEL-FWD";
const FORWARD_COMMENT: &str = "flanneld forward";

/// Our chains with their tables.
const OURS: [(&str, &str); 2] = [("nat", MASQUERADE_CHAIN), ("filter", FORWARD_CHAIN)];

fn word(text: &str) -> String {
    text.to_owned()
}

/// A rule in the form in which `iptables-save` prints it.
pub fn render(rule: &RuleSpec, comment: &str, fully_random: bool) -> Rule {
    let mut words = Vec::new();
    let mut mark = Vec::new();
    for condition in &rule.matches {
        match condition {
            Match::KubeMark => {
                mark.extend([
                    word("-m"),
                    word("mark"),
                    word("--mark"),
                    format!("{KUBE_MARK:#x}/{KUBE_MARK:#x}"),
                ]);
            }
            Match::From(net) => words.extend([word("-s"), net.to_string()]),
            Match::NotFrom(net) => words.extend([word("!"), word("-s"), net.to_string()]),
            Match::To(net) => words.extend([word("-d"), net.to_string()]),
            Match::NotTo(net) => words.extend([word("!"), word("-d"), net.to_string()]),
        }
    }
    words.extend(mark);
    words.extend([word("-m"), word("comment"), word("--comment"), word(comment), word("-j")]);
    match rule.action {
        Action::Return => words.push(word("RETURN")),
        Action::Accept => words.push(word("ACCEPT")),
        Action::Masquerade => {
            words.push(word("MASQUERADE"));
            if fully_random {
                words.push(word("--random-fully"));
            }
        }
    }
    Rule(words)
}

fn jump(comment: &str, chain: &str) -> Rule {
    Rule(["-m", "comment", "--comment", comment, "-j", chain].map(word).to_vec())
}

/// What a family's tables shall hold.
pub fn wanted(config: &TrafficConfig, family: Family, random_fully_known: bool) -> Vec<Wanted> {
    let fully_random = config.fully_random && random_fully_known;
    let table = |table: &str, chain: &str, from: &str, comment: &str, rules: Vec<RuleSpec>| Wanted {
        table: word(table),
        chains: vec![(word(chain), rules.iter().map(|rule| render(rule, comment, fully_random)).collect())],
        jumps: vec![(word(from), jump(comment, chain), Position::Last)],
    };
    let mut wanted = Vec::new();
    wanted.extend(
        config
            .masquerade_rules(family)
            .map(|rules| table("nat", MASQUERADE_CHAIN, "POSTROUTING", MASQUERADE_COMMENT, rules)),
    );
    wanted.extend(
        config
            .forward_rules(family)
            .map(|rules| table("filter", FORWARD_CHAIN, "FORWARD", FORWARD_COMMENT, rules)),
    );
    wanted
}

/// What is remembered between two looks, so that an idle node costs next to nothing.
#[derive(Debug, Default)]
pub(super) struct Memory {
    tools: Vec<Iptables>,
    tools_found: Option<Instant>,
    /// Generation of the kernel's ruleset in which all was right.
    right_in: Option<u32>,
}

/// How long found programs are used before they are looked for again: the host may change its choice
/// of variant.
const TOOLS_LIFETIME: Duration = Duration::from_secs(300);

impl Memory {
    /// The programs of every family that has rules.
    fn tools(&mut self, config: &TrafficConfig) -> Result<&[Iptables], Error> {
        if self.tools_found.is_none_or(|found| found.elapsed() > TOOLS_LIFETIME) {
            self.right_in = None;
            // No program is looked for where no rule is wanted.
            let families = FAMILIES.into_iter().filter(|family| !wanted(config, *family, true).is_empty());
            self.tools = families.map(Iptables::find).collect::<Result<_, _>>()?;
            self.tools_found = Some(Instant::now());
        }
        Ok(&self.tools)
    }
}

/// Makes the tables hold what is configured; says whether anything had to be written.
pub(super) fn ensure(config: &TrafficConfig, memory: &mut Memory) -> Result<bool, Error> {
    let outcome = look(config, memory);
    if outcome.is_err() {
        *memory = Memory::default();
    }
    outcome
}

fn look(config: &TrafficConfig, memory: &mut Memory) -> Result<bool, Error> {
    let nft_only = memory.tools(config)?.iter().all(|tool| tool.variant() == Variant::Nft);
    // Read before the look: a change during it is seen next time. The old interface has no such number.
    let generation = if nft_only { Nft::new().and_then(|mut nft| nft.generation()).ok() } else { None };
    if generation.is_some() && generation == memory.right_in {
        return Ok(false);
    }
    let mut changed = false;
    for tool in &memory.tools {
        changed |= tool.ensure_all(&wanted(config, tool.family(), tool.has_random_fully()))?;
    }
    memory.right_in = generation.filter(|_| !changed);
    Ok(changed)
}

/// Whether programs that the configuration needs are not installed.
pub(super) fn is_missing(config: &TrafficConfig) -> bool {
    FAMILIES.into_iter().any(|family| {
        !wanted(config, family, true).is_empty()
            && Iptables::find(family).is_err_and(|error| error.is_not_found())
    })
}

/// Removes our chains that the configuration does not ask for.
pub(super) fn remove_unwanted(config: &TrafficConfig) -> Result<bool, Error> {
    each_tool(&FAMILIES, |tool| {
        let wanted = wanted(config, tool.family(), true);
        let unwanted =
            OURS.into_iter().filter(|(table, _)| !wanted.iter().any(|wanted| wanted.table == *table));
        remove_from(tool, unwanted)
    })
}

/// Removes all our chains; says whether there was one.
pub(super) fn remove(families: &[Family]) -> Result<bool, Error> {
    each_tool(families, |tool| remove_from(tool, OURS))
}

fn remove_from<'a>(
    tool: &Iptables,
    chains: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<bool, Error> {
    let mut found = false;
    for (table, chain) in chains {
        found |= tool.remove_chains(table, &[chain])?;
    }
    Ok(found)
}

/// Works with the programs of each family; where they are not installed there is nothing to do.
fn each_tool(families: &[Family], work: impl Fn(&Iptables) -> Result<bool, Error>) -> Result<bool, Error> {
    let mut found = Ok(false);
    for family in families {
        let outcome = match Iptables::find(*family) {
            Ok(tool) => work(&tool),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        };
        found = match (found, outcome) {
            (Ok(before), Ok(now)) => Ok(before | now),
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::Mode;
    use super::*;

    fn config() -> TrafficConfig {
        TrafficConfig {
            mode: Mode::Iptables,
            v4: Some(("10.5.0.0/16".parse().unwrap(), "10.5.34.0/24".parse().unwrap())),
            v6: Some(("fd00:7::/48".parse().unwrap(), "fd00:7:0:58::/64".parse().unwrap())),
            masquerade: true,
            forward: true,
            fully_random: true,
            blackhole: true,
            previous: Vec::new(),
        }
    }

    fn text(wanted: &Wanted) -> Vec<String> {
        wanted.chains[0].1.iter().map(|rule| rule.0.join(" ")).collect()
    }

    #[test]
    fn rules_are_flannels_in_its_order() {
        let tables = wanted(&config(), Family::V4, true);
        assert_eq!(
            text(&tables[0]),
            [
                "-m mark --mark 0x4000/0x4000 -m comment --comment flanneld masq -j RETURN",
                "-s 10.5.34.0/24 -d 10.5.0.0/16 -m comment --comment flanneld masq -j RETURN",
                "-s 10.5.0.0/16 -d 10.5.34.0/24 -m comment --comment flanneld masq -j RETURN",
                "! -s 10.5.0.0/16 -d 10.5.34.0/24 -m comment --comment flanneld masq -j RETURN",
                "-s 10.5.0.0/16 ! -d 224.0.0.0/4 -m comment --comment flanneld masq -j MASQUERADE --random-fully",
                "! -s 10.5.0.0/16 -d 10.5.0.0/16 -m comment --comment flanneld masq -j MASQUERADE --random-fully",
            ]
        );
        assert_eq!(
            text(&tables[1]),
            [
                "-s 10.5.0.0/16 -m comment --comment flanneld forward -j ACCEPT",
                "-d 10.5.0.0/16 -m comment --comment flanneld forward -j ACCEPT",
            ]
        );
        assert_eq!(tables[0].jumps[0].1.0.join(" "), "-m comment --comment flanneld masq -j FLANNEL-POSTRTG");
        assert_eq!((tables[1].table.as_str(), tables[1].jumps[0].0.as_str()), ("filter", "FORWARD"));
    }

    #[test]
    fn ipv6_and_switches() {
        let tables = wanted(&config(), Family::V6, false);
        assert_eq!(
            text(&tables[0])[4],
            "-s fd00:7::/48 ! -d ff00::/8 -m comment --comment flanneld masq -j MASQUERADE"
        );
        let off = TrafficConfig { masquerade: false, v6: None, ..config() };
        assert_eq!(wanted(&off, Family::V4, true).len(), 1);
        assert!(wanted(&off, Family::V6, true).is_empty());
        let plain = TrafficConfig { fully_random: false, ..config() };
        assert!(text(&wanted(&plain, Family::V4, true)[0])[4].ends_with("-j MASQUERADE"));
    }
}
