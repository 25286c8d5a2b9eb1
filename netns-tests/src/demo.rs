//! `felt-lab demo`: seven steps that show, and check, what felt does.
//!
//! Each step is a function below; each statement it makes is a [`Check`] with its own line in the summary. The demo
//! goes on after a failed check where it can, and succeeds only when every check held.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;

use crate::capture::{Capture, UDP, inner_lengths};
use crate::cmd;
use crate::daemon;
use crate::kernel_node;
use crate::netns::{Lifetime, NODE_BIN};
use crate::pod::{Pod, Runtime};
use crate::snapshot::{Scope, Snapshot};
use crate::topology::{Backend, Lab, NodeKind, Spec};
use crate::traffic::{self, Ping, Tcp, Udp, UdpFlow};

/// One statement and whether it held.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Step of the demo, 1 to 7.
    pub step: u8,
    /// What was stated.
    pub name: String,
    /// Whether it held.
    pub ok: bool,
    /// The figure, or why it did not hold.
    pub detail: String,
}

/// How to show it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// One JSON document on standard output instead of the table; progress goes to standard error.
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    version: u32,
    ok: bool,
    passed: usize,
    failed: usize,
    seconds: f64,
    checks: &'a [Check],
}

/// Runs the demo. `Ok(true)` = every check held.
///
/// # Errors
/// When standard output cannot be written. A failing step is a failed check, not an error.
pub fn run(options: Options) -> Result<bool> {
    let begun = Instant::now();
    let mut demo =
        Demo { checks: Vec::new(), step: 0, step_begun: begun, ui: Ui::new(options.json), baseline: None };
    demo.all();
    let failed = demo.checks.iter().filter(|c| !c.ok).count();
    let passed = demo.checks.len() - failed;
    let seconds = begun.elapsed().as_secs_f64();
    if options.json {
        let report = Report { version: 1, ok: failed == 0, passed, failed, seconds, checks: &demo.checks };
        let text = serde_json::to_string_pretty(&report).context("format the report")?;
        writeln!(std::io::stdout(), "{text}").context("write to standard output")?;
    } else {
        demo.ui.summary(&demo.checks);
        demo.ui.line(&format!("{passed} checks held, {failed} failed, {seconds:.1} s"));
    }
    Ok(failed == 0)
}

struct Demo {
    checks: Vec<Check>,
    step: u8,
    step_begun: Instant,
    ui: Ui,
    /// n1 before felt ran on it.
    baseline: Option<Snapshot>,
}

impl Demo {
    fn all(&mut self) {
        let before = Snapshot::take(Scope::Host);
        let mut lab = None;
        self.step("three nodes, two pods each, file registry, vxlan", |d| {
            lab = Some(d.bring_up(Spec::new("demo", 3))?);
            Ok(())
        });
        if let Some(lab) = &mut lab {
            self.step("every pod reaches every pod, and only through the tunnel", |d| d.reach(lab));
            self.step("TCP between pods on different nodes", |d| d.tcp(lab));
            self.step("kill -9 a daemon", |d| d.kill_and_restart(lab));
            self.step("give a node's lease up", |d| d.give_up_lease(lab));
            self.step("udp, and a node that is the kernel's vxlan device", |d| d.other_encapsulations());
        }
        self.step("remove everything", |d| {
            if let Some(mut lab) = lab.take() {
                let cleaned = d.clean_node(&mut lab);
                lab.down()?;
                cleaned?;
            }
            d.compare_host(&before?)
        });
    }

    fn step(&mut self, title: &str, body: impl FnOnce(&mut Demo) -> Result<()>) {
        self.step += 1;
        self.step_begun = Instant::now();
        self.ui.begin(self.step, title);
        let from = self.checks.len();
        if let Err(e) = body(self) {
            self.check("the step ran to its end", false, format!("{e:#}"));
        }
        let ok = self.checks[from..].iter().all(|c| c.ok);
        self.ui.end(ok, self.step_begun.elapsed());
        for c in self.checks[from..].iter().filter(|c| !c.ok) {
            self.ui.line(&format!("      FAILED {}: {}", c.name, c.detail));
        }
    }

    fn check(&mut self, name: &str, ok: bool, detail: impl Into<String>) {
        self.checks.push(Check { step: self.step, name: name.to_owned(), ok, detail: detail.into() });
    }

