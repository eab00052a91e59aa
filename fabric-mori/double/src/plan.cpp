#include "plan.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace dbl {
namespace {

bool merge(Wr& last, uint64_t remote, uint64_t local, uint64_t len, size_t pieces_max) {
  constexpr uint64_t kMax = std::numeric_limits<uint32_t>::max();
  if (last.remote + last.len != remote || last.len + len > kMax) return false;
  Piece& tail = last.local.back();
  if (tail.addr + tail.len == local) {
    tail.len += len;
  } else if (last.local.size() < pieces_max) {
    last.local.push_back({local, len});
  } else {
    return false;
  }
  last.len += len;
  last.requests += 1;
  return true;
}

void split(const Wr& wr, const Limits& limits, std::vector<Wr>& out) {
  uint64_t size = std::max(limits.chunk, (wr.len + limits.chunks_max - 1) / limits.chunks_max);
  size = std::min(size, limits.message_max);
  uint64_t at = wr.remote;
  for (const Piece& piece : wr.local) {
    for (uint64_t done = 0; done < piece.len;) {
      uint64_t len = std::min(size, piece.len - done);
      out.push_back({at, len, {{piece.addr + done, len}}, 1});
      done += len;
      at += len;
    }
  }
}

std::string refusal(const Batch& b, uint64_t local_len, uint64_t remote_len) {
  if (b.local.size() != b.remote.size() || b.sizes.size() != b.remote.size()) {
    return "lengths of local offsets, remote offsets or sizes mismatch";
  }
  for (size_t i = 0; i < b.sizes.size(); ++i) {
    if (b.sizes[i] > std::numeric_limits<uint32_t>::max()) {
      return "single request size " + std::to_string(b.sizes[i]) +
             " exceeds UINT32_MAX; split it before submitting";
    }
    // Wraps: an offset next to the largest number passes, and the NIC has to refuse it.
    if (b.local[i] + b.sizes[i] > local_len || b.remote[i] + b.sizes[i] > remote_len) {
      return "length out of range";
    }
  }
  return "";
}

}  // namespace

Plan plan(const Batch& batch, uint64_t local, uint64_t local_len, uint64_t remote,
          uint64_t remote_len, const Limits& limits) {
  Plan out;
  out.refused = refusal(batch, local_len, remote_len);
  if (!out.refused.empty()) return out;
  std::vector<size_t> order(batch.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  if (!std::is_sorted(batch.remote.begin(), batch.remote.end())) {
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return batch.remote[a] < batch.remote[b]; });
  }
  for (size_t i : order) {
    uint64_t from = local + batch.local[i], to = remote + batch.remote[i], len = batch.sizes[i];
    if (!out.wrs.empty() && merge(out.wrs.back(), to, from, len, limits.pieces_max)) continue;
    out.wrs.push_back({to, len, {{from, len}}, 1});
  }
  if (limits.chunk > 0) {
    std::vector<Wr> chunks;
    for (Wr& wr : out.wrs) {
      if (wr.len <= limits.chunk && wr.len <= limits.message_max) {
        wr.requests = 1;
        chunks.push_back(std::move(wr));
      } else {
        split(wr, limits, chunks);
      }
    }
    out.wrs = std::move(chunks);
  }
  for (size_t i = 0; i < out.wrs.size(); ++i) {
    if (out.wrs[i].len <= limits.message_max) continue;
    out.refused = "merged RDMA WR " + std::to_string(i) + " length " +
                  std::to_string(out.wrs[i].len) + " exceeds local max_msg_sz " +
                  std::to_string(limits.message_max) +
                  "; enable RDMA transfer chunking or reduce batch size";
    return out;
  }
  return out;
}

}  // namespace dbl
