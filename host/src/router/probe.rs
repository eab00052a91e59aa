//! Whether an instance answers HTTP before it gets legs.

use super::http_adapter::RouterAddr;
use super::pool::ConnectionPool;
use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, Uri};
use kvferry_engine::actors::Input;
use kvferry_engine::core::router::{ProbeId, RouterInput};
use kvferry_engine::fabric::Endpoint;
use std::time::Duration;

/// Time for an answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks an instance for its health and tells the core. Any answer will do that is not the server's
/// own failure: the instance listens.
pub(crate) fn start(probe: ProbeId, to: Endpoint, pool: ConnectionPool, core: RouterAddr) {
    // The task ends within its patience.
    let _detached = actix::spawn(async move {
        let asked = tokio::time::timeout(PATIENCE, ask(&to, &pool)).await;
        let answers = match asked {
            Ok(Ok(status)) => status < 500,
            _ => false,
        };
        match answers {
            true => tracing::info!(http = %to, "instance answers"),
            false => tracing::debug!(http = %to, "instance does not answer yet"),
        }
        core.do_send(Input(RouterInput::Probed { probe, answers }));
    });
}

async fn ask(to: &Endpoint, pool: &ConnectionPool) -> Result<u16, String> {
    let mut request = Request::new(Full::<Bytes>::default());
    *request.uri_mut() = Uri::from_static("/health");
    let answer = pool.send(to, request).await?;
    Ok(answer.status().as_u16())
}
