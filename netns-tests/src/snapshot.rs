//! "Leaves the machine as before", made checkable: everything felt could leave behind, as sorted lines of text, taken
//! before and after and compared.
//!
//! Left out on purpose: what the kernel changes by itself (interface indices, counters, ages, learned neighbours,
//! names the kernel numbers at random).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::cmd;
use crate::netns::Place;

/// The state of a machine or node: section -> lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    sections: BTreeMap<&'static str, BTreeSet<String>>,
}

/// Where to look.
#[derive(Clone, Copy, Debug)]
pub enum Scope<'a> {
    /// The host: this process's own namespaces.
    Host,
    /// A node of a lab.
    Node(&'a Place),
}

impl Snapshot {
    /// Looks at links, addresses, routes, rules, permanent neighbours, FDB, nftables, iptables, named namespaces,
    /// felt's processes, mounts, /run and /var/lib.
    ///
    /// # Errors
    /// When `ip` fails. A firewall tool that is not installed has nothing to show.
    pub fn take(scope: Scope<'_>) -> Result<Snapshot> {
        let mut s = Snapshot { sections: BTreeMap::new() };
        for (section, words) in [
            ("link", "-j -d link"),
            ("addr", "-j addr"),
            ("route", "-j route show table all"),
            ("route6", "-6 -j route show table all"),
            ("rule", "-j rule"),
            ("rule6", "-6 -j rule"),
            ("neigh", "-j neigh show nud permanent"),
            ("neigh6", "-6 -j neigh show nud permanent"),
        ] {
            let text = run(scope, "ip", &words.split(' ').collect::<Vec<_>>())?;
            s.json(section, &text)?;
        }
        if cmd::have("bridge") {
            let text = run(scope, "bridge", &["-j", "fdb", "show"])?;
            s.json("fdb", &text)?;
        }
        if cmd::have("nft")
            && let Ok(text) = run(scope, "nft", &["-j", "list", "ruleset"])
        {
            let parsed: Value = serde_json::from_str(&text).context("nft -j")?;
            let lines =
                parsed["nftables"].as_array().into_iter().flatten().filter(|v| v.get("metainfo").is_none());
            s.lines("nft", lines.filter(|v| !is_iptables_frame(v)).map(|v| strip(v.clone()).to_string()));
        }
        for (section, tool) in [("iptables", "iptables-save"), ("ip6tables", "ip6tables-save")] {
            if cmd::have(tool)
                && let Ok(text) = run(scope, tool, &[])
            {
                // Comments carry dates, chain lines carry counters. Tables and accepting built-in chains are there as
                // soon as anybody has called iptables once, and say nothing.
                let idle = |l: &str| {
                    l.starts_with(['#', '*'])
                        || l == "COMMIT"
                        || (l.starts_with(':') && l.contains(" ACCEPT"))
                };
                let lines = text.lines().filter(|l| !idle(l));
                s.lines(section, lines.map(|l| l.split(" [").next().unwrap_or(l).to_owned()));
            }
        }
        let root = match scope {
            Scope::Host => std::path::PathBuf::from("/"),
            Scope::Node(p) => p.root(),
        };
        s.lines("netns", names(&root.join("run/netns")));
        for (section, dir) in [("/run", "run"), ("/var/lib", "var/lib")] {
            let mut found = BTreeSet::new();
            let depth = if matches!(scope, Scope::Host) { 2 } else { 8 };
            tree(&root.join(dir), dir, depth, &mut found);
            s.sections.insert(section, found);
        }
        s.lines("process", processes(scope));
        if matches!(scope, Scope::Host) {
            let mounts = fs::read_to_string("/proc/self/mounts").context("read the mount table")?;
            s.lines("mount", mounts.lines().filter_map(|l| l.split(' ').nth(1)).map(str::to_owned));
        }
        Ok(s)
    }

    fn json(&mut self, section: &'static str, text: &str) -> Result<()> {
        let text = text.trim();
        let parsed: Value = if text.is_empty() {
            Value::Null
        } else {
            serde_json::from_str(text).with_context(|| format!("{section}: {text}"))?
        };
        self.lines(section, parsed.as_array().into_iter().flatten().map(|v| strip(v.clone()).to_string()));
        Ok(())
    }

    fn lines(&mut self, section: &'static str, lines: impl IntoIterator<Item = String>) {
        self.sections.entry(section).or_default().extend(lines);
    }

    /// Lines that are in only one of the two: `+` came, `-` went.
    pub fn difference(&self, later: &Snapshot) -> Vec<String> {
        let empty = BTreeSet::new();
        let mut out = Vec::new();
        let names: BTreeSet<_> = self.sections.keys().chain(later.sections.keys()).collect();
        for name in names {
            let a = self.sections.get(name).unwrap_or(&empty);
            let b = later.sections.get(name).unwrap_or(&empty);
            out.extend(a.difference(b).map(|l| format!("- {name}: {l}")));
            out.extend(b.difference(a).map(|l| format!("+ {name}: {l}")));
        }
        out
    }

