#include "mori/io/engine.hpp"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <stdexcept>

#include "knobs.hpp"
#include "rdma.hpp"
#include "xgmi.hpp"

namespace mori::io {
namespace {

// Stands for "no control plane" in the descriptor of an engine that has only XGMI.
constexpr uint16_t kNoPort = 1;

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string node_id(const std::string& fallback) {
  if (const char* set = std::getenv("MORI_NODE_ID")) return set;
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(in, id);
  return id.empty() ? fallback : id;
}

int numa_node(const void* addr) {
  int node = -1;
  long rc = syscall(SYS_get_mempolicy, &node, nullptr, 0, addr, MPOL_F_NODE | MPOL_F_ADDR);
  return rc == 0 ? node : -1;
}

std::string bus_id(int device) {
  if (device < 0) return "";
  char text[16];
  std::snprintf(text, sizeof(text), "0000:%02x:00.0", static_cast<unsigned>(device & 0x7f) + 1);
  return text;
}

bool auto_xgmi() {
  const char* value = std::getenv("MORI_DISABLE_AUTO_XGMI");
  return value != nullptr && value[0] == '0';
}

// XGMI is asked first and RDMA last.
int rank(BackendType type) {
  if (type == BackendType::XGMI) return 0;
  return type == BackendType::RDMA ? 2 : 1;
}

}  // namespace

struct IOEngine::Inner {
  dbl::Gate gate;
  std::atomic<uint32_t> transfers{0}, memories{0};
  std::map<int, std::unique_ptr<Backend>> backends;

