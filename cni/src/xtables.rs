//! iptables rules, reached the cheapest way.
//!
//! A run of an iptables program costs about five milliseconds, so there is at most one per family and
//! call in the common case. What is there is looked up by netlink where the programs are of the
//! nf_tables kind (their chains are nftables chains, and a jump is a jump), and one `iptables-restore`
//! adds everything that is missing. New chains are made with `-N`, never declared: a declaration
//! empties a chain that somebody else filled in between, `-N` fails, and we look again.
//!
//! Removal needs no program at all for the nf_tables kind: rules, by their jump, and chains go in one
//! netlink transaction. The legacy kind takes `iptables-save` and `iptables-restore`.

use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use felt_hostnet::iptables::{Iptables, Rule, Variant};
use felt_hostnet::netlink::Family;
use felt_hostnet::nft::{self, Base, Batch, Expr, Nft, Verdict};

use crate::trace;
use crate::types::error::{Context, Error, Result};

/// The programs of one family.
#[derive(Debug)]
pub struct Tool {
    family: Family,
    restore: PathBuf,
    variant: Variant,
}

/// Where a rule goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At the head of its chain.
    First,
    /// At the end of its chain.
    Last,
}

/// A rule in a chain that others use too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The chain.
    pub chain: String,
    /// The rule as `iptables-save` prints it, without `-A CHAIN`.
    pub rule: String,
    /// How it is known again.
    pub mark: Mark,
    /// Where it goes.
    pub place: Place,
}

/// What tells a rule from others in the kernel's form, where the words of `iptables-save` are not
/// at hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mark {
    /// It jumps to this chain.
    Jump(String),
    /// It compares the source address with this one.
    Source(IpAddr),
    /// It compares the destination address with this one.
    Destination(IpAddr),
}

impl Mark {
    fn is_on(&self, rule: &nft::FoundRule) -> bool {
        let compares = |ip: &IpAddr, offsets: (u32, u32)| {
            let (offset, bytes) = match ip {
                IpAddr::V4(v4) => (offsets.0, v4.octets().to_vec()),
                IpAddr::V6(v6) => (offsets.1, v6.octets().to_vec()),
            };
            rule.exprs.windows(2).any(|pair| {
                matches!(pair, [Expr::Payload { base: Base::Network, offset: at, len }, Expr::Cmp { equal: true, value }]
                    if *at == offset && *len as usize == bytes.len() && *value == bytes)
            })
        };
        match self {
            Self::Jump(target) => jump_target(rule) == Some(target),
            // Offsets of the addresses in the IPv4 and the IPv6 header.
            Self::Source(ip) => compares(ip, (12, 8)),
            Self::Destination(ip) => compares(ip, (16, 24)),
        }
    }
}

/// What a table is to hold. Rules are only ever added; present ones stay where they are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// `nat` or `filter`.
    pub table: &'static str,
    /// Chains with their rules, made before the entries.
    pub chains: Vec<(String, Vec<String>)>,
    /// Rules in chains of others.
    pub entries: Vec<Entry>,
    /// Bytes that a rule of a chain must hold for the chain to count as whole.
    pub proofs: Vec<(String, Vec<u8>)>,
    /// Compare the words of `iptables-save`, for chains that several networks fill.
    pub exact: bool,
}

/// Attempts when another process changes the same table meanwhile.
const TRIES: usize = 8;

impl Tool {
    /// Finds the programs; `None` when they are not installed.
    pub fn find(family: Family) -> Option<Self> {
        let name = program(family);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
        let main = dirs.map(|dir| dir.join(name)).find(|path| path.is_file())?;
        let restore = main.with_file_name(format!("{name}-restore"));
        if !restore.is_file() {
            return None;
        }
        let real = std::fs::canonicalize(&main).unwrap_or(main);
        let real = real.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let variant = if real.contains("nft") {
            Variant::Nft
        } else if real.contains("legacy") {
            Variant::Legacy
        } else {
            Iptables::find(family).ok()?.variant()
        };
        Some(Self { family, restore, variant })
    }

