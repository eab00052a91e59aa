//! Instances that the operator names, beside those that register: in arguments, in a file, and in
//! DNS, as a headless service of Kubernetes lists its pods.
//!
//! What all of these name is told to the core again and again, as registrations are repeated: it
//! probes who is new, and drains who is named no more.

use super::args::seconds;
use super::http_adapter::RouterAddr;
use crate::process::{CommandError, address, lock};
use clap::Args;
use hyper::http::uri::Authority;
use kvferry_engine::actors::Input;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::{RouterInput, StaticInstance};
use kvferry_engine::fabric::Endpoint;
use kvferry_trust::ReloadedFiles;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

/// Longest file of instances, in bytes.
const FILE_MAX: u64 = 1 << 20;

/// Instances that a file or a name may have.
const INSTANCES_MAX: usize = 512;

/// Instances are named to the core as often at least.
const REPEATED: Duration = Duration::from_secs(1);

/// Time for an answer of DNS, with all tries. After it the source has an error; the look-up goes on.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns the addresses of a name, A and AAAA, with the port that is passed. Blocks until DNS has
/// answered.
type Resolver = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Instances that do not register.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct StaticArgs {
    /// A prefill that does not register, e.g. http://prefill-0:8000. May be repeated, as --decode,
    /// --prefill-dns and --decode-dns may
    #[arg(long, value_name = "URL")]
    prefill: Vec<String>,
    /// A decode that does not register
    #[arg(long, value_name = "URL")]
    decode: Vec<String>,
    /// File with such instances, in TOML, or in JSON if its name ends so: lists `prefill` and `decode`
    /// of URLs. Read anew when it changes
    #[arg(long, value_name = "FILE")]
    static_instances: Option<PathBuf>,
    /// A name that DNS has all prefills at, e.g. a headless service of Kubernetes
    #[arg(long, value_name = "NAME:PORT")]
    prefill_dns: Vec<String>,
    /// The same for decodes
    #[arg(long, value_name = "NAME:PORT")]
    decode_dns: Vec<String>,
    /// Seconds after which a name is looked up again
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    dns_period: f64,
    /// Seconds for which instances of a name stay that is not answered any more
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    dns_keep: f64,
}

/// Where the operator names instances.
enum SourceKind {
    Arguments,
    File(ReloadedFiles<Vec<StaticInstance>, 1>),
    Dns { role: Role, name: String, port: u16 },
}

/// What a source names now.
struct SourceState {
    instances: Arc<Vec<StaticInstance>>,
    /// Why it could not be asked; then this is what it named before.
    error: Option<String>,
    /// When it was asked last with success.
    asked: Option<Instant>,
}

struct StaticSource {
    /// The options that name it.
    label: String,
    kind: SourceKind,
    state: Mutex<SourceState>,
}

/// A source as operators see it.
#[derive(Serialize)]
pub(crate) struct ListedSource {
    pub(crate) source: String,
    pub(crate) instances: usize,
    /// Why it names nothing new.
    pub(crate) error: Option<String>,
    /// Since it was asked last with success; none if it never was.
    age_seconds: Option<f64>,
}

