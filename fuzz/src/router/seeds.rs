//! Scripts to start from: each has one misbehaviour of a client or of an instance.

/// Actors of a record.
const CLIENT: u8 = 0;
const OTHER_CLIENT: u8 = 1;
const PREFILL: u8 = 2;
const DECODE: u8 = 3;

/// Steps of a client.
const RAW: u8 = 0;
const REQUEST: u8 = 1;
const HALF: u8 = 4;
const PAUSE: u8 = 5;
const STOP_READING: u8 = 6;
const RESET: u8 = 7;

/// Flags of a request.
const STREAM: u8 = 1;
const CHAT: u8 = 2;
const CHUNKED: u8 = 4;
const CLOSE: u8 = 8;
const LIST: u8 = 32;
const USAGE: u8 = 64;
const PIECES: u8 = 128;

/// Flags of an answer, beside its framing.
const EVENTS: u8 = 16;
const SPLIT: u8 = 32;
const LATE: u8 = 64;

fn with_text(mut record: Vec<u8>, text: &[u8]) -> Vec<u8> {
    record.push(text.len() as u8);
    record.extend_from_slice(text);
    record
}

fn step(client: u8, step: u8) -> Vec<u8> {
    vec![client | step << 2]
}

/// A request with these flags, `n`, shape and further members.
fn request(client: u8, kind: u8, [flags, samples, shape]: [u8; 3], extra: &[u8]) -> Vec<u8> {
    with_text(vec![client | kind << 2, flags, samples, shape], extra)
}

fn raw(client: u8, text: &[u8]) -> Vec<u8> {
    with_text(step(client, RAW), text)
}

fn answer(role: u8, [status, framing, header, body]: [u8; 4], text: &[u8]) -> Vec<u8> {
    with_text(vec![role, status, framing, header, body], text)
}

fn plain() -> Vec<u8> {
    request(CLIENT, REQUEST, [0, 0, 0], b"")
}

fn streamed() -> Vec<u8> {
    request(CLIENT, REQUEST, [STREAM | USAGE, 0, 0], b"")
}

/// Requests of each shape and flag, whole, in halves and in pieces.
fn of_clients() -> Vec<Vec<u8>> {
    let head: &[u8] = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n";
    let body: &[u8] = b"content-type: application/json\r\ncontent-length: 28\r\n\r\n{\"model\":\"m\",\"prompt\":\"p\"}";
    let flags = [STREAM, CHAT, CHUNKED, CLOSE, LIST, USAGE | STREAM, PIECES, STREAM | LIST, 255];
    let mut seeds: Vec<_> =
        flags.iter().map(|flags| request(CLIENT, REQUEST, [*flags, 0, 0], b"")).collect();
    // Many keys, deep lists, a long prompt.
    seeds.extend([127, 191, 255].map(|shape| request(CLIENT, REQUEST, [0, 0, shape], b"")));
    // As many legs as there may be, of a long prompt.
    seeds.push(request(CLIENT, REQUEST, [0, 7, 255], b""));
    // Several samples, alone and of a stream.
    seeds.extend([4, 6, 7].map(|n| request(CLIENT, REQUEST, [n & STREAM, n, 0], b"")));
    let extras: [&[u8]; 5] = [
        b"\"kv_transfer_params\":{\"remote_host\":\"h\"}",
        b"\"sampling_params\":{\"extra_args\":{\"kv_transfer_params\":{}}}",
        b"\"n\":1.0,\"stream\":\"false\"",
        b"\"logit_bias\":{\"5\":-Infinity}",
        b"\"prompt\":[[1,2],[3]],\"stream\":null",
    ];
    seeds.extend(extras.map(|extra| request(CLIENT, REQUEST, [0, 0, 0], extra)));
    seeds.extend([
        [plain(), plain(), streamed(), plain()].concat(),
        [plain(), streamed(), request(OTHER_CLIENT, REQUEST, [STREAM, 5, 0], b"")].concat(),
        request(CLIENT, HALF, [CHUNKED, 0, 200], b""),
        [request(CLIENT, HALF, [0, 0, 0], b""), step(CLIENT, RESET)].concat(),
        [streamed(), step(CLIENT, RESET)].concat(),
        [step(CLIENT, STOP_READING), streamed(), streamed()].concat(),
        [plain(), step(CLIENT, PAUSE), vec![200], plain()].concat(),
        raw(CLIENT, &[head, body].concat()),
        raw(CLIENT, &[head, b"transfer-encoding: chunked\r\n", body].concat()),
        raw(CLIENT, &[head, b"expect: 100-continue\r\nconnection: content-type\r\n", body].concat()),
        raw(CLIENT, b"OPTIONS * HTTP/1.1\r\nhost: a\r\norigin: http://b\r\n\r\nGET /v1/models HTTP/1.0\r\n\r\n"),
        raw(CLIENT, b"\x16\x03\x01\0PRI * HTTP/2.0\r\n\r\n"),
    ]);
    seeds
}

/// Each framing, head and body of an answer, by the prefill and by the decode.
fn of_instances() -> Vec<Vec<u8>> {
    let mut answers = Vec::new();
    answers.extend((0..9).map(|framing| ([0, framing, 0, 0], &b""[..])));
    answers.extend((0..9).map(|framing| ([0, framing | EVENTS | SPLIT, 0, 0x62], &b""[..])));
    answers.extend((1..6).map(|header| ([0, 0, header, 0], &b"\xff\x01odd"[..])));
    answers.extend((4..24).map(|status| ([status, 0, 0, 0x20], &b"{\"error\":{\"code\":1}}"[..])));
    answers.extend(
        [0x20, 0x40, 0x9f, 0xa3, 0xdf, 0xff].map(|body| ([0, 1, 0, body], &b"[1e999]"[..])),
    );
    let params: [&[u8]; 6] = [
        b"null",
        b"{\"remote_host\":\"\\ud800\"}",
        b"{\"do_remote_prefill\":1}",
        b"{\"a\":1,\"a\":2}",
        b"\"text\"",
        b"{",
    ];
    answers.extend(params.map(|params| ([0, LATE, 0, 0x40], params)));
    let error = &b"{\"error\":{\"message\":\"m\",\"code\":503}}"[..];
    answers.push(([0, 1 | EVENTS, 0, 0xa1], error));
    answers.push(([0, 1 | EVENTS, 0, 0xa3], b"{\"choices\":[{\"index\":7}],\"usage\":{}}"));
    let seeds = answers.iter().enumerate().map(|(nth, (fields, text))| {
        let asked = match nth % 3 {
            0 => plain(),
            1 => streamed(),
            _ => request(CLIENT, REQUEST, [STREAM | LIST, 4, 0], b""),
        };
        let answers = [PREFILL, DECODE].map(|role| answer(role, *fields, text));
        [answers.concat(), asked].concat()
    });
    seeds.collect()
}

/// Scripts with one misbehaviour each.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = of_clients();
    seeds.extend(of_instances());
    seeds
}
