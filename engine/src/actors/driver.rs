//! The actor beside a shell: performs what the machine wants and tells it what happened.

use super::Clock;
use super::credit::{Full, Port};
use super::shell::{Effects, Look, Shell};
use crate::core::machine::Machine;
use crate::core::time::Nanos;
use crate::fabric::Wake;
use actix::{Actor, Addr, AsyncContext, Context, Handler, Message, ResponseFuture, SpawnHandle};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

/// A machine's place in the world: its plane, and where its other effects go.
pub trait Seat: Unpin + 'static {
    /// The machine.
    type Machine: Machine + Unpin + 'static;

    /// Collects what the plane reports and says when to come again.
    fn poll(&mut self, now: Nanos, out: &mut VecDeque<Input<Self>>) -> Wake;

    /// Does one thing; what follows from it at once goes to `out`.
    fn perform(&mut self, effect: Effect<Self>, out: &mut VecDeque<Input<Self>>);

    /// The machine's tick.
    fn tick(&self) -> Input<Self>;

    /// Who the plane wakes.
    fn set_waker(&mut self, waker: Waker);
}

type Input<S> = <<S as Seat>::Machine as Machine>::Input;
type Effect<S> = <<S as Seat>::Machine as Machine>::Effect;

/// An input that does not come from the plane: a job, a report, a hook of the engine.
#[derive(Debug)]
pub struct Give<I>(pub I);

impl<I> Message for Give<I> {
    type Result = ();
}

/// The plane may have news.
#[derive(Message)]
#[rtype(result = "()")]
struct Wakeup;

/// Drives one shell.
pub struct Driver<S: Seat> {
    seat: S,
    shell: Port<Shell<S::Machine>>,
    clock: Clock,
    /// Inputs that wait for a credit.
    backlog: VecDeque<Input<S>>,
    deadline: Option<Nanos>,
    alarm: Option<(Nanos, SpawnHandle)>,
    woken: Arc<AtomicBool>,
}

impl<S: Seat> Driver<S> {
    /// Starts a machine and its driver in the current arbiter; `first` is its first input.
    pub fn start(
        seat: S,
        machine: S::Machine,
        first: Option<Input<S>>,
        clock: Clock,
        credits: usize,
    ) -> Addr<Driver<S>> {
        Driver::create(|context: &mut Context<Driver<S>>| Driver {
            seat,
            shell: Shell::start(0, machine, context.address().recipient(), credits),
            clock,
            backlog: first.into_iter().collect(),
            deadline: None,
            alarm: None,
            woken: Arc::new(AtomicBool::new(false)),
        })
    }

    fn run(&mut self, context: &mut Context<Self>) {
        let now = (self.clock)();
        let wake = self.seat.poll(now, &mut self.backlog);
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            self.backlog.push_back(self.seat.tick());
        }
        while let Some(input) = self.backlog.pop_front() {
            if let Err(Full(input)) = self.shell.send(now, input) {
                self.backlog.push_front(input);
                break;
            }
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

    /// Keeps one timer, for the earlier of the plane's and the machine's wish.
    fn arm(&mut self, now: Nanos, plane: Option<Nanos>, context: &mut Context<Self>) {
        let Some(at) = [plane, self.deadline].into_iter().flatten().min() else { return };
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
        let wake =
            Waker::from(Arc::new(Bell { driver: context.address(), woken: self.woken.clone() }));
        self.seat.set_waker(wake);
        self.run(context);
    }
}

impl<S: Seat> Handler<Effects<Effect<S>>> for Driver<S> {
    type Result = ();

    fn handle(&mut self, turn: Effects<Effect<S>>, context: &mut Self::Context) {
        for effect in turn.effects {
            self.seat.perform(effect, &mut self.backlog);
        }
        self.deadline = turn.deadline;
        drop(turn.credit);
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

/// Answered by the shell, in turn with the inputs before it; an error only when it is gone.
impl<S: Seat, R: Send + 'static> Handler<Look<S::Machine, R>> for Driver<S> {
    type Result = ResponseFuture<R>;

    fn handle(&mut self, look: Look<S::Machine, R>, _: &mut Self::Context) -> Self::Result {
        let answer = self.shell.ask(look);
        Box::pin(async move { answer.await.expect("a shell lives as long as its driver") })
    }
}

impl<S: Seat> Handler<Wakeup> for Driver<S> {
    type Result = ();

    fn handle(&mut self, _: Wakeup, context: &mut Self::Context) {
        self.woken.store(false, Ordering::Release);
        self.run(context);
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
