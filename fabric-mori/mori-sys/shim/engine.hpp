// What the handles of kf_mori.h point to.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mori.hpp"
#include "pool.hpp"
#include "text.hpp"

struct kf_engine {
  // Before MoRI's engine, so that it goes after it.
  kf::StatusPool pool;
  std::unique_ptr<mori::io::IOEngine> mori;
  std::vector<mori::io::BackendType> backends;
  size_t memories = 0;
  std::atomic<size_t> sessions = 0;
  // The ranges of the batch that is being posted: posts of one engine come one after another.
  mori::io::SizeVec local, remote, len;
};

struct kf_memory {
  kf_engine *engine = nullptr;
  mori::io::MemoryDesc desc{};
  mutable std::atomic<size_t> sessions = 0;
};

struct kf_session {
  kf_engine *engine;
  const kf_memory *local;
  uint64_t remote_size;
  mori::io::IOEngineSession session;
};
