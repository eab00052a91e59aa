//! The plane that peers talk to: what they may reach of its memory, and what not.

use super::forged::{
    AttackedAddress, AttackedPlane, ForgedMessage, ForgedRegion, ForgedSegment, register,
    write_record,
};
use super::tcp::ForgedStream;
use super::{LEN, patient};
use kvferry_engine::fabric::{DataPlane, Memory, OwnMemory, RegionId};
use kvferry_fabric_host::{HugePages, MemfdPool};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Once};

/// What stands where peers may not reach: no byte that they say has this bit.
pub(super) const GUARD: u8 = 0x80;

/// Guard, what is granted, guard, what was granted once, guard.
const PLACES: usize = 5;

/// A thread of the plane panicked.
static HAS_PANICKED: AtomicBool = AtomicBool::new(false);

pub(super) struct FuzzVictim {
    /// First, so that it is dropped before the memory.
    plane: AttackedPlane,
    bytes: &'static [AtomicU8],
    /// Granted as a memory file.
    _pool: MemfdPool,
    /// Tokens by region: own memory, a memory file, and one that is registered no more.
    pub(super) tokens: [u64; 3],
    honest: (OwnedFd, ForgedSegment),
    honest_stream: ForgedStream,
    writes: u64,
}

impl FuzzVictim {
    pub(super) fn new() -> FuzzVictim {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |why| {
                HAS_PANICKED.store(true, Ordering::SeqCst);
                before(why);
            }));
        });
        let bytes: Vec<AtomicU8> = (0..PLACES * LEN as usize)
            .map(|at| AtomicU8::new(if is_guarded(at) { GUARD } else { 0 }))
            .collect();
        let bytes: &'static [AtomicU8] = bytes.leak();
        let part = |place: usize| {
            let base = bytes[place * LEN as usize..].as_ptr() as u64;
            // SAFETY: It is never freed, and looked at as atomics alone.
            Memory::Own(unsafe { OwnMemory::new(base, LEN) })
        };
        let mut plane = AttackedPlane::new(patient(), part(1));
        let pool = MemfdPool::new(LEN, HugePages::No).expect("memory");
        let in_file = register(&mut plane.plane, RegionId(2), pool.memory());
        let stale = register(&mut plane.plane, RegionId(3), part(3));
        plane.plane.deregister(RegionId(3)).expect("it is registered");
        let tokens = [plane.at.token, in_file, stale];
        let honest = plane.at.enter_as("honest");
        let honest_stream = ForgedStream::enter_honestly(&plane.at);
        let writes = 0;
        FuzzVictim { plane, bytes, _pool: pool, tokens, honest, honest_stream, writes }
    }

    pub(super) fn at(&self) -> &Arc<AttackedAddress> {
        &self.plane.at
    }

    /// Nothing of what earlier peers wrote is there.
    pub(super) fn clear(&self) {
        self.granted().iter().for_each(|byte| byte.store(0, Ordering::SeqCst));
    }

    fn granted(&self) -> &[AtomicU8] {
        &self.bytes[LEN as usize..2 * LEN as usize]
    }

    /// # Panics
    /// If a byte is not as it was that nobody was granted, a thread of the plane has panicked, or
    /// peers that were there before are not served.
    pub(super) fn check(&mut self) {
        assert!(!HAS_PANICKED.load(Ordering::SeqCst), "a thread of the plane has panicked");
        let is_hurt =
            |at: &usize| is_guarded(*at) && self.bytes[*at].load(Ordering::SeqCst) != GUARD;
        assert_eq!((0..self.bytes.len()).find(is_hurt), None, "a byte that was not granted");
        self.writes += 1;
        let source = [AtomicU64::new(self.writes)];
        let (socket, segment) = &mut self.honest;
        // The session was opened with memory that is gone: each write has one of its own.
        let session = self.writes as u32;
        let (base, len) = (source.as_ptr() as u64, 8);
        let local = ForgedRegion { base, len, process: None, file: false };
        let (answer, _) = self.plane.at.open_session(session, socket, local, None);
        assert!(matches!(answer, ForgedMessage::Opened { result: Ok(_), .. }), "{answer:?}");
        segment.push(&write_record(session, self.writes, true, 1, 8));
        let done = super::wait_for(|| segment.pop());
        assert_eq!(done, [3 << 56, self.writes], "an honest peer of this host is served");
        segment.push(&[5 << 56 | u64::from(session)]);
        let closed = super::wait_for(|| segment.pop());
        assert_eq!(closed, [6 << 56 | u64::from(session)]);
        let seen: Vec<u8> = self.granted()[..8].iter().map(|b| b.load(Ordering::SeqCst)).collect();
        assert_eq!(seen, self.writes.to_ne_bytes(), "what it wrote is there");
        self.honest_stream.write(self.writes ^ 1 << 40);
        let seen: Vec<u8> = self.granted()[..8].iter().map(|b| b.load(Ordering::SeqCst)).collect();
        assert_eq!(seen, (self.writes ^ 1 << 40).to_le_bytes(), "what it wrote is there");
        // Who comes now is let in, and served.
        if self.writes.is_multiple_of(16) {
            drop(self.plane.at.enter_as("honest"));
            drop(ForgedStream::enter_honestly(&self.plane.at));
        }
        let mut events = Vec::new();
        self.plane.plane.poll(kvferry_engine::core::Nanos::ZERO, &mut events);
        assert_eq!(events, [], "of what peers do, its owner hears nothing");
    }
}

fn is_guarded(at: usize) -> bool {
    at / LEN as usize != 1
}
