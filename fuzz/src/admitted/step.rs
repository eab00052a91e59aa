//! What an admitted peer does, one thing after the other.

use arbitrary::Arbitrary;

/// A number that a peer says: most are near a bound.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum SaidNumber {
    Small(u8),
    /// So far from the length of the region.
    NearLength(i8),
    Power(u8, i8),
    NearMost(u8),
    Any(u64),
}

impl SaidNumber {
    pub(super) fn value(self, len: u64) -> u64 {
        match self {
            SaidNumber::Small(number) => number.into(),
            SaidNumber::NearLength(more) => len.wrapping_add_signed(more.into()),
            SaidNumber::Power(bits, more) => {
                (1_u64 << (bits % 64)).wrapping_add_signed(more.into())
            }
            SaidNumber::NearMost(less) => u64::MAX - u64::from(less),
            SaidNumber::Any(number) => number,
        }
    }
}

/// Slices of a record.
#[derive(Arbitrary, Clone, Debug)]
pub(super) enum SaidSlices {
    /// Of the first bytes of both regions, `len` each, which is inside of them.
    Good {
        count: u8,
        len: u8,
    },
    /// One that ends about where both regions do.
    Edge {
        len: u8,
        from: i8,
        to: i8,
    },
    Plain {
        repeat: u8,
        slices: Vec<[SaidNumber; 3]>,
    },
    Packed {
        len: SaidNumber,
        shift: u8,
        words: Vec<u64>,
    },
    /// As many words as `more` says beyond what a part may have.
    Long {
        more: i8,
    },
}

impl SaidSlices {
    /// The words, and the bytes that they ask for as far as they can be told.
    pub(super) fn words(&self, region: u64) -> (Vec<u64>, u64) {
        match self {
            SaidSlices::Good { count, len } => {
                let slice = [0, 0, u64::from(*len)];
                let words = std::iter::once(0).chain((0..*count).flat_map(|_| slice)).collect();
                (words, u64::from(*count) * u64::from(*len))
            }
            SaidSlices::Edge { len, from, to } => {
                let len = u64::from(*len);
                let at = |more: i8| (region - len).saturating_add_signed((more % 16).into());
                (vec![0, at(*from), at(*to), len], len)
            }
            SaidSlices::Plain { repeat, slices } => {
                let slices: Vec<_> =
                    slices.iter().map(|slice| slice.map(|at| at.value(region))).collect();
                let all = (0..=*repeat).flat_map(|_| slices.iter().copied());
                let bytes = all.clone().fold(0_u64, |sum, [.., len]| sum.saturating_add(len));
                (std::iter::once(0).chain(all.flatten()).collect(), bytes)
            }
            SaidSlices::Packed { len, shift, words } => {
                let len = len.value(region) & ((1 << 58) - 1);
                let bytes = len.saturating_mul(words.len() as u64);
                let form = len << 6 | u64::from(shift % 64);
                (std::iter::once(form).chain(words.iter().copied()).collect(), bytes)
            }
            SaidSlices::Long { more } => {
                let words = 1_usize + 3 * 1_024_usize.saturating_add_signed((*more).into());
                (vec![0; words], 0)
            }
        }
    }
}

/// A descriptor that comes along.
#[derive(Arbitrary, Clone, Debug)]
pub(super) enum PassedFile {
    Memory {
        len: SaidNumber,
        seals: u8,
        holes: bool,
    },
    EventFd,
    Pipe {
        write: bool,
    },
    Datagrams,
    Stream,
    Null,
    /// The open memory of this process, which is the peer's.
    OwnMemory,
}

/// Memory that is said to be the peer's.
#[derive(Arbitrary, Clone, Debug)]
pub(super) enum PeerMemorySpec {
    /// What it has, all of it.
    Own,
    At {
        shift: SaidNumber,
        len: SaidNumber,
        process: Option<(u8, u64)>,
        file: bool,
    },
}

/// What a peer does.
#[derive(Arbitrary, Clone, Debug)]
pub(super) enum PeerStep {
    Open {
        session: u8,
        region: u8,
        memory: PeerMemorySpec,
        files: Vec<PassedFile>,
    },
    Write {
        session: u8,
        op: u8,
        last: bool,
        slices: SaidSlices,
        payload: Option<u16>,
    },
    Read {
        session: u8,
        op: u8,
        last: bool,
        slices: SaidSlices,
    },
    Close {
        session: u8,
    },
    /// A record of any kind.
    Record {
        kind: u8,
        low: SaidNumber,
        words: Vec<SaidNumber>,
    },
    /// A message that another side says, at another time.
    Message {
        kind: u8,
        session: u8,
        files: Vec<PassedFile>,
    },
    /// Bytes in place of a record or message.
    Raw {
        bytes: Vec<u8>,
    },
    /// A word of the memory that is shared: the header of a ring, or any.
    Word {
        at: SaidNumber,
        is_header: bool,
        word: SaidNumber,
    },
    /// Waits until the plane has taken what came.
    Wait,
}

/// How a peer greets.
#[derive(Arbitrary, Clone, Debug)]
pub(super) struct PeerGreeting {
    /// Unless odd, as planes greet.
    pub(super) odd: u8,
    pub(super) name: u8,
    pub(super) version: u8,
    pub(super) newest: Option<u8>,
    pub(super) fence_key: u8,
    pub(super) link: u8,
    pub(super) ends: Vec<u8>,
    pub(super) paths: u8,
    pub(super) slower: bool,
    pub(super) files: Vec<PassedFile>,
}
