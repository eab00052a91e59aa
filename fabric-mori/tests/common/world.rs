//! Some planes of this process and what they said.

use super::{MEMORY, MoriTestPlane, MoriTestSetup, MoriTested, config, start};
use kvferry_engine::conformance::{PlaneUnderTest, RemotePlane};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, DataPlane, Direction, FabricError, Landed, Memory, OpId, PeerId,
    QuiesceTicket, RegionDesc, RegionId, SessionId, Submit,
};
use kvferry_fabric_mori::{MoriBackend, MoriConfig, MoriMixedPlane, MoriPlane, PortCommand};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CString, c_char, c_int};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Faults and latencies of the stand-in are those of the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A guard against waiting for ever; however busy the machine is, nothing takes as long.
const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) const REGION: RegionId = RegionId(1);
pub(crate) const PASS: u64 = 5;

/// Calls a function of the stand-in's library, which is loaded already.
fn stand_in(name: &str, call: impl FnOnce(&Library)) {
    let shim = super::shim();
    let path = Path::new(&shim.info.compiled_at).to_owned();
    // SAFETY: Loaded before, so nothing is run.
    let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
    call(&library.unwrap_or_else(|why| panic!("{name} in {}: {why}", path.display())));
}

/// Says what goes wrong from here on; see `mori_double`.
pub(crate) fn faults(spec: &str) {
    if super::is_installed() {
        // MoRI has no faults on demand; not to want any is fine.
        return assert!(spec.is_empty(), "only the stand-in has the fault {spec}");
    }
    let spec = CString::new(spec).expect("plain text");
    stand_in("mori_double_faults", |library| {
        // SAFETY: As the stand-in declares it.
        let taken = unsafe {
            let set = library
                .get::<unsafe extern "C" fn(*const c_char) -> c_int>(b"mori_double_faults\0");
            (set.expect("it is there"))(spec.as_ptr())
        };
        assert_eq!(taken, 0, "{spec:?} is not understood");
    });
}

/// Takes the network card's port of this process down, or up again.
pub(crate) fn port(up: bool) {
    if let Some(command) = PortCommand::of_environment() {
        return command.set(std::process::id(), up).unwrap_or_else(|why| panic!("{why}"));
    }
    assert!(
        !super::is_installed(),
        "KVFERRY_PORT_COMMAND is not set: nothing takes MoRI's port down"
    );
    stand_in("mori_double_port", |library| {
        // SAFETY: As the stand-in declares it.
        unsafe {
            let set = library.get::<unsafe extern "C" fn(c_int)>(b"mori_double_port\0");
            (set.expect("it is there"))(c_int::from(up));
        }
    });
}

/// Has planes play nodes, by the beginnings of their keys.
pub(crate) fn nodes() {
    stand_in("mori_double_nodes", |library| {
        // SAFETY: As the stand-in declares it, which copies the text.
        unsafe {
            let set = library.get::<unsafe extern "C" fn(*const c_char)>(b"mori_double_nodes\0");
            (set.expect("it is there"))(c"here=node-a;near=node-a;far=node-b".as_ptr());
        }
    });
}

pub(crate) struct MoriTestWorld {
    locals: Vec<MoriTestPlane>,
    seen: Vec<Vec<DataEvent>>,
    ops: u64,
    /// Each plane's region, as it was registered first.
    pub(crate) descs: Vec<RegionDesc>,
    start: Instant,
    _alone: MutexGuard<'static, ()>,
}

impl MoriTestWorld {
    /// So many planes with a region each.
    pub(crate) fn new(planes: usize, settings: impl Fn(usize) -> MoriConfig) -> MoriTestWorld {
        MoriTestWorld::of(planes, |n| MoriTestSetup::of(settings(n)))
    }

    /// The same with planes of any kind.
    pub(crate) fn of(planes: usize, setup: impl Fn(usize) -> MoriTestSetup) -> MoriTestWorld {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        port(true);
        let locals: Vec<_> = (0..planes).map(|n| MoriTestPlane::new(&setup(n))).collect();
        faults("");
        let seen = vec![Vec::new(); planes];
        let mut world = MoriTestWorld {
            locals,
            seen,
            ops: 0,
            descs: Vec::new(),
            start: Instant::now(),
            _alone: alone,
        };
        for plane in 0..planes {
            let bytes: Vec<u8> = (0..MEMORY).map(|at| (at * 7 + plane as u64 * 91) as u8).collect();
            world.locals[plane].poke(0, &bytes);
        }
        world
    }

    pub(crate) fn rdma(planes: usize) -> MoriTestWorld {
        MoriTestWorld::new(planes, |_| config(MoriBackend::Rdma))
    }

