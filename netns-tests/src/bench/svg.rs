//! A small writer of SVG: shapes, texts, and a document that looks the same wherever it is shown.

use std::fmt::Write as _;

/// A picture under way. Coordinates are pixels, y grows downwards.
#[derive(Debug)]
pub(crate) struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// Where a text's `x` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// How a text looks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Font {
    pub(crate) size: f64,
    pub(crate) color: &'static str,
    pub(crate) bold: bool,
    pub(crate) anchor: Anchor,
}

impl Font {
    pub(crate) const fn new(size: f64, color: &'static str) -> Font {
        Font { size, color, bold: false, anchor: Anchor::Start }
    }

    pub(crate) const fn bold(mut self) -> Font {
        self.bold = true;
        self
    }

    pub(crate) const fn at(mut self, anchor: Anchor) -> Font {
        self.anchor = anchor;
        self
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Svg {
    /// An empty picture with a white background and rounded corners, so that it also stands on a dark page.
    pub(crate) fn new(width: f64, height: f64, title: &str) -> Svg {
        let mut body = String::new();
        let _ = write!(body, "<title>{}</title>", escape(title));
        let mut svg = Svg { width, height, body };
        svg.rect(0.0, 0.0, width, height, 8.0, "#ffffff", 1.0);
        svg
    }

    #[expect(clippy::too_many_arguments, reason = "a rectangle has that many numbers")]
    pub(crate) fn rect(&mut self, x: f64, y: f64, w: f64, h: f64, radius: f64, fill: &str, opacity: f64) {
        let _ = write!(
            self.body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{h:.1}\" rx=\"{radius}\" fill=\"{fill}\"",
            w.max(0.0)
        );
        self.opacity(opacity);
    }

    fn opacity(&mut self, opacity: f64) {
        if opacity < 1.0 {
            let _ = write!(self.body, " opacity=\"{opacity}\"");
        }
        self.body.push_str("/>\n");
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), color: &str, width: f64, dashed: bool) {
        let dash = if dashed { " stroke-dasharray=\"3 4\"" } else { "" };
        let _ = writeln!(
            self.body,
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{color}\" stroke-width=\"{width}\" stroke-linecap=\"round\"{dash}/>",
            from.0, from.1, to.0, to.1
        );
    }

    pub(crate) fn polyline(&mut self, points: &[(f64, f64)], color: &str, width: f64) {
        let list: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            self.body,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"/>",
            list.join(" ")
        );
    }

    pub(crate) fn dot(&mut self, at: (f64, f64), radius: f64, color: &str, hollow: bool) {
        let fill = if hollow { "#ffffff" } else { color };
        let _ = writeln!(
            self.body,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius}\" fill=\"{fill}\" stroke=\"{color}\" stroke-width=\"2\"/>",
            at.0, at.1
        );
    }

    pub(crate) fn text(&mut self, x: f64, y: f64, font: Font, text: &str) {
        let anchor = match font.anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let weight = if font.bold { " font-weight=\"600\"" } else { "" };
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{}\" fill=\"{}\" text-anchor=\"{anchor}\"{weight}>{}</text>",
            font.size,
            font.color,
            escape(text)
        );
    }

    /// The document.
    pub(crate) fn finish(self) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w:.0} {h:.0}\" width=\"{w:.0}\" height=\"{h:.0}\" \
             font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\">\n{}</svg>\n",
            self.body,
            w = self.width,
            h = self.height
        )
    }
}

/// A round number at or above `max`, and a step that divides it into three to six parts.
pub(crate) fn nice_axis(max: f64) -> (f64, f64) {
    if max <= 0.0 {
        return (1.0, 0.25);
    }
    let decade = 10_f64.powf((max / 4.0).log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
    let step = steps.iter().map(|s| s * decade).find(|s| max / s <= 5.0).unwrap_or(10.0 * decade);
    ((max / step).ceil() * step, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_on_round_numbers() {
        assert_eq!(nice_axis(9.3), (10.0, 2.0));
        assert_eq!(nice_axis(21.0), (25.0, 5.0));
        assert_eq!(nice_axis(0.0), (1.0, 0.25));
        for max in [0.0123, 0.7, 1.0, 3.3, 47.0, 123_456.0] {
            let (end, step) = nice_axis(max);
            assert!(end >= max && end / step <= 6.0 && end / step >= 2.0, "{max}: {end} by {step}");
        }
    }

    #[test]
    fn texts_are_escaped() {
        let mut svg = Svg::new(10.0, 10.0, "a < b");
        svg.text(1.0, 2.0, Font::new(10.0, "#000"), "x & \"y\"");
        let text = svg.finish();
        assert!(text.contains("a &lt; b") && text.contains("x &amp; &quot;y&quot;"), "{text}");
    }
}
