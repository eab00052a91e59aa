//! The stream of one decode leg on its way to the client.

use super::leg::chain;
use bytes::Bytes;
use hyper::body::{Body, Incoming};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep, sleep};

/// How a stream ended.
pub(crate) type End = Result<(), String>;

/// A stream that has begun.
pub(crate) struct Relay {
    first: Option<Bytes>,
    body: Incoming,
    /// Fires when the instance has been silent for too long.
    silence: Pin<Box<Sleep>>,
    idle: Duration,
    /// Is closed when the router gives the leg up.
    cut: oneshot::Receiver<()>,
    /// Is told how it ended.
    report: Option<Box<dyn FnOnce(End) + Send>>,
}

impl Relay {
    /// The stream, with its first bytes; `report` hears of its end unless the stream is dropped.
    pub(crate) fn new(
        first: Bytes,
        body: Incoming,
        idle: Duration,
        cut: oneshot::Receiver<()>,
        report: impl FnOnce(End) + Send + 'static,
    ) -> Relay {
        let (silence, report) = (Box::pin(sleep(idle)), Some(Box::new(report) as Box<_>));
        Relay { first: Some(first), body, silence, idle, cut, report }
    }

    /// The next bytes, or the end.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes, End>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Ok(first));
        }
        if self.report.is_none() {
            return Poll::Ready(Err(Ok(())));
        }
        loop {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        self.silence.as_mut().reset(Instant::now() + self.idle);
                        return Poll::Ready(Ok(data));
                    }
                }
                Poll::Ready(Some(Err(why))) => return self.end(Err(chain(&why))),
                Poll::Ready(None) => return self.end(Ok(())),
                Poll::Pending => break,
            }
        }
        if Pin::new(&mut self.cut).poll(context).is_ready() {
            return self.end(Err("the instance left or was replaced".into()));
        }
        match self.silence.as_mut().poll(context) {
            Poll::Ready(()) => self.end(Err(format!("silent for {:?}", self.idle))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn end(&mut self, end: End) -> Poll<Result<Bytes, End>> {
        if let Some(report) = self.report.take() {
            report(end.clone());
        }
        Poll::Ready(Err(end))
    }
}
