//! What clients are told of legs that failed: the reason and the remedy, and no address of the fleet.

use super::metrics::role_name;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::message::Role;
use kvferry_engine::text::printable;
use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

/// Most characters of an instance's text that clients are shown.
const SHOWN_MAX: usize = 600;

/// What stands in the place of an address.
const HIDDEN: &str = "(address)";

/// Why a leg went without KV, or did not hand KV over, and what to do. `role` is that of the
/// instance that said so.
pub(super) fn kv_failure(role: Role, failure: &Failure) -> String {
    let what = match role {
        Role::Prefill => "the prefill instance did not hand the prompt's KV over",
        Role::Decode => "the prompt's KV did not reach the decode instance",
    };
    let (kind, why) = (failure.kind(), without_addresses(&failure.to_string()));
    match failure.remedy() {
        Some(remedy) => format!("{what} ({kind}): {why}; {remedy}"),
        None => format!("{what} ({kind}): {why}"),
    }
}

/// What happened to a leg at an instance of this role.
pub(super) fn at_instance(role: Role, why: &str) -> String {
    format!("the {} instance: {}", role_name(role), without_addresses(why))
}

/// What an instance of this role answered instead of saying why.
pub(super) fn without_cause(role: Role, status: u16, waited_ms: u128) -> String {
    let name = role_name(role);
    format!(
        "the {name} instance answered with status {status} and no reason, and its kvferry host gave none \
         within {waited_ms} ms: the logs of that server and of its host have it; if the host has ended or \
         stands still, start it again"
    )
}

/// The text of an instance as clients see it: printable, not too long, and without IP addresses and
/// hosts with a port.
pub(super) fn without_addresses(text: &str) -> String {
    let text = printable(text, SHOWN_MAX);
    let is_word = |c: char| c.is_ascii_alphanumeric() || "._:/[]%-".contains(c);
    let mut shown = String::with_capacity(text.len());
    let mut rest = &*text;
    while !rest.is_empty() {
        let other = rest.find(is_word).unwrap_or(rest.len());
        shown.push_str(&rest[..other]);
        rest = &rest[other..];
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        shown.push_str(&hidden(&rest[..end]));
        rest = &rest[end..];
    }
    shown
}

/// A word, or what stands for it if it is an address.
fn hidden(word: &str) -> Cow<'_, str> {
    let bare = word.trim_end_matches(['.', ':', '-']);
    let after = &word[bare.len()..];
    let place = bare.split_once("://").map_or(bare, |(_, place)| place);
    let place = place.split('/').next().unwrap_or_default();
    if is_address(place) { format!("{HIDDEN}{after}").into() } else { word.into() }
}

fn is_address(text: &str) -> bool {
    let unbracketed = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let ip = unbracketed.unwrap_or(text);
    let ip = ip.split_once('%').map_or(ip, |(ip, _)| ip);
    // Names of hosts are shown with a port only: a name alone may be any word.
    let named = text.rsplit_once(':').is_some_and(|(host, port)| {
        let is_host = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        port.parse::<u16>().is_ok()
            && host.contains(|c: char| c.is_ascii_alphabetic())
            && host.chars().all(is_host)
    });
    named || ip.parse::<IpAddr>().is_ok() || text.parse::<SocketAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_engine::core::error::PeerViolation;

    #[test]
    fn addresses_are_hidden_and_other_words_are_not() {
        for (text, shown) in [
            ("block 4 in layer 5, from 10.0.0.1:6301", "block 4 in layer 5, from (address)"),
            ("at tcp://[fd00::1]:6301: refused", "at (address): refused"),
            ("http://prefill-0.ns.svc:8000/health.", "(address)."),
            ("(10.0.0.1) ::1 fe80::1%eth0", "((address)) (address) (address)"),
            ("decode-0:6301 speaks only MoRIIO", "(address) speaks only MoRIIO"),
            ("block sizes: 16 and 32, layers 1..4", "block sizes: 16 and 32, layers 1..4"),
            ("no answer within 1.5s; v0.1.2 --legs-ca", "no answer within 1.5s; v0.1.2 --legs-ca"),
            ("a\u{1b}[31m\u{202e}b\n", "a\u{fffd}[31m\u{fffd}b\u{fffd}"),
        ] {
            assert_eq!(without_addresses(text), shown);
        }
        assert_eq!(without_addresses(&"x".repeat(10_000)).len(), SHOWN_MAX);
    }

    #[test]
    fn cause_has_kind_and_remedy_and_hides_the_peer() {
        let violation = PeerViolation {
            peer: "10.0.0.7:6301".into(),
            frame: "Grant".into(),
            rule: "blocks are missing".into(),
        };
        let said = kv_failure(Role::Decode, &Failure::Violation(violation));
        let expected = "the prompt's KV did not reach the decode instance (violation): peer (address) \
            broke the protocol: blocks are missing in Grant; install one version of kvferry on both \
            instances";
        assert_eq!(said, expected);
        let said = kv_failure(Role::Prefill, &Failure::Overload);
        assert!(said.starts_with("the prefill instance did not hand") && said.contains("overload"));
    }
}
