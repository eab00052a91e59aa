// MoRI's public API as a program in C++ uses it, for benchmarks of what is between: two engines of one
// process with a session, and a batch that is posted again and again.
#include <deque>
#include <memory>
#include <vector>

#include "mori/io/engine.hpp"

namespace dbl {
namespace {

using namespace mori::io;

struct Direct {
  IOEngine near{"direct-near", IOEngineConfig{"127.0.0.1", 0}};
  IOEngine far{"direct-far", IOEngineConfig{"127.0.0.1", 0}};
  MemoryDesc from, to;
  std::optional<IOEngineSession> session;
  SizeVec local, remote, sizes;
  std::deque<std::unique_ptr<TransferStatus>> flying, over;
  uint64_t posted = 0;

  Direct(void* source, void* target, size_t len) {
    RdmaBackendConfig config;
    config.enableNotification = false;
    near.CreateBackend(BackendType::RDMA, config);
    far.CreateBackend(BackendType::RDMA, config);
    near.RegisterRemoteEngine(far.GetEngineDesc());
    far.RegisterRemoteEngine(near.GetEngineDesc());
    from = near.RegisterMemory(source, len, -1, MemoryLocationType::CPU);
    to = far.RegisterMemory(target, len, -1, MemoryLocationType::CPU);
    session = near.CreateSession(from, to);
  }

  ~Direct() {
    session.reset();
    near.RemoveBackend(BackendType::RDMA);
    far.RemoveBackend(BackendType::RDMA);
  }
};

}  // namespace
}  // namespace dbl

extern "C" void* mori_double_direct_new(void* source, void* target, size_t len) {
  return new dbl::Direct(source, target, len);
}

extern "C" void mori_double_direct_free(void* direct) { delete static_cast<dbl::Direct*>(direct); }

// What the next posts write.
extern "C" void mori_double_direct_batch(void* direct, size_t count, const uint64_t* local,
                                         const uint64_t* remote, const uint64_t* len) {
  auto& all = *static_cast<dbl::Direct*>(direct);
  all.local.assign(local, local + count);
  all.remote.assign(remote, remote + count);
  all.sizes.assign(len, len + count);
}

extern "C" void mori_double_direct_post(void* direct) {
  auto& all = *static_cast<dbl::Direct*>(direct);
  all.flying.push_back(std::make_unique<mori::io::TransferStatus>());
  all.session->BatchWrite(all.local, all.remote, all.sizes, all.flying.back().get(), all.posted++);
}

// Waits for the oldest post; whether it succeeded.
extern "C" int mori_double_direct_wait(void* direct) {
  auto& all = *static_cast<dbl::Direct*>(direct);
  if (all.flying.empty()) return 0;
  const bool done = all.flying.front()->WaitFor(-1) == mori::io::StatusCode::SUCCESS;
  // MoRI may not have left it yet.
  all.over.push_back(std::move(all.flying.front()));
  all.flying.pop_front();
  if (all.over.size() > 64) all.over.pop_front();
  return done ? 1 : 0;
}
