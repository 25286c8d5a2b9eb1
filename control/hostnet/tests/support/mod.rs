//! Throw-away network namespaces for the tests, and the tools' view of them as JSON.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::process::Command;

use felt_hostnet::netns::NetNs;
use serde_json::Value;

/// Runs `work` on a thread of its own inside a new, empty network namespace, which ends with it.
pub(crate) fn in_new_netns<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let netns = NetNs::create().unwrap_or_else(|error| {
                    panic!("this test needs root (CAP_SYS_ADMIN) to make a network namespace: {error}")
                });
                netns.enter_for_good().expect("enter the new namespace");
                work()
            })
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs a tool in the calling thread's namespace; its standard output.
pub(crate) fn run(command: &str) -> String {
    let mut words = command.split_whitespace();
    let program = words.next().expect("a program");
    let output = Command::new(program)
        .args(words)
        .output()
        .unwrap_or_else(|error| panic!("run {command:?} (is its package installed?): {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("UTF-8 output")
}

/// Runs a tool that prints JSON.
pub(crate) fn json(command: &str) -> Value {
    let text = run(command);
    if text.trim().is_empty() {
        return Value::Array(Vec::new());
    }
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{command:?} printed no JSON: {error}: {text}"))
}
