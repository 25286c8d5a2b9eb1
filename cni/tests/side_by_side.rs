//! felt and Debian's reference plugins do the same: results, kernel state, firewall, files.
//!
//! Each case runs in two fresh nodes, one per implementation; [`support::compare`] says what is looked
//! at and what may differ. One adds, the other checks and removes, both ways. The last test makes sure
//! that the comparison finds a rule that is missing.

mod support;

use std::path::Path;

use serde_json::Value;
use support::cases::{Case, cases};
use support::compare::{Observed, Run, differences};
use support::{REFERENCE, has_reference};

/// Debian's plugins, which `make test` installs.
fn debian() -> Option<&'static Path> {
    assert!(
        has_reference(),
        "{REFERENCE} holds no reference plugins: apt-get install containernetworking-plugins"
    );
    Some(Path::new(REFERENCE))
}

/// All that may differ from Debian's version.
fn accepted(case: &Case) -> Vec<(&'static str, &'static str)> {
    [case.accepted, case.accepted_old].concat()
}

#[test]
fn felt_does_what_the_reference_does() {
    let mut found = Vec::new();
    for case in cases() {
        let [ours, theirs] = [None, debian()].map(|reference| {
            let run = Run::new(&case);
            let result = run.call(&case, "ADD", reference, None);
            let added = run.observe(&result);
            let out = run.call(&case, "DEL", reference, None);
            let removed = run.observe(&out);
            [added, removed]
        });
        for (when, (ours, theirs)) in ["after ADD", "after DEL"].iter().zip(ours.iter().zip(&theirs)) {
            found.extend(
                differences(ours, theirs, &accepted(&case))
                    .iter()
                    .map(|d| format!("{} {when}: {d}", case.name)),
            );
        }
    }
    assert!(found.is_empty(), "{} differences:\n{}", found.len(), found.join("\n"));
}

#[test]
fn either_removes_what_the_other_made() {
    for case in cases() {
        for reference_adds in [true, false] {
            let [adds, removes] = if reference_adds { [debian(), None] } else { [None, debian()] };
            let run = Run::new(&case);
            let before = run.observe("");
            let result = run.call(&case, "ADD", adds, None);
            let value: Value = serde_json::from_str(&result).unwrap();
            // The reference's CHECK fails for bridges without IPAM.
            let checkable = reference_adds || case.config.contains("\"ipam\"") || case.plugin == "loopback";
            if value["cniVersion"].as_str() >= Some("0.4.0") && checkable {
                // And the other's CHECK is content.
                run.call(&case, "CHECK", removes, Some(&value));
            }
            run.call(&case, "DEL", removes, None);
            let after = run.observe("");
            let left = |seen: &Observed| {
                let mut lines = Vec::new();
                for (key, found) in seen {
                    // Chains that all attachments share stay.
                    let nat = |l: &&String| {
                        ["CNI-DN-", "cid1", "10.1.2.9", "fd00::9"].iter().any(|t| l.contains(t))
                    };
                    if key.ends_with("-save") {
                        lines.extend(found.iter().filter(nat).cloned());
                    }
                    if key.starts_with("file") && !key.contains("last_reserved") && !key.ends_with("lock") {
                        lines.push(key.clone());
                    }
                    if key.contains("ip -d link") {
                        // Of links that were there before, only that they are: a returned device is down, a
                        // token bucket goes with its cable.
                        lines.extend(found.iter().filter(|l| !l.contains("tbr0")).filter_map(|l| {
                            let (_, rest) = l.split_once("\"ifname\":\"")?;
                            rest.split_once('"').map(|(name, _)| format!("link {name}"))
                        }));
                    }
                }
                lines.sort();
                lines
            };
            assert_eq!(left(&before), left(&after), "{} added by reference: {reference_adds}", case.name);
        }
    }
}

#[test]
fn the_comparison_finds_a_missing_rule() {
    let case = cases().into_iter().find(|c| c.name == "bridge masquerade").unwrap();
    let run = Run::new(&case);
    let result = run.call(&case, "ADD", None, None);
    let whole = run.observe(&result);
    assert!(differences(&whole, &run.observe(&result), &[]).is_empty(), "looking twice sees the same");
    let jump = whole["iptables-save"].iter().find(|l| l.starts_with("-A POSTROUTING")).unwrap();
    let output = run.node.with(|| {
        std::process::Command::new("sh")
            .arg("-c")
            .arg(format!("iptables -t nat {}", jump.replacen("-A", "-D", 1)))
            .output()
    });
    assert!(output.unwrap().status.success());
    let found = differences(&whole, &run.observe(&result), &[]);
    assert!(found.iter().any(|d| d.contains("felt only: -A POSTROUTING")), "{found:?}");
}
