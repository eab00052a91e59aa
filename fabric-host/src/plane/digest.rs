//! Digests of own memory, by the owner's thread: at once as far as they are small, the rest in parts
//! between polls, so that nothing else waits long.

use crate::copy::{CHUNK_MAX, CopyBuffers, CopySlice, SliceCursor, copy};
use crate::memory::{HostMemoryAccess, HostRegion};
use kvferry_engine::fabric::{
    DataEvent, DigestBatch, DigestId, DigestParts, FabricError, digest_of,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// A batch that is being digested.
#[derive(Debug)]
struct HostDigestJob {
    id: DigestId,
    region: Arc<HostRegion>,
    parts: DigestParts,
    digests: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct HostDigests {
    jobs: VecDeque<HostDigestJob>,
    /// Bytes since the last poll.
    read: u64,
    slices: Vec<CopySlice>,
    chunk: Vec<CopySlice>,
    /// A copy of the part that is digested: others may write to the memory meanwhile.
    part: Vec<u8>,
    scratch: CopyBuffers,
}

impl HostDigests {
    pub(super) fn new(scratch: CopyBuffers) -> HostDigests {
        HostDigests {
            jobs: VecDeque::new(),
            read: 0,
            slices: Vec::new(),
            chunk: Vec::new(),
            part: Vec::new(),
            scratch,
        }
    }

    /// Takes a batch whose ranges are inside the region.
    pub(super) fn push(&mut self, region: &Arc<HostRegion>, batch: DigestBatch) {
        let DigestBatch { id, parts, .. } = batch;
        let digests = Vec::with_capacity(parts.count());
        self.jobs.push_back(HostDigestJob { id, region: region.clone(), parts, digests });
    }

    /// Works until so many bytes were read since the last poll; tells what is complete.
    pub(super) fn work(&mut self, out: &mut VecDeque<DataEvent>) {
        while self.read < CHUNK_MAX
            && let Some(job) = self.jobs.front_mut()
        {
            let (number, id) = (job.digests.len(), job.id);
            if number == job.parts.count() {
                let digests = std::mem::take(&mut job.digests);
                out.push_back(DataEvent::Digested { id, result: Ok(digests) });
                self.jobs.pop_front();
                continue;
            }
            let (region, seed) = (job.region.clone(), job.parts.seed(number));
            self.slices.clear();
            let mut to = 0;
            for (from, len) in job.parts.ranges(number) {
                self.slices.push(CopySlice { from, to, len });
                to += len;
            }
            self.read += to;
            match self.fetch(&region, to) {
                Ok(()) => {
                    let digest = digest_of(seed, &self.part[..to as usize]);
                    self.jobs.front_mut().expect("it was there").digests.push(digest);
                }
                Err(cause) => {
                    out.push_back(DataEvent::Digested { id, result: Err(cause) });
                    self.jobs.pop_front();
                }
            }
        }
    }

    /// Copies the part whose slices are listed, of so many bytes.
    fn fetch(&mut self, region: &HostRegion, bytes: u64) -> Result<(), FabricError> {
        self.part.resize(self.part.len().max(bytes as usize), 0);
        let part = HostMemoryAccess::Here { base: self.part.as_mut_ptr() as u64, map: None };
        let mut cursor = SliceCursor::default();
        while !cursor.is_at_end(&self.slices) {
            let chunk = cursor.chunk(&self.slices, &mut self.chunk);
            let _registered = region.hold().ok_or(FabricError::Closed)?;
            // SAFETY: The ranges are inside the region, which is registered as long as the guard is
            // held, and add up to the length that the buffer has at least. Nobody else has that.
            let done = unsafe { copy((chunk, bytes), &region.reach, &part, &mut self.scratch) };
            done.map_err(|_| FabricError::LocalAccess)?;
        }
        Ok(())
    }

    /// The owner polls; true if there is more to do.
    pub(super) fn rest(&mut self, out: &mut VecDeque<DataEvent>) -> bool {
        self.read = 0;
        self.scratch.rest();
        self.work(out);
        !self.jobs.is_empty()
    }
}
