#include "rdma.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <sstream>
#include <stdexcept>

namespace dbl {
namespace {

void validate(const io::RdmaBackendConfig& c) {
  if (c.enableNotification && c.notifPerQp == 0) {
    throw std::runtime_error("notifPerQp must be at least 1");
  }
  if (c.enableTransferChunking && c.chunkBytes < 4096) {
    throw std::runtime_error("chunkBytes must be at least 4096");
  }
  if (c.maxChunksPerTransfer < 1 || c.numNicsPerTransfer < 1 || c.qpPerTransfer < 1) {
    throw std::runtime_error("chunks, NICs and queue pairs must be at least 1");
  }
}

// Whether all pages of a range are there.
bool mapped(uint64_t addr, uint64_t len) {
  uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE)), start = addr & ~(page - 1);
  // Writes nothing back, but looks at the mappings.
  return msync(reinterpret_cast<void*>(start), addr + len - start, MS_ASYNC) == 0;
}

Limits limits(const io::RdmaBackendConfig& c) {
  return {.message_max = number("MORI_DOUBLE_MESSAGE_MAX").value_or(1 << 30),
          .pieces_max = c.maxMsgSge > 0 ? static_cast<size_t>(c.maxMsgSge) : 4,
          .chunk = c.enableTransferChunking ? c.chunkBytes : 0,
          .chunks_max = static_cast<uint64_t>(c.maxChunksPerTransfer)};
}

[[noreturn]] void cannot_pin(uint32_t id, uint64_t addr, uint64_t len) {
  std::ostringstream text;
  text << "ibv_reg_mr failed (memory " << id << ", " << len << " bytes at 0x" << std::hex << addr
       << ")";
  die(text.str());
}

std::optional<Millis> retry() {
  std::optional<uint64_t> ms = number("MORI_DOUBLE_RETRY_MS");
  return ms ? std::optional(Millis(*ms)) : std::nullopt;
}

}  // namespace

std::vector<std::shared_ptr<Pair>>& Rdma::Remote::pairs(const Route& route) {
  for (auto& [known, pairs] : routes) {
    if (known == route) return pairs;
  }
  return routes.emplace_back(route, std::vector<std::shared_ptr<Pair>>()).second;
}

Rdma::Rdma(std::string key, const io::IOEngineConfig& at, io::RdmaBackendConfig config, Gate& gate)
    : key_(std::move(key)),
      config_((validate(config), config)),
      limits_(limits(config)),
      depth_max_(config.maxSendWr > 0 ? static_cast<size_t>(config.maxSendWr) : 8192),
      room_wait_(number("MORI_IO_SQ_BACKOFF_TIMEOUT_US").value_or(5'000'000)),
      gate_(gate),
      nic_(table_.layout(), retry()) {
  server_ = std::make_unique<Server>(
      at.host, at.port,
      Server::Answers{[this](const ConnectMsg& from) { return answer_connect(from); },
                      [this](uint32_t id) { return answer_region(id); }});
}

void Rdma::close() {
  if (closed_.exchange(true)) return;
  nic_.stop();
  server_->stop();
  table_.close();
  sessions_.clear();
  remotes_.clear();
}

void Rdma::add_engine(const io::EngineDesc& desc) {
  std::lock_guard lock(mu_);
  engines_[desc.key] = desc;
}

// Queue pairs and regions of the engine stay, so nothing heals by this.
void Rdma::remove_engine(const io::EngineDesc& desc) {
  std::lock_guard lock(mu_);
  engines_.erase(desc.key);
}

bool Rdma::knows(const std::string& engine) const {
  std::lock_guard lock(mu_);
  auto it = engines_.find(engine);
  return it != engines_.end() && it->second.port != 1;
}

io::EngineDesc Rdma::engine(const std::string& key) const {
  std::lock_guard lock(mu_);
  auto it = engines_.find(key);
  if (it == engines_.end()) {
    throw std::runtime_error("BuildRdmaConn: remote engine " + key + " is not registered");
  }
  return it->second;
}

void Rdma::add_memory(const io::MemoryDesc& desc) {
  std::lock_guard lock(mu_);
  memories_[desc.id] = desc;
}

void Rdma::remove_memory(const io::MemoryDesc& desc) {
  std::optional<uint64_t> revoked;
  {
    std::lock_guard lock(mu_);
    memories_.erase(desc.id);
    // By address, as MoRI does it: of two regions that were pinned at one address the first is
    // revoked whichever is deregistered, and the second never is.
    if (pinned_.erase(desc.id) > 0) {
      auto first = pool_.find(desc.data);
      if (first != pool_.end()) {
        revoked = first->second;
        pool_.erase(first);
      }
    }
    // Ids are per engine, so a session with an unrelated remote memory can go too.
    std::erase_if(sessions_, [&](const auto& entry) {
      return std::get<1>(entry.first) == desc.id || std::get<2>(entry.first) == desc.id;
    });
  }
  if (revoked) table_.revoke(*revoked);
}

Region Rdma::pin(uint32_t id, uint64_t addr, uint64_t len) {
  auto it = pinned_.find(id);
  if (it != pinned_.end()) return it->second;
  if (!mapped(addr, len)) cannot_pin(id, addr, len);
  Region region = table_.add_region(addr, len);
  pinned_[id] = region;
  pool_.try_emplace(addr, region.key);
  return region;
}

std::shared_ptr<RdmaSession> Rdma::cached(const io::MemoryDesc& local,
                                          const io::MemoryDesc& remote) {
  SessionKey key{remote.engineKey, local.id, remote.id};
  {
    std::lock_guard lock(mu_);
    auto it = sessions_.find(key);
    if (it != sessions_.end()) return it->second;
  }
  std::shared_ptr<RdmaSession> made = connect(local, remote);
  std::lock_guard lock(mu_);
  return sessions_.try_emplace(key, made).first->second;
}

