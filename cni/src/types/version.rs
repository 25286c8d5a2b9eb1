//! Versions of the CNI specification.

use std::fmt;

/// Versions whose result shapes felt can read and write, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SpecVersion {
    /// 0.1.0
    V0_1_0,
    /// 0.2.0
    V0_2_0,
    /// 0.3.0
    V0_3_0,
    /// 0.3.1
    V0_3_1,
    /// 0.4.0
    V0_4_0,
    /// 1.0.0
    V1_0_0,
    /// 1.1.0
    V1_1_0,
}

/// The three families of result shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `ip4`, `ip6`, `dns`
    Legacy,
    /// `interfaces`, `ips` with a `version`, `routes`, `dns`
    Versioned,
    /// As [`Shape::Versioned`], without the `version` of an address
    Current,
}

impl SpecVersion {
    /// Every version, oldest first.
    pub const ALL: &'static [Self] =
        &[Self::V0_1_0, Self::V0_2_0, Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    /// The newest one.
    pub const NEWEST: Self = Self::V1_1_0;

    /// The text in configs and results.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_1_0 => "0.1.0",
            Self::V0_2_0 => "0.2.0",
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// The version spelled exactly so; the empty text is 0.1.0.
    pub fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::V0_1_0);
        }
        Self::ALL.iter().copied().find(|v| v.as_str() == text)
    }

    /// How results of this version look.
    pub fn shape(self) -> Shape {
        match self {
            Self::V0_1_0 | Self::V0_2_0 => Shape::Legacy,
            Self::V0_3_0 | Self::V0_3_1 | Self::V0_4_0 => Shape::Versioned,
            Self::V1_0_0 | Self::V1_1_0 => Shape::Current,
        }
    }
}

impl fmt::Display for SpecVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Numbers of a version text for comparisons; `1` and `1.0` are accepted, a fourth part is not.
///
/// # Errors
/// The reference's text for a malformed version.
pub fn numbers(text: &str) -> Result<[u64; 3], String> {
    if text.is_empty() {
        return Ok([0, 1, 0]);
    }
    let parts: Vec<&str> = text.split('.').collect();
    if parts.len() > 3 {
        return Err(format!("invalid version \"{text}\": too many parts"));
    }
    let mut out = [0; 3];
    for ((slot, part), name) in out.iter_mut().zip(&parts).zip(["major", "minor", "micro"]) {
        *slot = part.parse().map_err(|_| {
            format!(
                "failed to convert {name} version part \"{part}\": strconv.Atoi: parsing \"{part}\": invalid syntax"
            )
        })?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_spellings_are_versions() {
        assert_eq!(SpecVersion::parse(""), Some(SpecVersion::V0_1_0));
        assert_eq!(SpecVersion::parse("1.1.0"), Some(SpecVersion::V1_1_0));
        assert_eq!(SpecVersion::parse("1.0"), None);
        for v in SpecVersion::ALL {
            assert_eq!(SpecVersion::parse(v.as_str()), Some(*v));
        }
    }

    #[test]
    fn compares_by_numbers() {
        assert!(numbers("1.10.0").unwrap() > numbers("1.9").unwrap());
        assert!(numbers("a").is_err());
        assert!(numbers("1.2.3.4").is_err());
    }
}
