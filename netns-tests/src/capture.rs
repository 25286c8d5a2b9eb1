//! What really was on a link: `tcpdump` writes a capture file, this module reads it (the classic pcap format, link
//! type Ethernet) and takes the outer headers apart. Nothing here is shared with felt's own parsers.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::cmd;
use crate::netns::{Place, Process};

/// A capture under way. Dropping it ends it.
#[derive(Debug)]
pub struct Capture {
    process: Process,
    file: PathBuf,
    log: PathBuf,
}

impl Capture {
    /// Captures `device` in a place, at most `snap` bytes of each frame, frames matching the filter (pcap-filter(7);
    /// empty = all). Returns when it listens. `file` is on the host.
    ///
    /// # Errors
    /// When `tcpdump` is missing or refuses the filter.
    pub fn start(at: &Place, device: &str, snap: u32, filter: &str, file: &Path) -> Result<Capture> {
        ensure!(cmd::have("tcpdump"), "tcpdump is missing (package tcpdump)");
        let log = file.with_extension("log");
        let _ = fs::remove_file(file);
        let _ = fs::remove_file(&log);
        // All namespaces, so that it ends with the lab; the path goes through the node's own view of the lab's files.
        let mut c = at.command("tcpdump");
        // Promiscuous even on a bridge: it shows what it forwards only then.
        c.args(["-i", device, "-n", "-U", "--immediate-mode", "-Z", "root", "-B", "16384"]);
        c.args(["-s", &snap.to_string(), "-w", "-"]);
        c.args(filter.split_whitespace());
        let out = fs::File::create(file).with_context(|| format!("create {}", file.display()))?;
        let err = fs::File::create(&log).with_context(|| format!("create {}", log.display()))?;
        c.stdin(std::process::Stdio::null()).stdout(out).stderr(err);
        let mut process = Process::start(c).with_context(|| format!("start tcpdump on {}", at.name))?;
        let told = || fs::read_to_string(&log).unwrap_or_default();
        cmd::wait_for("tcpdump to listen", Duration::from_secs(5), || {
            if told().contains("listening on") {
                return Some(Ok(()));
            }
            let ended = process.front().try_wait().ok().flatten();
            ended.map(|status| Err(anyhow::anyhow!("tcpdump: {status}: {}", told())))
        })??;
        Ok(Capture { process, file: file.to_path_buf(), log })
    }

    /// Ends the capture and reads it.
    ///
    /// # Errors
    /// When the kernel dropped frames (the capture would not be the whole truth) or the file is damaged.
    pub fn finish(mut self) -> Result<Vec<Frame>> {
        // Frames on their way through the ring reach tcpdump within its read time-out.
        std::thread::sleep(Duration::from_millis(150));
        self.process.signal("INT");
        self.process.wait(Duration::from_secs(5))?;
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        let dropped = said.lines().find_map(|l| l.strip_suffix(" packets dropped by kernel"));
        ensure!(dropped.is_none_or(|n| n.trim() == "0"), "tcpdump: {said}");
        let bytes = fs::read(&self.file).with_context(|| format!("read {}", self.file.display()))?;
        parse(&bytes)
    }
}

/// One captured frame.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Seconds since the epoch.
    pub time: f64,
    /// Length on the link (more than `bytes` when cut).
    pub length: usize,
    /// The captured bytes, from the Ethernet header on.
    pub bytes: Vec<u8>,
}

/// An IP packet taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// IP protocol (or last IPv6 next header; extension headers are not walked).
    pub protocol: u8,
    /// Time to live or hop limit.
    pub ttl: u8,
    /// Type of service or traffic class.
    pub tos: u8,
    /// May not be fragmented (IPv4's flag; IPv6: always).
    pub dont_fragment: bool,
    /// Offset or more-fragments set.
    pub fragment: bool,
    /// Ports of UDP and TCP.
    pub ports: Option<(u16, u16)>,
    /// What follows the UDP header, or the IP header of anything else.
    pub payload: &'a [u8],
    /// The IP header's total length.
    pub total_length: usize,
}

/// Protocol number of UDP.
pub const UDP: u8 = 17;

