//! Faults on processes: which can be injected, and when.

use super::child::{ClusterProcess, LocalCluster};
use super::client::ClusterClient;
use kvferry_fabric_mori::PortCommand;
use kvferry_scenarios::run::{FaultTrigger, InjectedFault, WorkloadRequest};
use kvferry_scenarios::{FaultKind, Run, TriggerEvent};
use std::time::{Duration, Instant};

/// How often counters are looked at for faults that wait for an event.
const LOOK: Duration = Duration::from_millis(2);

/// What is done to a process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ProcessFault {
    Crash,
    Restart,
    Pause,
    Port(PortCommand),
}

/// What a fault waits for.
#[derive(Clone, Debug)]
enum InjectionTrigger {
    At(Duration),
    /// The value of a counter, at an instance or over all.
    Count {
        metric: &'static str,
        at: Option<String>,
        value: u64,
    },
}

#[derive(Clone, Debug)]
struct Injection {
    fault: ProcessFault,
    target: Option<String>,
    when: InjectionTrigger,
    lasts: Option<Duration>,
    name: &'static str,
}

/// The faults of a run as far as processes can have them.
pub(super) struct InjectionPlan {
    injections: Vec<Injection>,
    /// The others, and why.
    pub(super) skipped: Vec<String>,
}

impl InjectionPlan {
    pub(super) fn new(run: &Run) -> InjectionPlan {
        let mut plan = InjectionPlan { injections: Vec::new(), skipped: Vec::new() };
        for fault in &run.faults {
            match injection(fault) {
                Ok(injection) => plan.injections.push(injection),
                Err(why) => plan.skipped.push(format!("{}: {why}", fault.kind)),
            }
        }
        let stops = |request: &&WorkloadRequest| request.stop;
        if run.requests.iter().any(|request| request.model.is_some()) {
            plan.skipped.push("models that requests name: all of its servers have one".into());
        }
        if run.requests.iter().any(|request| stops(&request)) {
            plan.skipped.push("first tokens that stop: clients cannot ask for them".into());
        }
        plan
    }
}

fn injection(fault: &InjectedFault) -> Result<Injection, &'static str> {
    let deed = match fault.kind {
        FaultKind::Crash => ProcessFault::Crash,
        FaultKind::Restart => ProcessFault::Restart,
        FaultKind::Pause => ProcessFault::Pause,
        FaultKind::PortDown => match PortCommand::of_environment() {
            Some(command) => ProcessFault::Port(command),
            None => {
                return Err("no command takes a port down: set KVFERRY_PORT_COMMAND, such as to \
                            `ip link set eth1`");
            }
        },
        _ => return Err("this fabric cannot inject it"),
    };
    let when = match &fault.trigger {
        FaultTrigger::At(at) => InjectionTrigger::At(Duration::from_nanos(at.0)),
        FaultTrigger::Chance(_) => {
            return Err("a chance at each step cannot be drawn from outside");
        }
        FaultTrigger::On { event, from, nth, .. } => {
            let metric = counter(*event).ok_or("its event cannot be seen from outside")?;
            InjectionTrigger::Count { metric, at: from.clone(), value: u64::from(*nth) }
        }
    };
    let lasts = fault.lasts.map(|span| Duration::from_nanos(span.max.0));
    Ok(Injection {
        fault: deed,
        target: fault.target.clone(),
        when,
        lasts,
        name: fault.kind.name(),
    })
}

/// The counter that grows with an event.
fn counter(event: TriggerEvent) -> Option<&'static str> {
    match event {
        TriggerEvent::OpPosted | TriggerEvent::OpLanded | TriggerEvent::OpCompleted => {
            Some("kvferry_host_operations_total{side=\"initiated\"")
        }
        TriggerEvent::TransferAnnounced
        | TriggerEvent::TransferGranted
        | TriggerEvent::TransferWriting
        | TriggerEvent::TransferReading
        | TriggerEvent::TransferDelivered => Some("kvferry_flows_total"),
        _ => None,
    }
}

/// Injects what is planned, in the order in which it falls due; ends when all of it is over.
pub(super) async fn inject(
    plan: &InjectionPlan,
    fleet: &mut LocalCluster,
    client: &ClusterClient,
    begun: Instant,
) {
    let mut waiting = plan.injections.clone();
    let mut healing: Vec<(Instant, usize, ProcessFault)> = Vec::new();
    while !(waiting.is_empty() && healing.is_empty()) {
        let mut later = Vec::new();
        for injection in waiting {
            if !is_due(&injection.when, fleet, client, begun).await {
                later.push(injection);
                continue;
            }
            for index in targets(&injection, fleet) {
                let process = &mut fleet.instances[index];
                strike(process, &injection.fault);
                tracing::info!(fault = injection.name, target = process.name, "injected");
                if let (Some(lasts), true) =
                    (injection.lasts, injection.fault != ProcessFault::Crash)
                {
                    healing.push((Instant::now() + lasts, index, injection.fault.clone()));
                }
            }
        }
        waiting = later;
        let now = Instant::now();
        healing.retain(|(at, index, deed)| {
            let due = *at <= now;
            if due {
                heal(&mut fleet.instances[*index], deed);
            }
            !due
        });
        tokio::time::sleep(LOOK).await;
    }
}

fn strike(process: &mut ClusterProcess, deed: &ProcessFault) {
    match deed {
        ProcessFault::Pause => process.pause(),
        ProcessFault::Crash | ProcessFault::Restart => process.crash(),
        ProcessFault::Port(command) => process.port_down(command.clone()),
    }
}

fn heal(process: &mut ClusterProcess, deed: &ProcessFault) {
    match deed {
        ProcessFault::Pause => process.resume(),
        ProcessFault::Crash => {}
        ProcessFault::Port(_) => process.port_up(),
        ProcessFault::Restart => {
            if let Err(why) = process.restart() {
                tracing::error!(target = process.name, %why, "does not start again");
            }
        }
    }
}

async fn is_due(
    when: &InjectionTrigger,
    fleet: &LocalCluster,
    client: &ClusterClient,
    begun: Instant,
) -> bool {
    match when {
        InjectionTrigger::At(at) => begun.elapsed() >= *at,
        InjectionTrigger::Count { metric, at, value } => {
            let mut sum = 0;
            let answers = |process: &&ClusterProcess| process.alive && !process.paused;
            for process in fleet.instances.iter().filter(answers) {
                if at.as_ref().is_some_and(|at| !is_named(&process.name, at)) {
                    continue;
                }
                let Ok(http) = process.ready("http") else { continue };
                sum += client.metrics(http).await.map_or(0, |metrics| metrics.sum(metric));
            }
            sum >= *value
        }
    }
}

/// True if an instance has this name, or is a DP rank of the host of this name.
fn is_named(instance: &str, name: &str) -> bool {
    instance == name || instance.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'))
}

/// The processes that a fault strikes: the DP ranks of its target, or the first that lives.
fn targets(injection: &Injection, fleet: &LocalCluster) -> Vec<usize> {
    let lives = |index: &usize| fleet.instances[*index].alive && !fleet.instances[*index].paused;
    let all = (0..fleet.instances.len()).filter(lives);
    match &injection.target {
        Some(name) => all.filter(|index| is_named(&fleet.instances[*index].name, name)).collect(),
        None => all.take(1).collect(),
    }
}
