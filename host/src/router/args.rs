//! Arguments of `kvferry router`, and the settings that they make.

use super::access::AccessArgs;
use super::identity::RouterIdentity;
use super::response_makers::ResponseMakers;
use super::static_instances::StaticArgs;
use crate::process::CommandError;
use crate::process::logs::LogArgs;
use crate::spans::SpanArgs;
use crate::tls::{LegAuthorities, TlsArgs};
use clap::Args;
use hyper::header::HeaderValue;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::router::{ListedInstances, RetryShare, RouterConfig};
use kvferry_trust::{FleetProof, SecretFile};
use std::path::PathBuf;
use std::time::Duration;

/// The variable with the key that instances get in place of the clients' own.
const KEY: &str = "OPENAI_API_KEY";

/// Arguments of `router`.
#[derive(Clone, Debug, Args)]
pub(crate) struct RouterArgs {
    /// Where clients connect; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    pub(crate) listen: String,
    /// Where operators ask for /workers, /registrations/rejected, /metrics and readiness; port 0 takes a
    /// free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:29000")]
    pub(crate) admin_addr: String,
    /// Where instances register over ZeroMQ (proxy_ip and proxy_ping_port of vLLM's connector);
    /// port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:36367")]
    pub(crate) discovery: String,
    /// Instances that may register, and get prompts and the key of OPENAI_API_KEY, by where they serve
    /// HTTP: HOST, HOST:PORT or ADDRESS/BITS, with commas between. Without it those on loopback if
    /// there is a key, else all
    #[arg(long, value_name = "LIST")]
    pub(crate) instances: Option<String>,
    /// File of the fleet's secret, by which instances sign their registrations;
    /// $KVFERRY_SECRET_FILE by default
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
    /// Take only instances that sign their registrations; the default if there is a secret
    #[arg(long)]
    pub(crate) require_signed: bool,
    /// Also take instances that do not sign their registrations, although there is a secret
    #[arg(long, conflicts_with = "require_signed")]
    pub(crate) allow_unsigned: bool,
    #[command(flatten)]
    pub(crate) statics: StaticArgs,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Ask instances over TLS, and not otherwise: their certificates have to be signed by the
    /// authorities of this PEM file, and to be for the host that they register with. Read anew when it
    /// changes
    #[arg(long, value_name = "FILE")]
    pub(crate) legs_ca: Option<PathBuf>,
    /// Print the start line as JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) logs: LogArgs,
    #[command(flatten)]
    pub(crate) spans: SpanArgs,
    /// A registration that is not repeated for this many seconds is dropped
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub(crate) expiry: f64,
    /// Seconds for which an instance stays that has lost its host, but answers at its HTTP address: its
    /// registration has expired, or the connection of that has ended. Requests that have no other
    /// instance wait for it
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub(crate) host_wait: f64,
    /// Seconds that a new request waits for an instance
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    pub(crate) queue_timeout: f64,
    /// Requests that wait for an instance; more are refused
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub(crate) queue_size: u32,
    /// Requests in flight; more wait
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub(crate) requests_max: u32,
    /// Times that a transfer is sent again after a failure that the client has not seen
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) retries: u32,
    /// Retries in 10 s, in percent of the requests that came in these or are open
    #[arg(long, value_name = "PERCENT", default_value_t = 50)]
    pub(crate) retry_budget: u32,
    /// Retries per second that are made beyond --retry-budget
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) retries_per_second: u32,
    /// Requests open, in flight or waiting, above which new ones are answered 429; 0: no limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) open_max: u32,
    /// Prompts with fewer tokens, by the router's estimate and less the prefix that the decode has, go
    /// to a decode alone; 0: none
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub(crate) direct_below: u32,
    /// Ask each server this often, in seconds, for the load that its /metrics tells, which counts beside
    /// what the router sent it: for several routers of one fleet; 0: do not ask
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub(crate) scrape_load: f64,
    /// Seconds after which instances that do not say which models they serve are asked for them again;
    /// 0: they are not asked, and get requests for any
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub(crate) models_period: f64,
    /// Transfers of one request: prompts times n
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) parts_max: u32,
    /// Seconds for a connection to an instance
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub(crate) connect_timeout: f64,
    /// Seconds until an instance begins to answer
    #[arg(long, value_name = "SECONDS", default_value_t = 1800.0)]
    pub(crate) answer_timeout: f64,
    /// Seconds that a stream may be silent
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    pub(crate) idle_timeout: f64,
    /// Seconds after SIGTERM in which new requests are still served, while readiness says that the
    /// router drains and instances register with the next one; a second signal ends them
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub(crate) shutdown_delay: f64,
    /// Seconds for requests in flight after that
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    pub(crate) drain_timeout: f64,
    /// Longest body of a request, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    pub(crate) body_max: usize,
    /// Bytes of memory for bodies of requests, answers that are not streamed, and incomplete events
    /// of streams; one address gets no more than is left for others
    #[arg(long, alias = "bodies-max", value_name = "BYTES", default_value_t = 1 << 30)]
    pub(crate) memory_max: usize,
    /// Connections of clients; idle ones are closed for new ones
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub(crate) connections_max: u32,
    /// Seconds in which a client has to read some bytes of its answer while bytes wait
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    pub(crate) write_timeout: f64,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
}

