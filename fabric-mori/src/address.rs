//! Addresses and region descriptors: MoRI's own bytes, so that handshakes that carry those carry
//! these. Addresses have fields at the end that MoRI's decoders ignore; those of memory cannot have
//! any, as later layouts go on where earlier ones end.

use kvferry_engine::core::dialect::moriio::descriptor::{MoriEngineDesc, MoriMemoryDesc};
use kvferry_engine::fabric::Address;
use kvferry_fabric_common::PlaneIdentity;
use serde::{Deserialize, Serialize};
use std::net::SocketAddrV4;
use std::sync::Arc;

/// First of the fields that follow MoRI's.
const MARK: &str = "kvferry-mori-1";

/// What peers need beyond MoRI's fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MoriAcceptorInfo {
    pub(crate) who: PlaneIdentity,
    /// TCP port at the host of MoRI's control plane.
    pub(crate) port: u16,
    /// Fields of its MoRI's memory descriptors.
    pub(crate) layout: u32,
}

/// Where a plane can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MoriPlaneAddress {
    pub(crate) host: Arc<str>,
    /// MoRI's descriptor as its owner wrote it.
    pub(crate) engine: Arc<[u8]>,
    /// None for a peer that is not one of ours.
    pub(crate) acceptor: Option<MoriAcceptorInfo>,
}

/// Memory of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MoriRegionDescriptor {
    pub(crate) len: u64,
    /// MoRI's descriptor as its owner wrote it.
    pub(crate) memory: Arc<[u8]>,
    /// What names it: the key of its engine, and a number there.
    pub(crate) name: MoriMemoryKey,
}

/// Memory as MoRI names it.
pub(crate) type MoriMemoryKey = (Arc<str>, u32);

/// Number of elements of a msgpack array and the length of its header.
fn header(bytes: &[u8]) -> Option<(usize, usize)> {
    match *bytes {
        [first @ 0x90..=0x9f, ..] => Some((usize::from(first & 0x0f), 1)),
        [0xdc, high, low, ..] => Some((usize::from(u16::from_be_bytes([high, low])), 3)),
        _ => None,
    }
}

/// The array with two more elements: the mark and `tail`.
fn extend(bytes: &[u8], tail: &impl Serialize) -> Option<Vec<u8>> {
    let (count, skip) = header(bytes)?;
    let count = u16::try_from(count + 2).ok()?;
    let mut longer = vec![0xdc];
    longer.extend(count.to_be_bytes());
    longer.extend(&bytes[skip..]);
    longer.extend(rmp_serde::to_vec(MARK).ok()?);
    longer.extend(rmp_serde::to_vec(tail).ok()?);
    Some(longer)
}

/// The element after the mark.
fn tail<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Option<T> {
    let mark = rmp_serde::to_vec(MARK).ok()?;
    let at = bytes.windows(mark.len()).rposition(|window| window == mark)?;
    rmp_serde::from_slice(&bytes[at + mark.len()..]).ok()
}

impl MoriPlaneAddress {
    /// `engine` is what MoRI packed; none if that is no array.
    pub(crate) fn encode(engine: &[u8], acceptor: &MoriAcceptorInfo) -> Option<Address> {
        Some(Address(extend(engine, acceptor)?.into()))
    }

    /// Where MoRI's control plane listens, by its descriptor; none if it does not.
    pub(crate) fn listens_at(engine: &[u8]) -> Option<SocketAddrV4> {
        let desc = MoriEngineDesc::decode(engine).ok()?;
        Some(SocketAddrV4::new(desc.host.parse().ok()?, u16::try_from(desc.port).ok()?))
    }

    /// None for the address of another kind of plane.
    pub(crate) fn decode(address: &Address) -> Option<MoriPlaneAddress> {
        let desc = MoriEngineDesc::decode(&address.0).ok()?;
        if desc.host.is_empty() || !(0..=65_535).contains(&desc.port) {
            return None;
        }
        let acceptor = tail(&address.0);
        Some(MoriPlaneAddress { host: desc.host, engine: address.0.clone(), acceptor })
    }
}

impl MoriRegionDescriptor {
    /// None for a descriptor of another kind of plane.
    pub(crate) fn decode(bytes: &[u8]) -> Option<MoriRegionDescriptor> {
        let (_, memory) = MoriMemoryDesc::decode(bytes).ok()?;
        if memory.size == 0 {
            return None;
        }
        let name = (memory.engine_key, memory.id);
        Some(MoriRegionDescriptor { len: memory.size, memory: bytes.into(), name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_engine::core::dialect::moriio::descriptor::DescLayout;

    fn acceptor() -> MoriAcceptorInfo {
        let who = PlaneIdentity { key: "k".into(), incarnation: 7 };
        MoriAcceptorInfo { who, port: 4_711, layout: 15 }
    }

    #[test]
    fn addresses_are_mori_s_with_a_door() {
        let desc = MoriEngineDesc {
            key: "k~7".into(),
            host: "127.0.0.1".into(),
            port: 9,
            ..MoriEngineDesc::default()
        };
        for layout in [DescLayout::V1_2, DescLayout::V1_2_2] {
            let plain = desc.encode(layout);
            let address = MoriPlaneAddress::encode(&plain, &acceptor()).expect("an array");
            assert_eq!(MoriEngineDesc::decode(&address.0), Ok(desc.clone()), "MoRI reads it");
            let location = MoriPlaneAddress::decode(&address).expect("ours");
            assert_eq!(location.acceptor, Some(acceptor()));
            let foreign = MoriPlaneAddress::decode(&Address(plain.into())).expect("MoRI's");
            assert_eq!(foreign.acceptor, None);
        }
        assert_eq!(MoriPlaneAddress::decode(&Address(b"else".as_slice().into())), None);
    }
}
