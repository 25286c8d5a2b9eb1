//! JSON as the plugins' callers expect it.
//!
//! The reference plugins are written in Go, and runtimes, operators and stored files rely on the
//! habits of Go's `encoding/json`: keys match without regard to case, of equal keys the last one
//! wins, `null` leaves a default, `<`, `>` and `&` are escaped, objects keep the order in which a
//! program wrote them. [`Value`] keeps the order of keys (which `serde_json::Value` does not), and
//! [`Fields`] reads typed members with Go's rules and error texts. Parsing itself is `serde_json`'s.

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt::{self, Write as _};

use crate::types::error::Error;

/// A JSON value whose objects keep the order and the repetitions of their keys.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// Any number; integers keep 64 bits.
    Number(serde_json::Number),
    /// A string.
    String(String),
    /// An array.
    Array(Vec<Value>),
    /// An object in source order.
    Object(Object),
}

/// An object: pairs in source order. Reading takes the last of equal keys.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Object(Vec<(String, Value)>);

impl Object {
    /// An empty object.
    pub fn new() -> Self {
        Self::default()
    }

    /// The value of `key`, spelled exactly so.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    /// The value Go would store in the struct member tagged `key`: the last non-null pair whose key
    /// is equal without regard to case.
    pub fn get_folded(&self, key: &str) -> Option<&Value> {
        self.0.iter().rev().find(|(k, v)| k.eq_ignore_ascii_case(key) && *v != Value::Null).map(|(_, v)| v)
    }

    /// Sets `key`, replacing any pair of exactly this name.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.0.retain(|(k, _)| k != key);
        self.0.push((key.to_owned(), value.into()));
    }

    /// Sets `key`, replacing every pair Go would have read into the same struct member.
    pub fn set_folded(&mut self, key: &str, value: impl Into<Value>) {
        self.0.retain(|(k, _)| !k.eq_ignore_ascii_case(key));
        self.0.push((key.to_owned(), value.into()));
    }

    /// Removes every pair of exactly this name.
    pub fn remove(&mut self, key: &str) {
        self.0.retain(|(k, _)| k != key);
    }

    /// Appends without looking for an equal key; for writers that list each key once.
    pub fn push(&mut self, key: &str, value: impl Into<Value>) {
        self.0.push((key.to_owned(), value.into()));
    }

    /// Pairs in source order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// Whether there is no pair.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Value {
    /// Parses a document. Bytes that are not UTF-8 become U+FFFD, as in Go.
    ///
    /// # Errors
    /// The text of the parser; `unexpected end of JSON input` for empty or cut input.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_str(&String::from_utf8_lossy(bytes)).map_err(|err| {
            if err.is_eof() {
                "unexpected end of JSON input".to_owned()
            } else {
                format!("invalid JSON: {err}")
            }
        })
    }

    /// Go's word for the kind of value, used in its error texts.
    pub fn kind(&self) -> String {
        match self {
            Self::Null => "null".into(),
            Self::Bool(_) => "bool".into(),
            Self::Number(_) => "number".into(),
            Self::String(_) => "string".into(),
            Self::Array(_) => "array".into(),
            Self::Object(_) => "object".into(),
        }
    }

    /// The object, if it is one.
    pub fn as_object(&self) -> Option<&Object> {
        if let Self::Object(o) = self { Some(o) } else { None }
    }

    /// The string, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(s) = self { Some(s) } else { None }
    }

    /// One line, no spaces, keys in the order they were written.
    pub fn to_compact(&self) -> String {
        let mut out = String::new();
        write_value(&mut out, self, None, 0);
        out
    }

    /// Four spaces per level, no newline at the end.
    pub fn to_indented(&self) -> String {
        self.to_indented_by(4)
    }

    /// `width` spaces per level, no newline at the end.
    pub fn to_indented_by(&self, width: usize) -> String {
        let mut out = String::new();
        write_value(&mut out, self, Some(width), 0);
        out
    }

    /// The same value as Go writes it from a `map`: keys sorted, of equal keys the last.
    #[must_use]
    pub fn sorted(&self) -> Self {
        match self {
            Self::Array(items) => Self::Array(items.iter().map(Self::sorted).collect()),
            Self::Object(o) => {
                let map: std::collections::BTreeMap<&str, &Value> = o.iter().collect();
                Self::Object(Object(map.into_iter().map(|(k, v)| (k.to_owned(), v.sorted())).collect()))
            }
            other => other.clone(),
        }
    }
}

