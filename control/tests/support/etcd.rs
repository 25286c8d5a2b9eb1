//! A real etcd server for one test: own ports, own data, gone with the value.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etcd_client::Client;
use tempfile::TempDir;

use super::certs::Certs;

/// A running `etcd`, killed when dropped, even when the test dies by a signal.
pub(crate) struct EtcdServer {
    data: TempDir,
    client_port: u16,
    peer_port: u16,
    tls: Option<Tls>,
    /// Name and peer URL of every member.
    members: String,
    child: Option<Child>,
}

/// How the server wants its clients.
#[derive(Clone, Copy)]
pub(crate) struct Tls {
    pub(crate) certs: &'static Certs,
    /// Whether clients must show a certificate.
    pub(crate) client_certs: bool,
}

impl EtcdServer {
    /// Starts a server without TLS.
    pub(crate) fn start() -> Self {
        Self::start_with(None)
    }

    /// Starts a server, with TLS if asked for.
    pub(crate) fn start_with(tls: Option<Tls>) -> Self {
        Self::start_members(1, tls).remove(0)
    }

    /// Starts the three members of a cluster.
    pub(crate) fn start_cluster() -> Vec<Self> {
        Self::start_members(3, None)
    }

    fn start_members(count: usize, tls: Option<Tls>) -> Vec<Self> {
        for _ in 0..5 {
            let mut members: Vec<EtcdServer> = (0..count).map(|_| EtcdServer::prepare(tls)).collect();
            let names = members.iter().map(|member| format!("{}={}", member.name(), member.peer_url()));
            let names = names.collect::<Vec<_>>().join(",");
            for member in &mut members {
                member.members.clone_from(&names);
                member.spawn();
            }
            if members.iter_mut().all(EtcdServer::comes_up) {
                return members;
            }
        }
        panic!("etcd does not start on any port");
    }

    fn prepare(tls: Option<Tls>) -> Self {
        let memory = std::path::Path::new("/dev/shm");
        let data = if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() };
        let data = data.expect("directory for etcd's data");
        let [client_port, peer_port] = free_ports();
        EtcdServer { data, client_port, peer_port, tls, members: String::new(), child: None }
    }

    fn name(&self) -> String {
        format!("member-{}", self.peer_port)
    }

    fn peer_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.peer_port)
    }

    /// What clients connect to.
    pub(crate) fn endpoint(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.client_port)
    }

    /// Port of the clients.
    pub(crate) fn port(&self) -> u16 {
        self.client_port
    }

    /// A client without TLS.
    pub(crate) async fn client(&self) -> Client {
        Client::connect([self.endpoint()], None).await.expect("client of the test's etcd")
    }

    /// Kills the server; its data stays.
    pub(crate) fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts a stopped server on its old ports and data.
    pub(crate) fn start_again(&mut self) {
        Self::start_all_again(std::slice::from_mut(self));
    }

    /// Starts stopped members that serve only together.
    pub(crate) fn start_all_again(members: &mut [Self]) {
        members.iter_mut().for_each(EtcdServer::spawn);
        assert!(members.iter_mut().all(EtcdServer::comes_up), "etcd does not start again");
    }

    /// Stops the process without ending it.
    pub(crate) fn pause(&self) {
        self.signal("STOP");
        let stat = format!("/proc/{}/stat", self.child.as_ref().expect("running").id());
        // The signal takes effect when the process is next scheduled.
        while !std::fs::read_to_string(&stat).expect("its state").contains(") T ") {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets it go on.
    pub(crate) fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.as_ref().expect("running").id().to_string();
        let status = Command::new("kill").args(["-s", signal, &pid]).status().expect("kill");
        assert!(status.success());
    }

    fn spawn(&mut self) {
        let (client_url, peer_url) = (self.endpoint(), self.peer_url());
        // With the first process dies the second: no server outlives a killed test.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "etcd", "--name", &self.name(), "--log-level", "error"]);
        command.arg("--data-dir").arg(self.data.path().join("data"));
        command.args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url]);
        command.args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url]);
        command.args(["--initial-cluster", &self.members]);
        // The shortest time to live of a lease is one and a half election timeouts.
        command.args(["--heartbeat-interval", "60", "--election-timeout", "600"]);
        if let Some(tls) = self.tls {
            command.arg("--cert-file").arg(tls.certs.path("server.pem"));
            command.arg("--key-file").arg(tls.certs.path("server.key"));
            if tls.client_certs {
                command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(tls.certs.path("ca.pem"));
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let missing = "cannot run etcd: install Debian's package etcd-server (`make test` installs it)";
        assert!(has_etcd(), "{missing}");
        self.child = Some(command.spawn().expect(missing));
    }

    /// Waits until it serves. `false` when it ended instead, as it does when a port was taken meanwhile.
    fn comes_up(&mut self) -> bool {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(30) {
            let ended = self.child.as_mut().is_none_or(|child| child.try_wait().expect("wait").is_some());
            if ended {
                return false;
            }
            // The port opens when the server can serve.
            if std::net::TcpStream::connect(("127.0.0.1", self.client_port)).is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.stop();
        false
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn has_etcd() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join("etcd").is_file())
}

fn free_ports() -> [u16; 2] {
    let sockets = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    sockets.map(|socket| socket.local_addr().expect("its address").port())
}
