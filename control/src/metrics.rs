//! Prometheus text: sums per drop reason and sums per peer.
//!
//! The cross product of peers and reasons stays on the admin socket, so that a cluster of thousands of nodes does not
//! make thousands of series times thirty.

use std::fmt::Write as _;
use std::time::SystemTime;

use crate::api;
use crate::view::View;

/// One family of samples.
struct Family<'a> {
    out: &'a mut String,
    name: &'static str,
}

impl<'a> Family<'a> {
    fn new(out: &'a mut String, name: &'static str, kind: &str, help: &str) -> Self {
        // Writing to a String cannot fail; here and below.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Self { out, name }
    }

    fn sample(&mut self, labels: &[(&str, &str)], value: impl std::fmt::Display) -> &mut Self {
        self.out.push_str(self.name);
        for (at, (label, text)) in labels.iter().enumerate() {
            let open = if at == 0 { '{' } else { ',' };
            let _ = write!(self.out, "{open}{label}=\"{}\"", escape(text));
        }
        if !labels.is_empty() {
            self.out.push('}');
        }
        let _ = writeln!(self.out, " {value}");
        self
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// All metrics of the daemon.
pub fn render(view: &View) -> String {
    let status = view.status();
    let peers = view.peers().peers;
    let engines = view.counters().engines;
    let mut out = String::with_capacity(4096 + 400 * peers.len());
    node(&mut out, view, &status);
    packets(&mut out, &engines);
    drops(&mut out, &engines);
    events(&mut out, &engines);
    per_peer(&mut out, &peers);
    out
}

fn node(out: &mut String, view: &View, status: &api::Status) {
    let flag = u8::from;
    Family::new(out, "felt_build_info", "gauge", "Version of the program.")
        .sample(&[("version", &status.program)], 1);
    Family::new(out, "felt_ready", "gauge", "Whether /readyz says ready.").sample(&[], flag(status.ready));
    Family::new(out, "felt_uptime_seconds", "gauge", "Time since the start.")
        .sample(&[], view.uptime().as_secs());
    Family::new(out, "felt_leases", "gauge", "Leases of other nodes that are known.")
        .sample(&[], status.peers);
    let (keep, repairs, rules) = {
        let inner = view.lock();
        (inner.keep.clone(), inner.repairs, inner.rules.clone())
    };
    if let Some(end) = keep.expiration {
        let left = end.duration_since(SystemTime::now()).map_or(0.0, |left| left.as_secs_f64());
        Family::new(
            out,
            "felt_lease_expires_seconds",
            "gauge",
            "Time until the own lease ends unless renewed.",
        )
        .sample(&[], format!("{left:.0}"));
    }
    Family::new(out, "felt_lease_renewal_failures", "gauge", "Failed renewals of the own lease in a row.")
        .sample(&[], keep.failures);
    Family::new(out, "felt_watch_deliveries_total", "counter", "Deliveries of the watch on the registry.")
        .sample(&[], status.watch.deliveries);
    if let Some(age) = status.watch.last_event_age_seconds {
        Family::new(out, "felt_watch_age_seconds", "gauge", "Time since the last delivery of the watch.")
            .sample(&[], age);
    }
    Family::new(out, "felt_repairs_total", "counter", "Restorations of devices, addresses and routes.")
        .sample(&[], repairs);
    if let Some(rules) = rules {
        Family::new(out, "felt_rule_repairs_total", "counter", "Restorations of traffic rules.")
            .sample(&[], rules.repairs());
        Family::new(out, "felt_rule_failures_total", "counter", "Failed checks of traffic rules.")
            .sample(&[], rules.failures());
    }
    let Some(backend) = &status.backend else { return };
    Family::new(out, "felt_backend_info", "gauge", "Backend in use.")
        .sample(&[("type", &backend.kind), ("dataplane", &backend.dataplane)], 1);
    Family::new(out, "felt_mtu_bytes", "gauge", "MTU written to the subnet file.").sample(&[], backend.mtu);
    let mut offload = Family::new(out, "felt_offload_info", "gauge", "State of each offload.");
    for device in &backend.devices {
        for (name, state) in &device.offload {
            offload.sample(&[("device", &device.name), ("offload", name), ("state", state)], 1);
        }
    }
}

fn directions(engine: &api::Engine) -> [(&'static str, &api::Direction); 2] {
    [("outbound", &engine.outbound), ("inbound", &engine.inbound)]
}

fn packets(out: &mut String, engines: &[api::Engine]) {
    let mut family = Family::new(out, "felt_packets_total", "counter", "Inner packets forwarded.");
    for engine in engines {
        for (name, direction) in directions(engine) {
            family.sample(&[("device", &engine.device), ("direction", name)], direction.packets);
        }
    }
    let mut family = Family::new(out, "felt_bytes_total", "counter", "Bytes of inner packets forwarded.");
    for engine in engines {
        for (name, direction) in directions(engine) {
            family.sample(&[("device", &engine.device), ("direction", name)], direction.bytes);
        }
    }
    let mut family = Family::new(out, "felt_batches_total", "counter", "Batches of packets.");
    for engine in engines {
        for (name, direction) in directions(engine) {
            family.sample(&[("device", &engine.device), ("direction", name)], direction.batches);
        }
    }
}

fn drops(out: &mut String, engines: &[api::Engine]) {
    let mut family = Family::new(out, "felt_dropped_packets_total", "counter", "Dropped packets by reason.");
    for engine in engines {
        for (name, direction) in directions(engine) {
            for (reason, count) in &direction.drops {
                let labels = [("device", engine.device.as_str()), ("direction", name), ("reason", reason)];
                family.sample(&labels, count);
            }
        }
    }
}

fn events(out: &mut String, engines: &[api::Engine]) {
    let mut family = Family::new(out, "felt_events_total", "counter", "Further events of the packet loop.");
    for engine in engines {
        for (event, count) in &engine.events {
            family.sample(&[("device", &engine.device), ("event", event)], count);
        }
    }
}

/// Picks one number of a peer.
type Value = fn(&api::PeerTraffic) -> u64;

fn per_peer(out: &mut String, peers: &[api::Peer]) {
    let columns: [(&'static str, &str, Value); 5] = [
        ("felt_peer_out_packets_total", "Inner packets sent to a peer.", |t| t.out_packets),
        ("felt_peer_out_bytes_total", "Bytes of inner packets sent to a peer.", |t| t.out_bytes),
        ("felt_peer_in_packets_total", "Inner packets received from a peer.", |t| t.in_packets),
        ("felt_peer_in_bytes_total", "Bytes of inner packets received from a peer.", |t| t.in_bytes),
        ("felt_peer_dropped_packets_total", "Dropped packets of a peer.", |t| t.drops.values().sum()),
    ];
    for (name, help, value) in columns {
        let mut family = Family::new(out, name, "counter", help);
        for peer in peers {
            if let Some(traffic) = &peer.traffic {
                family.sample(&[("subnet", &peer.key)], value(traffic));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cli::Options;

    #[test]
    fn text_has_prometheus_form() {
        let view = View::new(Arc::new(Options::default()));
        let mut text = render(&view);
        let engine = api::Engine {
            device: "flannel.1".into(),
            outbound: api::Direction {
                packets: 3,
                drops: [("no_route".into(), 2)].into(),
                ..Default::default()
            },
            ..Default::default()
        };
        packets(&mut text, std::slice::from_ref(&engine));
        drops(&mut text, &[engine]);
        let line = regex::Regex::new(
            r#"^(# (HELP|TYPE) felt_[a-z_]+ .+|felt_[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [0-9.]+)$"#,
        )
        .unwrap();
        for text in text.lines() {
            assert!(line.is_match(text), "{text:?}");
        }
        assert!(text.contains("felt_ready 0\n"));
        assert!(text.contains(
            "felt_dropped_packets_total{device=\"flannel.1\",direction=\"outbound\",reason=\"no_route\"} 2\n"
        ));
    }

    #[test]
    fn label_values_are_escaped() {
        assert_eq!(escape("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
