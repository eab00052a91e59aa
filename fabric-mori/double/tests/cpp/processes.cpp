// Peers in other processes: stopped, killed, started anew, and those that revoke their memory.
#include "check.hpp"

namespace {

constexpr size_t kLen = 1 << 20;

// This process writes to a memory of the peer.
struct Pushing {
  explicit Pushing(const std::string& key = "peer") : a("a", quiet(), kLen, 1), peer(key) {
    there = peer.memory(std::to_string(kLen) + " 0");
    peer.meet(a.engine);
  }
  void connect() { session = a.engine.CreateSession(a.memory, there); }
  End write(size_t len = 64) { return ::write(*session, 0, 0, len); }
  // Statuses of what never ends outlive the engine, as MoRI demands.
  TransferStatus& unanswered() {
    statuses.push_back(&new_status());
    session->Write(0, 0, 64, statuses.back(), 1);
    CHECK_EQ(statuses.back()->WaitFor(kNever), StatusCode::IN_PROGRESS);
    return *statuses.back();
  }

  std::vector<TransferStatus*> statuses;
  Node a;
  Process peer;
  MemoryDesc there;
  std::optional<IOEngineSession> session;
};

}  // namespace

CASE(another_process) {
  Pushing p;
  p.connect();
  check_done(p.write(kLen));
  CHECK(p.peer.all(0, 1));
  MemoryDesc source = p.peer.memory("1048576 6");
  TransferStatus& read = new_status();
  p.a.engine.Read(p.a.memory, 0, source, 0, kLen, &read, 2);
  CHECK_EQ(wait(read), StatusCode::SUCCESS);
  CHECK(p.a.all(6, 0, kLen));
  // The peer starts one too.
  CHECK_EQ(p.peer.ask("write " + hex(packed(p.a.memory))), std::string("0 success"));
  CHECK(p.a.all(1, 0, kLen));
}

CASE(a_stopped_target_is_written) {
  Pushing p;
  p.connect();
  p.peer.stop();
  check_done(p.write(kLen));
  p.peer.go_on();
  CHECK(p.peer.all(0, 1));
}

CASE(a_deregistered_target) {
  Pushing p;
  p.connect();
  check_done(p.write());
  CHECK_EQ(p.peer.ask("dereg 0"), std::string("ok"));
  check_advised(p.write(kLen), "remote access error");
  CHECK_EQ(p.peer.ask("count 0 1"), std::string("64"));
  CHECK(p.session->Alive());
  check_flushed(p.write());
  // Nothing of this heals it.
  p.there = p.peer.memory("1048576 0");
  p.connect();
  check_flushed(p.write());
  EngineDesc desc = p.peer.desc();
  p.a.engine.DeregisterRemoteEngine(desc);
  p.a.engine.RegisterRemoteEngine(desc);
  p.connect();
  CHECK(p.session->Alive());
  check_flushed(p.write());
  // The other direction shares the queue pair.
  CHECK(has(p.peer.ask("write " + hex(packed(p.a.memory))), "Work Request Flushed Error"));
  p.a.engine.RemoveBackend(BackendType::RDMA);
  p.a.engine.CreateBackend(BackendType::RDMA, quiet());
  p.a.engine.RegisterRemoteEngine(desc);
  p.connect();
  check_done(p.write(kLen));
  CHECK(p.peer.all(1, 1));
}

// Only the last request of a batch asks for a completion, so the status is taken from that one.
CASE(a_batch_to_a_deregistered_target) {
  Pushing p;
  p.connect();
  CHECK_EQ(p.peer.ask("dereg 0"), std::string("ok"));
  check_flushed(write_ranges(*p.session, 3));
  CHECK(p.peer.all(0, 0));
}

CASE(a_target_without_backend) {
  Pushing p;
  p.connect();
  check_done(p.write());
  CHECK_EQ(p.peer.ask("remove"), std::string("ok"));
  p.unanswered();
  CHECK_EQ(p.peer.ask("count 0 1"), std::string("64"));
  // Also with a new one under the old key.
  CHECK_EQ(p.peer.ask("create"), std::string("ok"));
  p.peer.meet(p.a.engine);
  p.there = p.peer.memory("1048576 0");
  p.connect();
  p.unanswered();
}

