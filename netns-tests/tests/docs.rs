//! The pages in front of the code: links and paths lead somewhere, dependencies are those of the manifests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_path_buf()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Every Markdown page of the root, of `docs/` and of the crates.
fn pages() -> Vec<PathBuf> {
    let out = Command::new("find")
        .arg(root())
        .args(["-name", "target", "-prune", "-o", "-name", ".git", "-prune", "-o", "-name", "*.md", "-print"])
        .output()
        .expect("find runs");
    let pages: Vec<PathBuf> = String::from_utf8_lossy(&out.stdout).lines().map(PathBuf::from).collect();
    assert!(pages.len() > 5, "only {pages:?}");
    pages
}

/// The page without fenced blocks, whose text is no Markdown.
fn prose(text: &str) -> String {
    text.split("\n```").step_by(2).collect::<Vec<_>>().join("\n")
}

/// Targets of `[text](target)`.
fn links(text: &str) -> Vec<String> {
    let rest = text.split("](").skip(1);
    rest.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target.to_owned()).collect()
}

/// The names a link may have behind `#`: headings as GitHub turns them into anchors, and `<a id="..">`.
fn anchors(text: &str) -> BTreeSet<String> {
    let slug = |heading: &str| -> String {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    let prose = prose(text);
    let headings = prose.lines().filter(|line| line.starts_with('#')).map(slug);
    let ids = text.split("<a id=\"").skip(1).filter_map(|rest| rest.split('"').next()).map(str::to_owned);
    headings.chain(ids).collect()
}

#[test]
fn every_link_in_the_pages_leads_somewhere() {
    let mut broken = Vec::new();
    for page in pages() {
        let text = read(&page);
        for link in links(&prose(&text)) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = link.split_once('#').map_or((link.as_str(), None), |(p, a)| (p, Some(a)));
            let target = if path.is_empty() { page.clone() } else { page.with_file_name(path) };
            let found = target.exists()
                && anchor.is_none_or(|anchor| target.is_file() && anchors(&read(&target)).contains(anchor));
            if !found {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links to nowhere:\n{}", broken.join("\n"));
}

#[test]
fn every_source_path_named_in_the_pages_exists() {
    let mut broken = Vec::new();
    let rooms = [
        "dataplane/",
        "control/",
        "cni/",
        "netns-tests/",
        "benches/",
        "docs/",
        "scripts/",
        "deploy/",
        ".ci/",
    ];
    for page in pages() {
        let text = prose(&read(&page));
        for word in text.split('`').skip(1).step_by(2) {
            // A path, not a command line, a pattern, or a place that only a build makes.
            let path =
                rooms.iter().any(|room| word.starts_with(room)) && !word.contains([' ', '*', '<', '{']);
            // `file.rs::test` names a test; that it exists is checked with the field cases.
            let file = word.split("::").next().unwrap_or(word);
            if path && !root().join(file).exists() {
                broken.push(format!("{}: {word}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "paths to nowhere:\n{}", broken.join("\n"));
}

/// The crates in the first column of the table below a heading.
fn crates_of(page: &str, heading: &str) -> BTreeSet<String> {
    let from =
        page.split(&format!("\n## {heading}\n")).nth(1).unwrap_or_else(|| panic!("no heading {heading}"));
    let section = from.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix('|')?.split('|').next()).skip(2);
    rows.flat_map(|cell| cell.split(',')).map(|name| name.trim().to_owned()).collect()
}

#[test]
fn the_page_of_dependencies_is_that_of_the_manifests() {
    let out = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()))
        .args(["metadata", "--format-version", "1", "--locked", "--no-deps"])
        .current_dir(root())
        .output()
        .expect("cargo metadata runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let page = read(&root().join("docs/dependencies.md"));
    let sections: [(&str, &[&str]); 5] = [
        ("dataplane", &["felt-dataplane"]),
        ("control", &["felt-control"]),
        ("control/hostnet", &["felt-hostnet"]),
        ("cni", &["felt-cni"]),
        ("netns-tests, benches", &["felt-netns-tests", "felt-benches"]),
    ];
    let packages = metadata["packages"].as_array().expect("packages");
    let mut covered = 0;
    for (heading, members) in sections {
        let used: BTreeSet<String> = packages
            .iter()
            .filter(|p| p["name"].as_str().is_some_and(|name| members.contains(&name)))
            .inspect(|_| covered += 1)
            .flat_map(|p| p["dependencies"].as_array().expect("dependencies"))
            .filter_map(|d| d["name"].as_str())
            .filter(|name| !name.starts_with("felt-"))
            .map(str::to_owned)
            .collect();
        assert_eq!(
            crates_of(&page, heading),
            used,
            "docs/dependencies.md, {heading}: page left, manifests right"
        );
    }
    assert_eq!(covered, packages.len(), "a crate of the workspace has no section in docs/dependencies.md");
}
