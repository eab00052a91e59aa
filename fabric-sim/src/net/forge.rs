//! Frames that no process wrote for the link on which they come.

use kvferry_engine::core::dialect::moriio::handshake;
use kvferry_engine::core::dialect::native::{self, MAGIC};
use kvferry_scenarios::decide::{below, mix};

/// Most bits that are flipped in one frame.
const FLIPS: u64 = 8;

/// Longest garbage, in bytes.
const GARBAGE: u64 = 300;

/// The version byte and the kind byte of a frame. They are not flipped: what a peer of a later
/// version says in good faith is no damage.
const SPARED: std::ops::Range<usize> = MAGIC.len()..MAGIC.len() + 2;

/// Number `n` of the uniform numbers below `bound` that the bits draw.
fn pick(bits: u64, n: u64, bound: usize) -> usize {
    below(mix(bits, n), bound as u64) as usize
}

/// The frame after something has happened to it: it lost its end or its beginning, fell in two, or
/// has other bits. In any case nobody can read it: a frame that means something else than
/// what was written is what the checksums of the transport below are for.
pub(super) fn damaged(bits: u64, mut parts: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let Some(part) = parts.first_mut() else { return parts };
    let at = pick(bits, 1, part.len());
    match pick(bits, 0, 4) {
        0 => part.truncate(at),
        1 => {
            part.drain(..=at.min(part.len().saturating_sub(1)));
        }
        2 => {
            let rest = part.split_off(at);
            parts.insert(1, rest);
        }
        _ => {
            for flip in 0..1 + below(mix(bits, 2), FLIPS) {
                let bit = pick(bits, 3 + flip, part.len() * 8);
                if !SPARED.contains(&(bit / 8)) {
                    part[bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
    }
    if let [part] = &mut parts[..]
        && native::decode(part).is_ok()
    {
        part.pop();
    }
    parts
}

/// A frame that does not belong where it comes: noise, noise that begins like a frame, the question
/// of vLLM's connector, a frame of a version that nobody speaks, or one of those given.
pub(super) fn foreign<'a>(
    bits: u64,
    recorded: impl Iterator<Item = &'a Vec<Vec<u8>>>,
) -> Vec<Vec<u8>> {
    let noise = |from: u64| -> Vec<u8> {
        let length = below(mix(bits, 2), GARBAGE);
        (0..length).map(|n| mix(bits, from + n) as u8).collect()
    };
    let recorded: Vec<_> = recorded.collect();
    match pick(bits, 0, 6) {
        0 => vec![noise(3)],
        1 => vec![[&MAGIC[..], &noise(3)].concat()],
        2 => vec![handshake::REQUEST.to_vec()],
        3 => vec![Vec::new(), noise(3)],
        4 => vec![[&MAGIC[..], &[u8::MAX], &noise(3)].concat()],
        _ if recorded.is_empty() => Vec::new(),
        _ => recorded[pick(bits, 1, recorded.len())].clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_engine::core::dialect::native::{ConnectionHeader, Frame, VERSION};
    use kvferry_engine::core::ids::Incarnation;

    fn frame() -> Vec<u8> {
        let envelope = ConnectionHeader {
            version: VERSION,
            from: Incarnation(1),
            to: Incarnation(2),
            session: 3,
        };
        native::encode(&Frame::Ack { envelope, next: 4 })
    }

    #[test]
    fn nobody_reads_a_damaged_frame() {
        let mut seen = std::collections::BTreeSet::new();
        for bits in 0..2_000 {
            let parts = damaged(mix(7, bits), vec![frame()]);
            let readable = matches!(&parts[..], [part] if native::decode(part).is_ok());
            assert!(!readable, "{parts:?}");
            let flipped = parts[0].len() == frame().len();
            seen.insert((parts.len(), flipped));
            if flipped {
                assert_eq!(parts[0][SPARED], frame()[SPARED]);
            }
        }
        assert_eq!(seen.len(), 3, "cut, in two, flipped: {seen:?}");
    }

    #[test]
    fn foreign_frames_are_of_every_kind() {
        let other = vec![b"recorded".to_vec()];
        let made: Vec<_> =
            (0..200).map(|bits| foreign(mix(9, bits), [&other].into_iter())).collect();
        let some = |is: &dyn Fn(&Vec<Vec<u8>>) -> bool| made.iter().any(is);
        assert!(some(&|parts| *parts == other));
        assert!(some(&|parts| *parts == [handshake::REQUEST.to_vec()]));
        assert!(some(&|parts| parts.len() == 2));
        assert!(some(&|parts| parts[0].starts_with(&MAGIC) && parts[0].get(2) == Some(&255)));
        let readable = |parts: &Vec<Vec<u8>>| parts.len() == 1 && native::decode(&parts[0]).is_ok();
        assert!(!some(&readable));
    }
}
