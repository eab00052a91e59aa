//! The local socket, from the host's side.

use super::codec::{MessageDecoder, decode, encode};
use super::gateway::{ClientJoined, ClientLeft, ClientMessage};
use super::left_sockets;
use super::ownership;
use super::proto::{ConnectorHello, FRAME_MAX, FromHost};
use actix::{Actor, Context, Handler};
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use kvferry_engine::actors::{MailboxMessage, MailboxSender};
use kvferry_fabric_common::{ACCEPT_PAUSE, AcceptFailures};
use rustix::cmsg_space;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use std::fmt::Display;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

/// Messages that a connection may have waiting for it.
pub(super) const WAITING_MAX: usize = 65_536;

/// A connection, in frames.
pub(super) type SocketFrames = Framed<UnixStream, LengthDelimitedCodec>;

/// A path that is listened at. Who holds the lock beside it has it; the socket is removed with it.
pub(super) struct ListeningSocket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    lock: PathBuf,
    _held: File,
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        // Nobody is to connect to what has ended. The lock goes last.
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_file(&self.lock);
    }
}

/// Listens at a path, also at one that a host left behind which was killed.
///
/// # Errors
/// The path and why it cannot be listened at: another host is there.
pub(super) fn listen(path: &Path) -> Result<ListeningSocket, String> {
    let fail = |why: &dyn Display| format!("socket {}: cannot listen: {why}", path.display());
    ownership::check_folder_of(path).map_err(|why| fail(&why))?;
    let mut lock = path.as_os_str().to_owned();
    lock.push(".lock");
    let lock = PathBuf::from(lock);
    let held = hold(&lock, TRIES).map_err(|why| fail(&why))?;
    let held = held.ok_or_else(|| fail(&"a host is there"))?;
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        // Whoever had it has no lock any more. If it cannot be removed, that is told next.
        let _ = fs::remove_file(path);
    }
    let listener = UnixListener::bind(path).map_err(|why| fail(&why))?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(|why| fail(&why))?;
    left_sockets::remove(path);
    Ok(ListeningSocket { listener, path: path.into(), lock, _held: held })
}

/// Times that a lock is tried for, and the pause between them: a host that starts holds the locks of
/// others for a moment, to see whether these are left behind.
const TRIES: u32 = 10;
const TRY_PAUSE: Duration = Duration::from_millis(20);

/// Takes the lock; none if another process has it each time.
pub(super) fn hold(lock: &Path, mut tries: u32) -> io::Result<Option<File>> {
    loop {
        let not_elsewhere = OFlags::NOFOLLOW.bits() as i32;
        let file = File::options()
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(not_elsewhere)
            .open(lock)?;
        // Whoever opened it can hold it for ever.
        ownership::check_owner(lock, &file.metadata()?)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) if tries > 1 => {
                tries -= 1;
                thread::sleep(TRY_PAUSE);
                continue;
            }
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(why) => return Err(why.into()),
        }
        let own = file.metadata()?;
        // Who had it before may have removed it since it was opened.
        if fs::metadata(lock)
            .is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino()))
        {
            return Ok(Some(file));
        }
    }
}

/// An actor with connections.
pub(super) trait ServesClients:
    Actor<Context = Context<Self>>
    + Handler<ClientJoined>
    + Handler<MailboxMessage<ClientMessage>>
    + Handler<ClientLeft>
{
    /// Whose connections they are, for the log.
    const OF: &'static str;
}

/// Serves connections for ever.
pub(super) async fn serve<A: ServesClients>(listener: &UnixListener, actor: MailboxSender<A>) {
    let mut client = 0;
    let mut failures = AcceptFailures::new(A::OF);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                client += 1;
                let (client, actor) = (client, actor.clone());
                // It ends with the connection.
                let _detached = actix::spawn(async move {
                    match connection(stream, client, &actor).await {
                        Err(why) if has_left(&why) => {
                            tracing::debug!(client, %why, "a process of {} has left", A::OF);
                        }
                        Err(why) => {
                            tracing::warn!(client, %why, "a connection of {} ended", A::OF);
                        }
                        Ok(()) => {}
                    }
                    actor.address().do_send(ClientLeft(client));
                });
            }
            Err(why) if failures.must_wait(&why) => tokio::time::sleep(ACCEPT_PAUSE).await,
            Err(_) => {}
        }
    }
}

