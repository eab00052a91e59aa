// Threads that post, poll, revoke and remove, for the sanitizers.
#include "check.hpp"

namespace {

using Statuses = std::vector<TransferStatus*>;

// Posts pieces of a memory from one thread and polls them from another.
void post_and_poll(Node& from, const MemoryDesc& to, int rounds) {
  auto session = from.engine.CreateSession(from.memory, to);
  CHECK(session);
  Statuses statuses;
  for (int i = 0; i < rounds; ++i) statuses.push_back(&new_status());
  std::atomic<int> posted{0};
  std::thread poll([&] {
    for (int i = 0; i < rounds; ++i) {
      while (posted.load() <= i) std::this_thread::yield();
      CHECK_EQ(wait(*statuses[i]), StatusCode::SUCCESS);
    }
  });
  for (int i = 0; i < rounds; ++i) {
    size_t at = static_cast<size_t>(i) * 4096 % (from.memory.size / 2);
    SizeVec local{at, at + 8192, at + 4096}, remote{at, at + 16384, at + 4096};
    session->BatchWrite(local, remote, {4096, 100, 4096}, statuses[i], i);
    posted.store(i + 1);
  }
  poll.join();
}

// In flight when the backend goes: what has not completed by then never does.
void remove_in_flight(int round) {
  Statuses statuses;
  Node a("a", quiet(2), 1 << 20, 1), b("b");
  a.meet(b);
  auto session = a.engine.CreateSession(a.memory, b.memory);
  for (uint64_t i = 0; i < 50; ++i) {
    statuses.push_back(&new_status());
    session->Write(0, 0, 1 << 20, statuses.back(), i);
  }
  std::thread poll([&] { wait(*statuses[0]); });
  poll.join();
  if (round % 2 == 0) {
    b.engine.RemoveBackend(BackendType::RDMA);
  } else {
    b.engine.DeregisterMemory(b.memory);
  }
  // Its bytes may be gone now.
  std::fill(b.bytes.begin(), b.bytes.end(), 0);
  session.reset();
  a.engine.RemoveBackend(BackendType::RDMA);
  std::fill(a.bytes.begin(), a.bytes.end(), 0);
  for (auto& status : statuses) status->Update(StatusCode::ERR_BAD_STATE, "over");
}

void gpus() {
  Node a("ga"), b("gb");
  for (Node* node : {&a, &b}) node->engine.CreateBackend(BackendType::XGMI, XgmiBackendConfig());
  a.meet(b);
  MemoryDesc here = a.engine.RegisterMemory(a.bytes.data(), 4096, 0, MemoryLocationType::GPU);
  MemoryDesc there = b.engine.RegisterMemory(b.bytes.data(), 4096, 1, MemoryLocationType::GPU);
  for (uint64_t i = 0; i < 100; ++i) {
    TransferStatus& status = new_status();
    a.engine.Write(here, 0, there, 0, 4096, &status, i);
    CHECK_EQ(wait(status), StatusCode::SUCCESS);
  }
}

}  // namespace

CASE(load) {
  RdmaBackendConfig notifying = quiet(2);
  notifying.enableNotification = true;
  Node a("a", notifying), b("b", quiet(3)), c("c", notifying);
  a.meet(b);
  b.meet(c);
  c.meet(a);
  mori_double_latency(200);
  std::vector<std::thread> threads;
  threads.emplace_back([&] { post_and_poll(a, b.memory, 150); });
  threads.emplace_back([&] { post_and_poll(a, c.memory, 150); });
  threads.emplace_back([&] { post_and_poll(b, c.memory, 150); });
  threads.emplace_back([&] { post_and_poll(c, a.memory, 150); });
  threads.emplace_back([&] { post_and_poll(c, a.memory, 150); });
  threads.emplace_back([] {
    for (int round = 0; round < 4; ++round) remove_in_flight(round);
  });
  threads.emplace_back([] { gpus(); });
  for (std::thread& thread : threads) thread.join();
  TransferStatus& inbound = new_status();
  CHECK(c.engine.PopInboundTransferStatus("a", 149, &inbound));
}
