//! The protocol of host planes as an attacker writes it down, and a plane to attack.
#![allow(dead_code, reason = "the fuzz target that includes this uses some of it")]

use super::patient;
use kvferry_engine::core::dialect::moriio::descriptor::{
    DescLayout, MoriEngineDesc, MoriMemoryDesc,
};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{DataEvent, DataPlane, Memory, OwnMemory, RegionId};
use kvferry_fabric_host::{DataPath, HostConfig, HostCounters, HostPlane};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::retry_on_intr;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with,
};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A guard against waiting for ever; however busy the machine is, nothing takes as long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// The versions that are said to be spoken.
pub(crate) const VERSIONS: (u32, u32) = (2, 4);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ForgedRules {
    pub(crate) paths: Vec<DataPath>,
    pub(crate) slower: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ForgedRegion {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) process: Option<(u32, u64)>,
    pub(crate) file: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ForgedDenial {
    pub(crate) why: String,
    pub(crate) tcp: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum ForgedMessage {
    Hello {
        version: u32,
        from: Vec<u8>,
        to: (String, u64),
        pass: u64,
        link: u64,
        ends: Vec<u64>,
        rules: ForgedRules,
        newest: Option<u32>,
    },
    Welcome {
        rules: ForgedRules,
        version: Option<(u32, u32)>,
    },
    Refuse {
        why: String,
        over: bool,
    },
    Open {
        session: u32,
        region: u32,
        token: u64,
        local: ForgedRegion,
    },
    Opened {
        session: u32,
        result: Result<(DataPath, ForgedRegion, u32), ForgedDenial>,
    },
}

impl ForgedMessage {
    pub(crate) fn encode(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(self).expect("plain data")
    }

    /// Why a greeting was refused, or a session denied.
    pub(crate) fn why(&self) -> &str {
        match self {
            ForgedMessage::Refuse { why, .. }
            | ForgedMessage::Opened { result: Err(ForgedDenial { why, .. }), .. } => why,
            other => panic!("it was let through: {other:?}"),
        }
    }
}

/// A plane with an open door and one region.
pub(crate) struct AttackedPlane {
    pub(crate) plane: HostPlane,
    pub(crate) at: Arc<AttackedAddress>,
}

/// What of it everybody of this host can find out.
pub(crate) struct AttackedAddress {
    pub(crate) engine: MoriEngineDesc,
    pub(crate) incarnation: u64,
    pub(crate) token: u64,
}

impl Deref for AttackedPlane {
    type Target = AttackedAddress;

    fn deref(&self) -> &AttackedAddress {
        &self.at
    }
}

pub(crate) const REGION: RegionId = RegionId(1);

impl AttackedPlane {
    pub(crate) fn new(config: HostConfig, memory: Memory) -> AttackedPlane {
        let config = HostConfig { open_door: true, ..config };
        let mut plane = HostPlane::new(config).expect("a plane at loopback");
        let token = register(&mut plane, REGION, memory);
        let engine = MoriEngineDesc::decode(&plane.address().0).expect("an address");
        let (_, incarnation) = engine.node_id.rsplit_once('/').expect("an incarnation");
        let incarnation = u64::from_str_radix(incarnation, 16).expect("hex");
        AttackedPlane { plane, at: Arc::new(AttackedAddress { engine, incarnation, token }) }
    }

    /// With 8 KiB of this process.
    pub(crate) fn of_own_memory() -> AttackedPlane {
        let bytes = Box::leak(vec![0xa5_u8; 8_192].into_boxed_slice());
        let (base, len) = (bytes.as_mut_ptr() as u64, bytes.len() as u64);
        // SAFETY: It is never freed, and nobody has a reference to it.
        let memory = Memory::Own(unsafe { OwnMemory::new(base, len) });
        AttackedPlane::new(patient(), memory)
    }

    /// Waits for a count of the plane.
    pub(crate) fn until(&self, what: &str, count: impl Fn(&HostCounters) -> bool) {
        let start = Instant::now();
        while !count(&self.plane.counters()) {
            assert!(start.elapsed() < PATIENCE, "{what}: {:?}", self.plane.counters());
            std::thread::yield_now();
        }
    }
}

/// Registers memory; what peers have to know of it.
pub(crate) fn register(plane: &mut HostPlane, region: RegionId, memory: Memory) -> u64 {
    plane.register(region, memory).expect("memory is taken");
    let mut events = Vec::new();
    plane.poll(Nanos::ZERO, &mut events);
    let [DataEvent::Registered { result: Ok(desc), .. }] = &events[..] else {
        panic!("{events:?}")
    };
    let (_, desc) = MoriMemoryDesc::decode(&desc.0).expect("a descriptor");
    u64::from_le_bytes(desc.ipc_handle[16..24].try_into().expect("eight bytes"))
}

impl AttackedAddress {
    /// The address of a plane that says to be process `pid` of this host.
    pub(crate) fn sender(&self, name: &str, pid: u32) -> Vec<u8> {
        let (node, _) = self.engine.node_id.rsplit_once('/').expect("an incarnation");
        let from = MoriEngineDesc {
            key: name.into(),
            node_id: format!("{node}/{:016x}", 77).into(),
            pid: pid as i32,
            ..self.engine.clone()
        };
        from.encode(DescLayout::V1_2_2)
    }

    /// A hello of a plane that says to be process `pid` of this host.
    pub(crate) fn hello(&self, pid: u32) -> ForgedMessage {
        ForgedMessage::Hello {
            version: VERSIONS.0,
            from: self.sender("stranger", pid),
            to: (self.engine.key.to_string(), self.incarnation),
            pass: 0,
            link: 0,
            ends: Vec::new(),
            rules: all_paths(),
            newest: Some(VERSIONS.1),
        }
    }

    /// A connection to the local socket, which anybody of this host can make.
    pub(crate) fn connect(&self) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
        let name = format!("kvferry-host-{:016x}", self.incarnation);
        let at = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
        connect(&socket, &at).expect("the plane listens");
        socket
    }

    /// A greeting with a doorbell of the attacker's choice; the answer.
    pub(crate) fn greet(
        &self,
        pid: u32,
        bell: BorrowedFd<'_>,
    ) -> (OwnedFd, ForgedSegment, ForgedMessage) {
        self.say_hello(&self.hello(pid), bell)
    }

    fn say_hello(
        &self,
        hello: &ForgedMessage,
        bell: BorrowedFd<'_>,
    ) -> (OwnedFd, ForgedSegment, ForgedMessage) {
        let socket = self.connect();
        let mut segment = ForgedSegment::new();
        say(&socket, hello, &[segment.file.as_fd(), bell]);
        let (answer, fds) = hear(&socket).expect("an answer to the hello");
        segment.is_rung_by(&fds);
        (socket, segment, answer)
    }

    /// A link that was let in.
    pub(crate) fn enter(&self) -> (OwnedFd, ForgedSegment) {
        self.enter_as("stranger")
    }

    /// The same of a plane with another name.
    pub(crate) fn enter_as(&self, name: &str) -> (OwnedFd, ForgedSegment) {
        let (bell, _) = bell();
        let mut hello = self.hello(std::process::id());
        if let ForgedMessage::Hello { from, .. } = &mut hello {
            *from = self.sender(name, std::process::id());
        }
        let (socket, segment, answer) = self.say_hello(&hello, bell.as_fd());
        assert!(matches!(answer, ForgedMessage::Welcome { .. }), "{answer:?}");
        (socket, segment)
    }

    /// Asks for a session from memory that the attacker says is its own.
    pub(crate) fn open(
        &self,
        socket: &OwnedFd,
        local: ForgedRegion,
        file: Option<BorrowedFd<'_>>,
    ) -> (ForgedMessage, Option<OwnedFd>) {
        self.open_session(9, socket, local, file)
    }

    /// The same for a session of another number.
    pub(crate) fn open_session(
        &self,
        session: u32,
        socket: &OwnedFd,
        local: ForgedRegion,
        file: Option<BorrowedFd<'_>>,
    ) -> (ForgedMessage, Option<OwnedFd>) {
        let (region, token) = (REGION.0, self.token);
        let open = ForgedMessage::Open { session, region, token, local };
        say(socket, &open, file.as_slice());
        let (answer, mut fds) = hear(socket).expect("an answer");
        (answer, fds.pop())
    }
}

pub(crate) fn all_paths() -> ForgedRules {
    ForgedRules { paths: DataPath::ALL.into(), slower: true }
}

/// Memory of this process, as a peer offers its own.
pub(crate) fn own_memory(bytes: &[u8]) -> ForgedRegion {
    let (base, len) = (bytes.as_ptr() as u64, bytes.len() as u64);
    ForgedRegion { base, len, process: None, file: false }
}

/// A doorbell: the end that is rung, and the one that is waited on.
pub(crate) fn bell() -> (OwnedFd, OwnedFd) {
    let (waited, rung) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
    (rung, waited)
}

/// Sends a message with descriptors.
pub(crate) fn say(socket: &OwnedFd, message: &ForgedMessage, fds: &[BorrowedFd<'_>]) {
    assert!(is_sent(socket, &message.encode(), fds), "the plane listens");
}

/// Sends bytes with at most four descriptors; false if the other side has hung up.
pub(crate) fn is_sent(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
    }
    let bytes = [IoSlice::new(bytes)];
    retry_on_intr(|| sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL)).is_ok()
}

