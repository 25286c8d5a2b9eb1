//! host-local beside the reference in one directory, under load and under `kill -9`.

mod support;

use std::collections::HashSet;
use std::process::Stdio;

use support::{Node, files, has_reference};

fn config(node: &Node, keys: &str) -> String {
    format!(
        r#"{{"cniVersion":"1.1.0","name":"pool","ipam":{{"type":"host-local","dataDir":{:?}{keys}}}}}"#,
        node.path("data")
    )
}

fn addresses(node: &Node) -> Vec<String> {
    files(&node.path("data/pool")).into_iter().filter(|f| f.parse::<std::net::IpAddr>().is_ok()).collect()
}

#[test]
fn both_implementations_share_one_range() {
    if !has_reference() {
        let note = b"SKIPPED: no reference plugins (Debian: containernetworking-plugins)\n";
        std::io::Write::write_all(&mut std::io::stderr(), note).unwrap();
        return;
    }
    let node = Node::new();
    // 1.1.1 speaks up to 1.0.0.
    let config = config(&node, r#","subnet":"10.1.0.0/24""#).replace("1.1.0", "1.0.0");
    let call = |command: &'static str, i: usize, id: &str| {
        let call = if i.is_multiple_of(2) {
            node.call("host-local", command, "x", "/x")
        } else {
            node.reference("host-local", command, "x", "/x")
        };
        let call = support::Call { id, ..call };
        node.run(&call, &config).good()
    };
    let ids: Vec<String> = (0..64).map(|i| format!("cid{i}")).collect();
    let got: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = ids
            .iter()
            .enumerate()
            .map(|(i, id)| {
                let call = &call;
                scope.spawn(move || {
                    call("ADD", i, id).json()["ips"][0]["address"].as_str().unwrap().to_owned()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(got.iter().collect::<HashSet<_>>().len(), 64, "every address once");
    assert_eq!(addresses(&node).len(), 64);
    // Each is released by the other.
    std::thread::scope(|scope| {
        for (i, id) in ids.iter().enumerate() {
            let call = &call;
            scope.spawn(move || call("DEL", i + 1, id));
        }
    });
    assert_eq!(files(&node.path("data/pool")), ["last_reserved_ip.0", "lock"]);
}

#[test]
fn killed_calls_lose_no_address() {
    let node = Node::new();
    let config = config(&node, r#","subnet":"10.1.0.0/26""#);
    for round in 0..60u64 {
        let call = node.call("host-local", "ADD", "victim", "/x");
        let mut command = node.command(call.bin.join("host-local"));
        command
            .command
            .env("CNI_COMMAND", "ADD")
            .env("CNI_CONTAINERID", format!("victim{round}"))
            .env("CNI_NETNS", "/x")
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", &call.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        let mut child = command.spawn();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), config.as_bytes()).unwrap();
        // Anywhere between the start and the end of a call.
        std::thread::sleep(std::time::Duration::from_micros(round * 40));
        let _ = child.kill();
        child.wait().unwrap();
        node.run(
            &support::Call { id: &format!("victim{round}"), ..node.call("host-local", "DEL", "", "") },
            &config,
        )
        .good();
    }
    // Whatever was cut where: nothing is left, and every address can be had.
    let left: Vec<String> = files(&node.path("data/pool"))
        .into_iter()
        .filter(|f| !f.starts_with("last_reserved") && f != "lock")
        .collect();
    assert_eq!(left, [""; 0]);
    for i in 0..61 {
        let id = format!("cid{i}");
        node.run(&support::Call { id: &id, ..node.call("host-local", "ADD", "", "/x") }, &config).good();
    }
    let full = node.run(&node.call("host-local", "ADD", "more", "/x"), &config);
    assert!(full.msg().contains("no IP addresses available in range set: 10.1.0.1-10.1.0.62"), "{full:?}");
    let status = node.run(&node.call("host-local", "STATUS", "", ""), &config);
    assert_eq!(status.json()["code"], 50, "{status:?}");
    assert!(status.msg().contains("no IP addresses available"));
}

#[test]
fn gc_keeps_the_valid_and_only_its_own_network() {
    let node = Node::new();
    let config = config(&node, r#","subnet":"10.1.0.0/24""#);
    let other = config.replace("\"pool\"", "\"other\"");
    for id in ["a", "b", "c"] {
        node.run(&node.call("host-local", "ADD", id, "/x"), &config).good();
        node.run(&node.call("host-local", "ADD", id, "/x"), &other).good();
    }
    let valid = r#"{"cni.dev/valid-attachments":[{"containerID":"b","ifname":"eth0"},{"containerID":"c","ifname":"net9"}],"#;
    node.run(&node.call("host-local", "GC", "", ""), &config.replacen('{', valid, 1)).good();
    assert_eq!(addresses(&node), ["10.1.0.3"]);
    assert_eq!(files(&node.path("data/other")).len(), 5);
    let empty = r#"{"cni.dev/valid-attachments":[],"#;
    node.run(&node.call("host-local", "GC", "", ""), &config.replacen('{', empty, 1)).good();
    assert_eq!(addresses(&node), [""; 0]);
}

#[test]
fn a_full_disk_is_an_error_without_leftovers() {
    let node = Node::new();
    let mount = node.path("data");
    std::fs::create_dir_all(&mount).unwrap();
    let run = |program: &str, args: &str| {
        std::process::Command::new(program).args(args.split(' ')).output().unwrap()
    };
    let path = mount.to_str().unwrap();
    assert!(
        run("mount", &format!("-n -t tmpfs -o size=16k,nr_inodes=64 felt-cni-test {path}")).status.success()
    );
    std::fs::create_dir_all(mount.join("pool")).unwrap();
    std::fs::write(mount.join("filler"), [0; 16384]).unwrap();
    let config = config(&node, r#","subnet":"10.1.0.0/24""#);
    let refused = node.run(&node.call("host-local", "ADD", "cid", "/x"), &config);
    let left = files(&mount.join("pool"));
    std::fs::remove_file(mount.join("filler")).unwrap();
    let works = node.run(&node.call("host-local", "ADD", "cid", "/x"), &config);
    let unmounted = run("umount", &format!("-n {path}"));
    assert!(refused.msg().contains("no space left on device"), "{refused:?}");
    assert_eq!(left, ["lock"]);
    works.good();
    assert!(unmounted.status.success());
}
