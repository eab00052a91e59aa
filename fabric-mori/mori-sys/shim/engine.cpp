// Engines, peers, memories and sessions.
#include "engine.hpp"

#include <algorithm>

#include "last.hpp"

namespace {

using kf::Call;
using kf::guarded;
using kf::refuse;
using kf::require;
namespace io = mori::io;

// As much as MoRI's own control plane takes.
constexpr size_t kDescriptorMax = size_t{1} << 20;

template <class Desc>
void pack(const Desc &desc, uint8_t *out, size_t room, size_t *len) {
  require(len != nullptr && (out != nullptr || room == 0), "no room for a descriptor");
  msgpack::sbuffer packed;
  msgpack::pack(packed, desc);
  *len = packed.size();
  require(packed.size() <= room, "the descriptor is longer than its buffer");
  std::memcpy(out, packed.data(), packed.size());
}

msgpack::object_handle parse(const char *bytes, size_t len) {
#ifdef MSGPACK_VERSION_MAJOR
  // msgpack-c allocates what the counts in the bytes ask for, before it looks whether they are there.
  const msgpack::unpack_limit limit(64, 0, kDescriptorMax, kDescriptorMax, 0, 2);
  return msgpack::unpack(bytes, len, nullptr, nullptr, limit);
#else
  return msgpack::unpack(bytes, len);
#endif
}

template <class Desc>
Desc unpack(const uint8_t *bytes, size_t len) {
  require(bytes != nullptr && len <= kDescriptorMax, "no descriptor, or one that is too long");
  try {
    const auto object = parse(reinterpret_cast<const char *>(bytes), len);
    Desc desc{};
    object.get().convert(desc);
    return desc;
  } catch (const std::exception &why) {
    refuse(KF_DESCRIPTOR, std::string("MoRI cannot decode the descriptor: ") + why.what());
  }
}

io::EngineDesc unpack_engine(const uint8_t *bytes, size_t len) {
  auto desc = unpack<io::EngineDesc>(bytes, len);
  // A short array leaves the rest as it was: without this an empty one would be a peer.
  if (desc.key.empty()) refuse(KF_DESCRIPTOR, "the engine descriptor has no key");
  return desc;
}

io::MemoryDesc unpack_memory(const uint8_t *bytes, size_t len) {
  auto desc = unpack<io::MemoryDesc>(bytes, len);
  const bool located =
      desc.loc == io::MemoryLocationType::CPU || desc.loc == io::MemoryLocationType::GPU;
  if (desc.engineKey.empty() || !located) {
    refuse(KF_DESCRIPTOR, "the memory descriptor has no engine or no location");
  }
  return desc;
}

/// 0 leaves MoRI's default.
void set(int &field, int32_t value, const char *why) {
  require(value >= 0, why);
  if (value > 0) field = value;
}

io::RdmaBackendConfig rdma_config(const kf_rdma &from) {
  io::RdmaBackendConfig to;
  set(to.qpPerTransfer, from.qp_per_transfer, "qp_per_transfer is negative");
  require(from.post_batch_size >= -1, "post_batch_size is below -1");
  if (from.post_batch_size > 0) to.postBatchSize = from.post_batch_size;
  set(to.numWorkerThreads, from.num_workers, "num_workers is negative");
  to.pollCqMode = from.poll_events != 0 ? io::PollCqMode::EVENT : io::PollCqMode::POLLING;
  to.enableNotification = false;
  to.enableTransferChunking = from.chunking != 0;
  if (from.chunk_bytes > 0) to.chunkBytes = from.chunk_bytes;
  set(to.maxChunksPerTransfer, from.chunks_max, "chunks_max is negative");
  set(to.numNicsPerTransfer, from.nics_per_transfer, "nics_per_transfer is negative");
  set(to.maxSendWr, from.send_wr_max, "send_wr_max is negative");
  set(to.maxCqeNum, from.cqe_max, "cqe_max is negative");
  set(to.maxMsgSge, from.sge_max, "sge_max is negative");
  return to;
}

void create_backend(kf_engine &engine, io::BackendType type, const io::BackendConfig &config,
                    const char *name) {
  engine.backends.reserve(engine.backends.size() + 1);
  require(std::find(engine.backends.begin(), engine.backends.end(), type) == engine.backends.end(),
          "the engine has this backend");
  Call call(name);
  engine.mori->CreateBackend(type, config);
  engine.backends.push_back(type);
}

}  // namespace

int32_t kf_engine_new(const char *key, const char *host, uint16_t port, kf_engine **out,
                      kf_text *error) noexcept {
  return guarded(error, [&] {
    require(key != nullptr && *key != '\0' && host != nullptr && out != nullptr,
            "an engine needs a key, a host and a place to go to");
    kf::watch_the_end();
    auto engine = std::make_unique<kf_engine>();
    {
      Call call("IOEngine");
      engine->mori = std::make_unique<io::IOEngine>(key, io::IOEngineConfig{host, port});
    }
    kf::engine_is_up();
    *out = engine.release();
  });
}

