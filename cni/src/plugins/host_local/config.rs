//! The configuration: ranges that cannot be wrong, requested addresses, routes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use crate::json::{Fields, Value};
use crate::skel::Call;
use crate::types::args;
use crate::types::error::{Error, Result};
use crate::types::result::{Route, parse_cidr, parse_ip};
use crate::types::version::{Shape, SpecVersion};

/// A validated configuration.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Config {
    /// Network name: the directory below `data_dir`.
    pub name: String,
    /// Where reservations live.
    pub data_dir: PathBuf,
    /// One address is taken from each set.
    pub sets: Vec<RangeSet>,
    /// Echoed into the result.
    pub routes: Vec<Route>,
    /// File whose settings become the result's `dns`.
    pub resolv_conf: Option<PathBuf>,
    /// Addresses asked for by the caller.
    pub requested: Vec<IpAddr>,
    /// Addresses never handed out (felt's own key).
    pub exclude: Vec<IpNet>,
    /// How long a released address rests (felt's own key).
    pub reuse_delay: Option<Duration>,
}

/// Ranges of one family that do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RangeSet(pub Vec<Range>);

/// Addresses `start..=end` of a subnet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Range {
    /// The subnet, without host bits.
    pub subnet: IpNet,
    /// First address handed out.
    pub start: IpAddr,
    /// Last address handed out.
    pub end: IpAddr,
    /// Never handed out; reported with each address.
    pub gateway: IpAddr,
}

impl Config {
    /// The directory of this network's reservations.
    pub(super) fn directory(&self) -> PathBuf {
        self.data_dir.join(&self.name)
    }

    /// Reads and validates.
    pub(super) fn load(call: &Call<'_>) -> Result<Self> {
        let value = call.value();
        let f = Fields::of("Net", &value)?;
        let Some(ipam) = f.object_of("ipam", "IPAMConfig.ipam")? else {
            return Err(Error::internal("IPAM config missing 'ipam' key"));
        };
        let text = |key| -> Result<Option<&str>> { Ok(ipam.string(key)?.filter(|s| !s.is_empty())) };
        let data_dir = text("dataDir")?.unwrap_or("/var/lib/cni/networks");
        let runtime = f.object_of("runtimeConfig", "struct")?;
        let mut raw_sets: Vec<Vec<RawRange>> = Vec::new();
        if let Some(runtime) = &runtime {
            raw_sets.extend(read_sets(runtime, "ipRanges")?);
        }
        let legacy = RawRange::read(&ipam)?;
        if legacy.subnet.is_some() {
            raw_sets.push(vec![legacy]);
        }
        raw_sets.extend(read_sets(&ipam, "ranges")?);

        let routes = ipam.array("routes")?.iter().map(Route::read).collect::<Result<_>>()?;
        let requested = requested(call, &f, runtime.as_ref())?;
        if raw_sets.is_empty() {
            return Err(Error::internal("no IP ranges specified"));
        }
        let sets = validate(raw_sets, call.conf.version)?;
        Ok(Self {
            name: call.conf.name.clone(),
            data_dir: data_dir.into(),
            sets,
            routes,
            resolv_conf: text("resolvConf")?.map(PathBuf::from),
            requested,
            exclude: ipam
                .strings("exclude")?
                .unwrap_or_default()
                .iter()
                .map(|text| parse_block(text).map_err(|err| err.context("exclude")))
                .collect::<Result<_>>()?,
            reuse_delay: text("reuseDelay")?
                .map(|text| {
                    parse_duration(text).ok_or_else(|| {
                        Error::internal(format!("reuseDelay: time: invalid duration {text:?}"))
                    })
                })
                .transpose()?
                .filter(|d| !d.is_zero()),
        })
    }
}

fn requested(call: &Call<'_>, f: &Fields<'_>, runtime: Option<&Fields<'_>>) -> Result<Vec<IpAddr>> {
    let mut out = Vec::new();
    let pairs = args::parse(&call.env.args, &["IP"])?;
    if let Some(text) = args::last(&pairs, "IP").filter(|s| !s.is_empty()) {
        out.push(parse_address(text).map_err(|err| {
            Error::internal(format!(
                "ARGS: error parsing value of pair {:?}: {}",
                format!("IP={text}"),
                err.msg.replace("address: ", "address ")
            ))
        })?);
    }
    let mut lists = Vec::new();
    if let Some(cni) =
        f.object_of("args", "struct")?.map(|a| a.object_of("cni", "IPAMArgs")).transpose()?.flatten()
    {
        lists.push(cni.strings("ips")?);
    }
    if let Some(runtime) = runtime {
        lists.push(runtime.strings("ips")?);
    }
    for text in lists.into_iter().flatten().flatten() {
        out.push(parse_address(&text)?);
    }
    Ok(out)
}