/// The next message; none if the other side has hung up.
pub(crate) fn hear(socket: &OwnedFd) -> Option<(ForgedMessage, Vec<OwnedFd>)> {
    let mut bytes = [0; 16 << 10];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut bytes)];
    // A fuzzer has signals of its own.
    let got = retry_on_intr(|| recvmsg(socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC));
    let got = got.ok()?;
    let rights = |message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    };
    let fds = ancillary.drain().filter_map(rights).flatten().collect();
    let count = got.bytes;
    (count > 0).then(|| (rmp_serde::from_slice(&bytes[..count]).expect("a message"), fds))
}

/// Words of a ring ahead of its records: what was written, what was read, who sleeps.
const HEADER: usize = 32;
const RECORDS: usize = 1 << 16;
const RING: usize = HEADER + RECORDS;
/// The words ahead of both rings, of requests and of answers.
const FRONT: usize = 8;
const WORDS: usize = FRONT + 2 * RING;

/// The memory of a local link, as who dials makes it.
pub(crate) struct ForgedSegment {
    pub(crate) file: OwnedFd,
    words: ForgedWords,
    tail: u64,
    /// Of the answers.
    head: u64,
    /// What the plane is rung by.
    bell: Option<OwnedFd>,
}

/// Mapped words.
struct ForgedWords(*mut AtomicU64);

