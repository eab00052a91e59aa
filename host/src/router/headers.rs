//! Headers that the router passes: to engines all except a list, to clients only a list.
//!
//! Both lists are tables here; docs/router.md has the same ones.

use super::error::HttpError;
use super::identity::{ROUTER, RouterIdentity};
use super::leg::REQUEST_ID;
use crate::needle::Needle;
use hyper::header::{AUTHORIZATION, CONNECTION, HeaderMap, HeaderName, HeaderValue};

/// Client headers that engines do not get, besides those that `Connection` names.
const NOT_TO_ENGINES: [&str; 26] = [
    // About the client's connection only.
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "http2-settings",
    // About the client's body and server name: the router sends its own.
    "host",
    "content-length",
    "content-type",
    "content-encoding",
    "expect",
    // The router parses answers and does not decompress them.
    "accept-encoding",
    // About a browser and the router's site.
    "cookie",
    "origin",
    "access-control-request-headers",
    "access-control-request-method",
    "access-control-request-private-network",
    // Made or replaced by the router.
    "authorization",
    "x-api-key",
    "x-data-parallel-rank",
    "x-kvferry-router",
    "x-request-id",
];

/// Instance headers that clients get, unless `Connection` names them.
const TO_CLIENTS: [&str; 18] = [
    "content-type",
    "content-encoding",
    "content-language",
    "cache-control",
    "retry-after",
    "retry-after-ms",
    "x-accel-buffering",
    "x-request-id",
    "traceparent",
    "tracestate",
    "traceresponse",
    "server-timing",
    // Headers that the client libraries of OpenAI and Anthropic read.
    "openai-model",
    "openai-processing-ms",
    "openai-version",
    "x-should-retry",
    "request-id",
    "anthropic-version",
];

/// Beginnings of the names of further headers that clients get.
const BEGINNINGS_TO_CLIENTS: [&str; 2] = ["x-ratelimit-", "anthropic-ratelimit-"];

/// Header with the API key of Anthropic's client libraries.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Most bytes of a client's request id.
const ID_MAX: usize = 256;

/// Header names in `Connection`.
struct ConnectionNames<'a>(Vec<&'a str>);

impl ConnectionNames<'_> {
    fn of(headers: &HeaderMap) -> ConnectionNames<'_> {
        let lists = headers.get_all(CONNECTION).into_iter().filter_map(|list| list.to_str().ok());
        let names = lists.flat_map(|list| list.split(',').map(str::trim));
        // What every message may say names no header.
        let others = names.filter(|name| !["close", "keep-alive"].contains(name));
        ConnectionNames(others.collect())
    }

    fn has(&self, name: &HeaderName) -> bool {
        self.0.iter().any(|it| it.eq_ignore_ascii_case(name.as_str()))
    }
}

/// Id of a client's request, in the ids of its legs, the log and the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClientRequestId(HeaderValue);

impl ClientRequestId {
    /// The client's own id, or the result of `new` if there is no usable one. A usable id has 1 to
    /// 256 visible ASCII characters and no address marks of MoRIIO's ids.
    pub(crate) fn of(client: &HeaderMap, new: impl FnOnce() -> String) -> ClientRequestId {
        let own = client.get(REQUEST_ID).filter(|id| is_usable(id.as_bytes()));
        let made = || HeaderValue::try_from(new()).expect("an id is of letters and digits");
        ClientRequestId(own.cloned().unwrap_or_else(made))
    }

    pub(crate) fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }

    pub(crate) fn header(&self) -> HeaderValue {
        self.0.clone()
    }
}

/// True if engines may get this request id of a client.
pub(crate) fn is_usable(id: &[u8]) -> bool {
    // Engines dial what they find behind such a mark.
    static MARKS: [Needle; 2] = [Needle::new("_prefill_addr_"), Needle::new("_decode_addr_")];
    let marked = MARKS.iter().any(|mark| mark.is_in(id));
    (1..=ID_MAX).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic) && !marked
}

/// Bytes of memory that a copy of these headers takes, about.
pub(crate) fn bytes(headers: &HeaderMap) -> usize {
    // An entry has a hash, two lengths and two references beside its texts.
    const ENTRY: usize = 96;
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + ENTRY).sum()
}

