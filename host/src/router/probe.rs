//! Whether an instance answers HTTP before it gets legs, and which models it serves.

use super::http_adapter::RouterAddr;
use super::identity::RouterIdentity;
use super::leg;
use super::pool::{ConnectionPool, PooledBody};
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use hyper::{Request, Response, Uri};
use kvferry_engine::actors::Input;
use kvferry_engine::core::message::ServedModels;
use kvferry_engine::core::router::{ProbeId, RouterInput};
use kvferry_engine::fabric::Endpoint;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Time for an answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest list of models that is read, in bytes.
pub(super) const MODELS_BYTES: usize = 1 << 20;

/// What is wanted of an instance.
pub(crate) struct ProbeOrder {
    pub(crate) probe: ProbeId,
    pub(crate) to: Endpoint,
    /// True if it is to show that it answers at all, which it has not before.
    pub(crate) is_unproven: bool,
    /// True if it is to show that its server goes on.
    pub(crate) is_doubted: bool,
    /// True if the models that it lists are wanted.
    pub(crate) wants_models: bool,
}

/// Asks an instance for its health and its models and tells the core. Any answer will do for the
/// first that is not the server's own failure: the instance listens. An instance that is this router
/// does not answer.
pub(crate) fn start(
    order: ProbeOrder,
    pool: ConnectionPool,
    key: Option<HeaderValue>,
    identity: RouterIdentity,
    core: RouterAddr,
) {
    let ProbeOrder { probe, to, is_unproven, is_doubted, wants_models } = order;
    // The task ends within its patience.
    let _detached = actix::spawn(async move {
        let answers = !(is_unproven || is_doubted) || {
            let asked = timeout(PATIENCE, ask(&to, &pool, "/health", HeaderMap::new())).await;
            let answer = asked.ok().and_then(Result::ok);
            let answers = answer.is_some_and(|it| {
                !identity.probed(&to, it.headers()) && it.status().as_u16() < 500
            });
            match answers {
                true if is_unproven => tracing::info!(http = %to, "instance answers"),
                true => {
                    tracing::debug!(http = %to, "the server of an instance without a host answers")
                }
                false if is_doubted => tracing::debug!(http = %to,
                    "the server of an instance without a host does not answer"),
                false => tracing::debug!(http = %to, "instance does not answer yet"),
            }
            answers
        };
        let models = match answers && wants_models {
            true => timeout(PATIENCE, models(&to, &pool, key, &identity)).await.ok().flatten(),
            false => None,
        };
        let models = models.map(Arc::new);
        core.do_send(Input(RouterInput::Probed { probe, answers, models }));
    });
}

async fn ask(
    to: &Endpoint,
    pool: &ConnectionPool,
    path: &'static str,
    headers: HeaderMap,
) -> Result<Response<PooledBody>, String> {
    let mut request = Request::new(Full::<Bytes>::default());
    *request.uri_mut() = Uri::from_static(path);
    *request.headers_mut() = headers;
    pool.send(to, request).await
}

/// The models that an instance lists; nothing if it lists none, or none that can be used.
async fn models(
    to: &Endpoint,
    pool: &ConnectionPool,
    key: Option<HeaderValue>,
    identity: &RouterIdentity,
) -> Option<ServedModels> {
    // An instance that is a router asks its own instances, one of which may be this router.
    let mut headers = HeaderMap::from_iter([identity.header()]);
    headers.extend(key.map(|key| (AUTHORIZATION, key)));
    let answer = ask(to, pool, "/v1/models", headers).await.ok()?;
    if !answer.status().is_success() {
        return None;
    }
    let list = leg::collect(answer.into_body(), MODELS_BYTES, PATIENCE).await.ok()?;
    let listed = served(&list);
    if listed.is_none() {
        tracing::debug!(http = %to, "its list of models says nothing: it gets requests for any");
    }
    listed
}

/// The models of a list as `GET /v1/models` answers it; none if it says that it takes any, or cannot
/// be used.
pub(super) fn served(list: &[u8]) -> Option<ServedModels> {
    #[derive(Deserialize)]
    struct ListedModels {
        data: Vec<ModelEntry>,
        /// Of `kvferry serve`.
        #[serde(default)]
        any_model: bool,
    }
    #[derive(Deserialize)]
    struct ModelEntry {
        id: Arc<str>,
        #[serde(default)]
        parent: Option<IgnoredAny>,
    }
    let list: ListedModels =
        serde_json::from_slice(list).ok().filter(|it: &ListedModels| !it.any_model)?;
    let (names, adapters): (Vec<_>, Vec<_>) =
        list.data.into_iter().partition(|card| card.parent.is_none());
    let names = names.into_iter().map(|card| card.id).collect();
    let adapters = adapters.into_iter().map(|card| card.id).collect();
    Some(ServedModels { names, adapters }).filter(ServedModels::is_well_formed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_models_is_read_or_says_nothing() {
        let list = br#"{"object": "list", "data": [{"id": "m", "parent": null, "root": "/m"},
            {"id": "sql", "parent": "m"}, {"id": "n"}], "x": 1}"#;
        let served_by = served(list).expect("models");
        assert_eq!(served_by.names.iter().map(|it| &**it).collect::<Vec<_>>(), ["m", "n"]);
        assert_eq!(served_by.adapters.iter().map(|it| &**it).collect::<Vec<_>>(), ["sql"]);
        let long = format!(r#"{{"data": [{{"id": "{}"}}]}}"#, "m".repeat(257));
        let many: Vec<_> = (0..257).map(|n| format!(r#"{{"id": "m{n}"}}"#)).collect();
        let many = format!(r#"{{"data": [{}]}}"#, many.join(","));
        let any = r#"{"data": [{"id": "m"}], "any_model": true}"#;
        for says_nothing in [&*long, &*many, any, "", "[]", r#"{"data": []}"#, r#"{"data": [{}]}"#]
        {
            assert_eq!(served(says_nothing.as_bytes()), None, "{says_nothing:.40}");
        }
    }
}
