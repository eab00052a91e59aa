//! The actor between the connectors of one engine and the protocol.

use super::proto::{FromHost, Hello, ToHost, VERSION, Who};
use super::spec::{Engine, Worker};
use super::start;
use crate::cores::{Cores, Outlets, log_violation};
use crate::legs::Own;
use actix::{Actor, Addr, AsyncContext, Context, Handler, Message};
use engine::actors::{Clock, Foreign, RankReport};
use engine::core::decode::DecodeEffect;
use engine::core::ids::RequestId;
use engine::core::message::{DecodeHook, PrefillAnswer, PrefillHook};
use engine::core::prefill::PrefillEffect;
use engine::core::router::LegBody;
use fabric_host::HostConfig;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;

/// A connection said hello; what is for it goes into `out`.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Joined {
    pub(super) client: u64,
    pub(super) hello: Hello,
    pub(super) out: Sender<FromHost>,
}

/// A connection said something else.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Said {
    pub(super) client: u64,
    pub(super) message: ToHost,
}

/// A connection ended.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Left(pub(super) u64);

/// A host that no engine came to after this long has no engine.
const ALONE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Scheduler,
    Worker(u16),
}

struct Client {
    part: Part,
    out: Sender<FromHost>,
}

/// The engine is complete and served.
struct Serving {
    cores: Cores,
    own: Own,
}

/// The actor.
pub(super) struct Gateway {
    clock: Clock,
    /// What the operator says of the data planes.
    fabric: HostConfig,
    clients: BTreeMap<u64, Client>,
    engine: Option<Box<Engine>>,
    workers: BTreeMap<u16, Worker>,
    serving: Option<Serving>,
    /// The engine was told that it is not served.
    is_refused: bool,
    /// Told when a part of the engine has left.
    over: Option<oneshot::Sender<()>>,
}

impl Gateway {
    pub(super) fn start(
        clock: Clock,
        fabric: HostConfig,
        over: oneshot::Sender<()>,
    ) -> Addr<Gateway> {
        let gateway = Gateway {
            clock,
            fabric,
            clients: BTreeMap::new(),
            engine: None,
            workers: BTreeMap::new(),
            serving: None,
            is_refused: false,
            over: Some(over),
        };
        gateway.start()
    }

    /// A part that does not take what it is told is cut off: it would miss an answer.
    fn tell(&mut self, to: impl Fn(Part) -> bool, message: &FromHost) {
        let told = |client: &Client| client.out.try_send(message.clone()).is_ok();
        self.clients.retain(|_, client| !to(client.part) || told(client));
    }

    fn refuse(&mut self, why: &str) {
        tracing::error!(why, "the engine is not served");
        self.tell(|_| true, &FromHost::Refused { why: why.into() });
        self.clients.clear();
        self.is_refused = true;
    }

    /// Takes up a part of the engine.
    fn join(&mut self, client: u64, hello: Hello, out: Sender<FromHost>) -> Result<(), String> {
        if hello.version != VERSION {
            let other = hello.version;
            return Err(format!("the connector speaks version {other} and the host {VERSION}"));
        }
        let part = match &hello.who {
            Who::Scheduler(_) => Part::Scheduler,
            Who::Worker(worker) => Part::Worker(worker.rank),
        };
        if self.clients.values().any(|known| known.part == part) || self.serving.is_some() {
            return Err(format!(
                "another {part:?} is served by this host; give each engine its own"
            ));
        }
        self.clients.insert(client, Client { part, out });
        match hello.who {
            Who::Scheduler(engine) => self.engine = Some(engine),
            Who::Worker(worker) => _ = self.workers.insert(worker.rank, *worker),
        }
        Ok(())
    }

    /// Starts the protocol when all parts of the engine are there.
    fn serve(&mut self, context: &mut Context<Self>) -> Result<(), String> {
        let Some(engine) = &self.engine else { return Ok(()) };
        if self.workers.len() < usize::from(engine.tp) {
            return Ok(());
        }
        let own = context.address();
        let outlets = Outlets {
            prefill: own.clone().recipient(),
            decode: own.clone().recipient(),
            reports: own.recipient(),
        };
        let planes = (&self.workers, &self.fabric);
        let (cores, own, lease) = start::start(engine, planes, outlets, &self.clock)?;
        let ready = FromHost::Ready { address: own.address.clone(), lease_ms: lease.0 / 1_000_000 };
        self.serving = Some(Serving { cores, own });
        self.tell(|_| true, &ready);
        Ok(())
    }

