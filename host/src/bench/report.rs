//! What came out, as a table or as JSON.

use super::args::brief;
use super::measure::{BenchCase, Measurement};
use super::published::PublishedResult;
use crate::process::ruled;
use comfy_table::CellAlignment;
use serde::Serialize;
use std::io::{self, Write};

/// A row, as JSON has it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct BenchRow {
    /// `host`, `mori-rdma` or `mori-xgmi`.
    fabric: &'static str,
    direction: &'static str,
    /// Bytes of a range.
    size: u64,
    /// Ranges of a batch.
    batch: u32,
    /// Of one batch at a time.
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    gb_per_s: f64,
    /// Batches in flight, and what they moved.
    inflight: u32,
    inflight_gb_per_s: f64,
    /// What MoRI's own benchmark has.
    published: Option<PublishedResult>,
}

impl BenchRow {
    pub(super) fn new(
        fabric: &'static str,
        kind: BenchCase,
        figures: Measurement,
        published: Option<PublishedResult>,
    ) -> BenchRow {
        let Measurement { mean, p50, p99, serial_rate: alone, inflight, pipelined_rate: together } =
            figures;
        let [mean_us, p50_us, p99_us] = [mean, p50, p99].map(|time| time.as_nanos() as f64 / 1e3);
        BenchRow {
            fabric,
            direction: kind.name(),
            size: kind.shape.size,
            batch: kind.shape.batch,
            mean_us,
            p50_us,
            p99_us,
            gb_per_s: alone / 1e9,
            inflight,
            inflight_gb_per_s: together / 1e9,
            published,
        }
    }

    pub(super) fn json(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}", serde_json::to_string(self)?)?;
        out.flush()
    }

    fn cells(&self, with_published: bool) -> Vec<String> {
        let mut cells = vec![self.direction.into(), self.batch.to_string(), brief(self.size)];
        cells.extend([self.mean_us, self.p50_us, self.p99_us].map(digits));
        cells.extend([digits(self.gb_per_s), self.inflight.to_string()]);
        cells.push(digits(self.inflight_gb_per_s));
        if with_published {
            cells.extend(match self.published {
                Some(PublishedResult { card, latency_us, gb_per_s }) => {
                    [card.into(), digits(latency_us), digits(gb_per_s)]
                }
                None => [String::new(), String::new(), String::new()],
            });
        }
        cells
    }
}

/// A row that could not be measured, as JSON.
#[derive(Debug, Serialize)]
struct FailedRow<'a> {
    fabric: &'static str,
    direction: &'static str,
    size: u64,
    batch: u32,
    error: &'a str,
}

/// Writes a row that could not be measured, and why.
pub(super) fn failure(
    fabric: &'static str,
    kind: BenchCase,
    error: &str,
    out: &mut dyn Write,
) -> io::Result<()> {
    let (direction, size, batch) = (kind.name(), kind.shape.size, kind.shape.batch);
    let row = FailedRow { fabric, direction, size, batch, error };
    writeln!(out, "{}", serde_json::to_string(&row)?)?;
    out.flush()
}

/// All rows; those of MoRI's benchmark beside them, if there are some.
pub(super) fn table(rows: &[BenchRow]) -> String {
    let with_published = rows.iter().any(|row| row.published.is_some());
    let mut header = vec![
        "direction",
        "batch",
        "size",
        "mean us",
        "p50 us",
        "p99 us",
        "GB/s",
        "in flight",
        "GB/s in flight",
    ];
    if with_published {
        header.extend(["published", "us", "GB/s"]);
    }
    let mut table = ruled(header);
    table.add_rows(rows.iter().map(|row| row.cells(with_published)));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

/// A positive number with three digits or more.
fn digits(value: f64) -> String {
    let after = if value < 10.0 { 2 } else { usize::from(value < 1000.0) };
    format!("{value:.after$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.171, 26.94, 1360.09].map(digits), ["0.17", "26.9", "1360"]);
    }
}