  bool has(BackendType type) const { return backends.contains(rank(type)); }
  void set(BackendType type, std::unique_ptr<Backend> backend) {
    backends[rank(type)] = std::move(backend);
  }
  Backend* select(const MemoryDesc& local, const MemoryDesc& remote) {
    for (auto& [order, backend] : backends) {
      if (backend->CanHandle(local, remote)) return backend.get();
    }
    return nullptr;
  }
  Backend* select_or_fail(const MemoryDesc& local, const MemoryDesc& remote,
                          TransferStatus* status) {
    Backend* backend = select(local, remote);
    if (backend == nullptr && status != nullptr) {
      status->Update(StatusCode::ERR_BAD_STATE, "No available backend found, create backend first");
    }
    return backend;
  }
  void one(const MemoryDesc& local, size_t local_at, const MemoryDesc& remote, size_t remote_at,
           size_t size, TransferStatus* status, TransferUniqueId id, bool read) {
    dbl::Use use(gate, "a transfer");
    Backend* backend = select_or_fail(local, remote, status);
    if (backend == nullptr) return;
    backend->ReadWrite(local, local_at, remote, remote_at, size, status, id, read);
  }
  void many(const MemDescVec& local, const BatchSizeVec& local_at, const MemDescVec& remote,
            const BatchSizeVec& remote_at, const BatchSizeVec& sizes, TransferStatusPtrVec& status,
            TransferUniqueIdVec& ids, bool read) {
    dbl::Use use(gate, "a batch");
    size_t count = local.size();
    if (count != remote.size() || count != local_at.size() || count != remote_at.size() ||
        count != sizes.size() || count != status.size() || count != ids.size()) {
      dbl::die("assert: the vectors of a batch differ in length");
    }
    for (size_t i = 0; i < count; ++i) {
      Backend* backend = select_or_fail(local[i], remote[i], status[i]);
      // The rest is not submitted: their statuses stay as they are.
      if (backend == nullptr) return;
      backend->BatchReadWrite(local[i], local_at[i], remote[i], remote_at[i], sizes[i], status[i],
                              ids[i], read);
    }
  }
};

TransferUniqueId IOEngineSession::AllocateTransferUniqueId() {
  return engine->AllocateTransferUniqueId();
}

void IOEngineSession::Read(size_t localOffset, size_t remoteOffset, size_t size,
                           TransferStatus* status, TransferUniqueId id) {
  backendSess->ReadWrite(localOffset, remoteOffset, size, status, id, true);
}

void IOEngineSession::Write(size_t localOffset, size_t remoteOffset, size_t size,
                            TransferStatus* status, TransferUniqueId id) {
  backendSess->ReadWrite(localOffset, remoteOffset, size, status, id, false);
}

void IOEngineSession::BatchRead(const SizeVec& localOffsets, const SizeVec& remoteOffsets,
                                const SizeVec& sizes, TransferStatus* status,
                                TransferUniqueId id) {
  backendSess->BatchReadWrite(localOffsets, remoteOffsets, sizes, status, id, true);
}

void IOEngineSession::BatchWrite(const SizeVec& localOffsets, const SizeVec& remoteOffsets,
                                 const SizeVec& sizes, TransferStatus* status,
                                 TransferUniqueId id) {
  backendSess->BatchReadWrite(localOffsets, remoteOffsets, sizes, status, id, false);
}

bool IOEngineSession::Alive() { return backendSess->Alive(); }

IOEngine::IOEngine(EngineKey key, IOEngineConfig at)
    : config(std::move(at)), inner_(std::make_unique<Inner>()) {
  desc.key = std::move(key);
  desc.hostname = host_name();
  desc.nodeId = dbl::node_of(desc.key).value_or(node_id(desc.hostname));
  desc.host = config.host;
  desc.port = config.port;
  desc.pid = static_cast<int>(getpid());
}

IOEngine::~IOEngine() {
  dbl::Alone alone(inner_->gate, "the engine's end");
  inner_->backends.clear();
}

void IOEngine::CreateBackend(BackendType type, const BackendConfig& backend) {
  dbl::Alone alone(inner_->gate, "CreateBackend");
  if (inner_->has(type) && type != BackendType::TCP && type != BackendType::Unknown) return;
  if (type == BackendType::XGMI) {
    inner_->set(type, dbl::make_xgmi(desc, inner_->gate));
    return;
  }
#if MORI_DOUBLE_CLASS >= 15
  if (type == BackendType::FABRIC) {
    inner_->set(type, dbl::make_fabric());
    return;
  }
#endif
  if (type != BackendType::RDMA) dbl::die("assert: false && \"not implemented\"");
  if (dbl::port_is_down() || dbl::flag("MORI_DOUBLE_NO_NIC")) {
    if (!auto_xgmi()) {
      throw std::runtime_error(
          "no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0 to enable XGMI-only "
          "fallback");
    }
    config.port = kNoPort;
    desc.port = kNoPort;
  } else {
    if (config.port == kNoPort) {
      throw std::runtime_error("IOEngineConfig.port=1 is reserved as XGMI-only fallback sentinel");
    }
    uint16_t port = 0;
    const auto& rdma = static_cast<const RdmaBackendConfig&>(backend);
    inner_->set(type, dbl::make_rdma(desc.key, config, rdma, inner_->gate, &port));
    desc.port = port;
    // The next backend takes the port of the first one.
    config.port = port;
    if (!auto_xgmi()) return;
  }
  if (!inner_->has(BackendType::XGMI)) {
    inner_->set(BackendType::XGMI, dbl::make_xgmi(desc, inner_->gate));
  }
}

void IOEngine::RemoveBackend(BackendType type) {
  dbl::Alone alone(inner_->gate, "RemoveBackend");
  inner_->backends.erase(rank(type));
}

void IOEngine::RegisterRemoteEngine(const EngineDesc& remote) {
  dbl::Use use(inner_->gate, "RegisterRemoteEngine");
  for (auto& [order, backend] : inner_->backends) backend->RegisterRemoteEngine(remote);
}

void IOEngine::DeregisterRemoteEngine(const EngineDesc& remote) {
  dbl::Use use(inner_->gate, "DeregisterRemoteEngine");
  for (auto& [order, backend] : inner_->backends) backend->DeregisterRemoteEngine(remote);
}

MemoryDesc IOEngine::RegisterMemory(void* data, size_t size, int device, MemoryLocationType loc) {
  dbl::Alone alone(inner_->gate, "RegisterMemory");
  MemoryDesc out;
  out.engineKey = desc.key;
  out.id = inner_->memories.fetch_add(1);
  out.deviceId = device;
  if (loc == MemoryLocationType::GPU) out.deviceBusId = bus_id(device);
  out.data = reinterpret_cast<uintptr_t>(data);
  out.size = size;
  out.loc = loc;
  if (loc == MemoryLocationType::CPU && data != nullptr) out.numaNode = numa_node(data);
  for (auto& [order, backend] : inner_->backends) backend->RegisterMemory(out);
  return out;
}

void IOEngine::DeregisterMemory(const MemoryDesc& memory) {
  dbl::Alone alone(inner_->gate, "DeregisterMemory");
  for (auto& [order, backend] : inner_->backends) backend->DeregisterMemory(memory);
}

TransferUniqueId IOEngine::AllocateTransferUniqueId() { return inner_->transfers.fetch_add(1); }

void IOEngine::Read(const MemoryDesc& local, size_t localOffset, const MemoryDesc& remote,
                    size_t remoteOffset, size_t size, TransferStatus* status, TransferUniqueId id) {
  inner_->one(local, localOffset, remote, remoteOffset, size, status, id, true);
}

void IOEngine::Write(const MemoryDesc& local, size_t localOffset, const MemoryDesc& remote,
                     size_t remoteOffset, size_t size, TransferStatus* status,
                     TransferUniqueId id) {
  inner_->one(local, localOffset, remote, remoteOffset, size, status, id, false);
}

void IOEngine::BatchRead(const MemDescVec& local, const BatchSizeVec& localOffsets,
                         const MemDescVec& remote, const BatchSizeVec& remoteOffsets,
                         const BatchSizeVec& sizes, TransferStatusPtrVec& status,
                         TransferUniqueIdVec& ids) {
  inner_->many(local, localOffsets, remote, remoteOffsets, sizes, status, ids, true);
}

void IOEngine::BatchWrite(const MemDescVec& local, const BatchSizeVec& localOffsets,
                          const MemDescVec& remote, const BatchSizeVec& remoteOffsets,
                          const BatchSizeVec& sizes, TransferStatusPtrVec& status,
                          TransferUniqueIdVec& ids) {
  inner_->many(local, localOffsets, remote, remoteOffsets, sizes, status, ids, false);
}

bool IOEngine::PopInboundTransferStatus(EngineKey remote, TransferUniqueId id,
                                        TransferStatus* status) {
  dbl::Use use(inner_->gate, "PopInboundTransferStatus");
  for (auto& [order, backend] : inner_->backends) {
    if (backend->PopInboundTransferStatus(remote, id, status)) return true;
  }
  return false;
}

StatusCode IOEngine::WaitAll(const std::vector<TransferStatus*>& statuses, int timeoutMs) {
  auto deadline = dbl::Clock::now() + dbl::Millis(std::max(timeoutMs, 0));
  StatusCode first = StatusCode::SUCCESS;
  bool running = false;
  for (TransferStatus* status : statuses) {
    if (status == nullptr) continue;
    int wait = timeoutMs;
    if (timeoutMs > 0) {
      auto left = std::chrono::duration_cast<dbl::Millis>(deadline - dbl::Clock::now()).count();
      if (left <= 0) return first != StatusCode::SUCCESS ? first : StatusCode::IN_PROGRESS;
      wait = static_cast<int>(left);
    }
    StatusCode code = status->WaitFor(wait);
    if (code == StatusCode::IN_PROGRESS) {
      if (timeoutMs != 0) return first != StatusCode::SUCCESS ? first : code;
      running = true;
    } else if (code != StatusCode::SUCCESS && first == StatusCode::SUCCESS) {
      if (timeoutMs == 0) return code;
      first = code;
    }
  }
  return running ? StatusCode::IN_PROGRESS : first;
}

std::optional<IOEngineSession> IOEngine::CreateSession(const MemoryDesc& local,
                                                       const MemoryDesc& remote) {
  dbl::Use use(inner_->gate, "CreateSession");
  Backend* backend = inner_->select(local, remote);
  if (backend == nullptr) return std::nullopt;
  IOEngineSession session;
  session.engine = this;
  session.backendSess.reset(backend->CreateSession(local, remote));
  if (session.backendSess == nullptr) return std::nullopt;
  return session;
}

// There are no kernels to load.
void IOEngine::LoadScatterGatherModule(const std::string&) {}
#if MORI_DOUBLE_CLASS >= 15
void IOEngine::LoadFabricCopyModule(const std::string&) {}
#endif

}  // namespace mori::io
