//! The blackhole route for the own subnet.
//!
//! While the pods' bridge does not exist (no pod yet), packets to the own subnet would follow the
//! route of the whole overlay into the tunnel, or the default route out into the world. A blackhole
//! route of the subnet stops them. Its metric is the worst there is, so that the bridge's own route
//! wins whichever of the two comes first.

use ipnet::IpNet;

use felt_hostnet::netlink::{Family, Handle, Route, RouteKind};
use felt_hostnet::{Error, TolerateAbsence};

use super::{FAMILIES, TrafficConfig};

/// The worst metric but one: 4294967295 is refused for IPv6.
const METRIC: u32 = u32::MAX - 1;
const TABLE_MAIN: u32 = 254;

fn route(subnet: IpNet) -> Route {
    Route::to(subnet).blackhole().metric(METRIC)
}

/// The blackhole routes of the main table.
fn found(handle: &mut Handle, family: Family) -> Result<Vec<Route>, Error> {
    let mut routes = handle.routes(family, Some(TABLE_MAIN))?;
    routes.retain(|route| route.kind == RouteKind::Blackhole);
    Ok(routes)
}

/// Adds the routes that are missing; says whether one was.
pub(super) fn ensure(config: &TrafficConfig) -> Result<bool, Error> {
    if !config.blackhole {
        return Ok(false);
    }
    let mut changed = false;
    let mut handle = Handle::new()?;
    for pods in FAMILIES.into_iter().filter_map(|family| config.pods(family)) {
        match handle.route_add(&route(pods.subnet)) {
            Ok(()) => changed = true,
            Err(error) if error.already_exists() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(changed)
}

/// Removes blackhole routes that are ours and not wanted.
///
/// Ours are those of the own subnet and of earlier ones (flannel makes them with the best metric,
/// which would win over the bridge's route), and those inside the overlay network that have our
/// metric. All else is somebody else's.
pub(super) fn remove_unwanted(config: &TrafficConfig) -> Result<(), Error> {
    let mut handle = Handle::new()?;
    for family in FAMILIES {
        let Some(pods) = config.pods(family) else { continue };
        for route in found(&mut handle, family)? {
            let own = route.dst == pods.subnet;
            let wanted = config.blackhole && own && route.metric == Some(METRIC);
            let ours = own
                || config.previous.contains(&route.dst)
                || (route.metric == Some(METRIC) && pods.network.contains(&route.dst));
            if ours && !wanted {
                handle.route_del(&exact(&route)).tolerate_absence()?;
            }
        }
    }
    Ok(())
}

/// Removes the blackhole routes of these subnets; says whether there was one.
pub(super) fn remove(subnets: &[IpNet]) -> Result<bool, Error> {
    let mut removed = false;
    let mut handle = Handle::new()?;
    for subnet in subnets {
        let family = Family::of(subnet.addr());
        for route in found(&mut handle, family)?.iter().filter(|route| route.dst == *subnet) {
            removed |= handle.route_del(&exact(route)).tolerate_absence()?;
        }
    }
    Ok(removed)
}

/// What names a found blackhole route for removal: IPv6 ones are listed with the loopback device.
fn exact(found: &Route) -> Route {
    let route = Route::to(found.dst).blackhole();
    match found.metric {
        Some(metric) => route.metric(metric),
        None => route,
    }
}
