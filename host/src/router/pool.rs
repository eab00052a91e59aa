//! Connections to instances. A request drives its own, without a task beside it; between requests
//! they wait here.

use super::body_chain::BodyChain;
use crate::process::lock;
use crate::tls::{LegAuthorities, SPEAK_TLS};
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper::header::{HOST, HeaderValue};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use kvferry_engine::fabric::Endpoint;
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

/// A connection waits this long at most: vLLM closes idle ones after 5 s.
const LINGER: Duration = Duration::from_secs(4);

/// Connections to one instance that may wait.
const WAITING_MAX: usize = 1024;

/// Why an instance could not be connected to is known for so long after the last try.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The connections to all instances; clones share them.
#[derive(Clone)]
pub(crate) struct ConnectionPool {
    waiting: Arc<Mutex<IdleConnections>>,
    /// Time for a new connection, its TLS handshake included.
    connect: Duration,
    /// By whom instances are verified; none if they are asked without TLS.
    authorities: Option<Arc<LegAuthorities>>,
}

#[derive(Default)]
struct IdleConnections {
    /// The last one is the one that has waited for the shortest time.
    lines: HashMap<Endpoint, Vec<(Instant, Box<PooledConnection>)>>,
    /// Why the last connection to an instance was none.
    failures: HashMap<Endpoint, (Instant, String)>,
    /// A task closes those that have waited for too long, and forgets old failures.
    is_swept: bool,
}

/// Bytes to and from an instance.
type LegStream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// Error of a request without an answer.
#[derive(Debug)]
pub(crate) struct SendError {
    pub(crate) why: String,
    /// True if the instance got nothing of the request.
    pub(crate) is_unsent: bool,
}

impl SendError {
    fn unsent(why: String) -> SendError {
        SendError { why, is_unsent: true }
    }
}

struct PooledConnection {
    sender: SendRequest<BodyChain>,
    connection: Connection<TokioIo<LegStream>, BodyChain>,
    ended: bool,
}

impl PooledConnection {
    /// Reads and writes what it can.
    fn drive(&mut self, context: &mut Context<'_>) {
        // Why it ended is told to the request that it has, if any.
        self.ended = self.ended || Pin::new(&mut self.connection).poll(context).is_ready();
    }

    /// True if it takes a request, as far as can be told.
    fn is_free(&mut self, context: &mut Context<'_>) -> bool {
        self.drive(context);
        !self.ended && self.sender.is_ready()
    }
}

impl ConnectionPool {
    /// No connections; new ones may take `connect`, and are TLS if there are authorities.
    pub(crate) fn new(connect: Duration, authorities: Option<LegAuthorities>) -> ConnectionPool {
        let authorities = authorities.map(Arc::new);
        ConnectionPool { waiting: Arc::default(), connect, authorities }
    }

    /// Why an instance could not be connected to, if the last try failed, and not long ago.
    pub(crate) fn failure(&self, to: &Endpoint) -> Option<String> {
        self.waiting().failures.get(to).map(|(_, why)| why.clone())
    }

    /// Sends a request, whose URI is a path, and waits for the head of the answer.
    ///
    /// # Errors
    /// No connection, or it ended before the answer.
    pub(crate) async fn send<B: Into<BodyChain>>(
        &self,
        to: &Endpoint,
        request: Request<B>,
    ) -> Result<Response<PooledBody>, String> {
        self.try_send(to, request).await.map_err(|error| error.why)
    }

    /// Sends a request as [`send`](ConnectionPool::send) does.
    ///
    /// # Errors
    /// The same, with whether the instance may have got the request.
    pub(crate) async fn try_send<B: Into<BodyChain>>(
        &self,
        to: &Endpoint,
        request: Request<B>,
    ) -> Result<Response<PooledBody>, SendError> {
        let mut request = request.map(Into::into);
        let host = HeaderValue::from_str(&to.0);
        let host = host.map_err(|why| SendError::unsent(format!("{to}: {why}")))?;
        request.headers_mut().insert(HOST, host);
        loop {
            let waited = poll_fn(|context| Poll::Ready(self.take(to, context))).await;
            let is_new = waited.is_none();
            let mut line = match waited {
                Some(line) => line,
                None => self.dial(to).await.map_err(SendError::unsent)?,
            };
            let mut answer = pin!(line.sender.try_send_request(request));
            let answer = poll_fn(|context| {
                line.drive(context);
                answer.as_mut().poll(context)
            });
            match answer.await {
                Ok(answer) => {
                    let (pool, to) = (self.clone(), to.clone());
                    return Ok(answer.map(|body| PooledBody { body, line: Some(line), to, pool }));
                }
                // The instance closed it before it took anything of the request.
                Err(mut why) => match why.take_message() {
                    Some(unsent) if !is_new => request = unsent,
                    unsent => {
                        let is_unsent = unsent.is_some();
                        return Err(SendError { why: chain(&why.into_error()), is_unsent });
                    }
                },
            }
        }
    }

    async fn dial(&self, to: &Endpoint) -> Result<Box<PooledConnection>, String> {
        let stream = timeout(self.connect, self.stream(to)).await;
        let stream = stream.unwrap_or_else(|_| Err(self.too_late()));
        let is_new = self.remember(to, stream.as_ref().err());
        // Once for each reason: it is tried again and again.
        if let (Err(why), true, Some(_)) = (&stream, is_new, &self.authorities) {
            tracing::warn!(http = %to, why, "an instance is not verified");
        }
        let line = Builder::new().handshake(TokioIo::new(stream?)).await;
        let (sender, connection) = line.map_err(|why| chain(&why))?;
        Ok(Box::new(PooledConnection { sender, connection, ended: false }))
    }

