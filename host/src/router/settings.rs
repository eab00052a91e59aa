//! Limits and options of the HTTP side.

use hyper::header::HeaderValue;
use std::time::Duration;

/// How long things may take and how large they may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HttpLimits {
    /// Time for a connection to an instance.
    pub(crate) connect: Duration,
    /// Time until an instance begins to answer.
    pub(crate) answer: Duration,
    /// Longest silence of a stream that has begun.
    pub(crate) idle: Duration,
    /// Longest body of a client, in bytes.
    pub(crate) body_bytes: usize,
    /// Time for a client to send its body.
    pub(crate) body: Duration,
    /// Longest answer that is not streamed, in bytes.
    pub(crate) answer_bytes: usize,
    /// Transfers of one request.
    pub(crate) parts: u32,
    /// Tokens per run of prefixes.
    pub(crate) prefix_tokens: u32,
}

/// What does not change while the router runs.
#[derive(Clone, Debug)]
pub(crate) struct HttpSettings {
    pub(crate) limits: HttpLimits,
    /// Sent to instances in place of what the client sends.
    pub(crate) authorization: Option<HeaderValue>,
}