impl StaticArgs {
    /// What they name. With `is_tls` all instances are asked over TLS, else none.
    ///
    /// # Errors
    /// A URL, name, file or time that cannot be used.
    pub(super) fn sources(&self, is_tls: bool) -> Result<StaticSources, CommandError> {
        let named =
            [("--prefill", Role::Prefill, &self.prefill), ("--decode", Role::Decode, &self.decode)];
        let mut sources = Vec::new();
        for (option, role, urls) in named {
            for url in urls {
                let http = endpoint(url, is_tls)
                    .map_err(|why| CommandError::Input(format!("{option} {url}: {why}")))?;
                let named = vec![StaticInstance { role, http }];
                sources.push(StaticSource::new(
                    format!("{option} {url}"),
                    SourceKind::Arguments,
                    Arc::new(named),
                ));
            }
        }
        if let Some(path) = &self.static_instances {
            let label = format!("--static-instances {}", path.display());
            let read = if is_tls { read::<true> } else { read::<false> };
            let wrong = |why| CommandError::Input(format!("{label}: {why}"));
            let file = ReloadedFiles::open([path.clone()], read).map_err(wrong)?;
            let instances = file.value(|_| {});
            sources.push(StaticSource::new(label, SourceKind::File(file), instances));
        }
        let names = [
            ("--prefill-dns", Role::Prefill, &self.prefill_dns),
            ("--decode-dns", Role::Decode, &self.decode_dns),
        ];
        for (option, role, names) in names {
            for text in names {
                let label = format!("{option} {text}");
                let (name, port) = dns_name(text).ok_or_else(|| {
                    CommandError::Input(format!(
                        "{label}: give NAME:PORT, e.g. prefill.default.svc:8000"
                    ))
                })?;
                let kind = SourceKind::Dns { role, name, port };
                sources.push(StaticSource::new(label, kind, Arc::default()));
            }
        }
        let period = seconds("--dns-period", self.dns_period)?;
        let keep = seconds("--dns-keep", self.dns_keep)?;
        let resolver = Arc::new(system_addresses);
        Ok(StaticSources { sources, resolver, period, patience: PATIENCE, keep })
    }
}

/// All that names instances.
pub(crate) struct StaticSources {
    sources: Vec<StaticSource>,
    resolver: Arc<Resolver>,
    /// Time between two look-ups of a name.
    period: Duration,
    /// Time after which a look-up without an answer is an error of its source.
    patience: Duration,
    /// Instances of a name that is not answered stay so long.
    keep: Duration,
}

impl StaticSource {
    fn new(label: String, kind: SourceKind, instances: Arc<Vec<StaticInstance>>) -> StaticSource {
        let is_dns = matches!(kind, SourceKind::Dns { .. });
        let asked = (!is_dns).then(Instant::now);
        let state = SourceState { instances, error: None, asked };
        StaticSource { label, kind, state: Mutex::new(state) }
    }

    fn answered(&self, instances: Arc<Vec<StaticInstance>>) {
        let mut state = lock(&self.state);
        if state.error.take().is_some() {
            tracing::info!(source = self.label, "instances are named again");
        }
        (state.instances, state.asked) = (instances, Some(Instant::now()));
    }

    fn failed(&self, why: &str) {
        let mut state = lock(&self.state);
        if state.error.as_deref() != Some(why) {
            tracing::warn!(source = self.label, why, "instances that it named before stay");
            state.error = Some(why.to_owned());
        }
    }

    /// What it names now.
    fn instances(&self, keep: Duration) -> Arc<Vec<StaticInstance>> {
        if let SourceKind::File(file) = &self.kind {
            let mut broken = None;
            let named = file.value(|why| broken = Some(why.to_owned()));
            let is_new = !Arc::ptr_eq(&named, &lock(&self.state).instances);
            match broken {
                Some(why) => self.failed(&why),
                None if is_new => self.answered(named),
                None => {}
            }
        }
        let mut state = lock(&self.state);
        let is_old = state.asked.is_none_or(|asked| asked.elapsed() > keep);
        let is_dns = matches!(self.kind, SourceKind::Dns { .. });
        if is_dns && is_old && !state.instances.is_empty() {
            tracing::warn!(source = self.label, ?keep, "instances are given up, as it names none");
            state.instances = Arc::default();
        }
        state.instances.clone()
    }
}

impl StaticSources {
    /// Tells the core what is named, until the process ends. `expiry` is how long it believes it.
    pub(super) fn start(self, core: RouterAddr, expiry: Duration) -> Arc<StaticSources> {
        let all = Arc::new(self);
        for at in 0..all.sources.len() {
            if matches!(all.sources[at].kind, SourceKind::Dns { .. }) {
                let all = all.clone();
                let _to_the_end = actix::spawn(async move { all.look_up(at).await });
            }
        }
        if !all.sources.is_empty() {
            let told = all.clone();
            let period = REPEATED.min(expiry / 4);
            let _to_the_end = actix::spawn(async move {
                loop {
                    let named = told.sources.iter().map(|source| source.instances(told.keep));
                    let named = named.flat_map(|named| named.to_vec()).collect();
                    core.do_send(Input(RouterInput::Static(named)));
                    sleep(period).await;
                }
            });
        }
        all
    }