    /// Step 1: build it, show leases and one node's table.
    fn bring_up(&mut self, spec: Spec) -> Result<Lab> {
        let backend = spec.backend.name();
        let mut lab = Lab::build(spec, Lifetime::Tied)?;
        if self.baseline.is_none() {
            self.baseline = Some(Snapshot::take(Scope::Node(&lab.nodes.first().context("no n1")?.place))?);
        }
        lab.start_registry()?;
        lab.start_nodes()?;
        let slowest =
            lab.nodes.iter().filter_map(|n| n.daemon.as_ref()?.ready_after()).max().unwrap_or_default();
        lab.program_kernel_nodes()?;
        lab.attach_pods()?;
        self.check(
            &format!("{} nodes are up ({backend})", lab.nodes.len()),
            true,
            format!("slowest daemon ready after {} ms", slowest.as_millis()),
        );
        lab.wait_converged(Duration::from_secs(10))?;
        self.ui.block(&lab.describe());

        let leases = daemon::felt_json(&lab.nodes[0].place, &["lease", "list"])?;
        let mut table =
            String::from("      LEASE                PUBLIC IP        VTEP MAC           EXPIRES\n");
        let mut keys = std::collections::BTreeSet::new();
        for lease in leases["leases"].as_array().context("no leases in the answer")? {
            let text = |v: &Value| v.as_str().unwrap_or("-").to_owned();
            keys.insert(text(&lease["key"]));
            let _ = writeln!(
                table,
                "      {:<20} {:<16} {:<18} {}",
                text(&lease["key"]),
                text(&lease["public_ip"]),
                text(&lease["backend_data"]["VtepMAC"]),
                text(&lease["expires_at"]),
            );
        }
        self.check(
            &format!("every node has its own subnet ({backend})"),
            keys.len() == lab.nodes.len(),
            format!("{} leases", keys.len()),
        );

        let peers = daemon::felt_json(&lab.nodes[0].place, &["peers"])?;
        let list = peers["peers"].as_array().context("no peers in the answer")?;
        table.push_str("      n1's table           PEER             STATE\n");
        for p in list {
            let text = |v: &Value| v.as_str().unwrap_or("-").to_owned();
            let _ = writeln!(
                table,
                "      {:<20} {:<16} {}",
                text(&p["key"]),
                text(&p["public_ip"]),
                text(&p["state"])
            );
        }
        self.ui.block(&table);
        self.check(
            &format!("n1 knows the others ({backend})"),
            list.len() + 1 == lab.nodes.len(),
            format!("{} peers", list.len()),
        );
        Ok(lab)
    }

