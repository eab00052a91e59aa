#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "knobs.hpp"
#include "mori/io/engine.hpp"
#include "nic.hpp"
#include "server.hpp"
#include "table.hpp"
#include "wire.hpp"

namespace dbl {

namespace io = mori::io;

class RdmaSession;

// The RDMA backend without MoRI's class around it, since sessions may outlive that.
class Rdma : public std::enable_shared_from_this<Rdma> {
 public:
  Rdma(std::string key, const io::IOEngineConfig& at, io::RdmaBackendConfig config, Gate& gate);
  ~Rdma() { close(); }

  uint16_t port() const { return server_->port(); }
  // Nothing lands and no status is touched from its return on, on both sides.
  void close();

  void add_engine(const io::EngineDesc& desc);
  void remove_engine(const io::EngineDesc& desc);
  bool knows(const std::string& engine) const;
  void add_memory(const io::MemoryDesc& desc);
  void remove_memory(const io::MemoryDesc& desc);
  std::shared_ptr<RdmaSession> cached(const io::MemoryDesc& local, const io::MemoryDesc& remote);
  std::shared_ptr<RdmaSession> connect(const io::MemoryDesc& local, const io::MemoryDesc& remote);
  bool pop_inbound(const std::string& engine, uint64_t id);

 private:
  friend class RdmaSession;
  struct Remote {
    std::vector<std::pair<Route, std::vector<std::shared_ptr<Pair>>>> routes;
    std::map<uint32_t, Region> regions;

    std::vector<std::shared_ptr<Pair>>& pairs(const Route& route);
  };
  using SessionKey = std::tuple<std::string, uint32_t, uint32_t>;

  io::EngineDesc engine(const std::string& key) const;
  uint32_t new_end();
  void build(const std::string& key, const Route& route);
  Region pin(uint32_t id, uint64_t addr, uint64_t len);
  Region remote_region(const io::MemoryDesc& remote);
  ConnectMsg own_end(const std::string& engine, const Route& route, uint32_t slot);
  std::shared_ptr<Peer> peer(int pid, int fd, uint64_t identity);
  ConnectMsg answer_connect(const ConnectMsg& from);
  RegionMsg answer_region(uint32_t id);
  void drain_notes();

  const std::string key_;
  io::RdmaBackendConfig config_;
  Limits limits_;
  size_t depth_max_;
  std::chrono::microseconds room_wait_;
  Gate& gate_;
  Table table_;
  Nic nic_;

  mutable std::mutex mu_;
  std::map<std::string, io::EngineDesc> engines_;
  std::map<uint32_t, io::MemoryDesc> memories_;
  std::map<uint32_t, Region> pinned_;
  // What DeregisterMemory revokes: the first region that was pinned at an address.
  std::map<uint64_t, uint64_t> pool_;
  std::map<std::string, Remote> remotes_;
  std::map<std::pair<int, uint64_t>, std::weak_ptr<Peer>> peers_;
  std::map<uint32_t, std::string> pair_engine_;
  std::map<SessionKey, std::shared_ptr<RdmaSession>> sessions_;
  // Never taken by the control-plane thread: two engines may connect to each other at once.
  std::mutex build_;

  std::mutex notes_mu_;
  uint64_t notes_read_ = 0;
  std::map<std::pair<std::string, uint64_t>, int64_t> inbound_;
  std::atomic<bool> closed_{false};

  std::unique_ptr<Server> server_;
};

class RdmaSession {
 public:
  RdmaSession(std::shared_ptr<Rdma> rdma, std::vector<std::shared_ptr<Pair>> pairs, Region local,
              Region remote)
      : rdma_(std::move(rdma)), pairs_(std::move(pairs)), local_(local), remote_(remote) {}

  void post(const Batch& batch, io::TransferStatus* status, uint64_t id, bool read, bool single);

 private:
  struct Answer {
    io::StatusCode code;
    std::string text;
  };
  Answer submit(const Batch& batch, std::shared_ptr<Meta> meta, uint64_t id, bool read, bool single,
                const Fault& fault);
  Answer spread(const Item& base, std::vector<Wr> wrs, uint64_t id, bool single);
  Answer faulty(Item base, std::vector<Wr> wrs, uint64_t id, const Fault& fault);
  Answer full(size_t pair, size_t depth, size_t wanted) const;
  void notify(uint64_t id);

  std::shared_ptr<Rdma> rdma_;
  std::vector<std::shared_ptr<Pair>> pairs_;
  Region local_, remote_;
};

std::unique_ptr<io::Backend> make_rdma(const std::string& key, const io::IOEngineConfig& at,
                                       const io::RdmaBackendConfig& config, Gate& gate,
                                       uint16_t* port);

}  // namespace dbl
