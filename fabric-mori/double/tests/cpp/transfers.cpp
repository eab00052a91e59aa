// Bytes that arrive, and what a status says.
#include "check.hpp"

CASE(both_directions) {
  Node a("a"), b("b", quiet(), 1 << 20, 7);
  a.meet(b);
  for (size_t len : {size_t{1}, size_t{4096}, size_t{1} << 20}) {
    std::fill(a.bytes.begin(), a.bytes.end(), 9);
    TransferStatus& read = new_status();
    CHECK_EQ(read.Code(), StatusCode::INIT);
    check_done(a.write(b.memory, 0, len));
    b.look();
    CHECK(b.all(9, 0, len));
    CHECK(len == b.bytes.size() || b.all(7, len, b.bytes.size() - len));
    std::fill(b.bytes.begin(), b.bytes.end(), 5);
    a.engine.Read(a.memory, 0, b.memory, 0, len, &read, a.engine.AllocateTransferUniqueId());
    CHECK_EQ(read.WaitFor(-1), StatusCode::SUCCESS);
    CHECK(a.all(5, 0, len));
    std::fill(b.bytes.begin(), b.bytes.end(), 7);
  }
}

CASE(a_permuted_batch) {
  Node a("a", quiet(4)), b("b", quiet(4), 1 << 20, 0xff);
  a.meet(b);
  SizeVec local, remote, sizes;
  for (size_t i = 0; i < 64; ++i) {
    size_t to = i * 37 % 64;
    std::memset(a.bytes.data() + i * 4096, static_cast<int>(to), 4096);
    local.push_back(i * 4096);
    remote.push_back(to * 4096);
    sizes.push_back(4096);
  }
  auto session = a.engine.CreateSession(a.memory, b.memory);
  CHECK(session && session->Alive());
  for (uint64_t id = 0; id < 5; ++id) {
    std::fill(b.bytes.begin(), b.bytes.end(), 0xff);
    TransferStatus& status = new_status();
    session->BatchWrite(local, remote, sizes, &status, id);
    CHECK_EQ(wait(status), StatusCode::SUCCESS);
    b.look();
    for (size_t i = 0; i < 64; ++i) CHECK(b.all(static_cast<unsigned char>(i), i * 4096, 4096));
    CHECK(b.all(0xff, 64 * 4096, b.bytes.size() - 64 * 4096));
  }
  std::fill(a.bytes.begin(), a.bytes.end(), 0);
  TransferStatus& status = new_status();
  session->BatchRead(local, remote, sizes, &status, 9);
  CHECK_EQ(wait(status), StatusCode::SUCCESS);
  for (size_t i = 0; i < 64; ++i) {
    CHECK(a.all(static_cast<unsigned char>(i * 37 % 64), i * 4096, 4096));
  }
}

CASE(in_chunks) {
  RdmaBackendConfig config = quiet(4);
  config.enableTransferChunking = true;
  config.chunkBytes = 4096;
  config.maxChunksPerTransfer = 64;
  Node a("a", config, 1 << 20, 3), b("b");
  a.meet(b);
  check_done(a.write(b.memory, 0, 1 << 20));
  b.look();
  CHECK(b.all(3, 0, 1 << 20));
  std::fill(b.bytes.begin(), b.bytes.end(), 0);
  auto session = a.engine.CreateSession(a.memory, b.memory);
  TransferStatus& many = new_status();
  session->BatchWrite({0, 600000, 10}, {500000, 0, 900000}, {100001, 300000, 77}, &many, 4);
  CHECK_EQ(wait(many), StatusCode::SUCCESS);
  b.look();
  CHECK(b.all(3, 500000, 100001) && b.all(3, 0, 300000) && b.all(3, 900000, 77));
  CHECK(b.all(0, 300000, 200000) && b.all(0, 600001, 299999));
}

