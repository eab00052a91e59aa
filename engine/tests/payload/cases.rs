//! What went wrong elsewhere, one by one.

use kvferry_engine::core::payload::{
    ClaimId, FormerUse, PayloadAnswer, PayloadClient, PayloadConfig, PayloadCore, PayloadEffect,
    PayloadFailure, PayloadHook, PayloadInput, PayloadKey, PayloadStream, SlotId,
};
use kvferry_engine::core::{Machine, Nanos, Outbox};
use std::sync::Arc;

pub(crate) const THINKER: PayloadClient = PayloadClient(0);
pub(crate) const TALKER: PayloadClient = PayloadClient(1);
pub(crate) const OTHER: PayloadClient = PayloadClient(2);

pub(crate) struct CaseBench {
    pub(crate) core: PayloadCore,
    pub(crate) now: Nanos,
}

pub(crate) fn chunk(index: u64) -> PayloadKey {
    PayloadStream::new("0", "1", "r/@\u{e4}").chunk(index)
}

impl CaseBench {
    pub(crate) fn new(config: PayloadConfig) -> CaseBench {
        CaseBench::with_stages(config, ["0", "1", "1"])
    }

    /// The stages of the three clients.
    pub(crate) fn with_stages(config: PayloadConfig, stages: [&str; 3]) -> CaseBench {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let mut bench = CaseBench { core: PayloadCore::new(config), now: Nanos::ZERO };
        for (client, stage) in [THINKER, TALKER, OTHER].into_iter().zip(stages) {
            bench.join(client, "a", stage);
        }
        bench
    }

    pub(crate) fn join(&mut self, client: PayloadClient, deployment: &str, stage: &str) {
        let (deployment, stage) = (deployment.into(), stage.into());
        assert_eq!(self.tell(client, PayloadHook::Joined { deployment, stage }), []);
    }

    pub(crate) fn input(&mut self, input: PayloadInput) -> Vec<(PayloadClient, PayloadAnswer)> {
        let mut out = Outbox::new();
        self.core.handle(self.now, input, &mut out);
        let answer = |effect| match effect {
            PayloadEffect::Answer { client, answer } => (client, answer),
            effect => panic!("{effect:?}"),
        };
        let answers = out.take().into_iter().map(answer);
        answers.filter(|(_, answer)| !answer.is_receipt()).collect()
    }

    pub(crate) fn tell(
        &mut self,
        client: PayloadClient,
        hook: PayloadHook,
    ) -> Vec<(PayloadClient, PayloadAnswer)> {
        self.input(PayloadInput::Hook { client, hook })
    }

    pub(crate) fn reserve(
        &mut self,
        bytes: u64,
        wait: Nanos,
    ) -> Vec<(PayloadClient, PayloadAnswer)> {
        self.tell(THINKER, PayloadHook::Reserve { ticket: bytes, bytes, wait })
    }

    /// Puts at once; where it is in the pool, and who got it.
    pub(crate) fn put(
        &mut self,
        key: PayloadKey,
        bytes: u64,
        receivers: u32,
    ) -> (u64, Vec<PayloadClient>) {
        let answers = self.reserve(bytes, Nanos::ZERO);
        let [(_, PayloadAnswer::Reserved { slot, offset, .. })] = answers[..] else {
            panic!("{answers:?}")
        };
        let is_chunk = key.chunk.is_some();
        let answers = self.tell(THINKER, PayloadHook::Put { slot, key, receivers, is_chunk });
        (offset, answers.into_iter().map(|(client, _)| client).collect())
    }

    pub(crate) fn get(
        &mut self,
        client: PayloadClient,
        key: PayloadKey,
    ) -> Result<(ClaimId, u64, u64), Option<PayloadFailure>> {
        match self.tell(client, PayloadHook::Want { key, producer: None }).pop() {
            Some((_, PayloadAnswer::Arrived { claim, offset, bytes, .. })) => {
                Ok((claim, offset, bytes))
            }
            Some((_, PayloadAnswer::Missing { failure, .. })) => Err(Some(failure)),
            _ => Err(None),
        }
    }
}

