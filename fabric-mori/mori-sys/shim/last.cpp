#include "last.hpp"

#include <unistd.h>

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
std::terminate_handler before = nullptr;

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
  // Past the C library's buffers: they may be locked by the thread that ends the process.
  if (write(STDERR_FILENO, line, static_cast<size_t>(len)) < 0) return;
}

void at_exit() { say("the process exits", ""); }

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
    std::atexit(at_exit);
  });
}

void engine_is_up() noexcept { engines_up.fetch_add(1); }

void engine_is_down() noexcept { engines_up.fetch_sub(1); }

}  // namespace kf
