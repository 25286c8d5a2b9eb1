//! The tunnel's MTU from that of the link below.

/// Bytes an outer IPv4 header takes.
pub(super) const IP_OVER_V4: u32 = 20;
/// Bytes an outer IPv4 header and a UDP header take.
pub(super) const UDP_OVER_V4: u32 = 20 + 8;
/// Bytes an outer IPv6 header and a UDP header take.
pub(super) const UDP_OVER_V6: u32 = 40 + 8;
/// Bytes of VXLAN header and inner Ethernet header (RFC 7348 section 5).
pub(super) const VXLAN_FRAME: u32 = 8 + 14;

/// Largest IP packet (RFC 791); loopback's MTU is one more.
const MAX_PACKET: u32 = 65_535;
/// Smallest MTU of a link that carries IPv4 (RFC 791 section 3.2).
const MIN_V4: u32 = 68;
/// Smallest MTU of a link that carries IPv6 (RFC 8200 section 5).
const MIN_V6: u32 = 1280;

/// The link below leaves no room.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "MTU {below} of the link leaves {left} bytes after {overhead} bytes of tunnel headers; {family} needs {least}"
)]
pub struct MtuError {
    below: u32,
    left: i64,
    overhead: u32,
    family: &'static str,
    least: u32,
}

/// The inner MTU over a link of MTU `below`.
pub(super) fn inner(below: u32, overhead: u32, carries_v6: bool) -> Result<u32, MtuError> {
    let (family, least) = if carries_v6 { ("IPv6", MIN_V6) } else { ("IPv4", MIN_V4) };
    let below = below.min(MAX_PACKET);
    match below.checked_sub(overhead) {
        Some(left) if left >= least => Ok(left),
        _ => Err(MtuError { below, left: i64::from(below) - i64::from(overhead), overhead, family, least }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_links_give_flannels_values() {
        assert_eq!(inner(1500, UDP_OVER_V4, false), Ok(1472));
        assert_eq!(inner(1500, UDP_OVER_V4 + VXLAN_FRAME, false), Ok(1450));
        assert_eq!(inner(1500, UDP_OVER_V6 + VXLAN_FRAME, true), Ok(1430));
        assert_eq!(inner(9000, UDP_OVER_V4, false), Ok(8972));
        assert_eq!(inner(9000, UDP_OVER_V4 + VXLAN_FRAME, false), Ok(8950));
    }

    #[test]
    fn loopback_is_clamped_and_tiny_links_are_refused() {
        assert_eq!(inner(65_536, UDP_OVER_V4, false), Ok(65_507));
        assert_eq!(inner(576, UDP_OVER_V4, false), Ok(548));
        for (below, overhead, v6) in
            [(68, UDP_OVER_V4, false), (0, UDP_OVER_V4, false), (1300, UDP_OVER_V4, true)]
        {
            let error = inner(below, overhead, v6).unwrap_err();
            assert!(error.to_string().contains(&below.to_string()), "{error}");
        }
    }
}
