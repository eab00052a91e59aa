#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <thread>

#include "rdma.hpp"

namespace dbl {
namespace {

size_t requests(const std::vector<Wr>& wrs) {
  size_t sum = 0;
  for (const Wr& wr : wrs) sum += wr.requests;
  return sum;
}

}  // namespace

void RdmaSession::post(const Batch& batch, io::TransferStatus* status, uint64_t id, bool read,
                       bool single) {
  if (rdma_->closed_.load()) die("a session is used after its RDMA backend was removed");
  Use use(rdma_->gate_, "a post");
  Fault fault = next_post();
  leave_post(fault);
  if (fault.kind == Kind::Skip) return status->SetCode(io::StatusCode::SUCCESS);
  status->SetCode(io::StatusCode::IN_PROGRESS);
  auto meta = std::make_shared<Meta>(Meta{status, 0});
  Answer answer = submit(batch, meta, id, read, single, fault);
  if (answer.code != io::StatusCode::IN_PROGRESS) status->Update(answer.code, answer.text);
  bool failed = answer.code > io::StatusCode::ERR_BEGIN;
  if (!failed && rdma_->config_.enableNotification) notify(id);
}

RdmaSession::Answer RdmaSession::submit(const Batch& batch, std::shared_ptr<Meta> meta, uint64_t id,
                                        bool read, bool single, const Fault& fault) {
  if (batch.sizes.empty() && batch.local.empty() && batch.remote.empty()) {
    return {io::StatusCode::SUCCESS, ""};
  }
  Plan planned = plan(batch, local_.addr, local_.len, remote_.addr, remote_.len, rdma_->limits_);
  if (!planned.refused.empty()) return {io::StatusCode::ERR_INVALID_ARGS, planned.refused};
  Item base;
  base.local_key = local_.key;
  base.remote_key = remote_.key;
  base.read = read;
  meta->total = requests(planned.wrs);
  base.meta = std::move(meta);
  base.ready = Clock::now() + latency();
  if (fault.kind == Kind::None) return spread(base, std::move(planned.wrs), id, single);
  return faulty(std::move(base), std::move(planned.wrs), id, fault);
}

// The work requests in chains over the queue pairs, from the one that the id selects.
RdmaSession::Answer RdmaSession::spread(const Item& base, std::vector<Wr> wrs, uint64_t id,
                                        bool single) {
  size_t count = pairs_.size();
  size_t even = (wrs.size() + count - 1) / count;
  int configured = single ? 1 : rdma_->config_.postBatchSize;
  size_t chain = configured == -1 ? even : static_cast<size_t>(std::max(configured, 1));
  chain = std::max<size_t>(1, std::min(chain, rdma_->depth_max_));
  size_t at = id % count;
  for (size_t from = 0; from < wrs.size(); from += chain, ++at) {
    Item item = base;
    size_t to = std::min(from + chain, wrs.size());
    item.wrs.assign(std::make_move_iterator(wrs.begin() + static_cast<ptrdiff_t>(from)),
                    std::make_move_iterator(wrs.begin() + static_cast<ptrdiff_t>(to)));
    item.credit = requests(item.wrs);
    item.tail = from + chain * count >= wrs.size();
    size_t depth = 0;
    if (!rdma_->nic_.post(*pairs_[at % count], std::move(item), rdma_->depth_max_,
                          rdma_->room_wait_, &depth)) {
      return full(at % count, depth, to - from);
    }
  }
  return {io::StatusCode::IN_PROGRESS, ""};
}

// On one queue pair, so that what was posted before the fault lands before its error.
RdmaSession::Answer RdmaSession::faulty(Item base, std::vector<Wr> wrs, uint64_t id,
                                        const Fault& fault) {
  size_t at = id % pairs_.size(), count = wrs.size();
  bool half = fault.kind == Kind::SqFull;
  if (fault.kind == Kind::QpError) {
    // What is cut off here never lands, and its first request is the one that fails.
    base.tail = count / 2 + 1 == count;
    wrs.resize(count / 2);
  }
  if (half) wrs.resize((count + 1) / 2);
  base.wrs = std::move(wrs);
  base.credit = half ? 0 : base.meta->total;
  if (fault.kind == Kind::QpError) base.fate = Fate::Error;
  if (fault.kind == Kind::AckLost) base.fate = Fate::AckLost;
  if (fault.kind == Kind::Lost) base.fate = Fate::Lost;
  if (fault.kind == Kind::QpError || fault.kind == Kind::AckLost) base.dies = pairs_;
  base.ready += fault.after;
  if (fault.kind == Kind::Late) {
    rdma_->nic_.post_late(pairs_[at], std::move(base));
    for (const std::shared_ptr<Pair>& pair : pairs_) pair->fail();
    return {io::StatusCode::ERR_RDMA_OP, text_of(Wrong::Retries)};
  }
  // It must land after the error that the poster gets, not before.
  if (half) base.ready += fault.after;
  size_t depth = 0;
  if (!rdma_->nic_.post(*pairs_[at], std::move(base), rdma_->depth_max_, rdma_->room_wait_,
                        &depth)) {
    return full(at, depth, count);
  }
  if (!half) return {io::StatusCode::IN_PROGRESS, ""};
  std::this_thread::sleep_for(fault.after);
  return full(at, rdma_->depth_max_, count);
}

RdmaSession::Answer RdmaSession::full(size_t pair, size_t depth, size_t wanted) const {
  std::ostringstream text;
  text << "SQ full (batch): ep=" << pair << " depth=" << depth << " requested=" << wanted
       << " max=" << rdma_->depth_max_
       << " Hint: try increasing MORI_IO_SQ_BACKOFF_TIMEOUT_US (current value "
       << rdma_->room_wait_.count() << " us), MORI_IO_QP_MAX_SEND_WR or qpPerTransfer ("
       << pairs_.size() << " QP(s)), or reducing postBatchSize.";
  return {io::StatusCode::ERR_RDMA_OP, text.str()};
}

// Right behind the data on each queue pair, not after its completion.
void RdmaSession::notify(uint64_t id) {
  for (const std::shared_ptr<Pair>& pair : pairs_) {
    Item item;
    item.wrs.push_back({});
    item.meta = std::make_shared<Meta>(Meta{nullptr, 0});
    item.note = true;
    item.note_id = id;
    item.note_total = pairs_.size();
    size_t depth = 0;
    rdma_->nic_.post(*pair, std::move(item), rdma_->depth_max_, rdma_->room_wait_, &depth);
  }
}

namespace {

// MoRI's classes around it.
class Session : public io::BackendSession {
 public:
  explicit Session(std::shared_ptr<RdmaSession> inner) : inner_(std::move(inner)) {}

