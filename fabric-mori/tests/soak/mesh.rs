//! Planes that all write to each other, their owners, and what goes wrong.

use crate::node::SoakNode;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{Completion, DataEvent, OpId, PeerId, QuiesceTicket, SessionId};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const NODES: usize = 4;
/// Bytes of one operation.
const LEN: u64 = 256;
/// Operations that one plane may have in flight to another.
const SLOTS: u64 = 8;
/// Where the writes of others land, one plane after the other; the sources come behind.
const LANE: u64 = LEN * SLOTS;
const MEMORY: u64 = 2 * LANE * NODES as u64;

/// No outcome within this time is none, unless the owner was stopped meanwhile.
const PATIENCE: Duration = Duration::from_secs(60);
/// Faults of MoRI are set for posts that come within this time.
const LEAD: Duration = Duration::from_secs(5);
/// After this long it is told who does not serve yet.
const SLOW: Duration = Duration::from_secs(1);
/// Between two tries to connect or to open.
const PAUSE: Duration = Duration::from_millis(30);

type SoakPair = (usize, usize);

/// Bytes of the target that one operation writes at a time.
#[derive(Debug, Default)]
enum SoakSlot {
    /// Nothing is under way: these are its bytes, if the target is the one of this incarnation.
    #[default]
    Unknown,
    Holds(u64),
    /// With the time of its submission.
    InFlight(OpId, Instant),
    /// It failed: its bytes may land until its session is quiet.
    Failed,
}

#[derive(Default)]
struct SoakLink {
    /// By which the initiator knows the target, and for which incarnations of both.
    peer: Option<(PeerId, [u64; 2])>,
    session: Option<SessionId>,
    is_open: bool,
    /// The session was quiesced and is closed once it is quiet.
    closing: Option<QuiesceTicket>,
    slots: [SoakSlot; SLOTS as usize],
    not_before: Option<Instant>,
    /// Writes that landed since the troubles ended.
    fresh: u64,
}

#[derive(Clone, Copy, Debug)]
enum SoakTrouble {
    Stopped(usize),
    Port(usize),
}

#[derive(Debug, Default)]
struct SoakTally {
    done: u64,
    failed: u64,
    flaps: u64,
    stops: u64,
    kills: u64,
    fences: u64,
}

pub(crate) struct Mesh {
    nodes: Vec<SoakNode>,
    links: BTreeMap<SoakPair, SoakLink>,
    rng: StdRng,
    start: Instant,
    ids: u64,
    troubles: Vec<(Instant, SoakTrouble)>,
    tally: SoakTally,
    ports: PathBuf,
}

fn bytes(of: u64) -> Vec<u8> {
    (0..LEN).map(|at| (of.wrapping_mul(31).wrapping_add(at * 7) >> (at % 5)) as u8).collect()
}

fn ways() -> impl Iterator<Item = SoakPair> {
    (0..NODES).flat_map(|from| (0..NODES).map(move |to| (from, to))).filter(|(a, b)| a != b)
}

fn target_at((from, _): SoakPair, slot: usize) -> u64 {
    from as u64 * LANE + slot as u64 * LEN
}

fn source_at((_, to): SoakPair, slot: usize) -> u64 {
    (NODES + to) as u64 * LANE + slot as u64 * LEN
}

impl Mesh {
    pub(crate) fn new(seed: u64) -> Mesh {
        let ports = std::env::temp_dir().join(format!("kvferry-soak-{}", std::process::id()));
        std::fs::create_dir_all(&ports).expect("a folder");
        // SAFETY: Before the stand-in is loaded and any plane has threads.
        unsafe { std::env::set_var("MORI_DOUBLE_PORTS", &ports) };
        let mut rng = StdRng::seed_from_u64(seed);
        let mut nodes = vec![SoakNode::here(MEMORY, ports.clone())];
        for _ in 1..NODES {
            nodes.push(SoakNode::there(MEMORY, ports.clone(), spec(&mut rng)));
        }
        let links = ways().map(|way| (way, SoakLink::default())).collect();
        let (start, tally) = (Instant::now(), SoakTally::default());
        Mesh { nodes, links, rng, start, ids: 0, troubles: Vec::new(), tally, ports }
    }

    pub(crate) fn summary(&self) -> String {
        format!("{:?}", self.tally)
    }

    fn id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    /// Works while things go wrong.
    pub(crate) fn trouble(&mut self, time: Duration) {
        let end = Instant::now() + time;
        let mut next = Instant::now();
        while Instant::now() < end {
            if Instant::now() >= next {
                // What MoRI is to do wrong is done before the troubles end.
                let is_late = end - next.min(end) < LEAD;
                self.one_trouble(is_late);
                next = Instant::now() + Duration::from_millis(self.rng.random_range(5..400));
            }
            self.work();
        }
    }

