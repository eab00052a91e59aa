//! Bodies made of slices: bodies of several legs share the bytes of the client's body, and answers
//! of the router those of the instances' answers.

use super::memory_budget::MemoryCharge;
use bytes::{Bytes, BytesMut};
use http_body_util::Full;
use hyper::body::{Body, Frame, SizeHint};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Longest slice that is sent at once, so that connections do not copy a long one whole.
const FRAME_MAX: usize = 64 << 10;

/// Slices shorter than this are copied together.
pub(super) const SHARED_MIN: usize = 256;

/// A body made of slices, which are sent one after another.
#[derive(Debug, Default)]
pub(crate) struct BodyChain {
    slices: VecDeque<Bytes>,
    left: usize,
    /// Charges for the bytes; dropped when they are sent.
    _held: Vec<MemoryCharge>,
}

impl BodyChain {
    /// The same body holding these charges until it is sent or dropped.
    pub(crate) fn holding(self, held: Vec<MemoryCharge>) -> BodyChain {
        BodyChain { _held: held, ..self }
    }

    pub(crate) fn into_slices(self) -> impl Iterator<Item = Bytes> {
        self.slices.into_iter()
    }

    #[cfg(test)]
    pub(crate) fn slices(&self) -> impl Iterator<Item = &Bytes> {
        self.slices.iter()
    }

    /// The bytes in one piece; a chain of one slice is not copied.
    pub(crate) fn to_bytes(&self) -> Bytes {
        match self.slices.len() {
            0 => Bytes::new(),
            1 => self.slices[0].clone(),
            _ => {
                let mut all = BytesMut::with_capacity(self.left);
                self.slices.iter().for_each(|slice| all.extend_from_slice(slice));
                all.freeze()
            }
        }
    }
}

impl From<Bytes> for BodyChain {
    fn from(bytes: Bytes) -> BodyChain {
        let left = bytes.len();
        let slices = if left == 0 { VecDeque::new() } else { VecDeque::from([bytes]) };
        BodyChain { slices, left, _held: Vec::new() }
    }
}

impl From<Full<Bytes>> for BodyChain {
    fn from(mut full: Full<Bytes>) -> BodyChain {
        let mut context = Context::from_waker(std::task::Waker::noop());
        match Pin::new(&mut full).poll_frame(&mut context) {
            Poll::Ready(Some(Ok(frame))) => frame.into_data().unwrap_or_default().into(),
            _ => BodyChain::default(),
        }
    }
}

impl Body for BodyChain {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(first) = self.slices.front_mut() else { return Poll::Ready(None) };
        let frame = first.split_to(first.len().min(FRAME_MAX));
        if first.is_empty() {
            self.slices.pop_front();
        }
        self.left -= frame.len();
        Poll::Ready(Some(Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.slices.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left as u64)
    }
}

/// Longest chain that is copied to one slice, which is faster to send than several.
const COPIED_MAX: usize = 1024;

/// Builder of a chain.
#[derive(Debug)]
pub(crate) struct ChainBuilder {
    chain: BodyChain,
    /// Short slices at the end of the chain.
    short: BytesMut,
    /// Slices as long as this, or longer, are shared.
    shared_min: usize,
}

impl Default for ChainBuilder {
    fn default() -> ChainBuilder {
        ChainBuilder { chain: BodyChain::default(), short: BytesMut::new(), shared_min: SHARED_MIN }
    }
}

impl ChainBuilder {
    /// A builder of a chain of at most this many bytes.
    pub(crate) fn with_capacity(bytes: usize) -> ChainBuilder {
        let mut builder = ChainBuilder::default();
        if bytes <= COPIED_MAX {
            builder.short.reserve(bytes);
            builder.shared_min = usize::MAX;
        }
        builder
    }

    /// Appends a slice, shared if it is long.
    pub(crate) fn push(&mut self, slice: Bytes) {
        if slice.len() < self.shared_min {
            return self.short.extend_from_slice(&slice);
        }
        self.flush();
        self.chain.left += slice.len();
        self.chain.slices.push_back(slice);
    }

    /// Appends a part of a text, shared if it is long.
    pub(crate) fn push_part(&mut self, text: &Bytes, part: Range<usize>) {
        if part.len() < self.shared_min {
            return self.short.extend_from_slice(&text[part]);
        }
        self.push(text.slice(part));
    }

    fn flush(&mut self) {
        if !self.short.is_empty() {
            let short = self.short.split().freeze();
            self.chain.left += short.len();
            self.chain.slices.push_back(short);
        }
    }

    pub(crate) fn finish(mut self) -> BodyChain {
        self.flush();
        self.chain
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    #[tokio::test]
    async fn slices_are_sent_in_order_and_long_ones_are_shared() {
        let long = Bytes::from(vec![b'x'; 3 * FRAME_MAX + 1]);
        let mut builder = ChainBuilder::default();
        for slice in [Bytes::from_static(b"{"), long.clone(), Bytes::from_static(b"}")] {
            builder.push(slice);
        }
        let mut chain = builder.finish();
        assert_eq!((chain.left, chain.slices.len()), (long.len() + 2, 3));
        assert_eq!(chain.slices[1].as_ptr(), long.as_ptr());
        let whole = chain.to_bytes();
        let mut sent = Vec::new();
        while let Some(frame) = chain.frame().await {
            let data = frame.expect("no error").into_data().expect("data");
            assert!(!data.is_empty() && data.len() <= FRAME_MAX);
            sent.extend_from_slice(&data);
            assert_eq!(chain.size_hint().exact(), Some((whole.len() - sent.len()) as u64));
        }
        assert!(chain.is_end_stream() && whole == sent);
    }

    #[test]
    fn short_chains_are_one_slice() {
        let text = Bytes::from(vec![b'x'; COPIED_MAX]);
        for (last, slices) in [(COPIED_MAX - 1, 1), (COPIED_MAX, 2)] {
            let mut builder = ChainBuilder::with_capacity(last + 1);
            builder.push_part(&text, 0..last);
            builder.push(Bytes::from_static(b"}"));
            let chain = builder.finish();
            assert_eq!((chain.left, chain.slices.len()), (last + 1, slices));
            assert!(chain.to_bytes().ends_with(b"x}"));
        }
    }

    #[test]
    fn bodies_of_one_slice_are_chains() {
        let full = Full::new(Bytes::from_static(b"ab"));
        assert_eq!(BodyChain::from(full).to_bytes(), "ab");
        assert!(BodyChain::from(Full::<Bytes>::default()).is_end_stream());
        assert!(BodyChain::from(Bytes::new()).is_end_stream());
    }
}
