#include "nic.hpp"

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "copy.hpp"

namespace dbl {
namespace {

constexpr uint64_t kStep = 256 << 10;
// The state of a pair can be changed by the other process, which has no way to wake us.
constexpr Millis kTick{5};

// Marks the regions of a copy for those who revoke them.
class Mark {
 public:
  Mark(Inside& inside, uint64_t key) : inside_(inside) {
    inside_.holder.store(uint64_t(getpid()) << 32 | uint64_t(gettid()));
    inside_.region.store(static_cast<uint32_t>(key) + 1);
  }
  ~Mark() { inside_.region.store(0); }
  Mark(const Mark&) = delete;

 private:
  Inside& inside_;
};

std::vector<iovec> local_range(const Wr& wr, uint64_t from, uint64_t len) {
  std::vector<iovec> out;
  for (const Piece& piece : wr.local) {
    if (from >= piece.len) {
      from -= piece.len;
      continue;
    }
    uint64_t part = std::min(len, piece.len - from);
    out.push_back(range(piece.addr + from, part));
    len -= part;
    from = 0;
    if (len == 0) break;
  }
  return out;
}

}  // namespace

std::string text_of(Wrong wrong) {
  switch (wrong) {
    case Wrong::Flushed: return "Work Request Flushed Error";
    case Wrong::QueuePair: return "local QP operation error";
    case Wrong::Retries:
      return "transport retry counter exceeded Hint: transport retry limit exceeded; the peer may "
             "be gone, or MORI_IB_GID_INDEX, MORI_IO_SL or MORI_IO_TC may be wrong.";
    case Wrong::LocalAccess:
      return "local protection error Hint: local protection error; the local buffer may not be "
             "registered any more, or offset and length leave it.";
    case Wrong::RemoteAccess:
      return "remote access error Hint: remote access error; the remote buffer may not be "
             "registered any more, or offset and length leave it.";
  }
  return "unknown";
}

void Pair::fail(bool both) {
  uint32_t up = kUp;
  own->pair[slot].state.compare_exchange_strong(up, kBroken);
  up = kUp;
  if (both) peer->layout().pair[peer_slot].state.compare_exchange_strong(up, kBroken);
}

Nic::Nic(Layout& own, std::optional<Millis> retry) : own_(own), retry_(retry) {
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "mori-nic");
}

void Nic::add(std::shared_ptr<Pair> pair) {
  std::lock_guard lock(mu_);
  pairs_.push_back(std::move(pair));
}

bool Nic::post(Pair& pair, Item item, size_t depth_max, std::chrono::microseconds wait,
               size_t* depth) {
  std::unique_lock lock(mu_);
  auto room = [&] { return stop_ || pair.depth + item.wrs.size() <= depth_max; };
  if (!room_.wait_until(lock, Clock::now() + wait, room)) {
    *depth = pair.depth;
    return false;
  }
  pair.depth += item.wrs.size();
  pair.queue.push_back(std::move(item));
  changed_.notify_one();
  return true;
}

void Nic::post_late(std::shared_ptr<Pair> pair, Item item) {
  std::lock_guard lock(mu_);
  late_.push_back({std::move(pair), std::move(item)});
  changed_.notify_one();
}

void Nic::stop() {
  {
    std::lock_guard lock(mu_);
    stop_ = true;
  }
  changed_.notify_all();
  room_.notify_all();
  if (thread_.joinable()) thread_.join();
  // The server may still be adding pairs.
  std::lock_guard lock(mu_);
  // Items of a dead pair hold the pair.
  for (const std::shared_ptr<Pair>& pair : pairs_) pair->queue.clear();
  late_.clear();
}

void Nic::run() {
  std::unique_lock lock(mu_);
  while (!stop_) {
    Clock::time_point wake = Clock::time_point::max();
    bool worked = one_late(lock, wake);
    worked = one(lock, wake) || worked;
    if (worked || stop_) continue;
    if (wake == Clock::time_point::max()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, wake);
    }
  }
}

// One step of the next pair in turn that has something to do.
bool Nic::one(std::unique_lock<std::mutex>& lock, Clock::time_point& wake) {
  Clock::time_point now = Clock::now();
  for (size_t i = 0; i < pairs_.size(); ++i) {
    std::shared_ptr<Pair> pair = pairs_[next_++ % pairs_.size()];
    if (pair->queue.empty()) continue;
    if (!pair->up()) {
      flush(*pair);
      return true;
    }
    wake = std::min(wake, now + kTick);
    Item& head = pair->queue.front();
    if (port_is_down()) {
      pair->fail();
      fail(head, Wrong::Retries);
      pop(*pair);
      return true;
    }
    if (pair->unanswered) {
      if (!retry_ || now - pair->asked < *retry_) continue;
      pair->fail();
      fail(head, Wrong::Retries);
      pop(*pair);
      return true;
    }
    if (head.ready > now) {
      wake = std::min(wake, head.ready);
      continue;
    }
    // Others only append, and only this thread takes away: the head stays where it is.
    lock.unlock();
    Result result = work(*pair, head, false);
    lock.lock();
    if (!stop_) settle(*pair, result);
    return true;
  }
  return false;
}

