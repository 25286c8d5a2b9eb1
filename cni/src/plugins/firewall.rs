//! `firewall`: lets a container's packets through a host whose forwarding is restricted.
//!
//! iptables' filter table gets one chain `CNI-FORWARD` with two rules per address, and an admin chain
//! before them. `ingressPolicy` adds the isolation of bridges. felt needs the tool of a family only if
//! the container has an address of it. With firewalld on the system bus, addresses are put into its
//! trusted zone instead.

mod firewalld;

use std::net::IpAddr;

use felt_hostnet::netlink::Family;
use ipnet::IpNet;

use super::{Plugin, nothing};
use crate::json::Fields;
use crate::skel::Call;
use crate::types::error::{Error, Result};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;
use crate::xtables::{self, Entry, Mark, Place, Plan, Tool};
use firewalld::Firewalld;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "firewall",
    versions: &[SpecVersion::V0_4_0, SpecVersion::V1_0_0, SpecVersion::V1_1_0],
    add,
    del,
    check,
    gc: nothing,
    status: nothing,
    may_have_no_address: true,
};

const FORWARD: &str = "CNI-FORWARD";
const STAGE_1: &str = "CNI-ISOLATION-STAGE-1";
const STAGE_2: &str = "CNI-ISOLATION-STAGE-2";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Open,
    SameBridge,
    Isolated,
}

struct Conf {
    backend: String,
    admin: String,
    zone: String,
    policy: Policy,
}

impl Conf {
    fn load(call: &Call<'_>) -> Result<Self> {
        let value = call.value();
        let f = Fields::of("FirewallNetConf", &value)?;
        let text = |key, default: &str| -> Result<String> {
            Ok(f.string(key)?.filter(|s| !s.is_empty()).unwrap_or(default).to_owned())
        };
        let admin = text("iptablesAdminChainName", "CNI-ADMIN")?;
        if admin.contains(|c: char| c.is_whitespace() || c == '"') {
            return Err(Error::internal(format!("invalid iptablesAdminChainName {admin:?}")));
        }
        Ok(Self {
            backend: text("backend", "")?,
            admin,
            zone: text("firewalldZone", "trusted")?,
            policy: match f.string("ingressPolicy")?.unwrap_or_default() {
                "" | "open" => Policy::Open,
                "same-bridge" => Policy::SameBridge,
                "isolated" => Policy::Isolated,
                other => return Err(Error::internal(format!("unknown ingress policy: {other:?}"))),
            },
        })
    }

    /// firewalld, where it is asked for or nothing is said and it runs.
    fn firewalld(&self) -> Result<Option<Firewalld>> {
        match self.backend.as_str() {
            "iptables" => Ok(None),
            "firewalld" => Firewalld::connect().map(Some),
            _ => {
                let bus = Firewalld::connect().ok();
                Ok(bus.and_then(|mut bus| bus.has_owner().unwrap_or(false).then_some(bus)))
            }
        }
    }
}

fn addresses(result: &CniResult, family: Family) -> Vec<IpAddr> {
    result.ips.iter().map(|ip| ip.address.addr()).filter(|ip| Family::of(*ip) == family).collect()
}

fn tool(family: Family) -> Result<Tool> {
    let name = if family == Family::V4 { "iptables" } else { "ip6tables" };
    Tool::find(family).ok_or_else(|| {
        Error::internal(format!(
            "could not initialize iptables protocol {}: exec: {name:?}: executable file not found in $PATH",
            u8::from(family == Family::V6)
        ))
    })
}

fn previous(call: &Call<'_>) -> Result<CniResult> {
    call.conf.prev_result()?.ok_or_else(|| Error::internal("missing prevResult from earlier plugin"))
}

fn add(call: &Call<'_>) -> Result<CniResult> {
    let conf = Conf::load(call)?;
    let result = previous(call)?;
    if let Some(mut bus) = conf.firewalld()? {
        for ip in &result.ips {
            bus.add_source(&conf.zone, IpNet::from(ip.address.addr()))?;
        }
    } else {
        set(&conf, &result).inspect_err(|_| {
            let _ = remove(&conf, &result);
        })?;
    }
    isolate(&conf, &result)?;
    Ok(result)
}

fn set(conf: &Conf, result: &CniResult) -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let ips = addresses(result, family);
        if !ips.is_empty() {
            tool(family)?.ensure(&plan(conf, &ips))?;
        }
    }
    Ok(())
}

