//! The actor with a machine and its plane: performs what the machine wants and tells it what
//! happened.

use super::Clock;
use super::mailbox::MailboxMessage;
use crate::core::machine::{Machine, Outbox};
use crate::core::time::Nanos;
use crate::fabric::NextPoll;
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
pub type InputQueue<M> = VecDeque<<M as Machine>::Input>;

/// A machine's place in the world: its planes, and where its other effects go.
pub trait PlaneAdapter: Unpin + 'static {
    /// What is driven: an engine core, a transfer core, a router or a whole instance.
    type Machine: Machine + Unpin + 'static;

    /// False if whoever hands in the inputs hands in the ticks as well.
    const KEEPS_TIME: bool = true;

    /// Collects what the planes report and says when to come again.
    fn poll(&mut self, now: Nanos, out: &mut InputQueue<Self::Machine>) -> NextPoll;

    /// Does one thing; what follows from it at once goes to `out`.
    fn perform(
        &mut self,
        machine: &Self::Machine,
        effect: <Self::Machine as Machine>::Effect,
        out: &mut InputQueue<Self::Machine>,
    );

    /// The ticks of a machine whose deadline has passed.
    fn ticks(&self, machine: &Self::Machine, now: Nanos, out: &mut InputQueue<Self::Machine>);

    /// Who the planes wake.
    fn set_waker(&mut self, waker: Waker);

    /// What planes ring in place of the waker, if they have such a thing, with names for
    /// [`PlaneAdapter::on_doorbell`].
    fn doorbells(&mut self) -> Vec<(usize, BorrowedFd<'_>)> {
        Vec::new()
    }

    /// A doorbell was rung.
    fn on_doorbell(&mut self, _bell: usize) {}

    /// The machine is about to handle an input.
    fn began(&mut self, _now: Nanos, _input: &<Self::Machine as Machine>::Input) {}

    /// What it wanted is done.
    fn ended(&mut self, _machine: &Self::Machine) {}
}

type InputOf<S> = <<S as PlaneAdapter>::Machine as Machine>::Input;
type EffectOf<S> = <<S as PlaneAdapter>::Machine as Machine>::Effect;

/// An input that does not come from the plane: a job, a report, a hook of the engine.
#[derive(Debug)]
pub struct Input<I>(pub I);

impl<I> Message for Input<I> {
    type Result = ();
}

/// Asks for something that the machine of an actor knows; changes nothing.
pub struct Query<M, R>(pub Box<dyn FnOnce(&M) -> R + Send>);

impl<M: 'static, R: 'static> Message for Query<M, R> {
    type Result = R;
}

/// The plane may have news.
#[derive(Message)]
#[rtype(result = "()")]
struct Wakeup;

/// The actor around one machine: hands it inputs and the time, performs its effects, polls its
/// planes.
pub struct Driver<S: PlaneAdapter> {
    adapter: S,
    machine: S::Machine,
    outbox: Outbox<EffectOf<S>>,
    clock: Clock,
    /// Inputs that the machine has not taken yet.
    backlog: VecDeque<InputOf<S>>,
    deadline: Option<Nanos>,
    alarm: Option<(Nanos, SpawnHandle)>,
    woken: Arc<AtomicBool>,
}

impl<S: PlaneAdapter> Driver<S> {
    /// Starts a machine and its driver in the current arbiter; `adapter` is told the driver's
    /// address, and `first` are the machine's first inputs.
    pub fn start(
        adapter: impl FnOnce(Addr<Driver<S>>) -> S,
        machine: S::Machine,
        first: impl IntoIterator<Item = InputOf<S>>,
        clock: Clock,
    ) -> Addr<Driver<S>> {
        Driver::create(|context: &mut Context<Driver<S>>| Driver {
            adapter: adapter(context.address()),
            machine,
            outbox: Outbox::new(),
            clock,
            backlog: first.into_iter().collect(),
            deadline: None,
            alarm: None,
            woken: Arc::new(AtomicBool::new(false)),
        })
    }

    /// Tells the adapter something; what the machine is to hear of it goes to the queue that `tell`
    /// gets.
    pub fn with_adapter<R>(
        &mut self,
        context: &mut Context<Self>,
        tell: impl FnOnce(&mut S, &mut InputQueue<S::Machine>) -> R,
    ) -> R {
        let told = tell(&mut self.adapter, &mut self.backlog);
        self.run(context);
        told
    }

    /// The adapter and the machine, to look at.
    pub fn adapter_and_machine(&self) -> (&S, &S::Machine) {
        (&self.adapter, &self.machine)
    }

    /// Changes the machine and its planes: those that the adapter has afterwards wake the driver.
    pub(super) fn reconfigure<R>(
        &mut self,
        context: &mut Context<Self>,
        equip: impl FnOnce(&mut S, &mut S::Machine, &mut InputQueue<S::Machine>) -> R,
    ) -> R {
        let equipped = equip(&mut self.adapter, &mut self.machine, &mut self.backlog);
        self.listen(context);
        self.run(context);
        equipped
    }

