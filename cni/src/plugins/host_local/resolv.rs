//! `resolvConf`: a file in the form of resolv.conf(5) becomes the result's `dns`.

use std::path::Path;

use crate::types::error::{Error, Result, go_text};
use crate::types::result::Dns;

/// Reads the file.
///
/// # Errors
/// `open PATH: no such file or directory` and its like.
pub(super) fn load(path: &Path) -> Result<Dns> {
    let text = std::fs::read(path)
        .map_err(|err| Error::internal(format!("open {}: {}", path.display(), go_text(&err))))?;
    Ok(parse(&String::from_utf8_lossy(&text)))
}

fn parse(text: &str) -> Dns {
    let mut dns = Dns::default();
    for line in text.lines().map(str::trim) {
        if line.starts_with(['#', ';']) {
            continue;
        }
        let mut words = line.split_whitespace();
        let Some(keyword) = words.next() else { continue };
        let rest: Vec<String> = words.map(str::to_owned).collect();
        let Some(first) = rest.first() else { continue };
        match keyword {
            "nameserver" => dns.nameservers.push(first.clone()),
            "domain" => dns.domain.clone_from(first),
            "search" => dns.search.extend(rest),
            "options" => dns.options.extend(rest),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_all_keywords_and_skips_the_rest() {
        let dns = parse(
            "# x\n;nameserver 9.9.9.9\n  nameserver 192.0.2.1 junk\nnameserver 192.0.2.2\ndomain a\ndomain example.com\n\
             search b.example c.example\nsearch d\noptions a b\nnameserver\nsortlist 1\n",
        );
        assert_eq!(dns.nameservers, ["192.0.2.1", "192.0.2.2"]);
        assert_eq!(dns.domain, "example.com");
        assert_eq!(dns.search, ["b.example", "c.example", "d"]);
        assert_eq!(dns.options, ["a", "b"]);
    }

    #[test]
    fn a_missing_file_is_named() {
        assert_eq!(load(Path::new("/nope")).unwrap_err().msg, "open /nope: no such file or directory");
    }
}
