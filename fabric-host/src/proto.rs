//! What planes say to each other: greetings and openings as MessagePack, operations as words.
//!
//! Who connects says which versions it speaks, and who lets it in chooses the newest that both
//! speak. Structs go as maps of their fields: a field that a plane does not know is skipped, one
//! that is missing has its default. Messages that there are in a later version only are skipped if
//! they come from a plane that speaks one. Records are not: who knows new ones says them to who
//! agreed on a version that has them.

use crate::config::DataPath;
use crate::copy::{CopySlice, all_inside};
use kvferry_engine::core::enum_variants;
use kvferry_trust::{SecretAnswer, SecretConfirmation, SecretOffer, SessionSeal};
use serde::{Deserialize, Serialize};

/// The newest version that is spoken.
pub(crate) const VERSION: u32 = 4;

/// The oldest version that is spoken.
pub(crate) const OLDEST: u32 = 2;

/// The oldest version that is spoken by a local link: the doorbells of older ones are eventfds, which
/// a peer can have block whoever rings them.
const OLDEST_LOCAL: u32 = 4;

/// Whether a local link can be of a version.
///
/// # Errors
/// The version that is needed, and what to do.
pub(crate) fn local_version(version: u32) -> Result<(), String> {
    if version >= OLDEST_LOCAL {
        return Ok(());
    }
    Err(format!(
        "local links need version {OLDEST_LOCAL} of the protocol of host planes, one side speaks \
         {version} at most: install the same version of kvferry for both"
    ))
}

/// The version that planes of version 2 speak, who do not say it in their answer.
const UNSAID: u32 = 2;

/// The versions that a plane speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostVersionRange {
    pub(crate) oldest: u32,
    pub(crate) newest: u32,
}

impl HostVersionRange {
    /// The newest version that both sides speak.
    ///
    /// # Errors
    /// Both ranges, and what to do.
    pub(crate) fn agree(self) -> Result<u32, String> {
        let HostVersionRange { oldest, newest } = self;
        let agreed = newest.min(VERSION);
        if agreed >= oldest.max(OLDEST) {
            return Ok(agreed);
        }
        Err(format!(
            "who connects speaks versions {oldest} to {newest} of the protocol of host planes, this \
             plane {OLDEST} to {VERSION}; install versions of kvferry that have one in common"
        ))
    }

    /// True if messages may come that this plane does not know.
    pub(crate) fn is_later(self) -> bool {
        self.newest > VERSION
    }
}

/// Longest encoded [`HostControlMessage`].
pub(crate) const CONTROL_MAX: usize = 16 << 10;

/// Slices in one part of an operation.
pub(crate) const PART_MAX: usize = 1_024;

/// Words in the longest record.
pub(crate) const RECORD_MAX: usize = 3 + 3 * PART_MAX;

/// Which paths a side takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PathPolicy {
    pub(crate) paths: Vec<DataPath>,
    pub(crate) slower: bool,
}

/// Memory of one side of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostRegionInfo {
    /// Address in its process.
    pub(crate) base: u64,
    pub(crate) len: u64,
    /// A process other than the plane's, and when it started.
    pub(crate) process: Option<(u32, u64)>,
    /// True if its memory file comes along. With a process that is not the plane's, the open file
    /// of the memory of that process does: who may read it has one.
    pub(crate) file: bool,
}

/// Why a session cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionDenial {
    pub(crate) why: String,
    /// It can be over TCP.
    pub(crate) tcp: bool,
}

/// Messages ahead of and beside operations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum HostControlMessage {
    /// First message of who connects. Locally with the segment and the doorbell of its thread.
    Hello {
        /// The oldest version that it speaks; planes of version 2 demand that it is theirs.
        version: u32,
        from: Vec<u8>,
        /// Key and incarnation of who is meant.
        to: (String, u64),
        #[serde(rename = "pass")]
        fence_key: u64,
        /// The number that it gives this link.
        link: u64,
        /// Numbers of links that broke: nothing that came by them lands after the answer.
        ends: Vec<u64>,
        rules: PathPolicy,
        /// The newest version that it speaks; planes of version 2 speak one.
        #[serde(default)]
        newest: Option<u32>,
        /// From who has the fleet's secret: it is answered by [`HostControlMessage::Prove`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        offer: Option<SecretOffer>,
    },
    /// The proof of who was said hello to.
    Prove(SecretAnswer),
    /// The proof of who said hello; all that comes after it in the greeting is sealed.
    Proven(SecretConfirmation),
    /// A welcome or a refusal of who was proven, encoded.
    Sealed { message: Vec<u8>, seal: SessionSeal },
    /// It is let in. Locally with the doorbell and the registration table.
    Welcome {
        rules: PathPolicy,
        /// The version that was chosen, and the newest that this plane speaks; planes of version 2
        /// say neither.
        #[serde(default)]
        version: Option<(u32, u32)>,
    },
    Refuse {
        why: String,
        /// Nothing of the links that the hello says have ended lands any more.
        over: bool,
    },
    /// A session between two regions, maybe with the file of the local one.
    Open { session: u32, region: u32, token: u64, local: HostRegionInfo },
    /// Answer: how writes go, the other region and its place in the registration table, maybe with
    /// its file.
    Opened { session: u32, result: Result<(DataPath, HostRegionInfo, u32), SessionDenial> },
    /// What there is in a later version only; never sent.
    #[serde(skip)]
    Unknown,
}

