//! The real program, its clients, and what they wait for.

use crate::backend::{BackendHeartbeat, HeartbeatFields, StubInstance, frame};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A guard against waiting for ever; however busy the machine is, nothing takes as long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) struct TestRouter {
    pub(crate) child: Child,
    out: BufReader<ChildStdout>,
    pub(crate) http: String,
    /// Where operators ask.
    pub(crate) admin: String,
    pub(crate) discovery: String,
    client: Client<HttpConnector, Full<Bytes>>,
    hearts: Vec<BackendHeartbeat>,
}

/// An answer that was read to its end.
#[derive(Debug)]
pub(crate) struct TestResponse {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl TestResponse {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|why| panic!("{why}: {self:?}"))
    }

    /// A header; nothing if it is not there.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    /// The message of an OpenAI error object.
    pub(crate) fn error(&self) -> String {
        let object = self.json();
        let error = &object["error"];
        assert_eq!(error["code"], self.status, "{object}");
        assert!(error["type"].is_string(), "{object}");
        error["message"].as_str().unwrap_or_else(|| panic!("no message: {object}")).into()
    }

    /// The data of the events of a stream.
    pub(crate) fn events(&self) -> Vec<Value> {
        let events = self.body.split("\n\n").filter(|event| !event.is_empty());
        let data = |event: &str| match event.strip_prefix("data: ") {
            Some("[DONE]") => Value::String("[DONE]".into()),
            Some(json) => serde_json::from_str(json).unwrap(),
            None => panic!("no data: {event}"),
        };
        events.map(data).collect()
    }
}

impl TestRouter {
    /// A router at free ports; `options` beside.
    pub(crate) fn start(options: &[&str]) -> TestRouter {
        TestRouter::start_with(options, |_| {})
    }

    /// The same, with a last look at the command.
    pub(crate) fn start_with(options: &[&str], with: impl FnOnce(&mut Command)) -> TestRouter {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        command.args([
            "router",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--admin-addr",
            "127.0.0.1:0",
        ]);
        if !options.contains(&"--discovery") {
            command.args(["--discovery", "127.0.0.1:0"]);
        }
        if !options.contains(&"--expiry") {
            // Hearts beat when the machine has time for them.
            command.args(["--expiry", "3600"]);
        }
        command.args(options).env_remove("OPENAI_API_KEY").stdout(Stdio::piped());
        command.stderr(Stdio::null());
        with(&mut command);
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let line: Value = serde_json::from_str(&line).unwrap_or_else(|why| panic!("{why}: {line}"));
        let text = |key: &str| line[key].as_str().unwrap().to_owned();
        let (http, admin, discovery) = (text("http"), text("admin"), text("discovery"));
        let client = Client::builder(TokioExecutor::new()).build_http();
        TestRouter { child, out, http, admin, discovery, client, hearts: Vec::new() }
    }

    /// Has an instance beat until the router is gone.
    pub(crate) fn register(&mut self, backend: &StubInstance, form: &HeartbeatFields) {
        self.send(vec![vec![frame(backend.role, &backend.http, form)]]);
    }

    /// Sends messages of the discovery channel, again and again.
    pub(crate) fn send(&mut self, messages: Vec<Vec<Vec<u8>>>) {
        self.hearts.push(BackendHeartbeat::beat(&self.discovery, messages));
    }

    /// Stops the last heart.
    pub(crate) fn hush(&mut self) {
        self.hearts.pop().expect("one beats");
    }

    pub(crate) async fn call(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        tokio::time::timeout(PATIENCE, self.client.request(request)).await.unwrap().unwrap()
    }

    pub(crate) async fn read(response: Response<Incoming>) -> TestResponse {
        let (head, body) = response.into_parts();
        let body = tokio::time::timeout(PATIENCE, body.collect()).await.unwrap();
        let body = String::from_utf8(body.unwrap().to_bytes().to_vec()).unwrap();
        TestResponse { status: head.status.as_u16(), headers: head.headers, body }
    }

