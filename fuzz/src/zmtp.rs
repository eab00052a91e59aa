//! What peers say at the ZeroMQ ports, before and after they are greeted.

use kvferry_wire::zmtp::{MESSAGE_MAX, ZmtpError, ZmtpEvent, ZmtpReader, ZmtpSocket};

/// Reads the bytes in pieces of as many as the first says. If it is odd, who says them was greeted.
///
/// # Panics
/// If it matters how the bytes come, or more is held than came or one message may have.
pub fn run(data: &[u8]) {
    let Some((how, said)) = data.split_first() else { return };
    let mut said = said.to_vec();
    if !how.is_multiple_of(2) {
        said.splice(..0, ZmtpSocket::Dealer.opening());
    }
    let pieced = heard(&said, usize::from(how / 2).max(1));
    assert_eq!(pieced, heard(&said, said.len().max(1)));
}

fn heard(said: &[u8], pieces: usize) -> Result<Vec<ZmtpEvent>, ZmtpError> {
    let (mut reader, mut out) = (ZmtpReader::new(ZmtpSocket::Router), Vec::new());
    for piece in said.chunks(pieces) {
        reader.read(piece, &mut out)?;
        // What a part costs, and what is set aside for one.
        let most = 64 * said.len() + (64 << 10);
        assert!(reader.held() <= most.min(MESSAGE_MAX), "{} bytes", reader.held());
    }
    Ok(out)
}
