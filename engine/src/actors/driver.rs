//! The actor with a machine and its plane: performs what the machine wants and tells it what
//! happened.

use super::Clock;
use super::credit::Posted;
use crate::core::machine::{Machine, Outbox};
use crate::core::time::Nanos;
use crate::fabric::Wake;
use actix::{
    Actor, Addr, AsyncContext, Context, Handler, Message, MessageResult, SpawnHandle, StreamHandler,
};
use futures_core::Stream;
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{self, Poll, Waker};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Inputs that a machine has not taken yet, in order.
pub type Inputs<M> = VecDeque<<M as Machine>::Input>;

/// A machine's place in the world: its planes, and where its other effects go.
pub trait Seat: Unpin + 'static {
    /// The machine.
    type Machine: Machine + Unpin + 'static;

    /// False if whoever hands in the inputs hands in the ticks as well.
    const KEEPS_TIME: bool = true;

    /// Collects what the planes report and says when to come again.
    fn poll(&mut self, now: Nanos, out: &mut Inputs<Self::Machine>) -> Wake;

    /// Does one thing; what follows from it at once goes to `out`.
    fn perform(
        &mut self,
        machine: &Self::Machine,
        effect: <Self::Machine as Machine>::Effect,
        out: &mut Inputs<Self::Machine>,
    );

    /// The ticks of a machine whose deadline has passed.
    fn ticks(&self, machine: &Self::Machine, now: Nanos, out: &mut Inputs<Self::Machine>);

    /// Who the planes wake.
    fn set_waker(&mut self, waker: Waker);

    /// What planes ring in place of the waker, if they have such a thing, with names for
    /// [`Seat::rung`].
    fn doorbells(&mut self) -> Vec<(usize, BorrowedFd<'_>)> {
        Vec::new()
    }

    /// A doorbell was rung.
    fn rung(&mut self, _bell: usize) {}

    /// The machine is about to handle an input.
    fn began(&mut self, _now: Nanos, _input: &<Self::Machine as Machine>::Input) {}

    /// What it wanted is done.
    fn ended(&mut self, _machine: &Self::Machine) {}
}

type Input<S> = <<S as Seat>::Machine as Machine>::Input;
type Effect<S> = <<S as Seat>::Machine as Machine>::Effect;

/// An input that does not come from the plane: a job, a report, a hook of the engine.
#[derive(Debug)]
pub struct Give<I>(pub I);

impl<I> Message for Give<I> {
    type Result = ();
}

/// Asks for something that the machine of an actor knows; changes nothing.
pub struct Look<M, R>(pub Box<dyn FnOnce(&M) -> R + Send>);

impl<M: 'static, R: 'static> Message for Look<M, R> {
    type Result = R;
}

/// The plane may have news.
#[derive(Message)]
#[rtype(result = "()")]
struct Wakeup;

/// Drives one machine.
pub struct Driver<S: Seat> {
    seat: S,
    machine: S::Machine,
    outbox: Outbox<Effect<S>>,
    clock: Clock,
    /// Inputs that the machine has not taken yet.
    backlog: VecDeque<Input<S>>,
    deadline: Option<Nanos>,
    alarm: Option<(Nanos, SpawnHandle)>,
    woken: Arc<AtomicBool>,
}

impl<S: Seat> Driver<S> {
    /// Starts a machine and its driver in the current arbiter; `seat` is told the driver's address,
    /// and `first` are the machine's first inputs.
    pub fn start(
        seat: impl FnOnce(Addr<Driver<S>>) -> S,
        machine: S::Machine,
        first: impl IntoIterator<Item = Input<S>>,
        clock: Clock,
    ) -> Addr<Driver<S>> {
        Driver::create(|context: &mut Context<Driver<S>>| Driver {
            seat: seat(context.address()),
            machine,
            outbox: Outbox::new(),
            clock,
            backlog: first.into_iter().collect(),
            deadline: None,
            alarm: None,
            woken: Arc::new(AtomicBool::new(false)),
        })
    }

    /// Tells the seat something; what the machine is to hear of it goes to the queue that `tell`
    /// gets.
    pub fn tell<R>(
        &mut self,
        context: &mut Context<Self>,
        tell: impl FnOnce(&mut S, &mut Inputs<S::Machine>) -> R,
    ) -> R {
        let told = tell(&mut self.seat, &mut self.backlog);
        self.run(context);
        told
    }

    /// The seat and the machine, to look at.
    pub fn look(&self) -> (&S, &S::Machine) {
        (&self.seat, &self.machine)
    }

    /// Changes the machine and its planes: those that the seat has afterwards wake the driver.
    pub fn equip<R>(
        &mut self,
        context: &mut Context<Self>,
        equip: impl FnOnce(&mut S, &mut S::Machine, &mut Inputs<S::Machine>) -> R,
    ) -> R {
        let equipped = equip(&mut self.seat, &mut self.machine, &mut self.backlog);
        self.listen(context);
        self.run(context);
        equipped
    }

