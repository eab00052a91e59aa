// Memory of "GPUs" of one node, copied when the status is polled.
#include "check.hpp"

namespace {

struct Gpu : Node {
  explicit Gpu(const std::string& key, int fill, bool rdma = false) : Node(key, 65536, fill) {
    engine.CreateBackend(BackendType::XGMI, XgmiBackendConfig());
    if (rdma) engine.CreateBackend(BackendType::RDMA, quiet());
    memory = engine.RegisterMemory(bytes.data(), bytes.size(), 0, MemoryLocationType::GPU);
  }
};

struct Gpus {
  Gpus() : a("a", 1), b("b", 0) { a.engine.RegisterRemoteEngine(b.engine.GetEngineDesc()); }
  Gpu a, b;
};

}  // namespace

CASE(xgmi_between_processes) {
  Gpu a("a", 1);
  Process peer("peer", "xgmi");
  MemoryDesc there = peer.memory("65536 0 gpu");
  peer.meet(a.engine);
  auto session = a.engine.CreateSession(a.memory, there);
  CHECK(session && session->Alive());
  TransferStatus &write = new_status(), &read = new_status(), &waited = new_status();
  session->BatchWrite({0, 4096}, {32768, 0}, {4096, 8192}, &write, 1);
  // It has not begun: only polling advances it.
  CHECK_EQ(peer.ask("count 0 1"), std::string("0"));
  CHECK_EQ(mori_double_events_out(), uint64_t{1});
  CHECK_EQ(wait(write), StatusCode::SUCCESS);
  CHECK_EQ(mori_double_events_out(), uint64_t{0});
  CHECK_EQ(peer.ask("count 0 1"), std::string("12288"));
  CHECK_EQ(peer.ask("bytes 0 8191 2"), std::string("0100"));
  session->Read(0, 16384, 8, &read, 2);
  CHECK_EQ(read.WaitFor(-1), StatusCode::SUCCESS);
  CHECK(a.bytes[7] == 0 && a.bytes[8] == 1);
  // Nothing wakes a bounded wait before its deadline.
  session->Write(0, 0, 8, &waited, 3);
  CHECK_EQ(waited.WaitFor(50), StatusCode::SUCCESS);
  CHECK(!a.engine.PopInboundTransferStatus("peer", 1, &waited));
  // Deregistering fences nothing.
  peer.ask("dereg 0");
  check_done(::write(*session, 4096, 60000));
  CHECK_EQ(peer.ask("bytes 0 60000 9"), std::string("010101010101010100"));
}

