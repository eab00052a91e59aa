//! The router between clients and instances that may send anything: HTTP from end to end.
//!
//! The clock stands still while any task can run, so timeouts pass without waiting.

mod client;
mod instance;
mod responses;
mod script;
mod seeds;

pub use self::seeds::seeds;

use self::client::{ask, play};
use self::instance::ScriptedInstance;
use self::script::Script;
use crate::allocated;
use kvferry::{HeldByRouter, RouterInProcess};
use std::cell::Cell;
use std::net::Ipv4Addr;
use std::sync::Once;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

/// Memory of the router, the clients and the instances, without the copies of what they send.
const HELD_MAX: usize = 24 << 20;

/// Number of copies of all bodies, on both sides of the router and in it.
const COPIES_MAX: usize = 6;

/// Seconds after which nothing is in flight any more.
const DRAIN_S: usize = 300;

/// Tries of a well-formed request, a second apart: instances that failed are tried again later.
const TRIES: usize = 120;

thread_local! {
    static PANICS: Cell<usize> = const { Cell::new(0) };
}

/// Counts panics of tasks, which the runtime would otherwise hide.
fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let _ = PANICS.try_with(|panics| panics.set(panics.get() + 1));
            before(panic);
        }));
    });
    PANICS.set(0);
}

/// Plays a script.
///
/// # Panics
/// If the router panics, answers a request twice or not at all, keeps anything after its clients
/// have left, takes much more memory than it was sent, or does not serve afterwards.
pub fn run(data: &[u8]) {
    let script = Script::read(data);
    count_panics();
    let bound = HELD_MAX + COPIES_MAX * script.bytes();
    allocated::begin();
    let system = actix::System::with_tokio_rt(|| {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().expect("a runtime")
    });
    system.block_on(exchange(script));
    let peak = allocated::peak();
    assert!(peak <= bound, "{peak} bytes were held at a time, {bound} may be");
    assert_eq!(PANICS.get(), 0, "a task panicked");
}

async fn exchange(script: Script) {
    // A Rust program ignores it; under the fuzzer, whose `main` is not Rust's, it would end the process.
    let _ignored = signal(SignalKind::pipe()).expect("a handler");
    let Script { clients, instances } = script;
    let [prefill, decode] =
        [ScriptedInstance::start(true).await, ScriptedInstance::start(false).await];
    let (p, d) = (format!("http://{}", prefill.http), format!("http://{}", decode.http));
    let short = ["--queue-timeout", "1", "--answer-timeout", "5", "--idle-timeout", "5"];
    let small = ["--body-max", "524288", "--bodies-max", "4194304", "--connections-max", "8"];
    let named = ["--prefill", &*p, "--decode", &*d];
    let options: Vec<&str> = [&short[..], &small[..], &named[..]].concat();
    let router = RouterInProcess::start(&options).expect("a router");
    serves(&router, "at first").await;
    for (instance, answers) in [&prefill, &decode].into_iter().zip(instances) {
        instance.answers.borrow_mut().extend(answers);
    }
    let playing: Vec<_> = clients
        .into_iter()
        .zip(2..)
        .map(|(steps, host)| actix::spawn(play(steps, Ipv4Addr::new(127, 0, 0, host), router.http)))
        .collect();
    for client in playing {
        client.await.expect("a client panics on a finding");
    }
    is_drained(&router).await;
    for instance in [&prefill, &decode] {
        instance.answers.borrow_mut().clear();
    }
    serves(&router, "afterwards").await;
    is_drained(&router).await;
}

async fn is_drained(router: &RouterInProcess) {
    let mut held = router.held().await;
    for _ in 0..DRAIN_S {
        if held == HeldByRouter::default() {
            return;
        }
        sleep(Duration::from_secs(1)).await;
        held = router.held().await;
    }
    panic!("{held:?} after all clients have left");
}

/// Waits until a streamed and another request are served.
async fn serves(router: &RouterInProcess, when: &str) {
    for is_streamed in [false, true] {
        let mut last = None;
        for _ in 0..TRIES {
            last = ask(router.http, is_streamed).await;
            let served = |it: &responses::ReceivedResponse| it.status == 200 && it.is_whole;
            if last.as_ref().is_some_and(served) {
                break;
            }
            sleep(Duration::from_secs(1)).await;
        }
        let last = last.unwrap_or_else(|| panic!("no answer {when}"));
        let text = String::from_utf8_lossy(&last.body).into_owned();
        assert!(last.status == 200 && text.contains("from decode"), "{when}: {last:?} {text}");
    }
}
