//! Transfers that name their two regions, in place of a session.

use crate::desc::CompatMemoryDesc;
use crate::engine::CompatEngine;
use crate::error::CompatError;
use crate::session::CompatSession;
use crate::status::{CompatFailure, CompatStatusCode, CompatTransferStatus};
use kvferry_engine::fabric::Direction;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One batch between two regions; offsets and lengths in bytes.
#[derive(Clone, Debug)]
pub struct CompatRequest {
    /// Of this engine.
    pub local: CompatMemoryDesc,
    /// Of a registered peer.
    pub remote: CompatMemoryDesc,
    pub local_offsets: Vec<u64>,
    pub remote_offsets: Vec<u64>,
    pub sizes: Vec<u64>,
    /// The caller's number of it.
    pub uid: u64,
}

/// Sessions that were opened for requests, by the bytes of their regions.
#[derive(Debug, Default)]
pub(crate) struct KeptSessions(Mutex<HashMap<[Vec<u8>; 2], Arc<CompatSession>>>);

impl KeptSessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<[Vec<u8>; 2], Arc<CompatSession>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops those that can do nothing any more.
    pub(crate) fn prune(&self) {
        self.lock().retain(|_, session| !session.is_stale());
    }
}

impl CompatEngine {
    /// Posts all of some requests. Sessions are opened at the first request between two regions, all
    /// of them before anything is posted, and kept. What cannot be posted is in the status, as with
    /// MoRI, where a peer or region that is not registered is a bad state.
    ///
    /// # Errors
    /// `Plane` if a peer cannot be reached; nothing was posted.
    pub fn post(
        &self,
        direction: Direction,
        requests: Vec<CompatRequest>,
    ) -> Result<Vec<Arc<CompatTransferStatus>>, CompatError> {
        let mut sessions = Vec::with_capacity(requests.len());
        for request in &requests {
            sessions.push(match self.session(&request.local, &request.remote) {
                Err(CompatError::Argument(why)) => Err(why),
                other => Ok(other?),
            });
        }
        let posted = sessions.into_iter().zip(requests).map(|(session, request)| {
            let CompatRequest { local_offsets, remote_offsets, sizes, uid, .. } = request;
            session.map_or_else(
                |why| {
                    let status = CompatTransferStatus::under_way();
                    status.settle(Err(CompatFailure::new(CompatStatusCode::BadState, why)));
                    Arc::new(status)
                },
                |session| session.post(direction, local_offsets, remote_offsets, sizes, uid),
            )
        });
        Ok(posted.collect())
    }

    /// The session that is kept for two regions, or a new one.
    fn session(
        &self,
        local: &CompatMemoryDesc,
        remote: &CompatMemoryDesc,
    ) -> Result<Arc<CompatSession>, CompatError> {
        let key = [local.pack().to_vec(), remote.pack().to_vec()];
        if let Some(session) = self.kept.lock().get(&key).filter(|session| !session.is_stale()) {
            return Ok(session.clone());
        }
        self.kept.prune();
        // Others go on meanwhile; two that open the same keep one of them.
        let session = Arc::new(self.create_session(local, remote)?);
        Ok(self.kept.lock().entry(key).or_insert(session).clone())
    }
}