impl From<bool> for Value {
    fn from(v: bool) -> Self {
        Self::Bool(v)
    }
}
impl From<&str> for Value {
    fn from(v: &str) -> Self {
        Self::String(v.to_owned())
    }
}
impl From<String> for Value {
    fn from(v: String) -> Self {
        Self::String(v)
    }
}
impl From<u64> for Value {
    fn from(v: u64) -> Self {
        Self::Number(v.into())
    }
}
impl From<u32> for Value {
    fn from(v: u32) -> Self {
        Self::Number(v.into())
    }
}
impl From<i64> for Value {
    fn from(v: i64) -> Self {
        Self::Number(v.into())
    }
}
impl From<Object> for Value {
    fn from(v: Object) -> Self {
        Self::Object(v)
    }
}
impl From<Vec<Value>> for Value {
    fn from(v: Vec<Value>) -> Self {
        Self::Array(v)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(de: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
                Ok(Value::Bool(v))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
                Ok(Value::Number(v.into()))
            }
            fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
                Ok(Value::Number(v.into()))
            }
            fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
                Ok(serde_json::Number::from_f64(v).map_or(Value::Null, Value::Number))
            }
            fn visit_str<E>(self, v: &str) -> Result<Value, E> {
                Ok(Value::String(v.to_owned()))
            }
            fn visit_string<E>(self, v: String) -> Result<Value, E> {
                Ok(Value::String(v))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Value::Array(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Value::Object(Object(pairs)))
            }
        }
        de.deserialize_any(V)
    }
}

fn write_value(out: &mut String, value: &Value, indent: Option<usize>, depth: usize) {
    let newline = |out: &mut String, depth: usize| {
        if let Some(width) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Number(n) => match n.as_f64() {
            // Go prints a float without a fraction as an integer.
            Some(f) if !n.is_i64() && !n.is_u64() && f.fract() == 0.0 && f.abs() < 1e21 => {
                let _ = write!(out, "{f:.0}");
            }
            _ => {
                let _ = write!(out, "{n}");
            }
        },
        Value::String(s) => write_string(out, s),
        Value::Array(items) if items.is_empty() => out.push_str("[]"),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                newline(out, depth + 1);
                write_value(out, item, indent, depth + 1);
            }
            newline(out, depth);
            out.push(']');
        }
        Value::Object(o) if o.is_empty() => out.push_str("{}"),
        Value::Object(o) => {
            out.push('{');
            for (i, (key, item)) in o.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                newline(out, depth + 1);
                write_string(out, key);
                out.push_str(if indent.is_some() { ": " } else { ":" });
                write_value(out, item, indent, depth + 1);
            }
            newline(out, depth);
            out.push('}');
        }
    }
}

fn write_string(out: &mut String, s: &str) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..='\u{1f}' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Typed access to an object the way Go fills a struct of type `of`.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    object: &'a Object,
    of: &'a str,
}

impl<'a> Fields<'a> {
    /// Views `value` as struct `of`; `null` counts as an empty object.
    ///
    /// # Errors
    /// Go's text when `value` is not an object.
    pub fn of(of: &'a str, value: &'a Value) -> Result<Self, Error> {
        static EMPTY: Object = Object(Vec::new());
        match value {
            Value::Object(object) => Ok(Self { object, of }),
            Value::Null => Ok(Self { object: &EMPTY, of }),
            other => Err(Error::internal(format!(
                "json: cannot unmarshal {} into Go value of type {of}",
                other.kind()
            ))),
        }
    }

