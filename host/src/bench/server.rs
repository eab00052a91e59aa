//! The side that waits for those that measure.

use super::args::{BenchArgs, BenchPlan};
use super::batch::{BatchRanges, BatchShape};
use super::connection::{BenchConnection, BenchHello, BenchRequest, BenchResponse};
use super::harness::PlaneHarness;
use crate::process::{CommandError, Exit, ShutdownSignals, print_error};
use kvferry_engine::fabric::{PeerId, RegionDesc};
use serde_json::json;
use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::Duration;

/// Long enough: who has news wakes this thread.
const SLEEP: Duration = Duration::from_secs(60);

/// Serves one after the other until it is told to end.
///
/// # Errors
/// It cannot listen, or has no plane.
pub(super) fn serve(
    args: &BenchArgs,
    plan: &BenchPlan,
    out: &mut dyn Write,
) -> Result<Exit, CommandError> {
    let text = args.serve.as_deref().unwrap_or_default();
    let listening = |why: io::Error| {
        CommandError::Input(format!(
            "--serve {text}: cannot listen there: {why}; give ADDR:PORT of this host"
        ))
    };
    let over =
        shutdown_flag(args.child).map_err(|why| CommandError::Input(format!("signals: {why}")))?;
    let listener = TcpListener::bind(text).map_err(listening)?;
    let address = listener.local_addr().map_err(listening)?;
    let host = args.host(address.ip())?;
    let mut side = PlaneHarness::start(plan, &host, over)?;
    let mut region = side.register()?;
    let ready = json!({"address": address.to_string(), "fabric": side.backend(), "host_ip": host});
    writeln!(out, "{ready}")?;
    out.flush()?;
    let clients = clients(listener)?;
    let mut number = 0;
    while !side.is_shutdown() {
        renew(&mut side, &mut region)?;
        match clients.try_recv() {
            Ok(client) => {
                number += 1;
                let attended = serve_client(&mut side, &mut region, client, PeerId(number));
                if args.once {
                    return attended.map(|()| Exit::HELD);
                }
                if let Err(why) = attended {
                    print_error(&why.to_string());
                }
            }
            Err(TryRecvError::Empty) => side.poll_once(SLEEP),
            Err(TryRecvError::Disconnected) => {
                return Err(CommandError::Input(format!(
                    "--serve {text}: cannot accept connections"
                )));
            }
        }
    }
    Ok(Exit::HELD)
}

/// A backend that was replaced knows the region no more.
fn renew(side: &mut PlaneHarness, region: &mut RegionDesc) -> Result<(), CommandError> {
    side.events.clear();
    if std::mem::take(&mut side.needs_registration) {
        *region = side.register()?;
    }
    Ok(())
}

/// Set when a signal comes, or for a child its input ends; this thread is woken.
fn shutdown_flag(is_child: bool) -> io::Result<Arc<AtomicBool>> {
    let over = Arc::new(AtomicBool::new(false));
    let (main, flag) = (thread::current(), over.clone());
    let tell = move || {
        flag.store(true, Ordering::Release);
        main.unpark();
    };
    if is_child {
        let tell = tell.clone();
        thread::Builder::new().name("bench-input".into()).spawn(move || {
            // However it ends.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            tell();
        })?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let mut ends = {
        let _inside = runtime.enter();
        ShutdownSignals::new()?
    };
    thread::Builder::new().name("bench-signals".into()).spawn(move || {
        runtime.block_on(ends.recv());
        tell();
    })?;
    Ok(over)
}

/// Accepts one after the other.
fn clients(listener: TcpListener) -> io::Result<Receiver<TcpStream>> {
    let (tell, told) = mpsc::sync_channel(1);
    let main = thread::current();
    thread::Builder::new().name("bench-clients".into()).spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            if tell.send(stream).is_err() {
                return;
            }
            main.unpark();
        }
        drop(tell);
        main.unpark();
    })?;
    Ok(told)
}

/// Serves one until it goes.
///
/// # Errors
/// It is not one of ours, or what it asks cannot be.
fn serve_client(
    side: &mut PlaneHarness,
    region: &mut RegionDesc,
    client: TcpStream,
    peer: PeerId,
) -> Result<(), CommandError> {
    let line = BenchConnection::new(client)
        .map_err(|why| CommandError::Input(format!("a connection: {why}")))?;
    let who = format!("client {}", line.peer);
    let said = |why: &dyn std::fmt::Display| CommandError::Input(format!("{who}: {why}"));
    let hello = side.recv_line(&line, &who)?;
    let hello = BenchHello::of_other(&hello, side.backend());
    // Who is refused is told by this why, too.
    let fence_key = hello.as_ref().map(|hello| hello.fence_key).unwrap_or_default();
    let connected = match &hello {
        Ok(hello) => side.plane.connect(peer, &hello.address, fence_key).map_err(|why| said(&why)),
        Err(why) => Err(said(why)),
    };
    line.send(&side.hello(region, fence_key))?;
    connected?;
    let ended = answer_all(side, region, &line);
    side.plane.disconnect(peer);
    ended.map_err(|why| said(&why))
}

fn answer_all(
    side: &mut PlaneHarness,
    region: &mut RegionDesc,
    line: &BenchConnection,
) -> Result<(), CommandError> {
    while !side.is_shutdown() {
        renew(side, region)?;
        match line.try_recv() {
            Ok(Some(text)) => {
                let ask = serde_json::from_str(&text);
                let ask =
                    ask.map_err(|why| CommandError::Input(format!("asks what is unknown: {why}")))?;
                line.send(&answer(side, &ask))?;
            }
            Ok(None) => side.poll_once(SLEEP),
            // It has what it wanted, or will say why not.
            Err(_) => break,
        }
    }
    Ok(())
}

/// Does what is asked with the memory of this side.
pub(super) fn answer(side: &PlaneHarness, ask: &BenchRequest) -> BenchResponse {
    let &(BenchRequest::Fill(shape, seed) | BenchRequest::Compare(shape, seed)) = ask;
    let most = side.plane.caps().slices_max;
    if !shape.is_inside(side.len) || shape.batch > most {
        return BenchResponse::Failed(format!(
            "{shape:?} is not inside {} bytes, or has more ranges than {most}",
            side.len
        ));
    }
    let BatchShape { size, .. } = shape;
    let BatchRanges { local, remote, .. } = shape.ranges(0);
    let done = match ask {
        BenchRequest::Fill(..) => {
            let places = remote.iter().map(|at| (*at, *at));
            side.bytes.fill(places, size, seed).map(|()| None)
        }
        BenchRequest::Compare(..) => {
            side.bytes.first_mismatch(remote.into_iter().zip(local), size, seed)
        }
    };
    match done {
        Ok(None) => BenchResponse::Done,
        Ok(Some(at)) => BenchResponse::Wrong(at),
        Err(why) => BenchResponse::Failed(why.to_string()),
    }
}
