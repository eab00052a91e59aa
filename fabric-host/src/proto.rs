//! What planes say to each other: greetings and openings as MessagePack, operations as words.

use crate::config::Path;
use crate::copy::{Slice, all_inside};
use serde::{Deserialize, Serialize};

/// Planes of another version are refused.
pub(crate) const VERSION: u32 = 2;

/// Longest encoded [`Control`].
pub(crate) const CONTROL_MAX: usize = 16 << 10;

/// Slices in one part of an operation.
pub(crate) const PART_MAX: usize = 1_024;

/// Words in the longest record.
pub(crate) const RECORD_MAX: usize = 3 + 3 * PART_MAX;

/// Which paths a side takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rules {
    pub(crate) paths: Vec<Path>,
    pub(crate) slower: bool,
}

/// Memory of one side of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Side {
    /// Address in its process.
    pub(crate) base: u64,
    pub(crate) len: u64,
    /// A process other than the plane's, and when it started.
    pub(crate) process: Option<(u32, u64)>,
    /// True if a descriptor comes along.
    pub(crate) file: bool,
}

/// Why a session cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Denial {
    pub(crate) why: String,
    /// It can be over TCP.
    pub(crate) tcp: bool,
}

/// Messages ahead of and beside operations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Control {
    /// First message of who connects. Locally with the segment and the doorbell of its thread.
    Hello {
        version: u32,
        /// Its address.
        from: Vec<u8>,
        /// Key and incarnation of who is meant.
        to: (String, u64),
        pass: u64,
        /// The number that it gives this link.
        link: u64,
        /// Numbers of links that broke: nothing that came by them lands after the answer.
        ends: Vec<u64>,
        rules: Rules,
    },
    /// It is let in. Locally with the doorbell and the roll.
    Welcome { rules: Rules },
    /// It is not.
    Refuse {
        why: String,
        /// Nothing of the links that the hello says have ended lands any more.
        over: bool,
    },
    /// A session between two regions, maybe with the file of the local one.
    Open { session: u32, region: u32, token: u64, local: Side },
    /// Answer: how writes go, the other region and its place in the roll, maybe with its file.
    Opened { session: u32, result: Result<(Path, Side, u32), Denial> },
}

impl Control {
    pub(crate) fn encode(&self) -> Vec<u8> {
        rmp_serde::to_vec(self).expect("plain data always encodes")
    }

    /// None for what is no message.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Control> {
        rmp_serde::from_slice(bytes).ok()
    }
}

/// How an operation ended, as told by who copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Done,
    /// Nothing was copied: the session or a region is not there any more.
    Refused,
    /// The source could not be read.
    Source,
    /// The destination could not be written.
    Destination,
}

impl Status {
    pub(crate) fn of(code: u64) -> Option<Status> {
        const ALL: [Status; 4] =
            [Status::Done, Status::Refused, Status::Source, Status::Destination];
        ALL.into_iter().find(|status| *status as u64 == code)
    }
}

/// A part of an operation, seen from who owns the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) session: u32,
    pub(crate) op: u64,
    /// The last part of its operation.
    pub(crate) last: bool,
}

/// What stands in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// Slices of a write follow; by TCP, their bytes after that.
    Write(Part),
    /// Slices of a read follow; by TCP only.
    Read(Part),
    /// An operation ended.
    Done { op: u64, status: Status },
    /// Bytes of a part of a read follow, by TCP only; none unless `Done`.
    Bytes { op: u64, status: Status },
    /// A session ends.
    Close { session: u32 },
    /// Nothing of it lands any more.
    Closed { session: u32 },
    /// A [`Control`] of so many bytes follows, in whole words; by TCP only.
    Control { bytes: u32 },
}

const LAST: u64 = 1 << 32;

impl Record {
    /// Writes the record, without slices, over what is in `words`.
    pub(crate) fn encode(self, words: &mut Vec<u64>) {
        let head = |kind: u64, low: u64| kind << 56 | low;
        let part = |part: Part| u64::from(part.session) | if part.last { LAST } else { 0 };
        words.clear();
        match self {
            Record::Write(p) => words.extend([head(1, part(p)), p.op]),
            Record::Read(p) => words.extend([head(2, part(p)), p.op]),
            Record::Done { op, status } => words.extend([head(3, status as u64), op]),
            Record::Bytes { op, status } => words.extend([head(4, status as u64), op]),
            Record::Close { session } => words.push(head(5, session.into())),
            Record::Closed { session } => words.push(head(6, session.into())),
            Record::Control { bytes } => words.push(head(7, bytes.into())),
        }
    }