    /// Whether the programs reach the kernel's tables. Costs two runs.
    pub fn usable(&self) -> bool {
        Iptables::find(self.family).is_ok_and(|tool| tool.probe().is_ok())
    }

    /// Adds what is missing of the plan. Says whether anything was.
    ///
    /// # Errors
    /// What the programs or the kernel refuse.
    pub fn ensure(&self, plan: &Plan) -> Result<bool> {
        let mut failure = None;
        for attempt in 0..TRIES {
            let payload = self.missing(plan)?;
            if payload.is_empty() {
                return Ok(attempt > 0);
            }
            match self.restore(&format!("*{}\n{payload}COMMIT\n", plan.table)) {
                Ok(()) => return Ok(true),
                // Most likely somebody made one of the chains: look again, with another rhythm than
                // whoever did.
                Err(err) => failure = Some(err),
            }
            std::thread::sleep(Duration::from_millis(1 << attempt));
        }
        Err(failure.unwrap_or_else(|| Error::internal("iptables rules could not be set")))
    }

    fn missing(&self, plan: &Plan) -> Result<String> {
        if self.variant == Variant::Nft
            && !plan.exact
            && let Some(payload) = self.missing_by_netlink(plan)?
        {
            return Ok(payload);
        }
        let found = Iptables::find(self.family)?.save(plan.table)?;
        let mut payload = String::new();
        for (chain, rules) in &plan.chains {
            let present = found.rules(chain);
            if present.is_none() {
                payload.push_str(&format!("-N {chain}\n"));
            }
            for rule in rules {
                if !contains(present.unwrap_or_default(), rule) {
                    payload.push_str(&format!("-A {chain} {rule}\n"));
                }
            }
        }
        for entry in &plan.entries {
            if !contains(found.rules(&entry.chain).unwrap_or_default(), &entry.rule) {
                payload.push_str(&entry.line());
            }
        }
        Ok(payload)
    }

    /// The same by netlink, where that can tell: chains that are there are taken for whole when they
    /// hold as many rules as they should, else `None` asks for the exact comparison.
    fn missing_by_netlink(&self, plan: &Plan) -> Result<Option<String>> {
        let mut nft = Nft::new()?;
        let mut rules = |chain: &str| nft.rules(nft_family(self.family), plan.table, Some(chain));
        let mut payload = String::new();
        for (chain, wanted) in &plan.chains {
            let found = rules(chain)?;
            let present = found.len();
            if wanted.is_empty() {
                // An empty chain cannot be told from none; a jump to it tells.
                let jump = Mark::Jump(chain.clone());
                let mut exists = present > 0;
                for entry in plan.entries.iter().filter(|e| e.mark == jump) {
                    exists |= rules(&entry.chain)?.iter().any(|rule| jump.is_on(rule));
                }
                if !exists {
                    payload.push_str(&format!("-N {chain}\n"));
                }
            } else if present == 0 {
                payload.push_str(&format!("-N {chain}\n"));
                for rule in wanted {
                    payload.push_str(&format!("-A {chain} {rule}\n"));
                }
            } else {
                let proofs = plan.proofs.iter().filter(|(of, _)| of == chain);
                let proven = proofs.fold(present >= wanted.len(), |whole, (_, bytes)| {
                    whole && found.iter().any(|rule| holds(rule, bytes))
                });
                if !proven {
                    return Ok(None);
                }
            }
        }
        for entry in &plan.entries {
            if !rules(&entry.chain)?.iter().any(|rule| entry.mark.is_on(rule)) {
                payload.push_str(&entry.line());
            }
        }
        Ok(Some(payload))
    }

