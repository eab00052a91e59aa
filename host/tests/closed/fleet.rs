//! A router with instances.

use crate::process::ServeProcess;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A guard against waiting for ever; however busy the machine is, nothing takes as long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// Times of the protocol that no busy machine passes.
pub(crate) const PATIENT: &str = "channel.hello_ms=600000,channel.silent_ms=600000,\
     protocol.lease_ms=600000,protocol.orphan_ms=600000,protocol.resume_ms=600000,\
     operations.stall_ms=600000,operations.open_ms=600000,operations.quiet_ms=600000";

/// The same for who is to find soon that a peer does not answer its hello.
pub(crate) const KEEN: &str = "channel.silent_ms=600000,protocol.lease_ms=600000,\
     protocol.orphan_ms=600000,protocol.resume_ms=600000,operations.stall_ms=600000,\
     operations.open_ms=600000,operations.quiet_ms=600000";

pub(crate) struct TestCluster {
    pub(crate) router: ServeProcess,
}

impl TestCluster {
    /// A router that drops no registration.
    pub(crate) fn new(options: &[&str]) -> TestCluster {
        TestCluster::at("127.0.0.1:0", options)
    }

    /// The same where instances look for it.
    pub(crate) fn at(discovery: &str, options: &[&str]) -> TestCluster {
        let mut args = vec!["--json", "--listen", "127.0.0.1:0", "--discovery", discovery];
        args.extend_from_slice(&["--admin-addr", "127.0.0.1:0", "--expiry", "3600"]);
        args.extend_from_slice(options);
        TestCluster { router: ServeProcess::run("router", &args) }
    }

    pub(crate) fn discovery(&self) -> &str {
        self.router.text("discovery").strip_prefix("tcp://").expect("a TCP address")
    }

    /// An instance that registers.
    pub(crate) fn serve(&self, role: &str, mode: &str, more: &[&str]) -> ServeProcess {
        let mut args = vec!["--role", role, "--mode", mode, "--proxy", self.discovery()];
        args.extend_from_slice(more);
        ServeProcess::serve(&args)
    }

    pub(crate) fn page(&self, path: &str) -> Value {
        serde_json::from_str(&self.router.get(path)).expect("JSON")
    }

    pub(crate) fn workers(&self) -> Vec<Value> {
        self.page("/workers")["workers"].as_array().expect("a list").clone()
    }

    /// Waits for what the router is to show.
    pub(crate) fn until(&self, what: &str, is_so: impl Fn(&[Value]) -> bool) {
        let start = Instant::now();
        loop {
            let workers = self.workers();
            if is_so(&workers) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{what}: {workers:?}");
            thread::yield_now();
        }
    }

    pub(crate) fn ready(&self, count: usize) {
        self.until("ready", |workers| {
            workers.iter().filter(|it| it["state"] == "ready").count() == count
        });
    }

    /// Status and answer of a request for a prompt that no other has begun with.
    pub(crate) fn ask(&self, seed: u32, more: &[(&str, Value)]) -> (u16, String) {
        let prompt: Vec<u32> = (0..70).map(|at| (at * 7 + seed * 13) % 251).collect();
        let mut body = json!({"model": "m", "prompt": prompt, "max_tokens": 2});
        for (key, value) in more {
            body[*key] = value.clone();
        }
        self.router.post("/v1/completions", "r", &body)
    }

    /// The value of a metric of the router; 0 if it is not there.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        metric(&self.router, name)
    }
}

/// The value of a metric; 0 if it is not there.
pub(crate) fn metric(process: &ServeProcess, name: &str) -> u64 {
    let page = process.get("/metrics");
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map_or(0, |value| value.parse().expect("a number"))
}

/// The registration of a process, which the test sends in its place.
pub(crate) fn registration(
    of: &ServeProcess,
    role: Role,
    mode: Mode,
    control: &str,
) -> Registration {
    let port = of.text("handshake").rsplit_once(':').expect("a port").1;
    Registration {
        engine: format!("127.0.0.1:{port}").as_str().into(),
        incarnation: Incarnation(of.ready["incarnation"].as_u64().expect("a number")),
        ..answering(of.text("http"), role, mode, control)
    }
}

/// What an instance says that is nothing but what answers at an address.
pub(crate) fn answering(http: &str, role: Role, mode: Mode, control: &str) -> Registration {
    Registration {
        sequence: 0,
        ..Registration::new(http.into(), Incarnation(1), role, mode, http.into(), control.into())
    }
}

/// Registers again and again until it is dropped.
pub(crate) struct FleetHeartbeat {
    stop: Arc<AtomicBool>,
    beats: Option<JoinHandle<()>>,
}

impl FleetHeartbeat {
    pub(crate) fn beat(discovery: &str, mut registration: Registration) -> FleetHeartbeat {
        FleetHeartbeat::send(discovery, move || {
            registration.sequence += 1;
            native::encode(&Frame::Register(registration.clone()))
        })
    }

    /// The same with frames of any kind.
    pub(crate) fn send(
        discovery: &str,
        mut frame: impl FnMut() -> Vec<u8> + Send + 'static,
    ) -> FleetHeartbeat {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::DEALER).expect("a socket");
        socket.set_linger(0).expect("an option of sockets");
        socket.connect(&format!("tcp://{discovery}")).expect("an address");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let beats = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                // A router that is gone takes nothing.
                let _ = socket.send(frame(), zmq::DONTWAIT);
                thread::park_timeout(Duration::from_millis(200));
            }
        });
        FleetHeartbeat { stop, beats: Some(beats) }
    }
}

impl Drop for FleetHeartbeat {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(beats) = self.beats.take() {
            beats.thread().unpark();
            // It has nothing to say.
            let _ = beats.join();
        }
    }
}
