#include "last.hpp"

#include "header.hpp"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>

namespace kf {

std::atomic<int> calls_under_way{0};
std::atomic<const char *> last_call{nullptr};

namespace {

std::atomic<int> engines_up{0};
std::atomic<bool> said{false};
std::atomic<int> words{-1};
std::terminate_handler before = nullptr;
struct sigaction abort_before = {};

/// Past the C library's buffers: they may be locked by the thread that ends the process.
void put(int fd, const char *line, size_t len) noexcept {
  while (len > 0) {
    const ssize_t written = write(fd, line, len);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    line += written;
    len -= static_cast<size_t>(written);
  }
}

void say(const char *how, const char *why) noexcept {
  const int engines = engines_up.load();
  const int calls = calls_under_way.load();
  if ((engines == 0 && calls == 0) || said.exchange(true)) return;
  const char *call = last_call.load();
  char line[512];
  int len = std::snprintf(line, sizeof line,
                          "kvferry: %s%s%s with %d MoRI engine(s) up; last call into MoRI: %s, %s\n",
                          how, *why == '\0' ? "" : ": ", why, engines,
                          call == nullptr ? "none" : call, calls > 0 ? "under way" : "returned");
  if (len < 0) return;
  if (len >= static_cast<int>(sizeof line)) {
    len = sizeof line - 1;
    line[len - 1] = '\n';
  }
  put(STDERR_FILENO, line, static_cast<size_t>(len));
  if (const int fd = words.load(); fd >= 0) put(fd, line, static_cast<size_t>(len));
}

void at_exit(int status, void *) {
  char how[64];
  std::snprintf(how, sizeof how, "the process exits with status %d", status & 0xff);
  say(how, "");
}

/// MoRI aborts where it cannot pin memory; exceptions that nobody catches got here by `at_terminate`.
void at_abort(int signal) {
  say("the process aborts", "");
  sigaction(signal, &abort_before, nullptr);
  raise(signal);
}

void at_terminate() {
  char why[256] = "";
  try {
    if (std::current_exception()) std::rethrow_exception(std::current_exception());
  } catch (const std::exception &thrown) {
    std::snprintf(why, sizeof why, "%s", thrown.what());
  } catch (...) {
  }
  say("std::terminate", why);
  if (before != nullptr) before();
  std::abort();
}

}  // namespace

void watch_the_end() {
  static std::once_flag once;
  std::call_once(once, [] {
    before = std::set_terminate(at_terminate);
    on_exit(at_exit, nullptr);
    struct sigaction handler = {};
    handler.sa_handler = at_abort;
    sigaction(SIGABRT, &handler, &abort_before);
  });
}

void engine_is_up() noexcept { engines_up.fetch_add(1); }

void engine_is_down() noexcept { engines_up.fetch_sub(1); }

}  // namespace kf

int32_t kf_last_words(int32_t fd) noexcept {
  kf::words.store(fd);
  return KF_OK;
}
