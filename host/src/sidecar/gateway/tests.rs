//! A gateway without connections.

use super::*;
use crate::instance::InstanceTrust;
use crate::sidecar::settings::{TransferBackend, TransferPlacement};
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::ids::TransferKey;
use kvferry_engine::core::message::{DecodeLeg, FinishReason, Mode, PrefillLeg, Role};
use kvferry_engine::core::prompt_hash::PromptHash;
use std::sync::Arc;
use tokio::sync::mpsc::{Receiver, channel};

/// A gateway of an engine that is served, and what its scheduler is told.
fn gateway(role: Role) -> (Gateway, Receiver<FromHost>) {
    let mode = Mode::Push;
    let trust = InstanceTrust {
        network: kvferry_trust::NetworkTrust::Loopback,
        moriio_peers: true,
        is_verifying: false,
    };
    let moved_by = (TransferBackend::Host, TransferPlacement::Sidecar, "memory files");
    let address = ZmqAddress { host: "127.0.0.1".into(), handshake: 1, notify: 2 };
    let serving = ActiveEngine {
        own: InstanceIdentity::open(role, mode, address),
        engine: "e".into(),
        records: TransferLog::new(role, mode, 1, KEPT),
        metrics: SidecarMetrics::new(role, mode, moved_by, (Vec::new(), trust)),
        pending: None,
        kept: (0, 0),
        offer: None,
    };
    let (out, told) = channel(8);
    let gateway = Gateway {
        clock: Arc::new(|| Nanos(5)),
        operator: OperatorConfig {
            fabric: Default::default(),
            limits: Default::default(),
            state: None,
        },
        started_unix_us: 0,
        clients: [(
            1,
            ConnectorClient {
                part: ConnectorRole::Scheduler,
                version: crate::sidecar::proto::VERSION,
                out,
            },
        )]
        .into(),
        engine: None,
        workers: BTreeMap::new(),
        last_errors: BTreeMap::new(),
        serving: Some(serving),
        observers: BTreeSet::new(),
        is_refused: false,
        over: None,
    };
    (gateway, told)
}

fn arrived(role: Role) -> ToHost {
    let (key, mode, incarnation) = (TransferKey { id: "t".into(), prompt: 0 }, Mode::Push, None);
    let leg = match role {
        Role::Prefill => {
            serde_json::to_string(&PrefillLeg { incarnation, ..PrefillLeg::new(key, mode) })
        }
        Role::Decode => {
            let (prefill, control) = ("p".into(), "c".into());
            let moriio = None;
            let leg =
                DecodeLeg { incarnation, moriio, ..DecodeLeg::new(key, mode, prefill, control) };
            serde_json::to_string(&leg)
        }
    };
    let params = format!("{{\"kvferry\": {}}}", leg.expect("a leg in JSON")).into();
    ToHost::Arrived {
        request: "r".into(),
        params,
        tokens: 3,
        prompt_hash: Some(PromptHash::default()),
    }
}

#[test]
fn a_request_that_finds_the_mailbox_full_is_told_overload_and_only_that() {
    for role in [Role::Prefill, Role::Decode] {
        let (mut gateway, mut told) = gateway(role);
        let mut out = InputQueue::<Instance>::new();
        let said = |message, is_refused| ClientMessage { client: 1, message, is_refused };
        gateway.on_message(said(arrived(role), true), &mut out);
        assert!(out.is_empty(), "the core is not troubled: {out:?}");
        let ended = told.try_recv().expect("the transfer ended");
        assert!(matches!(&ended, FromHost::Ended(_)), "{ended:?}");
        let (request, failure) = (RequestId::from("r"), Failure::Overload);
        match told.try_recv().expect("who asked is answered") {
            FromHost::Prefill(answer) => {
                assert_eq!(answer, PrefillAnswer::Rejected { request, failure });
            }
            FromHost::Decode(answer) => {
                assert_eq!(answer, DecodeAnswer::Rejected { request, failure });
            }
            other => panic!("{other:?}"),
        }
        // What belongs to something begun is passed on all the same.
        let (request, reason) = (RequestId::from("q"), FinishReason::Length);
        let finished = match role {
            Role::Prefill => ToHost::Prefill(PrefillHook::Finished { request, reason }),
            Role::Decode => ToHost::Decode(DecodeHook::Finished { request, reason }),
        };
        gateway.on_message(said(finished, true), &mut out);
        gateway.on_message(said(arrived(role), false), &mut out);
        assert_eq!((out.len(), told.try_recv().ok().is_none()), (2, true));
    }
}
