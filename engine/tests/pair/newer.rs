//! An engine that meets one of a later version, which says more than this one knows.

use super::*;
use crate::versions::{CONVERSATIONS, read, told};
use crate::world::{PairWorld, Speaker};
use kvferry_engine::core::dialect::native::{self, Frame, MAGIC, VERSION};

/// Kinds that this version does not have: of a signal, and of a message.
const SIGNAL: u8 = 11;
const NOVELTY: u8 = 77;

/// Length of the MessagePack value at the start; of the types that messages are made of.
fn span(bytes: &[u8]) -> usize {
    let items = |count: usize| (0..count).fold(1, |at, _| at + span(&bytes[at..]));
    match bytes[0] {
        0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => 1,
        0x90..=0x9f => items(usize::from(bytes[0] & 0x0f)),
        0x80..=0x8f => items(2 * usize::from(bytes[0] & 0x0f)),
        0xa0..=0xbf => 1 + usize::from(bytes[0] & 0x1f),
        0xcc => 2,
        0xcd => 3,
        0xce => 5,
        0xcf => 9,
        other => panic!("{other:#x} is in no frame of these tests"),
    }
}

/// The list with one more value at its end.
fn with(list: &[u8], value: &[u8]) -> Vec<u8> {
    [&[list[0] + 1], &list[1..], value].concat()
}

/// The list with a value at its end that is of a later version.
fn longer(list: &[u8]) -> Vec<u8> {
    with(list, b"\x82\xa3new\x07\xa4more\x91\xc0")
}

/// Messages that end with what is left out where it is not wanted, but not by who adds behind it.
const OPTIONAL: [&[u8]; 4] = [b"Announce", b"Pull", b"Grant", b"Delivered"];

/// A message with a new field in its tag and one at its end.
fn grown(message: &[u8]) -> Vec<u8> {
    let name = 1 + span(&message[1..]);
    let fields = &message[name..];
    let tag = span(&fields[1..]);
    let fields = [&fields[..1], &longer(&fields[1..1 + tag]), &fields[1 + tag..]].concat();
    let fields = match OPTIONAL.contains(&&message[2..name]) {
        true => with(&fields, b"\xc0"),
        false => fields,
    };
    [&message[..name], &longer(&fields)].concat()
}

/// The frames that a later version would send instead: a hello that says so, and, while the version
/// of the connection knows of additions, a message of a new kind before each message.
fn of_later_version(frame: &[u8]) -> Vec<Vec<u8>> {
    let body = &frame[4..];
    let (head, kind) = ([MAGIC[0], MAGIC[1], frame[2]], frame[3]);
    match native::decode(frame).unwrap() {
        Frame::Hello(mut hello) => {
            hello.version = VERSION + 1;
            let frame = native::encode(&Frame::Hello(hello));
            vec![[&frame[..4], &longer(&frame[4..])].concat()]
        }
        Frame::Welcome(mut hello) => {
            hello.version = VERSION + 1;
            let frame = native::encode(&Frame::Welcome(hello));
            vec![[&frame[..4], &longer(&frame[4..])].concat()]
        }
        Frame::Data { envelope, seq, message } => {
            assert_eq!(envelope.version, VERSION, "the newest that both speak");
            let frame = native::encode_data(&envelope, 2 * seq + 1, &message);
            let envelope = &frame[5..5 + span(&frame[5..])];
            let at = 5 + envelope.len() + span(&frame[5 + envelope.len()..]);
            let changed = [&frame[..at], &grown(&frame[at..])].concat();
            let faded = |bytes: Vec<u8>| {
                let mut bytes = bytes;
                let at = bytes.windows(12).position(|text| text == b"PrefillEnded");
                if let Some(at) = at {
                    bytes[at..at + 12].copy_from_slice(b"PrefillFaded");
                }
                bytes
            };
            let number = rmp_number(2 * seq);
            let novelty = [&head[..], &[NOVELTY, 0x93], envelope, &number, b"\x81\xa4News\x91\xc0"];
            let signal = [&head[..], &[SIGNAL, 0x91], envelope].concat();
            vec![signal, novelty.concat(), faded(changed)]
        }
        Frame::Ack { .. } => vec![[&head[..], &[kind], &longer(body)].concat()],
        _ => vec![frame.to_vec()],
    }
}

fn rmp_number(number: u64) -> Vec<u8> {
    match u8::try_from(number) {
        Ok(number @ 0..0x80) => vec![number],
        Ok(number) => vec![0xcc, number],
        Err(_) => panic!("{number} messages"),
    }
}

/// An acknowledgement, in the numbers of the side that sends no new messages.
fn acknowledged(frame: Vec<u8>) -> Vec<u8> {
    match native::decode(&frame) {
        Ok(Frame::Ack { envelope, next }) => {
            native::encode(&Frame::Ack { envelope, next: next / 2 })
        }
        _ => frame,
    }
}

#[test]
fn what_a_later_version_adds_is_passed_over_and_acknowledged() {
    for (name, mode, play) in CONVERSATIONS {
        for later in [Speaker::Prefill, Speaker::Decode] {
            let mut pair = PairWorld::new(mode, 1, 1);
            pair.alter = Box::new(move |from, frame| match from == later {
                true => of_later_version(&frame),
                false => vec![acknowledged(frame)],
            });
            play(&mut pair);
            settle(&mut pair, 5);
            let mut expected = read(1, name).told;
            for answer in &mut expected[1] {
                if later == Speaker::Prefill {
                    let unknown = r#"{"Unknown":"PrefillFaded"}"#;
                    *answer = answer.replace(r#""PrefillEnded""#, unknown);
                }
            }
            assert_eq!(told(&pair), expected, "{name}, the {later:?} is of a later version");
        }
    }
}
