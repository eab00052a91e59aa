//! A driver serves each deadline at its time, whichever input made it earlier.

use actix::{Context, Handler, Message, System};
use kvferry_engine::actors::{Clock, Driver, Input, InputQueue, PlaneAdapter, monotonic_clock};
use kvferry_engine::core::{Gauges, Machine, Nanos, Outbox};
use kvferry_engine::fabric::NextPoll;
use std::task::Waker;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// A time that no test waits for.
const LATE: Nanos = Nanos::from_secs(3_600);

#[derive(Clone, Copy, Debug)]
enum AlarmInput {
    Set(Nanos),
    Tick,
}

/// A machine that tells the time once, at the deadline that it was given last.
struct Alarm(Option<Nanos>);

impl Machine for Alarm {
    type Input = AlarmInput;
    type Effect = Nanos;

    fn handle(&mut self, now: Nanos, input: AlarmInput, out: &mut Outbox<Nanos>) {
        match input {
            AlarmInput::Set(at) => self.0 = Some(at),
            AlarmInput::Tick if self.0.is_some_and(|at| at <= now) => {
                self.0 = None;
                out.push(now);
            }
            AlarmInput::Tick => {}
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        self.0
    }

    fn gauges(&self) -> Gauges {
        Gauges::default()
    }
}

/// A plane that wants to be polled at a time, and tells when it was.
struct AlarmPlane {
    at: Option<Nanos>,
    rang: UnboundedSender<(AlarmOwner, Nanos)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AlarmOwner {
    Machine,
    Plane,
}

impl PlaneAdapter for AlarmPlane {
    type Machine = Alarm;

    fn poll(&mut self, now: Nanos, _: &mut InputQueue<Alarm>) -> NextPoll {
        match self.at {
            Some(at) if at <= now => {
                self.at = None;
                self.rang.send((AlarmOwner::Plane, now)).unwrap();
                NextPoll::External
            }
            Some(at) => NextPoll::At(at),
            None => NextPoll::External,
        }
    }

    fn perform(&mut self, _: &Alarm, now: Nanos, _: &mut InputQueue<Alarm>) {
        self.rang.send((AlarmOwner::Machine, now)).unwrap();
    }

    fn ticks(&self, _: &Alarm, _: Nanos, out: &mut InputQueue<Alarm>) {
        out.push_back(AlarmInput::Tick);
    }

    fn set_waker(&mut self, _: Waker) {}
}

/// The plane is to be polled at this time.
#[derive(Message)]
#[rtype(result = "()")]
struct PollAt(Nanos);

impl Handler<PollAt> for Driver<AlarmPlane> {
    type Result = ();

    fn handle(&mut self, PollAt(at): PollAt, context: &mut Context<Self>) {
        self.with_adapter(context, |plane, _| plane.at = Some(at));
    }
}

/// Sets the alarms in this order, the first ones late and the last one soon, and waits for it.
async fn ring(order: &[AlarmOwner], clock: Clock) {
    let (rang, mut heard): (_, UnboundedReceiver<_>) = unbounded_channel();
    let plane = AlarmPlane { at: None, rang };
    let driver = Driver::start(|_| plane, Alarm(None), None, clock.clone());
    let mut soon = Nanos::ZERO;
    for (index, owner) in order.iter().enumerate() {
        soon = clock() + Nanos::from_ms(5);
        let at = if index + 1 == order.len() { soon } else { LATE };
        match owner {
            AlarmOwner::Machine => driver.send(Input(AlarmInput::Set(at))).await.unwrap(),
            AlarmOwner::Plane => driver.send(PollAt(at)).await.unwrap(),
        }
    }
    let minute = Duration::from_secs(60);
    let first = tokio::time::timeout(minute, heard.recv()).await;
    let (owner, at) = first.unwrap_or_else(|_| panic!("late: {order:?}")).unwrap();
    assert_eq!(Some(&owner), order.last(), "{order:?}");
    assert!(at >= soon, "early: {order:?}");
}

#[test]
fn earlier_deadline_is_served_at_its_time_whoever_has_it() {
    use AlarmOwner::{Machine, Plane};
    let clock = monotonic_clock();
    System::new().block_on(async {
        for order in [
            &[Machine][..],
            &[Plane],
            &[Machine, Machine],
            &[Plane, Plane],
            &[Machine, Plane],
            &[Plane, Machine],
            &[Plane, Machine, Machine],
            &[Machine, Plane, Plane],
        ] {
            ring(order, clock.clone()).await;
        }
    });
}
