//! Addresses and region descriptors: MoRI's own bytes, so that handshakes that carry those carry
//! these. Addresses have fields at the end that MoRI's decoders ignore; those of memory cannot have
//! any, as later layouts go on where earlier ones end. What a plane with both backends says of xGMI
//! stands ahead of the mark in an address, and behind the array in a region descriptor, where
//! planes with RDMA alone do not look.

use kvferry_engine::core::dialect::moriio::descriptor::{MoriEngineDesc, MoriMemoryDesc};
use kvferry_engine::fabric::{Address, RegionDesc};
use kvferry_fabric_common::PlaneIdentity;
use serde::{Deserialize, Serialize};
use std::net::SocketAddrV4;
use std::sync::Arc;

/// First of the fields that follow MoRI's.
const MARK: &str = "kvferry-mori-1";

/// Ahead of what a plane with both backends says of xGMI.
const XGMI_MARK: &str = "kvferry-mori-xgmi-1";

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
    longer.extend(packed(MARK)?);
    longer.extend(rmp_serde::to_vec(tail).ok()?);
    Some(longer)
}

/// The element after the mark.
fn tail<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Option<T> {
    let mark = packed(MARK)?;
    let at = bytes.windows(mark.len()).rposition(|window| window == mark)?;
    rmp_serde::from_slice(&bytes[at + mark.len()..]).ok()
}

fn packed(text: &str) -> Option<Vec<u8>> {
    rmp_serde::to_vec(text).ok()
}

/// The second mark and bytes behind it.
fn xgmi_part(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut part = packed(XGMI_MARK)?;
    part.push(0xc5);
    part.extend(u16::try_from(bytes.len()).ok()?.to_be_bytes());
    part.extend(bytes);
    Some(part)
}

/// What a plane with both backends says of xGMI in an address or a region descriptor; none from
/// another plane.
pub(crate) fn of_xgmi(bytes: &[u8]) -> Option<&[u8]> {
    let mark = packed(XGMI_MARK)?;
    let at = bytes.windows(mark.len()).position(|window| window == mark)?;
    match bytes[at + mark.len()..] {
        [0xc5, high, low, ref rest @ ..] => rest.get(..u16::from_be_bytes([high, low]).into()),
        _ => None,
    }
}

/// The address of a plane with both backends. Who looks for that of an RDMA plane finds it.
pub(crate) fn with_xgmi(rdma: &Address, xgmi: &Address) -> Option<Address> {
    let (count, skip) = header(&rdma.0)?;
    let mark = packed(MARK)?;
    let at = rdma.0.windows(mark.len()).rposition(|window| window == mark)?;
    let mut both = vec![0xdc];
    both.extend(u16::try_from(count + 2).ok()?.to_be_bytes());
    both.extend(&rdma.0[skip..at]);
    both.extend(xgmi_part(&xgmi.0)?);
    both.extend(&rdma.0[at..]);
    Some(Address(both.into()))
}

/// A region that is registered with both backends.
pub(crate) fn region_with_xgmi(rdma: &RegionDesc, xgmi: &RegionDesc) -> Option<RegionDesc> {
    let mut both = rdma.0.to_vec();
    both.extend(xgmi_part(&xgmi.0)?);
    Some(RegionDesc(both.into()))
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

    /// What the peer calls itself.
    pub(crate) fn name(&self) -> Arc<str> {
        match &self.acceptor {
            Some(acceptor) => acceptor.who.key.clone(),
            None => {
                MoriEngineDesc::decode(&self.engine).map_or_else(|_| Arc::default(), |it| it.key)
            }
        }
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

    #[test]
    fn those_of_both_backends_are_read_as_rdma_s_by_who_has_that_alone() {
        let desc = |key: &str| MoriEngineDesc {
            key: key.into(),
            host: "127.0.0.1".into(),
            port: 9,
            ..MoriEngineDesc::default()
        };
        let of = |key: &str, port| {
            let acceptor = MoriAcceptorInfo { port, ..acceptor() };
            MoriPlaneAddress::encode(&desc(key).encode(DescLayout::V1_2_2), &acceptor)
        };
        let [rdma, xgmi] = [("r", 1), ("x", 2)].map(|(key, port)| of(key, port).expect("ours"));
        let both = with_xgmi(&rdma, &xgmi).expect("two addresses");
        assert_eq!(MoriEngineDesc::decode(&both.0), Ok(desc("r")));
        let location = MoriPlaneAddress::decode(&both).expect("ours");
        assert_eq!(location.acceptor.map(|acceptor| acceptor.port), Some(1));
        assert_eq!(of_xgmi(&both.0), Some(&*xgmi.0));
        assert_eq!(of_xgmi(&rdma.0), None);
        for layout in [DescLayout::V1_2, DescLayout::V1_2_2] {
            let region = |key: &str| {
                let desc =
                    MoriMemoryDesc { engine_key: key.into(), size: 64, ..Default::default() };
                RegionDesc(desc.encode(layout).into())
            };
            let both = region_with_xgmi(&region("r"), &region("x")).expect("two descriptors");
            assert_eq!(MoriMemoryDesc::decode(&both.0), MoriMemoryDesc::decode(&region("r").0));
            let claim = MoriRegionDescriptor::decode(&both.0).expect("ours");
            assert_eq!(claim.name, ("r".into(), 0));
            assert_eq!(of_xgmi(&both.0), Some(&*region("x").0));
        }
        // Whatever is behind the mark is no more than bytes.
        let mark = both.0.windows(XGMI_MARK.len()).position(|it| it == XGMI_MARK.as_bytes());
        let end = mark.expect("it is there") + XGMI_MARK.len();
        for cut in end..both.0.len() {
            assert_eq!(of_xgmi(&both.0[..cut]).is_some(), cut >= end + 3 + xgmi.0.len(), "{cut}");
        }
    }
}
