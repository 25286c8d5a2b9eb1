//! Log lines on standard error: klog's header form or one JSON object a line.
//!
//! Levels follow klog: errors, warnings and information always show, `debug!` shows from `-v=1` and `trace!` from
//! `-v=4`; `-vmodule` raises that for single source files. Lines of other crates show from `-v=6`, their warnings
//! always, but those of a client whose failures are reported by its caller.
//!
//! A warning or error that repeats word for word is written once a [`REPEAT_WINDOW`]; the next line that gets through
//! says how many were left out. So a dead registry or peer cannot flood a disk.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use crate::cli::LogFormat;

/// How long an unchanged warning or error stays quiet.
pub const REPEAT_WINDOW: Duration = Duration::from_secs(30);

/// The Kubernetes client logs every failed request as an error. The registry says it once, with what it was for.
const REPORTED_ELSEWHERE: &str = "kube_client";

/// Most different lines remembered; beyond it the oldest knowledge is dropped and lines simply show.
const REMEMBERED: usize = 256;

/// Starts logging for this process.
///
/// # Errors
/// When it was started before.
pub fn init(format: LogFormat, verbosity: i32, vmodule: Vec<(String, i32)>) -> Result<(), String> {
    let layer = LineLayer {
        format,
        verbosity,
        vmodule,
        pid: std::process::id(),
        repeats: Mutex::new(Repeats::default()),
        sink: |line: &str| {
            // Nobody is left to tell when standard error is gone.
            let _ = std::io::stderr().lock().write_all(line.as_bytes());
        },
    };
    let subscriber = tracing_subscriber::registry().with(layer);
    tracing::subscriber::set_global_default(subscriber).map_err(|error| error.to_string())
}

struct LineLayer<W> {
    format: LogFormat,
    verbosity: i32,
    vmodule: Vec<(String, i32)>,
    pid: u32,
    repeats: Mutex<Repeats>,
    sink: W,
}

impl<W> LineLayer<W> {
    fn shows(&self, meta: &Metadata<'_>) -> bool {
        let reported = meta.target().starts_with(REPORTED_ELSEWHERE);
        if *meta.level() <= Level::WARN && !reported {
            return true;
        }
        let ours = meta.target().starts_with("felt");
        let stem = meta.file().map(file_stem).unwrap_or_default();
        let set = self.vmodule.iter().find(|(pattern, _)| glob(pattern, stem)).map(|(_, level)| *level);
        let verbosity = set.unwrap_or(self.verbosity);
        match *meta.level() {
            _ if !ours => verbosity >= 6,
            Level::TRACE => verbosity >= 4,
            Level::DEBUG => verbosity >= 1,
            _ => true,
        }
    }
}

impl<S: Subscriber, W: Fn(&str) + 'static> Layer<S> for LineLayer<W> {
    fn enabled(&self, meta: &Metadata<'_>, _: Context<'_, S>) -> bool {
        meta.is_event() && self.shows(meta)
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let meta = event.metadata();
        let mut text = Text::default();
        event.record(&mut text);
        if *meta.level() <= Level::WARN {
            let Ok(mut repeats) = self.repeats.lock() else { return };
            match repeats.admit(&text.whole(), Instant::now()) {
                None => return,
                Some(0) => {}
                Some(left_out) => text.repeated = left_out,
            }
        }
        let now = jiff::Timestamp::now();
        let line = match self.format {
            LogFormat::Klog => klog_line(meta, &text, now, self.pid),
            LogFormat::Json => json_line(meta, &text, now),
        };
        (self.sink)(&line);
    }
}

