//! The doctor that connects.

use super::super::ports::dial;
use super::super::{Check, DoctorArgs, SystemRoots};
use super::dialogue::{
    DataRoute, DoctorConnection, DoctorGreeting, DoctorHello, DoctorProof, DoctorRequest,
    DoctorResponse, DoctorWelcome, PATIENCE, PORTS_MAX, PURPOSE, VERSION, proven,
};
use super::findings::{self, LATENCY, PORTS, REACH, RoundTrip, SECRET, VERSIONS};
use super::{PairSide, rate, reach};
use kvferry_trust::SecretOffer;
use serde_json::Value;
use std::io;
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Round trips that are measured.
const ROUND_TRIPS: usize = 32;

/// Tries what is between this machine and the one whose doctor waits at `to`.
pub(in super::super) fn with_peer(
    args: &DoctorArgs,
    to: &str,
    secret: Option<PathBuf>,
) -> Vec<Check> {
    let side = match PairSide::new(args, secret) {
        Ok(side) => side,
        Err(why) => return vec![Check::fail(SECRET, why, "as it says")],
    };
    let mut checks = Vec::new();
    let stream = match dial(to) {
        Ok(stream) => stream,
        Err(why) => return vec![findings::unreached(to, why.into())],
    };
    checks.push(Check::ok(REACH, format!("{to} takes connections")));
    let step = |step: &'static str| {
        move |why: io::Error| {
            let found = format!("{to} did not answer: {why}");
            Check::fail(step, found, "see what the doctor there says, and let it wait again")
        }
    };
    let ended = DoctorConnection::new(stream).map_err(step(REACH)).and_then(|line| {
        let mut pair = AskingDoctor::greet(&side, line, to, &mut checks)?;
        pair.prove(&mut checks)?;
        pair.clocks(&mut checks).map_err(step(LATENCY))?;
        pair.ports(&mut checks).map_err(step(PORTS))?;
        pair.network(&mut checks)?;
        pair.rates(&mut checks).map_err(step(rate::RATE))?;
        pair.line.ask(&DoctorRequest::Done, PATIENCE).map(drop).map_err(step(rate::RATE))
    });
    checks.extend(ended.err());
    checks
}

/// Nanoseconds since 1970.
pub(super) fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// One that has greeted another.
struct AskingDoctor<'a> {
    side: &'a PairSide<'a>,
    line: DoctorConnection,
    to: &'a str,
    ours: DoctorHello,
    theirs: DoctorHello,
    offer: Option<SecretOffer>,
    proof: DoctorProof,
}

fn other_answer() -> io::Error {
    io::Error::other("it answered something else")
}

