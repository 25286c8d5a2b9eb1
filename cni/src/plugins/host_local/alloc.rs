//! Choosing addresses: requested ones first, else the next free one after the last handed out.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::config::{Config, Range, RangeSet, next};
use super::cooling;
use super::store::{Store, Ticket};
use crate::types::error::{Error, Result};
use crate::types::result::IpConfig;

/// Occupied addresses met one by one before the directory is read as a whole.
const PROBES: usize = 4;

/// One ADD.
pub(super) struct Allocator<'a> {
    store: &'a Store,
    config: &'a Config,
    id: &'a str,
    ifname: &'a str,
    ticket: Ticket<'a>,
    got: Vec<IpAddr>,
}

impl<'a> Allocator<'a> {
    /// An allocator for one attachment.
    pub(super) fn new(store: &'a Store, config: &'a Config, id: &'a str, ifname: &'a str) -> Self {
        Self { store, config, id, ifname, ticket: Ticket::new(store, id, ifname), got: Vec::new() }
    }

    /// One address per range set; on failure none stays reserved.
    pub(super) fn allocate_all(&mut self) -> Result<Vec<IpConfig>> {
        self.try_all().inspect_err(|_| {
            for ip in &self.got {
                let _ = self.store.free(*ip);
            }
        })
    }

    fn try_all(&mut self) -> Result<Vec<IpConfig>> {
        let mut requested: Vec<IpAddr> = Vec::new();
        for ip in &self.config.requested {
            if !requested.contains(ip) {
                requested.push(*ip);
            }
        }
        let mut ips = Vec::new();
        for (n, set) in self.config.sets.iter().enumerate() {
            let asked =
                requested.iter().position(|ip| set.range_of(*ip).is_some()).map(|i| requested.remove(i));
            let (ip, range) = match asked {
                Some(ip) => self.take_requested(set, ip),
                None => self.take_next(n, set),
            }
            .map_err(|err| err.recoded(format!("failed to allocate for range {n}")))?;
            self.got.push(ip);
            self.store.set_last_reserved(n, ip)?;
            let address = IpNet::new(ip, range.subnet.prefix_len())
                .map_err(|err| Error::internal(format!("prefix of {}: {err}", range.subnet)))?;
            ips.push(IpConfig { interface: None, address, gateway: Some(range.gateway) });
        }
        if requested.is_empty() {
            return Ok(ips);
        }
        let rest: Vec<String> = requested.iter().map(ToString::to_string).collect();
        Err(Error::internal(format!("failed to allocate all requested IPs: {}", rest.join(" "))))
    }

    fn take_requested(&mut self, set: &'a RangeSet, ip: IpAddr) -> Result<(IpAddr, &'a Range)> {
        let range =
            set.range_of(ip).ok_or_else(|| Error::internal(format!("{ip} not in range set {set}")))?;
        if ip == range.gateway {
            return Err(Error::internal(format!("requested ip {ip} is subnet's gateway")));
        }
        if self.config.exclude.iter().any(|block| block.contains(&ip)) {
            return Err(Error::internal(format!("requested ip {ip} is excluded")));
        }
        if self.ticket.reserve(ip)? {
            return Ok((ip, range));
        }
        let holder = self.store.holder(ip)?.unwrap_or_else(|| "an unreadable file".into());
        Err(Error::internal(format!(
            "requested IP address {ip} is not available in range set {set} (held by {holder})"
        )))
    }

