//! Taking batches.

use super::{HostLinkBundle, HostOperation, HostPlane};
use crate::copy::{CopyBuffers, CopyPool, CopySlice, SliceCursor, cut};
use crate::link::{HostReadJob, HostReadSource};
use crate::memory::HostRegion;
use crate::proto::{HostCopyStatus, HostOperationPart, HostRecord};
use crate::shared::SHORT_MAX;
use kvferry_engine::fabric::{Completion, DataEvent, Direction, Refused, Submit};
use kvferry_fabric_common::invalid;
use std::sync::Arc;

/// Fewer bytes are not worth another thread of each side.
const SHARE_MIN: u64 = 512 << 10;

/// The slices of a batch, seen from who copies; neighbours that go on on both sides are one.
fn merge(
    batch: &Submit<'_>,
    [local_len, remote_len]: [u64; 2],
    slices: &mut Vec<CopySlice>,
) -> Result<u64, Refused> {
    slices.clear();
    let mut bytes = 0_u64;
    let write = batch.direction == Direction::Write;
    for ((&local, &remote), &len) in batch.local.iter().zip(batch.remote).zip(batch.len) {
        for (side, at, end) in [("local", local, local_len), ("remote", remote, remote_len)] {
            if at.checked_add(len).is_none_or(|to| to > end) {
                return invalid(format!("{side} range {at}+{len} in a region of {end} bytes"));
            }
        }
        if len == 0 {
            continue;
        }
        bytes = bytes.saturating_add(len);
        let (from, to) = if write { (local, remote) } else { (remote, local) };
        match slices.last_mut() {
            Some(last) if last.from + last.len == from && last.to + last.len == to => {
                last.len += len;
            }
            _ => slices.push(CopySlice { from, to, len }),
        }
    }
    Ok(bytes)
}

/// What the owner copies with.
#[derive(Debug)]
pub(super) struct InlineCopier {
    /// Bytes since the last poll.
    copied: u64,
    chunk: Vec<CopySlice>,
    scratch: CopyBuffers,
}

impl InlineCopier {
    pub(super) fn new(pool: Arc<CopyPool>) -> InlineCopier {
        InlineCopier { copied: 0, chunk: Vec::new(), scratch: CopyBuffers::new(pool) }
    }

    pub(super) fn rest(&mut self) {
        self.copied = 0;
        self.scratch.rest();
    }

    /// A whole read, by the thread that asks for it.
    ///
    /// # Safety
    /// The slices are inside the source and the region.
    unsafe fn read(
        &mut self,
        source: &HostReadSource,
        into: &HostRegion,
        (slices, bytes): (&[CopySlice], u64),
    ) -> HostCopyStatus {
        let mut cursor = SliceCursor::default();
        while !cursor.is_at_end(slices) {
            let chunk = cursor.chunk(slices, &mut self.chunk);
            // SAFETY: The caller promises it of all the slices.
            match unsafe { source.read((chunk, bytes), into, &mut self.scratch) } {
                HostCopyStatus::Done => {}
                failed => return failed,
            }
        }
        HostCopyStatus::Done
    }
}

/// Posts an operation by the links that share it; to how many. Short ones take turns.
fn post_shares(
    links: &HostLinkBundle,
    (kind, op, session): (fn(HostOperationPart) -> HostRecord, u64, u32),
    region: &Arc<HostRegion>,
    (slices, bytes): (&mut Vec<CopySlice>, u64),
) -> u32 {
    let count = (bytes / SHARE_MIN).clamp(1, links.len() as u64);
    let turns = links.iter().cycle().skip(op as usize % links.len());
    let (mut posted, mut start) = (0, 0);
    for (left, link) in (0..count).rev().zip(turns) {
        let end = if left == 0 { slices.len() } else { cut(slices, start, bytes / count) };
        if end > start {
            link.post(kind, (op, session), region, &slices[start..end]);
            posted += 1;
        }
        start = end;
    }
    posted
}

impl HostPlane {
    pub(super) fn post(&mut self, batch: &Submit<'_>) -> Result<(), Refused> {
        let (slices_max, most) = (self.hub.config.slices_max, self.hub.config.operations_max);
        let (session, (links, lane)) = self.ledger.check_submit(batch, slices_max)?;
        let bytes = merge(batch, session.lens, &mut self.slices)?;
        if self.ledger.operations.len() >= most as usize {
            return Err(Refused::Busy);
        }
        let write = batch.direction == Direction::Write;
        let path = if write { lane.write } else { lane.read };
        if self.slices.is_empty() {
            let event = DataEvent::Completed { op: batch.op, outcome: Completion::Done };
            self.ledger.events.push_back(event);
            return Ok(());
        }
        let (op, id, region) = (batch.op.0, batch.session.0, &session.own.region);
        let (mut read, mut shares) = (None, 1);
        match (write, &lane.source) {
            (false, Some(source)) => {
                let inline = self.inline_copier.copied.saturating_add(bytes);
                if inline <= self.hub.config.inline_max.into() {
                    self.inline_copier.copied = inline;
                    let slices = (&self.slices[..], bytes);
                    // SAFETY: `merge` has found them inside both regions, and a session is not
                    // opened whose source is shorter than it says.
                    read = Some(unsafe { self.inline_copier.read(source, region, slices) });
                } else {
                    links[0].read(HostReadJob::Copy {
                        op,
                        source: source.clone(),
                        region: region.clone(),
                        slices: std::mem::take(&mut self.slices),
                        bytes,
                    });
                }
            }
            _ => {
                let kind = if write { HostRecord::Write } else { HostRecord::Read };
                shares = post_shares(links, (kind, op, id), region, (&mut self.slices, bytes));
            }
        }
        let status = HostCopyStatus::Done;
        self.ledger.submitted(batch, HostOperation { write, path, bytes, shares, status });
        self.short += u32::from(bytes <= SHORT_MAX);
        match read {
            Some(status) => self.completed(batch.op, status),
            None if bytes <= SHORT_MAX => self.start_busy_polling(),
            None => {}
        }
        Ok(())
    }
}
