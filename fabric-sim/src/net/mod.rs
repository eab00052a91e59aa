//! The control network: [`SimControlPlane`] for processes, [`Net`] for the world.
//!
//! Links carry frames in order, each after a drawn latency, like one TCP connection. Frames that
//! meet a partition vanish and the link stays up: a silent peer has to be noticed by silence.

mod call;
mod forge;
mod plane;

pub use call::{
    EveryFrame, FrameFate, FrameInfo, NetCalls, NetConfig, NetEvent, NetHooks, NetIx, NetNews,
    NetOutput,
};
pub use plane::SimControlPlane;

use crate::keyed::Keyed;
use crate::queue::Schedule;
use call::NetCall;
use engine::core::time::Nanos;
use engine::fabric::{Channel, ControlEvent, LinkId};
use scenarios::decide::kind;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// The kind of latency draws.
const LATENCY: u64 = kind("net.latency");

/// The control network.
#[derive(Debug)]
pub struct Net {
    config: NetConfig,
    keyed: Keyed,
    planes: Vec<Plane>,
    /// Who answers to a name.
    names: BTreeMap<Arc<str>, NetIx>,
    links: Vec<Link>,
    mail: Vec<Option<Mail>>,
    free_mail: Vec<u32>,
    /// Ordered pairs of nodes between which nothing passes.
    cut: BTreeSet<(u32, u32)>,
    /// The newest frames of each channel, if they are kept.
    recorded: BTreeMap<Channel, VecDeque<Vec<Vec<u8>>>>,
}

#[derive(Debug)]
struct Plane {
    node: u32,
    alive: bool,
    paused: bool,
    held: Vec<Arrival>,
    listening: BTreeSet<Channel>,
    links: BTreeMap<LinkId, (u32, usize)>,
    inbound: u32,
    frames: u64,
    drawn: u64,
}

/// A connection; end 0 dialled.
#[derive(Debug)]
struct Link {
    channel: Channel,
    name: Arc<str>,
    ends: [End; 2],
}

#[derive(Clone, Copy, Debug)]
struct End {
    plane: NetIx,
    id: LinkId,
    open: bool,
    /// When the other end is told that the link is up.
    first: Nanos,
    /// When the frame sent last from here arrives; the next is not earlier.
    last: Nanos,
    /// What is sent from here vanishes.
    mute: bool,
}

/// Something under way.
#[derive(Clone, Debug)]
enum Mail {
    Dial(u32),
    Arrival(NetIx, Arrival),
}

/// Something that a process is told.
#[derive(Clone, Debug)]
struct Arrival {
    link: u32,
    end: usize,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
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

impl Net {
    /// A network without planes.
    pub fn new(config: NetConfig) -> Net {
        Net {
            keyed: Keyed::new(config.seed),
            config,
            planes: Vec::new(),
            names: BTreeMap::new(),
            links: Vec::new(),
            mail: Vec::new(),
            free_mail: Vec::new(),
            cut: BTreeSet::new(),
            recorded: BTreeMap::new(),
        }
    }