    fn take_next(&mut self, n: usize, set: &'a RangeSet) -> Result<(IpAddr, &'a Range)> {
        for ip in self.store.owned_by(self.id, self.ifname)? {
            if set.range_of(ip).is_some() && !self.got.contains(&ip) {
                return Err(Error::internal(format!(
                    "{ip} has been allocated to {}, duplicate allocation is not allowed",
                    self.id
                )));
            }
        }
        let resting = match self.config.reuse_delay {
            Some(delay) => cooling::resting(self.store, delay),
            None => HashMap::new(),
        };
        let mut taken: Option<HashSet<IpAddr>> = None;
        let mut probes = 0;
        for (range, ip) in Round::new(set, self.store.last_reserved(n), &self.config.exclude) {
            if resting.contains_key(&ip) || taken.as_ref().is_some_and(|t| t.contains(&ip)) {
                continue;
            }
            if self.ticket.reserve(ip)? {
                return Ok((ip, range));
            }
            probes += 1;
            if probes == PROBES {
                taken = Some(self.store.taken()?);
            }
        }
        // Files without content look taken by name but are free: the slow way finds them.
        if taken.is_some() {
            for (range, ip) in Round::new(set, self.store.last_reserved(n), &self.config.exclude) {
                let empty = self.store.is_empty(ip);
                if empty && !resting.contains_key(&ip) && self.ticket.reserve(ip)? {
                    return Ok((ip, range));
                }
            }
        }
        let mut text = format!("no IP addresses available in range set: {set}");
        if !resting.is_empty() {
            text.push_str(&format!(" ({} released ones rest until reuseDelay has passed)", resting.len()));
        }
        Err(Error::internal(text))
    }
}

/// Whether an ADD would find an address in `set`.
pub(super) fn has_free_address(store: &Store, config: &Config, set: &RangeSet) -> Result<bool> {
    let taken = store.taken()?;
    let resting = match config.reuse_delay {
        Some(delay) => cooling::resting(store, delay),
        None => HashMap::new(),
    };
    Ok(Round::new(set, None, &config.exclude)
        .any(|(_, ip)| !resting.contains_key(&ip) && (!taken.contains(&ip) || store.is_empty(ip))))
}

/// Every address of a set once: from behind the last one handed out to the end of its range, through
/// the ranges that follow, and round to where it began. Gateways and excluded blocks are left out;
/// a block is jumped over, so that half a /64 costs one step.
struct Round<'a> {
    pieces: Vec<(&'a Range, IpAddr, IpAddr)>,
    piece: usize,
    at: Option<IpAddr>,
    exclude: &'a [IpNet],
}

impl<'a> Round<'a> {
    fn new(set: &'a RangeSet, last: Option<IpAddr>, exclude: &'a [IpNet]) -> Self {
        let whole = |r: &'a Range| (r, r.start, r.end);
        let ranges = &set.0;
        let began = last.and_then(|ip| ranges.iter().position(|r| r.contains(ip)).map(|i| (i, ip)));
        let pieces: Vec<_> = match began {
            None => ranges.iter().map(whole).collect(),
            Some((i, last)) => {
                let mut pieces = Vec::new();
                if last < ranges[i].end {
                    pieces.push((&ranges[i], next(last), ranges[i].end));
                }
                pieces.extend(ranges[i + 1..].iter().map(whole));
                pieces.extend(ranges[..i].iter().map(whole));
                pieces.push((&ranges[i], ranges[i].start, last));
                pieces
            }
        };
        let at = pieces.first().map(|p| p.1);
        Self { pieces, piece: 0, at, exclude }
    }

    /// Moves behind `ip`, into the next piece at the end of this one.
    fn advance_behind(&mut self, ip: IpAddr) {
        let Some((_, _, end)) = self.pieces.get(self.piece) else { return };
        if ip < *end {
            self.at = Some(next(ip));
        } else {
            self.piece += 1;
            self.at = self.pieces.get(self.piece).map(|p| p.1);
        }
    }
}

