// What is asked of HIP, whichever the process has: the shim links to none.
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <string>

#include "text.hpp"

namespace {

using Query = int (*)(void *);
using Describe = const char *(*)(int);
using Choose = int (*)(int);
using Alloc = int (*)(void **, size_t);
using Free = int (*)(void *);

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;

std::atomic<Query> query{nullptr};

/// The path of a loaded HIP, that this library need not be able to see.
int visit(dl_phdr_info *info, size_t, void *data) {
  const char *slash = std::strrchr(info->dlpi_name, '/');
  const char *name = slash == nullptr ? info->dlpi_name : slash + 1;
  if (std::strncmp(name, "libamdhip64.so", 14) != 0) return 0;
  *static_cast<const char **>(data) = info->dlpi_name;
  return 1;
}

void *symbol(const char *name) {
  if (void *found = dlsym(RTLD_DEFAULT, name)) return found;
  const char *path = nullptr;
  dl_iterate_phdr(visit, &path);
  if (path == nullptr) return nullptr;
  void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : dlsym(library, name);
}

template <class Function>
Function required(const char *name) {
  void *found = symbol(name);
  if (found == nullptr) {
    kf::refuse(KF_MISSING, std::string("no library of this process has ") + name);
  }
  return reinterpret_cast<Function>(found);
}

void check(const char *name, int answer) {
  if (answer == kSuccess) return;
  const auto words = reinterpret_cast<Describe>(symbol("hipGetErrorString"));
  kf::refuse(KF_SYSTEM, std::string(name) + ": error " + std::to_string(answer) +
                            (words == nullptr ? "" : std::string(": ") + words(answer)));
}

Query event_query() {
  Query found = query.load(std::memory_order_acquire);
  if (found == nullptr) {
    found = required<Query>("hipEventQuery");
    query.store(found, std::memory_order_release);
  }
  return found;
}

}  // namespace

int32_t kf_device_alloc(int32_t device, uint64_t len, uint64_t *base, kf_text *error) noexcept {
  return kf::guarded(error, [&] {
    kf::require(base != nullptr && len > 0, "no bytes, or nowhere for their address to go to");
    check("hipSetDevice", required<Choose>("hipSetDevice")(device));
    void *got = nullptr;
    check("hipMalloc", required<Alloc>("hipMalloc")(&got, len));
    *base = reinterpret_cast<uint64_t>(got);
  });
}

int32_t kf_device_free(uint64_t base, kf_text *error) noexcept {
  return kf::guarded(error, [&] {
    check("hipFree", required<Free>("hipFree")(reinterpret_cast<void *>(base)));
  });
}

int32_t kf_event_done(uint64_t event, uint32_t *done, kf_text *error) noexcept {
  return kf::guarded(error, [&] {
    kf::require(event != 0 && done != nullptr, "no event, or nowhere for the answer to go to");
    const int answer = event_query()(reinterpret_cast<void *>(event));
    if (answer != kNotReady) check("hipEventQuery", answer);
    *done = answer == kSuccess ? 1 : 0;
  });
}
