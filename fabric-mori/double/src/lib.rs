//! A stand-in for MoRI-IO's C++ library on machines without GPU and NIC: the same classes, memory
//! that really moves between processes of one host, and MoRI's misbehaviour, some of it on demand.
//!
//! `RDMA` copies by `process_vm_readv` and `process_vm_writev` from a thread of the initiator, so a
//! target that is stopped is written to all the same. `XGMI` does so in whoever polls the status,
//! for ordinary memory that is registered as a GPU's. What MoRI answers with undefined behaviour
//! ends the process here, with a line on stderr: calls of one engine that MoRI does not
//! synchronise, sessions and statuses that outlive their backend, `XGMI` out of range.
//!
//! # Knobs
//!
//! | | |
//! |---|---|
//! | `mori_double_faults(spec)`, `MORI_DOUBLE_FAULTS` | what goes wrong; the variable is read when a backend is made, if it has changed |
//! | `mori_double_latency(us)`, `MORI_DOUBLE_LATENCY_US` | from a post until its bytes land and it completes |
//! | `MORI_DOUBLE_RETRY_MS` | how long a peer that does not answer is asked; unset: for ever |
//! | `MORI_DOUBLE_BACKEND_MS`, `MORI_DOUBLE_PAIR_MS` | how long it takes to make an RDMA backend, and either end of a queue pair; 0 |
//! | `MORI_DOUBLE_START=hang`, `crash` | a backend is never made, or the process crashes in it |
//! | `MORI_DOUBLE_MESSAGE_MAX` | bytes of a work request: 1 GiB unless it is set; software RDMA has 8388608 |
//! | `MORI_DOUBLE_NO_NIC=1`, `mori_double_port(up)` | no RDMA device is active: no backend is made, and what is under way fails |
//! | `MORI_DOUBLE_PORTS` | a folder; the same while it has a file of the name of the process's id, which [`PORT_COMMAND`] makes and removes |
//! | `mori_double_nodes(spec)`, `MORI_DOUBLE_NODES` | `prefix=node;prefix=node`: engines whose key begins like this are of that node, whatever `MORI_NODE_ID` says |
//! | `MORI_DOUBLE_NO_SMI=1` | making an RDMA backend ends the process |
//! | `MORI_IO_CP_TIMEOUT_MS`, `MORI_IO_SQ_BACKOFF_TIMEOUT_US`, `MORI_IO_ENABLE_ASYNC_EVENTS`, `MORI_DISABLE_AUTO_XGMI`, `MORI_NODE_ID` | as in MoRI, which has more |
//! | `mori_double_events_out()` | XGMI transfers that were not polled to their end |
//! | `mori_double_event_new()`, `_fire(event)`, `_free(event)` | events for `hipEventQuery` |
//!
//! Faults are items with `;` between them: `kind@n`, `kind@n:ms`, or `n+` for that one and all
//! later ones. `n` counts from 1 and from when the text was set: posts of the process, except for
//! `pin` (sessions it makes) and `pin_remote` (questions of peers for a region).
//!
//! | Kind | |
//! |---|---|
//! | `qp_error` | the first half of the work requests lands, then `ERR_RDMA_OP`; the queue pair is dead |
//! | `ack_lost` | all lands, `ERR_RDMA_OP`; the queue pair is dead |
//! | `lost` | all lands, the status stays `IN_PROGRESS` |
//! | `late:ms` | `ERR_RDMA_OP` at once, the queue pair is dead, and yet all lands after `ms` |
//! | `sq_full:ms` | the post blocks for `ms`, then `ERR_RDMA_OP`; half of it lands `ms` after that |
//! | `slow:ms` | lands and completes after `ms` |
//! | `throw`, `throw_other` | a `std::system_error`, or an `int`, out of the post |
//! | `exit` | the process ends in the post |
//! | `skip` | `SUCCESS` in the post, nothing lands: for the time of what is around it |
//! | `pin`, `pin_remote` | the process aborts |
//!
//! On XGMI `qp_error` is `ERR_GPU_OP` with nothing landed, `lost` never lands, and `ack_lost`,
//! `late` and `sq_full` are only as slow as they say.
//!
//! # What is not as in MoRI
//!
//! - What MoRI corrupts memory by ends the process with a line, as said above; a session that is used
//!   after its backend is a segmentation fault there.
//! - The advice behind the texts of errors is in other words, and the log has few of MoRI's lines.
//! - Any memory that is mapped can be pinned: also what may not be written to, and without a limit.
//! - A peer that does not answer is asked for ever unless `MORI_DOUBLE_RETRY_MS` is set: software RDMA
//!   is alike, a card gives up.
//! - Of asynchronous events there are those of a port that `mori_double_port` flaps, which MoRI only
//!   logs, as all others. There is no GID table.
//! - A notification without room in the send queue is lost; in MoRI it fails the transfer.
//! - A count of more than 2^31 elements in a descriptor or frame is a `std::bad_alloc`, and a lower one
//!   that the bytes lack is not; for MoRI that depends on the memory of the machine.

/// The program that takes a process' port down and up, for `KVFERRY_PORT_COMMAND`.
pub const PORT_COMMAND: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/port");

/// A MoRI to compile and link against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoubleInstall {
    /// Fields of a packed `MemoryDesc`.
    pub class: u32,
    /// The release of MoRI that has this class.
    pub version: &'static str,
    /// `MORI_INCLUDE_DIR`.
    pub include: &'static str,
    /// `MORI_LIB_DIR`, with `libmori_io.so`.
    pub lib: &'static str,
    /// kvferry's shim, compiled for this library.
    pub shim: &'static str,
}

/// One of each layout class, the older first.
pub const INSTALLS: [DoubleInstall; 2] = [
    DoubleInstall {
        class: 9,
        version: "1.2.1",
        include: concat!(env!("OUT_DIR"), "/9/include"),
        lib: concat!(env!("OUT_DIR"), "/9/lib"),
        shim: concat!(env!("OUT_DIR"), "/9/libkf_mori_shim.so"),
    },
    DoubleInstall {
        class: 15,
        version: "1.2.2",
        include: concat!(env!("OUT_DIR"), "/15/include"),
        lib: concat!(env!("OUT_DIR"), "/15/lib"),
        shim: concat!(env!("OUT_DIR"), "/15/libkf_mori_shim.so"),
    },
];
