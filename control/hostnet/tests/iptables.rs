//! The iptables programs of both variants, in namespaces.

mod support;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use felt_hostnet::iptables::{Iptables, Position, Rule, Variant, Wanted};
use felt_hostnet::netlink::Family;
use support::{in_new_netns, run};

const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

fn wanted() -> Wanted {
    let rule = Rule::parse;
    Wanted {
        table: "nat".into(),
        chains: vec![
            (
                "FELT-T".into(),
                vec![
                    rule("-m mark --mark 0x4000/0x4000 -m comment --comment \"felt test\" -j RETURN"),
                    rule("-s 10.5.1.0/24 -d 10.5.0.0/16 -m comment --comment \"felt test\" -j RETURN"),
                    rule("! -s 10.5.0.0/16 -d 10.5.1.0/24 -m comment --comment \"felt test\" -j RETURN"),
                    rule(
                        "-s 10.5.0.0/16 ! -d 224.0.0.0/4 -m comment --comment \"felt test\" -j MASQUERADE --random-fully",
                    ),
                ],
            ),
            ("FELT-T2".into(), vec![rule("-p tcp -m tcp --dport 80 -j DNAT --to-destination 10.5.1.2:8080")]),
        ],
        jumps: vec![
            ("POSTROUTING".into(), rule("-m comment --comment \"felt test\" -j FELT-T"), Position::Last),
            ("PREROUTING".into(), rule("-m addrtype --dst-type LOCAL -j FELT-T2"), Position::First),
        ],
    }
}

fn both_variants(test: impl Fn(&Iptables) + Sync) {
    let mut ran = 0;
    for variant in [Variant::Nft, Variant::Legacy] {
        in_new_netns(|| {
            let tool = Iptables::find_variant(Family::V4, OsStr::new(PATH), Some(variant)).unwrap();
            assert_eq!(tool.variant(), variant);
            test(&tool);
        });
        ran += 1;
    }
    assert_eq!(ran, 2);
}

#[test]
fn wanted_state_is_reached_once_and_then_left_alone() {
    both_variants(|tool| {
        tool.probe().unwrap();
        assert!(!tool.remove_chains("nat", &["FELT-T"]).unwrap());
        if tool.variant() == Variant::Legacy {
            let names = fs::read_to_string("/proc/thread-self/net/ip_tables_names").unwrap();
            assert!(!names.contains("nat"), "a look for left-overs made a table: {names}");
        }
        assert!(tool.ensure(&wanted()).unwrap());
        for _ in 0..3 {
            assert!(!tool.ensure(&wanted()).unwrap(), "{:?} rewrote an equal state", tool.variant());
            assert!(tool.holds(&wanted()).unwrap());
        }
        assert!(tool.remove_chains("nat", &["FELT-T", "FELT-T2"]).unwrap());
        assert!(!tool.remove_chains("nat", &["FELT-T", "FELT-T2"]).unwrap());
        let state = tool.save("nat").unwrap();
        assert!(state.rules("FELT-T").is_none());
        assert!(state.chains.iter().all(|(_, rules)| rules.is_empty()), "{state:?}");
        if tool.variant() == Variant::Nft {
            assert_eq!(run("nft list ruleset").trim(), "", "a table stays that only we used");
        }
    });
}

#[test]
fn tables_of_others_stay() {
    in_new_netns(|| {
        let tool = Iptables::find_variant(Family::V4, OsStr::new(PATH), Some(Variant::Nft)).unwrap();
        for others in ["-A INPUT -s 192.0.2.1/32 -j ACCEPT", "-P OUTPUT DROP", "-N SOMEONE"] {
            tool.ensure(&Wanted {
                table: "filter".into(),
                chains: vec![("FELT-T".into(), vec![Rule::parse("-s 10.5.0.0/16 -j ACCEPT")])],
                jumps: vec![("FORWARD".into(), Rule::parse("-j FELT-T"), Position::Last)],
            })
            .unwrap();
            run(&format!("iptables-nft {others}"));
            assert!(tool.remove_chains("filter", &["FELT-T"]).unwrap());
            let left = run("iptables-nft -S");
            assert!(left.lines().any(|line| line == others), "{others}: {left}");
            assert!(!left.contains("FELT-T"));
            run("nft flush ruleset");
        }
    });
}

