//! The daemon's settings as typed values.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde_json::Value;

use super::goflag::{parse_bool, parse_go_duration, parse_int};
use crate::netconfig::{Dataplane, Offload, SourceGuard, UnknownValue};

/// flannel's renewal margin.
const DEFAULT_MARGIN: Duration = Duration::from_secs(60 * 60);

/// Flags that say where leases are kept.
const REGISTRY_FLAGS: &[&str] = &[
    "etcd-cafile",
    "etcd-certfile",
    "etcd-endpoints",
    "etcd-keyfile",
    "etcd-prefix",
    "etcd-username",
    "kube-annotation-prefix",
    "kube-api-url",
    "kube-subnet-mgr",
    "kubeconfig-file",
    "lease-dir",
    "net-config-path",
    "subnet-lease-renew-margin",
    "subnet-lease-ttl",
];

/// A text that must not be shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself, for the one place that needs it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "\"\"" } else { "\"***\"" })
    }
}

/// Form of the log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// klog's header and a text.
    #[default]
    Klog,
    /// One JSON object a line.
    Json,
}

/// `--handover`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Handover {
    /// Hand over and end.
    #[default]
    Exit,
    /// Hand over and stay without anything to do until a signal comes: for supervisors that would start the program
    /// again, which would then take over in turn.
    Wait,
    /// Refuse successors.
    Refuse,
}

impl Handover {
    fn as_str(self) -> &'static str {
        match self {
            Self::Exit => "exit",
            Self::Wait => "wait",
            Self::Refuse => "refuse",
        }
    }
}

/// `--etcd-*`.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdOptions {
    /// At least one URL unless the flag held only blanks.
    pub endpoints: Vec<String>,
    /// Key prefix.
    pub prefix: String,
    /// Client key file, empty for none.
    pub keyfile: String,
    /// Client certificate file, empty for none.
    pub certfile: String,
    /// File of trusted authorities, empty for none.
    pub cafile: String,
    /// User of etcd's own authentication, empty for none.
    pub username: String,
    /// Its password.
    pub password: Secret,
}

impl fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.shown_endpoints())
            .field("prefix", &self.prefix)
            .field("keyfile", &self.keyfile)
            .field("certfile", &self.certfile)
            .field("cafile", &self.cafile)
            .field("username", &self.username)
            .field("password", &self.password)
            .finish()
    }
}

impl EtcdOptions {
    /// The endpoints with passwords inside URLs blotted out.
    pub fn shown_endpoints(&self) -> Vec<String> {
        self.endpoints.iter().map(|url| redact_url(url)).collect()
    }
}

/// `scheme://user:***@host` for a URL that holds a password.
fn redact_url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    match rest.rsplit_once('@') {
        Some((user, host)) => {
            let name = user.split(':').next().unwrap_or_default();
            format!("{scheme}://{name}:***@{host}")
        }
        None => url.to_owned(),
    }
}

/// `--kube-*` and its relatives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeOptions {
    /// Whether leases come from the Kubernetes API.
    pub subnet_mgr: bool,
    /// API server URL, empty for the one of the kubeconfig file or of the pod.
    pub api_url: String,
    /// Prefix of the node annotations.
    pub annotation_prefix: String,
    /// kubeconfig file, empty for none.
    pub kubeconfig_file: String,
    /// Network configuration file.
    pub net_config_path: PathBuf,
    /// Whether to clear the node's NetworkUnavailable condition.
    pub set_node_network_unavailable: bool,
}