#[test]
fn what_is_read_stays_whatever_becomes_of_the_payload() {
    let ways: [fn(&mut CaseBench); 3] = [
        |bench| {
            bench.now = Nanos::from_secs(301);
            assert_eq!(bench.input(PayloadInput::Tick), []);
        },
        |bench| {
            let stream = chunk(0).stream;
            assert_eq!(bench.tell(TALKER, PayloadHook::CleanUp { stream, is_own: false }), []);
        },
        |bench| {
            bench.put(chunk(0), 4_000, 1);
        },
    ];
    for (way, becomes) in ways.iter().enumerate() {
        let config = PayloadConfig { pool: 3 * 4096, ..PayloadConfig::default() };
        let mut bench = CaseBench::with_stages(config, ["0"; 3]);
        let (at, _) = bench.put(chunk(0), 4_000, 1);
        let (claim, offset, bytes) = bench.get(TALKER, chunk(0)).expect("it is there");
        assert_eq!((offset, bytes), (at, 4_000));
        becomes(&mut bench);
        let room = if way == 2 { 4_096 } else { 8_192 };
        let answers = bench.reserve(room, Nanos::from_secs(1));
        let [(_, PayloadAnswer::Reserved { offset, .. })] = answers[..] else {
            panic!("{answers:?}")
        };
        assert!(offset + room <= at || offset > at, "{way}: {offset} is read at {at}");
        assert_eq!(bench.reserve(1, Nanos::from_secs(1)), [], "{way}: the pool is full");
        // When it was read, who waits gets its place.
        let answers = bench.tell(TALKER, PayloadHook::Release { claim });
        let [(THINKER, PayloadAnswer::Reserved { offset, .. })] = answers[..] else {
            panic!("{answers:?}")
        };
        assert_eq!(offset, at);
    }
}

#[test]
fn room_is_waited_for_in_turn_and_no_longer_than_was_said() {
    let config = PayloadConfig { pool: 4 * 4096, ..PayloadConfig::default() };
    let mut bench = CaseBench::with_stages(config, ["0"; 3]);
    bench.put(chunk(0), 3 * 4096, 1);
    assert_eq!(bench.reserve(2 * 4096, Nanos::from_ms(10)), []);
    // There is room for it, but somebody was before it.
    assert_eq!(bench.reserve(1, Nanos::from_ms(20)), []);
    bench.now = Nanos::from_ms(10);
    let answers = bench.input(PayloadInput::Tick);
    let full =
        PayloadFailure::PoolFull { bytes: 2 * 4096, free: 4096, largest: 4096, share: 4 * 4096 };
    let [
        (_, PayloadAnswer::NotReserved { ticket: 8192, failure }),
        (_, PayloadAnswer::Reserved { ticket: 1, .. }),
    ] = &answers[..]
    else {
        panic!("{answers:?}")
    };
    assert_eq!(*failure, full);
    let answers = bench.reserve(5 * 4096, Nanos::from_secs(1));
    let [(_, PayloadAnswer::NotReserved { failure, .. })] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert!(failure.to_string().contains("give a larger one"), "{failure}");
}

#[test]
fn a_stage_leaves_room_for_those_behind_it() {
    let mut bench = CaseBench::new(PayloadConfig { pool: 8 * 4096, ..PayloadConfig::default() });
    // Two stages share the pool.
    for index in 0..4 {
        bench.put(chunk(index), 4096, 1);
    }
    assert_eq!(bench.reserve(10, Nanos::from_secs(1)), []);
    let (claim, ..) = bench.get(TALKER, chunk(0)).expect("it is there");
    // It reads what came, and has to put something before it is done with it.
    let hook = PayloadHook::Reserve { ticket: 1, bytes: 4 * 4096, wait: Nanos::ZERO };
    let answers = bench.tell(TALKER, hook);
    assert!(matches!(answers[..], [(TALKER, PayloadAnswer::Reserved { .. })]), "{answers:?}");
    let answers = bench.tell(TALKER, PayloadHook::Release { claim });
    assert!(
        matches!(answers[..], [(THINKER, PayloadAnswer::Reserved { ticket: 10, .. })]),
        "{answers:?}"
    );
}

#[test]
fn what_is_longer_than_a_share_fits_beside_slots_that_are_kept_for_small_ones() {
    let mut bench = CaseBench::new(PayloadConfig { pool: 64 * 4096, ..PayloadConfig::default() });
    // Two stages share the pool, and a process of the first keeps a page.
    let kept = bench.reserve(4096, Nanos::ZERO);
    assert!(matches!(kept[..], [(_, PayloadAnswer::Reserved { .. })]), "{kept:?}");
    let long = bench.reserve(40 * 4096, Nanos::ZERO);
    assert!(matches!(long[..], [(_, PayloadAnswer::Reserved { .. })]), "{long:?}");
    // There is room for no more of them, nor for anything else of this stage.
    for bytes in [1, 33 * 4096] {
        let full = bench.reserve(bytes, Nanos::ZERO);
        assert!(matches!(full[..], [(_, PayloadAnswer::NotReserved { .. })]), "{full:?}");
    }
}