    /// Adds a plane that answers to `sim://<name>`; a restarted process takes over its name.
    pub fn add_plane(&mut self, name: &str, node: u32) -> SimControlPlane {
        let ix = NetIx(self.planes.len() as u32);
        let name: Arc<str> = name.into();
        self.names.insert(name.clone(), ix);
        self.planes.push(Plane {
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
    pub fn perform<S: Schedule<NetEvent>>(
        &mut self,
        now: Nanos,
        plane: NetIx,
        calls: &mut NetCalls,
        hooks: &mut dyn NetHooks,
        queue: &mut S,
    ) {
        let alive = self.planes[plane.0 as usize].alive;
        for call in calls.list.drain(..).filter(|_| alive) {
            match call {
                NetCall::Listen { channel } => {
                    self.planes[plane.0 as usize].listening.insert(channel);
                }
                NetCall::Dial { link, name, channel } => {
                    self.dial(now, plane, (link, name, channel), queue);
                }
                NetCall::Send { link, parts } => {
                    self.send(now, plane, (link, parts), hooks, queue);
                }
                NetCall::HangUp { link } => {
                    let Some((link, end)) = self.planes[plane.0 as usize].links.remove(&link)
                    else {
                        continue;
                    };
                    self.links[link as usize].ends[end].open = false;
                    self.tell_down(now, (link, 1 - end), queue);
                }
            }
        }
    }

    fn dial<S: Schedule<NetEvent>>(
        &mut self,
        now: Nanos,
        plane: NetIx,
        (id, name, channel): (LinkId, Arc<str>, Channel),
        queue: &mut S,
    ) {
        let end = End { plane, id, open: true, first: Nanos::ZERO, last: Nanos::ZERO, mute: false };
        let slot = self.links.len() as u32;
        self.links.push(Link { channel, name, ends: [end, End { open: false, ..end }] });
        self.planes[plane.0 as usize].links.insert(id, (slot, 0));
        let at = now + self.latency(plane);
        self.post(at, Mail::Dial(slot), queue);
    }

    /// A dial reaches the other side, or does not.
    fn answer<S: Schedule<NetEvent>>(&mut self, now: Nanos, slot: u32, queue: &mut S) {
        let link = &self.links[slot as usize];
        let [End { plane: from, open, .. }, _] = link.ends;
        if !open {
            return;
        }
        let to = self.names.get(&link.name).copied();
        let accepts = |to: &NetIx| {
            let to = &self.planes[to.0 as usize];
            to.alive && to.listening.contains(&link.channel)
        };
        let cut = to.is_some_and(|to| self.is_cut(from, to) || self.is_cut(to, from));
        let Some(to) = to.filter(accepts).filter(|_| !cut) else {
            let wait = if cut { self.config.dial_timeout } else { self.latency(from) };
            let down = Arrival { link: slot, end: 0, what: What::Down };
            return self.post(now + wait, Mail::Arrival(from, down), queue);
        };
        let target = &mut self.planes[to.0 as usize];
        let id = LinkId(target.inbound | LinkId::INBOUND);
        target.inbound += 1;
        target.links.insert(id, (slot, 1));
        let back = now + self.latency(to);
        let ends = &mut self.links[slot as usize].ends;
        ends[1] = End { plane: to, id, open: true, first: back, last: back, mute: false };
        (ends[0].first, ends[0].last) = (now, now);
        let up = |end| Arrival { link: slot, end, what: What::Up };
        self.post(now, Mail::Arrival(to, up(1)), queue);
        self.post(back, Mail::Arrival(from, up(0)), queue);
    }

    fn send<S: Schedule<NetEvent>>(
        &mut self,
        now: Nanos,
        plane: NetIx,
        (id, parts): (LinkId, Vec<Vec<u8>>),
        hooks: &mut dyn NetHooks,
        queue: &mut S,
    ) {
        let me = &mut self.planes[plane.0 as usize];
        let Some((slot, end)) = me.links.get(&id).copied() else { return };
        let nth = me.frames;
        me.frames += 1;
        let link = &self.links[slot as usize];
        let (to, channel) = (link.ends[1 - end].plane, link.channel);
        let fate = hooks.fate(now, &FrameInfo { from: plane, to, channel, nth, parts: &parts });
        let due = now + self.latency(plane) + fate.delay;
        let lost = fate.drop || self.is_cut(plane, to);
        let me = &mut self.links[slot as usize].ends[end];
        let at = due.max(if fate.reorder { me.first } else { me.last });
        if !fate.reorder {
            me.last = at;
        }
        let lost = lost || me.mute;
        let arrival = |what| Mail::Arrival(to, Arrival { link: slot, end: 1 - end, what });
        if let Some(after) = fate.duplicate.filter(|_| !lost) {
            self.post(at + after, arrival(What::Copy(parts.clone())), queue);
        }
        if let Some(bits) = fate.foreign.filter(|_| !lost) {
            let recorded = self.recorded.get(&channel);
            let foreign = forge::foreign(bits, recorded.into_iter().flatten());
            self.post(at, arrival(What::Foreign(foreign)), queue);
        }
        if self.config.recorded > 0 {
            let kept = self.recorded.entry(channel).or_default();
            if kept.len() == self.config.recorded {
                kept.pop_front();
            }
            kept.push_back(parts.clone());
        }
        let what = match fate.damage {
            _ if lost => What::Lost,
            Some(bits) => What::Damaged(forge::damaged(bits, parts)),
            None => What::Frame(parts),
        };
        self.post(at, arrival(what), queue);
    }

    /// Tells one end of a link that the other is gone, after what that one sent.
    fn tell_down<S: Schedule<NetEvent>>(
        &mut self,
        now: Nanos,
        (link, end): (u32, usize),
        queue: &mut S,
    ) {
        let ends = self.links[link as usize].ends;
        if ends[end].open {
            let at = (now + self.latency(ends[1 - end].plane)).max(ends[1 - end].last);
            let down = Arrival { link, end, what: What::Down };
            self.post(at, Mail::Arrival(ends[end].plane, down), queue);
        }
    }

    /// Handles an entry of the queue and appends what it did.
    pub fn step<S: Schedule<NetEvent>>(
        &mut self,
        now: Nanos,
        event: NetEvent,
        queue: &mut S,
        out: &mut Vec<NetOutput>,
    ) {
        let NetEvent::Arrive { slot } = event;
        self.free_mail.push(slot);
        match self.mail[slot as usize].take().expect("mail arrives once") {
            Mail::Dial(link) => self.answer(now, link, queue),
            Mail::Arrival(plane, arrival) => {
                let to = &mut self.planes[plane.0 as usize];
                if to.paused && to.alive && !matches!(arrival.what, What::Lost) {
                    to.held.push(arrival);
                } else {
                    self.arrive(plane, arrival, out);
                }
            }
        }
    }

    fn arrive(&mut self, plane: NetIx, arrival: Arrival, out: &mut Vec<NetOutput>) {
        let Arrival { link, end, what } = arrival;
        let ends = self.links[link as usize].ends;
        if matches!(what, What::Frame(_) | What::Damaged(_) | What::Lost) {
            let sender = &ends[1 - end];
            let news = NetNews::Sent { link: sender.id, frames: 1 };
            if sender.open && self.planes[sender.plane.0 as usize].alive {
                out.push(NetOutput::Deliver { plane: sender.plane, news, forged: false });
            }
        }
        let End { id, open, .. } = ends[end];
        if !open || !self.planes[plane.0 as usize].alive {
            return;
        }
        let forged = matches!(what, What::Damaged(_) | What::Foreign(_));
        let event = match what {
            What::Up => {
                let channel = self.links[link as usize].channel;
                ControlEvent::LinkUp { link: id, channel, from: None }
            }
            What::Down => {
                self.links[link as usize].ends[end].open = false;
                self.planes[plane.0 as usize].links.remove(&id);
                ControlEvent::LinkDown { link: id }
            }
            What::Frame(parts)
            | What::Damaged(parts)
            | What::Copy(parts)
            | What::Foreign(parts) => ControlEvent::Frame { link: id, parts },
            What::Lost => return,
        };
        out.push(NetOutput::Deliver { plane, news: NetNews::Event(event), forged });
    }

    /// A process died. Frames that it sent before still arrive. With `told` the other ends of its
    /// links see `LinkDown` after that time; otherwise what they send vanishes.
    pub fn crash<S: Schedule<NetEvent>>(
        &mut self,
        now: Nanos,
        plane: NetIx,
        told: Option<Nanos>,
        queue: &mut S,
    ) {
        let me = &mut self.planes[plane.0 as usize];
        me.alive = false;
        me.held.clear();
        for (link, end) in std::mem::take(&mut self.planes[plane.0 as usize].links).into_values() {
            self.links[link as usize].ends[end].open = false;
            if let Some(told) = told {
                self.tell_down(now + told, (link, 1 - end), queue);
            }
        }
    }

    /// Stops or resumes a process: while stopped its plane is told nothing.
    pub fn set_paused(&mut self, plane: NetIx, paused: bool, out: &mut Vec<NetOutput>) {
        self.planes[plane.0 as usize].paused = paused;
        if !paused {
            for arrival in std::mem::take(&mut self.planes[plane.0 as usize].held) {
                self.arrive(plane, arrival, out);
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
    pub fn mute(&mut self, plane: NetIx, link: LinkId) {
        if let Some((link, end)) = self.planes[plane.0 as usize].links.get(&link) {
            self.links[*link as usize].ends[*end].mute = true;
        }
    }

    /// Links of a plane that are up or being dialled.
    pub fn links(&self, plane: NetIx) -> impl Iterator<Item = LinkId> + '_ {
        self.planes[plane.0 as usize].links.keys().copied()
    }

    /// Who is at the other end of a link, if it is up.
    pub fn peer(&self, plane: NetIx, link: LinkId) -> Option<NetIx> {
        let (link, end) = self.planes[plane.0 as usize].links.get(&link)?;
        Some(self.links[*link as usize].ends[1 - end].plane)
    }

    fn is_cut(&self, from: NetIx, to: NetIx) -> bool {
        let node = |plane: NetIx| self.planes[plane.0 as usize].node;
        !self.cut.is_empty() && self.cut.contains(&(node(from), node(to)))
    }

    fn latency(&mut self, plane: NetIx) -> Nanos {
        let me = &mut self.planes[plane.0 as usize];
        me.drawn += 1;
        let bits = self.keyed.draw(LATENCY, u64::from(plane.0), me.drawn);
        Nanos(self.config.latency.pick(bits))
    }

    fn post<S: Schedule<NetEvent>>(&mut self, at: Nanos, mail: Mail, queue: &mut S) {
        let slot = self.free_mail.pop().unwrap_or_else(|| {
            self.mail.push(None);
            self.mail.len() as u32 - 1
        });
        self.mail[slot as usize] = Some(mail);
        queue.at(at, NetEvent::Arrive { slot });
    }
}
