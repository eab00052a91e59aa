//! The streamed answer to a client, made of one or more streams of decodes.

use super::api::{Api, GenerationRequest};
use super::error::HttpError;
use super::http_adapter::{ClientEvent, ClientGone, PartBody, RouterAddr};
use super::merge::{PartFacts, StreamMerger};
use super::relay::StreamRelay;
use super::request_spans;
use crate::spans::OpenSpan;
use bytes::Bytes;
use hyper::StatusCode;
use hyper::body::{Body, Frame};
use kvferry_engine::core::ids::ClientId;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// Tells the core that the client has gone, or has its answer.
pub(crate) struct ClientGuard {
    pub(crate) core: RouterAddr,
    pub(crate) client: ClientId,
}

impl Drop for ClientGuard {
    fn drop(&mut self) {
        self.core.do_send(ClientGone(self.client));
    }
}

/// The body of a streamed answer.
pub(crate) struct ClientBody {
    events: mpsc::Receiver<ClientEvent>,
    /// Streams that have begun and not ended, with their parts.
    relays: Vec<(usize, StreamRelay)>,
    /// Streams that have not ended.
    left: usize,
    /// Streams that have not begun.
    to_come: usize,
    merger: Option<StreamMerger>,
    queue: VecDeque<Bytes>,
    /// The last bytes were the end of an event.
    between_events: bool,
    ended: bool,
    api: Api,
    _guard: ClientGuard,
    /// Of the request, until its answer has ended.
    span: Option<OpenSpan>,
}

impl ClientBody {
    /// Bodies of the streams, one for each part; `merger` is absent if they are passed on
    /// unchanged.
    pub(crate) fn new(
        asked: &GenerationRequest,
        events: mpsc::Receiver<ClientEvent>,
        merger: Option<StreamMerger>,
        (guard, span): (ClientGuard, Option<OpenSpan>),
    ) -> ClientBody {
        ClientBody {
            events,
            relays: Vec::new(),
            left: asked.parts.len(),
            to_come: asked.parts.len(),
            merger,
            queue: VecDeque::new(),
            between_events: true,
            ended: false,
            api: asked.api,
            _guard: guard,
            span,
        }
    }

    /// Adds a stream that has begun.
    pub(crate) fn add(&mut self, part: usize, body: PartBody, facts: PartFacts) {
        self.to_come -= 1;
        if let Some(merger) = &mut self.merger {
            merger.begin(part, facts);
        }
        match body {
            PartBody::Stream(relay) => self.relays.push((part, *relay)),
            PartBody::Whole(whole) => {
                self.take(part, whole.bytes);
                self.part_ended(part);
            }
        }
    }

    fn take(&mut self, part: usize, bytes: Bytes) {
        match &mut self.merger {
            None => self.queue.push_back(bytes),
            Some(merger) => {
                if let Err(why) = merger.feed(part, bytes, &mut self.queue) {
                    self.fail(&HttpError::new(StatusCode::BAD_GATEWAY, &why));
                }
            }
        }
    }

    fn part_ended(&mut self, part: usize) {
        self.left -= 1;
        if let Some(merger) = &mut self.merger {
            merger.part_ended(part, &mut self.queue);
            if self.left == 0 {
                merger.finish(&mut self.queue);
            }
        }
        if self.left == 0 {
            self.ended = true;
            if let Some(span) = self.span.take() {
                span.end("done");
            }
        }
    }

    /// Ends the stream with an event that says why.
    fn fail(&mut self, why: &HttpError) {
        if !self.between_events {
            self.queue.push_back(Bytes::from_static(b"\n\n"));
        }
        self.queue.push_back(why.event(self.api));
        if let Some(span) = self.span.take() {
            request_spans::refused(span, why);
        }
        self.relays.clear();
        self.ended = true;
    }

    fn poll_events(&mut self, context: &mut Context<'_>) {
        while self.to_come > 0 && !self.ended {
            match self.events.poll_recv(context) {
                Poll::Ready(Some(ClientEvent::Part { part, body, facts, .. })) => {
                    self.add(part, body, facts);
                }
                Poll::Ready(Some(ClientEvent::Ended(Err(refusal)))) => self.fail(&refusal),
                Poll::Ready(Some(ClientEvent::Ended(Ok(()))) | None) => {
                    let status = StatusCode::INTERNAL_SERVER_ERROR;
                    self.fail(&HttpError::new(status, "the router lost the request"));
                }
                Poll::Pending => return,
            }
        }
    }

    fn poll_relays(&mut self, context: &mut Context<'_>) {
        let mut at = 0;
        while at < self.relays.len() {
            let (part, relay) = &mut self.relays[at];
            let part = *part;
            match relay.poll(context) {
                Poll::Ready(Ok(bytes)) => {
                    self.take(part, bytes);
                    // What is there goes out before more is read.
                    if !self.queue.is_empty() {
                        return;
                    }
                }
                Poll::Ready(Err(Ok(()))) => {
                    self.relays.remove(at);
                    self.part_ended(part);
                }
                Poll::Ready(Err(Err(why))) => {
                    let message = format!("the decode instance broke off: {why}");
                    return self.fail(&HttpError::new(StatusCode::BAD_GATEWAY, &message));
                }
                Poll::Pending => at += 1,
            }
        }
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.queue.is_empty() && !self.ended {
            self.poll_events(context);
        }
        if self.queue.is_empty() && !self.ended {
            self.poll_relays(context);
        }
        match self.queue.pop_front() {
            Some(bytes) => {
                self.between_events = bytes.ends_with(b"\n\n") || bytes.ends_with(b"\r\n\r\n");
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            None if self.ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}