#[test]
fn every_kind_of_damage_is_repaired_in_place() {
    both_variants(|tool| {
        let name = match tool.variant() {
            Variant::Nft => "iptables-nft",
            Variant::Legacy => "iptables-legacy",
        };
        tool.ensure(&wanted()).unwrap();
        run(&format!("{name} -t nat -A POSTROUTING -s 192.0.2.1 -j ACCEPT"));
        let good = tool.save("nat").unwrap();
        for damage in [
            "-F FELT-T",
            "-D FELT-T 2",
            "-F PREROUTING",
            "-I FELT-T 1 -j ACCEPT",
            "-A FELT-T2 -j RETURN",
            "-F FELT-T2",
            "-A POSTROUTING -m comment --comment felt -j FELT-T",
        ] {
            run(&format!("{name} -t nat {damage}"));
            let wrote = tool.ensure(&wanted()).unwrap();
            if damage.ends_with("felt -j FELT-T") {
                // A foreign rule of a foreign chain is not ours to remove.
                assert!(!wrote);
                run(&format!("{name} -t nat -D POSTROUTING -m comment --comment felt -j FELT-T"));
            } else {
                assert!(wrote, "{damage}");
            }
            assert_eq!(tool.save("nat").unwrap(), good, "{damage}");
        }
        run(&format!("{name} -t nat -F"));
        assert!(tool.ensure(&wanted()).unwrap());
        run(&format!("{name} -t nat -F"));
        run(&format!("{name} -t nat -X"));
        assert!(tool.ensure(&wanted()).unwrap());
        assert!(tool.holds(&wanted()).unwrap());
    });
}

#[test]
fn counters_keep_running_when_nothing_changed() {
    both_variants(|tool| {
        let name = if tool.variant() == Variant::Nft { "iptables-nft" } else { "iptables-legacy" };
        tool.ensure(&wanted()).unwrap();
        run("ip link set lo up");
        run("ip addr add 10.5.1.7/32 dev lo");
        let socket = std::net::UdpSocket::bind("10.5.1.7:0").unwrap();
        let count = || {
            run(&format!("{name}-save -c -t nat"))
                .lines()
                .find(|line| line.contains("-A POSTROUTING"))
                .map(str::to_owned)
                .unwrap()
        };
        socket.send_to(b"x", "10.5.1.7:9").unwrap();
        let before = count();
        assert!(!before.starts_with("[0:0]"), "{before}");
        assert!(!tool.ensure(&wanted()).unwrap());
        assert_eq!(count(), before);
    });
}

/// Programs that fail as told, in a directory of their own.
fn fake(directory: &std::path::Path, restore: &str) {
    let write = |name: &str, script: &str| {
        let path = directory.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    write("iptables", "echo 'iptables v1.8.9 (legacy)'");
    write("iptables-save", "printf '*nat\\n:POSTROUTING ACCEPT [0:0]\\nCOMMIT\\n'");
    write("iptables-restore", restore);
}

#[test]
fn a_held_lock_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let count = directory.path().join("count");
    fake(
        directory.path(),
        &format!(
            "cat >/dev/null; echo x >>{0}; [ $(wc -l <{0}) -ge 4 ] || exit 4; env | sort >{0}.env",
            count.display()
        ),
    );
    let path = std::env::join_paths([directory.path(), "/usr/bin".as_ref(), "/bin".as_ref()]).unwrap();
    let tool = Iptables::find_in(Family::V4, &path).unwrap();
    assert!(tool.ensure(&wanted()).unwrap());
    assert_eq!(fs::read_to_string(&count).unwrap().lines().count(), 4);
    // The environment of the program is ours, not the caller's.
    let environment = fs::read_to_string(count.with_extension("env")).unwrap();
    assert!(!environment.contains("CARGO"), "{environment}");
}

#[test]
fn a_program_killed_by_a_signal_is_tried_again_and_other_failures_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let count = directory.path().join("count");
    fake(
        directory.path(),
        &format!("cat >/dev/null; echo x >>{0}; [ $(wc -l <{0}) -ge 3 ] || kill -9 $$", count.display()),
    );
    let path = std::env::join_paths([directory.path(), "/usr/bin".as_ref(), "/bin".as_ref()]).unwrap();
    let tool = Iptables::find_in(Family::V4, &path).unwrap();
    assert!(tool.ensure(&wanted()).unwrap());

    fs::remove_file(&count).unwrap();
    fake(
        directory.path(),
        &format!("cat >/dev/null; echo x >>{}; echo 'no such match' >&2; exit 2", count.display()),
    );
    let error = tool.ensure(&wanted()).unwrap_err();
    assert!(error.to_string().contains("iptables-restore --noflush --wait 5: no such match"), "{error}");
    // Once per look at the table, without pauses in between.
    assert_eq!(fs::read_to_string(&count).unwrap().lines().count(), 3);
}

#[test]
fn missing_programs_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let error = Iptables::find_in(Family::V6, directory.path().as_os_str()).unwrap_err();
    assert!(error.is_not_found());
    assert!(
        error.to_string().contains("ip6tables and ip6tables-save, ip6tables-restore are not in"),
        "{error}"
    );
}
