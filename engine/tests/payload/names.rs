//! Keys and streams that the properties of payloads draw.

use kvferry_engine::core::payload::{PayloadKey, PayloadStream};

/// Stream from stage 0 to stage 1 of a request.
pub(crate) fn stream(request: u8) -> PayloadStream {
    PayloadStream::new("0", "1", &format!("request-{request}"))
}

/// Key of a chunk of a request. The third is the key of a single payload.
pub(crate) fn key((request, chunk): (u8, u8)) -> PayloadKey {
    match chunk {
        2 => stream(request).whole(),
        chunk => stream(request).chunk(chunk.into()),
    }
}
