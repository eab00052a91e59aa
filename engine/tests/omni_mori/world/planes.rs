//! The data plane towards receivers, and what senders say and write.

use super::{OfferedRange, OmniMoriWorld, PostedWrite};
use crate::steps::{id, key, memory_desc};
use kvferry_engine::core::command::{DataCommand, DataRefusal};
use kvferry_engine::core::dialect::omni_mori::{
    ConnectorCall, PullAnswer, PullRequest, QueryAnswer,
};
use kvferry_engine::core::omni_mori::OmniMoriInput;
use kvferry_engine::fabric::*;
use std::collections::BTreeSet;

impl OmniMoriWorld {
    pub(super) fn data(&mut self, command: DataCommand) {
        match command {
            DataCommand::Open { session, remote, .. } => {
                let engine = (0..3).find(|engine| memory_desc(*engine) == remote.0);
                self.sessions.insert(session, engine.expect("a region that was named"));
                self.opens.push_back(session);
            }
            DataCommand::Close { session } => {
                for write in self.writes.iter_mut().filter(|write| write.session == session) {
                    write.is_lost = true;
                }
                self.opens.retain(|open| *open != session);
                self.sessions.remove(&session);
                self.hush();
            }
            DataCommand::Submit { op, slices, .. } if self.busy => {
                assert_eq!(slices.count(), 1);
                let refusal = DataRefusal::Submit { op, why: Refused::Busy };
                self.inputs.push_back(OmniMoriInput::Refused(refusal));
            }
            DataCommand::Submit { op, session, slices, .. } => {
                let (from, to, len) = (slices.local[0], slices.remote[0], slices.len[0]);
                let (engine, is_lost) = (self.sessions[&session], false);
                self.writes.push(PostedWrite { op, session, engine, from, to, len, is_lost });
            }
            DataCommand::Quiesce { session, ticket } => {
                self.quiesced.push((session, ticket));
                self.hush();
            }
            DataCommand::Connect { .. } | DataCommand::Disconnect { .. } => {}
            other => panic!("{other:?}"),
        }
    }

    /// Answers the tickets of sessions on which nothing moves.
    pub(super) fn hush(&mut self) {
        let moving = self.writes.iter().chain(&self.failed);
        let busy: BTreeSet<_> = moving.map(|write| write.session).collect();
        let (quiet, left) = std::mem::take(&mut self.quiesced)
            .into_iter()
            .partition(|(session, _)| !busy.contains(session));
        self.quiesced = left;
        for (session, ticket) in quiet {
            self.events.push_back(DataEvent::Quiet { session, ticket });
        }
    }

    pub(super) fn ends(&mut self, op: OpId, how: u8) {
        let cause = FabricError::QueuePair;
        let outcome = match how {
            0..=2 => Completion::Done,
            3 => Completion::Failed { cause, landed: Landed::Unknown },
            4 => Completion::Failed { cause, landed: Landed::None },
            _ => Completion::Failed { cause, landed: Landed::All },
        };
        self.events.push_back(DataEvent::Completed { op, outcome });
    }

    /// The bytes of a write get there.
    pub(super) fn lands(&mut self, write: &PostedWrite) {
        let engine = write.engine;
        let bytes = self.pool[write.from as usize..(write.from + write.len) as usize].to_vec();
        let is_offered = |range: &&OfferedRange| {
            let fits = write.to >= range.dst && write.to + write.len <= range.dst + range.len;
            let at = write.to.saturating_sub(range.dst) as usize;
            let has = |content: &Vec<u8>| content.get(at..at + bytes.len()) == Some(&bytes[..]);
            range.engine == engine && fits && self.contents[&range.key].iter().any(has)
        };
        assert!(self.offered.iter().any(|range| is_offered(&range)), "{write:?} was not offered");
        let memory = &mut self.memories[usize::from(engine)];
        memory[write.to as usize..][..bytes.len()].copy_from_slice(&bytes);
    }

    pub(super) fn sender_says(&mut self, link: LinkId, call: Option<ConnectorCall>, how: u8) {
        if how == 8 {
            self.dialled.remove(&link);
            return self.tell(OmniMoriInput::Control(ControlEvent::LinkDown { link }));
        }
        let answer = match (&call, how) {
            // It says what was not asked.
            (None, 7) => PullAnswer::Done.encode(),
            (None, _) | (_, 6) => return,
            (_, 5) => b"\x91\x05".to_vec(),
            (Some(ConnectorCall::Query { .. }), 3) => QueryAnswer::NotFound.encode(),
            (Some(ConnectorCall::Query { request_id }), how) => {
                let real = (0..3).map(key).find(|key| id(key) == *request_id);
                let size = real.map_or(0, |key| self.at_senders[&key].len() as u64);
                let data_size = match how {
                    4 => u64::MAX,
                    7 => size + 1,
                    _ => size,
                };
                let request_id = request_id.clone();
                QueryAnswer::Found { request_id, data_size, is_fast_path: false }.encode()
            }
            (Some(ConnectorCall::Pull(pull)), how) => self.sender_writes(pull, how).encode(),
        };
        if let Some((_, asked)) = self.dialled.get_mut(&link) {
            *asked = None;
        }
        self.tell(OmniMoriInput::Control(ControlEvent::Frame {
            link,
            parts: vec![vec![], answer],
        }));
    }

    pub(super) fn sender_writes(&mut self, pull: &PullRequest, how: u8) -> PullAnswer {
        let region = RegionId(u32::from_be_bytes((*pull.memory).try_into().expect("a region")));
        let key = (0..3).map(key).find(|key| id(key) == pull.request_id).expect("a key");
        let content = self.at_senders[&key].clone();
        let there = self.regions.get(&region).copied();
        let fits = content.len() as u64 == pull.length;
        match there {
            Some((at, bytes)) if fits && how < 4 && pull.dst_offset + pull.length <= bytes => {
                let at = (at + pull.dst_offset) as usize;
                self.pool[at..at + content.len()].copy_from_slice(&content);
                self.whole.insert(region);
                PullAnswer::Done
            }
            _ => PullAnswer::Failed("".into()),
        }
    }
}
