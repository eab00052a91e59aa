//! A link that this side dialled: one DEALER.

use crate::message::receive;
use crate::monitor::{MonitoredSocket, ZmqMonitorEvent};
use crate::shared::{SendQueueDepth, ZmqEventQueue, ZmqLinkEvent};
use kvferry_engine::fabric::{LinkId, LinkKind};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use zmq::{Context, SocketType};

/// Milliseconds until libzmq dials again, long after this side has closed the socket: or the next
/// process at the address might hear what was meant for this one. With -1, which stands for never,
/// libzmq 4.3.4 drops what came before the end and was not read yet.
const NEVER: i32 = 3_600_000;

pub(crate) struct ZmqDialler {
    pub(crate) watched: MonitoredSocket,
    link: LinkId,
    channel: LinkKind,
    queued: Arc<SendQueueDepth>,
    out: VecDeque<Vec<Vec<u8>>>,
    up: bool,
}

impl ZmqDialler {
    pub(crate) fn new(
        context: &Context,
        link: LinkId,
        channel: LinkKind,
        to: &str,
        queued: Arc<SendQueueDepth>,
        wait: Duration,
    ) -> zmq::Result<ZmqDialler> {
        let socket = context.socket(SocketType::DEALER)?;
        crate::io::prepare(&socket)?;
        let wait = wait.as_millis().clamp(1, 1 << 30) as i32;
        socket.set_connect_timeout(wait)?;
        socket.set_handshake_ivl(wait)?;
        socket.set_reconnect_ivl(NEVER)?;
        let watched = MonitoredSocket::new(context, socket, &format!("link-{}", link.0))?;
        watched.socket.connect(to)?;
        let out = VecDeque::new();
        Ok(ZmqDialler { watched, link, channel, queued, out, up: false })
    }

    pub(crate) fn push(&mut self, parts: Vec<Vec<u8>>) {
        self.out.push_back(parts);
    }

    /// True if something waits for room.
    pub(crate) fn has_output(&self) -> bool {
        self.up && !self.out.is_empty()
    }

    /// Does what can be done; false if the link is down, which was told.
    pub(crate) fn pump(&mut self, inbox: &ZmqEventQueue) -> bool {
        let mut lost = false;
        while let Some(event) = self.watched.next() {
            match event {
                ZmqMonitorEvent::Ready if !std::mem::replace(&mut self.up, true) => {
                    inbox.push(ZmqLinkEvent::Up {
                        from: None,
                        link: self.link,
                        channel: self.channel,
                        queued: self.queued.clone(),
                    })
                }
                ZmqMonitorEvent::Ready | ZmqMonitorEvent::Accepted(_) => {}
                ZmqMonitorEvent::Lost(_) | ZmqMonitorEvent::Failed => lost = true,
            }
        }
        while !inbox.is_full() || lost {
            let Some(message) = receive(&mut self.watched.socket) else { break };
            inbox.push(ZmqLinkEvent::Frame { link: self.link, parts: message.parts });
        }
        if lost {
            inbox.push(ZmqLinkEvent::Down { link: self.link });
            return false;
        }
        self.flush();
        true
    }

    /// Gives libzmq what it takes.
    pub(crate) fn flush(&mut self) {
        while self.has_output()
            && let Some(parts) = self.out.front()
        {
            if self.watched.socket.send_multipart(parts, zmq::DONTWAIT).is_err() {
                return;
            }
            self.out.pop_front();
            self.queued.leave();
        }
    }
}
