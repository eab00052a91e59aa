//! Ids that are used again, and what is no stream.

use crate::cases::{CaseBench, OTHER, TALKER, THINKER, chunk};
use kvferry_engine::core::payload::*;
use kvferry_engine::core::{Gauges, Machine, Nanos, Outbox};

/// Puts at once as a chunk of its stream, or as none; what the client is told of that.
fn put_as(
    bench: &mut CaseBench,
    client: PayloadClient,
    (key, is_chunk): (PayloadKey, bool),
) -> Option<PayloadFailure> {
    let reserve = PayloadHook::Reserve { ticket: 1, bytes: 10, wait: Nanos::ZERO };
    let [(_, PayloadAnswer::Reserved { slot, .. })] = bench.tell(client, reserve)[..] else {
        panic!("there is room")
    };
    let mut out = Outbox::new();
    let hook = PayloadHook::Put { slot, key, receivers: 1, is_chunk };
    bench.core.handle(bench.now, PayloadInput::Hook { client, hook }, &mut out);
    let stored = out.take().into_iter().find_map(|effect| match effect {
        PayloadEffect::Answer {
            client: told,
            answer: PayloadAnswer::Stored { slot: of, failure },
        } if told == client && of == slot => Some(failure),
        _ => None,
    });
    stored.expect("a put is answered")
}

/// Asks for a payload. Returns why there is none, if so, and whether that may be of an earlier request.
fn asks(
    bench: &mut CaseBench,
    client: PayloadClient,
    key: PayloadKey,
) -> Option<(PayloadFailure, FormerUse)> {
    match bench.tell(client, PayloadHook::Want { key, producer: None }).pop() {
        Some((_, PayloadAnswer::Missing { failure, former, .. })) => Some((failure, former)),
        None => None,
        Some(other) => panic!("{other:?}"),
    }
}

fn gets(bench: &mut CaseBench, client: PayloadClient, key: PayloadKey) {
    let (claim, ..) = bench.get(client, key).expect("it is there");
    bench.tell(client, PayloadHook::Release { claim });
}

/// Joins a second process of the stage that puts.
fn second(bench: &mut CaseBench) -> PayloadClient {
    let client = PayloadClient(8);
    bench.join(client, "a", "0");
    client
}

#[test]
fn a_stream_that_begins_anew_has_nothing_of_the_one_before() {
    let ends: [Option<PayloadHook>; 3] = [
        None,
        Some(PayloadHook::End { stream: chunk(0).stream, failure: None, is_own: true }),
        Some(PayloadHook::CleanUp { stream: chunk(0).stream, is_own: true }),
    ];
    for end in ends {
        let mut bench = CaseBench::new(PayloadConfig::default());
        let second = second(&mut bench);
        for index in 0..4 {
            assert_eq!(put_as(&mut bench, THINKER, (chunk(index), true)), None);
        }
        for index in 0..2 {
            gets(&mut bench, TALKER, chunk(index));
        }
        if let Some(end) = end {
            bench.tell(THINKER, end);
        }
        // Taken, left, and never put: all of it is for the request that begins now.
        assert_eq!(put_as(&mut bench, second, (chunk(0), true)), None);
        assert_eq!(bench.core.gauges().transfers, 1, "what was left is gone");
        gets(&mut bench, OTHER, chunk(0));
        for index in 1..5 {
            assert_eq!(asks(&mut bench, OTHER, chunk(index)), None, "chunk {index}");
        }
    }
}

#[test]
fn a_chunk_of_an_earlier_request_is_for_nobody() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    let second = second(&mut bench);
    put_as(&mut bench, THINKER, (chunk(0), true));
    put_as(&mut bench, second, (chunk(0), true));
    let refused = put_as(&mut bench, THINKER, (chunk(1), true));
    assert_eq!(refused, Some(PayloadFailure::Superseded));
    assert_eq!(put_as(&mut bench, second, (chunk(1), true)), None);
    let Gauges { transfers, held, .. } = bench.core.gauges();
    assert_eq!((transfers, held), (2, 2));
}