CASE(empty_ones) {
  Joined two;
  TransferStatus &zeros = new_status(), &none = new_status(), &engine_none = new_status();
  check_done(write(*two.session, 0, 0, 0));
  two.session->BatchWrite({1, 5}, {7, 3}, {0, 0}, &zeros, 2);
  CHECK_EQ(wait(zeros), StatusCode::SUCCESS);
  two.session->BatchRead({}, {}, {}, &none, 3);
  CHECK_EQ(none.Code(), StatusCode::SUCCESS);
  TransferStatusPtrVec statuses{&engine_none};
  TransferUniqueIdVec ids{4};
  two.a.engine.BatchWrite({two.a.memory}, {{}}, {two.b.memory}, {{}}, {{}}, statuses, ids);
  CHECK_EQ(engine_none.Code(), StatusCode::SUCCESS);
}

CASE(engine_batches) {
  Node a("a", quiet(), 1 << 16, 1), b("b", quiet(), 1 << 16);
  a.meet(b);
  TransferStatus &first = new_status(), &second = new_status();
  TransferStatusPtrVec statuses{&first, &second};
  TransferUniqueIdVec ids{a.engine.AllocateTransferUniqueId(), a.engine.AllocateTransferUniqueId()};
  CHECK(ids[0] != ids[1]);
  a.engine.BatchWrite({a.memory, a.memory}, {{0, 8}, {16}}, {b.memory, b.memory}, {{0, 100}, {200}},
                      {{8, 8}, {8}}, statuses, ids);
  CHECK_EQ(a.engine.WaitAll({&first, nullptr, &second}), StatusCode::SUCCESS);
  b.look();
  CHECK(b.all(1, 0, 8) && b.all(1, 100, 8) && b.all(1, 200, 8) && b.all(0, 8, 92));
  // The second has no route: it fails, and what is behind it is not submitted.
  MemoryDesc stranger = b.memory;
  stranger.engineKey = "nobody";
  TransferStatus &ok = new_status(), &bad = new_status(), &left = new_status();
  TransferStatusPtrVec three{&ok, &bad, &left};
  TransferUniqueIdVec more{5, 6, 7};
  BatchSizeVec starts{{0}, {0}, {0}};
  a.engine.BatchRead({a.memory, a.memory, a.memory}, starts, {b.memory, stranger, b.memory}, starts,
                     {{8}, {8}, {8}}, three, more);
  CHECK_EQ(wait(ok), StatusCode::SUCCESS);
  CHECK_EQ(bad.Code(), StatusCode::ERR_BAD_STATE);
  CHECK_EQ(left.Code(), StatusCode::INIT);
  CHECK_EQ(left.WaitFor(-1), StatusCode::INIT);
  CHECK_EQ(a.engine.WaitAll({&ok, &bad}), StatusCode::ERR_BAD_STATE);
}

CASE(waiting) {
  Node a("a"), b("b");
  a.meet(b);
  CHECK_EQ(mori_double_faults("lost@1"), 0);
  TransferStatus &lost = new_status(), &fine = new_status();
  a.engine.Write(a.memory, 0, b.memory, 0, 8, &lost, 1);
  a.engine.Write(a.memory, 0, b.memory, 0, 8, &fine, 2);
  CHECK_EQ(wait(fine), StatusCode::SUCCESS);
  CHECK_EQ(lost.WaitFor(0), StatusCode::IN_PROGRESS);
  CHECK_EQ(a.engine.WaitAll({&fine, &lost}, 0), StatusCode::IN_PROGRESS);
  auto start = Clock::now();
  CHECK_EQ(a.engine.WaitAll({&lost, &fine}, 30), StatusCode::IN_PROGRESS);
  // MoRI counts whole milliseconds.
  CHECK(Clock::now() - start >= Millis(28));
  TransferStatus& failed = new_status();
  failed.Update(StatusCode::ERR_RDMA_OP, "first");
  failed.Update(StatusCode::SUCCESS, "second");
  CHECK(failed.Failed() && failed.Message() == "first");
  CHECK_EQ(a.engine.WaitAll({&lost, &failed}, 0), StatusCode::ERR_RDMA_OP);
  CHECK_EQ(a.engine.WaitAll({}), StatusCode::SUCCESS);
}

