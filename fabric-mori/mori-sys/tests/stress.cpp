// All of the shim from several threads, as far as kf_mori.h allows it, for the sanitizers.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kf_mori.h"

extern "C" int mori_double_faults(const char *spec);
extern "C" void *mori_double_event_new();
extern "C" void mori_double_event_fire(void *event);
extern "C" void mori_double_event_free(void *event);

namespace {

char buffer[512];
thread_local char mine[512];

void must(int32_t kind, const kf_text &error, const char *what) {
  if (kind == KF_OK) return;
  std::fprintf(stderr, "%s: %d %s\n", what, kind, error.data);
  std::_Exit(1);
}

/// Lets others run. On a busy machine who sleeps is back long before who yields.
void pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

#define MUST(call)                       \
  do {                                   \
    kf_text error{mine, sizeof mine};    \
    must(call, error, #call);            \
  } while (false)

struct Node {
  kf_engine *engine = nullptr;
  kf_memory *memory = nullptr;
  std::vector<uint64_t> words = std::vector<uint64_t>(4096);
  std::vector<uint8_t> desc, memory_desc;

  Node(const char *key, bool rdma) {
    MUST(kf_engine_new(key, "127.0.0.1", 0, &engine, &error));
    kf_rdma config{};
    if (rdma) {
      MUST(kf_engine_rdma(engine, &config, &error));
    } else {
      MUST(kf_engine_xgmi(engine, 4, 4, &error));
    }
    const auto base = reinterpret_cast<uint64_t>(words.data());
    MUST(kf_memory_new(engine, base, words.size() * 8, rdma ? -1 : 0, rdma ? KF_CPU : KF_GPU,
                       &memory, &error));
    uint8_t bytes[1024];
    size_t len = 0;
    MUST(kf_engine_desc(engine, bytes, sizeof bytes, &len, &error));
    desc.assign(bytes, bytes + len);
    MUST(kf_memory_desc(memory, bytes, sizeof bytes, &len, &error));
    memory_desc.assign(bytes, bytes + len);
  }

  ~Node() {
    MUST(kf_memory_free(memory, &error));
    MUST(kf_engine_free(engine, &error));
  }
};

/// Takes, asks and gives statuses that are never posted.
void idle(kf_engine *engine, const std::atomic<bool> &stop) {
  while (!stop.load()) {
    uint64_t handles[70], counts[3];
    for (uint64_t &handle : handles) MUST(kf_status_take(engine, &handle, &error));
    for (uint64_t handle : handles) {
      uint32_t code = 99;
      MUST(kf_status_poll(engine, handle, &code, &error));
      if (code != KF_INIT) std::abort();
      MUST(kf_status_give(engine, handle, &error));
      if (kf_status_poll(engine, handle, &code, nullptr) != KF_STALE) std::abort();
    }
    MUST(kf_status_count(engine, counts, &error));
  }
}

/// Polls what is posted while it is being posted, and gives it back.
void poll(kf_engine *engine, std::atomic<uint64_t> &next, const std::atomic<bool> &stop) {
  while (!stop.load()) {
    const uint64_t handle = next.load();
    if (handle == 0) {
      pause();
      continue;
    }
    uint32_t code = KF_IN_PROGRESS;
    for (int i = 0; i < 100000 && code <= KF_IN_PROGRESS && code != KF_SUCCESS; ++i) {
      MUST(kf_status_poll(engine, handle, &code, &error));
      if (code == KF_IN_PROGRESS || code == KF_INIT) pause();
    }
    kf_text text{mine, sizeof mine};
    if (kf_status_text(engine, handle, &text) != KF_OK) std::abort();
    // One that was lost is given while it is on its way; one that is being posted cannot be.
    while (kf_status_give(engine, handle, nullptr) == KF_ARGUMENT) pause();
    next.store(0);
  }
}

/// Connects sessions beside the posts, which another thread ends.
void connect(Node &near, const Node &far, std::atomic<kf_session *> &made) {
  for (int i = 0; i < 50; ++i) {
    MUST(kf_peer_add(near.engine, far.desc.data(), far.desc.size(), &error));
    kf_session *session = nullptr;
    MUST(kf_session_new(near.engine, near.memory, far.memory_desc.data(), far.memory_desc.size(),
                        &session, &error));
    if (kf_session *before = made.exchange(session)) MUST(kf_session_free(before, &error));
  }
}

void end_some(std::atomic<kf_session *> &made, const std::atomic<bool> &stop) {
  bool last = false;
  while (!last) {
    last = stop.load();
    if (kf_session *session = made.exchange(nullptr)) MUST(kf_session_free(session, &error));
    pause();
  }
}

void round(bool rdma, const char *faults, size_t posts) {
  mori_double_faults(faults);
  Node near("near", rdma), far("far", rdma);
  MUST(kf_peer_add(near.engine, far.desc.data(), far.desc.size(), &error));
  kf_session *session = nullptr;
  MUST(kf_session_new(near.engine, near.memory, far.memory_desc.data(), far.memory_desc.size(),
                      &session, &error));
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> next[2]{};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) threads.emplace_back([&] { idle(near.engine, stop); });
  for (auto &one : next) threads.emplace_back([&] { poll(near.engine, one, stop); });
  std::atomic<kf_session *> made{nullptr};
  threads.emplace_back([&] { end_some(made, stop); });
  std::thread connecting([&] { connect(near, far, made); });
  for (size_t i = 0; i < posts; ++i) {
    auto &one = next[i % 2];
    while (one.load() != 0) pause();
    uint64_t handle = 0;
    MUST(kf_status_take(near.engine, &handle, &error));
    one.store(handle);
    const size_t count = 1 + i % 3;
    // Two are on their way at a time, each with bytes of its own.
    const uint64_t at = i % 2 * 16384;
    const uint64_t local[] = {at, at + 4096, at + 8192}, remote[] = {at + 1024, at, at + 512};
    const uint64_t len[] = {64, 128, 8};
    kf_text text{buffer, sizeof buffer};
    // Failures are the double's; the poller may have given the status before the post.
    kf_post(session, i % 2 == 0 ? KF_READ : KF_WRITE, count, local, remote, len, handle, &text);
  }
  for (auto &one : next) {
    while (one.load() != 0) pause();
  }
  connecting.join();
  stop.store(true);
  for (auto &thread : threads) thread.join();
  uint64_t counts[3];
  MUST(kf_status_count(near.engine, counts, &error));
  if (counts[0] != 0) std::abort();
  MUST(kf_session_free(session, &error));
  MUST(kf_peer_remove(near.engine, far.desc.data(), far.desc.size(), &error));
}

void garbage() {
  Node node("node", true);
  std::vector<uint8_t> bytes(300);
  std::srand(1);
  for (int i = 0; i < 20000; ++i) {
    const bool engine = i % 2 == 0;
    const auto &from = engine ? node.desc : node.memory_desc;
    bytes.assign(from.begin(), from.begin() + std::rand() % static_cast<int>(from.size() + 1));
    for (int changes = std::rand() % 4; changes > 0 && !bytes.empty(); --changes) {
      bytes[static_cast<size_t>(std::rand()) % bytes.size()] = static_cast<uint8_t>(std::rand());
    }
    kf_text text{buffer, sizeof buffer};
    if (engine) {
      kf_peer_add(node.engine, bytes.data(), bytes.size(), &text);
    } else if (i < 400) {
      // Few, since some find the way to a peer's port and wait for it.
      kf_session *session = nullptr;
      const auto kind = kf_session_new(node.engine, node.memory, bytes.data(), bytes.size(),
                                       &session, &text);
      if (kind == KF_OK) MUST(kf_session_free(session, &error));
    }
  }
}

void events() {
  void *event = mori_double_event_new();
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([event] {
      uint32_t done = 0;
      while (done == 0) MUST(kf_event_done(reinterpret_cast<uint64_t>(event), &done, &error));
    });
  }
  mori_double_event_fire(event);
  for (auto &thread : threads) thread.join();
  mori_double_event_free(event);
}

}  // namespace

int main(int argc, char **argv) {
  MUST(kf_mori_check(&error));
  if (argc > 1 && std::strcmp(argv[1], "terminate") == 0) {
    kf_engine *engine = nullptr;
    MUST(kf_engine_new("left", "127.0.0.1", 0, &engine, &error));
    std::thread([] { throw std::runtime_error("from a thread of MoRI"); }).join();
  }
  round(true, "", 400);
  round(false, "", 400);
  round(true, "throw@3;throw_other@5;qp_error@300", 400);
  round(false, "throw@3;throw_other@5;qp_error@7;lost@9", 100);
  mori_double_faults("");
  garbage();
  events();
  std::puts("held");
}
