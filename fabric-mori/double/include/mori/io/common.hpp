#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

// As MoRI's own header does; HIP's is not everywhere where the stand-in is.
#if __has_include("hip/hip_runtime_api.h")
#include "hip/hip_runtime_api.h"
#endif

#include "mori/io/enum.hpp"
#include "mori/io/msgpack_adaptor.hpp"

namespace mori::io {

using EngineKey = std::string;
using MemoryUniqueId = uint32_t;
using TransferUniqueId = uint64_t;

struct EngineDesc {
  EngineKey key;
  std::string nodeId;
  std::string hostname;
  std::string host;
  int port;
  int pid{0};

  bool operator==(const EngineDesc&) const noexcept = default;
  MSGPACK_DEFINE(key, nodeId, hostname, host, port, pid);
};

constexpr size_t kIpcHandleSize = 64;

struct MemoryDesc {
  EngineKey engineKey;
  MemoryUniqueId id{0};
  int deviceId{-1};
  std::string deviceBusId;
  uintptr_t data{0};
  size_t size{0};
  MemoryLocationType loc;
  std::array<char, kIpcHandleSize> ipcHandle{};
  int numaNode{-1};
#if MORI_DOUBLE_CLASS >= 15
  uintptr_t ipcOffset{0};
  std::array<char, kIpcHandleSize> fabricHandle{};
  int vpodId{-1};
  std::string vpodPpodId;
  uint64_t fabricOffset{0};
  uint64_t fabricAllocSize{0};
#endif

  // Handles are left out, as MoRI leaves them out.
  bool operator==(const MemoryDesc& other) const noexcept {
    bool same = engineKey == other.engineKey && id == other.id && deviceId == other.deviceId &&
                deviceBusId == other.deviceBusId && data == other.data && size == other.size &&
                loc == other.loc && numaNode == other.numaNode;
#if MORI_DOUBLE_CLASS >= 15
    same = same && ipcOffset == other.ipcOffset;
#endif
    return same;
  }

#if MORI_DOUBLE_CLASS >= 15
  MSGPACK_DEFINE(engineKey, id, deviceId, deviceBusId, data, size, loc, ipcHandle, numaNode,
                 ipcOffset, fabricHandle, vpodId, vpodPpodId, fabricOffset, fabricAllocSize);
#else
  MSGPACK_DEFINE(engineKey, id, deviceId, deviceBusId, data, size, loc, ipcHandle, numaNode);
#endif
};

#if MORI_DOUBLE_CLASS >= 15
constexpr size_t kFabricHandleSize = kIpcHandleSize;
#endif

struct TransferStatus {
 public:
  TransferStatus() = default;
  ~TransferStatus() = default;
  TransferStatus(const TransferStatus&) = delete;
  TransferStatus& operator=(const TransferStatus&) = delete;

  StatusCode Code() {
    Progress();
    return Now();
  }
  uint32_t CodeUint32() { return static_cast<uint32_t>(Code()); }
  bool Init() { return Code() == StatusCode::INIT; }
  bool InProgress() { return Code() == StatusCode::IN_PROGRESS; }
  bool Succeeded() { return Code() == StatusCode::SUCCESS; }
  bool Failed() { return Code() > StatusCode::ERR_BEGIN; }

  std::string Message() {
    std::lock_guard lock(mu_);
    return message_;
  }

  // A failure is final. The waiters are told after the lock is gone, so whoever polls can see the
  // end before this has left the object; MoRI is the same.
  void Update(StatusCode code, const std::string& message) {
    {
      std::lock_guard lock(mu_);
      if (code_.load(std::memory_order_relaxed) > StatusCode::ERR_BEGIN) return;
      message_ = message;
      code_.store(code, std::memory_order_release);
    }
    ended_.notify_all();
  }

  void SetCode(StatusCode code) {
    {
      std::lock_guard lock(mu_);
      code_.store(code, std::memory_order_release);
    }
    if (code != StatusCode::INIT && code != StatusCode::IN_PROGRESS) ended_.notify_all();
  }
  void SetMessage(const std::string& message) {
    std::lock_guard lock(mu_);
    message_ = message;
  }

  void Wait() { WaitFor(-1); }

  // Below 0 waits without end, 0 polls once.
  StatusCode WaitFor(int timeoutMs = -1) {
    if (Now() != StatusCode::IN_PROGRESS) return Now();
    Progress();
    if (timeoutMs == 0) return Now();
    if (timeoutMs < 0 && wait_) {
      wait_();
      return Now();
    }
    std::unique_lock lock(mu_);
    if (timeoutMs < 0) {
      ended_.wait(lock, [this] { return Now() != StatusCode::IN_PROGRESS; });
      return Now();
    }
    // Nothing wakes this for a transfer that only polling advances: it sleeps to its deadline.
    auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeoutMs);
    while (Now() == StatusCode::IN_PROGRESS && std::chrono::steady_clock::now() < deadline) {
      ended_.wait_until(lock, deadline);
      lock.unlock();
      Progress();
      lock.lock();
    }
    return Now();
  }

  void SetWaitCallback(std::function<void()> callback) { wait_ = std::move(callback); }
  void SetProgressCallback(std::function<void()> callback) { progress_ = std::move(callback); }

 private:
  StatusCode Now() const { return code_.load(std::memory_order_acquire); }
  void Progress() {
    if (Now() == StatusCode::IN_PROGRESS && progress_) progress_();
  }

  std::atomic<StatusCode> code_{StatusCode::INIT};
  std::mutex mu_;
  std::string message_;
  std::function<void()> wait_;
  std::function<void()> progress_;
  std::condition_variable ended_;
};

using SizeVec = std::vector<size_t>;
using MemDescVec = std::vector<MemoryDesc>;
using BatchSizeVec = std::vector<SizeVec>;
using TransferUniqueIdVec = std::vector<TransferUniqueId>;
using TransferStatusPtrVec = std::vector<TransferStatus*>;

}  // namespace mori::io
