//! Asks servers for their load: the metrics that vLLM has at `/metrics` of the address of its legs.
//!
//! Side calls, which no request waits for: one at a time to a server, [`CALLS_MAX`] in all, bounded in
//! time and bytes. What is of no use is counted, and the core goes on with its own estimates.

use super::http_adapter::RouterAddr;
use super::metrics::{LoadLabels, RouterMetrics};
use super::pool::{ConnectionPool, chain};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Uri};
use kvferry_engine::actors::Input;
use kvferry_engine::core::router::{RouterInput, ServerLoad};
use kvferry_engine::fabric::Endpoint;
use memchr::memchr;
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Calls at a time.
const CALLS_MAX: usize = 32;

/// Time for a call.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest page, in bytes; vLLM's have a tenth of it.
const PAGE_MAX: usize = 4 << 20;

/// Longest line that is looked at, in bytes.
const LINE_MAX: usize = 4 << 10;

/// The calls under way.
pub(super) struct LoadCalls {
    asked: Rc<RefCell<HashSet<Endpoint>>>,
    places: Arc<Semaphore>,
}

impl LoadCalls {
    pub(super) fn new() -> LoadCalls {
        LoadCalls { asked: Rc::default(), places: Arc::new(Semaphore::new(CALLS_MAX)) }
    }

    /// Asks a server, unless it has not answered the last time yet, and tells the core what it says.
    pub(super) fn start(
        &self,
        to: Endpoint,
        pool: ConnectionPool,
        core: RouterAddr,
        metrics: &RouterMetrics,
    ) {
        let count = |outcome| metrics.loads.get_or_create_owned(&LoadLabels { outcome });
        if !self.asked.borrow_mut().insert(to.clone()) {
            count("late").inc();
            return;
        }
        let (asked, places) = (self.asked.clone(), self.places.clone());
        let (answered, failed) = (count("answered"), count("failed"));
        // The task ends within its patience, and that of those before it.
        let _detached = actix::spawn(async move {
            let _place = places.acquire().await;
            let said = timeout(PATIENCE, ask(&to, &pool)).await;
            match said.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}"))) {
                Ok(load) => {
                    answered.inc();
                    core.do_send(Input(RouterInput::Load { http: to.clone(), load }));
                }
                Err(why) => {
                    failed.inc();
                    tracing::debug!(http = %to, why, "instance does not say how busy it is");
                }
            }
            asked.borrow_mut().remove(&to);
        });
    }
}

async fn ask(to: &Endpoint, pool: &ConnectionPool) -> Result<ServerLoad, String> {
    let mut request = Request::new(Full::<Bytes>::default());
    *request.uri_mut() = Uri::from_static("/metrics");
    let (head, mut body) = pool.send(to, request).await?.into_parts();
    if !head.status.is_success() {
        return Err(format!("status {}", head.status));
    }
    let (mut page, mut left) = (LoadPage::default(), PAGE_MAX);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|why| chain(&why))?.into_data() else { continue };
        left = left.checked_sub(data.len()).ok_or(format!("a page above {PAGE_MAX} bytes"))?;
        page.read(&data);
    }
    page.load().ok_or_else(|| "no vllm:num_requests_running in the page".into())
}

/// What a page says, read piece by piece.
#[derive(Debug, Default)]
struct LoadPage {
    /// The beginning of a line whose end is still to come.
    line: Vec<u8>,
    running: Option<f64>,
    waiting: f64,
    /// Those that wait for room, where the server tells them apart.
    queued: Option<f64>,
    kv_cache: f64,
}

impl LoadPage {
    fn read(&mut self, mut piece: &[u8]) {
        while let Some(end) = memchr(b'\n', piece) {
            let (line, rest) = (&piece[..end], &piece[end + 1..]);
            piece = rest;
            if self.line.is_empty() {
                self.sample(line);
            } else {
                self.keep(line);
                let line = std::mem::take(&mut self.line);
                self.sample(&line);
            }
        }
        self.keep(piece);
    }

    /// Keeps a part of a line; of one that is too long no more than shows that.
    fn keep(&mut self, part: &[u8]) {
        let room = (LINE_MAX + 1).saturating_sub(self.line.len());
        self.line.extend_from_slice(&part[..part.len().min(room)]);
    }

