//! The plots of a report, as SVG files.
//!
//! | File | What it shows |
//! |---|---|
//! | `throughput.svg` | TCP: a bar for each system, a group for each figure, a panel for each underlay |
//! | `udp.svg` | datagrams delivered against datagrams offered |
//! | `latency.svg` | round trips: median and 99th percentile, idle and under load |
//! | `cost.svg` | processor time per gigabyte, of the daemons and of the whole machine |
//!
//! felt is always in colour, everything it is compared with in greys; numbers stand where the eye ends up, so that no
//! legend has to be looked up.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::bench::figure::{FULL_DATAGRAM, udp_figure};
use crate::bench::report::{Report, Row, number};
use crate::bench::svg::{Anchor, Font, Svg, nice_axis};
use crate::bench::system::{System, Underlay};

const INK: &str = "#1f2933";
const FAINT: &str = "#7b8794";
const GRID: &str = "#e4e7eb";
const TITLE: Font = Font::new(18.0, INK).bold();
const SUBTITLE: Font = Font::new(11.0, FAINT);
const PANEL: Font = Font::new(13.0, INK).bold();
const LABEL: Font = Font::new(12.0, INK);
const SMALL: Font = Font::new(11.0, FAINT);
const MARGIN: f64 = 24.0;
/// Title, subtitle and the space below them.
const HEAD: f64 = 88.0;

fn color(system: System) -> &'static str {
    match system {
        System::Plain => "#c3cad2",
        System::KernelVxlan => "#52606d",
        System::FeltVxlan => "#0967d2",
        System::FeltUdp => "#12a594",
        System::FeltVxlanOff => "#7cb8f5",
        System::FeltUdpOff => "#7fd4c8",
        System::PlainLoop => "#b9a58a",
        System::FlannelUdp => "#8f7a5e",
    }
}

/// Writes every plot the report has figures for.
///
/// # Errors
/// When the directory cannot be made or a file not written.
pub fn write_all(report: &Report, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let plots = [
        ("throughput.svg", throughput(report)),
        ("udp.svg", udp(report)),
        ("latency.svg", latency(report)),
        ("cost.svg", cost(report)),
    ];
    for (name, plot) in plots {
        if let Some(text) = plot {
            let file = dir.join(name);
            fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        }
    }
    Ok(())
}

fn head(svg: &mut Svg, report: &Report, title: &str, subtitle: &str) {
    svg.text(MARGIN, 32.0, TITLE, title);
    let m = &report.machine;
    let s = &report.settings;
    let machine = format!(
        "{} nodes and the load on one machine of {} cores, Linux {}; medians of {} rounds of {} s.",
        s.nodes, m.cores, m.kernel, s.rounds, s.seconds
    );
    svg.text(MARGIN, 51.0, SUBTITLE, subtitle);
    svg.text(MARGIN, 66.0, SUBTITLE, &machine);
}

/// A bar's row in a panel.
struct Bars<'a> {
    x: f64,
    width: f64,
    scale: f64,
    rows: Vec<&'a Row>,
}

/// The figures of [`throughput`] a report has.
fn tcp_figures(report: &Report) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    for r in report.rows.iter().filter(|r| r.figure.starts_with("tcp") && r.unit == "Gbit/s") {
        if !found.iter().any(|(f, _)| *f == r.figure) {
            found.push((r.figure.clone(), r.title.clone()));
        }
    }
    found
}

