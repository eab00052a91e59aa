#include "xgmi.hpp"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "copy.hpp"
#include "plan.hpp"

namespace dbl {

namespace io = mori::io;

namespace {

std::atomic<uint64_t> events_out{0};

// What stands in a descriptor for hipIpcMemHandle_t. Process numbers are used again, start times
// are not.
struct Handle {
  char magic[8];
  uint64_t pid, started, addr;
};
constexpr char kMagic[8] = {'m', 'o', 'r', 'i', 'd', 'b', 'l', '1'};

uint64_t start_time(uint64_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(in, text);
  // The name is field 2, so the blank behind it begins field 3.
  size_t at = text.rfind(')');
  for (int field = 2; field < 22 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  return at == std::string::npos ? 0 : std::strtoull(text.c_str() + at, nullptr, 10);
}

struct Shared {
  explicit Shared(Gate& g) : gate(g) {}
  Gate& gate;
  std::atomic<bool> removed{false};
};

struct Side {
  uint64_t addr, len;
};

struct Process {
  uint64_t pid, started;
};

// One transfer: the "GPU" copies when its event is asked for, and not before it is due.
struct Transfer {
  std::shared_ptr<Shared> shared;
  io::TransferStatus* status;
  std::vector<Wr> wrs;
  Process process;
  bool read;
  bool never;
  Clock::time_point due;
  std::mutex mu;
  bool over = false;

  void poll(bool wait) {
    if (shared->removed.load()) die("an XGMI status is polled after its backend was removed");
    std::lock_guard lock(mu);
    if (over) return;
    while (wait && (never || Clock::now() < due)) std::this_thread::sleep_for(Millis(1));
    if (never || Clock::now() < due) return;
    const char* why = copy();
    if (why == nullptr) {
      status->SetCode(io::StatusCode::SUCCESS);
    } else {
      status->Update(io::StatusCode::ERR_GPU_OP, why);
    }
    over = true;
    events_out.fetch_sub(1);
  }

  const char* copy() const {
    const char* fault = "XGMI: hipEventQuery failed: an illegal memory access was encountered";
    // MoRI's mapping of a dead process' memory stays: writes to it show nowhere, and what a read
    // would give is gone here.
    const char* dead = read ? fault : nullptr;
    if (start_time(process.pid) != process.started) return dead;
    for (const Wr& wr : wrs) {
      if (wr.len == 0) continue;
      std::vector<iovec> local{range(wr.local[0].addr, wr.len)};
      Moved moved = move(static_cast<int>(process.pid), local, range(wr.remote, wr.len), read);
      if (moved == Moved::NoProcess) return dead;
      if (moved == Moved::Fault) return fault;
    }
    return nullptr;
  }
};

class XgmiSession : public io::BackendSession {
 public:
  XgmiSession(std::shared_ptr<Shared> shared, Side local, Side remote, Process process)
      : shared_(std::move(shared)), local_(local), remote_(remote), process_(process) {}

  void ReadWrite(size_t local, size_t remote, size_t size, io::TransferStatus* status,
                 io::TransferUniqueId, bool read) override {
    std::vector<size_t> l{local}, r{remote}, s{size};
    post({l, r, s}, status, read);
  }
  void BatchReadWrite(const io::SizeVec& local, const io::SizeVec& remote, const io::SizeVec& sizes,
                      io::TransferStatus* status, io::TransferUniqueId, bool read) override {
    if (local.size() != sizes.size() || remote.size() != sizes.size()) {
      die("assert: batchSize == localOffsets.size() == remoteOffsets.size()");
    }
    if (sizes.empty()) {
      status->SetCode(io::StatusCode::SUCCESS);
      return;
    }
    post({local, remote, sizes}, status, read);
  }
  bool Alive() const override { return true; }

 private:
  // MoRI checks nothing here, and would copy to wherever the offset leads.
  static void check(const Side& side, uint64_t at, uint64_t len) {
    if (at <= side.len && len <= side.len - at) return;
    die("an XGMI copy out of range: offset " + std::to_string(at) + ", size " +
        std::to_string(len) + " of " + std::to_string(side.len));
  }

  void post(const Batch& batch, io::TransferStatus* status, bool read) {
    if (shared_->removed.load()) die("a session is used after its XGMI backend was removed");
    Use use(shared_->gate, "a post");
    Fault fault = next_post();
    leave_post(fault);
    if (fault.kind == Kind::Skip) return status->SetCode(io::StatusCode::SUCCESS);
    auto transfer = std::make_shared<Transfer>();
    for (size_t i = 0; i < batch.sizes.size(); ++i) {
      uint64_t len = batch.sizes[i];
      check(local_, batch.local[i], len);
      check(remote_, batch.remote[i], len);
      uint64_t from = local_.addr + batch.local[i];
      transfer->wrs.push_back({remote_.addr + batch.remote[i], len, {{from, len}}, 1});
    }
    if (fault.kind == Kind::QpError) {
      status->Update(io::StatusCode::ERR_GPU_OP, "XGMI: hipMemcpyPeerAsync failed: injected");
      return;
    }
    transfer->shared = shared_;
    transfer->status = status;
    transfer->process = process_;
    transfer->read = read;
    transfer->never = fault.kind == Kind::Lost;
    transfer->due = Clock::now() + latency() + fault.after;
    events_out.fetch_add(1);
    status->SetCode(io::StatusCode::IN_PROGRESS);
    status->SetWaitCallback([transfer] { transfer->poll(true); });
    status->SetProgressCallback([transfer] { transfer->poll(false); });
  }

  std::shared_ptr<Shared> shared_;
  Side local_, remote_;
  Process process_;
};

class XgmiBackend : public io::Backend {
 public:
  XgmiBackend(const io::EngineDesc& self, Gate& gate)
      : self_(self),
        shared_(std::make_shared<Shared>(gate)),
        process_{static_cast<uint64_t>(self.pid), start_time(static_cast<uint64_t>(self.pid))} {}
  ~XgmiBackend() override { shared_->removed.store(true); }

  void RegisterRemoteEngine(const io::EngineDesc& desc) override {
    std::lock_guard lock(mu_);
    engines_[desc.key] = desc;
  }
  void DeregisterRemoteEngine(const io::EngineDesc& desc) override {
    std::lock_guard lock(mu_);
    engines_.erase(desc.key);
  }
  void RegisterMemory(io::MemoryDesc& desc) override {
    if (desc.loc != io::MemoryLocationType::GPU) return;
    Handle handle{{}, process_.pid, process_.started, desc.data};
    std::memcpy(handle.magic, kMagic, sizeof(kMagic));
    std::memcpy(desc.ipcHandle.data(), &handle, sizeof(handle));
  }
  // Fences nothing: who has opened the handle can go on copying.
  void DeregisterMemory(const io::MemoryDesc&) override {}

  void ReadWrite(const io::MemoryDesc& local, size_t local_at, const io::MemoryDesc& remote,
                 size_t remote_at, size_t size, io::TransferStatus* status, io::TransferUniqueId id,
                 bool read) override {
    auto session = open(local, remote, status);
    if (session) session->ReadWrite(local_at, remote_at, size, status, id, read);
  }
  void BatchReadWrite(const io::MemoryDesc& local, const io::SizeVec& local_at,
                      const io::MemoryDesc& remote, const io::SizeVec& remote_at,
                      const io::SizeVec& sizes, io::TransferStatus* status, io::TransferUniqueId id,
                      bool read) override {
    auto session = open(local, remote, status);
    if (session) session->BatchReadWrite(local_at, remote_at, sizes, status, id, read);
  }
  io::BackendSession* CreateSession(const io::MemoryDesc& local,
                                    const io::MemoryDesc& remote) override {
    Side here{local.data, local.size}, there{remote.data, remote.size};
    if (remote.engineKey == self_.key) return new XgmiSession(shared_, here, there, process_);
    Handle handle;
    std::memcpy(&handle, remote.ipcHandle.data(), sizeof(handle));
    if (std::memcmp(handle.magic, kMagic, sizeof(kMagic)) == 0) {
      if (handle.started == 0 || start_time(handle.pid) != handle.started) return nullptr;
      there.addr = handle.addr;
      return new XgmiSession(shared_, here, there, {handle.pid, handle.started});
    }
    // Without a handle only the same process' memory can be reached.
    std::lock_guard lock(mu_);
    auto it = engines_.find(remote.engineKey);
    if (it == engines_.end() || it->second.pid != self_.pid) return nullptr;
    return new XgmiSession(shared_, here, there, process_);
  }
  bool PopInboundTransferStatus(io::EngineKey, io::TransferUniqueId, io::TransferStatus*) override {
    return false;
  }
  bool CanHandle(const io::MemoryDesc& local, const io::MemoryDesc& remote) const override {
    if (local.loc != io::MemoryLocationType::GPU || remote.loc != io::MemoryLocationType::GPU) {
      return false;
    }
    if (remote.deviceBusId.empty()) return false;
    if (remote.engineKey == self_.key) return true;
    std::lock_guard lock(mu_);
    auto it = engines_.find(remote.engineKey);
    if (it == engines_.end()) return false;
    if (!self_.nodeId.empty() && !it->second.nodeId.empty()) {
      return it->second.nodeId == self_.nodeId;
    }
    return it->second.hostname == self_.hostname;
  }

 private:
  std::unique_ptr<io::BackendSession> open(const io::MemoryDesc& local,
                                           const io::MemoryDesc& remote,
                                           io::TransferStatus* status) {
    std::unique_ptr<io::BackendSession> session(CreateSession(local, remote));
    if (!session) {
      status->Update(io::StatusCode::ERR_BAD_STATE, "XGMI: Failed to create session");
    }
    return session;
  }

  io::EngineDesc self_;
  std::shared_ptr<Shared> shared_;
  Process process_;
  mutable std::mutex mu_;
  std::map<std::string, io::EngineDesc> engines_;
};

#if MORI_DOUBLE_CLASS >= 15
class FabricBackend : public io::Backend {
 public:
  void RegisterRemoteEngine(const io::EngineDesc&) override {}
  void DeregisterRemoteEngine(const io::EngineDesc&) override {}
  void RegisterMemory(io::MemoryDesc&) override {}
  void DeregisterMemory(const io::MemoryDesc&) override {}
  void ReadWrite(const io::MemoryDesc&, size_t, const io::MemoryDesc&, size_t, size_t,
                 io::TransferStatus*, io::TransferUniqueId, bool) override {}
  void BatchReadWrite(const io::MemoryDesc&, const io::SizeVec&, const io::MemoryDesc&,
                      const io::SizeVec&, const io::SizeVec&, io::TransferStatus*,
                      io::TransferUniqueId, bool) override {}
  io::BackendSession* CreateSession(const io::MemoryDesc&, const io::MemoryDesc&) override {
    return nullptr;
  }
  bool PopInboundTransferStatus(io::EngineKey, io::TransferUniqueId, io::TransferStatus*) override {
    return false;
  }
  bool CanHandle(const io::MemoryDesc&, const io::MemoryDesc&) const override { return false; }
};
#endif

}  // namespace

std::unique_ptr<io::Backend> make_xgmi(const io::EngineDesc& self, Gate& gate) {
  read_environment();
  let_peers_in();
  return std::make_unique<XgmiBackend>(self, gate);
}

#if MORI_DOUBLE_CLASS >= 15
std::unique_ptr<io::Backend> make_fabric() { return std::make_unique<FabricBackend>(); }
#endif

}  // namespace dbl

// Events of XGMI transfers that were never polled to their end.
extern "C" uint64_t mori_double_events_out() { return dbl::events_out.load(); }
