#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace dbl {

inline iovec range(uint64_t addr, uint64_t len) {
  return {reinterpret_cast<void*>(addr), static_cast<size_t>(len)};
}

// Where only ancestors may reach into a process by default, any process of the user may.
void let_peers_in();

// What has to hold when the copy begins.
struct Still {
  const std::atomic<uint32_t>* word;
  uint32_t value;
};

enum class Moved { All, NoProcess, Fault, Changed };

// Between this process and `pid`, which needs not take part; `pid` may be this process. Nothing is
// copied after something of `still` has changed.
Moved move(int pid, std::vector<iovec> local, iovec remote, bool read,
           std::initializer_list<Still> still = {});

}  // namespace dbl
