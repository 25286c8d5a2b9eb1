//! The `Backend` object: which encapsulation, and the keys of each.
//!
//! Names and defaults are flannel's. felt's own keys (`Dataplane`, `Offload`, `Workers`,
//! `SourceGuard`) stand beside them, have defaults, and are overridden by node-local flags; flannel
//! ignores them, so one configuration serves both.

use std::fmt;
use std::str::FromStr;

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use thiserror::Error;

use super::NetworkConfigError;
use crate::gojson::Object;

/// The backends this program has, in the order of its documentation.
pub const BACKENDS: &[&str] = &["vxlan", "udp", "host-gw", "ipip", "alloc", "extension"];

/// The parsed `Backend` object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// The encapsulation with its keys.
    pub kind: BackendKind,
    /// `Dataplane`: who moves the packets of a vxlan network.
    pub dataplane: Dataplane,
    /// `Offload`: whether segmentation offloads are used.
    pub offload: Offload,
    /// `Workers`: number of packet workers; 0 = from the number of cores.
    pub workers: usize,
    /// `SourceGuard`: which received packets are believed.
    pub source_guard: SourceGuard,
}

/// A backend's own keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendKind {
    /// `vxlan`
    Vxlan(Vxlan),
    /// `udp`
    Udp(Udp),
    /// `host-gw`: plain routes, no encapsulation.
    HostGw,
    /// `ipip`
    Ipip {
        /// `DirectRouting`: plain routes to nodes on the same link.
        direct_routing: bool,
    },
    /// `alloc`: lease a subnet, move no packets.
    Alloc,
    /// `extension`: the operator's own commands.
    Extension(Extension),
}

/// Keys of `vxlan`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vxlan {
    /// `VNI`, 0 to 2^24 - 1; default 1.
    pub vni: u32,
    /// `Port`; 0 or absent means the Linux default, 8472.
    pub port: u16,
    /// `MTU` of the link that carries the tunnel; `None` = that of the external interface.
    pub mtu: Option<u16>,
    /// `GBP`
    pub gbp: bool,
    /// `Learning`
    pub learning: bool,
    /// `DirectRouting`: plain routes to nodes on the same link.
    pub direct_routing: bool,
}

/// Keys of `udp`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Udp {
    /// `Port`; default 8285.
    pub port: u16,
    /// `DirectRouting`: plain routes to nodes on the same link (flannel has it for vxlan only).
    pub direct_routing: bool,
}

/// Commands of `extension`; empty means none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extension {
    /// `PreStartupCommand`
    pub pre_startup: String,
    /// `PostStartupCommand`
    pub post_startup: String,
    /// `SubnetAddCommand`
    pub subnet_add: String,
    /// `SubnetRemoveCommand`
    pub subnet_remove: String,
}

/// Linux' own VXLAN port, older than the one IANA assigned (include/uapi/linux/if_link.h).
const VXLAN_PORT: u16 = 8472;
/// flannel's port for `udp` (backend/udp/udp_amd64.go).
const UDP_PORT: u16 = 8285;
/// A VNI has 24 bits (RFC 7348 section 5).
const MAX_VNI: u64 = (1 << 24) - 1;

/// A word that is none of those a setting knows.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{given:?} is unknown; possible are {possible}")]
pub struct UnknownValue {
    given: String,
    possible: &'static str,
}

/// An enumeration written as one lower-case word, in the configuration and in flags.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal),+ } $possible:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }

        impl $name {
            /// The word for it.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownValue;

            fn from_str(word: &str) -> Result<Self, UnknownValue> {
                match word.to_ascii_lowercase().as_str() {
                    $($word => Ok(Self::$variant),)+
                    _ => Err(UnknownValue { given: word.to_owned(), possible: $possible }),
                }
            }
        }
    };
}

words! {
    /// Who moves the packets of a vxlan network.
    Dataplane {
        /// Userspace where `/dev/net/tun` opens, else the kernel.
        #[default]
        Auto = "auto",
        /// The packet loop of this program.
        Userspace = "userspace",
        /// A kernel vxlan device, as flannel makes it.
        Kernel = "kernel"
    }
    "auto, userspace, kernel"
}

words! {
    /// Whether segmentation offloads of the TUN device and the socket are used.
    Offload {
        /// Probed at start.
        #[default]
        Auto = "auto",
        /// One packet at a time.
        Off = "off"
    }
    "auto, off"
}

words! {
    /// Which received packets are believed.
    SourceGuard {
        /// All, as flannel does.
        Off = "off",
        /// The inner source must lie in a known node's subnet, not in ours.
        #[default]
        Inner = "inner",
        /// Also the outer source must be a known public address.
        Peers = "peers",
        /// Also the inner source must belong to the node of that address.
        Strict = "strict"
    }
    "off, inner, peers, strict"
}

impl BackendKind {
    /// The name in the configuration.
    pub fn name(&self) -> &'static str {
        match self {
            BackendKind::Vxlan(_) => "vxlan",
            BackendKind::Udp(_) => "udp",
            BackendKind::HostGw => "host-gw",
            BackendKind::Ipip { .. } => "ipip",
            BackendKind::Alloc => "alloc",
            BackendKind::Extension(_) => "extension",
        }
    }

    /// The name in a lease's `BackendType`: flannel leaves it empty for `udp` and `alloc`.
    pub fn lease_type(&self) -> &'static str {
        match self {
            BackendKind::Udp(_) | BackendKind::Alloc => "",
            other => other.name(),
        }
    }
}