CASE(a_killed_target) {
  Pushing p;
  p.connect();
  check_done(p.write());
  p.peer.end(SIGKILL);
  p.unanswered();
  // Its successor under the same key is never dialled, and what it dials is not used.
  Process successor("peer");
  MemoryDesc there = successor.memory("1048576 0");
  successor.meet(p.a.engine);
  CHECK_EQ(successor.ask("write " + hex(packed(p.a.memory))), std::string("0 success"));
  std::fill(p.a.bytes.begin(), p.a.bytes.end(), 1);
  p.connect();
  p.unanswered();
  p.there = there;
  p.connect();
  p.unanswered();
  CHECK(successor.all(0, 0));
  Process stranger("peer2");
  p.there = stranger.memory("1048576 0");
  stranger.meet(p.a.engine);
  p.connect();
  check_done(p.write(kLen));
  CHECK(stranger.all(0, 1));
}

static void retries(bool killed) {
  setenv("MORI_DOUBLE_RETRY_MS", "60", 1);
  Pushing p;
  p.connect();
  if (killed) {
    p.peer.end(SIGKILL);
  } else {
    p.peer.ask("remove");
  }
  auto start = Clock::now();
  check_advised(p.write(), "transport retry counter exceeded");
  CHECK(Clock::now() - start >= Millis(60));
  check_flushed(p.write());
}

CASE(a_killed_target_is_given_up) { retries(true); }
CASE(a_target_without_backend_is_given_up) { retries(false); }

// Nothing lands and no status moves from its return on.
CASE(the_initiator_removes_its_backend) {
  Pushing p;
  p.connect();
  mori_double_latency(1000);
  // The last one is still on its way, however late the removal is.
  CHECK_EQ(mori_double_faults("slow@200:60000"), 0);
  std::vector<TransferStatus*>& statuses = p.statuses;
  for (uint64_t i = 0; i < 200; ++i) {
    statuses.push_back(&new_status());
    p.session->Write(0, 0, kLen, statuses.back(), i);
  }
  CHECK_EQ(wait(*statuses[3]), StatusCode::SUCCESS);
  p.a.engine.RemoveBackend(BackendType::RDMA);
  std::vector<StatusCode> codes;
  for (auto& status : statuses) codes.push_back(status->Code());
  CHECK_EQ(codes.back(), StatusCode::IN_PROGRESS);
  std::fill(p.a.bytes.begin(), p.a.bytes.end(), 2);
  CHECK_EQ(statuses.back()->WaitFor(kNever), StatusCode::IN_PROGRESS);
  for (size_t i = 0; i < codes.size(); ++i) CHECK_EQ(statuses[i]->Code(), codes[i]);
  CHECK(p.peer.all(0, 1));
}

namespace {

// This process is the target of a peer that writes without end.
struct Flooded {
  Flooded() : a("a", quiet(), kFlood), peer("peer") {
    peer.memory(std::to_string(kFlood) + " 1");
    peer.meet(a.engine);
    CHECK_EQ(peer.ask("flood " + hex(packed(a.memory))), std::string("ok"));
  }
  // Only the end, that a copy on its way would reach last.
  void paint() { std::memset(a.bytes.data() + kFlood - kPainted, 7, kPainted); }
  bool untouched() {
    a.look();
    return a.all(7, kFlood - kPainted, kPainted);
  }
  void fenced() {
    paint();
    TransferStatus& never = new_status();
    never.SetCode(StatusCode::IN_PROGRESS);
    CHECK_EQ(never.WaitFor(30), StatusCode::IN_PROGRESS);
    CHECK(untouched());
  }

  static constexpr size_t kFlood = 256 << 10, kPainted = 16 << 10;
  Node a;
  Process peer;
};

constexpr int kRounds = 20;

}  // namespace

CASE(deregistering_fences_a_flood) {
  for (int i = 0; i < kRounds; ++i) {
    Flooded f;
    f.a.engine.DeregisterMemory(f.a.memory);
    f.fenced();
  }
}

CASE(removing_the_backend_fences_a_flood) {
  for (int i = 0; i < kRounds; ++i) {
    Flooded f;
    f.a.engine.RemoveBackend(BackendType::RDMA);
    f.fenced();
  }
}

// It was stopped in the middle of a copy, perhaps, and goes on when all is over.
CASE(deregistering_fences_a_stopped_initiator) {
  for (int i = 0; i < kRounds; ++i) {
    Flooded f;
    f.peer.stop();
    f.a.engine.DeregisterMemory(f.a.memory);
    f.paint();
    f.peer.go_on();
    f.fenced();
  }
}

CASE(a_killed_initiator_does_not_hold_a_memory) {
  for (int i = 0; i < kRounds; ++i) {
    Flooded f;
    f.peer.end(SIGKILL);
    f.a.engine.DeregisterMemory(f.a.memory);
    f.paint();
    CHECK(f.untouched());
  }
}