// SAFETY: They are atomics, which any thread may use.
unsafe impl Send for ForgedWords {}

impl Deref for ForgedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: The mapping has as many, and lives as long as this.
        unsafe { std::slice::from_raw_parts(self.0, WORDS) }
    }
}

impl Drop for ForgedWords {
    fn drop(&mut self) {
        // SAFETY: Nobody refers to the mapping any more.
        unsafe { munmap(self.0.cast(), 8 * WORDS) }.expect("a mapping");
    }
}

/// Words that say how far a ring is and who sleeps, of the requests and of the answers.
pub(crate) const HEADS: [usize; 9] = [
    0,
    FRONT,
    FRONT + 8,
    FRONT + 16,
    FRONT + 24,
    FRONT + RING,
    FRONT + RING + 8,
    FRONT + RING + 16,
    FRONT + RING + 24,
];

impl ForgedSegment {
    pub(crate) fn new() -> ForgedSegment {
        let file = memory_file(8 * WORDS as u64);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: A new mapping of a file of that length.
        let start =
            unsafe { mmap(std::ptr::null_mut(), 8 * WORDS, access, MapFlags::SHARED, &file, 0) };
        let words = ForgedWords(start.expect("a mapping").cast());
        ForgedSegment { file, words, tail: 0, head: 0, bell: None }
    }

