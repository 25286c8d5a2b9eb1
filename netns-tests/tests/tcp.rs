//! TCP through the tunnel: bulk in every shape, with the payload's hash compared.

use felt_netns_tests::check::{ok, pod, up};
use felt_netns_tests::topology::{Backend, Lab, Spec};
use felt_netns_tests::traffic::{self, Tcp};

const MIB: u64 = 1 << 20;

fn labs() -> [Lab; 2] {
    [Backend::Vxlan, Backend::Udp].map(|b| up(Spec::new("t-tcp", 2).backend(b).pods(1).dual_stack()))
}

#[test]
fn one_stream_arrives_unchanged_both_ways_and_families() {
    for lab in labs() {
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        for (from, to) in [(a, b), (b, a)] {
            for addr in to.addresses() {
                let how = Tcp { bytes: 64 * MIB, hash: true, ..Tcp::default() };
                let r = ok(traffic::tcp(&from.place, &to.place, addr, &how));
                assert_eq!(r.bytes, how.bytes, "{:?} to {addr}", lab.spec.backend);
            }
        }
    }
}

#[test]
fn eight_streams_arrive_unchanged() {
    for lab in labs() {
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        let how = Tcp { streams: 8, bytes: 8 * MIB, hash: true, ..Tcp::default() };
        let r = ok(traffic::tcp(&a.place, &b.place, ok(b.v4()), &how));
        assert_eq!((r.bytes, r.hashes.len()), (8 * how.bytes, 8));
    }
}

#[test]
fn both_directions_at_once_arrive_unchanged() {
    for lab in labs() {
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        let how = Tcp { bytes: 32 * MIB, hash: true, ..Tcp::default() };
        std::thread::scope(|s| {
            let there = s.spawn(|| traffic::tcp(&a.place, &b.place, b.v4()?, &how));
            let back = s.spawn(|| traffic::tcp(&b.place, &a.place, a.v4()?, &how));
            for t in [there, back] {
                assert_eq!(ok(t.join().expect("no panic")).bytes, how.bytes);
            }
        });
    }
}

#[test]
fn odd_lengths_arrive_unchanged() {
    let [lab, _] = labs();
    let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
    for bytes in [1, 2, 7, 536, 1397, 1398, 1399, 65_535, 65_537, 1_000_003] {
        let how = Tcp { bytes, hash: true, ..Tcp::default() };
        assert_eq!(ok(traffic::tcp(&a.place, &b.place, ok(b.v4()), &how)).bytes, bytes);
    }
}

#[test]
fn offload_off_carries_the_same() {
    for backend in [Backend::Vxlan, Backend::Udp] {
        let lab = up(Spec::new("t-tcp", 2).backend(backend).pods(1).arg("--offload=off"));
        let (a, b) = (pod(&lab, "p1-1"), pod(&lab, "p2-1"));
        let how = Tcp { streams: 2, bytes: 8 * MIB, hash: true, ..Tcp::default() };
        assert_eq!(ok(traffic::tcp(&a.place, &b.place, ok(b.v4()), &how)).bytes, 2 * how.bytes);
    }
}