/// An address, with or without a prefix length (which is ignored).
fn parse_address(text: &str) -> Result<IpAddr> {
    if text.contains('/') { parse_cidr(text).map(|net| net.addr()) } else { parse_ip(text) }
}

/// An address or a block.
fn parse_block(text: &str) -> Result<IpNet> {
    if text.contains('/') { parse_cidr(text).map(|net| net.trunc()) } else { parse_ip(text).map(IpNet::from) }
}

/// Go's duration text: `90s`, `1h30m`, `1.5m`, `250ms`.
pub(in crate::plugins) fn parse_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut total = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(rest.len());
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let (unit, scale) =
            [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("h", 3600.0), ("m", 60.0), ("s", 1.0)]
                .into_iter()
                .find(|(unit, _)| rest.starts_with(unit))?;
        rest = &rest[unit.len()..];
        total += number * scale;
    }
    Duration::try_from_secs_f64(total).ok().filter(|_| !text.is_empty())
}

#[derive(Debug, Clone, Default)]
struct RawRange {
    subnet: Option<IpNet>,
    start: Option<IpAddr>,
    end: Option<IpAddr>,
    gateway: Option<IpAddr>,
}

impl RawRange {
    fn read(f: &Fields<'_>) -> Result<Self> {
        let ip = |key| -> Result<Option<IpAddr>> {
            f.string(key)?.filter(|s| !s.is_empty()).map(parse_ip).transpose()
        };
        Ok(Self {
            subnet: f.string("subnet")?.map(parse_cidr).transpose()?,
            start: ip("rangeStart")?,
            end: ip("rangeEnd")?,
            gateway: ip("gateway")?,
        })
    }
}

fn read_sets(f: &Fields<'_>, key: &str) -> Result<Vec<Vec<RawRange>>> {
    f.array(key)?
        .iter()
        .map(|set| match set {
            Value::Array(ranges) => {
                ranges.iter().map(|r| RawRange::read(&Fields::of("allocator.Range", r)?)).collect()
            }
            Value::Null => Ok(Vec::new()),
            other => Err(f.mismatch(key, other, "allocator.RangeSet")),
        })
        .collect()
}

fn validate(raw_sets: Vec<Vec<RawRange>>, version: SpecVersion) -> Result<Vec<RangeSet>> {
    let mut sets: Vec<RangeSet> = Vec::new();
    for (i, raw) in raw_sets.into_iter().enumerate() {
        sets.push(
            RangeSet::of(raw).map_err(|text| Error::internal(format!("invalid range set {i}: {text}")))?,
        );
    }
    let v4 = sets.iter().filter(|s| s.is_ipv4()).count();
    if version.shape() == Shape::Legacy && (v4 > 1 || sets.len() - v4 > 1) {
        return Err(Error::internal(format!(
            "CNI version {version} does not support more than 1 address per family"
        )));
    }
    for (i, a) in sets.iter().enumerate() {
        for (j, b) in sets.iter().enumerate().skip(i + 1) {
            if a.overlaps(b) {
                return Err(Error::internal(format!("range set {i} overlaps with {j}")));
            }
        }
    }
    Ok(sets)
}

impl RangeSet {
    fn of(raw: Vec<RawRange>) -> std::result::Result<Self, String> {
        let ranges = raw.into_iter().map(Range::of).collect::<std::result::Result<Vec<_>, _>>()?;
        let Some(first) = ranges.first() else { return Err("empty range set".into()) };
        if ranges.iter().any(|r| r.subnet.addr().is_ipv4() != first.subnet.addr().is_ipv4()) {
            return Err("mixed address families".into());
        }
        for (i, a) in ranges.iter().enumerate() {
            if let Some(b) = ranges[i + 1..].iter().find(|b| a.overlaps(b)) {
                return Err(format!("subnets {a} and {b} overlap"));
            }
        }
        Ok(Self(ranges))
    }

    /// Whether the set's family is IPv4.
    pub(super) fn is_ipv4(&self) -> bool {
        self.0.iter().any(|r| r.subnet.addr().is_ipv4())
    }

    /// The range that holds `ip`.
    pub(super) fn range_of(&self, ip: IpAddr) -> Option<&Range> {
        self.0.iter().find(|r| r.contains(ip))
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.0.iter().any(|a| other.0.iter().any(|b| a.overlaps(b)))
    }
}

