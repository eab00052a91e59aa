//! What it costs when a message cannot be read, however often it is sent.

use super::*;
use crate::versions::CONVERSATIONS;
use crate::world::{PairWorld, Speaker};
use kvferry_engine::core::channel::COPIES;
use kvferry_engine::core::dialect::native::{self, Frame, MessageKind};
use std::cell::Cell;
use std::rc::Rc;

/// Damages every copy of one message: number `nth` of those of its kind that a side says. Says
/// which number the message has, once it was sent.
fn spoil(
    pair: &mut PairWorld,
    (who, kind, nth): (Speaker, MessageKind, usize),
    damage: fn(&mut Vec<u8>),
) -> Rc<Cell<Option<u64>>> {
    let spoilt = Rc::new(Cell::new(None));
    let (number, mut seen) = (Rc::clone(&spoilt), Vec::new());
    pair.violations = Some(Vec::new());
    pair.alter = Box::new(move |from, mut frame| {
        if let Ok(Frame::Data { seq, message, .. }) = native::decode(&frame)
            && (from, native::kind_of(&message)) == (who, kind)
        {
            if !seen.contains(&seq) {
                seen.push(seq);
            }
            if seen.get(nth) == Some(&seq) {
                number.set(Some(seq));
                damage(&mut frame);
            }
        }
        vec![frame]
    });
    spoilt
}

/// All but its last byte can be read.
fn cut(frame: &mut Vec<u8>) {
    frame.pop();
}

/// Nothing of it can be read behind its version and kind, so that nobody knows its number.
fn behead(frame: &mut Vec<u8>) {
    frame.truncate(4);
}

/// Longer than anything waits for a message that does not come.
const LONG: u64 = 700;

/// A connection of which a message was damaged, at its end.
struct Spoilt {
    case: String,
    /// Which of [`CONVERSATIONS`] it is.
    conversation: usize,
    kind: MessageKind,
    who: Speaker,
    pair: PairWorld,
}

/// Plays all connections as often as they have a message to damage.
fn each_spoilt(damage: fn(&mut Vec<u8>), mut check: impl FnMut(&Spoilt)) {
    for (conversation, (name, mode, play)) in CONVERSATIONS.into_iter().enumerate() {
        for &kind in MessageKind::ALL {
            for (who, nth) in [(Speaker::Prefill, 0), (Speaker::Prefill, 1), (Speaker::Decode, 0)] {
                let mut pair = PairWorld::new(mode, 1, 1);
                let number = spoil(&mut pair, (who, kind, nth), damage);
                play(&mut pair);
                settle(&mut pair, LONG);
                let case = format!("{name}: {} {nth} of {who:?}", kind.name());
                if number.get().is_some() {
                    assert!(pair.at_rest(), "{case}: something waits for it");
                    check(&Spoilt { case, conversation, kind, who, pair });
                }
            }
        }
    }
}

#[test]
fn a_message_that_cannot_be_read_costs_its_transfer_and_leaves_nothing() {
    let mut spoilt = Vec::new();
    each_spoilt(cut, |Spoilt { case, kind, who, pair, .. }| {
        spoilt.push(kind.name());
        let violations = pair.violations.as_deref().unwrap();
        let sender = if *who == Speaker::Prefill { "prefill" } else { "decode" };
        assert_eq!(violations.len(), COPIES as usize, "{case}: {violations:?}");
        for violation in violations {
            assert_eq!((&*violation.peer, &*violation.frame), (sender, kind.name()));
            let cut = ["cut short", "list longer than the frame", "text longer than the frame"];
            assert!(cut.contains(&&*violation.rule), "{case}: {violation}");
        }
        assert_eq!(pair.prefill_said.len(), 1, "{case}");
    });
    let messages = MessageKind::ALL.iter().filter(|kind| !(1..14).contains(&(**kind as u8)));
    // A note is about no transfer: its connection ends.
    for kind in messages.filter(|kind| **kind != MessageKind::Payload) {
        assert!(spoilt.contains(&kind.name()), "no connection has {}", kind.name());
    }
}

