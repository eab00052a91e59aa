//! One core, its engine, its rank and its wire.

use super::frames;
use super::network::{FuzzFrame, FuzzNetwork};
use super::ranks::FuzzRanks;
use super::step::{FuzzFrameSpec, FuzzStep};
use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::config::{CoreConfig, CoreSettings};
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::dialect::moriio::params::MoriioRemote;
use kvferry_engine::core::dialect::moriio::ports::ParallelSizes;
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{Mode, MoriioLeg, Role, TransferJob, TransferReport};
use kvferry_engine::core::moriio::{MoriioConfig, MoriioSettings};
use kvferry_engine::core::{Gauges, Machine, Nanos, Outbox};
use kvferry_engine::fabric::{ControlEvent, LinkId, LinkKind};
use std::fmt::Debug;
use std::sync::Arc;

/// Something that a core is told.
pub(super) enum FuzzCoreInput<H> {
    Control(ControlEvent),
    Report(TransferReport),
    Hook(H),
    Drain,
    Tick,
}

/// Something that a core wants.
pub(super) enum FuzzCoreEffect<A> {
    Control(ControlCommand),
    Job(TransferJob),
    Answer(A),
    Nothing,
}

/// The serving engine of a core, and how that core is talked to.
pub(super) trait FuzzEngine: Default {
    type Core: Machine;
    type Hook: Debug;
    type Answer;
    const ROLE: Role;

    fn core(config: CoreConfig) -> Self::Core;
    fn input(told: FuzzCoreInput<Self::Hook>) -> <Self::Core as Machine>::Input;
    fn want(effect: <Self::Core as Machine>::Effect) -> FuzzCoreEffect<Self::Answer>;
    /// A hook that may be called now, if there is one.
    fn hook(&mut self, mode: Mode, what: u8, which: u8, size: u8) -> Option<Self::Hook>;
    /// Panics on an answer that is not due.
    fn hear(&mut self, answer: Self::Answer);
    /// Ends a request that has not ended.
    fn finish(&mut self) -> Option<Self::Hook>;
    /// Panics if an answer is still due.
    fn check_settled(&self);
}

/// Effects of one input: a burst of repetitions to each of a few peers, and something for each of a
/// few requests.
const EFFECTS_MAX: usize = 256;

/// Ticks at one time: as many timers as can be due.
const TICKS_MAX: u32 = 64;

/// Ticks of one program.
const TICKS_TOTAL: u32 = 20_000;

#[derive(Debug)]
pub(super) struct FuzzWorld<E: FuzzEngine> {
    core: E::Core,
    engine: E,
    ranks: FuzzRanks,
    wire: FuzzNetwork,
    mode: Mode,
    limits: Gauges,
    now: Nanos,
    ticks: u32,
}

/// The other engine, which speaks MoRIIO.
pub(super) fn moriio_peer(known: bool, blocks: Vec<BlockList>) -> Arc<MoriioLeg> {
    let address = ZmqAddress { host: "10.0.0.9".into(), handshake: 6301, notify: 7301 };
    let hosts = vec![address.host.clone()];
    let shape = ParallelSizes { dp_size_local: 1, tp_size: 1 };
    let peer = MoriioRemote { address, hosts, dp_size: 1, dp_rank: 0, shape };
    Arc::new(MoriioLeg { peer: known.then_some(peer), blocks, only: false })
}