    /// The number of things looked at.
    pub fn len(&self) -> usize {
        self.sections.values().map(BTreeSet::len).sum()
    }

    /// Whether nothing was found at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn run(scope: Scope<'_>, program: &str, args: &[&str]) -> Result<String> {
    let mut c = match scope {
        Scope::Host => std::process::Command::new(program),
        // With the node's mounts, so that the firewall tools use its lock file.
        Scope::Node(p) => p.command(program),
    };
    c.args(args);
    cmd::run(c)
}

/// The tables and accepting base chains that the iptables program makes in nftables when it is first called, by
/// whomever. Rules and further chains in them do count.
fn is_iptables_frame(v: &Value) -> bool {
    const TABLES: [&str; 5] = ["filter", "nat", "mangle", "raw", "security"];
    let ours = |o: &Value, name: &str| {
        (o["family"] == "ip" || o["family"] == "ip6") && o[name].as_str().is_some_and(|t| TABLES.contains(&t))
    };
    match (v.get("table"), v.get("chain")) {
        (Some(table), _) => ours(table, "name"),
        (_, Some(chain)) => ours(chain, "table") && chain["policy"] == "accept",
        _ => false,
    }
}

/// Removes what changes by itself.
fn strip(mut v: Value) -> Value {
    match &mut v {
        Value::Object(map) => {
            for key in [
                "ifindex",
                "link_index",
                "link_netnsid",
                "handle",
                "packets",
                "bytes",
                "stats",
                "stats64",
                "operstate",
                "flags",
                "expires",
                "used",
                "updated",
                "valid_life_time",
                "preferred_life_time",
                "linkinfo_age",
                "hello_timer",
                "gc_timer",
                "tcn_timer",
                "topology_change_timer",
                "hold_timer",
                "forward_delay_timer",
                "message_age_timer",
                "index",
                "cacheinfo",
            ] {
                map.remove(key);
            }
            for (_, inner) in map.iter_mut() {
                *inner = strip(inner.take());
            }
        }
        Value::Array(list) => {
            for inner in list {
                *inner = strip(inner.take());
            }
        }
        _ => {}
    }
    v
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

fn tree(dir: &Path, shown: &str, depth: u32, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = format!("{shown}/{}", entry.file_name().to_string_lossy());
        // The lab's own mounts are the fixture, not something felt left.
        if name == "run/lab" || name.starts_with("run/felt-lab") {
            continue;
        }
        if depth > 1 && entry.file_type().is_ok_and(|t| t.is_dir()) {
            tree(&entry.path(), &name, depth - 1, found);
        }
        found.insert(name);
    }
}

/// Processes of the scope that are felt's: on the host those whose program is called felt*, in a node all of its
/// network namespace but the holder.
fn processes(scope: Scope<'_>) -> Vec<String> {
    let node_net = match scope {
        Scope::Host => None,
        Scope::Node(p) => fs::read_link(format!("/proc/{}/ns/net", p.holder.pid)).ok(),
    };
    let me = std::process::id();
    let mut out = Vec::new();
    for pid in names(Path::new("/proc")).iter().filter_map(|n| n.parse::<u32>().ok()) {
        let Ok(name) = fs::read_to_string(format!("/proc/{pid}/comm")) else { continue };
        let name = name.trim().to_owned();
        let counts = match (scope, &node_net) {
            (Scope::Host, _) => pid != me && name.starts_with("felt") && !in_foreign_pid_namespace(pid),
            (Scope::Node(p), Some(net)) => {
                pid != p.holder.pid && fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|l| l == *net)
            }
            _ => false,
        };
        if counts {
            out.push(name);
        }
    }
    out
}

/// Labs of others run in PID namespaces of their own and are no business of this one.
fn in_foreign_pid_namespace(pid: u32) -> bool {
    let own = fs::read_link("/proc/self/ns/pid").ok();
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok() != own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_names_what_came_and_what_went() {
        let snap = |lines: &[&str]| {
            let mut s = Snapshot { sections: BTreeMap::new() };
            s.lines("link", lines.iter().map(|l| (*l).to_owned()));
            s
        };
        let (a, b) = (snap(&["lo", "eth0"]), snap(&["lo", "flannel.1"]));
        assert_eq!(a.difference(&b), ["- link: eth0", "+ link: flannel.1"]);
        assert!(a.difference(&a).is_empty());
    }

    #[test]
    fn indices_and_counters_do_not_count() {
        let v = serde_json::json!({"ifname": "lo", "ifindex": 1, "stats64": {"rx": 1}, "linkinfo": {"handle": 3, "kind": "x"}});
        assert_eq!(strip(v).to_string(), r#"{"ifname":"lo","linkinfo":{"kind":"x"}}"#);
    }
}
