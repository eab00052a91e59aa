//! Bytes to and from a client. The connection ends if the client reads nothing for too long.

use super::connections::ClientConnection;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A connection that ends if none of its waiting bytes can be written for a time.
pub(crate) struct ClientStream<S> {
    stream: S,
    limit: Duration,
    own: Arc<ClientConnection>,
    /// Timer that ends the connection; set while bytes wait for the client to read.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> ClientStream<S> {
    pub(crate) fn new(stream: S, limit: Duration, own: Arc<ClientConnection>) -> ClientStream<S> {
        ClientStream { stream, limit, own, stalled: None }
    }

    /// Handles the result of an attempt to write.
    fn written<T>(
        &mut self,
        tried: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if tried.is_ready() {
            if self.stalled.take().is_some() {
                self.own.resume();
            }
            return tried;
        }
        if self.stalled.is_none() {
            self.own.stall();
        }
        let limit = self.limit;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        stalled.as_mut().poll(context).map(|()| {
            let text = format!("the client has read nothing for {limit:?} (--write-timeout)");
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        })
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(tried, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.written(tried, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let tried = Pin::new(&mut self.stream).poll_flush(context);
        self.written(tried, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let tried = Pin::new(&mut self.stream).poll_shutdown(context);
        self.written(tried, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::connections::ConnectionTable;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::Instant;

    const LIMIT: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_nothing_loses_its_connection() {
        let own = ConnectionTable::new(1).admit([127, 0, 0, 1].into()).expect("a place");
        let (stream, mut client) = duplex(10);
        let mut stream = ClientStream::new(stream, LIMIT, own);
        // A client that reads slowly keeps its connection.
        let begin = Instant::now();
        let slowly = async {
            for _ in 0..10 {
                sleep(LIMIT / 2).await;
                client.read_exact(&mut [0; 10]).await.expect("bytes");
            }
        };
        let (written, ()) = tokio::join!(stream.write_all(&[0; 110]), slowly);
        written.expect("all of it");
        assert_eq!(begin.elapsed(), LIMIT * 5);
        let begin = Instant::now();
        let why = stream.write_all(&[0; 20]).await.expect_err("nobody reads");
        assert_eq!((why.kind(), begin.elapsed()), (io::ErrorKind::TimedOut, LIMIT));
        drop(client);
    }
}
