// Cases by name, checks that say where they failed, and a peer in another process.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "mori/io/engine.hpp"
#include "msgpack.hpp"

// Weak: MoRI itself has none of these.
#define KNOB extern "C" __attribute__((weak))
KNOB int mori_double_faults(const char* spec);
KNOB void mori_double_latency(uint64_t us);
KNOB void mori_double_port(int up);
KNOB uint64_t mori_double_events_out();

using namespace mori::io;
using Millis = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

inline std::map<std::string, std::function<void()>>& cases() {
  static std::map<std::string, std::function<void()>> the;
  return the;
}

struct Case {
  Case(const char* name, std::function<void()> body) { cases()[name] = std::move(body); }
};
#define CASE(name)                           \
  static void case_##name();                 \
  static Case add_##name(#name, case_##name); \
  static void case_##name()

[[noreturn]] inline void check_failed(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::fflush(nullptr);
  _exit(1);
}
#define CHECK(condition) \
  if (!(condition)) ::check_failed(__FILE__, __LINE__, #condition)
#define CHECK_EQ(left, right)                                                 \
  {                                                                           \
    auto l_ = (left);                                                         \
    auto r_ = (right);                                                        \
    std::ostringstream text_;                                                 \
    text_ << #left << " is " << show(l_) << ", not " << show(r_);             \
    if (!(l_ == r_)) ::check_failed(__FILE__, __LINE__, text_.str());                 \
  }

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<uint64_t>(value);
  } else {
    out << value;
  }
  return out.str();
}

// The text of what `body` throws, behind the name of its class.
inline std::string thrown(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::system_error& e) {
    return std::string("system_error ") + e.what();
  } catch (const msgpack::type_error& e) {
    return std::string("type_error ") + e.what();
  } catch (const std::runtime_error& e) {
    return std::string("runtime_error ") + e.what();
  } catch (const std::bad_alloc&) {
    return "bad_alloc";
  } catch (int value) {
    return "int " + std::to_string(value);
  }
  return "nothing";
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline std::string hex(const std::string& bytes) {
  std::string out;
  for (unsigned char c : bytes) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", c);
    out += two;
  }
  return out;
}
inline std::string unhex(const std::string& text) {
  std::string out;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    out += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return out;
}

template <typename T>
std::string packed(const T& value) {
  msgpack::sbuffer out;
  msgpack::pack(out, value);
  return {out.data(), out.size()};
}
template <typename T>
T unpacked(const std::string& bytes) {
  return msgpack::unpack(bytes.data(), bytes.size()).get().as<T>();
}

// A status that is never destroyed: whoever sees its end cannot know that MoRI has left it.
inline TransferStatus& new_status() {
  static auto* all = new std::deque<TransferStatus>;
  static std::mutex mu;
  std::lock_guard lock(mu);
  return all->emplace_back();
}

// Until it is over; the deadline only ends a test that hangs.
inline StatusCode wait(TransferStatus& status) {
  auto deadline = Clock::now() + std::chrono::seconds(60);
  while (status.Code() == StatusCode::IN_PROGRESS) {
    CHECK(Clock::now() < deadline);
    std::this_thread::yield();
  }
  return status.Code();
}
// What must not happen is given this long to happen.
constexpr int kNever = 150;

// How a transfer ended.
struct End {
  StatusCode code;
  std::string text;
};
inline End end_of(TransferStatus& status) {
  StatusCode code = wait(status);
  return {code, status.Message()};
}
inline End write(IOEngineSession& session, size_t local = 0, size_t remote = 0, size_t len = 8,
                 TransferUniqueId id = 1) {
  TransferStatus& status = new_status();
  session.Write(local, remote, len, &status, id);
  return end_of(status);
}
// So many ranges of eight bytes that are no neighbours.
inline End write_ranges(IOEngineSession& session, size_t count) {
  SizeVec local, remote;
  for (size_t i = 0; i < count; ++i) {
    local.push_back(i * 16);
    remote.push_back(i * 32);
  }
  TransferStatus& status = new_status();
  session.BatchWrite(local, remote, SizeVec(count, 8), &status, 1);
  return end_of(status);
}
inline void check_done(const End& end) { CHECK_EQ(end.code, StatusCode::SUCCESS); }
// `what` is followed by MoRI's advice.
inline void check_advised(const End& end, const std::string& what) {
  CHECK_EQ(end.code, StatusCode::ERR_RDMA_OP);
  CHECK_EQ(end.text.substr(0, end.text.find(" Hint: ")), what);
  CHECK(end.text.size() > what.size() + 20);
}
inline void check_flushed(const End& end) {
  CHECK_EQ(end.code, StatusCode::ERR_RDMA_OP);
  CHECK_EQ(end.text, std::string("Work Request Flushed Error"));
}

