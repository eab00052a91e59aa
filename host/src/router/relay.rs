//! The stream of one decode leg on its way to the client.

use super::memory_budget::MemoryCharge;
use super::pool::PooledBody;
use super::pool::chain;
use super::sse::{self, SseDecoder};
use crate::instance::{ReportedFailure, find_failure};
use crate::needle::Needle;
use bytes::Bytes;
use hyper::body::Body;
use prometheus_client::metrics::histogram::Histogram;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep, sleep};

/// How a stream ended.
pub(crate) type StreamEnd = Result<(), String>;

/// Looks for what an instance tells of its leg in the stream.
#[derive(Debug)]
struct FailureScanner {
    events: SseDecoder,
    /// Bytes of an event that is not whole are in `events`.
    is_inside: bool,
    heard: Option<ReportedFailure>,
}

impl FailureScanner {
    fn new(memory: MemoryCharge) -> FailureScanner {
        FailureScanner { events: SseDecoder::new(memory), is_inside: false, heard: None }
    }

    fn scan(&mut self, bytes: &Bytes) {
        let ends = bytes.ends_with(b"\n\n") || bytes.ends_with(b"\r\n\r\n");
        if !self.is_inside && ends {
            // Whole events, as nearly always: nothing is copied, and nearly nothing looked at.
            static FAILED: Needle = Needle::new("\"failed\"");
            if !FAILED.is_in(bytes) {
                return;
            }
        }
        self.is_inside = !ends;
        if self.events.feed(bytes.clone()).is_err() {
            // An event that is too long, or that there is no memory for, is not looked into.
            self.events.clear();
            return;
        }
        while let Some(event) = self.events.next() {
            let heard = sse::data(&event).and_then(find_failure);
            self.heard = self.heard.take().or(heard);
        }
    }
}

/// A stream that has begun.
pub(crate) struct StreamRelay<B = PooledBody> {
    first: Option<Bytes>,
    body: B,
    /// Fires when the instance has been silent for too long.
    silence: Pin<Box<Sleep>>,
    idle: Duration,
    /// When the last bytes came, and the times between bytes of its instance.
    last: Instant,
    between: Histogram,
    /// Is closed when the router gives the leg up.
    cut: oneshot::Receiver<()>,
    /// Of a stream of an instance that tells something of its leg.
    scanner: Option<FailureScanner>,
    /// Is told how it ended, and what was heard.
    report: Option<EndCallback>,
}

type EndCallback = Box<dyn FnOnce(StreamEnd, Option<ReportedFailure>) + Send>;

impl<B> StreamRelay<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + 'static,
{
    /// The stream, with its first bytes, how long it may be silent, and where the times between its
    /// bytes are kept; `report` hears of its end unless the stream is dropped,
    /// and of what the instance told in it, if it is one that `tells`.
    pub(crate) fn new(
        (first, body, memory): (Bytes, B, MemoryCharge),
        (idle, between): (Duration, Histogram),
        cut: oneshot::Receiver<()>,
        tells: bool,
        report: impl FnOnce(StreamEnd, Option<ReportedFailure>) + Send + 'static,
    ) -> StreamRelay<B> {
        let (silence, report) = (Box::pin(sleep(idle)), Some(Box::new(report) as EndCallback));
        let mut ear = tells.then(|| FailureScanner::new(memory));
        if let Some(ear) = &mut ear {
            ear.scan(&first);
        }
        let (first, last) = (Some(first), Instant::now());
        StreamRelay { first, body, silence, idle, last, between, cut, scanner: ear, report }
    }

    /// The next bytes, or the end.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes, StreamEnd>> {
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
                        let now = Instant::now();
                        self.silence.as_mut().reset(now + self.idle);
                        let before = std::mem::replace(&mut self.last, now);
                        self.between.observe((now - before).as_secs_f64());
                        if let Some(ear) = &mut self.scanner {
                            ear.scan(&data);
                        }
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

