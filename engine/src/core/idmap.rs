//! The boundary between the request ids of one engine and the transfers they take part in.

use super::error::Failure;
use super::ids::{RequestId, TransferKey};
use std::collections::BTreeMap;

/// A two-way map between requests of one engine and (transfer, sample). Both sides are unique.
#[derive(Clone, Debug, Default)]
pub struct IdMap {
    by_request: BTreeMap<RequestId, (TransferKey, u32)>,
    by_transfer: BTreeMap<(TransferKey, u32), RequestId>,
}

impl IdMap {
    /// Ties a request to a sample of a transfer (0 if the engine serves all samples at once).
    ///
    /// # Errors
    /// `DuplicateKey` if either is tied already; nothing changes then.
    pub fn insert(
        &mut self,
        request: RequestId,
        key: TransferKey,
        sibling: u32,
    ) -> Result<(), Failure> {
        let transfer = (key, sibling);
        if self.by_request.contains_key(&request) || self.by_transfer.contains_key(&transfer) {
            return Err(Failure::DuplicateKey);
        }
        self.by_request.insert(request.clone(), transfer.clone());
        self.by_transfer.insert(transfer, request);
        Ok(())
    }

    /// The transfer and sample of a request.
    pub fn transfer(&self, request: &RequestId) -> Option<&(TransferKey, u32)> {
        self.by_request.get(request)
    }

    /// The request of a transfer and sample.
    pub fn request(&self, transfer: &(TransferKey, u32)) -> Option<&RequestId> {
        self.by_transfer.get(transfer)
    }

    /// Unties a request; returns what it was tied to.
    pub fn remove_request(&mut self, request: &RequestId) -> Option<(TransferKey, u32)> {
        let transfer = self.by_request.remove(request)?;
        self.by_transfer.remove(&transfer);
        Some(transfer)
    }

    /// Unties a transfer and sample; returns the request it was tied to.
    pub fn remove_transfer(&mut self, transfer: &(TransferKey, u32)) -> Option<RequestId> {
        let request = self.by_transfer.remove(transfer)?;
        self.by_request.remove(&request);
        Some(request)
    }

    pub fn len(&self) -> usize {
        self.by_request.len()
    }

    /// True if nothing is tied.
    pub fn is_empty(&self) -> bool {
        self.by_request.is_empty()
    }
}
