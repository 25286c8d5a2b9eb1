//! `tuning`: sysctls and attributes of the container's interface, set after another plugin made it.
//!
//! What an ADD overwrites of the interface is kept in `<dataDir>/<container ID>_<ifname>.json` and
//! given back by DEL. An ADD that fails half way puts back what it changed.

mod backup;
mod pattern;

use std::collections::BTreeMap;
use std::path::PathBuf;

use felt_hostnet::MacAddr;
use felt_hostnet::netlink::{Handle, Link, LinkChange};
use felt_hostnet::netns::NetNs;
use felt_hostnet::sysctl;

use super::{Plugin, nothing, required_result};
use crate::ipconf::{self, find_link};
use crate::json::{Fields, Value};
use crate::skel::Call;
use crate::trace;
use crate::types::args;
use crate::types::error::{Context, Error, Result};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;
use backup::Backup;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "tuning",
    versions: SpecVersion::ALL,
    add,
    del,
    check,
    gc: nothing,
    status: nothing,
    may_have_no_address: true,
};

const ALLOW_LIST: &str = "/etc/cni/tuning/allowlist.conf";

/// The validated keys.
#[derive(Debug, Default)]
struct Conf {
    /// Names with slashes, `IFNAME` replaced, with their values.
    sysctls: BTreeMap<String, String>,
    mac: Option<MacAddr>,
    /// As written, for CHECK.
    mac_text: String,
    promisc: bool,
    mtu: Option<u32>,
    allmulti: Option<bool>,
    tx_queue_len: Option<u32>,
    data_dir: PathBuf,
}

