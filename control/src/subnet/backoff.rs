//! Growing pauses between attempts to reach a server.

use std::time::Duration;

/// Pauses of 100 ms doubling to 5 s, as flannel's, each shortened at random by up to half, so that the nodes of a
/// cluster do not come back in step.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(5);

    /// The next pause is a short one again.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Length of the next pause.
    pub(super) fn next(&mut self) -> Duration {
        let pause = Self::FIRST.saturating_mul(1 << self.failures.min(16)).min(Self::LONGEST);
        self.failures = self.failures.saturating_add(1);
        pause.mul_f64(rand::random_range(0.5..=1.0))
    }

    /// Waits.
    pub(super) async fn pause(&mut self) {
        tokio::time::sleep(self.next()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_to_its_limit_and_starts_again() {
        let mut backoff = Backoff::default();
        let ms = Duration::from_millis;
        for (least, most) in [(50, 100), (100, 200), (200, 400)] {
            let pause = backoff.next();
            assert!(pause >= ms(least) && pause <= ms(most), "{pause:?}");
        }
        for _ in 0..100 {
            backoff.next();
        }
        let pause = backoff.next();
        assert!(pause >= ms(2500) && pause <= ms(5000), "{pause:?}");
        backoff.reset();
        assert!(backoff.next() <= ms(100));
    }
}
