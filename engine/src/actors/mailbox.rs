//! Bounded sending: a mailbox that is only reached with a credit in hand.

use actix::dev::ToEnvelope;
use actix::{Actor, Addr, Context, Handler, Message};
use std::fmt;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The right to one place in a mailbox; dropping it gives the place back.
#[derive(Debug)]
pub struct MailboxPermit {
    _place: OwnedSemaphorePermit,
}

impl MailboxPermit {
    fn of(place: OwnedSemaphorePermit) -> MailboxPermit {
        MailboxPermit { _place: place }
    }
}

/// A message and the place it takes until it is handled.
#[derive(Debug)]
pub struct MailboxMessage<M>(pub(super) M, pub(super) MailboxPermit);

impl<M> Message for MailboxMessage<M> {
    type Result = ();
}

/// The way into the mailbox of an actor. Clones share the places.
///
/// One place of four is kept for what cannot be refused ([`MailboxSender::wait`]): news of what was
/// begun, of which nothing may be lost. What begins something new asks [`MailboxSender::has_room`]
/// and is refused as `Overload`, or takes a place by [`MailboxSender::reserve`] or not at all.
pub struct MailboxSender<A: Actor> {
    to: Addr<A>,
    places: Arc<Semaphore>,
    kept: usize,
}

impl<A: Actor> fmt::Debug for MailboxSender<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MailboxSender").field("free", &self.places.available_permits()).finish()
    }
}

impl<A: Actor> Clone for MailboxSender<A> {
    fn clone(&self) -> Self {
        MailboxSender { to: self.to.clone(), places: self.places.clone(), kept: self.kept }
    }
}

impl<A: Actor<Context = Context<A>>> MailboxSender<A> {
    /// A port with `places` places, at least 2.
    pub fn new(to: Addr<A>, places: usize) -> MailboxSender<A> {
        let places = places.max(2);
        MailboxSender { to, places: Arc::new(Semaphore::new(places)), kept: places.div_ceil(4) }
    }

    /// The actor behind it, for what is bounded by other means.
    pub fn address(&self) -> &Addr<A> {
        &self.to
    }

    /// Places that are free now.
    pub fn free(&self) -> usize {
        self.places.available_permits()
    }

    /// False if something new is to be refused.
    pub fn has_room(&self) -> bool {
        self.free() > self.kept
    }

    /// A place for something new, if there is room.
    pub fn reserve(&self) -> Option<MailboxPermit> {
        let permit = self.has_room().then(|| self.places.clone().try_acquire_owned().ok());
        permit.flatten().map(MailboxPermit::of)
    }

    /// A place for what cannot be refused, when there is one.
    pub async fn wait(&self) -> MailboxPermit {
        let permit = self.places.clone().acquire_owned().await;
        MailboxPermit::of(permit.expect("the places are never closed"))
    }

    /// A place for what cannot be refused, if there is one.
    pub fn try_wait(&self) -> Option<MailboxPermit> {
        self.places.clone().try_acquire_owned().ok().map(MailboxPermit::of)
    }

    /// Sends a message; it gives its place back when it is handled.
    pub fn post<M>(&self, message: M, credit: MailboxPermit)
    where
        A: Handler<MailboxMessage<M>>,
        A::Context: ToEnvelope<A, MailboxMessage<M>>,
        M: Send + 'static,
    {
        self.to.do_send(MailboxMessage(message, credit));
    }
}
