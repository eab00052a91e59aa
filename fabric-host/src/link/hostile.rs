//! Peers that say what no plane says: it costs them their connection, and is counted.

use super::handshake::{TimedSocket, read_message};
use super::outbound::LocalOutbound;
use super::segment::ShmSegment;
use super::stream::{pack, pack_control, words_of};
use super::{HostLinkKind, HostOutboundLink, socket};
use crate::copy::CopySlice;
use crate::descriptor::{HostPlaneAddress, HostRegionDescriptor};
use crate::doorbell::{HeardBell, PeerBell, WorkerHandle};
use crate::memory::sealed;
use crate::proto::{
    HostControlMessage, HostCopyStatus, HostOperationPart, HostRecord, HostRegionInfo, OLDEST,
    PART_MAX, PathPolicy, VERSION, push_slices,
};
use crate::ring::{AtomicU64, Consumer, Ordering, Producer};
use crate::shared::HostCloseReason;
use crate::{DataPath, HostConfig, HostPlane};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    DataEvent, DataPlane, FabricError, Memory, OwnMemory, PeerId, RegionDesc, RegionId, SessionId,
};
use kvferry_fabric_common::PlaneIdentity;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fs::{self, Permissions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const LEN: usize = 4_096;
pub(super) const MARK: u8 = 0xa5;

/// A guard against waiting for ever; however busy the machine is, nothing takes as long.
const PATIENCE: Duration = Duration::from_secs(300);

pub(super) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// Bytes that are looked at when nobody writes them, and freed after their plane.
fn own(bytes: &mut [u8; LEN]) -> Memory {
    // SAFETY: See above.
    Memory::Own(unsafe { OwnMemory::new(bytes.as_mut_ptr() as u64, LEN as u64) })
}

/// A plane with an open door and one region.
pub(super) struct Victim {
    pub(super) plane: HostPlane,
    pub(super) bytes: Box<[u8; LEN]>,
    claim: HostRegionDescriptor,
    /// The newest version that those who attack it say they speak.
    pub(super) newest: u32,
}

impl Victim {
    pub(super) fn new() -> Victim {
        Victim::with(PATIENCE)
    }

    /// One that waits for a greeting as long as this.
    fn with(connect: Duration) -> Victim {
        let connect_ms = connect.as_millis() as u32;
        Victim::of(HostConfig { connect_ms, ..HostConfig::default() })
    }

    pub(super) fn of(config: HostConfig) -> Victim {
        let config = HostConfig { open_door: true, ..config };
        let mut plane = HostPlane::new(config).unwrap();
        let mut bytes = Box::new([MARK; LEN]);
        let memory = own(&mut bytes);
        plane.register(RegionId(1), memory).unwrap();
        let mut events = Vec::new();
        plane.poll(Nanos::ZERO, &mut events);
        let [DataEvent::Registered { result: Ok(desc), .. }] = &events[..] else {
            panic!("{events:?}")
        };
        let claim = HostRegionDescriptor::decode(desc).unwrap();
        Victim { plane, bytes, claim, newest: VERSION }
    }

    pub(super) fn location(&self) -> HostPlaneAddress {
        HostPlaneAddress::decode(&self.plane.address()).unwrap()
    }

    pub(super) fn hello(&self) -> HostControlMessage {
        let who = &self.location().who;
        HostControlMessage::Hello {
            version: OLDEST,
            from: stranger(0).encode().0.to_vec(),
            to: (who.key.to_string(), who.incarnation),
            fence_key: 0,
            link: 0,
            ends: Vec::new(),
            rules: rules(),
            newest: Some(self.newest),
            offer: None,
        }
    }

    pub(super) fn dial(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.plane.port())).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A connection that was let in, with a session open.
    pub(super) fn enter(&self) -> TcpStream {
        let mut stream = self.dial();
        send(&mut stream, &self.hello(), deadline()).unwrap();
        let welcome = receive(&mut stream, deadline()).unwrap();
        assert!(matches!(welcome, HostControlMessage::Welcome { .. }), "{welcome:?}");
        self.open(&mut stream);
        stream
    }

    pub(super) fn open(&self, stream: &mut TcpStream) {
        let local = side_of(LEN as u64);
        let (region, token) = (self.claim.region.0, self.claim.token);
        let open = HostControlMessage::Open { session: 9, region, token, local };
        stream.write_all(&pack_control(&open)).unwrap();
        let opened = receive(stream, deadline()).unwrap();
        assert!(
            matches!(opened, HostControlMessage::Opened { session: 9, result: Ok(_) }),
            "{opened:?}"
        );
    }

    /// Waits for a count of the plane.
    pub(super) fn until(&self, what: &str, count: impl Fn(&crate::HostCounters) -> bool) {
        let end = deadline();
        while !count(&self.plane.counters()) {
            assert!(Instant::now() < end, "{what}: {:?}", self.plane.counters());
            std::thread::yield_now();
        }
    }

    pub(super) fn assert_untouched(&self) {
        assert!(self.bytes.iter().all(|byte| *byte == MARK), "bytes of a stranger landed");
    }
}

