// Behind HIP's own names: events that tests make and fire, and memory, which is the host's.
#include <cstdlib>
#include <mutex>
#include <set>

namespace dbl {
namespace {

constexpr int kSuccess = 0, kOutOfMemory = 2, kInvalidDevice = 101;
constexpr int kInvalidHandle = 400, kNotReady = 600;

struct Event {
  bool fired = false;
};

struct Events {
  std::mutex mu;
  std::set<Event*> live;
};

Events& events() {
  static Events* the = new Events;
  return *the;
}

}  // namespace
}  // namespace dbl

// Under names of their own: HIP's headers, where there are any, declare the others with HIP's types.
#define HIP_FUNCTION(name, ...)                              \
  extern "C" int double_##name(__VA_ARGS__) __asm__(#name);  \
  extern "C" int double_##name(__VA_ARGS__)

HIP_FUNCTION(hipEventQuery, void* event) {
  dbl::Events& all = dbl::events();
  std::lock_guard lock(all.mu);
  auto it = all.live.find(static_cast<dbl::Event*>(event));
  if (it == all.live.end()) return dbl::kInvalidHandle;
  return (*it)->fired ? dbl::kSuccess : dbl::kNotReady;
}

HIP_FUNCTION(hipSetDevice, int device) {
  return device >= 0 ? dbl::kSuccess : dbl::kInvalidDevice;
}

HIP_FUNCTION(hipMalloc, void** base, size_t len) {
  *base = std::malloc(len);
  return *base == nullptr ? dbl::kOutOfMemory : dbl::kSuccess;
}

HIP_FUNCTION(hipFree, void* base) {
  std::free(base);
  return dbl::kSuccess;
}

extern "C" void* mori_double_event_new() {
  dbl::Events& all = dbl::events();
  std::lock_guard lock(all.mu);
  return *all.live.insert(new dbl::Event).first;
}

extern "C" void mori_double_event_fire(void* event) {
  dbl::Events& all = dbl::events();
  std::lock_guard lock(all.mu);
  auto it = all.live.find(static_cast<dbl::Event*>(event));
  if (it != all.live.end()) (*it)->fired = true;
}

extern "C" void mori_double_event_free(void* event) {
  dbl::Events& all = dbl::events();
  std::lock_guard lock(all.mu);
  if (all.live.erase(static_cast<dbl::Event*>(event)) > 0) delete static_cast<dbl::Event*>(event);
}