CASE(xgmi_is_late_as_asked) {
  Gpus two;
  auto &[a, b] = two;
  mori_double_latency(40'000);
  TransferStatus& status = new_status();
  auto start = Clock::now();
  a.engine.Write(a.memory, 0, b.memory, 0, 65536, &status, 1);
  // Its end shows no earlier, however long this process had to wait for a core.
  StatusCode first = status.Code();
  CHECK(first == StatusCode::IN_PROGRESS || Clock::now() - start >= Millis(40));
  CHECK_EQ(wait(status), StatusCode::SUCCESS);
  CHECK(Clock::now() - start >= Millis(40));
  CHECK_EQ(b.bytes[65535], 1);
}

CASE(xgmi_events_leak) {
  Gpus two;
  auto &[a, b] = two;
  { // Never polled.
    TransferStatus& dropped = new_status();
    a.engine.Write(a.memory, 0, b.memory, 0, 8, &dropped, 1);
  }
  CHECK_EQ(mori_double_events_out(), uint64_t{1});
  CHECK_EQ(mori_double_faults("qp_error@1;lost@2;throw@3"), 0);
  TransferStatus &failed = new_status(), &lost = new_status(), &thrown_at = new_status();
  auto write = [&](TransferStatus& status) {
    return thrown([&] { a.engine.Write(a.memory, 0, b.memory, 0, 8, &status, 2); });
  };
  write(failed);
  CHECK_EQ(failed.Code(), StatusCode::ERR_GPU_OP);
  write(lost);
  CHECK_EQ(lost.WaitFor(kNever), StatusCode::IN_PROGRESS);
  CHECK(has(write(thrown_at), "system_error"));
  CHECK_EQ(mori_double_events_out(), uint64_t{2});
  CHECK_EQ(b.bytes[0], 0);
}

// XGMI before RDMA, RDMA for the rest, and nothing else.
CASE(routes) {
  Gpu a("a", 1, true), b("b", 0, true), only("only", 0);
  a.engine.RegisterRemoteEngine(b.engine.GetEngineDesc());
  a.engine.RegisterRemoteEngine(only.engine.GetEngineDesc());
  std::vector<unsigned char> host(4096);
  MemoryDesc cpu = b.engine.RegisterMemory(host.data(), 4096, -1, MemoryLocationType::CPU);
  TransferStatus &gpu_gpu = new_status(), &gpu_cpu = new_status();
  a.engine.Write(a.memory, 0, b.memory, 0, 8, &gpu_gpu, 1);
  CHECK_EQ(mori_double_events_out(), uint64_t{1});
  CHECK_EQ(wait(gpu_gpu), StatusCode::SUCCESS);
  a.engine.Write(a.memory, 0, cpu, 0, 8, &gpu_cpu, 2);
  CHECK_EQ(mori_double_events_out(), uint64_t{0});
  CHECK_EQ(wait(gpu_cpu), StatusCode::SUCCESS);
  CHECK_EQ(host[7], 1);
  // Without XGMI the same pair goes over RDMA.
  a.engine.RemoveBackend(BackendType::XGMI);
  check_done(a.write(b.memory, 16));
  CHECK_EQ(b.bytes[23], 1);
  a.engine.RemoveBackend(BackendType::RDMA);
  CHECK_EQ(a.write(b.memory).code, StatusCode::ERR_BAD_STATE);
  CHECK(!a.engine.CreateSession(a.memory, b.memory));
#if MORI_DOUBLE_CLASS >= 15
  a.engine.CreateBackend(BackendType::FABRIC, FabricBackendConfig());
  a.engine.LoadFabricCopyModule("nothing");
  CHECK(!a.engine.CreateSession(a.memory, b.memory));
#endif
  // CPU memory is nothing for XGMI.
  CHECK(!only.engine.CreateSession(only.memory, cpu));
}

CASE(auto_xgmi) {
  setenv("MORI_DISABLE_AUTO_XGMI", "0", 1);
  Node a("a"), b("b");
  a.meet(b);
  MemoryDesc here = a.engine.RegisterMemory(a.bytes.data(), 64, 0, MemoryLocationType::GPU);
  MemoryDesc there = b.engine.RegisterMemory(b.bytes.data(), 64, 1, MemoryLocationType::GPU);
  TransferStatus& status = new_status();
  a.engine.Write(here, 0, there, 0, 8, &status, 1);
  CHECK_EQ(mori_double_events_out(), uint64_t{1});
  CHECK_EQ(wait(status), StatusCode::SUCCESS);
}

// A memory of before the backend has no handle that another process could open.
CASE(xgmi_without_a_handle) {
  Gpu a("a", 1);
  Process peer("peer", "none");
  MemoryDesc there = peer.memory("4096 0 gpu");
  CHECK((there.ipcHandle == std::array<char, 64>{}));
  a.engine.RegisterRemoteEngine(peer.desc());
  CHECK(!a.engine.CreateSession(a.memory, there));
  CHECK_EQ(a.write(there).code, StatusCode::ERR_BAD_STATE);
}

CASE(xgmi_of_another_node) {
  Gpu a("a", 1), b("b", 0);
  EngineDesc far = b.engine.GetEngineDesc();
  far.nodeId = "elsewhere";
  a.engine.RegisterRemoteEngine(far);
  CHECK(!a.engine.CreateSession(a.memory, b.memory));
}

CASE(xgmi_and_a_killed_target) {
  Gpu a("a", 1);
  Process peer("peer", "xgmi");
  MemoryDesc there = peer.memory("65536 0 gpu");
  peer.meet(a.engine);
  auto session = a.engine.CreateSession(a.memory, there);
  peer.end(SIGKILL);
  check_done(write(*session));
  TransferStatus& read = new_status();
  session->Read(0, 0, 8, &read, 2);
  CHECK_EQ(wait(read), StatusCode::ERR_GPU_OP);
  CHECK(!a.engine.CreateSession(a.memory, there));
}

CASE(ends_xgmi_out_of_range) {
  Gpus g;
  g.a.engine.Write(g.a.memory, 0, g.b.memory, SIZE_MAX - 4, 8, &new_status(), 1);
}

CASE(ends_xgmi_ragged_batch) {
  Gpus g;
  auto session = g.a.engine.CreateSession(g.a.memory, g.b.memory);
  session->BatchWrite({0}, {0, 1}, {1, 1}, &new_status(), 1);
}

CASE(ends_xgmi_polled_after_backend) {
  Gpus g;
  TransferStatus& status = new_status();
  g.a.engine.Write(g.a.memory, 0, g.b.memory, 0, 8, &status, 1);
  g.a.engine.RemoveBackend(BackendType::XGMI);
  status.Code();
}
