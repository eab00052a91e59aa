//! Rules of a listener: host names in requests, and origins of web pages, that it serves.
//!
//! Every page in a browser can reach a listener at loopback of the browser's machine. So such a
//! listener serves only requests for names of this machine, and only pages from it, unless options
//! allow more.

use super::error::HttpError;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use clap::Args;
use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HOST, HeaderMap, HeaderValue, ORIGIN, VARY,
};
use hyper::http::uri::Authority;
use hyper::{Method, StatusCode, Uri};
use kvferry_engine::fabric::unbracketed;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Most characters of a client's header that an error quotes.
const SHOWN: usize = 200;

/// Options about names and pages.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct AccessArgs {
    /// Origin of web pages that may send requests to --listen and read the answers, e.g.
    /// https://ui.example; * for all. May be repeated
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    cors_allow_origin: Vec<HeaderValue>,
    /// Name that listeners at loopback accept as Host, besides localhost and addresses of loopback.
    /// May be repeated
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
}

fn origin(text: &str) -> Result<HeaderValue, String> {
    let form = "give SCHEME://HOST, SCHEME://HOST:PORT, or *";
    let is_origin = text == "*"
        || text.split_once("://").is_some_and(|(scheme, rest)| {
            !scheme.is_empty() && !rest.contains(['/', '?', '#', '@']) && authority(rest).is_some()
        });
    let value = HeaderValue::try_from(text).ok().filter(|_| is_origin);
    value.ok_or_else(|| format!("{text:?} is not an origin: {form}"))
}

fn authority(text: &str) -> Option<Authority> {
    text.parse().ok()
}

/// Clients and pages that may use a listener.
#[derive(Debug)]
pub(crate) struct AccessRules {
    is_loopback: bool,
    /// With TLS, clients verify the listener's name by its certificate.
    is_tls: bool,
    hosts: Vec<String>,
    origins: Vec<HeaderValue>,
}

/// Decision of a listener about a request.
#[derive(Debug)]
pub(crate) enum Access {
    /// Serve it; the answer names this origin, if there is one.
    Serve(Option<HeaderValue>),
    /// Reject it with this answer.
    Answer(Box<Response>),
}

impl AccessArgs {
    /// Rules of the clients' listener at an address.
    pub(crate) fn for_clients(&self, at: SocketAddr, is_tls: bool) -> Arc<AccessRules> {
        self.rules(at, is_tls, self.cors_allow_origin.clone())
    }

    /// Rules of the operators' listener at an address, which serves no pages of other origins.
    pub(crate) fn for_operators(&self, at: SocketAddr) -> Arc<AccessRules> {
        self.rules(at, false, Vec::new())
    }

    fn rules(&self, at: SocketAddr, is_tls: bool, origins: Vec<HeaderValue>) -> Arc<AccessRules> {
        let is_loopback = at.ip().to_canonical().is_loopback();
        Arc::new(AccessRules { is_loopback, is_tls, hosts: self.allow_host.clone(), origins })
    }
}

impl AccessRules {
    /// Decides about a request by its head.
    pub(crate) fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Access {
        if !self.is_loopback && self.origins.is_empty() {
            return Access::Serve(None);
        }
        let origin = headers.get(ORIGIN);
        let allowed = origin.and_then(|origin| self.allowed(origin));
        let refused = |error: HttpError| {
            let mut response = error.into_response();
            add_origin(&mut response, allowed.clone());
            Access::Answer(Box::new(response))
        };
        if let Some(error) = self.wrong_host(uri, headers) {
            return refused(error);
        }
        let Some(origin) = origin else { return Access::Serve(None) };
        let asked_method = headers.get(ACCESS_CONTROL_REQUEST_METHOD);
        let is_preflight = *method == Method::OPTIONS && asked_method.is_some();
        let is_refused = match allowed {
            Some(_) => false,
            // A page of this machine is served, but the browser hides answers of another origin
            // from it.
            None => is_preflight || self.is_loopback && !self.is_own(origin),
        };
        if is_refused {
            let message = format!(
                "pages of origin {} may not ask here: ask without a browser (the router takes pages \
                 by --cors-allow-origin ORIGIN)",
                shown(origin)
            );
            return refused(HttpError::new(StatusCode::FORBIDDEN, &message));
        }
        match is_preflight {
            true => Access::Answer(Box::new(preflight(headers, allowed))),
            false => Access::Serve(allowed),
        }
    }

