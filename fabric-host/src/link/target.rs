//! What the serving sides of both kinds of links have in common: the sessions of the peer, and how
//! the write goes whose parts are coming in.

use super::HostInboundLink;
use crate::config::DataPath;
use crate::memory::{HostMemoryAccess, HostRegion};
use crate::proto::{
    HostControlMessage, HostCopyStatus, HostOperationPart, HostRecord, HostRegionInfo, PathPolicy,
    SessionDenial,
};
use crate::shared::{HostCloseReason, WorkerContext};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Sessions that one peer may have open.
const SESSIONS_MAX: usize = 16_384;

/// Answers that wait for room before requests are left where they are.
pub(super) const ANSWERS_MAX: usize = 1_024;

/// A session of the peer: from its region to ours.
#[derive(Debug)]
pub(super) struct TargetSession {
    pub(super) region: Arc<HostRegion>,
    /// None by TCP.
    pub(super) source: Option<HostMemoryAccess>,
    pub(super) peer_len: u64,
    path: DataPath,
}

/// Which path writes take, and by what their source is reached, if not by TCP.
pub(super) type TargetRoute = (DataPath, Option<HostMemoryAccess>);

/// True if both sides take memory files.
pub(super) fn share_files(rules: [&PathPolicy; 2]) -> bool {
    rules.iter().all(|rules| rules.paths.contains(&DataPath::SharedMemory))
}

#[derive(Debug)]
pub(super) struct TargetState {
    pub(super) inbound: Arc<HostInboundLink>,
    pub(super) sessions: BTreeMap<u32, TargetSession>,
    /// How the write goes, and its bytes so far.
    pub(super) status: HostCopyStatus,
    pub(super) bytes: u64,
}

impl TargetState {
    pub(super) fn new(inbound: Arc<HostInboundLink>) -> TargetState {
        let (status, bytes) = (HostCopyStatus::Done, 0);
        TargetState { inbound, sessions: BTreeMap::new(), status, bytes }
    }

    /// Answers a request for a session, and says whose file goes with the answer.
    pub(super) fn open(
        &mut self,
        cx: &WorkerContext,
        session: u32,
        (region, token): (u32, u64),
        (local, files): (&HostRegionInfo, bool),
        route: impl FnOnce(&PathPolicy) -> Result<TargetRoute, SessionDenial>,
    ) -> (HostControlMessage, Option<Arc<HostRegion>>) {
        let deny = |why: &str| SessionDenial { why: why.into(), tcp: false };
        let open = || {
            if self.sessions.len() >= SESSIONS_MAX || self.sessions.contains_key(&session) {
                return Err(deny("session in use, or too many of them"));
            }
            let (region, place) =
                cx.hub.region(region, token).ok_or_else(|| deny("the region is not registered"))?;
            let (path, source) = route(&cx.hub.rules())?;
            let answer = (path, HostRegionInfo::of(&region, files), place);
            let known = region.clone();
            let entry = TargetSession { region, source, peer_len: local.len, path };
            self.sessions.insert(session, entry);
            Ok((answer, known))
        };
        let (result, region) = match open() {
            Ok((answer, region)) => (Ok(answer), Some(region)),
            Err(denial) => (Err(denial), None),
        };
        (HostControlMessage::Opened { session, result }, region)
    }

    /// A part of the write is for no session that is open.
    pub(super) fn refuse(&mut self) {
        if self.status == HostCopyStatus::Done {
            self.status = HostCopyStatus::Refused;
        }
    }

    /// A part has ended. With the last one, what is answered and the bytes of the write.
    pub(super) fn finish(
        &mut self,
        cx: &WorkerContext,
        part: HostOperationPart,
    ) -> Option<(HostRecord, u64)> {
        if !part.last {
            return None;
        }
        let status = std::mem::replace(&mut self.status, HostCopyStatus::Done);
        let bytes = std::mem::take(&mut self.bytes);
        if status == HostCopyStatus::Done
            && let Some(session) = self.sessions.get(&part.session)
        {
            cx.hub.counts.served[session.path as usize].add(bytes);
        }
        Some((HostRecord::Done { op: part.op, status }, bytes))
    }

    /// The link has ended: reads of the peer end, too.
    pub(super) fn end(&self, cx: &WorkerContext, why: HostCloseReason) {
        cx.hub.dismiss(self.inbound.id);
        if why == HostCloseReason::Corrupt {
            cx.hub.counts.corrupt.fetch_add(1, Ordering::Relaxed);
        }
        self.inbound.shut();
    }
}