/// True if the other process closed its end, even with unread messages, as at a normal stop.
fn has_left(why: &io::Error) -> bool {
    matches!(why.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

/// Frames of at most [`FRAME_MAX`] bytes.
pub(super) fn framed(stream: UnixStream) -> SocketFrames {
    let codec = LengthDelimitedCodec::builder().max_frame_length(FRAME_MAX).new_codec();
    Framed::new(stream, codec)
}

/// Reads no further while the mailbox is full; what was asked then is told to be too much.
async fn connection<A: ServesClients>(
    stream: UnixStream,
    client: u64,
    actor: &MailboxSender<A>,
) -> io::Result<()> {
    ownership::check_peer(&stream)?;
    let mut frames = framed(stream);
    let Some(first) = frames.next().await else { return Ok(()) };
    let hello: ConnectorHello = decode(&first?)?;
    let mut reader = MessageDecoder::new(hello.versions());
    let (out, mut waiting) = mpsc::channel(WAITING_MAX);
    actor.address().do_send(ClientJoined { client, hello, out });
    loop {
        tokio::select! {
            message = waiting.recv() => match message {
                Some(message @ FromHost::Pool { descriptor, .. }) => {
                    send_with(&mut frames, &message, descriptor).await?;
                }
                Some(message) => send(&mut frames, message, &mut waiting).await?,
                None => return Ok(()),
            },
            frame = frames.next() => match frame {
                Some(frame) => {
                    if let Some(message) = reader.read(&frame?)? {
                        let is_refused = !actor.has_room();
                        let place = actor.wait().await;
                        actor.post(ClientMessage { client, message, is_refused }, place);
                    }
                }
                None => return Ok(()),
            },
        }
    }
}

/// Sends a message, and a descriptor of this process with its first byte.
async fn send_with(
    frames: &mut SocketFrames,
    message: &FromHost,
    descriptor: RawFd,
) -> io::Result<()> {
    SinkExt::<Bytes>::flush(frames).await?;
    let (stream, body) = (frames.get_ref(), encode(message)?);
    let bytes = [&(body.len() as u32).to_be_bytes()[..], &body].concat();
    let mut at = 0;
    while at < bytes.len() {
        stream.writable().await?;
        let sent = stream.try_io(Interest::WRITABLE, || {
            // SAFETY: Who has the pool keeps its file open for as long as it has clients.
            let file = [unsafe { BorrowedFd::borrow_raw(descriptor) }];
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
            let mut with = SendAncillaryBuffer::new(&mut space);
            if at == 0 {
                with.push(SendAncillaryMessage::ScmRights(&file));
            }
            let rest = [IoSlice::new(&bytes[at..])];
            Ok(sendmsg(stream, &rest, &mut with, SendFlags::NOSIGNAL)?)
        });
        match sent {
            Ok(sent) => at += sent,
            Err(why) if why.kind() == ErrorKind::WouldBlock => {}
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

/// Sends a message and all that wait behind it.
pub(super) async fn send<T: Serialize>(
    frames: &mut SocketFrames,
    first: T,
    waiting: &mut mpsc::Receiver<T>,
) -> io::Result<()> {
    frames.feed(encode(&first)?).await?;
    while let Ok(next) = waiting.try_recv() {
        frames.feed(encode(&next)?).await?;
    }
    SinkExt::<Bytes>::flush(frames).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn process_that_closes_with_unread_messages_has_left() {
        let (host, process) = UnixStream::pair().expect("a pair");
        let mut host = framed(host);
        host.send(Bytes::from_static(b"unread")).await.expect("there is room");
        drop(process);
        let end = host.next().await.expect("the end is told").expect_err("a reset");
        assert!(has_left(&end), "{end:?}");
        assert!(!has_left(&ErrorKind::InvalidData.into()));
    }
}
