/* The C side of MoRI-IO: what the shim exports and Rust loads at run time.
 *
 * Every function returns KF_OK or a negative kind and then puts the reason into `error`, UTF-8 that
 * ends with NUL and is cut to fit; no function throws. No C++ type crosses: descriptors are MoRI's
 * own msgpack bytes, batches are three arrays of one length, statuses are handles. Pointers are only
 * borrowed for the call. Unless a comment says otherwise the calls of one engine have to be
 * serialised by the caller; calls of different engines need not be. */
#ifndef KF_MORI_H
#define KF_MORI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define KF_NOEXCEPT noexcept
extern "C" {
#else
#define KF_NOEXCEPT
#endif

/* Raised with every change of this file. */
#define KF_MORI_ABI 3

enum kf_kind {
  KF_OK = 0,
  KF_EXCEPTION = -1,  /* MoRI threw */
  KF_SYSTEM = -2,     /* MoRI threw a std::system_error: the peer's port is closed, say */
  KF_DESCRIPTOR = -3, /* bytes that MoRI cannot decode */
  KF_ARGUMENT = -4,   /* null, ragged, out of range, or a buffer that is too small */
  KF_ABI = -5,        /* the library that is loaded is not the one the shim was compiled for */
  KF_NO_ROUTE = -6,   /* no backend serves this pair of memories */
  KF_STALE = -7,      /* a status handle whose generation is over */
  KF_MISSING = -8     /* this MoRI, or HIP, has no such function */
};

typedef struct kf_text {
  char *data;
  size_t room; /* bytes with the final NUL */
} kf_text;

typedef struct kf_info {
  uint32_t abi;                /* KF_MORI_ABI */
  uint32_t layout;             /* fields of a packed MemoryDesc: 9 (v1.2.1) or 15 (v1.2.2 to HEAD) */
  uint32_t engine_desc;        /* sizeof, here and below */
  uint32_t memory_desc;
  uint32_t transfer_status;
  uint32_t rdma_config;
  uint32_t engine;
  const char *compiled_for;    /* identity of libmori_io.so at compile time: "build-id:HEX" or "sha256:HEX" */
  const char *compiled_at;     /* its path at compile time */
} kf_info;

/* MoRI's RdmaBackendConfig; 0 or -1 where MoRI takes that for its own default. */
typedef struct kf_rdma {
  int32_t qp_per_transfer;
  int32_t post_batch_size;
  int32_t num_workers;
  int32_t poll_events; /* 0 polling, 1 event */
  int32_t chunking;    /* 0 or 1 */
  uint64_t chunk_bytes;
  int32_t chunks_max;
  int32_t nics_per_transfer;
  int32_t send_wr_max;
  int32_t cqe_max;
  int32_t sge_max;
} kf_rdma;

typedef struct kf_engine kf_engine;
typedef struct kf_memory kf_memory;
typedef struct kf_session kf_session;

enum kf_backend { KF_XGMI = 1, KF_RDMA = 2 };
enum kf_location { KF_CPU = 1, KF_GPU = 2 };
enum kf_direction { KF_READ = 0, KF_WRITE = 1 };

/* MoRI's StatusCode. */
enum kf_code {
  KF_SUCCESS = 0,
  KF_INIT = 1,
  KF_IN_PROGRESS = 2,
  KF_ERR_INVALID_ARGS = 11,
  KF_ERR_NOT_FOUND = 12,
  KF_ERR_RDMA_OP = 13,
  KF_ERR_BAD_STATE = 14,
  KF_ERR_GPU_OP = 15
};

/* What the shim was compiled for; the strings live as long as the shim. */
int32_t kf_mori_info(kf_info *out) KF_NOEXCEPT;
/* Compares the libmori_io.so of this process with it: KF_ABI with both identities and paths. */
int32_t kf_mori_check(kf_text *error) KF_NOEXCEPT;

/* An engine without backends and its pool of statuses. From the first one on, a process that ends
 * while an engine is up prints one line with the last call into MoRI. It handles SIGABRT for that,
 * and hands it on. */
int32_t kf_engine_new(const char *key, const char *host, uint16_t port, kf_engine **out,
                      kf_text *error) KF_NOEXCEPT;
/* Removes the backends, then the engine, then the statuses. Sessions and memories have to be freed
 * before: otherwise KF_ARGUMENT, and nothing is freed. */
int32_t kf_engine_free(kf_engine *engine, kf_text *error) KF_NOEXCEPT;
/* Notifications are off. */
int32_t kf_engine_rdma(kf_engine *engine, const kf_rdma *config, kf_text *error) KF_NOEXCEPT;
int32_t kf_engine_xgmi(kf_engine *engine, int32_t streams, int32_t events, kf_text *error) KF_NOEXCEPT;
/* Packed EngineDesc, with the port that the control plane is bound to. */
int32_t kf_engine_desc(kf_engine *engine, uint8_t *out, size_t room, size_t *len,
                       kf_text *error) KF_NOEXCEPT;

/* May run beside a post, a session's end and whatever status functions, as kf_session_new. */
int32_t kf_peer_add(kf_engine *engine, const uint8_t *desc, size_t len, kf_text *error) KF_NOEXCEPT;
int32_t kf_peer_remove(kf_engine *engine, const uint8_t *desc, size_t len, kf_text *error) KF_NOEXCEPT;

/* device -1 for CPU memory. */
int32_t kf_memory_new(kf_engine *engine, uint64_t base, uint64_t len, int32_t device,
                      uint32_t location, kf_memory **out, kf_text *error) KF_NOEXCEPT;
int32_t kf_memory_desc(const kf_memory *memory, uint8_t *out, size_t room, size_t *len,
                       kf_text *error) KF_NOEXCEPT;
/* KF_ARGUMENT while it has sessions. */
int32_t kf_memory_free(kf_memory *memory, kf_text *error) KF_NOEXCEPT;

/* `remote` is a packed MemoryDesc of a peer that was added. Connects and pins: may take seconds, and
 * may run beside a post or a session's end, so that other sessions go on. */
int32_t kf_session_new(kf_engine *engine, const kf_memory *local, const uint8_t *remote, size_t len,
                       kf_session **out, kf_text *error) KF_NOEXCEPT;
int32_t kf_session_free(kf_session *session, kf_text *error) KF_NOEXCEPT;

/* A status in state KF_INIT. Callable from any thread, as the four below. */
int32_t kf_status_take(kf_engine *engine, uint64_t *handle, kf_text *error) KF_NOEXCEPT;
/* Its code; drives the progress of XGMI, so one thread at a time per status. */
int32_t kf_status_poll(kf_engine *engine, uint64_t handle, uint32_t *code, kf_text *error) KF_NOEXCEPT;
/* MoRI's message, in `text`. */
int32_t kf_status_text(kf_engine *engine, uint64_t handle, kf_text *text) KF_NOEXCEPT;
/* Ends the handle. One that succeeded, or was never posted, is used again; any other one is kept
 * until the engine is freed, since MoRI may still write to it. */
int32_t kf_status_give(kf_engine *engine, uint64_t handle, kf_text *error) KF_NOEXCEPT;
/* Statuses that are taken, kept and free. */
int32_t kf_status_count(kf_engine *engine, uint64_t counts[3], kf_text *error) KF_NOEXCEPT;

/* Posts a batch of `count` ranges. May block for seconds. KF_OK says that MoRI returned; the status
 * says what of. On any other kind the status is as MoRI left it. May run beside the polls and takes
 * of statuses, and beside kf_session_new and kf_peer_add, but nothing else of this engine. */
int32_t kf_post(kf_session *session, uint32_t direction, size_t count, const uint64_t *local,
                const uint64_t *remote, const uint64_t *len, uint64_t status,
                kf_text *error) KF_NOEXCEPT;

/* Where that line is written to beside stderr; -1 for nowhere. */
int32_t kf_last_words(int32_t fd) KF_NOEXCEPT;

/* hipMalloc and hipFree: memory of a GPU, for who has none of its own. */
int32_t kf_device_alloc(int32_t device, uint64_t len, uint64_t *base, kf_text *error) KF_NOEXCEPT;
int32_t kf_device_free(uint64_t base, kf_text *error) KF_NOEXCEPT;
/* hipEventQuery: whether everything before the event is done. Callable from any thread. */
int32_t kf_event_done(uint64_t event, uint32_t *done, kf_text *error) KF_NOEXCEPT;

#ifdef __cplusplus
}
#endif
#endif
