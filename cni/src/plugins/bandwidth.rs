//! `bandwidth`: token buckets on the host's end of the container's cable.
//!
//! What goes to the container is queued on the host end itself; what comes from it passes an ifb
//! device first. Rates, limits and names are the reference's, so that either checks and removes what
//! the other made.

use felt_hostnet::TolerateAbsence;
use felt_hostnet::netlink::{Handle, Link, LinkKind, NewLink, NewQdisc, Tbf, TcHandle};

use super::{Plugin, mac_text, nothing};
use crate::ipconf::{self, find_link};
use crate::json::Fields;
use crate::names;
use crate::skel::Call;
use crate::types::error::{Context, Error, Result};
use crate::types::result::{CniResult, Interface};
use crate::types::version::SpecVersion;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "bandwidth",
    versions: &[
        SpecVersion::V0_3_0,
        SpecVersion::V0_3_1,
        SpecVersion::V0_4_0,
        SpecVersion::V1_0_0,
        SpecVersion::V1_1_0,
    ],
    add,
    del,
    check,
    gc: nothing,
    status: nothing,
    may_have_no_address: true,
};

/// Limits in bits per second and bits; zero is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Limits {
    ingress_rate: u64,
    ingress_burst: u64,
    egress_rate: u64,
    egress_burst: u64,
}

const KEYS: [&str; 4] = ["ingressRate", "ingressBurst", "egressRate", "egressBurst"];

impl Limits {
    fn load(call: &Call<'_>) -> Result<Self> {
        let value = call.value();
        let f = Fields::of("PluginConf", &value)?;
        let runtime = f.object_of("runtimeConfig", "struct")?;
        let runtime = runtime.map(|r| r.object_of("bandwidth", "BandwidthEntry")).transpose()?.flatten();
        // The config wins if it says anything at all, be it zero.
        let place = if KEYS.iter().any(|key| f.raw(key).is_some()) {
            Some(Fields::of("PluginConf.BandwidthEntry", &value)?)
        } else {
            runtime
        };
        let read =
            |key: &str| -> Result<u64> { Ok(place.map(|p| p.uint(key)).transpose()?.flatten().unwrap_or(0)) };
        let limits = Self {
            ingress_rate: read(KEYS[0])?,
            ingress_burst: read(KEYS[1])?,
            egress_rate: read(KEYS[2])?,
            egress_burst: read(KEYS[3])?,
        };
        for (rate, burst) in
            [(limits.ingress_rate, limits.ingress_burst), (limits.egress_rate, limits.egress_burst)]
        {
            match (rate, burst) {
                (0, 1..) => return Err(Error::internal("if burst is set, rate must also be set")),
                (1.., 0) => return Err(Error::internal("if rate is set, burst must also be set")),
                _ if burst / 8 >= u64::from(u32::MAX) => {
                    return Err(Error::internal("burst cannot be more than 4GB"));
                }
                _ => {}
            }
        }
        Ok(limits)
    }

    fn none(&self) -> bool {
        self.ingress_rate == 0 && self.egress_rate == 0
    }
}

/// Microseconds a packet may wait for.
const LATENCY: f64 = 25_000.0;
const MICROSECONDS: f64 = 1_000_000.0;

/// The bucket for a rate and burst in bits.
///
/// COMPAT: numbers that do not fit wrap at 32 bits, as the reference's conversions do; its CHECK
/// computes and compares the same.
fn bucket(rate: u64, burst: u64, tick: f64) -> Tbf {
    let wrap = |x: f64| x as i64 as u32;
    let rate = rate / 8;
    let burst = (burst / 8) as u32;
    let time = wrap(f64::from(burst) * MICROSECONDS / rate as f64);
    Tbf {
        rate,
        limit: wrap(rate as f64 * LATENCY / MICROSECONDS).wrapping_add(burst),
        buffer: wrap(f64::from(time) * tick),
    }
}

/// Scheduler ticks per microsecond, from /proc/net/psched.
fn tick() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/net/psched").context("read /proc/net/psched")?;
    let mut words = text.split_whitespace().map(|word| u32::from_str_radix(word, 16));
    match (words.next(), words.next(), words.next()) {
        (Some(Ok(to_us)), Some(Ok(to_tick)), Some(Ok(clock))) if to_tick != 0 => {
            Ok(f64::from(to_us) / f64::from(to_tick) * (f64::from(clock) / MICROSECONDS))
        }
        _ => Err(Error::internal(format!("/proc/net/psched: {:?} is not understood", text.trim()))),
    }
}

const ROOT_QDISC: TcHandle = TcHandle::new(1, 0);

fn add(call: &Call<'_>) -> Result<CniResult> {
    let limits = Limits::load(call)?;
    let mut result =
        call.conf.prev_result()?.ok_or_else(|| Error::internal("must be called as chained plugin"))?;
    if limits.none() {
        return Ok(result);
    }
    let mut host = Handle::new()?;
    let port = host_end(call, &mut host, &result)?;
    let tick = tick()?;
    let mut made = Made::default();
    set(call, &mut host, &port, &limits, tick, &mut result, &mut made).inspect_err(|_| {
        if made.ifb {
            let _ = host.link_del_by_name(&ifb_name(call));
        }
        if made.root {
            let _ = host.qdisc_del(port.index, TcHandle::ROOT);
        }
        if made.ingress {
            let _ = host.qdisc_del(port.index, TcHandle::INGRESS);
        }
    })?;
    Ok(result)
}

