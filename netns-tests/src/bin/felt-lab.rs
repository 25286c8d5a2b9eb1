//! `felt-lab`: clusters of network namespaces on one machine.

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use felt_netns_tests::bench::args::Bench;
use felt_netns_tests::bench::report::{Report, Target};
use felt_netns_tests::bench::{self, flood, latency, plot};
use felt_netns_tests::netns::Lifetime;
use felt_netns_tests::topology::{Backend, Lab, NodeKind, Registry, Spec};
use felt_netns_tests::{demo, generator, topology, vm};

#[derive(Parser)]
#[command(name = "felt-lab", version, about = "Clusters of network namespaces on one machine")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build a cluster and leave it running in the background
    Up(Up),
    /// Run a command on a node (n1) or in a pod (p1-1)
    Exec(Exec),
    /// End a cluster and remove everything it made
    Down(Name),
    /// Show the nodes and pods of a running cluster
    Show(Name),
    /// Show and check in seven steps what felt does
    Demo {
        /// One JSON document on standard output, progress on standard error
        #[arg(long)]
        json: bool,
    },
    /// Another kernel in emulation
    Vm {
        /// Only fetch and build what it needs; the exit code tells whether it can run here
        #[arg(long)]
        prepare: bool,
        /// A shell script to run in it
        #[arg(last = true)]
        words: Vec<String>,
    },
    /// Measure felt beside the kernel's vxlan, plain routing and others
    Bench(Box<Bench>),
    /// What runs inside the pods (used by the other commands)
    #[command(subcommand, hide = true)]
    Gen(Gen),
}

#[derive(Args)]
struct Up {
    /// The cluster's name, for the other commands
    #[arg(long, default_value = "lab")]
    name: String,
    /// Number of nodes
    #[arg(long, default_value_t = 3)]
    nodes: usize,
    /// Pods on each node
    #[arg(long, default_value_t = 2)]
    pods: usize,
    /// Encapsulation
    #[arg(long, value_enum, default_value = "vxlan")]
    backend: BackendArg,
    /// Where leases are kept
    #[arg(long, value_enum, default_value = "file")]
    registry: RegistryArg,
    /// Pods also have IPv6
    #[arg(long)]
    ipv6: bool,
    /// Nodes (n2,n3) that are the kernel's vxlan device instead of feltd
    #[arg(long, value_delimiter = ',')]
    kernel: Vec<String>,
    /// Nodes without a data path, to set one up by hand
    #[arg(long, value_delimiter = ',')]
    bare: Vec<String>,
    /// A further argument for every feltd (repeatable)
    #[arg(long = "daemon-arg", allow_hyphen_values = true)]
    daemon_args: Vec<String>,
}

#[derive(Args)]
struct Name {
    /// The cluster's name
    #[arg(long, default_value = "lab")]
    name: String,
}

#[derive(Args)]
struct Exec {
    #[command(flatten)]
    name: Name,
    /// A node, a pod, or "underlay"
    place: String,
    /// The command
    #[arg(last = true, required = true)]
    words: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendArg {
    Vxlan,
    Udp,
}

#[derive(Clone, Copy, ValueEnum)]
enum RegistryArg {
    File,
    Etcd,
}

#[derive(Subcommand)]
enum Gen {
    TcpServe {
        #[arg(long)]
        bind: IpAddr,
        #[arg(long, default_value_t = 1)]
        streams: u32,
        #[arg(long)]
        hash: bool,
    },
    TcpSend {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long, default_value_t = 1)]
        streams: u32,
        #[arg(long)]
        bytes: u64,
        #[arg(long)]
        seconds: f64,
        #[arg(long)]
        hash: bool,
    },
    UdpServe {
        #[arg(long)]
        bind: IpAddr,
        #[arg(long)]
        size: usize,
    },
    UdpSend {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        size: usize,
        #[arg(long)]
        rate: u32,
        #[arg(long)]
        seconds: f64,
    },
    EchoServe {
        #[arg(long)]
        bind: IpAddr,
    },
    EchoAsk {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        seconds: f64,
    },
    SendHex {
        #[arg(long)]
        to: SocketAddr,
    },
    Hostile {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        count: u64,
        #[arg(long)]
        seed: u64,
    },
    FloodServe {
        #[arg(long)]
        bind: IpAddr,
        #[arg(long)]
        size: usize,
    },
    FloodSend {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        size: usize,
        #[arg(long)]
        rate: u32,
        #[arg(long)]
        seconds: f64,
    },
    Ask {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        seconds: f64,
    },
    /// Builds a lab tied to this process, prints its directory and waits to be killed
    Hold,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "felt-lab: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn say(text: &str) -> Result<()> {
    write!(std::io::stdout(), "{text}").context("write to standard output")
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Up(args) => up(args)?,
        Command::Exec(args) => return exec(&args),
        Command::Down(args) => down(&args.name)?,
        Command::Show(args) => say(&Lab::load(&args.name)?.describe())?,
        Command::Demo { json } => {
            check_rights()?;
            return Ok(if demo::run(demo::Options { json })? {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            });
        }
        Command::Bench(args) => return measure(&args),
        Command::Vm { prepare, words } => return machine(prepare, &words),
        Command::Gen(what) => generate(what)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// One clear line for what is missing, before anything is made.