    /// Step 2.
    fn reach(&mut self, lab: &mut Lab) -> Result<()> {
        let backend = lab.spec.backend;
        let file = lab.dir.join("underlay.pcap");
        let capture = Capture::start(&lab.underlay, "ul0", 65_535, "", &file)?;
        let before = counters(lab)?;
        self.mesh(lab)?;

        let (a, b) = (lab.pod("p1-1")?, lab.pod("p2-1")?);
        let hops = traceroute(a, b.v4()?)?;
        let ends =
            hops.last().is_some_and(|h| Some(h.as_str()) == b.v4().ok().map(|a| a.to_string()).as_deref());
        self.check(&format!("traceroute ends ({})", backend.name()), ends, hops.join(" > "));

        let after = counters(lab)?;
        let frames = capture.finish()?;
        let nodes: BTreeMap<IpAddr, String> =
            lab.nodes.iter().map(|n| (IpAddr::from(n.ip), n.name.clone())).collect();
        let (mut tunnel, mut foreign) = (0_u64, Vec::new());
        let mut sent: BTreeMap<&str, u64> = BTreeMap::new();
        let mut received: BTreeMap<&str, u64> = BTreeMap::new();
        for frame in &frames {
            let Some(packet) = frame.packet() else { continue };
            let (Some(from), Some(to)) = (nodes.get(&packet.source), nodes.get(&packet.destination)) else {
                continue;
            };
            let header = match backend {
                Backend::Vxlan => frame.vxlan(backend.port()).filter(|(vni, _)| *vni == 1).map(|_| 22),
                Backend::Udp => (packet.protocol == UDP
                    && packet.ports.is_some_and(|p| p.1 == backend.port()))
                .then_some(0),
            };
            if let Some(inner) = header.and_then(|h| inner_lengths(packet.payload, h)) {
                let count = inner.len() as u64;
                tunnel += count;
                *sent.entry(from).or_default() += count;
                *received.entry(to).or_default() += count;
            } else {
                foreign.push(format!("{packet:?}"));
            }
        }
        let what = match backend {
            Backend::Vxlan => "every packet between nodes is UDP 8472 with VNI 1",
            Backend::Udp => "every packet between nodes is UDP 8285",
        };
        let detail = match foreign.first() {
            Some(f) => format!("{} others, first {f}", foreign.len()),
            None => format!("{tunnel} packets in {} frames", frames.len()),
        };
        self.check(what, foreign.is_empty() && tunnel > 0, detail);

        let mut wrong = Vec::new();
        for node in lab.nodes.iter().filter(|n| n.kind == NodeKind::Felt) {
            let (b, a) = (
                before.get(&node.name).copied().unwrap_or_default(),
                after.get(&node.name).copied().unwrap_or_default(),
            );
            let (out, inn) = (a.0 - b.0, a.1 - b.1);
            let (cap_out, cap_in) = (
                sent.get(node.name.as_str()).copied().unwrap_or(0),
                received.get(node.name.as_str()).copied().unwrap_or(0),
            );
            if (out, inn) != (cap_out, cap_in) {
                wrong.push(format!(
                    "{}: counted {out} out {inn} in, captured {cap_out} and {cap_in}",
                    node.name
                ));
            }
        }
        self.check(
            &format!("counters agree with the capture ({})", backend.name()),
            wrong.is_empty(),
            if wrong.is_empty() { format!("{tunnel} packets") } else { wrong.join("; ") },
        );

        let mut kernel = Vec::new();
        for node in lab.nodes.iter().filter(|n| n.kind == NodeKind::Felt) {
            let links = node.place.ip_json("-d link show type vxlan")?;
            if links.as_array().is_some_and(|l| l.iter().any(|v| v.get("ifname").is_some())) {
                kernel.push(node.name.clone());
            }
        }
        self.check(
            &format!("felt nodes have no vxlan device ({})", backend.name()),
            kernel.is_empty(),
            kernel.join(" "),
        );

        let n2 = lab.nodes.get(1).context("no n2")?;
        if let Some(d) = &n2.daemon {
            d.signal("STOP");
            let stopped = traffic::ping(
                &a.place,
                b.v4()?,
                &Ping { count: 3, timeout: Duration::from_millis(300), ..Ping::default() },
            );
            d.signal("CONT");
            let stopped = stopped?;
            self.check(
                &format!("no ping passes while n2's feltd is stopped ({})", backend.name()),
                stopped.received == 0,
                format!("{} of {}", stopped.received, stopped.sent),
            );
            cmd::wait_for("pings to return", Duration::from_secs(5), || {
                traffic::reaches(&a.place, b.v4().ok()?).then_some(())
            })?;
        }
        Ok(())
    }

