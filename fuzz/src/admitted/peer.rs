//! What a peer says, step by step, by both ways.

use super::LEN;
use super::forged::{
    ForgedDenial, ForgedMessage, ForgedRegion, ForgedRules, ForgedSegment, HEADS, bell, hear,
    is_sent,
};
use super::passed::make_all;
use super::step::{PassedFile, PeerGreeting, PeerMemorySpec, PeerStep};
use super::tcp::{ForgedStream, pack, pack_message};
use super::victim::{FuzzVictim, GUARD};
use kvferry_fabric_host::DataPath;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{Shutdown, shutdown};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes that one peer asks for, or sends, at most.
const BYTES_MAX: u64 = 8 << 20;

/// Times that somebody looks again whether the plane took what it may never take.
const LOOKS_MAX: usize = 500;

/// Bytes of a peer at a stretch that nobody says but who sends what it may not.
const LEAK: usize = 64;

/// What the peers of this host offer as theirs.
static OWN: [u8; LEN as usize] = [1; LEN as usize];

impl PeerGreeting {
    fn hello(&self, victim: &FuzzVictim) -> ForgedMessage {
        let pid = std::process::id();
        let mut hello = victim.at().hello(if self.odd % 16 == 3 { 1 } else { pid });
        let ForgedMessage::Hello { version, from, to, pass, link, ends, rules, newest } =
            &mut hello
        else {
            return hello;
        };
        *from = victim.at().sender(["a", "b", "c"][usize::from(self.name % 3)], pid);
        *link = self.link.into();
        *ends = self.ends.iter().map(|end| u64::from(*end)).collect();
        match self.odd % 16 {
            4 => *pass = self.fence_key.into(),
            5 => to.1 ^= u64::from(self.fence_key),
            6 => from.truncate(self.fence_key.into()),
            7 => {
                *version = self.version.into();
                *newest = self.newest.map(u32::from);
            }
            8 => *newest = Some(5),
            9 => *rules = self.rules(),
            _ => {}
        }
        hello
    }

    fn rules(&self) -> ForgedRules {
        let chosen = DataPath::ALL.into_iter().enumerate();
        let chosen = chosen.filter(|(bit, _)| self.paths >> bit & 1 == 1);
        ForgedRules { paths: chosen.map(|(_, path)| path).collect(), slower: self.slower }
    }
}

fn memory(said: &PeerMemorySpec) -> ForgedRegion {
    let base = OWN.as_ptr() as u64;
    match said {
        PeerMemorySpec::Own => ForgedRegion { base, len: LEN, process: None, file: false },
        PeerMemorySpec::At { shift, len, process, file } => ForgedRegion {
            base: base.wrapping_add(shift.value(LEN)),
            len: len.value(LEN),
            process: process.map(|(pid, started)| {
                let own = std::process::id();
                (if pid % 2 == 0 { own } else { pid.into() }, started)
            }),
            file: *file,
        },
    }
}

fn message(kind: u8, session: u8) -> ForgedMessage {
    let rules = ForgedRules { paths: DataPath::ALL.into(), slower: true };
    let session = session.into();
    let region = memory(&PeerMemorySpec::Own);
    match kind % 4 {
        0 => ForgedMessage::Welcome { rules, version: Some((4, 4)) },
        1 => ForgedMessage::Refuse { why: "no".into(), over: true },
        2 => ForgedMessage::Opened { session, result: Ok((DataPath::Tcp, region, 1)) },
        _ => {
            let denial = ForgedDenial { why: "no".into(), tcp: true };
            ForgedMessage::Opened { session, result: Err(denial) }
        }
    }
}

fn opening(
    victim: &FuzzVictim,
    (session, region): (u8, u8),
    said: &PeerMemorySpec,
) -> ForgedMessage {
    let place = usize::from(region % 4);
    // The fourth is one that never was.
    let token = victim.tokens.get(place).copied().unwrap_or(99);
    let region = place as u32 + 1;
    ForgedMessage::Open { session: session.into(), region, token, local: memory(said) }
}

/// The words of a record, and the bytes that it moves; none for what is no record.
fn record(step: &PeerStep) -> Option<(Vec<u64>, u64)> {
    let part = |kind: u64, session: u8, op: u8, last: bool| {
        [kind << 56 | u64::from(last) << 32 | u64::from(session), op.into()]
    };
    Some(match step {
        PeerStep::Write { session, op, last, slices, .. } => {
            let (words, bytes) = slices.words(LEN);
            ([&part(1, *session, *op, *last)[..], &words].concat(), bytes)
        }
        PeerStep::Read { session, op, last, slices } => {
            let (words, bytes) = slices.words(LEN);
            ([&part(2, *session, *op, *last)[..], &words].concat(), bytes)
        }
        PeerStep::Close { session } => (vec![5 << 56 | u64::from(*session)], 0),
        PeerStep::Record { kind, low, words } => {
            let head = u64::from(*kind) << 56 | (low.value(LEN) & ((1 << 56) - 1));
            let words = words.iter().map(|word| word.value(LEN));
            (std::iter::once(head).chain(words).collect(), 0)
        }
        _ => return None,
    })
}

