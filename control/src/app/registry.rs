//! Flags to registry.

use std::path::PathBuf;
use std::sync::Arc;

use super::Exit;
use crate::cli::{EtcdOptions, KubeOptions, Options};
use crate::subnet::SubnetManager;
use crate::subnet::etcd::{EtcdConfig, EtcdManager};
use crate::subnet::file::FileManager;
use crate::subnet::kube::{KubeConfig, KubeManager, Limits};
use crate::subnet::term::Term;

/// The registry the flags choose.
///
/// # Errors
/// When it cannot be made from them.
pub async fn open(options: &Options) -> Result<Arc<dyn SubnetManager>, Exit> {
    let term = Term::new(options.subnet_lease_ttl, options.renew_margin());
    if options.kube.subnet_mgr {
        if options.lease_dir.is_some() {
            return Err(Exit::failure("--kube-subnet-mgr and --lease-dir exclude each other"));
        }
        let config = kube_config(&options.kube).with_environment(|name| std::env::var(name).ok());
        let manager = config.and_then(KubeManager::new).map_err(Exit::failure)?;
        return Ok(Arc::new(manager));
    }
    match &options.lease_dir {
        Some(dir) => Ok(Arc::new(FileManager::new(dir, term))),
        None => {
            let manager = EtcdManager::new(etcd_config(&options.etcd), term).map_err(Exit::failure)?;
            Ok(Arc::new(manager))
        }
    }
}

fn etcd_config(options: &EtcdOptions) -> EtcdConfig {
    let file = |path: &String| Some(path).filter(|path| !path.is_empty()).map(PathBuf::from);
    let user = Some(&options.username).filter(|name| !name.is_empty());
    EtcdConfig {
        endpoints: options.endpoints.clone(),
        prefix: options.prefix.clone(),
        cafile: file(&options.cafile),
        certfile: file(&options.certfile),
        keyfile: file(&options.keyfile),
        user: user.map(|name| (name.clone(), options.password.reveal().to_owned())),
    }
}

fn kube_config(options: &KubeOptions) -> KubeConfig {
    let given = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    KubeConfig {
        api_url: given(&options.api_url),
        kubeconfig: given(&options.kubeconfig_file).map(PathBuf::from),
        annotation_prefix: options.annotation_prefix.clone(),
        net_config: options.net_config_path.clone(),
        set_node_network_unavailable: options.set_node_network_unavailable,
        node_name: None,
        pod: None,
        limits: Limits::default(),
    }
}
