//! What a peer is told of a region.

use kvferry_engine::fabric::RegionId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// MoRI's descriptors of engine and memory, and which region that is to its owner.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MoriRegionGrant {
    pub(crate) region: RegionId,
    pub(crate) engine: Arc<[u8]>,
    pub(crate) memory: Arc<[u8]>,
}