    pub(crate) fn plane(&mut self, at: usize) -> &mut MoriPlane {
        match &mut self.locals[at].plane {
            MoriTested::One(plane) => plane,
            MoriTested::Mixed(_) => panic!("plane {at} has both backends"),
        }
    }

    /// One that has both backends.
    pub(crate) fn mixed(&mut self, at: usize) -> &mut MoriMixedPlane {
        match &mut self.locals[at].plane {
            MoriTested::Mixed(plane) => plane,
            MoriTested::One(_) => panic!("plane {at} has one backend"),
        }
    }

    /// Whichever it is.
    pub(crate) fn data(&mut self, at: usize) -> &mut dyn DataPlane {
        self.locals[at].plane()
    }

    /// A plane in place of another one, which is dropped.
    pub(crate) fn replace(&mut self, at: usize, config: MoriConfig) {
        self.locals.remove(at);
        self.locals.insert(at, MoriTestPlane::new(&MoriTestSetup::of(config)));
        self.seen[at].clear();
    }

    pub(crate) fn seen(&self, at: usize) -> &[DataEvent] {
        &self.seen[at]
    }

    /// Address of a plane's memory.
    pub(crate) fn base(&mut self, at: usize) -> u64 {
        match self.locals[at].memory() {
            Memory::Own(range) | Memory::Device { range, .. } => range.base(),
            other => panic!("{other:?}"),
        }
    }

    /// Forgets what a plane said.
    pub(crate) fn forget(&mut self, at: usize) {
        self.seen[at].clear();
    }

    pub(crate) fn pump(&mut self) {
        let now = Nanos(self.start.elapsed().as_nanos() as u64);
        for (local, seen) in self.locals.iter_mut().zip(&mut self.seen) {
            local.plane().poll(now, seen);
        }
        std::thread::park_timeout(Duration::from_micros(50));
    }