    /// The only origin that an answer may name if the request could not be read.
    pub(crate) fn sole_origin(&self) -> Option<&str> {
        match &self.origins[..] {
            [one] => one.to_str().ok(),
            _ => None,
        }
    }

    /// The origin that an answer allows a page to have.
    fn allowed(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        let is_it =
            |it: &&HeaderValue| *it == "*" || it.as_bytes().eq_ignore_ascii_case(origin.as_bytes());
        let allowed = self.origins.iter().find(is_it)?;
        Some(if allowed == "*" { allowed.clone() } else { origin.clone() })
    }

    /// Reason why a listener at loopback rejects a request for this host, if it does.
    fn wrong_host(&self, uri: &Uri, headers: &HeaderMap) -> Option<HttpError> {
        if !self.is_loopback || self.is_tls {
            return None;
        }
        // Nearly all clients ask so, and nothing needs to be parsed.
        if uri.authority().is_none()
            && headers.get(HOST).is_some_and(|host| is_usual(host.as_bytes()))
        {
            return None;
        }
        let named = headers.get(HOST).map(|host| host.to_str().ok().and_then(authority));
        let by_uri = uri.authority().cloned().map(Some);
        let is_wrong = |host: &Option<Authority>| {
            host.as_ref().is_none_or(|host| !self.is_own_name(host.host()))
        };
        if ![named, by_uri].into_iter().flatten().any(|host| is_wrong(&host)) {
            return None;
        }
        let message = format!(
            "Host {} is not a name of this machine's loopback: ask by localhost or 127.0.0.1 (the \
             router takes other names by --allow-host NAME)",
            headers.get(HOST).map_or_else(|| shown_text(&uri.to_string()), shown)
        );
        Some(HttpError::new(StatusCode::FORBIDDEN, &message))
    }

    /// True if a page of this origin is from this machine, or from a name that is allowed for it.
    fn is_own(&self, origin: &HeaderValue) -> bool {
        let host = origin.to_str().ok().and_then(|it| it.split_once("://"));
        let host = host.and_then(|(_, host)| authority(host));
        host.is_some_and(|host| self.is_own_name(host.host()))
    }

    fn is_own_name(&self, host: &str) -> bool {
        let name = host.strip_suffix('.').unwrap_or(host);
        let address: Option<IpAddr> = unbracketed(name).parse().ok();
        address.is_some_and(|it| it.to_canonical().is_loopback())
            || name.eq_ignore_ascii_case("localhost")
            || self.hosts.iter().any(|own| own.eq_ignore_ascii_case(name))
    }
}

/// App of a listener that has an address but no access options: at loopback it serves names and
/// pages of this machine only.
pub(crate) fn guarded(app: axum::Router, at: SocketAddr) -> axum::Router {
    let rules = AccessArgs::default().for_operators(at);
    app.layer(from_fn(move |request: Request, next: Next| {
        let access = rules.check(request.method(), request.uri(), request.headers());
        async move {
            match access {
                Access::Serve(_) => next.run(request).await,
                Access::Answer(answer) => *answer,
            }
        }
    }))
}

/// Rejects a request from a page whose origin is not that of the listener.
///
/// # Errors
/// The `Origin` differs from `Host`.
pub(crate) fn check_same_origin(headers: &HeaderMap) -> Result<(), HttpError> {
    let Some(origin) = headers.get(ORIGIN) else { return Ok(()) };
    let page = origin.to_str().ok().and_then(|it| it.split_once("://")).map(|(_, host)| host);
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    if page.is_some() && page == host {
        return Ok(());
    }
    let message =
        format!("pages of origin {} change no engines: ask without a browser", shown(origin));
    Err(HttpError::new(StatusCode::FORBIDDEN, &message))
}

/// True for the usual names of loopback, with or without a port.
fn is_usual(host: &[u8]) -> bool {
    let (name, port) = match memchr::memchr(b':', host) {
        Some(colon) => (&host[..colon], &host[colon + 1..]),
        None => (host, &b"80"[..]),
    };
    let is_port = (1..=5).contains(&port.len()) && port.iter().all(u8::is_ascii_digit);
    is_port && [&b"127.0.0.1"[..], b"localhost"].contains(&name)
}

fn shown(value: &HeaderValue) -> String {
    shown_text(&String::from_utf8_lossy(value.as_bytes()))
}

fn shown_text(text: &str) -> String {
    text.chars().take(SHOWN).collect()
}

