//! Where spans go, and how: an argument, and the variables that OpenTelemetry's SDKs share.

use super::SpanTracer;
use super::export::CollectorClient;
use crate::process::CommandError;
use clap::Args;
use hyper::Uri;
use opentelemetry::{Key, KeyValue};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use prometheus_client::registry::Registry;
use std::env;
use std::ops::RangeInclusive;
use std::time::Duration;

const OPTION: &str = "--otlp-endpoint";

/// What a collector takes spans at, below the URL that is the same for all that it takes.
const TRACES_PATH: &str = "/v1/traces";

/// Spans that wait to be sent, unless a variable says otherwise.
const QUEUE: u32 = 2048;

/// Milliseconds for an answer of the collector, likewise.
const PATIENCE: u32 = 10_000;

/// What numbers that the SDK reads may be.
const COUNTS: RangeInclusive<u32> = 1..=65_536;
const MILLISECONDS: RangeInclusive<u32> = 1..=3_600_000;

/// Samplers, of which those that take a share read `OTEL_TRACES_SAMPLER_ARG`.
const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

/// Where spans go.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SpanArgs {
    /// Send spans of requests, legs and transfers to the OpenTelemetry collector at this URL, by OTLP over
    /// HTTP: http://HOST:4318; $OTEL_EXPORTER_OTLP_ENDPOINT by default, and without either there are none
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
}

/// What a tracer is started with.
pub(super) struct SpanSettings {
    pub(super) exporter: SpanExporter,
    pub(super) resource: Resource,
    /// Spans that may wait to be sent.
    pub(super) queue: usize,
}

impl SpanArgs {
    /// The tracer of a `service` that serves `at` an address, whose counters go into `registry`; none if
    /// no collector is named.
    ///
    /// # Errors
    /// An argument or a variable that cannot be used: which, why and the remedy.
    pub(crate) fn tracer(
        &self,
        service: &'static str,
        at: &str,
        registry: &mut Registry,
    ) -> Result<Option<SpanTracer>, CommandError> {
        let tracer = self.settings(service, at).and_then(|settings| {
            let start = |settings| {
                SpanTracer::start(settings).map_err(|why| {
                    format!(
                        "spans cannot be sent: {why}; raise the limit of open files (ulimit -n)"
                    )
                })
            };
            settings.map(start).transpose()
        });
        let tracer = tracer.map_err(CommandError::Input)?;
        if let Some(tracer) = &tracer {
            tracer.register(registry);
        }
        Ok(tracer)
    }

    fn settings(&self, service: &'static str, at: &str) -> Result<Option<SpanSettings>, String> {
        let Some(endpoint) = self.endpoint()? else { return Ok(None) };
        let queue = number("OTEL_BSP_MAX_QUEUE_SIZE", COUNTS)?.unwrap_or(QUEUE);
        number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", COUNTS)?;
        number("OTEL_BSP_SCHEDULE_DELAY", MILLISECONDS)?;
        let all = number("OTEL_EXPORTER_OTLP_TIMEOUT", MILLISECONDS)?;
        let patience = number("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", MILLISECONDS)?.or(all);
        let patience = Duration::from_millis(patience.unwrap_or(PATIENCE).into());
        check_sampler()?;
        let exporter = SpanExporter::builder().with_http().with_endpoint(&endpoint);
        let exporter = exporter.with_timeout(patience);
        let exporter = exporter.with_http_client(CollectorClient::new(patience));
        let exporter = exporter.with_protocol(Protocol::HttpBinary).build();
        let exporter = exporter.map_err(|why| {
            format!("spans cannot be sent to {endpoint}: {why}; look at the variables OTEL_EXPORTER_OTLP_*")
        })?;
        Ok(Some(SpanSettings { exporter, resource: resource(service, at), queue: queue as usize }))
    }

    /// Where spans are sent; none if nobody says so.
    fn endpoint(&self) -> Result<Option<String>, String> {
        if variable("OTEL_SDK_DISABLED")?.is_some_and(|it| it.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        if let Some(url) = &self.otlp_endpoint {
            return check_url(OPTION, url, TRACES_PATH).map(Some);
        }
        let own = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
        let (name, url, path) = match variable(own)? {
            Some(url) => (own, url, ""),
            None => {
                let all = "OTEL_EXPORTER_OTLP_ENDPOINT";
                let Some(url) = variable(all)? else { return Ok(None) };
                (all, url, TRACES_PATH)
            }
        };
        let url = check_url(name, &url, path)?;
        for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
            match variable(name)?.as_deref() {
                None => {}
                Some("http/protobuf") => break,
                Some(other) => {
                    return Err(format!(
                        "{name} {other}: spans are sent as http/protobuf only; unset it and name the \
                         port at which the collector takes that, mostly 4318, or set \
                         OTEL_SDK_DISABLED=true to send none"
                    ));
                }
            }
        }
        Ok(Some(url))
    }
}