impl HostControlMessage {
    pub(crate) fn encode(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(self).expect("plain data always encodes")
    }

    /// The region that it speaks of.
    pub(crate) fn side(&self) -> Option<&HostRegionInfo> {
        match self {
            HostControlMessage::Open { local, .. } => Some(local),
            HostControlMessage::Opened { result: Ok((_, side, _)), .. } => Some(side),
            _ => None,
        }
    }

    /// None for what is no message. From a plane of a `later` version what is not known here is
    /// [`HostControlMessage::Unknown`].
    pub(crate) fn decode(bytes: &[u8], later: bool) -> Option<HostControlMessage> {
        let unknown = || later && enum_variants::is_foreign::<HostControlMessage>(bytes);
        match rmp_serde::from_slice(bytes) {
            Ok(message) => Some(message),
            Err(_) => unknown().then_some(HostControlMessage::Unknown),
        }
    }

    /// The chosen version of a welcome.
    ///
    /// # Errors
    /// One that was not offered, which no plane chooses.
    pub(crate) fn chosen(version: Option<(u32, u32)>) -> Result<HostVersionRange, String> {
        let (chosen, newest) = version.unwrap_or((UNSAID, UNSAID));
        if !(OLDEST..=VERSION).contains(&chosen) || newest < chosen {
            return Err(format!(
                "the peer chose version {chosen} of the protocol, and {OLDEST} to {VERSION} were \
                 offered"
            ));
        }
        Ok(HostVersionRange { oldest: chosen, newest })
    }
}

/// How an operation ended, as told by who copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostCopyStatus {
    Done,
    /// Nothing was copied: the session or a region is not there any more.
    Refused,
    /// The source could not be read.
    Source,
    /// The destination could not be written.
    Destination,
}

impl HostCopyStatus {
    pub(crate) fn of(code: u64) -> Option<HostCopyStatus> {
        const ALL: [HostCopyStatus; 4] = [
            HostCopyStatus::Done,
            HostCopyStatus::Refused,
            HostCopyStatus::Source,
            HostCopyStatus::Destination,
        ];
        ALL.into_iter().find(|status| *status as u64 == code)
    }
}

/// A part of an operation, seen from who owns the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostOperationPart {
    pub(crate) session: u32,
    pub(crate) op: u64,
    /// The last part of its operation.
    pub(crate) last: bool,
}

/// What stands in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostRecord {
    /// Slices of a write follow; by TCP, their bytes after that.
    Write(HostOperationPart),
    /// Slices of a read follow; by TCP only.
    Read(HostOperationPart),
    Done {
        op: u64,
        status: HostCopyStatus,
    },
    /// Bytes of a part of a read follow, by TCP only; none unless `Done`.
    Bytes {
        op: u64,
        status: HostCopyStatus,
    },
    Close {
        session: u32,
    },
    /// Nothing of it lands any more.
    Closed {
        session: u32,
    },
    /// A [`HostControlMessage`] of so many bytes follows, in whole words; by TCP only.
    Control {
        bytes: u32,
    },
}

const LAST: u64 = 1 << 32;

impl HostRecord {
    /// Writes the record, without slices, over what is in `words`.
    pub(crate) fn encode(self, words: &mut Vec<u64>) {
        let head = |kind: u64, low: u64| kind << 56 | low;
        let part =
            |part: HostOperationPart| u64::from(part.session) | if part.last { LAST } else { 0 };
        words.clear();
        match self {
            HostRecord::Write(p) => words.extend([head(1, part(p)), p.op]),
            HostRecord::Read(p) => words.extend([head(2, part(p)), p.op]),
            HostRecord::Done { op, status } => words.extend([head(3, status as u64), op]),
            HostRecord::Bytes { op, status } => words.extend([head(4, status as u64), op]),
            HostRecord::Close { session } => words.push(head(5, session.into())),
            HostRecord::Closed { session } => words.push(head(6, session.into())),
            HostRecord::Control { bytes } => words.push(head(7, bytes.into())),
        }
    }

    /// The words of a record without slices.
    pub(crate) fn words(self) -> Vec<u64> {
        let mut words = Vec::new();
        self.encode(&mut words);
        words
    }

