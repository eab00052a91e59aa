//! HTTP of instances and hosts at loopback, as a web page on the same machine can reach it.

use crate::process::{ServeProcess, exchange};
use crate::sidecar_process::SidecarProcess;

#[test]
fn instances_and_hosts_at_loopback_refuse_other_names_and_pages() {
    let instance = ServeProcess::serve(&["--role", "prefill", "--mode", "push"]);
    let (_host, metrics) = SidecarProcess::with_metrics("loopback", &[]);
    for (at, path) in [(instance.text("http"), "/health"), (&metrics.to_string(), "/metrics")] {
        for (headers, status) in [
            ("host: localhost", 200),
            ("host: 127.0.0.1:8000", 200),
            ("host: localhost\r\norigin: http://localhost:3000", 200),
            ("host: evil.example", 403),
            ("host: localhost\r\norigin: https://evil.example", 403),
        ] {
            let head = format!("GET {path} HTTP/1.1\r\n{headers}\r\nconnection: close\r\n\r\n");
            let (told, answer) = exchange(at, head.as_bytes());
            assert_eq!(told, status, "{path}, {headers}: {answer}");
        }
    }
}