/// Limits that programs reach.
fn config(role: Role, mode: Mode, moriio: bool, router: bool) -> CoreConfig {
    let moriio = moriio.then(|| MoriioConfig {
        address: ZmqAddress { host: "10.0.0.1".into(), handshake: 6300, notify: 7300 },
        layer_names: (0..frames::LAYERS).map(frames::layer_name).collect(),
        attn_backend: "CPU_ATTN".into(),
        settings: MoriioSettings {
            notices_max: 4,
            early_max: 4,
            peers_max: 2,
            links_max: 3,
            ..MoriioSettings::default()
        },
        closed: None,
    });
    let ((engine, incarnation), control) = (frames::OWN, "tcp://10.0.0.1:6300".into());
    CoreConfig {
        mode,
        http: "10.0.0.1:80".into(),
        router: router.then(|| "tcp://10.0.0.8:6000".into()),
        settings: CoreSettings {
            lease: Nanos::from_secs(9),
            early_max: 4,
            tombstones_max: 8,
            requests_max: 6,
            receivers_max: 8,
            ..CoreSettings::default()
        },
        channel: ChannelConfig {
            queue_max: 16,
            peers_max: 3,
            links_max: 6,
            ..ChannelConfig::default()
        },
        moriio,
        ..CoreConfig::new(role, engine, incarnation, frames::geometry(), control)
    }
}

impl<E: FuzzEngine> FuzzWorld<E> {
    pub(super) fn new(mode: Mode, moriio: bool, router: bool) -> FuzzWorld<E> {
        let config = config(E::ROLE, mode, moriio, router);
        let other = if E::ROLE == Role::Prefill { Role::Decode } else { Role::Prefill };
        let mut world = FuzzWorld {
            limits: config.limits(frames::BLOCKS),
            core: E::core(config),
            engine: E::default(),
            ranks: FuzzRanks::default(),
            wire: FuzzNetwork::new(other),
            mode,
            now: Nanos(1),
            ticks: 0,
        };
        world.tell(FuzzCoreInput::Report(TransferReport::Ready { layout: frames::layout(0x1000) }));
        world
    }

    /// True if the program takes too long to go on.
    pub(super) fn is_tired(&self) -> bool {
        self.ticks > TICKS_TOTAL
    }

    fn tell(&mut self, told: FuzzCoreInput<E::Hook>) {
        let mut out = Outbox::new();
        self.core.handle(self.now, E::input(told), &mut out);
        let effects = out.take();
        assert!(effects.len() <= EFFECTS_MAX, "{} effects at once", effects.len());
        for effect in effects {
            match E::want(effect) {
                FuzzCoreEffect::Control(command) => self.wire.command(command),
                FuzzCoreEffect::Job(job) => self.ranks.job(&job),
                FuzzCoreEffect::Answer(answer) => self.engine.hear(answer),
                FuzzCoreEffect::Nothing => {}
            }
        }
        within(&self.core.gauges(), &self.limits);
    }

    fn hear(&mut self, (link, parts): FuzzFrame) {
        if self.wire.links.get(&link).is_some_and(|link| link.up) {
            self.tell(FuzzCoreInput::Control(ControlEvent::Frame { link, parts }));
        }
    }

    fn accept(&mut self, channel: LinkKind) -> LinkId {
        let link = self.wire.open(channel);
        self.tell(FuzzCoreInput::Control(ControlEvent::LinkUp { link, channel, from: None }));
        link
    }

    fn down(&mut self, link: LinkId) {
        self.wire.links.remove(&link);
        self.tell(FuzzCoreInput::Control(ControlEvent::LinkDown { link }));
    }

    /// Lets time pass, with a tick at each deadline.
    fn wait(&mut self, time: Nanos) {
        let end = self.now + time;
        let mut at_once = 0;
        while let Some(due) = self.core.deadline().filter(|due| *due <= end) {
            at_once = if due > self.now { 1 } else { at_once + 1 };
            assert!(at_once <= TICKS_MAX, "a deadline at {} does not pass", self.now);
            self.now = due.max(self.now);
            self.ticks += 1;
            self.tell(FuzzCoreInput::Tick);
        }
        self.now = end;
    }

