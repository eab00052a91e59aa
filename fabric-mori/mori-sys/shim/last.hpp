// The last call into MoRI, for a process that MoRI ends: it calls exit where others return an error.
#pragma once

#include <atomic>

namespace kf {

extern std::atomic<int> calls_under_way;
extern std::atomic<const char *> last_call;

/// A call into MoRI while this lives. `name` has to be a literal.
class Call {
 public:
  explicit Call(const char *name) noexcept {
    last_call.store(name, std::memory_order_relaxed);
    calls_under_way.fetch_add(1, std::memory_order_relaxed);
  }
  ~Call() { calls_under_way.fetch_sub(1, std::memory_order_relaxed); }
  Call(const Call &) = delete;
  Call &operator=(const Call &) = delete;
};

/// Installs the handlers that print the last call, once.
void watch_the_end();
void engine_is_up() noexcept;
void engine_is_down() noexcept;

}  // namespace kf