    /// Waits for an event.
    pub(crate) fn until<T>(
        &mut self,
        at: usize,
        what: &str,
        found: impl Fn(&DataEvent) -> Option<T>,
    ) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = self.seen[at].iter().rev().find_map(&found) {
                return found;
            }
            assert!(Instant::now() < until, "no {what}; seen: {:?}", self.seen[at]);
            self.pump();
        }
    }

    pub(crate) fn until_told(&mut self, at: usize, event: &DataEvent) {
        self.until(at, &format!("{event:?}"), |told| (told == event).then_some(()));
    }

    pub(crate) fn until_reset(&mut self, at: usize) {
        self.until(at, "Reset", |event| matches!(event, DataEvent::Reset { .. }).then_some(()));
    }

    pub(crate) fn register(&mut self, at: usize) -> RegionDesc {
        let memory = self.locals[at].memory();
        self.register_memory(at, memory)
    }

    /// Registers memory that is not the plane's own.
    pub(crate) fn register_memory(&mut self, at: usize, memory: Memory) -> RegionDesc {
        self.data(at).register(REGION, memory).expect("memory registers");
        self.seen[at].retain(|event| !matches!(event, DataEvent::Registered { .. }));
        self.until(at, "Registered", |event| match event {
            DataEvent::Registered { result, .. } => Some(result.clone()),
            _ => None,
        })
        .expect("the region can be used")
    }

    /// The descriptor of a plane's region, which has one already.
    pub(crate) fn register_again(&mut self, at: usize) -> RegionDesc {
        match self.data(at).deregister(REGION) {
            Ok(()) => self.register(at),
            Err(refused) => panic!("plane {at}: {refused}"),
        }
    }

    /// A plane in another process that plane 0 is connected to, and its region.
    pub(crate) fn far(
        &mut self,
        peer: PeerId,
        faults: Option<String>,
    ) -> (RemotePlane, RegionDesc) {
        let setup = MoriTestSetup::of(config(MoriBackend::Rdma));
        self.apart(peer, &MoriTestSetup { faults, ..setup })
    }

    /// The same with a plane of any kind.
    pub(crate) fn apart(
        &mut self,
        peer: PeerId,
        setup: &MoriTestSetup,
    ) -> (RemotePlane, RegionDesc) {
        let mut far = start(setup);
        let desc = self.register_of(&mut far);
        let (here, there) = (self.data(0).address(), far.address());
        far.connect(PeerId(0), &here, PASS).expect("a peer connects");
        self.data(0).connect(peer, &there, PASS).expect("a peer connects");
        (far, desc)
    }

    /// Registers the memory of a plane in another process.
    fn register_of(&mut self, far: &mut RemotePlane) -> RegionDesc {
        let memory = far.memory();
        far.register(REGION, memory).expect("memory registers");
        let mut seen = Vec::new();
        loop {
            far.poll(Nanos(0), &mut seen);
            let answer = seen.iter().find_map(|event| match event {
                DataEvent::Registered { result, .. } => Some(result.clone()),
                _ => None,
            });
            match answer {
                Some(result) => return result.expect("the region can be used"),
                None => self.pump(),
            }
        }
    }

    /// Connects two planes; each has the other under its number.
    pub(crate) fn connect(&mut self, a: usize, b: usize) {
        for (from, to) in [(a, b), (b, a)] {
            let address = self.data(to).address();
            self.data(from).connect(PeerId(to as u32), &address, PASS).expect("a peer connects");
        }
    }

    /// Opens a session from one plane to another.
    pub(crate) fn open(
        &mut self,
        session: u32,
        from: usize,
        to: usize,
        remote: &RegionDesc,
    ) -> Result<(), FabricError> {
        let session = SessionId(session);
        let peer = PeerId(to as u32);
        self.data(from).open(session, REGION, peer, remote).expect("an open is taken");
        // Of a session of that number before a reset.
        self.seen[from].retain(
            |event| !matches!(event, DataEvent::Opened { session: id, .. } if *id == session),
        );
        self.until(from, "Opened", |event| match event {
            DataEvent::Opened { session: id, result } if *id == session => Some(result.clone()),
            _ => None,
        })
    }

    /// Registered, connected, and with session `to` from plane 0 to each other one.
    pub(crate) fn star(planes: usize) -> MoriTestWorld {
        MoriTestWorld::rdma(planes).joined()
    }

    /// The same with these planes.
    pub(crate) fn joined(mut self) -> MoriTestWorld {
        let planes = self.locals.len();
        self.descs = (0..planes).map(|at| self.register(at)).collect();
        for to in 1..planes {
            self.connect(0, to);
            let desc = self.descs[to].clone();
            self.open(to as u32, 0, to, &desc).expect("the session opens");
        }
        self
    }

    /// Writes 64 bytes of plane 0 at an offset of both sides, in two ranges.
    pub(crate) fn write(&mut self, session: u32, offset: u64) -> OpId {
        self.ops += 1;
        let op = OpId(self.ops);
        let (local, remote) = (&[offset, offset + 64][..], &[offset, offset + 128][..]);
        let (session, direction, len) = (SessionId(session), Direction::Write, &[64, 64][..]);
        let batch = Submit { op, session, direction, local, remote, len };
        let until = Instant::now() + PATIENCE;
        while let Err(refused) = self.data(0).submit(batch) {
            assert_eq!(refused, kvferry_engine::fabric::Refused::Busy);
            assert!(Instant::now() < until, "busy for ever");
            self.pump();
        }
        op
    }

    pub(crate) fn finish(&mut self, op: OpId) -> Completion {
        self.until(0, "Completed", |event| match event {
            DataEvent::Completed { op: id, outcome } if *id == op => Some(outcome.clone()),
            _ => None,
        })
    }

    /// The cause of an operation that failed, of whose bytes nothing is known.
    pub(crate) fn failure(&mut self, op: OpId) -> FabricError {
        match self.finish(op) {
            Completion::Failed { cause, landed: Landed::Unknown } => cause,
            other => panic!("{op:?} ended with {other:?}"),
        }
    }

    pub(crate) fn quiesce(&mut self, session: u32) {
        let (session, ticket) = (SessionId(session), QuiesceTicket(self.ops));
        self.data(0).quiesce(session, ticket);
        self.until_told(0, &DataEvent::Quiet { session, ticket });
    }

    /// Whether what `write` writes at an offset is there.
    pub(crate) fn has_landed(&mut self, at: usize, offset: u64) -> bool {
        let mut pairs = [[[0; 64]; 2]; 2];
        for (n, pair) in pairs.iter_mut().enumerate() {
            let n = n as u64;
            self.locals[0].peek(offset + 64 * n, &mut pair[0]);
            self.locals[at].peek(offset + 128 * n, &mut pair[1]);
        }
        pairs.iter().all(|[from, to]| from == to)
    }

    /// Overwrites the memory of a plane and sees that nothing changes it any more.
    pub(crate) fn assert_untouched(&mut self, at: usize, rounds: usize) {
        self.locals[at].poke(0, &[0xa5; MEMORY as usize]);
        (0..rounds).for_each(|_| self.pump());
        let mut now = [0; MEMORY as usize];
        self.locals[at].peek(0, &mut now);
        assert!(now == [0xa5; MEMORY as usize], "bytes landed in plane {at} that must not");
    }
}
