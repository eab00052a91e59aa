//! A plane's start and end.

use super::MoriPlane;
use super::recovery::MoriRecovery;
use crate::access_control::MoriAccessControl;
use crate::completion_poller::MoriCompletionPoller;
use crate::counters::MoriAtomicCounters;
use crate::engine_thread::{MoriEngineCommand, MoriEngineThread, MoriPlaneShared};
use crate::event_queue::MoriEventQueue;
use crate::link::listen;
use crate::mori::Shim;
use crate::preflight;
use crate::process::install_last_error;
use crate::session_opener::MoriSessionOpener;
use crate::{MoriBackend, MoriConfig};
use kvferry_engine::fabric::Address;
use kvferry_fabric_common::{PlaneLedger, draw_incarnation, spawn};
use kvferry_trust::{FleetProof, NetworkTrust};
use mori_sys::ShimSearchPath;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// Why there is no plane.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MoriError {
    /// MoRI cannot be used here: what was looked for, and where.
    Unavailable(String),
    /// A setting: which, its value and what it may be.
    Config(String),
    /// An address that cannot be listened at, with address, port and reason.
    Listen(String),
    /// What this machine lacks, and what to do.
    Preflight(String),
    /// MoRI refused or threw: the call, and its text.
    Mori(String),
    /// Threads or descriptors that the system does not give.
    System(String),
}

impl fmt::Display for MoriError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MoriError::Unavailable(text) => write!(f, "MoRI is not available: {text}"),
            MoriError::Config(text) | MoriError::Listen(text) | MoriError::Preflight(text) => {
                f.write_str(text)
            }
            MoriError::Mori(text) => write!(f, "MoRI: {text}"),
            MoriError::System(text) => write!(f, "MoRI plane: {text}"),
        }
    }
}

impl std::error::Error for MoriError {}

/// Has MoRI add xGMI to an engine for RDMA, and prefer it, where it says 0.
const AUTO_XGMI: &str = "MORI_DISABLE_AUTO_XGMI";

fn check_auto_xgmi(value: Option<&OsStr>) -> Result<(), String> {
    match value.is_some_and(|value| value == "0") {
        true => Err(format!(
            "{AUTO_XGMI}=0: MoRI would choose xGMI by itself where RDMA was chosen, and a fence would \
             not end it; unset it"
        )),
        false => Ok(()),
    }
}

impl MoriPlane {
    /// Loads MoRI, starts its engine and the threads.
    ///
    /// # Errors
    /// `Unavailable` without MoRI, a setting that cannot be, what the machine lacks, or what MoRI
    /// says.
    pub fn new(config: MoriConfig) -> Result<MoriPlane, MoriError> {
        config.check().map_err(MoriError::Config)?;
        let shim = Shim::load(&ShimSearchPath::of_process());
        MoriPlane::with_shim(shim.map_err(|why| MoriError::Unavailable(why.to_string()))?, config)
    }

    /// The same over MoRI that is loaded already.
    ///
    /// # Errors
    /// A setting that cannot be, what the machine lacks, or what MoRI says.
    pub fn with_shim(shim: Arc<Shim>, config: MoriConfig) -> Result<MoriPlane, MoriError> {
        config.check().map_err(MoriError::Config)?;
        if config.backend == MoriBackend::Rdma {
            check_auto_xgmi(std::env::var_os(AUTO_XGMI).as_deref()).map_err(MoriError::Config)?;
        }
        let host: Ipv4Addr =
            config.host.parse().map_err(|why| MoriError::Config(format!("host: {why}")))?;
        let secret_file = config.secret_file.as_deref();
        let at = (("host", &*config.host), [host.into()]);
        let trust = NetworkTrust::of(at, secret_file, config.insecure_network);
        trust.map_err(|why| MoriError::Config(why.to_string()))?.announce();
        let proof = FleetProof::open(secret_file).map_err(MoriError::Config)?;
        preflight::check(&config).map_err(MoriError::Preflight)?;
        preflight::warn(&config);
        install_last_error(&shim);
        let ms = |ms: u32| Duration::from_millis(ms.into());
        mori_sys::set_timeouts(ms(config.open_ms), ms(config.operation_ms));
        let board = Arc::new(MoriEventQueue::default());
        let incarnation = draw_incarnation().map_err(MoriError::System)?;
        let access = Arc::new(MoriAccessControl::new(incarnation, &config, proof, board.clone()));
        let (acceptor, acceptor_port) =
            listen(host, config.door_port, access.clone(), config.dead_ms)
                .map_err(MoriError::Listen)?;
        let spin = config.spin_us;
        let common = Arc::new(MoriPlaneShared {
            acceptor_port,
            config,
            shim,
            access_control: access,
            watch: MoriCompletionPoller::default(),
            board: board.clone(),
            address: Mutex::new(Address(Arc::default())),
            counts: MoriAtomicCounters::default(),
        });
        let opener = Arc::new(MoriSessionOpener::default());
        let thread = MoriEngineThread::new(common.clone(), opener.clone());
        let thread = thread.map_err(|fault| MoriError::Mori(fault.to_string()))?;
        let (orders, inbox) = mpsc::channel();
        let told = orders.clone();
        let mut plane = MoriPlane {
            common: common.clone(),
            orders: Some(orders),
            acceptor: Some(acceptor),
            threads: Vec::new(),
            ledger: PlaneLedger::default(),
            news: Vec::new(),
            lines: 0,
            recovery: MoriRecovery::Idle,
            resetting: false,
            renewing: false,
            awaits: false,
            check_at: None,
            fences: BTreeSet::new(),
            deferred_grants: Vec::new(),
            broken: None,
            pause: super::recovery::PAUSE,
            worn: None,
        };
        let spin = Duration::from_micros(spin.into());
        plane.start("kvferry-watch", move || common.watch.run(&board, spin))?;
        plane.start("kvferry-mori", move || thread.run(&inbox))?;
        plane.start("kvferry-open", move || opener.run(&told))?;
        Ok(plane)
    }

    fn start(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), MoriError> {
        let thread = spawn(name, work).map_err(|why| MoriError::System(why.to_string()))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for MoriPlane {
    fn drop(&mut self) {
        self.acceptor = None;
        // Ends the lines of peers; nobody is told that number.
        self.common.access_control.renew(0);
        self.tell(MoriEngineCommand::End);
        for thread in self.threads.drain(..) {
            let _ended = thread.join();
        }
        // Last: peers take it for the end of what was under way.
        for peer in self.ledger.peers.values() {
            if let Some(line) = &peer.link {
                line.hang_up();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mori_is_not_to_choose_by_itself() {
        assert_eq!(
            [None, Some("1"), Some("")].map(|it| check_auto_xgmi(it.map(OsStr::new))),
            [(); 3].map(Ok)
        );
        let why = check_auto_xgmi(Some(OsStr::new("0"))).expect_err("it would");
        assert!(why.starts_with("MORI_DISABLE_AUTO_XGMI=0: "), "{why}");
    }
}
