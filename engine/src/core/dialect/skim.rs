//! A look over MessagePack bytes before they are decoded.

/// Checks that `bytes` are exactly one value and that no length in it exceeds what is there, so
/// that decoding allocates in proportion to the bytes and leaves none over.
pub(super) fn skim(bytes: &[u8]) -> Result<(), &'static str> {
    if span(bytes)? == bytes.len() { Ok(()) } else { Err("bytes after the end") }
}

/// Length in bytes of the value at the start of `bytes`, whatever is nested in it. Extension types
/// are not used by any dialect and refused.
pub(super) fn span(bytes: &[u8]) -> Result<usize, &'static str> {
    let mut rest = bytes;
    let mut values: u64 = 1;
    while values > 0 {
        let Some((&marker, after)) = rest.split_first() else {
            return Err("cut short");
        };
        rest = after;
        values -= 1;
        let (skip, more) = match marker {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => (0, 0),
            0x80..=0x8f => (0, 2 * u64::from(marker & 0x0f)),
            0x90..=0x9f => (0, u64::from(marker & 0x0f)),
            0xa0..=0xbf => (u64::from(marker & 0x1f), 0),
            0xcc | 0xd0 => (1, 0),
            0xcd | 0xd1 => (2, 0),
            0xca | 0xce | 0xd2 => (4, 0),
            0xcb | 0xcf | 0xd3 => (8, 0),
            0xc4 | 0xd9 => (length(&mut rest, 1)?, 0),
            0xc5 | 0xda => (length(&mut rest, 2)?, 0),
            0xc6 | 0xdb => (length(&mut rest, 4)?, 0),
            0xdc => (0, length(&mut rest, 2)?),
            0xdd => (0, length(&mut rest, 4)?),
            0xde => (0, 2 * length(&mut rest, 2)?),
            0xdf => (0, 2 * length(&mut rest, 4)?),
            0xc1 | 0xc7..=0xc9 | 0xd4..=0xd8 => return Err("type that the dialect does not use"),
        };
        if skip > rest.len() as u64 {
            return Err("text longer than the frame");
        }
        rest = &rest[skip as usize..];
        values += more;
        if values > rest.len() as u64 {
            return Err(if more > 0 { "list longer than the frame" } else { "cut short" });
        }
    }
    Ok(bytes.len() - rest.len())
}

/// Takes a big-endian length of `width` bytes.
fn length(rest: &mut &[u8], width: usize) -> Result<u64, &'static str> {
    let Some((head, after)) = rest.split_at_checked(width) else {
        return Err("cut short");
    };
    *rest = after;
    Ok(head.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}
