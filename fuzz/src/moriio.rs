//! Everything that MoRIIO peers, routers and clients send: what decodes, encodes to what decodes
//! alike, where there is an encoder for it.

use kvferry_engine::core::dialect::moriio::address::incarnation_of;
use kvferry_engine::core::dialect::moriio::handshake::{
    AgentMetadata, HandshakeRequest, LayerMemory, REQUEST, decode_call,
};
use kvferry_engine::core::dialect::moriio::notify::{
    ReceivedDecodeNotice, ReceivedPrefillNotice, decode_at_decode, decode_at_prefill, write_done,
    write_failed,
};
use kvferry_engine::core::dialect::moriio::params::KvTransferParams;
use kvferry_engine::core::dialect::moriio::ports::{DialPurpose, PortFormula, port};
use kvferry_engine::core::dialect::moriio::registration::UncheckedRegistration;
use kvferry_engine::core::ids::{Incarnation, RequestId, TransferId};
use kvferry_engine::core::message::{Mode, Registration, Role};
use std::num::NonZeroU16;

/// Gives the bytes to every decoder: as one part, behind the empty part of a reply, and cut into
/// parts at 0xc1, which is in no MessagePack.
///
/// # Panics
/// If a message changes on its way through the bytes.
pub fn run(data: &[u8]) {
    let cut: Vec<&[u8]> = data.split(|byte| *byte == 0xc1).collect();
    for parts in [&[data][..], &[&[], data], &cut] {
        notify(parts);
        handshake(parts);
        registration(parts);
    }
    params(data);
}

fn notify(parts: &[&[u8]]) {
    match decode_at_prefill(parts) {
        Ok(ReceivedPrefillNotice::RemoteBlocks(message)) => {
            let bytes = message.encode();
            assert_eq!(
                decode_at_prefill(&[bytes]),
                Ok(ReceivedPrefillNotice::RemoteBlocks(message))
            );
        }
        Ok(ReceivedPrefillNotice::Release(message)) => {
            let bytes = message.encode();
            assert_eq!(decode_at_prefill(&[bytes]), Ok(ReceivedPrefillNotice::Release(message)));
        }
        Ok(ReceivedPrefillNotice::Unusable { .. }) | Err(_) => {}
    }
    match decode_at_decode(parts) {
        Ok(ReceivedDecodeNotice::Written { transfer, .. }) => {
            let bytes = write_done(&transfer);
            assert_eq!(decode_at_decode(&[bytes]), Ok(written(transfer.clone())));
            completion(transfer);
        }
        Ok(ReceivedDecodeNotice::Failed(transfer)) => {
            let bytes = write_failed(&transfer);
            assert_eq!(decode_at_decode(&[bytes]), Ok(ReceivedDecodeNotice::Failed(transfer)));
        }
        Err(_) => {}
    }
}

/// What a decode hears from its only writer.
fn written(transfer: TransferId) -> ReceivedDecodeNotice {
    ReceivedDecodeNotice::Written { transfer, writers: NonZeroU16::MIN }
}

/// An id alone, unless it begins like a map, is taken for itself by both roles.
fn completion(transfer: TransferId) {
    let bytes = transfer.0.as_bytes();
    if matches!(bytes, [] | [0x80..=0x8f | 0xde | 0xdf, ..]) {
        return;
    }
    assert_eq!(decode_at_decode(&[bytes]), Ok(written(transfer.clone())));
    let Ok(ReceivedPrefillNotice::Release(release)) = decode_at_prefill(&[bytes]) else {
        panic!("{transfer:?} is no completion at a prefill");
    };
    assert_eq!((release.transfer(), release.consumer_tp().get()), (&transfer, 1));
}

fn handshake(parts: &[&[u8]]) {
    let asks = parts.len() == 1 && parts[0] == REQUEST;
    assert_eq!(decode_call(parts) == Ok(HandshakeRequest::Metadata), asks);
    if let Ok(metadata) = AgentMetadata::decode(parts) {
        assert_eq!(AgentMetadata::decode(&metadata.encode()), Ok(metadata));
    }
    if let Ok(memory) = LayerMemory::decode(parts) {
        assert_eq!(LayerMemory::decode(&memory.encode()), Ok(memory));
    }
}

fn registration(parts: &[&[u8]]) {
    let Ok(heard) = UncheckedRegistration::decode(parts) else { return };
    let Ok(heartbeat) = heard.check() else { return };
    let again = UncheckedRegistration::decode(&[heartbeat.encode()]).expect("a heartbeat is heard");
    assert_eq!(again.check().as_ref(), Ok(&heartbeat));
    let incarnation = Incarnation(heard.dp_size << 32 | heard.tp_size);
    let native = Registration {
        sequence: heard.tp_size,
        dp_size: heartbeat.dp_size().get(),
        tp: heartbeat.tp_size().get(),
        draining: heard.dp_size % 2 == 1,
        ..Registration::new(
            "e".into(),
            incarnation,
            heard.role,
            heard.mode,
            heartbeat.http().clone(),
            "tcp://10.0.0.1:1".into(),
        )
    };
    let again = UncheckedRegistration::decode(&[heartbeat.encode_with(&native)]).expect("likewise");
    assert_eq!(again.check(), Ok(heartbeat));
    assert_eq!(incarnation_of(&again.zmq_address), Some(incarnation));
}

fn params(json: &[u8]) {
    let Ok(params) = KvTransferParams::decode(json) else { return };
    let ids = [
        "",
        "___prefill_addr_host:a,handshake:1,notify:2___decode_addr_host:b,handshake:3,notify:4_0123456789abcdef0123456789abcdef",
    ];
    for request in ids.map(RequestId::from) {
        for role in [Role::Prefill, Role::Decode] {
            peer(&params, role, &request);
            for mode in [Mode::Push, Mode::Pull] {
                if let Ok(bytes) = params.encode_leg(role, mode, &request) {
                    assert_eq!(KvTransferParams::decode(&bytes).as_ref(), Ok(&params));
                }
            }
        }
    }
    if let Ok(bytes) = params.encode_answer() {
        assert_eq!(KvTransferParams::decode(&bytes), Ok(params));
    }
}

/// Everything that is computed of a peer before it is dialled.
fn peer(params: &KvTransferParams, role: Role, request: &RequestId) {
    for sizes in [0, 1, u16::MAX] {
        params.is_leader(sizes, sizes);
    }
    let Ok(peer) = params.peer(role, request) else { return };
    for dp in [0, peer.dp_rank, peer.dp_size, u16::MAX] {
        assert!(peer.hosts.contains(peer.host(dp)));
        for formula in [PortFormula::Legacy, PortFormula::Injective] {
            peer.shape.tp_size_or(1);
            for dial in
                [DialPurpose::Handshake, DialPurpose::RemoteBlocks, DialPurpose::EarlyRelease]
            {
                if let Ok(offset) = formula.dial(dial, peer.shape, dp, 0) {
                    port(peer.address.handshake, offset);
                    port(peer.address.notify, offset);
                }
            }
        }
    }
}
