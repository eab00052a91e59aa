// What is refused, and how.
#include <netinet/in.h>
#include <sys/socket.h>

#include "check.hpp"

CASE(ranges) {
  Node a("a", quiet(), 4096, 1), b("b", quiet(), 8192);
  a.meet(b);
  auto session = a.engine.CreateSession(a.memory, b.memory);
  auto refused = [&](size_t local, size_t remote, size_t len) {
    TransferStatus& status = new_status();
    session->Write(local, remote, len, &status, 1);
    CHECK_EQ(status.Code(), StatusCode::ERR_INVALID_ARGS);
    CHECK_EQ(status.Message(), std::string("length out of range"));
  };
  refused(0, 0, 4097);
  refused(4096, 0, 1);
  refused(0, 8192, 1);
  refused(0, 8000, 200);
  TransferStatus &ragged = new_status(), &shorter = new_status();
  session->BatchWrite({0, 1}, {0}, {1}, &ragged, 2);
  CHECK_EQ(ragged.Code(), StatusCode::ERR_INVALID_ARGS);
  CHECK(has(ragged.Message(), "mismatch"));
  session->BatchRead({0}, {0}, {}, &shorter, 2);
  CHECK_EQ(shorter.Code(), StatusCode::ERR_INVALID_ARGS);
  // Nothing has come of it, and the queue pair lives.
  check_done(write(*session, 4095, 8191, 1));
  b.look();
  CHECK(b.all(0, 0, 8191) && b.all(1, 8191, 1));
}

CASE(sizes_beyond_a_work_request) {
  Node a("a"), b("b");
  a.meet(b);
  size_t large = size_t{1} << 34;
  // Nobody touches it.
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* nowhere = mmap(nullptr, large, PROT_NONE, flags, -1, 0);
  CHECK(nowhere != MAP_FAILED);
  MemoryDesc here = a.engine.RegisterMemory(nowhere, large, -1, MemoryLocationType::CPU);
  MemoryDesc there = b.engine.RegisterMemory(nowhere, large, -1, MemoryLocationType::CPU);
  auto session = a.engine.CreateSession(here, there);
  TransferStatus &single = new_status(), &merged = new_status();
  session->Write(0, 0, size_t{1} << 32, &single, 1);
  CHECK_EQ(single.Code(), StatusCode::ERR_INVALID_ARGS);
  CHECK(has(single.Message(), "exceeds UINT32_MAX"));
  size_t half = size_t{1} << 29;
  session->BatchWrite({0, half, 2 * half}, {0, half, 2 * half}, {half, half, 1}, &merged, 2);
  CHECK_EQ(merged.Code(), StatusCode::ERR_INVALID_ARGS);
  CHECK(has(merged.Message(), "exceeds local max_msg_sz 1073741824"));
}

// Neighbours are merged into one request, which is too long for it unless it is split.
CASE(messages_of_software_rdma) {
  constexpr size_t most = 8 << 20;
  setenv("MORI_DOUBLE_MESSAGE_MAX", std::to_string(most).c_str(), 1);
  for (bool chunking : {false, true}) {
    RdmaBackendConfig config = quiet();
    config.enableTransferChunking = chunking;
    Joined two(config, 2 * most);
    check_done(write(*two.session, 0, 0, most));
    TransferStatus& status = new_status();
    two.session->BatchWrite({0, most}, {0, most}, {most, 1}, &status, 1);
    End end = end_of(status);
    if (chunking) {
      check_done(end);
      CHECK_EQ(two.b.bytes[most], 1);
    } else {
      CHECK_EQ(end.code, StatusCode::ERR_INVALID_ARGS);
      CHECK(has(end.text, "exceeds local max_msg_sz 8388608"));
    }
  }
}

// The sum of offset and size wraps, so MoRI lets it through and the NIC refuses it.
static void wrapping(bool local) {
  Joined two(quiet(), 4096);
  size_t far = SIZE_MAX - 4;
  End wild = write(*two.session, local ? far : 0, local ? 0 : far);
  check_advised(wild, local ? "local protection error" : "remote access error");
  check_flushed(two.write());
  two.b.look();
  CHECK(two.b.all(0, 0, 4096));
  CHECK(two.session->Alive());
}

CASE(an_offset_that_wraps_there) { wrapping(false); }
CASE(an_offset_that_wraps_here) { wrapping(true); }

CASE(no_session) {
  Node a("a"), b("b");
  a.engine.RegisterRemoteEngine(b.engine.GetEngineDesc());
  auto connect = [&](const MemoryDesc& to) {
    return thrown([&] { a.engine.CreateSession(a.memory, to); });
  };
  MemoryDesc unknown = b.memory, larger = b.memory;
  unknown.id = 99;
  std::string why = connect(unknown);
  CHECK(has(why, "runtime_error") && has(why, "remote MR size mismatch for engine b"));
  CHECK(has(why, "expected=1048576 got=0"));
  larger.size += 1;
  CHECK(has(connect(larger), "expected=1048577 got=1048576"));

  MemoryDesc stranger = b.memory;
  stranger.engineKey = "nobody";
  CHECK(!a.engine.CreateSession(a.memory, stranger));
  End end = a.write(stranger);
  CHECK_EQ(end.code, StatusCode::ERR_BAD_STATE);
  CHECK(has(end.text, "No available backend found"));

  auto at = [&](const std::string& host, int port) {
    EngineDesc moved = b.engine.GetEngineDesc();
    moved.key = stranger.engineKey = host;
    moved.host = host;
    moved.port = port;
    a.engine.RegisterRemoteEngine(moved);
    return connect(stranger);
  };
  int port = b.engine.GetEngineDesc().port;
  CHECK(has(at("localhost", port), "system_error connect(localhost:" + std::to_string(port)));
  b.engine.RemoveBackend(BackendType::RDMA);
  std::string refused = at("127.0.0.1", port);
  CHECK_EQ(refused, "system_error connect(127.0.0.1:" + std::to_string(port) +
                        "): Connection refused");
  // The port that stands for an engine without RDMA.
  CHECK_EQ(at("127.0.0.2", 1), std::string("nothing"));
  CHECK(!a.engine.CreateSession(a.memory, stranger));
}

