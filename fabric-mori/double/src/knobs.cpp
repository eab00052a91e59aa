#include "knobs.hpp"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

namespace dbl {
namespace {

struct Rule {
  Fault fault;
  uint64_t from;
  bool onwards;
};

struct State {
  std::mutex mu;
  std::vector<Rule> rules;
  uint64_t posts = 0, pins = 0, remote_pins = 0;
  std::string faults_text, latency_text;
  std::optional<std::string> nodes;
};

// Never destroyed: threads of the backends may still run while the process exits.
State& state() {
  static State* the = new State;
  return *the;
}

std::atomic<uint64_t> latency_us{0};
std::atomic<bool> port_down{false};
std::atomic<int> monitors{0};

struct Name {
  std::string_view text;
  Kind kind;
  bool timed;
};

constexpr std::array<Name, 12> kNames{{{"qp_error", Kind::QpError, false},
                                       {"ack_lost", Kind::AckLost, false},
                                       {"lost", Kind::Lost, false},
                                       {"late", Kind::Late, true},
                                       {"sq_full", Kind::SqFull, true},
                                       {"throw", Kind::Throw, false},
                                       {"throw_other", Kind::ThrowOther, false},
                                       {"slow", Kind::Slow, true},
                                       {"exit", Kind::Exit, false},
                                       {"skip", Kind::Skip, false},
                                       {"pin", Kind::Pin, false},
                                       {"pin_remote", Kind::PinRemote, false}}};

std::optional<uint64_t> digits(std::string_view text) {
  if (text.empty() || text.size() > 18) return std::nullopt;
  uint64_t value = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  return value;
}

std::string parse_rule(std::string_view text, Rule& out) {
  std::string quoted = "'" + std::string(text) + "'";
  size_t at = text.find('@');
  if (at == std::string_view::npos) return quoted + " has no '@n'";
  std::string_view name = text.substr(0, at), when = text.substr(at + 1);
  const Name* known = nullptr;
  for (const Name& n : kNames) {
    if (n.text == name) known = &n;
  }
  if (known == nullptr) return quoted + " is of no known kind";
  size_t colon = when.find(':');
  if ((colon != std::string_view::npos) != known->timed) {
    return quoted + (known->timed ? " needs ':ms'" : " takes no ':ms'");
  }
  out.fault.kind = known->kind;
  if (known->timed) {
    std::optional<uint64_t> ms = digits(when.substr(colon + 1));
    if (!ms) return quoted + " has a bad ':ms'";
    out.fault.after = Millis(*ms);
    when = when.substr(0, colon);
  }
  out.onwards = when.ends_with('+');
  if (out.onwards) when.remove_suffix(1);
  std::optional<uint64_t> from = digits(when);
  if (!from || *from == 0) return quoted + " has a bad 'n'";
  out.from = *from;
  return "";
}

Fault match(const State& s, uint64_t count, bool (*wanted)(Kind)) {
  for (const Rule& rule : s.rules) {
    bool hit = rule.onwards ? count >= rule.from : count == rule.from;
    if (hit && wanted(rule.fault.kind)) return rule.fault;
  }
  return {};
}

// MORI_DOUBLE_START: where a backend is made MoRI never returns from a device without a PCI address,
// and nobody knows where it crashes.
void start() {
  const char* how = std::getenv("MORI_DOUBLE_START");
  if (how == nullptr) return;
  std::string_view text = how;
  while (text == "hang") pause();
  volatile int* nowhere = nullptr;
  if (text == "crash") *nowhere = 0;
  die("MORI_DOUBLE_START is neither hang nor crash");
}

}  // namespace

void log(const std::string& line) {
  std::printf("mori double: %s\n", line.c_str());
  std::fflush(stdout);
}

void die(const std::string& why) {
  std::fprintf(stderr, "mori double: %s\n", why.c_str());
  std::abort();
}

Fault next_post() {
  State& s = state();
  std::lock_guard lock(s.mu);
  return match(s, ++s.posts, [](Kind k) { return k != Kind::Pin && k != Kind::PinRemote; });
}

bool next_pin() {
  State& s = state();
  std::lock_guard lock(s.mu);
  return match(s, ++s.pins, [](Kind k) { return k == Kind::Pin; }).kind != Kind::None;
}

bool next_pin_remote() {
  State& s = state();
  std::lock_guard lock(s.mu);
  auto wanted = [](Kind k) { return k == Kind::PinRemote; };
  return match(s, ++s.remote_pins, wanted).kind != Kind::None;
}

void leave_post(const Fault& fault) {
  if (fault.kind == Kind::Throw) {
    throw std::system_error(ECONNREFUSED, std::generic_category(), "connect(injected fault)");
  }
  if (fault.kind == Kind::ThrowOther) throw 7;
  if (fault.kind == Kind::Exit) {
    std::fprintf(stderr, "mori double: exit(-1) by an injected fault\n");
    std::exit(-1);
  }
}

std::string set_faults(const std::string& spec) {
  std::vector<Rule> rules;
  for (std::string_view rest = spec; !rest.empty();) {
    size_t end = rest.find(';');
    std::string_view text = rest.substr(0, end);
    rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
    if (text.empty()) continue;
    Rule rule{};
    if (std::string why = parse_rule(text, rule); !why.empty()) return why;
    rules.push_back(rule);
  }
  State& s = state();
  std::lock_guard lock(s.mu);
  s.rules = std::move(rules);
  s.posts = s.pins = s.remote_pins = 0;
  return "";
}

void read_environment() {
  start();
  State& s = state();
  const char* faults = std::getenv("MORI_DOUBLE_FAULTS");
  const char* wait = std::getenv("MORI_DOUBLE_LATENCY_US");
  bool new_faults = false;
  {
    std::lock_guard lock(s.mu);
    // A backend that is made again must not arm the same faults again.
    if (faults != nullptr && s.faults_text != faults) {
      s.faults_text = faults;
      new_faults = true;
    }
    if (wait != nullptr && s.latency_text != wait) {
      s.latency_text = wait;
      latency_us.store(number("MORI_DOUBLE_LATENCY_US").value_or(0));
    }
  }
  if (!new_faults) return;
  if (std::string why = set_faults(faults); !why.empty()) die("MORI_DOUBLE_FAULTS: " + why);
}

std::chrono::microseconds latency() { return std::chrono::microseconds(latency_us.load()); }

bool port_is_down() {
  static const std::string* file = [] {
    const char* folder = std::getenv("MORI_DOUBLE_PORTS");
    if (folder == nullptr) return static_cast<std::string*>(nullptr);
    return new std::string(std::string(folder) + "/" + std::to_string(getpid()));
  }();
  return port_down.load() || (file != nullptr && access(file->c_str(), F_OK) == 0);
}

std::optional<std::string> node_of(const std::string& key) {
  State& s = state();
  std::lock_guard lock(s.mu);
  if (!s.nodes) {
    const char* said = std::getenv("MORI_DOUBLE_NODES");
    s.nodes = said == nullptr ? "" : said;
  }
  for (std::string_view rest = *s.nodes; !rest.empty();) {
    size_t end = rest.find(';');
    std::string_view item = rest.substr(0, end);
    rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
    size_t at = item.rfind('=');
    if (at == std::string_view::npos) die("MORI_DOUBLE_NODES: an item has no '='");
    if (key.starts_with(item.substr(0, at))) return std::string(item.substr(at + 1));
  }
  return std::nullopt;
}

Monitor::Monitor() {
  const char* events = std::getenv("MORI_IO_ENABLE_ASYNC_EVENTS");
  on_ = events == nullptr || std::string_view(events) != "0";
  monitors += on_;
}

Monitor::~Monitor() { monitors -= on_; }

bool flag(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && std::string_view(text) == "1";
}

std::optional<uint64_t> number(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  std::optional<uint64_t> value = digits(text);
  if (!value) die(std::string(variable) + "=" + text + " is no number");
  return value;
}

void take_time(const char* variable) {
  std::this_thread::sleep_for(Millis(number(variable).value_or(0)));
}

}  // namespace dbl

extern "C" int mori_double_faults(const char* spec) {
  std::string why = dbl::set_faults(spec == nullptr ? "" : spec);
  if (why.empty()) return 0;
  std::fprintf(stderr, "mori double: faults: %s\n", why.c_str());
  return -1;
}

extern "C" void mori_double_nodes(const char* spec) {
  dbl::State& s = dbl::state();
  std::lock_guard lock(s.mu);
  s.nodes = spec == nullptr ? "" : spec;
}

extern "C" void mori_double_port(int up) {
  if (dbl::port_down.exchange(up == 0) == (up == 0)) return;
  const char* event = up == 0 ? "PORT_ERR (type=10)" : "PORT_ACTIVE (recovery) (type=9)";
  for (int i = dbl::monitors.load(); i > 0; --i) {
    dbl::log(std::string("RDMA async event IBV_EVENT_") + event + " port=1");
  }
}

extern "C" void mori_double_latency(uint64_t us) { dbl::latency_us.store(us); }