    fn end(&mut self, end: StreamEnd) -> Poll<Result<Bytes, StreamEnd>> {
        if let Some(report) = self.report.take() {
            report(end.clone(), self.scanner.take().and_then(|ear| ear.heard));
        }
        Poll::Ready(Err(end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::memory_budget::{MemoryBudget, unbounded};
    use hyper::body::Frame;
    use kvferry_engine::source::PeerSource;
    use prometheus_client::metrics::counter::Counter;
    use std::convert::Infallible;
    use std::future::poll_fn;
    use std::sync::mpsc::{Receiver, channel};
    use tokio::sync::mpsc;
    use tokio::time::advance;

    struct Fed(mpsc::UnboundedReceiver<Bytes>);

    impl Body for Fed {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
        }
    }

    const IDLE: Duration = Duration::from_secs(10);

    struct RelayFixture {
        relay: StreamRelay<Fed>,
        tokens: mpsc::UnboundedSender<Bytes>,
        cut: Option<oneshot::Sender<()>>,
        told: Receiver<StreamEnd>,
    }

    fn bench() -> RelayFixture {
        let (tokens, fed) = mpsc::unbounded_channel();
        let (cut, is_cut) = oneshot::channel();
        let (tell, told) = channel();
        let report = move |end, _| tell.send(end).expect("the test listens");
        let first = Bytes::from_static(b"first");
        let between = Histogram::new([1.0]);
        let relay = StreamRelay::new(
            (first, Fed(fed), unbounded()),
            (IDLE, between),
            is_cut,
            false,
            report,
        );
        RelayFixture { relay, tokens, cut: Some(cut), told }
    }

    async fn next(relay: &mut StreamRelay<Fed>) -> Result<Bytes, StreamEnd> {
        poll_fn(|context| relay.poll(context)).await
    }

    /// Ten times the idle time in all.
    #[tokio::test(start_paused = true)]
    async fn a_stream_may_last_as_long_as_it_is_never_silent_for_long() {
        let RelayFixture { mut relay, tokens, cut: _cut, told } = bench();
        assert_eq!(next(&mut relay).await, Ok(Bytes::from_static(b"first")));
        for _ in 0..11 {
            advance(IDLE - Duration::from_secs(1)).await;
            tokens.send(Bytes::from_static(b"more")).expect("it listens");
            assert_eq!(next(&mut relay).await, Ok(Bytes::from_static(b"more")));
            let goes_on = poll_fn(|context| Poll::Ready(relay.poll(context).is_pending())).await;
            assert!(goes_on);
        }
        drop(tokens);
        assert_eq!(next(&mut relay).await, Err(Ok(())));
        assert_eq!(told.try_recv(), Ok(Ok(())));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_ends_at_its_time() {
        let RelayFixture { mut relay, tokens: _tokens, cut: _cut, told } = bench();
        next(&mut relay).await.expect("the first bytes");
        let start = Instant::now();
        assert_eq!(next(&mut relay).await, Err(Err("silent for 10s".into())));
        assert_eq!(start.elapsed().as_secs(), 10);
        assert!(told.try_recv().is_ok_and(|end| end.is_err()));
    }

    #[test]
    fn what_is_told_in_a_stream_is_heard_however_it_is_cut() {
        let told = r#"data: {"kvferry":{"failed":{"why":"w","failure":"PeerSilent"}}}"#;
        let stream = format!("data: {{\"a\":\"\\\"failed\\\"\"}}\n\n{told}\n\ndata: [DONE]\n\n");
        for cut in 1..stream.len() {
            let mut ear = FailureScanner::new(unbounded());
            stream.as_bytes().chunks(cut).for_each(|part| ear.scan(&Bytes::copy_from_slice(part)));
            assert_eq!(ear.heard.map(|heard| heard.why).as_deref(), Some("w"), "{cut}");
        }
        let mut ear = FailureScanner::new(unbounded());
        ear.scan(&Bytes::from_static(b"data: {}\n\n"));
        assert!(!ear.is_inside && ear.heard.is_none());
    }

    #[test]
    fn event_beyond_the_memory_is_dropped_with_its_charge() {
        let budget = MemoryBudget::new(256, Counter::default());
        let mut ear = FailureScanner::new(budget.charge(PeerSource::new([127, 0, 0, 1].into())));
        let part = Bytes::from(format!("data: {}", "x".repeat(74)));
        ear.scan(&part);
        assert_eq!(budget.held(), 80);
        ear.scan(&part);
        assert_eq!(budget.held(), 0);
        ear.scan(&Bytes::from_static(b"x\n\n"));
        let told = r#"data: {"kvferry":{"failed":{"why":"w","failure":"PeerSilent"}}}"#;
        ear.scan(&Bytes::from(format!("{told}\n\n")));
        assert_eq!(ear.heard.map(|heard| heard.why).as_deref(), Some("w"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_given_up_ends_at_once() {
        let RelayFixture { mut relay, tokens: _tokens, mut cut, told: _told } = bench();
        next(&mut relay).await.expect("the first bytes");
        cut.take();
        let start = Instant::now();
        assert!(next(&mut relay).await.is_err_and(|end| end.is_err()));
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
