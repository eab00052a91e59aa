#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dbl {

struct Piece {
  uint64_t addr, len;
};

// One work request: `len` bytes from `remote` on, gathered from or scattered to local pieces.
struct Wr {
  uint64_t remote = 0, len = 0;
  std::vector<Piece> local;
  size_t requests = 1;
};

struct Limits {
  uint64_t message_max;
  size_t pieces_max;
  uint64_t chunk;  // 0 for none
  uint64_t chunks_max;
};

struct Batch {
  const std::vector<size_t>& local;
  const std::vector<size_t>& remote;
  const std::vector<size_t>& sizes;
};

struct Plan {
  std::vector<Wr> wrs;
  std::string refused;  // the text for ERR_INVALID_ARGS, or empty
};

// The work requests of a batch, in the order they are posted in: that of the remote offsets, with
// neighbours merged. Addresses are added without a check of overflow, as MoRI adds them.
Plan plan(const Batch& batch, uint64_t local, uint64_t local_len, uint64_t remote,
          uint64_t remote_len, const Limits& limits);

}  // namespace dbl