    fn too_late(&self) -> String {
        match &self.authorities {
            None => format!("no connection within {:?}", self.connect),
            Some(_) => format!("no TLS connection within {:?}; {SPEAK_TLS}", self.connect),
        }
    }

    async fn stream(&self, to: &Endpoint) -> Result<LegStream, String> {
        let stream = TcpStream::connect(&*to.0).await;
        let stream = stream.map_err(|why| format!("cannot connect: {why}"))?;
        // Without it small bodies wait; with it failing they only wait.
        let _ = stream.set_nodelay(true);
        match &self.authorities {
            None => Ok(Either::Left(stream)),
            Some(authorities) => {
                let secured = authorities.connect(&to.0, stream).await;
                secured.map(|stream| Either::Right(Box::new(stream)))
            }
        }
    }

    /// Keeps why there is no connection, for who asks about the instance; true if it is another
    /// reason than before.
    fn remember(&self, to: &Endpoint, failure: Option<&String>) -> bool {
        let mut waiting = self.waiting();
        let Some(why) = failure else {
            waiting.failures.remove(to);
            return false;
        };
        let before = waiting.failures.insert(to.clone(), (Instant::now(), why.clone()));
        self.have_swept(&mut waiting);
        before.is_none_or(|(_, before)| before != *why)
    }

    fn waiting(&self) -> MutexGuard<'_, IdleConnections> {
        lock(&self.waiting)
    }

    fn take(&self, to: &Endpoint, context: &mut Context<'_>) -> Option<Box<PooledConnection>> {
        let mut waiting = self.waiting();
        let lines = waiting.lines.get_mut(to)?;
        while let Some((since, mut line)) = lines.pop() {
            if since.elapsed() < LINGER && line.is_free(context) {
                return Some(line);
            }
        }
        None
    }

    fn put(&self, to: &Endpoint, line: Box<PooledConnection>) {
        let mut waiting = self.waiting();
        let lines = waiting.lines.entry(to.clone()).or_default();
        if lines.len() < WAITING_MAX {
            lines.push((Instant::now(), line));
        }
        self.have_swept(&mut waiting);
    }

    fn have_swept(&self, waiting: &mut IdleConnections) {
        if !std::mem::replace(&mut waiting.is_swept, true) {
            // The task ends when nothing is left.
            let _detached = actix::spawn(self.clone().sweep());
        }
    }

    async fn sweep(self) {
        loop {
            sleep(LINGER / 4).await;
            let mut waiting = self.waiting();
            waiting.lines.retain(|_, lines| {
                lines.retain(|(since, _)| since.elapsed() < LINGER);
                !lines.is_empty()
            });
            waiting.failures.retain(|_, (last, _)| last.elapsed() < REMEMBERED);
            if waiting.lines.is_empty() && waiting.failures.is_empty() {
                waiting.is_swept = false;
                return;
            }
        }
    }
}

/// The body of an answer. Read to its end it gives the connection back; dropped before, it closes
/// it.
pub(crate) struct PooledBody {
    body: Incoming,
    line: Option<Box<PooledConnection>>,
    to: Endpoint,
    pool: ConnectionPool,
}

impl Body for PooledBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let mut polled = Pin::new(&mut self.body).poll_frame(context);
        if polled.is_pending()
            && let Some(line) = &mut self.line
        {
            line.drive(context);
            polled = Pin::new(&mut self.body).poll_frame(context);
        }
        if let Poll::Ready(None) = &polled
            && let Some(line) = self.line.take()
        {
            self.pool.put(&self.to, line);
        }
        polled
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An error and what it is due to, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(why) = cause {
        text += ": ";
        text += &why.to_string();
        cause = why.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    /// Serves two connections with two answers each, and says so before it closes one.
    fn serve(listener: &TcpListener) {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().expect("the test connects");
            let mut lines = BufReader::new(stream.try_clone().expect("a socket")).lines();
            for last in ["", "connection: close\r\n"] {
                while !lines.next().expect("a request").expect("a line").is_empty() {}
                let head = format!("HTTP/1.1 200 OK\r\n{last}content-length: 2\r\n\r\nok");
                stream.write_all(head.as_bytes()).expect("the test reads");
            }
        }
    }

    #[test]
    fn a_connection_is_used_again_until_the_instance_closes_it() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let to = Endpoint::from(&*listener.local_addr().expect("bound").to_string());
        let server = std::thread::spawn(move || serve(&listener));
        actix::System::new().block_on(async {
            let pool = ConnectionPool::new(Duration::from_secs(5), None);
            for left in [1, 0, 1, 0] {
                let answer = pool.send(&to, Request::<Bytes>::default()).await.expect("it answers");
                let body = answer.into_body().collect().await.expect("all of it").to_bytes();
                assert_eq!(body, "ok");
                let free = poll_fn(|context| Poll::Ready(pool.take(&to, context))).await;
                assert_eq!(free.is_some(), left == 1);
                if let Some(line) = free {
                    pool.put(&to, line);
                }
            }
        });
        server.join().expect("two connections");
    }
}
