//! Ethernet addresses.

use std::fmt;
use std::str::FromStr;

/// A 48-bit Ethernet address; text form is lower-case hex with colons.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// `ff:ff:ff:ff:ff:ff`.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// The six bytes.
    pub fn octets(self) -> [u8; 6] {
        self.0
    }

    /// Whether it is neither zero nor a group address, so that a device can carry it.
    pub fn is_unicast(self) -> bool {
        self.0[0] & 0x01 == 0 && self.0 != [0; 6]
    }

    /// Makes a unicast, locally administered address of six (random) bytes.
    pub fn local_from(mut bytes: [u8; 6]) -> Self {
        bytes[0] = (bytes[0] & 0xfe) | 0x02;
        Self(bytes)
    }

    pub(crate) fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is not a 48-bit Ethernet address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an Ethernet address")]
pub struct ParseMacError(String);

impl FromStr for MacAddr {
    type Err = ParseMacError;

    /// Accepts six two-digit hex groups separated by `:` or by `-`, in either case.
    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        let fail = || ParseMacError(text.to_owned());
        let separator = if text.contains('-') { '-' } else { ':' };
        let mut bytes = [0u8; 6];
        let mut parts = text.split(separator);
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(fail)?;
            if part.len() != 2 || !part.bytes().all(|c| c.is_ascii_hexdigit()) {
                return Err(fail());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| fail())?;
        }
        if parts.next().is_some() {
            return Err(fail());
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_round_trip() {
        let mac: MacAddr = "0A:1b:2c:3d:4e:5f".parse().unwrap();
        assert_eq!(mac.to_string(), "0a:1b:2c:3d:4e:5f");
        assert_eq!("0a-1b-2c-3d-4e-5f".parse::<MacAddr>().unwrap(), mac);
        for bad in ["", "0a:1b:2c:3d:4e", "0a:1b:2c:3d:4e:5f:60", "+a:1b:2c:3d:4e:5f", "0a:1b:2c:3d:4e:5"] {
            assert!(bad.parse::<MacAddr>().is_err(), "{bad}");
        }
    }

    #[test]
    fn local_addresses_are_unicast() {
        let mac = MacAddr::local_from([0xff; 6]);
        assert_eq!(mac.0[0], 0xfe);
        assert!(mac.is_unicast());
        assert!(!MacAddr::BROADCAST.is_unicast());
        assert!(!MacAddr::default().is_unicast());
    }
}