    /// Has the planes wake it.
    fn listen(&mut self, context: &mut Context<Self>) {
        let (driver, woken) = (context.address(), self.woken.clone());
        self.adapter.set_waker(Waker::from(Arc::new(DriverWaker { driver, woken })));
        for (name, bell) in self.adapter.doorbells() {
            context.add_stream(DoorbellStream::of(name, bell));
        }
    }

    fn run(&mut self, context: &mut Context<Self>) {
        let now = (self.clock)();
        self.turns(now);
        let wake = self.adapter.poll(now, &mut self.backlog);
        if S::KEEPS_TIME && self.deadline.is_some_and(|deadline| deadline <= now) {
            self.adapter.ticks(&self.machine, now, &mut self.backlog);
        }
        if !self.backlog.is_empty() {
            self.turns(now);
            // What was performed may have changed what the plane waits for; others come first.
            return context.notify(Wakeup);
        }
        match wake {
            NextPoll::Ready => {
                // A plane that spins may wait for a thread, or a process, that waits for this core.
                std::thread::yield_now();
                context.notify(Wakeup);
            }
            NextPoll::At(at) => self.arm(now, Some(at), context),
            NextPoll::External => self.arm(now, None, context),
        }
    }

    /// Gives the machine its inputs and performs what it wants.
    fn turns(&mut self, now: Nanos) {
        while let Some(input) = self.backlog.pop_front() {
            self.adapter.began(now, &input);
            self.machine.handle(now, input, &mut self.outbox);
            for effect in self.outbox.drain() {
                self.adapter.perform(&self.machine, effect, &mut self.backlog);
            }
            self.adapter.ended(&self.machine);
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

impl<S: PlaneAdapter> Actor for Driver<S> {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        self.listen(context);
        self.run(context);
    }
}

impl<S: PlaneAdapter> StreamHandler<DoorbellEvent> for Driver<S> {
    fn handle(&mut self, DoorbellEvent(bell): DoorbellEvent, context: &mut Self::Context) {
        self.adapter.on_doorbell(bell);
        self.run(context);
    }
}

impl<S: PlaneAdapter> Handler<Input<InputOf<S>>> for Driver<S> {
    type Result = ();

    fn handle(&mut self, give: Input<InputOf<S>>, context: &mut Self::Context) {
        self.backlog.push_back(give.0);
        self.run(context);
    }
}

impl<S: PlaneAdapter, M> Handler<MailboxMessage<M>> for Driver<S>
where
    M: Message<Result = ()>,
    Driver<S>: Handler<M>,
{
    type Result = ();

    fn handle(&mut self, posted: MailboxMessage<M>, context: &mut Self::Context) {
        let MailboxMessage(message, credit) = posted;
        <Self as Handler<M>>::handle(self, message, context);
        drop(credit);
    }
}

impl<S: PlaneAdapter, R: 'static> Handler<Query<S::Machine, R>> for Driver<S> {
    type Result = MessageResult<Query<S::Machine, R>>;

    fn handle(&mut self, look: Query<S::Machine, R>, _: &mut Self::Context) -> Self::Result {
        MessageResult((look.0)(&self.machine))
    }
}

impl<S: PlaneAdapter> Handler<Wakeup> for Driver<S> {
    type Result = ();

    fn handle(&mut self, _: Wakeup, context: &mut Self::Context) {
        self.woken.store(false, Ordering::Release);
        self.run(context);
    }
}

/// The doorbell of this name was rung.
struct DoorbellEvent(usize);

/// The times that a doorbell was rung. It is never read: each ring is an edge.
struct DoorbellStream(usize, AsyncFd<OwnedFd>);

impl DoorbellStream {
    fn of(name: usize, bell: BorrowedFd<'_>) -> DoorbellStream {
        let bell = bell.try_clone_to_owned().expect("a descriptor is left");
        // SAFETY: An `OwnedFd` is the same descriptor, and open, until it is dropped.
        let watched = unsafe { AsyncFd::register_with_interest(bell, Interest::READABLE) };
        DoorbellStream(name, watched.expect("a descriptor can be watched"))
    }
}

impl Stream for DoorbellStream {
    type Item = DoorbellEvent;

    fn poll_next(
        self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
    ) -> Poll<Option<DoorbellEvent>> {
        let DoorbellStream(name, watched) = &*self;
        watched.poll_read_ready(context).map(|ready| {
            ready.ok().map(|mut rung| {
                rung.clear_ready();
                DoorbellEvent(*name)
            })
        })
    }
}

/// Wakes a driver from any thread; rings once until it is heard.
struct DriverWaker<S: PlaneAdapter> {
    driver: Addr<Driver<S>>,
    woken: Arc<AtomicBool>,
}

impl<S: PlaneAdapter> std::task::Wake for DriverWaker<S> {
    fn wake(self: Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.driver.do_send(Wakeup);
        }
    }
}
