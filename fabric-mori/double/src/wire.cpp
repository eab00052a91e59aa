#include "wire.hpp"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "knobs.hpp"

namespace dbl {

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

sockaddr_in address(const std::string& host, int port) {
  sockaddr_in out{};
  out.sin_family = AF_INET;
  out.sin_port = htons(static_cast<uint16_t>(port));
  out.sin_addr.s_addr = inet_addr(host.c_str());
  return out;
}

Socket Socket::connect(const std::string& host, int port) {
  Socket out(socket(AF_INET, SOCK_STREAM, 0));
  if (out.fd_ < 0) {
    throw std::system_error(errno, std::generic_category(), "socket(AF_INET, SOCK_STREAM)");
  }
  out.limit_time();
  sockaddr_in to = address(host, port);
  if (::connect(out.fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0) {
    throw std::system_error(errno, std::generic_category(),
                            "connect(" + host + ":" + std::to_string(port) + ")");
  }
  return out;
}

void Socket::limit_time() {
  uint64_t ms = number("MORI_IO_CP_TIMEOUT_MS").value_or(5000);
  timeval limit{static_cast<time_t>(ms / 1000), static_cast<suseconds_t>(ms % 1000 * 1000)};
  setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

Type Socket::receive_type() {
  Type type{};
  read_all(&type, sizeof(type), "ReadMessageHeader(type)");
  return type;
}

void Socket::write(Type type, const msgpack::sbuffer& body) {
  std::string out(1, static_cast<char>(type));
  uint32_t len = htonl(static_cast<uint32_t>(body.size()));
  out.append(reinterpret_cast<const char*>(&len), sizeof(len));
  out.append(body.data(), body.size());
  write_all(out.data(), out.size());
}

void Socket::write_all(const void* bytes, size_t len) {
  const char* at = static_cast<const char*>(bytes);
  while (len > 0) {
    ssize_t n = ::send(fd_, at, len, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      throw std::runtime_error(std::string("control plane: write failed: ") + strerror(errno));
    }
    at += n;
    len -= static_cast<size_t>(n);
  }
}

void Socket::read_all(void* bytes, size_t len, const char* what) {
  char* at = static_cast<char*>(bytes);
  for (size_t got = 0; got < len;) {
    ssize_t n = ::recv(fd_, at + got, len - got, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      std::string text = std::string(what) + " failed: expected " + std::to_string(len) +
                         " byte(s), received " + std::to_string(got);
      text += n == 0 ? " before EOF" : std::string(", errno ") + strerror(errno);
      throw std::runtime_error(text);
    }
    got += static_cast<size_t>(n);
  }
}

std::string Socket::read_body() {
  uint32_t len = 0;
  read_all(&len, sizeof(len), "ReadMessageHeader(len)");
  len = ntohl(len);
  if (len > 1 << 20) throw std::runtime_error("length exceeds control-plane limit");
  std::string body(len, '\0');
  read_all(body.data(), len, "ReadMessage(body)");
  return body;
}

}  // namespace dbl
