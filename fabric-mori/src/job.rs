//! A batch as it is posted.

use kvferry_engine::fabric::{Direction, OpId, Refused, SessionId, Submit};

/// The ranges of a batch: offsets into the two regions, and lengths in bytes. Neighbours that go on
/// on both sides are one.
#[derive(Debug)]
pub(crate) struct MoriBatch {
    pub(crate) op: OpId,
    pub(crate) session: SessionId,
    pub(crate) direction: Direction,
    pub(crate) local: Vec<u64>,
    pub(crate) remote: Vec<u64>,
    pub(crate) len: Vec<u64>,
}

impl Default for MoriBatch {
    fn default() -> Self {
        MoriBatch {
            op: OpId(0),
            session: SessionId(0),
            direction: Direction::Write,
            local: Vec::new(),
            remote: Vec::new(),
            len: Vec::new(),
        }
    }
}

/// Longest range of one work request; MoRI refuses more.
const RANGE_MAX: u64 = u32::MAX as u64;

impl MoriBatch {
    /// Takes over a batch after it was checked against the lengths of both regions: MoRI's own
    /// checks wrap around (RDMA), or are none (xGMI).
    ///
    /// # Errors
    /// `Invalid` with the range and the region's length.
    pub(crate) fn fill(&mut self, batch: &Submit<'_>, lens: [u64; 2]) -> Result<u64, Refused> {
        (self.op, self.session, self.direction) = (batch.op, batch.session, batch.direction);
        self.local.clear();
        self.remote.clear();
        self.len.clear();
        let Submit { local, remote, len, .. } = *batch;
        let seen = RangeScan::of(batch, lens);
        if seen.may_leave
            && let Some(refused) = outside(batch, lens)
        {
            return Err(refused);
        }
        if seen.as_they_are {
            self.local.extend_from_slice(local);
            self.remote.extend_from_slice(remote);
            self.len.extend_from_slice(len);
        } else {
            self.merge(batch);
        }
        Ok(seen.bytes)
    }

    fn merge(&mut self, batch: &Submit<'_>) {
        let mut ends = (u64::MAX, u64::MAX);
        for ((&local, &remote), &len) in batch.local.iter().zip(batch.remote).zip(batch.len) {
            if len == 0 {
                continue;
            }
            match self.len.last_mut() {
                Some(last) if ends == (local, remote) && *last + len <= RANGE_MAX => *last += len,
                _ => self.push(local, remote, len),
            }
            ends = (local + len, remote + len);
        }
    }

    fn push(&mut self, mut local: u64, mut remote: u64, mut len: u64) {
        while len > 0 {
            let piece = len.min(RANGE_MAX);
            self.local.push(local);
            self.remote.push(remote);
            self.len.push(piece);
            (local, remote, len) = (local + piece, remote + piece, len - piece);
        }
    }
}

/// What one look at all ranges of a batch shows. It gathers bits, of which the highest tells:
/// without a branch or a comparison the compiler looks at several ranges at a time.
struct RangeScan {
    /// One may leave its region; never false if one does.
    may_leave: bool,
    /// None is empty, too long, or goes on where the one before it ends.
    as_they_are: bool,
    bytes: u64,
}

impl RangeScan {
    fn of(batch: &Submit<'_>, [local_len, remote_len]: [u64; 2]) -> RangeScan {
        let Submit { local, remote, len, .. } = *batch;
        let is_set = |bits: u64| bits >> 63 != 0;
        let (mut leaves, mut uneven, mut bytes) = (local_len | remote_len, 0, 0_u64);
        for ((&local, &remote), &len) in local.iter().zip(remote).zip(len) {
            // Below 2^63 a difference has the highest bit if it is negative.
            let (here, there) = (local_len.wrapping_sub(len), remote_len.wrapping_sub(len));
            leaves |= local | remote | len | here | there;
            leaves |= here.wrapping_sub(local) | there.wrapping_sub(remote);
            uneven |= len.wrapping_sub(1) | RANGE_MAX.wrapping_sub(len);
            bytes = bytes.wrapping_add(len);
        }
        let before = local.iter().zip(remote).zip(len);
        let after = local.iter().zip(remote).skip(1);
        for (((&local, &remote), &len), (&next_local, &next_remote)) in before.zip(after) {
            let gap =
                (local.wrapping_add(len) ^ next_local) | (remote.wrapping_add(len) ^ next_remote);
            // Of a number and its negative one has the highest bit, but for zero.
            uneven |= !(gap | gap.wrapping_neg());
        }
        RangeScan { may_leave: is_set(leaves), as_they_are: !is_set(uneven), bytes }
    }
}

