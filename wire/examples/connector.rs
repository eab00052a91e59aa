//! Two serving engines that hand KV over, each a process with a scheduler, a model and memory of
//! its own: what it takes to embed kvferry. Run it by `cargo run --example connector`.
//!
//! The process that is started is the prefill, and starts itself again as the decode. Both know the
//! request beforehand, because there is no router here that sends legs.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use kvferry_engine::actors::{EffectHandler, InputQueue, InstanceBuilder};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::{config::CoreConfig, ids::*, instance::*, layout::*, message::*};
use kvferry_engine::fabric::{ControlPlane, Endpoint, LinkKind};
use kvferry_fabric_host::{HostConfig, HostPlane, HugePages, MemfdPool};
use kvferry_wire::{WireConfig, ZmqPlane};
use std::process::{ChildStdin, Command, Stdio, exit};
use std::time::{Instant, SystemTime};
use std::{env, error::Error, fmt, io, slice, thread};

/// The tensor of a layer: blocks, KV heads, tokens, elements of K and V of a head, 2 bytes each.
const SHAPE: [u32; 4] = [256, 4, 16, 128];
const LAYERS: usize = 8;
const BLOCK_BYTES: usize = 4 * 16 * 128 * 2;
const LAYER_BYTES: usize = 256 * BLOCK_BYTES;
/// The prompt, in blocks and in tokens.
const PROMPT: (usize, u32) = (200, 200 * SHAPE[2]);
/// Where the prefill listens, in the environment of the decode.
const PREFILL: &str = "KVFERRY_CONNECTOR_PREFILL";

fn fail(why: impl fmt::Debug) -> ! {
    eprintln!("connector: {why:?}");
    exit(1)
}

/// What the model computes for a block of the prompt.
fn model(layer: usize, block: usize) -> impl Iterator<Item = u8> {
    let start = (layer * PROMPT.0 + block) * BLOCK_BYTES;
    (start..start + BLOCK_BYTES).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 16) as u8)
}

/// The scheduler of either engine, and its KV.
struct Scheduler {
    pool: MemfdPool,
    free: Vec<u32>,
    start: Instant,
    blocks: Vec<u32>,
    /// Of a prefill: the decode, which may end when this is closed.
    decode: Option<ChildStdin>,
}

impl Scheduler {
    fn allocate(&mut self) -> Vec<BlockList> {
        self.blocks = self.free.split_off(self.free.len() - PROMPT.0);
        vec![BlockList::new(self.blocks.clone())]
    }

    /// The bytes of the request's blocks in a layer, each with what the model computes for it.
    fn kv(&mut self, layer: usize) -> impl Iterator<Item = (&mut u8, u8)> {
        let start = self.pool.start();
        (0..).zip(&self.blocks).flat_map(move |(nth, id)| {
            let at = layer * LAYER_BYTES + *id as usize * BLOCK_BYTES;
            // SAFETY: It is inside of the pool, and no transfer writes to it meanwhile.
            let block = unsafe { slice::from_raw_parts_mut(start.add(at), BLOCK_BYTES) };
            block.iter_mut().zip(model(layer, nth))
        })
    }
}

impl EffectHandler for Scheduler {
    fn prefill(&mut self, answer: PrefillAnswer, _: &mut InputQueue<Instance>) {
        let PrefillAnswer::SourceFree { failure: None, .. } = answer else { fail(answer) };
        self.free.append(&mut self.blocks);
        self.decode = None;
    }

    fn decode(&mut self, answer: DecodeAnswer, inputs: &mut InputQueue<Instance>) {
        let hook = match answer {
            DecodeAnswer::Allocate { request } => {
                DecodeHook::Allocated { request, computed: 0, blocks: self.allocate() }
            }
            DecodeAnswer::Loaded { request } => {
                let (time, bytes) = (self.start.elapsed(), PROMPT.0 * LAYERS * BLOCK_BYTES);
                if (0..LAYERS).any(|layer| self.kv(layer).any(|(byte, value)| *byte != value)) {
                    fail("a byte is wrong");
                }
                println!("{bytes} bytes in {} blocks, {time:?}", PROMPT.0);
                thread::spawn(|| exit(io::copy(&mut io::stdin(), &mut io::sink()).is_err().into()));
                DecodeHook::Finished { request, reason: FinishReason::Length }
            }
            other => fail(other),
        };
        inputs.push_back(InstanceInput::Decode(hook));
    }
}

