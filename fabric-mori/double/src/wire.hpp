// The control plane's messages: u8 type, u32 length in network order, msgpack.
#pragma once

#include <netinet/in.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "mori/io/common.hpp"

namespace dbl {

struct Place {
  int device = -1;
  mori::io::MemoryLocationType loc = mori::io::MemoryLocationType::Unknown;
  int numa = -1;

  bool operator==(const Place&) const = default;
  MSGPACK_DEFINE(device, loc, numa);
};

// Queue pairs are kept for each engine and pair of places.
struct Route {
  Place local, remote;

  bool operator==(const Route&) const = default;
  MSGPACK_DEFINE(local, remote);
};

enum class Type : uint8_t { Connect = 1, AskRegion = 2 };

// One end of a queue pair, and where to find its engine's table.
struct ConnectMsg {
  std::string engine;
  Route route;
  int pid = 0, fd = -1;
  uint64_t table = 0;
  uint32_t slot = 0;

  MSGPACK_DEFINE(engine, route, pid, fd, table, slot);
};

// A request has only the id; a reply of length 0 says that there is no such memory.
struct RegionMsg {
  uint32_t id = 0;
  uint64_t addr = 0, len = 0, key = 0;

  MSGPACK_DEFINE(id, addr, len, key);
};

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();

  // `host` has to be an IPv4 literal; throws std::system_error "connect(host:port): ...".
  static Socket connect(const std::string& host, int port);

  int fd() const { return fd_; }
  void limit_time();

  template <typename Message>
  void send(Type type, const Message& message) {
    msgpack::sbuffer body;
    msgpack::pack(body, message);
    write(type, body);
  }
  Type receive_type();
  template <typename Message>
  Message receive_body() {
    std::string body = read_body();
    return msgpack::unpack(body.data(), body.size()).get().as<Message>();
  }
  template <typename Message>
  Message ask(Type type, const Message& message) {
    send(type, message);
    if (receive_type() != type) throw std::runtime_error("unexpected control-plane message");
    return receive_body<Message>();
  }

 private:
  void write(Type type, const msgpack::sbuffer& body);
  void write_all(const void* bytes, size_t len);
  void read_all(void* bytes, size_t len, const char* what);
  std::string read_body();

  int fd_;
};

// What MoRI's inet_addr makes of it: a name becomes the broadcast address, which nothing reaches.
sockaddr_in address(const std::string& host, int port);

}  // namespace dbl
