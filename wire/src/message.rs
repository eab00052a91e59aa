//! Messages with the connection that they came by.

use std::mem::MaybeUninit;
use zmq::Socket;

/// `ZMQ_SRCFD` of zmq.h 4.x: the file descriptor of the connection that a message came by.
const SRCFD: i32 = 2;

/// A message that was received.
#[derive(Debug)]
pub(crate) struct ZmqMessage {
    pub(crate) parts: Vec<Vec<u8>>,
    /// File descriptor of the connection.
    pub(crate) fd: i32,
}

/// The next message of a socket, if there is one.
pub(crate) fn receive(socket: &mut Socket) -> Option<ZmqMessage> {
    let (mut parts, mut fd) = (Vec::new(), 0);
    loop {
        let (part, from, more) = receive_part(socket)?;
        parts.push(part);
        fd = from.max(fd);
        if !more {
            return Some(ZmqMessage { parts, fd });
        }
    }
}

fn receive_part(socket: &mut Socket) -> Option<(Vec<u8>, i32, bool)> {
    let mut raw = MaybeUninit::<zmq_sys::zmq_msg_t>::uninit();
    // SAFETY: `zmq_msg_init` makes the message valid and cannot fail; it is closed below on every
    // way. The socket lives and is used by this thread only. Data and size belong to the message
    // until it is closed, and are copied before.
    unsafe {
        let message = raw.as_mut_ptr();
        zmq_sys::zmq_msg_init(message);
        let flags = zmq_sys::ZMQ_DONTWAIT as i32;
        let got = zmq_sys::zmq_msg_recv(message, socket.as_mut_ptr(), flags);
        let part = (got >= 0).then(|| {
            let data = zmq_sys::zmq_msg_data(message).cast::<u8>();
            let bytes = std::slice::from_raw_parts(data, zmq_sys::zmq_msg_size(message)).to_vec();
            let fd = zmq_sys::zmq_msg_get(message, SRCFD);
            (bytes, fd, zmq_sys::zmq_msg_more(message) != 0)
        });
        zmq_sys::zmq_msg_close(message);
        part
    }
}
