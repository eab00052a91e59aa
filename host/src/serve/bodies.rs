//! Memory of request bodies: one budget for all that are being read or served.

use super::openai::error;
use axum::body::Body;
use http_body_util::BodyExt;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::timeout;

/// Longest body of a request, in bytes.
const BODY_MAX: usize = 64 << 20;

/// Time in which a body has to arrive.
const BODY_TIME: Duration = Duration::from_secs(60);

/// Status and error object for a body that is refused.
type BodyRefusal = (u16, Value);

/// The budget of an instance.
#[derive(Debug)]
pub(super) struct ServeBodies {
    most: usize,
    held: AtomicUsize,
}

/// Bytes of one body, counted until its request has ended.
#[derive(Debug)]
pub(super) struct HeldBody {
    bodies: Arc<ServeBodies>,
    bytes: usize,
}

impl Drop for HeldBody {
    fn drop(&mut self) {
        self.bodies.held.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

impl HeldBody {
    fn add(&mut self, more: usize) -> Result<(), BodyRefusal> {
        let ServeBodies { most, held } = &*self.bodies;
        let room = |held: usize| held.checked_add(more).filter(|held| held <= most);
        match held.fetch_update(Ordering::AcqRel, Ordering::Acquire, room) {
            Ok(_) => {
                self.bytes += more;
                Ok(())
            }
            Err(held) => {
                let why = format!(
                    "overload: bodies of requests take {held} bytes of memory, and at most {most}; try \
                     again, or have the operator raise --bodies-max"
                );
                Err(error(503, "overloaded_error", &why))
            }
        }
    }
}

impl ServeBodies {
    /// A budget of this many bytes.
    pub(super) fn new(most: usize) -> Arc<ServeBodies> {
        Arc::new(ServeBodies { most, held: AtomicUsize::new(0) })
    }

    /// Reads a body; returns it with the guard that counts its bytes.
    ///
    /// # Errors
    /// The body is too long or too slow, breaks off, or there is no memory for it now.
    pub(super) async fn collect(
        self: &Arc<ServeBodies>,
        body: Body,
    ) -> Result<(Vec<u8>, HeldBody), BodyRefusal> {
        timeout(BODY_TIME, self.read(body)).await.unwrap_or_else(|_| {
            let why = format!("the body did not come within {} s", BODY_TIME.as_secs());
            Err(error(408, "invalid_request_error", &why))
        })
    }

    async fn read(
        self: &Arc<ServeBodies>,
        mut body: Body,
    ) -> Result<(Vec<u8>, HeldBody), BodyRefusal> {
        let most = BODY_MAX.min(self.most);
        let (mut bytes, mut held) = (Vec::new(), HeldBody { bodies: self.clone(), bytes: 0 });
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|why| {
                error(400, "invalid_request_error", &format!("the body broke off: {why}"))
            })?;
            let Ok(more) = frame.into_data() else { continue };
            if bytes.len() + more.len() > most {
                let why = format!("the body is longer than {most} bytes: send a shorter prompt");
                return Err(error(413, "invalid_request_error", &why));
            }
            held.add(more.len())?;
            bytes.extend_from_slice(&more);
        }
        Ok((bytes, held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Bytes;
    use futures_util::stream::iter;
    use std::convert::Infallible;

    fn frames(count: usize) -> Body {
        let frame = |_| Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 10]));
        Body::from_stream(iter((0..count).map(frame)))
    }

    #[tokio::test]
    async fn bodies_beyond_the_budget_are_refused_until_one_has_ended() {
        let bodies = ServeBodies::new(100);
        let (bytes, held) = bodies.collect(frames(6)).await.expect("there is room");
        assert_eq!(bytes.len(), 60);
        let (status, why) = bodies.collect(frames(6)).await.expect_err("there is none");
        let why = why["error"]["message"].as_str().expect("a text").to_owned();
        assert!(status == 503 && why.contains("--bodies-max"), "{status} {why}");
        // The memory of the refused body is free again.
        let other = bodies.collect(frames(4)).await.expect("there is room");
        drop((held, other));
        assert_eq!(bodies.held.load(Ordering::Acquire), 0);
        let (status, why) = bodies.collect(frames(11)).await.expect_err("too long");
        assert!(status == 413, "{status} {why}");
        bodies.collect(frames(10)).await.expect("there is room");
    }
}