    /// What is left of an engine whose parts are not all there is not served, and comes again.
    fn end(&mut self) {
        if let Some(over) = self.over.take() {
            // Who waits for it may have ended before.
            let _ = over.send(());
        }
    }

    fn scheduler(&mut self, message: &FromHost) {
        self.tell(|part| part == Part::Scheduler, message);
    }

    fn arrived(&mut self, request: RequestId, params: &str, tokens: u32) {
        let Some(Serving { cores, own }) = &self.serving else { return };
        let json: Result<Box<RawValue>, _> = serde_json::from_str(params);
        let leg = json.map_err(|why| why.to_string());
        match leg.and_then(|json| own.leg(&request, Some(&json), 1)) {
            Ok(LegBody::Prefill { transfer: leg, .. }) => {
                cores.prefill(PrefillHook::Arrived { request, leg, tokens });
            }
            Ok(LegBody::Decode { transfer: leg, .. }) => {
                cores.decode(DecodeHook::Arrived { request, leg, tokens });
            }
            Err(why) => {
                tracing::warn!(request = &*request.0, why, "kv_transfer_params cannot be used");
                self.scheduler(&FromHost::Unusable { request, why });
            }
        }
    }

    fn said(&mut self, part: Part, message: ToHost) {
        let Some(Serving { cores, .. }) = &self.serving else { return };
        match message {
            ToHost::Arrived { request, params, tokens } => self.arrived(request, &params, tokens),
            ToHost::Prefill(hook) => cores.prefill(hook),
            ToHost::Decode(hook) => cores.decode(hook),
            ToHost::Layers { step, layers } => {
                if let Part::Worker(rank) = part {
                    cores.layers(Some(rank), step, layers);
                }
            }
        }
    }
}

impl Actor for Gateway {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.run_later(ALONE, |own, _| {
            if own.clients.is_empty() {
                own.end();
            }
        });
    }
}

impl Handler<Joined> for Gateway {
    type Result = ();

    fn handle(&mut self, Joined { client, hello, out }: Joined, context: &mut Self::Context) {
        if let Err(why) = self.join(client, hello, out.clone()) {
            tracing::warn!(why, "refused a connection");
            // It is dropped with the sender.
            let _ = out.try_send(FromHost::Refused { why });
        } else if let Err(why) = self.serve(context) {
            self.refuse(&why);
        }
    }
}

impl Handler<Said> for Gateway {
    type Result = ();

    fn handle(&mut self, Said { client, message }: Said, _: &mut Self::Context) {
        if let Some(part) = self.clients.get(&client).map(|client| client.part) {
            self.said(part, message);
        }
    }
}

impl Handler<Left> for Gateway {
    type Result = ();

    fn handle(&mut self, Left(client): Left, _: &mut Self::Context) {
        let was_part = self.clients.remove(&client).is_some();
        let is_left = was_part && (self.serving.is_some() || self.clients.is_empty());
        if is_left || self.is_refused {
            self.end();
        }
    }
}

impl Handler<RankReport> for Gateway {
    type Result = ();

    fn handle(&mut self, RankReport { rank, report }: RankReport, _: &mut Self::Context) {
        if let Some(serving) = &self.serving {
            serving.cores.report(rank, report);
        }
    }
}

impl Handler<Foreign<PrefillEffect>> for Gateway {
    type Result = ();

    fn handle(&mut self, Foreign(effect): Foreign<PrefillEffect>, _: &mut Self::Context) {
        let Some(Serving { cores, .. }) = &self.serving else { return };
        match effect {
            PrefillEffect::Job(job) => cores.job(&job),
            PrefillEffect::Answer(answer) => {
                let to_workers = matches!(answer, PrefillAnswer::PreemptionSafe { .. });
                let answer = FromHost::Prefill(answer);
                self.tell(|part| (part != Part::Scheduler) == to_workers, &answer);
            }
            PrefillEffect::Violation(violation) => log_violation(&violation),
            PrefillEffect::Control(_) => {}
        }
    }
}

impl Handler<Foreign<DecodeEffect>> for Gateway {
    type Result = ();

    fn handle(&mut self, Foreign(effect): Foreign<DecodeEffect>, _: &mut Self::Context) {
        let Some(Serving { cores, .. }) = &self.serving else { return };
        match effect {
            DecodeEffect::Job(job) => cores.job(&job),
            DecodeEffect::Answer(answer) => self.scheduler(&FromHost::Decode(answer)),
            DecodeEffect::Violation(violation) => log_violation(&violation),
            DecodeEffect::Control(_) => {}
        }
    }
}
