//! A table as `iptables-save` prints it, what of it is wanted, and the difference as input for
//! `iptables-restore`.
//!
//! Pure functions. Rules are compared word by word in the form in which `iptables-save` prints them
//! (`-s`, `-d`, `-i`, `-o`, `-p`, matches, `-j`), so wanted rules must be written in that form.

use std::collections::HashSet;
use std::fmt::Write as _;

/// One rule without its chain, as words: `["-s", "10.5.0.0/16", "-j", "ACCEPT"]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule(pub Vec<String>);

impl Rule {
    /// A rule from text as `iptables-save` prints it, without `-A CHAIN`; quotes group words.
    pub fn parse(text: &str) -> Self {
        Self(words(text))
    }

    /// The chain or verdict it jumps to.
    pub fn target(&self) -> Option<&str> {
        self.0
            .iter()
            .position(|word| word == "-j" || word == "-g")
            .and_then(|at| self.0.get(at + 1))
            .map(String::as_str)
    }

    /// Whether it takes every packet for good, so that rules behind it are never reached. A comment
    /// does not restrict it.
    fn is_catch_all(&self) -> bool {
        let mut words = self.0.iter().map(String::as_str).peekable();
        loop {
            match words.next() {
                Some("-m") if words.peek() == Some(&"comment") => {
                    // comment --comment TEXT
                    words.nth(2);
                }
                Some("-j") => {
                    return matches!(
                        words.next(),
                        Some("ACCEPT" | "DROP" | "REJECT" | "RETURN" | "MASQUERADE")
                    );
                }
                _ => return false,
            }
        }
    }

    /// The rule as a line can hold it.
    fn line(&self) -> String {
        self.0.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
    }
}

/// What a table holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableState {
    /// The table's name.
    pub table: String,
    /// Chains and their rules, in order.
    pub chains: Vec<(String, Vec<Rule>)>,
}

impl TableState {
    /// Reads the output of `iptables-save -t TABLE`; an empty output is an empty table.
    pub(super) fn parse(table: &str, text: &str) -> Result<Self, String> {
        let mut state = Self { table: table.to_owned(), chains: Vec::new() };
        let mut inside = false;
        for line in text.lines() {
            let line = line.trim_end();
            if let Some(name) = line.strip_prefix('*') {
                inside = name == table;
            } else if line.starts_with('#') {
                if line.contains("is incompatible") && line.contains(&format!("`{table}'")) {
                    return Err(format!(
                        "{} (rules made by the nft tool block it)",
                        line.trim_start_matches(['#', ' '])
                    ));
                }
            } else if !inside {
            } else if let Some(chain) = line.strip_prefix(':') {
                let name = chain.split_whitespace().next().unwrap_or_default();
                state.chains.push((name.to_owned(), Vec::new()));
            } else if line.starts_with("-A ") {
                let mut parts = words(line);
                if parts.len() < 2 {
                    return Err(format!("not a rule: {line:?}"));
                }
                let rule = Rule(parts.split_off(2));
                let chain = &parts[1];
                match state.chains.iter_mut().find(|(name, _)| name == chain) {
                    Some((_, rules)) => rules.push(rule),
                    None => return Err(format!("rule of an unknown chain: {line:?}")),
                }
            }
        }
        Ok(state)
    }

    /// The rules of a chain; none when there is no such chain.
    pub fn rules(&self, chain: &str) -> Option<&[Rule]> {
        self.chains.iter().find(|(name, _)| name == chain).map(|(_, rules)| rules.as_slice())
    }

    /// What removes chains with every jump to them; nothing when there is none.
    pub(super) fn removal(&self, chains: &[&str]) -> Option<String> {
        let present: Vec<&str> = chains.iter().copied().filter(|chain| self.rules(chain).is_some()).collect();
        if present.is_empty() {
            return None;
        }
        let mut payload = format!("*{}\n", self.table);
        for chain in &present {
            // Naming a user chain empties it.
            let _ = writeln!(payload, ":{chain} - [0:0]");
        }
        for (chain, rules) in &self.chains {
            if present.contains(&chain.as_str()) {
                continue;
            }
            for rule in
                rules.iter().filter(|rule| rule.target().is_some_and(|target| present.contains(&target)))
            {
                let _ = writeln!(payload, "-D {chain} {}", rule.line());
            }
        }
        for chain in &present {
            let _ = writeln!(payload, "-X {chain}");
        }
        payload.push_str("COMMIT\n");
        Some(payload)
    }
}

