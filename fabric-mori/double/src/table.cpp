#include "table.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>

#include "copy.hpp"
#include "knobs.hpp"

namespace dbl {
namespace {

uint64_t random_bits() {
  uint64_t bits = 0;
  while (getrandom(&bits, sizeof(bits), 0) != sizeof(bits) || bits == 0) {
  }
  return bits;
}

Layout* map(int fd) {
  void* at = mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mori double: mmap of a table");
  }
  return static_cast<Layout*>(at);
}

std::string proc(uint64_t holder, const char* file) {
  std::string path = "/proc/" + std::to_string(holder >> 32) + "/task/" +
                     std::to_string(holder & 0xffffffff) + "/" + file;
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

enum class Holder { Runs, Left, Stopped };

// A thread that is stopped inside the system call has already left the kernel's copy: it stops on
// its way out. One that is stopped elsewhere is a few instructions before or after it.
Holder holder_state(uint64_t holder) {
  std::string stat = proc(holder, "stat");
  size_t paren = stat.rfind(')');
  if (paren == std::string::npos || paren + 2 >= stat.size()) return Holder::Left;
  char c = stat[paren + 2];
  if (c == 'Z' || c == 'X') return Holder::Left;
  if (c != 'T' && c != 't') return Holder::Runs;
  std::string call = proc(holder, "syscall");
  std::string number = call.substr(0, call.find(' '));
  bool copied = number == std::to_string(SYS_process_vm_readv) ||
                number == std::to_string(SYS_process_vm_writev);
  return copied ? Holder::Left : Holder::Stopped;
}

// `region` 0 stands for any.
void wait_out(const Inside& inside, uint64_t region) {
  auto since = Clock::now();
  for (int spins = 0;; ++spins) {
    uint64_t now = inside.region.load();
    if (now == 0 || (region != 0 && now != region)) return;
    if (spins < 100) {
      std::this_thread::yield();
      continue;
    }
    Holder holder = holder_state(inside.holder.load());
    if (holder == Holder::Left && inside.region.load() == now) return;
    // Bounded, since nobody promises that a stopped process goes on.
    if (holder == Holder::Stopped && Clock::now() - since > Millis(500)) return;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace

bool covers(const Layout& table, uint64_t key, uint64_t addr, uint64_t len) {
  uint32_t slot = static_cast<uint32_t>(key);
  if (slot >= kRegions) return false;
  const RegionSlot& r = table.region[slot];
  if (r.state.load() != kRegion || r.key.load() != key) return false;
  uint64_t base = r.addr.load(), size = r.len.load();
  return addr >= base && len <= size && addr - base <= size - len;
}

Table::Table() {
  fd_ = memfd_create("mori-double", MFD_CLOEXEC);
  if (fd_ < 0 || ftruncate(fd_, sizeof(Layout)) != 0) {
    throw std::system_error(errno, std::generic_category(), "mori double: memfd of a table");
  }
  layout_ = map(fd_);
  layout_->identity.store(random_bits());
  let_peers_in();
}

Table::~Table() {
  munmap(layout_, sizeof(Layout));
  ::close(fd_);
}

Region Table::add_region(uint64_t addr, uint64_t len) {
  uint32_t slot = layout_->regions.fetch_add(1);
  if (slot >= kRegions) die("more memory regions than a table holds");
  RegionSlot& r = layout_->region[slot];
  uint64_t key = random_bits() << 32 | slot;
  r.key.store(key);
  r.addr.store(addr);
  r.len.store(len);
  r.state.store(kRegion);
  return {addr, len, key};
}

void Table::revoke(uint64_t key) {
  uint32_t slot = static_cast<uint32_t>(key);
  layout_->region[slot].state.store(kRevoked);
  uint32_t pairs = layout_->pairs.load();
  for (uint32_t i = 0; i < pairs; ++i) {
    wait_out(layout_->pair[i].out, slot + 1);
    wait_out(layout_->pair[i].in, slot + 1);
  }
}

uint32_t Table::add_pair() {
  uint32_t slot = layout_->pairs.fetch_add(1);
  if (slot >= kPairs) die("more queue pairs than a table holds");
  layout_->pair[slot].state.store(kUp);
  return slot;
}

void Table::close() {
  uint32_t regions = layout_->regions.load(), pairs = layout_->pairs.load();
  for (uint32_t i = 0; i < regions; ++i) layout_->region[i].state.store(kRevoked);
  for (uint32_t i = 0; i < pairs; ++i) layout_->pair[i].state.store(kGone);
  for (uint32_t i = 0; i < pairs; ++i) {
    wait_out(layout_->pair[i].out, 0);
    wait_out(layout_->pair[i].in, 0);
  }
}

Peer::Peer(int pid, int fd, uint64_t identity) : pid_(pid), identity_(identity) {
  pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd_ < 0) {
    throw std::system_error(errno, std::generic_category(), "mori double: pidfd_open of a peer");
  }
  std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  int table = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat info {};
  // A file that is smaller is none of ours: the number was used again.
  if (table < 0 || fstat(table, &info) != 0 || info.st_size != off_t{sizeof(Layout)}) {
    int error = table < 0 ? errno : ESTALE;
    if (table >= 0) ::close(table);
    ::close(pidfd_);
    throw std::system_error(error, std::generic_category(), "mori double: table " + path);
  }
  layout_ = map(table);
  ::close(table);
  if (layout_->identity.load() == identity) return;
  munmap(layout_, sizeof(Layout));
  ::close(pidfd_);
  throw std::system_error(ESTALE, std::generic_category(), "mori double: table " + path);
}

Peer::~Peer() {
  munmap(layout_, sizeof(Layout));
  ::close(pidfd_);
}

bool Peer::alive() const {
  if (pid_ == getpid()) return true;
  pollfd p{pidfd_, POLLIN, 0};
  return poll(&p, 1, 0) == 0;
}

}  // namespace dbl