    /// Looks a name up again and again.
    async fn look_up(&self, at: usize) {
        let source = &self.sources[at];
        let SourceKind::Dns { role, name, port } = &source.kind else { return };
        loop {
            match self.addresses(source, name, *port).await {
                Err(why) => source.failed(&why),
                Ok(found) if found.is_empty() => source.failed("DNS has no address for it"),
                Ok(found) => {
                    let named = found.iter().take(INSTANCES_MAX);
                    let named = named.map(|ip| StaticInstance {
                        role: *role,
                        http: Endpoint::from(&*SocketAddr::new(*ip, *port).to_string()),
                    });
                    source.answered(Arc::new(named.collect()));
                    if found.len() > INSTANCES_MAX {
                        source.failed(&format!(
                            "DNS has {} addresses for it, of which {INSTANCES_MAX} are taken",
                            found.len()
                        ));
                    }
                }
            }
            sleep(self.period).await;
        }
    }

    /// Addresses that a name has now, each once and always in the same order. They are looked up on a
    /// thread of its own: the system's resolver blocks, and the end of the process waits for no such thread.
    /// A look-up that takes longer than the patience is an error of the source, and is waited for all the
    /// same, so that a name has one thread at most.
    async fn addresses(
        &self,
        source: &StaticSource,
        name: &str,
        port: u16,
    ) -> Result<Vec<IpAddr>, String> {
        let (tell, mut told) = oneshot::channel();
        let (resolver, name) = (self.resolver.clone(), name.to_owned());
        let thread = thread::Builder::new().name("dns".into());
        let thread = thread.spawn(move || tell.send(resolver(&name, port)));
        thread.map_err(|why| format!("no thread to look it up: {why}"))?;
        let found = match timeout(self.patience, &mut told).await {
            Ok(found) => found,
            Err(_) => {
                source.failed(&format!("DNS does not answer within {:?}", self.patience));
                told.await
            }
        };
        let found = found.map_err(|_| "the look-up panicked".to_owned())?;
        let found = found.map_err(|why| why.to_string())?;
        let mut addresses: Vec<IpAddr> = found.iter().map(SocketAddr::ip).collect();
        addresses.sort_unstable();
        addresses.dedup();
        Ok(addresses)
    }

    /// The sources as operators see them.
    pub(super) fn list(&self) -> Vec<ListedSource> {
        let list = self.sources.iter().map(|source| {
            let state = lock(&source.state);
            ListedSource {
                source: source.label.clone(),
                instances: state.instances.len(),
                error: state.error.clone(),
                age_seconds: state.asked.map(|asked| asked.elapsed().as_secs_f64()),
            }
        });
        list.collect()
    }
}

/// Asks the system's resolver, as `getaddrinfo` does: `/etc/hosts`, and DNS by `/etc/resolv.conf`.
fn system_addresses(name: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((name, port).to_socket_addrs()?.collect())
}

/// Where an instance serves HTTP, by its URL.
fn endpoint(url: &str, is_tls: bool) -> Result<Endpoint, String> {
    let form = "give http://HOST:PORT, or https:// with --legs-ca; IPv6 in brackets";
    let (scheme, rest) = match url.split_once("://") {
        Some((scheme, rest)) => (Some(scheme), rest),
        None => (None, url),
    };
    let default = match (scheme, is_tls) {
        (None, _) => None,
        (Some("http"), false) => Some(80),
        (Some("https"), true) => Some(443),
        (Some("https"), false) => return Err("TLS to instances needs --legs-ca FILE".into()),
        (Some("http"), true) => return Err("with --legs-ca all instances are https://".into()),
        (Some(scheme), _) => return Err(format!("scheme {scheme}: {form}")),
    };
    let authority: Authority =
        rest.trim_end_matches('/').parse().map_err(|why| format!("{why}: {form}"))?;
    if authority.as_str().contains('@') {
        return Err(format!("it names a user: {form}"));
    }
    // A port above 65535 is none to it.
    let told = authority.as_str().len() > authority.host().len();
    let port = authority.port_u16().or(default.filter(|_| !told)).filter(|port| *port > 0);
    let port = port.ok_or_else(|| format!("no port: {form}"))?;
    Ok(Endpoint::from(&*format!("{}:{port}", authority.host())))
}

