//! The dhcp plugin and its daemon against busybox's udhcpd.

mod support;

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use support::{Answer, Node, addresses, files};

/// A program that ends with its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Lab {
    node: Node,
    server: Option<Running>,
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Lab {
    /// A bridge with a DHCP server on it; `None` where there is no server program.
    fn new(lease_seconds: u32) -> Option<Self> {
        if !std::process::Command::new("busybox")
            .arg("udhcpd")
            .arg("--help")
            .output()
            .is_ok_and(|o| o.status.success())
        {
            let note = b"SKIPPED: busybox has no udhcpd (Debian: busybox-static)\n";
            std::io::Write::write_all(&mut std::io::stderr(), note).unwrap();
            return None;
        }
        let node = Node::new();
        for line in ["link add tbr0 type bridge", "link set tbr0 up", "addr add 198.19.5.1/24 dev tbr0"] {
            node.ip(line);
        }
        std::fs::write(
            node.path("udhcpd.conf"),
            format!(
                "start 198.19.5.100\nend 198.19.5.110\ninterface tbr0\nmin_lease 1\nlease_file {0}/udhcpd.leases\n\
                 pidfile {0}/udhcpd.pid\noption subnet 255.255.255.0\noption router 198.19.5.1\noption lease {lease_seconds}\n",
                node.dir.path().display()
            ),
        )
        .unwrap();
        std::fs::write(node.path("udhcpd.leases"), "").unwrap();
        let mut lab = Self { node, server: None };
        lab.start_server();
        Some(lab)
    }

    fn start_server(&mut self) {
        let conf = self.node.path("udhcpd.conf");
        let mut command = self.node.command("busybox").args(&format!("udhcpd -f -a 1 {}", conf.display()));
        command.command.stdout(Stdio::null()).stderr(Stdio::null());
        self.server = Some(Running(command.spawn()));
    }

    fn socket(&self) -> PathBuf {
        self.node.path("run/dhcp.sock")
    }

    fn daemon(&self) -> Running {
        let args = format!(
            "daemon -socketpath {} -statedir {} -pidfile {} -timeout 4s",
            self.socket().display(),
            self.node.path("leases").display(),
            self.node.path("dhcp.pid").display()
        );
        let mut command = self.node.command(self.node.bin().join("dhcp")).args(&args);
        command.command.stderr(Stdio::null());
        let daemon = Running(command.spawn());
        wait_for("the daemon", || std::os::unix::net::UnixStream::connect(self.socket()).is_ok());
        daemon
    }

    fn config(&self) -> String {
        format!(
            r#"{{"cniVersion":"1.1.0","name":"lan","bridge":"tbr0","ipam":{{"type":"dhcp","daemonSocketPath":{:?},
                "provide":[{{"option":"host-name","fromArg":"K8S_POD_NAME"}}]}}}}"#,
            self.socket()
        )
    }

    fn run(&self, command: &'static str, ns: &str, prev: Option<&serde_json::Value>) -> Answer {
        let mut call = self.node.call("bridge", command, "cid1", ns);
        call.args = "IgnoreUnknown=1;K8S_POD_NAME=web";
        let mut config = self.config();
        if let Some(prev) = prev {
            config = config.replacen('{', &format!("{{\"prevResult\":{prev},"), 1);
        }
        self.node.run(&call, &config)
    }
}

fn terminate(daemon: &mut Running) {
    let pid = daemon.0.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(daemon.0.wait().unwrap().success());
}

#[test]
fn a_lease_is_taken_survives_a_restart_and_is_given_back() {
    let Some(mut lab) = Lab::new(600) else { return };
    let ns = lab.node.container("c1");
    let refused = lab.run("ADD", &ns, None);
    assert!(refused.msg().contains("error dialing DHCP daemon: dial unix "), "{refused:?}");
    assert!(lab.node.links() == ["tbr0"], "nothing is left of it");
    assert_eq!(lab.run("STATUS", &ns, None).json()["code"], 50);

    let mut daemon = lab.daemon();
    lab.run("STATUS", &ns, None).good();
    let result = lab.run("ADD", &ns, None).good().json();
    let address = result["ips"][0]["address"].as_str().unwrap().to_owned();
    assert!(address.starts_with("198.19.5.1"), "{address}");
    assert_eq!(addresses(&lab.node.ip_in(&ns, "addr show dev eth0")), [&*address]);
    assert_eq!(lab.node.ip_in(&ns, "route show default")[0]["gateway"], "198.19.5.1");
    assert!(lab.node.exec_in(&ns, "ping -c 1 -W 1 198.19.5.1").status.success());

    for _ in 0..50 {
        lab.run("CHECK", &ns, Some(&result)).good();
    }
    assert_eq!(files(&lab.node.path("leases")).len(), 1);
    // A second daemon does not push the first one away.
    let second = lab
        .node
        .command(lab.node.bin().join("dhcp"))
        .args(&format!("daemon -socketpath {}", lab.socket().display()))
        .output();
    assert!(
        !second.status.success()
            && String::from_utf8_lossy(&second.stderr).contains("another daemon listens")
    );

    terminate(&mut daemon);
    assert!(!lab.socket().exists() && !lab.node.path("dhcp.pid").exists());
    // Killed, it leaves its socket: the next one takes the place.
    let mut daemon = lab.daemon();
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    assert!(lab.socket().exists());
    let _daemon = lab.daemon();
    lab.run("CHECK", &ns, Some(&result)).good();
    assert_eq!(files(&lab.node.path("leases")).len(), 1);
    for _ in 0..2 {
        lab.run("DEL", &ns, None).good();
    }
    assert_eq!(files(&lab.node.path("leases")), [""; 0]);
    lab.run("DEL", "", None).good();
}

#[test]
fn a_lease_is_renewed_and_its_end_takes_the_link_down() {
    let Some(mut lab) = Lab::new(4) else { return };
    let ns = lab.node.container("c1");
    let _daemon = lab.daemon();
    lab.run("ADD", &ns, None).good();
    let since = |lab: &Lab| {
        let name = files(&lab.node.path("leases")).into_iter().find(|f| f.ends_with(".json"))?;
        let text = std::fs::read_to_string(lab.node.path("leases").join(name)).ok()?;
        serde_json::from_str::<serde_json::Value>(&text).ok()?["since"].as_u64()
    };
    let first = since(&lab).unwrap();
    wait_for("a renewal", || since(&lab).is_some_and(|now| now > first));
    let up = |lab: &Lab| lab.node.ip_in(&ns, "link show dev eth0")[0]["flags"].to_string().contains("\"UP\"");
    assert!(up(&lab));
    lab.server = None;
    wait_for("the end of the lease", || !up(&lab));
    assert_eq!(files(&lab.node.path("leases")), [""; 0]);
    // The daemon is not stuck on it.
    lab.start_server();
    lab.run("DEL", &ns, None).good();
    lab.run("ADD", &ns, None).good();
    lab.run("DEL", &ns, None).good();
}
