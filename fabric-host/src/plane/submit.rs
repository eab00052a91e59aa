//! Taking batches.

use super::calls::invalid;
use super::{HostOperation, HostPlane, HostSessionPhase};
use crate::copy::{CopyBuffers, CopyPool, CopySlice, SliceCursor};
use crate::link::{HostLinkKind, HostReadJob, HostReadSource};
use crate::memory::HostRegion;
use crate::proto::HostCopyStatus;
use crate::worker::SHORT_MAX;
use kvferry_engine::fabric::{Completion, DataEvent, Direction, Refused, Submit};
use std::sync::Arc;

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
    pub(super) fn new(crew: Arc<CopyPool>) -> InlineCopier {
        InlineCopier { copied: 0, chunk: Vec::new(), scratch: CopyBuffers::new(crew) }
    }

    /// The owner polls.
    pub(super) fn rest(&mut self) {
        self.copied = 0;
        self.scratch.rest();
    }

    /// A whole read, by the thread that asks for it.
    fn read(
        &mut self,
        source: &HostReadSource,
        into: &HostRegion,
        (slices, bytes): (&[CopySlice], u64),
    ) -> HostCopyStatus {
        let mut cursor = SliceCursor::default();
        while !cursor.is_at_end(slices) {
            let chunk = cursor.chunk(slices, &mut self.chunk);
            match source.read((chunk, bytes), into, &mut self.scratch) {
                HostCopyStatus::Done => {}
                failed => return failed,
            }
        }
        HostCopyStatus::Done
    }
}

impl HostPlane {
    pub(super) fn post(&mut self, batch: &Submit<'_>) -> Result<(), Refused> {
        let Some(session) = self.sessions.get_mut(&batch.session) else {
            return Err(Refused::Gone);
        };
        let HostSessionPhase::Open(link, lane) = &session.phase else { return Err(Refused::Gone) };
        let count = batch.len.len();
        if batch.local.len() != count || batch.remote.len() != count {
            let (local, remote) = (batch.local.len(), batch.remote.len());
            return invalid(format!(
                "lists of different length: {local} local, {remote} remote, {count} lengths"
            ));
        }
        let most = self.hub.config.slices_max as usize;
        if count > most {
            return invalid(format!("{count} slices, {most} is the most"));
        }
        if self.operations.contains_key(&batch.op) {
            return invalid(format!("operation {} is in flight", batch.op));
        }
        let lens = [session.region.len, session.claim.len];
        let bytes = merge(batch, lens, &mut self.slices)?;
        if self.operations.len() >= self.hub.config.operations_max as usize {
            return Err(Refused::Busy);
        }
        let write = batch.direction == Direction::Write;
        let path = if write { lane.write } else { lane.read };
        if self.slices.is_empty() {
            let event = DataEvent::Completed { op: batch.op, outcome: Completion::Done };
            self.events.push_back(event);
            return Ok(());
        }
        let (op, id) = (batch.op.0, batch.session.0);
        let mut read = None;
        match (write, &lane.source) {
            (true, _) => link.write(op, id, &session.region, &self.slices),
            (false, Some(source)) if link.kind == HostLinkKind::Local => {
                let inline = self.inline_copier.copied.saturating_add(bytes);
                if inline <= self.hub.config.inline_max.into() {
                    self.inline_copier.copied = inline;
                    let slices = (&self.slices[..], bytes);
                    read = Some(self.inline_copier.read(source, &session.region, slices));
                } else {
                    link.read(HostReadJob::Copy {
                        op,
                        source: source.clone(),
                        region: session.region.clone(),
                        slices: std::mem::take(&mut self.slices),
                        bytes,
                    });
                }
            }
            (false, _) => link.fetch(op, id, &session.region, &self.slices),
        }
        let order = self.order;
        self.order += 1;
        session.operations.insert(order, batch.op);
        let region = session.local;
        let entry = HostOperation { session: batch.session, order, region, write, path, bytes };
        self.operations.insert(batch.op, entry);
        if let Some(held) = self.regions.get_mut(&region) {
            held.operations += 1;
        }
        self.short += u32::from(bytes <= SHORT_MAX);
        match read {
            Some(status) => self.completed(batch.op, status),
            None if bytes <= SHORT_MAX => self.start_busy_polling(),
            None => {}
        }
        Ok(())
    }
}
