//! `CNI_ARGS`: `KEY=VALUE` pairs joined by semicolons.

use super::error::{Error, Result};

/// The pairs a plugin knows, in the order given.
///
/// Keys are compared exactly. A pair the plugin does not know is an error unless the string also
/// says `IgnoreUnknown=1` (or `true`), wherever that stands.
///
/// # Errors
/// The reference's texts for a malformed pair, an unknown key or a bad boolean.
pub fn parse<'a>(text: &'a str, known: &[&str]) -> Result<Vec<(&'a str, &'a str)>> {
    let mut found = Vec::new();
    let mut unknown = Vec::new();
    let mut ignore = false;
    if text.is_empty() {
        return Ok(found);
    }
    for pair in text.split(';') {
        let mut pieces = pair.split('=');
        let (Some(key), Some(value), None) = (pieces.next(), pieces.next(), pieces.next()) else {
            return Err(Error::internal(format!("ARGS: invalid pair {pair:?}")));
        };
        if key == "IgnoreUnknown" {
            ignore = match value.to_ascii_lowercase().as_str() {
                "1" | "true" => true,
                "0" | "false" => false,
                _ => {
                    return Err(Error::internal(format!(
                        "ARGS: error parsing value of pair {pair:?}: boolean unmarshal error: invalid input {value}"
                    )));
                }
            };
        } else if known.contains(&key) {
            found.push((key, value));
        } else {
            unknown.push(format!("{pair:?}"));
        }
    }
    if !unknown.is_empty() && !ignore {
        return Err(Error::internal(format!("ARGS: unknown args [{}]", unknown.join(" "))));
    }
    Ok(found)
}

/// The last value of `key` among parsed pairs.
pub fn last<'a>(pairs: &[(&str, &'a str)], key: &str) -> Option<&'a str> {
    pairs.iter().rev().find(|(k, _)| *k == key).map(|(_, v)| *v)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_need_permission_which_may_come_last() {
        assert_eq!(parse("A=1;B=2", &["MAC"]).unwrap_err().msg, "ARGS: unknown args [\"A=1\" \"B=2\"]");
        assert_eq!(parse("A=1;MAC=x;IgnoreUnknown=TRUE", &["MAC"]).unwrap(), [("MAC", "x")]);
        assert!(parse("mac=x", &["MAC"]).is_err(), "keys are case-sensitive");
    }

    #[test]
    fn malformed_pairs_are_named() {
        for text in ["A", "A=1=2", "MAC=x;"] {
            assert!(parse(text, &["A", "MAC"]).unwrap_err().msg.starts_with("ARGS: invalid pair"), "{text}");
        }
        assert_eq!(
            parse("IgnoreUnknown=yes", &[]).unwrap_err().msg,
            "ARGS: error parsing value of pair \"IgnoreUnknown=yes\": boolean unmarshal error: invalid input yes"
        );
    }
}
