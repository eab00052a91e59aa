//! Host names in requests to the router, and pages of browsers.

use crate::rig::{TestRouter, completion, pair};
use http_body_util::Full;
use hyper::Request;
use kvferry_engine::core::message::Mode;

fn get(at: &str, path: &str) -> Request<Full<bytes::Bytes>> {
    Request::get(format!("http://{at}{path}")).body(Full::default()).unwrap()
}

#[tokio::test]
async fn loopback_listeners_refuse_hosts_that_are_not_theirs() {
    let router = TestRouter::start(&["--allow-host", "router.example"]);
    for at in [&router.http, &router.admin] {
        for (host, status) in [
            ("evil.example", 403),
            ("evil.example:8000", 403),
            ("localhost", 200),
            ("127.0.0.1:1", 200),
            ("[::1]:8000", 200),
            ("Router.example:8000", 200),
        ] {
            let answer = router.ask_with(get(at, "/health"), &[("host", host)]).await;
            assert_eq!(answer.status, status, "{host}: {answer:?}");
            if status == 403 {
                assert!(answer.error().contains("--allow-host"), "{answer:?}");
            }
        }
    }
}

#[tokio::test]
async fn loopback_listeners_refuse_pages_of_other_origins() {
    let allowed = ["--cors-allow-origin", "https://ui.example"];
    let router = TestRouter::start(&allowed);
    for (at, origin, status) in [
        (&router.http, "https://evil.example", 403),
        (&router.http, "null", 403),
        (&router.http, "https://ui.example", 200),
        (&router.http, "http://localhost:3000", 200),
        (&router.admin, "https://ui.example", 403),
        (&router.admin, "http://127.0.0.1:29000", 200),
    ] {
        let answer = router.ask_with(get(at, "/health"), &[("origin", origin)]).await;
        assert_eq!(answer.status, status, "{origin}: {answer:?}");
        if status == 403 {
            assert!(answer.error().contains("--cors-allow-origin"), "{answer:?}");
        }
    }
}

#[tokio::test]
async fn pages_of_allowed_origins_may_ask_and_read() {
    for (allowed, named) in [("https://ui.example", "https://ui.example"), ("*", "*")] {
        let options = ["--cors-allow-origin", "http://a.example", "--cors-allow-origin", allowed];
        let (router, p, _d) = pair(Mode::Push, &options).await;
        let preflight = |origin: &'static str| {
            let uri = format!("http://{}/v1/chat/completions", router.http);
            let request = Request::options(uri).body(Full::default()).unwrap();
            let router = &router;
            async move {
                let headers = [
                    ("origin", origin),
                    ("access-control-request-method", "POST"),
                    ("access-control-request-headers", "authorization,content-type"),
                ];
                router.ask_with(request, &headers).await
            }
        };
        let answer = preflight("https://ui.example").await;
        assert_eq!(answer.status, 204, "{answer:?}");
        let names = ["allow-origin", "allow-headers"].map(|it| format!("access-control-{it}"));
        let told = names.each_ref().map(|name| answer.header(name));
        assert_eq!(told, [named, "authorization,content-type"]);
        assert!(answer.header("access-control-allow-methods").contains("POST"));
        if allowed != "*" {
            assert_eq!(preflight("https://evil.example").await.status, 403);
        }
        assert!(p.seen().is_empty(), "the router answers it");
        let ask = |path| router.request(path, completion().to_string());
        let origin = [("origin", "https://ui.example")];
        // A page can read errors as well.
        for (path, status) in [("/v1/completions", 200), ("/v1/none", 404), ("/v1/models", 405)] {
            let answer = router.ask_with(ask(path), &origin).await;
            assert_eq!(answer.status, status, "{path}: {answer:?}");
            assert_eq!(answer.header("access-control-allow-origin"), named, "{path}");
        }
        assert_eq!(p.seen()[0].header("origin"), "");
        let answer = router.ask().await;
        assert_eq!(answer.header("access-control-allow-origin"), "", "it is no page");
    }
}
