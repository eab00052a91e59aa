//! Connections: bounded in number, header and silence, and ended gracefully. Those of clients and
//! those of operators have places of their own.

use super::connections::{ClientConnection, ConnectionTable, NoPlace};
use super::error::HttpError;
use super::metrics::Counted;
use crate::process::PatientListener;
use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};

/// Time for a client to send the header of its next request.
const HEADER: Duration = Duration::from_secs(60);

/// Longest header of a request, in bytes.
const HEADER_BYTES: usize = 64 << 10;

/// Serves until `stop` says so, then waits until all connections have their answers.
pub(crate) async fn serve(
    mut listener: PatientListener,
    app: Router,
    table: Arc<ConnectionTable>,
    (counted, refused): (Gauge, Counter),
    mut stop: watch::Receiver<bool>,
) {
    let stopping = stop.clone();
    // Each connection has one of them; nobody sends.
    let (open, mut ended) = mpsc::channel::<()>(1);
    loop {
        let (stream, from) = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        match table.admit(from.ip()) {
            Ok(own) => {
                let (app, stopping) = (app.clone(), stopping.clone());
                let (counted, open) = (counted.clone(), open.clone());
                // Its place is given back when it ends.
                let _detached = actix::spawn(async move {
                    let counted = Counted::begin(&counted);
                    connection(stream, app, own, stopping).await;
                    drop((counted, open));
                });
            }
            Err(why) => {
                refused.inc();
                turn_away(&stream, why);
            }
        }
    }
    drop((listener, open));
    let _all_have = ended.recv().await;
}

/// Says why, if the socket takes it at once: who is refused is not waited for.
fn turn_away(stream: &TcpStream, NoPlace { most, own }: NoPlace) {
    let message = format!(
        "all {most} connections of clients are in use, {own} of them by your address; try again, \
         or have the operator raise --connections-max or the limit of open files"
    );
    let error = HttpError::new(StatusCode::SERVICE_UNAVAILABLE, &message);
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n",
        error.body.len()
    );
    let _ = send(stream, &[head.as_bytes(), &error.body].concat(), SendFlags::NOSIGNAL);
    // What is unread would have the kernel take the answer back.
    let _ = recv(stream, &mut [0; 16 << 10], RecvFlags::DONTWAIT);
    let _ = shutdown(stream, Shutdown::Write);
}

async fn connection(
    stream: TcpStream,
    app: Router,
    own: Arc<ClientConnection>,
    mut stop: watch::Receiver<bool>,
) {
    // Without it small answers wait; with it failing they only wait.
    let _ = stream.set_nodelay(true);
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER).max_buf_size(HEADER_BYTES);
    let app = TowerToHyperService::new(app);
    let known = own.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(known.clone());
        let (answer, known) = (app.call(request), known.clone());
        async move { answer.await.map(|it| it.map(|body| CountedBody { body, own: known })) }
    });
    let serving = server.serve_connection(TokioIo::new(stream), service);
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        biased;
        ended = serving.as_mut() => ended,
        () = own.closed() => return,
        _ = stop.wait_for(|stop| *stop) => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(why) = ended {
        tracing::debug!(%why, "connection of a client ended");
    }
}

/// The body of an answer, after which its connection is idle.
struct CountedBody {
    body: Body,
    own: Arc<ClientConnection>,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for CountedBody {
    fn drop(&mut self) {
        self.own.end();
    }
}