    /// The underlying object.
    pub fn object(&self) -> &'a Object {
        self.object
    }

    /// The raw member.
    pub fn raw(&self, key: &str) -> Option<&'a Value> {
        self.object.get_folded(key)
    }

    /// Go's text for a member of the wrong type, after what the plugin that reads such a struct says first.
    pub fn mismatch(&self, key: &str, value: &Value, want: &str) -> Error {
        let kind = match value {
            Value::Number(n) if want != "string" && want != "bool" => format!("number {n}"),
            other => other.kind(),
        };
        let load = match self.of {
            "NetConf" | "TuningConf" | "FirewallNetConf" => "failed to load netconf: ",
            "PluginConf" | "PluginConf.BandwidthEntry" | "PortMapConf" => {
                "failed to parse network configuration: "
            }
            _ => "",
        };
        Error::internal(format!(
            "{load}json: cannot unmarshal {kind} into Go struct field {}.{key} of type {want}",
            self.of
        ))
    }

    /// A string member.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn string(&self, key: &str) -> Result<Option<&'a str>, Error> {
        match self.raw(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.mismatch(key, other, "string")),
        }
    }

    /// A string member, empty when absent.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn string_or_empty(&self, key: &str) -> Result<String, Error> {
        Ok(self.string(key)?.unwrap_or_default().to_owned())
    }

    /// A boolean member.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.raw(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => Err(self.mismatch(key, other, "bool")),
        }
    }

    /// A boolean member, false when absent.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn flag(&self, key: &str) -> Result<bool, Error> {
        Ok(self.bool(key)?.unwrap_or(false))
    }

    /// An integer member.
    ///
    /// # Errors
    /// When it is of another type or has a fraction.
    pub fn int(&self, key: &str) -> Result<Option<i64>, Error> {
        match self.raw(key) {
            None => Ok(None),
            Some(Value::Number(n)) if n.as_i64().is_some() => Ok(n.as_i64()),
            Some(other) => Err(self.mismatch(key, other, "int")),
        }
    }

    /// An unsigned integer member.
    ///
    /// # Errors
    /// When it is of another type, negative, or has a fraction.
    pub fn uint(&self, key: &str) -> Result<Option<u64>, Error> {
        match self.raw(key) {
            None => Ok(None),
            Some(Value::Number(n)) if n.as_u64().is_some() => Ok(n.as_u64()),
            Some(other) => Err(self.mismatch(key, other, "uint64")),
        }
    }

    /// An array member, empty when absent.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn array(&self, key: &str) -> Result<&'a [Value], Error> {
        self.array_of(key, "interface {}")
    }

    /// An array member whose items are of Go's type `of`, empty when absent.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn array_of(&self, key: &str, of: &str) -> Result<&'a [Value], Error> {
        match self.raw(key) {
            None => Ok(&[]),
            Some(Value::Array(items)) => Ok(items),
            Some(other) => Err(self.mismatch(key, other, &format!("[]{of}"))),
        }
    }

    /// An array of strings, `None` when absent.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<String>>, Error> {
        match self.raw(key) {
            None => Ok(None),
            Some(Value::Array(items)) => items
                .iter()
                .map(|item| match item {
                    Value::String(s) => Ok(s.clone()),
                    other => Err(self.mismatch(key, other, "string")),
                })
                .collect::<Result<Vec<_>, _>>()
                .map(Some),
            Some(other) => Err(self.mismatch(key, other, "[]string")),
        }
    }

    /// An object member as struct `of`, `None` when absent.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn object_of(&self, key: &str, of: &'a str) -> Result<Option<Fields<'a>>, Error> {
        match self.raw(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Fields { object, of })),
            Some(other) => Err(self.mismatch(key, other, of)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Value {
        Value::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn keys_match_without_case_and_the_last_one_wins() {
        let v = parse(r#"{"MTU":1,"mtu":2,"Mtu":null}"#);
        assert_eq!(Fields::of("NetConf", &v).unwrap().int("mtu").unwrap(), Some(2));
        let v = parse(r#"{"mtu":2,"MTU":1}"#);
        assert_eq!(Fields::of("NetConf", &v).unwrap().int("mtu").unwrap(), Some(1));
    }

    #[test]
    fn wrong_types_are_named_as_go_names_them() {
        let v = parse(r#"{"mtu":"x","b":1,"s":3}"#);
        let f = Fields::of("NetConf", &v).unwrap();
        assert_eq!(
            f.int("mtu").unwrap_err().msg,
            "failed to load netconf: json: cannot unmarshal string into Go struct field NetConf.mtu of type int"
        );
        assert!(f.bool("b").is_err());
        assert!(f.string("s").unwrap_err().msg.contains("cannot unmarshal number into"));
    }

    #[test]
    fn writes_go_escapes_and_order() {
        let v = parse(r#"{"b":"<&>\u0001\n\"\\","a":[],"c":{},"d":[1,2.0,{"x":null}]}"#);
        assert_eq!(
            v.to_compact(),
            r#"{"b":"\u003c\u0026\u003e\u0001\n\"\\","a":[],"c":{},"d":[1,2,{"x":null}]}"#
        );
        assert_eq!(v.sorted().to_compact().find("\"a\""), Some(1));
        assert_eq!(parse(r#"{"a":[1]}"#).to_indented(), "{\n    \"a\": [\n        1\n    ]\n}");
    }

    #[test]
    fn cut_or_empty_input_is_an_end_of_input() {
        for text in ["", "{", "{\"a\":", "[1,"] {
            assert_eq!(Value::parse(text.as_bytes()).unwrap_err(), "unexpected end of JSON input", "{text}");
        }
        for text in ["\u{feff}{}", "{}\0", "nul", "{} x", "{'a':1}"] {
            assert!(Value::parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn bytes_that_are_not_utf8_become_replacement_characters() {
        assert_eq!(Value::parse(b"\"a\xffb\"").unwrap(), Value::String("a\u{fffd}b".into()));
    }
}
