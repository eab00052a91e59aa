//! The doctor that waits.

use super::super::child::{ChildExit, ChildProcess, ExitCause};
use super::super::side::{BenchRole, side};
use super::super::{Check, DoctorArgs, SHOWN};
use super::dialogue::{
    DataRoute, DoctorConnection, DoctorGreeting, DoctorHello, DoctorProof, DoctorRequest,
    DoctorResponse, DoctorWelcome, NamedPort, PATIENCE, PORTS_MAX, PURPOSE, PortTrial, VERSION,
    proven,
};
use super::{PairSide, joined, reach};
use kvferry_engine::text::printable;
use kvferry_trust::ExpectedConfirmation;
use serde_json::Value;
use std::io::{self, Write};
use std::net::{IpAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::PathBuf;

const SERVED: &str = "peer-served";

/// Waits at this address until the doctor of another machine has tried what is between the two.
pub(in super::super) fn serve(args: &DoctorArgs, at: &str, secret: Option<PathBuf>) -> Check {
    let side = match PairSide::new(args, secret) {
        Ok(side) => side,
        Err(why) => return Check::fail(SERVED, why, "as it says"),
    };
    let listening =
        TcpListener::bind(at).and_then(|listener| Ok((listener.local_addr()?, listener)));
    let (address, listener) = match listening {
        Ok(listening) => listening,
        Err(why) => {
            let found = format!("{at}: cannot listen there: {why}");
            return Check::fail(SERVED, found, crate::instance::remedy(at, &why));
        }
    };
    let mut err = io::stderr();
    // It waits all the same.
    let _ = writeln!(err, "note: waits for `kvferry doctor{} --peer {address}`", more(args));
    for stream in listener.incoming() {
        let stream = match stream {
            Ok(stream) => stream,
            Err(why) => return Check::fail(SERVED, format!("{address}: {why}"), "wait again"),
        };
        match AttendedDoctor::attend(&side, stream) {
            Ok(check) => return check,
            // A scan of ports, or a probe, is no reason to wait no more.
            Err(who) => drop(writeln!(err, "note: {}", printable(&who, SHOWN))),
        }
    }
    Check::fail(SERVED, format!("{address}: nobody came"), "wait again")
}

/// What the other doctor has to be given for the same fabric.
fn more(args: &DoctorArgs) -> &'static str {
    match args.fabric {
        crate::instance::FabricArg::Mori => " --fabric mori",
        crate::instance::FabricArg::Host => "",
    }
}

/// One doctor that has connected.
struct AttendedDoctor<'a> {
    side: &'a PairSide<'a>,
    line: DoctorConnection,
    from: IpAddr,
    local: IpAddr,
    theirs: DoctorHello,
    is_proven: bool,
    expected: Option<ExpectedConfirmation>,
    bench: Option<ChildProcess>,
    /// How processes of a rate ended that did not end well.
    failed: Option<ChildExit>,
}

impl<'a> AttendedDoctor<'a> {
    /// Does what one asks, until it is done.
    ///
    /// # Errors
    /// It is no doctor, or one that is refused: who, and why.
    fn attend(side: &'a PairSide<'a>, stream: TcpStream) -> Result<Check, String> {
        let from = stream.peer_addr().map_err(|why| why.to_string())?;
        let said =
            |why: io::Error| format!("{from} connected, and is no `kvferry doctor --peer`: {why}");
        let local = stream.local_addr().map_err(said)?.ip();
        let mut line = DoctorConnection::new(stream).map_err(said)?;
        let greeting: Value = line.recv(PATIENCE).map_err(said)?;
        let version = greeting["hello"]["kvferry_doctor"].as_str().unwrap_or_default();
        let of_other =
            (version != VERSION).then(|| format!("it is of version {version}, not {VERSION}"));
        let DoctorGreeting { hello, offer } = serde_json::from_value(greeting)
            .map_err(|why| said(io::Error::other(of_other.clone().unwrap_or(why.to_string()))))?;
        let ours = side.hello(local);
        let over = proven(&hello, &ours);
        let answered = side.proof.answer((PURPOSE, &over), offer.as_ref());
        let (proof, expected, refused) = match answered {
            Ok(None) => (DoctorProof::None, None, None),
            Ok(Some((answer, expected))) => (DoctorProof::Answer(answer), Some(expected), None),
            Err(why) => (DoctorProof::Refused(why.clone()), None, Some(why)),
        };
        line.send(&DoctorWelcome { hello: ours, proof }).map_err(said)?;
        if let Some(why) = refused {
            return Err(format!("{from} was refused: {why}"));
        }
        let (from, is_proven) = (from.ip().to_canonical(), false);
        let (theirs, bench, failed) = (hello, None, None);
        let mut served =
            AttendedDoctor { side, line, from, local, theirs, is_proven, expected, bench, failed };
        let is_done = served.run();
        Ok(served.outcome(is_done))
    }