fn plan(conf: &Conf, ips: &[IpAddr]) -> Plan {
    let mut plan = Plan {
        table: "filter",
        chains: vec![(conf.admin.clone(), Vec::new()), (FORWARD.into(), Vec::new())],
        ..Plan::default()
    };
    let comment = |text: &str| format!("-m comment --comment \"{text}\"");
    plan.entries.push(Entry {
        chain: "FORWARD".into(),
        rule: format!("{} -j {FORWARD}", comment("CNI firewall plugin rules")),
        mark: Mark::Jump(FORWARD.into()),
        place: Place::First,
    });
    plan.entries.push(Entry {
        chain: FORWARD.into(),
        rule: format!("{} -j {}", comment("CNI firewall plugin admin overrides"), conf.admin),
        mark: Mark::Jump(conf.admin.clone()),
        place: Place::First,
    });
    for ip in ips {
        let net = IpNet::from(*ip);
        plan.entries.push(Entry {
            chain: FORWARD.into(),
            rule: format!("-d {net} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"),
            mark: Mark::Destination(*ip),
            place: Place::Last,
        });
        plan.entries.push(Entry {
            chain: FORWARD.into(),
            rule: format!("-s {net} -j ACCEPT"),
            mark: Mark::Source(*ip),
            place: Place::Last,
        });
    }
    plan
}

/// Bridges may not reach each other's containers; isolated ones not even their own.
fn isolate(conf: &Conf, result: &CniResult) -> Result<()> {
    let policy = match conf.policy {
        Policy::Open => return Ok(()),
        Policy::SameBridge => "same-bridge",
        Policy::Isolated => "isolated",
    };
    let bridge = result.interfaces.first().map(|i| i.name.as_str()).filter(|s| !s.is_empty()).ok_or_else(|| {
        Error::internal(format!(
            "interface needs to be set for ingress policy {policy:?}, make sure to chain \"firewall\" plugin with \"bridge\""
        ))
    })?;
    let bridge = &xtables::word(bridge)?;
    let all = "-m comment --comment \"CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)\"";
    let own = format!("-m comment --comment \"CNI firewall plugin rules (ingressPolicy: {policy})\"");
    let entry = |chain: &str, rule: String, place: Place| Entry {
        chain: chain.into(),
        rule,
        mark: Mark::Jump(String::new()),
        place,
    };
    let mut plan = Plan {
        table: "filter",
        chains: vec![(STAGE_1.into(), Vec::new()), (STAGE_2.into(), Vec::new())],
        exact: true,
        ..Plan::default()
    };
    plan.entries.push(entry("FORWARD", format!("{all} -j {STAGE_1}"), Place::First));
    plan.entries.push(entry(STAGE_1, format!("-i {bridge} ! -o {bridge} {own} -j {STAGE_2}"), Place::First));
    if conf.policy == Policy::Isolated {
        plan.entries.push(entry(STAGE_1, format!("-i {bridge} -o {bridge} {own} -j DROP"), Place::First));
    }
    plan.entries.push(entry(STAGE_1, format!("{all} -j RETURN"), Place::Last));
    plan.entries.push(entry(STAGE_2, format!("-o {bridge} {all} -j DROP"), Place::First));
    plan.entries.push(entry(STAGE_2, format!("{all} -j RETURN"), Place::Last));
    for family in [Family::V4, Family::V6] {
        if !addresses(result, family).is_empty() {
            tool(family)?.ensure(&plan)?;
        }
    }
    Ok(())
}

fn del(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call)?;
    // Without a result there is no address whose rules could be found.
    let Some(result) = call.conf.prev_result()? else { return Ok(()) };
    if let Ok(Some(mut bus)) = conf.firewalld() {
        for ip in &result.ips {
            let _ = bus.remove_source(&conf.zone, IpNet::from(ip.address.addr()));
        }
        return Ok(());
    }
    remove(&conf, &result)
}

fn remove(conf: &Conf, result: &CniResult) -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let ips = addresses(result, family);
        if ips.is_empty() {
            continue;
        }
        let mut plan = plan(conf, &ips);
        plan.entries.retain(|e| matches!(e.mark, Mark::Source(_) | Mark::Destination(_)));
        xtables::remove_entries(family, &plan)?;
    }
    Ok(())
}

fn check(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call)?;
    let result = previous(call)?;
    if let Some(mut bus) = conf.firewalld()? {
        for ip in &result.ips {
            bus.query_source(&conf.zone, IpNet::from(ip.address.addr()))?;
        }
        return Ok(());
    }
    for family in [Family::V4, Family::V6] {
        let ips = addresses(&result, family);
        if !ips.is_empty() {
            tool(family)?.check(&plan(&conf, &ips))?;
        }
    }
    Ok(())
}
