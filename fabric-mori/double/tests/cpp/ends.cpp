// What ends the process. Each of these cases has to end before its last line.
#include "check.hpp"

namespace {

struct Pair2 {
  Pair2() : a("a"), b("b") { a.meet(b); }
  Node a, b;
};

void gpus(IOEngine& a, IOEngine& b, std::vector<unsigned char>& bytes, MemoryDesc* here,
          MemoryDesc* there) {
  for (IOEngine* engine : {&a, &b}) engine->CreateBackend(BackendType::XGMI, XgmiBackendConfig());
  a.RegisterRemoteEngine(b.GetEngineDesc());
  *here = a.RegisterMemory(bytes.data(), 64, 0, MemoryLocationType::GPU);
  *there = b.RegisterMemory(bytes.data() + 64, 64, 1, MemoryLocationType::GPU);
}

}  // namespace

CASE(ends_no_smi) {
  setenv("MORI_DOUBLE_NO_SMI", "1", 1);
  IOEngine engine("e", {"127.0.0.1", 0});
  thrown([&] { engine.CreateBackend(BackendType::RDMA, quiet()); });
}

CASE(ends_port_in_use) {
  Node a("a");
  IOEngine other("b", {"127.0.0.1", static_cast<uint16_t>(a.engine.GetEngineDesc().port)});
  thrown([&] { other.CreateBackend(BackendType::RDMA, quiet()); });
}

CASE(ends_foreign_address) {
  // Reserved for documentation: no interface has it.
  IOEngine engine("e", {"192.0.2.1", 0});
  thrown([&] { engine.CreateBackend(BackendType::RDMA, quiet()); });
}

CASE(ends_tcp_backend) {
  IOEngine engine("e", {"127.0.0.1", 0});
  thrown([&] { engine.CreateBackend(BackendType::TCP, BackendConfig(BackendType::TCP)); });
}

CASE(ends_unequal_batch) {
  Pair2 p;
  TransferStatusPtrVec statuses;
  TransferUniqueIdVec ids{1};
  p.a.engine.BatchWrite({p.a.memory}, {{0}}, {p.b.memory}, {{0}}, {{8}}, statuses, ids);
}

CASE(ends_ragged_batch) {
  Pair2 p;
  TransferStatus &status = new_status();
  TransferStatusPtrVec statuses{&status};
  TransferUniqueIdVec ids{1};
  p.a.engine.BatchWrite({p.a.memory}, {{0, 1}}, {p.b.memory}, {{0}}, {{8}}, statuses, ids);
}

CASE(ends_pin) {
  mori_double_faults("pin@1");
  // Registering pins nothing.
  Pair2 p;
  std::fprintf(stderr, "registered\n");
  p.a.engine.CreateSession(p.a.memory, p.b.memory);
}

CASE(ends_exit) {
  Pair2 p;
  mori_double_faults("exit@1");
  TransferStatus &status = new_status();
  p.a.engine.Write(p.a.memory, 0, p.b.memory, 0, 8, &status, 1);
}

CASE(ends_session_after_backend) {
  Pair2 p;
  auto session = p.a.engine.CreateSession(p.a.memory, p.b.memory);
  p.a.engine.RemoveBackend(BackendType::RDMA);
  TransferStatus &status = new_status();
  session->Write(0, 0, 8, &status, 1);
}

CASE(ends_unserialised_calls) {
  Pair2 p;
  auto session = p.a.engine.CreateSession(p.a.memory, p.b.memory);
  mori_double_faults("sq_full@1:60000");
  TransferStatus &status = new_status();
  std::atomic<bool> posting{false};
  std::thread post([&] {
    posting = true;
    session->Write(0, 0, 8, &status, 1);
  });
  // The status is in progress from within the post on.
  while (!posting || status.Init()) std::this_thread::yield();
  p.a.engine.DeregisterMemory(p.a.memory);
}

CASE(ends_xgmi_out_of_range) {
  IOEngine a("a", {"127.0.0.1", 0}), b("b", {"127.0.0.1", 0});
  std::vector<unsigned char> bytes(128);
  MemoryDesc here, there;
  gpus(a, b, bytes, &here, &there);
  TransferStatus &status = new_status();
  a.Write(here, 0, there, SIZE_MAX - 4, 8, &status, 1);
}

CASE(ends_xgmi_ragged_batch) {
  IOEngine a("a", {"127.0.0.1", 0}), b("b", {"127.0.0.1", 0});
  std::vector<unsigned char> bytes(128);
  MemoryDesc here, there;
  gpus(a, b, bytes, &here, &there);
  TransferStatus &status = new_status();
  a.CreateSession(here, there)->BatchWrite({0}, {0, 1}, {1, 1}, &status, 1);
}

CASE(ends_xgmi_polled_after_backend) {
  IOEngine a("a", {"127.0.0.1", 0}), b("b", {"127.0.0.1", 0});
  std::vector<unsigned char> bytes(128);
  MemoryDesc here, there;
  gpus(a, b, bytes, &here, &there);
  TransferStatus &status = new_status();
  a.Write(here, 0, there, 0, 8, &status, 1);
  a.RemoveBackend(BackendType::XGMI);
  status.Code();
}

CASE(ends_bad_faults) {
  setenv("MORI_DOUBLE_FAULTS", "fire@1", 1);
  Node a("a");
}
