//! Transfers whose KV nobody fetches any more, as told to the prefill that holds it.

use crate::core::command::ControlCommand;
use crate::core::dialect::native::{self, Frame};
use crate::core::ids::TransferKey;
use crate::fabric::LinkId;
use std::collections::VecDeque;

/// Times that each key is told. It is not acknowledged: what is lost that often is freed by its
/// lease.
const TIMES: u8 = 3;

/// Keys remembered per instance; of more the oldest are left to their leases.
pub(super) const KEYS_MAX: usize = 1024;

/// What one prefill is still to be told, on the link of its registrations.
#[derive(Clone, Debug, Default)]
pub(super) struct AbandonQueue {
    link: Option<LinkId>,
    keys: VecDeque<(TransferKey, u8)>,
}

impl AbandonQueue {
    /// Tells the instance of a key, if it has a link.
    pub(super) fn add(&mut self, key: TransferKey) -> Option<ControlCommand> {
        if self.keys.len() == KEYS_MAX {
            self.keys.pop_front();
        }
        self.keys.push_back((key.clone(), TIMES));
        let link = self.link?;
        Some(tell(link, vec![key]))
    }

    /// A registration came over a link: tells the instance what it may have missed.
    pub(super) fn repeat(&mut self, link: LinkId) -> Option<ControlCommand> {
        self.link = Some(link);
        let keys: Vec<_> = self.keys.iter().map(|(key, _)| key.clone()).collect();
        self.keys.retain_mut(|(_, left)| {
            *left -= 1;
            *left > 0
        });
        (!keys.is_empty()).then(|| tell(link, keys))
    }

    /// Keys that it is still to be told.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// A link is down.
    pub(super) fn unlink(&mut self, link: LinkId) {
        if self.link == Some(link) {
            self.link = None;
        }
    }
}

fn tell(link: LinkId, keys: Vec<TransferKey>) -> ControlCommand {
    ControlCommand::Send { link, frame: native::encode(&Frame::Abandon { keys }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(prompt: u32) -> TransferKey {
        TransferKey { id: "t".into(), prompt }
    }

    fn keys(command: Option<ControlCommand>) -> Vec<u32> {
        match command {
            Some(ControlCommand::Send { frame, .. }) => match native::decode(&frame) {
                Ok(Frame::Abandon { keys }) => keys.iter().map(|key| key.prompt).collect(),
                other => panic!("not an abandon: {other:?}"),
            },
            _ => Vec::new(),
        }
    }

    #[test]
    fn keys_are_told_at_once_and_again_with_the_next_registrations() {
        let mut abandoned = AbandonQueue::default();
        assert!(keys(abandoned.add(key(1))).is_empty(), "there is no link yet");
        assert_eq!(keys(abandoned.repeat(LinkId(7))), [1]);
        assert_eq!(keys(abandoned.add(key(2))), [2]);
        assert_eq!(keys(abandoned.repeat(LinkId(7))), [1, 2]);
        assert_eq!(keys(abandoned.repeat(LinkId(7))), [1, 2]);
        assert_eq!(keys(abandoned.repeat(LinkId(7))), [2]);
        assert!(keys(abandoned.repeat(LinkId(7))).is_empty());
        abandoned.unlink(LinkId(7));
        assert!(keys(abandoned.add(key(3))).is_empty());
    }

    #[test]
    fn the_oldest_keys_are_left_to_their_leases() {
        let mut abandoned = AbandonQueue::default();
        for prompt in 0..KEYS_MAX as u32 + 5 {
            abandoned.add(key(prompt));
        }
        let told = keys(abandoned.repeat(LinkId(1)));
        assert_eq!((told.len(), told[0]), (KEYS_MAX, 5));
    }
}
