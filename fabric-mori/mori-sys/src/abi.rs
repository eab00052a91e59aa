//! `shim/kf_mori.h` in Rust; a test compares the two.

// These are what the C compiler calls them.
#![allow(non_upper_case_globals)]

use std::ffi::c_char;
use std::marker::{PhantomData, PhantomPinned};

/// The version of the interface.
pub const MORI_ABI: u32 = 3;

macro_rules! constants {
    ($(#[$doc:meta])* $group:ident: $type:ty { $($(#[$note:meta])* $name:ident = $value:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $group {}

        impl $group {
            $($(#[$note])* pub const $name: $type = $value;)*
        }
    };
}

constants! {
    /// What a function returns.
    Kind: i32 {
        /// It did what it says.
        OK = 0,
        /// MoRI threw.
        EXCEPTION = -1,
        /// MoRI threw a `std::system_error`, or HIP failed.
        SYSTEM = -2,
        /// Bytes that MoRI cannot decode.
        DESCRIPTOR = -3,
        /// Null, ragged, out of range, or a buffer that is too small.
        ARGUMENT = -4,
        /// The library that is loaded is not the one the shim was compiled for.
        ABI = -5,
        /// No backend serves this pair of memories.
        NO_ROUTE = -6,
        /// A status handle whose generation is over.
        STALE = -7,
        /// This MoRI, or HIP, has no such function.
        MISSING = -8,
    }
}

constants! {
    /// MoRI's backends.
    Backend: u32 {
        /// Copies between GPUs of one node.
        XGMI = 1,
        /// One-sided verbs.
        RDMA = 2,
    }
}

constants! {
    Location: u32 {
        CPU = 1,
        GPU = 2,
    }
}

constants! {
    Direction: u32 {
        /// From remote to local.
        READ = 0,
        /// From local to remote.
        WRITE = 1,
    }
}

constants! {
    /// MoRI's `StatusCode`.
    Code: u32 {
        /// All bytes are there.
        SUCCESS = 0,
        /// Never submitted.
        INIT = 1,
        IN_PROGRESS = 2,
        /// Arguments that the backend refuses.
        ERR_INVALID_ARGS = 11,
        /// Unused by MoRI-IO.
        ERR_NOT_FOUND = 12,
        /// A verb, or its completion, failed: the pair of engines is unusable from here on.
        ERR_RDMA_OP = 13,
        /// No backend, or none that is ready.
        ERR_BAD_STATE = 14,
        /// HIP failed.
        ERR_GPU_OP = 15,
    }
}

/// A buffer for a text.
#[repr(C)]
#[derive(Debug)]
pub struct Text {
    /// Its start; null for no text.
    pub data: *mut c_char,
    /// Its bytes, with the final NUL.
    pub room: usize,
}

/// What a shim was compiled for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Info {
    /// The shim's [`MORI_ABI`].
    pub abi: u32,
    /// Fields of a packed `MemoryDesc`.
    pub layout: u32,
    /// `sizeof(EngineDesc)`.
    pub engine_desc: u32,
    /// `sizeof(MemoryDesc)`.
    pub memory_desc: u32,
    /// `sizeof(TransferStatus)`.
    pub transfer_status: u32,
    /// `sizeof(RdmaBackendConfig)`.
    pub rdma_config: u32,
    /// `sizeof(IOEngine)`.
    pub engine: u32,
    /// Identity of `libmori_io.so`.
    pub compiled_for: *const c_char,
    /// Its path at compile time.
    pub compiled_at: *const c_char,
}

/// MoRI's `RdmaBackendConfig`; 0, and -1 for `post_batch_size`, leave MoRI's default.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rdma {
    /// Queue pairs of one transfer.
    pub qp_per_transfer: i32,
    /// Work requests that are posted at once.
    pub post_batch_size: i32,
    pub num_workers: i32,
    /// 0 polls completions, 1 waits for events.
    pub poll_events: i32,
    /// Whether long requests are split.
    pub chunking: i32,
    /// Into pieces of so many bytes,
    pub chunk_bytes: u64,
    /// but no more pieces than these.
    pub chunks_max: i32,
    /// NICs of one transfer.
    pub nics_per_transfer: i32,
    /// Entries of a send queue.
    pub send_wr_max: i32,
    /// Entries of a completion queue.
    pub cqe_max: i32,
    /// Segments of a work request.
    pub sge_max: i32,
}

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            nothing: [u8; 0],
            pinned: PhantomData<(*mut u8, PhantomPinned)>,
        }
    )*};
}