    fn run(&mut self) -> io::Result<()> {
        loop {
            // The longest that the other one does meanwhile is to measure a rate.
            let request = self.line.recv(2 * self.side.args.timeout)?;
            if self.expected.is_some() && !matches!(request, DoctorRequest::Confirm(_)) {
                return Err(io::Error::other("it did not prove the secret"));
            }
            let is_last = matches!(request, DoctorRequest::Done);
            let wants_bytes = matches!(request, DoctorRequest::Give);
            let answer = self.answer(request)?;
            self.line.send(&answer)?;
            if wants_bytes {
                self.line.send_bulk()?;
            }
            if is_last {
                return Ok(());
            }
        }
    }

    fn answer(&mut self, request: DoctorRequest) -> io::Result<DoctorResponse> {
        self.end_bench();
        Ok(match request {
            DoctorRequest::Confirm(said) => {
                let expected = self.expected.take();
                let checked = match expected.map(|expected| expected.check(&said)) {
                    Some(Ok(_)) => Ok(()),
                    Some(Err(why)) => Err(why.to_string()),
                    None => Err("nothing was to be proven".into()),
                };
                self.is_proven = checked.is_ok();
                if let Err(why) = &checked {
                    self.line.send(&DoctorResponse::Confirmed(Err(why.clone())))?;
                    return Err(io::Error::other(why.clone()));
                }
                DoctorResponse::Confirmed(checked)
            }
            DoctorRequest::Clock => DoctorResponse::Clock(super::asking::unix_ns()),
            DoctorRequest::Reach(ports) => DoctorResponse::Reached(self.reach(&ports)),
            DoctorRequest::Take => {
                self.line.recv_bulk()?;
                DoctorResponse::Took
            }
            DoctorRequest::Give => DoctorResponse::Given,
            DoctorRequest::Bench(route) => DoctorResponse::Bench(self.start_bench(route)),
            DoctorRequest::Done => DoctorResponse::Done,
        })
    }

    /// Connects to the other's ports. Without a proof it might be anybody, who has us connect to
    /// somebody else.
    fn reach(&self, ports: &[NamedPort]) -> Result<Vec<PortTrial>, String> {
        let host = &self.theirs.host_ip;
        if ports.len() > PORTS_MAX {
            return Err(format!("more than {PORTS_MAX} ports"));
        }
        let mut found =
            joined(host, 0).to_socket_addrs().map_err(|why| format!("{host}: {why}"))?;
        let is_own = |address: std::net::SocketAddr| address.ip().to_canonical() == self.from;
        if !self.is_proven && !found.all(is_own) {
            return Err(format!(
                "without a secret no address is connected to but {}, which this comes from, and its \
                 host-ip is {host}",
                self.from
            ));
        }
        Ok(reach(host, ports))
    }

    fn start_bench(&mut self, route: DataRoute) -> Result<String, String> {
        let args = self.side.args;
        let at = joined(&self.local.to_canonical().to_string(), 0);
        let started = side(args, &self.side.fabric(route), BenchRole::Serve(&at))?;
        match started.ready::<Value>(args.timeout) {
            Ok((process, ready)) => {
                self.bench = Some(process);
                Ok(ready["address"].as_str().unwrap_or_default().into())
            }
            Err(end) => {
                let why = end.describe();
                self.failed = Some(end);
                Err(format!("the process that waits {why}"))
            }
        }
    }

    /// The other one has measured, or has gone.
    fn end_bench(&mut self) {
        let Some(process) = self.bench.take() else { return };
        let end = process.end(self.side.args.timeout);
        // Who is told that a peer is gone has less to say than the peer.
        if !matches!(end.how, ExitCause::Exit(0 | 2)) {
            self.failed.get_or_insert(end);
        }
    }

    fn outcome(mut self, is_done: io::Result<()>) -> Check {
        self.end_bench();
        let from = self.from;
        if let Some(end) = &self.failed {
            let found = format!("the process that waits {}", end.describe());
            return Check::fail(SERVED, found, end.remedy());
        }
        match is_done {
            Ok(()) => Check::ok(SERVED, format!("{from} came and went; it says what it saw")),
            Err(why) => Check::fail(
                SERVED,
                format!("{from} did not come to an end: {why}"),
                "see what it says, and wait again",
            ),
        }
    }
}