    /// Has the planes wake it.
    fn listen(&mut self, context: &mut Context<Self>) {
        let (driver, woken) = (context.address(), self.woken.clone());
        self.seat.set_waker(Waker::from(Arc::new(Bell { driver, woken })));
        for (name, bell) in self.seat.doorbells() {
            context.add_stream(Rings::of(name, bell));
        }
    }

    fn run(&mut self, context: &mut Context<Self>) {
        let now = (self.clock)();
        self.turns(now);
        let wake = self.seat.poll(now, &mut self.backlog);
        if S::KEEPS_TIME && self.deadline.is_some_and(|deadline| deadline <= now) {
            self.seat.ticks(&self.machine, now, &mut self.backlog);
        }
        if !self.backlog.is_empty() {
            self.turns(now);
            // What was performed may have changed what the plane waits for; others come first.
            return context.notify(Wakeup);
        }
        match wake {
            Wake::Ready => {
                // A plane that spins may wait for a thread, or a process, that waits for this core.
                std::thread::yield_now();
                context.notify(Wakeup);
            }
            Wake::At(at) => self.arm(now, Some(at), context),
            Wake::External => self.arm(now, None, context),
        }
    }

    /// Gives the machine its inputs and performs what it wants.
    fn turns(&mut self, now: Nanos) {
        while let Some(input) = self.backlog.pop_front() {
            self.seat.began(now, &input);
            self.machine.handle(now, input, &mut self.outbox);
            for effect in self.outbox.drain() {
                self.seat.perform(&self.machine, effect, &mut self.backlog);
            }
            self.seat.ended(&self.machine);
        }
        self.deadline = self.machine.deadline();
    }

    /// Keeps one timer, for the earlier of the plane's and the machine's wish.
    fn arm(&mut self, now: Nanos, plane: Option<Nanos>, context: &mut Context<Self>) {
        let own = self.deadline.filter(|_| S::KEEPS_TIME);
        let Some(at) = [plane, own].into_iter().flatten().min() else { return };
        if let Some((armed, handle)) = self.alarm {
            if armed <= at && armed > now {
                return;
            }
            context.cancel_future(handle);
        }
        let wait = Duration::from_nanos((at - now).0);
        let handle = context.run_later(wait, |driver, context| {
            driver.alarm = None;
            driver.run(context);
        });
        self.alarm = Some((at, handle));
    }
}

impl<S: Seat> Actor for Driver<S> {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        self.listen(context);
        self.run(context);
    }
}

impl<S: Seat> StreamHandler<Rung> for Driver<S> {
    fn handle(&mut self, Rung(bell): Rung, context: &mut Self::Context) {
        self.seat.rung(bell);
        self.run(context);
    }
}

impl<S: Seat> Handler<Give<Input<S>>> for Driver<S> {
    type Result = ();

    fn handle(&mut self, give: Give<Input<S>>, context: &mut Self::Context) {
        self.backlog.push_back(give.0);
        self.run(context);
    }
}

impl<S: Seat, M> Handler<Posted<M>> for Driver<S>
where
    M: Message<Result = ()>,
    Driver<S>: Handler<M>,
{
    type Result = ();

    fn handle(&mut self, posted: Posted<M>, context: &mut Self::Context) {
        let (message, credit) = posted.open();
        <Self as Handler<M>>::handle(self, message, context);
        drop(credit);
    }
}

impl<S: Seat, R: 'static> Handler<Look<S::Machine, R>> for Driver<S> {
    type Result = MessageResult<Look<S::Machine, R>>;

    fn handle(&mut self, look: Look<S::Machine, R>, _: &mut Self::Context) -> Self::Result {
        MessageResult((look.0)(&self.machine))
    }
}

impl<S: Seat> Handler<Wakeup> for Driver<S> {
    type Result = ();

    fn handle(&mut self, _: Wakeup, context: &mut Self::Context) {
        self.woken.store(false, Ordering::Release);
        self.run(context);
    }
}

/// The doorbell of this name was rung.
struct Rung(usize);

/// The times that a doorbell was rung. It is never read: each ring is an edge.
struct Rings(usize, AsyncFd<OwnedFd>);

impl Rings {
    fn of(name: usize, bell: BorrowedFd<'_>) -> Rings {
        let bell = bell.try_clone_to_owned().expect("a descriptor is left");
        // SAFETY: An `OwnedFd` is the same descriptor, and open, until it is dropped.
        let watched = unsafe { AsyncFd::register_with_interest(bell, Interest::READABLE) };
        Rings(name, watched.expect("a descriptor can be watched"))
    }
}

impl Stream for Rings {
    type Item = Rung;

    fn poll_next(self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<Option<Rung>> {
        let Rings(name, watched) = &*self;
        watched.poll_read_ready(context).map(|ready| {
            ready.ok().map(|mut rung| {
                rung.clear_ready();
                Rung(*name)
            })
        })
    }
}

/// Wakes a driver from any thread; rings once until it is heard.
struct Bell<S: Seat> {
    driver: Addr<Driver<S>>,
    woken: Arc<AtomicBool>,
}

impl<S: Seat> std::task::Wake for Bell<S> {
    fn wake(self: Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.driver.do_send(Wakeup);
        }
    }
}
