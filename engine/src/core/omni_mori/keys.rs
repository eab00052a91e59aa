//! Keys of payloads as the connectors of vLLM-Omni write them.

use crate::core::payload::{PayloadKey, PayloadStream};

/// The key of a request id, `{key}@{from}_{to}`, where the key of a chunk is
/// `{request}_{from}_{chunk}`; none if it names no stages. No two ids have one key.
pub(super) fn key_of(request_id: &str) -> Option<PayloadKey> {
    let (key, stages) = request_id.rsplit_once('@')?;
    let (from, to) =
        stages.split_once('_').filter(|(from, to)| !from.is_empty() && !to.is_empty())?;
    let stream = |request: &str| PayloadStream::new(from, to, request);
    Some(match chunk_of(key, from) {
        Some((request, chunk)) => stream(request).chunk(chunk),
        None => stream(key).whole(),
    })
}

/// Request and number of a chunk, if the key has the form of one.
fn chunk_of<'a>(key: &'a str, from: &str) -> Option<(&'a str, u64)> {
    let (head, number) = key.rsplit_once('_')?;
    let chunk: u64 = number.parse().ok()?;
    let request = head.strip_suffix(from)?.strip_suffix('_')?;
    (chunk.to_string() == number).then_some((request, chunk))
}

/// The request id of a key.
pub(super) fn request_id(PayloadKey { stream, chunk }: &PayloadKey) -> String {
    let PayloadStream { from, to, request } = stream;
    match chunk {
        Some(chunk) => format!("{request}_{from}_{chunk}@{from}_{to}"),
        None => format!("{request}@{from}_{to}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_keys_and_back() {
        let chunk = |request: &str, chunk| PayloadStream::new("0", "1", request).chunk(chunk);
        let whole = |request: &str| PayloadStream::new("0", "1", request).whole();
        for (id, key) in [
            ("req-1_0_0@0_1", chunk("req-1", 0)),
            ("a@b_0_18446744073709551615@0_1", chunk("a@b", u64::MAX)),
            ("_0_7@0_1", chunk("", 7)),
            ("omni_0_to_1_kv_cache_r@0_1", whole("omni_0_to_1_kv_cache_r")),
            // No numbers that are written so, or not of this stage.
            ("r_0_07@0_1", whole("r_0_07")),
            ("r_0_18446744073709551616@0_1", whole("r_0_18446744073709551616")),
            ("r_1_0@0_1", whole("r_1_0")),
            ("0_0@0_1", whole("0_0")),
            ("@0_1", whole("")),
        ] {
            assert_eq!(key_of(id).as_ref(), Some(&key), "{id}");
            assert_eq!(request_id(&key), id);
        }
        for none in ["", "r", "r@01", "r@_1", "r@0_"] {
            assert_eq!(key_of(none), None, "{none}");
        }
    }
}