    /// Takes one line `name{labels} value`, an engine's each.
    fn sample(&mut self, line: &[u8]) {
        const OURS: &[u8] = b"kvferry_legs_open ";
        if line.len() > LINE_MAX || !(line.starts_with(b"vllm:") || line.starts_with(OURS)) {
            return;
        }
        let Ok(line) = std::str::from_utf8(line) else { return };
        let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap_or(line.len()));
        // A label may have a brace in it, a value has not.
        let (labels, value) = rest.split_at(rest.rfind('}').map_or(0, |at| at + 1));
        let Some(Ok(value)) = value.split_whitespace().next().map(str::parse::<f64>) else {
            return;
        };
        if !value.is_finite() || value < 0.0 {
            return;
        }
        match name {
            "vllm:num_requests_running" | "kvferry_legs_open" => {
                *self.running.get_or_insert_default() += value;
            }
            "vllm:num_requests_waiting" => self.waiting += value,
            "vllm:num_requests_waiting_by_reason" => {
                let is_queued = labels.contains(r#"reason="capacity""#);
                *self.queued.get_or_insert_default() += if is_queued { value } else { 0.0 };
            }
            "vllm:kv_cache_usage_perc" => self.kv_cache = self.kv_cache.max(value),
            _ => {}
        }
    }

    /// The load of all engines together; none if the page is of something else.
    fn load(mut self) -> Option<ServerLoad> {
        // The last line may have no end.
        let line = std::mem::take(&mut self.line);
        self.sample(&line);
        // What is too large is the largest.
        Some(ServerLoad {
            running: self.running? as u32,
            waiting: self.waiting as u32,
            queued: self.queued.unwrap_or(self.waiting) as u32,
            kv_cache: (self.kv_cache.min(1.0) * 1000.0) as u16,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: &str = "# HELP vllm:num_requests_running Number of requests in model execution batches.\n\
        # TYPE vllm:num_requests_running gauge\n\
        vllm:num_requests_running{engine=\"0\",model_name=\"a} 9\"} 2.0\n\
        vllm:num_requests_running{engine=\"1\",model_name=\"a} 9\"} 3.0\n\
        vllm:num_requests_waiting{engine=\"0\",model_name=\"a\"} 4.0\n\
        vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 1.0\n\
        vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"deferred\"} 3.0\n\
        vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
        vllm:kv_cache_usage_perc{engine=\"1\"} 0.975 1700000000\n\
        vllm:request_success_total{engine=\"0\"} NaN\n";

    fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Option<ServerLoad> {
        let mut page = LoadPage::default();
        for piece in pieces {
            page.read(piece);
            assert!(page.line.len() <= LINE_MAX + 1);
        }
        page.load()
    }

    #[test]
    fn engines_of_a_server_are_added_up() {
        let load = ServerLoad { running: 5, waiting: 4, queued: 1, kv_cache: 975 };
        assert_eq!(read([PAGE.as_bytes()]), Some(load));
        let older = PAGE.replace("_by_reason", "_otherwise");
        assert_eq!(read([older.as_bytes()]), Some(ServerLoad { queued: 4, ..load }));
        let ours = "kvferry_legs 7\nkvferry_legs_open 3\n# EOF";
        let load = ServerLoad { running: 3, ..ServerLoad::default() };
        assert_eq!(read([ours.as_bytes()]), Some(load));
        assert_eq!(read(["<html>".as_bytes()]), None);
    }

    #[test]
    fn lies_are_numbers_like_others() {
        for (said, running) in [("1e300", u32::MAX), ("-1", 7), ("inf", 7), ("NaN", 7), ("", 7)] {
            let text = format!("vllm:num_requests_running 7\nvllm:num_requests_running {said}\n");
            assert_eq!(read([text.as_bytes()]).map(|it| it.running), Some(running), "{said}");
        }
        let long = [b"vllm:num_requests_running 7\nvllm:num_".to_vec(), vec![b'x'; 3 * LINE_MAX]];
        let load = read([&long[0][..], &long[1], b"\nvllm:num_requests_running 1"]);
        assert_eq!(load.map(|it| it.running), Some(8));
    }

    proptest! {
        #[test]
        fn however_it_is_cut_a_page_says_the_same(
            cuts in prop::collection::vec(0..PAGE.len(), 0..8),
        ) {
            let mut cuts = cuts;
            cuts.extend([0, PAGE.len()]);
            cuts.sort_unstable();
            let pieces = cuts.windows(2).map(|cut| &PAGE.as_bytes()[cut[0]..cut[1]]);
            prop_assert_eq!(read(pieces), read([PAGE.as_bytes()]));
        }

        #[test]
        fn anything_is_survived(pieces in prop::collection::vec("vllm:num_requests_(running|waiting)|[{}\n \"=,#e.0-9-]{0,30}", 0..40)) {
            read(pieces.iter().map(|piece| piece.as_bytes()));
        }
    }
}
