//! The control network: [`SimControlPlane`] for processes, [`ControlNetwork`] for the world.
//!
//! Links carry frames in order, each after a drawn latency, like one TCP connection. Frames that
//! meet a partition vanish and the link stays up: a silent peer has to be noticed by silence.

mod call;
mod forge;
mod plane;

pub use call::{
    ControlPlaneIx, FrameDecision, FrameInfo, NetCalls, NetConfig, NetContext, NetEvent, NetHooks,
    NetMessage, NetOutput,
};
pub use plane::SimControlPlane;

use crate::keyed_rng::KeyedRng;
use crate::slab::Slab;
use call::NetCall;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{ControlEvent, LinkId, LinkKind};
use kvferry_scenarios::decide::kind;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// The kind of latency draws.
const LATENCY: u64 = kind("net.latency");

#[derive(Debug)]
pub struct ControlNetwork {
    config: NetConfig,
    keyed: KeyedRng,
    planes: Vec<NetPlane>,
    /// Who answers to a name.
    names: BTreeMap<Arc<str>, ControlPlaneIx>,
    links: Vec<SimLink>,
    mail: Slab<NetInFlight>,
    /// Ordered pairs of nodes between which nothing passes.
    cut: BTreeSet<(u32, u32)>,
    /// The newest frames of each channel, if they are kept.
    recorded: BTreeMap<LinkKind, VecDeque<Vec<Vec<u8>>>>,
}

#[derive(Debug)]
struct NetPlane {
    node: u32,
    alive: bool,
    paused: bool,
    held: Vec<NetArrival>,
    listening: BTreeSet<LinkKind>,
    links: BTreeMap<LinkId, (u32, usize)>,
    inbound: u32,
    frames: u64,
    drawn: u64,
}

/// A connection; end 0 dialled.
#[derive(Debug)]
struct SimLink {
    channel: LinkKind,
    name: Arc<str>,
    ends: [SimLinkEnd; 2],
}

#[derive(Clone, Copy, Debug)]
struct SimLinkEnd {
    plane: ControlPlaneIx,
    id: LinkId,
    open: bool,
    /// When the other end is told that the link is up.
    first: Nanos,
    /// When the frame sent last from here arrives; the next is not earlier.
    last: Nanos,
    /// What is sent from here vanishes.
    mute: bool,
}

#[derive(Clone, Debug)]
enum NetInFlight {
    Dial(u32),
    Arrival(ControlPlaneIx, NetArrival),
}

/// Something that a process is told.
#[derive(Clone, Debug)]
struct NetArrival {
    link: u32,
    end: usize,
    what: NetPayload,
}

#[derive(Clone, Debug)]
enum NetPayload {
    Up,
    Down,
    Frame(Vec<Vec<u8>>),
    /// A frame that is damaged.
    Damaged(Vec<Vec<u8>>),
    /// A copy of a frame, which takes no place in the sender's queue.
    Copy(Vec<Vec<u8>>),
    /// A frame that does not belong to this link, and takes no place either.
    Foreign(Vec<Vec<u8>>),
    /// Nothing; but it took a place in the sender's queue.
    Lost,
}

impl ControlNetwork {
    /// A network without planes.
    pub fn new(config: NetConfig) -> ControlNetwork {
        ControlNetwork {
            keyed: KeyedRng::new(config.seed),
            config,
            planes: Vec::new(),
            names: BTreeMap::new(),
            links: Vec::new(),
            mail: Slab::default(),
            cut: BTreeSet::new(),
            recorded: BTreeMap::new(),
        }
    }

