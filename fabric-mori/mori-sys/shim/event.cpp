// HIP's event query, from whichever HIP the process has: the shim links to none.
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <string>

#include "text.hpp"

namespace {

using Query = int (*)(void *);
using Describe = const char *(*)(int);

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;

std::atomic<Query> query{nullptr};
std::atomic<Describe> describe{nullptr};

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

Query find() {
  Query found = query.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  found = reinterpret_cast<Query>(symbol("hipEventQuery"));
  if (found == nullptr) return nullptr;
  describe.store(reinterpret_cast<Describe>(symbol("hipGetErrorString")));
  query.store(found, std::memory_order_release);
  return found;
}

}  // namespace

int32_t kf_event_done(uint64_t event, uint32_t *done, kf_text *error) noexcept {
  return kf::guarded(error, [&] {
    kf::require(event != 0 && done != nullptr, "no event, or nowhere for the answer to go to");
    const Query ask = find();
    if (ask == nullptr) kf::refuse(KF_MISSING, "no library of this process has hipEventQuery");
    const int answer = ask(reinterpret_cast<void *>(event));
    if (answer != kSuccess && answer != kNotReady) {
      const Describe words = describe.load();
      kf::refuse(KF_SYSTEM, "hipEventQuery: error " + std::to_string(answer) +
                                (words == nullptr ? "" : std::string(": ") + words(answer)));
    }
    *done = answer == kSuccess ? 1 : 0;
  });
}
