//! Payloads on their way into the memory of receivers.

use super::io::PullRefusal;
use super::targets::PullTargetState;
use super::{OmniMori, OmniMoriTimer, StageTurn};
use crate::core::command::DataCommand;
use crate::core::dialect::moriio::descriptor::{MoriEngineDesc, MoriMemoryDesc};
use crate::core::dialect::omni_mori::PullRequest;
use crate::core::layout::Slices;
use crate::core::payload::PayloadKey;
use crate::fabric::{
    Completion, Direction, Landed, LinkId, OpId, Placement, QuiesceTicket, Refused, SessionId,
};
use std::sync::Arc;

/// A payload that is written into a receiver's region.
#[derive(Debug)]
pub(super) struct StagePull {
    pub(super) key: PayloadKey,
    /// Who waits for it, unless it is gone or was told that it failed.
    pub(super) link: Option<LinkId>,
    /// Name of the receiver's engine.
    engine: Arc<str>,
    session: SessionId,
    /// Where it is in the pool, and where it goes to in the region.
    from: u64,
    to: u64,
    bytes: u64,
    moved: u64,
    state: PullState,
}

#[derive(Debug)]
enum PullState {
    /// Its session is not open, or the data plane busy.
    Waiting,
    Moving {
        bytes: u64,
    },
    /// It ends like this when no byte is read or written for it any more.
    Quieting(Result<(), PullRefusal>),
}

impl StagePull {
    /// True as long as the data plane may read its slot.
    pub(super) fn is_moving(&self) -> bool {
        !matches!(self.state, PullState::Waiting)
    }
}

fn refusal(kind: &'static str, why: impl Into<String>) -> PullRefusal {
    PullRefusal { kind, why: why.into().into() }
}

impl OmniMori {
    pub(super) fn begin_pull(
        &mut self,
        link: LinkId,
        key: &PayloadKey,
        request: &PullRequest,
        turn: &mut StageTurn<'_>,
    ) {
        let checked = self.check_pull(key, request).and_then(|(engine, from)| {
            let session = self.target(&request.engine, &request.memory, turn)?;
            Ok((engine, from, session))
        });
        let (engine, from, session) = match checked {
            Ok(checked) => checked,
            Err(PullRefusal { kind, why }) => return self.refuse(link, kind, &why, turn),
        };
        let id = self.fresh();
        if let Some(offered) = self.offered(key) {
            offered.is_writing = true;
        }
        if let Some(entry) = self.links.get_mut(&link) {
            entry.pull = Some(id);
        }
        if let Some(target) = self.sessions.get_mut(&session) {
            target.users.insert(id);
        }
        let bytes = request.length;
        let until = turn.now + self.config.settings.pull_time(bytes);
        self.timers.arm(OmniMoriTimer::Pull(id), until);
        let pull = StagePull {
            key: key.clone(),
            link: Some(link),
            engine,
            session,
            from,
            to: request.dst_offset,
            bytes,
            moved: 0,
            state: PullState::Waiting,
        };
        self.pulls.insert(id, pull);
        self.advance(id, turn);
    }

    /// The name of the receiver's engine, and where the payload is in the pool.
    fn check_pull(
        &mut self,
        key: &PayloadKey,
        request: &PullRequest,
    ) -> Result<(Arc<str>, u64), PullRefusal> {
        let engine = MoriEngineDesc::decode(&request.engine)
            .map_err(|why| refusal("descriptor", format!("engine_desc_packed: {why}")))?;
        let (_, memory) = MoriMemoryDesc::decode(&request.memory)
            .map_err(|why| refusal("descriptor", format!("mem_desc_packed: {why}")))?;
        if memory.engine_key != engine.key {
            return Err(refusal("descriptor", "the region is of another engine"));
        }
        let &PullRequest { dst_offset, length, .. } = request;
        if dst_offset.checked_add(length).is_none_or(|end| end > memory.size) {
            let size = memory.size;
            let why = format!(
                "dst_offset {dst_offset} and length {length} are not within the region of {size} bytes"
            );
            return Err(refusal("region", why));
        }
        let Some(offered) = self.offered(key) else {
            return Err(refusal("unknown", "there is no such payload, or not yet"));
        };
        if offered.payload.bytes != length {
            let bytes = offered.payload.bytes;
            let why = format!("length {length}, the payload has {bytes} bytes");
            return Err(refusal("length", why));
        }
        if offered.is_writing {
            return Err(refusal("in-use", "it is being written for another pull"));
        }
        if offered.taken_by.as_ref().is_some_and(|by| *by != engine.key) {
            return Err(refusal("in-use", "another receiver has it"));
        }
        Ok((engine.key, offered.payload.at))
    }

