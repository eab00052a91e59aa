//! One of each message and record, with values in all fields.

use super::{Control, Denial, Part, Record, Rules, Side, Status, push_slices};
use crate::config::Path;
use crate::copy::Slice;

fn rules() -> Rules {
    Rules { paths: vec![Path::SharedMemory, Path::Tcp], slower: true }
}

fn side() -> Side {
    Side { base: 1 << 40, len: 8_192, process: Some((4_711, 99)), file: true }
}

/// All messages.
pub(crate) fn controls() -> Vec<Control> {
    vec![
        Control::Hello {
            version: 2,
            from: b"address".to_vec(),
            to: ("engine".into(), u64::MAX),
            pass: 5,
            link: 6,
            ends: vec![1, 70_000],
            rules: rules(),
            newest: Some(3), // since 3
        },
        Control::Welcome {
            rules: rules(),
            version: Some((3, 3)), // since 3
        },
        Control::Refuse { why: "no".into(), over: true },
        Control::Open { session: 9, region: 4, token: 1 << 60, local: side() },
        Control::Opened { session: 9, result: Ok((Path::CrossMemory, side(), 7)) },
        Control::Opened { session: 9, result: Err(Denial { why: "no".into(), tcp: true }) },
    ]
}

/// All records, with their slices.
pub(crate) fn records() -> Vec<Vec<u64>> {
    let part = |last| Part { session: 9, op: 1 << 33, last };
    let packed = [1, 2, 3].map(|n| Slice { from: n << 12, to: n << 13, len: 4_096 });
    let plain = [Slice { from: 1, to: u64::MAX >> 1, len: 3 }, Slice { from: 9, to: 8, len: 4 }];
    let words = |record: Record, slices: &[Slice]| {
        let mut words = Vec::new();
        record.encode(&mut words);
        if !slices.is_empty() {
            push_slices(slices, &mut words);
        }
        words
    };
    vec![
        words(Record::Write(part(true)), &packed),
        words(Record::Write(part(false)), &plain),
        words(Record::Read(part(true)), &packed),
        words(Record::Done { op: 7, status: Status::Done }, &[]),
        words(Record::Done { op: 7, status: Status::Destination }, &[]),
        words(Record::Bytes { op: 7, status: Status::Source }, &[]),
        words(Record::Close { session: 9 }, &[]),
        words(Record::Closed { session: 9 }, &[]),
        words(Record::Control { bytes: 77 }, &[]),
    ]
}