    /// The record and the words after it; none for what is no record.
    pub(crate) fn decode(words: &[u64]) -> Option<(HostRecord, &[u64])> {
        let (first, rest) = words.split_first()?;
        let (kind, low) = (first >> 56, *first as u32);
        let second = || rest.split_first();
        let status = || HostCopyStatus::of(low.into());
        let part = |op: &u64| HostOperationPart { session: low, op: *op, last: first & LAST != 0 };
        Some(match kind {
            1 => second().map(|(op, rest)| (HostRecord::Write(part(op)), rest))?,
            2 => second().map(|(op, rest)| (HostRecord::Read(part(op)), rest))?,
            3 => (HostRecord::Done { op: *second()?.0, status: status()? }, second()?.1),
            4 => (HostRecord::Bytes { op: *second()?.0, status: status()? }, second()?.1),
            5 => (HostRecord::Close { session: low }, rest),
            6 => (HostRecord::Closed { session: low }, rest),
            7 => (HostRecord::Control { bytes: low }, rest),
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
fn packing(slices: &[CopySlice]) -> Option<(u64, u32)> {
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
pub(crate) fn push_slices(slices: &[CopySlice], words: &mut Vec<u64>) {
    match packing(slices) {
        Some((len, shift)) => {
            words.push(len << SHIFT_BITS | u64::from(shift));
            let pack = |slice: &CopySlice| slice.from >> shift << u32::BITS | slice.to >> shift;
            words.extend(slices.iter().map(pack));
        }
        None => {
            words.push(PLAIN);
            words.extend(slices.iter().flat_map(|slice| [slice.from, slice.to, slice.len]));
        }
    }
}

/// The slices of a part; false if they are not whole or too many.
pub(crate) fn take_slices(words: &[u64], slices: &mut Vec<CopySlice>) -> bool {
    slices.clear();
    let Some((&form, words)) = words.split_first() else { return false };
    if form == PLAIN {
        let (whole, rest) = words.as_chunks::<3>();
        slices.extend(whole.iter().map(|&[from, to, len]| CopySlice { from, to, len }));
        return rest.is_empty() && slices.len() <= PART_MAX;
    }
    let (len, shift) = (form >> SHIFT_BITS, form as u32 % (1 << SHIFT_BITS));
    if shift > u32::BITS || words.len() > PART_MAX {
        return false;
    }
    let offset = |half: u64| half << shift;
    slices.extend(words.iter().map(|word| CopySlice {
        from: offset(word >> u32::BITS),
        to: offset(u64::from(*word as u32)),
        len,
    }));
    true
}

/// Bytes of slices that are inside regions of these lengths; none if they are not.
pub(crate) fn bytes_inside(slices: &[CopySlice], from: u64, to: u64) -> Option<u64> {
    if !all_inside(slices, from, to) {
        return None;
    }
    slices.iter().try_fold(0_u64, |sum, slice| sum.checked_add(slice.len))
}

#[cfg(all(test, not(feature = "loom")))]
mod samples;

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::de::DeserializeOwned;

    /// Messages of a version, a line each: kind and hex.
    fn fixture(version: u32) -> String {
        let path = format!("{}/tests/fixtures/proto-v{version}.txt", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{path}: {why}"))
    }

    /// The lines of a kind, in hex.
    fn lines<'a>(text: &'a str, kind: &str) -> Vec<&'a str> {
        let line = |line: &'a str| Some(line.split_once(' ').filter(|(of, _)| *of == kind)?.1);
        text.lines().filter_map(line).collect()
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
        (0..hex.len()).step_by(2).map(byte).collect()
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// What is said stays what it is as long as the version does: who changes it on purpose adds a
    /// version, and a file of its own.
    #[test]
    fn messages_are_the_bytes_of_their_version() {
        let mut said = String::new();
        for message in samples::controls() {
            said += &format!("control {}\n", hex(&message.encode()));
        }
        for words in samples::records() {
            let words: String = words.iter().map(|word| format!("{word:016x}")).collect();
            said += &format!("record {words}\n");
        }
        let golden = fixture(VERSION);
        assert!(said == golden, "what is said now:\n{said}");
        for (line, message) in lines(&golden, "control").into_iter().zip(samples::controls()) {
            assert_eq!(HostControlMessage::decode(&bytes(line), false), Some(message));
        }
    }

    /// Recorded with a plane of version 2.
    #[test]
    fn messages_of_version_2_are_understood() {
        let golden = fixture(2);
        let messages = samples::controls().into_iter().map(|message| match message {
            HostControlMessage::Hello {
                version, from, to, fence_key, link, ends, rules, ..
            } => HostControlMessage::Hello {
                version,
                from,
                to,
                fence_key,
                link,
                ends,
                rules,
                newest: None,
                offer: None,
            },
            HostControlMessage::Welcome { rules, .. } => {
                HostControlMessage::Welcome { rules, version: None }
            }
            other => other,
        });
        let recorded = lines(&golden, "control");
        assert_eq!(recorded.len(), messages.len());
        for (line, message) in recorded.into_iter().zip(messages) {
            assert_eq!(HostControlMessage::decode(&bytes(line), false), Some(message));
        }
        assert_eq!(lines(&golden, "record"), lines(&fixture(3), "record"));
    }

    #[test]
    fn the_newest_common_version_is_chosen() {
        let agree = |oldest, newest| HostVersionRange { oldest, newest }.agree();
        assert_eq!(agree(2, 2), Ok(2));
        assert_eq!(agree(1, VERSION), Ok(VERSION));
        assert_eq!(agree(VERSION, VERSION + 5), Ok(VERSION));
        for (oldest, newest) in [(0, 1), (VERSION + 1, VERSION + 2), (9, 1)] {
            let why = agree(oldest, newest).expect_err("none in common");
            let said = format!("versions {oldest} to {newest}");
            assert!(why.contains(&said) && why.contains("install versions"), "{why}");
        }
        let chosen = |chosen, newest| HostControlMessage::chosen(Some((chosen, newest)));
        assert!(HostControlMessage::chosen(None).is_ok_and(|it| it.newest == 2 && !it.is_later()));
        assert!(chosen(VERSION, VERSION + 1).is_ok_and(HostVersionRange::is_later));
        for (version, newest) in [(1, 3), (VERSION + 1, VERSION + 1), (3, 2)] {
            assert!(chosen(version, newest).is_err(), "{version} {newest}");
        }
    }

    /// A message with a field more, and one that there is in a later version only.
    #[test]
    fn what_is_new_in_a_later_version_is_skipped() {
        #[derive(Serialize)]
        enum Later {
            Refuse { why: String, code: u32, over: bool },
            Renamed { why: String },
        }
        let encode = |message: &Later| rmp_serde::to_vec_named(message).expect("plain data");
        let more = encode(&Later::Refuse { why: "no".into(), code: 4, over: true });
        let known = HostControlMessage::Refuse { why: "no".into(), over: true };
        assert_eq!(HostControlMessage::decode(&more, false), Some(known));
        let new = encode(&Later::Renamed { why: "no".into() });
        assert_eq!(HostControlMessage::decode(&new, true), Some(HostControlMessage::Unknown));
        assert_eq!(HostControlMessage::decode(&new, false), None, "nobody of this version says it");
        for damaged in [&[0xff][..], &[], b"GET / HTTP/1.1", &more[..more.len() - 1]] {
            assert_eq!(HostControlMessage::decode(damaged, true), None, "{damaged:?}");
        }
    }

    /// As version 2 reads them: without the fields that are new, and by place or by name.
    #[test]
    fn version_2_understands_what_is_said_to_it() {
        #[derive(Debug, PartialEq, Deserialize)]
        enum Version2 {
            Hello {
                version: u32,
                from: Vec<u8>,
                to: (String, u64),
                #[serde(rename = "pass")]
                fence_key: u64,
                link: u64,
                ends: Vec<u64>,
                rules: PathPolicy,
            },
            Welcome {
                rules: PathPolicy,
            },
            Refuse {
                why: String,
                over: bool,
            },
            Open {
                session: u32,
                region: u32,
                token: u64,
                local: HostRegionInfo,
            },
            Opened {
                session: u32,
                result: Result<(DataPath, HostRegionInfo, u32), SessionDenial>,
            },
        }
        fn read<T: DeserializeOwned>(bytes: &[u8]) -> T {
            rmp_serde::from_slice(bytes).expect("a message of version 2")
        }
        let golden = fixture(2);
        let recorded = lines(&golden, "control");
        for (line, message) in recorded.into_iter().zip(samples::controls()) {
            assert_eq!(read::<Version2>(&message.encode()), read(&bytes(line)));
        }
    }

    fn slices(shift: u32, equal: bool) -> impl Strategy<Value = Vec<CopySlice>> {
        let offset = move || any::<u64>().prop_map(move |at| at >> (at % 64) >> shift << shift);
        let len = if equal { 4_096..4_097_u64 } else { 1..u64::MAX };
        let slice =
            (offset(), offset(), len).prop_map(|(from, to, len)| CopySlice { from, to, len });
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
        let block = |n: u64| CopySlice { from: n * 98_304, to: (9 - n) << 40 >> 3, len: 98_304 };
        let (mut words, blocks) = (Vec::new(), [1, 2, 3].map(block));
        push_slices(&blocks, &mut words);
        assert_eq!(words.len(), 4);
        let longer = CopySlice { len: 98_305, ..blocks[0] };
        words.clear();
        push_slices(&[blocks[0], longer], &mut words);
        assert_eq!(words.len(), 7);
    }
}
