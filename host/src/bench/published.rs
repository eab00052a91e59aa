//! What MoRI's own benchmark has measured.

use kvferry_engine::fabric::Direction;
use serde::Serialize;

/// A row of MoRI's tables.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct PublishedResult {
    pub(super) card: &'static str,
    /// Average of a batch.
    pub(super) latency_us: f64,
    /// Average, one batch at a time.
    pub(super) gb_per_s: f64,
}

const CONNECTX_7: &str = "ConnectX-7";
const THOR2: &str = "Thor2";

/// Direction, bytes of a range, ranges of a batch; average latency in us and GB/s (1e9).
type PublishedEntry = (&'static str, Direction, u64, u32, f64, f64);

/// From docs/MORI-IO-BENCHMARK.md of <https://github.com/ROCm/mori>, commit 03bbab8a: one GPU of
/// either host, one batch at a time, 4 queue pairs. Thor2's table is titled "write" there and
/// "read" in MoRI's README, with the same figures, so it stands for both.
const TABLES: [PublishedEntry; 20] = [
    (CONNECTX_7, Direction::Write, 1 << 10, 1, 5.87, 0.17),
    (CONNECTX_7, Direction::Write, 16 << 10, 1, 6.11, 2.68),
    (CONNECTX_7, Direction::Write, 64 << 10, 1, 7.20, 9.11),
    (CONNECTX_7, Direction::Write, 1 << 20, 1, 26.95, 38.91),
    (CONNECTX_7, Direction::Write, 16 << 20, 1, 344.46, 48.71),
    (CONNECTX_7, Direction::Write, 64 << 20, 1, 1360.09, 49.34),
    (CONNECTX_7, Direction::Read, 1 << 10, 1, 6.74, 0.15),
    (CONNECTX_7, Direction::Read, 16 << 10, 1, 6.96, 2.35),
    (CONNECTX_7, Direction::Read, 64 << 10, 1, 8.23, 7.96),
    (CONNECTX_7, Direction::Read, 1 << 20, 1, 30.00, 34.95),
    (CONNECTX_7, Direction::Read, 16 << 20, 1, 379.83, 44.17),
    (CONNECTX_7, Direction::Read, 64 << 20, 1, 1498.58, 44.78),
    (THOR2, Direction::Write, 1 << 10, 128, 37.09, 3.53),
    (THOR2, Direction::Write, 16 << 10, 128, 74.02, 28.33),
    (THOR2, Direction::Write, 64 << 10, 128, 202.70, 41.39),
    (THOR2, Direction::Write, 1 << 20, 128, 2777.76, 48.32),
    (THOR2, Direction::Read, 1 << 10, 128, 37.09, 3.53),
    (THOR2, Direction::Read, 16 << 10, 128, 74.02, 28.33),
    (THOR2, Direction::Read, 64 << 10, 128, 202.70, 41.39),
    (THOR2, Direction::Read, 1 << 20, 128, 2777.76, 48.32),
];

/// The published figures of a row, if there are some.
pub(super) fn published(direction: Direction, size: u64, batch: u32) -> Option<PublishedResult> {
    let mut rows = TABLES.iter();
    let row = rows.find(|row| (row.1, row.2, row.3) == (direction, size, batch));
    row.map(|&(card, _, _, _, latency_us, gb_per_s)| PublishedResult { card, latency_us, gb_per_s })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_and_throughput_of_a_row_are_of_one_batch() {
        for (card, _, size, batch, latency_us, gb_per_s) in TABLES {
            let bytes = size as f64 * f64::from(batch);
            let computed = bytes / latency_us / 1e3;
            // Both are averages, rounded to two digits.
            let near = (computed - gb_per_s).abs() < 0.006 + 0.005 * gb_per_s;
            assert!(near, "{card} {size} x {batch}: {computed}, published {gb_per_s}");
        }
    }
}