    /// Ends all troubles, and works until every plane has written to every other one. How long it
    /// took.
    pub(crate) fn recover(&mut self) -> Duration {
        self.nodes[0].faults("");
        self.end_troubles(None);
        self.links.values_mut().for_each(|link| link.fresh = 0);
        let start = Instant::now();
        let mut told = false;
        while self.links.values().any(|link| link.fresh == 0) {
            self.work();
            if start.elapsed() > SLOW && !std::mem::replace(&mut told, true) {
                println!("after {SLOW:?}: {}", self.stuck());
            }
            assert!(start.elapsed() < PATIENCE, "{}", self.stuck());
        }
        let took = start.elapsed();
        // What is under way has its outcome as well.
        while self.links.values().any(|link| {
            link.slots.iter().any(|slot| matches!(slot, SoakSlot::InFlight(..) | SoakSlot::Failed))
        }) {
            self.poll_all();
            self.advance_all();
            assert!(start.elapsed() < PATIENCE, "{}", self.stuck());
        }
        took
    }

    fn stuck(&self) -> String {
        let ways = self.links.iter().filter(|(_, link)| link.fresh == 0);
        let ways: Vec<_> = ways
            .map(|(way, link)| {
                format!(
                    "{way:?} {:?} {:?} open {} {:?} {:?}",
                    link.peer, link.session, link.is_open, link.closing, link.slots
                )
            })
            .collect();
        let lives: Vec<_> = self
            .nodes
            .iter()
            .map(|node| node.known.as_ref().map(|known| known.incarnation))
            .collect();
        format!("{lives:?} {ways:#?}")
    }

    fn one_trouble(&mut self, is_late: bool) {
        let node = self.rng.random_range(0..NODES);
        let until = Instant::now() + Duration::from_millis(self.rng.random_range(1..1_200));
        let is_free = |wanted: fn(&SoakTrouble) -> Option<usize>| {
            !self.troubles.iter().any(|(_, trouble)| wanted(trouble) == Some(node))
        };
        let port_up = is_free(|trouble| match trouble {
            SoakTrouble::Port(node) => Some(*node),
            SoakTrouble::Stopped(_) => None,
        });
        let stopped = self.nodes[node].stopped;
        match self.rng.random_range(0..10) {
            0..=2 if port_up => {
                self.nodes[node].port(false);
                self.troubles.push((until, SoakTrouble::Port(node)));
                self.tally.flaps += 1;
            }
            3 | 4 if !stopped && !self.nodes[node].is_here() => {
                self.nodes[node].stop();
                self.troubles.push((until, SoakTrouble::Stopped(node)));
                self.tally.stops += 1;
            }
            5 if !self.nodes[node].is_here() => {
                self.end_troubles(Some(node));
                let spec = if is_late { String::new() } else { spec(&mut self.rng) };
                self.nodes[node].kill(spec);
                self.forget(node);
                self.tally.kills += 1;
            }
            6 | 7 if !stopped => self.fence(node),
            8 => {
                let spec = spec(&mut self.rng);
                self.nodes[0].faults(&spec);
            }
            _ => {}
        }
    }

    /// Ends the troubles that are over, or all of one node or of any.
    fn end_troubles(&mut self, of: Option<usize>) {
        for (_, trouble) in std::mem::take(&mut self.troubles) {
            match trouble {
                SoakTrouble::Stopped(node) | SoakTrouble::Port(node)
                    if of.is_some_and(|it| it != node) =>
                {
                    self.troubles.push((Instant::now(), trouble));
                }
                SoakTrouble::Stopped(node) => self.nodes[node].go_on(),
                SoakTrouble::Port(node) => self.nodes[node].port(true),
            }
        }
    }

    fn pass_troubles(&mut self) {
        let now = Instant::now();
        let troubles = std::mem::take(&mut self.troubles);
        let (over, left) = troubles.into_iter().partition(|(until, _)| *until <= now);
        self.troubles = over;
        self.end_troubles(None);
        self.troubles = left;
    }

    /// A process is gone, and with it what it wrote and what was written to it.
    fn forget(&mut self, node: usize) {
        for (way, link) in &mut self.links {
            if way.0 == node {
                *link = SoakLink { slots: std::mem::take(&mut link.slots), ..SoakLink::default() };
                // Nothing of it lands any more, and what landed nobody knows.
                link.slots.iter_mut().for_each(|slot| *slot = SoakSlot::Unknown);
            } else if way.1 == node {
                for slot in &mut link.slots {
                    if let SoakSlot::Holds(_) = slot {
                        *slot = SoakSlot::Unknown;
                    }
                }
            }
        }
    }

