//! The life of an operation: queued, submitted, completed, retried.

use super::flow::Local;
use super::session::SessionState;
use super::{Out, Timer, Transfer, Waiter};
use crate::core::command::DataCommand;
use crate::core::error::Failure;
use crate::core::ids::{FlowId, PeerSlot};
use crate::core::layout::{Mismatch, Slices, Span};
use crate::core::message::Role;
use crate::core::time::Nanos;
use crate::fabric::{Cause, Direction, Landed, OpId, Outcome, Refused, SessionId};

/// Tokens of a unit that one operation (or a few, if there are many slices) moves.
#[derive(Clone, Debug)]
pub(super) struct Post {
    pub(super) flow: FlowId,
    unit: usize,
    from: u32,
    to: u32,
    /// Slices `.0..` of the plan, when the operation would exceed the slice limit.
    skip: usize,
    tries: u32,
}

impl Post {
    pub(super) fn new(flow: FlowId, unit: usize, from: u32, to: u32) -> Post {
        Post { flow, unit, from, to, skip: 0, tries: 0 }
    }
}

/// An operation that the data plane has accepted.
#[derive(Debug)]
pub(super) struct Op {
    post: Post,
    peer: PeerSlot,
    index: usize,
    session: SessionId,
    bytes: u64,
}

impl Transfer {
    /// Submits queued posts while there is credit.
    pub(super) fn pump(&mut self, now: Nanos, out: &mut Out) {
        while !self.busy && self.ops.len() < self.config.settings.operations_max as usize {
            let Some(post) = self.queue.pop_front() else { break };
            self.submit(now, post, out);
        }
    }

    fn submit(&mut self, now: Nanos, mut post: Post, out: &mut Out) {
        let Some(flow) = self.flows.get_mut(&post.flow) else { return };
        if flow.ending.is_some() {
            return;
        }
        let Some(peer) = self.peers.get_mut(&flow.peer) else { return };
        let unit = &peer.units[post.unit];
        let session = &mut peer.sessions[unit.session];
        if session.state != SessionState::Open {
            session.pending.push_back(post);
            return;
        }
        let local = match &flow.local {
            Local::Blocks(blocks) => blocks.as_slice(),
            Local::Source(id) => self.sources.get(id).map_or(&[][..], |s| s.blocks.as_slice()),
        };
        self.scratch.clear();
        let planned = match (local.get(unit.group), flow.remote.get(unit.group)) {
            (Some(local), Some(remote)) => {
                let span = Span { group: unit.group, from: post.from, to: post.to, local, remote };
                unit.plan(&peer.routes, span, flow.tokens, &mut self.scratch)
            }
            _ => Err(Mismatch(format!("no block list for group {}", unit.group).into())),
        };
        if let Err(mismatch) = planned {
            return self.fail_flow(now, post.flow, Failure::Mismatch(mismatch), true, out);
        }
        let count = self.scratch.count();
        if post.skip >= count {
            return self.settle_post(now, post.flow, 0, out);
        }
        let end = count.min(post.skip + self.config.settings.slices_max as usize);
        let slices = part(&self.scratch, post.skip..end);
        if end < count {
            flow.outstanding += 1;
            self.queue.push_front(Post { skip: end, ..post.clone() });
        }
        if !flow.touched.contains(&session.id) {
            flow.touched.push(session.id);
        }
        if session.in_flight == 0 {
            session.progress = now;
            self.timers.arm_if_idle(Timer::Stalled(session.id), now + self.config.settings.stall);
        }
        session.in_flight += 1;
        let (id, index, peer) = (session.id, unit.session, flow.peer);
        let direction = match self.config.role {
            Role::Prefill => Direction::Write,
            Role::Decode => Direction::Read,
        };
        let op = OpId(self.fresh());
        post.tries += 1;
        let bytes = slices.bytes();
        self.ops.insert(op, Op { post, peer, index, session: id, bytes });
        out.push(DataCommand::Submit { op, session: id, direction, slices });
    }

    /// Takes an operation off the books of its session.
    fn take_op(&mut self, now: Nanos, id: OpId) -> Option<Op> {
        let Some(op) = self.ops.remove(&id) else {
            self.violations += 1;
            return None;
        };
        if let Some(peer) = self.peers.get_mut(&op.peer)
            && let Some(session) = peer.sessions.get_mut(op.index)
            && session.id == op.session
        {
            session.in_flight -= 1;
            session.progress = now;
        }
        Some(op)
    }

    pub(super) fn completed(&mut self, now: Nanos, id: OpId, outcome: Outcome, out: &mut Out) {
        let Some(op) = self.take_op(now, id) else { return };
        self.busy = false;
        match outcome {
            Outcome::Done | Outcome::Failed { landed: Landed::All, .. } => {
                self.session_works(op.peer, op.index);
                self.settle_post(now, op.post.flow, op.bytes, out);
            }
            Outcome::Failed { cause, landed } => self.op_failed(now, op, cause, landed, out),
        }
    }

    fn op_failed(&mut self, now: Nanos, op: Op, cause: Cause, landed: Landed, out: &mut Out) {
        if matches!(cause, Cause::QueuePair | Cause::PeerGone) {
            self.session_died(now, op.session, cause.clone(), out);
        }
        let alive = self.flows.get(&op.post.flow).is_some_and(|flow| flow.ending.is_none());
        if !alive {
            return;
        }
        if op.post.tries > self.config.settings.retries_max {
            return self.fail_flow(now, op.post.flow, Failure::Fabric(cause), true, out);
        }
        match landed {
            Landed::None => self.retry(op.post),
            _ => self.quiesce(now, op.session, Waiter::Retry(op.post), out),
        }
    }

    /// Puts a post that failed and is quiet back in front of the queue. Rewriting the same bytes
    /// into the same blocks is harmless while the flow lives.
    pub(super) fn retry(&mut self, post: Post) {
        self.queue.push_front(post);
    }

    pub(super) fn submit_refused(&mut self, now: Nanos, id: OpId, why: Refused, out: &mut Out) {
        let Some(mut op) = self.take_op(now, id) else { return };
        match why {
            Refused::Busy => {
                op.post.tries -= 1;
                self.queue.push_front(op.post);
                self.busy = true;
                self.timers.arm_if_idle(Timer::Busy, now + self.config.settings.busy_delay);
            }
            Refused::Gone => {
                self.session_died(now, op.session, Cause::QueuePair, out);
                if op.post.tries > self.config.settings.retries_max {
                    let failure = Failure::Fabric(Cause::QueuePair);
                    self.fail_flow(now, op.post.flow, failure, true, out);
                } else {
                    self.queue.push_front(op.post);
                }
            }
            why => self.fail_flow(now, op.post.flow, Failure::Refused(why), true, out),
        }
    }
}

/// A copy of some of the slices, with exact capacity.
fn part(all: &Slices, range: std::ops::Range<usize>) -> Slices {
    Slices {
        local: all.local[range.clone()].to_vec(),
        remote: all.remote[range.clone()].to_vec(),
        len: all.len[range].to_vec(),
    }
}