/// How long things may take and how large they may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HttpLimits {
    /// Time for a connection to an instance.
    pub(crate) connect: Duration,
    /// Time until an instance begins to answer.
    pub(crate) answer: Duration,
    /// Longest silence of a stream that has begun.
    pub(crate) idle: Duration,
    /// Longest body of a client, in bytes.
    pub(crate) body_bytes: usize,
    /// Time for a client to send its body.
    pub(crate) body: Duration,
    /// Transfers of one request.
    pub(crate) parts: u32,
    /// Tokens per run of prefixes.
    pub(crate) prefix_tokens: u32,
}

/// Settings and state that all of the HTTP side shares.
#[derive(Clone, Debug)]
pub(crate) struct HttpSettings {
    pub(crate) limits: HttpLimits,
    /// Sent to instances in place of what the client sends.
    pub(crate) authorization: Option<HeaderValue>,
    /// The secret by which registrations are signed, and legs sealed, if there is one.
    pub(crate) proof: FleetProof,
    /// Requests that may be open; 0: any number.
    pub(crate) open_max: u32,
    /// Time in which a client has to read some bytes of its answer.
    pub(crate) write_timeout: Duration,
    pub(crate) identity: RouterIdentity,
    pub(crate) makers: ResponseMakers,
}

#[cfg(test)]
impl HttpSettings {
    /// Settings of a router without keys and secrets.
    pub(super) fn open(limits: HttpLimits) -> HttpSettings {
        HttpSettings {
            limits,
            authorization: None,
            proof: FleetProof::open(None).expect("no secret"),
            open_max: 0,
            write_timeout: Duration::from_secs(60),
            identity: RouterIdentity::random(),
            makers: ResponseMakers::default(),
        }
    }
}

/// The time that an option gives.
pub(super) fn seconds(option: &str, seconds: f64) -> Result<Duration, CommandError> {
    let in_range = seconds.is_finite() && (0.001..=1e6).contains(&seconds);
    let wrong =
        || CommandError::Input(format!("{option} {seconds}: give 0.001 to 1000000 seconds"));
    in_range.then(|| Duration::from_secs_f64(seconds)).ok_or_else(wrong)
}

/// What passes between SIGTERM and the end at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShutdownTimes {
    /// New requests are served for this long.
    pub(super) delay: Duration,
    /// Then those in flight have this long.
    pub(super) drain: Duration,
}

fn nanos(option: &str, span: f64) -> Result<Nanos, CommandError> {
    Ok(Nanos(seconds(option, span)?.as_nanos() as u64))
}

impl RouterArgs {
    /// What the router machine is told.
    ///
    /// # Errors
    /// A time that cannot be.
    pub(super) fn config(&self, proof: &FleetProof) -> Result<RouterConfig, CommandError> {
        let instances_max = RouterConfig::default().instances_max;
        let wait_max = nanos("--queue-timeout", self.queue_timeout)?;
        Ok(RouterConfig {
            expiry: nanos("--expiry", self.expiry)?,
            host_wait: nanos("--host-wait", self.host_wait)?,
            wait_max,
            // Where nobody is left to come back, who asked is told soon.
            retry_wait_max: wait_max.min(Nanos::from_ms(600)),
            probe: Some(Nanos::from_ms(500)),
            load_period: match self.scrape_load {
                0.0 => None,
                period => Some(nanos("--scrape-load", period)?),
            },
            models_period: match self.models_period {
                0.0 => None,
                period => Some(nanos("--models-period", period)?),
            },
            release_max: self.release_max()?,
            waiting_max: self.queue_size,
            requests_max: self.requests_max,
            retries_max: self.retries,
            retry_share: Some(RetryShare {
                percent: self.retry_budget,
                per_second: self.retries_per_second,
            }),
            open_max: (self.open_max > 0).then_some(self.open_max),
            direct_below: self.direct_below,
            legs_max: self.parts_max.saturating_mul(2),
            listed: self.listed()?,
            signed_min: if proof.is_demanded() { instances_max / 2 } else { 0 },
            require_signed: self.takes_signed_only(proof),
            ..RouterConfig::default()
        })
    }

