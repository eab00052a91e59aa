//! Control messages by Unix sockets, with descriptors.

use crate::proto::{CONTROL_MAX, HostControlMessage};
use crate::shared::HostCloseReason;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Descriptors that one message may carry.
const FDS_MAX: usize = 2;

/// Sends a message whole; false if the socket takes none now.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &HostControlMessage,
    fds: &[BorrowedFd<'_>],
) -> Result<bool, HostCloseReason> {
    let bytes = message.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    match sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::INTR) => Ok(false),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(HostCloseReason::Closed),
        Err(_) => Err(HostCloseReason::Lost),
    }
}

/// Receives a message; none if there is none now. See [`HostControlMessage::decode`] for `later`.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    later: bool,
) -> Result<Option<(HostControlMessage, Vec<OwnedFd>)>, HostCloseReason> {
    let mut bytes = [0; CONTROL_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let got = match recvmsg(socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(Errno::CONNRESET) => return Err(HostCloseReason::Closed),
        Err(_) => return Err(HostCloseReason::Lost),
    };
    let fds: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if got.bytes == 0 {
        return Err(HostCloseReason::Closed);
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(HostCloseReason::Corrupt);
    }
    let message =
        HostControlMessage::decode(&bytes[..got.bytes], later).ok_or(HostCloseReason::Corrupt)?;
    Ok(Some((message, fds)))
}
