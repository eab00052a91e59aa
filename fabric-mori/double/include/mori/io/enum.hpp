#pragma once

#include <cstdint>
#include <vector>

#ifndef MORI_DOUBLE_CLASS
#include "mori/io/double_class.hpp"
#endif

namespace mori::io {

enum class BackendType : uint32_t {
  Unknown = 0,
  XGMI = 1,
  RDMA = 2,
  TCP = 3,
#if MORI_DOUBLE_CLASS >= 15
  FABRIC = 4,
#endif
};

using BackendTypeVec = std::vector<BackendType>;

enum class MemoryLocationType : uint32_t { Unknown = 0, CPU = 1, GPU = 2 };

enum class StatusCode : uint32_t {
  SUCCESS = 0,
  INIT = 1,
  IN_PROGRESS = 2,
  // A bound, never a code: whatever is above failed.
  ERR_BEGIN = 10,
  ERR_INVALID_ARGS = 11,
  ERR_NOT_FOUND = 12,
  ERR_RDMA_OP = 13,
  ERR_BAD_STATE = 14,
  ERR_GPU_OP = 15
};

enum class PollCqMode : uint32_t { POLLING = 0, EVENT = 1 };

}  // namespace mori::io
