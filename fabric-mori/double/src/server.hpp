#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "wire.hpp"

namespace dbl {

// The thread that answers the peers' questions. A port that cannot be bound ends the process, as it
// does in MoRI.
class Server {
 public:
  struct Answers {
    std::function<ConnectMsg(const ConnectMsg&)> connect;
    std::function<RegionMsg(uint32_t id)> region;
  };

  Server(const std::string& host, uint16_t port, Answers answers);
  ~Server() { stop(); }
  Server(const Server&) = delete;

  uint16_t port() const { return port_; }
  void stop();

 private:
  void run();
  void accept();
  void answer(Socket& visitor);

  Answers answers_;
  int listen_ = -1, wake_ = -1;
  // Those who have not asked yet.
  std::vector<Socket> visitors_;
  uint16_t port_ = 0;
  std::thread thread_;
};

}  // namespace dbl