/// All that a peer says by TCP.
fn said(victim: &FuzzVictim, steps: &[PeerStep]) -> Vec<u8> {
    let (mut said, mut moved) = (Vec::new(), 0_u64);
    for step in steps {
        match step {
            PeerStep::Open { session, region, memory, .. } => {
                said.extend(pack_message(&opening(victim, (*session, *region), memory)));
            }
            PeerStep::Message { kind, session, .. } => {
                said.extend(pack_message(&message(*kind, *session)));
            }
            PeerStep::Raw { bytes } => said.extend(bytes),
            step => {
                let Some((words, bytes)) = record(step) else { continue };
                if bytes <= BYTES_MAX {
                    moved += bytes;
                }
                if moved > BYTES_MAX {
                    break;
                }
                said.extend(pack(&words));
                if let PeerStep::Write { payload, .. } = step {
                    let count = payload.map_or(bytes.min(BYTES_MAX), u64::from);
                    said.resize(said.len() + count as usize, 2);
                }
            }
        }
    }
    said
}

pub(super) fn said_by_tcp(victim: &FuzzVictim, greeting: &PeerGreeting, steps: &[PeerStep]) {
    let mut stream = ForgedStream::connect(victim.at());
    let is_in = greeting.odd % 16 == 1 || stream.greet(&greeting.hello(victim));
    if !is_in {
        return;
    }
    let heard = stream.finish(&said(victim, steps));
    let is_raw = |step: &PeerStep| matches!(step, PeerStep::Raw { .. } | PeerStep::Record { .. });
    if !steps.iter().any(is_raw) {
        let leak = heard.windows(LEAK).position(|bytes| bytes.iter().all(|byte| *byte == GUARD));
        assert_eq!(leak, None, "bytes were sent that nobody was granted");
    }
}

/// A peer of this host.
struct LocalAttacker {
    socket: OwnedFd,
    segment: ForgedSegment,
    /// It has written over the rings, and does not wait for what may not come.
    is_wild: bool,
}

impl LocalAttacker {
    /// None if it is not let in.
    fn enter(victim: &FuzzVictim, greeting: &PeerGreeting) -> Option<LocalAttacker> {
        let socket = victim.at().connect();
        let mut segment = ForgedSegment::new();
        let (rung, _heard) = bell();
        let passed = make_all(&greeting.files, LEN);
        let mut fds: Vec<BorrowedFd<'_>> = vec![segment.file.as_fd(), rung.as_fd()];
        match greeting.odd % 16 {
            10 => fds = passed.iter().map(AsFd::as_fd).collect(),
            11 => fds.extend(passed.iter().take(2).map(AsFd::as_fd)),
            12 => fds = passed.iter().map(AsFd::as_fd).take(1).chain([rung.as_fd()]).collect(),
            13 => {
                fds = std::iter::once(segment.file.as_fd())
                    .chain(passed.iter().map(AsFd::as_fd).take(1))
                    .collect();
            }
            _ => {}
        }
        is_sent(&socket, &greeting.hello(victim).encode(), &fds);
        let (answer, fds) = hear(&socket)?;
        if !matches!(answer, ForgedMessage::Welcome { .. }) {
            return None;
        }
        segment.is_rung_by(&fds);
        let flags = fcntl_getfl(&socket).expect("a socket");
        fcntl_setfl(&socket, flags | OFlags::NONBLOCK).expect("a socket");
        // Another segment than this one may be what the plane has.
        let is_wild = matches!(greeting.odd % 16, 10 | 12);
        Some(LocalAttacker { socket, segment, is_wild })
    }

    /// True if the plane has hung up.
    fn is_over(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
    }

    fn tell(&self, bytes: &[u8], files: &[PassedFile]) {
        let files = make_all(files, LEN);
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        for _ in 0..LOOKS_MAX {
            if is_sent(&self.socket, bytes, &fds) || self.is_over() {
                return;
            }
            // The plane hears no more before its answers are heard.
            while hear(&self.socket).is_some() {}
            std::thread::yield_now();
        }
    }

    fn wait(&self) {
        let looks = if self.is_wild { LOOKS_MAX / 100 } else { LOOKS_MAX };
        for _ in 0..looks {
            if self.segment.is_taken() || self.is_over() {
                return;
            }
            std::thread::yield_now();
        }
    }

    fn step(&mut self, victim: &FuzzVictim, step: &PeerStep) {
        match step {
            PeerStep::Open { session, region, memory, files } => {
                let open = opening(victim, (*session, *region), memory);
                self.tell(&open.encode(), files);
            }
            PeerStep::Message { kind, session, files } => {
                self.tell(&message(*kind, *session).encode(), files);
            }
            // No bytes are the end.
            PeerStep::Raw { bytes } if !bytes.is_empty() => self.tell(bytes, &[]),
            PeerStep::Word { at, is_header, word } => {
                self.is_wild = true;
                let at = at.value(LEN) as usize;
                let at = if *is_header { HEADS[at % HEADS.len()] } else { at };
                self.segment.poke(at, word.value(LEN));
            }
            PeerStep::Wait => self.wait(),
            step => {
                if let Some((words, bytes)) = record(step)
                    && bytes <= BYTES_MAX
                    && self.segment.has_room(words.len())
                {
                    self.segment.push(&words);
                }
            }
        }
    }
}

pub(super) fn said_by_local(victim: &FuzzVictim, greeting: &PeerGreeting, steps: &[PeerStep]) {
    let Some(mut peer) = LocalAttacker::enter(victim, greeting) else { return };
    for step in steps {
        peer.step(victim, step);
    }
    peer.wait();
    let flags = fcntl_getfl(&peer.socket).expect("a socket");
    fcntl_setfl(&peer.socket, flags - OFlags::NONBLOCK).expect("a socket");
    // It fails if the plane was first.
    let _over = shutdown(&peer.socket, Shutdown::Write);
    while hear(&peer.socket).is_some() {}
}