impl<'a> Iterator for Round<'a> {
    type Item = (&'a Range, IpAddr);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let ip = self.at?;
            let (range, _, _) = *self.pieces.get(self.piece)?;
            if let Some(block) = self.exclude.iter().find(|block| block.contains(&ip)) {
                let last = match block {
                    IpNet::V4(v4) => IpAddr::V4(v4.broadcast()),
                    IpNet::V6(v6) => IpAddr::V6(v6.broadcast()),
                };
                self.advance_behind(last);
                continue;
            }
            self.advance_behind(ip);
            if ip != range.gateway {
                return Some((range, ip));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::tests::load;
    use super::*;

    struct Pool {
        dir: tempfile::TempDir,
        config: Config,
    }

    impl Pool {
        fn new(ipam: &str) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let config =
                load(&format!(r#"{{"name":"net","ipam":{{"dataDir":{:?},{ipam}}}}}"#, dir.path()), "")
                    .unwrap();
            Self { dir, config }
        }
        fn add(&self, id: &str) -> std::result::Result<String, String> {
            let store = Store::open(&self.config.directory()).unwrap();
            Allocator::new(&store, &self.config, id, "eth0")
                .allocate_all()
                .map(|ips| ips.iter().map(|ip| ip.address.addr().to_string()).collect::<Vec<_>>().join(" "))
                .map_err(|err| err.msg)
        }
        fn del(&self, id: &str) -> Vec<IpAddr> {
            Store::open(&self.config.directory()).unwrap().release(id, "eth0").unwrap()
        }
        fn file(&self, name: &str) -> std::path::PathBuf {
            self.dir.path().join("net").join(name)
        }
        fn names(&self) -> Vec<String> {
            let mut names: Vec<String> = std::fs::read_dir(self.dir.path().join("net"))
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        }
    }

    #[test]
    fn writes_the_reference_layout() {
        use std::os::unix::fs::PermissionsExt;
        let p = Pool::new(r#""ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00::/64"}]]"#);
        assert_eq!(p.add("cid1").unwrap(), "10.1.2.2 fd00::2");
        assert_eq!(p.names(), ["10.1.2.2", "fd00::2", "last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
        assert_eq!(std::fs::read(p.file("10.1.2.2")).unwrap(), b"cid1\r\neth0");
        assert_eq!(std::fs::read(p.file("last_reserved_ip.1")).unwrap(), b"fd00::2");
        for name in ["10.1.2.2", "last_reserved_ip.0"] {
            assert_eq!(
                std::fs::metadata(p.file(name)).unwrap().permissions().mode() & 0o777,
                0o600,
                "{name}"
            );
        }
    }

    #[test]
    fn goes_round_and_meets_exhaustion() {
        let p = Pool::new(r#""subnet":"10.1.2.0/29""#);
        for want in 2..=6 {
            assert_eq!(p.add(&format!("c{want}")).unwrap(), format!("10.1.2.{want}"));
        }
        assert_eq!(
            p.add("c7").unwrap_err(),
            "failed to allocate for range 0: no IP addresses available in range set: 10.1.2.1-10.1.2.6"
        );
        p.del("c3");
        p.del("c5");
        assert_eq!(p.add("x").unwrap(), "10.1.2.3", "round from the last one handed out, .6");
        std::fs::write(p.file("last_reserved_ip.0"), "junk").unwrap();
        assert_eq!(p.add("y").unwrap(), "10.1.2.5");
    }

    #[test]
    fn crosses_ranges_and_octets() {
        let p = Pool::new(
            r#""ranges":[[{"subnet":"10.2.0.0/16","rangeStart":"10.2.0.254","rangeEnd":"10.2.1.1"},
                {"subnet":"10.3.0.0/16","rangeStart":"10.3.0.9","rangeEnd":"10.3.0.9"}]]"#,
        );
        let got: Vec<String> = (0..5).map(|i| p.add(&format!("c{i}")).unwrap()).collect();
        assert_eq!(got, ["10.2.0.254", "10.2.0.255", "10.2.1.0", "10.2.1.1", "10.3.0.9"]);
        assert!(p.add("more").is_err());
        p.del("c1");
        assert_eq!(p.add("again").unwrap(), "10.2.0.255");
    }

    #[test]
    fn v6_stays_v6_across_a_carry() {
        let p = Pool::new(r#""ranges":[[{"subnet":"fd00::/64","rangeStart":"fd00::ff:ffff"}]]"#);
        assert_eq!(p.add("a").unwrap(), "fd00::ff:ffff");
        assert_eq!(p.add("b").unwrap(), "fd00::100:0");
    }

    #[test]
    fn one_attachment_gets_one_address_per_set() {
        let p = Pool::new(r#""subnet":"10.1.2.0/24""#);
        p.add("cid1").unwrap();
        assert_eq!(
            p.add("cid1").unwrap_err(),
            "failed to allocate for range 0: 10.1.2.2 has been allocated to cid1, duplicate allocation is not allowed"
        );
        std::fs::write(p.file("10.1.2.9"), " old \n").unwrap();
        assert!(p.add("old").unwrap_err().contains("10.1.2.9 has been allocated to old"));
        assert_eq!(p.del("old").len(), 1);
        assert!(p.del("old").is_empty());
    }

    #[test]
    fn requested_addresses_are_taken_or_refused_with_the_holder() {
        let mut p = Pool::new(r#""ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"10.5.0.0/24"}]]"#);
        let ask = |p: &mut Pool, ips: &[&str]| {
            p.config.requested = ips.iter().map(|ip| ip.parse().unwrap()).collect()
        };
        ask(&mut p, &["10.5.0.50", "10.1.2.30"]);
        assert_eq!(p.add("a").unwrap(), "10.1.2.30 10.5.0.50");
        assert_eq!(
            p.add("b").unwrap_err(),
            "failed to allocate for range 0: requested IP address 10.1.2.30 is not available in range set \
             10.1.2.1-10.1.2.254 (held by a)"
        );
        ask(&mut p, &["10.1.2.1"]);
        assert!(p.add("b").unwrap_err().contains("requested ip 10.1.2.1 is subnet's gateway"));
        ask(&mut p, &["10.9.9.9", "10.1.2.31"]);
        assert_eq!(p.add("b").unwrap_err(), "failed to allocate all requested IPs: 10.9.9.9");
        assert!(!p.file("10.1.2.31").exists(), "an ADD that fails keeps nothing");
        ask(&mut p, &[]);
        assert_eq!(
            p.add("c").unwrap(),
            "10.1.2.32 10.5.0.52",
            "last_reserved moved with the failed requests"
        );
    }

    #[test]
    fn a_file_without_owner_blocks_nobody() {
        let p = Pool::new(r#""subnet":"10.1.2.0/29""#);
        std::fs::create_dir_all(p.file("")).unwrap();
        std::fs::write(p.file("10.1.2.2"), "").unwrap();
        assert_eq!(p.add("a").unwrap(), "10.1.2.2");
        for i in 3..=6 {
            p.add(&format!("c{i}")).unwrap();
        }
        std::fs::write(p.file("10.1.2.6"), "").unwrap();
        assert_eq!(p.add("b").unwrap(), "10.1.2.6", "also when the directory was read as a whole");
    }

    #[test]
    fn excluded_blocks_are_jumped_over() {
        let p = Pool::new(
            r#""ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00::/64"}]],"exclude":["10.1.2.2","10.1.2.4/30","fd00::/65"]"#,
        );
        assert_eq!(p.add("a").unwrap(), "10.1.2.3 fd00::8000:0:0:0");
        assert_eq!(p.add("b").unwrap(), "10.1.2.8 fd00::8000:0:0:1");
    }

    #[test]
    fn a_released_address_rests() {
        let p = Pool::new(r#""subnet":"10.1.2.0/29","reuseDelay":"1h""#);
        for i in 2..=6 {
            p.add(&format!("c{i}")).unwrap();
        }
        let freed = p.del("c3");
        {
            let store = Store::open(&p.config.directory()).unwrap();
            cooling::note(&store, &freed, p.config.reuse_delay.unwrap()).unwrap();
            assert!(!has_free_address(&store, &p.config, &p.config.sets[0]).unwrap());
        }
        assert!(p.add("x").unwrap_err().ends_with("(1 released ones rest until reuseDelay has passed)"));
        std::fs::write(p.file(".felt-released"), "10.1.2.3 5\n").unwrap();
        assert_eq!(p.add("x").unwrap(), "10.1.2.3");
    }

    #[test]
    fn parallel_threads_never_share_an_address() {
        let p = Pool::new(r#""subnet":"10.1.0.0/24""#);
        let mut all: Vec<String> = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..64)
                .map(|i| {
                    let p = &p;
                    scope.spawn(move || {
                        if i == 32 {
                            let _ = std::fs::remove_file(p.file("lock"));
                        }
                        p.add(&format!("c{i}")).unwrap()
                    })
                })
                .collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect()
        });
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 64);
    }
}