/// A variable that is set and not empty.
fn variable(name: &str) -> Result<Option<String>, String> {
    match env::var(name) {
        Ok(value) if !value.is_empty() => Ok(Some(value)),
        Ok(_) | Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => Err(format!("{name}: it is no UTF-8; unset it")),
    }
}

fn number(name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, String> {
    let Some(text) = variable(name)? else { return Ok(None) };
    let number = text.parse().ok().filter(|number| range.contains(number));
    let wrong =
        || format!("{name} {text}: give a number from {} to {}", range.start(), range.end());
    number.map(Some).ok_or_else(wrong)
}

fn check_sampler() -> Result<(), String> {
    let Some(sampler) = variable("OTEL_TRACES_SAMPLER")? else { return Ok(()) };
    if !SAMPLERS.contains(&&*sampler) {
        return Err(format!("OTEL_TRACES_SAMPLER {sampler}: give one of {}", SAMPLERS.join(", ")));
    }
    let name = "OTEL_TRACES_SAMPLER_ARG";
    match variable(name)? {
        Some(share) if sampler.ends_with("traceidratio") => {
            let is_share = share.parse().is_ok_and(|share: f64| (0.0..=1.0).contains(&share));
            is_share.then_some(()).ok_or_else(|| format!("{name} {share}: give 0 to 1"))
        }
        _ => Ok(()),
    }
}

/// `url` with `path` behind it.
fn check_url(name: &str, url: &str, path: &str) -> Result<String, String> {
    let wrong = |why: &str| {
        format!(
            "{name} {url}: {why}; give the URL at which a collector takes OTLP over HTTP, such as \
             http://127.0.0.1:4318"
        )
    };
    let parsed: Uri = url.parse().map_err(|why| wrong(&format!("it is no URL ({why})")))?;
    match parsed.scheme_str() {
        Some("http") => {}
        Some("https") => {
            return Err(wrong(
                "TLS is not spoken to a collector: have one on this machine or in this network pass \
                 spans on",
            ));
        }
        _ => return Err(wrong("it does not begin with http://")),
    }
    let authority = parsed.authority().ok_or_else(|| wrong("it has no host"))?;
    if authority.as_str().contains('@') {
        return Err(format!(
            "{name}: a user in its URL would not be sent; leave it out, and say who you are in \
             OTEL_EXPORTER_OTLP_HEADERS"
        ));
    }
    if authority.as_str() != authority.host() && authority.port_u16().is_none() {
        return Err(wrong("its port is none"));
    }
    if !path.is_empty() && parsed.query().is_some() {
        return Err(wrong("it has a query, behind which no path can be put"));
    }
    Ok(format!("{}{path}", if path.is_empty() { url } else { url.trim_end_matches('/') }))
}

/// What all spans of the process say of it; what variables say counts more.
fn resource(service: &'static str, at: &str) -> Resource {
    const NAME: Key = Key::from_static_str("service.name");
    const INSTANCE: Key = Key::from_static_str("service.instance.id");
    let given = Resource::builder().build();
    let is_named = given.get(&NAME).is_some_and(|it| !it.as_str().starts_with("unknown_service"));
    let is_numbered = given.get(&INSTANCE).is_some();
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let mut own = Resource::builder().with_attribute(version);
    if !is_named {
        own = own.with_service_name(service);
    }
    if !is_numbered {
        own = own.with_attribute(KeyValue::new(INSTANCE, at.to_owned()));
    }
    own.build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_that_cannot_be_used_is_told_with_the_remedy() {
        let good = |url| check_url("V", url, TRACES_PATH);
        assert_eq!(good("http://h:4318").as_deref(), Ok("http://h:4318/v1/traces"));
        assert_eq!(good("http://[::1]:1/x/").as_deref(), Ok("http://[::1]:1/x/v1/traces"));
        assert_eq!(check_url("V", "http://h/own/", "").as_deref(), Ok("http://h/own/"));
        for (url, why) in [
            ("h:4318", "http://"),
            ("/v1/traces", "http://"),
            ("grpc://h:4317", "http://"),
            ("https://h", "TLS"),
            ("http://", "no URL"),
            ("http://h:port", "port"),
            ("http://h:70000", "port"),
            ("http://h/?a=b", "query"),
        ] {
            let error = good(url).expect_err(url);
            let is_whole =
                error.starts_with(&format!("V {url}: ")) && error.contains("; give the URL");
            assert!(is_whole && error.contains(why), "{error}");
        }
        let error = good("http://me:secret@h").expect_err("a user");
        assert!(
            error.contains("OTEL_EXPORTER_OTLP_HEADERS") && !error.contains("secret"),
            "{error}"
        );
    }
}
