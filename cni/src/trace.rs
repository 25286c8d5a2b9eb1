//! A timed trace of one call, for looking at where its time goes.
//!
//! With `CNI_FELT_LOG=FILE` every step appends one line to FILE: time of day, process, plugin,
//! milliseconds since the start. Without the variable a step costs one load.

use std::fs::File;
use std::io::Write;
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

struct Trace {
    file: File,
    plugin: &'static str,
    began: Instant,
}

static TRACE: OnceLock<Option<Trace>> = OnceLock::new();

/// Opens the file named by `CNI_FELT_LOG`, if any. A file that cannot be opened traces nothing: a
/// trace must not fail a call.
pub fn start(plugin: &'static str) {
    TRACE.get_or_init(|| {
        let path = std::env::var_os("CNI_FELT_LOG").filter(|p| !p.is_empty())?;
        let file = File::options().append(true).create(true).open(path).ok()?;
        Some(Trace { file, plugin, began: Instant::now() })
    });
}

/// Writes one line; `text` is only made when tracing.
pub fn step(text: impl FnOnce() -> String) {
    let Some(Some(trace)) = TRACE.get() else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let line = format!(
        "{}.{:06} {} {} +{:.3}ms {}\n",
        now.as_secs(),
        now.subsec_micros(),
        std::process::id(),
        trace.plugin,
        trace.began.elapsed().as_secs_f64() * 1000.0,
        text()
    );
    let _ = (&trace.file).write_all(line.as_bytes());
}
