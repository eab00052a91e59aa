//! One payload core, told by the test what other hosts say.

use super::chunk;
use crate::cluster::prefill_name;
use kvferry_engine::core::ids::{Incarnation, RequestId};
use kvferry_engine::core::message::{DecodeAnswer, DecodeHook};
use kvferry_engine::core::payload::*;
use kvferry_engine::core::{Machine, Nanos, Outbox};
use std::collections::BTreeMap;

const CLIENT: PayloadClient = PayloadClient(0);

struct NoteBench {
    core: PayloadCore,
    /// Numbers of the wants that host 1 was told last.
    wants: BTreeMap<PayloadKey, u64>,
}

impl NoteBench {
    /// A core that knows of host 1, and has met it.
    fn new() -> NoteBench {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let config = PayloadConfig::default();
        let core = PayloadCore::with_peers(config, prefill_name(0), Incarnation(1));
        let mut bench = NoteBench { core, wants: BTreeMap::new() };
        let other = PayloadHost { engine: prefill_name(1), control: "sim://other".into() };
        bench.tell(PayloadInput::Hosts(vec![other]));
        let (deployment, stage) = ("a".into(), "1".into());
        bench.hook(PayloadHook::Joined { deployment, stage });
        bench
    }

    /// A core whose client wants the first chunk, which host 1 was told; and the hook that wants it.
    fn wanting() -> (NoteBench, PayloadHook) {
        let (mut bench, want) =
            (NoteBench::new(), PayloadHook::Want { key: chunk(0), producer: None });
        bench.hook(want.clone());
        bench.met(1);
        (bench, want)
    }

    fn tell(&mut self, input: PayloadInput) -> Vec<PayloadEffect> {
        let mut out = Outbox::new();
        self.core.handle(Nanos::from_ms(1), input, &mut out);
        let effects = out.take();
        for effect in &effects {
            if let PayloadEffect::DecodePeer(DirectoryCall::Tell { note, .. }) = effect
                && let PayloadNote::Want { place, want } = note
            {
                self.wants.insert(place.key.clone(), *want);
            }
        }
        effects
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
        let effects = self.offer(index, number, self.want(index));
        let is_fetch = |effect: &PayloadEffect| {
            matches!(effect, PayloadEffect::Decode(DecodeHook::Arrived { .. }))
        };
        effects.iter().any(is_fetch)
    }

    /// The want of a chunk that host 1 was told last.
    fn want(&self, index: u64) -> u64 {
        self.wants[&chunk(index)]
    }

    /// Host 1 offers a chunk that is wanted, and there is room for it; what fetches it.
    fn fetch(&mut self, index: u64, number: u64) -> RequestId {
        let offer = self.offer(index, number, self.want(index));
        let fetch = offer.into_iter().find_map(|effect| match effect {
            PayloadEffect::Decode(DecodeHook::Arrived { request, .. }) => Some(request),
            _ => None,
        });
        let request = fetch.expect("it is fetched");
        self.tell(PayloadInput::Decode(DecodeAnswer::Allocate { request: request.clone() }));
        request
    }

    fn offer(&mut self, index: u64, number: u64, want: u64) -> Vec<PayloadEffect> {
        let place = ScopedKey { deployment: "a".into(), key: chunk(index) };
        let (bytes, generation, is_chunk) = (10, number, true);
        let note = PayloadNote::Offer { place, number, bytes, generation, is_chunk, want };
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

/// Words to host 1.
fn notes(effects: Vec<PayloadEffect>) -> Vec<PayloadNote> {
    let note = |effect| match effect {
        PayloadEffect::DecodePeer(DirectoryCall::Tell { note, .. }) => Some(note),
        _ => None,
    };
    effects.into_iter().filter_map(note).collect()
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
    let (mut bench, want) = NoteBench::wanting();
    // Nobody waits for it any more, so it is over as soon as it is offered.
    bench.hook(PayloadHook::Abandon { key: chunk(0) });
    assert!(!bench.offered(0, 1));
    // The host has heard that it is wanted again, and not yet that it is over.
    bench.hook(want);
    bench.met(1);
    assert!(!bench.offered(0, 1));
    assert!(bench.core.deadline().is_some(), "it is asked again");
}

#[test]
fn an_offer_for_a_want_that_was_withdrawn_is_not_fetched() {
    let (mut bench, want) = NoteBench::wanting();
    let earlier = bench.want(0);
    bench.hook(PayloadHook::Abandon { key: chunk(0) });
    bench.hook(want);
    bench.met(1);
    assert_eq!(bench.offer(0, 1, earlier), [], "the host answers the later want, too");
    assert!(bench.offered(0, 1));
}

#[test]
fn a_payload_that_was_abandoned_while_it_came_is_handed_to_nobody() {
    let (mut bench, want) = NoteBench::wanting();
    let request = bench.fetch(0, 1);
    bench.hook(PayloadHook::Abandon { key: chunk(0) });
    // A later request with the same id, for which other bytes may be put by now.
    bench.hook(want);
    let loaded = bench.tell(PayloadInput::Decode(DecodeAnswer::Loaded { request }));
    assert_eq!(answers(loaded), []);
    let done = PayloadNote::Done { number: 1, got: false };
    assert_eq!(notes(bench.met(1)).first(), Some(&done));
}

#[test]
fn a_host_that_began_anew_does_not_keep_the_want_of_what_it_lost() {
    let (mut bench, _) = NoteBench::wanting();
    let request = bench.fetch(0, 1);
    bench.tell(PayloadInput::Decode(DecodeAnswer::Loaded { request }));
    bench.met(2);
    bench.hook(PayloadHook::WantFrom { key: chunk(1), host: prefill_name(1) });
    bench.met(2);
    let place = ScopedKey { deployment: "a".into(), key: chunk(1) };
    let want = bench.want(1);
    let note = PayloadNote::Absent { place: place.clone(), has_stage: true, want };
    let (peer, incarnation) = (prefill_name(1), Incarnation(2));
    let told =
        bench.tell(PayloadInput::DecodePeer(DirectoryNews::Told { peer, incarnation, note }));
    assert_eq!(notes(told), [PayloadNote::Unwant { place }]);
}
