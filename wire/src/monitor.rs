//! What libzmq tells of the connections of a socket.

use zmq::{Context, Socket, SocketType};

/// What happened to a connection, with its file descriptor where libzmq says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connection {
    /// The listener took it.
    Accepted(i32),
    /// Both sides said what they are.
    Ready,
    /// It is gone.
    Lost(i32),
    /// It never came to be.
    Failed,
}

/// The events of one socket. [`stop`] comes before its end.
pub(crate) struct Monitor(pub(crate) Socket);

/// Ends the events of a socket, before its [`Monitor`] goes: a thread of libzmq that all sockets of the
/// context need would wait for ever for somebody to take them.
pub(crate) fn stop(socket: &mut Socket) {
    // SAFETY: The socket lives and is used by this thread only. No address ends the events; that
    // cannot fail.
    unsafe { zmq_sys::zmq_socket_monitor(socket.as_mut_ptr(), std::ptr::null(), 0) };
}

impl Monitor {
    /// Watches a socket; `name` is unique in the context.
    pub(crate) fn new(context: &Context, socket: &Socket, name: &str) -> zmq::Result<Monitor> {
        let endpoint = format!("inproc://monitor-{name}");
        socket.monitor(&endpoint, zmq_sys::ZMQ_EVENT_ALL as i32)?;
        let events = context.socket(SocketType::PAIR)?;
        events.set_linger(0)?;
        events.connect(&endpoint)?;
        Ok(Monitor(events))
    }

    /// The next event that matters, if there is one.
    pub(crate) fn next(&self) -> Option<Connection> {
        loop {
            let parts = self.0.recv_multipart(zmq::DONTWAIT).ok()?;
            let &[a, b, c, d, e, f] = parts.first()?.get(..6)? else { return None };
            let (event, value) = (u16::from_le_bytes([a, b]), i32::from_le_bytes([c, d, e, f]));
            return Some(match u32::from(event) {
                zmq_sys::ZMQ_EVENT_ACCEPTED => Connection::Accepted(value),
                zmq_sys::ZMQ_EVENT_HANDSHAKE_SUCCEEDED => Connection::Ready,
                zmq_sys::ZMQ_EVENT_DISCONNECTED => Connection::Lost(value),
                zmq_sys::ZMQ_EVENT_CLOSED
                | zmq_sys::ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq_sys::ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq_sys::ZMQ_EVENT_HANDSHAKE_FAILED_AUTH => Connection::Failed,
                _ => continue,
            });
        }
    }
}
