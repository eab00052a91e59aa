//! The planes of a pair: they answer in time, and move bytes where a test gives their ranks memory.

use super::setup::mori_region;
use super::{OpResult, PairInput, PairWorld, Speaker};
use kvferry_engine::core::command::{DataCommand, DataRefusal};
use kvferry_engine::core::layout::Slices;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::transfer::TransferInput;
use kvferry_engine::fabric::*;
use std::collections::BTreeMap;

/// A rank of an engine.
pub(crate) type RankId = (Role, u16);

/// When bytes are damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Before the decode digests anything: in what has arrived.
    Arrived,
    /// When the prefill has digested the byte, before it is moved.
    Digested,
}

/// Bytes to be damaged, each once.
#[derive(Clone, Debug)]
pub(crate) struct Damage {
    pub(crate) moment: Moment,
    /// Ranks, and offsets into their memory.
    pub(crate) places: Vec<(RankId, usize)>,
}

/// Memory of ranks. Ranks without any move nothing.
#[derive(Debug, Default)]
pub(crate) struct PlaneBytes {
    pub(crate) memory: BTreeMap<RankId, Vec<u8>>,
    pub(crate) damage: Option<Damage>,
    /// Ranks at the far ends of sessions.
    remote: BTreeMap<(Role, u16, SessionId), RankId>,
}

impl PlaneBytes {
    fn opened(&mut self, session: (Role, u16, SessionId), remote: &RegionDesc) {
        let far = self.memory.keys().find(|(role, rank)| *remote.0 == [*role as u8, *rank as u8]);
        if let Some(far) = far.copied() {
            self.remote.insert(session, far);
        }
    }

    fn moved(&mut self, session: (Role, u16, SessionId), direction: Direction, slices: &Slices) {
        let (role, rank, _) = session;
        let Some(far) = self.remote.get(&session).copied() else { return };
        let ranges = slices.local.iter().zip(&slices.remote).zip(&slices.len);
        for ((local, remote), len) in ranges {
            let ((from, at), (to, into)) = match direction {
                Direction::Write => (((role, rank), *local), (far, *remote)),
                Direction::Read => ((far, *remote), ((role, rank), *local)),
            };
            let (at, into, len) = (at as usize, into as usize, *len as usize);
            let bytes = self.memory[&from][at..at + len].to_vec();
            let memory = self.memory.get_mut(&to).expect("both ends have memory");
            memory[into..into + len].copy_from_slice(&bytes);
        }
    }

    /// Digests of the bytes of a rank, if it has any.
    fn digested(&mut self, of: RankId, parts: &DigestParts) -> Option<Vec<u64>> {
        self.memory.get(&of)?;
        if of.0 == Role::Decode {
            self.damage_if(Moment::Arrived, |_| true);
        }
        let memory = &self.memory[&of];
        let ranges = |part| parts.ranges(part).map(|(at, len)| at as usize..(at + len) as usize);
        let digest = |part| {
            let bytes: Vec<u8> = ranges(part).flat_map(|range| memory[range].to_vec()).collect();
            digest_of(parts.seed(part), &bytes)
        };
        let digests = (0..parts.count()).map(digest).collect();
        if of.0 == Role::Prefill {
            let covered: Vec<_> = (0..parts.count()).flat_map(ranges).collect();
            self.damage_if(Moment::Digested, |(rank, at)| {
                rank == of && covered.iter().any(|range| range.contains(&at))
            });
        }
        Some(digests)
    }

    /// Flips a bit of each byte that is to be damaged at this moment.
    fn damage_if(&mut self, moment: Moment, is_due: impl Fn((RankId, usize)) -> bool) {
        let Some(damage) = self.damage.as_mut().filter(|damage| damage.moment == moment) else {
            return;
        };
        let (due, rest) = damage.places.drain(..).partition(|place| is_due(*place));
        damage.places = rest;
        let due: Vec<(RankId, usize)> = due;
        for (rank, at) in due {
            self.memory.get_mut(&rank).expect("a rank with memory")[at] ^= 0x40;
        }
    }
}

