//! A line of JSON for each finished transfer, so that a test can see which bytes are where.

use crate::error::CompatError;
use crate::status::{CompatFailure, CompatStatusCode};
use kvferry_engine::fabric::Direction;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// What a transfer was asked to move; offsets and lengths in bytes.
#[derive(Debug)]
pub(crate) struct AuditRecord {
    pub(crate) uid: u64,
    pub(crate) direction: Direction,
    pub(crate) peer: Arc<str>,
    /// First byte of the local region in this process.
    pub(crate) base: u64,
    pub(crate) local: Vec<u64>,
    pub(crate) remote: Vec<u64>,
    pub(crate) len: Vec<u64>,
}

#[derive(Serialize)]
struct AuditLine<'a> {
    engine: &'a str,
    peer: &'a str,
    uid: u64,
    direction: &'a str,
    slices: usize,
    bytes: u64,
    /// Lowest offset and end of what is touched in the local and in the remote region.
    local: (u64, u64),
    remote: (u64, u64),
    error: Option<&'a str>,
    /// SHA-256 of the local slices in the order of the call, after the transfer.
    sha256: String,
}

/// The file that `KVFERRY_AUDIT` names.
#[derive(Debug)]
pub(crate) struct AuditLog {
    engine: Arc<str>,
    file: Mutex<File>,
}

impl AuditLog {
    /// Opens the file to append to it.
    ///
    /// # Errors
    /// `Setting` if it cannot be written.
    pub(crate) fn open(path: &Path, engine: &Arc<str>) -> Result<AuditLog, CompatError> {
        let file = File::options().create(true).append(true).open(path).map_err(|why| {
            CompatError::Setting(format!("KVFERRY_AUDIT={}: cannot append: {why}", path.display()))
        })?;
        Ok(AuditLog { engine: engine.clone(), file: Mutex::new(file) })
    }

    /// Appends the line of a transfer.
    ///
    /// # Errors
    /// `RdmaOp` if the line cannot be written: whoever audits misses no transfer.
    pub(crate) fn write(
        &self,
        record: &AuditRecord,
        verdict: &Result<(), CompatFailure>,
    ) -> Result<(), CompatFailure> {
        let line = AuditLine {
            engine: &self.engine,
            peer: &record.peer,
            uid: record.uid,
            direction: match record.direction {
                Direction::Read => "read",
                Direction::Write => "write",
            },
            slices: record.len.len(),
            bytes: record.len.iter().sum(),
            local: extent(&record.local, &record.len),
            remote: extent(&record.remote, &record.len),
            error: verdict.as_ref().err().map(|failure| failure.message.as_str()),
            sha256: record.digest(),
        };
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        text.push(b'\n');
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // One write, so that several processes can share the file.
        file.write_all(&text).map_err(|why| {
            CompatFailure::new(CompatStatusCode::RdmaOp, format!("KVFERRY_AUDIT: {why}"))
        })
    }
}

/// The lowest offset and the end of the highest range.
fn extent(offsets: &[u64], len: &[u64]) -> (u64, u64) {
    let ends = offsets.iter().zip(len).map(|(at, len)| at + len);
    (offsets.iter().copied().min().unwrap_or(0), ends.max().unwrap_or(0))
}

impl AuditRecord {
    fn digest(&self) -> String {
        let mut digest = Sha256::new();
        let mut copy = Vec::new();
        for (at, len) in self.local.iter().zip(&self.len) {
            copy.resize(*len as usize, 0);
            // SAFETY: the transfer was accepted, so the range lies in the registered region, which
            // its owner keeps mapped; the bytes are copied since others may write them meanwhile.
            unsafe {
                let from = (self.base + at) as usize as *const u8;
                std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), copy.len());
            }
            digest.update(&copy);
        }
        digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
