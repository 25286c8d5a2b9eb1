//! Keys of the portmap plugin.

use std::net::IpAddr;

use crate::json::Fields;
use crate::skel::Call;
use crate::types::error::{Error, Result};
use crate::xtables;

/// How packets are redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backend {
    Iptables,
    Nftables,
}

/// One port of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub host_port: u16,
    pub container_port: u16,
    /// As given; `tcp` when nothing is.
    pub protocol: String,
    pub host_ip: Option<IpAddr>,
}

/// The validated keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Conf {
    pub mappings: Vec<Mapping>,
    pub backend: Option<Backend>,
    pub snat: bool,
    pub masq_all: bool,
    pub mark_bit: u32,
    pub external_mark_chain: Option<String>,
    pub conditions_v4: Vec<String>,
    pub conditions_v6: Vec<String>,
}

/// The packet mark's bit when none is said.
const MARK_BIT: i64 = 13;

impl Conf {
    /// Reads and validates.
    pub(super) fn load(call: &Call<'_>) -> Result<Self> {
        let value = call.value();
        let f = Fields::of("PortMapConf", &value)?;
        let mut backend = match f.string("backend")?.unwrap_or_default() {
            "" => None,
            "iptables" => Some(Backend::Iptables),
            "nftables" => Some(Backend::Nftables),
            other => return Err(Error::internal(format!("unrecognized backend {other:?}"))),
        };
        let external_mark_chain =
            f.string("externalSetMarkChain")?.filter(|s| !s.is_empty()).map(xtables::word).transpose()?;
        let mark_bit = f.int("markMasqBit")?;
        if external_mark_chain.is_some() && mark_bit.is_some() {
            return Err(Error::internal("Cannot specify externalSetMarkChain and markMasqBit"));
        }
        let mark_bit = u32::try_from(mark_bit.unwrap_or(MARK_BIT))
            .ok()
            .filter(|bit| *bit < 32)
            .ok_or_else(|| Error::internal("MasqMarkBit must be between 0 and 31"))?;
        let conditions_v4 = f.strings("conditionsV4")?.unwrap_or_default();
        let conditions_v6 = f.strings("conditionsV6")?.unwrap_or_default();
        for (key, conditions) in [("conditionsV4", &conditions_v4), ("conditionsV6", &conditions_v6)] {
            let Some(first) = conditions.first() else { continue };
            let theirs = if first.starts_with(['-', '!']) { Backend::Iptables } else { Backend::Nftables };
            if backend.is_some_and(|asked| asked != theirs) {
                let name = |b| if b == Backend::Iptables { "iptables" } else { "nftables" };
                return Err(Error::internal(format!(
                    "{} backend was requested but configuration contains {}-specific options [{key}]",
                    name(backend.unwrap_or(theirs)),
                    name(theirs)
                )));
            }
            backend = Some(theirs);
            if theirs == Backend::Iptables {
                conditions.iter().try_for_each(|text| xtables::word(text).map(drop))?;
            } else if let Some(text) =
                conditions.iter().find(|text| text.contains(|c: char| c.is_control() || c == ';' || c == '#'))
            {
                // These end nft's rule.
                return Err(Error::internal(format!("{text:?} cannot be a word of {key}")));
            }
        }
        Ok(Self {
            mappings: mappings(&f)?,
            backend,
            snat: f.bool("snat")?.unwrap_or(true),
            masq_all: f.flag("masqAll")?,
            mark_bit,
            external_mark_chain,
            conditions_v4,
            conditions_v6,
        })
    }

    /// The conditions of a family.
    pub(super) fn conditions(&self, v4: bool) -> &[String] {
        if v4 { &self.conditions_v4 } else { &self.conditions_v6 }
    }
}

fn mappings(f: &Fields<'_>) -> Result<Vec<Mapping>> {
    let Some(runtime) = f.object_of("runtimeConfig", "struct")? else { return Ok(Vec::new()) };
    runtime
        .array("portMappings")?
        .iter()
        .map(|item| {
            let m = Fields::of("MappingEntry", item)?;
            let port = |key: &str, what: &str| -> Result<u16> {
                let n = m.int(key)?.unwrap_or(0);
                u16::try_from(n)
                    .ok()
                    .filter(|port| *port > 0)
                    .ok_or_else(|| Error::internal(format!("Invalid {what} port number: {n}")))
            };
            let host_ip = m.string("hostIP")?.filter(|s| !s.is_empty());
            Ok(Mapping {
                host_port: port("hostPort", "host")?,
                container_port: port("containerPort", "container")?,
                protocol: word(m.string("protocol")?.filter(|s| !s.is_empty()).unwrap_or("tcp"))?,
                host_ip: host_ip
                    .map(|text| {
                        text.parse().map_err(|_| Error::internal(format!("Invalid host IP address: {text}")))
                    })
                    .transpose()?,
            })
        })
        .collect()
}

/// A protocol's name or number: it becomes part of a line for `iptables-restore`, so it is one word.
fn word(text: &str) -> Result<String> {
    if text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
        Ok(text.to_owned())
    } else {
        Err(Error::internal(format!("Invalid protocol: {text}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Value;
    use crate::skel::Env;
    use crate::types::conf::NetConf;
    use crate::types::version::SpecVersion;

    fn load(keys: &str) -> std::result::Result<Conf, String> {
        let raw = Value::parse(format!("{{\"name\":\"n\"{keys}}}").as_bytes()).unwrap();
        let conf = NetConf::from_object(raw.as_object().unwrap(), SpecVersion::V1_0_0).unwrap();
        Conf::load(&Call { env: &Env::default(), stdin: b"", conf }).map_err(|err| err.msg)
    }

    #[test]
    fn defaults() {
        let c = load("").unwrap();
        assert!(c.snat && !c.masq_all && c.mappings.is_empty() && c.backend.is_none());
        assert_eq!(c.mark_bit, 13);
    }

    #[test]
    fn bad_values_are_named() {
        for (keys, text) in [
            (
                r#","runtimeConfig":{"portMappings":[{"hostPort":0,"containerPort":1}]}"#,
                "Invalid host port number: 0",
            ),
            (
                r#","runtimeConfig":{"portMappings":[{"hostPort":1,"containerPort":0}]}"#,
                "Invalid container port number: 0",
            ),
            (
                r#","runtimeConfig":{"portMappings":[{"hostPort":1,"containerPort":1,"protocol":"tcp\n-A X"}]}"#,
                "Invalid protocol: tcp\n-A X",
            ),
            (r#","markMasqBit":32"#, "MasqMarkBit must be between 0 and 31"),
            (
                r#","markMasqBit":5,"externalSetMarkChain":"X""#,
                "Cannot specify externalSetMarkChain and markMasqBit",
            ),
            (r#","backend":"x""#, "unrecognized backend \"x\""),
            (
                r#","backend":"nftables","conditionsV4":["-s","1.2.3.4"]"#,
                "nftables backend was requested but configuration contains iptables-specific options [conditionsV4]",
            ),
        ] {
            assert_eq!(load(keys).unwrap_err(), text, "{keys}");
        }
        assert_eq!(
            load(r#","conditionsV6":["ip6 saddr fd00::1"]"#).unwrap().backend,
            Some(Backend::Nftables)
        );
    }
}