CASE(notifications) {
  RdmaBackendConfig config = quiet(2);
  config.enableNotification = true;
  Node a("a", config), b("b", config);
  a.meet(b);
  TransferStatus &status = new_status(), &inbound = new_status();
  CHECK(!b.engine.PopInboundTransferStatus("a", 77, &inbound));
  a.engine.Write(a.memory, 0, b.memory, 0, 8, &status, 77);
  while (!b.engine.PopInboundTransferStatus("a", 77, &inbound)) std::this_thread::yield();
  CHECK_EQ(inbound.Code(), StatusCode::SUCCESS);
  // It stays for ever, and for its engine only.
  CHECK(b.engine.PopInboundTransferStatus("a", 77, &inbound));
  CHECK(!b.engine.PopInboundTransferStatus("b", 77, &inbound));
  CHECK(!b.engine.PopInboundTransferStatus("a", 78, &inbound));
}

// Twenty one after the other would take twenty latencies, however long that is. On a busy machine a
// short one is not all that they take.
CASE(latencies_overlap) {
  Joined two;
  for (auto latency = Millis(100);; latency *= 2) {
    CHECK(latency <= Millis(1600));
    mori_double_latency(static_cast<uint64_t>(latency.count()) * 1000);
    auto start = Clock::now();
    std::vector<TransferStatus*> statuses;
    for (uint64_t i = 0; i < 20; ++i) {
      statuses.push_back(&new_status());
      two.session->Write(0, 0, 8, statuses.back(), i);
    }
    CHECK_EQ(wait(*statuses.front()), StatusCode::SUCCESS);
    CHECK(Clock::now() - start >= latency);
    for (auto& status : statuses) CHECK_EQ(wait(*status), StatusCode::SUCCESS);
    if (Clock::now() - start < 10 * latency) break;
  }
}

// A session is found again by engine and memories, without asking the peer.
CASE(sessions_are_cached) {
  Node a("a"), b("b");
  a.meet(b);
  // The second session would end the process.
  CHECK_EQ(mori_double_faults("pin@2"), 0);
  check_done(a.write(b.memory));
  EngineDesc moved = b.engine.GetEngineDesc();
  moved.host = "somewhere";
  a.engine.DeregisterRemoteEngine(moved);
  a.engine.RegisterRemoteEngine(moved);
  check_done(a.write(b.memory));
  CHECK_EQ(mori_double_faults(""), 0);
  MemoryDesc fresh = b.engine.RegisterMemory(b.bytes.data(), 64, -1, MemoryLocationType::CPU);
  TransferStatus& untouched = new_status();
  std::string why = thrown([&] { a.engine.Write(a.memory, 0, fresh, 0, 8, &untouched, 3); });
  CHECK(has(why, "system_error connect(somewhere:"));
  CHECK_EQ(untouched.Code(), StatusCode::INIT);
}

CASE(a_status_at_a_recycled_address) {
  Node a("a"), b("b");
  a.meet(b);
  auto start = Clock::now();
  alignas(TransferStatus) unsigned char place[sizeof(TransferStatus)];
  TransferStatus* fresh = nullptr;
  do {
    CHECK_EQ(mori_double_faults("slow@1:300"), 0);
    start = Clock::now();
    auto* early = new (place) TransferStatus;
    a.engine.Write(a.memory, 0, b.memory, 0, 8, early, 1);
    early->~TransferStatus();
    fresh = new (place) TransferStatus;
  } while (Clock::now() - start >= Millis(300));
  // Nothing was ever posted with it.
  while (fresh->Init()) std::this_thread::yield();
  CHECK_EQ(fresh->Code(), StatusCode::SUCCESS);
}
