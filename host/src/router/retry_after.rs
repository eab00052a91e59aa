//! The header `Retry-After`: time after which a busy server asks for the next attempt.

use hyper::header::{HeaderMap, RETRY_AFTER};
use std::time::{Duration, SystemTime};

/// Longest time that the router accepts.
const LONGEST: Duration = Duration::from_secs(3_600);

/// The time that an answer names, in seconds or as a date; `None` if it has none or is not valid.
pub(crate) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let span = match text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() {
        true => text.parse().map_or(LONGEST, Duration::from_secs),
        // A date in the past means at once.
        false => httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default(),
    };
    Some(span.min(LONGEST))
}

/// Seconds of a span, rounded up; at least one, so that no client retries at once.
pub(crate) fn seconds(span: Duration) -> u64 {
    span.as_nanos().div_ceil(1_000_000_000).clamp(1, LONGEST.as_secs().into()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_and_dates_are_read_and_bounded() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_700);
        for (text, expected) in [
            ("7", Some(7)),
            (" 0 ", Some(0)),
            ("99999", Some(3_600)),
            ("99999999999999999999999", Some(3_600)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(77)),
            ("Sun, 06 Nov 1994 08:00:00 GMT", Some(0)),
            ("Fri, 31 Dec 2027 23:59:59 GMT", Some(3_600)),
            ("", None),
            ("-1", None),
            ("1.5", None),
            ("soon", None),
        ] {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().expect("a value"))]);
            let span = retry_after(&headers, now);
            assert_eq!(span.map(|span| span.as_secs()), expected, "{text:?}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }

    #[test]
    fn seconds_are_rounded_up() {
        let of = |ms| seconds(Duration::from_millis(ms));
        assert_eq!([of(0), of(1), of(1_000), of(1_001)], [1, 1, 1, 2]);
    }
}
