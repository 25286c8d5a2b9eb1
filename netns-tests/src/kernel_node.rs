//! A node that is the kernel's own vxlan device, set up by hand with `ip` and `bridge` exactly as flannel's vxlan
//! backend leaves it: device `flannel.<VNI>` without learning, for each peer a permanent neighbour, an FDB line and
//! an onlink route. felt must interoperate with it in both directions.
//!
//! Its lease goes into the lab's registry in flannel's form, so that felt nodes learn of it like of any peer. Peers
//! are programmed once by [`program_peers`]; a kernel node has nobody who watches.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::topology::{Backend, Lab, Registry};

/// The kernel node's own lease.
#[derive(Clone, Debug)]
pub struct KernelNode {
    /// Its pod subnet, `10.244.203.0/24`.
    pub subnet: String,
    /// Its IPv6 pod subnet in dual-stack labs, `fd00:10:244:cb::/64`.
    pub subnet6: Option<String>,
    /// VTEP MAC address of `flannel.1`.
    pub mac: String,
    /// VTEP MAC address of `flannel-v6.1`.
    pub mac6: String,
}

/// A lease found in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLease {
    /// The registry's key text, `10.244.1.0-24`.
    pub key: String,
    /// `10.244.1.0/24`.
    pub subnet: String,
    /// `fd00:10:244:1::/64`, in dual stack.
    pub subnet6: Option<String>,
    /// The owner's underlay address.
    pub public_ip: String,
    /// The owner's IPv6 underlay address, in dual stack.
    pub public_ipv6: Option<String>,
    /// The owner's VTEP MAC, for vxlan.
    pub mac: Option<String>,
    /// The owner's VTEP MAC for IPv6, for vxlan.
    pub mac6: Option<String>,
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
        subnet6: lab.spec.ipv6.then(|| format!("fd00:10:244:{:x}::/64", 200 + number)),
        mac: format!("02:00:00:00:02:{number:02x}"),
        mac6: format!("02:00:00:00:06:{number:02x}"),
    };
    let n = &lab.nodes[node];
    let options = "id 1 dev eth0 dstport 8472 nolearning";
    let mut setup = format!(
        "link add flannel.1 address {mac} mtu {mtu} type vxlan {options} local {local}\n\
         addr add {gateway}/32 dev flannel.1\n\
         link set flannel.1 up\n",
        mac = kernel.mac,
        mtu = lab.spec.underlay_mtu - 50,
        local = n.ip,
        gateway = address(&kernel.subnet),
    );
    if let Some(subnet6) = &kernel.subnet6 {
        setup.push_str(&format!(
            "link add flannel-v6.1 address {mac} mtu {mtu} type vxlan {options} local {local}\n\
             addr add {gateway}/128 dev flannel-v6.1 nodad\n\
             link set flannel-v6.1 up\n",
            mac = kernel.mac6,
            mtu = lab.spec.underlay_mtu - 70,
            local = n.ip6,
            gateway = address(subnet6),
        ));
    }
    n.place.ip_batch(&setup).context("set up the kernel's vxlan device")?;
    // The text flannel writes, byte for byte.
    let data = |mac: &str| format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#);
    let (key, value) = match &kernel.subnet6 {
        None => (
            kernel.subnet.replace('/', "-"),
            format!(
                r#"{{"PublicIP":"{}","PublicIPv6":null,"BackendType":"vxlan","BackendData":{}}}"#,
                n.ip,
                data(&kernel.mac)
            ),
        ),
        Some(subnet6) => (
            format!("{}&{}", kernel.subnet, subnet6).replace('/', "-"),
            format!(
                r#"{{"PublicIP":"{}","PublicIPv6":"{}","BackendType":"vxlan","BackendData":{},"BackendV6Data":{}}}"#,
                n.ip,
                n.ip6,
                data(&kernel.mac),
                data(&kernel.mac6)
            ),
        ),
    };
    write_lease(lab, &key, &value)?;
    lab.nodes[node].kernel = Some(kernel);
    program_peers(lab, node)
}

/// The address part of a prefix.
fn address(prefix: &str) -> &str {
    prefix.split('/').next().unwrap_or(prefix)
}

/// Writes a lease value under its key (`10.244.1.0-24`).
///
/// # Errors
/// When the registry cannot be written.
pub fn write_lease(lab: &Lab, key: &str, value: &str) -> Result<()> {
    match lab.spec.registry {
        Registry::File => {
            // By rename, as every writer of that directory must, so that no reader sees half a file.
            let dir = lab.lease_dir().join("subnets");
            let temporary = lab.dir.join("shared").join(format!("new-{key}"));
            fs::write(&temporary, value).with_context(|| format!("write {}", temporary.display()))?;
            fs::rename(&temporary, dir.join(key)).with_context(|| format!("rename into {}", dir.display()))
        }
        Registry::Etcd => {
            let etcd = lab.etcd.as_ref().context("etcd is not running")?;
            etcd.put(&format!("/coreos.com/network/subnets/{key}"), value)
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
    // What is no lease is nobody's lease: tests put such entries there on purpose.
    Ok(entries.iter().filter_map(|(key, text)| parse(key, text)).collect())
}

fn parse(key: &str, text: &str) -> Option<FoundLease> {
    let v: Value = serde_json::from_str(text).ok()?;
    let mut prefixes = key.split('&').map(|p| p.replace('-', "/"));
    let field = |v: &Value| v.as_str().map(str::to_owned);
    Some(FoundLease {
        key: key.to_owned(),
        subnet: prefixes.next()?,
        subnet6: prefixes.next(),
        public_ip: field(&v["PublicIP"])?,
        public_ipv6: field(&v["PublicIPv6"]),
        mac: field(&v["BackendData"]["VtepMAC"]),
        mac6: field(&v["BackendV6Data"]["VtepMAC"]),
    })
}

/// Gives a kernel node a neighbour, an FDB line and a route for every other lease, per family.
///
/// # Errors
/// When the kernel refuses one.
pub fn program_peers(lab: &Lab, node: usize) -> Result<()> {
    let me = &lab.nodes[node];
    let own = me.kernel.as_ref().context("not a kernel node")?;
    let mut ip = String::new();
    let mut fdb = String::new();
    let mut peer = |device: &str, subnet: &str, mac: &str, endpoint: &str| {
        let gateway = address(subnet);
        ip.push_str(&format!("neigh replace {gateway} lladdr {mac} nud permanent dev {device}\n"));
        ip.push_str(&format!("route replace {subnet} via {gateway} dev {device} onlink\n"));
        fdb.push_str(&format!("fdb replace {mac} dev {device} dst {endpoint} self permanent\n"));
    };
    for lease in leases(lab)?.iter().filter(|l| l.subnet != own.subnet) {
        if let Some(mac) = &lease.mac {
            peer("flannel.1", &lease.subnet, mac, &lease.public_ip);
        }
        if let (Some(subnet), Some(mac), Some(endpoint)) = (&lease.subnet6, &lease.mac6, &lease.public_ipv6) {
            peer("flannel-v6.1", subnet, mac, endpoint);
        }
    }
    let mut c = me.place.net_command("bridge");
    c.args(["-batch", "-"]);
    crate::cmd::run_with(c, fdb.as_bytes(), crate::cmd::DEADLINE).context("program the FDB")?;
    me.place.ip_batch(&ip)
}
