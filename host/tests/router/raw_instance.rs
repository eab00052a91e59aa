//! Stand-in instances that answer with given bytes, heads included.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Most bytes of a leg's body that are kept.
const KEPT: usize = 64 << 10;

/// A leg as received.
#[derive(Clone, Debug, Default)]
pub(crate) struct RawLeg {
    /// The request line and the headers.
    pub(crate) head: String,
    /// The beginning of the body.
    pub(crate) body: String,
}

type RawAnswer = dyn Fn(&RawLeg) -> Vec<u8> + Send + Sync;

/// An instance with threads of its own, which end with the test program.
pub(crate) struct RawInstance {
    pub(crate) url: String,
    pub(crate) legs: Arc<Mutex<Vec<RawLeg>>>,
    /// Number of answers that were sent, or that the router refused to read.
    pub(crate) answered: Arc<AtomicUsize>,
}

impl RawInstance {
    /// An instance at a free port. If an answer is shorter than its head says, it never ends.
    pub(crate) fn start(
        answer: impl Fn(&RawLeg) -> Vec<u8> + Send + Sync + 'static,
    ) -> RawInstance {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answer: Arc<RawAnswer> = Arc::new(answer);
        let instance = RawInstance { url, legs: Arc::default(), answered: Arc::default() };
        let (legs, answered) = (instance.legs.clone(), instance.answered.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, legs, answered) = (answer.clone(), legs.clone(), answered.clone());
                // The router may end the connection at any time.
                std::thread::spawn(move || serve(&stream?, &*answer, &legs, &answered));
            }
        });
        instance
    }
}

fn serve(
    stream: &TcpStream,
    answer: &RawAnswer,
    legs: &Mutex<Vec<RawLeg>>,
    answered: &AtomicUsize,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reads = BufReader::new(stream);
    loop {
        let mut leg = RawLeg::default();
        while !leg.head.ends_with("\r\n\r\n") {
            if reads.read_line(&mut leg.head)? == 0 {
                return Ok(());
            }
        }
        let length = leg.head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length.min(KEPT)];
        reads.read_exact(&mut body)?;
        std::io::copy(&mut (&mut reads).take((length - body.len()) as u64), &mut std::io::sink())?;
        leg.body = String::from_utf8_lossy(&body).into_owned();
        if leg.head.starts_with("GET ") {
            (&*stream).write_all(&json("", r#"{"object":"list","data":[{"id":"m"}]}"#))?;
            continue;
        }
        let bytes = answer(&leg);
        legs.lock().unwrap().push(leg);
        let sent = (&*stream).write_all(&bytes);
        answered.fetch_add(1, Ordering::Relaxed);
        sent?;
    }
}

/// An answer with further headers, each with its line end.
pub(crate) fn json(headers: &str, body: &str) -> Vec<u8> {
    let len = body.len();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json";
    format!("{head}\r\ncontent-length: {len}\r\n{headers}\r\n{body}").into()
}

/// The answer of a prefill that had two prompt tokens cached, with these `kv_transfer_params`.
pub(crate) fn prefilled(params: &str) -> Vec<u8> {
    let usage = r#"{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":2}}"#;
    json("", &format!(r#"{{"choices":[],"usage":{usage},"kv_transfer_params":{params}}}"#))
}

/// Parameters by which a decode reads.
pub(crate) const PARAMS: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1],"remote_engine_id":"p","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}"#;

/// The answer of a decode.
pub(crate) fn decoded() -> Vec<u8> {
    json("", r#"{"id":"x","choices":[{"index":0,"text":"from decode"}]}"#)
}
