//! Gross bounds on speed: half of what `docs/performance.md` promises, so that a busy machine does not fail and a packet
//! path that has lost an offload does. Runs alone, in a stage of its own.

use std::process::Command;
use std::time::{Duration, Instant};

use felt_netns_tests::bench::report::Report;
use felt_netns_tests::bins;
use felt_netns_tests::cmd;

#[test]
fn figures_are_at_least_half_of_what_they_must_be() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let json = dir.path().join("bench.json");
    let mut c = Command::new(bins::dir().expect("the programs").join("felt-lab"));
    c.args(["bench", "--quick", "--json"]).arg(&json);
    let begun = Instant::now();
    let out = cmd::output(c, b"", Duration::from_secs(180)).expect("felt-lab bench runs");
    assert!(out.ok(), "{}\n{}", out.stdout, out.stderr);
    let report: Report =
        serde_json::from_slice(&std::fs::read(&json).expect("the report")).expect("a report in JSON");
    assert_eq!(report.problems, Vec::<String>::new());
    // Each of the twelve bounds for each encapsulation, or a figure has silently gone missing.
    assert_eq!(report.targets.len(), 20, "{}", report.table());
    let short: Vec<&str> = report.targets.iter().filter(|t| !t.half_met()).map(|t| t.what.as_str()).collect();
    assert!(short.is_empty(), "too slow: {short:?}\n{}", report.table());
    // On a quiet machine it takes less than a minute; a compiler beside it may double that.
    assert!(begun.elapsed() < Duration::from_secs(150), "took {:?}", begun.elapsed());
}
