//! MoRI's objects in Rust: what uses one keeps it alive, and what failed is kept until MoRI cannot
//! touch it any more.

use crate::config::{MoriBackend, MoriConfig};
use crate::job::MoriBatch;
use kvferry_engine::fabric::{Direction, Memory};
pub(crate) use mori_sys::Shim;
use mori_sys::{Code as Codes, Kind, Location, Rdma, Text};
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr;
use std::sync::Arc;

/// Bytes of a descriptor at most; those of MoRI have below 1 KiB.
const DESC_MAX: usize = 8 << 10;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MoriCallError {
    call: &'static str,
    kind: i32,
    text: String,
}

impl MoriCallError {
    pub(crate) fn of(call: &'static str, text: impl Into<String>) -> MoriCallError {
        MoriCallError { call, kind: Kind::ARGUMENT, text: text.into() }
    }

    /// True if the system refused something, such as a connection to the peer.
    pub(crate) fn is_system(&self) -> bool {
        self.kind == Kind::SYSTEM
    }
}

impl fmt::Display for MoriCallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.text)
    }
}

/// Calls a function of the shim with room for its text. All of them are unsafe: the caller says why
/// it may call this one.
macro_rules! call {
    ($shim:expr, $name:ident($($argument:expr),* $(,)?)) => {
        crate::mori::with_text(stringify!($name), |text| {
            ($shim.functions.$name)($($argument,)* text)
        })
    };
}

pub(crate) fn with_text(
    name: &'static str,
    function: impl FnOnce(*mut Text) -> i32,
) -> Result<(), MoriCallError> {
    let mut buffer = [0_u8; 512];
    let mut text = Text { data: buffer.as_mut_ptr().cast::<c_char>(), room: buffer.len() };
    match function(&raw mut text) {
        Kind::OK => Ok(()),
        kind => Err(MoriCallError { call: name, kind, text: text_of(&buffer) }),
    }
}

fn text_of(buffer: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(buffer).unwrap_or_default();
    text.to_string_lossy().into_owned()
}

/// Reads a descriptor into a buffer that is long enough.
fn bytes(
    name: &'static str,
    read: impl FnOnce(*mut u8, usize, *mut usize, *mut Text) -> i32,
) -> Result<Vec<u8>, MoriCallError> {
    let mut buffer = vec![0; DESC_MAX];
    let mut len = 0;
    with_text(name, |text| read(buffer.as_mut_ptr(), DESC_MAX, &raw mut len, text))?;
    buffer.truncate(len);
    Ok(buffer)
}

/// The engine with its backends, which go when the last that uses it is gone.
#[derive(Debug)]
struct MoriEngineInner {
    shim: Arc<Shim>,
    raw: *mut mori_sys::Engine,
}

// SAFETY: The shim's functions may be called from any thread; those that have to be serialised are
// called by the owner of `Engine`, `Region` and `Session`, none of which can be copied or shared.
unsafe impl Send for MoriEngineInner {}
// SAFETY: What is called by shared references are the functions of statuses, which lock.
unsafe impl Sync for MoriEngineInner {}

impl Drop for MoriEngineInner {
    fn drop(&mut self) {
        // SAFETY: Regions and sessions hold this, so that there are none any more.
        let freed = unsafe { call!(self.shim, kf_engine_free(self.raw)) };
        debug_assert_eq!(freed, Ok(()), "the engine is leaked");
    }
}

/// An engine of MoRI. Its own calls, and those of its regions and sessions, are one thread's.
#[derive(Debug)]
pub(crate) struct MoriEngineHandle(Arc<MoriEngineInner>);