/// All settings of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// etcd client.
    pub etcd: EtcdOptions,
    /// Kubernetes client.
    pub kube: KubeOptions,
    /// Directory of the file registry.
    pub lease_dir: Option<PathBuf>,
    /// Interface names or addresses, in order of preference.
    pub iface: Vec<String>,
    /// Regular expressions for the same.
    pub iface_regex: Vec<String>,
    /// Address whose route names the interface, empty for none.
    pub iface_can_reach: String,
    /// Advertised IPv4 address, empty for the interface's.
    pub public_ip: String,
    /// Advertised IPv6 address, empty for the interface's.
    pub public_ipv6: String,
    /// Where `subnet.env` goes.
    pub subnet_file: PathBuf,
    /// How long before its end a lease is renewed; `None` for an hour, or half of a short lease.
    pub subnet_lease_renew_margin: Option<Duration>,
    /// How long a lease lasts.
    pub subnet_lease_ttl: Duration,
    /// Whether to masquerade what leaves the overlay.
    pub ip_masq: bool,
    /// Whether to leave `random-fully` out of the masquerade rules.
    pub ip_masq_fully_random_disable: bool,
    /// Health server's address.
    pub healthz_ip: String,
    /// Health server's port, 0 for none.
    pub healthz_port: u16,
    /// How often rules are checked.
    pub iptables_resync: Duration,
    /// Whether to accept forwarded overlay traffic.
    pub iptables_forward_rules: bool,
    /// Whether to add a blackhole route for the own subnet; `None` for the default.
    pub ip_blackhole_route: Option<bool>,
    /// Print the version and exit.
    pub version: bool,
    /// klog verbosity.
    pub verbosity: i32,
    /// `pattern=N` pairs.
    pub vmodule: Vec<(String, i32)>,
    /// Form of the log lines.
    pub log_format: LogFormat,
    /// What to do when a successor asks for the packets, and after it has them.
    pub handover: Handover,
    /// Admin socket's path.
    pub admin_socket: PathBuf,
    /// Directory of the node's state.
    pub state_dir: PathBuf,
    /// `Dataplane` of the network config overridden.
    pub dataplane: Option<Dataplane>,
    /// `Offload` of the network config overridden.
    pub offload: Option<Offload>,
    /// `Workers` of the network config overridden.
    pub workers: Option<usize>,
    /// `SourceGuard` of the network config overridden.
    pub source_guard: Option<SourceGuard>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            etcd: EtcdOptions {
                endpoints: split_endpoints("http://127.0.0.1:4001,http://127.0.0.1:2379"),
                prefix: "/coreos.com/network".into(),
                keyfile: String::new(),
                certfile: String::new(),
                cafile: String::new(),
                username: String::new(),
                password: Secret::default(),
            },
            kube: KubeOptions {
                subnet_mgr: false,
                api_url: String::new(),
                annotation_prefix: "flannel.alpha.coreos.com".into(),
                kubeconfig_file: String::new(),
                net_config_path: "/etc/kube-flannel/net-conf.json".into(),
                set_node_network_unavailable: true,
            },
            lease_dir: None,
            iface: Vec::new(),
            iface_regex: Vec::new(),
            iface_can_reach: String::new(),
            public_ip: String::new(),
            public_ipv6: String::new(),
            subnet_file: "/run/flannel/subnet.env".into(),
            subnet_lease_renew_margin: None,
            subnet_lease_ttl: Duration::from_secs(24 * 60 * 60),
            ip_masq: false,
            ip_masq_fully_random_disable: false,
            healthz_ip: "0.0.0.0".into(),
            healthz_port: 0,
            iptables_resync: Duration::from_secs(5),
            iptables_forward_rules: true,
            ip_blackhole_route: None,
            version: false,
            verbosity: 0,
            vmodule: Vec::new(),
            log_format: LogFormat::Klog,
            handover: Handover::Exit,
            admin_socket: "/run/felt/feltd.sock".into(),
            state_dir: "/var/lib/felt".into(),
            dataplane: None,
            offload: None,
            workers: None,
            source_guard: None,
        }
    }
}

