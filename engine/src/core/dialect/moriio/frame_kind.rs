//! What a frame is, from its ends alone.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::frame_kind::{MoriioFrameKind, form};
//! use kvferry_engine::core::dialect::moriio::handshake::REQUEST;
//! use kvferry_engine::core::dialect::moriio::notify::write_done;
//!
//! assert!(matches!(form(&[REQUEST]), Some(MoriioFrameKind::Call)));
//! assert!(matches!(form(&[write_done(&"t".into())]), Some(MoriioFrameKind::Written)));
//! assert!(form(&[REQUEST, REQUEST]).is_none());
//! ```

use super::handshake::REQUEST;
use super::notify::starts_map;

/// What a frame looks like. No promise that it can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MoriioFrameKind {
    /// The question of a handshake.
    Call,
    Metadata,
    Memory,
    /// A notice to a prefill: where to write.
    Blocks,
    /// A notice to a prefill: the blocks are free.
    Release,
    /// A notice to a decode: all is written.
    Written,
    /// A notice to a decode: nothing will be written.
    Failed,
    /// Text, as of those who send completions without anything around them.
    Text,
}

/// How the first reply goes on behind the byte that begins the map.
const METADATA: &[u8] = b"\xa9engine_id";

/// The same of notices.
const RELEASE: &[u8] = b"\xa4type\xa7release";
const WRITTEN: &[u8] = b"\xa4type\xaawrite_done";
const FAILED: &[u8] = b"\xa4type\xacwrite_failed";

/// How the notice with blocks ends.
const BLOCKS: &[u8] = b"\xa4type\xadremote_blocks";

/// What the parts look like; none if like nothing that is sent. Takes the same time however long
/// they are, and finds keys only where 0.32.0 and the encoders here put them.
pub fn form<P: AsRef<[u8]>>(parts: &[P]) -> Option<MoriioFrameKind> {
    match parts {
        [part] => alone(part.as_ref()),
        [empty, part] if empty.as_ref().is_empty() => {
            let (first, rest) = part.as_ref().split_first()?;
            let is_first = rest.starts_with(METADATA);
            starts_map(*first).then_some(if is_first {
                MoriioFrameKind::Metadata
            } else {
                MoriioFrameKind::Memory
            })
        }
        _ => None,
    }
}

fn alone(part: &[u8]) -> Option<MoriioFrameKind> {
    let (first, rest) = part.split_first()?;
    if part == REQUEST {
        Some(MoriioFrameKind::Call)
    } else if first.is_ascii_graphic() {
        Some(MoriioFrameKind::Text)
    } else if !starts_map(*first) {
        None
    } else if rest.starts_with(RELEASE) {
        Some(MoriioFrameKind::Release)
    } else if rest.starts_with(WRITTEN) {
        Some(MoriioFrameKind::Written)
    } else if rest.starts_with(FAILED) {
        Some(MoriioFrameKind::Failed)
    } else {
        rest.ends_with(BLOCKS).then_some(MoriioFrameKind::Blocks)
    }
}
