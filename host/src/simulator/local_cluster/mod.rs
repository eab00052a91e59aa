//! `run --fabric host` and `run --fabric mori`: a scenario on real processes of this machine.
//!
//! The topology is started as `kvferry router` and `kvferry serve` processes on loopback, and the
//! workload goes through the router over HTTP (`client`). Faults of processes are real signals
//! (`faults`); what this fabric cannot inject or check is listed as skipped. Answers carry digests
//! of the KV that decodes got, which are compared with what the prompts' KV is (`check`).

mod check;
mod child;
mod client;
mod faults;
mod logs;

use crate::instance::FabricArg;
use crate::process::{CommandError, name};
use crate::simulator::outcome::RunOutcome;
use crate::simulator::scenario_files::ScenarioSource;
use check::RunChecks;
use child::LocalCluster;
use client::{ClusterClient, RequestOutcome};
use faults::InjectionPlan;
use kvferry_scenarios::{Run, Scenario};
use kvferry_sim::world::RunVerdict;
use logs::ClusterLogs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Longest time for a workload, and before it for the processes to register, where the scenario
/// does not say.
const WITHIN: Duration = Duration::from_secs(120);

/// Longest time after the last answer for all blocks to be free: a lease, and what fences take;
/// more if the workload has more.
const REST: Duration = Duration::from_secs(75);

pub(crate) struct ClusterRun<'a> {
    pub(crate) source: &'a ScenarioSource,
    pub(crate) scenario: &'a Scenario,
    pub(crate) seed: u64,
    pub(crate) trace: Option<&'a Path>,
    /// By what instances move bytes.
    pub(crate) fabric: FabricArg,
    /// Folder for the logs of the processes; without it one that is kept if a request failed or
    /// was recomputed.
    pub(crate) logs: Option<&'a Path>,
}

impl ClusterRun<'_> {
    /// Runs it.
    ///
    /// # Errors
    /// A scenario that processes cannot play, or processes that do not start; with the remedy.
    pub(crate) fn run(&self) -> Result<RunOutcome, CommandError> {
        let ScenarioSource::File(path) = self.source else {
            let text = "the bundled scenario is no file, which the processes could read";
            return Err(CommandError::Input(format!("{text}; name a scenario file")));
        };
        let run = Arc::new(self.scenario.draw(self.seed)?);
        if !run.hosts.is_empty() {
            let text = format!("{}: payloads between hosts are simulated only", path.display());
            return Err(CommandError::Input(format!("{text}; leave out --fabric")));
        }
        let repeat = format!(
            "kvferry run {} --seed {} --fabric {}",
            path.display(),
            self.seed,
            name(&self.fabric)
        );
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut outcome = RunOutcome::empty(&run, repeat);
        let started = Instant::now();
        let (trace, fabric) = (self.trace.map(Path::to_path_buf), self.fabric);
        let files = ClusterFiles { scenario: path.clone(), trace, fabric };
        let logs = ClusterLogs::new(self.logs)?;
        let played = runtime.block_on(play(&run, &files, self.seed, &logs, &mut outcome));
        if let Err(why) = played {
            return Err(logs.explain(why));
        }
        outcome.wall_seconds = started.elapsed().as_secs_f64();
        outcome.judge(run.expect.exit);
        outcome.logs = logs.end(&outcome);
        Ok(outcome)
    }
}

/// What the processes read.
struct ClusterFiles {
    scenario: PathBuf,
    trace: Option<PathBuf>,
    fabric: FabricArg,
}

async fn play(
    run: &Arc<Run>,
    files: &ClusterFiles,
    seed: u64,
    logs: &ClusterLogs,
    outcome: &mut RunOutcome,
) -> Result<(), CommandError> {
    let plan = InjectionPlan::new(run);
    outcome.skipped = plan.skipped.clone();
    let mut fleet = LocalCluster::start(run, files, seed, logs.folder())?;
    let (http, admin) = (fleet.router.ready("http")?, fleet.router.ready("admin")?);
    let client = Arc::new(ClusterClient::new(http, admin));
    let limit = run.expect.within.map_or(WITHIN, |within| {
        // Virtual seconds are no promise about this machine; shorter ones are not held to it.
        Duration::from_nanos(within.0).max(Duration::from_secs(30))
    });
    let registered = client.registered(run.instances.len(), limit).await;
    registered.map_err(CommandError::Input)?;
    let begun = Instant::now();
    let mut requests = JoinSet::new();
    for (index, request) in run.requests.iter().enumerate() {
        let (client, run, request) = (client.clone(), run.clone(), request.clone());
        requests.spawn(async move {
            tokio::time::sleep_until((begun + Duration::from_nanos(request.arrival.0)).into())
                .await;
            (index, client.send(&run, &request).await)
        });
    }
    let injecting = faults::inject(&plan, &mut fleet, &client, begun);
    let mut checks = RunChecks::new(run);
    let mut ended = Vec::new();
    let all = async {
        while let Some(joined) = requests.join_next().await {
            let (index, end) = joined.expect("no task panics or is cancelled");
            ended.push((index, end));
        }
    };
    let in_time = tokio::time::timeout(limit, async {
        // Faults that are still due when all is answered are not waited for.
        tokio::select! {
            () = all => {}
            () = async { injecting.await; std::future::pending::<()>().await } => {}
        }
    });
    let in_time = in_time.await.is_ok();
    let unanswered = requests.len();
    requests.abort_all();
    for (index, end) in ended {
        count(outcome, &checks.request(index, end));
    }
    outcome.unknown = outcome.requests - outcome.finished - outcome.failed;
    if !in_time {
        let text = format!(
            "L1-every-request-ends: {unanswered} requests without an answer after {limit:?}"
        );
        outcome.violate(RunVerdict::Liveness, text);
    }
    fleet.resume_all();
    fleet.gather(&client, outcome).await;
    checks.wait_quiescent(&fleet, &client, outcome, limit.max(REST)).await;
    checks.expectations(outcome);
    Ok(())
}

fn count(outcome: &mut RunOutcome, end: &RequestOutcome) {
    match end {
        RequestOutcome::Finished { .. } => outcome.finished += 1,
        RequestOutcome::Failed(why) => {
            outcome.failed += 1;
            *outcome.failed_causes.entry(why.clone()).or_default() += 1;
        }
        RequestOutcome::Gone => {}
        RequestOutcome::Wrong(text) => {
            outcome.finished += 1;
            outcome.violate(RunVerdict::Correctness, text.clone());
        }
    }
}