    /// Adds a plane that answers to `sim://<name>`; a restarted process takes over its name.
    pub fn add_plane(&mut self, name: &str, node: u32) -> SimControlPlane {
        let ix = ControlPlaneIx(self.planes.len() as u32);
        let name: Arc<str> = name.into();
        self.names.insert(name.clone(), ix);
        self.planes.push(NetPlane {
            node,
            alive: true,
            paused: false,
            held: Vec::new(),
            listening: BTreeSet::new(),
            links: BTreeMap::new(),
            inbound: 0,
            frames: 0,
            drawn: 0,
        });
        SimControlPlane::new(ix, name, self.config.queue_max)
    }

    /// Performs the calls that a plane took; they are used up.
    pub fn perform(
        &mut self,
        plane: ControlPlaneIx,
        calls: &mut NetCalls,
        hooks: &mut dyn NetHooks,
        cx: &mut NetContext<'_>,
    ) {
        let alive = self.planes[plane.0 as usize].alive;
        for call in calls.list.drain(..).filter(|_| alive) {
            match call {
                NetCall::Listen { channel } => {
                    self.planes[plane.0 as usize].listening.insert(channel);
                }
                NetCall::Dial { link, name, channel } => {
                    self.dial(plane, (link, name, channel), cx);
                }
                NetCall::Send { link, parts } => {
                    self.send(plane, (link, parts), hooks, cx);
                }
                NetCall::HangUp { link } => {
                    let Some((link, end)) = self.planes[plane.0 as usize].links.remove(&link)
                    else {
                        continue;
                    };
                    self.links[link as usize].ends[end].open = false;
                    self.tell_down(cx.now, (link, 1 - end), cx);
                }
            }
        }
    }

    fn dial(
        &mut self,
        plane: ControlPlaneIx,
        (id, name, channel): (LinkId, Arc<str>, LinkKind),
        cx: &mut NetContext<'_>,
    ) {
        let end = SimLinkEnd {
            plane,
            id,
            open: true,
            first: Nanos::ZERO,
            last: Nanos::ZERO,
            mute: false,
        };
        let slot = self.links.len() as u32;
        self.links.push(SimLink { channel, name, ends: [end, SimLinkEnd { open: false, ..end }] });
        self.planes[plane.0 as usize].links.insert(id, (slot, 0));
        let at = cx.now + self.latency(plane);
        self.post(at, NetInFlight::Dial(slot), cx);
    }

    /// A dial reaches the other side, or does not.
    fn answer(&mut self, slot: u32, cx: &mut NetContext<'_>) {
        let link = &self.links[slot as usize];
        let [SimLinkEnd { plane: from, open, .. }, _] = link.ends;
        if !open {
            return;
        }
        let to = self.names.get(&link.name).copied();
        let accepts = |to: &ControlPlaneIx| {
            let to = &self.planes[to.0 as usize];
            to.alive && to.listening.contains(&link.channel)
        };
        let cut = to.is_some_and(|to| self.is_cut(from, to) || self.is_cut(to, from));
        let Some(to) = to.filter(accepts).filter(|_| !cut) else {
            let wait = if cut { self.config.dial_timeout } else { self.latency(from) };
            let down = NetArrival { link: slot, end: 0, what: NetPayload::Down };
            return self.post(cx.now + wait, NetInFlight::Arrival(from, down), cx);
        };
        let target = &mut self.planes[to.0 as usize];
        let id = LinkId(target.inbound | LinkId::INBOUND);
        target.inbound += 1;
        target.links.insert(id, (slot, 1));
        let back = cx.now + self.latency(to);
        let ends = &mut self.links[slot as usize].ends;
        ends[1] = SimLinkEnd { plane: to, id, open: true, first: back, last: back, mute: false };
        (ends[0].first, ends[0].last) = (cx.now, cx.now);
        let up = |end| NetArrival { link: slot, end, what: NetPayload::Up };
        self.post(cx.now, NetInFlight::Arrival(to, up(1)), cx);
        self.post(back, NetInFlight::Arrival(from, up(0)), cx);
    }

