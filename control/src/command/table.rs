//! Columns for people.

/// Lines of cells; the first is the heading.
pub(super) struct Table {
    lines: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(heading: &[&str]) -> Self {
        Self { lines: vec![heading.iter().map(ToString::to_string).collect()] }
    }

    pub(super) fn line(&mut self, cells: impl IntoIterator<Item = String>) {
        self.lines.push(cells.into_iter().collect());
    }

    /// The text: cells padded to the widest of their column, two spaces between columns, none at line ends.
    pub(super) fn render(&self) -> String {
        let columns = self.lines.iter().map(Vec::len).max().unwrap_or(0);
        let width = |at: usize| {
            self.lines
                .iter()
                .filter_map(|line| line.get(at))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        let mut text = String::new();
        for line in &self.lines {
            let mut row = String::new();
            for (cell, width) in line.iter().zip(&widths) {
                row.push_str(&format!("{cell:width$}  "));
            }
            text.push_str(row.trim_end());
            text.push('\n');
        }
        text
    }
}

/// A dash for nothing.
pub(super) fn or_dash(text: Option<impl ToString>) -> String {
    text.map_or_else(|| "-".to_owned(), |text| text.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["SUBNET", "IP"]);
        table.line(["10.5.2.0/24".to_owned(), or_dash(Some(7))]);
        table.line(["x".to_owned(), or_dash(None::<u8>)]);
        assert_eq!(table.render(), "SUBNET       IP\n10.5.2.0/24  7\nx            -\n");
    }
}
