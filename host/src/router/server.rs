//! Connections: bounded in number, header and silence, and ended gracefully. Those of clients and
//! those of operators have places of their own.

use super::access::{Access, AccessRules, add_origin};
use super::client_stream::ClientStream;
use super::connections::{ClientConnection, ConnectionTable, NoPlace};
use super::error::HttpError;
use super::metrics::{ClientMeters, Counted};
use crate::process::PatientListener;
use crate::tls::ServerCertificate;
use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;

/// Time for a client to send the header of its next request.
const HEADER: Duration = Duration::from_secs(60);

/// Longest header of a request, in bytes.
const HEADER_BYTES: usize = 64 << 10;

/// A socket that listens, and what is served at it.
pub(crate) struct ServedListener {
    pub(crate) listener: PatientListener,
    pub(crate) app: Router,
    pub(crate) table: Arc<ConnectionTable>,
    /// What is shown to who connects, if TLS is to be spoken.
    pub(crate) certificate: Option<Arc<ServerCertificate>>,
    pub(crate) meters: ClientMeters,
    pub(crate) access: Arc<AccessRules>,
    /// Time in which a client has to read some bytes of its answer.
    pub(crate) write_timeout: Duration,
}

/// Handler of each connection of a listener.
#[derive(Clone)]
struct ConnectionService {
    app: Router,
    access: Arc<AccessRules>,
    write_timeout: Duration,
}

/// Serves until `stop` says so, then waits until all connections have their answers.
pub(crate) async fn serve(served: ServedListener, mut stop: watch::Receiver<bool>) {
    let ServedListener { mut listener, app, table, certificate, meters, access, write_timeout } =
        served;
    let service = ConnectionService { app, access, write_timeout };
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
                let (service, stopping) = (service.clone(), stopping.clone());
                let (certificate, meters) = (certificate.clone(), meters.clone());
                let open = open.clone();
                // Its place is given back when it ends.
                let _detached = actix::spawn(async move {
                    let counted = Counted::begin(&meters.connections);
                    // Without it small answers wait; with it failing they only wait.
                    let _ = stream.set_nodelay(true);
                    match certificate {
                        None => connection(stream, service, own, stopping).await,
                        Some(certificate) => {
                            let secured = secured(stream, &certificate, &own, stopping.clone());
                            match secured.await {
                                Ok(stream) => connection(stream, service, own, stopping).await,
                                Err(why) => {
                                    tracing::debug!(why, %from, "no TLS connection of a client");
                                    meters.handshakes_failed.inc();
                                }
                            }
                        }
                    }
                    drop((counted, open));
                });
            }
            Err(why) => {
                meters.refused.inc();
                // Words that who speaks TLS would understand need a handshake, which is work.
                if certificate.is_none() {
                    turn_away(&stream, why, service.access.sole_origin());
                }
            }
        }
    }
    drop((listener, open));
    let _all_have = ended.recv().await;
}

fn turn_away(stream: &TcpStream, NoPlace { most, own }: NoPlace, origin: Option<&str>) {
    let message = format!(
        "all {most} connections of clients are in use, {own} of them by your address; try again, \
         or have the operator raise --connections-max or the limit of open files"
    );
    say(stream, &HttpError::new(StatusCode::SERVICE_UNAVAILABLE, &message), origin);
}

/// Answers without TLS and without reading the request, and ends the connection. Writes only what
/// the socket takes at once: the server does not wait for a rejected client. Pages of `origin` may
/// read the answer.
fn say(stream: &TcpStream, error: &HttpError, origin: Option<&str>) {
    let (status, len) = (error.status, error.body.len());
    let again = match status {
        StatusCode::SERVICE_UNAVAILABLE => "retry-after: 1\r\n",
        _ => "",
    };
    let origin = origin
        .map(|origin| format!("access-control-allow-origin: {origin}\r\n"))
        .unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {status}\r\n{again}{origin}content-type: application/json\r\nconnection: close\r\n\
         content-length: {len}\r\n\r\n"
    );
    let _ = send(stream, &[head.as_bytes(), &error.body].concat(), SendFlags::NOSIGNAL);
    // What is unread would have the kernel take the answer back.
    let _ = recv(stream, &mut [0; 16 << 10], RecvFlags::DONTWAIT);
    let _ = shutdown(stream, Shutdown::Write);
}