/// Message and fields of one event.
#[derive(Default)]
struct Text {
    message: String,
    fields: Vec<(&'static str, String)>,
    repeated: u64,
}

impl Text {
    fn whole(&self) -> String {
        let mut whole = self.message.clone();
        for (name, value) in &self.fields {
            let _ = write!(whole, " {name}={value}");
        }
        whole
    }
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message = value.to_owned();
        } else {
            self.fields.push((field.name(), value.to_owned()));
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

/// `I1201 15:04:05.000000   12345 app.rs:10] text`, the time in UTC, line breaks inside the text escaped.
fn klog_line(meta: &Metadata<'_>, text: &Text, now: jiff::Timestamp, pid: u32) -> String {
    let letter = match *meta.level() {
        Level::ERROR => 'E',
        Level::WARN => 'W',
        _ => 'I',
    };
    let time = now.to_zoned(jiff::tz::TimeZone::UTC);
    let file = meta.file().and_then(|path| path.rsplit('/').next()).unwrap_or("???");
    let mut line = format!(
        "{letter}{:02}{:02} {:02}:{:02}:{:02}.{:06} {pid:7} {file}:{}] ",
        time.month(),
        time.day(),
        time.hour(),
        time.minute(),
        time.second(),
        time.subsec_nanosecond() / 1000,
        meta.line().unwrap_or(0),
    );
    line.push_str(&text.whole().replace('\n', "\\n"));
    if text.repeated > 0 {
        let _ = write!(line, " (and {} times before)", text.repeated);
    }
    line.push('\n');
    line
}

fn json_line(meta: &Metadata<'_>, text: &Text, now: jiff::Timestamp) -> String {
    let mut object = serde_json::Map::new();
    object.insert("time".into(), now.to_string().into());
    object.insert("level".into(), meta.level().as_str().to_ascii_lowercase().into());
    let file = meta.file().and_then(|path| path.rsplit('/').next()).unwrap_or("???");
    object.insert("caller".into(), format!("{file}:{}", meta.line().unwrap_or(0)).into());
    object.insert("message".into(), text.message.as_str().into());
    for (name, value) in &text.fields {
        object.insert((*name).into(), value.as_str().into());
    }
    if text.repeated > 0 {
        object.insert("repeated".into(), text.repeated.into());
    }
    let mut line = serde_json::Value::Object(object).to_string();
    line.push('\n');
    line
}

/// Which lines were written lately.
#[derive(Default)]
struct Repeats(HashMap<String, (Instant, u64)>);

impl Repeats {
    /// `None` to keep quiet, else how many equal lines were left out since the last one.
    fn admit(&mut self, line: &str, now: Instant) -> Option<u64> {
        if let Some((written, left_out)) = self.0.get_mut(line) {
            if now.duration_since(*written) < REPEAT_WINDOW {
                *left_out += 1;
                return None;
            }
            *written = now;
            return Some(std::mem::take(left_out));
        }
        if self.0.len() >= REMEMBERED {
            self.0.retain(|_, (written, _)| now.duration_since(*written) < REPEAT_WINDOW);
            if self.0.len() >= REMEMBERED {
                self.0.clear();
            }
        }
        self.0.insert(line.to_owned(), (now, 0));
        Some(0)
    }
}

fn file_stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.strip_suffix(".rs").unwrap_or(name)
}

/// klog's file patterns: `*` for any text, `?` for one character.
fn glob(pattern: &str, text: &str) -> bool {
    match pattern.chars().next() {
        None => text.is_empty(),
        Some('*') => {
            let rest = &pattern[1..];
            text.char_indices().map(|(at, _)| at).chain([text.len()]).any(|at| glob(rest, &text[at..]))
        }
        Some(first) => match text.chars().next() {
            Some(c) if first == '?' || first == c => {
                glob(&pattern[first.len_utf8()..], &text[c.len_utf8()..])
            }
            _ => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn capture(
        format: LogFormat,
        verbosity: i32,
        vmodule: &[(&str, i32)],
        work: impl FnOnce(),
    ) -> Vec<String> {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let layer = LineLayer {
            format,
            verbosity,
            vmodule: vmodule.iter().map(|(pattern, level)| ((*pattern).to_owned(), *level)).collect(),
            pid: 42,
            repeats: Mutex::new(Repeats::default()),
            sink: move |line: &str| sink.lock().unwrap().push(line.to_owned()),
        };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
        let lines = lines.lock().unwrap();
        lines.clone()
    }

    #[test]
    fn klog_header_has_klogs_columns() {
        let lines = capture(LogFormat::Klog, 0, &[], || tracing::warn!(peer = 7, "lost\nit"));
        let form =
            regex::Regex::new(r"^W\d{4} \d\d:\d\d:\d\d\.\d{6} {6}42 logging\.rs:\d+\] lost\\nit peer=7\n$")
                .unwrap();
        assert!(form.is_match(&lines[0]), "{:?}", lines[0]);
    }

    #[test]
    fn json_lines_are_objects() {
        let lines = capture(LogFormat::Json, 0, &[], || tracing::error!(what = "x", "a \"b\""));
        let value: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!(
            (&value["level"], &value["message"], &value["what"]),
            (&"error".into(), &"a \"b\"".into(), &"x".into())
        );
    }

    #[test]
    fn verbosity_and_vmodule_choose_lines() {
        let work = || {
            tracing::info!("i");
            tracing::debug!("d");
            tracing::trace!("t");
        };
        assert_eq!(capture(LogFormat::Klog, 0, &[], work).len(), 1);
        assert_eq!(capture(LogFormat::Klog, 1, &[], work).len(), 2);
        assert_eq!(capture(LogFormat::Klog, 4, &[], work).len(), 3);
        assert_eq!(capture(LogFormat::Klog, 0, &[("logg*", 9)], work).len(), 3);
        assert_eq!(capture(LogFormat::Klog, 9, &[("logging", 0)], work).len(), 1);
        assert_eq!(capture(LogFormat::Klog, 9, &[], || tracing::info!(target: "hyper", "x")).len(), 1);
        assert_eq!(capture(LogFormat::Klog, 5, &[], || tracing::info!(target: "hyper", "x")).len(), 0);
        assert_eq!(capture(LogFormat::Klog, 0, &[], || tracing::error!(target: "hyper", "x")).len(), 1);
        let reported = || tracing::error!(target: "kube_client::client::builder", "x");
        assert_eq!(capture(LogFormat::Klog, 0, &[], reported).len(), 0);
        assert_eq!(capture(LogFormat::Klog, 6, &[], reported).len(), 1);
    }

    #[test]
    fn equal_warnings_are_written_once_and_counted() {
        let lines = capture(LogFormat::Klog, 0, &[], || {
            for _ in 0..5 {
                tracing::warn!("same");
            }
            tracing::warn!("other");
            tracing::info!("told");
            tracing::info!("told");
        });
        assert_eq!(lines.len(), 4, "{lines:?}");

        let mut repeats = Repeats::default();
        let start = Instant::now();
        assert_eq!(repeats.admit("x", start), Some(0));
        assert_eq!(repeats.admit("x", start + Duration::from_secs(1)), None);
        assert_eq!(repeats.admit("x", start + Duration::from_secs(2)), None);
        assert_eq!(repeats.admit("x", start + REPEAT_WINDOW), Some(2));
    }

    #[test]
    fn memory_of_lines_is_bounded() {
        let mut repeats = Repeats::default();
        for n in 0..10 * REMEMBERED {
            repeats.admit(&n.to_string(), Instant::now());
        }
        assert!(repeats.0.len() <= REMEMBERED);
    }

    #[test]
    fn patterns_match_as_klogs() {
        for (pattern, text, matches) in [
            ("app", "app", true),
            ("a*", "app", true),
            ("*p", "app", true),
            ("a?p", "app", true),
            ("a", "app", false),
        ] {
            assert_eq!(glob(pattern, text), matches, "{pattern} {text}");
        }
    }
}
