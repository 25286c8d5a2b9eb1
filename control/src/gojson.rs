//! JSON objects read as Go's `encoding/json` reads them into a struct.
//!
//! flannel's configuration and lease values were always decoded by Go: keys match without regard to case, of two
//! equal keys the last one counts, unknown keys are ignored, and anything after the value is an error. Operators
//! rely on the first rule ("network", "Directrouting"), so every reader of such text goes through [`Object`].

use std::fmt::{self, Write as _};

use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The members of one JSON object in the order of the text, values still unparsed.
#[derive(Debug, Default)]
pub struct Object(Vec<(String, Box<RawValue>)>);

impl Object {
    /// Parses `text`, which must hold exactly one JSON object.
    ///
    /// # Errors
    /// When the text is no JSON, holds something else than an object, or goes on after it.
    pub fn parse(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str(text)
    }

    /// The value of the last member whose key equals `name` under Go's case folding.
    pub fn raw(&self, name: &str) -> Option<&RawValue> {
        self.0.iter().rev().find(|(key, _)| keys_fold_equal(key, name)).map(|(_, value)| value.as_ref())
    }

    /// The value of `name` decoded, `None` when the key is missing or its value is `null`.
    ///
    /// # Errors
    /// When the value has another JSON type or does not fit `T`.
    pub fn field<T: DeserializeOwned>(&self, name: &str) -> serde_json::Result<Option<T>> {
        self.raw(name).map_or(Ok(None), |raw| serde_json::from_str(raw.get()))
    }

    /// Keys and values in the order of the text.
    pub fn members(&self) -> impl Iterator<Item = (&str, &RawValue)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_ref()))
    }
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Object;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry::<String, Box<RawValue>>()? {
                    members.push(member);
                }
                Ok(Object(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// Whether two keys are the same under the folding Go applies to ASCII field names.
///
/// Besides the letters A-Z two runes fold to ASCII: U+017F (long s) to `s` and U+212A (Kelvin sign) to `k`.
pub fn keys_fold_equal(a: &str, b: &str) -> bool {
    a.chars().map(fold).eq(b.chars().map(fold))
}

fn fold(c: char) -> char {
    match c {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        _ => c.to_ascii_lowercase(),
    }
}

/// Appends `json` without insignificant white space and with the escapes Go's encoder makes for HTML's sake.
pub fn push_compact(out: &mut String, json: &str) {
    let (mut in_string, mut escaped) = (false, false);
    for c in json.chars() {
        match c {
            ' ' | '\t' | '\n' | '\r' if !in_string => continue,
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => drop(write!(out, "\\u{:04x}", u32::from(c))),
            _ => out.push(c),
        }
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = in_string,
            '"' => in_string = !in_string,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_of_two_equal_keys_wins_without_regard_to_case() {
        let object = Object::parse(r#"{"Network":"a","network":"b","NETWORK":"c","other":1}"#).unwrap();
        assert_eq!(object.field::<String>("Network").unwrap().unwrap(), "c");
        assert_eq!(object.field::<u8>("OTHER").unwrap(), Some(1));
        assert_eq!(object.field::<u8>("missing").unwrap(), None);
    }

    #[test]
    fn folds_the_two_runes_outside_ascii_that_go_folds() {
        assert!(keys_fold_equal("\u{17f}ubnetLen", "SubnetLen"));
        assert!(keys_fold_equal("bac\u{212a}end", "Backend"));
        assert!(!keys_fold_equal("Subnet", "SubnetLen"));
    }

    #[test]
    fn rejects_trailing_text_and_other_types() {
        for text in ["{} x", "{}{}", "[]", "null", "\"x\"", "", "{\"a\":}", "\u{feff}{}"] {
            assert!(Object::parse(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn null_reads_as_missing() {
        let object = Object::parse(r#"{"a":null}"#).unwrap();
        assert_eq!(object.field::<bool>("a").unwrap(), None);
        assert_eq!(object.raw("a").unwrap().get(), "null");
    }
}