    /// One plane keeps another one out, which it then connects anew.
    fn fence(&mut self, node: usize) {
        let other = (node + self.rng.random_range(1..NODES)) % NODES;
        let Some((peer, _)) = self.links[&(node, other)].peer else { return };
        self.nodes[node].plane().fence(peer);
        self.tally.fences += 1;
    }

    fn work(&mut self) {
        self.pass_troubles();
        self.poll_all();
        self.advance_all();
        self.write_some();
        self.look_at_one();
        std::thread::park_timeout(Duration::from_micros(50));
    }

    fn poll_all(&mut self) {
        let now = Nanos(self.start.elapsed().as_nanos() as u64);
        for at in 0..NODES {
            if !self.nodes[at].stopped {
                for event in self.nodes[at].poll(now) {
                    self.event(at, event);
                }
            }
        }
    }

    fn event(&mut self, at: usize, event: DataEvent) {
        let mut of_node = self.links.iter_mut().filter(|(way, _)| way.0 == at);
        match event {
            DataEvent::Opened { session, result } => {
                let link = of_node.find(|(_, link)| link.session == Some(session));
                let Some((_, link)) = link else { return };
                match result {
                    Ok(()) => link.is_open = true,
                    Err(_) => self.close(at, session),
                }
            }
            DataEvent::Completed { op, outcome } => self.completed(at, op, &outcome),
            DataEvent::Quiet { ticket, .. } => {
                if let Some((_, link)) = of_node.find(|(_, link)| link.closing == Some(ticket)) {
                    for slot in &mut link.slots {
                        assert!(
                            !matches!(slot, SoakSlot::InFlight(..)),
                            "quiet before its outcome"
                        );
                        if let SoakSlot::Failed = slot {
                            *slot = SoakSlot::Unknown;
                        }
                    }
                    (link.session, link.closing, link.is_open) = (None, None, false);
                }
            }
            DataEvent::PeerDown { peer } => {
                let its = |link: &SoakLink| link.peer.is_some_and(|(known, _)| known == peer);
                if let Some((way, link)) = of_node.find(|(_, link)| its(link)) {
                    // Both connect anew.
                    let (way, session) = (*way, link.session);
                    if let Some((_, lives)) = &mut link.peer {
                        *lives = [0, 0];
                    }
                    if let Some(session) = session {
                        self.close(way.0, session);
                    }
                }
            }
            DataEvent::Reset { .. } => {
                for (_, link) in of_node {
                    let mut slots = std::mem::take(&mut link.slots);
                    for slot in &mut slots {
                        if let SoakSlot::InFlight(..) | SoakSlot::Failed = slot {
                            *slot = SoakSlot::Unknown;
                        }
                    }
                    *link = SoakLink { slots, fresh: link.fresh, ..SoakLink::default() };
                }
            }
            _ => {}
        }
    }

    fn completed(&mut self, at: usize, op: OpId, outcome: &Completion) {
        let link = self.links.iter_mut().filter(|(way, _)| way.0 == at);
        let is_it = |slot: &SoakSlot| matches!(slot, SoakSlot::InFlight(id, _) if *id == op);
        for (way, link) in link {
            let Some(slot) = link.slots.iter_mut().position(|slot| is_it(slot)) else { continue };
            match outcome {
                Completion::Done => {
                    self.tally.done += 1;
                    let lives = link.peer.map(|(_, lives)| lives[1]);
                    let target = &mut self.nodes[way.1];
                    let is_same = target.known.as_ref().map(|known| known.incarnation) == lives;
                    link.slots[slot] =
                        if is_same { SoakSlot::Holds(op.0) } else { SoakSlot::Unknown };
                    link.fresh += 1;
                }
                Completion::Failed { .. } => {
                    self.tally.failed += 1;
                    link.slots[slot] = SoakSlot::Failed;
                    if let Some(session) = link.session {
                        return self.close(at, session);
                    }
                }
            }
            return;
        }
    }

    /// Closes a session once it is quiet.
    fn close(&mut self, at: usize, session: SessionId) {
        let ticket = QuiesceTicket(self.id());
        let links = self.links.iter_mut().filter(|(way, _)| way.0 == at);
        for (_, link) in links {
            if link.session == Some(session) && link.closing.is_none() {
                link.closing = Some(ticket);
                link.is_open = false;
                link.not_before = Some(Instant::now() + PAUSE);
                self.nodes[at].plane().close(session);
                self.nodes[at].quiesce(session, ticket);
            }
        }
    }

