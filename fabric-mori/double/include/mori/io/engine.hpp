#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mori/io/backend.hpp"
#include "mori/io/common.hpp"

namespace mori::io {

struct IOEngineConfig {
  std::string host;
  uint16_t port;
};

class IOEngine;

class IOEngineSession {
 public:
  TransferUniqueId AllocateTransferUniqueId();
  void Read(size_t localOffset, size_t remoteOffset, size_t size, TransferStatus* status,
            TransferUniqueId id);
  void Write(size_t localOffset, size_t remoteOffset, size_t size, TransferStatus* status,
             TransferUniqueId id);
  void BatchRead(const SizeVec& localOffsets, const SizeVec& remoteOffsets, const SizeVec& sizes,
                 TransferStatus* status, TransferUniqueId id);
  void BatchWrite(const SizeVec& localOffsets, const SizeVec& remoteOffsets, const SizeVec& sizes,
                  TransferStatus* status, TransferUniqueId id);
  bool Alive();

 protected:
  friend class IOEngine;
  IOEngineSession() = default;

  IOEngine* engine{nullptr};
  std::shared_ptr<BackendSession> backendSess{nullptr};
};

class IOEngine {
 public:
  IOEngine(EngineKey, IOEngineConfig);
  ~IOEngine();

  void CreateBackend(BackendType, const BackendConfig&);
  void RemoveBackend(BackendType);

  EngineDesc GetEngineDesc() const { return desc; }
  void RegisterRemoteEngine(const EngineDesc&);
  void DeregisterRemoteEngine(const EngineDesc&);

  MemoryDesc RegisterMemory(void* data, size_t size, int device, MemoryLocationType loc);
  void DeregisterMemory(const MemoryDesc& desc);

  TransferUniqueId AllocateTransferUniqueId();
  void Read(const MemoryDesc& local, size_t localOffset, const MemoryDesc& remote,
            size_t remoteOffset, size_t size, TransferStatus* status, TransferUniqueId id);
  void Write(const MemoryDesc& local, size_t localOffset, const MemoryDesc& remote,
             size_t remoteOffset, size_t size, TransferStatus* status, TransferUniqueId id);
  void BatchRead(const MemDescVec& local, const BatchSizeVec& localOffsets,
                 const MemDescVec& remote, const BatchSizeVec& remoteOffsets,
                 const BatchSizeVec& sizes, TransferStatusPtrVec& status, TransferUniqueIdVec& ids);
  void BatchWrite(const MemDescVec& local, const BatchSizeVec& localOffsets,
                  const MemDescVec& remote, const BatchSizeVec& remoteOffsets,
                  const BatchSizeVec& sizes, TransferStatusPtrVec& status,
                  TransferUniqueIdVec& ids);
  bool PopInboundTransferStatus(EngineKey remote, TransferUniqueId id, TransferStatus* status);
  StatusCode WaitAll(const std::vector<TransferStatus*>& statuses, int timeoutMs = -1);

  std::optional<IOEngineSession> CreateSession(const MemoryDesc& local, const MemoryDesc& remote);
  void LoadScatterGatherModule(const std::string& path);
#if MORI_DOUBLE_CLASS >= 15
  void LoadFabricCopyModule(const std::string& path);
#endif

  IOEngineConfig config;
  EngineDesc desc;

 private:
  struct Inner;
  std::unique_ptr<Inner> inner_;
};

}  // namespace mori::io