impl Conf {
    fn load(call: &Call<'_>) -> Result<Self> {
        let value = call.value();
        let f = Fields::of("TuningConf", &value)?;
        let own = f.object_of("args", "struct")?;
        let own = own.map(|a| a.object_of("cni", "IPAMArgs")).transpose()?.flatten();
        let pairs = args::parse(&call.env.args, &["MAC"])?;
        let mut mac_text = f.string_or_empty("mac")?;
        let runtime = f.object_of("runtimeConfig", "struct")?;
        let mut overrides = vec![args::last(&pairs, "MAC").map(str::to_owned)];
        overrides.push(runtime.map(|r| r.string_or_empty("mac")).transpose()?);
        overrides.push(own.map(|o| o.string_or_empty("mac")).transpose()?);
        for text in overrides.into_iter().flatten().filter(|s| !s.is_empty()) {
            mac_text = text;
        }
        let mut raw_sysctls = sysctls_of(&f)?;
        if let Some(own) = &own {
            raw_sysctls.extend(sysctls_of(own)?);
        }
        // args.cni wins wherever it says something.
        let places = [own.as_ref(), Some(&f)];
        let flag = |key: &str| -> Result<Option<bool>> {
            for place in places.into_iter().flatten() {
                if let Some(found) = place.bool(key)? {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        };
        let number = |key: &str| -> Result<Option<u32>> {
            for place in places.into_iter().flatten() {
                if let Some(n) = place.int(key)? {
                    let n = u32::try_from(n).map_err(|_| Error::internal(format!("invalid {key} {n}")))?;
                    return Ok(Some(n));
                }
            }
            Ok(None)
        };
        Ok(Self {
            sysctls: resolve_sysctls(&raw_sysctls, &call.env.ifname)?,
            mac: (!mac_text.is_empty())
                .then(|| {
                    mac_text.parse().map_err(|_| {
                        Error::internal(format!(
                            "invalid args {mac_text} for MAC addr: address {mac_text}: invalid MAC address"
                        ))
                    })
                })
                .transpose()?,
            mac_text,
            promisc: flag("promisc")?.unwrap_or(false),
            mtu: number("mtu")?.filter(|n| *n != 0),
            allmulti: flag("allmulti")?,
            tx_queue_len: number("txQLen")?,
            data_dir: f.string("dataDir")?.filter(|s| !s.is_empty()).unwrap_or("/run/cni/tuning").into(),
        })
    }

    fn changes_link(&self) -> bool {
        self.mac.is_some()
            || self.promisc
            || self.mtu.is_some()
            || self.allmulti.is_some()
            || self.tx_queue_len.is_some()
    }

    fn backup_path(&self, call: &Call<'_>) -> PathBuf {
        self.data_dir.join(format!("{}_{}.json", call.env.container_id, call.env.ifname))
    }
}

/// The `sysctl` object in source order; a key that stands twice is refused.
fn sysctls_of(f: &Fields<'_>) -> Result<Vec<(String, String)>> {
    let Some(object) = f.object_of("sysctl", "map[string]string")? else { return Ok(Vec::new()) };
    let mut found: Vec<(String, String)> = Vec::new();
    for (key, value) in object.object().iter() {
        let Value::String(value) = value else {
            return Err(f.mismatch(&format!("sysctl.{key}"), value, "string"));
        };
        if found.iter().any(|(other, _)| other == key) {
            return Err(Error::internal("duplicated sysctl keys are not allowed"));
        }
        found.push((key.to_owned(), value.clone()));
    }
    Ok(found)
}

fn resolve_sysctls(raw: &[(String, String)], ifname: &str) -> Result<BTreeMap<String, String>> {
    let allowed = match std::fs::read_to_string(ALLOW_LIST) {
        Ok(text) => {
            Some(text.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_owned).collect::<Vec<_>>())
        }
        Err(_) => None,
    };
    let mut out = BTreeMap::new();
    for (key, value) in raw {
        if let Some(allowed) = &allowed {
            check_allowed(key, allowed)?;
        }
        let name = key.replace('.', "/").replacen("IFNAME", ifname, 1);
        if !name.starts_with("net/")
            || name.split('/').any(|part| part == ".." || part == "." || part.is_empty())
        {
            return Err(Error::internal(format!("invalid net sysctl key: {:?}", key.replace('.', "/"))));
        }
        out.insert(name, value.clone());
    }
    Ok(out)
}

fn check_allowed(key: &str, allowed: &[String]) -> Result<()> {
    for text in allowed {
        let found = pattern::search(text, key)
            .map_err(|err| Error::internal(format!("{ALLOW_LIST}: {text:?}: {err}")))?;
        if found {
            return Ok(());
        }
    }
    Err(Error::internal(format!(
        "Sysctl {key} is not allowed. Only the following sysctls are allowed: [{}]",
        allowed.join(" ")
    )))
}

fn add(call: &Call<'_>) -> Result<CniResult> {
    let conf = Conf::load(call)?;
    let mut result = required_result(call, "Required prevResult missing")?;
    let ns = NetNs::open(&call.env.netns)?;
    let undo = set_sysctls(&ns, &conf.sysctls)?;
    trace::step(|| "sysctls set".into());
    if conf.changes_link() {
        change_link(call, &conf, &ns).inspect_err(|_| restore_sysctls(&ns, &undo))?;
    }
    if conf.mac.is_some() {
        for named in result.interfaces.iter_mut().filter(|i| i.name == call.env.ifname) {
            named.mac.clone_from(&conf.mac_text);
        }
    }
    Ok(result)
}

/// Writes the sysctls and returns what they were; on failure all are as before.
fn set_sysctls(ns: &NetNs, wanted: &BTreeMap<String, String>) -> Result<Vec<(String, String)>> {
    let mut before = Vec::new();
    if wanted.is_empty() {
        return Ok(before);
    }
    let done = ipconf::inside(ns, || {
        for (name, value) in wanted {
            if let Ok(old) = sysctl::read(name) {
                before.push((name.clone(), old));
            }
            sysctl::write(name, value)?;
        }
        Ok(())
    });
    match done {
        Ok(()) => Ok(before),
        Err(err) => {
            restore_sysctls(ns, &before);
            Err(err)
        }
    }
}

fn restore_sysctls(ns: &NetNs, before: &[(String, String)]) {
    let _ = ipconf::inside(ns, || {
        for (name, old) in before {
            let _ = sysctl::write(name, old);
        }
        Ok(())
    });
}

fn change_link(call: &Call<'_>, conf: &Conf, ns: &NetNs) -> Result<()> {
    let mut inside = Handle::new_in(ns)?;
    let link = find_link(&mut inside, &call.env.ifname)
        .map_err(|err| err.context(format!("failed to get {:?}", call.env.ifname)))?;
    let backup = Backup::of(&link, conf);
    let path = conf.backup_path(call);
    backup.write(&path)?;
    apply(&mut inside, &link, conf).inspect_err(|_| {
        let _ = inside.link_set(link.index, &backup.change());
        let _ = std::fs::remove_file(&path);
    })
}

fn apply(inside: &mut Handle, link: &Link, conf: &Conf) -> Result<()> {
    if let Some(mac) = conf.mac {
        // A link that is up takes a new address without losing its routes; few drivers refuse.
        match inside.link_set_mac(link.index, mac) {
            Err(err) if err.is(libc::EBUSY) => set_mac_down(inside, link, mac)?,
            other => other.context("failed to set hardware address")?,
        }
    }
    let change = LinkChange {
        promisc: conf.promisc.then_some(true),
        mtu: conf.mtu,
        allmulti: conf.allmulti,
        tx_queue_len: conf.tx_queue_len,
        ..LinkChange::default()
    };
    inside.link_set(link.index, &change).with_context(|| format!("failed to tune {}", link.name))
}

/// Sets the MAC of a driver that wants the link down, and puts back the routes that go with it.
fn set_mac_down(inside: &mut Handle, link: &Link, mac: MacAddr) -> Result<()> {
    use felt_hostnet::netlink::{Family, RouteProtocol};
    let mut routes = Vec::new();
    for family in [Family::V4, Family::V6] {
        routes.extend(inside.routes(family, Some(254))?);
    }
    routes.retain(|r| r.dev == Some(link.index) && r.protocol != RouteProtocol::KERNEL);
    // Routes without gateway first: the others need them.
    routes.sort_by_key(|r| r.gateway.is_some());
    inside.link_down(link.index)?;
    let set = inside.link_set_mac(link.index, mac).context("failed to set hardware address");
    inside.link_up(link.index)?;
    for route in &routes {
        let _ = inside.route_replace(route);
    }
    set
}

fn del(call: &Call<'_>) -> Result<()> {
    let value = call.value();
    let f = Fields::of("TuningConf", &value)?;
    let data_dir: PathBuf =
        f.string("dataDir")?.filter(|s| !s.is_empty()).unwrap_or("/run/cni/tuning").into();
    let conf = Conf { data_dir, ..Conf::default() };
    let path = conf.backup_path(call);
    let Some(backup) = Backup::read(&path) else { return Ok(()) };
    if let Ok(Some(ns)) = ipconf::open_netns_if_any(call)
        && let Ok(mut inside) = Handle::new_in(&ns)
        && let Ok(link) = inside.link_by_name(&call.env.ifname)
    {
        // What cannot be given back is lost with the container anyway.
        let _ = inside.link_set(link.index, &backup.change());
    }
    match std::fs::remove_file(&path) {
        Err(err) if err.kind() != std::io::ErrorKind::NotFound => Err(err.into()),
        _ => Ok(()),
    }
}

fn check(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call)?;
    required_result(call, "Required prevResult missing")?;
    let ns = NetNs::open(&call.env.netns)?;
    ipconf::inside(&ns, || {
        for (name, wanted) in &conf.sysctls {
            let found = sysctl::read(name)?;
            if found.trim() != wanted.trim() {
                return Err(Error::internal(format!(
                    "Error: Tuning configured value of {name} is {wanted}, current value is {found}"
                )));
            }
        }
        Ok(())
    })?;
    let mut inside = Handle::new_in(&ns)?;
    let link = find_link(&mut inside, &call.env.ifname)
        .map_err(|err| err.context(format!("Cannot find container link {}", call.env.ifname)))?;
    let differs = |what: &str, wanted: &dyn std::fmt::Display, found: &dyn std::fmt::Display| {
        Err(Error::internal(format!(
            "Error: Tuning configured {what} of {} is {wanted}, current value is {found}",
            link.name
        )))
    };
    if let Some(mac) = conf.mac
        && link.mac != Some(mac)
    {
        return differs("Ethernet", &conf.mac_text, &super::mac_text(&link));
    }
    let promisc = link.is_promisc();
    if conf.promisc != promisc {
        return differs("promisc mode", &conf.promisc, &promisc);
    }
    if let Some(mtu) = conf.mtu.filter(|mtu| *mtu != link.mtu) {
        return differs("MTU", &mtu, &link.mtu);
    }
    let allmulti = link.flags & libc::IFF_ALLMULTI as u32 != 0;
    if let Some(wanted) = conf.allmulti.filter(|wanted| *wanted != allmulti) {
        return differs("all-multicast mode", &wanted, &allmulti);
    }
    if let Some(wanted) = conf.tx_queue_len.filter(|wanted| *wanted != link.tx_queue_len) {
        return differs("transmit queue length", &wanted, &link.tx_queue_len);
    }
    Ok(())
}
