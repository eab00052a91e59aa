//! The fuzzer's bytes as scripts: requests of clients, and answers of a prefill and a decode.
//!
//! The bytes are records. The low two bits of a record's first byte name an actor (two clients, the
//! prefill, the decode), the others the kind of a client's step; then come the fields, each one byte,
//! and a text with its length in front.

use arbitrary::Unstructured;
use std::time::Duration;

/// Records of an input; further ones are ignored.
const RECORDS_MAX: usize = 32;

/// Clients, each with one connection.
pub(super) const CLIENTS: usize = 2;

/// One thing that a client does.
#[derive(Clone, Debug)]
pub(super) enum ClientStep {
    /// Sends bytes that need not be HTTP.
    Raw(Vec<u8>),
    /// Sends a whole request.
    Request(ScriptedRequest),
    /// Sends the head of a request and half of its body.
    Half(ScriptedRequest),
    Pause(Duration),
    /// Does not read any more.
    StopReading,
    /// Resets the connection.
    Reset,
}

/// A completion, or another request.
#[derive(Clone, Debug)]
pub(super) struct ScriptedRequest {
    flags: u8,
    samples: u8,
    /// Shape of the body in the upper two bits, and its size in the others.
    shape: u8,
    /// Further members of the body.
    extra: Vec<u8>,
}

/// Answer of an instance to one leg.
#[derive(Clone, Debug)]
pub(super) struct ScriptedAnswer {
    status: u8,
    /// Framing in the lower four bits, flags in the upper ones.
    framing: u8,
    header: u8,
    /// Kind of the body in the upper three bits, and its size in the others.
    body: u8,
    text: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Script {
    pub(super) clients: [Vec<ClientStep>; CLIENTS],
    /// Answers of the prefill and of the decode, in the order of legs; further legs are answered well.
    pub(super) instances: [Vec<ScriptedAnswer>; 2],
}

/// Framing of an answer's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Length,
    Chunked,
    Close,
    /// The length is greater than that of the body.
    Longer,
    /// The length is less than that of the body.
    Shorter,
    /// A chunk has a length that is not a number.
    BrokenChunk,
    /// The connection ends in the middle of a chunk.
    Truncated,
    /// The connection is reset after the head.
    Reset,
    /// Nothing is sent.
    Never,
}

impl Script {
    pub(super) fn read(data: &[u8]) -> Script {
        let mut script = Script::default();
        let mut bytes = Unstructured::new(data);
        for _ in 0..RECORDS_MAX {
            if bytes.is_empty() {
                break;
            }
            // Bytes that are missing read as zero.
            let kind = byte(&mut bytes);
            match usize::from(kind & 3) {
                nth if nth < CLIENTS => script.clients[nth].push(step(kind >> 2, &mut bytes)),
                nth => script.instances[nth - CLIENTS].push(answer(&mut bytes)),
            }
        }
        script
    }

    /// Bytes of all bodies.
    pub(super) fn bytes(&self) -> usize {
        let asked = self.clients.iter().flatten().map(|step| match step {
            ClientStep::Request(it) | ClientStep::Half(it) => it.bytes().len(),
            ClientStep::Raw(bytes) => bytes.len(),
            _ => 0,
        });
        let answered = self.instances.iter().flatten().map(|it| it.bytes().len());
        asked.sum::<usize>() + answered.sum::<usize>()
    }
}

fn byte(bytes: &mut Unstructured<'_>) -> u8 {
    bytes.arbitrary().unwrap_or_default()
}

fn text(bytes: &mut Unstructured<'_>) -> Vec<u8> {
    let len = usize::from(byte(bytes)).min(bytes.len());
    bytes.bytes(len).unwrap_or_default().to_vec()
}

fn request(bytes: &mut Unstructured<'_>) -> ScriptedRequest {
    let [flags, samples, shape] = std::array::from_fn(|_| byte(bytes));
    ScriptedRequest { flags, samples, shape, extra: text(bytes) }
}

fn step(kind: u8, bytes: &mut Unstructured<'_>) -> ClientStep {
    match kind % 8 {
        0 => ClientStep::Raw(text(bytes)),
        4 => ClientStep::Half(request(bytes)),
        5 => ClientStep::Pause(Duration::from_millis(100 * u64::from(byte(bytes)))),
        6 => ClientStep::StopReading,
        7 => ClientStep::Reset,
        _ => ClientStep::Request(request(bytes)),
    }
}

fn answer(bytes: &mut Unstructured<'_>) -> ScriptedAnswer {
    let [status, framing, header, body] = std::array::from_fn(|_| byte(bytes));
    ScriptedAnswer { status, framing, header, body, text: text(bytes) }
}

/// Members `"k0":0` and so on, each with a comma behind.
fn keys(count: usize) -> String {
    (0..count).map(|n| format!("\"k{n}\":0,")).collect()
}

impl ScriptedRequest {
    fn has(&self, bit: u8) -> bool {
        self.flags >> bit & 1 == 1
    }

