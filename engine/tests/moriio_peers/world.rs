//! One core on a table: the test plays its engine, its ranks, and vLLM at the other end of the
//! wire.

use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::config::{CoreConfig, CoreSettings};
use kvferry_engine::core::decode::{Decode, DecodeEffect, DecodeInput};
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::dialect::moriio::descriptor::{DescLayout, MoriMemoryDesc};
use kvferry_engine::core::dialect::moriio::handshake::{
    AgentMetadata, CacheLayouts, LayerMemory, LayerRegions, REQUEST,
};
use kvferry_engine::core::dialect::moriio::params::MoriioRemote;
use kvferry_engine::core::dialect::moriio::ports::ParallelSizes;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::layout::{Geometry, GroupKind, KvGroup, LayerLayout, RankLayout};
use kvferry_engine::core::message::{Mode, MoriioLeg, Role, TransferJob, TransferReport};
use kvferry_engine::core::moriio::{MoriioConfig, MoriioSettings};
use kvferry_engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
use kvferry_engine::core::verify::Verify;
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_engine::fabric::{Address, ControlEvent, Endpoint, LinkId, LinkKind, RegionDesc};
use std::sync::Arc;

/// Whence the other side opens its links.
pub(crate) const STRANGER: &str = "tcp://192.0.2.7:50123";

pub(crate) const LAYERS: u16 = 2;
pub(crate) const BLOCKS: u32 = 8;
/// KV heads of the model.
const HEADS: u16 = 2;
/// Bytes of a block of one rank: its heads, 16 tokens, 8 elements of 2 bytes.
pub(crate) const fn block(tp: u16) -> u64 {
    heads(tp) as u64 * 16 * 8 * 2
}

const fn heads(tp: u16) -> u16 {
    if tp > HEADS { 1 } else { HEADS / tp }
}

const BLOCK: u64 = block(1);
const LAYER: u64 = BLOCK * BLOCKS as u64;

fn geometry(tp: u16) -> Geometry {
    let group = KvGroup::full(16, [0, 1]);
    Geometry { tp, ..Geometry::new("m", HEADS, vec![group]) }
}

pub(crate) fn name(layer: u16) -> Arc<str> {
    format!("model.layers.{layer}.self_attn.attn").into()
}

pub(crate) fn blob(data: u64, size: u64) -> Vec<u8> {
    let desc =
        MoriMemoryDesc { engine_key: "k".into(), data, size, loc: 1, ..MoriMemoryDesc::default() };
    desc.encode(DescLayout::V1_2_2)
}

/// Where the KV of the only rank lies, both layers in one region that begins at `data`.
pub(crate) fn layout(data: u64) -> RankLayout {
    layout_of((1, 0), data)
}

/// The same of a rank of several.
pub(crate) fn layout_of((tp, rank): (u16, u16), data: u64) -> RankLayout {
    let shape = [BLOCKS, u32::from(heads(tp)), 16, 8];
    let bytes = block(tp) * u64::from(BLOCKS);
    let layer = |layer| LayerLayout::contiguous(u64::from(layer) * bytes, shape, 2);
    let size = bytes * u64::from(LAYERS);
    RankLayout {
        rank,
        address: Address((*b"own engine").into()),
        regions: vec![(RegionDesc(blob(data, size).into()), size)],
        layers: (0..LAYERS).map(layer).collect(),
    }
}

/// What vLLM answers to a handshake, its memory at `data`.
pub(crate) fn replies(data: u64, block_len: i64) -> (AgentMetadata, LayerMemory) {
    replies_at(data, LAYER, block_len)
}

/// What a rank of vLLM with so many answers, its memory at `data`.
pub(crate) fn replies_of(tp: u16, data: u64) -> (AgentMetadata, LayerMemory) {
    replies_at(data, block(tp) * u64::from(BLOCKS), block(tp) as i64)
}

