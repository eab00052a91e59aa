//! The clients of the workload, and questions to processes.

use crate::serve::kv_content::prompt_ids;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request as HttpRequest, StatusCode};
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kvferry_scenarios::Run;
use kvferry_scenarios::run::WorkloadRequest;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Longest time for the metrics of a process that is not stopped.
const METRICS: Duration = Duration::from_secs(60);

/// How a request ended.
#[derive(Debug)]
pub(super) enum RequestOutcome {
    /// Well; the digests that the samples answered, prompt by prompt.
    Finished { digests: Vec<String> },
    /// With an error of this type.
    Failed(String),
    /// The client went away.
    Gone,
    /// Well, but with KV that is not its prompt's.
    Wrong(String),
}

/// Values of a metrics page.
pub(super) struct MetricsPage(String);

impl MetricsPage {
    /// Sum of the values whose name and labels begin so.
    pub(super) fn sum(&self, begin: &str) -> u64 {
        let lines = self.0.lines().filter(|line| line.starts_with(begin));
        lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
    }

    /// Values of a metric by its label `cause`, which is its only one.
    pub(super) fn by_cause<'a>(&'a self, name: &str) -> impl Iterator<Item = (&'a str, u64)> {
        let begin = format!("{name}{{cause=\"");
        self.0.lines().filter_map(move |line| {
            let (cause, value) = line.strip_prefix(&begin)?.split_once("\"} ")?;
            Some((cause, value.parse().ok()?))
        })
    }
}

/// A pool of connections to the router and to instances.
pub(super) struct ClusterClient {
    hyper: Hyper<HttpConnector, Full<Bytes>>,
    router: String,
    /// Where the router tells what is registered.
    admin: String,
}

impl ClusterClient {
    pub(super) fn new(router: &str, admin: &str) -> ClusterClient {
        let hyper = Hyper::builder(TokioExecutor::new()).build_http();
        ClusterClient { hyper, router: router.to_string(), admin: admin.to_string() }
    }

    async fn call(
        &self,
        method: Method,
        uri: String,
        body: String,
    ) -> Result<(StatusCode, Bytes), String> {
        let request = HttpRequest::builder()
            .method(method)
            .uri(uri)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|why| why.to_string())?;
        let response = self.hyper.request(request).await.map_err(|why| why.to_string())?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(|why| why.to_string())?;
        Ok((status, body.to_bytes()))
    }

    async fn page(&self, host: &str, path: &str) -> Option<Bytes> {
        let uri = format!("http://{host}{path}");
        match self.call(Method::GET, uri, String::new()).await {
            Ok((StatusCode::OK, body)) => Some(body),
            _ => None,
        }
    }

    /// The metrics of a process, if it answers.
    pub(super) async fn metrics(&self, host: &str) -> Option<MetricsPage> {
        let page = self.page(host, "/metrics");
        let page = tokio::time::timeout(METRICS, page).await.ok()??;
        Some(MetricsPage(String::from_utf8_lossy(&page).into_owned()))
    }

    /// Waits until the router sends legs to as many instances.
    ///
    /// # Errors
    /// They are not there in time.
    pub(super) async fn registered(&self, count: usize, within: Duration) -> Result<(), String> {
        let begun = Instant::now();
        let mut seen = Value::Null;
        while begun.elapsed() < within {
            if let Some(page) = self.page(&self.admin, "/workers").await {
                seen = serde_json::from_slice(&page).unwrap_or_default();
                let ready = |worker: &&Value| worker["state"] == "ready";
                let workers = seen["workers"].as_array();
                if workers.is_some_and(|all| all.iter().filter(ready).count() >= count) {
                    return Ok(());
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(format!(
            "{count} instances have not registered within {within:?}; the router has {seen}"
        ))
    }

    /// Sends a request of the workload and waits for its end.
    pub(super) async fn send(&self, run: &Run, request: &WorkloadRequest) -> RequestOutcome {
        let prompts: Vec<Vec<u32>> =
            request.prompts.iter().map(|prompt| prompt_ids(prompt, run.prefix_tokens)).collect();
        let body = json!({
            "model": run.model.name, "prompt": prompts, "n": request.samples,
            "max_tokens": request.output, "temperature": 0,
        });
        let uri = format!("http://{}/v1/completions", self.router);
        let call = self.call(Method::POST, uri, body.to_string());
        let answer = match request.abort {
            None => call.await,
            Some(patience) => {
                let patience = Duration::from_nanos(patience.0);
                match tokio::time::timeout(patience, call).await {
                    Ok(answer) => answer,
                    Err(_) => return RequestOutcome::Gone,
                }
            }
        };
        match answer {
            Ok((StatusCode::OK, body)) => finished(&body),
            Ok((status, body)) => {
                let body: Value = serde_json::from_slice(&body).unwrap_or_default();
                let message = body["error"]["message"].as_str().unwrap_or("no error object");
                RequestOutcome::Failed(format!("{status}: {message}"))
            }
            Err(why) => RequestOutcome::Failed(why),
        }
    }
}

fn finished(body: &[u8]) -> RequestOutcome {
    let Ok(body) = serde_json::from_slice::<Value>(body) else {
        return RequestOutcome::Wrong("an answer that is no JSON".into());
    };
    let mut choices = body["choices"].as_array().cloned().unwrap_or_default();
    choices.sort_by_key(|choice| choice["index"].as_u64());
    let text = |choice: &Value| choice["text"].as_str().unwrap_or_default().to_string();
    RequestOutcome::Finished { digests: choices.iter().map(text).collect() }
}