/// MoRI's numbers are signed.
fn signed(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

impl MoriEngineHandle {
    /// An engine with the backend of the configuration.
    pub(crate) fn new(
        shim: &Arc<Shim>,
        config: &MoriConfig,
        key: &str,
    ) -> Result<MoriEngineHandle, MoriCallError> {
        let plain = |text: &str| {
            CString::new(text).map_err(|_| MoriCallError::of("kf_engine_new", "a name with a NUL"))
        };
        let (key, host) = (plain(key)?, plain(&config.host)?);
        let mut raw = ptr::null_mut();
        let port = match config.backend {
            MoriBackend::Rdma => config.port,
            // Nothing listens: MoRI takes this port as the word for that.
            MoriBackend::Xgmi => 1,
        };
        // SAFETY: Texts that end with NUL, and a place for the result.
        unsafe { call!(shim, kf_engine_new(key.as_ptr(), host.as_ptr(), port, &raw mut raw)) }?;
        let engine = MoriEngineHandle(Arc::new(MoriEngineInner { shim: shim.clone(), raw }));
        let streams = signed(config.streams);
        match config.backend {
            MoriBackend::Rdma => engine.add_rdma(config)?,
            // SAFETY: The engine lives.
            MoriBackend::Xgmi => unsafe { call!(shim, kf_engine_xgmi(raw, streams, streams)) }?,
        }
        Ok(engine)
    }

    fn add_rdma(&self, config: &MoriConfig) -> Result<(), MoriCallError> {
        let rdma = Rdma {
            qp_per_transfer: signed(config.qp_per_transfer),
            post_batch_size: if config.post_batch_size == 0 {
                -1
            } else {
                signed(config.post_batch_size)
            },
            num_workers: signed(config.num_workers),
            poll_events: config.poll_events.into(),
            chunking: config.chunking.into(),
            chunk_bytes: config.chunk_bytes,
            chunks_max: signed(config.chunks_max),
            nics_per_transfer: signed(config.nics_per_transfer),
            send_wr_max: signed(config.send_wr_max),
            cqe_max: signed(config.cqe_max),
            sge_max: signed(config.sge_max),
        };
        // SAFETY: The engine lives, and the configuration for the call.
        unsafe { call!(self.0.shim, kf_engine_rdma(self.0.raw, &raw const rdma)) }
    }

    /// MoRI's packed descriptor.
    pub(crate) fn desc(&self) -> Result<Vec<u8>, MoriCallError> {
        // SAFETY: The engine lives, and the buffer has the room that is told.
        bytes("kf_engine_desc", |out, room, len, text| unsafe {
            (self.0.shim.functions.kf_engine_desc)(self.0.raw, out, room, len, text)
        })
    }

    /// Makes a peer known by its packed descriptor.
    pub(crate) fn add_peer(&self, desc: &[u8]) -> Result<(), MoriCallError> {
        // SAFETY: The engine lives, and the bytes for the call.
        unsafe { call!(self.0.shim, kf_peer_add(self.0.raw, desc.as_ptr(), desc.len())) }
    }

    /// Registers memory, which has to stay until the region is dropped.
    pub(crate) fn register(&self, memory: Memory) -> Result<MoriMemoryHandle, MoriCallError> {
        let (range, device, location) = match memory {
            Memory::Own(range) => (range, -1, Location::CPU),
            Memory::Device { range, device } => (range, signed(device), Location::GPU),
            other => return Err(MoriCallError::of("kf_memory_new", format!("memory {other:?}"))),
        };
        if let Some(why) = memory.unproven() {
            return Err(MoriCallError::of("kf_memory_new", why));
        }
        let (base, len) = (range.base(), range.len());
        let mut raw = ptr::null_mut();
        // SAFETY: The engine lives. Who made the range has promised that it is there, and that
        // peers may reach it, until it is deregistered, which drops what is returned.
        unsafe {
            call!(self.0.shim, kf_memory_new(self.0.raw, base, len, device, location, &raw mut raw))
        }?;
        Ok(MoriMemoryHandle { engine: self.0.clone(), raw })
    }

    /// Connects a region with memory of a peer; may take seconds.
    pub(crate) fn session(
        &self,
        local: &MoriMemoryHandle,
        remote: &[u8],
    ) -> Result<MoriSessionHandle, MoriCallError> {
        let mut raw = ptr::null_mut();
        // SAFETY: Engine and region live, and the bytes for the call.
        unsafe {
            call!(
                self.0.shim,
                kf_session_new(self.0.raw, local.raw, remote.as_ptr(), remote.len(), &raw mut raw)
            )
        }?;
        Ok(MoriSessionHandle { engine: self.0.clone(), raw })
    }
}

/// Memory that an engine knows.
#[derive(Debug)]
pub(crate) struct MoriMemoryHandle {
    engine: Arc<MoriEngineInner>,
    raw: *mut mori_sys::Memory,
}

// SAFETY: Calls come from one thread at a time, whichever it is.
unsafe impl Send for MoriMemoryHandle {}

impl MoriMemoryHandle {
    /// MoRI's packed descriptor.
    pub(crate) fn desc(&self) -> Result<Vec<u8>, MoriCallError> {
        // SAFETY: The memory lives, and the buffer has the room that is told.
        bytes("kf_memory_desc", |out, room, len, text| unsafe {
            (self.engine.shim.functions.kf_memory_desc)(self.raw, out, room, len, text)
        })
    }
}

impl Drop for MoriMemoryHandle {
    fn drop(&mut self) {
        // SAFETY: Ours, and used by nobody from here on.
        let freed = unsafe { call!(self.engine.shim, kf_memory_free(self.raw)) };
        debug_assert_eq!(freed, Ok(()), "a memory is leaked, and its engine with it");
    }
}

/// A region with memory of a peer.
#[derive(Debug)]
pub(crate) struct MoriSessionHandle {
    engine: Arc<MoriEngineInner>,
    raw: *mut mori_sys::Session,
}

// SAFETY: Calls come from one thread at a time, whichever it is.
unsafe impl Send for MoriSessionHandle {}

impl MoriSessionHandle {
    /// A status that was not used yet.
    pub(crate) fn status(&self) -> Result<MoriTransferStatus, MoriCallError> {
        let mut handle = 0;
        // SAFETY: The engine lives.
        unsafe { call!(self.engine.shim, kf_status_take(self.engine.raw, &raw mut handle)) }?;
        Ok(MoriTransferStatus { engine: self.engine.clone(), handle })
    }

    /// Posts a batch; may take seconds. On an error MoRI may have posted a part.
    pub(crate) fn post(
        &self,
        job: &MoriBatch,
        status: &MoriTransferStatus,
    ) -> Result<(), MoriCallError> {
        let direction = match job.direction {
            Direction::Read => mori_sys::Direction::READ,
            Direction::Write => mori_sys::Direction::WRITE,
        };
        // SAFETY: Three lists of one length, which `Job` sees to, of a session and a status that
        // live.
        unsafe {
            call!(
                self.engine.shim,
                kf_post(
                    self.raw,
                    direction,
                    job.len.len(),
                    job.local.as_ptr(),
                    job.remote.as_ptr(),
                    job.len.as_ptr(),
                    status.handle
                )
            )
        }
    }
}

impl Drop for MoriSessionHandle {
    fn drop(&mut self) {
        // SAFETY: Ours, and used by nobody from here on.
        let freed = unsafe { call!(self.engine.shim, kf_session_free(self.raw)) };
        debug_assert_eq!(freed, Ok(()), "a session is leaked, and its engine with it");
    }
}

/// What MoRI says of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoriStatusCode {
    Success,
    InProgress,
    Rdma,
    /// Anything else that went wrong, as MoRI numbers it.
    Other(u32),
}

