//! The table of flags, in the order of the usage text.

use super::goflag::{Flag, Kind};

const fn flag(name: &'static str, kind: Kind, default: &'static str, usage: &'static str) -> Flag {
    Flag { name, kind, default, usage, secret: false }
}

/// Every flag of the daemon, sorted by name.
pub(super) const FLAGS: &[Flag] = &[
    flag("admin-socket", Kind::Text, "/run/felt/feltd.sock", "Unix socket of the admin API (felt)"),
    flag(
        "dataplane",
        Kind::Text,
        "",
        "for type vxlan: userspace, kernel or auto; wins over the network config (felt, default auto)",
    ),
    flag("etcd-cafile", Kind::Text, "", "SSL Certificate Authority file used to secure etcd communication"),
    flag("etcd-certfile", Kind::Text, "", "SSL certification file used to secure etcd communication"),
    flag(
        "etcd-endpoints",
        Kind::Text,
        "http://127.0.0.1:4001,http://127.0.0.1:2379",
        "a comma-delimited list of etcd endpoints",
    ),
    flag("etcd-keyfile", Kind::Text, "", "SSL key file used to secure etcd communication"),
    Flag {
        name: "etcd-password",
        kind: Kind::Text,
        default: "",
        usage: "password for basic authentication to etcd",
        secret: true,
    },
    flag("etcd-prefix", Kind::Text, "/coreos.com/network", "etcd prefix"),
    flag("etcd-username", Kind::Text, "", "username for basic authentication to etcd"),
    flag(
        "handover",
        Kind::Text,
        "exit",
        "when a second feltd takes over: exit afterwards, wait idle until told to end, or refuse it (felt)",
    ),
    flag("healthz-ip", Kind::Text, "0.0.0.0", "the IP address for healthz server to listen"),
    flag("healthz-port", Kind::Int, "", "the port for healthz server to listen(0 to disable)"),
    flag(
        "iface",
        Kind::Value,
        "",
        "interface to use (IP or name) for inter-host communication. Can be specified multiple times to check each \
         option in order. Returns the first match found",
    ),
    flag(
        "iface-can-reach",
        Kind::Text,
        "",
        "detect interface to use (IP or name) for inter-host communication based on which will be used for provided \
         IP. This is exactly the interface to use of command 'ip route get <ip-address>'",
    ),
    flag(
        "iface-regex",
        Kind::Value,
        "",
        "regex expression to match the first interface to use (IP or name) for inter-host communication. Can be \
         specified multiple times to check each regex in order. Returns the first match found. Regexes are checked \
         after specific interfaces specified by the iface option have already been checked",
    ),
    flag(
        "ip-blackhole-route",
        Kind::Bool,
        "",
        "add a blackhole route for the own subnet, so that packets for absent pods do not leave the node",
    ),
    flag(
        "ip-masq",
        Kind::Bool,
        "",
        "setup IP masquerade rule for traffic destined outside of overlay network",
    ),
    flag(
        "ip-masq-fully-random-disable",
        Kind::Bool,
        "",
        "do not use fully random port mapping for the masquerade rules",
    ),
    flag(
        "iptables-forward-rules",
        Kind::Bool,
        "true",
        "add default accept rules to FORWARD chain in iptables",
    ),
    flag("iptables-resync", Kind::Int, "5", "resync period for iptables rules, in seconds"),
    flag("kube-annotation-prefix", Kind::Text, "flannel.alpha.coreos.com", "Kubernetes annotation prefix"),
    flag(
        "kube-api-url",
        Kind::Text,
        "",
        "Kubernetes API server URL. Does not need to be specified if in a pod",
    ),
    flag(
        "kube-subnet-mgr",
        Kind::Bool,
        "",
        "contact the Kubernetes API for subnet assignment instead of etcd",
    ),
    flag(
        "kubeconfig-file",
        Kind::Text,
        "",
        "kubeconfig file location. Does not need to be specified if in a pod",
    ),
    flag("lease-dir", Kind::Text, "", "keep config and leases in this directory instead of etcd (felt)"),
    flag("log-format", Kind::Text, "klog", "form of log lines: klog or json (felt)"),
    flag("log_backtrace_at", Kind::Value, "", "accepted for compatibility, has no effect"),
    flag(
        "net-config-path",
        Kind::Text,
        "/etc/kube-flannel/net-conf.json",
        "path to the network configuration file, with kube-subnet-mgr",
    ),
    flag(
        "offload",
        Kind::Text,
        "",
        "segmentation offload: auto or off; wins over the network config (felt, default auto)",
    ),
    flag("public-ip", Kind::Text, "", "IP accessible by other nodes for inter-host communication"),
    flag("public-ipv6", Kind::Text, "", "IPv6 accessible by other nodes for inter-host communication"),
    flag(
        "set-node-network-unavailable",
        Kind::Bool,
        "true",
        "set NodeNetworkUnavailable after ready, with kube-subnet-mgr",
    ),
    flag(
        "source-guard",
        Kind::Text,
        "",
        "check sources of inbound packets: off, inner, peers or strict; wins over the network config (felt, default inner)",
    ),
    flag("state-dir", Kind::Text, "/var/lib/felt", "directory of node id and VTEP addresses (felt)"),
    flag(
        "subnet-file",
        Kind::Text,
        "/run/flannel/subnet.env",
        "filename where env variables (subnet, MTU, ... ) will be written to",
    ),
    flag(
        "subnet-lease-renew-margin",
        Kind::Span,
        "60",
        "subnet lease renewal margin: minutes, or a duration such as 90s; shorter than the lease",
    ),
    flag(
        "subnet-lease-ttl",
        Kind::Span,
        "24h",
        "length of a lease: minutes, or a duration such as 90s (felt)",
    ),
    flag("v", Kind::Value, "", "number for the log level verbosity"),
    flag("version", Kind::Bool, "", "print version and exit"),
    flag("vmodule", Kind::Value, "", "comma-separated list of pattern=N settings for file-filtered logging"),
    flag(
        "workers",
        Kind::Int,
        "",
        "packet workers, 0 = from the number of cores; wins over the network config (felt)",
    ),
];