#[test]
fn a_message_whose_number_cannot_be_read_ends_its_conversation_and_leaves_nothing() {
    let ended = |pair: &PairWorld| {
        let ends = |said: &&DecodeAnswer| !matches!(said, DecodeAnswer::Allocate { .. });
        (pair.prefill_said.len(), pair.decode_said.iter().filter(ends).count())
    };
    let plain = CONVERSATIONS.map(|(_, mode, play)| {
        let mut pair = PairWorld::new(mode, 1, 1);
        play(&mut pair);
        settle(&mut pair, LONG);
        ended(&pair)
    });
    let mut spoilt = 0;
    each_spoilt(behead, |Spoilt { case, conversation, pair, .. }| {
        spoilt += 1;
        assert_eq!(ended(pair), plain[*conversation], "{case}: {:?}", pair.decode_said);
    });
    assert!(spoilt > 20, "{spoilt}");
}

fn key_of(n: u32) -> TransferKey {
    TransferKey { id: format!("t{n}").into(), prompt: 0 }
}

/// Prompt `n` of 64 tokens is wanted by decode and computed by the prefill.
fn prompt(pair: &mut PairWorld, n: u32) -> RequestId {
    let (request, prefill) = (RequestId::from(format!("d-{n}")), RequestId::from(format!("p-{n}")));
    let (mode, control) = (Mode::Pull, "prefill-control".into());
    let leg = DecodeLeg::new(key_of(n), mode, "prefill".into(), control);
    let hook = DecodeHook::Arrived { request: request.clone(), leg, tokens: 64, prompt_hash: HASH };
    pair.decode(DecodeInput::Hook(hook));
    let leg = PrefillLeg::new(key_of(n), mode);
    let hook =
        PrefillHook::Arrived { request: prefill.clone(), leg, tokens: 64, prompt_hash: HASH };
    pair.prefill(PrefillInput::Hook(hook));
    let blocks = vec![BlockList::new((4 * n..4 * n + 4).collect())];
    let chunk = Chunk { request: prefill.clone(), from: 0, to: 64, blocks };
    let step = StepId(u64::from(n));
    pair.prefill(PrefillInput::Hook(PrefillHook::Scheduled { step, chunks: vec![chunk] }));
    pair.compute(u64::from(n), LAYERS);
    let reason = FinishReason::Length;
    pair.prefill(PrefillInput::Hook(PrefillHook::Finished { request: prefill, reason }));
    request
}

#[test]
fn what_comes_behind_a_message_that_cannot_be_read_is_taken() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    let number = spoil(&mut pair, (Speaker::Prefill, MessageKind::Grant, 0), cut);
    let requests: Vec<RequestId> = (1..=5).map(|n| prompt(&mut pair, n)).collect();
    settle(&mut pair, 1);
    for (n, request) in (1..).zip(&requests) {
        allocate(&mut pair, request, 0, 64, 4 * n);
    }
    settle(&mut pair, 30);
    assert!(number.get().is_some());
    let done = requests.iter().filter(|request| pair.decode_said.contains(&loaded(request)));
    assert_eq!(done.count(), 4);
    let broken = |said: &&DecodeAnswer| {
        matches!(said, DecodeAnswer::LoadFailed { failure: Failure::Violation(_), .. })
    };
    assert_eq!(pair.decode_said.iter().filter(broken).count(), 1);
    assert_eq!((pair.prefill_said.len(), pair.at_rest()), (5, true));
}

#[test]
fn a_message_that_was_damaged_on_its_way_is_sent_again() {
    for (name, mode, play) in CONVERSATIONS {
        let mut plain = PairWorld::new(mode, 1, 1);
        play(&mut plain);
        settle(&mut plain, 5);
        // All messages arrive damaged the first time, cut at another place each.
        let mut pair = PairWorld::new(mode, 1, 1);
        pair.violations = Some(Vec::new());
        let mut seen = Vec::new();
        pair.alter = Box::new(move |from, mut frame| {
            if let Ok(Frame::Data { seq, .. }) = native::decode(&frame)
                && !seen.contains(&(from, seq))
            {
                seen.push((from, seq));
                frame.truncate(frame.len() - 1 - (7 * seq as usize) % (frame.len() - 1));
            }
            vec![frame]
        });
        play(&mut pair);
        settle(&mut pair, 5);
        assert_eq!(
            (pair.prefill_said, pair.decode_said),
            (plain.prefill_said, plain.decode_said),
            "{name}"
        );
    }
}
