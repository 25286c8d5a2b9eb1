//! The commands of `felt-cni` beside the plugins.

mod support;

use serde_json::json;
use support::{Node, files};

fn felt_cni(node: &Node, args: &str) -> (bool, String) {
    let output = node.command(node.bin().join("felt-cni")).args(args).output();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

#[test]
fn gc_clears_what_a_dead_pod_left_and_nothing_else() {
    let mut node = Node::new();
    let dir = node.dir.path().to_str().unwrap().to_owned();
    let bridge = |backend: &str| {
        format!(
            r#"{{"cniVersion":"1.0.0","name":"net1","bridge":"tbr0","isDefaultGateway":true,"ipMasq":true,
                "ipMasqBackend":"{backend}","macspoofchk":true,
                "ipam":{{"type":"host-local","dataDir":"{dir}/data","subnet":"198.19.77.0/24"}}}}"#
        )
    };
    for (id, backend) in [("alive", "iptables"), ("dead1", "iptables"), ("dead2", "nftables")] {
        let ns = node.container(id);
        let result = node.run(&node.call("bridge", "ADD", id, &ns), &bridge(backend)).good().json();
        let maps = json!({
            "cniVersion": "1.0.0", "name": "net1", "prevResult": result, "backend": backend,
            "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}
        });
        node.run(&node.call("portmap", "ADD", id, &ns), &maps.to_string()).good();
        if id != "alive" {
            node.remove_container(&ns);
        }
    }
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while node.links().iter().filter(|l| l.starts_with("veth")).count() > 1 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // The living container has a process, as pods have: that is where its namespace is found.
    let ns = felt_hostnet::netns::NetNs::open(node.path("ns/alive")).unwrap();
    let mut process = ns.with(|| std::process::Command::new("sleep").arg("60").spawn().unwrap()).unwrap();

    let state = |node: &Node| {
        let nat = String::from_utf8(node.command("iptables-save").args("-t nat").output().stdout).unwrap();
        let nft = String::from_utf8(node.command("nft").args("list ruleset").output().stdout).unwrap();
        (nat.matches("dead").count(), nft.matches("dead").count(), files(&node.path("data/net1")))
    };
    let before = state(&node);
    assert!(before.0 > 0 && before.1 > 0);
    let args =
        format!("gc --grace 0 --data-dir {dir}/data --cache-dir {dir}/cache --flannel-dir {dir}/flannel");
    let (ok, said) = felt_cni(&node, &format!("{args} --dry-run"));
    assert!(ok && said.contains("would remove") && !said.contains("alive"), "{said}");
    assert_eq!(state(&node), before, "a dry run changes nothing");
    let (ok, said) = felt_cni(&node, &args);
    assert!(ok, "{said}");
    assert_eq!(state(&node), (0, 0, vec!["198.19.77.2".into(), "last_reserved_ip.0".into(), "lock".into()]));
    let nat = String::from_utf8(node.command("iptables-save").args("-t nat").output().stdout).unwrap();
    assert!(nat.contains("CNI-DN-") && nat.contains("id: \\\"alive\\\""));
    assert_eq!(felt_cni(&node, &args), (true, "nothing to remove\n".into()));
    process.kill().unwrap();
    process.wait().unwrap();
}

#[test]
fn gc_spares_young_reservations() {
    let node = Node::new();
    let dir = node.path("data/net1");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("198.19.78.2"), "cid\r\neth0").unwrap();
    let data = node.path("data");
    let args = format!("gc --data-dir {0} --cache-dir {0}/none --flannel-dir {0}/none", data.display());
    assert_eq!(felt_cni(&node, &args), (true, "nothing to remove\n".into()));
    assert!(dir.join("198.19.78.2").exists());
}

#[test]
fn kubenet_makes_a_pod_network_from_two_settings() {
    let mut node = Node::new();
    let conf_dir = node.path("net.d");
    let args = format!(
        "kubenet --pod-cidr 10.77.2.0/24 --mtu 1400 --hairpin-mode hairpin-veth --conf-dir {}",
        conf_dir.display()
    );
    for _ in 0..2 {
        let (ok, said) = felt_cni(&node, &args);
        assert!(ok, "{said}");
    }
    let nat = String::from_utf8(node.command("iptables-save").args("-t nat").output().stdout).unwrap();
    assert_eq!(nat.matches("kubenet: SNAT for outbound traffic from cluster").count(), 1, "{nat}");
    assert!(nat.contains("! -d 10.0.0.0/8"));
    assert_eq!(files(&conf_dir), ["10-kubenet.conflist"]);

    // A pod made from the conflist as a runtime would.
    let text = std::fs::read_to_string(conf_dir.join("10-kubenet.conflist")).unwrap();
    let list: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut plugin = list["plugins"][0].clone();
    plugin["name"] = list["name"].clone();
    plugin["cniVersion"] = list["cniVersion"].clone();
    plugin["ipam"]["dataDir"] = node.path("data").to_str().unwrap().into();
    let ns = node.container("pod");
    let result = node.run(&node.call("bridge", "ADD", "pod", &ns), &plugin.to_string()).good().json();
    assert_eq!(result["ips"][0]["address"], "10.77.2.2/24");
    assert!(node.exec_in(&ns, "ping -c 1 -W 1 10.77.2.1").status.success());
    assert_eq!(node.ip_json("link show dev cbr0")[0]["mtu"], 1400);
}

#[test]
fn a_plugin_can_be_named_as_the_first_argument() {
    let node = Node::new();
    let run = |command: std::process::Command| {
        let mut command = command;
        String::from_utf8(command.env("CNI_COMMAND", "VERSION").output().unwrap().stdout).unwrap()
    };
    let mut by_argument = std::process::Command::new(node.bin().join("felt-cni"));
    by_argument.arg("bandwidth");
    let by_name = std::process::Command::new(node.bin().join("bandwidth"));
    let text = run(by_name);
    assert_eq!(run(by_argument), text);
    assert_eq!(
        text,
        "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n"
    );
    assert!(!felt_cni(&node, "nonsense").0);
}
