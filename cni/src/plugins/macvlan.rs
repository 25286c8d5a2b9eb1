//! `macvlan`: a link in the container with its own MAC on a link of the host.

use felt_hostnet::MacAddr;
use felt_hostnet::netlink::{Handle, LinkDetail, LinkKind, MacvlanMode, NewLink};

use super::single::{self, DnsFrom, Options};
use super::{Plugin, delete_link, ipam_if_any};
use crate::ipconf;
use crate::json::Fields;
use crate::skel::{Call, Command};
use crate::types::args;
use crate::types::error::{Error, Result};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "macvlan",
    versions: SpecVersion::ALL,
    add,
    del: |call| ipam_if_any(call, Command::Del).and_then(|()| delete_link(call)),
    check,
    gc: |call| ipam_if_any(call, Command::Gc),
    status: |call| ipam_if_any(call, Command::Status),
    may_have_no_address: false,
};

fn mode(f: &Fields<'_>) -> Result<MacvlanMode> {
    Ok(match f.string("mode")?.unwrap_or_default() {
        "" | "bridge" => MacvlanMode::Bridge,
        "private" => MacvlanMode::Private,
        "vepa" => MacvlanMode::Vepa,
        "passthru" => MacvlanMode::Passthru,
        other => return Err(Error::internal(format!("unknown macvlan mode: {other:?}"))),
    })
}

/// The MAC asked for: runtimeConfig before CNI_ARGS before the config.
pub(super) fn mac(call: &Call<'_>, f: &Fields<'_>) -> Result<Option<MacAddr>> {
    let runtime = match f.object_of("runtimeConfig", "RuntimeConfig")? {
        Some(r) => r.string("mac")?.map(str::to_owned),
        None => None,
    };
    let pairs = args::parse(&call.env.args, &["MAC"])?;
    let given = [runtime.as_deref(), args::last(&pairs, "MAC"), f.string("mac")?];
    let Some(text) = given.into_iter().flatten().find(|s| !s.is_empty()) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| {
        Error::internal(format!("invalid args {text} for MAC addr: address {text}: invalid MAC address"))
    })
}

fn add(call: &Call<'_>) -> Result<CniResult> {
    let value = call.value();
    let f = Fields::of("NetConf", &value)?;
    f.int("mtu")?;
    let mode = mode(&f)?;
    let mac = mac(call, &f)?;
    single::refuse_unspeakable(call, !call.conf.ipam_type.is_empty())?;
    let mut host = Handle::new()?;
    let ns = ipconf::open_netns(call)?;
    let mut inside = Handle::new_in(&ns)?;
    let master = single::master(&f, &mut host, &mut inside, None)?;
    let kind = match f.uint("bcqueuelen")?.map(u32::try_from) {
        None | Some(Ok(0)) => LinkKind::Macvlan(mode),
        Some(Ok(packets)) => LinkKind::MacvlanQueue(mode, packets),
        Some(Err(_)) => return Err(Error::internal("bcqueuelen is out of range")),
    };
    let mut wanted = NewLink::new(&call.env.ifname, kind).lower(master.link.index);
    wanted.mtu = single::mtu_on(&f, &master.link)?;
    wanted.mac = mac;
    if master.in_container { inside.link_add(&wanted) } else { host.link_add(&wanted.netns(&ns)) }
        .map_err(|err| single::name_error("macvlan", call, err))?;
    let link = ipconf::find_link(&mut inside, &call.env.ifname)?;
    let options = Options { without_ipam: None, dns: DnsFrom::Config, notify: true };
    single::complete(call, &ns, &mut inside, &link, options)
}

fn check(call: &Call<'_>) -> Result<()> {
    let value = call.value();
    let f = Fields::of("NetConf", &value)?;
    let wanted = mode(&f)?;
    let (_, _, link, _) = single::check(call, "macvlan", true)?;
    if link.detail != LinkDetail::Macvlan(Some(wanted)) {
        return Err(Error::internal(format!(
            "Container macvlan mode {:?} does not match expected value: {wanted:?}",
            link.detail
        )));
    }
    Ok(())
}