    /// Writes any word of the segment.
    pub(crate) fn poke(&self, at: usize, word: u64) {
        self.words[at % WORDS].store(word, Ordering::SeqCst);
    }

    /// True if the plane has taken all records, or the link is shut.
    pub(crate) fn is_taken(&self) -> bool {
        let is_shut = self.words[0].load(Ordering::SeqCst) == 0;
        is_shut || self.words[FRONT + 8].load(Ordering::SeqCst) == self.tail
    }

    /// The next answer, if there is one.
    pub(crate) fn pop(&mut self) -> Option<Vec<u64>> {
        let answers = &self.words[FRONT + RING..];
        if answers[0].load(Ordering::Acquire) == self.head {
            return None;
        }
        let word =
            |n: u64| answers[HEADER + (self.head + n) as usize % RECORDS].load(Ordering::Relaxed);
        let record: Vec<u64> = (1..=word(0)).map(word).collect();
        self.head += record.len() as u64 + 1;
        answers[8].store(self.head, Ordering::Release);
        Some(record)
    }

    /// True if the ring of requests has room for a record of so many words.
    pub(crate) fn has_room(&self, words: usize) -> bool {
        let taken = self.words[FRONT + 8].load(Ordering::Acquire);
        taken.saturating_add(RECORDS as u64) > self.tail + words as u64
    }

    /// Puts a record into the ring of requests once there is room.
    pub(crate) fn push(&mut self, record: &[u64]) {
        let start = Instant::now();
        while !self.has_room(record.len()) {
            assert!(start.elapsed() < PATIENCE, "nothing is taken out of the ring");
            std::thread::yield_now();
        }
        let requests = &self.words[FRONT..FRONT + RING];
        for word in std::iter::once(&(record.len() as u64)).chain(record) {
            let at = HEADER + self.tail as usize % RECORDS;
            requests[at].store(*word, Ordering::Relaxed);
            self.tail += 1;
        }
        requests[0].store(self.tail, Ordering::SeqCst);
        if requests[16].swap(0, Ordering::SeqCst) == 1
            && let Some(bell) = &self.bell
        {
            // Where there is no room it was rung before.
            let _rung = rustix::io::write(bell, &[1]);
        }
    }

    /// Takes the doorbell of a welcome, if one came.
    pub(crate) fn is_rung_by(&mut self, fds: &[OwnedFd]) {
        self.bell = fds.first().map(|sent| {
            // For reading, too: a write to a pipe that nobody reads any more is a signal.
            let path = format!("/proc/self/fd/{}", sent.as_raw_fd());
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty()).expect("a pipe")
        });
    }

    /// Says that whoever answers has to ring.
    pub(crate) fn sleep(&self) {
        self.words[FRONT + RING + 16].store(1, Ordering::SeqCst);
    }

    /// True if somebody rang for an answer, or was about to.
    pub(crate) fn is_rung_for(&self) -> bool {
        self.words[FRONT + RING + 16].load(Ordering::SeqCst) == 0
    }
}

/// A memory file of fixed length, all of it holes.
pub(crate) fn memory_file(len: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("forged", flags).expect("a memory file");
    ftruncate(&file, len).expect("a length");
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&file, seals).expect("seals");
    file
}

/// The record of a write, or of a part of one, from and to the start of both regions.
pub(crate) fn write_record(session: u32, op: u64, last: bool, slices: u64, len: u64) -> Vec<u64> {
    let head = 1 << 56 | u64::from(last) << 32 | u64::from(session);
    let slices = (0..slices).flat_map(|_| [0, 0, len]);
    [head, op, 0].into_iter().chain(slices).collect()
}