#[test]
fn who_came_first_is_served_first_whatever_its_stage() {
    let config = PayloadConfig { pool: 4 * 4096, ..PayloadConfig::default() };
    let mut bench = CaseBench::with_stages(config, ["0", "1", "2"]);
    bench.put(chunk(0), 4 * 4096, 1);
    let (claim, ..) = bench.get(TALKER, chunk(0)).expect("it is there");
    for client in [OTHER, TALKER] {
        let wait = Nanos::from_secs(1);
        let hook = PayloadHook::Reserve { ticket: 1, bytes: 3 * 4096, wait };
        assert_eq!(bench.tell(client, hook), []);
    }
    let answers = bench.tell(TALKER, PayloadHook::Release { claim });
    assert!(matches!(answers[..], [(OTHER, PayloadAnswer::Reserved { .. })]), "{answers:?}");
}

#[test]
fn each_receiver_gets_it_once_and_others_learn_that_it_was_taken() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    bench.put(chunk(0), 10, 1);
    let (claim, ..) = bench.get(TALKER, chunk(0)).expect("it is there");
    assert_eq!(bench.get(OTHER, chunk(0)), Err(None), "it may come back");
    // Who asked gives it up, so that it goes to the next.
    let answers = bench.tell(TALKER, PayloadHook::Abandon { key: chunk(0) });
    let [
        (TALKER, PayloadAnswer::Abandoned { .. }),
        (OTHER, PayloadAnswer::Arrived { claim: second, .. }),
    ] = answers[..]
    else {
        panic!("{answers:?}")
    };
    assert_ne!(claim, second);
    assert_eq!(bench.tell(OTHER, PayloadHook::Take { claim: second }), []);
    for client in [TALKER, OTHER] {
        assert_eq!(bench.get(client, chunk(0)), Err(Some(PayloadFailure::Taken)));
    }
    let (_, got) = bench.put(chunk(1), 10, 2);
    assert_eq!(got, []);
    for client in [TALKER, OTHER] {
        let (claim, ..) = bench.get(client, chunk(1)).expect("there are two of it");
        bench.tell(client, PayloadHook::Release { claim });
    }
    assert_eq!(bench.core.gauges().held, 1, "what the second has is not released");
}

#[test]
fn who_waits_learns_of_the_end_and_of_the_death_of_a_producer() {
    type End = (fn() -> PayloadHook, PayloadFailure);
    let ends: [End; 4] = [
        (
            || PayloadHook::End { stream: chunk(0).stream, failure: None, is_own: false },
            PayloadFailure::Ended,
        ),
        (
            || PayloadHook::End {
                stream: chunk(0).stream,
                failure: Some("out of memory".into()),
                is_own: false,
            },
            PayloadFailure::GivenUp("out of memory".into()),
        ),
        (|| PayloadHook::Left, PayloadFailure::ProducerGone),
        (
            || PayloadHook::CleanUp { stream: chunk(0).stream, is_own: false },
            PayloadFailure::CleanedUp,
        ),
    ];
    for (hook, failure) in ends {
        let mut bench = CaseBench::new(PayloadConfig::default());
        bench.put(chunk(0), 10, 1);
        assert_eq!(bench.get(TALKER, chunk(1)), Err(None));
        let told = PayloadAnswer::Missing {
            key: chunk(1),
            failure: failure.clone(),
            former: FormerUse::No,
        };
        assert_eq!(bench.tell(THINKER, hook()), [(TALKER, told)]);
        // Who comes later hears the same, and gets what was put before, unless that was cleaned up.
        assert_eq!(bench.get(OTHER, chunk(2)), Err(Some(failure.clone())));
        let is_gone = failure == PayloadFailure::CleanedUp;
        assert_eq!(bench.get(OTHER, chunk(0)).is_err(), is_gone);
    }
}

#[test]
fn with_the_last_process_of_a_stage_goes_what_is_waited_for_from_it() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    let second = PayloadClient(8);
    bench.join(second, "a", "0");
    assert_eq!(bench.get(TALKER, chunk(0)), Err(None));
    assert_eq!(bench.tell(THINKER, PayloadHook::Left), []);
    let failure = PayloadFailure::ProducerGone;
    let told = PayloadAnswer::Missing { key: chunk(0), failure, former: FormerUse::No };
    assert_eq!(bench.tell(second, PayloadHook::Left), [(TALKER, told)]);
    // Another one may come.
    assert_eq!(bench.get(TALKER, chunk(0)), Err(None));
}

#[test]
fn who_waits_for_one_process_learns_that_it_is_gone_while_others_of_its_stage_are_there() {
    let mut bench = CaseBench::with_stages(PayloadConfig::default(), ["0", "1", "0"]);
    let want = |index| PayloadHook::Want { key: chunk(index), producer: Some(THINKER) };
    assert_eq!(bench.tell(TALKER, want(0)), []);
    let told = |index| {
        let failure = PayloadFailure::ProducerGone;
        (TALKER, PayloadAnswer::Missing { key: chunk(index), failure, former: FormerUse::No })
    };
    assert_eq!(bench.tell(THINKER, PayloadHook::Left), [told(0)]);
    // Also if it is asked for later.
    assert_eq!(bench.tell(TALKER, want(1)), [told(1)]);
    assert_eq!(bench.get(TALKER, chunk(1)), Err(None), "another process may put it");
}

