//! `felt lease`: the registry, with or without a running daemon.

use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Failure;
use super::args::Registry;
use super::client::Client;
use crate::api::{self, LeaseEntry};
use crate::app::open_registry;
use crate::cli::Options;
use crate::lease::SubnetKey;
use crate::subnet::SubnetManager;

/// `felt lease rm -o json`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Removed {
    pub(super) version: u32,
    pub(super) registry: String,
    pub(super) removed: Vec<LeaseEntry>,
}

pub(super) async fn list(client: &Client, registry: &Registry) -> Result<api::Leases, Failure> {
    let registry = open(client, registry).await?;
    let mut leases = registry.list().await.map_err(Failure::failed)?;
    leases.sort_by_key(|lease| lease.key);
    Ok(api::Leases {
        version: api::VERSION,
        registry: registry.name(),
        leases: leases.iter().map(LeaseEntry::of).collect(),
    })
}

pub(super) async fn remove(
    client: &Client,
    registry: &Registry,
    subnet: &str,
    force: bool,
) -> Result<Removed, Failure> {
    let wanted = Wanted::parse(subnet)
        .ok_or_else(|| Failure::Failed(format!("{subnet:?} is no subnet; write it as 10.244.1.0/24")))?;
    let registry = open(client, registry).await?;
    let leases = registry.list().await.map_err(Failure::failed)?;
    let found: Vec<_> = leases.into_iter().filter(|lease| wanted.matches(&lease.key)).collect();
    if found.is_empty() {
        return Err(Failure::No(format!("no lease of {subnet} in {}", registry.name())));
    }
    // Without a daemon on the socket there is nobody here who would take it again.
    let own = client
        .get::<api::Status>("/v1/status")
        .await
        .ok()
        .filter(|status| status.registry == registry.name());
    let mut removed = Vec::new();
    for lease in found {
        let holder = own
            .as_ref()
            .filter(|status| status.lease.as_ref().is_some_and(|own| own.key == lease.key.to_string()));
        if let (Some(status), false) = (holder, force) {
            return Err(Failure::Failed(format!(
                "the running feltd (pid {}) holds {} and would take it again at once; stop it first, or use --force",
                status.pid, lease.key
            )));
        }
        if registry.remove(&lease.key).await.map_err(Failure::failed)? {
            removed.push(LeaseEntry::of(&lease));
        }
    }
    Ok(Removed { version: api::VERSION, registry: registry.name(), removed })
}

/// The registry of the flags, else that of the running daemon, else the default one.
async fn open(client: &Client, registry: &Registry) -> Result<Arc<dyn SubnetManager>, Failure> {
    let options = match registry.options().map_err(Failure::Failed)? {
        Some(options) => options,
        None => match client.get::<api::Config>("/v1/config").await {
            Ok(config) => Options::from_shown(&config.flags),
            Err(Failure::Failed(reason) | Failure::No(reason)) => {
                return Err(Failure::Failed(format!(
                    "{reason}\nname the registry, for example with --lease-dir"
                )));
            }
        },
    };
    open_registry(&options).await.map_err(Failure::failed)
}

/// Which leases a word on the command line means.
enum Wanted {
    Key(SubnetKey),
    Net(IpNet),
}

impl Wanted {
    fn parse(text: &str) -> Option<Self> {
        text.parse().map(Self::Key).or_else(|_| text.parse().map(|net: IpNet| Self::Net(net.trunc()))).ok()
    }

    fn matches(&self, key: &SubnetKey) -> bool {
        match self {
            Self::Key(wanted) => wanted == key,
            Self::Net(IpNet::V4(net)) => key.v4 == Some(*net),
            Self::Net(IpNet::V6(net)) => key.v6 == Some(*net),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_leases_by_key_or_by_either_subnet() {
        let key: SubnetKey = "10.5.2.0-24&fd00:5:0:2::-64".parse().unwrap();
        for (word, hit) in [
            ("10.5.2.0/24", true),
            ("10.5.2.1/24", true),
            ("fd00:5:0:2::/64", true),
            ("10.5.2.0-24&fd00:5:0:2::-64", true),
            ("10.5.2.0-24", false),
            ("10.5.3.0/24", false),
        ] {
            assert_eq!(Wanted::parse(word).unwrap().matches(&key), hit, "{word}");
        }
        assert!(Wanted::parse("10.5.2.0").is_none());
    }
}
