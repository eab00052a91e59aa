//! Identity of a router, by which it recognizes itself as an instance or a request that comes back.

use super::error::HttpError;
use crate::process::lock;
use hyper::StatusCode;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use kvferry_engine::fabric::Endpoint;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Header with the comma-separated nonces of the routers that a request has passed. In an answer of
/// `/health`: the nonce of the router.
pub(crate) const ROUTER: HeaderName = HeaderName::from_static("x-kvferry-router");

/// Most routers that a request may pass.
const ROUTERS_MAX: usize = 16;

/// Time for which an address stays marked as the router's own after a probe has shown that it is.
/// Such an instance is probed every 500 ms.
const KNOWN: Duration = Duration::from_secs(10);

/// Random number of this process, and the addresses of instances at which the router found itself;
/// clones share these.
#[derive(Clone, Debug)]
pub(crate) struct RouterIdentity {
    nonce: HeaderValue,
    found: Arc<Mutex<BTreeMap<Endpoint, Instant>>>,
}

impl RouterIdentity {
    pub(crate) fn random() -> RouterIdentity {
        let text = format!("{:016x}", rand::random::<u64>());
        let nonce = HeaderValue::try_from(text).expect("letters and digits");
        RouterIdentity { nonce, found: Arc::default() }
    }

    /// The header with this router's nonce.
    pub(crate) fn header(&self) -> (HeaderName, HeaderValue) {
        (ROUTER, self.nonce.clone())
    }

    /// Notes whether this router gave the answer to a probe; true if it did.
    pub(crate) fn probed(&self, http: &Endpoint, answer: &HeaderMap) -> bool {
        let is_own = nonces(answer).any(|nonce| nonce == self.nonce.as_bytes());
        let mut found = lock(&self.found);
        if !is_own {
            if !found.is_empty() {
                found.remove(http);
            }
            return false;
        }
        found.retain(|_, last| last.elapsed() < KNOWN);
        if found.insert(http.clone(), Instant::now()).is_none() {
            tracing::warn!(%http, "an instance is this router itself, and gets no requests: correct \
                --prefill, --decode, or http_port of the connector");
        }
        true
    }

    /// Addresses at which the router found itself lately, with the age of the last such probe.
    pub(crate) fn found(&self) -> Vec<(Endpoint, Duration)> {
        let found = lock(&self.found);
        let ages = found.iter().map(|(http, last)| (http.clone(), last.elapsed()));
        ages.filter(|(_, age)| *age < KNOWN).collect()
    }

    /// The list of routers for a request that is passed on.
    ///
    /// # Errors
    /// The request has passed this router before, or too many.
    pub(crate) fn appended(&self, headers: &HeaderMap) -> Result<HeaderValue, HttpError> {
        let own = self.nonce.as_bytes();
        if !headers.contains_key(ROUTER) {
            return Ok(self.nonce.clone());
        }
        let passed: Vec<&[u8]> = nonces(headers).collect();
        if passed.contains(&own) || passed.len() >= ROUTERS_MAX {
            let message = format!(
                "the request comes from this router, or has passed {ROUTERS_MAX} routers: the \
                 address of an instance is that of a router; correct --prefill, --decode, or \
                 http_port of the connector"
            );
            return Err(HttpError::new(StatusCode::LOOP_DETECTED, &message));
        }
        let list = [&passed[..], &[own]].concat().join(&b","[..]);
        HeaderValue::from_bytes(&list).map_err(|why| HttpError::bad(&why.to_string(), ""))
    }
}

fn nonces(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let lists = headers.get_all(ROUTER).into_iter();
    lists.flat_map(|list| list.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_comes_back_or_passed_many_routers_is_a_loop() {
        let passed = |list: &HeaderValue| HeaderMap::from_iter([(ROUTER, list.clone())]);
        let [one, two] = [(); 2].map(|()| RouterIdentity::random());
        let first = one.appended(&HeaderMap::new()).expect("no loop");
        let second = two.appended(&passed(&first)).expect("no loop");
        for identity in [&one, &two] {
            let refused = identity.appended(&passed(&second)).expect_err("a loop");
            assert_eq!(refused.status, StatusCode::LOOP_DETECTED);
        }
        let mut headers = HeaderMap::new();
        for _ in 0..ROUTERS_MAX {
            let list = RouterIdentity::random().appended(&headers).expect("not too many");
            headers = passed(&list);
        }
        assert!(one.appended(&headers).is_err());
    }

    #[test]
    fn the_router_is_found_until_another_server_answers() {
        let (own, other) = (RouterIdentity::random(), RouterIdentity::random());
        let http = Endpoint::from("h:1");
        assert!(own.probed(&http, &HeaderMap::from_iter([own.header()])));
        assert_eq!(own.found().len(), 1);
        assert!(!own.probed(&http, &HeaderMap::from_iter([other.header()])));
        assert!(own.found().is_empty());
    }
}
