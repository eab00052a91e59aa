//! A router takes the place of another one under load: servers go over to it, and no request is lost.

use crate::fleet::{PATIENCE, PATIENT, TestCluster};
use crate::process::post;
use serde_json::json;
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

/// Clients that ask one after the other of whichever router they are told.
struct RequestStream {
    /// Where they ask, and how often that has changed.
    to: Mutex<(String, u64)>,
    stop: AtomicBool,
    served: AtomicU64,
}

impl RequestStream {
    fn new(to: &str) -> RequestStream {
        let to = Mutex::new((to.to_owned(), 0));
        RequestStream { to, stop: AtomicBool::new(false), served: AtomicU64::new(0) }
    }

    /// Asks until it is told to stop; `at` is the number of the address that is asked.
    fn ask(&self, seed: u32, at: &AtomicU64) {
        for nth in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let (to, number) = self.to.lock().expect("no panic").clone();
            at.store(number, Ordering::Relaxed);
            let prompt: Vec<u32> =
                (0..70).map(|of| (of * 7 + seed * 31 + nth * 13) % 251).collect();
            let body = json!({"model": "m", "prompt": prompt, "max_tokens": 64, "stream": true});
            let (status, answer) = post(&to, "/v1/completions", "r", &body);
            assert!(status == 200 && answer.ends_with("data: [DONE]\n\n"), "{status} {answer}");
            self.served.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until so many more were served.
    fn more(&self, count: u64) {
        let (start, before) = (Instant::now(), self.served.load(Ordering::Relaxed));
        while self.served.load(Ordering::Relaxed) < before + count {
            assert!(start.elapsed() < PATIENCE, "requests stand still");
            thread::yield_now();
        }
    }
}

/// Stops the clients also where the test fails.
struct StopGuard<'a>(&'a AtomicBool);

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        thread::yield_now();
    }
}

fn hands_over(mode: &str) {
    let mut old = TestCluster::new(&["--shutdown-delay", "3600"]);
    let _servers = ["prefill", "decode", "prefill", "decode"]
        .map(|role| old.serve(role, mode, &["--set", PATIENT]));
    old.ready(4);
    let clients = RequestStream::new(old.router.text("http"));
    let at = [const { AtomicU64::new(0) }; 3];
    thread::scope(|scope| {
        let _stop = StopGuard(&clients.stop);
        let asks = at.iter().enumerate().map(|(seed, at)| {
            let clients = &clients;
            scope.spawn(move || clients.ask(seed as u32, at))
        });
        let asks: Vec<_> = asks.collect();
        clients.more(5);
        old.router.signal("TERM");
        let place = old.discovery().to_owned();
        until("the place is not free", || TcpStream::connect(&place).is_err());
        let new = TestCluster::at(&place, &[]);
        new.ready(4);
        assert_eq!(old.page("/readiness")["status"], "draining");
        // The old one serves on, by what it knows.
        clients.more(10);
        assert_eq!(old.metric("kvferry_router_expired_total"), 0);
        *clients.to.lock().expect("no panic") = (new.router.text("http").to_owned(), 1);
        until("a client stays", || at.iter().all(|at| at.load(Ordering::Relaxed) == 1));
        old.router.signal("TERM");
        assert_eq!(old.router.wait(), Some(0));
        clients.more(10);
        assert_eq!(new.workers().len(), 4);
        clients.stop.store(true, Ordering::Relaxed);
        asks.into_iter().for_each(|asks| asks.join().expect("no request is lost"));
    });
}

#[test]
fn no_request_is_lost_when_a_router_takes_the_place_of_another() {
    for mode in ["push", "pull"] {
        hands_over(mode);
    }
}
