//! Connections to a name, which may have several addresses.

use std::io::{self, ErrorKind};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Connects to the first of the addresses of HOST:PORT that takes connections; each may take so
/// long.
///
/// # Errors
/// The name has no address, or why the last one takes none.
pub(crate) fn dial(address: &str, patience: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for one in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&one, patience) {
            Ok(stream) => return Ok(stream),
            Err(why) => last = why,
        }
    }
    Err(last)
}
