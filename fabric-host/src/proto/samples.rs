//! One of each message and record, with values in all fields.

use super::{
    HostControlMessage, HostCopyStatus, HostOperationPart, HostRecord, HostRegionInfo, PathPolicy,
    SessionDenial, push_slices,
};
use crate::config::DataPath;
use crate::copy::CopySlice;

fn rules() -> PathPolicy {
    PathPolicy { paths: vec![DataPath::SharedMemory, DataPath::Tcp], slower: true }
}

fn side() -> HostRegionInfo {
    HostRegionInfo { base: 1 << 40, len: 8_192, process: Some((4_711, 99)), file: true }
}

pub(crate) fn controls() -> Vec<HostControlMessage> {
    vec![
        HostControlMessage::Hello {
            version: 2,
            from: b"address".to_vec(),
            to: ("engine".into(), u64::MAX),
            fence_key: 5,
            link: 6,
            ends: vec![1, 70_000],
            rules: rules(),
            newest: Some(3), // since 3
            offer: None,
        },
        HostControlMessage::Welcome {
            rules: rules(),
            version: Some((3, 3)), // since 3
        },
        HostControlMessage::Refuse { why: "no".into(), over: true },
        HostControlMessage::Open { session: 9, region: 4, token: 1 << 60, local: side() },
        HostControlMessage::Opened { session: 9, result: Ok((DataPath::CrossMemory, side(), 7)) },
        HostControlMessage::Opened {
            session: 9,
            result: Err(SessionDenial { why: "no".into(), tcp: true }),
        },
    ]
}

/// All records, with their slices.
pub(crate) fn records() -> Vec<Vec<u64>> {
    let part = |last| HostOperationPart { session: 9, op: 1 << 33, last };
    let packed = [1, 2, 3].map(|n| CopySlice { from: n << 12, to: n << 13, len: 4_096 });
    let plain =
        [CopySlice { from: 1, to: u64::MAX >> 1, len: 3 }, CopySlice { from: 9, to: 8, len: 4 }];
    let words = |record: HostRecord, slices: &[CopySlice]| {
        let mut words = Vec::new();
        record.encode(&mut words);
        if !slices.is_empty() {
            push_slices(slices, &mut words);
        }
        words
    };
    vec![
        words(HostRecord::Write(part(true)), &packed),
        words(HostRecord::Write(part(false)), &plain),
        words(HostRecord::Read(part(true)), &packed),
        words(HostRecord::Done { op: 7, status: HostCopyStatus::Done }, &[]),
        words(HostRecord::Done { op: 7, status: HostCopyStatus::Destination }, &[]),
        words(HostRecord::Bytes { op: 7, status: HostCopyStatus::Source }, &[]),
        words(HostRecord::Close { session: 9 }, &[]),
        words(HostRecord::Closed { session: 9 }, &[]),
        words(HostRecord::Control { bytes: 77 }, &[]),
    ]
}
