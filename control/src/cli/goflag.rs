//! Go's `flag` syntax: words to (name, value) pairs, values to numbers, and the usage text.
//!
//! Messages are those of the Go package, since wrappers and people search for them.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::time::Duration;

/// How a flag takes its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A value only after `=`; alone it means true.
    Bool,
    /// Any text.
    Text,
    /// A number.
    Int,
    /// A type with a syntax of its own; shown as `value`.
    Value,
    /// A duration, or minutes as a plain number.
    Span,
}

/// One flag of the table.
#[derive(Debug)]
pub(super) struct Flag {
    /// Name without dashes.
    pub(super) name: &'static str,
    /// How it takes its value.
    pub(super) kind: Kind,
    /// Default as the usage text shows it; empty for a zero value.
    pub(super) default: &'static str,
    /// What it does.
    pub(super) usage: &'static str,
    /// Whether its value must not be shown.
    pub(super) secret: bool,
}

/// How far the words went.
#[derive(Debug)]
pub(super) enum Scan {
    /// All flags were set; these were named.
    Done(HashSet<&'static str>),
    /// `-h` or `-help` was met.
    Help,
}

/// Walks over `words` and calls `set` for each flag in order.
pub(super) fn scan<I>(
    words: I,
    table: &'static [Flag],
    set: &mut dyn FnMut(&str, &str) -> Result<(), String>,
) -> Result<Scan, String>
where
    I: IntoIterator<Item = String>,
{
    let mut named = HashSet::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let Some(body) = word.strip_prefix('-').filter(|body| !body.is_empty()) else { break };
        if body == "-" {
            break;
        }
        let body = body.strip_prefix('-').unwrap_or(body);
        if body.is_empty() || body.starts_with(['-', '=']) {
            return Err(format!("bad flag syntax: {word}"));
        }
        let (name, value) = body.split_once('=').map_or((body, None), |(n, v)| (n, Some(v.to_owned())));
        let Some(flag) = table.iter().find(|flag| flag.name == name) else {
            if matches!(name, "h" | "help") {
                return Ok(Scan::Help);
            }
            return Err(format!("flag provided but not defined: -{name}"));
        };
        let value = match value {
            Some(value) => value,
            None if flag.kind == Kind::Bool => "true".to_owned(),
            None => words.next().ok_or_else(|| format!("flag needs an argument: -{name}"))?,
        };
        set(flag.name, &value).map_err(|reason| {
            let shown = if flag.secret { "***" } else { value.as_str() };
            match flag.kind {
                Kind::Bool => format!("invalid boolean value {shown:?} for -{name}: {reason}"),
                _ => format!("invalid value {shown:?} for flag -{name}: {reason}"),
            }
        })?;
        named.insert(flag.name);
    }
    Ok(Scan::Done(named))
}

/// The usage text in the layout of Go's `PrintDefaults`.
pub(super) fn usage(program: &str, table: &[Flag]) -> String {
    let mut text = format!("Usage: {program} [OPTION]...\n");
    for flag in table {
        let _ = write!(text, "  -{}", flag.name);
        match flag.kind {
            Kind::Bool => {}
            Kind::Text => text.push_str(" string"),
            Kind::Int => text.push_str(" int"),
            Kind::Value => text.push_str(" value"),
            Kind::Span => text.push_str(" duration"),
        }
        let _ = write!(text, "\n    \t{}", flag.usage);
        match flag.kind {
            _ if flag.default.is_empty() => {}
            Kind::Text => drop(write!(text, " (default {:?})", flag.default)),
            _ => drop(write!(text, " (default {})", flag.default)),
        }
        text.push('\n');
    }
    text
}

const PARSE_ERROR: &str = "parse error";

/// The words Go's `strconv.ParseBool` takes.
pub(super) fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(PARSE_ERROR.to_owned()),
    }
}

/// A number as Go writes it in source: decimal, `0x`, `0o`, `0b`, a leading zero for octal, `_` between digits.
pub(super) fn parse_int(text: &str) -> Result<i64, String> {
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let lower = digits.to_ascii_lowercase();
    let (radix, rest) = match lower.as_bytes() {
        [b'0', b'x', ..] => (16, &lower[2..]),
        [b'0', b'o', ..] => (8, &lower[2..]),
        [b'0', b'b', ..] => (2, &lower[2..]),
        [b'0', _, ..] => (8, &lower[1..]),
        _ => (10, lower.as_str()),
    };
    let plain = rest.replace('_', "");
    if plain.is_empty() || plain.starts_with(['+', '-']) || rest.ends_with('_') || rest.contains("__") {
        return Err(PARSE_ERROR.to_owned());
    }
    let sign = if negative { "-" } else { "" };
    i64::from_str_radix(&format!("{sign}{plain}"), radix).map_err(|_| PARSE_ERROR.to_owned())
}

/// A positive duration in Go's form (`90s`, `1h30m`, `1.5h`), or a plain number of minutes.
///
/// # Errors
/// When the text has another form, or the value is negative or absurdly long.
pub fn parse_go_duration(text: &str) -> Result<Duration, String> {
    if let Ok(minutes) = parse_int(text) {
        let seconds = u64::try_from(minutes).ok().and_then(|minutes| minutes.checked_mul(60));
        return seconds.map(Duration::from_secs).ok_or_else(|| "must not be negative".to_owned());
    }
    let bad = || "want a duration such as 90s, 20m or 24h, or a number of minutes".to_owned();
    let mut rest = text;
    let mut total = 0f64;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let number: f64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = &rest[digits..];
        let unit_len = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let scale = match &rest[..unit_len] {
            "ns" => 1e-9,
            "us" | "\u{b5}s" | "\u{3bc}s" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return Err(bad()),
        };
        rest = &rest[unit_len..];
        total += number * scale;
    }
    Duration::try_from_secs_f64(total).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_gos_forms() {
        for (text, value) in [
            ("0", 0),
            ("42", 42),
            ("-7", -7),
            ("+7", 7),
            ("0x1F", 31),
            ("0b101", 5),
            ("017", 15),
            ("1_000", 1000),
        ] {
            assert_eq!(parse_int(text), Ok(value), "{text}");
        }
        for text in ["", "-", "x", "1.5", "08", "1__0", "1_", "--1", "0x", "99999999999999999999"] {
            assert!(parse_int(text).is_err(), "{text} was accepted");
        }
    }

    #[test]
    fn durations_have_gos_forms() {
        for (text, millis) in [("300ms", 300), ("1h0m1.5s", 3_601_500), ("3", 180_000), ("0s", 0)] {
            assert_eq!(parse_go_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "s", "3x", "1.2.3s", "-1s", "-1", "3s4", "1e9h"] {
            assert!(parse_go_duration(text).is_err(), "{text} was accepted");
        }
    }
}