    pub(super) fn step(&mut self, step: FuzzStep) {
        match step {
            FuzzStep::Polite => {
                for word in self.wire.polite() {
                    self.hear(word);
                }
            }
            FuzzStep::Hook { what, which, size } => {
                if let Some(hook) = self.engine.hook(self.mode, what, which, size) {
                    self.tell(FuzzCoreInput::Hook(hook));
                }
            }
            FuzzStep::Up { link } => {
                if let Some(link) = self.wire.pick(link, |link| !link.up)
                    && let Some(entry) = self.wire.links.get_mut(&link)
                {
                    entry.up = true;
                    let channel = entry.channel;
                    self.tell(FuzzCoreInput::Control(ControlEvent::LinkUp {
                        link,
                        channel,
                        from: None,
                    }));
                }
            }
            FuzzStep::Report { what, which } => {
                for report in self.ranks.report(what, which) {
                    self.tell(FuzzCoreInput::Report(report));
                }
            }
            FuzzStep::Greet { peer, incarnation, session } => {
                let link = self.accept(LinkKind::Handshake);
                let conversation = (u64::from(incarnation), u64::from(session));
                let word = self.wire.greet(link, peer, conversation);
                self.hear(word);
            }
            FuzzStep::Open { channel } => {
                let channels = [
                    LinkKind::Notify,
                    LinkKind::Handshake,
                    LinkKind::Discovery,
                    LinkKind::RankHandshake(1),
                    LinkKind::RankNotify(1),
                ];
                self.accept(channels[usize::from(channel) % channels.len()]);
            }
            FuzzStep::Say { link, words } => self.say(link, &words, |_| {}),
            FuzzStep::Hurt { link, words, at, value, cut } => self.say(link, &words, |part| {
                let at = usize::from(at) % part.len().max(1);
                part.iter_mut().skip(at).take(1).for_each(|byte| *byte = value);
                part.truncate(cut.map_or(usize::MAX, usize::from));
            }),
            FuzzStep::Raw { link, parts } => {
                if let Some(link) = self.wire.pick(link, |link| link.up) {
                    self.hear((link, parts));
                }
            }
            FuzzStep::Down { link } => {
                if let Some(link) = self.wire.pick(link, |_| true) {
                    self.down(link);
                }
            }
            FuzzStep::Wait { ms } => self.wait(Nanos::from_ms(u64::from(ms))),
            FuzzStep::WaitLong { seconds } => self.wait(Nanos::from_secs(u64::from(seconds))),
            FuzzStep::Drain => self.tell(FuzzCoreInput::Drain),
        }
    }

    /// Words over a link that is up, with their last part changed.
    fn say(&mut self, link: u8, words: &FuzzFrameSpec, change: impl Fn(&mut Vec<u8>)) {
        let Some(link) = self.wire.pick(link, |link| link.up) else { return };
        let Some((link, mut parts)) = self.wire.say(link, words) else { return };
        parts.last_mut().into_iter().for_each(change);
        self.hear((link, parts));
    }

    /// Ends all requests, takes all links down for good, lets the ranks end what they do, and waits
    /// longer than the longest time of the settings.
    pub(super) fn settle(mut self) {
        while let Some(hook) = self.engine.finish() {
            self.tell(FuzzCoreInput::Hook(hook));
        }
        for _ in 0..60 {
            while let Some(link) = self.wire.pick(0, |_| true) {
                self.down(link);
            }
            for report in self.ranks.end() {
                self.tell(FuzzCoreInput::Report(report));
            }
            self.wait(Nanos::from_secs(5));
        }
        self.engine.check_settled();
        let left = self.core.gauges();
        let held = (left.transfers, left.held, left.quarantined);
        assert_eq!(held, (0, 0, 0), "left over: {left:?}");
    }
}

fn within(gauges: &Gauges, limits: &Gauges) {
    let pairs = [
        ("transfers", gauges.transfers, limits.transfers),
        ("held", gauges.held, limits.held),
        ("quarantined", gauges.quarantined, limits.quarantined),
        ("queued", gauges.queued, limits.queued),
        ("tombstones", gauges.tombstones, limits.tombstones),
        ("peers", gauges.peers, limits.peers),
        ("links", gauges.links, limits.links),
    ];
    for (name, is, limit) in pairs {
        assert!(is <= limit, "{is} {name}, at most {limit}");
    }
}
