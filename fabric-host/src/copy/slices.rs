//! Byte ranges of one operation, and their walk in chunks.

use crate::sys::RANGES_MAX;

/// Bytes that are copied between two looks at whether the copy is still wanted; below a
/// millisecond on every path.
pub(crate) const CHUNK_MAX: u64 = 4 << 20;

/// Fewer bytes of a slice are not cut off.
const CUT_MIN: u64 = 64 << 10;

/// One range; offsets into the two regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopySlice {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) len: u64,
}

/// True if all slices are inside regions of these lengths.
pub(crate) fn all_inside(slices: &[CopySlice], from: u64, to: u64) -> bool {
    let inside = |at: u64, len: u64, end: u64| at.checked_add(len).is_some_and(|to| to <= end);
    slices
        .iter()
        .all(|slice| inside(slice.from, slice.len, from) && inside(slice.to, slice.len, to))
}

/// Where a share of about so many bytes ends that begins at the slice of index `start`. A long slice
/// is cut in two there; a shorter one belongs to the share as a whole.
pub(crate) fn cut(slices: &mut Vec<CopySlice>, start: usize, bytes: u64) -> usize {
    let mut room = bytes;
    for (at, slice) in slices.iter_mut().enumerate().skip(start) {
        if slice.len < room {
            room -= slice.len;
        } else if slice.len - room <= CUT_MIN {
            return at + 1;
        } else {
            let rest =
                CopySlice { from: slice.from + room, to: slice.to + room, len: slice.len - room };
            slice.len = room;
            slices.insert(at + 1, rest);
            return at + 1;
        }
    }
    slices.len()
}

/// A walk over slices, from where it was left.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SliceCursor {
    index: usize,
    offset: u64,
}

impl SliceCursor {
    /// True if nothing is left.
    pub(crate) fn is_at_end(&self, slices: &[CopySlice]) -> bool {
        self.index >= slices.len()
    }

    /// Puts the next ranges into `chunk`, as many as one call takes and a chunk may have bytes, and
    /// not of more bytes than `most`.
    pub(crate) fn next(&mut self, slices: &[CopySlice], chunk: &mut Vec<CopySlice>, most: u64) {
        chunk.clear();
        let mut room = CHUNK_MAX.min(most);
        while room > 0 && chunk.len() < RANGES_MAX && self.index < slices.len() {
            let slice = slices[self.index];
            let len = (slice.len - self.offset).min(room);
            let (from, to) = (slice.from + self.offset, slice.to + self.offset);
            chunk.push(CopySlice { from, to, len });
            room -= len;
            self.advance(slices, len);
        }
    }

    /// The next ranges, in place if there are whole ones, else in `chunk` as [`SliceCursor::next`]
    /// has it.
    pub(crate) fn chunk<'a>(
        &mut self,
        slices: &'a [CopySlice],
        chunk: &'a mut Vec<CopySlice>,
    ) -> &'a [CopySlice] {
        let left = &slices[self.index..];
        let mut room = CHUNK_MAX;
        let fits = |slice: &&CopySlice| match room.checked_sub(slice.len) {
            Some(rest) => {
                room = rest;
                true
            }
            None => false,
        };
        let whole = left.iter().take(RANGES_MAX).take_while(fits).count();
        if self.offset > 0 || whole == 0 {
            self.next(slices, chunk, CHUNK_MAX);
            return chunk;
        }
        self.index += whole;
        &left[..whole]
    }

    /// Goes on by some bytes, all of which are in the slices.
    pub(crate) fn advance(&mut self, slices: &[CopySlice], mut bytes: u64) {
        while self.index < slices.len() {
            let left = slices[self.index].len - self.offset;
            if bytes < left {
                self.offset += bytes;
                return;
            }
            bytes -= left;
            (self.index, self.offset) = (self.index + 1, 0);
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_cover_every_byte_once_and_keep_their_limits() {
        let lens =
            [3, CHUNK_MAX * 2 + 1, 1, CHUNK_MAX].into_iter().chain((0..3_000).map(|_| 4_096));
        let slices: Vec<_> = lens
            .scan(0, |at, len| {
                let slice = CopySlice { from: *at, to: *at * 2, len };
                *at += len;
                Some(slice)
            })
            .collect();
        let all = slices.iter().map(|slice| slice.len).sum::<u64>();
        for in_place in [false, true] {
            let (mut cursor, mut chunk, mut seen) = (SliceCursor::default(), Vec::new(), 0);
            while !cursor.is_at_end(&slices) {
                let taken = if in_place {
                    cursor.chunk(&slices, &mut chunk)
                } else {
                    cursor.next(&slices, &mut chunk, CHUNK_MAX);
                    &chunk
                };
                assert!((1..=RANGES_MAX).contains(&taken.len()));
                assert!(taken.iter().map(|slice| slice.len).sum::<u64>() <= CHUNK_MAX);
                for slice in taken {
                    assert_eq!(slice.from, seen);
                    seen += slice.len;
                }
            }
            assert_eq!(seen, all);
        }
    }

    proptest! {
        #[test]
        fn shares_have_every_byte_once_in_their_order(
            lens in prop::collection::vec(prop_oneof![1_u64..9_000, 1_u64..3_000_000], 1..40),
            count in 1_u64..6,
        ) {
            let slices: Vec<_> = lens.iter().scan(0, |at, &len| {
                let slice = CopySlice { from: *at, to: *at + 7, len };
                *at += len;
                Some(slice)
            }).collect();
            let bytes: u64 = lens.iter().sum();
            let (mut shared, mut start, mut seen) = (slices, 0, 0);
            for left in (0..count).rev() {
                let end = if left == 0 { shared.len() } else { cut(&mut shared, start, bytes / count) };
                let before = seen;
                for slice in &shared[start..end] {
                    prop_assert!(slice.from == seen && slice.to == seen + 7 && slice.len > 0);
                    seen += slice.len;
                }
                prop_assert!(seen - before <= bytes / count + CUT_MIN + count);
                start = end;
            }
            prop_assert_eq!(seen, bytes);
        }
    }

    #[test]
    fn ranges_that_wrap_or_leave_a_region_are_not_inside() {
        let at = |from, to, len| [CopySlice { from, to, len }];
        assert!(all_inside(&at(8, 0, 8), 16, 8));
        assert!(!all_inside(&at(9, 0, 8), 16, 8));
        assert!(!all_inside(&at(0, 1, 8), 16, 8));
        assert!(!all_inside(&at(u64::MAX, 0, 2), 16, 8));
        assert!(!all_inside(&at(0, u64::MAX, 2), 16, 8));
    }
}