    /// Runs `iptables-restore --noflush` once; again while another holds the lock.
    fn restore(&self, payload: &str) -> Result<()> {
        /// `RESOURCE_PROBLEM` of xtables.h.
        const BUSY: i32 = 4;
        for attempt in 0.. {
            trace::step(|| format!("{} starts", self.restore.display()));
            let mut child = Command::new(&self.restore)
                .args(["--noflush", "--wait", "5"])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .with_context(|| format!("exec {}", self.restore.display()))?;
            if let Some(mut pipe) = child.stdin.take() {
                let _ = pipe.write_all(payload.as_bytes());
            }
            let output = child.wait_with_output()?;
            trace::step(|| format!("{} ended: {}", self.restore.display(), output.status));
            if output.status.success() {
                return Ok(());
            }
            if output.status.code() == Some(BUSY) && attempt < 10 {
                std::thread::sleep(Duration::from_millis(20 << attempt.min(5)));
                continue;
            }
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(Error::internal(format!(
                "running {}: {}: {}",
                self.restore.display(),
                output.status,
                said.trim()
            )));
        }
        Ok(())
    }

    /// Whether everything of the plan is there, exactly.
    ///
    /// # Errors
    /// The first chain or rule that is missing, or that the table cannot be read.
    pub fn check(&self, plan: &Plan) -> Result<()> {
        let found = Iptables::find(self.family)?.save(plan.table)?;
        for (chain, rules) in &plan.chains {
            let Some(present) = found.rules(chain) else {
                return Err(Error::internal(format!(
                    "chain {chain} not found in iptables table {}",
                    plan.table
                )));
            };
            for rule in rules {
                if !contains(present, rule) {
                    return Err(Error::internal(format!("expected rule {rule} not found in chain {chain}")));
                }
            }
        }
        for entry in &plan.entries {
            if !contains(found.rules(&entry.chain).unwrap_or_default(), &entry.rule) {
                return Err(Error::internal(format!(
                    "expected rule {} not found in chain {}",
                    entry.rule, entry.chain
                )));
            }
        }
        Ok(())
    }
}

/// Whether a chain holds a rule of these words, in whatever order: the programs print conditions
/// given by users where they like.
fn contains(rules: &[Rule], text: &str) -> bool {
    let sorted = |rule: &Rule| {
        let mut words = rule.0.clone();
        words.sort_unstable();
        words
    };
    let wanted = sorted(&Rule::parse(text));
    rules.iter().any(|rule| rule.0.len() == wanted.len() && sorted(rule) == wanted)
}

impl Entry {
    fn line(&self) -> String {
        match self.place {
            Place::First => format!("-I {} 1 {}\n", self.chain, self.rule),
            Place::Last => format!("-A {} {}\n", self.chain, self.rule),
        }
    }
}

/// Whether a match or target of iptables inside the rule holds these bytes, or a comparison under a
/// mask does (the newer programs write some matches as such).
fn holds(rule: &nft::FoundRule, bytes: &[u8]) -> bool {
    let in_other = rule.exprs.iter().any(|expr| match expr {
        Expr::Other { data, .. } => data.windows(bytes.len()).any(|window| window == bytes),
        _ => false,
    });
    in_other
        || rule.exprs.windows(2).any(|pair| match pair {
            [Expr::Bitwise { mask, .. }, Expr::Cmp { value, .. }] => {
                [mask.as_slice(), value].concat() == bytes
            }
            _ => false,
        })
}

/// The chain a rule jumps to.
pub fn jump_target(rule: &nft::FoundRule) -> Option<&str> {
    rule.exprs.iter().find_map(|e| match e {
        Expr::Verdict(Verdict::Jump(to) | Verdict::Goto(to)) => Some(to.as_str()),
        _ => None,
    })
}

