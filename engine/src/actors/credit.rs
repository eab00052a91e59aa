//! Bounded sending: a mailbox that is only reached with a credit in hand.

use super::shell::Turn;
use crate::core::time::Nanos;
use actix::{Actor, Addr, Context, Handler};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The right to one place in a mailbox; dropping it gives the place back.
#[derive(Debug)]
pub struct Credit {
    left: Arc<AtomicUsize>,
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.left.fetch_add(1, Ordering::Release);
    }
}

/// No credit was left; holds what could not be sent.
#[derive(Debug)]
pub struct Full<I>(pub I);

/// The way into the mailbox of a shell. Clones share the credits.
#[derive(Debug)]
pub struct Port<A: Actor> {
    to: Addr<A>,
    left: Arc<AtomicUsize>,
}

impl<A: Actor> Clone for Port<A> {
    fn clone(&self) -> Self {
        Port { to: self.to.clone(), left: self.left.clone() }
    }
}

impl<A: Actor<Context = Context<A>>> Port<A> {
    /// A port with `credits` places, at least 1.
    pub fn new(to: Addr<A>, credits: usize) -> Port<A> {
        Port { to, left: Arc::new(AtomicUsize::new(credits.max(1))) }
    }

    /// Places that are free now.
    pub fn credits(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }

    /// Gives the actor a turn.
    ///
    /// # Errors
    /// [`Full`] with the input when no credit is left; try again when effects were performed.
    pub fn send<I>(&self, now: Nanos, input: I) -> Result<(), Full<I>>
    where
        A: Handler<Turn<I>>,
        I: Send + 'static,
    {
        let minus_one = |left: usize| left.checked_sub(1);
        if self.left.fetch_update(Ordering::Acquire, Ordering::Relaxed, minus_one).is_err() {
            return Err(Full(input));
        }
        self.to.do_send(Turn { now, input, credit: Credit { left: self.left.clone() } });
        Ok(())
    }
}
