//! A transfer actor whose plane has another backend.

use crate::world::{actor, caps};
use kvferry_engine::core::command::DataCommand;
use kvferry_engine::core::ids::ConnectionId;
use kvferry_engine::core::message::{Mode, Role, TransferJob, TransferReport};
use kvferry_engine::core::transfer::{Transfer, TransferEffect, TransferInput};
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_engine::fabric::{
    Address, DataEvent, PeerId, QuiesceTicket, RegionDesc, RegionId, SessionId,
};
use std::sync::Arc;

fn handle(transfer: &mut Transfer, input: TransferInput) -> Vec<TransferEffect> {
    let mut out = Outbox::new();
    transfer.handle(Nanos::from_ms(1), input, &mut out);
    out.take().into_iter().collect()
}

/// An actor that has registered and was told of a peer, and the id by which it connected to that.
fn connected() -> (Transfer, PeerId) {
    let config = actor(Role::Prefill, Mode::Push, 1, 0, caps());
    let geometry = config.geometry.clone();
    let mut transfer = Transfer::new(config);
    handle(&mut transfer, TransferInput::Start);
    let result = Ok(RegionDesc([1].into()));
    let registered = DataEvent::Registered { region: RegionId(0), result };
    let said = handle(&mut transfer, TransferInput::Data(registered));
    let layout = said.into_iter().find_map(|effect| match effect {
        TransferEffect::Report(TransferReport::Ready { layout }) => Some(layout),
        _ => None,
    });
    let ranks = Arc::new(vec![layout.expect("all is registered")]);
    let job = TransferJob::Peer { peer: ConnectionId(3), geometry, ranks, fence_key: 7 };
    let id = handle(&mut transfer, TransferInput::Job(job)).into_iter().find_map(|e| match e {
        TransferEffect::Data(DataCommand::Connect { peer, .. }) => Some(peer),
        _ => None,
    });
    (transfer, id.expect("it connects"))
}

fn reset(transfer: &mut Transfer) -> Vec<TransferEffect> {
    let address = Address([2].into());
    handle(transfer, TransferInput::Data(DataEvent::Reset { address }))
}

/// The plane may have connected under its new backend already.
#[test]
fn peers_of_before_a_reset_do_not_stay_connected() {
    let (mut transfer, id) = connected();
    let left = |effect: &TransferEffect| matches!(effect, TransferEffect::Data(DataCommand::Disconnect { peer }) if *peer == id);
    assert!(reset(&mut transfer).iter().any(left));
}

#[test]
fn answers_to_calls_of_before_a_reset_are_no_violations() {
    let (mut transfer, _) = connected();
    reset(&mut transfer);
    let quiet = |ticket| DataEvent::Quiet { session: SessionId(1), ticket: QuiesceTicket(ticket) };
    handle(&mut transfer, TransferInput::Data(quiet(1)));
    assert_eq!(transfer.gauges().violations, 0);
    handle(&mut transfer, TransferInput::Data(quiet(1_000_000)));
    assert_eq!(transfer.gauges().violations, 1);
}