fn throughput(report: &Report) -> Option<String> {
    const BAR: f64 = 17.0;
    const NAMES: f64 = 160.0;
    let figures = tcp_figures(report);
    let (systems, underlays) = (report.systems(), report.underlays());
    if figures.is_empty() {
        return None;
    }
    let width = if underlays.len() > 1 { 1000.0 } else { 720.0 };
    let group = 26.0 + BAR * systems.len() as f64 + 12.0;
    let height = HEAD + 24.0 + group * figures.len() as f64 + 34.0;
    let title = "TCP from pod to pod, Gbit/s";
    let mut svg = Svg::new(width, height, title);
    head(&mut svg, report, title, "Small figures: ratio to the kernel's vxlan.");
    let panel = (width - MARGIN * 2.0 - NAMES) / underlays.len() as f64;
    for (p, underlay) in underlays.iter().enumerate() {
        let left = MARGIN + NAMES + panel * p as f64;
        svg.text(left, HEAD + 8.0, PANEL, underlay.label());
        let rows =
            |f: &str| systems.iter().filter_map(|s| report.row(underlay.id(), f, *s)).collect::<Vec<_>>();
        let most = figures.iter().flat_map(|(f, _)| rows(f)).map(|r| r.median).fold(0.0, f64::max);
        let (end, step) = nice_axis(most);
        // Room for the numbers behind the longest bar.
        let scale = (panel - 96.0) / end;
        let bottom = HEAD + 20.0 + group * figures.len() as f64;
        let mut tick = 0.0;
        while tick <= end * 1.0001 {
            let x = left + tick * scale;
            svg.line((x, HEAD + 20.0), (x, bottom), GRID, 1.0, false);
            svg.text(x, bottom + 16.0, SMALL.at(Anchor::Middle), &format!("{tick}"));
            tick += step;
        }
        for (g, (figure, name)) in figures.iter().enumerate() {
            let top = HEAD + 24.0 + group * g as f64;
            if p == 0 {
                svg.text(MARGIN, top + 15.0, PANEL, name.trim_start_matches("TCP, "));
                for (i, s) in systems.iter().enumerate() {
                    let y = top + 26.0 + BAR * i as f64;
                    svg.text(left - 10.0, y + 12.0, LABEL.at(Anchor::End), s.label());
                }
            }
            let bars = Bars { x: left, width: BAR, scale, rows: rows(figure) };
            draw_bars(&mut svg, &bars, &systems, top + 26.0);
        }
    }
    Some(svg.finish())
}

fn draw_bars(svg: &mut Svg, bars: &Bars<'_>, systems: &[System], top: f64) {
    for (i, system) in systems.iter().enumerate() {
        let Some(row) = bars.rows.iter().find(|r| r.system == system.id()) else { continue };
        let y = top + bars.width * i as f64;
        let end = bars.x + row.median * bars.scale;
        svg.rect(bars.x, y + 2.0, end - bars.x, bars.width - 4.0, 2.0, color(*system), 1.0);
        // From the worst round to the best.
        let (least, most) = range(row);
        let middle = y + bars.width / 2.0;
        svg.line(
            (bars.x + least * bars.scale, middle),
            (bars.x + most * bars.scale, middle),
            INK,
            1.0,
            false,
        );
        let value = number(row.median);
        let at = end.max(bars.x + most * bars.scale) + 6.0;
        svg.text(at, y + 12.5, LABEL, &value);
        if let Some(r) = row.ratio.filter(|_| *system != System::KernelVxlan) {
            svg.text(at + 8.0 + 7.0 * value.len() as f64, y + 12.5, SMALL, &format!("{r:.2}"));
        }
    }
}

fn range(row: &Row) -> (f64, f64) {
    let all = row.values.iter().copied().flatten();
    all.fold((f64::INFINITY, 0.0), |(a, b), v| (a.min(v), b.max(v)))
}