fn check_rights() -> Result<()> {
    let status = std::fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    let uid = status.lines().find_map(|l| l.strip_prefix("Uid:")).and_then(|l| l.split_whitespace().nth(1));
    if uid != Some("0") {
        bail!("root is needed (network namespaces, /dev/net/tun)");
    }
    std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun").context(
        "/dev/net/tun cannot be opened (load the tun module, or pass the device into the container)",
    )?;
    Ok(())
}

fn up(args: Up) -> Result<()> {
    let mut spec = Spec::new("lab", args.nodes).pods(args.pods);
    spec.name = args.name;
    spec.backend = match args.backend {
        BackendArg::Vxlan => Backend::Vxlan,
        BackendArg::Udp => Backend::Udp,
    };
    spec.registry = match args.registry {
        RegistryArg::File => Registry::File,
        RegistryArg::Etcd => Registry::Etcd,
    };
    spec.ipv6 = args.ipv6;
    spec.daemon_args.extend(args.daemon_args);
    for (names, kind) in [(&args.kernel, NodeKind::Kernel), (&args.bare, NodeKind::Bare)] {
        for name in names {
            let number: usize =
                name.trim_start_matches('n').parse().with_context(|| format!("no node {name}"))?;
            match number.checked_sub(1).and_then(|i| spec.nodes.get_mut(i)) {
                Some(k) => *k = kind,
                None => bail!("no node {name}"),
            }
        }
    }
    let name = spec.name.clone();
    let bare = spec.nodes.iter().all(|k| *k == NodeKind::Bare);
    let mut lab = Lab::build(spec, Lifetime::Detached)?;
    let made = lab
        .start_registry()
        .and_then(|()| lab.start_nodes())
        .and_then(|()| if bare { Ok(()) } else { lab.attach_pods() });
    let made = made
        .and_then(|()| lab.program_kernel_nodes())
        .and_then(|()| lab.wait_converged(std::time::Duration::from_secs(10)));
    if let Err(e) = made {
        let _ = write!(std::io::stderr(), "{}", lab.log_tails());
        let _ = lab.down();
        return Err(e);
    }
    say(&format!("{}logs: {}\n", lab.describe(), lab.dir.join("log").display()))?;
    lab.detach()?;
    say(&format!(
        "try: felt-lab exec --name {name} p1-1 -- ping -c 3 <address of p2-1>\nend: felt-lab down --name {name}\n"
    ))
}

fn measure(args: &Bench) -> Result<ExitCode> {
    if let Some(file) = &args.redraw {
        let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        let mut report: Report =
            serde_json::from_str(&text).with_context(|| format!("{} is no report", file.display()))?;
        report.finish();
        say(&report.table())?;
        if let Some(dir) = &args.plots {
            plot::write_all(&report, dir)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    check_rights()?;
    let report = bench::run(&args.options())?;
    say(&report.table())?;
    let good = report.problems.is_empty() && (!args.check || report.targets.iter().all(Target::half_met));
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn exec(args: &Exec) -> Result<ExitCode> {
    let lab = Lab::load(&args.name.name)?;
    let (program, rest) = args.words.split_first().context("no command")?;
    let mut command = lab.place(&args.place)?.command(program);
    let status = command.args(rest).status().with_context(|| format!("run {program}"))?;
    let code = status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

fn machine(prepare: bool, words: &[String]) -> Result<ExitCode> {
    if prepare {
        say(&format!("kernel {}\n", vm::prepare()?.release))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut guest = vm::Vm::boot()?;
    let (code, text) = guest.output(&words.join(" "), std::time::Duration::from_secs(600))?;
    say(&text)?;
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

fn down(name: &str) -> Result<()> {
    let dir = std::path::Path::new(topology::STATE_DIR).join(name);
    match Lab::load(name) {
        Ok(lab) => lab.down(),
        Err(_) if dir.join("lab.json").exists() => {
            // The processes are gone already (a reboot, a kill): only the directory is left.
            std::fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))
        }
        Err(e) => Err(e),
    }
}

fn generate(what: Gen) -> Result<()> {
    match what {
        Gen::TcpServe { bind, streams, hash } => generator::tcp_serve(bind, streams, hash),
        Gen::TcpSend { to, streams, bytes, seconds, hash } => {
            generator::tcp_send(to, streams, bytes, seconds, hash)
        }
        Gen::UdpServe { bind, size } => generator::udp_serve(bind, size),
        Gen::UdpSend { to, size, rate, seconds } => generator::udp_send(to, size, rate, seconds),
        Gen::EchoServe { bind } => generator::echo_serve(bind),
        Gen::EchoAsk { to, seconds } => generator::echo_ask(to, seconds),
        Gen::SendHex { to } => generator::send_hex(to),
        Gen::Hostile { to, count, seed } => generator::hostile(to, count, seed),
        Gen::Ask { to, seconds } => latency::ask(to, seconds),
        Gen::FloodServe { bind, size } => flood::serve(bind, size),
        Gen::FloodSend { to, size, rate, seconds } => flood::send(to, size, rate, seconds),
        Gen::Hold => {
            // With daemons, which write to the registry while the lab ends.
            let lab = Lab::up(Spec::new("hold", 2), Lifetime::Tied)?;
            say(&format!("{}\n", lab.dir.display()))?;
            std::thread::sleep(std::time::Duration::from_secs(60));
            Ok(())
        }
    }
}
