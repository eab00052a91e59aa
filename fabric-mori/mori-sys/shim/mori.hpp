// MoRI's headers and what they have to offer. Features are asked for by name: no version of MoRI
// says which one it is.
#pragma once

// MoRI's enum.hpp and backend.hpp use these without including them.
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <sstream>
#include <vector>

#include "mori/io/engine.hpp"

namespace kf {

namespace io = mori::io;

template <class Status>
concept WaitsBounded = requires(Status &status) { status.WaitFor(0); };
template <class Config>
concept Chunks = requires(Config &config) {
  config.notifPerQp;
  config.enableTransferChunking;
  config.numNicsPerTransfer;
  config.maxMsgSge;
};
template <class Desc>
concept HasNumaNode = requires(Desc &desc) { desc.numaNode; };
template <class Desc>
concept HasIpcOffset = requires(Desc &desc) { desc.ipcOffset; };
template <class Desc>
concept HasFabric = requires(Desc &desc) {
  desc.fabricHandle;
  desc.fabricAllocSize;
};

static_assert(WaitsBounded<io::TransferStatus> && Chunks<io::RdmaBackendConfig> &&
                  HasNumaNode<io::MemoryDesc>,
              "this MoRI is older than v1.2.1");
static_assert(HasIpcOffset<io::MemoryDesc> == HasFabric<io::MemoryDesc>,
              "this MoRI is between v1.2.1 and v1.2.2: its descriptors fit neither");

/// Fields of a packed MemoryDesc.
inline constexpr uint32_t layout = HasIpcOffset<io::MemoryDesc> ? 15 : 9;

static_assert(layout == KF_MORI_LAYOUT, "MoRI's headers and its library are of different versions");

}  // namespace kf