    fn advance_all(&mut self) {
        for a in 0..NODES {
            for b in a + 1..NODES {
                self.connect(a, b);
            }
        }
        for way in ways() {
            self.open(way);
        }
    }

    /// Connects two planes with each other as they are now.
    fn connect(&mut self, a: usize, b: usize) {
        if self.nodes[a].stopped || self.nodes[b].stopped {
            return;
        }
        let known = [a, b].map(|at| self.nodes[at].known.clone());
        let [Some(one), Some(other)] = known else { return };
        let lives = [one.incarnation, other.incarnation];
        let is =
            |way: SoakPair, lives| self.links[&way].peer.is_some_and(|(_, known)| known == lives);
        if is((a, b), lives) && is((b, a), [lives[1], lives[0]]) {
            return;
        }
        let fence_key = self.id();
        for (way, address, lives) in
            [((a, b), other.address, lives), ((b, a), one.address, [lives[1], lives[0]])]
        {
            let (from, session) = (way.0, self.links[&way].session);
            if let Some(session) = session {
                self.close(from, session);
            }
            let peer = PeerId(self.id() as u32);
            let link = self.links.get_mut(&way).expect("all ways");
            if let Some((before, _)) = link.peer.replace((peer, lives)) {
                self.nodes[from].plane().disconnect(before);
            }
            self.nodes[from].plane().connect(peer, &address, fence_key).expect("an address");
        }
    }

    fn open(&mut self, way: SoakPair) {
        let (from, to) = way;
        let id = SessionId(self.id() as u32);
        let (Some(_), Some(known)) = (&self.nodes[from].known, self.nodes[to].known.clone()) else {
            return;
        };
        let link = self.links.get_mut(&way).expect("all ways");
        let Some((peer, lives)) = link.peer else { return };
        let is_late = link.not_before.is_none_or(|then| then <= Instant::now());
        if self.nodes[from].stopped
            || link.session.is_some()
            || !is_late
            || lives[1] != known.incarnation
        {
            return;
        }
        link.session = Some(id);
        link.not_before = None;
        self.nodes[from].open(id, peer, &known.desc);
    }

    fn write_some(&mut self) {
        let now = Instant::now();
        for way in ways() {
            let slot = self.rng.random_range(0..SLOTS as usize);
            let op = OpId(self.id());
            let link = self.links.get_mut(&way).expect("all ways");
            if let SoakSlot::InFlight(op, since) = link.slots[slot]
                && !self.nodes[way.0].stopped
            {
                assert!(now - since < PATIENCE, "{op:?} from {way:?} has no outcome");
            }
            let (Some(session), true) = (link.session, link.is_open) else { continue };
            let free = matches!(link.slots[slot], SoakSlot::Unknown | SoakSlot::Holds(_));
            if self.nodes[way.0].stopped || !free {
                continue;
            }
            let places = (source_at(way, slot), target_at(way, slot));
            self.nodes[way.0].poke(places.0, &bytes(op.0));
            if self.nodes[way.0].write(op, session, places, LEN).is_ok() {
                link.slots[slot] = SoakSlot::InFlight(op, now);
            }
        }
    }

    /// What was written is there, and what is not under way does not change.
    fn look_at_one(&mut self) {
        let way = loop {
            let way = (self.rng.random_range(0..NODES), self.rng.random_range(0..NODES));
            if way.0 != way.1 {
                break way;
            }
        };
        let slot = self.rng.random_range(0..SLOTS as usize);
        if self.nodes[way.1].stopped {
            return;
        }
        let link = self.links.get_mut(&way).expect("all ways");
        let at = target_at(way, slot);
        match link.slots[slot] {
            SoakSlot::Holds(op) => {
                let found = self.nodes[way.1].peek(at, LEN);
                assert!(found == bytes(op), "{way:?} {slot} is not what {op} wrote");
            }
            SoakSlot::Unknown => {
                // Nothing may change it from here on, as nothing is under way.
                let mark = self.id();
                self.nodes[way.1].poke(at, &bytes(mark));
                self.links.get_mut(&way).expect("all ways").slots[slot] = SoakSlot::Holds(mark);
            }
            SoakSlot::InFlight(..) | SoakSlot::Failed => {}
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.ports);
    }
}

/// Something that MoRI does wrong in one of the next posts.
fn spec(rng: &mut StdRng) -> String {
    let n = rng.random_range(20..2_000);
    let kind = ["qp_error", "ack_lost", "lost", "throw", "late", "sq_full", "slow"];
    match kind[rng.random_range(0..kind.len())] {
        timed @ ("late" | "sq_full" | "slow") => {
            format!("{timed}@{n}:{}", rng.random_range(1..300))
        }
        kind => format!("{kind}@{n}"),
    }
}
