//! What it costs to verify KV that is read from another plane of host memory: at each level the
//! source digests, the bytes move, and the reader digests, one after the other as in a pull; with
//! levels in turns, beside one that verifies nothing.
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use kvferry_engine::core::ids::{Incarnation, TransferKey};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::verify::{DigestPlan, Verify};
use kvferry_engine::fabric::{
    Completion, DataEvent, DataPlane, DigestBatch, DigestId, DigestParts, Direction, OpId, PeerId,
    RegionDesc, RegionId, SessionId, Submit,
};
use kvferry_fabric_host::{DataPath, HostConfig, HostPlane, HugePages, MemfdPool};
use std::time::{Duration, Instant};

const REGION: RegionId = RegionId(1);
const SESSION: SessionId = SessionId(1);
/// Bytes of a prompt's KV, in this many layers.
const PROMPT: u64 = 256 << 20;
const LAYERS: u16 = 32;
const TURNS: usize = 15;

/// The next events, which have to come.
fn heard(plane: &mut HostPlane, count: usize) -> Vec<DataEvent> {
    let (mut events, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
    while events.len() < count {
        assert!(Instant::now() < until, "nothing comes after {events:?}");
        plane.poll(Nanos::ZERO, &mut events);
    }
    events
}

fn next(plane: &mut HostPlane) -> DataEvent {
    heard(plane, 1).remove(0)
}

fn started(pool: &MemfdPool) -> (HostPlane, RegionDesc) {
    let paths = vec![DataPath::SharedMemory];
    let config = HostConfig { paths, open_door: true, ..HostConfig::default() };
    let mut plane = HostPlane::new(config).expect("a plane at loopback");
    plane.register(REGION, pool.memory()).expect("a pool registers");
    match next(&mut plane) {
        DataEvent::Registered { result: Ok(desc), .. } => (plane, desc),
        other => panic!("not registered: {other:?}"),
    }
}

struct VerifyBench {
    source: HostPlane,
    reader: HostPlane,
    blocks: u32,
    size: u64,
    count: u64,
}

impl VerifyBench {
    /// The digests of one side, a layer at a time.
    fn digest(&mut self, at_source: bool, plan: &DigestPlan) -> Vec<u64> {
        let per_layer = self.blocks / u32::from(LAYERS);
        let mut digests = Vec::new();
        for layer in 0..LAYERS {
            let mut parts = DigestParts::default();
            for block in (0..per_layer).filter(|block| plan.has(layer, per_layer - 1 - block)) {
                parts.begin(plan.seed(layer, block * 16, (0, 0)));
                let at = u64::from(u32::from(layer) * per_layer + block) * self.size;
                parts.push(at, self.size);
            }
            if parts.is_empty() {
                continue;
            }
            self.count += 1;
            let batch = DigestBatch { id: DigestId(self.count), region: REGION, parts };
            let plane = if at_source { &mut self.source } else { &mut self.reader };
            plane.digest(batch).expect("a good batch");
            match next(plane) {
                DataEvent::Digested { result: Ok(some), .. } => digests.extend(some),
                other => panic!("{other:?}"),
            }
        }
        digests
    }

    /// A hand-over in one operation for each layer.
    fn run(&mut self, level: Verify) -> Duration {
        let key = TransferKey { id: format!("t{}", self.count).as_str().into(), prompt: 0 };
        let plan = DigestPlan::new(level, (&key, Incarnation(1)), PromptHash([7, 7]));
        let begin = Instant::now();
        let sent = self.digest(true, &plan);
        let per_layer = u64::from(self.blocks) / u64::from(LAYERS);
        for layer in 0..u64::from(LAYERS) {
            let at = |n: u64| (layer * per_layer + n) * self.size;
            let offsets: Vec<u64> = (0..per_layer).map(at).collect();
            self.count += 1;
            let (op, session, direction) = (OpId(self.count), SESSION, Direction::Read);
            let len = &vec![self.size; per_layer as usize][..];
            let (local, remote) = (&offsets[..], &offsets[..]);
            let batch = Submit { op, session, direction, local, remote, len };
            self.reader.submit(batch).expect("there is room");
        }
        for event in heard(&mut self.reader, usize::from(LAYERS)) {
            assert!(matches!(event, DataEvent::Completed { outcome: Completion::Done, .. }));
        }
        let found = self.digest(false, &plan);
        let took = begin.elapsed();
        assert_eq!(sent, found, "they are the same bytes");
        took
    }
}

fn main() {
    println!(
        "{PROMPT} B of KV in {LAYERS} layers, read by shared memory; medians of {TURNS}, in turns"
    );
    for size in [4 << 10, 16 << 10, 64 << 10, 256 << 10] {
        let pools = [(); 2].map(|()| MemfdPool::new(PROMPT, HugePages::No).expect("a pool"));
        for at in 0..PROMPT / 8 {
            // SAFETY: It is inside the pool, which nobody else has yet.
            unsafe { pools[0].start().cast::<u64>().add(at as usize).write(at.wrapping_mul(31)) };
        }
        let ((source, desc), (mut reader, _)) = (started(&pools[0]), started(&pools[1]));
        reader.connect(PeerId(1), &source.address(), 0).expect("a peer");
        reader.open(SESSION, REGION, PeerId(1), &desc).expect("an open is taken");
        match next(&mut reader) {
            DataEvent::Opened { result: Ok(()), .. } => {}
            other => panic!("{other:?}"),
        }
        let blocks = (PROMPT / size) as u32;
        let mut bench = VerifyBench { source, reader, blocks, size, count: 0 };
        let mut times =
            [(Verify::Off, Vec::new()), (Verify::Sample, Vec::new()), (Verify::All, Vec::new())];
        bench.run(Verify::Off);
        for turn in 0..TURNS {
            for at in 0..times.len() {
                let (level, list) = &mut times[(turn + at) % 3];
                list.push(bench.run(*level));
            }
        }
        let medians = times.map(|(level, mut list)| {
            list.sort_unstable();
            (level, list[TURNS / 2].as_secs_f64())
        });
        let off = medians[0].1;
        for (level, median) in medians {
            let rate = PROMPT as f64 / median / 1e9;
            println!(
                "  blocks of {:>3} KiB, {level:<6}: {:7.2} ms, {rate:5.2} GB/s, {:.2} of off",
                size >> 10,
                median * 1e3,
                median / off
            );
        }
    }
}