/// Receives a control message by TCP.
pub(super) fn receive(peer: &mut TcpStream, deadline: Instant) -> io::Result<HostControlMessage> {
    read_message(&mut TimedSocket(peer, deadline))
}

/// Sends a control message by TCP.
pub(super) fn send(
    peer: &mut TcpStream,
    message: &HostControlMessage,
    deadline: Instant,
) -> io::Result<()> {
    TimedSocket(peer, deadline).write_all(&pack_control(message))
}

/// The file of a secret, which has to be there when a plane is made.
pub(super) fn secret_file(name: &str, secret: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("kvferry-{}-{name}", std::process::id()));
    fs::write(&path, secret).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
    path
}

pub(super) fn welcome() -> HostControlMessage {
    HostControlMessage::Welcome { rules: rules(), version: Some((VERSION, VERSION)) }
}

pub(super) fn rules() -> PathPolicy {
    PathPolicy { paths: DataPath::ALL.into(), slower: true }
}

pub(super) fn stranger(port: u16) -> HostPlaneAddress {
    HostPlaneAddress {
        who: PlaneIdentity { key: "stranger".into(), incarnation: 77 },
        node: "elsewhere/1/1".into(),
        hostname: "elsewhere".into(),
        host: "127.0.0.1".into(),
        port,
        pid: std::process::id(),
    }
}