std::shared_ptr<RdmaSession> Rdma::connect(const io::MemoryDesc& local,
                                           const io::MemoryDesc& remote) {
  std::lock_guard building(build_);
  Route route{{local.deviceId, local.loc, local.numaNode},
              {remote.deviceId, remote.loc, remote.numaNode}};
  size_t wanted = static_cast<size_t>(config_.qpPerTransfer);
  auto pairs = [&] {
    std::lock_guard lock(mu_);
    return remotes_[remote.engineKey].pairs(route);
  };
  for (size_t have = pairs().size(); have < wanted; ++have) build(remote.engineKey, route);
  // The oldest: those of a dead peer come before those of its successor under the same key.
  std::vector<std::shared_ptr<Pair>> used = pairs();
  used.resize(wanted);
  if (next_pin()) cannot_pin(local.id, local.data, local.size);
  Region here;
  {
    std::lock_guard lock(mu_);
    here = pin(local.id, local.data, local.size);
  }
  return std::make_shared<RdmaSession>(shared_from_this(), std::move(used), here,
                                       remote_region(remote));
}

uint32_t Rdma::new_end() {
  take_time("MORI_DOUBLE_PAIR_MS");
  return table_.add_pair();
}

void Rdma::build(const std::string& key, const Route& route) {
  io::EngineDesc to = engine(key);
  Socket socket = Socket::connect(to.host, to.port);
  uint32_t slot = new_end();
  ConnectMsg reply = socket.ask(Type::Connect, own_end(key_, route, slot));
  auto pair = std::make_shared<Pair>();
  pair->own = &table_.layout();
  pair->slot = slot;
  pair->peer = peer(reply.pid, reply.fd, reply.table);
  pair->peer_slot = reply.slot;
  nic_.add(pair);
  std::lock_guard lock(mu_);
  pair_engine_[slot] = key;
  remotes_[key].pairs(route).push_back(pair);
}

Region Rdma::remote_region(const io::MemoryDesc& remote) {
  {
    std::lock_guard lock(mu_);
    std::map<uint32_t, Region>& known = remotes_[remote.engineKey].regions;
    auto it = known.find(remote.id);
    if (it != known.end()) return it->second;
  }
  io::EngineDesc to = engine(remote.engineKey);
  RegionMsg question;
  question.id = remote.id;
  RegionMsg reply = Socket::connect(to.host, to.port).ask(Type::AskRegion, question);
  if (reply.len != remote.size) {
    std::ostringstream text;
    text << "RdmaBackend::CreateSession: remote MR size mismatch for engine " << remote.engineKey
         << " rdevId=0 memId=" << remote.id << " expected=" << remote.size << " got=" << reply.len;
    throw std::runtime_error(text.str());
  }
  std::lock_guard lock(mu_);
  return remotes_[remote.engineKey].regions[remote.id] = {reply.addr, reply.len, reply.key};
}

ConnectMsg Rdma::own_end(const std::string& engine, const Route& route, uint32_t slot) {
  return {engine, route, getpid(), table_.fd(), table_.identity(), slot};
}

std::shared_ptr<Peer> Rdma::peer(int pid, int fd, uint64_t identity) {
  std::lock_guard lock(mu_);
  std::weak_ptr<Peer>& known = peers_[{pid, identity}];
  std::shared_ptr<Peer> out = known.lock();
  if (!out) known = out = std::make_shared<Peer>(pid, fd, identity);
  return out;
}

ConnectMsg Rdma::answer_connect(const ConnectMsg& from) {
  auto pair = std::make_shared<Pair>();
  pair->own = &table_.layout();
  pair->slot = new_end();
  pair->peer = peer(from.pid, from.fd, from.table);
  pair->peer_slot = from.slot;
  nic_.add(pair);
  ConnectMsg reply = own_end(key_, from.route, pair->slot);
  std::lock_guard lock(mu_);
  pair_engine_[pair->slot] = from.engine;
  // Under the initiator's route, not under its reverse: this side sends on it too where both places
  // are alike, and otherwise never.
  remotes_[from.engine].pairs(from.route).push_back(pair);
  return reply;
}

RegionMsg Rdma::answer_region(uint32_t id) {
  std::lock_guard lock(mu_);
  RegionMsg reply;
  reply.id = id;
  auto it = memories_.find(id);
  if (it == memories_.end()) return reply;
  if (next_pin_remote()) cannot_pin(id, it->second.data, it->second.size);
  Region region = pin(id, it->second.data, it->second.size);
  return {id, region.addr, region.len, region.key};
}

bool Rdma::pop_inbound(const std::string& engine, uint64_t id) {
  std::lock_guard lock(notes_mu_);
  drain_notes();
  auto it = inbound_.find({engine, id});
  return it != inbound_.end() && it->second == 0;
}

void Rdma::drain_notes() {
  Layout& table = table_.layout();
  for (uint64_t end = table.notes.load(); notes_read_ < end; ++notes_read_) {
    Note& note = table.note[notes_read_ % kNotes];
    uint64_t number = note.number.load();
    if (number < notes_read_ + 1) return;
    // Overwritten: the sender went round the ring.
    if (number > notes_read_ + 1) continue;
    uint32_t pair = static_cast<uint32_t>(note.pair.load());
    uint64_t id = note.id.load(), total = note.total.load();
    std::lock_guard lock(mu_);
    auto left = inbound_.try_emplace({pair_engine_[pair], id}, static_cast<int64_t>(total)).first;
    left->second -= 1;
  }
}

}  // namespace dbl