    /// Posts what comes next of a pull, or ends it.
    pub(super) fn advance(&mut self, id: u64, turn: &mut StageTurn<'_>) {
        let op = OpId(self.fresh());
        let caps = &self.config.caps;
        let most = caps.per_peer.bytes.min(caps.in_all.bytes) / 2;
        let most = most.clamp(1, self.config.settings.operation_bytes_max);
        let Some(pull) = self.pulls.get_mut(&id).filter(|pull| !pull.is_moving()) else { return };
        if pull.moved == pull.bytes {
            return match caps.placement {
                Placement::OnCompletion => self.end_pull(id, Ok(()), turn),
                Placement::OnQuiet => self.quiesce_pull(id, Ok(()), turn),
            };
        }
        match self.sessions.get(&pull.session).map(|target| target.state) {
            Some(PullTargetState::Opening) => {}
            Some(PullTargetState::Open) => {
                let bytes = most.min(pull.bytes - pull.moved);
                let mut slices = Slices::default();
                slices.push(pull.from + pull.moved, pull.to + pull.moved, bytes);
                pull.state = PullState::Moving { bytes };
                let (session, direction) = (pull.session, Direction::Write);
                self.operations.insert(op, id);
                turn.push(DataCommand::Submit { op, session, direction, slices });
            }
            Some(PullTargetState::Retired | PullTargetState::Closed) | None => {
                self.end_pull(id, Err(refusal("fabric", "the receiver's region is gone")), turn);
            }
        }
    }

    pub(super) fn completed(&mut self, op: OpId, outcome: Completion, turn: &mut StageTurn<'_>) {
        let Some(id) = self.operations.remove(&op) else { return };
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let PullState::Moving { bytes } = pull.state else { return };
        match outcome {
            Completion::Done => {
                pull.moved += bytes;
                pull.state = PullState::Waiting;
                self.advance(id, turn);
            }
            Completion::Failed { cause, landed } => {
                let session = pull.session;
                let why = refusal("fabric", format!("the write failed: {cause}"));
                self.retire(session);
                match landed {
                    Landed::Unknown => self.quiesce_pull(id, Err(why), turn),
                    Landed::None | Landed::All => self.end_pull(id, Err(why), turn),
                }
            }
        }
    }

    pub(super) fn not_submitted(&mut self, op: OpId, why: Refused, turn: &mut StageTurn<'_>) {
        let Some(id) = self.operations.remove(&op) else { return };
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if !matches!(pull.state, PullState::Moving { .. }) {
            return;
        }
        pull.state = PullState::Waiting;
        if why == Refused::Busy {
            let at = turn.now + self.config.settings.busy;
            return self.timers.arm(OmniMoriTimer::Busy(id), at);
        }
        let session = pull.session;
        self.retire(session);
        self.end_pull(id, Err(refusal("fabric", format!("the write: {why}"))), turn);
    }

    fn quiesce_pull(&mut self, id: u64, end: Result<(), PullRefusal>, turn: &mut StageTurn<'_>) {
        let ticket = QuiesceTicket(self.fresh());
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        pull.state = PullState::Quieting(end);
        self.tickets_of_pulls.insert(ticket, id);
        turn.push(DataCommand::Quiesce { session: pull.session, ticket });
    }

    pub(super) fn quiet(&mut self, ticket: QuiesceTicket, turn: &mut StageTurn<'_>) {
        let Some(id) = self.tickets_of_pulls.remove(&ticket) else { return };
        let state = self.pulls.get_mut(&id).map(|pull| &mut pull.state);
        if let Some(PullState::Quieting(end)) = state {
            let end = end.clone();
            self.end_pull(id, end, turn);
        }
    }

    /// The receiver does not wait any longer. The slot does, until the data plane is done with it.
    pub(super) fn pull_overdue(&mut self, id: u64, turn: &mut StageTurn<'_>) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let (session, link) = (pull.session, pull.link.take());
        let late = refusal("timeout", "the write takes too long");
        self.retire(session);
        if let Some(link) = link {
            self.refuse(link, late.kind, &late.why, turn);
        }
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        match pull.state {
            PullState::Waiting => self.end_pull(id, Err(late), turn),
            PullState::Moving { .. } => {
                self.quiesce_pull(id, Err(late), turn);
                self.close_target(session, turn);
            }
            PullState::Quieting(_) => self.close_target(session, turn),
        }
    }

    /// Ends the pulls of a session for which nothing moves.
    pub(super) fn fail_waiting(&mut self, session: SessionId, why: &str, turn: &mut StageTurn<'_>) {
        let Some(target) = self.sessions.get(&session) else { return };
        for id in target.users.clone() {
            if self.pulls.get(&id).is_some_and(|pull| !pull.is_moving()) {
                self.end_pull(id, Err(refusal("fabric", why)), turn);
            }
        }
    }

    /// No byte is read or written for a pull any more.
    pub(super) fn end_pull(
        &mut self,
        id: u64,
        end: Result<(), PullRefusal>,
        turn: &mut StageTurn<'_>,
    ) {
        let Some(pull) = self.pulls.remove(&id) else { return };
        self.timers.cancel(&OmniMoriTimer::Pull(id));
        self.timers.cancel(&OmniMoriTimer::Busy(id));
        self.unuse_target(pull.session, id, turn);
        match end {
            Ok(()) => self.pull_done(&pull.key, (pull.link, pull.engine), turn),
            Err(refusal) => self.pull_failed(&pull.key, (pull.link, refusal), turn),
        }
    }

    /// The data plane was built anew: whatever moved does not any more.
    pub(super) fn end_all_pulls(&mut self, turn: &mut StageTurn<'_>) {
        self.operations.clear();
        self.tickets_of_pulls.clear();
        for id in self.pulls.keys().copied().collect::<Vec<_>>() {
            self.end_pull(id, Err(refusal("fabric", "the data plane was built anew")), turn);
        }
    }
}
