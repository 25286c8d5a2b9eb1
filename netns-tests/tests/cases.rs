//! docs/cases.md keeps its word: every row names tests that exist, or a decision that is written down.
//!
//! A row is `| number | symptom | basis | settled by |`. The last cell holds tests, written `` `file.rs::name` `` (any
//! end of the file's path that is unique enough, such as `offload/tests.rs::name`) or `` file.rs `name` ``, and links to
//! headings of docs/compatibility.md or cni.md, `[words](compatibility.md#heading)`. Cases that nothing settles yet are
//! listed as `- number: what is missing` instead; the real page has every case in one of the two forms.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a row rests on: agreed by the maintainers of the reference, expected by users, learnt from a neighbouring
/// project, or (for the matrix of configs) the reference's own behaviour.
const BASES: [&str; 4] = ["M", "U", "P", "R"];

/// Cases have even numbers up to this one; the matrix of configurations is `H`.
const LAST_CASE: u32 = 228;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_path_buf()
}

/// The sources that can hold tests (path from the root, text) and the pages that can hold decisions.
struct Tree {
    sources: BTreeMap<String, String>,
    pages: BTreeMap<String, String>,
}

impl Tree {
    fn read() -> Tree {
        let mut tree = Tree { sources: BTreeMap::new(), pages: BTreeMap::new() };
        for part in ["dataplane", "control", "cni", "netns-tests", "benches"] {
            tree.collect(&root().join(part));
        }
        for entry in std::fs::read_dir(root().join("docs")).expect("docs") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|e| e == "md") {
                let name = path.file_name().expect("a name").to_string_lossy().into_owned();
                tree.pages.insert(name, std::fs::read_to_string(&path).expect("a page"));
            }
        }
        tree
    }

    fn collect(&mut self, dir: &Path) {
        for entry in std::fs::read_dir(dir).expect("a folder").map(|e| e.expect("an entry")) {
            let path = entry.path();
            if entry.file_type().expect("a type").is_dir() {
                if path.file_name().is_some_and(|n| n != "target") {
                    self.collect(&path);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name = path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned();
                self.sources.insert(name, std::fs::read_to_string(&path).expect("a source"));
            }
        }
    }

    /// A file whose path ends with `file` has a test of this name.
    fn has_test(&self, file: &str, name: &str) -> bool {
        let end = format!("/{file}");
        self.sources.iter().any(|(path, text)| (path == file || path.ends_with(&end)) && is_test(text, name))
    }

    /// The page has a heading with this anchor, or an explicit one.
    fn has_anchor(&self, page: &str, anchor: &str) -> bool {
        self.pages.get(page).is_some_and(|text| {
            text.contains(&format!("id=\"{anchor}\""))
                || text.lines().filter(|l| l.starts_with('#')).any(|l| slug(l) == anchor)
        })
    }
}

/// A function of this name whose attributes make it a test.
fn is_test(text: &str, name: &str) -> bool {
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let starts = |line: &str| {
        let line = line.strip_prefix("async ").unwrap_or(line);
        line.strip_prefix("fn ").and_then(|l| l.strip_prefix(name)).is_some_and(|rest| rest.starts_with('('))
    };
    let above =
        |at: usize| lines[..at].iter().rev().take_while(|l| l.starts_with("#[") || l.starts_with("//"));
    (0..lines.len()).any(|at| {
        starts(lines[at])
            && above(at).any(|l| l.starts_with("#[test]") || (l.starts_with("#[") && l.contains("::test")))
    })
}

