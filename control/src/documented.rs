//! What `docs/api.md` and `docs/compatibility.md` say, beside what the code has: names of drops, events, metrics, paths,
//! JSON keys and flags. Where a list exists only as code, the source text itself is read, so that a name cannot be
//! added without being written down.

use std::collections::BTreeSet;

use felt_dataplane::stats::DropReason;
use regex::Regex;

use crate::{admin, cli};

const API: &str = include_str!("../../docs/api.md");
const COMPATIBILITY: &str = include_str!("../../docs/compatibility.md");

/// The text below a heading, up to the next one of any level.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let from = page.find(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no heading {heading:?}"));
    let text = &page[from + heading.len() + 2..];
    &text[..text.find("\n#").unwrap_or(text.len())]
}

/// The words in backticks in the first column of the tables of a text.
fn first_column(text: &str) -> BTreeSet<String> {
    let word = Regex::new("`([^`]+)`").unwrap();
    text.lines()
        .filter_map(|line| line.strip_prefix('|')?.split('|').next())
        .flat_map(|cell| word.captures_iter(cell).map(|found| found[1].to_owned()).collect::<Vec<_>>())
        .collect()
}

/// What the pattern's first group finds in source text in front of its tests.
fn in_source(source: &str, pattern: &str) -> BTreeSet<String> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    Regex::new(pattern).unwrap().captures_iter(code).map(|found| found[1].to_owned()).collect()
}

fn set<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    names.into_iter().map(str::to_owned).collect()
}

#[test]
fn every_drop_reason_is_in_the_page_and_no_other() {
    let code = set(DropReason::ALL.iter().map(|reason| reason.name()));
    assert_eq!(first_column(section(API, "## Drops")), code);
}

#[test]
fn every_metric_is_in_the_page_and_no_other() {
    let code = in_source(include_str!("metrics.rs"), r#""(felt_[a-z_]+)""#);
    assert!(code.len() > 20, "the pattern finds only {code:?}");
    assert_eq!(first_column(section(API, "## Metrics")), code);
}

#[test]
fn every_event_is_in_the_page_and_no_other() {
    let source = include_str!("backend/userspace/report.rs");
    let mut code = in_source(source, r#"\("([a-z_]+)", counters\.[a-z_]+\)"#);
    for prefix in in_source(source, r#"events\.insert\(format!\("([a-z_]+)_\{name\}"#) {
        code.insert(prefix + "_DIRECTION");
    }
    assert!(code.remove("icmp_answered_DIRECTION"), "{code:?}");
    code.insert("icmp_answered_DIRECTION_REASON".to_owned());
    assert_eq!(first_column(section(API, "## Events")), code);
}

#[test]
fn every_admin_path_is_in_the_page_and_no_other() {
    assert_eq!(first_column(section(API, "## Admin socket")), set(admin::PATHS));
}

#[test]
fn every_json_key_and_offload_is_in_the_page() {
    let mut code = in_source(include_str!("api.rs"), r"\n    pub ([a-z0-9_]+):");
    code.extend(in_source(include_str!("command/lease.rs"), r"\n    pub\(super\) ([a-z0-9_]+):"));
    code.extend(in_source(include_str!("command/cleanup.rs"), r"\n    pub\(super\) ([a-z0-9_]+):"));
    code.extend(in_source(include_str!("backend/userspace/report.rs"), r#"\("([a-z_]+)", state\."#));
    // In JSON it is `type`.
    assert!(code.remove("kind") && code.len() > 60, "the pattern finds only {code:?}");
    let word = Regex::new(r#"[`".]([a-z0-9_]+)[`"\[]"#).unwrap();
    let page: BTreeSet<String> = word.captures_iter(API).map(|found| found[1].to_owned()).collect();
    let missing: Vec<_> = code.difference(&page).collect();
    assert!(missing.is_empty(), "not in docs/api.md: {missing:?}");
}

#[test]
fn every_flag_with_its_variable_is_in_the_page_and_no_other() {
    let usage = cli::usage("feltd");
    let mut code: BTreeSet<String> = usage
        .lines()
        .filter_map(|line| line.strip_prefix("  -")?.split(' ').next())
        .map(String::from)
        .collect();
    code.extend(set(["h", "help"]));
    let text = section(COMPATIBILITY, "## Flags and environment");
    // Names in capitals are variables without a flag.
    let listed = first_column(text).into_iter().filter(|name| !name.starts_with(char::is_uppercase));
    assert_eq!(listed.collect::<BTreeSet<_>>(), code);
    let rows: Vec<&str> = text.lines().collect();
    for flag in code.iter().filter(|flag| !matches!(flag.as_str(), "h" | "help" | "version")) {
        let variable = format!("FLANNELD_{}", flag.to_uppercase().replace('-', "_"));
        let row = rows.iter().find(|row| row.starts_with(&format!("| `{flag}`")));
        let row = row.unwrap_or_else(|| panic!("no row for --{flag} in docs/compatibility.md"));
        assert!(row.contains(&format!("`{variable}`")), "{row} lacks {variable}");
    }
}
