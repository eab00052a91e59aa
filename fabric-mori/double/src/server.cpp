#include "server.hpp"

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "knobs.hpp"

namespace dbl {
namespace {

[[noreturn]] void leave(const std::string& host, uint16_t port) {
  std::fprintf(stderr, "mori double: bind(%s:%u) failed: %s\n", host.c_str(), unsigned{port},
               strerror(errno));
  std::exit(-1);
}

}  // namespace

Server::Server(const std::string& host, uint16_t port, Answers answers)
    : answers_(std::move(answers)) {
  // Without close-on-exec, as MoRI's: children inherit it.
  listen_ = socket(AF_INET, SOCK_STREAM, 0);
  int on = 1;
  setsockopt(listen_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in at = address(host, port);
  socklen_t len = sizeof(at);
  if (bind(listen_, reinterpret_cast<sockaddr*>(&at), len) != 0 || listen(listen_, 128) != 0) {
    leave(host, port);
  }
  getsockname(listen_, reinterpret_cast<sockaddr*>(&at), &len);
  port_ = ntohs(at.sin_port);
  wake_ = eventfd(0, EFD_CLOEXEC);
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "mori-control");
}

void Server::stop() {
  if (!thread_.joinable()) return;
  uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) != sizeof(one)) die("eventfd of the control plane");
  thread_.join();
  ::close(listen_);
  ::close(wake_);
}

void Server::run() {
  for (;;) {
    std::vector<pollfd> fds{{wake_, POLLIN, 0}, {listen_, POLLIN, 0}};
    for (const Socket& visitor : visitors_) fds.push_back({visitor.fd(), POLLIN, 0});
    if (poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) die("poll of the control plane");
    if (fds[0].revents != 0) return;
    for (size_t i = fds.size(); i-- > 2;) {
      if (fds[i].revents == 0) continue;
      try {
        answer(visitors_[i - 2]);
      } catch (const std::exception& e) {
        log(std::string("control-plane handler failed: ") + e.what());
      }
      visitors_.erase(visitors_.begin() + static_cast<ptrdiff_t>(i - 2));
    }
    if (fds[1].revents != 0) accept();
  }
}

void Server::accept() {
  int fd = ::accept(listen_, nullptr, nullptr);
  if (fd < 0) return;
  visitors_.emplace_back(fd).limit_time();
}

// One question for each connection. Whoever stops in the middle of it holds up all others.
void Server::answer(Socket& visitor) {
  Type type = visitor.receive_type();
  switch (type) {
    case Type::Connect:
      visitor.send(type, answers_.connect(visitor.receive_body<ConnectMsg>()));
      return;
    case Type::AskRegion:
      visitor.send(type, answers_.region(visitor.receive_body<RegionMsg>().id));
      return;
  }
  throw std::runtime_error("unsupported control-plane message type");
}

}  // namespace dbl
