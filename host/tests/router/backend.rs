//! Stand-in instances: an HTTP server that answers as a test says, and heartbeats over ZeroMQ.

use crate::rig::PATIENCE;
use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::TokioIo;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::dialect::moriio::registration::MoriioRegistration;
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::fabric::Endpoint;
use serde_json::{Value, json};
use std::num::NonZeroU16;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

/// A leg as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedLeg {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

impl ReceivedLeg {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub(crate) fn params(&self) -> &Value {
        &self.body["kv_transfer_params"]
    }
}

/// What an instance does with a leg.
#[derive(Clone)]
pub(crate) enum Act {
    Json(u16, Value),
    Text(u16, &'static str),
    /// A status, its `Retry-After`, and the error.
    Busy(u16, String, Value),
    /// Chunks of an event stream, then its end.
    Stream(Vec<String>),
    /// Chunks, then the connection is cut.
    Broken(Vec<String>),
    /// Chunks as the test sends them; the end when the sender is dropped.
    Fed(Arc<Mutex<Option<mpsc::UnboundedReceiver<String>>>>),
    /// The other act, with these headers.
    Head(Vec<(&'static str, &'static str)>, Box<Act>),
    /// The connection is cut without an answer.
    Cut,
    /// No answer, for ever.
    Never,
    /// The other act, once one of these instances has got the leg of this transfer.
    Kv(Vec<ReceivedLegs>, String, Box<Act>),
    /// The other act, once told.
    After(Arc<Notify>, Box<Act>),
}

/// Legs that an instance got.
pub(crate) type ReceivedLegs = Arc<Mutex<Vec<ReceivedLeg>>>;

/// A leg arrived somewhere.
static ARRIVAL: Notify = Notify::const_new();

type Decide = Arc<dyn Fn(&ReceivedLeg) -> Act + Send + Sync>;

pub(crate) struct StubInstance {
    pub(crate) role: Role,
    pub(crate) http: String,
    pub(crate) legs: ReceivedLegs,
    decide: Arc<Mutex<Decide>>,
    /// Legs that came, counted; and legs whose connection the router closed before the answer.
    pub(crate) arrived: watch::Sender<usize>,
    pub(crate) dropped: watch::Sender<usize>,
    /// Whether it answers probes well, and what key they had.
    pub(crate) health: Arc<Mutex<(bool, Vec<Option<String>>)>>,
    /// What it answers at /metrics.
    pub(crate) metrics: Arc<Mutex<Act>>,
    /// What it answers to who asks for its models.
    pub(crate) models: Arc<Mutex<Value>>,
    /// Legs of the prefills whose KV a decode waits for, as vLLM's does; none if it does not wait.
    partners: Arc<Mutex<Vec<ReceivedLegs>>>,
    /// Speaks TLS if there is one; all connections end when it is changed.
    pub(crate) tls: watch::Sender<Option<TlsAcceptor>>,
    /// Connections that the router made.
    pub(crate) accepted: Arc<AtomicUsize>,
    server: Option<JoinHandle<()>>,
}

/// What vLLM's prefill answers in READ mode.
pub(crate) fn prefill_params(transfer: &Value) -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[11, 12, 13]],
        "remote_engine_id": "engine-P", "remote_host": "127.0.0.1", "remote_handshake_port": 6301,
        "remote_notify_port": 61005, "remote_dp_rank": 0, "remote_dp_rank_override": true,
        "remote_dp_size": 1, "remote_dp_size_local": 1, "tp_size": 1, "transfer_id": transfer,
    })
}

/// What an instance usually does; a decode with partners waits until one has the leg of its
/// transfer.
fn usual(role: Role, leg: &ReceivedLeg, partners: &Mutex<Vec<ReceivedLegs>>) -> Act {
    let partners = partners.lock().unwrap().clone();
    match leg.params()["transfer_id"].as_str() {
        Some(transfer) if !partners.is_empty() => {
            Act::Kv(partners, transfer.to_owned(), Box::new(answer(role, leg)))
        }
        _ => answer(role, leg),
    }
}