/// Headers that engines get of a client's request, in one pass.
///
/// `own` is the operator's key, which replaces the client's.
///
/// # Errors
/// The request has passed this router before.
pub(crate) fn to_engine(
    client: &HeaderMap,
    own: Option<&HeaderValue>,
    router: &RouterIdentity,
) -> Result<HeaderMap, HttpError> {
    let mut headers = HeaderMap::with_capacity(client.len() + 8);
    headers.insert(ROUTER, router.appended(client)?);
    let named = ConnectionNames::of(client);
    for (name, value) in client {
        if !NOT_TO_ENGINES.contains(&name.as_str()) && !named.has(name) {
            headers.append(name, value.clone());
        }
    }
    match own {
        Some(key) => _ = headers.insert(AUTHORIZATION, key.clone()),
        None => {
            let keys = [AUTHORIZATION, API_KEY].map(|name| (client.get(&name).cloned(), name));
            headers.extend(keys.into_iter().filter_map(|(key, name)| Some((name, key?))));
        }
    }
    Ok(headers)
}

/// Headers of an instance's answer that a client gets.
pub(crate) fn to_client(instance: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(8);
    let named = ConnectionNames::of(instance);
    for (name, value) in instance {
        if passes_to_clients(name.as_str()) && !named.has(name) {
            headers.append(name, value.clone());
        }
    }
    headers
}

fn passes_to_clients(name: &str) -> bool {
    let begins = |beginning: &&str| name.starts_with(*beginning);
    TO_CLIENTS.contains(&name) || BEGINNINGS_TO_CLIENTS.iter().any(begins)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::paths::testing::documented;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn client_headers_pass_but_for_the_list_and_what_connection_names() {
        let router = RouterIdentity::random();
        let passed = [("x-vllm-priority", "-5"), ("x-many", "1"), ("x-many", "2")];
        let mut client = map(&passed);
        for name in NOT_TO_ENGINES {
            let is_kept = ["connection", "authorization", "x-api-key", "x-kvferry-router"];
            if !is_kept.contains(&name) {
                client.append(name, HeaderValue::from_static("x"));
            }
        }
        client.extend(map(&[("connection", "close, X-Hop"), ("x-hop", "1"), ("x-api-key", "k")]));
        let mut expected = map(&passed);
        expected.extend([router.header()]);
        let own = HeaderValue::from_static("Bearer ours");
        let with = |own, name: &'static str, key: &'static str| {
            let mut expected = expected.clone();
            expected.insert(name, HeaderValue::from_static(key));
            assert_eq!(to_engine(&client, own, &router).expect("no loop"), expected);
        };
        with(None, "x-api-key", "k");
        with(Some(&own), "authorization", "Bearer ours");
    }

    #[test]
    fn bytes_of_headers_grow_with_their_names_and_values() {
        let short = map(&[("x-a", "1")]);
        let long = map(&[("x-a", "1234"), ("x-a", "1")]);
        assert!(bytes(&short) > 4 && bytes(&long) == 2 * bytes(&short) + 3);
    }

    #[test]
    fn instance_headers_pass_only_if_listed_and_not_of_the_connection() {
        let instance = map(&[
            ("content-type", "application/json"),
            ("x-ratelimit-remaining-tokens", "7"),
            ("retry-after", "7"),
            ("connection", "Retry-After"),
            ("set-cookie", "a=b"),
            ("location", "http://10.0.0.1/"),
            ("access-control-allow-origin", "*"),
            ("content-length", "7"),
        ]);
        let expected =
            [("content-type", "application/json"), ("x-ratelimit-remaining-tokens", "7")];
        assert_eq!(to_client(&instance), map(&expected));
    }

    #[test]
    fn ids_of_clients_are_kept_if_they_are_short_visible_and_name_no_address() {
        let id = |text: &str| {
            let mut client = HeaderMap::new();
            client.insert(REQUEST_ID, HeaderValue::from_bytes(text.as_bytes()).expect("a header"));
            ClientRequestId::of(&client, || "new".into()).as_str().to_owned()
        };
        let longest = "x".repeat(ID_MAX);
        for kept in ["client-42", "a=b;c/{}\"", &longest] {
            assert_eq!(id(kept), kept);
        }
        let marked = "___prefill_addr_host:evil,handshake:1,notify:2___decode_addr_host:evil_0";
        for replaced in ["", "a b", "\u{e4}", &format!("{longest}x"), marked, "x___decode_addr_y"] {
            assert_eq!(id(replaced), "new", "{replaced}");
        }
    }

    #[test]
    fn the_documents_list_the_same_headers() {
        let listed = |list: &[&str]| {
            let mut list: Vec<String> = list.iter().map(ToString::to_string).collect();
            list.sort();
            list
        };
        assert_eq!(documented("- Not to engines:"), listed(&NOT_TO_ENGINES));
        let beginnings = BEGINNINGS_TO_CLIENTS.map(|beginning| format!("{beginning}*"));
        let mut to_clients = [&listed(&TO_CLIENTS)[..], &beginnings].concat();
        to_clients.sort();
        assert_eq!(documented("- To clients:"), to_clients);
    }
}
