//! The part of a network configuration every plugin shares.

use super::error::{Error, Result, code};
use super::result::{CniResult, Dns};
use super::version::SpecVersion;
use crate::json::{Fields, Object, Value};

/// Keys common to all plugins, with the whole object beside them.
#[derive(Debug, Clone)]
pub struct NetConf {
    /// `cniVersion`; absent means 0.1.0.
    pub version: SpecVersion,
    /// `name`, already checked against the allowed alphabet.
    pub name: String,
    /// `ipam.type`, empty when there is none.
    pub ipam_type: String,
    /// `dns` of the config itself.
    pub dns: Dns,
    /// Whether `dns` has any member, even an empty list.
    pub dns_given: bool,
    /// `prevResult`, still undecoded; `None` when absent.
    prev_result: Option<Value>,
    /// The whole configuration.
    pub raw: Object,
}

impl NetConf {
    /// Reads the common keys and checks the types the reference checks in every plugin.
    ///
    /// # Errors
    /// Go's texts for wrong types.
    pub fn from_object(raw: &Object, version: SpecVersion) -> Result<Self> {
        let value = Value::Object(raw.clone());
        let f = Fields::of("NetConf", &value)?;
        if let Some(caps) = f.object_of("capabilities", "map[string]bool")? {
            for (key, cap) in caps.object().iter() {
                if !matches!(cap, Value::Bool(_) | Value::Null) {
                    return Err(f.mismatch(&format!("capabilities.{key}"), cap, "bool"));
                }
            }
        }
        f.string("type")?;
        let ipam_type = match f.object_of("ipam", "IPAM")? {
            Some(ipam) => ipam.string_or_empty("type")?,
            None => String::new(),
        };
        let dns_fields = f.object_of("dns", "DNS")?;
        let prev_result = match f.raw("prevResult") {
            None => None,
            Some(v @ Value::Object(_)) => Some(v.clone()),
            Some(other) => return Err(f.mismatch("prevResult", other, "map[string]interface {}")),
        };
        Ok(Self {
            version,
            name: f.string_or_empty("name")?,
            ipam_type,
            dns: dns_fields.map(|d| Dns::read(&d)).transpose()?.unwrap_or_default(),
            dns_given: dns_fields.is_some_and(|d| {
                ["nameservers", "search", "options"].iter().any(|k| d.raw(k).is_some())
                    || d.raw("domain").and_then(Value::as_str).is_some_and(|s| !s.is_empty())
            }),
            prev_result,
            raw: raw.clone(),
        })
    }

    /// The decoded `prevResult`, read with the config's version when it names none.
    ///
    /// # Errors
    /// `could not parse prevResult: ...` when it is of another family of versions or malformed.
    pub fn prev_result(&self) -> Result<Option<CniResult>> {
        self.prev_result
            .as_ref()
            .map(|value| {
                CniResult::from_json(value, self.version)
                    .map_err(|err| Error::internal(format!("could not parse prevResult: {}", err.msg)))
            })
            .transpose()
    }

    /// Whether `prevResult` is present at all.
    pub fn has_prev_result(&self) -> bool {
        self.prev_result.is_some()
    }

    /// The attachments a GC must keep, as (container ID, interface name).
    ///
    /// # Errors
    /// When the list is absent (GC without it would remove everything) or malformed.
    pub fn valid_attachments(&self) -> Result<Vec<(String, String)>> {
        let value = self
            .raw
            .get("cni.dev/valid-attachments")
            .or_else(|| self.raw.get("cni.dev/attachments"))
            .ok_or_else(|| Error::new(code::INVALID_CONFIG, "GC needs cni.dev/valid-attachments", ""))?;
        let items = match value {
            Value::Array(items) => items.as_slice(),
            // What the runtime's library makes of a list that was never filled.
            Value::Null => &[],
            _ => return Err(Error::new(code::INVALID_CONFIG, "cni.dev/valid-attachments is not a list", "")),
        };
        items
            .iter()
            .map(|item| {
                let f = Fields::of("GCAttachment", item)?;
                Ok((f.string_or_empty("containerID")?, f.string_or_empty("ifname")?))
            })
            .collect()
    }
}