opaque! {
    /// An engine and its pool of statuses.
    Engine;
    Memory;
    /// A local memory with a remote one.
    Session;
}

macro_rules! functions {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        /// The shim's functions. Each returns a [`Kind`]; what they ask for is in
        /// `shim/kf_mori.h`.
        #[derive(Clone, Copy, Debug)]
        pub struct Functions {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg: $type),*) -> i32,)*
        }

        impl Functions {
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// # Safety
            ///
            /// The library has to be a shim of this interface, and stay loaded.
            pub(crate) unsafe fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: The caller says that these are the functions of `kf_mori.h`.
                unsafe {
                    Ok(Functions {
                        $($name: *library.get(concat!(stringify!($name), "\0"))?,)*
                    })
                }
            }
        }
    };
}

functions! {
    /// What the shim was compiled for.
    fn kf_mori_info(out: *mut Info);
    /// Compares MoRI's library with that.
    fn kf_mori_check(error: *mut Text);
    /// An engine without backends.
    fn kf_engine_new(
        key: *const c_char, host: *const c_char, port: u16, out: *mut *mut Engine, error: *mut Text,
    );
    /// Frees it, if it has no sessions and memories.
    fn kf_engine_free(engine: *mut Engine, error: *mut Text);
    /// Adds the RDMA backend.
    fn kf_engine_rdma(engine: *mut Engine, config: *const Rdma, error: *mut Text);
    /// Adds the xGMI backend.
    fn kf_engine_xgmi(engine: *mut Engine, streams: i32, events: i32, error: *mut Text);
    /// The packed `EngineDesc`.
    fn kf_engine_desc(
        engine: *mut Engine, out: *mut u8, room: usize, len: *mut usize, error: *mut Text,
    );
    fn kf_peer_add(engine: *mut Engine, desc: *const u8, len: usize, error: *mut Text);
    fn kf_peer_remove(engine: *mut Engine, desc: *const u8, len: usize, error: *mut Text);
    fn kf_memory_new(
        engine: *mut Engine, base: u64, len: u64, device: i32, location: u32, out: *mut *mut Memory,
        error: *mut Text,
    );
    /// Its packed `MemoryDesc`.
    fn kf_memory_desc(
        memory: *const Memory, out: *mut u8, room: usize, len: *mut usize, error: *mut Text,
    );
    /// Deregisters it, if it has no sessions.
    fn kf_memory_free(memory: *mut Memory, error: *mut Text);
    /// Connects a memory with one of a peer.
    fn kf_session_new(
        engine: *mut Engine, local: *const Memory, remote: *const u8, len: usize,
        out: *mut *mut Session, error: *mut Text,
    );
    fn kf_session_free(session: *mut Session, error: *mut Text);
    /// A status in state [`Code::INIT`].
    fn kf_status_take(engine: *mut Engine, handle: *mut u64, error: *mut Text);
    fn kf_status_poll(engine: *mut Engine, handle: u64, code: *mut u32, error: *mut Text);
    fn kf_status_text(engine: *mut Engine, handle: u64, text: *mut Text);
    fn kf_status_give(engine: *mut Engine, handle: u64, error: *mut Text);
    /// Statuses that are taken, kept and free.
    fn kf_status_count(engine: *mut Engine, counts: *mut u64, error: *mut Text);
    fn kf_post(
        session: *mut Session, direction: u32, count: usize, local: *const u64, remote: *const u64,
        len: *const u64, status: u64, error: *mut Text,
    );
    /// Where the last line of a process that MoRI ends goes to, beside stderr.
    fn kf_last_words(fd: i32);
    /// Memory of a GPU.
    fn kf_device_alloc(device: i32, len: u64, base: *mut u64, error: *mut Text);
    fn kf_device_free(base: u64, error: *mut Text);
    /// Whether all before a HIP event is done.
    fn kf_event_done(event: u64, done: *mut u32, error: *mut Text);
}