/// The same of vLLM 0.33.0.
pub(crate) fn replies_of_0_33(tp: u16, data: u64) -> (AgentMetadata, LayerMemory) {
    let (mut metadata, memory) = replies_of(tp, data);
    let (heads, bytes) = (i64::from(heads(tp)), block(tp) as i64);
    let numbers = vec![heads, 16, 16, bytes, 256, 16, 0];
    metadata.layouts.heads = (0..LAYERS).map(|layer| (name(layer), numbers.clone())).collect();
    metadata.layouts.block_sizes = (0..LAYERS).map(|layer| (name(layer), 16)).collect();
    (metadata, memory)
}

fn replies_at(data: u64, layer_bytes: u64, block_len: i64) -> (AgentMetadata, LayerMemory) {
    let region: Arc<[u8]> = blob(data, layer_bytes * u64::from(LAYERS)).into();
    let metadata = AgentMetadata {
        engine_id: "10.0.0.9:6301".into(),
        engine: (*b"its engine").into(),
        base_addrs: (0..LAYERS).map(|layer| data + u64::from(layer) * layer_bytes).collect(),
        num_blocks: i64::from(BLOCKS),
        block_len,
        attn_backend: "CPU_ATTN".into(),
        layouts: CacheLayouts::default(),
        native: false,
    };
    let layer = |layer| LayerRegions { name: name(layer), regions: vec![region.clone()] };
    (metadata, LayerMemory((0..LAYERS).map(layer).collect()))
}

pub(crate) fn good_replies() -> (AgentMetadata, LayerMemory) {
    replies(0x10_0000, BLOCK as i64)
}

/// A peer at 10.0.0.9, whose handshake port is 6301 and notify port 7301.
pub(crate) fn peer() -> MoriioRemote {
    peer_of(1)
}

/// The same with so many TP ranks, which listen at ports that follow one another.
pub(crate) fn peer_of(tp_size: u16) -> MoriioRemote {
    let address = ZmqAddress { host: "10.0.0.9".into(), handshake: 6301, notify: 7301 };
    let hosts = vec![address.host.clone()];
    let shape = ParallelSizes { dp_size_local: 1, tp_size };
    MoriioRemote { address, hosts, dp_size: 1, dp_rank: 0, shape }
}

pub(crate) fn moriio_peer() -> Arc<MoriioLeg> {
    Arc::new(MoriioLeg { peer: Some(peer()), ..MoriioLeg::default() })
}

pub(crate) fn moriio_peer_of(tp: u16) -> Arc<MoriioLeg> {
    Arc::new(MoriioLeg { peer: Some(peer_of(tp)), ..MoriioLeg::default() })
}

pub(crate) fn settings() -> CoreSettings {
    CoreSettings { lease: Nanos::from_secs(9), ..CoreSettings::default() }
}

/// Why a core that deals with no such peers does not.
pub(crate) const CLOSED: &str = "no MoRIIO here: moriio_peers true";

fn config((role, tp): (Role, u16), mode: Mode) -> CoreConfig {
    let (engine, control) = ("10.0.0.1:6300", "tcp://10.0.0.1:6300".into());
    CoreConfig {
        mode,
        http: "10.0.0.1:80".into(),
        settings: settings(),
        moriio: Some(MoriioConfig {
            address: ZmqAddress { host: "10.0.0.1".into(), handshake: 6300, notify: 7300 },
            layer_names: (0..LAYERS).map(name).collect(),
            attn_backend: "CPU_ATTN".into(),
            settings: MoriioSettings::default(),
            closed: None,
        }),
        ..CoreConfig::new(role, engine, Incarnation(5), geometry(tp), control)
    }
}

/// What a core wants done, whichever it is.
#[derive(Debug)]
pub(crate) enum CoreOutput<A> {
    Control(ControlCommand),
    Job(TransferJob),
    Answer(A),
    Violation(String),
    TurnedToMoriio,
}