/// What an ADD has made so far.
#[derive(Default)]
struct Made {
    root: bool,
    ingress: bool,
    ifb: bool,
}

fn set(
    call: &Call<'_>,
    host: &mut Handle,
    port: &Link,
    limits: &Limits,
    tick: f64,
    result: &mut CniResult,
    made: &mut Made,
) -> Result<()> {
    if limits.ingress_rate > 0 {
        let tbf = NewQdisc::Tbf(bucket(limits.ingress_rate, limits.ingress_burst, tick));
        host.qdisc_add(port.index, TcHandle::ROOT, ROOT_QDISC, &tbf).context("create qdisc")?;
        made.root = true;
    }
    if limits.egress_rate > 0 {
        let name = ifb_name(call);
        let ifb = NewLink::new(&name, LinkKind::Ifb).mtu(port.mtu).tx_queue_len(0).up();
        host.link_add(&ifb).with_context(|| format!("adding link {name}"))?;
        made.ifb = true;
        let ifb = find_link(host, &name)?;
        host.qdisc_add(port.index, TcHandle::INGRESS, TcHandle::INGRESS_QDISC, &NewQdisc::Ingress)
            .context("create ingress qdisc")?;
        made.ingress = true;
        host.filter_redirect_all(port.index, TcHandle::INGRESS_QDISC, 1, ifb.index)?;
        let tbf = NewQdisc::Tbf(bucket(limits.egress_rate, limits.egress_burst, tick));
        host.qdisc_add(ifb.index, TcHandle::ROOT, ROOT_QDISC, &tbf).context("create qdisc")?;
        result.interfaces.push(Interface { name, mac: mac_text(&ifb), ..Interface::default() });
    }
    Ok(())
}

fn ifb_name(call: &Call<'_>) -> String {
    names::ifb(&call.conf.name, &call.env.container_id)
}

/// The host's end of the container's veth; it must be one of the result's interfaces.
fn host_end(call: &Call<'_>, host: &mut Handle, result: &CniResult) -> Result<Link> {
    if result.interfaces.is_empty() {
        return Err(Error::internal("no interfaces provided"));
    }
    let ns = ipconf::open_netns(call)?;
    let mut inside = Handle::new_in(&ns)?;
    let link = find_link(&mut inside, &call.env.ifname)
        .map_err(|err| err.context(format!("failed to get link {:?}", call.env.ifname)))?;
    let peer = link.peer.filter(|_| link.is_kind("veth")).ok_or_else(|| {
        Error::internal(format!("container interface {} has no veth peer: not a veth", call.env.ifname))
    })?;
    let port = host
        .link_by_index(peer)
        .map_err(|_| Error::internal(format!("veth peer with index {peer} is not in host ns")))?;
    if result.interfaces.iter().any(|i| i.sandbox.is_empty() && i.name == port.name) {
        return Ok(port);
    }
    Err(Error::internal("no veth peer of container interface found in host ns"))
}

fn del(call: &Call<'_>) -> Result<()> {
    // The host end's disciplines go with the cable.
    Handle::new()?.link_del_by_name(&ifb_name(call)).tolerate_absence()?;
    Ok(())
}

fn check(call: &Call<'_>) -> Result<()> {
    let limits = Limits::load(call)?;
    let result =
        call.conf.prev_result()?.ok_or_else(|| Error::internal("must be called as a chained plugin"))?;
    let mut host = Handle::new()?;
    let port = host_end(call, &mut host, &result)?;
    if limits.none() {
        return Ok(());
    }
    let tick = tick()?;
    let mut compare = |link: &Link, rate: u64, burst: u64| -> Result<()> {
        let wanted = bucket(rate, burst, tick);
        let found = host.qdiscs(link.index)?.into_iter().find_map(|q| q.tbf);
        let found = found
            .ok_or_else(|| Error::internal(format!("Failed to find qdisc tbf on link {}", link.name)))?;
        if found.rate != wanted.rate {
            return Err(Error::internal("Rate doesn't match"));
        }
        if found.limit != wanted.limit {
            return Err(Error::internal("Limit doesn't match"));
        }
        if found.buffer != wanted.buffer {
            return Err(Error::internal("Buffer doesn't match"));
        }
        Ok(())
    };
    if limits.ingress_rate > 0 {
        compare(&port, limits.ingress_rate, limits.ingress_burst)?;
    }
    if limits.egress_rate > 0 {
        let ifb = find_link(&mut Handle::new()?, &ifb_name(call))?;
        compare(&ifb, limits.egress_rate, limits.egress_burst)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_the_references_down_to_the_wrap() {
        // containerd's burst with 10 Mbit/s, as the kernel showed it.
        let tbf = bucket(10_000_000, 4_294_967_295, 15.625);
        assert_eq!(tbf.rate, 1_250_000);
        assert_eq!(tbf.buffer, 0x8fff_ffe7);
        let small = bucket(8_000_000, 80_000, 15.625);
        assert_eq!((small.rate, small.limit, small.buffer), (1_000_000, 35_000, 156_250));
    }
}