    /// Every pod pings every pod, small and at full size without fragmentation.
    fn mesh(&mut self, lab: &Lab) -> Result<()> {
        let mtu = lab.spec.pod_mtu();
        let pods: Vec<&Pod> = lab.pods().collect();
        let pairs: Vec<(&Pod, &Pod)> = pods
            .iter()
            .flat_map(|a| pods.iter().map(move |b| (*a, *b)))
            .filter(|(a, b)| a.name != b.name)
            .collect();
        let results: Vec<Result<Option<String>>> = std::thread::scope(|scope| {
            // One thread for each source pod; pings of one pod run one after the other.
            let threads: Vec<_> = pods
                .iter()
                .map(|from| {
                    let mine: Vec<_> = pairs.iter().filter(|(a, _)| a.name == from.name).copied().collect();
                    scope.spawn(move || -> Vec<Result<Option<String>>> {
                        mine.into_iter().map(|(a, b)| pair(a, b, mtu)).collect()
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|t| {
                    t.join().unwrap_or_else(|_| vec![Err(anyhow::anyhow!("a ping thread panicked"))])
                })
                .collect()
        });
        let mut bad = Vec::new();
        for r in results {
            bad.extend(r?);
        }
        let detail = match bad.first() {
            Some(b) => format!("{} of {} failed, first: {b}", bad.len(), pairs.len()),
            None => format!("{} pairs, 84 and {mtu} bytes", pairs.len()),
        };
        self.check(
            &format!("every pod pings every pod ({})", lab.spec.backend.name()),
            bad.is_empty(),
            detail,
        );
        Ok(())
    }

    /// Step 3.
    fn tcp(&mut self, lab: &mut Lab) -> Result<()> {
        let backend = lab.spec.backend.name();
        let (a, b) = (lab.pod("p1-1")?, lab.pod("p2-1")?);
        let fast = traffic::tcp(&a.place, &b.place, b.v4()?, &Tcp { seconds: 1.5, ..Tcp::default() })?;
        let rate = fast.gbit_per_second();
        self.check(&format!("TCP between nodes ({backend})"), rate > 0.0, format!("{rate:.2} Gbit/s"));
        let how = Tcp { bytes: 128 << 20, hash: true, ..Tcp::default() };
        let exact = traffic::tcp(&a.place, &b.place, b.v4()?, &how)?;
        let hash = exact.hashes.first().map(|h| h.chars().take(16).collect::<String>()).unwrap_or_default();
        self.check(
            &format!("128 MiB arrive unchanged ({backend})"),
            exact.bytes == how.bytes,
            format!("sha256 {hash}..."),
        );
        Ok(())
    }

    /// Step 4.
    fn kill_and_restart(&mut self, lab: &mut Lab) -> Result<()> {
        let before = lease_of(lab, 1)?;
        let (a, b) = (lab.pod("p1-1")?.clone(), lab.pod("p2-1")?.clone());
        let flow = UdpFlow::start(&a.place, &b.place, b.v4()?, &Udp { size: 64, rate: 1000, seconds: 2.5 })?;
        std::thread::sleep(Duration::from_millis(500));
        lab.nodes[1].daemon.take().context("n2 has no daemon")?.kill()?;
        lab.start_node(1)?;
        let report = flow.finish()?;
        let after = lease_of(lab, 1)?;
        self.check(
            "the restarted node has the same subnet and MAC",
            before == after,
            format!("{} {}", after.subnet, after.mac.clone().unwrap_or_default()),
        );
        let back = traffic::reaches(&a.place, b.v4()?);
        let lost = report.sent - report.received;
        self.check(
            "traffic returns after the restart",
            back,
            format!("gap {:.0} ms, {lost} of {} packets lost", report.longest_gap * 1e3, report.sent),
        );
        Ok(())
    }

    /// Step 5.
    fn give_up_lease(&mut self, lab: &mut Lab) -> Result<()> {
        let before = lease_of(lab, 2)?;
        let (a, b) = (lab.pod("p1-1")?.clone(), lab.pod("p3-1")?.clone());
        lab.nodes[2].daemon.take().context("n3 has no daemon")?.stop()?;
        let key = before.subnet.replace('/', "-");
        let mut words = vec![format!("{NODE_BIN}/felt"), "lease".to_owned(), "rm".to_owned(), key];
        words.extend(lab.registry_args());
        lab.nodes[0].place.run(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        let begun = Instant::now();
        let answer = cmd::wait_for("an ICMP answer instead of silence", Duration::from_secs(3), || {
            let r = traffic::ping(
                &a.place,
                b.v4().ok()?,
                &Ping { timeout: Duration::from_millis(500), ..Ping::default() },
            )
            .ok()?;
            r.errors.into_iter().find(|e| e.contains("Unreachable"))
        });
        let after = begun.elapsed();
        match answer {
            Ok(line) => self.check(
                "pods of a released lease are unreachable by an ICMP answer",
                true,
                format!("{line} ({} ms after the release)", after.as_millis()),
            ),
            Err(e) => self.check(
                "pods of a released lease are unreachable by an ICMP answer",
                false,
                format!("{e:#}"),
            ),
        }
        lab.start_node(2)?;
        let again = lease_of(lab, 2)?;
        self.check("the node comes back with the same subnet", again.subnet == before.subnet, again.subnet);
        cmd::wait_for("its pods to answer", Duration::from_secs(5), || {
            traffic::reaches(&a.place, b.v4().ok()?).then_some(())
        })?;
        self.check("its pods answer again", true, "");
        Ok(())
    }

    /// Step 6.
    fn other_encapsulations(&mut self) -> Result<()> {
        let mut lab = self.bring_up(Spec::new("demo-udp", 3).backend(Backend::Udp))?;
        self.reach(&mut lab)?;
        self.tcp(&mut lab)?;
        lab.down()?;

        let mut lab = self.bring_up(Spec::new("demo-kernel", 3).kind(2, NodeKind::Kernel))?;
        self.mesh(&lab)?;
        let (felt, kernel) = (lab.pod("p1-1")?.clone(), lab.pod("p3-1")?.clone());
        for (from, to, way) in [(&felt, &kernel, "felt to kernel"), (&kernel, &felt, "kernel to felt")] {
            let addr = to.v4()?;
            let tcp = traffic::tcp(
                &from.place,
                &to.place,
                addr,
                &Tcp { bytes: 32 << 20, hash: true, ..Tcp::default() },
            )?;
            self.check(
                &format!("TCP {way}"),
                tcp.bytes == 32 << 20,
                format!("{:.2} Gbit/s, hash equal", tcp.gbit_per_second()),
            );
            let size = lab.spec.pod_mtu() - 28;
            let udp = traffic::udp(&from.place, &to.place, addr, &Udp { size, rate: 2000, seconds: 0.5 })?;
            let exact = udp.received == udp.sent && udp.damaged == 0;
            self.check(
                &format!("UDP {way} at full size"),
                exact,
                format!("{} of {}, {} damaged", udp.received, udp.sent, udp.damaged),
            );
        }
        let vxlan = lab.nodes[2].place.ip_json("-d link show type vxlan")?;
        let real = vxlan.as_array().is_some_and(|l| l.iter().any(|v| v["ifname"] == "flannel.1"));
        self.check("n3 is the kernel's vxlan device", real, "");
        lab.nodes.iter_mut().for_each(|n| n.daemon = None);
        lab.down()
    }

    /// Step 7, on a node: detach the pods, stop the daemon, `felt cleanup`, and compare with a node that never ran felt.
    fn clean_node(&mut self, lab: &mut Lab) -> Result<()> {
        let runtime = Runtime::for_node(lab, 0)?;
        let node = lab.nodes.first_mut().context("no n1")?;
        for pod in std::mem::take(&mut node.pods) {
            runtime.detach(&node.place, &pod.name)?;
        }
        node.daemon.take().context("n1 has no daemon")?.stop()?;
        node.place.run(&[&format!("{NODE_BIN}/felt"), "cleanup"])?;
        // What belongs to the runtime and to the pods' bridge is removed by whoever removes a CNI network.
        node.place.sh("ip link del cni0; rm -rf /var/lib/cni/* /run/lab/cni-bin")?;
        let before = self.baseline.take().context("no earlier state of n1")?;
        let mut left = Vec::new();
        let clean = cmd::wait_for("n1 to be as before", Duration::from_secs(5), || {
            left = before.difference(&Snapshot::take(Scope::Node(&node.place)).ok()?);
            left.is_empty().then_some(())
        });
        let detail =
            if clean.is_ok() { format!("{} things compared", before.len()) } else { left.join("; ") };
        self.check("after felt cleanup the node is as before felt", clean.is_ok(), detail);
        Ok(())
    }

    /// Step 7, on the host.
    fn compare_host(&mut self, before: &Snapshot) -> Result<()> {
        // The kernel takes dead namespaces apart in the background.
        let mut left = Vec::new();
        let clean = cmd::wait_for("the host to be as before", Duration::from_secs(5), || {
            left = before.difference(&Snapshot::take(Scope::Host).ok()?);
            left.is_empty().then_some(())
        });
        let detail =
            if clean.is_ok() { format!("{} things compared", before.len()) } else { left.join("; ") };
        self.check("the machine is as before", clean.is_ok(), detail);
        Ok(())
    }
}

/// Pings at both sizes; `Some` says what failed.
fn pair(a: &Pod, b: &Pod, mtu: u16) -> Result<Option<String>> {
    for to in b.addresses() {
        for how in [Ping::default(), Ping::full_size(mtu, to)] {
            let r = traffic::ping(&a.place, to, &how)?;
            if r.received != 1 {
                return Ok(Some(format!(
                    "{} to {} ({} bytes): {}",
                    a.name,
                    b.name,
                    how.payload,
                    r.errors.join(" ")
                )));
            }
        }
    }
    Ok(None)
}

/// Hops to an address; `*` for a silent one.
fn traceroute(from: &Pod, to: IpAddr) -> Result<Vec<String>> {
    let text = from.place.run(&["traceroute", "-n", "-q", "1", "-w", "1", "-m", "8", &to.to_string()])?;
    Ok(text.lines().skip(1).filter_map(|l| l.split_whitespace().nth(1)).map(str::to_owned).collect())
}

/// Packets (out, in) each felt node has counted, over its engines.
fn counters(lab: &Lab) -> Result<BTreeMap<String, (u64, u64)>> {
    let mut all = BTreeMap::new();
    for node in lab.nodes.iter().filter(|n| n.kind == NodeKind::Felt) {
        let answer = admin(&node.place, "/v1/counters")?;
        let engines = answer["engines"].as_array().context("no engines in the answer")?;
        let sum = |way: &str, what: &str| engines.iter().filter_map(|e| e[way][what].as_u64()).sum();
        // What was sent, and what came in, be it handed on or answered (a traceroute's expired packet).
        all.insert(node.name.clone(), (sum("outbound", "packets"), sum("inbound", "received_packets")));
    }
    Ok(all)
}

/// Asks a node's daemon over its admin socket (HTTP/1.1 on a Unix socket), through the node's root directory.
///
/// # Errors
/// When it does not answer 200 with JSON.
pub fn admin(place: &crate::netns::Place, path: &str) -> Result<Value> {
    use std::io::Read as _;
    let socket = place.path(daemon::ADMIN_SOCKET);
    let mut stream = std::os::unix::net::UnixStream::connect(&socket)
        .with_context(|| format!("connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).context("set a timeout")?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: felt\r\nConnection: close\r\n\r\n").context("ask")?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("read the answer")?;
    let (head, body) = text.split_once("\r\n\r\n").context("no end of the header")?;
    ensure!(head.starts_with("HTTP/1.1 200"), "{path}: {text}");
    let body = if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        unchunk(body)?
    } else {
        body.to_owned()
    };
    serde_json::from_str(&body).with_context(|| format!("{path}: {body}"))
}

fn unchunk(mut body: &str) -> Result<String> {
    let mut out = String::new();
    loop {
        let (size, rest) = body.split_once("\r\n").context("a chunk without size")?;
        let size = usize::from_str_radix(size.trim(), 16).context("a chunk's size")?;
        if size == 0 {
            return Ok(out);
        }
        out.push_str(rest.get(..size).context("a short chunk")?);
        body = rest.get(size + 2..).context("a short chunk")?;
    }
}

/// A node's lease, read from the registry without felt.
fn lease_of(lab: &Lab, node: usize) -> Result<kernel_node::FoundLease> {
    let ip = lab.nodes.get(node).context("no such node")?.ip.to_string();
    match kernel_node::leases(lab)?.into_iter().find(|l| l.public_ip == ip) {
        Some(l) => Ok(l),
        None => bail!("no lease with public IP {ip}"),
    }
}

/// Progress lines and tables for people. Colours only on a terminal.
struct Ui {
    to_stderr: bool,
    colour: bool,
}

impl Ui {
    fn new(json: bool) -> Ui {
        let terminal = if json { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
        Ui { to_stderr: json, colour: terminal && std::env::var_os("NO_COLOR").is_none() }
    }

    fn write(&self, text: &str) {
        // A closed pipe must not end the demo before it has cleaned up.
        let _ = if self.to_stderr {
            std::io::stderr().write_all(text.as_bytes())
        } else {
            std::io::stdout().write_all(text.as_bytes()).and_then(|()| std::io::stdout().flush())
        };
    }

    fn line(&self, text: &str) {
        self.write(&format!("{text}\n"));
    }

    fn block(&self, text: &str) {
        self.write(&format!("\n{}", text.trim_end_matches('\n')));
    }

    fn begin(&self, step: u8, title: &str) {
        self.write(&format!("[{step}/7] {title} "));
    }

    fn end(&self, ok: bool, took: Duration) {
        let word = self.paint(if ok { "ok" } else { "FAILED" }, if ok { "32" } else { "31" });
        self.write(&format!("\n      {word} ({:.1} s)\n", took.as_secs_f64()));
    }

    fn paint(&self, text: &str, code: &str) -> String {
        if self.colour { format!("\x1b[1;{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn summary(&self, checks: &[Check]) {
        let width = checks.iter().map(|c| c.name.chars().count()).max().unwrap_or(0);
        self.line("\nSTEP  RESULT  CHECK");
        for c in checks {
            // Painted words are longer than they look: pad by hand.
            let word = if c.ok { self.paint("held", "32") + "  " } else { self.paint("FAILED", "31") };
            let pad = " ".repeat(width - c.name.chars().count());
            self.line(format!("{:>4}  {word}  {}{pad}  {}", c.step, c.name, c.detail).trim_end());
        }
    }
}