/// How the test talks to a machine.
pub(crate) struct Ways<M: Machine, A> {
    control: fn(ControlEvent) -> M::Input,
    report: fn(u16, TransferReport) -> M::Input,
    tick: fn() -> M::Input,
    sort: fn(M::Effect) -> CoreOutput<A>,
}

pub(crate) struct CoreBench<M: Machine, A> {
    pub(crate) core: M,
    ways: Ways<M, A>,
    pub(crate) now: Nanos,
    pub(crate) wants: Vec<CoreOutput<A>>,
    inbound: u32,
}

pub(crate) type PrefillTable = CoreBench<Prefill, kvferry_engine::core::message::PrefillAnswer>;
pub(crate) type DecodeTable = CoreBench<Decode, kvferry_engine::core::message::DecodeAnswer>;

pub(crate) fn prefill(mode: Mode) -> PrefillTable {
    prefill_of(1, mode)
}

pub(crate) fn prefill_of(tp: u16, mode: Mode) -> PrefillTable {
    let ways = Ways {
        control: PrefillInput::Control,
        report: |rank, report| PrefillInput::Report { rank, report },
        tick: || PrefillInput::Tick,
        sort: |effect| match effect {
            PrefillEffect::Control(command) => CoreOutput::Control(command),
            PrefillEffect::Job(job) => CoreOutput::Job(job),
            PrefillEffect::Answer(answer) => CoreOutput::Answer(answer),
            PrefillEffect::Violation(violation) => CoreOutput::Violation(violation.to_string()),
            PrefillEffect::Directory(news) => panic!("{news:?}, without payloads"),
            PrefillEffect::Router(said) => panic!("{said:?}, without a router"),
            PrefillEffect::Refused { peer, .. } => panic!("{peer} says no hello"),
            PrefillEffect::SpeaksMoriio { request } => panic!("{request} asks nobody"),
        },
    };
    CoreBench::new(Prefill::new(config((Role::Prefill, tp), mode)), ways)
}

pub(crate) fn decode(mode: Mode) -> DecodeTable {
    decode_of(1, mode)
}

pub(crate) fn decode_of(tp: u16, mode: Mode) -> DecodeTable {
    let ways = Ways {
        control: DecodeInput::Control,
        report: |rank, report| DecodeInput::Report { rank, report },
        tick: || DecodeInput::Tick,
        sort: |effect| match effect {
            DecodeEffect::Control(command) => CoreOutput::Control(command),
            DecodeEffect::Job(job) => CoreOutput::Job(job),
            DecodeEffect::Answer(answer) => CoreOutput::Answer(answer),
            DecodeEffect::Violation(violation) => CoreOutput::Violation(violation.to_string()),
            DecodeEffect::Directory(news) => panic!("{news:?}, without payloads"),
            DecodeEffect::Router(said) => panic!("{said:?}, without a router"),
            DecodeEffect::Refused { peer, .. } => panic!("{peer} says no hello"),
            DecodeEffect::SpeaksMoriio { .. } => CoreOutput::TurnedToMoriio,
        },
    };
    CoreBench::new(Decode::new(config((Role::Decode, tp), mode)), ways)
}

/// A decode whose second layer sees the last 20 tokens only.
pub(crate) fn windowed_decode(mode: Mode) -> DecodeTable {
    let mut config = config((Role::Decode, 1), mode);
    let window = KvGroup { kind: GroupKind::Window { tokens: 20 }, ..KvGroup::full(16, [1]) };
    config.geometry = Arc::new(Geometry::new("m", HEADS, vec![KvGroup::full(16, [0]), window]));
    CoreBench { core: Decode::new(config), ..decode(mode) }
}

/// A core that deals with no peers of the kind.
fn closed(role: Role, mode: Mode) -> CoreConfig {
    let mut config = config((role, 1), mode);
    if let Some(moriio) = &mut config.moriio {
        moriio.closed = Some(CLOSED.into());
    }
    config
}

