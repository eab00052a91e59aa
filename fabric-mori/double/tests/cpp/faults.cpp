// Faults on demand.
#include "check.hpp"

namespace {

// 64 pieces that cannot be merged.
struct Pieces {
  SizeVec local, remote, sizes;
  Pieces() {
    for (size_t i = 0; i < 64; ++i) {
      local.push_back(i * 8192);
      remote.push_back(i * 16384);
      sizes.push_back(8192);
    }
  }
};

struct Two : Joined {
  explicit Two(const char* faults, int qps = 1) : Joined(quiet(qps)) {
    CHECK_EQ(mori_double_faults(faults), 0);
  }
  void post(TransferStatus& status) {
    session->BatchWrite(pieces.local, pieces.remote, pieces.sizes, &status, 1);
  }
  size_t landed() {
    b.look();
    size_t count = 0;
    for (size_t at : pieces.remote) count += b.all(1, at, 8192);
    return count;
  }
  void dead() {
    for (uint64_t id = 0; id < 4; ++id) check_flushed(write(8192, id));
    b.look();
    CHECK(b.all(0, 8192, 8));
  }
  void lives() { check_done(write(8192)); }

  Pieces pieces;
};

}  // namespace

CASE(fault_qp_error) {
  Two two("qp_error@1", 4);
  TransferStatus& status = new_status();
  two.post(status);
  // The one that failed had not asked for a completion, and the last one is flushed.
  check_flushed(end_of(status));
  CHECK_EQ(two.landed(), size_t{32});
  two.dead();
  CHECK_EQ(two.landed(), size_t{32});
  Two one("qp_error@1");
  CHECK_EQ(one.write().text, std::string("local QP operation error"));
}

CASE(fault_ack_lost) {
  Two two("ack_lost@2", 4);
  two.lives();
  std::fill(two.b.bytes.begin(), two.b.bytes.end(), 0);
  TransferStatus& status = new_status();
  two.post(status);
  check_advised(end_of(status), "transport retry counter exceeded");
  CHECK_EQ(two.landed(), size_t{64});
  two.dead();
}

CASE(fault_lost) {
  Two two("lost@1");
  TransferStatus& status = new_status();
  two.post(status);
  // On the same queue pair, so behind it.
  two.lives();
  CHECK_EQ(two.landed(), size_t{64});
  CHECK_EQ(status.WaitFor(kNever), StatusCode::IN_PROGRESS);
}

CASE(fault_late) {
  Two two("late@1:300", 4);
  TransferStatus& status = new_status();
  auto start = Clock::now();
  two.post(status);
  CHECK_EQ(status.Code(), StatusCode::ERR_RDMA_OP);
  two.dead();
  while (two.landed() < 64) std::this_thread::yield();
  CHECK(Clock::now() - start >= Millis(300));
}

// What is to be late, when `end` comes in time; then it never lands.
static void late_and(const std::function<void(Two&)>& end) {
  auto landing = Millis(500);
  auto start = Clock::now();
  std::unique_ptr<Two> two;
  do {
    two = std::make_unique<Two>("late@1:500");
    start = Clock::now();
    TransferStatus& status = new_status();
    two->post(status);
    CHECK(status.Failed());
    end(*two);
  } while (Clock::now() - start >= landing);
  TransferStatus& never = new_status();
  never.SetCode(StatusCode::IN_PROGRESS);
  CHECK_EQ(never.WaitFor(500 + kNever), StatusCode::IN_PROGRESS);
  CHECK_EQ(two->landed(), size_t{0});
}

CASE(fault_late_is_removed_with_the_backend) {
  late_and([](Two& two) { two.a.engine.RemoveBackend(BackendType::RDMA); });
}
CASE(fault_late_and_deregistered) {
  late_and([](Two& two) { two.b.engine.DeregisterMemory(two.b.memory); });
}
CASE(fault_late_and_the_target_is_removed) {
  late_and([](Two& two) { two.b.engine.RemoveBackend(BackendType::RDMA); });
}

CASE(fault_sq_full) {
  Two two("sq_full@1:200", 4);
  TransferStatus& status = new_status();
  auto start = Clock::now();
  two.post(status);
  CHECK(Clock::now() - start >= Millis(200));
  CHECK_EQ(status.Code(), StatusCode::ERR_RDMA_OP);
  CHECK(status.Message().starts_with("SQ full"));
  // Not the queue pair, and not the status, tells when the rest has landed.
  while (two.landed() < 32) std::this_thread::yield();
  CHECK(Clock::now() - start >= Millis(400));
  two.lives();
  CHECK_EQ(two.landed(), size_t{32});
}

CASE(fault_slow) {
  Two two("slow@2+:120");
  two.lives();
  for (int i = 0; i < 2; ++i) {
    TransferStatus& status = new_status();
    auto start = Clock::now();
    two.post(status);
    CHECK_EQ(wait(status), StatusCode::SUCCESS);
    CHECK(Clock::now() - start >= Millis(120));
  }
  CHECK_EQ(two.landed(), size_t{64});
}

CASE(fault_throw) {
  Two two("throw@1;throw_other@2;throw@3;lost@7");
  TransferStatus& status = new_status();
  CHECK(has(thrown([&] { two.post(status); }), "system_error"));
  CHECK_EQ(thrown([&] { two.post(status); }), std::string("int 7"));
  CHECK(has(thrown([&] { two.a.engine.Write(two.a.memory, 0, two.b.memory, 0, 8, &status, 1); }),
            "system_error"));
  CHECK_EQ(status.Code(), StatusCode::INIT);
  two.lives();
  CHECK_EQ(two.landed(), size_t{0});
  // Setting them anew begins the count anew.
  CHECK_EQ(mori_double_faults("throw_other@1"), 0);
  CHECK_EQ(thrown([&] { two.post(status); }), std::string("int 7"));
  CHECK_EQ(mori_double_faults(""), 0);
  two.lives();
}

// Each end of a queue pair takes its time, one after the other.
CASE(slow_set_ups) {
  setenv("MORI_DOUBLE_BACKEND_MS", "60", 1);
  setenv("MORI_DOUBLE_PAIR_MS", "40", 1);
  auto start = Clock::now();
  Node a("a"), b("b");
  CHECK(Clock::now() - start >= 2 * Millis(60));
  a.meet(b);
  start = Clock::now();
  CHECK(a.engine.CreateSession(a.memory, b.memory));
  CHECK(Clock::now() - start >= 2 * Millis(40));
}

// What goes to stdout while it lives.
struct Log {
  Log() : before(dup(STDOUT_FILENO)), file(std::tmpfile()) {
    CHECK(file != nullptr && dup2(fileno(file), STDOUT_FILENO) == STDOUT_FILENO);
  }
  ~Log() { dup2(before, STDOUT_FILENO); }
  std::string text() {
    std::string out(1 << 16, '\0');
    ssize_t len = pread(fileno(file), out.data(), out.size(), 0);
    return out.substr(0, len > 0 ? static_cast<size_t>(len) : 0);
  }
  int before;
  FILE* file;
};

// Asynchronous events are for the log only: nothing fails by them, and nothing is mended.
CASE(a_port_that_flaps) {
  Log log;
  Joined two;
  mori_double_port(0);
  CHECK(has(log.text(), "RDMA async event IBV_EVENT_PORT_ERR"));
  check_advised(two.write(), "transport retry counter exceeded");
  mori_double_port(1);
  CHECK(has(log.text(), "RDMA async event IBV_EVENT_PORT_ACTIVE (recovery)"));
  check_flushed(two.write());
}
