//! Frames of the native dialect: what decodes, encodes to what decodes alike.

use kvferry_engine::core::dialect::native::{Frame, decode, encode, kind_of, peek, read};

/// Decodes the bytes, or as much of them as can be told of a frame that cannot be read.
///
/// # Panics
/// If the frame changes on its way through the bytes, or the header does not say what it is.
pub fn run(data: &[u8]) {
    let Ok(frame) = read(data) else { return };
    if let Frame::Data { message, .. } = &frame {
        assert_eq!(peek(data), Some(kind_of(message)));
    }
    let bytes = encode(&frame);
    assert_eq!(peek(&bytes), peek(data), "{frame:?}");
    assert_eq!(decode(&bytes), Ok(frame));
}
