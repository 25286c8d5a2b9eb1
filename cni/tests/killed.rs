//! A plugin killed at any step leaves nothing that the next DEL does not remove.
//!
//! A traced call tells which system calls a plugin makes that change something; then the same call is
//! killed before the first of them, before the second, and so on. After each, one DEL must bring the
//! node back to what a whole ADD and DEL leave. DEL itself is killed likewise.

mod support;

use std::collections::BTreeMap;
use std::process::Stdio;

use support::cases::{Case, cases, newer};
use support::compare::{Observed, Run, differences};

/// System calls before which the plugin is killed.
const STEPS: &str = "sendto,sendmsg,write,pwrite64,rename,renameat2,link,linkat,unlink,unlinkat,mkdir,setns,vfork,clone,clone3,flock";

/// The cases, chosen so that each plugin and each back end is there.
const CHOSEN: &[&str] = &[
    "bridge masquerade",
    "bridge masquerade by nftables",
    "bridge checking source MACs",
    "ptp dual stack with masquerade",
    "macvlan",
    "portmap, two protocols, both families",
    "portmap by nftables",
    "firewall",
    "tuning",
    "bandwidth",
    "sbr",
    "host-device with addresses",
];

/// The call under strace with these options; whether it ended well, and what was traced.
fn traced(run: &Run, case: &Case, command: &str, options: &[&str]) -> (bool, String) {
    let call = run.node.call(case.plugin, command, "cid1", &run.ns);
    let log = run.node.path("strace");
    let mut process = run.node.command("strace");
    process
        .command
        .args(["-qq", "-o", log.to_str().unwrap()])
        .args(options)
        .arg(call.bin.join(case.plugin))
        .env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", "cid1")
        .env("CNI_NETNS", &run.ns)
        .env("CNI_IFNAME", case.ifname)
        .env("CNI_ARGS", case.args)
        .env("CNI_PATH", &call.path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = process.spawn();
    let config = run.config(case, command);
    let _ = std::io::Write::write_all(&mut child.stdin.take().unwrap(), config.as_bytes());
    let ok = child.wait().unwrap().success();
    run.node.wait_until_quiet();
    (ok, std::fs::read_to_string(log).unwrap())
}

/// How often each system call is made.
fn steps(log: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for name in log.lines().filter_map(|l| l.split_once('(')).map(|(name, _)| name) {
        *counts.entry(name.to_owned()).or_insert(0) += 1;
    }
    counts.retain(|name, _| STEPS.split(',').any(|s| s == name));
    counts
}

/// Brings back what goes with a link that another plugin made and removes: queues, routes.
fn renew(run: &Run, case: &Case) {
    let commands: &[&str] = match case.plugin {
        "bandwidth" => &["tc qdisc del dev vhost0 root", "tc qdisc del dev vhost0 ingress"],
        "sbr" => &[
            "nsenter --net=NSNAME ip addr flush dev eth0",
            "nsenter --net=NSNAME ip addr add 10.1.2.9/24 dev eth0",
            "nsenter --net=NSNAME ip route add default via 10.1.2.1",
            "nsenter --net=NSNAME ip route add 192.0.2.0/24 via 10.1.2.7",
        ],
        _ => &[],
    };
    for line in commands {
        let line = line.replace("NSNAME", &run.ns);
        let (program, args) = line.split_once(' ').unwrap();
        run.node.command(program).args(args).output();
    }
}

fn state(run: &Run, case: &Case) -> Observed {
    if case.plugin == "bandwidth" {
        renew(run, case);
    }
    let mut seen = run.observe("");
    // The next address goes on from the last one, whoever had it.
    seen.retain(|key, _| !key.contains("last_reserved"));
    if case.plugin == "sbr" {
        // Its routes go with the link.
        seen.retain(|key, _| key.contains("rule"));
    }
    seen
}

/// Kills `command` before each of its steps; returns how many there were.
fn kill_everywhere(run: &Run, case: &Case, command: &'static str, found: &mut Vec<String>) -> usize {
    let del = || {
        let call = run.node.call(case.plugin, "DEL", "cid1", &run.ns).ifname(case.ifname);
        let answer = run.node.run(&call, &run.config(case, "DEL"));
        assert!(answer.ok, "{}: DEL after a killed {command}: {answer:?}", case.name);
    };
    let add = || {
        renew(run, case);
        run.call(case, "ADD", None, None);
    };
    add();
    del();
    let clean = state(run, case);
    if command == "DEL" {
        add();
    } else {
        renew(run, case);
    }
    let (ok, log) = traced(run, case, command, &["-e", &format!("trace={STEPS}")]);
    assert!(ok, "{}: traced {command}", case.name);
    del();
    let mut killed = 0;
    for (name, count) in steps(&log) {
        for n in 1..=count {
            if command == "DEL" {
                add();
            } else {
                renew(run, case);
            }
            let (ok, _) = traced(run, case, command, &["-e", &format!("inject={name}:signal=KILL:when={n}")]);
            killed += usize::from(!ok);
            del();
            let left = differences(&state(run, case), &clean, case.accepted);
            found.extend(
                left.iter().map(|l| format!("{}: {command} killed before {name} {n}: {l}", case.name)),
            );
        }
    }
    assert!(killed >= 1, "{}: only {killed} calls of {command} were killed", case.name);
    add();
    del();
    killed
}

fn everywhere(command: &'static str) {
    let all: Vec<Case> = cases().into_iter().chain(newer()).filter(|c| CHOSEN.contains(&c.name)).collect();
    assert_eq!(all.len(), CHOSEN.len());
    let (mut found, mut killed) = (Vec::new(), 0);
    for case in &all {
        let run = Run::new(case);
        killed += kill_everywhere(&run, case, command, &mut found);
    }
    assert!(found.is_empty(), "{} left-overs after {killed} kills:\n{}", found.len(), found.join("\n"));
}

#[test]
fn add_killed_before_any_step_leaves_nothing_after_del() {
    everywhere("ADD");
}

#[test]
fn del_killed_before_any_step_is_completed_by_the_next() {
    everywhere("DEL");
}
