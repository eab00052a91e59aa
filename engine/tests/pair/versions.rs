//! Pairs of engines that speak different versions of the native dialect.
//!
//! `recorded` holds what pairs of an earlier version said to each other, frame by frame, and what
//! either side told its engine. A side that is played back from there gets on with today's code as
//! it did with its own.

use super::*;
use crate::world::{PairWorld, Speaker};
use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::dialect::native::{self, Frame, VERSION, VERSION_MIN};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

pub(crate) type Conversation = (&'static str, Mode, fn(&mut PairWorld));

/// What is recorded. Between them both sides say every message.
pub(crate) const CONVERSATIONS: [Conversation; 5] = [
    ("push", Mode::Push, push),
    ("pull", Mode::Pull, pull),
    ("cancel", Mode::Push, cancel),
    ("refused", Mode::Pull, refused),
    ("failed", Mode::Push, failed),
];

/// A prompt of which decode has a part, announced when it is computed.
fn push(pair: &mut PairWorld) {
    let request = arrive_decode(pair, Mode::Push, 100, 0);
    settle(pair, 1);
    arrive_prefill(pair, Mode::Push, 100, 1);
    schedule(pair, 1, 0, 50);
    settle(pair, 1);
    allocate(pair, &request, 32, 100, 10);
    settle(pair, 1);
    pair.compute(1, LAYERS);
    prefill_all_from_second_chunk(pair);
    settle(pair, 1);
}

/// A prompt that waits for blocks of decode for longer than a lease, and one that is cached.
fn pull(pair: &mut PairWorld) {
    let request = arrive_decode(pair, Mode::Pull, 100, 0);
    arrive_prefill(pair, Mode::Pull, 100, 2);
    prefill_all(pair, 100);
    settle(pair, 100);
    allocate(pair, &request, 0, 100, 10);
    settle(pair, 1);
    let cached = arrive_decode(pair, Mode::Pull, 100, 1);
    settle(pair, 1);
    allocate(pair, &cached, 100, 100, 20);
    settle(pair, 1);
}

/// A client that leaves while half of its prompt is written.
fn cancel(pair: &mut PairWorld) {
    let request = arrive_decode(pair, Mode::Push, 100, 0);
    allocate(pair, &request, 0, 100, 10);
    arrive_prefill(pair, Mode::Push, 100, 1);
    schedule(pair, 1, 0, 100);
    pair.compute(1, 2);
    settle(pair, 1);
    let reason = FinishReason::Aborted;
    pair.decode(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
    settle(pair, 1);
    pair.compute(1, LAYERS);
    finish(pair, FinishReason::Length);
    settle(pair, 1);
}

/// A sample that the prompt does not have, and one whose prefill ends early.
fn refused(pair: &mut PairWorld) {
    arrive_decode(pair, Mode::Pull, 100, 7);
    let request = arrive_decode(pair, Mode::Pull, 100, 0);
    settle(pair, 1);
    arrive_prefill(pair, Mode::Pull, 100, 1);
    settle(pair, 1);
    schedule(pair, 1, 0, 100);
    settle(pair, 1);
    allocate(pair, &request, 0, 100, 10);
    finish(pair, FinishReason::Aborted);
    settle(pair, 1);
}

/// Operations that the peer's memory refuses.
fn failed(pair: &mut PairWorld) {
    pair.op_fate = Box::new(|_| OpResult::Fails(FabricError::RemoteAccess, Landed::Unknown));
    let request = arrive_decode(pair, Mode::Push, 100, 0);
    allocate(pair, &request, 0, 100, 10);
    arrive_prefill(pair, Mode::Push, 100, 1);
    prefill_all(pair, 100);
    settle(pair, 5);
}

/// What one side said, without repetitions: its hello, and its messages by number.
pub(crate) fn messages(
    frames: &[(Nanos, Speaker, Vec<u8>)],
    who: Speaker,
) -> BTreeMap<Option<u64>, &[u8]> {
    let mut messages = BTreeMap::new();
    for (_, from, frame) in frames {
        let number = match native::decode(frame) {
            Ok(Frame::Hello(_) | Frame::Welcome(_)) => None,
            Ok(Frame::Data { seq, .. }) => Some(seq),
            _ => continue,
        };
        if *from == who {
            messages.entry(number).or_insert(&frame[..]);
        }
    }
    messages
}

/// What both sides told their engines.
pub(crate) fn told(pair: &PairWorld) -> [Vec<String>; 2] {
    let prefill = pair.prefill_said.iter().map(serde_json::to_string);
    let decode = pair.decode_said.iter().map(serde_json::to_string);
    [prefill.map(Result::unwrap).collect(), decode.map(Result::unwrap).collect()]
}

fn path(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pair/recorded");
    folder.join(format!("{name}.txt"))
}

/// Writes what a pair of today's version says, to be kept for the versions after it.
#[test]
#[ignore = "writes files that are kept"]
fn record() {
    for (name, mode, play) in CONVERSATIONS {
        let mut pair = PairWorld::new(mode, 1, 1);
        play(&mut pair);
        let mut text = String::new();
        for (at, from, frame) in &pair.frames {
            let side = if *from == Speaker::Prefill { 'P' } else { 'D' };
            write!(text, "{side} {} ", at.0).unwrap();
            frame.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
            text.push('\n');
        }
        for (side, told) in ['p', 'd'].into_iter().zip(told(&pair)) {
            told.iter().for_each(|answer| writeln!(text, "{side} {answer}").unwrap());
        }
        std::fs::write(path(&format!("{VERSION}-{name}")), text).unwrap();
    }
}

/// The frames of a recorded connection, and what both sides told their engines.
pub(crate) struct Recorded {
    frames: Vec<(Nanos, Speaker, Vec<u8>)>,
    pub(crate) told: [Vec<String>; 2],
}

pub(crate) fn read(version: u16, name: &str) -> Recorded {
    let text = std::fs::read_to_string(path(&format!("{version}-{name}"))).unwrap();
    let mut recorded = Recorded { frames: Vec::new(), told: [Vec::new(), Vec::new()] };
    for line in text.lines() {
        let (side, rest) = line.split_once(' ').unwrap();
        match side {
            "p" => recorded.told[0].push(rest.into()),
            "d" => recorded.told[1].push(rest.into()),
            _ => {
                let who = if side == "P" { Speaker::Prefill } else { Speaker::Decode };
                let (at, hex) = rest.split_once(' ').unwrap();
                let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
                let frame = (0..hex.len()).step_by(2).map(byte).collect();
                recorded.frames.push((Nanos(at.parse().unwrap()), who, frame));
            }
        }
    }
    recorded
}

#[test]
fn a_recorded_peer_of_each_version_is_met_as_it_was() {
    for version in VERSION_MIN..=VERSION {
        CONVERSATIONS.into_iter().for_each(|conversation| meets(version, conversation));
    }
}

#[test]
fn a_pair_of_unequal_versions_says_what_the_older_one_would() {
    let (settings, newest) = (CoreSettings::default(), ChannelConfig::default());
    for older in VERSION_MIN..VERSION {
        let channel = ChannelConfig { version: older, ..newest.clone() };
        for (name, mode, play) in CONVERSATIONS {
            for (prefill, decode) in [(&channel, &newest), (&newest, &channel)] {
                let mut pair = PairWorld::unequal(mode, (&settings, prefill), (&settings, decode));
                play(&mut pair);
                settle(&mut pair, 5);
                let recorded = read(older, name);
                assert_eq!(told(&pair), recorded.told, "{name}");
                for who in [Speaker::Prefill, Speaker::Decode] {
                    let mut said = messages(&pair.frames, who);
                    let mut then = messages(&recorded.frames, who);
                    said.remove(&None);
                    then.remove(&None);
                    assert_eq!(said, then, "{name}, {who:?}: another wire");
                }
            }
        }
    }
}

/// Plays back either side of a recorded connection to today's code.
fn meets(version: u16, (name, mode, play): Conversation) {
    let recorded = read(version, name);
    let sides = [(Role::Prefill, Speaker::Prefill), (Role::Decode, Speaker::Decode)];
    for (index, (role, who)) in sides.into_iter().enumerate() {
        let (_, other) = sides[1 - index];
        let mut script = Vec::new();
        for (at, (time, from, frame)) in recorded.frames.iter().enumerate() {
            if *from == who {
                let after = messages(&recorded.frames[..at], other).len();
                script.push((*time, after, frame.clone()));
            }
        }
        let mut pair = PairWorld::new(mode, 1, 1);
        pair.play(role, script);
        play(&mut pair);
        settle(&mut pair, 5);
        assert_eq!(told(&pair)[1 - index], recorded.told[1 - index], "{name}, {role} recorded");
        let mut said = messages(&pair.frames, other);
        let mut then = messages(&recorded.frames, other);
        // The hello says which versions are spoken.
        assert!(said.remove(&None).is_some() && then.remove(&None).is_some());
        assert_eq!(said, then, "{name}, {role} recorded: another wire");
    }
}
