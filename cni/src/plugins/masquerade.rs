//! Source translation for a container's addresses. The backends are not in this build yet: a request
//! for it is refused, so that no attachment runs without the translation it was promised.

use felt_hostnet::netlink::Handle;
use ipnet::IpNet;

use crate::skel::Call;
use crate::types::error::{Error, Result};
use crate::types::result::IpConfig;

/// Makes the rules for these addresses.
pub(super) fn setup(_call: &Call<'_>, _backend: Option<&str>, _ips: &[IpConfig]) -> Result<()> {
    Err(Error::internal("ipMasq is not supported by this build of felt-cni"))
}

/// Removes the rules of this attachment.
pub(super) fn teardown(_call: &Call<'_>, _addresses: &[IpNet]) -> Result<()> {
    Ok(())
}

/// The global addresses of the container's interface, for a teardown that needs them.
pub(super) fn addresses(inside: &mut Handle, ifname: &str) -> Result<Vec<IpNet>> {
    match inside.link_by_name(ifname) {
        Ok(link) => Ok(inside.addrs(Some(link.index), None)?.into_iter().map(|a| a.net).collect()),
        Err(err) if err.is_not_found() => Ok(Vec::new()),
        Err(err) => Err(err.into()),
    }
}