impl Options {
    /// Sets one flag from its text.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "admin-socket" => self.admin_socket = value.into(),
            "dataplane" => self.dataplane = word(value)?,
            "etcd-cafile" => self.etcd.cafile = value.into(),
            "etcd-certfile" => self.etcd.certfile = value.into(),
            "etcd-endpoints" => self.etcd.endpoints = split_endpoints(value),
            "etcd-keyfile" => self.etcd.keyfile = value.into(),
            "etcd-password" => self.etcd.password = Secret(value.into()),
            "etcd-prefix" => self.etcd.prefix = value.into(),
            "etcd-username" => self.etcd.username = value.into(),
            "handover" => {
                self.handover = match value {
                    "exit" => Handover::Exit,
                    "wait" => Handover::Wait,
                    "refuse" => Handover::Refuse,
                    _ => return Err("want one of exit, wait, refuse".to_owned()),
                };
            }
            "healthz-ip" => self.healthz_ip = value.into(),
            // A negative port starts no server in the reference either.
            "healthz-port" => self.healthz_port = port(parse_int(value)?)?,
            "iface" => self.iface.push(value.into()),
            "iface-can-reach" => self.iface_can_reach = value.into(),
            "iface-regex" => self.iface_regex.push(value.into()),
            "ip-blackhole-route" => self.ip_blackhole_route = Some(parse_bool(value)?),
            "ip-masq" => self.ip_masq = parse_bool(value)?,
            "ip-masq-fully-random-disable" => self.ip_masq_fully_random_disable = parse_bool(value)?,
            "iptables-forward-rules" => self.iptables_forward_rules = parse_bool(value)?,
            "iptables-resync" => {
                // Zero and less make the reference spin; here they mean the shortest period.
                self.iptables_resync = Duration::from_secs(parse_int(value)?.max(1).unsigned_abs());
            }
            "kube-annotation-prefix" => self.kube.annotation_prefix = value.into(),
            "kube-api-url" => self.kube.api_url = value.into(),
            "kube-subnet-mgr" => self.kube.subnet_mgr = parse_bool(value)?,
            "kubeconfig-file" => self.kube.kubeconfig_file = value.into(),
            "lease-dir" => self.lease_dir = Some(value).filter(|dir| !dir.is_empty()).map(PathBuf::from),
            "log-format" => {
                self.log_format = match value {
                    "klog" => LogFormat::Klog,
                    "json" => LogFormat::Json,
                    _ => return Err("want one of klog, json".to_owned()),
                };
            }
            "log_backtrace_at" => {}
            "net-config-path" => self.kube.net_config_path = value.into(),
            "offload" => self.offload = word(value)?,
            "public-ip" => self.public_ip = value.into(),
            "public-ipv6" => self.public_ipv6 = value.into(),
            "set-node-network-unavailable" => self.kube.set_node_network_unavailable = parse_bool(value)?,
            "source-guard" => self.source_guard = word(value)?,
            "state-dir" => self.state_dir = value.into(),
            "subnet-file" => self.subnet_file = value.into(),
            "subnet-lease-renew-margin" => self.subnet_lease_renew_margin = Some(parse_go_duration(value)?),
            "subnet-lease-ttl" => self.subnet_lease_ttl = parse_go_duration(value)?,
            "v" => self.verbosity = value.parse().map_err(|_| "parse error".to_owned())?,
            "version" => self.version = parse_bool(value)?,
            "vmodule" => self.vmodule = vmodule(value)?,
            "workers" => {
                self.workers =
                    Some(usize::try_from(parse_int(value)?).map_err(|_| "must not be negative".to_owned())?);
            }
            _ => return Err(format!("no such flag: {name}")),
        }
        Ok(())
    }

    /// The rule that spans two flags.
    ///
    /// # Errors
    /// When the renewal margin is not inside the lease.
    pub fn check(&self) -> Result<(), String> {
        let (margin, ttl) = (self.renew_margin(), self.subnet_lease_ttl);
        if margin.is_zero() || margin >= ttl {
            return Err(format!(
                "invalid --subnet-lease-renew-margin {margin:?}: must be longer than zero and shorter than the lease, {ttl:?}"
            ));
        }
        Ok(())
    }

    /// The renewal margin in force.
    pub fn renew_margin(&self) -> Duration {
        self.subnet_lease_renew_margin.unwrap_or_else(|| DEFAULT_MARGIN.min(self.subnet_lease_ttl / 2))
    }

    /// One line with every setting, secrets blotted out.
    pub fn redacted(&self) -> String {
        format!("{self:?}")
    }

    /// Options from what [`Options::shown`] gave, as far as they choose the registry; secrets are not among them.
    pub fn from_shown(flags: &BTreeMap<String, Value>) -> Self {
        let mut options = Self::default();
        for (name, value) in flags.iter().filter(|(name, _)| REGISTRY_FLAGS.contains(&name.as_str())) {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Null => continue,
                other => other.to_string(),
            };
            // A newer daemon may have values this program does not know; the default is as good then.
            let _ = options.set(name, &text);
        }
        options
    }

    /// Every flag with the value in force, by name, secrets blotted out.
    pub fn shown(&self) -> BTreeMap<String, Value> {
        let path = |path: &Path| Value::from(path.display().to_string());
        let secret = if self.etcd.password.reveal().is_empty() { "" } else { "***" };
        let seconds = |span: Duration| Value::from(format!("{}s", span.as_secs_f64()));
        let word = |word: Option<&'static str>| Value::from(word.unwrap_or_default());
        let flags = [
            ("admin-socket", path(&self.admin_socket)),
            ("dataplane", word(self.dataplane.map(Dataplane::as_str))),
            ("etcd-cafile", self.etcd.cafile.as_str().into()),
            ("etcd-certfile", self.etcd.certfile.as_str().into()),
            ("etcd-endpoints", self.etcd.shown_endpoints().join(",").into()),
            ("etcd-keyfile", self.etcd.keyfile.as_str().into()),
            ("etcd-password", secret.into()),
            ("etcd-prefix", self.etcd.prefix.as_str().into()),
            ("etcd-username", self.etcd.username.as_str().into()),
            ("handover", self.handover.as_str().into()),
            ("healthz-ip", self.healthz_ip.as_str().into()),
            ("healthz-port", self.healthz_port.into()),
            ("iface", self.iface.as_slice().into()),
            ("iface-can-reach", self.iface_can_reach.as_str().into()),
            ("iface-regex", self.iface_regex.as_slice().into()),
            ("ip-blackhole-route", self.ip_blackhole_route.into()),
            ("ip-masq", self.ip_masq.into()),
            ("ip-masq-fully-random-disable", self.ip_masq_fully_random_disable.into()),
            ("iptables-forward-rules", self.iptables_forward_rules.into()),
            ("iptables-resync", self.iptables_resync.as_secs().into()),
            ("kube-annotation-prefix", self.kube.annotation_prefix.as_str().into()),
            ("kube-api-url", redact_url(&self.kube.api_url).into()),
            ("kube-subnet-mgr", self.kube.subnet_mgr.into()),
            ("kubeconfig-file", self.kube.kubeconfig_file.as_str().into()),
            ("lease-dir", self.lease_dir.as_deref().map_or(Value::Null, path)),
            ("log-format", if self.log_format == LogFormat::Json { "json" } else { "klog" }.into()),
            ("net-config-path", path(&self.kube.net_config_path)),
            ("offload", word(self.offload.map(Offload::as_str))),
            ("public-ip", self.public_ip.as_str().into()),
            ("public-ipv6", self.public_ipv6.as_str().into()),
            ("set-node-network-unavailable", self.kube.set_node_network_unavailable.into()),
            ("source-guard", word(self.source_guard.map(SourceGuard::as_str))),
            ("state-dir", path(&self.state_dir)),
            ("subnet-file", path(&self.subnet_file)),
            ("subnet-lease-renew-margin", seconds(self.renew_margin())),
            ("subnet-lease-ttl", seconds(self.subnet_lease_ttl)),
            ("v", self.verbosity.into()),
            ("workers", self.workers.into()),
        ];
        flags.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// An empty text leaves the choice to the network config.
fn word<T: FromStr<Err = UnknownValue>>(value: &str) -> Result<Option<T>, String> {
    if value.is_empty() {
        Ok(None)
    } else {
        value.parse().map(Some).map_err(|error: UnknownValue| error.to_string())
    }
}

fn port(number: i64) -> Result<u16, String> {
    u16::try_from(number.max(0)).map_err(|_| "value out of range".to_owned())
}

fn split_endpoints(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|url| !url.is_empty()).map(ToOwned::to_owned).collect()
}

fn vmodule(text: &str) -> Result<Vec<(String, i32)>, String> {
    text.split(',')
        .filter(|part| !part.is_empty())
        .map(|part| {
            let (pattern, level) =
                part.split_once('=').ok_or("syntax error: expect comma-separated list of filename=N")?;
            let level =
                level.parse().map_err(|_| "syntax error: expect comma-separated list of filename=N")?;
            Ok((pattern.to_owned(), level))
        })
        .collect()
}