impl Range {
    fn of(raw: RawRange) -> std::result::Result<Self, String> {
        let Some(subnet) = raw.subnet else { return Err("IPNet IP and Mask version mismatch".into()) };
        if subnet.prefix_len() + 2 > subnet.max_prefix_len() {
            return Err(format!("Network {subnet} too small to allocate from"));
        }
        if subnet.addr() != subnet.network() {
            return Err(format!(
                "Network has host bits set. For a subnet mask of length {} the network address is {}",
                subnet.prefix_len(),
                subnet.network()
            ));
        }
        let first = next(subnet.network());
        let last = match subnet {
            IpNet::V4(v4) => IpAddr::V4(Ipv4Addr::from(u32::from(v4.broadcast()) - 1)),
            IpNet::V6(v6) => IpAddr::V6(v6.broadcast()),
        };
        if let Some(start) = raw.start
            && (!subnet.contains(&start)
                || raw.end.is_some_and(|end| end.is_ipv4() == start.is_ipv4() && start > end))
        {
            return Err(format!("RangeStart {start} not in network {subnet}"));
        }
        if let Some(end) = raw.end
            && !subnet.contains(&end)
        {
            return Err(format!("RangeEnd {end} not in network {subnet}"));
        }
        // The network address itself is nobody's: a range may name it, but starts after it.
        let start = raw.start.map_or(first, |start| start.max(first));
        let end = raw.end.unwrap_or(last);
        if start > end {
            return Err(format!("RangeStart {start} is after the last address {end}"));
        }
        Ok(Self { subnet, start, end, gateway: raw.gateway.unwrap_or(first) })
    }

    /// Whether `ip` lies between start and end.
    pub(super) fn contains(&self, ip: IpAddr) -> bool {
        ip.is_ipv4() == self.start.is_ipv4() && self.start <= ip && ip <= self.end
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.start.is_ipv4() == other.start.is_ipv4()
            && (self.contains(other.start) || other.contains(self.start))
    }
}

