//! A node that is the kernel's own vxlan device, set up by hand with `ip` and `bridge` exactly as flannel's vxlan
//! backend leaves it: device `flannel.<VNI>` without learning, for each peer a permanent neighbour, an FDB line and
//! an onlink route. felt must interoperate with it in both directions.
//!
//! Its lease goes into the lab's registry in flannel's form, so that felt nodes learn of it like of any peer. Peers
//! are programmed once by [`program_peers`]; a kernel node has nobody who watches.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::topology::{Backend, Lab, Registry};

/// The kernel node's own lease.
#[derive(Clone, Debug)]
pub struct KernelNode {
    /// Its pod subnet, `10.244.200.0/24`.
    pub subnet: String,
    /// Its VTEP MAC address.
    pub mac: String,
}

/// A lease found in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLease {
    /// `10.244.1.0/24`.
    pub subnet: String,
    /// The owner's underlay address.
    pub public_ip: String,
    /// The owner's VTEP MAC, for vxlan.
    pub mac: Option<String>,
}

/// Sets the node up, writes its lease, programs the peers there are.
///
/// # Errors
/// When the kernel has no vxlan device or the registry cannot be written.
pub fn start(lab: &mut Lab, node: usize) -> Result<()> {
    ensure!(lab.spec.backend == Backend::Vxlan, "the kernel node speaks vxlan only");
    let number = node + 1;
    let kernel = KernelNode {
        subnet: format!("10.244.{}.0/24", 200 + number),
        mac: format!("02:00:00:00:02:{number:02x}"),
    };
    let n = &lab.nodes[node];
    let gateway = kernel.subnet.trim_end_matches("/24").to_owned();
    n.place
        .ip_batch(&format!(
            "link add flannel.1 address {mac} mtu {mtu} type vxlan id 1 dev eth0 local {local} dstport 8472 nolearning\n\
             addr add {gateway}/32 dev flannel.1\n\
             link set flannel.1 up\n",
            mac = kernel.mac,
            mtu = lab.spec.underlay_mtu - 50,
            local = n.ip,
        ))
        .context("set up the kernel's vxlan device")?;
    let value = json!({
        "PublicIP": n.ip.to_string(), "PublicIPv6": null, "BackendType": "vxlan",
        "BackendData": {"VNI": 1, "VtepMAC": kernel.mac},
    });
    write_lease(lab, &kernel.subnet, &value)?;
    lab.nodes[node].kernel = Some(kernel);
    program_peers(lab, node)
}

/// Writes a lease value under its key.
///
/// # Errors
/// When the registry cannot be written.
pub fn write_lease(lab: &Lab, subnet: &str, value: &Value) -> Result<()> {
    let key = subnet.replace('/', "-");
    match lab.spec.registry {
        Registry::File => {
            // By rename, as every writer of that directory must, so that no reader sees half a file.
            let dir = lab.lease_dir().join("subnets");
            let temporary = lab.dir.join("shared").join(format!("new-{key}"));
            fs::write(&temporary, value.to_string())
                .with_context(|| format!("write {}", temporary.display()))?;
            fs::rename(&temporary, dir.join(&key)).with_context(|| format!("rename into {}", dir.display()))
        }
        Registry::Etcd => {
            let etcd = lab.etcd.as_ref().context("etcd is not running")?;
            etcd.put(&format!("/coreos.com/network/subnets/{key}"), &value.to_string())
        }
    }
}

/// All leases in the lab's registry, read without felt's help.
///
/// # Errors
/// When the registry cannot be read.
pub fn leases(lab: &Lab) -> Result<Vec<FoundLease>> {
    let mut entries: Vec<(String, String)> = Vec::new();
    match lab.spec.registry {
        Registry::File => {
            let dir = lab.lease_dir().join("subnets");
            for entry in fs::read_dir(&dir).with_context(|| format!("read {}", dir.display()))?.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                // Temporary files of writers begin with a dot.
                if name.starts_with('.') {
                    continue;
                }
                if let Ok(text) = fs::read_to_string(entry.path()) {
                    entries.push((name, text));
                }
            }
        }
        Registry::Etcd => {
            let etcd = lab.etcd.as_ref().context("etcd is not running")?;
            for key in etcd.keys("/coreos.com/network/subnets/")? {
                if let Some(value) = etcd.get(&key)? {
                    entries.push((key.rsplit('/').next().unwrap_or_default().to_owned(), value));
                }
            }
        }
    }
    entries.sort();
    let parse = |(key, text): (String, String)| -> Result<FoundLease> {
        let v: Value = serde_json::from_str(&text).with_context(|| format!("lease {key}: {text}"))?;
        Ok(FoundLease {
            subnet: key.split('&').next().unwrap_or_default().replace('-', "/"),
            public_ip: v["PublicIP"].as_str().unwrap_or_default().to_owned(),
            mac: v["BackendData"]["VtepMAC"].as_str().map(str::to_owned),
        })
    };
    entries.into_iter().map(parse).collect()
}

/// Gives a kernel node a neighbour, an FDB line and a route for every other lease.
///
/// # Errors
/// When the kernel refuses one.
pub fn program_peers(lab: &Lab, node: usize) -> Result<()> {
    let me = &lab.nodes[node];
    let own = me.kernel.as_ref().context("not a kernel node")?;
    let mut ip = String::new();
    let mut fdb = String::new();
    for lease in leases(lab)? {
        let Some(mac) = lease.mac.filter(|_| lease.subnet != own.subnet) else { continue };
        let gateway = lease.subnet.split('/').next().unwrap_or_default();
        ip.push_str(&format!("neigh replace {gateway} lladdr {mac} nud permanent dev flannel.1\n"));
        ip.push_str(&format!("route replace {} via {gateway} dev flannel.1 onlink\n", lease.subnet));
        fdb.push_str(&format!("fdb replace {mac} dev flannel.1 dst {} self permanent\n", lease.public_ip));
    }
    let mut c = me.place.net_command("bridge");
    c.args(["-batch", "-"]);
    crate::cmd::run_with(c, fdb.as_bytes(), crate::cmd::DEADLINE).context("program the FDB")?;
    me.place.ip_batch(&ip)
}