int32_t kf_engine_free(kf_engine *engine, kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr, "no engine");
    const size_t sessions = engine->sessions, memories = engine->memories;
    if (sessions + memories > 0) {
      refuse(KF_ARGUMENT, "the engine still has " + std::to_string(sessions) + " sessions and " +
                              std::to_string(memories) + " memories");
    }
    while (!engine->backends.empty()) {
      Call call("IOEngine::RemoveBackend");
      engine->mori->RemoveBackend(engine->backends.back());
      engine->backends.pop_back();
    }
    {
      Call call("~IOEngine");
      engine->mori.reset();
    }
    delete engine;
    kf::engine_is_down();
  });
}

int32_t kf_engine_rdma(kf_engine *engine, const kf_rdma *config, kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr && config != nullptr, "no engine or no configuration");
    create_backend(*engine, io::BackendType::RDMA, rdma_config(*config),
                   "IOEngine::CreateBackend(RDMA)");
  });
}

int32_t kf_engine_xgmi(kf_engine *engine, int32_t streams, int32_t events,
                       kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr, "no engine");
    io::XgmiBackendConfig config;
    set(config.numStreams, streams, "the number of streams is negative");
    set(config.numEvents, events, "the number of events is negative");
    create_backend(*engine, io::BackendType::XGMI, config, "IOEngine::CreateBackend(XGMI)");
  });
}

int32_t kf_engine_desc(kf_engine *engine, uint8_t *out, size_t room, size_t *len,
                       kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr, "no engine");
    pack(engine->mori->GetEngineDesc(), out, room, len);
  });
}

int32_t kf_peer_add(kf_engine *engine, const uint8_t *desc, size_t len, kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr, "no engine");
    const auto peer = unpack_engine(desc, len);
    Call call("IOEngine::RegisterRemoteEngine");
    engine->mori->RegisterRemoteEngine(peer);
  });
}

int32_t kf_peer_remove(kf_engine *engine, const uint8_t *desc, size_t len,
                       kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr, "no engine");
    const auto peer = unpack_engine(desc, len);
    Call call("IOEngine::DeregisterRemoteEngine");
    engine->mori->DeregisterRemoteEngine(peer);
  });
}

int32_t kf_memory_new(kf_engine *engine, uint64_t base, uint64_t len, int32_t device,
                      uint32_t location, kf_memory **out, kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr && out != nullptr, "no engine, or nowhere for the memory to go to");
    require(base != 0 && len != 0 && base + len > base, "the memory is empty or wraps around");
    require(location == KF_CPU ? device == -1 : location == KF_GPU && device >= 0,
            "memory is in the CPU with device -1, or in a GPU with its device");
    auto memory = std::make_unique<kf_memory>();
    memory->engine = engine;
    {
      Call call("IOEngine::RegisterMemory");
      memory->desc =
          engine->mori->RegisterMemory(reinterpret_cast<void *>(base), len, device,
                                       static_cast<io::MemoryLocationType>(location));
    }
    ++engine->memories;
    *out = memory.release();
  });
}

int32_t kf_memory_desc(const kf_memory *memory, uint8_t *out, size_t room, size_t *len,
                       kf_text *error) noexcept {
  return guarded(error, [&] {
    require(memory != nullptr, "no memory");
    pack(memory->desc, out, room, len);
  });
}

int32_t kf_memory_free(kf_memory *memory, kf_text *error) noexcept {
  return guarded(error, [&] {
    require(memory != nullptr, "no memory");
    if (memory->sessions > 0) {
      refuse(KF_ARGUMENT,
             "the memory still has " + std::to_string(memory->sessions) + " sessions");
    }
    {
      Call call("IOEngine::DeregisterMemory");
      memory->engine->mori->DeregisterMemory(memory->desc);
    }
    --memory->engine->memories;
    delete memory;
  });
}

int32_t kf_session_new(kf_engine *engine, const kf_memory *local, const uint8_t *remote, size_t len,
                       kf_session **out, kf_text *error) noexcept {
  return guarded(error, [&] {
    require(engine != nullptr && local != nullptr && out != nullptr,
            "no engine, no memory, or nowhere for the session to go to");
    require(local->engine == engine, "the memory is of another engine");
    const auto there = unpack_memory(remote, len);
    std::optional<io::IOEngineSession> session;
    {
      Call call("IOEngine::CreateSession");
      session = engine->mori->CreateSession(local->desc, there);
    }
    if (!session) {
      refuse(KF_NO_ROUTE, "no backend serves this memory together with one of engine " +
                              there.engineKey);
    }
    *out = new kf_session{engine, local, there.size, std::move(*session)};
    ++engine->sessions;
    ++local->sessions;
  });
}

int32_t kf_session_free(kf_session *session, kf_text *error) noexcept {
  return guarded(error, [&] {
    require(session != nullptr, "no session");
    kf_engine &engine = *session->engine;
    const kf_memory &local = *session->local;
    {
      Call call("~IOEngineSession");
      delete session;
    }
    --local.sessions;
    --engine.sessions;
  });
}
