//! Keys of the bridge plugin.

use felt_hostnet::MacAddr;

use crate::json::{Fields, Value};
use crate::plugins::masquerade;
use crate::skel::Call;
use crate::types::args;
use crate::types::error::{Error, Result};

/// The validated keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Conf {
    pub bridge: String,
    pub is_gateway: bool,
    pub is_default_gateway: bool,
    pub force_address: bool,
    pub ip_masq: bool,
    pub ip_masq_backend: Option<String>,
    pub mtu: Option<u32>,
    pub hairpin: bool,
    pub promisc: bool,
    pub vlan: u16,
    /// Sorted, without repetitions; `None` when the key is absent.
    pub trunk: Option<Vec<u16>>,
    pub preserve_default_vlan: bool,
    pub mac_spoof_check: bool,
    pub dad: bool,
    pub disable_container_interface: bool,
    pub port_isolation: bool,
    pub mac: Option<MacAddr>,
    pub gso_max_size: Option<u32>,
}

impl Conf {
    /// Reads the keys and the MAC address asked for in its three places.
    pub(super) fn load(call: &Call<'_>) -> Result<Self> {
        let value = call.value();
        let f = Fields::of("NetConf", &value)?;
        let is_default_gateway = f.flag("isDefaultGateway")?;
        let conf = Self {
            bridge: f.string("bridge")?.filter(|s| !s.is_empty()).unwrap_or("cni0").to_owned(),
            is_gateway: f.flag("isGateway")? || is_default_gateway,
            is_default_gateway,
            force_address: f.flag("forceAddress")?,
            ip_masq: f.flag("ipMasq")?,
            ip_masq_backend: masquerade::backend_key(&f)?,
            mtu: mtu(&f)?,
            hairpin: f.flag("hairpinMode")?,
            promisc: f.flag("promiscMode")?,
            vlan: vlan(&f)?,
            trunk: trunk(&f)?,
            preserve_default_vlan: f.flag("preserveDefaultVlan")?,
            mac_spoof_check: f.flag("macspoofchk")?,
            dad: f.flag("enabledad")?,
            disable_container_interface: f.flag("disableContainerInterface")?,
            port_isolation: f.flag("portIsolation")?,
            mac: mac(call, &f)?,
            gso_max_size: positive(&f, "gsoMaxSize")?,
        };
        if conf.hairpin && conf.promisc {
            return Err(Error::internal("cannot set hairpin mode and promiscuous mode at the same time"));
        }
        if conf.disable_container_interface && !call.conf.ipam_type.is_empty() {
            return Err(Error::internal("cannot use IPAM when DisableContainerInterface flag is set"));
        }
        Ok(conf)
    }

    /// Whether the bridge looks at VLAN tags.
    pub(super) fn uses_vlans(&self) -> bool {
        self.vlan != 0 || self.trunk.is_some()
    }
}

/// `mtu`; 0 and absent are the kernel's default.
fn mtu(f: &Fields<'_>) -> Result<Option<u32>> {
    positive(f, "mtu")
}

fn positive(f: &Fields<'_>, key: &str) -> Result<Option<u32>> {
    let Some(n) = f.int(key)? else { return Ok(None) };
    u32::try_from(n)
        .map(|n| (n != 0).then_some(n))
        .map_err(|_| Error::internal(format!("invalid {key} {n} (must not be negative)")))
}

fn vlan(f: &Fields<'_>) -> Result<u16> {
    let id = f.int("vlan")?.unwrap_or(0);
    u16::try_from(id)
        .ok()
        .filter(|id| *id <= 4094)
        .ok_or_else(|| Error::internal(format!("invalid VLAN ID {id} (must be between 0 and 4094)")))
}

fn trunk(f: &Fields<'_>) -> Result<Option<Vec<u16>>> {
    if f.raw("vlanTrunk").is_none() {
        return Ok(None);
    }
    let mut ids = std::collections::BTreeSet::new();
    for item in f.array("vlanTrunk")? {
        let t = Fields::of("VlanTrunk", item)?;
        let id = |key: &str, name: &str| -> Result<Option<u16>> {
            let Some(n) = t.int(key)? else { return Ok(None) };
            match u16::try_from(n) {
                Ok(n) if (1..=4094).contains(&n) => Ok(Some(n)),
                _ => Err(Error::internal(format!("incorrect trunk {name} parameter"))),
            }
        };
        let both = "minID and maxID should be configured simultaneously";
        match (id("minID", "minID")?, id("maxID", "maxID")?) {
            (Some(min), Some(max)) if min > max => {
                return Err(Error::internal("minID is greater than maxID in trunk parameter"));
            }
            (Some(min), Some(max)) => ids.extend(min..=max),
            (None, Some(_)) => return Err(Error::internal(format!("{both}, minID is missing"))),
            (Some(_), None) => return Err(Error::internal(format!("{both}, maxID is missing"))),
            (None, None) => {}
        }
        ids.extend(id("id", "id")?);
    }
    Ok(Some(ids.into_iter().collect()))
}