    /// The record and the words after it; none for what is no record.
    pub(crate) fn decode(words: &[u64]) -> Option<(Record, &[u64])> {
        let (first, rest) = words.split_first()?;
        let (kind, low) = (first >> 56, *first as u32);
        let second = || rest.split_first();
        let status = || Status::of(low.into());
        let part = |op: &u64| Part { session: low, op: *op, last: first & LAST != 0 };
        Some(match kind {
            1 => second().map(|(op, rest)| (Record::Write(part(op)), rest))?,
            2 => second().map(|(op, rest)| (Record::Read(part(op)), rest))?,
            3 => (Record::Done { op: *second()?.0, status: status()? }, second()?.1),
            4 => (Record::Bytes { op: *second()?.0, status: status()? }, second()?.1),
            5 => (Record::Close { session: low }, rest),
            6 => (Record::Closed { session: low }, rest),
            7 => (Record::Control { bytes: low }, rest),
            _ => return None,
        })
    }
}

/// Ahead of slices that stand as they are, three words each.
const PLAIN: u64 = 0;

/// Below the length that packed slices share: the number of bits that their offsets are shifted by.
const SHIFT_BITS: u32 = 6;

/// How slices of one length are packed into a word each; none if their offsets differ in more than
/// 32 bits. Blocks of a KV cache are such: what the peer has to fetch from another core's cache is
/// a third as much.
fn packing(slices: &[Slice]) -> Option<(u64, u32)> {
    let len = slices.first()?.len;
    let (mut offsets, mut differ) = (0, len >> (u64::BITS - SHIFT_BITS));
    for slice in slices {
        offsets |= slice.from | slice.to;
        differ |= slice.len ^ len;
    }
    let shift = offsets.trailing_zeros().min(u32::BITS);
    (len > 0 && differ == 0 && offsets >> shift <= u64::from(u32::MAX)).then_some((len, shift))
}

/// Appends slices to a record.
pub(crate) fn push_slices(slices: &[Slice], words: &mut Vec<u64>) {
    match packing(slices) {
        Some((len, shift)) => {
            words.push(len << SHIFT_BITS | u64::from(shift));
            let pack = |slice: &Slice| slice.from >> shift << u32::BITS | slice.to >> shift;
            words.extend(slices.iter().map(pack));
        }
        None => {
            words.push(PLAIN);
            words.extend(slices.iter().flat_map(|slice| [slice.from, slice.to, slice.len]));
        }
    }
}

/// The slices of a part; false if they are not whole or too many.
pub(crate) fn take_slices(words: &[u64], slices: &mut Vec<Slice>) -> bool {
    slices.clear();
    let Some((&form, words)) = words.split_first() else { return false };
    if form == PLAIN {
        let (whole, rest) = words.as_chunks::<3>();
        slices.extend(whole.iter().map(|&[from, to, len]| Slice { from, to, len }));
        return rest.is_empty() && slices.len() <= PART_MAX;
    }
    let (len, shift) = (form >> SHIFT_BITS, form as u32 % (1 << SHIFT_BITS));
    if shift > u32::BITS || words.len() > PART_MAX {
        return false;
    }
    let offset = |half: u64| half << shift;
    slices.extend(words.iter().map(|word| Slice {
        from: offset(word >> u32::BITS),
        to: offset(u64::from(*word as u32)),
        len,
    }));
    true
}

/// Bytes of slices that are inside regions of these lengths; none if they are not.
pub(crate) fn bytes_inside(slices: &[Slice], from: u64, to: u64) -> Option<u64> {
    if !all_inside(slices, from, to) {
        return None;
    }
    slices.iter().try_fold(0_u64, |sum, slice| sum.checked_add(slice.len))
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slices(shift: u32, equal: bool) -> impl Strategy<Value = Vec<Slice>> {
        let offset = move || any::<u64>().prop_map(move |at| at >> (at % 64) >> shift << shift);
        let len = if equal { 4_096..4_097_u64 } else { 1..u64::MAX };
        let slice = (offset(), offset(), len).prop_map(|(from, to, len)| Slice { from, to, len });
        prop::collection::vec(slice, 0..40)
    }

    proptest! {
        #[test]
        fn slices_come_as_they_went(
            slices in (0_u32..40, any::<bool>()).prop_flat_map(|(shift, equal)| slices(shift, equal)),
        ) {
            let (mut words, mut taken) = (Vec::new(), Vec::new());
            push_slices(&slices, &mut words);
            prop_assert!(words.len() <= 1 + 3 * slices.len());
            prop_assert!(take_slices(&words, &mut taken));
            prop_assert_eq!(taken, slices);
        }

        #[test]
        fn any_words_are_slices_or_refused(words in prop::collection::vec(any::<u64>(), 0..20)) {
            let mut taken = Vec::new();
            prop_assert!(!take_slices(&words, &mut taken) || taken.len() < words.len());
        }
    }

    #[test]
    fn blocks_of_one_length_take_a_word_each() {
        let block = |n: u64| Slice { from: n * 98_304, to: (9 - n) << 40 >> 3, len: 98_304 };
        let (mut words, blocks) = (Vec::new(), [1, 2, 3].map(block));
        push_slices(&blocks, &mut words);
        assert_eq!(words.len(), 4);
        let longer = Slice { len: 98_305, ..blocks[0] };
        words.clear();
        push_slices(&[blocks[0], longer], &mut words);
        assert_eq!(words.len(), 7);
    }
}
