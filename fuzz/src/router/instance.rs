//! A prefill or decode whose HTTP answers are scripted.

use super::script::{Framing, ScriptedAnswer};
use memchr::memmem;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// Longest head of a leg.
const HEAD_MAX: usize = 256 << 10;

const MODELS: &str = r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#;

/// Answers that are left.
pub(super) type Answers = Rc<RefCell<VecDeque<ScriptedAnswer>>>;

pub(super) struct ScriptedInstance {
    pub(super) http: SocketAddr,
    /// Answers to the next legs; without any they are answered well.
    pub(super) answers: Answers,
}

impl ScriptedInstance {
    /// An instance at a free port, until the system ends.
    pub(super) async fn start(is_prefill: bool) -> ScriptedInstance {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let http = listener.local_addr().expect("bound");
        let answers = Answers::default();
        let own = answers.clone();
        let _ends_with_the_system = actix::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let answers = own.clone();
                // The router may end the connection.
                actix::spawn(async move { serve(stream, answers, is_prefill).await.ok() });
            }
        });
        ScriptedInstance { http, answers }
    }
}

/// A leg, without its body.
struct ScriptedLeg {
    is_get: bool,
    is_streamed: bool,
}

async fn serve(mut stream: TcpStream, answers: Answers, is_prefill: bool) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut bytes = Vec::new();
    while let Some(leg) = receive(&mut stream, &mut bytes).await? {
        if leg.is_get {
            send_whole(&mut stream, "application/json", MODELS).await?;
            continue;
        }
        let scripted = answers.borrow_mut().pop_front();
        let Some(answer) = scripted else {
            send_usual(&mut stream, &leg, is_prefill).await?;
            continue;
        };
        if !send(&mut stream, &answer, &leg, is_prefill).await? {
            return Ok(());
        }
    }
    Ok(())
}

/// Reads the next leg and drops its body; `bytes` are those that follow it.
async fn receive(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> io::Result<Option<ScriptedLeg>> {
    let mut buffer = [0; 4096];
    let head = loop {
        if let Some(end) = memmem::find(bytes, b"\r\n\r\n") {
            break end;
        }
        let len = stream.read(&mut buffer).await?;
        if len == 0 || bytes.len() > HEAD_MAX {
            return Ok(None);
        }
        bytes.extend_from_slice(&buffer[..len]);
    };
    let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
    let length = text.split("\r\n").find_map(|line| line.strip_prefix("content-length:"));
    let mut left: usize = length.and_then(|length| length.trim().parse().ok()).unwrap_or(0);
    let mut leg = ScriptedLeg { is_get: text.starts_with("get "), is_streamed: false };
    let mut window = bytes.split_off(head + 4);
    *bytes = Vec::new();
    loop {
        leg.is_streamed |= memmem::find(&window, b"\"stream\":true").is_some();
        if window.len() > left {
            *bytes = window.split_off(left);
        }
        left -= window.len().min(left);
        if left == 0 {
            return Ok(Some(leg));
        }
        let len = stream.read(&mut buffer).await?;
        if len == 0 {
            return Ok(None);
        }
        // A marker may be split over two reads: then the answer is not streamed, which is as good.
        window.clear();
        window.extend_from_slice(&buffer[..len]);
    }
}

async fn send_whole(stream: &mut TcpStream, kind: &str, body: &str) -> io::Result<()> {
    let len = body.len();
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).await
}

fn usual(leg: &ScriptedLeg, is_prefill: bool) -> (&'static str, &'static str) {
    match (is_prefill, leg.is_streamed) {
        (true, _) => (
            "application/json",
            r#"{"id":"x","object":"text_completion","choices":[{"index":0,"text":"p"}],"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1],"remote_engine_id":"p","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}"#,
        ),
        (false, false) => (
            "application/json",
            r#"{"id":"x","object":"text_completion","choices":[{"index":0,"text":"from decode"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}"#,
        ),
        (false, true) => (
            "text/event-stream",
            "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"text\":\"from decode\"}]}\n\ndata: [DONE]\n\n",
        ),
    }
}

async fn send_usual(stream: &mut TcpStream, leg: &ScriptedLeg, prefill: bool) -> io::Result<()> {
    let (kind, body) = usual(leg, prefill);
    send_whole(stream, kind, body).await
}

/// Sends a scripted answer; true if the connection goes on.
async fn send(
    stream: &mut TcpStream,
    answer: &ScriptedAnswer,
    leg: &ScriptedLeg,
    is_prefill: bool,
) -> io::Result<bool> {
    sleep(answer.delay()).await;
    let framing = answer.framing();
    if framing == Framing::Never {
        // Until the router ends the connection.
        let _ended = stream.read(&mut [0]).await;
        return Ok(false);
    }
    let body = answer.body().unwrap_or_else(|| usual(leg, is_prefill).1.into());
    let mut bytes = answer.head();
    let length = match framing {
        Framing::Length => Some(body.len()),
        Framing::Longer => Some(body.len() + 7),
        Framing::Shorter => Some(body.len() / 2),
        _ => None,
    };
    match length {
        Some(length) => bytes.extend(format!("content-length: {length}\r\n\r\n").bytes()),
        None if framing == Framing::Close => bytes.extend(b"\r\n"),
        None => bytes.extend(b"transfer-encoding: chunked\r\n\r\n"),
    }
    if framing == Framing::Reset {
        stream.write_all(&bytes).await?;
        stream.set_zero_linger()?;
        return Ok(false);
    }
    if length.is_some() || framing == Framing::Close {
        bytes.extend(&body);
    } else {
        for chunk in body.chunks(100) {
            bytes.extend(format!("{:x}\r\n", chunk.len()).bytes());
            bytes.extend([chunk, b"\r\n"].concat());
        }
        match framing {
            Framing::BrokenChunk => bytes.extend(b"zz\r\nbroken\r\n"),
            Framing::Truncated => bytes.extend(b"40\r\ncut"),
            _ => bytes.extend(b"0\r\n\r\n"),
        }
    }
    drop(body);
    let piece = if answer.is_in_pieces() { 512 } else { bytes.len().max(1) };
    for piece in bytes.chunks(piece) {
        stream.write_all(piece).await?;
        tokio::task::yield_now().await;
    }
    let goes_on = matches!(framing, Framing::Length | Framing::Chunked);
    Ok(goes_on && !answer.closes())
}