/// The following address of the same family; the last one is followed by itself.
pub(super) fn next(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(v4) => Ipv4Addr::from(u32::from(v4).saturating_add(1)).into(),
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6).saturating_add(1)).into(),
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, range) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            range.fmt(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::skel::Env;
    use crate::types::conf::NetConf;

    pub(in super::super) fn load(config: &str, cni_args: &str) -> Result<Config> {
        let Value::Object(raw) = Value::parse(config.as_bytes()).unwrap() else { panic!("not an object") };
        let env = Env { container_id: "cid1".into(), args: cni_args.into(), ..Env::default() };
        let version = raw.get("cniVersion").and_then(Value::as_str).unwrap_or("1.0.0").to_owned();
        let conf = NetConf::from_object(&raw, SpecVersion::parse(&version).unwrap())?;
        Config::load(&Call { env: &env, stdin: b"", conf })
    }

    fn ranges(sets: &str) -> std::result::Result<String, String> {
        load(&format!(r#"{{"name":"n","ipam":{{"type":"host-local","ranges":{sets}}}}}"#), "")
            .map(|c| c.sets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
            .map_err(|err| err.msg)
    }

    #[test]
    fn defaults_leave_out_network_and_broadcast() {
        assert_eq!(ranges(r#"[[{"subnet":"10.1.2.0/24"}]]"#).unwrap(), "10.1.2.1-10.1.2.254");
        assert_eq!(ranges(r#"[[{"subnet":"10.1.2.8/29"}]]"#).unwrap(), "10.1.2.9-10.1.2.14");
        assert_eq!(ranges(r#"[[{"subnet":"2001:db8:1::/125"}]]"#).unwrap(), "2001:db8:1::1-2001:db8:1::7");
        assert_eq!(
            ranges(r#"[[{"subnet":"10.1.2.0/24","rangeStart":"10.1.2.0"}]]"#).unwrap(),
            "10.1.2.1-10.1.2.254"
        );
        let c = load(r#"{"name":"n","ipam":{"subnet":"10.1.2.0/24","rangeStart":"10.1.2.9"}}"#, "").unwrap();
        assert_eq!(c.sets[0].0[0].gateway.to_string(), "10.1.2.1");
        assert_eq!(c.directory(), PathBuf::from("/var/lib/cni/networks/n"));
    }

    #[test]
    fn wrong_ranges_are_named() {
        for (sets, text) in [
            ("[]", "no IP ranges specified"),
            ("[[]]", "invalid range set 0: empty range set"),
            (
                r#"[[{"subnet":"10.0.0.0/31"}]]"#,
                "invalid range set 0: Network 10.0.0.0/31 too small to allocate from",
            ),
            (
                r#"[[{"subnet":"2001:db8::/127"}]]"#,
                "invalid range set 0: Network 2001:db8::/127 too small to allocate from",
            ),
            (
                r#"[[{"subnet":"10.1.2.3/24"}]]"#,
                "invalid range set 0: Network has host bits set. For a subnet mask of length 24 the network address is 10.1.2.0",
            ),
            (
                r#"[[{"subnet":"10.1.2.0/24","rangeStart":"10.1.3.1"}]]"#,
                "invalid range set 0: RangeStart 10.1.3.1 not in network 10.1.2.0/24",
            ),
            (
                r#"[[{"subnet":"10.1.2.0/24","rangeStart":"10.1.2.50","rangeEnd":"10.1.2.40"}]]"#,
                "invalid range set 0: RangeStart 10.1.2.50 not in network 10.1.2.0/24",
            ),
            (
                r#"[[{"subnet":"10.1.2.0/24","rangeStart":"10.1.2.255"}]]"#,
                "invalid range set 0: RangeStart 10.1.2.255 is after the last address 10.1.2.254",
            ),
            (
                r#"[[{"subnet":"10.1.2.0/24","rangeEnd":"10.1.3.1"}]]"#,
                "invalid range set 0: RangeEnd 10.1.3.1 not in network 10.1.2.0/24",
            ),
            (
                r#"[[{"subnet":"10.1.2.0/24"},{"subnet":"fd00::/64"}]]"#,
                "invalid range set 0: mixed address families",
            ),
            (
                r#"[[{"subnet":"10.1.2.0/24"},{"subnet":"10.1.0.0/16"}]]"#,
                "invalid range set 0: subnets 10.1.2.1-10.1.2.254 and 10.1.0.1-10.1.255.254 overlap",
            ),
            (r#"[[{"subnet":"10.1.2.0/24"}],[{"subnet":"10.1.2.0/24"}]]"#, "range set 0 overlaps with 1"),
            (r#"[[{"subnet":"x"}]]"#, "invalid CIDR address: x"),
        ] {
            assert_eq!(ranges(sets).unwrap_err(), text, "{sets}");
        }
        assert_eq!(load(r#"{"name":"n"}"#, "").unwrap_err().msg, "IPAM config missing 'ipam' key");
        let two = r#"{"name":"n","cniVersion":"0.2.0","ipam":{"ranges":[[{"subnet":"10.1.0.0/24"}],[{"subnet":"10.2.0.0/24"}]]}}"#;
        assert_eq!(
            load(two, "").unwrap_err().msg,
            "CNI version 0.2.0 does not support more than 1 address per family"
        );
    }

    #[test]
    fn runtime_ranges_come_before_the_old_key_and_the_list() {
        let c = load(
            r#"{"name":"n","runtimeConfig":{"ipRanges":[[{"subnet":"10.3.0.0/24"}]],"ips":["10.3.0.7/24"]},
                "args":{"cni":{"ips":["10.1.0.9"]}},
                "ipam":{"SUBNET":"10.1.0.0/24","ranges":[[{"subnet":"10.2.0.0/24"}]],"ipRange":"x"}}"#,
            "IgnoreUnknown=1;IP=10.2.0.5/24",
        )
        .unwrap();
        let first: Vec<String> = c.sets.iter().map(|s| s.0[0].subnet.to_string()).collect();
        assert_eq!(first, ["10.3.0.0/24", "10.1.0.0/24", "10.2.0.0/24"]);
        let asked: Vec<String> = c.requested.iter().map(ToString::to_string).collect();
        assert_eq!(asked, ["10.2.0.5", "10.1.0.9", "10.3.0.7"]);
    }

    #[test]
    fn bad_addresses_are_named() {
        let base = r#"{"name":"n","ipam":{"subnet":"10.1.0.0/24"}}"#;
        assert!(load(base, "IP=10.1.0.300").unwrap_err().msg.contains("10.1.0.300"));
        assert!(load(base, "MAC=1").unwrap_err().msg.starts_with("ARGS: unknown args"));
        let c = r#"{"name":"n","runtimeConfig":{"ips":["x"]},"ipam":{"subnet":"10.1.0.0/24"}}"#;
        assert_eq!(load(c, "").unwrap_err().msg, "invalid IP address: x");
    }

    #[test]
    fn own_keys_are_checked() {
        let c = load(
            r#"{"name":"n","ipam":{"subnet":"10.1.0.0/24","exclude":["10.1.0.5","10.1.0.16/28"],"reuseDelay":"1m30s"}}"#,
            "",
        )
        .unwrap();
        assert_eq!(c.exclude.len(), 2);
        assert_eq!(c.reuse_delay, Some(Duration::from_secs(90)));
        for bad in [r#""exclude":["x"]"#, r#""reuseDelay":"5""#, r#""reuseDelay":"s""#] {
            assert!(load(&format!(r#"{{"name":"n","ipam":{{"subnet":"10.1.0.0/24",{bad}}}}}"#), "").is_err());
        }
        assert_eq!(parse_duration("1.5ms"), Some(Duration::from_micros(1500)));
    }
}