impl Default for Backend {
    /// What an absent `Backend` means: `udp`.
    fn default() -> Self {
        Backend {
            kind: BackendKind::Udp(Udp { port: UDP_PORT, direct_routing: false }),
            dataplane: Dataplane::default(),
            offload: Offload::default(),
            workers: 0,
            source_guard: SourceGuard::default(),
        }
    }
}

impl Backend {
    /// Decodes the value of the key `Backend`; `None`, `null` and `{}` are the default.
    ///
    /// # Errors
    ///
    /// Names the key of a wrong value, or the backends there are.
    pub(super) fn decode(value: Option<&RawValue>) -> Result<Backend, NetworkConfigError> {
        let Some(value) = value.filter(|value| value.get() != "null") else {
            return Ok(Backend::default());
        };
        let object = Object::parse(value.get())
            .map_err(|_| NetworkConfigError::of_type("Backend", value, "an object"))?;
        let keys = Keys(&object);
        // COMPAT: flannel exits with an unknown backend type on an object without Type.
        let kind = match keys.text("Type")?.to_ascii_lowercase().as_str() {
            "" | "udp" => BackendKind::Udp(Udp {
                port: keys.port("Port")?.unwrap_or(UDP_PORT),
                direct_routing: keys.flag("DirectRouting")?,
            }),
            "vxlan" => BackendKind::Vxlan(Vxlan {
                vni: keys.number("VNI", MAX_VNI)?.unwrap_or(1) as u32,
                port: keys.port("Port")?.unwrap_or(VXLAN_PORT),
                mtu: keys.number("MTU", u16::MAX.into())?.filter(|&mtu| mtu > 0).map(|mtu| mtu as u16),
                gbp: keys.flag("GBP")?,
                learning: keys.flag("Learning")?,
                direct_routing: keys.flag("DirectRouting")?,
            }),
            "host-gw" => BackendKind::HostGw,
            "ipip" => BackendKind::Ipip { direct_routing: keys.flag("DirectRouting")? },
            "alloc" => BackendKind::Alloc,
            "extension" => BackendKind::Extension(Extension {
                pre_startup: keys.text("PreStartupCommand")?,
                post_startup: keys.text("PostStartupCommand")?,
                subnet_add: keys.text("SubnetAddCommand")?,
                subnet_remove: keys.text("SubnetRemoveCommand")?,
            }),
            name => return Err(unsupported(name)),
        };
        Ok(Backend {
            kind,
            dataplane: keys.word("Dataplane")?,
            offload: keys.word("Offload")?,
            workers: keys.number("Workers", 1024)?.unwrap_or(0) as usize,
            source_guard: keys.word("SourceGuard")?,
        })
    }
}

fn unsupported(name: &str) -> NetworkConfigError {
    let what = match name {
        "wireguard" | "ipsec" => "encrypts, which felt does not do",
        "tencent-vpc" | "ali-vpc" | "aws-vpc" | "gce" => {
            "needs a cloud provider's interface, which felt does not speak"
        }
        _ => "is unknown",
    };
    NetworkConfigError::value("Backend.Type", format!("{name:?} {what}; there are {}", BACKENDS.join(", ")))
}

/// Typed access to the members of the `Backend` object; absent and `null` are the default.
struct Keys<'a>(&'a Object);

impl Keys<'_> {
    fn path(name: &str) -> String {
        format!("Backend.{name}")
    }

    fn get<T: DeserializeOwned>(&self, name: &str, wanted: &str) -> Result<Option<T>, NetworkConfigError> {
        let Some(value) = self.0.raw(name) else {
            return Ok(None);
        };
        serde_json::from_str(value.get())
            .map_err(|_| NetworkConfigError::of_type(Self::path(name), value, wanted))
    }

    fn text(&self, name: &str) -> Result<String, NetworkConfigError> {
        Ok(self.get(name, "a string")?.unwrap_or_default())
    }

    fn flag(&self, name: &str) -> Result<bool, NetworkConfigError> {
        Ok(self.get(name, "true or false")?.unwrap_or_default())
    }

    fn number(&self, name: &str, max: u64) -> Result<Option<u64>, NetworkConfigError> {
        let number = self.get(name, "a whole number")?;
        if let Some(number) = number.filter(|&number| number > max) {
            return Err(NetworkConfigError::value(Self::path(name), format!("{number} is more than {max}")));
        }
        Ok(number)
    }

    /// A port; 0 is the default.
    fn port(&self, name: &str) -> Result<Option<u16>, NetworkConfigError> {
        let port = self.number(name, u16::MAX.into())?;
        Ok(port.filter(|&port| port > 0).map(|port| port as u16))
    }

    fn word<T>(&self, name: &str) -> Result<T, NetworkConfigError>
    where
        T: FromStr<Err = UnknownValue> + Default,
    {
        let word = self.text(name)?;
        if word.is_empty() {
            return Ok(T::default());
        }
        word.parse().map_err(|e: UnknownValue| NetworkConfigError::value(Self::path(name), e.to_string()))
    }
}
