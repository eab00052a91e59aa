//! The local socket, from the host's side.

use super::gateway::{Gateway, Joined, Left, Said};
use super::proto::{FRAME_MAX, FromHost, Hello, ToHost};
use actix::Addr;
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::Path;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

/// Messages that a connection may have waiting for it.
const WAITING_MAX: usize = 65_536;

type Frames = Framed<UnixStream, LengthDelimitedCodec>;

/// Listens at a path, also at one that a host left behind which was killed.
///
/// # Errors
/// The path and why it cannot be listened at: another host is there.
pub(super) fn listen(path: &Path) -> Result<UnixListener, String> {
    let left = std::os::unix::net::UnixStream::connect(path);
    if left.is_err_and(|why| why.kind() == io::ErrorKind::ConnectionRefused) {
        // If it cannot be removed, that it is there is told next.
        let _ = std::fs::remove_file(path);
    }
    let listener = UnixListener::bind(path);
    listener.map_err(|why| format!("--socket {}: cannot listen: {why}", path.display()))
}

/// Serves connections for ever.
pub(super) async fn serve(listener: UnixListener, gateway: Addr<Gateway>) {
    let mut client = 0;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                client += 1;
                let (client, gateway) = (client, gateway.clone());
                // It ends with the connection.
                let _detached = actix::spawn(async move {
                    if let Err(why) = connection(stream, client, &gateway).await {
                        tracing::warn!(client, %why, "a connection of the engine ended");
                    }
                    gateway.do_send(Left(client));
                });
            }
            Err(why) => tracing::warn!(%why, "cannot accept a connection"),
        }
    }
}

/// Who owns this process is let in, and nobody else.
fn check(stream: &UnixStream) -> io::Result<()> {
    let (peer, own) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    match peer == own {
        true => Ok(()),
        false => Err(io::Error::other(format!("user {peer} is not {own}, who owns the host"))),
    }
}

async fn connection(stream: UnixStream, client: u64, gateway: &Addr<Gateway>) -> io::Result<()> {
    check(&stream)?;
    let codec = LengthDelimitedCodec::builder().max_frame_length(FRAME_MAX).new_codec();
    let mut frames = Framed::new(stream, codec);
    let Some(first) = frames.next().await else { return Ok(()) };
    let hello: Hello = decode(&first?)?;
    let (out, mut waiting) = mpsc::channel(WAITING_MAX);
    gateway.do_send(Joined { client, hello, out });
    loop {
        tokio::select! {
            message = waiting.recv() => match message {
                Some(message) => send(&mut frames, message, &mut waiting).await?,
                None => return Ok(()),
            },
            frame = frames.next() => match frame {
                Some(frame) => {
                    let message: ToHost = decode(&frame?)?;
                    gateway.do_send(Said { client, message });
                }
                None => return Ok(()),
            },
        }
    }
}

/// Sends a message and all that wait behind it.
async fn send(
    frames: &mut Frames,
    first: FromHost,
    waiting: &mut mpsc::Receiver<FromHost>,
) -> io::Result<()> {
    frames.feed(encode(&first)?).await?;
    while let Ok(next) = waiting.try_recv() {
        frames.feed(encode(&next)?).await?;
    }
    SinkExt::<Bytes>::flush(frames).await
}

fn encode<T: Serialize>(message: &T) -> io::Result<Bytes> {
    rmp_serde::to_vec(message).map(Bytes::from).map_err(io::Error::other)
}

fn decode<T: DeserializeOwned>(frame: &[u8]) -> io::Result<T> {
    rmp_serde::from_slice(frame).map_err(io::Error::other)
}
