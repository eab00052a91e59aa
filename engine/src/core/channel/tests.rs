//! Bounds of a channel: its window, what it repeats, and what it keeps of messages that came early.

use super::*;
use crate::core::ids::{Attempt, TransferKey};
use crate::core::layout::BlockList;
use crate::core::message::AttemptTag;

const LINK: LinkId = LinkId(1);
const PEER: Incarnation = Incarnation(6);
const ME: Incarnation = Incarnation(5);

fn tag(attempt: u32) -> AttemptTag {
    let key = TransferKey { id: "t".into(), prompt: 0 };
    AttemptTag { key, sibling: 0, attempt: Attempt(attempt) }
}

fn numbered(attempt: u32) -> Message {
    Message::Cancel { tag: tag(attempt) }
}

/// A channel with a link, and what it has sent so far.
struct OpenChannel {
    channel: Channel,
    out: Vec<ControlCommand>,
    delivered: Vec<Message>,
}

impl OpenChannel {
    fn new() -> OpenChannel {
        let mut channel = Channel::new(&ChannelConfig::default(), ME, 1);
        let mut out = Vec::new();
        channel.attach(Nanos::ZERO, LINK, (PEER, native::VERSION), &mut out);
        OpenChannel { channel, out, delivered: Vec::new() }
    }

    fn send(&mut self, count: u32) {
        for attempt in 0..count {
            self.channel.send(Nanos::ZERO, numbered(attempt), &mut self.out).expect("room");
        }
    }

    fn receive(&mut self, frame: Frame) -> Received {
        let delivered = &mut self.delivered;
        self.channel.receive(
            Nanos::ZERO,
            frame,
            &mut |message| delivered.push(message),
            &mut self.out,
        )
    }

    fn data(&mut self, seq: u64, message: Message) -> Received {
        let envelope = self.channel.inbound();
        self.receive(Frame::Data { envelope, seq, message })
    }

    /// Numbers of the messages that were sent since the last time.
    fn sent(&mut self) -> Vec<u64> {
        let number = |command| match command {
            ControlCommand::Send { frame, .. } => match native::decode(&frame) {
                Ok(Frame::Data { seq, .. }) => Some(seq),
                _ => None,
            },
            _ => None,
        };
        self.out.drain(..).filter_map(number).collect()
    }
}

#[test]
fn no_more_messages_are_under_way_than_the_window_has() {
    let mut near = OpenChannel::new();
    near.send(300);
    assert_eq!(near.sent(), (0..WINDOW).collect::<Vec<_>>());
    let ack = |near: &OpenChannel, next| Frame::Ack { envelope: near.channel.inbound(), next };
    let three = ack(&near, 3);
    assert_eq!(near.receive(three), Received::Progress);
    assert_eq!(near.sent(), [WINDOW, WINDOW + 1, WINDOW + 2]);
    let beyond = ack(&near, WINDOW + 4);
    assert_eq!(near.receive(beyond), Received::Violation("acknowledges what was not sent"));
}

#[test]
fn number_beyond_the_window_is_a_violation() {
    let mut near = OpenChannel::new();
    assert_eq!(near.data(WINDOW - 1, numbered(0)), Received::Nothing);
    let violation = Received::Violation("number beyond the window");
    for seq in [WINDOW, WINDOW + 1, u64::MAX] {
        assert_eq!(near.data(seq, numbered(0)), violation);
    }
    assert_eq!(near.data(0, numbered(0)), Received::Progress);
    assert_eq!(near.data(WINDOW, numbered(0)), Received::Nothing, "the window has moved");
    assert_eq!(near.data(WINDOW + 1, numbered(0)), violation);
}

#[test]
fn late_acknowledgement_repeats_a_bounded_number_of_the_oldest_messages() {
    let mut near = OpenChannel::new();
    near.send(100);
    assert_eq!(near.sent().len(), 100);
    for _ in 0..5 {
        let due = near.channel.deadline().expect("an acknowledgement is late");
        near.channel.tick(due, &mut near.out);
        assert_eq!(near.sent(), (0..BURST as u64).collect::<Vec<_>>());
    }
}

#[test]
fn last_copy_of_a_message_comes_before_the_silence_of_its_reader_is_noticed() {
    let mut near = OpenChannel::new();
    near.send(1);
    let mut copies = near.sent().len() as u32;
    let mut due = Nanos::ZERO;
    while copies < COPIES {
        due = near.channel.deadline().expect("it is not acknowledged");
        near.channel.tick(due, &mut near.out);
        copies += near.sent().len() as u32;
    }
    assert_eq!(due, Nanos::from_ms(3_550));
    assert!(due < ChannelConfig::default().silent);
}

#[test]
fn early_messages_are_kept_up_to_a_number_of_blocks_and_come_again() {
    let grant = |attempt: u32| Message::Grant {
        tag: tag(attempt),
        tokens: 1,
        blocks: vec![BlockList::new(vec![1; EARLY_BLOCKS_MAX / 4])],
        lease: Nanos::ZERO,
        digest: None,
    };
    let mut near = OpenChannel::new();
    for seq in 1..=9 {
        assert_eq!(near.data(seq, grant(seq as u32)), Received::Nothing);
    }
    assert_eq!(near.channel.early(), 3, "a list costs one more than its blocks");
    // A message without blocks is kept beside them.
    near.data(10, numbered(10));
    assert_eq!(near.channel.early(), 4);
    for seq in 0..=9 {
        near.data(seq, grant(seq as u32));
    }
    let expected: Vec<_> = (0..=9).map(grant).chain([numbered(10)]).collect();
    assert!(near.delivered == expected, "{} came", near.delivered.len());
    assert_eq!(near.channel.early(), 0);
    assert_eq!(near.channel.early_blocks, 0);
}
