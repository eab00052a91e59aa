//! W3C Trace Context: the headers by which the spans of several processes are one trace.

use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};
use serde::Deserialize;
use std::borrow::Cow;
use std::str::FromStr;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Length of a `traceparent` of version 00, in bytes.
const PARENT_LENGTH: usize = 55;

/// Longest `tracestate` that is carried on, in bytes.
const STATE_MAX: usize = 512;

/// The span that a caller names as the parent. What is no `traceparent`, or is there twice, is as
/// good as none, and so is a `tracestate` that cannot be read or is longer than 512 bytes.
pub(crate) fn parent_of(headers: &HeaderMap) -> Option<SpanContext> {
    let mut parents = headers.get_all(TRACEPARENT).iter();
    let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
    context(parent.to_str().ok()?, || state(headers))
}

/// The key of `kv_transfer_params` with a `traceparent`.
pub(crate) const PARENT_KEY: &str = "traceparent";

/// The span that `kv_transfer_params` name as the parent; none if they name none, or wrongly.
pub(crate) fn parent_in(params: &str) -> Option<SpanContext> {
    #[derive(Deserialize)]
    struct TracedParams<'a> {
        #[serde(borrow)]
        traceparent: Option<Cow<'a, str>>,
    }
    let TracedParams { traceparent } = serde_json::from_str(params).ok()?;
    context(&traceparent?, || None)
}

fn context(parent: &str, state: impl FnOnce() -> Option<TraceState>) -> Option<SpanContext> {
    let (trace, span, flags) = fields(parent)?;
    let context = SpanContext::new(trace, span, flags, true, state().unwrap_or_default());
    context.is_valid().then_some(context)
}

/// The ids and the flag of a `traceparent`; of later versions the part that is known.
fn fields(text: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let (known, more) = text.split_at_checked(PARENT_LENGTH)?;
    let is_one = |(at, byte): (usize, u8)| match at {
        2 | 35 | 52 => byte == b'-',
        _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
    };
    let is_form = known.bytes().enumerate().all(is_one);
    let is_known = match &known[..2] {
        "00" => more.is_empty(),
        "ff" => false,
        _ => more.is_empty() || more.starts_with('-'),
    };
    if !is_form || !is_known {
        return None;
    }
    let trace = TraceId::from_hex(&known[3..35]).ok()?;
    let span = SpanId::from_hex(&known[36..52]).ok()?;
    let flags = u8::from_str_radix(&known[53..], 16).ok()?;
    Some((trace, span, TraceFlags::new(flags) & TraceFlags::SAMPLED))
}

fn state(headers: &HeaderMap) -> Option<TraceState> {
    let mut all = String::new();
    for part in headers.get_all(TRACESTATE) {
        let part = part.to_str().ok()?;
        if all.len() + 1 + part.len() > STATE_MAX {
            return None;
        }
        if !all.is_empty() {
            all.push(',');
        }
        all.push_str(part);
    }
    TraceState::from_str(&all).ok()
}

/// A `traceparent` of version 00.
pub(crate) fn traceparent(context: &SpanContext) -> String {
    let flags = context.trace_flags() & TraceFlags::SAMPLED;
    format!("00-{}-{}-{flags:02x}", context.trace_id(), context.span_id())
}