/// Answer of an instance that comes at once.
pub(crate) fn answer(role: Role, leg: &ReceivedLeg) -> Act {
    let text = if role == Role::Prefill { "from P" } else { "from D" };
    let id = format!("cmpl-{}", leg.header("x-request-id"));
    if role == Role::Decode && leg.body["stream"] == true {
        let chunk = |n: u32| json!({"id": id, "choices": [{"index": 0, "text": format!("t{n}")}]});
        let mut chunks: Vec<_> = (0..3).map(|n| format!("data: {}\n\n", chunk(n))).collect();
        if leg.body["stream_options"]["include_usage"] == true {
            let usage = json!({"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6});
            let last = json!({"id": id, "choices": [], "usage": usage});
            chunks.push(format!("data: {last}\n\n"));
        }
        chunks.push("data: [DONE]\n\n".into());
        return Act::Stream(chunks);
    }
    let params = match role {
        Role::Prefill => prefill_params(&leg.params()["transfer_id"]),
        Role::Decode => Value::Null,
    };
    Act::Json(
        200,
        json!({
            "id": id, "object": "text_completion", "model": "fake-model",
            "choices": [{"index": 0, "finish_reason": "length", "text": text}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
            "kv_transfer_params": params,
        }),
    )
}

type Chunks = Pin<Box<dyn http_body::Body<Data = Bytes, Error = std::io::Error> + Send>>;

fn cut() -> std::io::Error {
    std::io::Error::other("cut by the test")
}

fn chunks(chunks: Vec<String>, ends: bool) -> Chunks {
    let (sender, receiver) = mpsc::unbounded_channel();
    for chunk in chunks {
        sender.send(Ok(chunk)).unwrap();
    }
    if !ends {
        sender.send(Err(cut())).unwrap();
    }
    fed(receiver)
}

fn fed(mut chunks: mpsc::UnboundedReceiver<Result<String, std::io::Error>>) -> Chunks {
    let mut cut = None;
    let stream = futures_poll(move |context| {
        if let Some(why) = cut.take() {
            return Poll::Ready(Some(Err(why)));
        }
        match chunks.poll_recv(context) {
            Poll::Ready(Some(Ok(chunk))) => Poll::Ready(Some(Ok(Frame::data(chunk.into())))),
            // What was written before goes out first.
            Poll::Ready(Some(Err(why))) => {
                cut = Some(why);
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    });
    Box::pin(StreamBody::new(stream))
}

/// A stream made of a function.
fn futures_poll<T, F>(poll: F) -> impl futures_core::Stream<Item = T>
where
    F: FnMut(&mut Context<'_>) -> Poll<Option<T>> + Unpin,
{
    struct Polled<F>(F);
    impl<T, F> futures_core::Stream for Polled<F>
    where
        F: FnMut(&mut Context<'_>) -> Poll<Option<T>> + Unpin,
    {
        type Item = T;
        fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
            (self.0)(context)
        }
    }
    Polled(poll)
}

/// Counts a leg that is dropped before it was answered.
struct DropCounter(Option<watch::Sender<usize>>);

impl Drop for DropCounter {
    fn drop(&mut self) {
        if let Some(dropped) = &self.0 {
            dropped.send_modify(|count| *count += 1);
        }
    }
}

async fn act(act: Act) -> Result<Response<Chunks>, std::io::Error> {
    let (mut act, mut headers) = (act, Vec::<(&str, String)>::new());
    loop {
        let (status, kind, body) = match act {
            Act::Json(status, value) => {
                (status, "application/json", chunks(vec![value.to_string()], true))
            }
            Act::Busy(status, again, error) => {
                headers.push(("retry-after", again));
                (status, "application/json", chunks(vec![error.to_string()], true))
            }
            Act::Text(status, text) => (status, "text/plain", chunks(vec![text.into()], true)),
            Act::Stream(list) => (200, "text/event-stream", chunks(list, true)),
            Act::Broken(list) => (200, "text/event-stream", chunks(list, false)),
            Act::Fed(source) => {
                let mut source = source.lock().unwrap().take().expect("fed once");
                let (sender, receiver) = mpsc::unbounded_channel();
                tokio::spawn(async move {
                    loop {
                        let chunk = tokio::select! {
                            chunk = source.recv() => chunk,
                            () = sender.closed() => None,
                        };
                        // The connection may close between the two.
                        let Some(true) = chunk.map(|chunk| sender.send(Ok(chunk)).is_ok()) else {
                            return;
                        };
                    }
                });
                (200, "text/event-stream", fed(receiver))
            }
            Act::Head(more, then) => {
                headers.extend(more.into_iter().map(|(name, value)| (name, value.to_owned())));
                act = *then;
                continue;
            }
            Act::Cut => return Err(cut()),
            Act::Never => std::future::pending().await,
            Act::Kv(prefills, transfer, then) => {
                loop {
                    let arrival = ARRIVAL.notified();
                    let is_it = |leg: &ReceivedLeg| leg.params()["transfer_id"] == *transfer;
                    if prefills.iter().any(|legs| legs.lock().unwrap().iter().any(is_it)) {
                        break;
                    }
                    arrival.await;
                }
                act = *then;
                continue;
            }
            Act::After(notify, then) => {
                notify.notified().await;
                act = *then;
                continue;
            }
        };
        let response = Response::builder().status(status).header("content-type", kind);
        let response =
            headers.into_iter().fold(response, |it, (name, value)| it.header(name, value));
        return Ok(response.body(body).unwrap());
    }
}

impl StubInstance {
    /// An instance at a free port that does the usual.
    pub(crate) async fn start(role: Role) -> StubInstance {
        StubInstance::start_at(role, "127.0.0.1:0").await.unwrap()
    }

    /// The same at an address, if that is free.
    pub(crate) async fn start_at(role: Role, at: &str) -> std::io::Result<StubInstance> {
        let listener = TcpListener::bind(at).await?;
        let http = listener.local_addr().unwrap().to_string();
        let partners: Arc<Mutex<Vec<ReceivedLegs>>> = Arc::default();
        let of = partners.clone();
        let decide: Decide = Arc::new(move |leg| usual(role, leg, &of));
        let mut backend = StubInstance {
            role,
            http,
            legs: Arc::default(),
            decide: Arc::new(Mutex::new(decide)),
            arrived: watch::Sender::new(0),
            dropped: watch::Sender::new(0),
            health: Arc::new(Mutex::new((true, Vec::new()))),
            metrics: Arc::new(Mutex::new(Act::Text(404, ""))),
            models: Arc::new(Mutex::new(model_list(&["fake-model", "m"]))),
            partners,
            tls: watch::Sender::new(None),
            accepted: Arc::default(),
            server: None,
        };
        let (legs, decide) = (backend.legs.clone(), backend.decide.clone());
        let (arrived, dropped) = (backend.arrived.clone(), backend.dropped.clone());
        let (health, metrics) = (backend.health.clone(), backend.metrics.clone());
        let models = backend.models.clone();
        let (tls, accepted) = (backend.tls.clone(), backend.accepted.clone());
        backend.server = Some(tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                stream.set_nodelay(true).unwrap();
                accepted.fetch_add(1, Ordering::Relaxed);
                let state = StubState {
                    legs: legs.clone(),
                    decide: decide.clone(),
                    arrived: arrived.clone(),
                    dropped: dropped.clone(),
                    health: health.clone(),
                    metrics: metrics.clone(),
                    models: models.clone(),
                };
                let service = service_fn(move |request| serve(request, state.clone()));
                let mut changes = tls.subscribe();
                let acceptor = changes.borrow_and_update().clone();
                let server = hyper::server::conn::http1::Builder::new();
                connections.spawn(async move {
                    let served = async {
                        // Who asks may go away.
                        let _ = match acceptor {
                            None => server.serve_connection(TokioIo::new(stream), service).await,
                            Some(acceptor) => {
                                let Ok(stream) = acceptor.accept(stream).await else { return };
                                server.serve_connection(TokioIo::new(stream), service).await
                            }
                        };
                    };
                    tokio::select! {
                        () = served => {}
                        _ = changes.changed() => {}
                    }
                });
            }
        }));
        Ok(backend)
    }

    /// Does with each leg what `decide` says; the usual if it says nothing.
    pub(crate) fn on(&self, decide: impl Fn(&ReceivedLeg) -> Option<Act> + Send + Sync + 'static) {
        let (role, partners) = (self.role, self.partners.clone());
        *self.decide.lock().unwrap() =
            Arc::new(move |leg| decide(leg).unwrap_or_else(|| usual(role, leg, &partners)));
    }

    /// Has the usual answer of a decode wait until one of these prefills has got the other leg:
    /// otherwise the router may drop that leg, which nobody needs any more, before it was sent.
    pub(crate) fn waits_for<'a>(&self, prefills: impl IntoIterator<Item = &'a StubInstance>) {
        *self.partners.lock().unwrap() = prefills.into_iter().map(|it| it.legs.clone()).collect();
    }

    /// Does this with each leg.
    pub(crate) fn always(&self, act: Act) {
        self.on(move |_| Some(act.clone()));
    }

    /// Has it answer this at /metrics.
    pub(crate) fn says(&self, page: &str) {
        *self.metrics.lock().unwrap() = Act::Stream(vec![page.to_owned()]);
    }

    /// Legs that came so far.
    pub(crate) fn seen(&self) -> Vec<ReceivedLeg> {
        self.legs.lock().unwrap().clone()
    }

    /// Waits for the `count`th leg.
    pub(crate) async fn arrival(&self, count: usize) {
        let mut arrived = self.arrived.subscribe();
        let waiting = arrived.wait_for(|arrived| *arrived >= count);
        timeout(PATIENCE, waiting).await.expect("the leg arrives").unwrap();
    }

    /// Waits until the router has given up `count` legs.
    pub(crate) async fn given_up(&self, count: usize) {
        let mut dropped = self.dropped.subscribe();
        let waiting = dropped.wait_for(|dropped| *dropped >= count);
        timeout(PATIENCE, waiting).await.expect("the leg is given up").unwrap();
    }

    /// Dies with all its connections.
    pub(crate) fn die(&mut self) {
        self.server.take().expect("it lives").abort();
    }
}

impl Drop for StubInstance {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.abort();
        }
    }
}