impl Frame {
    /// Ethernet type.
    pub fn ethertype(&self) -> u16 {
        self.bytes.get(12..14).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]))
    }

    /// The IP packet, if it is one.
    pub fn packet(&self) -> Option<Packet<'_>> {
        match self.ethertype() {
            0x0800 | 0x86dd => ip(self.bytes.get(14..)?),
            _ => None,
        }
    }

    /// The VXLAN header's VNI and the inner frame, if the frame is UDP to this port with a valid-VNI flag.
    pub fn vxlan(&self, port: u16) -> Option<(u32, Frame)> {
        let packet = self.packet()?;
        if packet.protocol != UDP || packet.fragment || packet.ports?.1 != port {
            return None;
        }
        let h = packet.payload.get(..8)?;
        if h[0] != 0x08 {
            return None;
        }
        let inner = packet.payload.get(8..)?;
        let vni = u32::from_be_bytes([0, h[4], h[5], h[6]]);
        Some((
            vni,
            Frame {
                time: self.time,
                length: self.length - (self.bytes.len() - inner.len()),
                bytes: inner.to_vec(),
            },
        ))
    }
}

/// The inner packets' lengths of a tunnel datagram's payload. A virtual link carries segmented sends unsegmented, so
/// one captured frame may hold many datagrams, each with its `header` bytes (22 for VXLAN and Ethernet, 0 for udp) in
/// front of a whole inner packet. `None` = the payload is something else (or was cut by the snap length).
pub fn inner_lengths(mut payload: &[u8], header: usize) -> Option<Vec<usize>> {
    let mut lengths = Vec::new();
    while !payload.is_empty() {
        let inner = ip(payload.get(header..)?)?.total_length;
        lengths.push(inner);
        payload = payload.get(header + inner..)?;
    }
    Some(lengths)
}

/// Takes an IP packet apart.
pub fn ip(b: &[u8]) -> Option<Packet<'_>> {
    match b.first()? >> 4 {
        4 => {
            let header = usize::from(b[0] & 15) * 4;
            let h = b.get(..header.max(20))?;
            let total_length = usize::from(u16::from_be_bytes([h[2], h[3]]));
            let flags = u16::from_be_bytes([h[6], h[7]]);
            let rest = b.get(header..total_length.min(b.len()))?;
            Some(finish(
                IpAddr::V4(Ipv4Addr::new(h[12], h[13], h[14], h[15])),
                IpAddr::V4(Ipv4Addr::new(h[16], h[17], h[18], h[19])),
                h[9],
                Shared {
                    ttl: h[8],
                    tos: h[1],
                    dont_fragment: flags & 0x4000 != 0,
                    fragment: flags & 0x3fff != 0,
                    total_length,
                },
                rest,
            ))
        }
        6 => {
            let h = b.get(..40)?;
            let address =
                |at: usize| <[u8; 16]>::try_from(&h[at..at + 16]).ok().map(|a| IpAddr::V6(Ipv6Addr::from(a)));
            let total_length = 40 + usize::from(u16::from_be_bytes([h[4], h[5]]));
            let tos = (h[0] << 4) | (h[1] >> 4);
            let fragment = h[6] == 44;
            let rest = b.get(40..total_length.min(b.len()))?;
            Some(finish(
                address(8)?,
                address(24)?,
                h[6],
                Shared { ttl: h[7], tos, dont_fragment: true, fragment, total_length },
                rest,
            ))
        }
        _ => None,
    }
}

struct Shared {
    ttl: u8,
    tos: u8,
    dont_fragment: bool,
    fragment: bool,
    total_length: usize,
}

fn finish(source: IpAddr, destination: IpAddr, protocol: u8, s: Shared, rest: &[u8]) -> Packet<'_> {
    let ports = match protocol {
        6 | UDP if !s.fragment => {
            rest.get(..4).map(|p| (u16::from_be_bytes([p[0], p[1]]), u16::from_be_bytes([p[2], p[3]])))
        }
        _ => None,
    };
    let payload = if protocol == UDP && ports.is_some() { rest.get(8..).unwrap_or(&[]) } else { rest };
    Packet {
        source,
        destination,
        protocol,
        ttl: s.ttl,
        tos: s.tos,
        dont_fragment: s.dont_fragment,
        fragment: s.fragment,
        ports,
        payload,
        total_length: s.total_length,
    }
}