/// A decode that verifies KV, which no such peer can prove.
pub(crate) fn verifying_decode(mode: Mode) -> DecodeTable {
    let config = CoreConfig { verify: Verify::Sample, ..config((Role::Decode, 1), mode) };
    CoreBench { core: Decode::new(config), ..decode(mode) }
}

pub(crate) fn closed_prefill(mode: Mode) -> PrefillTable {
    let table = prefill(mode);
    CoreBench { core: Prefill::new(closed(Role::Prefill, mode)), ..table }
}

pub(crate) fn closed_decode(mode: Mode) -> DecodeTable {
    let table = decode(mode);
    CoreBench { core: Decode::new(closed(Role::Decode, mode)), ..table }
}

impl<M: Machine, A> CoreBench<M, A> {
    fn new(core: M, ways: Ways<M, A>) -> Self {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        CoreBench { core, ways, now: Nanos(1), wants: Vec::new(), inbound: LinkId::INBOUND }
    }

    pub(crate) fn ready(mut self) -> Self {
        self.report(TransferReport::Ready { layout: layout(0x1000) });
        self
    }

    /// All ranks are ready, the memory of rank `n` at `0x1000 * (n + 1)`.
    pub(crate) fn ready_of(mut self, tp: u16) -> Self {
        for rank in 0..tp {
            let layout = layout_of((tp, rank), 0x1000 * (u64::from(rank) + 1));
            self.report_of(rank, TransferReport::Ready { layout });
        }
        self
    }

    pub(crate) fn give(&mut self, input: M::Input) {
        let mut out = Outbox::new();
        self.core.handle(self.now, input, &mut out);
        self.wants.extend(out.take().into_iter().map(self.ways.sort));
    }

    pub(crate) fn report(&mut self, report: TransferReport) {
        self.report_of(0, report);
    }

    pub(crate) fn report_of(&mut self, rank: u16, report: TransferReport) {
        self.give((self.ways.report)(rank, report));
    }

    pub(crate) fn control(&mut self, event: ControlEvent) {
        self.give((self.ways.control)(event));
    }

    /// Lets time pass, with a tick at each deadline.
    pub(crate) fn wait(&mut self, time: Nanos) {
        let end = self.now + time;
        while let Some(due) = self.core.deadline().filter(|due| *due <= end) {
            self.now = due.max(self.now);
            self.give((self.ways.tick)());
        }
        self.now = end;
    }

    /// Takes the first thing wanted that `pick` knows.
    pub(crate) fn take<T>(&mut self, what: &str, pick: impl Fn(&CoreOutput<A>) -> Option<T>) -> T
    where
        A: std::fmt::Debug,
    {
        match self.wants.iter().enumerate().find_map(|(at, want)| Some((at, pick(want)?))) {
            Some((at, found)) => {
                self.wants.remove(at);
                found
            }
            None => panic!("no {what} in {:#?}", self.wants),
        }
    }

    /// The link that the core dials to an endpoint.
    pub(crate) fn dialled(&mut self, to: &str, channel: LinkKind) -> LinkId
    where
        A: std::fmt::Debug,
    {
        let wanted = Endpoint::from(to);
        self.take(to, |want| match want {
            CoreOutput::Control(ControlCommand::Dial { link, to, channel: what })
                if *to == wanted && *what == channel =>
            {
                Some(*link)
            }
            _ => None,
        })
    }

    pub(crate) fn up(&mut self, link: LinkId, channel: LinkKind) {
        self.control(ControlEvent::LinkUp { link, channel, from: None });
    }

    /// A link that the other side opened.
    pub(crate) fn accept(&mut self, channel: LinkKind) -> LinkId {
        self.inbound += 1;
        let link = LinkId(self.inbound);
        let from = Some(Endpoint::from(STRANGER));
        self.control(ControlEvent::LinkUp { link, channel, from });
        link
    }

