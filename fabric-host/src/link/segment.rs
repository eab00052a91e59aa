//! The memory that both sides of a local link share: two rings, and a word by which the serving
//! side shuts the other one out.

use crate::memory::{MemfdMapping, sealed};
use crate::ring::{AtomicU64, Ordering, words_for};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Words that a ring has for records.
const CAPACITY: usize = 1 << 16;
/// Words ahead of the rings.
const FRONT: usize = 8;
const RING: usize = words_for(CAPACITY);
const BYTES: u64 = ((FRONT + 2 * RING) * 8) as u64;

/// The memory of a local link.
#[derive(Clone, Debug)]
pub(crate) struct ShmSegment(Arc<MemfdMapping>);

/// One ring of it.
#[derive(Debug)]
pub(crate) struct ShmRing {
    map: Arc<MemfdMapping>,
    from: usize,
}

impl Deref for ShmRing {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        &self.map.words()[self.from..self.from + RING]
    }
}

impl ShmSegment {
    /// A new one, and the file for the other side.
    ///
    /// # Errors
    /// No memory.
    pub(crate) fn create() -> Result<(ShmSegment, OwnedFd), String> {
        let file = sealed("kvferry-link", BYTES)?;
        let segment = ShmSegment::map(&file)?;
        Ok((segment, file))
    }

    /// That of the other side.
    ///
    /// # Errors
    /// The file is not what a plane makes.
    pub(crate) fn map(file: &OwnedFd) -> Result<ShmSegment, String> {
        Ok(ShmSegment(Arc::new(MemfdMapping::new(file, BYTES, true)?)))
    }

    /// From the side that initiates to the side that serves.
    pub(crate) fn requests(&self) -> ShmRing {
        ShmRing { map: self.0.clone(), from: FRONT }
    }

    pub(crate) fn answers(&self) -> ShmRing {
        ShmRing { map: self.0.clone(), from: FRONT + RING }
    }

    /// Whether the serving side lets the other one in.
    pub(crate) fn set_open(&self, open: bool) {
        self.0.words()[0].store(open.into(), Ordering::SeqCst);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.words()[0].load(Ordering::SeqCst) == 1
    }
}