impl PairWorld {
    pub(super) fn event(&mut self, us: u64, role: Role, rank: u16, event: DataEvent) {
        self.after(us, Speaker::Rank(role, rank), PairInput::Transfer(TransferInput::Data(event)));
    }

    pub(super) fn data(&mut self, role: Role, rank: u16, command: DataCommand) {
        match command {
            DataCommand::Register { region, .. } => {
                let result = Ok(match self.describes {
                    true => mori_region(),
                    false => RegionDesc([role as u8, rank as u8].into()),
                });
                self.event(10, role, rank, DataEvent::Registered { region, result });
            }
            DataCommand::Open { session, remote, .. } => {
                self.opens.1 += 1;
                self.bytes.opened((role, rank, session), &remote);
                self.event(self.opens.0, role, rank, DataEvent::Opened { session, result: Ok(()) });
            }
            DataCommand::Submit { op, session, slices, direction } => {
                assert!(!slices.is_empty());
                self.ops += 1;
                *self.posted.entry(slices.local[0]).or_default() += 1;
                self.moved.push(slices.clone());
                let flying = self.flying.entry((role, rank, session)).or_default();
                if flying.len() >= self.credit {
                    self.refused += 1;
                    self.counts.refused((role, rank));
                    let refused = DataRefusal::Submit { op, why: Refused::Busy };
                    let input = PairInput::Transfer(TransferInput::Refused(refused));
                    return self.after(0, Speaker::Rank(role, rank), input);
                }
                flying.push(op);
                let (ranges, bytes) = (slices.count() as u64, slices.bytes());
                let more = Credits { operations: 1, ranges, bytes };
                let used = self.used.entry((role, rank)).or_default();
                assert!(self.caps.in_all.fits(used, &more), "{more:?} beside {used:?}");
                assert!(self.caps.per_peer.fits(used, &more), "{more:?} beside {used:?}");
                assert!(ranges <= self.caps.slices_max.into());
                let us = (self.op_us)(more, *used);
                used.add(&more);
                self.bytes.moved((role, rank, session), direction, &slices);
                self.credits.insert((role, rank, op), more);
                let outcome = match (self.op_fate)(self.ops) {
                    OpResult::Done => Completion::Done,
                    OpResult::Fails(cause, landed) => Completion::Failed { cause, landed },
                    OpResult::Silent => return,
                };
                self.event(us, role, rank, DataEvent::Completed { op, outcome });
            }
            DataCommand::Close { session } => {
                let flying = self.flying.remove(&(role, rank, session)).unwrap_or_default();
                for op in flying {
                    let outcome =
                        Completion::Failed { cause: FabricError::Closed, landed: Landed::Unknown };
                    self.event(5, role, rank, DataEvent::Completed { op, outcome });
                }
            }
            DataCommand::Quiesce { session, ticket } => {
                self.tickets.push((role, rank, session, ticket));
            }
            DataCommand::Fence { peer } => {
                self.event(50, role, rank, DataEvent::Fenced { peer });
            }
            DataCommand::Digest(DigestBatch { id, parts, .. }) => {
                let result = match self.bytes.digested((role, rank), &parts) {
                    Some(digests) => Ok(digests),
                    None => (0..parts.count())
                        .map(|part| (self.digests)(role, parts.seed(part)))
                        .collect(),
                };
                self.event(self.digest_us, role, rank, DataEvent::Digested { id, result });
            }
            DataCommand::Connect { .. } | DataCommand::Disconnect { .. } => {}
        }
    }

    pub(super) fn answer_tickets(&mut self) {
        let flying = &self.flying;
        let busy = |(role, rank, session, _): &(Role, u16, SessionId, QuiesceTicket)| {
            flying.get(&(*role, *rank, *session)).is_some_and(|ops| !ops.is_empty())
        };
        let (wait, quiet): (Vec<_>, Vec<_>) = self.tickets.drain(..).partition(busy);
        self.tickets = wait;
        for (role, rank, session, ticket) in quiet {
            self.event(self.quiet_us, role, rank, DataEvent::Quiet { session, ticket });
        }
    }
}