/// True if the other side closed the connection.
pub(super) fn is_dropped(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    // A reset, too, is an end.
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(why) => why.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn what_is_no_greeting_is_refused() {
    // Half of one is given up after that time.
    let victim = Victim::with(Duration::from_millis(300));
    let mut long = u64::MAX.to_le_bytes().to_vec();
    long.extend([1; 64]);
    let http = b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n".to_vec();
    let mut half = pack_control(&victim.hello());
    half.truncate(half.len() / 2);
    let early = pack(&HostRecord::Close { session: 1 }.words());
    let lying = pack(&HostRecord::Control { bytes: u32::MAX }.words());
    for (n, bytes) in [long, http, vec![0; 8], half, early, lying].into_iter().enumerate() {
        let mut stream = victim.dial();
        stream.write_all(&bytes).unwrap();
        assert!(is_dropped(&mut stream), "greeting {n}");
        victim.until("refused", |counters| counters.refused == n as u64 + 1);
    }
}

#[test]
fn hellos_that_do_not_fit_are_told_why() {
    let victim = Victim::new();
    let change = |f: fn(&mut HostControlMessage)| {
        let mut hello = victim.hello();
        f(&mut hello);
        let mut stream = victim.dial();
        send(&mut stream, &hello, deadline()).unwrap();
        match receive(&mut stream, deadline()).unwrap() {
            HostControlMessage::Refuse { why, .. } => why,
            other => panic!("{other:?}"),
        }
    };
    let why = change(|hello| {
        if let HostControlMessage::Hello { version, newest, .. } = hello {
            (*version, *newest) = (VERSION + 1, Some(VERSION + 4));
        }
    });
    for (oldest, newest) in [(VERSION + 1, VERSION + 4), (OLDEST, VERSION)] {
        assert!(why.contains(&format!("{oldest} to {newest}")), "{why}");
    }
    let why = change(|hello| {
        if let HostControlMessage::Hello { to, .. } = hello {
            to.1 ^= 1;
        }
    });
    assert!(why.contains("restarted"), "{why}");
    let why = change(|hello| {
        if let HostControlMessage::Hello { fence_key, .. } = hello {
            *fence_key = 1;
        }
    });
    assert!(why.contains("not connected"), "{why}");
    let why = change(|hello| {
        if let HostControlMessage::Hello { from, .. } = hello {
            from.truncate(5);
        }
    });
    assert!(why.contains("address"), "{why}");
}

pub(super) fn write(session: u32, slices: &[CopySlice]) -> Vec<u8> {
    pack(&write_words(session, slices))
}

fn write_words(session: u32, slices: &[CopySlice]) -> Vec<u64> {
    let mut words = HostRecord::Write(HostOperationPart { session, op: 1, last: true }).words();
    push_slices(slices, &mut words);
    words
}

/// The next record of an answer.
pub(super) fn answered(stream: &mut TcpStream) -> Vec<u64> {
    let mut answer = [0; 24];
    stream.read_exact(&mut answer).unwrap();
    words_of(&answer).skip(1).collect()
}

fn done(op: u64) -> Vec<u8> {
    pack(&HostRecord::Done { op, status: HostCopyStatus::Done }.words())
}

pub(super) fn slice(from: u64, to: u64, len: u64) -> CopySlice {
    CopySlice { from, to, len }
}

#[test]
fn records_that_no_plane_sends_end_the_connection() {
    let victim = Victim::new();
    let len = LEN as u64;
    let many = vec![slice(0, 0, 0); PART_MAX + 1];
    let mut ragged = HostRecord::Write(HostOperationPart { session: 9, op: 1, last: true }).words();
    ragged.push(7);
    let cases = [
        write(9, &[slice(0, 0, 8), slice(0, len, 1)]),
        write(9, &[slice(len, 0, 1)]),
        write(9, &[slice(0, u64::MAX, 8)]),
        write(9, &[slice(0, 8, u64::MAX)]),
        write(9, &many),
        pack(&ragged),
        pack(&[u64::MAX]),
        pack(&[]),
        done(1),
        pack_control(&welcome()),
    ];
    for (n, bytes) in cases.into_iter().enumerate() {
        let mut stream = victim.enter();
        stream.write_all(&bytes).unwrap();
        // Bytes for ranges that were not taken.
        let _ = stream.write_all(&[1; 64]);
        assert!(is_dropped(&mut stream), "record {n}");
        victim.until("corrupt", |counters| counters.corrupt == n as u64 + 1);
    }
    victim.assert_untouched();
}

#[test]
fn half_of_a_write_lands_and_is_no_success() {
    let victim = Victim::new();
    let mut stream = victim.enter();
    stream.write_all(&write(9, &[slice(0, 0, 64)])).unwrap();
    stream.write_all(&[1; 32]).unwrap();
    drop(stream);
    // The next link is greeted when the first one may be over or not: both are fine.
    let _ = victim.enter();
    assert_eq!(victim.plane.counters().served[DataPath::Tcp as usize].operations, 0);
}

#[test]
fn unknown_sessions_and_regions_are_answered_with_an_error() {
    let victim = Victim::new();
    let mut stream = victim.enter();
    let local = side_of(8);
    let open = |session, region, token, local: &HostRegionInfo| {
        pack_control(&HostControlMessage::Open { session, region, token, local: local.clone() })
    };
    let token = victim.claim.token;
    for bytes in
        [open(10, 1, token + 1, &local), open(10, 2, token, &local), open(9, 1, token, &local)]
    {
        stream.write_all(&bytes).unwrap();
        let answer = receive(&mut stream, deadline()).unwrap();
        assert!(matches!(answer, HostControlMessage::Opened { result: Err(_), .. }), "{answer:?}");
    }
    stream.write_all(&write(11, &[slice(0, 0, 64)])).unwrap();
    stream.write_all(&[1; 64]).unwrap();
    let refused = HostRecord::Done { op: 1, status: HostCopyStatus::Refused };
    assert_eq!(answered(&mut stream), refused.words());
    victim.assert_untouched();
}

/// A local link that was let in, seen from who dialled it.
struct HostileLocalLink {
    socket: OwnedFd,
    segment: ShmSegment,
}

impl HostileLocalLink {
    fn say_hello(
        victim: &Victim,
        file: &OwnedFd,
    ) -> (OwnedFd, Result<HostControlMessage, HostCloseReason>) {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let name = victim.location().socket_name();
        connect(&socket, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
        let (_heard, bell) = HeardBell::pair().unwrap();
        socket::send(socket.as_fd(), &victim.hello(), &[file.as_fd(), bell.as_fd()]).unwrap();
        let answer = socket::receive(socket.as_fd(), false).map(|answer| answer.unwrap().0);
        (socket, answer)
    }

    fn enter(victim: &Victim) -> HostileLocalLink {
        let (segment, file) = ShmSegment::create().unwrap();
        let (socket, answer) = HostileLocalLink::say_hello(victim, &file);
        assert!(matches!(answer, Ok(HostControlMessage::Welcome { .. })), "{answer:?}");
        HostileLocalLink { socket, segment }
    }

    fn is_dropped(&self) -> bool {
        matches!(socket::receive(self.socket.as_fd(), false), Err(HostCloseReason::Closed))
    }

    fn open(
        &self,
        victim: &Victim,
        local: HostRegionInfo,
        file: Option<&OwnedFd>,
    ) -> HostControlMessage {
        let (region, token) = (victim.claim.region.0, victim.claim.token);
        let open = HostControlMessage::Open { session: 9, region, token, local };
        let fds: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        socket::send(self.socket.as_fd(), &open, &fds).unwrap();
        socket::receive(self.socket.as_fd(), false).unwrap().unwrap().0
    }
}

/// A memory file that may shrink.
fn unsealed(len: u64) -> OwnedFd {
    let file = memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

#[test]
fn segments_that_could_shrink_or_are_short_are_refused() {
    let victim = Victim::new();
    let unsealed = unsealed(1 << 24);
    let short = sealed("short", 4_096).unwrap();
    for (n, file) in [unsealed, short].iter().enumerate() {
        let (_, answer) = HostileLocalLink::say_hello(&victim, file);
        let Ok(HostControlMessage::Refuse { why, .. }) = answer else { panic!("{answer:?}") };
        assert!(why.contains("memory file"), "{why}");
        victim.until("refused", |counters| counters.refused == n as u64 + 1);
    }
}

#[test]
fn sources_that_are_not_what_they_claim_are_refused() {
    let victim = Victim::new();
    let local = HostileLocalLink::enter(&victim);
    let len = LEN as u64;
    let side = |base, len, process, file| HostRegionInfo { base, len, process, file };
    let short = sealed("short", 4_096).unwrap();
    let unsealed = unsealed(len);
    // It could be read, but the process is not the one of that start.
    let own = victim.claim.base;
    let stale = Some((std::process::id(), 1));
    for (case, file) in [
        (side(0, 2 * len, None, true), Some(&short)),
        (side(0, len, None, true), Some(&unsealed)),
        (side(0, len, None, true), None),
        (side(0, len, None, false), None),
        (side(u64::MAX, len, None, false), None),
        (side(8, 0, None, false), None),
        (side(own, len, stale, false), None),
        (side(8, len, Some((u32::MAX, 1)), false), None),
    ] {
        let answer = local.open(&victim, case.clone(), file);
        assert!(
            matches!(answer, HostControlMessage::Opened { result: Err(_), .. }),
            "{case:?}: {answer:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_words_in_the_ring_are_survived(
        noise in prop::collection::vec((0..80_usize, any::<u64>()), 1..30),
        records in prop::collection::vec(prop::collection::vec(any::<u64>(), 0..12), 0..6),
    ) {
        let victim = Victim::new();
        let local = HostileLocalLink::enter(&victim);
        let words = local.segment.requests();
        let mut requests = Producer::new(local.segment.requests());
        for record in &records {
            prop_assert_eq!(requests.push(record), Ok(true));
        }
        for (at, word) in noise {
            words[at].store(word, Ordering::Relaxed);
        }
        // The tail says that there is something, whatever it is.
        words[0].fetch_or(1 << 40, Ordering::Release);
        // It is awake, or wakes up by this.
        let (region, token) = (victim.claim.region.0, victim.claim.token);
        let own = side_of(8);
        let open = HostControlMessage::Open { session: 1, region, token, local: own };
        let _ = socket::send(local.socket.as_fd(), &open, &[]);
        victim.until("corrupt", |counters| counters.corrupt == 1);
        victim.assert_untouched();
        // It lives and lets others in.
        HostileLocalLink::enter(&victim);
    }
}

#[test]
fn out_of_range_writes_by_ring_end_the_link() {
    let victim = Victim::new();
    let local = HostileLocalLink::enter(&victim);
    let source = [1_u8; LEN];
    let base = source.as_ptr() as u64;
    let side = HostRegionInfo { base, len: LEN as u64, process: None, file: false };
    let answer = local.open(&victim, side, None);
    assert!(matches!(answer, HostControlMessage::Opened { result: Ok(_), .. }), "{answer:?}");
    let words = write_words(9, &[slice(0, 0, 8), slice(0, LEN as u64 - 1, 2)]);
    assert_eq!(Producer::new(local.segment.requests()).push(&words), Ok(true));
    let again = welcome();
    let _ = socket::send(local.socket.as_fd(), &again, &[]);
    assert!(local.is_dropped());
    victim.until("corrupt", |counters| counters.corrupt == 1);
    victim.assert_untouched();
    let answers: Consumer<_> = Consumer::new(local.segment.answers());
    assert!(!answers.is_filled(), "an answer to a write out of range");
}

/// A plane that opens a session to a peer of ours, and what it dialled with; it has not been
/// answered.
pub(super) fn dialling() -> (HostPlane, TcpStream) {
    let (connect_ms, open_ms) = (300_000, 300_000);
    let config = HostConfig { connect_ms, open_ms, ..HostConfig::default() };
    dialling_with(config, stranger(0))
}

/// The same, with settings, and a peer that is said to be at our port, on another host. It has one
/// connection.
pub(super) fn dialling_with(config: HostConfig, peer: HostPlaneAddress) -> (HostPlane, TcpStream) {
    let (listener, plane) = dialling_by(HostConfig { streams: 1, ..config }, peer);
    let (stream, _) = listener.accept().unwrap();
    (plane, stream)
}

/// The same, before the peer takes a connection.
pub(super) fn dialling_by(config: HostConfig, peer: HostPlaneAddress) -> (TcpListener, HostPlane) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let peer = HostPlaneAddress { port, node: stranger(0).node, ..peer };
    let mut plane = HostPlane::new(config).unwrap();
    let bytes = Box::leak(Box::new([MARK; LEN]));
    let memory = own(bytes);
    plane.register(RegionId(1), memory).unwrap();
    plane.connect(PeerId(1), &peer.encode(), 5).unwrap();
    let claim = HostRegionDescriptor {
        owner: peer.who,
        region: RegionId(4),
        token: 6,
        base: 0,
        len: 4_096,
    };
    let desc: RegionDesc = claim.encode();
    plane.open(SessionId(2), RegionId(1), PeerId(1), &desc).unwrap();
    (listener, plane)
}

/// The same, with a peer that answers its hello and then `says`.
fn betrayed(says: impl FnOnce(&mut TcpStream)) -> (HostPlane, Vec<DataEvent>) {
    let (mut plane, mut stream) = dialling();
    receive(&mut stream, deadline()).unwrap();
    send(&mut stream, &welcome(), deadline()).unwrap();
    let mut events = Vec::new();
    let end = deadline();
    let mut says = Some(says);
    while !events.iter().any(|event| matches!(event, DataEvent::PeerDown { .. })) {
        assert!(Instant::now() < end, "{events:?}");
        plane.poll(Nanos::ZERO, &mut events);
        if let Some(says) = says.take() {
            says(&mut stream);
        }
        std::thread::yield_now();
    }
    (plane, events)
}

#[test]
fn answers_to_what_was_not_asked_end_the_link() {
    let bytes = pack(&HostRecord::Bytes { op: 1, status: HostCopyStatus::Done }.words());
    let opened =
        HostControlMessage::Opened { session: 99, result: Ok((DataPath::Tcp, side_of(8), 0)) };
    for bytes in [done(1), bytes, pack_control(&opened), pack(&[0]), u64::MAX.to_le_bytes().into()]
    {
        let (plane, _) = betrayed(|stream| stream.write_all(&bytes).unwrap());
        assert_eq!(plane.counters().corrupt, 1);
    }
}

pub(super) fn side_of(len: u64) -> HostRegionInfo {
    HostRegionInfo { base: 0, len, process: None, file: false }
}

#[test]
fn a_peer_that_hangs_up_fails_what_is_being_opened() {
    let (_, events) = betrayed(|stream| stream.shutdown(std::net::Shutdown::Both).unwrap());
    let gone = DataEvent::Opened { session: SessionId(2), result: Err(FabricError::PeerGone) };
    assert!(events.contains(&gone), "{events:?}");
}

#[test]
fn answers_by_ring_to_what_was_not_asked_end_the_link() {
    for record in
        [HostRecord::Done { op: 1, status: HostCopyStatus::Done }, HostRecord::Control { bytes: 1 }]
    {
        let (segment, _file) = ShmSegment::create().unwrap();
        let worker = Arc::new(WorkerHandle::new().unwrap());
        let (_heard, bell) = HeardBell::pair().unwrap();
        let bell = PeerBell::new(bell).unwrap();
        let local = LocalOutbound { segment: segment.clone(), bell, heard: None, files: true };
        let link = HostOutboundLink::new(1, HostLinkKind::Local, worker, Some(local));
        assert_eq!(Producer::new(segment.answers()).push(&record.words()), Ok(true));
        let mut heard = Vec::new();
        assert_eq!(
            (link.poll_completions(&mut heard), &heard[..]),
            (Err(HostCloseReason::Corrupt), &[][..])
        );
    }
}

/// So that the type stays the one that both sides map.
#[test]
fn words_are_eight_bytes() {
    assert_eq!(size_of::<AtomicU64>(), 8);
}