bool Nic::one_late(std::unique_lock<std::mutex>& lock, Clock::time_point& wake) {
  for (auto it = late_.begin(); it != late_.end(); ++it) {
    if (it->item.ready > Clock::now()) {
      wake = std::min(wake, it->item.ready);
      continue;
    }
    lock.unlock();
    Result result = work(*it->pair, it->item, true);
    lock.lock();
    if (result != Result::More) late_.erase(it);
    return true;
  }
  return false;
}

void Nic::flush(Pair& pair) {
  while (!pair.queue.empty()) {
    fail(pair.queue.front(), Wrong::Flushed);
    pop(pair);
  }
}

void Nic::settle(Pair& pair, Result result) {
  Item& item = pair.queue.front();
  switch (result) {
    case Result::More:
      return;
    case Result::NoAnswer:
      pair.unanswered = true;
      pair.asked = Clock::now();
      return;
    case Result::Local:
      pair.fail();
      fail(item, Wrong::LocalAccess);
      break;
    case Result::Remote:
      pair.fail(true);
      fail(item, Wrong::RemoteAccess);
      break;
    case Result::Done:
      complete(item);
      break;
  }
  pop(pair);
}

void Nic::complete(Item& item) {
  for (const std::shared_ptr<Pair>& pair : item.dies) pair->fail();
  switch (item.fate) {
    case Fate::Error:
      fail(item, Wrong::QueuePair);
      return;
    case Fate::AckLost:
      fail(item, Wrong::Retries);
      return;
    case Fate::Lost:
      item.meta->status = nullptr;
      return;
    case Fate::Normal:
      break;
  }
  if (item.credit == 0) return;
  item.meta->finished += item.credit;
  if (item.meta->status != nullptr && item.meta->finished == item.meta->total) {
    item.meta->status->Update(mori::io::StatusCode::SUCCESS, "success");
  }
}

void Nic::pop(Pair& pair) {
  pair.depth -= pair.queue.front().wrs.size();
  pair.queue.pop_front();
  room_.notify_all();
}

// Only the last request of a transfer on a queue pair asks for a completion, and the status is
// taken from that one: if an earlier request fails, it is flushed.
void Nic::fail(Item& item, Wrong wrong) {
  if (wrong != Wrong::Flushed) log("[ROOT CAUSE] CQE error: " + text_of(wrong));
  bool last = item.tail && item.wr + 1 >= item.wrs.size();
  mori::io::TransferStatus* status = std::exchange(item.meta->status, nullptr);
  if (status == nullptr) return;
  status->Update(mori::io::StatusCode::ERR_RDMA_OP, text_of(last ? wrong : Wrong::Flushed));
}

// Some work requests of the item, or a part of one: not so many that others wait for long.
Nic::Result Nic::work(Pair& pair, Item& item, bool late) {
  uint64_t budget = kStep;
  while (item.wr < item.wrs.size()) {
    if (budget == 0) return Result::More;
    const Wr& wr = item.wrs[item.wr];
    uint64_t len = std::min(budget, wr.len - item.done);
    // A pair that was broken since is flushed by the caller.
    if (!late && !pair.up()) return Result::More;
    Result result = copy(pair, item, wr, item.done, len);
    if (result != Result::Done) return result;
    budget -= len;
    item.done += len;
    if (item.done < wr.len) continue;
    item.wr += 1;
    item.done = 0;
  }
  if (item.note) tell(pair, item);
  return Result::Done;
}

Nic::Result Nic::copy(Pair& pair, const Item& item, const Wr& wr, uint64_t from, uint64_t len) {
  if (!pair.peer->alive()) return Result::NoAnswer;
  Layout& far = pair.peer->layout();
  Mark here(own_.pair[pair.slot].out, item.local_key);
  Mark there(far.pair[pair.peer_slot].in, item.remote_key);
  const std::atomic<uint32_t>& own_end = own_.pair[pair.slot].state;
  const std::atomic<uint32_t>& far_end = far.pair[pair.peer_slot].state;
  // Broken, if it is late.
  uint32_t own_state = own_end.load();
  if (own_state == kGone) return Result::More;
  if (far_end.load() != kUp) return Result::NoAnswer;
  if (wr.len == 0) return Result::Done;
  for (const Piece& piece : wr.local) {
    if (!covers(own_, item.local_key, piece.addr, piece.len)) return Result::Local;
  }
  if (!covers(far, item.remote_key, wr.remote, wr.len)) return Result::Remote;
  Moved moved = move(pair.peer->pid(), local_range(wr, from, len), range(wr.remote + from, len),
                     item.read,
                     {{&own_end, own_state},
                      {&far_end, kUp},
                      {&region(own_, item.local_key).state, kRegion},
                      {&region(far, item.remote_key).state, kRegion}});
  switch (moved) {
    case Moved::All:
      return Result::Done;
    case Moved::NoProcess:
      return Result::NoAnswer;
    case Moved::Changed:
      // It is asked again what has.
      return Result::More;
    case Moved::Fault:
      break;
  }
  return Result::Remote;
}

void Nic::tell(const Pair& pair, const Item& item) {
  Layout& far = pair.peer->layout();
  uint64_t number = far.notes.fetch_add(1) + 1;
  Note& note = far.note[(number - 1) % kNotes];
  note.number.store(0);
  note.pair.store(pair.peer_slot);
  note.id.store(item.note_id);
  note.total.store(item.note_total);
  note.number.store(number);
}

}  // namespace dbl
