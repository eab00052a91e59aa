// The stand-in for a NIC: a thread that executes posted work requests, in the order of each queue
// pair, and completes their statuses.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "knobs.hpp"
#include "mori/io/common.hpp"
#include "plan.hpp"
#include "table.hpp"

namespace dbl {

// What completions of one post have in common. The status is a bare pointer, as MoRI's is: an
// object that was made anew at its address is completed in its place.
struct Meta {
  mori::io::TransferStatus* status;
  size_t total;
  size_t finished = 0;
};

enum class Fate { Normal, Error, AckLost, Lost };

// How a work request fails.
enum class Wrong { Flushed, Retries, LocalAccess, RemoteAccess, QueuePair };
// What a status says of it: the verbs' text, and MoRI's advice behind it.
std::string text_of(Wrong wrong);

struct Pair;

// A chain of work requests on one queue pair.
struct Item {
  std::vector<Wr> wrs;
  uint64_t local_key = 0, remote_key = 0;
  bool read = false;
  std::shared_ptr<Meta> meta;
  size_t credit = 0;  // of meta->total
  Clock::time_point ready;
  Fate fate = Fate::Normal;
  std::vector<std::shared_ptr<Pair>> dies;  // with the injected error
  bool tail = true;  // of what the transfer has on this queue pair
  bool note = false;
  uint64_t note_id = 0, note_total = 0;

  size_t wr = 0;
  uint64_t done = 0;  // of that work request
};

// This side's end of a queue pair, and what it sends.
struct Pair {
  Layout* own;
  uint32_t slot;
  std::shared_ptr<Peer> peer;
  uint32_t peer_slot;

  std::deque<Item> queue;
  size_t depth = 0;
  bool unanswered = false;
  Clock::time_point asked;

  bool up() const { return own->pair[slot].state.load() == kUp; }
  void fail(bool both = false);
};

class Nic {
 public:
  Nic(Layout& own, std::optional<Millis> retry);
  ~Nic() { stop(); }
  Nic(const Nic&) = delete;

  void add(std::shared_ptr<Pair> pair);
  // False when the send queue had no room for so long; then `depth` says how full it is.
  bool post(Pair& pair, Item item, size_t depth_max, std::chrono::microseconds wait, size_t* depth);
  // Lands at its time though the pair be dead by then.
  void post_late(std::shared_ptr<Pair> pair, Item item);
  // Nothing is copied and no status is touched from its return on.
  void stop();

 private:
  enum class Result { More, Done, Local, Remote, NoAnswer };
  struct Late {
    std::shared_ptr<Pair> pair;
    Item item;
  };

  void run();
  bool one(std::unique_lock<std::mutex>& lock, Clock::time_point& wake);
  bool one_late(std::unique_lock<std::mutex>& lock, Clock::time_point& wake);
  void flush(Pair& pair);
  void settle(Pair& pair, Result result);
  void complete(Item& item);
  void pop(Pair& pair);
  static void fail(Item& item, Wrong wrong);
  Result work(Pair& pair, Item& item, bool late);
  Result copy(Pair& pair, const Item& item, const Wr& wr, uint64_t from, uint64_t len);
  void tell(const Pair& pair, const Item& item);

  Layout& own_;
  std::optional<Millis> retry_;
  std::mutex mu_;
  std::condition_variable changed_, room_;
  std::vector<std::shared_ptr<Pair>> pairs_;
  std::list<Late> late_;
  size_t next_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace dbl
