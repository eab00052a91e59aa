//! The side that waits for those that measure.

use super::args::{BenchArgs, Plan};
use super::line::{Answer, Ask, Hello, Line};
use super::shape::{Ranges, Shape};
use super::side::Side;
use crate::cli::complain;
use crate::exit::{Exit, Stop};
use crate::signals::Ends;
use engine::fabric::{PeerId, RegionDesc};
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
pub(super) fn serve(args: &BenchArgs, plan: &Plan, out: &mut dyn Write) -> Result<Exit, Stop> {
    let text = args.serve.as_deref().unwrap_or_default();
    let listening = |why: io::Error| {
        Stop::Input(format!(
            "--serve {text}: cannot listen there: {why}; give ADDR:PORT of this host"
        ))
    };
    let over = told_to_end(args.child).map_err(|why| Stop::Input(format!("signals: {why}")))?;
    let listener = TcpListener::bind(text).map_err(listening)?;
    let address = listener.local_addr().map_err(listening)?;
    let host = args.host(address.ip())?;
    let mut side = Side::start(plan, &host, over)?;
    let mut region = side.register()?;
    let ready = json!({"address": address.to_string(), "fabric": side.backend(), "host_ip": host});
    writeln!(out, "{ready}")?;
    out.flush()?;
    let clients = clients(listener)?;
    let mut number = 0;
    while !side.is_over() {
        renew(&mut side, &mut region)?;
        match clients.try_recv() {
            Ok(client) => {
                number += 1;
                let attended = attend(&mut side, &mut region, client, PeerId(number));
                if args.once {
                    return attended.map(|()| Exit::Held);
                }
                if let Err(why) = attended {
                    complain(&why.to_string());
                }
            }
            Err(TryRecvError::Empty) => side.turn(SLEEP),
            Err(TryRecvError::Disconnected) => {
                return Err(Stop::Input(format!("--serve {text}: cannot accept connections")));
            }
        }
    }
    Ok(Exit::Held)
}

/// A backend that was replaced knows the region no more.
fn renew(side: &mut Side, region: &mut RegionDesc) -> Result<(), Stop> {
    side.events.clear();
    if std::mem::take(&mut side.is_void) {
        *region = side.register()?;
    }
    Ok(())
}

/// Set when a signal comes, or for a child its input ends; this thread is woken.
fn told_to_end(is_child: bool) -> io::Result<Arc<AtomicBool>> {
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
        Ends::new()?
    };
    thread::Builder::new().name("bench-signals".into()).spawn(move || {
        runtime.block_on(ends.heard());
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
fn attend(
    side: &mut Side,
    region: &mut RegionDesc,
    client: TcpStream,
    peer: PeerId,
) -> Result<(), Stop> {
    let line = Line::new(client).map_err(|why| Stop::Input(format!("a connection: {why}")))?;
    let who = format!("client {}", line.peer);
    let said = |why: &dyn std::fmt::Display| Stop::Input(format!("{who}: {why}"));
    let hello = side.hear(&line, &who)?;
    let hello = Hello::of_other(&hello, side.backend());
    // Who is refused is told by this why, too.
    let pass = hello.as_ref().map(|hello| hello.pass).unwrap_or_default();
    let connected = match &hello {
        Ok(hello) => side.plane.connect(peer, &hello.address, pass).map_err(|why| said(&why)),
        Err(why) => Err(said(why)),
    };
    line.tell(&side.hello(region, pass))?;
    connected?;
    let ended = answer_all(side, region, &line);
    side.plane.disconnect(peer);
    ended.map_err(|why| said(&why))
}

fn answer_all(side: &mut Side, region: &mut RegionDesc, line: &Line) -> Result<(), Stop> {
    while !side.is_over() {
        renew(side, region)?;
        match line.next() {
            Ok(Some(text)) => {
                let ask = serde_json::from_str(&text);
                let ask = ask.map_err(|why| Stop::Input(format!("asks what is unknown: {why}")))?;
                line.tell(&answer(side, &ask))?;
            }
            Ok(None) => side.turn(SLEEP),
            // It has what it wanted, or will say why not.
            Err(_) => break,
        }
    }
    Ok(())
}

/// Does what is asked with the memory of this side.
pub(super) fn answer(side: &Side, ask: &Ask) -> Answer {
    let &(Ask::Fill(shape, seed) | Ask::Compare(shape, seed)) = ask;
    let most = side.plane.caps().slices_max;
    if !shape.is_inside(side.len) || shape.batch > most {
        return Answer::Failed(format!(
            "{shape:?} is not inside {} bytes, or has more ranges than {most}",
            side.len
        ));
    }
    let Shape { size, .. } = shape;
    let Ranges { local, remote, .. } = shape.ranges(0);
    let done = match ask {
        Ask::Fill(..) => {
            let places = remote.iter().map(|at| (*at, *at));
            side.bytes.fill(places, size, seed).map(|()| None)
        }
        Ask::Compare(..) => side.bytes.wrong(remote.into_iter().zip(local), size, seed),
    };
    match done {
        Ok(None) => Answer::Done,
        Ok(Some(at)) => Answer::Wrong(at),
        Err(why) => Answer::Failed(why.to_string()),
    }
}