/// Names the parent to who is called, in place of what the headers named.
pub(crate) fn insert_context(headers: &mut HeaderMap, context: &SpanContext) {
    let parent = HeaderValue::try_from(traceparent(context)).expect("hexadecimal digits");
    headers.insert(TRACEPARENT, parent);
    let state = context.trace_state().header();
    match HeaderValue::try_from(state) {
        Ok(state) if !state.is_empty() => headers.insert(TRACESTATE, state),
        _ => headers.remove(TRACESTATE),
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let line = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).expect("a value"))
        };
        lines.iter().map(line).collect()
    }

    fn read(parent: &str) -> Option<String> {
        let context = parent_of(&headers(&[("traceparent", parent)]))?;
        let is_sampled = context.is_sampled();
        Some(format!("{} {} {is_sampled}", context.trace_id(), context.span_id()))
    }

    /// <https://www.w3.org/TR/trace-context/#versioning-of-traceparent>
    #[test]
    fn a_traceparent_is_read_as_the_standard_says() {
        let known = |sampled: bool| Some(format!("{TRACE} {SPAN} {sampled}"));
        for (version, flags, more, expected) in [
            ("00", "01", "", known(true)),
            ("00", "00", "", known(false)),
            ("00", "fe", "", known(false)),
            ("00", "ff", "", known(true)),
            ("cc", "01", "", known(true)),
            ("cc", "01", "-what-the-future-will-be-like", known(true)),
            ("cc", "01", ".what", None),
            ("00", "01", "-more", None),
            ("00", "01", "-", None),
            ("ff", "01", "", None),
            ("0", "01", "", None),
            ("00", ".1", "", None),
            ("00", "+1", "", None),
            ("00", "0A", "", None),
        ] {
            let parent = format!("{version}-{TRACE}-{SPAN}-{flags}{more}");
            assert_eq!(read(&parent), expected, "{parent}");
        }
        let zero = format!("00-{}-{SPAN}-01", "0".repeat(32));
        let no_span = format!("00-{TRACE}-{}-01", "0".repeat(16));
        let upper = format!("00-{}-{SPAN}-01", TRACE.to_uppercase());
        for parent in ["", "00", &zero, &no_span, &upper, &"-".repeat(55), &"é".repeat(40)] {
            assert_eq!(read(parent), None, "{parent}");
        }
        let twice = format!("00-{TRACE}-{SPAN}-01");
        assert!(parent_of(&headers(&[("traceparent", &*twice); 2])).is_none());
    }

    #[test]
    fn a_tracestate_is_carried_on_if_it_is_one() {
        let parent = format!("00-{TRACE}-{SPAN}-01");
        let carried = |states: &[&str]| {
            let mut lines = vec![("traceparent", &*parent)];
            lines.extend(states.iter().map(|state| ("tracestate", *state)));
            let context = parent_of(&headers(&lines)).expect("a parent");
            let mut sent = headers(&[("tracestate", "old=1"), ("traceparent", "old")]);
            insert_context(&mut sent, &context);
            assert_eq!(sent["traceparent"], parent);
            sent.get("tracestate").map(|state| state.to_str().expect("text").to_owned())
        };
        assert_eq!(carried(&["a=1,b=2"]).as_deref(), Some("a=1,b=2"));
        assert_eq!(carried(&["a=1", "b=2"]).as_deref(), Some("a=1,b=2"));
        let long = format!("a={}", "x".repeat(STATE_MAX));
        for none in [&[][..], &[""], &["no list"], &[&long]] {
            assert_eq!(carried(none), None, "{none:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_sent_is_what_is_read(trace in 1u128.., span in 1u64.., sampled: bool) {
            let flags = TraceFlags::default().with_sampled(sampled);
            let (trace, span) = (TraceId::from(trace), SpanId::from(span));
            let sent = SpanContext::new(trace, span, flags, true, TraceState::default());
            let mut headers = HeaderMap::new();
            insert_context(&mut headers, &sent);
            prop_assert_eq!(parent_of(&headers), Some(sent.clone()));
            let params = format!("{{\"do\":{{}},\"{PARENT_KEY}\":\"{}\"}}", traceparent(&sent));
            prop_assert_eq!(parent_in(&params), Some(sent));
        }

        #[test]
        fn anything_may_be_said(parent in "\\PC{0,70}", state in "\\PC{0,600}", text in "[{}\":a-z0-9,-]{0,80}") {
            if let (Ok(parent), Ok(state)) = (HeaderValue::from_str(&parent), HeaderValue::from_str(&state)) {
                let mut headers = HeaderMap::new();
                headers.insert(TRACEPARENT, parent);
                headers.insert(TRACESTATE, state);
                let _ = parent_of(&headers);
            }
            let _ = parent_in(&text);
        }
    }
}