    pub(super) fn is_chunked(&self) -> bool {
        self.has(2)
    }

    /// Pieces in which the request is sent.
    pub(super) fn piece(&self) -> usize {
        if self.has(7) { 97 } else { usize::MAX }
    }

    pub(super) fn head(&self) -> String {
        let path = match self.has(1) {
            true => "/v1/chat/completions",
            false => "/v1/completions",
        };
        let mut head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        );
        if self.has(3) {
            head += "connection: close\r\n";
        }
        if self.has(4) {
            head += "x-request-id: of-the-client\r\n";
        }
        head
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let size = usize::from(self.shape & 63);
        let mut body = String::from("{\"model\":\"m\",\"max_tokens\":4,");
        let mut prompt = "p".to_owned();
        match self.shape >> 6 {
            0 => {}
            1 => body += &keys(size * 16),
            2 => {
                let depth = size * 16;
                body += &format!("\"deep\":{}{},", "[".repeat(depth), "]".repeat(depth));
            }
            _ => prompt = "p".repeat(size * 4096),
        }
        let samples = [1, 1, 1, 1, 2, 3, 8, 128][usize::from(self.samples & 7)];
        if samples > 1 {
            body += &format!("\"n\":{samples},");
        }
        if self.has(0) {
            body += "\"stream\":true,";
        }
        if self.has(6) {
            body += "\"stream_options\":{\"include_usage\":true},";
        }
        let prompt = match (self.has(1), self.has(5)) {
            (true, _) => format!("\"messages\":[{{\"role\":\"user\",\"content\":\"{prompt}\"}}]"),
            (false, true) => format!("\"prompt\":[\"{prompt}\",\"q\"]"),
            (false, false) => format!("\"prompt\":\"{prompt}\""),
        };
        body += &prompt;
        let mut body = body.into_bytes();
        if !self.extra.is_empty() {
            body.push(b',');
            body.extend_from_slice(&self.extra);
        }
        body.push(b'}');
        body
    }
}

const STATUS: [u16; 24] = [
    200, 200, 200, 200, 201, 204, 304, 307, 400, 401, 404, 408, 413, 421, 429, 500, 501, 502, 503,
    504, 100, 101, 199, 999,
];

impl ScriptedAnswer {
    fn has(&self, bit: u8) -> bool {
        self.framing >> bit & 1 == 1
    }

    pub(super) fn framing(&self) -> Framing {
        use Framing::*;
        let all = [Length, Chunked, Close, Longer, Shorter, BrokenChunk, Truncated, Reset, Never];
        all[usize::from(self.framing & 15) % all.len()]
    }

    pub(super) fn is_in_pieces(&self) -> bool {
        self.has(5)
    }

    pub(super) fn delay(&self) -> Duration {
        Duration::from_secs(u64::from(self.has(6)))
    }

    /// The connection ends after the answer.
    pub(super) fn closes(&self) -> bool {
        self.has(7)
    }

    /// The head without the framing.
    pub(super) fn head(&self) -> Vec<u8> {
        let status = STATUS[usize::from(self.status) % STATUS.len()];
        let kind = if self.has(4) { "text/event-stream" } else { "application/json" };
        let mut head = format!("HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\n").into_bytes();
        match self.header % 6 {
            1 => head.extend(format!("x-long: {}\r\n", "v".repeat(40 << 10)).bytes()),
            2 => (0..90).for_each(|n| head.extend(format!("x-{n}: v\r\n").bytes())),
            3 => head.extend(
                b"connection: x-own\r\nx-own: 1\r\nset-cookie: a=b\r\nlocation: http://10.0.0.1/\r\n",
            ),
            4 => head.extend([b"x-odd: ", &self.text[..], b"\r\n"].concat()),
            5 => head.extend(format!("x-endless: {}\r\n", "v".repeat(600 << 10)).bytes()),
            _ => {}
        }
        head
    }

    /// The body; `None` for the default one.
    pub(super) fn body(&self) -> Option<Vec<u8>> {
        let size = usize::from(self.body & 31);
        let params = |params: &[u8]| {
            let front = b"{\"id\":\"x\",\"choices\":[],\"kv_transfer_params\":";
            [&front[..], params, b"}"].concat()
        };
        Some(match self.body >> 5 {
            0 => return None,
            1 => self.text.clone(),
            2 => params(&self.text),
            3 => b"data: {}\n\n".repeat(size * 64),
            4 => vec![b'x'; size << 15],
            5 => [b"data: ", &self.text[..], b"\n\n"].concat().repeat(size.max(1)),
            6 => params(&[b"[".repeat(size * 64), b"]".repeat(size * 64)].concat()),
            _ => params(format!("{{{}\"a\":1}}", keys(size * 64)).as_bytes()),
        })
    }

    fn bytes(&self) -> Vec<u8> {
        [self.head(), self.body().unwrap_or_default()].concat()
    }
}