impl<'a> AskingDoctor<'a> {
    /// # Errors
    /// The check that tells why the two cannot talk.
    fn greet(
        side: &'a PairSide<'a>,
        mut line: DoctorConnection,
        to: &'a str,
        checks: &mut Vec<Check>,
    ) -> Result<AskingDoctor<'a>, Check> {
        let none = |why: String| {
            let found = format!("{to} is no `kvferry doctor --serve`: {why}");
            Check::fail(
                VERSIONS,
                found,
                "start one there, of the same version, and give its address",
            )
        };
        let local = line.stream().local_addr().map_err(|why| none(why.to_string()))?;
        let ours = side.hello(local.ip());
        let secret = side.proof.secret();
        let offer = secret.map(|secret| secret.offer()).transpose();
        let offer = offer.map_err(|why| none(why.to_string()))?;
        let greeting = DoctorGreeting { hello: ours.clone(), offer: offer.clone() };
        line.send(&greeting).map_err(|why| none(why.to_string()))?;
        let said: Value = line.recv(PATIENCE).map_err(|why| none(why.to_string()))?;
        let theirs = said["hello"]["kvferry_doctor"].as_str().unwrap_or_default().to_owned();
        let DoctorWelcome { hello, proof } = serde_json::from_value(said).map_err(|why| {
            none(match theirs == VERSION || theirs.is_empty() {
                true => why.to_string(),
                false => format!("it is of version {theirs}, and this one of {VERSION}"),
            })
        })?;
        checks.push(findings::versions(&ours, &hello));
        checks.push(findings::node(&ours, &hello));
        Ok(AskingDoctor { side, line, to, ours, theirs: hello, offer, proof })
    }

    /// Whether both know the secret of one fleet.
    ///
    /// # Errors
    /// The check that tells why the other one does nothing for this one.
    fn prove(&mut self, checks: &mut Vec<Check>) -> Result<(), Check> {
        let fail = |found: String| {
            Check::fail(SECRET, found, "give both machines the same file as secret_file")
        };
        let (answer, offer) = match (&self.proof, &self.offer) {
            (DoctorProof::None, None) => {
                checks.push(Check::ok(SECRET, "neither side has one"));
                return Ok(());
            }
            (DoctorProof::None, Some(_)) => {
                return Err(fail("this side has one, and the other one ignored the offer".into()));
            }
            (DoctorProof::Refused(why), _) => return Err(fail(format!("the other side: {why}"))),
            (DoctorProof::Answer(_), None) => {
                return Err(fail("the other side answered what was not offered".into()));
            }
            (DoctorProof::Answer(answer), Some(offer)) => (answer, offer),
        };
        let over = proven(&self.ours, &self.theirs);
        let secret = self.side.proof.secret().ok_or_else(|| fail("it is gone".into()))?;
        let (confirmation, _) =
            secret.confirm((PURPOSE, &over), offer, answer).map_err(|why| fail(why.to_string()))?;
        let confirmed = self.line.ask(&DoctorRequest::Confirm(confirmation), PATIENCE);
        match confirmed.map_err(|why| fail(why.to_string()))? {
            DoctorResponse::Confirmed(Ok(())) => {
                checks.push(Check::ok(SECRET, "both sides have proven the same one"));
                Ok(())
            }
            DoctorResponse::Confirmed(Err(why)) => Err(fail(format!("the other side: {why}"))),
            _ => Err(fail(other_answer().to_string())),
        }
    }

    /// How long small messages take, and how far the clocks are apart.
    fn clocks(&mut self, checks: &mut Vec<Check>) -> io::Result<()> {
        let mut trips = Vec::with_capacity(ROUND_TRIPS);
        for _ in 0..ROUND_TRIPS {
            let (begun, ours) = (Instant::now(), unix_ns());
            let DoctorResponse::Clock(theirs) = self.line.ask(&DoctorRequest::Clock, PATIENCE)?
            else {
                return Err(other_answer());
            };
            trips.push(RoundTrip::new(begun.elapsed(), ours, theirs));
        }
        trips.sort_by_key(|trip| trip.took);
        checks.push(findings::latency(&trips));
        checks.push(findings::clock(&trips[0]));
        Ok(())
    }

    /// Whether each reaches the ports of the other.
    fn ports(&mut self, checks: &mut Vec<Check>) -> io::Result<()> {
        let theirs = &self.theirs.ports[..self.theirs.ports.len().min(PORTS_MAX)];
        let from_here = reach(&self.theirs.host_ip, theirs);
        let within = PATIENCE * (1 + self.ours.ports.len() as u32);
        let answer = self.line.ask(&DoctorRequest::Reach(self.ours.ports.clone()), within)?;
        let DoctorResponse::Reached(from_there) = answer else { return Err(other_answer()) };
        checks.push(findings::ports(&from_here, &from_there));
        Ok(())
    }

    /// Whether large segments get through, and by which interface.
    ///
    /// # Errors
    /// The check that tells that they do not: nothing more can be said over this connection.
    fn network(&mut self, checks: &mut Vec<Check>) -> Result<(), Check> {
        let begun = Instant::now();
        let moved = self.take().and_then(|()| self.give());
        moved.map_err(|why| findings::stalled(&self.ours, &self.theirs, &why))?;
        let took = begun.elapsed();
        let segment = socket2::SockRef::from(self.line.stream()).tcp_mss().ok();
        let local = self.line.stream().local_addr().map(|local| local.ip());
        let roots = SystemRoots::of_machine();
        let faster = self.ours.interface.as_ref().and_then(|ours| ours.faster(&roots));
        let local = local.map(|local| local.to_canonical().to_string()).unwrap_or_default();
        let path = findings::NetworkPath { local: &local, segment, faster, took };
        checks.push(findings::network(&self.ours, &self.theirs, &path));
        Ok(())
    }
}

impl AskingDoctor<'_> {
    fn take(&mut self) -> io::Result<()> {
        self.line.send(&DoctorRequest::Take)?;
        self.line.send_bulk()?;
        match self.line.recv(PATIENCE)? {
            DoctorResponse::Took => Ok(()),
            _ => Err(other_answer()),
        }
    }

    fn give(&mut self) -> io::Result<()> {
        match self.line.ask(&DoctorRequest::Give, PATIENCE)? {
            DoctorResponse::Given => self.line.recv_bulk(),
            _ => Err(other_answer()),
        }
    }

    /// What moves between the two, each way that there is.
    fn rates(&mut self, checks: &mut Vec<Check>) -> io::Result<()> {
        let (ours, theirs) = (&self.ours, &self.theirs);
        if ours.backend != theirs.backend || ours.kvferry_doctor != theirs.kvferry_doctor {
            let found = "not measured: the two have other backends, or other versions";
            checks.push(Check::skip(rate::RATE, found));
            return Ok(());
        }
        let routes: &[DataRoute] = match (&*ours.backend, ours.node == theirs.node) {
            ("host", true) => &[DataRoute::SharedMemory, DataRoute::Tcp],
            ("host", false) => &[DataRoute::Tcp],
            _ => &[DataRoute::Mori],
        };
        for route in routes {
            let within = self.side.args.timeout + PATIENCE;
            let answer = self.line.ask(&DoctorRequest::Bench(*route), within)?;
            let DoctorResponse::Bench(address) = answer else { return Err(other_answer()) };
            let speed = self.ours.interface.as_ref().and_then(|ours| ours.speed);
            checks.push(rate::measure(self.side, (*route, speed), address, self.to));
        }
        Ok(())
    }
}