    pub(crate) fn hear(&mut self, link: LinkId, parts: &[&[u8]]) {
        let parts = parts.iter().map(|part| part.to_vec()).collect();
        self.control(ControlEvent::Frame { link, parts });
    }

    /// The next frame that the core sends over a link.
    pub(crate) fn said(&mut self, link: LinkId) -> Vec<u8>
    where
        A: std::fmt::Debug,
    {
        self.take("frame", |want| match want {
            CoreOutput::Control(ControlCommand::Send { link: on, frame }) if *on == link => {
                Some(frame.clone())
            }
            _ => None,
        })
    }

    /// The next frame that the core answers with over a link.
    pub(crate) fn replied(&mut self, link: LinkId) -> Vec<u8>
    where
        A: std::fmt::Debug,
    {
        self.take("reply", |want| match want {
            CoreOutput::Control(ControlCommand::Reply { link: on, frame }) if *on == link => {
                Some(frame.clone())
            }
            _ => None,
        })
    }

    pub(crate) fn job(&mut self) -> TransferJob
    where
        A: std::fmt::Debug,
    {
        self.take("job", |want| match want {
            CoreOutput::Job(job) => Some(job.clone()),
            _ => None,
        })
    }

    pub(crate) fn answer(&mut self) -> A
    where
        A: Clone + std::fmt::Debug,
    {
        self.take("answer", |want| match want {
            CoreOutput::Answer(answer) => Some(answer.clone()),
            _ => None,
        })
    }

    pub(crate) fn violation(&mut self) -> String
    where
        A: std::fmt::Debug,
    {
        self.take("violation", |want| match want {
            CoreOutput::Violation(text) => Some(text.clone()),
            _ => None,
        })
    }

    /// Takes that the core hangs up.
    pub(crate) fn hung_up(&mut self)
    where
        A: std::fmt::Debug,
    {
        self.take("hang-up", |want| {
            matches!(want, CoreOutput::Control(ControlCommand::HangUp { .. })).then_some(())
        });
    }

    /// Plays vLLM, which the core asks first whether it may say hello.
    pub(crate) fn meet_vllm(&mut self)
    where
        A: std::fmt::Debug,
    {
        let link = self.dialled("tcp://10.0.0.9:6301", LinkKind::Handshake);
        self.up(link, LinkKind::Handshake);
        assert_eq!(self.said(link), REQUEST);
        let [empty, metadata] = good_replies().0.encode();
        self.hear(link, &[&empty, &metadata]);
        self.turned_to_moriio();
    }

    /// Takes that a request is said to be spoken of in MoRIIO's words.
    pub(crate) fn turned_to_moriio(&mut self)
    where
        A: std::fmt::Debug,
    {
        self.take("dialect", |want| matches!(want, CoreOutput::TurnedToMoriio).then_some(()));
    }

    /// Plays vLLM's side of the handshake that the core begins.
    pub(crate) fn handshake(&mut self, replies: &(AgentMetadata, LayerMemory))
    where
        A: std::fmt::Debug,
    {
        self.handshake_of(0, replies);
    }

    /// The same with a TP rank.
    pub(crate) fn handshake_of(
        &mut self,
        rank: u16,
        (metadata, memory): &(AgentMetadata, LayerMemory),
    ) where
        A: std::fmt::Debug,
    {
        let link = self.dialled(&format!("tcp://10.0.0.9:{}", 6301 + rank), LinkKind::Handshake);
        self.up(link, LinkKind::Handshake);
        assert_eq!(self.said(link), REQUEST);
        for frame in [metadata.encode(), memory.encode()] {
            let parts: Vec<&[u8]> = frame.iter().map(|part| &part[..]).collect();
            self.hear(link, &parts);
        }
        self.take("hang-up", |want| match want {
            CoreOutput::Control(ControlCommand::HangUp { link: on }) if *on == link => Some(()),
            _ => None,
        });
    }
}