#[test]
fn the_end_of_an_earlier_request_is_none_of_a_later_one() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    let second = second(&mut bench);
    let (stream, failure) = (chunk(0).stream, Some("aborted".into()));
    let end = PayloadHook::End { stream: stream.clone(), failure, is_own: true };
    let clean_up = PayloadHook::CleanUp { stream, is_own: true };
    put_as(&mut bench, THINKER, (chunk(0), true));
    gets(&mut bench, TALKER, chunk(0));
    put_as(&mut bench, second, (chunk(0), true));
    put_as(&mut bench, second, (chunk(1), true));
    // Who has put or got something of the earlier one says that it is over.
    for (client, hook) in [(THINKER, end), (THINKER, clean_up.clone()), (TALKER, clean_up.clone())]
    {
        assert_eq!(bench.tell(client, hook), []);
    }
    for index in 0..2 {
        gets(&mut bench, OTHER, chunk(index));
    }
    assert_eq!(asks(&mut bench, OTHER, chunk(2)), None);
    // Of those who have a part in it each may end it.
    for client in [second, OTHER] {
        bench.tell(client, clean_up.clone());
        let told = asks(&mut bench, OTHER, chunk(3));
        assert_eq!(told, Some((PayloadFailure::CleanedUp, FormerUse::No)));
        put_as(&mut bench, second, (chunk(0), true));
        gets(&mut bench, OTHER, chunk(0));
    }
}

#[test]
fn what_is_put_behind_a_clean_up_is_dropped() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    put_as(&mut bench, THINKER, (chunk(0), true));
    bench.tell(TALKER, PayloadHook::CleanUp { stream: chunk(0).stream, is_own: false });
    let refused = put_as(&mut bench, THINKER, (chunk(1), true));
    assert_eq!(refused, Some(PayloadFailure::CleanedUp));
    assert_eq!(bench.core.gauges().held, 0);
    assert_eq!(put_as(&mut bench, THINKER, (chunk(0), true)), None);
}

#[test]
fn what_failed_before_it_was_asked_for_may_be_of_an_earlier_request() {
    let end = |why: Option<&str>| {
        let failure = why.map(Into::into);
        PayloadHook::End { stream: chunk(0).stream, failure, is_own: true }
    };
    let gone = PayloadFailure::GivenUp("gone".into());
    // Nobody has learned of it.
    let mut bench = CaseBench::new(PayloadConfig::default());
    bench.tell(THINKER, end(Some("gone")));
    assert_eq!(asks(&mut bench, TALKER, chunk(0)), Some((gone.clone(), FormerUse::Perhaps)));
    // Whoever waited has learned of it, and does so for sure.
    let mut bench = CaseBench::new(PayloadConfig::default());
    assert_eq!(asks(&mut bench, TALKER, chunk(0)), None);
    let former = FormerUse::No;
    let told = PayloadAnswer::Missing { key: chunk(0), failure: gone.clone(), former };
    assert_eq!(bench.tell(THINKER, end(Some("gone"))), [(TALKER, told)]);
    assert_eq!(asks(&mut bench, OTHER, chunk(0)), Some((gone, FormerUse::Yes)));
    // The first chunk was taken by the request before; a later one is of no other request.
    let mut bench = CaseBench::new(PayloadConfig::default());
    for index in 0..2 {
        put_as(&mut bench, THINKER, (chunk(index), true));
        gets(&mut bench, TALKER, chunk(index));
    }
    assert_eq!(asks(&mut bench, OTHER, chunk(0)), Some((PayloadFailure::Taken, FormerUse::Yes)));
    assert_eq!(asks(&mut bench, OTHER, chunk(1)), Some((PayloadFailure::Taken, FormerUse::No)));
}

#[test]
fn what_is_no_chunk_has_no_stream_whatever_its_key_is() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    let second = second(&mut bench);
    for (index, client) in [(3, THINKER), (1, second), (0, second), (2, THINKER)] {
        assert_eq!(put_as(&mut bench, client, (chunk(index), false)), None);
    }
    let failure: std::sync::Arc<str> = "no room".into();
    for is_chunk in [true, false] {
        let hook = PayloadHook::GiveUp { key: chunk(9), is_chunk, failure: failure.clone() };
        assert_eq!(bench.tell(THINKER, hook), []);
        let former = if is_chunk { FormerUse::No } else { FormerUse::Perhaps };
        let given_up = PayloadFailure::GivenUp(failure.clone());
        assert_eq!(asks(&mut bench, OTHER, chunk(9)), Some((given_up, former)));
    }
    // Nor does the end of a stream with its name mean it.
    bench.tell(THINKER, PayloadHook::CleanUp { stream: chunk(0).stream, is_own: false });
    for index in 0..4 {
        gets(&mut bench, TALKER, chunk(index));
        let taken = Some((PayloadFailure::Taken, FormerUse::Yes));
        assert_eq!(asks(&mut bench, TALKER, chunk(index)), taken);
        put_as(&mut bench, second, (chunk(index), false));
        bench.tell(OTHER, PayloadHook::Drop { key: chunk(index) });
        let dropped = Some((PayloadFailure::CleanedUp, FormerUse::Perhaps));
        assert_eq!(asks(&mut bench, TALKER, chunk(index)), dropped);
    }
    assert_eq!(bench.core.gauges().transfers, 0);
}