/// A connection after its handshake, which has as long as a header, and may be ended as one that is
/// idle.
async fn secured(
    stream: TcpStream,
    certificate: &ServerCertificate,
    own: &ClientConnection,
    mut stop: watch::Receiver<bool>,
) -> Result<TlsStream<TcpStream>, String> {
    let handshake = async move {
        match ServerCertificate::is_spoken(&stream).await {
            Ok(true) => certificate.accept(stream).await.map_err(|why| why.to_string()),
            Ok(false) => {
                let message = "TLS is spoken here, and nothing else: ask at https://";
                say(&stream, &HttpError::bad(message, ""), None);
                Err("it does not speak TLS".into())
            }
            Err(why) => Err(why.to_string()),
        }
    };
    tokio::select! {
        biased;
        secured = timeout(HEADER, handshake) => {
            secured.unwrap_or_else(|_| Err(format!("no handshake within {HEADER:?}")))
        }
        () = own.closed() => Err("closed for another connection".into()),
        _ = stop.wait_for(|stop| *stop) => Err("the router is stopping".into()),
    }
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    ConnectionService { app, access, write_timeout }: ConnectionService,
    own: Arc<ClientConnection>,
    mut stop: watch::Receiver<bool>,
) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER).max_buf_size(HEADER_BYTES);
    let app = TowerToHyperService::new(app);
    let known = own.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let known = known.clone();
        request.extensions_mut().insert(known.clone());
        let access = access.check(request.method(), request.uri(), request.headers());
        let served = match access {
            Access::Serve(origin) => Ok((app.call(request), origin)),
            Access::Answer(response) => Err(response),
        };
        async move {
            let response = match served {
                Ok((answer, origin)) => {
                    let mut response = answer.await?;
                    add_origin(&mut response, origin);
                    response
                }
                Err(response) => *response,
            };
            Ok::<_, Infallible>(response.map(|body| CountedBody { body, own: known }))
        }
    });
    let stream = ClientStream::new(stream, write_timeout, own.clone());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::TlsArgs;
    use clap::Parser;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    #[derive(Parser)]
    struct TlsCli {
        #[command(flatten)]
        tls: TlsArgs,
    }

    fn certificate() -> ServerCertificate {
        let both = concat!(
            include_str!("../../tests/certificates/ours/127.0.0.1.pem"),
            include_str!("../../tests/certificates/ours/127.0.0.1.key"),
        );
        let file = std::env::temp_dir().join(format!("kvferry-server-{}", std::process::id()));
        fs::write(&file, both).expect("a file");
        fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("its mode");
        let path = file.display();
        let line = format!("router --tls-cert {path} --tls-key {path}");
        let opened = TlsCli::parse_from(line.split(' ')).tls.certificate();
        fs::remove_file(&file).expect("it is there");
        opened.expect("it fits").expect("one is named")
    }

    /// The clock goes on when there is nothing else to do.
    #[tokio::test(start_paused = true)]
    async fn a_handshake_has_as_long_as_a_header() {
        let certificate = certificate();
        let table = ConnectionTable::new(2);
        let (_stop, stopped) = watch::channel(false);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let at = listener.local_addr().expect("bound");
        for said in [&[][..], &[0x16, 3, 1]] {
            let client = TcpStream::connect(at).await.expect("it listens");
            let _ = client.try_write(said).expect("room for a few bytes");
            let (stream, from) = listener.accept().await.expect("a client");
            let own = table.admit(from.ip()).expect("a place");
            let begin = Instant::now();
            let why = secured(stream, &certificate, &own, stopped.clone()).await.expect_err("none");
            assert!(begin.elapsed() >= HEADER && why.contains("no handshake within 60s"), "{why}");
        }
    }
}