/// The status of one batch. It goes back to the pool, or is kept there until the engine is gone if
/// MoRI may still write to it.
#[derive(Debug)]
pub(crate) struct MoriTransferStatus {
    engine: Arc<MoriEngineInner>,
    handle: u64,
}

impl MoriTransferStatus {
    /// For one thread at a time, as it drives xGMI.
    pub(crate) fn poll(&self) -> MoriStatusCode {
        let mut code = Codes::INIT;
        // SAFETY: The engine lives, and the handle was given out.
        let polled = unsafe {
            call!(self.engine.shim, kf_status_poll(self.engine.raw, self.handle, &raw mut code))
        };
        match code {
            _ if polled.is_err() => MoriStatusCode::Other(Codes::ERR_BAD_STATE),
            Codes::SUCCESS => MoriStatusCode::Success,
            Codes::IN_PROGRESS => MoriStatusCode::InProgress,
            Codes::ERR_RDMA_OP => MoriStatusCode::Rdma,
            other => MoriStatusCode::Other(other),
        }
    }

    /// MoRI's message.
    pub(crate) fn text(&self) -> String {
        let mut buffer = [0_u8; 512];
        let mut text = Text { data: buffer.as_mut_ptr().cast::<c_char>(), room: buffer.len() };
        // SAFETY: The engine lives, and the buffer has the room that is told.
        unsafe {
            (self.engine.shim.functions.kf_status_text)(
                self.engine.raw,
                self.handle,
                &raw mut text,
            );
        }
        text_of(&buffer)
    }
}

impl Drop for MoriTransferStatus {
    fn drop(&mut self) {
        // SAFETY: The engine lives, and the handle is ours.
        let given =
            unsafe { call!(self.engine.shim, kf_status_give(self.engine.raw, self.handle)) };
        debug_assert_eq!(given, Ok(()), "a status was given back twice");
    }
}
