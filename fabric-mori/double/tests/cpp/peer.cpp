// The peer process: one line in, one line out.
#include <fcntl.h>
#include <linux/close_range.h>

#include "check.hpp"

Process::Process(const std::string& key, const std::string& backends) {
  int in[2], out[2];
  CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(in[0], 0);
    dup2(out[1], 1);
    // MoRI's sockets have no close-on-exec: a child that kept one would keep its port.
    close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
    execl("/proc/self/exe", "peer", "--process", key.c_str(), backends.c_str(), nullptr);
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  to_ = in[1];
  from_ = fdopen(out[0], "r");
}

std::string Process::ask(const std::string& line) {
  tell(line);
  return answer();
}

void Process::tell(const std::string& line) {
  std::string text = line + "\n";
  CHECK(write(to_, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

std::string Process::answer() {
  std::string out;
  for (int c; (c = fgetc(from_)) != EOF && c != '\n';) out += static_cast<char>(c);
  return out;
}

namespace {

struct Peer {
  IOEngine engine;
  std::vector<std::unique_ptr<std::vector<unsigned char>>> bytes;
  std::vector<MemoryDesc> memories;
  std::vector<TransferStatus*> statuses;
  std::atomic<bool> streaming{false};
  std::thread stream;

  explicit Peer(const std::string& key) : engine(key, {"127.0.0.1", 0}) {}
  ~Peer() {
    streaming = false;
    if (stream.joinable()) stream.join();
  }

  std::string add(size_t len, int fill, bool gpu) {
    bytes.push_back(std::make_unique<std::vector<unsigned char>>(len, fill));
    auto loc = gpu ? MemoryLocationType::GPU : MemoryLocationType::CPU;
    memories.push_back(engine.RegisterMemory(bytes.back()->data(), len, gpu ? 0 : -1, loc));
    return hex(packed(memories.back()));
  }
  // Writes without a pause until one fails: the next one is always posted already.
  std::string flood(const MemoryDesc& to) {
    auto session = engine.CreateSession(memories[0], to);
    auto post = [this, to, session](uint64_t id) mutable {
      statuses.push_back(&new_status());
      session->Write(0, 0, to.size, statuses.back(), id);
    };
    for (uint64_t id = 0; id < 8; ++id) post(id);
    wait(*statuses[0]);
    streaming = true;
    stream = std::thread([this, post]() mutable {
      for (uint64_t id = 8; streaming; ++id) {
        TransferStatus& oldest = *statuses[id - 8];
        while (oldest.InProgress() && streaming) std::this_thread::yield();
        if (oldest.Failed()) return;
        post(id);
      }
    });
    return "ok";
  }

  std::string obey(std::istringstream& line);
  std::string look(const std::string& verb, std::istringstream& line);
};

std::string Peer::look(const std::string& verb, std::istringstream& line) {
  size_t index = 0;
  line >> index;
  const std::vector<unsigned char>& memory = *bytes[index];
  if (verb == "bytes") {
    size_t from, len;
    line >> from >> len;
    return hex(std::string(memory.begin() + from, memory.begin() + from + len));
  }
  int value;
  line >> value;
  size_t count = 0;
  for (unsigned char byte : memory) count += byte == value;
  if (verb == "count") return std::to_string(count);
  return count == memory.size() ? "yes" : "no";
}

std::string Peer::obey(std::istringstream& line) {
  std::string verb, text;
  line >> verb;
  if (verb == "desc") return hex(packed(engine.GetEngineDesc()));
  if (verb == "bytes" || verb == "all" || verb == "count") return look(verb, line);
  if (verb == "mem") {
    size_t len;
    int fill;
    line >> len >> fill >> text;
    return add(len, fill, text == "gpu");
  }
  if (verb == "unmapped") {
    static Unmapped hole;
    memories.push_back(engine.RegisterMemory(hole.at(), hole.len, -1, MemoryLocationType::CPU));
    return hex(packed(memories.back()));
  }
  if (verb == "again") {
    size_t index;
    line >> index;
    const MemoryDesc& old = memories[index];
    auto* at = reinterpret_cast<void*>(old.data);
    memories.push_back(engine.RegisterMemory(at, old.size, old.deviceId, old.loc));
    return hex(packed(memories.back()));
  }
  if (verb == "pop") {
    uint64_t id;
    line >> text >> id;
    TransferStatus& status = new_status();
    return engine.PopInboundTransferStatus(text, id, &status) ? "yes" : "no";
  }
  if (verb == "write" || verb == "flood") {
    line >> text;
    MemoryDesc to = unpacked<MemoryDesc>(unhex(text));
    if (verb == "flood") return flood(to);
    TransferStatus& status = new_status();
    engine.Write(memories[0], 0, to, 0, to.size, &status, 1);
    status.Wait();
    return std::to_string(status.CodeUint32()) + " " + status.Message();
  }
  if (verb == "peer") {
    line >> text;
    engine.RegisterRemoteEngine(unpacked<EngineDesc>(unhex(text)));
  } else if (verb == "dereg") {
    size_t index;
    line >> index;
    engine.DeregisterMemory(memories[index]);
  } else if (verb == "remove") {
    engine.RemoveBackend(BackendType::RDMA);
  } else if (verb == "create") {
    engine.CreateBackend(BackendType::RDMA, quiet());
  } else if (verb == "faults") {
    line >> text;
    mori_double_faults(text.c_str());
  } else {
    return "what?";
  }
  return "ok";
}

}  // namespace

int be_process(const std::string& key, const std::string& backends) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // MoRI's log is on stdout: it is not to stand among the answers.
  FILE* answers = fdopen(fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3), "w");
  dup2(STDERR_FILENO, STDOUT_FILENO);
  Peer peer(key);
  if (has(backends, "xgmi")) peer.engine.CreateBackend(BackendType::XGMI, XgmiBackendConfig());
  if (has(backends, "rdma")) {
    RdmaBackendConfig config = quiet();
    config.enableNotification = has(backends, "notify");
    peer.engine.CreateBackend(BackendType::RDMA, config);
  }
  char buffer[8192];
  while (std::fgets(buffer, sizeof(buffer), stdin) != nullptr) {
    std::istringstream line(buffer);
    std::fprintf(answers, "%s\n", peer.obey(line).c_str());
    std::fflush(answers);
  }
  _exit(0);
}