/// Offered and delivered datagrams a second of one system, by rising offer.
fn udp_curve(report: &Report, underlay: Underlay, size: u16, system: System) -> Vec<(f64, f64)> {
    let prefix = udp_figure(size, 0);
    let prefix = prefix.trim_end_matches("max");
    let mut points: Vec<(f64, f64)> = report
        .rows
        .iter()
        .filter(|r| r.underlay == underlay.id() && r.system == system.id() && r.unit == "packets/s")
        .filter(|r| r.figure.starts_with(prefix) && !r.figure.ends_with("-offered"))
        .filter_map(|r| {
            let offered = report.row(underlay.id(), &format!("{}-offered", r.figure), system)?;
            Some((offered.median, r.median))
        })
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

fn udp(report: &Report) -> Option<String> {
    const PANEL_HEIGHT: f64 = 300.0;
    const WIDTH: f64 = 1000.0;
    let sizes = [(64, "64-byte datagrams"), (FULL_DATAGRAM, "datagrams that fill the MTU")];
    let underlays = report.underlays();
    let any = |u: &Underlay, size| report.systems().iter().any(|s| udp_curve(report, *u, size, *s).len() > 1);
    let underlays: Vec<Underlay> =
        underlays.into_iter().filter(|u| sizes.iter().any(|(size, _)| any(u, *size))).collect();
    if underlays.is_empty() {
        return None;
    }
    let title = "UDP from pod to pod: delivered against offered, thousand packets a second";
    let mut svg = Svg::new(WIDTH, HEAD + PANEL_HEIGHT * underlays.len() as f64 + 8.0, title);
    head(
        &mut svg,
        report,
        title,
        "On the dotted line nothing is lost; the last point is all the sender can.",
    );
    for (row, underlay) in underlays.iter().enumerate() {
        for (column, (size, name)) in sizes.iter().enumerate() {
            let x = MARGIN + 36.0 + (WIDTH - MARGIN) / 2.0 * column as f64;
            let y = HEAD + PANEL_HEIGHT * row as f64;
            svg.text(x - 36.0, y + 8.0, PANEL, &format!("{name}, {}", underlay.label()));
            let curves: Vec<(System, Vec<(f64, f64)>)> = report
                .systems()
                .into_iter()
                .map(|s| (s, udp_curve(report, *underlay, *size, s)))
                .filter(|(_, c)| c.len() > 1)
                .collect();
            udp_panel(
                &mut svg,
                (x, y + 22.0),
                ((WIDTH - MARGIN) / 2.0 - 210.0, PANEL_HEIGHT - 64.0),
                &curves,
            );
        }
    }
    Some(svg.finish())
}

fn udp_panel(svg: &mut Svg, origin: (f64, f64), size: (f64, f64), curves: &[(System, Vec<(f64, f64)>)]) {
    let most =
        |pick: fn(&(f64, f64)) -> f64| curves.iter().flat_map(|(_, c)| c).map(pick).fold(0.0, f64::max) / 1e3;
    let (x_end, x_step) = nice_axis(most(|p| p.0));
    let (y_end, y_step) = nice_axis(most(|p| p.1));
    let bottom = origin.1 + size.1;
    let place = |p: (f64, f64)| (origin.0 + p.0 / x_end * size.0, bottom - p.1 / y_end * size.1);
    let mut tick = 0.0;
    while tick <= y_end * 1.0001 {
        let (x, y) = place((0.0, tick));
        svg.line((x, y), (x + size.0, y), GRID, 1.0, false);
        svg.text(x - 8.0, y + 4.0, SMALL.at(Anchor::End), &format!("{tick}"));
        tick += y_step;
    }
    tick = 0.0;
    while tick <= x_end * 1.0001 {
        svg.text(place((tick, 0.0)).0, bottom + 16.0, SMALL.at(Anchor::Middle), &format!("{tick}"));
        tick += x_step;
    }
    svg.text(origin.0 + size.0, bottom + 31.0, SMALL.at(Anchor::End), "offered");
    let diagonal = x_end.min(y_end);
    svg.line(place((0.0, 0.0)), place((diagonal, diagonal)), FAINT, 1.0, true);
    let mut labels: Vec<(f64, System, String)> = Vec::new();
    for (system, points) in curves {
        let placed: Vec<(f64, f64)> = points.iter().map(|p| place((p.0 / 1e3, p.1 / 1e3))).collect();
        svg.polyline(&placed, color(*system), 2.5);
        for p in &placed {
            svg.dot(*p, 2.5, color(*system), false);
        }
        let last = points.last().map_or(0.0, |p| p.1);
        let y = placed.last().map_or(bottom, |p| p.1);
        labels.push((y, *system, format!("{} {}", system.label(), number(last))));
    }
    // Names beside the ends of their lines, pushed apart where these meet.
    labels.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut free = origin.1;
    for (y, ..) in &mut labels {
        *y = y.max(free);
        free = *y + 14.0;
    }
    let mut limit = bottom + 4.0;
    for (y, ..) in labels.iter_mut().rev() {
        *y = y.min(limit);
        limit = *y - 14.0;
    }
    for (y, system, text) in labels {
        svg.text(origin.0 + size.0 + 10.0, y + 4.0, Font::new(12.0, color(system)).bold(), &text);
    }
}

fn latency(report: &Report) -> Option<String> {
    const LINE: f64 = 24.0;
    const NAMES: f64 = 160.0;
    const WIDTH: f64 = 1000.0;
    let systems = report.systems();
    let of =
        |u: &Underlay| report.rows.iter().any(|r| r.underlay == u.id() && r.figure.starts_with("latency-"));
    let underlays: Vec<Underlay> = report.underlays().into_iter().filter(of).collect();
    let whens = [("idle", "idle"), ("loaded", "beside a TCP stream")];
    let has = |when: &str| report.rows.iter().any(|r| r.figure == format!("latency-{when}-p50"));
    let whens: Vec<_> = whens.into_iter().filter(|(w, _)| has(w)).collect();
    if whens.is_empty() {
        return None;
    }
    let panel_height = 64.0 + LINE * systems.len() as f64;
    let title = "Round trip of a small request from pod to pod, microseconds";
    let mut svg = Svg::new(WIDTH, HEAD + panel_height * underlays.len() as f64, title);
    head(&mut svg, report, title, "Full dot: median. Hollow dot: 99th percentile.");
    let panel = (WIDTH - MARGIN * 2.0 - NAMES) / whens.len() as f64;
    for (u, underlay) in underlays.iter().enumerate() {
        let top = HEAD + panel_height * u as f64;
        for (i, s) in systems.iter().enumerate() {
            let y = top + 38.0 + LINE * i as f64;
            svg.text(MARGIN + NAMES - 10.0, y + 4.0, LABEL.at(Anchor::End), s.label());
        }
        for (w, (when, name)) in whens.iter().enumerate() {
            let left = MARGIN + NAMES + panel * w as f64;
            svg.text(left, top + 8.0, PANEL, &format!("{name}, {}", underlay.label()));
            let rows: Vec<(usize, System, f64, f64)> = systems
                .iter()
                .enumerate()
                .filter_map(|(i, s)| {
                    let at = |p: &str| report.row(underlay.id(), &format!("latency-{when}-{p}"), *s);
                    Some((i, *s, at("p50")?.median, at("p99")?.median))
                })
                .collect();
            if rows.is_empty() {
                continue;
            }
            let least = rows.iter().map(|r| r.2).fold(f64::INFINITY, f64::min).max(1.0);
            let most = rows.iter().map(|r| r.3).fold(10.0, f64::max);
            // Logarithmic, from a power of ten to room for the last number.
            let (from, to) = (least.log10().floor(), most.log10().max(least.log10().floor() + 1.0) + 0.05);
            let x_of = |v: f64| left + (v.max(1.0).log10() - from) / (to - from) * (panel - 70.0);
            let bottom = top + 28.0 + LINE * systems.len() as f64;
            for (value, strong) in log_ticks(from, to) {
                let x = x_of(value);
                svg.line((x, top + 22.0), (x, bottom), GRID, 1.0, !strong);
                if strong {
                    svg.text(x, bottom + 15.0, SMALL.at(Anchor::Middle), &number_plain(value));
                }
            }
            for (i, system, p50, p99) in rows {
                let y = top + 38.0 + LINE * i as f64;
                svg.line((x_of(p50), y), (x_of(p99), y), color(system), 2.0, false);
                svg.dot((x_of(p99), y), 4.5, color(system), true);
                svg.dot((x_of(p50), y), 4.5, color(system), false);
                svg.text(x_of(p50) - 9.0, y + 4.0, SMALL.at(Anchor::End), &number_plain(p50));
                svg.text(x_of(p99) + 9.0, y + 4.0, SMALL, &number_plain(p99));
            }
        }
    }
    Some(svg.finish())
}

fn number_plain(v: f64) -> String {
    if v >= 9_999.5 { format!("{:.0}k", v / 1000.0) } else { format!("{v:.0}") }
}

/// Powers of ten, twice and five times these, between two exponents; whether it is one to be named.
fn log_ticks(from: f64, to: f64) -> Vec<(f64, bool)> {
    let mut ticks = Vec::new();
    let mut exponent = from;
    while exponent <= to {
        for (factor, named) in [(1.0, true), (2.0, false), (5.0, false)] {
            let value = factor * 10_f64.powf(exponent);
            if value.log10() <= to {
                ticks.push((value, named));
            }
        }
        exponent += 1.0;
    }
    ticks
}

fn cost(report: &Report) -> Option<String> {
    const LINE: f64 = 26.0;
    const NAMES: f64 = 160.0;
    let (systems, underlays) = (report.systems(), report.underlays());
    report.rows.iter().find(|r| r.figure == "tcp1-machine-cpu")?;
    let width = if underlays.len() > 1 { 1000.0 } else { 720.0 };
    let title = "Processor seconds to move a gigabyte from pod to pod (TCP, 1 stream)";
    let height = HEAD + 62.0 + LINE * systems.len() as f64;
    let mut svg = Svg::new(width, height, title);
    head(&mut svg, report, title, "Strong: the two daemons. Pale: the whole machine, with load generators.");
    let panel = (width - MARGIN * 2.0 - NAMES) / underlays.len() as f64;
    for (p, underlay) in underlays.iter().enumerate() {
        let left = MARGIN + NAMES + panel * p as f64;
        svg.text(left, HEAD + 8.0, PANEL, underlay.label());
        let value = |f: &str, s: System| report.row(underlay.id(), f, s).map(|r| r.median);
        let most = systems.iter().filter_map(|s| value("tcp1-machine-cpu", *s)).fold(0.0, f64::max);
        let (end, step) = nice_axis(most);
        let scale = (panel - 60.0) / end;
        let bottom = HEAD + 26.0 + LINE * systems.len() as f64;
        let mut tick = 0.0;
        while tick <= end * 1.0001 {
            let x = left + tick * scale;
            svg.line((x, HEAD + 20.0), (x, bottom), GRID, 1.0, false);
            svg.text(x, bottom + 16.0, SMALL.at(Anchor::Middle), &format!("{tick}"));
            tick += step;
        }
        for (i, s) in systems.iter().enumerate() {
            let y = HEAD + 24.0 + LINE * i as f64;
            if p == 0 {
                svg.text(left - 10.0, y + 17.0, LABEL.at(Anchor::End), s.label());
            }
            let Some(machine) = value("tcp1-machine-cpu", *s) else { continue };
            svg.rect(left, y + 3.0, machine * scale, LINE - 8.0, 2.0, color(*s), 0.35);
            if let Some(daemons) = value("tcp1-daemon-cpu", *s) {
                svg.rect(left, y + 3.0, daemons * scale, LINE - 8.0, 2.0, color(*s), 1.0);
            }
            svg.text(left + machine * scale + 6.0, y + 17.0, LABEL, &number(machine));
        }
    }
    Some(svg.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::figure::Value;

    fn add(
        report: &mut Report,
        underlay: Underlay,
        system: System,
        figure: &str,
        unit: &'static str,
        value: f64,
    ) {
        let v =
            Value { figure: figure.to_owned(), title: figure.to_owned(), unit, more_is_better: true, value };
        report.add(underlay, system, 0, &[v]);
    }

    #[test]
    fn report_with_gaps_is_drawn() {
        let mut r = Report::default();
        add(&mut r, Underlay::Veth, System::FeltUdp, "tcp1", "Gbit/s", 0.0);
        add(&mut r, Underlay::Veth, System::FeltUdp, "latency-idle-p50", "us", 30.0);
        add(&mut r, Underlay::Wire, System::KernelVxlan, "tcp4", "Gbit/s", 3.0);
        add(&mut r, Underlay::Wire, System::KernelVxlan, "tcp1-machine-cpu", "s/GB", 3.0);
        for (figure, value) in [("udp64-1000", 900.0), ("udp64-max", 1500.0)] {
            add(&mut r, Underlay::Wire, System::FeltVxlan, figure, "packets/s", value);
            add(&mut r, Underlay::Wire, System::FeltVxlan, &format!("{figure}-offered"), "packets/s", value);
        }
        r.finish();
        for text in [throughput(&r), udp(&r), latency(&r), cost(&r)].map(|p| p.expect("a plot")) {
            assert!(text.starts_with("<svg") && !text.contains("NaN") && !text.contains("inf"), "{text}");
        }
    }

    #[test]
    fn empty_report_has_no_plots() {
        let r = Report::default();
        assert!(throughput(&r).is_none() && udp(&r).is_none() && latency(&r).is_none() && cost(&r).is_none());
    }
}