/// Reads a classic pcap file of Ethernet frames (pcap-savefile(5)), either byte order.
///
/// # Errors
/// When it is something else. A record cut at the end is left out.
pub fn parse(file: &[u8]) -> Result<Vec<Frame>> {
    let head = file.get(..24).context("the capture file has no header")?;
    let magic = [head[0], head[1], head[2], head[3]];
    let word = |b: &[u8]| -> u32 {
        let b = [b[0], b[1], b[2], b[3]];
        if magic[0] == 0xa1 { u32::from_be_bytes(b) } else { u32::from_le_bytes(b) }
    };
    if !matches!(word(&magic), 0xa1b2_c3d4) {
        bail!("not a microsecond pcap file (magic {magic:02x?})");
    }
    ensure!(word(&head[20..]) & 0xffff == 1, "link type {} is not Ethernet", word(&head[20..]));
    let mut frames = Vec::new();
    let mut rest = &file[24..];
    while rest.len() >= 16 {
        let (record, after) = rest.split_at(16);
        let captured = usize::try_from(word(&record[8..])).context("length")?;
        if after.len() < captured {
            break;
        }
        let (bytes, after) = after.split_at(captured);
        frames.push(Frame {
            time: f64::from(word(record)) + f64::from(word(&record[4..])) / 1e6,
            length: usize::try_from(word(&record[12..])).context("length")?,
            bytes: bytes.to_vec(),
        });
        rest = after;
    }
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame() -> Frame {
        // Ethernet, IPv4, UDP 50000 -> 8472, VXLAN with VNI 5, inner Ethernet without payload.
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        bytes.extend([0x45, 0, 0, 50, 0, 1, 0x40, 0, 64, 17, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2]);
        bytes.extend([0xc3, 0x50, 0x21, 0x18, 0, 30, 0, 0]);
        bytes.extend([8, 0, 0, 0, 0, 0, 5, 0]);
        bytes.extend([2, 0, 0, 0, 0, 3, 2, 0, 0, 0, 0, 4, 8, 0]);
        Frame { time: 0.0, length: bytes.len(), bytes }
    }

    #[test]
    fn vxlan_is_taken_apart() {
        let frame = frame();
        let packet = frame.packet().expect("IPv4");
        assert_eq!(packet.ports, Some((50_000, 8472)));
        assert!(packet.dont_fragment && !packet.fragment && packet.ttl == 64);
        let (vni, inner) = frame.vxlan(8472).expect("VXLAN");
        assert_eq!((vni, inner.length, inner.ethertype()), (5, 14, 0x0800));
        assert!(frame.vxlan(4789).is_none());
    }

    #[test]
    fn datagrams_sent_in_one_go_are_counted_singly() {
        let inner =
            [&[0x45, 0, 0, 28, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2][..], &[0; 8]].concat();
        let one = [&[0_u8; 22][..], &inner].concat();
        let three = [one.clone(), one.clone(), one.clone()].concat();
        assert_eq!(inner_lengths(&three, 22), Some(vec![28; 3]));
        assert_eq!(inner_lengths(&inner, 0), Some(vec![28]));
        assert_eq!(inner_lengths(&three[..three.len() - 1], 22), None, "cut");
    }

    #[test]
    fn every_truncation_is_survived() {
        let whole = frame();
        for n in 0..whole.bytes.len() {
            let cut = Frame { bytes: whole.bytes[..n].to_vec(), ..whole.clone() };
            let _ = (cut.packet(), cut.vxlan(8472));
        }
    }

    #[test]
    fn pcap_records_are_read_until_the_cut_one() {
        let mut file =
            vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0];
        file.extend([1, 0, 0, 0, 0x20, 0xa1, 7, 0, 2, 0, 0, 0, 60, 0, 0, 0, 0xaa, 0xbb]);
        file.extend([2, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 9, 0, 0, 0, 1]);
        let frames = parse(&file).expect("a pcap file");
        assert_eq!(frames.len(), 1);
        assert_eq!((frames[0].length, frames[0].bytes.as_slice()), (60, &[0xaa, 0xbb][..]));
        assert!((frames[0].time - 1.5).abs() < 1e-6);
    }
}