  void ReadWrite(size_t local, size_t remote, size_t size, io::TransferStatus* status,
                 io::TransferUniqueId id, bool read) override {
    std::vector<size_t> l{local}, r{remote}, s{size};
    inner_->post({l, r, s}, status, id, read, true);
  }
  void BatchReadWrite(const io::SizeVec& local, const io::SizeVec& remote, const io::SizeVec& sizes,
                      io::TransferStatus* status, io::TransferUniqueId id, bool read) override {
    inner_->post({local, remote, sizes}, status, id, read, false);
  }
  // Also when its queue pairs are dead.
  bool Alive() const override { return true; }

 private:
  std::shared_ptr<RdmaSession> inner_;
};

class RdmaBackend : public io::Backend {
 public:
  explicit RdmaBackend(std::shared_ptr<Rdma> rdma) : rdma_(std::move(rdma)) {}
  ~RdmaBackend() override { rdma_->close(); }

  void RegisterRemoteEngine(const io::EngineDesc& desc) override { rdma_->add_engine(desc); }
  void DeregisterRemoteEngine(const io::EngineDesc& desc) override { rdma_->remove_engine(desc); }
  void RegisterMemory(io::MemoryDesc& desc) override { rdma_->add_memory(desc); }
  void DeregisterMemory(const io::MemoryDesc& desc) override { rdma_->remove_memory(desc); }
  void ReadWrite(const io::MemoryDesc& local, size_t local_at, const io::MemoryDesc& remote,
                 size_t remote_at, size_t size, io::TransferStatus* status, io::TransferUniqueId id,
                 bool read) override {
    std::vector<size_t> l{local_at}, r{remote_at}, s{size};
    rdma_->cached(local, remote)->post({l, r, s}, status, id, read, true);
  }
  void BatchReadWrite(const io::MemoryDesc& local, const io::SizeVec& local_at,
                      const io::MemoryDesc& remote, const io::SizeVec& remote_at,
                      const io::SizeVec& sizes, io::TransferStatus* status, io::TransferUniqueId id,
                      bool read) override {
    if (local_at.size() != remote_at.size() || sizes.size() != remote_at.size()) {
      die("assert: localOffsets.size() == remoteOffsets.size() == sizes.size()");
    }
    if (sizes.empty()) {
      status->SetCode(io::StatusCode::SUCCESS);
      return;
    }
    rdma_->cached(local, remote)->post({local_at, remote_at, sizes}, status, id, read, false);
  }
  io::BackendSession* CreateSession(const io::MemoryDesc& local,
                                    const io::MemoryDesc& remote) override {
    return new Session(rdma_->connect(local, remote));
  }
  bool PopInboundTransferStatus(io::EngineKey remote, io::TransferUniqueId id,
                                io::TransferStatus* status) override {
    bool there = rdma_->pop_inbound(remote, id);
    if (there) status->SetCode(io::StatusCode::SUCCESS);
    return there;
  }
  bool CanHandle(const io::MemoryDesc&, const io::MemoryDesc& remote) const override {
    return rdma_->knows(remote.engineKey);
  }

 private:
  std::shared_ptr<Rdma> rdma_;
  Monitor monitor_;
};

}  // namespace

std::unique_ptr<io::Backend> make_rdma(const std::string& key, const io::IOEngineConfig& at,
                                       const io::RdmaBackendConfig& config, Gate& gate,
                                       uint16_t* port) {
  read_environment();
  if (flag("MORI_DOUBLE_NO_SMI")) {
    std::fprintf(stderr, "mori double: rocm_smi cannot be loaded\n");
    std::exit(-1);
  }
  take_time("MORI_DOUBLE_BACKEND_MS");
  auto rdma = std::make_shared<Rdma>(key, at, config, gate);
  *port = rdma->port();
  return std::make_unique<RdmaBackend>(std::move(rdma));
}

}  // namespace dbl
