// Transfer statuses that outlive their transfers: MoRI keeps their raw pointers, and may touch one
// after it told its code. So they never move, and go back to the allocator with the engine only.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <vector>

#include "mori.hpp"
#include "text.hpp"

namespace kf {

/// A handle is a slot's index and a generation, which is odd while the slot is taken. A lookup takes
/// no lock: chunks only come, and stay where they are.
class StatusPool {
 public:
  enum Use : uint64_t { kFresh = 0, kPosting = 1, kPosted = 2 };

  struct alignas(64) Slot {
    std::atomic<uint64_t> word{0};  // generation and use
    io::TransferStatus status;
  };

  StatusPool() = default;
  StatusPool(const StatusPool &) = delete;
  StatusPool &operator=(const StatusPool &) = delete;

  uint64_t take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) grow();
    const uint32_t index = free_.back();
    free_.pop_back();
    Slot &slot = *at(index);
    const uint64_t generation = (slot.word.load(std::memory_order_relaxed) >> kUseBits) + 1;
    slot.word.store(generation << kUseBits | kFresh, std::memory_order_release);
    return generation << kIndexBits | index;
  }

  /// The slot of a handle that is not over, and how it is used.
  Slot *find(uint64_t handle, Use &use) const noexcept {
    Slot *slot = at(static_cast<uint32_t>(handle & kIndexMask));
    if (slot == nullptr) return nullptr;
    const uint64_t word = slot->word.load(std::memory_order_acquire);
    const uint64_t generation = word >> kUseBits;
    if (generation != handle >> kIndexBits || generation % 2 == 0) return nullptr;
    use = static_cast<Use>(word & kUseMask);
    return slot;
  }

  Slot &live(uint64_t handle, Use &use) const {
    Slot *slot = find(handle, use);
    if (slot == nullptr) refuse(KF_STALE, kStale);
    return *slot;
  }

  /// Marks a fresh status as being posted.
  Slot &begin_post(uint64_t handle) {
    Use use;
    Slot &slot = live(handle, use);
    uint64_t word = word_of(handle, kFresh);
    require(slot.word.compare_exchange_strong(word, word_of(handle, kPosting),
                                              std::memory_order_acq_rel),
            "the status has been posted before");
    return slot;
  }

  static void end_post(Slot &slot, uint64_t handle) noexcept {
    slot.word.store(word_of(handle, kPosted), std::memory_order_release);
  }

  void give(uint64_t handle) {
    Use use;
    Slot &slot = live(handle, use);
    require(use != kPosting, "the status is being posted");
    uint64_t word = word_of(handle, use);
    const uint64_t next = (handle >> kIndexBits) + 1;
    if (!slot.word.compare_exchange_strong(word, next << kUseBits, std::memory_order_acq_rel)) {
      refuse(KF_STALE, kStale);
    }
    const bool again = next < kLastGeneration && reset(slot, use);
    std::lock_guard<std::mutex> lock(mutex_);
    if (again) {
      free_.push_back(static_cast<uint32_t>(handle & kIndexMask));
    } else {
      ++kept_;
    }
  }

  void count(uint64_t counts[3]) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts[0] = slots_ - kept_ - free_.size();
    counts[1] = kept_;
    counts[2] = free_.size();
  }

  static constexpr const char *kStale = "the handle of the status is over";

 private:
  static constexpr unsigned kIndexBits = 24;
  static constexpr unsigned kUseBits = 2;
  static constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;
  static constexpr uint64_t kUseMask = (uint64_t{1} << kUseBits) - 1;
  static constexpr uint64_t kLastGeneration = (uint64_t{1} << (64 - kIndexBits)) - 2;
  // A chunk is twice as large as the one before it.
  static constexpr uint32_t kFirst = 64;
  static constexpr unsigned kChunks = kIndexBits - 6;

  static uint64_t word_of(uint64_t handle, Use use) noexcept {
    return handle >> kIndexBits << kUseBits | use;
  }

  /// Whether MoRI is done with the status, which then is as new. One that was posted and is INIT was
  /// left so by an exception, behind which part of the batch may be on its way.
  static bool reset(Slot &slot, Use use) noexcept {
    try {
      const io::StatusCode code = slot.status.Code();
      const bool unused = use == kFresh && code == io::StatusCode::INIT;
      if (code != io::StatusCode::SUCCESS && !unused) return false;
      slot.status.SetCode(io::StatusCode::INIT);
      slot.status.SetMessage(std::string());
      slot.status.SetWaitCallback(nullptr);
      slot.status.SetProgressCallback(nullptr);
      return true;
    } catch (...) {
      return false;
    }
  }

  Slot *at(uint32_t index) const noexcept {
    const uint32_t place = index + kFirst;
    const unsigned chunk = static_cast<unsigned>(std::bit_width(place)) - 7;
    if (chunk >= kChunks) return nullptr;
    Slot *slots = chunks_[chunk].load(std::memory_order_acquire);
    return slots == nullptr ? nullptr : slots + (place - (kFirst << chunk));
  }

  void grow() {
    if (owned_.size() == kChunks) refuse(KF_ARGUMENT, "the engine has no more statuses");
    const uint32_t first = static_cast<uint32_t>(slots_);
    const uint32_t more = kFirst << owned_.size();
    // All indices fit from here on, so that giving back allocates nothing.
    free_.reserve(slots_ + more);
    owned_.reserve(kChunks);
    owned_.push_back(std::make_unique<Slot[]>(more));
    chunks_[owned_.size() - 1].store(owned_.back().get(), std::memory_order_release);
    for (uint32_t i = more; i > 0; --i) free_.push_back(first + i - 1);
    slots_ += more;
  }

  std::array<std::atomic<Slot *>, kChunks> chunks_{};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Slot[]>> owned_;
  std::vector<uint32_t> free_;
  uint64_t slots_ = 0;
  uint64_t kept_ = 0;
};

}  // namespace kf
