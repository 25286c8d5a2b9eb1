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
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use felt_hostnet::iptables::{Iptables, Rule, Variant};
use felt_hostnet::netlink::Family;
use felt_hostnet::nft::{self, Batch, Expr, Nft, Verdict};

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

/// A rule with a jump, in a chain that others use too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The chain.
    pub chain: String,
    /// The rule as `iptables-save` prints it, without `-A CHAIN`.
    pub rule: String,
    /// The chain it jumps to.
    pub target: String,
    /// Where it goes.
    pub place: Place,
}

/// What a table is to hold. Rules are only ever added; present ones stay where they are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// `nat` or `filter`.
    pub table: &'static str,
    /// Chains with their rules, made before the entries.
    pub chains: Vec<(String, Vec<String>)>,
    /// Jumps.
    pub entries: Vec<Entry>,
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
                if !present.unwrap_or_default().contains(&Rule::parse(rule)) {
                    payload.push_str(&format!("-A {chain} {rule}\n"));
                }
            }
        }
        for entry in &plan.entries {
            if !found.rules(&entry.chain).unwrap_or_default().contains(&Rule::parse(&entry.rule)) {
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
            let present = rules(chain)?.len();
            if wanted.is_empty() {
                // An empty chain cannot be told from none; a jump to it tells.
                let jumped = plan.entries.iter().filter(|e| e.target == *chain);
                let mut exists = present > 0;
                for entry in jumped {
                    exists |= jumps_to(&rules(&entry.chain)?, chain);
                }
                if !exists {
                    payload.push_str(&format!("-N {chain}\n"));
                }
            } else if present == 0 {
                payload.push_str(&format!("-N {chain}\n"));
                for rule in wanted {
                    payload.push_str(&format!("-A {chain} {rule}\n"));
                }
            } else if present < wanted.len() {
                return Ok(None);
            }
        }
        for entry in &plan.entries {
            if !jumps_to(&rules(&entry.chain)?, &entry.target) {
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
                if !present.contains(&Rule::parse(rule)) {
                    return Err(Error::internal(format!("expected rule {rule} not found in chain {chain}")));
                }
            }
        }
        for entry in &plan.entries {
            if !found.rules(&entry.chain).unwrap_or_default().contains(&Rule::parse(&entry.rule)) {
                return Err(Error::internal(format!(
                    "expected rule {} not found in chain {}",
                    entry.rule, entry.chain
                )));
            }
        }
        Ok(())
    }
}

impl Entry {
    fn line(&self) -> String {
        match self.place {
            Place::First => format!("-I {} 1 {}\n", self.chain, self.rule),
            Place::Last => format!("-A {} {}\n", self.chain, self.rule),
        }
    }
}

fn jumps_to(rules: &[nft::FoundRule], target: &str) -> bool {
    rules.iter().any(|rule| is_jump(rule, target))
}

fn is_jump(rule: &nft::FoundRule, target: &str) -> bool {
    rule.exprs
        .iter()
        .any(|e| matches!(e, Expr::Verdict(Verdict::Jump(to) | Verdict::Goto(to)) if to == target))
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

/// nftables' name of the family.
pub fn nft_family(family: Family) -> nft::Family {
    match family {
        Family::V4 => nft::Family::Ip,
        Family::V6 => nft::Family::Ip6,
    }
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
        for rule in nft.rules(family, table, Some(holder))?.iter().filter(|rule| is_jump(rule, chain)) {
            batch.delete_rule(family, table, holder, rule.handle);
        }
    }
    let filled = !nft.rules(family, table, Some(chain))?.is_empty();
    let known = filled || !batch.is_empty();
    if filled {
        batch.flush_chain(family, table, chain);
    }
    batch.delete_chain(family, table, chain);
    match nft.commit(batch) {
        // An empty chain that nobody jumps to looks like none: deleting it was a guess.
        Err(err) if err.is_not_found() && !known => Ok(()),
        other => other,
    }
}

/// Whether the legacy kind has the table loaded.
fn legacy_has(family: Family, table: &str) -> bool {
    let file = match family {
        Family::V4 => "/proc/net/ip_tables_names",
        Family::V6 => "/proc/net/ip6_tables_names",
    };
    std::fs::read_to_string(Path::new(file)).is_ok_and(|names| names.lines().any(|name| name == table))
}
