//! The command line of `felt`.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

use crate::cli::Options;

/// Ask and tend felt, the overlay network of this node.
#[derive(Debug, Parser)]
#[command(
    name = "felt",
    version,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong command line, 3 the answer is no (not ready, no such lease)."
)]
pub(super) struct Args {
    /// Unix socket of the running feltd.
    #[arg(long, global = true, value_name = "PATH", default_value = "/run/felt/feltd.sock")]
    pub(super) admin_socket: PathBuf,
    /// Form of the output.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table, value_name = "FORM")]
    pub(super) output: Output,
    #[command(subcommand)]
    pub(super) verb: Verb,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// For people.
    Table,
    /// For programs.
    Json,
}

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Show how this node's daemon fares; exit 3 unless it is ready.
    Status,
    /// Show the other nodes and the traffic with them.
    Peers,
    /// Show the packet counters.
    Counters,
    /// Show the settings in force.
    Config,
    /// Look at and change leases in the registry.
    Lease {
        #[command(subcommand)]
        verb: LeaseVerb,
    },
    /// Remove everything felt made on this node; the lease stays in the registry.
    Cleanup(Cleanup),
}

#[derive(Debug, Subcommand)]
pub(super) enum LeaseVerb {
    /// List all leases.
    List {
        #[command(flatten)]
        registry: Box<Registry>,
    },
    /// Give a lease up, so that another node may take its subnet.
    Rm {
        /// The subnet, as 10.244.1.0/24 or as the registry's key 10.244.1.0-24.
        subnet: String,
        /// Also when this node's running daemon holds it and would take it again.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        registry: Box<Registry>,
    },
}

/// Where leases are kept; without any of these the running daemon's registry is used.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Registry (default: that of the running feltd)")]
pub(super) struct Registry {
    /// Directory of the file registry.
    #[arg(long, value_name = "DIR", env = "FLANNELD_LEASE_DIR")]
    lease_dir: Option<String>,
    /// etcd endpoints, separated by commas.
    #[arg(long, value_name = "URLS", env = "FLANNELD_ETCD_ENDPOINTS")]
    etcd_endpoints: Option<String>,
    /// etcd key prefix.
    #[arg(long, value_name = "PREFIX", env = "FLANNELD_ETCD_PREFIX")]
    etcd_prefix: Option<String>,
    /// etcd client key.
    #[arg(long, value_name = "FILE", env = "FLANNELD_ETCD_KEYFILE")]
    etcd_keyfile: Option<String>,
    /// etcd client certificate.
    #[arg(long, value_name = "FILE", env = "FLANNELD_ETCD_CERTFILE")]
    etcd_certfile: Option<String>,
    /// Authority of etcd's certificate.
    #[arg(long, value_name = "FILE", env = "FLANNELD_ETCD_CAFILE")]
    etcd_cafile: Option<String>,
    /// etcd user.
    #[arg(long, value_name = "NAME", env = "FLANNELD_ETCD_USERNAME")]
    etcd_username: Option<String>,
    /// etcd password; better given by the environment.
    #[arg(long, value_name = "WORD", env = "FLANNELD_ETCD_PASSWORD", hide_env_values = true)]
    etcd_password: Option<String>,
    /// Leases are node annotations of Kubernetes.
    #[arg(long)]
    kube_subnet_mgr: bool,
    /// Kubernetes API server.
    #[arg(long, value_name = "URL", env = "FLANNELD_KUBE_API_URL")]
    kube_api_url: Option<String>,
    /// kubeconfig file.
    #[arg(long, value_name = "FILE", env = "FLANNELD_KUBECONFIG_FILE")]
    kubeconfig_file: Option<String>,
    /// Prefix of the node annotations.
    #[arg(long, value_name = "PREFIX", env = "FLANNELD_KUBE_ANNOTATION_PREFIX")]
    kube_annotation_prefix: Option<String>,
}

impl Registry {
    /// Daemon options with these settings, or `None` when nothing is set.
    pub(super) fn options(&self) -> Result<Option<Options>, String> {
        let flags = [
            ("lease-dir", &self.lease_dir),
            ("etcd-endpoints", &self.etcd_endpoints),
            ("etcd-prefix", &self.etcd_prefix),
            ("etcd-keyfile", &self.etcd_keyfile),
            ("etcd-certfile", &self.etcd_certfile),
            ("etcd-cafile", &self.etcd_cafile),
            ("etcd-username", &self.etcd_username),
            ("etcd-password", &self.etcd_password),
            ("kube-api-url", &self.kube_api_url),
            ("kubeconfig-file", &self.kubeconfig_file),
            ("kube-annotation-prefix", &self.kube_annotation_prefix),
        ];
        let kube = self.kube_subnet_mgr.then_some(("kube-subnet-mgr", "true"));
        let given: Vec<_> = flags
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_deref()?)))
            .chain(kube)
            .collect();
        if given.is_empty() {
            return Ok(None);
        }
        let mut options = Options::default();
        for (name, value) in given {
            options.set(name, value).map_err(|reason| format!("--{name}: {reason}"))?;
        }
        Ok(Some(options))
    }
}

#[derive(Debug, clap::Args)]
pub(super) struct Cleanup {
    /// Only say what would be removed.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// The daemon's state directory.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/felt")]
    pub(super) state_dir: PathBuf,
    /// The daemon's subnet file.
    #[arg(long, value_name = "PATH", default_value = "/run/flannel/subnet.env")]
    pub(super) subnet_file: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn registry_flags_become_daemon_options() {
        let parse = |words: &[&str]| match Args::try_parse_from(words).unwrap().verb {
            Verb::Lease { verb: LeaseVerb::List { registry } } => registry.options().unwrap(),
            other => panic!("{other:?}"),
        };
        assert!(parse(&["felt", "lease", "list"]).is_none());
        let options = parse(&["felt", "-o", "json", "lease", "list", "--lease-dir", "/x"]).unwrap();
        assert_eq!(options.lease_dir, Some("/x".into()));
    }
}
