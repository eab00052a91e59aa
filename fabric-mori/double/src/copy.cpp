#include "copy.hpp"

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "knobs.hpp"

namespace dbl {

void let_peers_in() { prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

Moved move(int pid, std::vector<iovec> local, iovec remote, bool read,
           std::initializer_list<Still> still) {
  long number = read ? SYS_process_vm_readv : SYS_process_vm_writev;
  size_t first = 0;
  while (remote.iov_len > 0) {
    iovec* from = local.data() + first;
    size_t count = local.size() - first;
    // A process that is stopped here copies when it goes on, and whoever revoked the memory
    // meanwhile cannot see where it stands. So nothing but the call itself is behind the check,
    // no wrapper of it either.
    for (const Still& s : still) {
      if (s.word->load() != s.value) return Moved::Changed;
    }
    ssize_t n = syscall(number, pid, from, count, &remote, 1, 0);
    if (n <= 0) {
      if (errno == ESRCH) return Moved::NoProcess;
      if (errno == EPERM) die("no permission to reach into process " + std::to_string(pid));
      return Moved::Fault;
    }
    size_t done = static_cast<size_t>(n);
    remote.iov_base = static_cast<char*>(remote.iov_base) + done;
    remote.iov_len -= done;
    while (done > 0) {
      size_t part = std::min(done, local[first].iov_len);
      local[first].iov_base = static_cast<char*>(local[first].iov_base) + part;
      local[first].iov_len -= part;
      done -= part;
      if (local[first].iov_len == 0) ++first;
    }
  }
  return Moved::All;
}

}  // namespace dbl
