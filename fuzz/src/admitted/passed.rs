//! Descriptors that peers pass along.

use super::step::PassedFile;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate,
    memfd_create, open,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::pipe;
use std::os::fd::OwnedFd;

/// Longest memory file that has memory.
const ALLOCATED_MAX: u64 = 1 << 20;

/// Longest memory file: what is mapped of it is taken from the address space alone.
const LEN_MAX: u64 = 1 << 40;

fn memory(len: u64, seals: u8, holes: bool) -> Option<OwnedFd> {
    let file = memfd_create("passed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
    ftruncate(&file, len.min(LEN_MAX)).ok()?;
    if !holes {
        fallocate(&file, FallocateFlags::empty(), 0, len.clamp(1, ALLOCATED_MAX)).ok()?;
    }
    let all = [
        SealFlags::SHRINK,
        SealFlags::GROW,
        SealFlags::WRITE,
        SealFlags::FUTURE_WRITE,
        SealFlags::SEAL,
    ];
    let chosen = all.into_iter().enumerate().filter(|(bit, _)| seals >> bit & 1 == 1);
    let chosen = chosen.fold(SealFlags::empty(), |all, (_, seal)| all | seal);
    fcntl_add_seals(&file, chosen).ok()?;
    Some(file)
}

/// The descriptor, if the system has it to give.
pub(super) fn make(file: &PassedFile, len: u64) -> Option<OwnedFd> {
    let pair = |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).ok();
    match file {
        PassedFile::Memory { len: said, seals, holes } => memory(said.value(len), *seals, *holes),
        PassedFile::EventFd => eventfd(0, EventfdFlags::CLOEXEC).ok(),
        PassedFile::Pipe { write } => {
            let (read, write_end) = pipe().ok()?;
            Some(if *write { write_end } else { read })
        }
        PassedFile::Datagrams => Some(pair(SocketType::DGRAM)?.0),
        PassedFile::Stream => Some(pair(SocketType::STREAM)?.0),
        PassedFile::Null => open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok(),
        PassedFile::OwnMemory => {
            open("/proc/self/mem", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
        }
    }
}

/// As many as one message carries.
pub(super) fn make_all(files: &[PassedFile], len: u64) -> Vec<OwnedFd> {
    files.iter().take(4).filter_map(|file| make(file, len)).collect()
}
