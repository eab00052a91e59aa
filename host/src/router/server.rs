//! Connections of clients: bounded in number, header and silence, and ended gracefully.

use super::metrics::{Counted, RouterMetrics};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

/// Time for a client to send the header of its next request.
const HEADER: Duration = Duration::from_secs(60);

/// Longest header of a request, in bytes.
const HEADER_BYTES: usize = 64 << 10;

/// Pause after the system had no descriptor for a connection.
const BREATH: Duration = Duration::from_millis(50);

/// Serves until `stop` says so, then waits until all connections have their answers.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Router,
    connections_max: usize,
    metrics: RouterMetrics,
    mut stop: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(connections_max));
    let stopping = stop.clone();
    loop {
        let place = places.clone().acquire_owned();
        let Ok(place) = (tokio::select! {
            place = place => place,
            _ = stop.wait_for(|stop| *stop) => break,
        }) else {
            break;
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let (app, stopping, metrics) = (app.clone(), stopping.clone(), metrics.clone());
                // Its place is given back when it ends.
                let _detached = actix::spawn(async move {
                    let counted = Counted::begin(&metrics.connections);
                    connection(stream, app, stopping).await;
                    drop(counted);
                    drop(place);
                });
            }
            Err(why) => {
                tracing::warn!(%why, "cannot accept a connection");
                tokio::time::sleep(BREATH).await;
            }
        }
    }
    drop(listener);
    let all = u32::try_from(connections_max).unwrap_or(u32::MAX);
    // All places are free when the last connection has ended.
    let _ = places.acquire_many(all).await;
}

async fn connection(stream: TcpStream, app: Router, mut stop: watch::Receiver<bool>) {
    // Without it small answers wait; with it failing they only wait.
    let _ = stream.set_nodelay(true);
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER).max_buf_size(HEADER_BYTES);
    let serving = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        biased;
        ended = serving.as_mut() => ended,
        _ = stop.wait_for(|stop| *stop) => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(why) = ended {
        tracing::debug!(%why, "connection of a client ended");
    }
}
