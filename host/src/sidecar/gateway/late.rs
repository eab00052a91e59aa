//! What an engine still waits for before it is served.

use super::{ConnectorClient, ConnectorRole, Gateway, GatewayActor};
use crate::sidecar::spec::{ServingEngine, ServingWorker};
use actix::AsyncContext;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How often an engine that is not served yet says what it waits for.
const EVERY: Duration = Duration::from_secs(10);

/// What of an engine is there.
struct StartState<'a> {
    engine: &'a ServingEngine,
    /// By TP rank.
    workers: &'a BTreeMap<u16, ServingWorker>,
    /// Ranks whose transfer actors have connected, if they are in the workers.
    actors: BTreeSet<u16>,
    /// Ranks whose transfer actors were begun and have not registered their memory.
    registering: &'a BTreeSet<u16>,
}

fn ranks(which: &[u16]) -> String {
    let which: Vec<String> = which.iter().map(u16::to_string).collect();
    format!("{} {}", if which.len() == 1 { "TP rank" } else { "TP ranks" }, which.join(", "))
}

impl StartState<'_> {
    /// How far the ranks are that are late; none if no rank is.
    fn late(&self) -> Option<String> {
        let absent = |there: &dyn Fn(&u16) -> bool| -> Vec<u16> {
            (0..self.engine.tp).filter(|rank| !there(rank)).collect()
        };
        let unknown = absent(&|rank| self.workers.contains_key(rank));
        let idle = match self.engine.runs_in_workers() {
            true => absent(&|rank| self.actors.contains(rank) || unknown.contains(rank)),
            false => Vec::new(),
        };
        let mut said = Vec::new();
        if !unknown.is_empty() {
            said.push(format!("{}: vLLM has told of no KV cache yet", ranks(&unknown)));
        }
        if !idle.is_empty() {
            said.push(format!("{}: no transfer actor has started", ranks(&idle)));
        }
        for rank in self.registering {
            let bytes = |worker: &ServingWorker| worker.regions.iter().map(|it| it.len).sum();
            let bytes: u64 = self.workers.get(rank).map_or(0, bytes);
            let gib = bytes as f64 / f64::from(1 << 30);
            let backend = self.engine.settings.backend();
            said.push(format!("TP rank {rank}: {backend} registers {gib:.1} GiB of memory"));
        }
        (!said.is_empty()).then(|| said.join("; "))
    }
}

/// Watches the start of an engine whose scheduler has come.
pub(super) fn watch_start(limit: Duration, context: &mut actix::Context<GatewayActor>) {
    tell_each(Instant::now(), context);
    context.run_later(limit, move |host, context| {
        host.with_adapter(context, |site, _| site.outlet.tell_late(limit, true));
    });
}

/// Says what is late as long as something is.
fn tell_each(since: Instant, context: &mut actix::Context<GatewayActor>) {
    context.run_later(EVERY, move |host, context| {
        let waited = since.elapsed();
        if host.with_adapter(context, |site, _| site.outlet.tell_late(waited, false)) {
            tell_each(since, context);
        }
    });
}

impl Gateway {
    fn state<'a>(
        &'a self,
        engine: &'a ServingEngine,
        registering: &'a BTreeSet<u16>,
    ) -> StartState<'a> {
        let actor = |client: &ConnectorClient| match client.part {
            ConnectorRole::Transfer(rank) => Some(rank),
            ConnectorRole::Scheduler | ConnectorRole::Worker(_) => None,
        };
        let actors = self.clients.values().filter_map(actor).collect();
        StartState { engine, workers: &self.workers, actors, registering }
    }

    /// True if all its parts are there.
    pub(super) fn is_complete(&self, engine: &ServingEngine) -> bool {
        self.state(engine, &BTreeSet::new()).late().is_none()
    }

    /// What the engine waits for that is not served yet.
    fn late(&self) -> Option<String> {
        let none = BTreeSet::new();
        let registering = match &self.serving {
            None => &none,
            Some(serving) => &serving.pending.as_ref()?.1,
        };
        self.state(self.engine.as_ref()?, registering).late()
    }

    /// Who waits for the start of the engine hears how far it is, and at the end of its time that it
    /// is over. False if nothing is waited for.
    fn tell_late(&mut self, waited: Duration, is_over: bool) -> bool {
        let Some(late) = self.late().filter(|_| !self.is_refused) else { return false };
        let waited = waited.as_secs();
        if is_over {
            self.refuse(&format!(
                "the engine is not complete after {waited} s: {late}; if that is slow and not \
                 stuck, give it more time (start_timeout)"
            ));
            return false;
        }
        tracing::warn!(waited, late, "the engine is not complete");
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sidecar::settings::ConnectorSettings;
    use crate::sidecar::spec::WorkerRegion;
    use kvferry_engine::core::message::Role;

    fn engine(transfer: &str) -> ServingEngine {
        let settings = format!(r#"{{"transfer": "{transfer}"}}"#);
        ServingEngine {
            role: Role::Prefill,
            model: "m".into(),
            tp: 3,
            dp: (0, 1),
            kv_heads: 8,
            latent: false,
            packed: false,
            groups: Vec::new(),
            settings: ConnectorSettings::read(&settings).expect("settings"),
            last_incarnation: None,
        }
    }

    fn worker(rank: u16) -> (u16, ServingWorker) {
        let region = |len| WorkerRegion { base: 0, len, file: None, device: Some(0) };
        let regions = vec![region(1 << 30), region(1 << 29)];
        let tensors = Vec::new();
        (rank, ServingWorker { rank, pid: 1, regions, tensors, attention: None })
    }

    fn late(transfer: &str, known: &[u16], actors: &[u16], registering: &[u16]) -> Option<String> {
        let workers = known.iter().map(|rank| worker(*rank)).collect();
        let (actors, registering) =
            (actors.iter().copied().collect(), registering.iter().copied().collect());
        let engine = &engine(transfer);
        StartState { engine, workers: &workers, actors, registering: &registering }.late()
    }

    #[test]
    fn a_rank_that_is_late_says_how_far_it_is() {
        assert_eq!(late("sidecar", &[0, 1, 2], &[], &[]), None);
        assert_eq!(late("worker", &[0, 1, 2], &[0, 1, 2], &[]), None);
        assert_eq!(
            late("sidecar", &[1], &[], &[]).as_deref(),
            Some("TP ranks 0, 2: vLLM has told of no KV cache yet")
        );
        assert_eq!(
            late("worker", &[0, 1], &[1], &[]).as_deref(),
            Some(
                "TP rank 2: vLLM has told of no KV cache yet; TP rank 0: no transfer actor has \
                 started"
            )
        );
        assert_eq!(
            late("worker", &[0, 1, 2], &[0, 1, 2], &[2]).as_deref(),
            Some("TP rank 2: host registers 1.5 GiB of memory")
        );
    }
}
