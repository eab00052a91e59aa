//! Addresses in request ids, against vLLM's own patterns in another engine for them.

use kvferry_engine::core::dialect::moriio::address::{
    ZmqAddress, embedded_peer, incarnation_of, with_incarnation,
};
use kvferry_engine::core::ids::{Incarnation, RequestId};
use kvferry_engine::core::message::Role;
use regex::Regex;
use std::sync::LazyLock;

/// Takes the bytes as a text, and as a list of pieces that the patterns look for.
///
/// # Panics
/// If the second implementation finds something else, or an address does not survive its text.
pub fn run(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        check(text);
    }
    let piece = |byte: &u8| PIECES[usize::from(*byte) % PIECES.len()];
    check(&data.iter().map(piece).collect::<String>());
}

const PIECES: &[&str] = &[
    "___prefill_addr_",
    "___decode_addr_",
    "_0123456789abcdef0123456789abcdef",
    "_",
    "0123456789abcdef",
    "-",
    "\n",
    "é",
    "A",
    "host:",
    "handshake:",
    "notify:",
    "kvferry:",
    ",",
    ":",
    " ",
    "+1",
    "1_0",
];

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the pattern is fixed")
}

static AT_DECODE: LazyLock<Regex> =
    LazyLock::new(|| pattern("___prefill_addr_(.+?)___decode_addr_"));

/// Python's `$` is also before a line feed at the end.
static AT_PREFILL: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?\n?\z"));

static PART: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?:^|,)([^:,]*):([^,]*)"));

static INT: LazyLock<Regex> = LazyLock::new(|| pattern(r"^\s*([+-]?)([0-9]+(?:_[0-9]+)*)\s*$"));

fn first<'a>(pattern: &Regex, text: &'a str) -> Option<&'a str> {
    Some(pattern.captures(text)?.get(1)?.as_str())
}

/// The last value under a key, as it stands there.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let parts = PART.captures_iter(text).map(|part| part.extract().1);
    parts.filter(|[name, _]| name.trim() == key).map(|[_, value]| value).last()
}

fn int(text: &str) -> Option<i64> {
    let (_, [sign, digits]) = INT.captures(text)?.extract();
    format!("{sign}{}", digits.replace('_', "")).parse().ok()
}

fn address(text: &str) -> Option<ZmqAddress> {
    let (handshake, notify) = (value(text, "handshake")?, value(text, "notify")?);
    let host = value(text, "host")?.trim().into();
    Some(ZmqAddress { host, handshake: int(handshake)?, notify: int(notify)? })
}

fn check(text: &str) {
    let request = RequestId::from(text);
    assert_eq!(embedded_peer(Role::Decode, &request), first(&AT_DECODE, text), "{text:?}");
    assert_eq!(embedded_peer(Role::Prefill, &request), first(&AT_PREFILL, text), "{text:?}");
    let found = ZmqAddress::parse(text);
    assert_eq!(found, address(text), "{text:?}");
    let incarnation = value(text, "kvferry")
        .and_then(|incarnation| u64::from_str_radix(incarnation.trim(), 16).ok().map(Incarnation));
    assert_eq!(incarnation_of(text), incarnation, "{text:?}");
    let Some(found) = found else { return };
    let incarnation = incarnation.unwrap_or(Incarnation(text.len() as u64));
    let again = with_incarnation(&found, incarnation);
    assert_eq!(incarnation_of(&again), Some(incarnation), "{again:?}");
    assert_eq!(ZmqAddress::parse(&again), Some(found), "{again:?}");
}
