//! What the gauges of a router count, table by table.

use super::*;
use crate::core::error::Failure;
use crate::core::ids::LegId;
use crate::core::message::{Registration, UnreachablePrefill};
use crate::fabric::LinkKind;

struct RouterBench {
    router: Router,
    seen: (u32, u32),
    legs: Vec<LegId>,
    /// Where they were sent.
    sent: Vec<Endpoint>,
}

impl RouterBench {
    fn give(&mut self, input: RouterInput) {
        let mut out = Outbox::new();
        self.router.handle(Nanos(1), input, &mut out);
        for effect in out.take() {
            if let RouterEffect::Dispatch { leg, http, .. } = effect {
                self.legs.push(leg);
                self.sent.push(http);
            }
        }
    }

    /// So many entries and remembered ones more, or less, than before.
    #[track_caller]
    fn sees(&mut self, entries: i32, remembered: i32) {
        let gauges = self.router.gauges();
        let (before, limits) = (self.seen, self.router.dispatcher.config.limits());
        self.seen = (gauges.entries, gauges.remembered);
        let grown = |is: u32, was: u32| i64::from(is) - i64::from(was);
        let seen = (grown(self.seen.0, before.0), grown(self.seen.1, before.1));
        assert_eq!(seen, (entries.into(), remembered.into()), "{gauges:?}");
        assert!(gauges.entries <= limits.entries && gauges.remembered <= limits.remembered);
    }

    fn link(&mut self, event: ControlEvent) {
        self.give(RouterInput::Control(event));
    }

    fn request(&mut self, client: u64) {
        self.request_of(client, [1, 2]);
    }

    fn request_of(&mut self, client: u64, prefix: [u64; 2]) {
        let prompts = vec![RoutedPrompt { tokens: 1_100, prefix: prefix.into() }];
        let client = ClientId(client);
        self.give(RouterInput::Request(ClientRequest {
            client,
            prompts,
            samples: 1,
            output: 9,
            model: None,
            engines: None,
        }));
    }
}

fn table() -> RouterBench {
    let config = RouterConfig { instances_max: 3, prefixes_max: 2, ..RouterConfig::default() };
    let router = Router::new(config, Incarnation(1));
    RouterBench { router, seen: (0, 0), legs: Vec::new(), sent: Vec::new() }
}

fn registration(engine: &str, sequence: u64) -> Registration {
    Registration { sequence, http: engine.into(), ..registry::tests::registration(engine, 1) }
}

/// A router with a prefill and a decode, as instances 0 and 1.
fn pair() -> RouterBench {
    let mut table = table();
    for engine in ["p", "d"] {
        table.give(RouterInput::Register(registration(engine, 1)));
        // Its name, and when it expires.
        table.sees(0, 2);
    }
    table
}

#[test]
fn links_and_what_was_not_taken_are_counted() {
    let mut table = table();
    let (link, from) = (LinkId(LinkId::INBOUND + 1), Some("h:1".into()));
    table.link(ControlEvent::LinkUp { link, channel: LinkKind::Discovery, from });
    table.sees(0, 1);
    table.link(ControlEvent::Frame { link, parts: vec![b"x".to_vec()] });
    // In the list, and by its reason.
    table.sees(0, 2);
    table.link(ControlEvent::LinkDown { link });
    table.sees(0, -1);
}

#[test]
fn requests_are_counted_while_they_are_open_and_what_they_leave_behind() {
    let mut table = pair();
    table.request(1);
    // Two legs, twice, the prompt and its sample; two hashes at each instance, and their pair.
    table.sees(6, 5);
    let leg = table.legs[0];
    let failure = LegFailure::Answer(500);
    table.give(RouterInput::Leg { leg, event: LegEvent::Failed(failure) });
    // No leg, but who failed it and who is to blame; when it is sent again, and what is told to
    // the prefill.
    table.sees(-2, 2);
    table.give(RouterInput::Gone { client: ClientId(1) });
    table.sees(-4, -1);
    table.request(2);
    table.sees(6, 0);
    table.give(RouterInput::Gone { client: ClientId(2) });
    // One more that nobody fetches.
    table.sees(-6, 1);
}

