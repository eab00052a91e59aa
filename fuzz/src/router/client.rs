//! A client that follows its script, and the bytes that it received.

use super::responses::{ReceivedResponse, responses};
use super::script::{ClientStep, ScriptedRequest};
use std::cell::{Cell, RefCell};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

/// Silence after which nothing more is expected: longer than all tries of all legs together.
const QUIET: Duration = Duration::from_secs(50);

/// Time in which the router has to read bytes; after it, the client assumes that it does not read.
const UNREAD: Duration = Duration::from_secs(90);

/// A connection while its script is played.
#[derive(Default)]
struct ScriptedClient {
    received: RefCell<Vec<u8>>,
    /// Requests that were sent to their end.
    sent: Cell<usize>,
    is_deaf: Cell<bool>,
    /// All steps were done.
    is_done: Cell<bool>,
    /// The router closed the connection.
    is_closed: Cell<bool>,
}

/// Plays a script from an address of loopback.
///
/// # Panics
/// If the router sends something that is not an answer, too many answers, or none at all.
pub(super) async fn play(steps: Vec<ClientStep>, from: Ipv4Addr, to: SocketAddr) {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((from, 0).into()).expect("an address of loopback");
    let mut stream = socket.connect(to).await.expect("the router listens");
    // The paused clock does not wait for bytes that the kernel delays.
    stream.set_nodelay(true).expect("an open socket");
    let state = ScriptedClient::default();
    let was_reset = {
        let (reads, writes) = stream.split();
        let (reading, writing) = (read(reads, &state), write(writes, &steps, &state));
        tokio::pin!(reading, writing);
        tokio::select! {
            was_reset = &mut writing => {
                if !was_reset {
                    reading.await;
                }
                was_reset
            }
            () = &mut reading => false,
        }
    };
    if was_reset {
        stream.set_zero_linger().expect("an open socket");
        return;
    }
    // Only the sender of arbitrary bytes could tell their answers apart.
    let is_raw = |step: &ClientStep| matches!(step, ClientStep::Raw(_) | ClientStep::Half(_));
    if !state.is_deaf.get() && !steps.iter().any(is_raw) {
        check(&state);
    }
}

fn check(state: &ScriptedClient) {
    let received = state.received.borrow();
    let found = responses(&received).unwrap_or_else(|why| panic!("{why}"));
    let whole = found.iter().filter(|it| it.is_whole).count();
    let is_turned_away = |it: &&ReceivedResponse| it.status == 503 && it.closes;
    let sent = state.sent.get();
    let uncalled = found.len().saturating_sub(sent);
    assert!(
        uncalled == 0 || found.iter().filter(is_turned_away).count() >= uncalled,
        "{sent} requests were sent, answered were {found:?}"
    );
    assert!(
        state.is_closed.get() || (whole == sent && found.len() == sent),
        "{sent} requests were sent, the connection is open and silent, answered were {found:?}"
    );
}

async fn read(mut reads: ReadHalf<'_>, state: &ScriptedClient) {
    let mut buffer = vec![0; 16 << 10];
    loop {
        if state.is_deaf.get() {
            sleep(QUIET).await;
            if state.is_done.get() {
                return;
            }
            continue;
        }
        match timeout(QUIET, reads.read(&mut buffer)).await {
            Ok(Ok(0) | Err(_)) => return state.is_closed.set(true),
            Ok(Ok(len)) => state.received.borrow_mut().extend_from_slice(&buffer[..len]),
            Err(_) if state.is_done.get() => return,
            Err(_) => {}
        }
    }
}

/// Does the steps; true if the last one is a reset.
async fn write(mut writes: WriteHalf<'_>, steps: &[ClientStep], state: &ScriptedClient) -> bool {
    for step in steps {
        let (bytes, piece, is_request) = match step {
            ClientStep::Raw(bytes) => (bytes.clone(), usize::MAX, false),
            ClientStep::Request(request) => (whole(request), request.piece(), true),
            ClientStep::Half(request) => {
                let mut bytes = whole(request);
                bytes.truncate(bytes.len() - request.bytes().len() / 2);
                (bytes, request.piece(), false)
            }
            ClientStep::Pause(time) => {
                sleep(*time).await;
                continue;
            }
            ClientStep::StopReading => {
                state.is_deaf.set(true);
                continue;
            }
            ClientStep::Reset => return true,
        };
        // Counted before: a router that knows the end of a body may answer before we do.
        state.sent.set(state.sent.get() + usize::from(is_request));
        let pieces = bytes.chunks(piece.min(bytes.len()).max(1));
        for piece in pieces {
            if !matches!(timeout(UNREAD, writes.write_all(piece)).await, Ok(Ok(()))) {
                state.is_done.set(true);
                return false;
            }
        }
    }
    state.is_done.set(true);
    false
}

fn whole(request: &ScriptedRequest) -> Vec<u8> {
    let (mut bytes, body) = (request.head().into_bytes(), request.bytes());
    if !request.is_chunked() {
        bytes.extend(format!("content-length: {}\r\n\r\n", body.len()).bytes());
        bytes.extend(body);
        return bytes;
    }
    bytes.extend(b"transfer-encoding: chunked\r\n\r\n");
    for chunk in body.chunks(1000) {
        bytes.extend(format!("{:x}\r\n", chunk.len()).bytes());
        bytes.extend([chunk, b"\r\n"].concat());
    }
    bytes.extend(b"0\r\n\r\n");
    bytes
}

/// Sends one well-formed request and returns its answer.
pub(super) async fn ask(to: SocketAddr, is_streamed: bool) -> Option<ReceivedResponse> {
    let stream = if is_streamed { ",\"stream\":true" } else { "" };
    let body = format!("{{\"model\":\"m\",\"prompt\":\"p\",\"max_tokens\":4{stream}}}");
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut connection = TcpStream::connect(to).await.ok()?;
    connection.write_all(request.as_bytes()).await.ok()?;
    let mut received = Vec::new();
    timeout(QUIET, connection.read_to_end(&mut received)).await.ok()?.ok()?;
    responses(&received).ok()?.pop()
}