inline RdmaBackendConfig quiet(int qps = 1) {
  RdmaBackendConfig config;
  config.qpPerTransfer = qps;
  config.enableNotification = false;
  return config;
}

// Mapped in its first half only.
struct Unmapped {
  static constexpr size_t len = 128 << 10;
  Unmapped() {
    base = mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(base != MAP_FAILED && munmap(static_cast<char*>(base) + len / 2, len / 2) == 0);
  }
  void* at() const { return base; }
  void* base;
};

// An engine of this process with a memory.
struct Node {
  explicit Node(const std::string& key, RdmaBackendConfig config = quiet(), size_t len = 1 << 20,
                unsigned char fill = 0)
      : bytes(len, fill), engine(key, {"127.0.0.1", 0}) {
    engine.CreateBackend(BackendType::RDMA, config);
    memory = engine.RegisterMemory(bytes.data(), len, -1, MemoryLocationType::CPU);
  }
  End write(const MemoryDesc& to, size_t at = 0, size_t len = 8) {
    TransferStatus& status = new_status();
    engine.Write(memory, 0, to, at, len, &status, engine.AllocateTransferUniqueId());
    return end_of(status);
  }
  void meet(Node& other) {
    engine.RegisterRemoteEngine(other.engine.GetEngineDesc());
    other.engine.RegisterRemoteEngine(engine.GetEngineDesc());
  }
  bool all(unsigned char value, size_t from, size_t len) const {
    for (size_t i = from; i < from + len; ++i) {
      if (bytes[i] != value) return false;
    }
    return true;
  }
  // The compiler cannot know that another process, or the NIC, has written to it.
  void look() { asm volatile("" ::: "memory"); }

  // Freed when the engine is gone.
  std::vector<unsigned char> bytes;
  IOEngine engine;
  MemoryDesc memory;

 protected:
  Node(const std::string& key, size_t len, unsigned char fill)
      : bytes(len, fill), engine(key, {"127.0.0.1", 0}) {}
};

// Two engines that know each other, with a session from the first one's memory to the second's.
struct Joined {
  explicit Joined(RdmaBackendConfig config = quiet(), size_t len = 1 << 20)
      : a("a", config, len, 1), b("b", config, len) {
    a.meet(b);
    session = a.engine.CreateSession(a.memory, b.memory);
  }
  End write(size_t remote = 0, TransferUniqueId id = 1) {
    return ::write(*session, 0, remote, 8, id);
  }

  Node a, b;
  std::optional<IOEngineSession> session;
};

// A process with an engine that is told what to do, line by line (peer.cpp).
class Process {
 public:
  explicit Process(const std::string& key, const std::string& backends = "rdma");
  ~Process() {
    close(to_);
    if (pid_ > 0) end(SIGKILL);
    fclose(from_);
  }
  std::string ask(const std::string& line);
  void tell(const std::string& line);
  std::string answer();
  EngineDesc desc() { return unpacked<EngineDesc>(unhex(ask("desc"))); }
  MemoryDesc memory(const std::string& args) {
    return unpacked<MemoryDesc>(unhex(ask("mem " + args)));
  }
  void meet(IOEngine& other) {
    other.RegisterRemoteEngine(desc());
    CHECK_EQ(ask("peer " + hex(packed(other.GetEngineDesc()))), std::string("ok"));
  }
  bool all(int memory, int value) {
    return ask("all " + std::to_string(memory) + " " + std::to_string(value)) == "yes";
  }
  int pid() const { return pid_; }
  void stop() {
    kill(pid_, SIGSTOP);
    int status = 0;
    CHECK(waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status));
  }
  void go_on() { kill(pid_, SIGCONT); }
  // The status that it ended with.
  int end(int signal) {
    if (signal != 0) kill(pid_, signal);
    int status = 0;
    CHECK(waitpid(pid_, &status, 0) == pid_);
    pid_ = -1;
    return status;
  }

 private:
  int pid_ = -1, to_ = -1;
  FILE* from_ = nullptr;
};

int be_process(const std::string& key, const std::string& backends);