/// Where a rule of ours stands in a chain that is not ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// At the head.
    First,
    /// At the end, but before a rule that takes every packet: behind that it would never be reached.
    Last,
}

/// What of a table is wanted: chains of ours with all their rules, and rules of ours in chains of
/// others, each there exactly once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The table's name.
    pub table: String,
    /// Our chains; nothing else may be in them.
    pub chains: Vec<(String, Vec<Rule>)>,
    /// Our rules in other chains.
    pub jumps: Vec<(String, Rule, Position)>,
}

impl Wanted {
    /// The difference to what was found as input for `iptables-restore --noflush`, or none.
    pub fn changes(&self, found: &TableState) -> Option<String> {
        let mut body = String::new();
        let rewrite: HashSet<&str> = self
            .chains
            .iter()
            .filter(|(name, rules)| found.rules(name) != Some(rules.as_slice()))
            .map(|(name, _)| name.as_str())
            .collect();
        for name in self.chains.iter().map(|(name, _)| name).filter(|name| rewrite.contains(name.as_str())) {
            // Makes the chain, or empties it.
            let _ = writeln!(body, ":{name} - [0:0]");
        }
        for (name, rules) in &self.chains {
            if rewrite.contains(name.as_str()) {
                for rule in rules {
                    let _ = writeln!(body, "-A {name} {}", rule.line());
                }
            }
        }
        for (chain, rule, position) in &self.jumps {
            let rules = found.rules(chain).unwrap_or_default();
            let ours: Vec<usize> =
                rules.iter().enumerate().filter(|(_, found)| *found == rule).map(|(at, _)| at).collect();
            let catch_all = rules.iter().position(Rule::is_catch_all);
            let right = match (ours.as_slice(), position) {
                ([at], Position::First) => *at == 0,
                ([at], Position::Last) => catch_all.is_none_or(|catch_all| *at < catch_all),
                _ => false,
            };
            if right {
                continue;
            }
            for _ in &ours {
                let _ = writeln!(body, "-D {chain} {}", rule.line());
            }
            match (position, catch_all) {
                (Position::First, _) => {
                    let _ = writeln!(body, "-I {chain} 1 {}", rule.line());
                }
                (Position::Last, None) => {
                    let _ = writeln!(body, "-A {chain} {}", rule.line());
                }
                (Position::Last, Some(catch_all)) => {
                    // Counted from 1, without our own that were just removed.
                    let before = ours.iter().filter(|at| **at < catch_all).count();
                    let _ = writeln!(body, "-I {chain} {} {}", catch_all - before + 1, rule.line());
                }
            }
        }
        (!body.is_empty()).then(|| format!("*{}\n{body}COMMIT\n", self.table))
    }
}

/// Splits a line as `iptables-restore` does: at blanks, with double quotes and backslashes.
fn words(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut word = String::new();
    let (mut open, mut quoted, mut escaped) = (false, false, false);
    for character in line.chars() {
        if escaped {
            word.push(character);
            escaped = false;
        } else if character == '\\' {
            escaped = true;
            open = true;
        } else if character == '"' {
            quoted = !quoted;
            open = true;
        } else if character.is_whitespace() && !quoted {
            if open {
                found.push(std::mem::take(&mut word));
                open = false;
            }
        } else {
            word.push(character);
            open = true;
        }
    }
    if open {
        found.push(word);
    }
    found
}

