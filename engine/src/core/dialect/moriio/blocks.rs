//! Which blocks of a prefill and a decode belong together: MoRIIO names blocks and no tokens, so
//! the lengths of the lists have to say it.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::blocks::{to_read, to_write};
//! use kvferry_engine::core::ids::BlockId;
//!
//! let (one, three) = ([BlockId(7)], [BlockId(1), BlockId(2), BlockId(3)]);
//! // A decode that has the start of the prompt reads the last blocks; a prefill writes the first.
//! assert_eq!(to_read(&one, &three, 0)?, (&one[..], &three[2..]));
//! assert_eq!(to_write(&one, &three)?, (&one[..], &three[..1]));
//! assert!(to_write(&three, &one).is_err());
//! # Ok::<(), kvferry_engine::core::layout::Mismatch>(())
//! ```

use crate::core::ids::BlockId;
use crate::core::layout::Mismatch;
use crate::core::layout::check::refuse;

/// READ: the blocks of a decode and those of the prefill to read into them, equally many. A decode
/// with fewer has the start of the prompt already; one with up to `spare` more has them for tokens
/// to come, in 0.32.0 `ceil((1 + lookahead) / block_size)`.
///
/// # Errors
/// The decode has more than that.
pub fn to_read<'a>(
    decode: &'a [BlockId],
    prefill: &'a [BlockId],
    spare: usize,
) -> Result<(&'a [BlockId], &'a [BlockId]), Mismatch> {
    let (own, theirs) = (decode.len(), prefill.len());
    if own > theirs.saturating_add(spare) {
        return refuse(format_args!("blocks: decode has {own}, prefill {theirs}, spare {spare}"));
    }
    let both = own.min(theirs);
    Ok((&decode[..both], &prefill[theirs - both..]))
}

/// WRITE: the blocks of a prefill and those of the decode to write to, equally many and both from
/// the start of the prompt.
///
/// # Errors
/// The decode announced fewer than there are.
pub fn to_write<'a>(
    prefill: &'a [BlockId],
    decode: &'a [BlockId],
) -> Result<(&'a [BlockId], &'a [BlockId]), Mismatch> {
    let (own, theirs) = (prefill.len(), decode.len());
    if own > theirs {
        return refuse(format_args!("blocks: prefill has {own}, decode announced {theirs}"));
    }
    Ok((prefill, &decode[..own]))
}
