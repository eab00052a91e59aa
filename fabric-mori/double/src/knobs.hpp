#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace dbl {

using Clock = std::chrono::steady_clock;
using Millis = std::chrono::milliseconds;

// A line of the log, which MoRI has on stdout.
void log(const std::string& line);
// One line on stderr, then SIGABRT: for what MoRI would answer with corruption or an assert.
[[noreturn]] void die(const std::string& why);

enum class Kind {
  None,
  QpError,
  AckLost,
  Lost,
  Late,
  SqFull,
  Throw,
  ThrowOther,
  Slow,
  Exit,
  Skip,
  Pin,
  PinRemote
};

struct Fault {
  Kind kind = Kind::None;
  Millis after{0};
};

// Counts one post, session or remote pin, and says what is to go wrong with it.
Fault next_post();
bool next_pin();
bool next_pin_remote();
// Ends the post here for the kinds that do: an exception or the process.
void leave_post(const Fault& fault);

// Empty, or why the text cannot be parsed; then the old faults stay.
std::string set_faults(const std::string& spec);
// MORI_DOUBLE_FAULTS and MORI_DOUBLE_LATENCY_US, each time their texts have changed.
void read_environment();

std::chrono::microseconds latency();

// Whether the network card's port is down; nothing that is asked over it is answered then.
bool port_is_down();

// The node that an engine with this key plays, if it is said.
std::optional<std::string> node_of(const std::string& key);

// MoRI's thread that logs the card's asynchronous events while there is a backend. Nothing else
// comes of them.
class Monitor {
 public:
  Monitor();
  ~Monitor();
  Monitor(const Monitor&) = delete;

 private:
  bool on_;
};

bool flag(const char* variable);
std::optional<uint64_t> number(const char* variable);
// Lasts as many milliseconds as the variable says.
void take_time(const char* variable);

// Calls that MoRI does not synchronise: one of them beside any other call of the engine is a bug of
// the caller, and ends the process instead of corrupting it.
struct Gate {
  std::atomic<int> shared{0};
  std::atomic<int> alone{0};
};

class Use {
 public:
  Use(Gate& gate, const char* what) : gate_(gate) {
    gate_.shared.fetch_add(1);
    if (gate_.alone.load() > 0) die(std::string(what) + " while the engine is being changed");
  }
  ~Use() { gate_.shared.fetch_sub(1); }
  Use(const Use&) = delete;

 private:
  Gate& gate_;
};

class Alone {
 public:
  Alone(Gate& gate, const char* what) : gate_(gate) {
    if (gate_.alone.fetch_add(1) > 0 || gate_.shared.load() > 0) {
      die(std::string(what) + " beside another call of the same engine");
    }
  }
  ~Alone() { gate_.alone.fetch_sub(1); }
  Alone(const Alone&) = delete;

 private:
  Gate& gate_;
};

}  // namespace dbl
