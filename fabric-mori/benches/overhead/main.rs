//! What is between the engine and MoRI, over its stand-in, beside a program that calls MoRI's C++
//! classes itself. Both post the same 512 ranges, in turns of one run.
//!
//! `post` is the CPU time of the thread that posts: checks, conversion and pool of statuses,
//! without the hop from the caller to it; then the same with a stand-in that leaves out what MoRI
//! does. `pipelined` is the time of a batch while others are under way.
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "inner modules of the plane, of which a part is used"
)]

#[path = "../../src/config.rs"]
mod config;
mod direct;
#[path = "../../src/job.rs"]
mod job;
#[path = "../../src/mori.rs"]
mod mori;
mod planes;
mod wrapped;

use criterion::{Criterion, Throughput};
use direct::DirectPoster;
use planes::PlanePoster;
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};
use wrapped::WrappedPoster;

/// Ranges of a batch.
pub(crate) const RANGES: usize = 512;

/// Batches under way at a time.
const FLYING: usize = 4;

/// Ranges that are no neighbours of each other, on both sides of `RANGES * size` bytes.
pub(crate) struct BenchRanges {
    pub(crate) local: Vec<u64>,
    pub(crate) remote: Vec<u64>,
    pub(crate) len: Vec<u64>,
}

impl BenchRanges {
    pub(crate) fn new(size: u64) -> BenchRanges {
        let all = 0..RANGES as u64;
        BenchRanges {
            local: all.clone().map(|at| at * size).collect(),
            // 197 and 512 have no common divisor.
            remote: all.map(|at| at * 197 % RANGES as u64 * size).collect(),
            len: vec![size; RANGES],
        }
    }
}

/// CPU time of this thread.
pub(crate) fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

pub(crate) trait Poster {
    fn post(&mut self);
    /// Waits for the oldest one.
    fn wait(&mut self);
}

/// CPU time of a number of posts, none of which waits for another.
fn posts(poster: &mut impl Poster, count: u64) -> Duration {
    let mut spent = Duration::ZERO;
    for _ in 0..count {
        let before = cpu();
        poster.post();
        spent += cpu() - before;
        poster.wait();
    }
    spent
}

/// Time of a number of batches of which some are under way at a time.
fn pipelined(poster: &mut impl Poster, count: u64) -> Duration {
    let begun = Instant::now();
    for at in 0..count {
        if at >= FLYING as u64 {
            poster.wait();
        }
        poster.post();
    }
    (0..count.min(FLYING as u64)).for_each(|_| poster.wait());
    begun.elapsed()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Both in turns: medians of a batch in microseconds.
fn in_turns(
    turns: usize,
    mut one: impl FnMut() -> f64,
    mut other: impl FnMut() -> f64,
) -> [f64; 2] {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        first.push(one());
        second.push(other());
    }
    [median(first), median(second)]
}

fn micros(time: Duration, count: u64) -> f64 {
    time.as_secs_f64() * 1e6 / count as f64
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();

    let small = BenchRanges::new(8);
    let (mut direct, mut wrapped) = (DirectPoster::new(&small), WrappedPoster::new(&small));
    let mut group = criterion.benchmark_group("post 512 x 8 B");
    group.bench_function("C++", |b| b.iter_custom(|count| posts(&mut direct, count)));
    group.bench_function("plane", |b| b.iter_custom(|count| posts(&mut wrapped, count)));
    group.finish();
    let [cpp, plane] = in_turns(
        400,
        || micros(posts(&mut direct, 10), 10),
        || micros(posts(&mut wrapped, 10), 10),
    );
    println!("post 512 x 8 B: {cpp:.2} us in C++, {plane:.2} us here: {:.2} us more", plane - cpp);
    // MoRI's part is twenty times as long and never twice the same.
    direct.faults(c"skip@1+");
    let [cpp, plane] = in_turns(
        400,
        || micros(posts(&mut direct, 50), 50),
        || micros(posts(&mut wrapped, 50), 50),
    );
    direct.faults(c"");
    println!("without MoRI's part: {cpp:.2} us, {plane:.2} us here: {:.2} us more", plane - cpp);
    drop((direct, wrapped));

    let large = BenchRanges::new(64 << 10);
    let (mut direct, mut planes) = (DirectPoster::new(&large), PlanePoster::new(&large));
    let mut group = criterion.benchmark_group("pipelined 512 x 64 KiB");
    group.throughput(Throughput::Bytes(large.len.iter().sum()));
    group.sample_size(20);
    group.bench_function("C++", |b| b.iter_custom(|count| pipelined(&mut direct, count)));
    group.bench_function("plane", |b| b.iter_custom(|count| pipelined(&mut planes, count)));
    group.finish();
    let [cpp, plane] = in_turns(
        30,
        || micros(pipelined(&mut direct, 20), 20),
        || micros(pipelined(&mut planes, 20), 20),
    );
    let more = 100.0 * (plane / cpp - 1.0);
    println!("pipelined 512 x 64 KiB: {cpp:.0} us in C++, {plane:.0} us here: {more:+.1} %");
}
