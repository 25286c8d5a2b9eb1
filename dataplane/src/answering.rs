//! Makes and sends ICMP answers about packets that go no further. The cold side of both directions.

use std::time::{Duration, Instant};

use crate::config::EngineConfig;
use crate::encap::Inner;
use crate::icmp::{Answerer, MAX_ANSWER_LEN, TokenBucket, Trouble};
use crate::socket::Answers;

/// Answers of one thread in a burst, and how long until one more is allowed.
const BURST: u32 = 100;
const INTERVAL: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct Answering<A> {
    answerer: Answerer,
    sockets: Option<A>,
    out: Box<[u8; MAX_ANSWER_LEN]>,
}

impl<A: Answers> Answering<A> {
    /// Without sockets nothing is answered.
    pub(crate) fn new(config: &EngineConfig, sockets: Option<A>) -> Answering<A> {
        let limit = TokenBucket::new(BURST, INTERVAL);
        Answering {
            answerer: Answerer::new(config.tunnel_v4, config.tunnel_v6, limit),
            sockets,
            out: Box::new([0; MAX_ANSWER_LEN]),
        }
    }

    /// Tells the packet's sender, if that is allowed. Returns whether it was told.
    pub(crate) fn tell(&mut self, packet: &Inner<'_>, trouble: Trouble) -> bool {
        let Some(sockets) = &mut self.sockets else { return false };
        match self.answerer.answer(packet, trouble, Instant::now(), &mut self.out) {
            Ok(len) => sockets.send(&self.out[..len], packet.src()).is_ok(),
            Err(_) => false,
        }
    }
}
