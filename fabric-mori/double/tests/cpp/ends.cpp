// What ends the process. Each of these cases has to end before its last line.
#include "check.hpp"

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
  Joined p;
  TransferStatusPtrVec statuses;
  TransferUniqueIdVec ids{1};
  p.a.engine.BatchWrite({p.a.memory}, {{0}}, {p.b.memory}, {{0}}, {{8}}, statuses, ids);
}

CASE(ends_ragged_batch) {
  Joined p;
  TransferStatusPtrVec statuses{&new_status()};
  TransferUniqueIdVec ids{1};
  p.a.engine.BatchWrite({p.a.memory}, {{0, 1}}, {p.b.memory}, {{0}}, {{8}}, statuses, ids);
}

CASE(ends_unmapped_memory) {
  Joined p;
  Unmapped hole;
  // Registering pins nothing.
  MemoryDesc here = p.a.engine.RegisterMemory(hole.at(), hole.len, -1, MemoryLocationType::CPU);
  std::fprintf(stderr, "registered\n");
  p.a.engine.CreateSession(here, p.b.memory);
}

CASE(ends_session_after_backend) {
  Joined p;
  p.a.engine.RemoveBackend(BackendType::RDMA);
  p.write();
}

CASE(ends_unserialised_calls) {
  Joined p;
  mori_double_faults("sq_full@1:60000");
  TransferStatus& status = new_status();
  std::atomic<bool> posting{false};
  std::thread post([&] {
    posting = true;
    p.session->Write(0, 0, 8, &status, 1);
  });
  // The status is in progress from within the post on.
  while (!posting || status.Init()) std::this_thread::yield();
  p.a.engine.DeregisterMemory(p.a.memory);
}
