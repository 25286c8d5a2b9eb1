//! Regular expressions of the allow list.
//!
//! The list names sysctls; its lines use little more than literals, dots and stars. This is a
//! backtracking matcher of that much: literals, `.`, classes, groups, alternatives, `* + ?`, `^ $`,
//! escapes. Anything else is an error rather than a guess. A step limit bounds hostile patterns.

/// Steps after which a match is given up.
const STEPS_MAX: usize = 200_000;

#[derive(Debug, Clone)]
enum Node {
    Char(char),
    Any,
    Class { negated: bool, ranges: Vec<(char, char)> },
    Start,
    End,
    Group(Vec<Vec<Node>>),
    Repeat { node: Box<Node>, min: usize, max: usize },
}

/// Whether `pattern` matches anywhere in `text`.
///
/// # Errors
/// What is not understood of the pattern.
pub(super) fn search(pattern: &str, text: &str) -> Result<bool, String> {
    let chars: Vec<char> = pattern.chars().collect();
    let mut parser = Parser { chars: &chars, at: 0 };
    let alternatives = parser.alternatives()?;
    if parser.at != chars.len() {
        return Err("unexpected )".into());
    }
    let text: Vec<char> = text.chars().collect();
    let mut steps = 0;
    for start in 0..=text.len() {
        for nodes in &alternatives {
            if matches(nodes, &text, start, &mut steps, &mut |_, _| Ok(true))? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

struct Parser<'a> {
    chars: &'a [char],
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn alternatives(&mut self) -> Result<Vec<Vec<Node>>, String> {
        let mut all = vec![Vec::new()];
        while let Some(c) = self.peek() {
            match c {
                ')' => break,
                '|' => {
                    self.at += 1;
                    all.push(Vec::new());
                }
                _ => {
                    let node = self.repeated()?;
                    if let Some(last) = all.last_mut() {
                        last.push(node);
                    }
                }
            }
        }
        Ok(all)
    }

    fn repeated(&mut self) -> Result<Node, String> {
        let mut node = self.atom()?;
        while let Some(c) = self.peek() {
            let (min, max) = match c {
                '*' => (0, usize::MAX),
                '+' => (1, usize::MAX),
                '?' => (0, 1),
                '{' => return Err("counted repetition is not supported".into()),
                _ => break,
            };
            self.at += 1;
            node = Node::Repeat { node: Box::new(node), min, max };
        }
        Ok(node)
    }

    fn atom(&mut self) -> Result<Node, String> {
        let Some(c) = self.peek() else { return Err("unexpected end".into()) };
        self.at += 1;
        Ok(match c {
            '.' => Node::Any,
            '^' => Node::Start,
            '$' => Node::End,
            '(' => {
                if self.chars[self.at..].starts_with(&['?', ':']) {
                    self.at += 2;
                } else if self.peek() == Some('?') {
                    return Err("group options are not supported".into());
                }
                let inner = self.alternatives()?;
                if self.peek() != Some(')') {
                    return Err("missing )".into());
                }
                self.at += 1;
                Node::Group(inner)
            }
            '[' => self.class()?,
            '\\' => self.escape()?,
            '*' | '+' | '?' => return Err("missing argument to repetition operator".into()),
            other => Node::Char(other),
        })
    }

    fn escape(&mut self) -> Result<Node, String> {
        let Some(c) = self.peek() else { return Err("trailing backslash".into()) };
        self.at += 1;
        let class = |negated, ranges: &[(char, char)]| Node::Class { negated, ranges: ranges.to_vec() };
        const WORD: &[(char, char)] = &[('0', '9'), ('A', 'Z'), ('a', 'z'), ('_', '_')];
        const SPACE: &[(char, char)] = &[(' ', ' '), ('\t', '\r')];
        Ok(match c {
            'd' => class(false, &[('0', '9')]),
            'D' => class(true, &[('0', '9')]),
            'w' => class(false, WORD),
            'W' => class(true, WORD),
            's' => class(false, SPACE),
            'S' => class(true, SPACE),
            c if c.is_ascii_alphanumeric() => return Err(format!("escape \\{c} is not supported")),
            c => Node::Char(c),
        })
    }

    fn class(&mut self) -> Result<Node, String> {
        let negated = self.peek() == Some('^');
        if negated {
            self.at += 1;
        }
        let mut ranges = Vec::new();
        let mut first = true;
        loop {
            let Some(mut c) = self.peek() else { return Err("missing ]".into()) };
            self.at += 1;
            if c == ']' && !first {
                return Ok(Node::Class { negated, ranges });
            }
            first = false;
            if c == '\\' {
                match self.escape()? {
                    Node::Char(literal) => c = literal,
                    Node::Class { negated: false, ranges: more } => {
                        ranges.extend(more);
                        continue;
                    }
                    _ => return Err("this escape is not supported in a class".into()),
                }
            }
            let is_range = self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|c| *c != ']');
            if is_range {
                let end = self.chars[self.at + 1];
                self.at += 2;
                ranges.push((c, end));
            } else {
                ranges.push((c, c));
            }
        }
    }
}

type Then<'a> = &'a mut dyn FnMut(usize, &mut usize) -> Result<bool, String>;

fn matches(
    nodes: &[Node],
    text: &[char],
    at: usize,
    steps: &mut usize,
    then: Then<'_>,
) -> Result<bool, String> {
    *steps += 1;
    if *steps > STEPS_MAX {
        return Err("too complex".into());
    }
    let Some((node, rest)) = nodes.split_first() else { return then(at, steps) };
    let one = |yes: bool| yes && at < text.len();
    match node {
        Node::Char(c) => {
            let yes = text.get(at) == Some(c);
            if yes { matches(rest, text, at + 1, steps, then) } else { Ok(false) }
        }
        Node::Any => {
            if one(true) {
                matches(rest, text, at + 1, steps, then)
            } else {
                Ok(false)
            }
        }
        Node::Class { negated, ranges } => {
            let yes = text.get(at).is_some_and(|c| ranges.iter().any(|(a, b)| a <= c && c <= b) != *negated);
            if yes { matches(rest, text, at + 1, steps, then) } else { Ok(false) }
        }
        Node::Start => {
            if at == 0 {
                matches(rest, text, at, steps, then)
            } else {
                Ok(false)
            }
        }
        Node::End => {
            if at == text.len() {
                matches(rest, text, at, steps, then)
            } else {
                Ok(false)
            }
        }
        Node::Group(alternatives) => {
            for inner in alternatives {
                let yes =
                    matches(inner, text, at, steps, &mut |at, steps| matches(rest, text, at, steps, then))?;
                if yes {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Node::Repeat { node, min, max } => repeat(node, *min, *max, rest, text, at, steps, then),
    }
}

#[expect(clippy::too_many_arguments, reason = "the state of one recursive step")]
fn repeat(
    node: &Node,
    min: usize,
    max: usize,
    rest: &[Node],
    text: &[char],
    at: usize,
    steps: &mut usize,
    then: Then<'_>,
) -> Result<bool, String> {
    if max > 0 {
        let once = std::slice::from_ref(node);
        let more = matches(once, text, at, steps, &mut |next, steps| {
            // A repetition of nothing would never end.
            if next == at {
                return Ok(false);
            }
            repeat(
                node,
                min.saturating_sub(1),
                max - usize::from(max != usize::MAX),
                rest,
                text,
                next,
                steps,
                then,
            )
        })?;
        if more {
            return Ok(true);
        }
    }
    if min == 0 { matches(rest, text, at, steps, then) } else { Ok(false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_what_allow_lists_use() {
        for (pattern, text, want) in [
            ("net.ipv4.conf.all.send_redirects", "net.ipv4.conf.all.send_redirects", true),
            ("^net.ipv4.conf.IFNAME.[a-z_]*$", "net.ipv4.conf.IFNAME.arp_filter", true),
            ("^net.ipv4.conf.IFNAME.[a-z_]*$", "net.ipv4.conf.eth0.arp_filter", false),
            ("arp", "net.ipv4.conf.eth0.arp_filter", true),
            ("^arp", "net.ipv4.conf.eth0.arp_filter", false),
            (r"^net\.(ipv4|ipv6)\.conf\..+\.accept_ra$", "net.ipv6.conf.eth0.accept_ra", true),
            (r"^net\.(ipv4|ipv6)\.conf\..+\.accept_ra$", "netxipv6.conf.eth0.accept_ra", false),
            ("a(bc)?d", "xabcdx", true),
            ("a(bc)*$", "abcbc", true),
            ("^(a|b)+c$", "abbac", true),
            ("[^0-9]+", "123", false),
            (r"\d+", "abc1", true),
            ("(a*)*b", "aaaa", false),
            ("", "anything", true),
        ] {
            assert_eq!(search(pattern, text), Ok(want), "{pattern} {text}");
        }
    }

    #[test]
    fn what_it_does_not_know_is_an_error() {
        for pattern in ["(a", "a)", "[a", "*a", "a{2}", "\\b", "a\\", "(?i)a"] {
            assert!(search(pattern, "aaa").is_err(), "{pattern}");
        }
        let hostile = format!("({}a+)+$", "a*".repeat(8));
        assert!(search(&hostile, &format!("{}b", "a".repeat(60))).is_err());
    }
}
