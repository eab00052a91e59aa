#pragma once

#include <cstddef>
#include <ostream>

#include "mori/io/common.hpp"
#include "mori/io/enum.hpp"

namespace mori::io {

struct BackendConfig {
  BackendConfig(BackendType type) : type_(type) {}
  BackendType Type() const { return type_; }

 private:
  BackendType type_;
};

struct RdmaBackendConfig : public BackendConfig {
  RdmaBackendConfig() : BackendConfig(BackendType::RDMA) {}
  RdmaBackendConfig(int qps, int postBatch, int workers, PollCqMode mode, bool notifications,
                    uint32_t notifications_per_qp = 1024, bool chunking = false,
                    size_t chunk = 65536, int chunks = 64, int nics = 1)
      : BackendConfig(BackendType::RDMA),
        qpPerTransfer(qps),
        postBatchSize(postBatch),
        numWorkerThreads(workers),
        pollCqMode(mode),
        enableNotification(notifications),
        notifPerQp(notifications_per_qp),
        enableTransferChunking(chunking),
        chunkBytes(chunk),
        maxChunksPerTransfer(chunks),
        numNicsPerTransfer(nics) {}

  int qpPerTransfer{1};
  int postBatchSize{-1};
  int numWorkerThreads{1};
  PollCqMode pollCqMode{PollCqMode::POLLING};
  bool enableNotification{true};
  uint32_t notifPerQp{1024};
  bool enableTransferChunking{false};
  size_t chunkBytes{65536};
  int maxChunksPerTransfer{64};
  int numNicsPerTransfer{1};
  int maxSendWr{0};
  int maxCqeNum{0};
  int maxMsgSge{0};
};

struct XgmiBackendConfig : public BackendConfig {
  XgmiBackendConfig() : BackendConfig(BackendType::XGMI) {}
  XgmiBackendConfig(int streams, int events)
      : BackendConfig(BackendType::XGMI), numStreams(streams), numEvents(events) {}

  int numStreams{64};
  int numEvents{64};
};

#if MORI_DOUBLE_CLASS >= 15
struct FabricBackendConfig : public BackendConfig {
  FabricBackendConfig() : BackendConfig(BackendType::FABRIC) {}
  FabricBackendConfig(int streams, int events)
      : BackendConfig(BackendType::FABRIC), numStreams(streams), numEvents(events) {}

  int numStreams{64};
  int numEvents{64};
};
#endif

inline std::ostream& operator<<(std::ostream& out, const RdmaBackendConfig& c) {
  return out << "qpPerTransfer[" << c.qpPerTransfer << "] postBatchSize[" << c.postBatchSize
             << "] enableTransferChunking[" << c.enableTransferChunking << "]";
}

class BackendSession {
 public:
  virtual ~BackendSession() = default;
  virtual void ReadWrite(size_t localOffset, size_t remoteOffset, size_t size,
                         TransferStatus* status, TransferUniqueId id, bool isRead) = 0;
  virtual void BatchReadWrite(const SizeVec& localOffsets, const SizeVec& remoteOffsets,
                              const SizeVec& sizes, TransferStatus* status, TransferUniqueId id,
                              bool isRead) = 0;
  virtual bool Alive() const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual void RegisterRemoteEngine(const EngineDesc&) = 0;
  virtual void DeregisterRemoteEngine(const EngineDesc&) = 0;
  virtual void RegisterMemory(MemoryDesc& desc) = 0;
  virtual void DeregisterMemory(const MemoryDesc& desc) = 0;
  virtual void ReadWrite(const MemoryDesc& local, size_t localOffset, const MemoryDesc& remote,
                         size_t remoteOffset, size_t size, TransferStatus* status,
                         TransferUniqueId id, bool isRead) = 0;
  virtual void BatchReadWrite(const MemoryDesc& local, const SizeVec& localOffsets,
                              const MemoryDesc& remote, const SizeVec& remoteOffsets,
                              const SizeVec& sizes, TransferStatus* status, TransferUniqueId id,
                              bool isRead) = 0;
  virtual BackendSession* CreateSession(const MemoryDesc& local, const MemoryDesc& remote) = 0;
  virtual bool PopInboundTransferStatus(EngineKey remote, TransferUniqueId id,
                                        TransferStatus* status) = 0;
  virtual bool CanHandle(const MemoryDesc& local, const MemoryDesc& remote) const = 0;
};

}  // namespace mori::io