/// The anchor that renderers of Markdown give a heading.
fn slug(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    text.chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// The tests a cell names: (file, name).
fn tests_of(cell: &str) -> Vec<(String, String)> {
    let mut tests = Vec::new();
    let mut file = String::new();
    for (i, part) in cell.split('`').enumerate() {
        if i % 2 == 0 {
            let word = part.split([' ', ',', ';']).rfind(|w| !w.is_empty()).unwrap_or_default();
            if word.ends_with(".rs") {
                word.clone_into(&mut file);
            }
        } else if let Some((in_file, name)) = part.split_once("::") {
            in_file.clone_into(&mut file);
            tests.push((in_file.to_owned(), name.trim().to_owned()));
        } else if !file.is_empty() {
            tests.push((file.clone(), part.to_owned()));
        }
    }
    tests
}

/// The links of a cell: (page, anchor).
fn links_of(cell: &str) -> Vec<(String, String)> {
    let targets = cell.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.map(|t| t.split_once('#').unwrap_or((t, ""))).map(|(p, a)| (p.to_owned(), a.to_owned())).collect()
}

/// What is wrong with a page of rows: one line for each fault. `tree` answers what exists.
fn faults(table: &str, tree: &Tree) -> Vec<String> {
    let mut faults = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    for line in table.lines().filter(|l| l.starts_with('|')) {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let number = cells[0];
        if number == "#" || number.starts_with("--") {
            continue;
        }
        let mut fault = |text: String| faults.push(format!("row {number}: {text}"));
        if number != "H" && number.parse::<u32>().is_err() {
            fault("not a number".to_owned());
        }
        if !seen.insert(number.to_owned()) {
            fault("stands there twice".to_owned());
        }
        let [_, symptom, basis, settled] = cells[..] else {
            fault(format!("{} cells instead of 4", cells.len()));
            continue;
        };
        if symptom.is_empty() {
            fault("no symptom".to_owned());
        }
        if !BASES.contains(&basis) {
            fault(format!("basis {basis:?} is none of {BASES:?}"));
        }
        let (tests, links) = (tests_of(settled), links_of(settled));
        if tests.is_empty() && links.is_empty() {
            fault("neither a test nor a decision".to_owned());
        } else if basis == "M" && tests.is_empty() {
            fault("what the maintainers agreed on needs a test".to_owned());
        }
        for (file, name) in tests.iter().filter(|(file, name)| !tree.has_test(file, name)) {
            fault(format!("there is no test {name} in {file}"));
        }
        for (page, anchor) in links.iter().filter(|(page, anchor)| !tree.has_anchor(page, anchor)) {
            fault(format!("there is no {page}#{anchor}"));
        }
    }
    for number in open_cases(table) {
        if !seen.insert(number.clone()) {
            faults.push(format!("row {number}: both settled and open, or open twice"));
        }
    }
    if seen.is_empty() {
        faults.push("no rows".to_owned());
    }
    faults
}

/// Numbers of the cases that the page calls open: `- 12: what is missing`.
fn open_cases(page: &str) -> Vec<String> {
    let items = page.lines().filter_map(|l| l.strip_prefix("- ")?.split_once(": "));
    items.filter(|(number, _)| number.parse::<u32>().is_ok()).map(|(number, _)| number.to_owned()).collect()
}

/// Cases that are neither in a row nor open.
fn missing(page: &str) -> Vec<String> {
    let open = open_cases(page);
    let has_row = |n: &str| page.lines().any(|l| l.starts_with(&format!("| {n} |")));
    let all = (2..=LAST_CASE).step_by(2).map(|n| n.to_string()).chain(["H".to_owned()]);
    all.filter(|n| !has_row(n) && !open.contains(n)).collect()
}

#[test]
fn every_row_names_a_test_or_a_decision_that_exists() {
    let tree = Tree::read();
    let faults = faults(&tree.pages["cases.md"], &tree);
    assert!(faults.is_empty(), "docs/cases.md:\n{}", faults.join("\n"));
    assert_eq!(missing(&tree.pages["cases.md"]), Vec::<String>::new(), "cases in no list");
}

#[test]
fn a_case_in_no_list_is_missed() {
    let rows: String = (2..=LAST_CASE).step_by(2).map(|n| format!("| {n} | s | M | t |\n")).collect();
    let whole = rows + "| H | s | R | t |\n";
    assert_eq!(missing(&whole), Vec::<String>::new());
    assert_eq!(missing(&whole.replace("| 12 |", "- 12: ")), Vec::<String>::new(), "open cases count");
    assert_eq!(missing(&whole.replace("| 12 |", "| 112 |")), ["12"]);
    assert_eq!(missing(&whole.replace("| H |", "| h |")), ["H"]);
}

#[test]
fn broken_rows_are_found() {
    let source = "#[test]\nfn real_test() {}\n\n#[test]\n#[ignore = \"root\"]\nfn ignored_test() {}\n\nfn helper() {}\n\
                  #[tokio::test(start_paused = true)]\nasync fn async_test() {}\n";
    let tree = Tree {
        sources: [("a/tests/x.rs".to_owned(), source.to_owned())].into(),
        pages: [("compatibility.md".to_owned(), "# Page\n## Silent for ICMP, too\n".to_owned())].into(),
    };
    let check = |row: &str| faults(row, &tree);
    for good in [
        "| 2 | s | M | `x.rs::real_test`, `tests/x.rs::ignored_test` |",
        "| 4 | s | P | x.rs `real_test`, `async_test` |",
        "| 6 | s | U | [why](compatibility.md#silent-for-icmp-too) |",
        "| H | s | R | `a/tests/x.rs::real_test` and [why](compatibility.md#silent-for-icmp-too) |",
    ] {
        assert_eq!(check(&format!("| # | a | b | c |\n|---|---|---|---|\n{good}")), Vec::<String>::new());
    }
    for (bad, words) in [
        ("| 2 | s | M | `x.rs::no_such_test` |", "no test no_such_test in x.rs"),
        ("| 2 | s | M | `x.rs::real` |", "no test real "),
        ("| 2 | s | M | `x.rs::helper` |", "no test helper"),
        ("| 2 | s | M | `y.rs::real_test` |", "no test real_test in y.rs"),
        ("| 2 | s | M | `.rs::real_test` |", "no test real_test in .rs"),
        ("| 2 | s | M | x.rs `real_test`, `gone` |", "no test gone"),
        ("| 2 | s | U | [why](compatibility.md#silent) |", "no compatibility.md#silent"),
        ("| 2 | s | U | [why](other.md#page) |", "no other.md#page"),
        ("| 2 | s | U | [why](compatibility.md) |", "no compatibility.md#"),
        ("| 2 | s | M | [why](compatibility.md#page) |", "needs a test"),
        ("| 2 | s | M |  |", "neither a test"),
        ("| 2 | s | M | later |", "neither a test"),
        ("| 2 |  | M | `x.rs::real_test` |", "no symptom"),
        ("| 2 | s | X | `x.rs::real_test` |", "basis"),
        ("| 2 | s | `x.rs::real_test` |", "3 cells"),
        ("| two | s | M | `x.rs::real_test` |", "not a number"),
        ("| 2 | s | M | `x.rs::real_test` |\n| 2 | s | M | `x.rs::real_test` |", "twice"),
        ("| 2 | s | M | `x.rs::real_test` |\n- 2: something", "both settled and open"),
        ("", "no rows"),
    ] {
        let faults = check(bad);
        assert!(faults.len() == 1 && faults[0].contains(words), "{bad}: {faults:?}");
    }
}