/// Hash of the prompt: its token ids are 0, 1, 2 and so on.
fn prompt_hash() -> PromptHash {
    PromptHash::of_tokens(&(0..PROMPT.1).collect::<Vec<_>>())
}

/// What both engines are made of, where peers find them, and their scheduler.
fn engine(role: Role) -> Result<(InstanceBuilder, Endpoint, Scheduler), Box<dyn Error>> {
    let pool = MemfdPool::new((LAYERS * LAYER_BYTES) as u64, HugePages::No)?;
    let mut wire = ZmqPlane::new(WireConfig::default())?;
    let at = wire.listen(LinkKind::Handshake)?;
    let plane = HostPlane::new(HostConfig { key: role.to_string(), ..HostConfig::default() })?;
    let geometry = Geometry::new("toy", 4, vec![KvGroup::full(SHAPE[2], 0..LAYERS as u16)]);
    let clock_us = SystemTime::UNIX_EPOCH.elapsed()?.as_micros() as u64;
    let incarnation = Incarnation::begin(clock_us, None);
    let core = CoreConfig::new(role, role.to_string(), incarnation, geometry, at.clone());
    let layer = |layer| LayerLayout::contiguous((layer * LAYER_BYTES) as u64, SHAPE, 2);
    let kv = (vec![pool.memory()], (0..LAYERS).map(layer).collect());
    let builder = InstanceBuilder::new(core).with_core(Box::new(wire));
    let builder = builder.with_rank(0, Box::new(plane), kv, Default::default());
    let (free, start) = ((0..SHAPE[0]).collect(), Instant::now());
    Ok((builder, at, Scheduler { pool, free, start, blocks: Vec::new(), decode: None }))
}

fn prefill(request: RequestId, key: TransferKey) -> Result<(), Box<dyn Error>> {
    let (builder, at, mut scheduler) = engine(Role::Prefill)?;
    let mut decode = Command::new(env::current_exe()?);
    let mut decode = decode.env(PREFILL, &*at.0).stdin(Stdio::piped()).spawn()?;
    scheduler.decode = decode.stdin.take();
    thread::spawn(move || exit(decode.wait().ok().and_then(|it| it.code()).unwrap_or(1)));
    let (step, tokens, blocks) = (StepId(1), PROMPT.1, scheduler.allocate());
    let leg = PrefillLeg::new(key, Mode::Push);
    let chunk = Chunk { request: request.clone(), from: 0, to: tokens, blocks };
    let mut inputs = vec![
        PrefillHook::Arrived { request: request.clone(), leg, tokens, prompt_hash: prompt_hash() }
            .into(),
        PrefillHook::Scheduled { step, chunks: vec![chunk] }.into(),
    ];
    for layer in 0..LAYERS {
        scheduler.kv(layer).for_each(|(byte, value)| *byte = value);
        inputs.push(InstanceInput::Layers { rank: 0, step, layers: layer as u16 + 1 });
    }
    inputs.push(PrefillHook::Finished { request, reason: FinishReason::Length }.into());
    builder.with_inputs(inputs).start(|_| scheduler);
    Ok(())
}

fn decode(request: RequestId, key: TransferKey, prefill: &str) -> Result<(), Box<dyn Error>> {
    let (builder, _, scheduler) = engine(Role::Decode)?;
    let leg = DecodeLeg::new(key, Mode::Push, "prefill".into(), prefill.into());
    let arrived =
        DecodeHook::Arrived { request, leg, tokens: PROMPT.1, prompt_hash: prompt_hash() };
    builder.with_inputs([arrived.into()]).start(|_| scheduler);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let (system, key) = (actix::System::new(), TransferKey { id: "t".into(), prompt: 0 });
    system.block_on(async {
        match env::var(PREFILL) {
            Ok(at) => decode("d".into(), key, &at),
            Err(_) => prefill("p".into(), key),
        }
    })?;
    Ok(system.run()?)
}