#[derive(Clone)]
struct StubState {
    legs: ReceivedLegs,
    decide: Arc<Mutex<Decide>>,
    arrived: watch::Sender<usize>,
    dropped: watch::Sender<usize>,
    health: Arc<Mutex<(bool, Vec<Option<String>>)>>,
    metrics: Arc<Mutex<Act>>,
    models: Arc<Mutex<Value>>,
}

/// A list of models as vLLM has it.
pub(crate) fn model_list(names: &[&str]) -> Value {
    let card = |id: &&str| json!({"id": id, "object": "model", "root": "/models", "parent": null});
    json!({"object": "list", "data": names.iter().map(card).collect::<Vec<_>>()})
}

async fn serve(
    request: Request<Incoming>,
    StubState { legs, decide, arrived, dropped, health, metrics, models }: StubState,
) -> Result<Response<Chunks>, std::io::Error> {
    let is_asked_by_the_router = ["/health", "/metrics", "/v1/models"];
    if is_asked_by_the_router.contains(&request.uri().path()) {
        let key =
            request.headers().get("authorization").map(|key| key.to_str().unwrap().to_owned());
        if request.uri().path() == "/health" {
            let status = {
                let mut health = health.lock().unwrap();
                health.1.push(key);
                if health.0 { 200 } else { 503 }
            };
            return act(Act::Text(status, "")).await;
        }
        if request.uri().path() == "/metrics" {
            let page = metrics.lock().unwrap().clone();
            return act(page).await;
        }
        let mut body = models.lock().unwrap().clone();
        body["key"] = json!(key);
        return act(Act::Json(200, body)).await;
    }
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let body = match body.is_empty() {
        true => Value::Null,
        false => serde_json::from_slice(&body).unwrap(),
    };
    let leg = ReceivedLeg { path: head.uri.to_string(), headers: head.headers, body };
    let decided = decide.lock().unwrap().clone()(&leg);
    legs.lock().unwrap().push(leg);
    arrived.send_modify(|count| *count += 1);
    ARRIVAL.notify_waiters();
    let mut watch = DropCounter(Some(dropped));
    let answer = act(decided).await;
    watch.0 = None;
    answer
}