    pub(crate) fn request(&self, path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
        let uri = format!("http://{}{path}", self.http);
        let request = Request::post(uri).header("content-type", "application/json");
        request.body(Full::new(body.into())).unwrap()
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> TestResponse {
        TestRouter::read(self.call(self.request(path, body.to_string())).await).await
    }

    pub(crate) async fn ask(&self) -> TestResponse {
        self.post("/v1/completions", &completion()).await
    }

    /// What an operator is told, or at a path that is not theirs, a client.
    pub(crate) async fn get(&self, path: &str) -> TestResponse {
        match path.starts_with("/v1/") || path == "/health" {
            true => self.get_of_client(path).await,
            false => self.get_at(&self.admin, path).await,
        }
    }

    pub(crate) async fn get_of_client(&self, path: &str) -> TestResponse {
        self.get_at(&self.http, path).await
    }

    /// Sends a request with these additional headers.
    pub(crate) async fn ask_with(
        &self,
        mut request: Request<Full<Bytes>>,
        headers: &[(&'static str, &str)],
    ) -> TestResponse {
        for (name, value) in headers {
            request.headers_mut().append(*name, value.parse().unwrap());
        }
        TestRouter::read(self.call(request).await).await
    }

    /// A request of an operator.
    pub(crate) fn admin_request(&self, path: &str, body: &str) -> Request<Full<Bytes>> {
        let request = Request::post(format!("http://{}{path}", self.admin));
        let request = request.header("content-type", "application/json");
        request.body(Full::new(body.to_owned().into())).unwrap()
    }

    async fn get_at(&self, at: &str, path: &str) -> TestResponse {
        let request = Request::get(format!("http://{at}{path}"));
        TestRouter::read(self.call(request.body(Full::default()).unwrap()).await).await
    }

    pub(crate) async fn workers(&self) -> Vec<Value> {
        self.get("/workers").await.json()["workers"].as_array().unwrap().clone()
    }

    /// Asks for the list of instances until it is as wanted.
    pub(crate) async fn until(&self, what: &str, wanted: impl Fn(&[Value]) -> bool) {
        let start = Instant::now();
        loop {
            let workers = self.workers().await;
            if wanted(&workers) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{what}: {workers:?}");
        }
    }

    /// Waits until so many instances are ready.
    pub(crate) async fn ready(&self, count: usize) {
        let is_ready = |worker: &&Value| worker["state"] == "ready";
        self.until("ready", |workers| workers.iter().filter(is_ready).count() == count).await;
    }

    /// The value of a metric with these labels.
    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let page = self.get("/metrics").await.body;
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }

    /// Waits until a metric is at least `least`.
    pub(crate) async fn metric_reaches(&self, name: &str, least: u64) {
        let start = Instant::now();
        while self.metric(name).await < least {
            assert!(start.elapsed() < PATIENCE, "{name} does not reach {least}");
        }
    }

    /// Where instances register, as a socket dials it.
    pub(crate) fn discovery_address(&self) -> &str {
        self.discovery.strip_prefix("tcp://").expect("a TCP address")
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    /// Waits for its end; its exit code.
    pub(crate) fn exit(mut self) -> Option<i32> {
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for TestRouter {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn completion() -> Value {
    json!({"model": "m", "prompt": "hello", "max_tokens": 5})
}

pub(crate) fn streaming() -> Value {
    json!({"model": "m", "prompt": "hello", "max_tokens": 5, "stream": true})
}

/// A router with so many prefills and decodes of one mode, all ready.
pub(crate) async fn fleet(
    mode: Mode,
    prefills: usize,
    decodes: usize,
    options: &[&str],
) -> (TestRouter, Vec<StubInstance>, Vec<StubInstance>) {
    let mut router = TestRouter::start(options);
    let (mut ps, mut ds) = (Vec::new(), Vec::new());
    for _ in 0..prefills {
        ps.push(StubInstance::start(Role::Prefill).await);
    }
    for _ in 0..decodes {
        ds.push(StubInstance::start(Role::Decode).await);
    }
    if mode == Mode::Push {
        ds.iter().for_each(|decode| decode.waits_for(&ps));
    }
    for backend in ps.iter().chain(&ds) {
        router.register(backend, &HeartbeatFields::of(mode));
    }
    router.ready(prefills + decodes).await;
    (router, ps, ds)
}

pub(crate) async fn pair(mode: Mode, options: &[&str]) -> (TestRouter, StubInstance, StubInstance) {
    let (router, mut ps, mut ds) = fleet(mode, 1, 1, options).await;
    (router, ps.remove(0), ds.remove(0))
}
