//! `kvferry health`: asks a server whether it is well. For health checks of containers, in whose
//! images there is no other client of HTTP.

use crate::process::{CommandError, Exit, address, seconds};
use crate::router::chain;
use clap::Args;
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::{StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use kvferry_engine::text::printable;
use std::io::Write;
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::time::timeout;

/// Arguments of `health`.
#[derive(Clone, Debug, Args)]
pub(crate) struct HealthArgs {
    /// What to ask, over HTTP without TLS; if it is not given, a router of this machine at its
    /// admin port, whether it lives. Its /readiness says whether it can serve
    #[arg(value_name = "HOST:PORT/PATH", default_value = "127.0.0.1:29000/liveness")]
    pub(crate) server: String,
    /// Longest wait for the answer
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = seconds)]
    pub(crate) timeout: Duration,
}

/// Asks once. The server is well if it answers with a status from 200 to 299.
///
/// # Errors
/// What cannot be asked, output that cannot be written.
pub(crate) fn command(args: &HealthArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let uri = uri(&args.server).map_err(|why| {
        let text = &args.server;
        CommandError::Input(format!("{text}: {why}; give HOST:PORT/PATH, IPv6 in brackets"))
    })?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let asked = runtime.block_on(async { timeout(args.timeout, ask(uri)).await });
    // A name may be looked up for longer than that.
    runtime.shutdown_background();
    let (exit, said) = match asked {
        Ok(Ok(status)) if status.is_success() => (Exit::HELD, status.to_string()),
        Ok(Ok(status)) => (Exit::UNFIT, status.to_string()),
        Ok(Err(why)) => (Exit::UNFIT, why),
        Err(_) => (Exit::UNFIT, format!("no answer within {:?}", args.timeout)),
    };
    writeln!(out, "{}: {}", args.server, printable(&said, 1_000))?;
    Ok(exit)
}

fn uri(text: &str) -> Result<Uri, String> {
    let text = match text.split_once("://") {
        None => format!("http://{text}"),
        Some(("http", _)) => text.to_owned(),
        Some((scheme, _)) => return Err(format!("{scheme} is not spoken")),
    };
    let uri: Uri = text.parse().map_err(|why: hyper::http::uri::InvalidUri| why.to_string())?;
    if let Some(authority) = uri.authority().filter(|it| it.as_str() != it.host()) {
        address::host_and_port(authority.as_str())?;
    }
    Ok(uri)
}

async fn ask(uri: Uri) -> Result<StatusCode, String> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let answer = client.get(uri).await.map_err(|why| chain(&why))?;
    Ok(answer.status())
}