    fn send(
        &mut self,
        plane: ControlPlaneIx,
        (id, parts): (LinkId, Vec<Vec<u8>>),
        hooks: &mut dyn NetHooks,
        cx: &mut NetContext<'_>,
    ) {
        let me = &mut self.planes[plane.0 as usize];
        let Some((slot, end)) = me.links.get(&id).copied() else { return };
        let nth = me.frames;
        me.frames += 1;
        let link = &self.links[slot as usize];
        let (to, channel) = (link.ends[1 - end].plane, link.channel);
        let fate =
            hooks.decide_frame(cx.now, &FrameInfo { from: plane, to, channel, nth, parts: &parts });
        let due = cx.now + self.latency(plane) + fate.delay;
        let lost = fate.drop || self.is_cut(plane, to);
        let me = &mut self.links[slot as usize].ends[end];
        let at = due.max(if fate.reorder { me.first } else { me.last });
        if !fate.reorder {
            me.last = at;
        }
        let lost = lost || me.mute;
        let arrival =
            |what| NetInFlight::Arrival(to, NetArrival { link: slot, end: 1 - end, what });
        if let Some(after) = fate.duplicate.filter(|_| !lost) {
            self.post(at + after, arrival(NetPayload::Copy(parts.clone())), cx);
        }
        if let Some(bits) = fate.foreign.filter(|_| !lost) {
            let recorded = self.recorded.get(&channel);
            let foreign = forge::foreign(bits, recorded.into_iter().flatten());
            self.post(at, arrival(NetPayload::Foreign(foreign)), cx);
        }
        if self.config.recorded > 0 {
            let kept = self.recorded.entry(channel).or_default();
            if kept.len() == self.config.recorded {
                kept.pop_front();
            }
            kept.push_back(parts.clone());
        }
        let what = match fate.damage {
            _ if lost => NetPayload::Lost,
            Some(bits) => NetPayload::Damaged(forge::damaged(bits, parts)),
            None => NetPayload::Frame(parts),
        };
        self.post(at, arrival(what), cx);
    }

    /// Tells one end of a link that the other is gone, after what that one sent.
    fn tell_down(&mut self, now: Nanos, (link, end): (u32, usize), cx: &mut NetContext<'_>) {
        let ends = self.links[link as usize].ends;
        if ends[end].open {
            let at = (now + self.latency(ends[1 - end].plane)).max(ends[1 - end].last);
            let down = NetArrival { link, end, what: NetPayload::Down };
            self.post(at, NetInFlight::Arrival(ends[end].plane, down), cx);
        }
    }

    /// Handles an entry of the queue and appends what it did.
    pub fn step(&mut self, event: NetEvent, cx: &mut NetContext<'_>) {
        let NetEvent::Arrive { slot } = event;
        match self.mail.take(slot) {
            NetInFlight::Dial(link) => self.answer(link, cx),
            NetInFlight::Arrival(plane, arrival) => {
                let to = &mut self.planes[plane.0 as usize];
                if to.paused && to.alive && !matches!(arrival.what, NetPayload::Lost) {
                    to.held.push(arrival);
                } else {
                    self.arrive(plane, arrival, cx);
                }
            }
        }
    }

    fn arrive(&mut self, plane: ControlPlaneIx, arrival: NetArrival, cx: &mut NetContext<'_>) {
        let NetArrival { link, end, what } = arrival;
        let ends = self.links[link as usize].ends;
        if matches!(what, NetPayload::Frame(_) | NetPayload::Damaged(_) | NetPayload::Lost) {
            let sender = &ends[1 - end];
            let news = NetMessage::Sent { link: sender.id, frames: 1 };
            if sender.open && self.planes[sender.plane.0 as usize].alive {
                cx.out.push(NetOutput::Deliver {
                    plane: sender.plane,
                    message: news,
                    forged: false,
                });
            }
        }
        let SimLinkEnd { id, open, .. } = ends[end];
        if !open || !self.planes[plane.0 as usize].alive {
            return;
        }
        let forged = matches!(what, NetPayload::Damaged(_) | NetPayload::Foreign(_));
        let event = match what {
            NetPayload::Up => {
                let channel = self.links[link as usize].channel;
                ControlEvent::LinkUp { link: id, channel, from: None }
            }
            NetPayload::Down => {
                self.links[link as usize].ends[end].open = false;
                self.planes[plane.0 as usize].links.remove(&id);
                ControlEvent::LinkDown { link: id }
            }
            NetPayload::Frame(parts)
            | NetPayload::Damaged(parts)
            | NetPayload::Copy(parts)
            | NetPayload::Foreign(parts) => ControlEvent::Frame { link: id, parts },
            NetPayload::Lost => return,
        };
        cx.out.push(NetOutput::Deliver { plane, message: NetMessage::Event(event), forged });
    }

