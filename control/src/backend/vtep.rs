//! A VXLAN node's published data, `{"VNI":1,"VtepMAC":"ee:25:24:46:88:02"}`.
//!
//! The text is flannel's to the byte: original nodes in Kubernetes find their stored MAC again by splitting it.

use felt_hostnet::MacAddr;
use felt_hostnet::netlink::Handle as Netlink;
use serde_json::value::RawValue;

use super::BackendError;
use crate::gojson::Object;
use crate::state::NodeState;

/// The data of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct VtepData {
    /// The node's VXLAN network identifier; peers ignore it.
    pub(super) vni: u32,
    /// Destination of inner frames to the node.
    pub(super) mac: MacAddr,
}

impl VtepData {
    /// The JSON to publish.
    pub(super) fn encode(self) -> Box<RawValue> {
        let text = format!("{{\"VNI\":{},\"VtepMAC\":\"{}\"}}", self.vni, self.mac);
        // A number and hex digits always make valid JSON; `null` would only be ignored by peers.
        RawValue::from_string(text).unwrap_or_else(|_| RawValue::NULL.to_owned())
    }

    /// Reads what any node published.
    pub(super) fn decode(data: Option<&RawValue>) -> Result<Self, String> {
        let data = data.ok_or("missing")?;
        let object = Object::parse(data.get()).map_err(|error| error.to_string())?;
        let vni = object.field("VNI").map_err(|error| format!("VNI: {error}"))?.unwrap_or(0);
        let text: String =
            object.field("VtepMAC").map_err(|error| format!("VtepMAC: {error}"))?.unwrap_or_default();
        let mac: MacAddr = text.parse().map_err(|_| format!("{text:?} is no MAC address"))?;
        if !mac.is_unicast() {
            return Err(format!("{mac} is no unicast MAC address"));
        }
        Ok(Self { vni, mac })
    }
}

/// The VTEP MAC of `device`: the own lease's, else a left-over device's, else the remembered one, else a new one. It is
/// remembered for the next start.
pub(super) fn choose_mac(
    netlink: &mut Netlink,
    state: &mut NodeState,
    device: &str,
    leased: Option<VtepData>,
) -> Result<MacAddr, BackendError> {
    let left_over = match netlink.link_by_name(device) {
        Ok(link) if link.is_kind("vxlan") => link.mac.filter(|mac| mac.is_unicast()),
        Ok(_) => None,
        Err(error) if error.is_not_found() => None,
        Err(error) => return Err(error.into()),
    };
    let mac = leased
        .map(|data| data.mac)
        .or(left_over)
        .or_else(|| state.vtep_mac(device))
        .unwrap_or_else(|| MacAddr::local_from(rand::random()));
    if let Err(error) = state.set_vtep_mac(device, mac) {
        tracing::warn!("{error}: the VTEP MAC {mac} of {device} is kept by the lease alone");
    }
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_flannels() {
        let data = VtepData { vni: 1, mac: "ee:25:24:46:88:02".parse().unwrap() };
        assert_eq!(data.encode().get(), r#"{"VNI":1,"VtepMAC":"ee:25:24:46:88:02"}"#);
        assert_eq!(VtepData::decode(Some(&data.encode())), Ok(data));
    }

    #[test]
    fn bad_data_is_refused() {
        for text in [
            "null",
            r#""""#,
            "{}",
            r#"{"VtepMAC":"02:00"}"#,
            r#"{"VtepMAC":7}"#,
            r#"{"VtepMAC":"ff:ff:ff:ff:ff:ff"}"#,
            r#"{"VtepMAC":"00:00:00:00:00:00"}"#,
            r#"{"VNI":"x","VtepMAC":"02:00:00:00:00:01"}"#,
        ] {
            let raw = RawValue::from_string(text.to_owned()).unwrap();
            assert!(VtepData::decode(Some(&raw)).is_err(), "{text} was accepted");
        }
        assert!(VtepData::decode(None).is_err());
    }
}
