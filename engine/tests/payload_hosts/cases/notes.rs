//! One payload core, told by the test what other hosts say.

use super::chunk;
use crate::cluster::prefill_name;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::DecodeHook;
use kvferry_engine::core::payload::*;
use kvferry_engine::core::{Machine, Nanos, Outbox};

const CLIENT: PayloadClient = PayloadClient(0);

struct NoteBench(PayloadCore);

impl NoteBench {
    /// A core that knows of host 1, and has met it.
    fn new() -> NoteBench {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let config = PayloadConfig::default();
        let core = PayloadCore::with_peers(config, prefill_name(0), Incarnation(1));
        let mut bench = NoteBench(core);
        let other = PayloadHost { engine: prefill_name(1), control: "sim://other".into() };
        bench.tell(PayloadInput::Hosts(vec![other]));
        let (deployment, stage) = ("a".into(), "1".into());
        bench.hook(PayloadHook::Joined { deployment, stage });
        bench
    }

    fn tell(&mut self, input: PayloadInput) -> Vec<PayloadEffect> {
        let mut out = Outbox::new();
        self.0.handle(Nanos::from_ms(1), input, &mut out);
        out.take()
    }

    fn hook(&mut self, hook: PayloadHook) -> Vec<PayloadEffect> {
        self.tell(PayloadInput::Hook { client: CLIENT, hook })
    }

    fn met(&mut self, incarnation: u64) -> Vec<PayloadEffect> {
        let (peer, incarnation) = (prefill_name(1), Incarnation(incarnation));
        self.tell(PayloadInput::DecodePeer(DirectoryNews::Met { peer, incarnation }))
    }

    /// Host 1 offers a chunk; true if it is fetched.
    fn offered(&mut self, index: u64, number: u64) -> bool {
        let effects = self.offer(index, number);
        let is_fetch = |effect: &PayloadEffect| {
            matches!(effect, PayloadEffect::Decode(DecodeHook::Arrived { .. }))
        };
        effects.iter().any(is_fetch)
    }

    fn offer(&mut self, index: u64, number: u64) -> Vec<PayloadEffect> {
        let place = ScopedKey { deployment: "a".into(), key: chunk(index) };
        let note =
            PayloadNote::Offer { place, number, bytes: 10, generation: number, is_chunk: true };
        let (peer, incarnation) = (prefill_name(1), Incarnation(1));
        let news = DirectoryNews::Told { peer, incarnation, note };
        self.tell(PayloadInput::DecodePeer(news))
    }
}

fn answers(effects: Vec<PayloadEffect>) -> Vec<PayloadAnswer> {
    let answer = |effect| match effect {
        PayloadEffect::Answer { answer, .. } if !answer.is_receipt() => Some(answer),
        _ => None,
    };
    effects.into_iter().filter_map(answer).collect()
}

#[test]
fn what_is_offered_again_is_fetched_though_more_was_offered_since() {
    let mut bench = NoteBench::new();
    for index in 0..2 {
        bench.hook(PayloadHook::Want { key: chunk(index), producer: None });
    }
    bench.met(1);
    // The first offer, with number 1, was lost with its connection.
    assert!(bench.offered(1, 2));
    bench.met(1);
    assert!(bench.offered(0, 1));
    // Once is enough.
    assert!(!bench.offered(0, 1));
}

#[test]
fn what_was_asked_of_a_host_that_began_anew_is_gone() {
    let mut bench = NoteBench::new();
    let named = |index| PayloadHook::WantFrom { key: chunk(index), host: prefill_name(1) };
    bench.hook(named(0));
    bench.met(1);
    let gone = PayloadFailure::PeerGone(prefill_name(1).0);
    let missing = PayloadAnswer::Missing { key: chunk(0), failure: gone, former: FormerUse::No };
    assert_eq!(answers(bench.met(2)), [missing]);
    // What is asked of the new one may be put there.
    assert_eq!(answers(bench.hook(named(1))), []);
}

#[test]
fn what_is_answered_with_what_is_over_is_asked_again() {
    let mut bench = NoteBench::new();
    let want = PayloadHook::Want { key: chunk(0), producer: None };
    bench.hook(want.clone());
    bench.met(1);
    // Nobody waits for it any more, so it is over as soon as it is offered.
    bench.hook(PayloadHook::Abandon { key: chunk(0) });
    assert!(!bench.offered(0, 1));
    // The host has heard that it is wanted again, and not yet that it is over.
    bench.hook(want);
    bench.met(1);
    assert!(!bench.offered(0, 1));
    assert!(bench.0.deadline().is_some(), "it is asked again");
}