    /// How long the router lives on after SIGTERM.
    ///
    /// # Errors
    /// A time that cannot be.
    pub(super) fn shutdown(&self) -> Result<ShutdownTimes, CommandError> {
        let delay = match self.shutdown_delay {
            0.0 => Duration::ZERO,
            delay => seconds("--shutdown-delay", delay)?,
        };
        Ok(ShutdownTimes { delay, drain: seconds("--drain-timeout", self.drain_timeout)? })
    }

    /// Instances are not forgotten before the router ends.
    fn release_max(&self) -> Result<Nanos, CommandError> {
        let ShutdownTimes { delay, drain } = self.shutdown()?;
        Ok(Nanos((delay + drain).as_nanos() as u64))
    }

    /// True if an instance that does not sign its registrations gets no requests.
    pub(super) fn takes_signed_only(&self, proof: &FleetProof) -> bool {
        proof.is_demanded() && !self.allow_unsigned
    }

    /// The secret by which registrations are signed, if there is one.
    ///
    /// # Errors
    /// A file that cannot be used, or none where signatures are required.
    fn proof(&self) -> Result<FleetProof, CommandError> {
        let file = self.secret_file.clone().or_else(SecretFile::of_environment);
        if self.require_signed && file.is_none() {
            let text = "--require-signed: there is no secret to check signatures by; give \
                --secret-file FILE, or KVFERRY_SECRET_FILE, as the instances have it";
            return Err(CommandError::Input(text.into()));
        }
        FleetProof::open(file.as_deref()).map_err(CommandError::Input)
    }

    /// Whose registrations are taken: a key of the operator goes to nobody by mistake.
    fn listed(&self) -> Result<Option<ListedInstances>, CommandError> {
        if let Some(list) = &self.instances {
            let wrong = |why| CommandError::Input(format!("--instances {list}: {why}"));
            return list.parse().map(Some).map_err(wrong);
        }
        let has_key = std::env::var_os(KEY).is_some_and(|key| !key.is_empty());
        if has_key {
            tracing::info!(
                "{KEY} is set and --instances is not: only instances that serve at \
                loopback, or sign their registrations, are taken"
            );
        }
        // A list that was given is the whole list, and this one is not.
        Ok(has_key.then(|| ListedInstances::loopback().or_signed()))
    }

    /// By whom instances are verified, if legs are to be TLS.
    ///
    /// # Errors
    /// A file that cannot be used.
    pub(super) fn leg_authorities(&self) -> Result<Option<LegAuthorities>, CommandError> {
        let opened = self.legs_ca.as_deref().map(LegAuthorities::open).transpose();
        opened.map_err(CommandError::Input)
    }

    /// What the HTTP side is told.
    ///
    /// # Errors
    /// A time or size that cannot be, or a key that no header can have.
    pub(super) fn settings(&self) -> Result<HttpSettings, CommandError> {
        if self.memory_max / 2 < self.body_max {
            let text = format!(
                "--memory-max {}: one address gets half of it at most, which is less than \
                 --body-max {}; give {} or more",
                self.memory_max,
                self.body_max,
                self.body_max.saturating_mul(2)
            );
            return Err(CommandError::Input(text));
        }
        let authorization = match std::env::var(KEY) {
            Ok(key) if !key.is_empty() => {
                let mut value = HeaderValue::try_from(format!("Bearer {key}"))
                    .map_err(|_| CommandError::Input("OPENAI_API_KEY is no header value".into()))?;
                value.set_sensitive(true);
                Some(value)
            }
            _ => None,
        };
        let limits = HttpLimits {
            connect: seconds("--connect-timeout", self.connect_timeout)?,
            answer: seconds("--answer-timeout", self.answer_timeout)?,
            idle: seconds("--idle-timeout", self.idle_timeout)?,
            body_bytes: self.body_max,
            body: Duration::from_secs(60),
            parts: self.parts_max,
            prefix_tokens: RouterConfig::default().prefix_tokens,
        };
        Ok(HttpSettings {
            limits,
            authorization,
            proof: self.proof()?,
            open_max: self.open_max,
            write_timeout: seconds("--write-timeout", self.write_timeout)?,
            identity: RouterIdentity::random(),
            makers: ResponseMakers::default(),
        })
    }
}