#[test]
fn pairs_are_counted_until_one_of_them_leaves() {
    let mut table = pair();
    let (engine, failure) = ("p".into(), Failure::PeerSilent);
    let troubles = vec![UnreachablePrefill { engine, incarnation: None, number: 1, failure }];
    table.give(RouterInput::Register(Registration { troubles, ..registration("d", 2) }));
    // What it said, what it is taken for, and the pair that fails.
    table.sees(0, 3);
    let prefill = table.router.dispatcher.registry.instance_mut(InstanceId(0));
    prefill.misfits.insert(InstanceId(1), Mismatch("block sizes".into()));
    table.sees(0, 1);
    let draining = Registration { draining: true, ..registration("d", 3) };
    table.give(RouterInput::Register(draining));
    // Its pairs and its deadline go, its name is one of those that left.
    table.sees(0, -4);
}

#[test]
fn only_a_decode_says_what_is_out_of_reach_and_only_a_prefill_is() {
    let trouble = |engine: &str| {
        let (engine, failure) = (engine.into(), Failure::PeerSilent);
        vec![UnreachablePrefill { engine, incarnation: None, number: 1, failure }]
    };
    for (by, of) in [("d", "d"), ("d", "e"), ("p", "p"), ("p", "d"), ("d", "nobody")] {
        let mut table = pair();
        table.give(RouterInput::Register(registration("e", 1)));
        table.sees(0, 2);
        let troubles = trouble(of);
        table.give(RouterInput::Register(Registration { troubles, ..registration(by, 2) }));
        // What it said is all that is kept.
        table.sees(0, 1);
    }
}

#[test]
fn of_what_a_decode_says_no_more_is_kept_than_it_may_say() {
    let mut table = pair();
    let (engine, failure) = (EngineId::from("nobody"), Failure::PeerSilent);
    let trouble = UnreachablePrefill { engine, incarnation: None, number: 1, failure };
    let troubles = vec![trouble; 1_000];
    table.give(RouterInput::Register(Registration { troubles, ..registration("d", 2) }));
    table.sees(0, 32);
}

/// Where the two legs of each request go, with these instances, each at a server.
fn pairs_of<const N: usize>(instances: &[(&str, &str)]) -> [(String, String); N] {
    let config = RouterConfig { instances_max: 8, ..RouterConfig::default() };
    let mut table = RouterBench { router: Router::new(config, Incarnation(1)), ..table() };
    for (engine, server) in instances {
        let at = Endpoint::from(*server);
        table.give(RouterInput::Register(Registration { http: at, ..registration(engine, 1) }));
    }
    std::array::from_fn(|client| {
        table.request_of(client as u64, [client as u64, 2]);
        let [prefill, decode] = &table.sent[2 * client..] else { panic!("{:?}", table.sent) };
        (prefill.to_string(), decode.to_string())
    })
}

#[test]
fn a_server_of_both_roles_hands_over_to_another_one_if_there_is_one() {
    let both = [("p1", "a"), ("d1", "a"), ("p2", "b"), ("d2", "b")];
    let pairs: [_; 8] = pairs_of(&both);
    assert!(pairs.iter().all(|(prefill, decode)| prefill != decode), "{pairs:?}");
    let pairs: [_; 3] = pairs_of(&[("p1", "a"), ("d1", "a"), ("p2", "b")]);
    assert!(pairs.iter().all(|pair| *pair == ("b".into(), "a".into())), "{pairs:?}");
    assert_eq!(pairs_of(&both[..2]), [("a".into(), "a".into())]);
}

#[test]
fn a_server_of_both_roles_has_the_load_of_both() {
    let instances = [("p1", "a"), ("d1", "b"), ("d2", "c"), ("p3", "b")];
    let [first, second] = pairs_of(&instances);
    assert_eq!(first, ("a".into(), "b".into()));
    // What is decoded at b is a little more than what was prefilled at a.
    assert_eq!(second, ("a".into(), "c".into()));
}
