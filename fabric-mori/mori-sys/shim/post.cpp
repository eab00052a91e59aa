// Statuses, posts, and what the shim was compiled for.
#include "engine.hpp"
#include "identity.hpp"
#include "last.hpp"

namespace {

using kf::Call;
using kf::fail;
using kf::guarded;
using kf::refuse;
using kf::require;
using kf::StatusPool;
namespace io = mori::io;

/// A status on its way into MoRI. It counts as posted also when MoRI throws.
class Posting {
 public:
  Posting(StatusPool &pool, uint64_t handle) : slot_(pool.begin_post(handle)), handle_(handle) {}
  ~Posting() { StatusPool::end_post(slot_, handle_); }
  Posting(const Posting &) = delete;
  Posting &operator=(const Posting &) = delete;

  io::TransferStatus *status() { return &slot_.status; }

 private:
  StatusPool::Slot &slot_;
  uint64_t handle_;
};

void check_range(const kf_session &session, size_t i, uint64_t local, uint64_t remote,
                 uint64_t len) {
  const auto inside = [len](uint64_t offset, uint64_t size) {
    return len <= size && offset <= size - len;
  };
  const bool here = inside(local, session.local->desc.size);
  if (here && inside(remote, session.remote_size)) return;
  refuse(KF_ARGUMENT, "range " + std::to_string(i) + " of " + std::to_string(len) +
                          " bytes leaves the " + (here ? "remote" : "local") + " memory");
}

/// Looks at all of them before it says which: this is in the way of every batch. Below 2^63 the
/// highest bit of a difference tells that it is negative.
void check_ranges(const kf_session &session, size_t count, const uint64_t *local,
                  const uint64_t *remote, const uint64_t *len) {
  const uint64_t here = session.local->desc.size, there = session.remote_size;
  uint64_t bits = here | there;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t last_here = here - len[i], last_there = there - len[i];
    bits |= local[i] | remote[i] | len[i] | last_here | last_there;
    bits |= (last_here - local[i]) | (last_there - remote[i]);
  }
  if (bits >> 63 == 0) return;
  for (size_t i = 0; i < count; ++i) check_range(session, i, local[i], remote[i], len[i]);
}

void post_one(io::IOEngineSession &session, bool read, uint64_t local, uint64_t remote,
              uint64_t len, io::TransferStatus *status) {
  const auto id = session.AllocateTransferUniqueId();
  if (read) {
    session.Read(local, remote, len, status, id);
  } else {
    session.Write(local, remote, len, status, id);
  }
}

void post_batch(kf_session &session, bool read, io::TransferStatus *status) {
  const kf_engine &ranges = *session.engine;
  const auto id = session.session.AllocateTransferUniqueId();
  if (read) {
    session.session.BatchRead(ranges.local, ranges.remote, ranges.len, status, id);
  } else {
    session.session.BatchWrite(ranges.local, ranges.remote, ranges.len, status, id);
  }
}

/// The code of the library that the shim's calls end up in.
const void *inside_mori() {
  const auto method = &io::IOEngine::RemoveBackend;
  const void *code;
  // A pointer to a method that is not virtual starts with its address.
  static_assert(sizeof method >= sizeof code);
  std::memcpy(&code, &method, sizeof code);
  return code;
}

void check_layout() {
  msgpack::sbuffer packed;
  msgpack::pack(packed, io::MemoryDesc{});
  const auto first = static_cast<unsigned char>(packed.size() == 0 ? 0 : packed.data()[0]);
  if (first != (0x90u | kf::layout)) {
    refuse(KF_ABI, "MoRI packs a MemoryDesc in another way than its " +
                       std::to_string(kf::layout) + " fields");
  }
}

}  // namespace

int32_t kf_mori_info(kf_info *out) noexcept {
  if (out == nullptr) return KF_ARGUMENT;
  *out = kf_info{KF_MORI_ABI,
                 kf::layout,
                 sizeof(io::EngineDesc),
                 sizeof(io::MemoryDesc),
                 sizeof(io::TransferStatus),
                 sizeof(io::RdmaBackendConfig),
                 sizeof(io::IOEngine),
                 kf::compiled_for(),
                 kf::compiled_at()};
  return KF_OK;
}

int32_t kf_mori_check(kf_text *error) noexcept {
  return guarded(error, [] {
    kf::check_loaded(inside_mori());
    check_layout();
  });
}

int32_t kf_status_take(kf_engine *engine, uint64_t *handle, kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr && handle != nullptr, "no engine, or nowhere for the handle to go to");
    *handle = engine->pool.take();
  });
}

int32_t kf_status_poll(kf_engine *engine, uint64_t handle, uint32_t *code,
                       kf_text *error) noexcept {
  if (engine == nullptr || code == nullptr) return fail(error, KF_ARGUMENT, "no engine or no code");
  StatusPool::Use use;
  StatusPool::Slot *slot = engine->pool.find(handle, use);
  if (slot == nullptr) return fail(error, KF_STALE, StatusPool::kStale);
  if (use == StatusPool::kPosting) {
    // XGMI sets this code before the callbacks that it makes a poll run.
    *code = KF_IN_PROGRESS;
    return KF_OK;
  }
  return guarded(error, [&] { *code = slot->status.CodeUint32(); });
}

int32_t kf_status_text(kf_engine *engine, uint64_t handle, kf_text *text) noexcept {
  return guarded(text, [&] {
    require(engine != nullptr, "no engine");
    StatusPool::Use use;
    kf::put(text, engine->pool.live(handle, use).status.Message());
  });
}

int32_t kf_status_give(kf_engine *engine, uint64_t handle, kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr, "no engine");
    engine->pool.give(handle);
  });
}

int32_t kf_status_count(kf_engine *engine, uint64_t counts[3], kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr && counts != nullptr, "no engine, or nowhere for the counts to go to");
    engine->pool.count(counts);
  });
}

int32_t kf_post(kf_session *session, uint32_t direction, size_t count, const uint64_t *local,
                const uint64_t *remote, const uint64_t *len, uint64_t status,
                kf_text *error) noexcept {
  return guarded(error, [&] {
    require(session != nullptr, "no session");
    require(direction == KF_READ || direction == KF_WRITE, "no such direction");
    require(count == 0 || (local != nullptr && remote != nullptr && len != nullptr), "no ranges");
    check_ranges(*session, count, local, remote, len);
    const bool read = direction == KF_READ;
    kf_engine &engine = *session->engine;
    if (count > 1) {
      engine.local.assign(local, local + count);
      engine.remote.assign(remote, remote + count);
      engine.len.assign(len, len + count);
    }
    Posting posting(engine.pool, status);
    if (count == 0) {
      posting.status()->SetCode(io::StatusCode::SUCCESS);
    } else if (count == 1) {
      // Not a batch of one: that would take the detour over MoRI's workers, if it has any.
      Call call(read ? "IOEngineSession::Read" : "IOEngineSession::Write");
      post_one(session->session, read, *local, *remote, *len, posting.status());
    } else {
      Call call(read ? "IOEngineSession::BatchRead" : "IOEngineSession::BatchWrite");
      post_batch(*session, read, posting.status());
    }
  });
}