CASE(backends_that_cannot_be_made) {
  IOEngine sentinel("s", {"127.0.0.1", 1});
  CHECK(has(thrown([&] { sentinel.CreateBackend(BackendType::RDMA, quiet()); }), "port=1"));
  IOEngine engine("e", {"127.0.0.1", 0});
  auto with = [&](auto change) {
    RdmaBackendConfig config;
    change(config);
    return thrown([&] { engine.CreateBackend(BackendType::RDMA, config); });
  };
  CHECK(has(with([](auto& c) { c.notifPerQp = 0; }), "runtime_error"));
  CHECK(has(with([](auto& c) { c.maxChunksPerTransfer = 0; }), "runtime_error"));
  CHECK(has(with([](auto& c) { c.numNicsPerTransfer = 0; }), "runtime_error"));
  CHECK(has(with([](auto& c) {
              c.enableTransferChunking = true;
              c.chunkBytes = 4095;
            }),
            "runtime_error"));
  CHECK_EQ(engine.GetEngineDesc().port, 0);
  engine.CreateBackend(BackendType::RDMA, quiet());
  CHECK(engine.GetEngineDesc().port > 1);
  engine.CreateBackend(BackendType::RDMA, quiet());
}

CASE(no_nic) {
  setenv("MORI_DOUBLE_NO_NIC", "1", 1);
  IOEngine engine("e", {"127.0.0.1", 0});
  std::string why = thrown([&] { engine.CreateBackend(BackendType::RDMA, quiet()); });
  CHECK(has(why, "no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0"));
  setenv("MORI_DISABLE_AUTO_XGMI", "0", 1);
  engine.CreateBackend(BackendType::RDMA, quiet());
  CHECK_EQ(engine.GetEngineDesc().port, 1);
}

// Regions are revoked by address, and the first one at it has the place.
CASE(two_memories_at_one_address) {
  for (bool first_goes : {true, false}) {
    Node a("a"), b("b"), c("c");
    a.meet(b);
    c.meet(b);
    MemoryDesc twin = b.engine.RegisterMemory(b.bytes.data(), b.bytes.size(), -1,
                                              MemoryLocationType::CPU);
    auto to_first = a.engine.CreateSession(a.memory, b.memory);
    auto to_twin = c.engine.CreateSession(c.memory, twin);
    b.engine.DeregisterMemory(first_goes ? b.memory : twin);
    CHECK_EQ(write(*to_first).code, StatusCode::ERR_RDMA_OP);
    check_done(write(*to_twin));
    // The other one has no place in the pool: it is never revoked.
    b.engine.DeregisterMemory(first_goes ? twin : b.memory);
    check_done(write(*to_twin));
  }
}

// The target pins in its control plane, when it is asked for the first time.
CASE(a_target_that_cannot_pin) {
  Process peer("peer");
  Node a("a");
  MemoryDesc first = peer.memory("4096 0");
  MemoryDesc there = unpacked<MemoryDesc>(unhex(peer.ask("unmapped")));
  peer.meet(a.engine);
  CHECK(a.engine.CreateSession(a.memory, first));
  std::string why = thrown([&] { a.engine.CreateSession(a.memory, there); });
  CHECK(has(why, "ReadMessageHeader(type) failed: expected 1 byte(s), received 0"));
  int status = peer.end(0);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

CASE(a_control_plane_that_does_not_answer) {
  setenv("MORI_IO_CP_TIMEOUT_MS", "50", 1);
  Process peer("peer");
  Node a("a");
  MemoryDesc there = peer.memory("4096 0");
  peer.meet(a.engine);
  peer.stop();
  CHECK(has(thrown([&] { a.engine.CreateSession(a.memory, there); }), "ReadMessageHeader(type)"));
}

// Connections that ask nothing, half of a question, or nonsense.
CASE(visitors) {
  setenv("MORI_IO_CP_TIMEOUT_MS", "2000", 1);
  Node a("a"), b("b");
  a.meet(b);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<uint16_t>(b.engine.GetEngineDesc().port));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> sockets;
  for (std::string text : {"", "\x01\x02", "\x09\x01\x01\x01\x01", "\x01\xff\xff\xff\xff"}) {
    int fd = sockets.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0);
    CHECK(send(fd, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  }
  char byte;
  // The last three are dropped.
  for (size_t i = 1; i < sockets.size(); ++i) CHECK(recv(sockets[i], &byte, 1, 0) <= 0);
  check_done(a.write(b.memory));
  for (int fd : sockets) close(fd);
}

// The peer answers no more, so nothing leaves the queue.
CASE(a_full_send_queue) {
  setenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "30000", 1);
  RdmaBackendConfig config = quiet();
  config.maxSendWr = 4;
  std::vector<TransferStatus*> statuses;
  Joined two(config);
  two.b.engine.RemoveBackend(BackendType::RDMA);
  for (uint64_t i = 0; i < 4; ++i) {
    statuses.push_back(&new_status());
    two.session->Write(0, i * 8, 8, statuses.back(), i);
  }
  check_advised(two.write(), "SQ full (batch): ep=0 depth=4 requested=1 max=4");
  for (TransferStatus* status : statuses) CHECK_EQ(status->Code(), StatusCode::IN_PROGRESS);
  two.b.look();
  CHECK(two.b.all(0, 0, 40));
}