fn preflight(asked: &HeaderMap, allowed: Option<HeaderValue>) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    let methods = HeaderValue::from_static("GET, POST, OPTIONS");
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, methods);
    if let Some(asked) = asked.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    add_origin(&mut response, allowed);
    response
}

/// Allows a page of this origin to read the answer.
pub(crate) fn add_origin(response: &mut Response, allowed: Option<HeaderValue>) {
    let Some(allowed) = allowed else { return };
    let headers = response.headers_mut();
    if allowed != "*" {
        headers.append(VARY, HeaderValue::from_static("origin"));
    }
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(at: &str, hosts: &[&str], origins: &[&str]) -> Arc<AccessRules> {
        let args = AccessArgs {
            cors_allow_origin: origins.iter().map(|it| origin(it).expect("an origin")).collect(),
            allow_host: hosts.iter().map(ToString::to_string).collect(),
        };
        args.for_clients(at.parse().expect("an address"), false)
    }

    /// Status of the answer; 200 if the request is served.
    fn status(rules: &AccessRules, host: &str, origin: &str) -> u16 {
        let mut headers = HeaderMap::new();
        for (name, value) in [(HOST, host), (ORIGIN, origin)] {
            if !value.is_empty() {
                headers.insert(name, HeaderValue::from_str(value).expect("a value"));
            }
        }
        match rules.check(&Method::POST, &Uri::from_static("/v1/completions"), &headers) {
            Access::Serve(_) => 200,
            Access::Answer(response) => response.status().as_u16(),
        }
    }

    #[test]
    fn loopback_listeners_serve_names_of_loopback_and_named_ones() {
        for at in ["127.0.0.1:8000", "[::1]:8000", "[::ffff:127.0.0.1]:8000"] {
            let rules = rules(at, &["Router.Local"], &[]);
            for host in [
                "",
                "localhost",
                "LOCALHOST:8000",
                "127.0.0.1:1",
                "127.9.9.9",
                "[::1]:8000",
                "localhost.:80",
                "router.local:8000",
            ] {
                assert_eq!(status(&rules, host, ""), 200, "{host}");
            }
            for host in [
                "evil",
                "evil:8000",
                "localhost.evil",
                "127.0.0.1.evil",
                "10.0.0.1:8000",
                "[::2]",
                "a b",
                "0.0.0.0:8000",
                "localhost@evil",
            ] {
                assert_eq!(status(&rules, host, ""), 403, "{host}");
            }
        }
        let open = rules("0.0.0.0:8000", &[], &[]);
        assert_eq!(status(&open, "evil", "https://evil"), 200);
    }

    #[test]
    fn absolute_uris_do_not_go_around_the_host_rule() {
        let rules = rules("127.0.0.1:8000", &[], &[]);
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static("localhost"));
        let uri = Uri::from_static("http://evil/health");
        assert!(matches!(rules.check(&Method::GET, &uri, &headers), Access::Answer(_)));
    }

    #[test]
    fn loopback_listeners_refuse_pages_of_others_unless_allowed() {
        let rules = rules("127.0.0.1:8000", &["own.example"], &["https://ui.example"]);
        for (origin, expected) in [
            ("https://ui.example", 200),
            ("https://UI.example", 200),
            ("http://localhost:3000", 200),
            ("https://own.example", 200),
            ("https://evil.example", 403),
            ("http://ui.example", 403),
            ("null", 403),
        ] {
            assert_eq!(status(&rules, "localhost", origin), expected, "{origin}");
        }
    }

    #[test]
    fn origins_are_checked_at_the_start() {
        for good in ["*", "https://ui.example", "http://[::1]:3000", "http://localhost:3000"] {
            assert!(origin(good).is_ok(), "{good}");
        }
        for bad in ["", "ui.example", "https://", "https://a/", "https://a@b", "null", "://a"] {
            assert!(origin(bad).expect_err(bad).contains("is not an origin"));
        }
    }

    #[test]
    fn pages_change_engines_only_from_the_listener_itself() {
        let check = |host: &'static str, origin: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::from_static(host));
            headers.extend(origin.map(|it| (ORIGIN, HeaderValue::from_static(it))));
            check_same_origin(&headers).is_ok()
        };
        assert!(check("a:29000", None) && check("a:29000", Some("http://a:29000")));
        assert!(!check("a:29000", Some("http://a:8000")) && !check("a:29000", Some("null")));
    }
}
