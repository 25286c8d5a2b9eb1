//! How long a lease is taken for and when it is renewed.

use std::time::{Duration, SystemTime};

/// Time to live of a lease and the renewal margin before its end.
///
/// Invariant: the margin is shorter than the time to live, so a renewal never lies in the past.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term {
    ttl: Duration,
    margin: Duration,
}

impl Term {
    /// flannel's: a day (pkg/subnet/etcd/local_manager.go).
    pub const DEFAULT_TTL: Duration = Duration::from_secs(24 * 3600);
    /// flannel's default for `--subnet-lease-renew-margin`.
    pub const DEFAULT_MARGIN: Duration = Duration::from_secs(3600);

    /// A term with a time to live of at least a second. A margin that is not shorter than it becomes half
    /// of it, so that a short `--subnet-lease-ttl` works with the default margin.
    pub fn new(ttl: Duration, margin: Duration) -> Self {
        let ttl = ttl.max(Duration::from_secs(1));
        let margin = if margin < ttl { margin } else { ttl / 2 };
        Term { ttl, margin }
    }

    /// Time from a renewal to the end of the lease.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Time from the planned renewal to the end of the lease.
    pub fn margin(&self) -> Duration {
        self.margin
    }

    /// How long to wait from `now` before renewing a lease that ends at `expiration`.
    pub fn until_renewal(&self, expiration: SystemTime, now: SystemTime) -> Duration {
        let left = expiration.duration_since(now).unwrap_or_default();
        // A clock set back must not put the renewal off beyond a whole term.
        left.saturating_sub(self.margin).min(self.ttl)
    }

    /// Pause before trying a failed renewal again: a minute as in flannel, less when the margin is short,
    /// so that there are several tries before the lease ends.
    pub fn retry_pause(&self) -> Duration {
        (self.margin / 10).clamp(Duration::from_millis(200), Duration::from_secs(60))
    }
}

impl Default for Term {
    fn default() -> Self {
        Term::new(Self::DEFAULT_TTL, Self::DEFAULT_MARGIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn margin_is_always_shorter_than_the_term() {
        assert_eq!(Term::new(60 * SECOND, 20 * SECOND).margin(), 20 * SECOND);
        assert_eq!(Term::new(60 * SECOND, 3600 * SECOND).margin(), 30 * SECOND);
        assert_eq!(Term::new(Duration::ZERO, SECOND).ttl(), SECOND);
    }

    #[test]
    fn renewal_lies_a_margin_before_the_end() {
        let term = Term::new(60 * SECOND, 20 * SECOND);
        let now = SystemTime::UNIX_EPOCH + 1000 * SECOND;
        assert_eq!(term.until_renewal(now + 60 * SECOND, now), 40 * SECOND);
        assert_eq!(term.until_renewal(now + 5 * SECOND, now), Duration::ZERO);
        assert_eq!(term.until_renewal(now - 5 * SECOND, now), Duration::ZERO);
        assert_eq!(term.until_renewal(now + 5000 * SECOND, now), 60 * SECOND);
        assert_eq!(term.retry_pause(), 2 * SECOND);
    }
}
