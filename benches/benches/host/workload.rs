//! Workloads and figures.

use std::time::Duration;

/// Bytes of each side's pool.
pub(crate) const POOL: u64 = 512 << 20;

/// `count` blocks of `size` bytes, drawn from twice as many places on both sides, in runs.
#[derive(Debug)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    pub(crate) size: u64,
    pub(crate) count: u64,
    /// Blocks that lie one after the other on both sides.
    pub(crate) run: u64,
}

const fn kv(name: &'static str, size: u64, count: u64, run: u64) -> Workload {
    Workload { name, size, count, run }
}

pub(crate) const ROWS: &[Workload] = &[
    kv("p1m6", 1_611_713, 1, 1),
    kv("p3k3", 3_305, 1, 1),
    kv("kv4Kx512", 4 << 10, 512, 1),
    kv("kv16Kx512", 16 << 10, 512, 1),
    kv("kv64Kx512", 64 << 10, 512, 1),
    kv("kv256Kx512", 256 << 10, 512, 1),
    kv("kv1Mx128", 1 << 20, 128, 1),
    kv("kv4K-256M", 4 << 10, 65_536, 1),
    kv("kv16K-256M", 16 << 10, 16_384, 1),
    kv("kv64K-256M", 64 << 10, 4_096, 1),
    kv("kv4K-run32", 4 << 10, 65_536, 32),
];

/// The next number of a sequence, whose bits look drawn.
pub(crate) fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Another order.
pub(crate) fn shuffle<T>(list: &mut [T], seed: &mut u64) {
    for at in (1..list.len()).rev() {
        list.swap(at, (mix(seed) % (at as u64 + 1)) as usize);
    }
}

impl Workload {
    pub(crate) fn bytes(&self) -> u64 {
        self.size * self.count
    }

    pub(crate) fn repeats(&self, at_a_time: usize) -> usize {
        (6_000_000_000 / (self.bytes() * at_a_time as u64)).clamp(15, 1_000) as usize
    }

    /// Transfers in flight at a time in a stream, as of a prompt's layers; 1 for none.
    pub(crate) fn stream(&self) -> usize {
        ((64 << 20) / self.bytes().max(2 << 20)).max(1) as usize
    }

    /// Offsets of the blocks on both sides.
    pub(crate) fn blocks(&self) -> [Vec<u64>; 2] {
        [1, 2].map(|seed| self.drawn(seed))
    }

    fn drawn(&self, mut seed: u64) -> Vec<u64> {
        let runs = self.count / self.run;
        let mut places: Vec<u64> = (0..2 * runs).collect();
        shuffle(&mut places, &mut seed);
        places.truncate(runs as usize);
        let (run, size) = (self.run, self.size);
        let blocks = move |place: u64| (0..run).map(move |n| (place * run + n) * size);
        places.into_iter().flat_map(blocks).collect()
    }
}

/// What a block holds, by its place in the list: enough to tell it from all others.
pub(crate) fn content(seed: u64, block: u64, size: u64) -> Vec<u8> {
    let mut state = seed << 32 | block;
    let words = (0..size.div_ceil(8)).flat_map(|_| mix(&mut state).to_le_bytes());
    words.take(size as usize).collect()
}

/// Puts the blocks of a row into a pool.
///
/// # Safety
/// The pool has all the blocks, and nothing else is at it.
pub(crate) unsafe fn fill(pool: *mut u8, at: &[u64], seed: u64, size: u64) {
    for (n, at) in (0..).zip(at) {
        let block = content(seed, n, size);
        // SAFETY: See above.
        unsafe {
            std::ptr::copy_nonoverlapping(block.as_ptr(), pool.add(*at as usize), block.len())
        };
    }
}

/// True if the blocks of a row are there.
///
/// # Safety
/// As for [`fill`].
pub(crate) unsafe fn is_filled(pool: *const u8, at: &[u64], seed: u64, size: u64) -> bool {
    (0..).zip(at).all(|(n, at)| {
        // SAFETY: See above.
        let block = unsafe { std::slice::from_raw_parts(pool.add(*at as usize), size as usize) };
        *block == content(seed, n, size)[..]
    })
}

/// `process_vm_readv` or `process_vm_writev`.
pub(crate) type AttachCall = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

/// Moves blocks between this process and another, 1024 ranges a call; bases and offsets of the
/// local and the remote side.
///
/// # Safety
/// The ranges are in memory that nothing else is at.
pub(crate) unsafe fn attach(
    call: AttachCall,
    pid: u32,
    [local, remote]: [(u64, &[u64]); 2],
    size: u64,
) {
    let ranges = |base: u64, at: &[u64]| -> Vec<libc::iovec> {
        let range = |at: &u64| libc::iovec {
            iov_base: (base + at) as *mut libc::c_void,
            iov_len: size as usize,
        };
        at.iter().map(range).collect()
    };
    for (here, there) in local.1.chunks(1_024).zip(remote.1.chunks(1_024)) {
        let (here, there) = (ranges(local.0, here), ranges(remote.0, there));
        let count = here.len() as u64;
        // SAFETY: See above.
        let moved = unsafe { call(pid as i32, here.as_ptr(), count, there.as_ptr(), count, 0) };
        assert_eq!(moved as u64, count * size, "short");
    }
}

/// Times and CPU of one way.
#[derive(Debug, Default)]
pub(crate) struct LatencyStats {
    pub(crate) times: Vec<Duration>,
    pub(crate) bytes: u64,
    pub(crate) near_cpu: Duration,
    pub(crate) far_cpu: Duration,
}

impl LatencyStats {
    fn sorted(&self) -> Vec<f64> {
        let mut times: Vec<f64> = self.times.iter().map(Duration::as_secs_f64).collect();
        times.sort_by(f64::total_cmp);
        times
    }

    /// Median time in seconds.
    pub(crate) fn median(&self) -> f64 {
        let times = self.sorted();
        times[times.len() / 2]
    }

    fn per_gb(&self, cpu: Duration) -> f64 {
        cpu.as_secs_f64() * 1e9 / (self.bytes * self.times.len() as u64) as f64
    }

    /// CPU seconds per GB of both sides.
    pub(crate) fn cpu(&self) -> f64 {
        self.per_gb(self.near_cpu + self.far_cpu)
    }

    pub(crate) fn print(&self, name: &str, extra: &[&str]) {
        let times = self.sorted();
        let p99 = times[(times.len() * 99 / 100).min(times.len() - 1)];
        let (min, p50) = (times[0], self.median());
        println!(
            "  {name:<14} {:>7.2} GB/s   min {:>9.1} us  p50 {:>9.1} us  p99 {:>9.1} us   \
             cpu {:.3} + {:.3} s/GB  {}",
            self.bytes as f64 / p50 / 1e9,
            min * 1e6,
            p50 * 1e6,
            p99 * 1e6,
            self.per_gb(self.near_cpu),
            self.per_gb(self.far_cpu),
            extra.join(" ")
        );
    }
}