#[test]
fn a_deployment_that_comes_again_inherits_nothing() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    let whole = chunk(0).stream.whole();
    put_as(&mut bench, THINKER, (chunk(0), true));
    put_as(&mut bench, THINKER, (whole.clone(), false));
    let failure = "gone".into();
    bench.tell(THINKER, PayloadHook::GiveUp { key: chunk(7), is_chunk: true, failure });
    let neighbour = PayloadClient(9);
    bench.join(neighbour, "b", "0");
    put_as(&mut bench, neighbour, (whole.clone(), false));
    // As long as somebody of it is there, it is the same one.
    for client in [THINKER, OTHER] {
        bench.tell(client, PayloadHook::Left);
    }
    let again = PayloadClient(10);
    bench.join(again, "a", "0");
    assert_eq!(bench.core.gauges().transfers, 3);
    for client in [TALKER, again] {
        bench.tell(client, PayloadHook::Left);
    }
    let next = PayloadClient(11);
    bench.join(next, "a", "1");
    let Gauges { transfers, held, .. } = bench.core.gauges();
    assert_eq!((transfers, held), (1, 1), "of the other deployment");
    for key in [chunk(0), whole, chunk(1), chunk(7)] {
        assert_eq!(asks(&mut bench, next, key), None);
    }
}

#[test]
fn a_table_without_a_slot_is_not_called_a_full_pool() {
    let config = PayloadConfig { slots_max: 6, ..PayloadConfig::default() };
    let mut bench = CaseBench::new(config);
    for index in 0..3 {
        put_as(&mut bench, THINKER, (chunk(index), true));
    }
    let answers = bench.reserve(10, Nanos::ZERO);
    let [(_, PayloadAnswer::NotReserved { failure, .. })] = &answers[..] else {
        panic!("{answers:?}")
    };
    let why = failure.to_string();
    assert!(why.contains("which has 6 slots, 3 for a stage"), "{why}");
    assert!(why.contains("put fewer and larger ones"), "{why}");
}

#[test]
fn names_that_are_too_long_are_refused() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    let stream = PayloadStream::new("0", "1", &"k".repeat(KEY_BYTES_MAX));
    let hook = PayloadHook::Want { key: stream.whole(), producer: None };
    let answers = bench.tell(TALKER, hook);
    let [(TALKER, PayloadAnswer::Missing { failure: PayloadFailure::Overload(what), .. })] =
        &answers[..]
    else {
        panic!("{answers:?}")
    };
    assert!(what.contains("bytes in the names"), "{what}");
    let mut out = Outbox::new();
    let hook = PayloadHook::CleanUp { stream, is_own: false };
    bench.core.handle(bench.now, PayloadInput::Hook { client: TALKER, hook }, &mut out);
    assert!(matches!(&out.take()[..], [PayloadEffect::Misuse { client: TALKER, .. }]));
}

#[test]
fn a_stream_that_was_cleaned_up_is_not_complete_at_its_end() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    let stream = chunk(0).stream;
    put_as(&mut bench, THINKER, (chunk(0), true));
    gets(&mut bench, TALKER, chunk(0));
    bench.tell(OTHER, PayloadHook::CleanUp { stream: stream.clone(), is_own: false });
    let refused = put_as(&mut bench, THINKER, (chunk(1), true));
    assert_eq!(refused, Some(PayloadFailure::CleanedUp));
    bench.tell(THINKER, PayloadHook::End { stream, failure: None, is_own: true });
    let (failure, _) = asks(&mut bench, TALKER, chunk(1)).expect("it does not come");
    assert_eq!(failure, PayloadFailure::CleanedUp);
}