/// A word with quotes where the line needs them.
fn quoted(word: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "-_./:,=!+[]%@".contains(character);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    let mut text = String::from("\"");
    for character in word.chars() {
        if character == '"' || character == '\\' {
            text.push('\\');
        }
        text.push(character);
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = "# Generated by iptables-save v1.8.9 (nf_tables)\n*nat\n:PREROUTING ACCEPT [0:0]\n\
        :POSTROUTING ACCEPT [0:0]\n:FELT - [0:0]\n-A POSTROUTING -m comment --comment \"ours now\" -j FELT\n\
        -A FELT -s 10.5.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully\nCOMMIT\n# Completed\n";

    fn rule(text: &str) -> Rule {
        Rule::parse(text)
    }

    fn wanted() -> Wanted {
        Wanted {
            table: "nat".into(),
            chains: vec![(
                "FELT".into(),
                vec![rule("-s 10.5.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully")],
            )],
            jumps: vec![(
                "POSTROUTING".into(),
                rule("-m comment --comment \"ours now\" -j FELT"),
                Position::Last,
            )],
        }
    }

    fn state(text: &str) -> TableState {
        TableState::parse("nat", text).unwrap()
    }

    #[test]
    fn nothing_to_do_is_nothing_written() {
        assert_eq!(wanted().changes(&state(SAVED)), None);
    }

    #[test]
    fn empty_table_gets_everything_in_one_transaction() {
        let empty = state("*nat\n:POSTROUTING ACCEPT [0:0]\nCOMMIT\n");
        let expected = "*nat\n:FELT - [0:0]\n-A FELT -s 10.5.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully\n\
             -A POSTROUTING -m comment --comment \"ours now\" -j FELT\nCOMMIT\n";
        assert_eq!(wanted().changes(&empty).as_deref(), Some(expected));
        assert_eq!(wanted().changes(&state("")).as_deref(), Some(expected));
    }

    #[test]
    fn order_counts() {
        let mut wanted = wanted();
        wanted.chains[0].1.insert(0, rule("-s 10.5.1.0/24 -j RETURN"));
        let swapped = SAVED.replace("COMMIT", "-A FELT -s 10.5.1.0/24 -j RETURN\nCOMMIT");
        let changes = wanted.changes(&state(&swapped)).unwrap();
        assert!(changes.contains(":FELT - [0:0]\n-A FELT -s 10.5.1.0/24 -j RETURN\n-A FELT -s 10.5.0.0/16"));
        assert!(!changes.contains("POSTROUTING"), "the jump is right already: {changes}");
    }

    #[test]
    fn doubled_jump_becomes_one() {
        let line = "-A POSTROUTING -m comment --comment \"ours now\" -j FELT\n";
        let doubled = SAVED.replace(line, &format!("{line}{line}"));
        let changes = wanted().changes(&state(&doubled)).unwrap();
        assert_eq!(changes.matches("-D POSTROUTING").count(), 2);
        assert_eq!(changes.matches("-A POSTROUTING").count(), 1);
    }

    #[test]
    fn jump_stands_before_a_catch_all() {
        let jump = "-A POSTROUTING -m comment --comment \"ours now\" -j FELT\n";
        let behind = SAVED.replace(jump, &format!("-A POSTROUTING -s 1.2.3.4/32 -j ACCEPT\n-A POSTROUTING -m comment --comment all -j MASQUERADE\n{jump}"));
        let changes = wanted().changes(&state(&behind)).unwrap();
        assert!(changes.contains("-D POSTROUTING"), "{changes}");
        assert!(changes.contains("-I POSTROUTING 2 -m comment"), "{changes}");
        let before = SAVED.replace(jump, &format!("{jump}-A POSTROUTING -j MASQUERADE\n"));
        assert_eq!(wanted().changes(&state(&before)), None);
        let missing = SAVED.replace(jump, "-A POSTROUTING -j DROP\n");
        assert!(wanted().changes(&state(&missing)).unwrap().contains("-I POSTROUTING 1 "));
    }

    #[test]
    fn removal_takes_every_jump_along() {
        let payload = state(SAVED).removal(&["FELT", "ABSENT"]).unwrap();
        assert_eq!(
            payload,
            "*nat\n:FELT - [0:0]\n-D POSTROUTING -m comment --comment \"ours now\" -j FELT\n-X FELT\nCOMMIT\n"
        );
        assert_eq!(state(SAVED).removal(&["ABSENT"]), None);
    }

    #[test]
    fn words_survive_quoting() {
        for text in ["plain", "two words", "a\"b", "back\\slash", "", "name: \"x\" id: \"y\""] {
            assert_eq!(words(&format!("-m {} -j X", quoted(text)))[1], text);
        }
    }

    #[test]
    fn incompatible_tables_are_an_error() {
        let text = "# Table `nat' is incompatible, use 'nft' tool.\n";
        assert!(TableState::parse("nat", text).unwrap_err().contains("incompatible"));
    }
}