/// Name and port of `NAME:PORT`.
fn dns_name(text: &str) -> Option<(String, u16)> {
    let (name, port) = address::host_and_port(text).ok()?;
    (address::is_name(name) && port > 0).then(|| (name.to_owned(), port))
}

/// A file of instances.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InstancesFile {
    #[serde(default)]
    prefill: Vec<String>,
    #[serde(default)]
    decode: Vec<String>,
}

fn read<const TLS: bool>([path]: &[PathBuf; 1]) -> Result<Vec<StaticInstance>, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|why| format!("it cannot be read: {why}"))?;
    let taken = file.take(FILE_MAX + 1).read_to_string(&mut text);
    if taken.map_err(|why| format!("it cannot be read as text: {why}"))? as u64 > FILE_MAX {
        return Err(format!("it is longer than {FILE_MAX} bytes"));
    }
    let form = "lists `prefill` and `decode` of URLs are wanted";
    let is_json = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
    let file: InstancesFile = match is_json {
        true => serde_json::from_str(&text).map_err(|why| format!("{why}; {form}"))?,
        false => toml::from_str(&text).map_err(|why| format!("{}; {form}", why.message()))?,
    };
    let named = [(Role::Prefill, file.prefill), (Role::Decode, file.decode)];
    let mut instances = Vec::new();
    for (role, urls) in named {
        for url in urls {
            let http = endpoint(&url, TLS).map_err(|why| format!("{url}: {why}"))?;
            instances.push(StaticInstance { role, http });
        }
    }
    match instances.len() > INSTANCES_MAX {
        true => Err(format!("it has {} instances, more than {INSTANCES_MAX}", instances.len())),
        false => Ok(instances),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    #[test]
    fn urls_become_endpoints_or_one_clear_error() {
        for (url, is_tls, http) in [
            ("http://p-0:8000", false, "p-0:8000"),
            ("http://p-0", false, "p-0:80"),
            ("https://p-0/", true, "p-0:443"),
            ("p-0:8000", true, "p-0:8000"),
            ("http://[::1]:8000/", false, "[::1]:8000"),
        ] {
            assert_eq!(endpoint(url, is_tls).map(|it| it.to_string()).as_deref(), Ok(http));
        }
        for (url, is_tls, says) in [
            ("", false, "give http://"),
            ("p-0", false, "no port"),
            ("http://p-0:0", false, "no port"),
            ("http://p-0:99999", false, "no port"),
            ("http://p-0:8000/v1", false, "give http://"),
            ("http://me@p-0:8000", false, "a user"),
            ("ftp://p-0:8000", false, "scheme ftp"),
            ("https://p-0:8000", false, "--legs-ca FILE"),
            ("http://p-0:8000", true, "https://"),
        ] {
            let why = endpoint(url, is_tls).expect_err(url);
            assert!(why.contains(says), "{url}: {why}");
        }
    }

    /// A resolver that a test answers: each look-up is told to it and waits for its answer.
    struct PlayedResolver {
        asked: UnboundedReceiver<()>,
        answers: mpsc::Sender<io::Result<Vec<SocketAddr>>>,
    }

    impl PlayedResolver {
        /// Sources with one name, which is looked up again and again.
        fn start(patience: Duration, keep: Duration) -> (PlayedResolver, Arc<StaticSources>) {
            let (tell, asked) = unbounded_channel();
            let (answers, answered) = mpsc::channel();
            let answered = Mutex::new(answered);
            let args = StaticArgs {
                decode_dns: vec!["decode.ns.svc.:8000".into()],
                dns_period: 0.001,
                dns_keep: 300.0,
                ..StaticArgs::default()
            };
            let mut sources = args.sources(false).expect("they can be used");
            sources.resolver = Arc::new(move |name, port| {
                assert_eq!((name, port), ("decode.ns.svc.", 8000));
                let _gone = tell.send(());
                lock(&answered).recv().unwrap_or_else(|why| Err(io::Error::other(why)))
            });
            (sources.patience, sources.keep) = (patience, keep);
            let sources = Arc::new(sources);
            let looks = sources.clone();
            tokio::spawn(async move { looks.look_up(0).await });
            (PlayedResolver { asked, answers }, sources)
        }

        /// Answers the look-up under way, and waits for the next one.
        async fn answer(&mut self, answer: io::Result<&[&str]>) {
            let found = answer.map(|found| {
                let addresses = found.iter().map(|it| it.parse::<IpAddr>().expect("an address"));
                addresses.map(|it| SocketAddr::new(it, 8000)).collect()
            });
            self.answers.send(found).expect("it is looked up");
            self.asked.recv().await.expect("it is looked up again");
        }
    }

    /// Endpoints that the only source names, and its error.
    fn named(sources: &StaticSources) -> (Vec<String>, Option<String>) {
        let named = sources.sources[0].instances(sources.keep);
        let error = sources.list().remove(0).error;
        (named.iter().map(|it| it.http.to_string()).collect(), error)
    }

    #[tokio::test]
    async fn name_has_the_addresses_of_its_last_answer() {
        let (mut dns, sources) = PlayedResolver::start(PATIENCE, PATIENCE);
        dns.asked.recv().await.expect("it is looked up");
        assert_eq!(named(&sources), (vec![], None));
        dns.answer(Ok(&["10.0.0.2", "::1", "10.0.0.1", "10.0.0.2"])).await;
        let all = ["10.0.0.1:8000", "10.0.0.2:8000", "[::1]:8000"].map(String::from);
        assert_eq!(named(&sources), (all.to_vec(), None));
        dns.answer(Ok(&["10.0.0.2"])).await;
        let one = vec!["10.0.0.2:8000".to_string()];
        assert_eq!(named(&sources), (one.clone(), None));
        let failed = io::Error::other("SERVFAIL");
        for (answer, says) in [(Err(failed), "SERVFAIL"), (Ok(&[][..]), "DNS has no address")] {
            dns.answer(answer).await;
            let (instances, error) = named(&sources);
            assert_eq!(instances, one);
            assert!(error.as_deref().is_some_and(|error| error.contains(says)), "{error:?}");
            dns.answer(Ok(&["10.0.0.2"])).await;
            assert_eq!(named(&sources), (one.clone(), None));
        }
    }

    #[tokio::test]
    async fn instances_of_a_name_without_answers_are_given_up() {
        let (mut dns, sources) = PlayedResolver::start(PATIENCE, Duration::ZERO);
        dns.asked.recv().await.expect("it is looked up");
        dns.answer(Ok(&["10.0.0.1"])).await;
        dns.answer(Err(io::Error::other("SERVFAIL"))).await;
        assert_eq!(named(&sources).0, [""; 0]);
    }

    #[tokio::test]
    async fn late_answer_is_an_error_until_it_is_there() {
        let (mut dns, sources) = PlayedResolver::start(Duration::ZERO, PATIENCE);
        dns.asked.recv().await.expect("it is looked up");
        while named(&sources).1.is_none() {
            tokio::task::yield_now().await;
        }
        assert_eq!(named(&sources), (vec![], Some("DNS does not answer within 0ns".into())));
        // One thread a name: it is not looked up again meanwhile.
        assert!(dns.asked.is_empty());
        dns.answers.send(Ok(vec![SocketAddr::from(([10, 0, 0, 1], 8000))])).expect("it waits");
        while named(&sources).0.is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(named(&sources).0, ["10.0.0.1:8000"]);
    }

    #[test]
    fn names_have_a_port() {
        assert_eq!(dns_name("prefill.ns.svc:8000"), Some(("prefill.ns.svc".into(), 8000)));
        for bad in ["", "prefill", ":8000", "prefill:0", "prefill:70000", "http://p:80", "a b:80"] {
            assert_eq!(dns_name(bad), None, "{bad}");
        }
    }
}