/// The first range that leaves its region, if there is one.
fn outside(batch: &Submit<'_>, lens: [u64; 2]) -> Option<Refused> {
    let starts = [("local", batch.local, lens[0]), ("remote", batch.remote, lens[1])];
    for (at, &len) in batch.len.iter().enumerate() {
        for (side, starts, end) in starts {
            let start = starts[at];
            if start.checked_add(len).is_none_or(|to| to > end) {
                let what = format!("{side} range {start}+{len} in a region of {end} bytes");
                return Some(Refused::Invalid(what.into()));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(ranges: &[(u64, u64, u64)], lens: [u64; 2]) -> Result<(MoriBatch, u64), Refused> {
        let local: Vec<_> = ranges.iter().map(|range| range.0).collect();
        let remote: Vec<_> = ranges.iter().map(|range| range.1).collect();
        let len: Vec<_> = ranges.iter().map(|range| range.2).collect();
        let (op, session, direction) = (OpId(1), SessionId(2), Direction::Read);
        let mut job = MoriBatch::default();
        let batch = Submit { op, session, direction, local: &local, remote: &remote, len: &len };
        job.fill(&batch, lens).map(|bytes| (job, bytes))
    }

    #[test]
    fn neighbours_on_both_sides_are_one() {
        let ranges = [(0, 64, 8), (8, 72, 8), (16, 96, 8), (24, 104, 0), (24, 104, 1)];
        let (job, bytes) = filled(&ranges, [100, 200]).expect("inside");
        assert_eq!((job.local, job.remote, job.len), (vec![0, 16], vec![64, 96], vec![16, 9]));
        assert_eq!(bytes, 25);
        for (ranges, expected) in [
            (&[(0, 64, 8), (8, 72, 8), (16, 80, 8)][..], &[24][..]),
            (&[(0, 64, 8), (8, 73, 8), (17, 81, 8)], &[8, 8, 8]),
            (&[(0, 64, 8), (16, 80, 8), (24, 88, 8)], &[8, 16]),
        ] {
            assert_eq!(filled(ranges, [100, 200]).expect("inside").0.len, expected);
        }
    }

    #[test]
    fn long_ranges_are_cut() {
        let long = RANGE_MAX + 5;
        let (job, bytes) = filled(&[(0, 7, long)], [long, long + 7]).expect("inside");
        assert_eq!(job.len, [RANGE_MAX, 5]);
        assert_eq!((job.local[1], job.remote[1], bytes), (RANGE_MAX, RANGE_MAX + 7, long));
        let neighbours = [(0, 7, RANGE_MAX - 1), (RANGE_MAX - 1, RANGE_MAX + 6, 1)];
        let after = (RANGE_MAX, RANGE_MAX + 7, 1);
        let (job, _) =
            filled(&[&neighbours[..], &[after]].concat(), [long, long + 7]).expect("inside");
        assert_eq!(job.len, [RANGE_MAX, 1]);
    }

    #[test]
    fn ranges_that_wrap_or_leave_a_region_are_refused() {
        let half = 1 << 63;
        let bad = [
            (u64::MAX - 4, 0, 8),
            (0, u64::MAX - 4, 8),
            (93, 0, 8),
            (0, 193, 8),
            (101, 0, 0),
            (half, 0, half),
            (0, half, 1),
            (1, 0, u64::MAX),
        ];
        for range in bad {
            for ranges in [&[range][..], &[(0, 0, 1), range], &[range, (0, 0, 1)]] {
                let refused = filled(ranges, [100, 200]);
                assert!(matches!(refused, Err(Refused::Invalid(_))), "{ranges:?}");
            }
        }
        assert!(filled(&[(half, half, 8)], [half + 8; 2]).is_ok());
    }
}
