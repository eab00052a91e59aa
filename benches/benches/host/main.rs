//! The host plane between two processes, beside a plain copy, bare cross-memory attach and a bare
//! TCP echo, in one run and in turns. All bytes are compared. Times are from the submit to the
//! completion at the initiator; the target copies.
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

mod initiator;
mod raw_tcp;
mod target;
mod workload;

use initiator::{CopyMethod, Initiator};
use workload::{LatencyStats, ROWS, Workload, shuffle};

fn row(near: &mut Initiator, row: &Workload, ways: &[CopyMethod]) {
    let [from, to] = row.blocks();
    for way in ways {
        near.verify(*way, row, &from, &to);
    }
    turns(near, row, ways, [&from, &to], 1);
    if row.stream() > 1 {
        turns(near, row, ways, [&from, &to], row.stream());
    }
}

/// All ways in turns, in another order each time; in each the same transfer once or, all at the
/// same time, several times.
fn turns(
    near: &mut Initiator,
    row: &Workload,
    ways: &[CopyMethod],
    [from, to]: [&[u64]; 2],
    at_a_time: usize,
) {
    let fresh =
        || LatencyStats { bytes: row.bytes() * at_a_time as u64, ..LatencyStats::default() };
    let mut stats: Vec<(CopyMethod, LatencyStats)> =
        ways.iter().map(|way| (*way, fresh())).collect();
    let mut seed = 1;
    for _ in 0..row.repeats(at_a_time) {
        // What ran before leaves caches warm or cold.
        shuffle(&mut stats, &mut seed);
        for (way, stats) in &mut stats {
            near.measure(*way, row, from, to, (at_a_time, stats));
        }
    }
    stats.sort_by_key(|(way, _)| CopyMethod::ALL.iter().position(|known| known == way));
    println!("\n{} ({} x {} B), {at_a_time} at a time", row.name, row.count, row.size);
    stats.iter().for_each(|(way, stats)| stats.print(way.name(), &[]));
    let _without_some = summarise(&stats);
}

/// How paths compare with plain copies, of those that were measured.
fn summarise(stats: &[(CopyMethod, LatencyStats)]) -> Option<()> {
    let of = |way: CopyMethod| Some(&stats.iter().find(|(w, _)| *w == way)?.1);
    let raw = [1, 2, 4].map(|streams| of(CopyMethod::RawTcp(streams)));
    if let ([Some(one), Some(two), Some(four)], Some(tcp)) = (raw, of(CopyMethod::Tcp)) {
        let best = one.median().min(two.median()).min(four.median());
        println!("  tcp: {:.2} of the throughput of the best raw one", best / tcp.median());
    }
    let local = of(CopyMethod::Memcpy)?;
    for (kind, shared, copy, cross, bare) in [
        (
            "pushed",
            CopyMethod::Shared,
            CopyMethod::MemcpyFar,
            CopyMethod::Cross,
            CopyMethod::AttachFar,
        ),
        (
            "read",
            CopyMethod::SharedRead,
            CopyMethod::Memcpy,
            CopyMethod::CrossRead,
            CopyMethod::AttachRead,
        ),
    ] {
        let (shared, copy, cross, bare) = (of(shared)?, of(copy)?, of(cross)?, of(bare)?);
        println!(
            "  {kind}: shared memory {:.2} of the CPU of memcpy in the process that copies, {:.2} of \
             one in the initiator; cross-memory {:.2} of the throughput of bare readv, {:.2} of its \
             CPU",
            shared.cpu() / copy.cpu(),
            shared.cpu() / local.cpu(),
            bare.median() / cross.median(),
            cross.cpu() / bare.cpu(),
        );
    }
    Some(())
}

fn main() {
    if target::run_if_child() {
        return;
    }
    let load = || std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load average before: {}", load().trim());
    println!("GB/s, then CPU seconds per GB of the initiator and of the target");
    let mut near = Initiator::start();
    // A name of a row, or a part of one, leaves the others out; a second one does so with ways.
    let mut words = std::env::args().skip(1).filter(|arg| !arg.starts_with('-'));
    let mut word = || words.next().unwrap_or_default();
    let (wanted, ways) = (word(), word());
    let ways: Vec<_> =
        CopyMethod::ALL.into_iter().filter(|way| way.name().contains(&ways)).collect();
    if "rtt64".contains(&wanted) {
        near.round_trips();
    }
    for one in ROWS.iter().filter(|row| row.name.contains(&wanted)) {
        row(&mut near, one, &ways);
    }
    if "many".contains(&wanted) {
        near.many();
    }
    println!("\nload average after: {}", load().trim());
}