#[test]
fn a_claim_of_an_earlier_generation_counts_for_none_of_a_later_one() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    bench.put(chunk(0), 10, 1);
    bench.get(TALKER, chunk(0)).expect("it is there");
    bench.put(chunk(0), 20, 1);
    let (_, _, bytes) = bench.get(OTHER, chunk(0)).expect("it is there");
    assert_eq!(bytes, 20);
    let abandoned = PayloadAnswer::Abandoned { key: chunk(0) };
    let answers = bench.tell(TALKER, PayloadHook::Abandon { key: chunk(0) });
    assert_eq!(answers, [(TALKER, abandoned)]);
    assert_eq!(bench.get(TALKER, chunk(0)), Err(None), "there is one of it");
    assert_eq!(bench.core.gauges().held, 1);
}

#[test]
fn deployments_do_not_meet() {
    let mut bench = CaseBench::new(PayloadConfig::default());
    let stranger = PayloadClient(9);
    bench.join(stranger, "b", "1");
    bench.put(chunk(0), 10, 2);
    assert_eq!(bench.get(stranger, chunk(0)), Err(None));
    let stream = chunk(0).stream;
    assert_eq!(
        bench.tell(stranger, PayloadHook::CleanUp { stream, is_own: false }).len(),
        1,
        "its own want ends"
    );
    assert!(bench.get(TALKER, chunk(0)).is_ok());
}

#[test]
fn an_empty_payload_is_one() {
    let mut bench = CaseBench::new(PayloadConfig { pool: 4096, ..PayloadConfig::default() });
    bench.put(chunk(0), 4096, 1);
    bench.put(chunk(1), 0, 1);
    let (claim, _, bytes) = bench.get(TALKER, chunk(1)).expect("it is there");
    assert_eq!(bytes, 0);
    bench.tell(TALKER, PayloadHook::Release { claim });
    assert_eq!(bench.core.gauges().held, 1);
}

#[test]
fn a_host_that_ends_reserves_nothing() {
    let mut bench = CaseBench::new(PayloadConfig { pool: 4096, ..PayloadConfig::default() });
    bench.put(chunk(0), 4096, 1);
    assert_eq!(bench.reserve(1, Nanos::from_secs(1)), []);
    let closed =
        |ticket| (THINKER, PayloadAnswer::NotReserved { ticket, failure: PayloadFailure::Closed });
    assert_eq!(bench.input(PayloadInput::Drain), [closed(1)]);
    assert_eq!(bench.reserve(2, Nanos::from_secs(1)), [closed(2)]);
    assert!(bench.get(TALKER, chunk(0)).is_ok(), "what is there can be had");
}

#[test]
fn who_takes_what_it_does_not_have_is_named() {
    let mut core = PayloadCore::new(PayloadConfig::default());
    let mut out = Outbox::new();
    let mut tell = |client, hook| {
        core.handle(Nanos::ZERO, PayloadInput::Hook { client, hook }, &mut out);
        out.take()
    };
    let misuse = |client, rule: &str| PayloadEffect::Misuse { client, rule: Arc::from(rule) };
    let said = tell(TALKER, PayloadHook::Return { slot: SlotId(1) });
    assert_eq!(said, [misuse(TALKER, "it has not joined")]);
    tell(TALKER, PayloadHook::Joined { deployment: "a".into(), stage: "9".into() });
    let said = tell(TALKER, PayloadHook::Take { claim: ClaimId(7) });
    assert_eq!(said, [misuse(TALKER, "it has no such claim to take")]);
}

#[test]
fn what_is_long_gone_is_not_beyond_the_end() {
    let config = PayloadConfig { tombstones_max: 1, ..PayloadConfig::default() };
    let mut bench = CaseBench::new(config);
    for index in 0..2 {
        bench.put(chunk(index), 10, 1);
        let (claim, ..) = bench.get(TALKER, chunk(index)).expect("it is there");
        bench.tell(TALKER, PayloadHook::Take { claim });
        bench.tell(TALKER, PayloadHook::Release { claim });
    }
    bench.tell(THINKER, PayloadHook::End { stream: chunk(0).stream, failure: None, is_own: false });
    assert_eq!(bench.get(OTHER, chunk(1)), Err(Some(PayloadFailure::Taken)));
    assert_eq!(bench.get(OTHER, chunk(0)), Err(Some(PayloadFailure::Expired)), "or taken");
    assert_eq!(bench.get(OTHER, chunk(2)), Err(Some(PayloadFailure::Ended)));
}
