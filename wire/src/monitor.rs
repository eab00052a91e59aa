//! What libzmq tells of the connections of a socket.

use zmq::{Context, Socket, SocketType};

/// What happened to a connection, with its file descriptor where libzmq says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZmqMonitorEvent {
    /// The listener took it.
    Accepted(i32),
    /// Both sides said what they are.
    Ready,
    Lost(i32),
    /// It never came to be.
    Failed,
}

/// A socket and the events of its connections.
pub(crate) struct MonitoredSocket {
    pub(crate) socket: Socket,
    /// Readable when there is an event.
    pub(crate) events: Socket,
}

impl Drop for MonitoredSocket {
    fn drop(&mut self) {
        // The events end before who takes them: a thread of libzmq that all sockets of the context
        // need would wait for ever for somebody to do so. SAFETY: The socket lives and is used by
        // this thread only. No address ends the events; that cannot fail.
        unsafe { zmq_sys::zmq_socket_monitor(self.socket.as_mut_ptr(), std::ptr::null(), 0) };
    }
}

impl MonitoredSocket {
    /// Watches a socket; `name` is unique in the context.
    pub(crate) fn new(
        context: &Context,
        socket: Socket,
        name: &str,
    ) -> zmq::Result<MonitoredSocket> {
        let endpoint = format!("inproc://monitor-{name}");
        let events = context.socket(SocketType::PAIR)?;
        events.set_linger(0)?;
        let watched = MonitoredSocket { socket, events };
        watched.socket.monitor(&endpoint, zmq_sys::ZMQ_EVENT_ALL as i32)?;
        watched.events.connect(&endpoint)?;
        Ok(watched)
    }

    /// The next event that matters, if there is one.
    pub(crate) fn next(&self) -> Option<ZmqMonitorEvent> {
        loop {
            let parts = self.events.recv_multipart(zmq::DONTWAIT).ok()?;
            let &[a, b, c, d, e, f] = parts.first()?.get(..6)? else { return None };
            let (event, value) = (u16::from_le_bytes([a, b]), i32::from_le_bytes([c, d, e, f]));
            return Some(match u32::from(event) {
                zmq_sys::ZMQ_EVENT_ACCEPTED => ZmqMonitorEvent::Accepted(value),
                zmq_sys::ZMQ_EVENT_HANDSHAKE_SUCCEEDED => ZmqMonitorEvent::Ready,
                zmq_sys::ZMQ_EVENT_DISCONNECTED => ZmqMonitorEvent::Lost(value),
                zmq_sys::ZMQ_EVENT_CLOSED
                | zmq_sys::ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq_sys::ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq_sys::ZMQ_EVENT_HANDSHAKE_FAILED_AUTH => ZmqMonitorEvent::Failed,
                _ => continue,
            });
        }
    }
}
