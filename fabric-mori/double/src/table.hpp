// What the "NIC" of an engine consults: its memory regions and its ends of queue pairs, in memory
// that the initiators of other processes map too. They check it at each copy, so that the owner can
// revoke a region or a queue pair though the initiator knows nothing of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace dbl {

constexpr uint32_t kRegions = 1 << 20, kPairs = 1 << 16, kNotes = 1 << 16;

enum RegionState : uint32_t { kNoRegion, kRegion, kRevoked };
enum PairState : uint32_t { kNoPair, kUp, kBroken, kGone };

struct RegionSlot {
  std::atomic<uint64_t> key, addr, len;
  std::atomic<uint32_t> state;
};

// Which region a thread is copying from or to just now: its slot + 1. Set before the region is
// checked, so that whoever revokes it afterwards sees the copy.
struct Inside {
  std::atomic<uint64_t> region;
  std::atomic<uint64_t> holder;  // pid << 32 | tid
};

struct PairSlot {
  std::atomic<uint32_t> state;
  Inside out;  // copies that this side started
  Inside in;   // copies that the other side started
};

struct Note {
  std::atomic<uint64_t> number;  // of the note in this place, from 1; 0 while it is written
  std::atomic<uint64_t> pair, id, total;
};

struct Layout {
  std::atomic<uint64_t> identity;
  std::atomic<uint32_t> regions, pairs;
  std::atomic<uint64_t> notes;
  RegionSlot region[kRegions];
  PairSlot pair[kPairs];
  Note note[kNotes];
};

struct Region {
  uint64_t addr = 0, len = 0;
  uint64_t key = 0;  // random << 32 | slot
};

inline RegionSlot& region(Layout& table, uint64_t key) {
  return table.region[static_cast<uint32_t>(key) % kRegions];
}

// Whether the whole range is in the region of that key, and it is not revoked.
bool covers(const Layout& table, uint64_t key, uint64_t addr, uint64_t len);

class Table {
 public:
  Table();
  ~Table();
  Table(const Table&) = delete;

  int fd() const { return fd_; }
  Layout& layout() { return *layout_; }
  uint64_t identity() const { return layout_->identity.load(); }

  Region add_region(uint64_t addr, uint64_t len);
  // Returns when no copy is inside.
  void revoke(uint64_t key);
  uint32_t add_pair();
  // Every queue pair is gone and every region revoked, and no copy is inside.
  void close();

 private:
  int fd_ = -1;
  Layout* layout_ = nullptr;
};

// Another engine's table, and its process.
class Peer {
 public:
  Peer(int pid, int fd, uint64_t identity);
  ~Peer();
  Peer(const Peer&) = delete;

  int pid() const { return pid_; }
  uint64_t identity() const { return identity_; }
  bool alive() const;
  Layout& layout() const { return *layout_; }

 private:
  int pid_;
  int pidfd_ = -1;
  uint64_t identity_;
  Layout* layout_ = nullptr;
};

}  // namespace dbl