/// The MAC asked for: runtimeConfig before args before CNI_ARGS.
fn mac(call: &Call<'_>, f: &Fields<'_>) -> Result<Option<MacAddr>> {
    let pairs = args::parse(&call.env.args, &["MAC"])?;
    let mut text = args::last(&pairs, "MAC").unwrap_or_default().to_owned();
    let nested = |outer: Option<&Value>, inner: &str| -> Option<Value> {
        outer.and_then(Value::as_object).and_then(|o| o.get_folded(inner)).cloned()
    };
    let places =
        [nested(nested(f.raw("args"), "cni").as_ref(), "mac"), nested(f.raw("runtimeConfig"), "mac")];
    for value in places.into_iter().flatten() {
        match value {
            Value::String(s) if s.is_empty() => {}
            Value::String(s) => text = s,
            other => return Err(f.mismatch("mac", &other, "string")),
        }
    }
    parse_mac(&text)
}

/// A MAC address, `None` for the empty text.
fn parse_mac(text: &str) -> Result<Option<MacAddr>> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| {
        Error::internal(format!("failed to make veth pair: address {text}: invalid MAC address"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skel::Env;
    use crate::types::conf::NetConf;
    use crate::types::version::SpecVersion;

    fn load(keys: &str, cni_args: &str) -> std::result::Result<Conf, String> {
        let text = format!(r#"{{"name":"n"{}{keys}}}"#, if keys.is_empty() { "" } else { "," });
        let Value::Object(raw) = Value::parse(text.as_bytes()).unwrap() else { panic!("not an object") };
        let env = Env { args: cni_args.into(), ..Env::default() };
        let conf = NetConf::from_object(&raw, SpecVersion::V1_0_0).map_err(|err| err.msg)?;
        Conf::load(&Call { env: &env, stdin: b"", conf }).map_err(|err| err.msg)
    }

    #[test]
    fn defaults_and_implications() {
        let c = load("", "").unwrap();
        assert_eq!(c.bridge, "cni0");
        assert!(!c.is_gateway && c.mtu.is_none() && c.trunk.is_none() && !c.uses_vlans());
        assert!(load(r#""isDefaultGateway":true"#, "").unwrap().is_gateway);
        assert_eq!(load(r#""MTU":1400"#, "").unwrap().mtu, Some(1400));
    }

    #[test]
    fn contradictions_are_refused() {
        for (keys, text) in [
            (
                r#""hairpinMode":true,"promiscMode":true"#,
                "cannot set hairpin mode and promiscuous mode at the same time",
            ),
            (
                r#""disableContainerInterface":true,"ipam":{"type":"host-local"}"#,
                "cannot use IPAM when DisableContainerInterface flag is set",
            ),
            (r#""ipMasqBackend":"x""#, "unknown ipmasq backend \"x\""),
            (r#""vlan":4095"#, "invalid VLAN ID 4095 (must be between 0 and 4094)"),
            (r#""vlan":-1"#, "invalid VLAN ID -1 (must be between 0 and 4094)"),
            (
                r#""vlanTrunk":[{"minID":5}]"#,
                "minID and maxID should be configured simultaneously, maxID is missing",
            ),
            (
                r#""vlanTrunk":[{"maxID":5}]"#,
                "minID and maxID should be configured simultaneously, minID is missing",
            ),
            (r#""vlanTrunk":[{"minID":0,"maxID":5}]"#, "incorrect trunk minID parameter"),
            (r#""vlanTrunk":[{"minID":1,"maxID":4095}]"#, "incorrect trunk maxID parameter"),
            (r#""vlanTrunk":[{"id":-2}]"#, "incorrect trunk id parameter"),
            (r#""vlanTrunk":[{"minID":9,"maxID":5}]"#, "minID is greater than maxID in trunk parameter"),
        ] {
            assert_eq!(load(keys, "").unwrap_err(), text, "{keys}");
        }
    }

    #[test]
    fn trunks_are_united_and_sorted() {
        let c = load(r#""vlanTrunk":[{"minID":12,"maxID":14},{"id":3},{"id":13}]"#, "").unwrap();
        assert_eq!(c.trunk, Some(vec![3, 12, 13, 14]));
        assert!(load(r#""vlanTrunk":[]"#, "").unwrap().uses_vlans());
    }

    #[test]
    fn the_runtime_decides_about_the_mac() {
        let all = r#""args":{"cni":{"mac":"02:00:00:00:00:02"}},"runtimeConfig":{"mac":"02:00:00:00:00:03"}"#;
        let env = "IgnoreUnknown=1;MAC=02:00:00:00:00:01";
        assert_eq!(load(all, env).unwrap().mac.unwrap().to_string(), "02:00:00:00:00:03");
        let args = r#""args":{"cni":{"mac":"02:00:00:00:00:02"}}"#;
        assert_eq!(load(args, env).unwrap().mac.unwrap().to_string(), "02:00:00:00:00:02");
        assert_eq!(load("", env).unwrap().mac.unwrap().to_string(), "02:00:00:00:00:01");
        assert_eq!(
            load("", "MAC=zz").unwrap_err(),
            "failed to make veth pair: address zz: invalid MAC address"
        );
    }
}