    /// A process died. Frames that it sent before still arrive. With `told` the other ends of its
    /// links see `LinkDown` after that time; otherwise what they send vanishes.
    pub fn crash(&mut self, plane: ControlPlaneIx, told: Option<Nanos>, cx: &mut NetContext<'_>) {
        let me = &mut self.planes[plane.0 as usize];
        me.alive = false;
        me.held.clear();
        for (link, end) in std::mem::take(&mut self.planes[plane.0 as usize].links).into_values() {
            self.links[link as usize].ends[end].open = false;
            if let Some(told) = told {
                self.tell_down(cx.now + told, (link, 1 - end), cx);
            }
        }
    }

    /// Stops or resumes a process: while stopped its plane is told nothing.
    pub fn set_paused(&mut self, plane: ControlPlaneIx, paused: bool, cx: &mut NetContext<'_>) {
        self.planes[plane.0 as usize].paused = paused;
        if !paused {
            for arrival in std::mem::take(&mut self.planes[plane.0 as usize].held) {
                self.arrive(plane, arrival, cx);
            }
        }
    }

    /// Cuts or heals the way from one node to another; what is sent meanwhile is lost.
    pub fn set_cut(&mut self, (from, to): (u32, u32), cut: bool) {
        if cut {
            self.cut.insert((from, to));
        } else {
            self.cut.remove(&(from, to));
        }
    }

    /// Makes a link half open: what `plane` sends on it vanishes from now on.
    pub fn mute(&mut self, plane: ControlPlaneIx, link: LinkId) {
        if let Some((link, end)) = self.planes[plane.0 as usize].links.get(&link) {
            self.links[*link as usize].ends[*end].mute = true;
        }
    }

    /// Links of a plane that are up or being dialled.
    pub fn links(&self, plane: ControlPlaneIx) -> impl Iterator<Item = LinkId> + '_ {
        self.planes[plane.0 as usize].links.keys().copied()
    }

    /// Who is at the other end of a link, if it is up.
    pub fn peer(&self, plane: ControlPlaneIx, link: LinkId) -> Option<ControlPlaneIx> {
        let (link, end) = self.planes[plane.0 as usize].links.get(&link)?;
        Some(self.links[*link as usize].ends[1 - end].plane)
    }

    fn is_cut(&self, from: ControlPlaneIx, to: ControlPlaneIx) -> bool {
        let node = |plane: ControlPlaneIx| self.planes[plane.0 as usize].node;
        !self.cut.is_empty() && self.cut.contains(&(node(from), node(to)))
    }

    fn latency(&mut self, plane: ControlPlaneIx) -> Nanos {
        let me = &mut self.planes[plane.0 as usize];
        me.drawn += 1;
        let bits = self.keyed.draw(LATENCY, u64::from(plane.0), me.drawn);
        Nanos(self.config.latency.pick(bits))
    }

    fn post(&mut self, at: Nanos, mail: NetInFlight, cx: &mut NetContext<'_>) {
        let slot = self.mail.add(mail);
        cx.queue.at(at, NetEvent::Arrive { slot });
    }
}
