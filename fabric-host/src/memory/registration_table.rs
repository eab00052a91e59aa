//! Which registrations live: a page that peers on this host see, so that what was deregistered is
//! read no more, though its file may still be mapped.

use super::MemfdMapping;
use super::pool::sealed_file;
use crate::ring::Ordering;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals};
use std::os::fd::OwnedFd;

/// Regions that can be registered at a time.
pub(crate) const ROWS_MAX: usize = 4_096;

/// Bytes of a registration table.
pub(crate) const TABLE_BYTES: u64 = ROWS_MAX as u64 * 8;

/// Tokens of the regions that live, each in a place of its own, 0 where there is none.
#[derive(Debug)]
pub(crate) struct RegistrationTable {
    map: MemfdMapping,
    file: OwnedFd,
    free: Vec<u32>,
}

impl RegistrationTable {
    /// # Errors
    /// No memory file, or no room for it.
    pub(crate) fn new() -> Result<RegistrationTable, String> {
        let file = sealed_file(
            "kvferry-registrations",
            TABLE_BYTES,
            MemfdFlags::empty(),
            SealFlags::empty(),
        )?;
        let map = MemfdMapping::new(&file, TABLE_BYTES, true)?;
        // Only this mapping may write.
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE | SealFlags::SEAL)
            .map_err(|why| format!("sealing a memory file: {why}"))?;
        Ok(RegistrationTable { map, file, free: (0..ROWS_MAX as u32).rev().collect() })
    }

    /// The file, for peers; they cannot write it.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Enters a token; none if the table is full.
    pub(crate) fn enter(&mut self, token: u64) -> Option<u32> {
        let place = self.free.pop()?;
        self.map.words()[place as usize].store(token, Ordering::SeqCst);
        Some(place)
    }

    /// Strikes what is at a place.
    pub(crate) fn strike(&mut self, place: u32) {
        self.map.words()[place as usize].store(0, Ordering::SeqCst);
        self.free.push(place);
    }
}
