//! The bytes that a client received, as responses.

use memchr::memmem;

/// One response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReceivedResponse {
    pub(super) status: u16,
    /// False if the connection ended before its end.
    pub(super) is_whole: bool,
    /// The router ends the connection after it.
    pub(super) closes: bool,
    pub(super) body: Vec<u8>,
}

/// The responses in `bytes`.
///
/// # Errors
/// Bytes that are not a response.
pub(super) fn responses(bytes: &[u8]) -> Result<Vec<ReceivedResponse>, String> {
    let (mut found, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let (response, len) = response(rest)?;
        let is_whole = response.is_whole;
        if response.status >= 200 || !is_whole {
            found.push(response);
        }
        if !is_whole {
            break;
        }
        rest = &rest[len..];
    }
    Ok(found)
}

fn response(bytes: &[u8]) -> Result<(ReceivedResponse, usize), String> {
    let wrong =
        || format!("no response: {:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(200)]));
    let cut = |status| ReceivedResponse { status, is_whole: false, closes: true, body: Vec::new() };
    let Some(head) = memmem::find(bytes, b"\r\n\r\n") else {
        let begins =
            b"HTTP/1.1 ".starts_with(&bytes[..bytes.len().min(9)]) || bytes.starts_with(b"HTTP/1.");
        return if begins { Ok((cut(0), bytes.len())) } else { Err(wrong()) };
    };
    let text = String::from_utf8_lossy(&bytes[..head]);
    let mut lines = text.split("\r\n");
    let status =
        lines.next().and_then(|line| line.strip_prefix("HTTP/1.")?.get(2..5)?.parse().ok());
    let status: u16 = status.ok_or_else(wrong)?;
    let (mut length, mut is_chunked, mut closes) = (None, false, false);
    for line in lines {
        let (name, value) = line.split_once(':').ok_or_else(wrong)?;
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = Some(value.parse::<usize>().map_err(|_| wrong())?),
            "transfer-encoding" => is_chunked = value.eq_ignore_ascii_case("chunked"),
            "connection" => closes |= value.eq_ignore_ascii_case("close"),
            _ => {}
        }
    }
    let rest = &bytes[head + 4..];
    let (body, used) = match (is_chunked, length) {
        _ if status < 200 || status == 204 || status == 304 => (Some(Vec::new()), 0),
        (true, _) => chunks(rest)?,
        (false, Some(length)) if rest.len() < length => (None, rest.len()),
        (false, Some(length)) => (Some(rest[..length].to_vec()), length),
        (false, None) => (Some(rest.to_vec()), rest.len()),
    };
    let is_whole = body.is_some();
    let response = ReceivedResponse { status, is_whole, closes, body: body.unwrap_or_default() };
    Ok((response, head + 4 + used))
}

/// The chunks of a body and their length; no body if the last one is missing.
fn chunks(bytes: &[u8]) -> Result<(Option<Vec<u8>>, usize), String> {
    let (mut body, mut at) = (Vec::new(), 0);
    loop {
        let Some(line) = memmem::find(&bytes[at..], b"\r\n") else {
            return Ok((None, bytes.len()));
        };
        let size = String::from_utf8_lossy(&bytes[at..at + line]).into_owned();
        let size = usize::from_str_radix(&size, 16).map_err(|_| format!("no chunk: {size:?}"))?;
        let begin = at + line + 2;
        if bytes.len() < begin + size + 2 {
            return Ok((None, bytes.len()));
        }
        if &bytes[begin + size..begin + size + 2] != b"\r\n" {
            return Err("a chunk without its end".into());
        }
        body.extend_from_slice(&bytes[begin..begin + size]);
        at = begin + size + 2;
        if size == 0 {
            return Ok((Some(body), at));
        }
    }
}