fn program(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

/// One word of a rule, from a configuration, as `iptables-restore` reads it back: in quotes where it has
/// to be. Nothing in it can end the rule or begin another.
///
/// # Errors
/// A control character, which no quotes hide, or an empty word.
pub fn word(text: &str) -> Result<String> {
    if text.is_empty() || text.chars().any(char::is_control) {
        return Err(Error::internal(format!("{text:?} cannot be a word of an iptables rule")));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,!+=@%".contains(c);
    if text.chars().all(plain) {
        return Ok(text.to_owned());
    }
    Ok(format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")))
}

/// nftables' name of the family.
pub fn nft_family(family: Family) -> nft::Family {
    match family {
        Family::V4 => nft::Family::Ip,
        Family::V6 => nft::Family::Ip6,
    }
}

/// Removes the rules of a plan's entries, in whichever kind of iptables they are.
///
/// # Errors
/// What the kernel or the programs refuse.
pub fn remove_entries(family: Family, plan: &Plan) -> Result<()> {
    for attempt in 1..=TRIES {
        let table = plan.table;
        let kernel = nft_family(family);
        let mut nft = Nft::new()?;
        let mut batch = Batch::new();
        for entry in &plan.entries {
            for rule in nft.rules(kernel, table, Some(&entry.chain))?.iter().filter(|r| entry.mark.is_on(r)) {
                batch.delete_rule(kernel, table, &entry.chain, rule.handle);
            }
        }
        match nft.commit(batch) {
            Err(err) if err.is_not_found() && attempt < TRIES => {}
            Err(err) if err.is_unsupported() => break,
            other => {
                other?;
                break;
            }
        }
    }
    if legacy_has(family, plan.table)
        && let Ok(tool) = Iptables::find(family)
    {
        let found = tool.save(plan.table)?;
        let mut payload = String::new();
        for entry in &plan.entries {
            let rule = Rule::parse(&entry.rule);
            let count = found.rules(&entry.chain).unwrap_or_default().iter().filter(|r| **r == rule).count();
            payload.push_str(&format!("-D {} {}\n", entry.chain, entry.rule).repeat(count));
        }
        if !payload.is_empty() {
            tool.restore(&format!("*{}\n{payload}COMMIT\n", plan.table))?;
        }
    }
    Ok(())
}

/// Removes a chain with the rules in `holders` that jump to it, in whichever kind of iptables it is.
/// Nothing there is success.
///
/// # Errors
/// What the kernel or the programs refuse.
pub fn remove_chain(family: Family, table: &str, chain: &str, holders: &[&str]) -> Result<()> {
    for attempt in 0..TRIES {
        match remove_by_netlink(family, table, chain, holders) {
            // Another process changed the table between look and change.
            Err(err) if err.is_not_found() && attempt + 1 < TRIES => {}
            Err(err) if err.is_unsupported() => break,
            other => {
                other?;
                break;
            }
        }
    }
    if legacy_has(family, table) {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let legacy =
            Iptables::find_variant(family, &path, Some(Variant::Legacy)).or_else(|_| Iptables::find(family));
        if let Ok(tool) = legacy {
            tool.remove_chains(table, &[chain])?;
        }
    }
    Ok(())
}

fn remove_by_netlink(
    family: Family,
    table: &str,
    chain: &str,
    holders: &[&str],
) -> std::result::Result<(), felt_hostnet::Error> {
    let family = nft_family(family);
    let mut nft = Nft::new()?;
    let mut batch = Batch::new();
    for holder in holders {
        for rule in
            nft.rules(family, table, Some(holder))?.iter().filter(|rule| jump_target(rule) == Some(chain))
        {
            batch.delete_rule(family, table, holder, rule.handle);
        }
    }
    let filled = !nft.rules(family, table, Some(chain))?.is_empty();
    if filled {
        batch.flush_chain(family, table, chain);
    }
    // A chain without rules and without jumps to it cannot be told from none, and is never ours: it is
    // made in one transaction with its rules. Trying to delete it would cost a grace period each time.
    if batch.is_empty() {
        return Ok(());
    }
    batch.delete_chain(family, table, chain);
    nft.commit(batch)
}

/// Whether the legacy kind has the table loaded.
fn legacy_has(family: Family, table: &str) -> bool {
    let file = match family {
        Family::V4 => "/proc/net/ip_tables_names",
        Family::V6 => "/proc/net/ip6_tables_names",
    };
    std::fs::read_to_string(Path::new(file)).is_ok_and(|names| names.lines().any(|name| name == table))
}