/// What a heartbeat says beside role and HTTP address.
#[derive(Clone, Debug)]
pub(crate) struct HeartbeatFields {
    pub(crate) mode: Mode,
    pub(crate) dp: u16,
    pub(crate) tp: u16,
    pub(crate) native: Option<Registration>,
}

impl HeartbeatFields {
    pub(crate) fn of(mode: Mode) -> HeartbeatFields {
        HeartbeatFields { mode, dp: 1, tp: 1, native: None }
    }
}

/// The frame of a stand-in instance.
pub(crate) fn frame(role: Role, http: &str, form: &HeartbeatFields) -> Vec<u8> {
    let zmq = match role {
        Role::Prefill => "host:127.0.0.1,handshake:6301,notify:61005",
        Role::Decode => "host:127.0.0.1,handshake:7301,notify:62005",
    };
    let size = |size| NonZeroU16::new(size).unwrap();
    let beat = MoriioRegistration::new(
        role,
        Endpoint::from(http),
        ZmqAddress::parse(zmq).unwrap(),
        size(form.dp),
        size(form.tp),
        form.mode,
    )
    .unwrap();
    match &form.native {
        Some(registration) => beat.encode_with(registration),
        None => beat.encode(),
    }
}

/// A DEALER that repeats its messages until it is dropped.
pub(crate) struct BackendHeartbeat {
    stop: Option<Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl BackendHeartbeat {
    /// Sends the messages at once and then every second.
    pub(crate) fn beat(discovery: &str, messages: Vec<Vec<Vec<u8>>>) -> BackendHeartbeat {
        let (stop, stopped) = channel();
        let context = zmq::Context::new();
        let socket = context.socket(zmq::DEALER).unwrap();
        socket.set_linger(0).unwrap();
        socket.set_ipv6(true).unwrap();
        socket.connect(discovery).unwrap();
        let thread = std::thread::spawn(move || {
            loop {
                for parts in &messages {
                    socket.send_multipart(parts, 0).unwrap();
                }
                match stopped.recv_timeout(Duration::from_secs(1)) {
                    Err(RecvTimeoutError::Timeout) => {}
                    _ => return,
                }
            }
        });
        BackendHeartbeat { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for BackendHeartbeat {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}
