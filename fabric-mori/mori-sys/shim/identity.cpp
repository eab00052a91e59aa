#include "identity.hpp"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "sha256.hpp"
#include "text.hpp"

#if !defined(KF_MORI_IDENTITY) || !defined(KF_MORI_PATH)
#error "the shim is compiled by mori-build, which says what for"
#endif

namespace kf {

namespace {

/// A loaded library; the shim depends on the one it looks for, so that these stay valid.
struct Loaded {
  uintptr_t code = 0;
  uintptr_t base = 0;
  const ElfW(Phdr) *parts = nullptr;
  size_t count = 0;
  const char *path = "";
};

std::string hex(const unsigned char *bytes, size_t len) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < len; ++i) {
    text += digits[bytes[i] >> 4];
    text += digits[bytes[i] & 15];
  }
  return text;
}

std::string build_id_in(const unsigned char *notes, size_t len, size_t align) {
  const auto padded = [align](size_t size) { return (size + align - 1) / align * align; };
  while (len >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes, sizeof note);
    const size_t name = sizeof note, desc = name + padded(note.n_namesz);
    const size_t end = desc + padded(note.n_descsz);
    if (desc + note.n_descsz > len) break;
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
        std::memcmp(notes + name, "GNU", 4) == 0) {
      return hex(notes + desc, note.n_descsz);
    }
    if (end >= len) break;
    notes += end;
    len -= end;
  }
  return {};
}

/// Allocates nothing: an exception must not pass through the C library.
int visit(dl_phdr_info *info, size_t, void *data) {
  Loaded &loaded = *static_cast<Loaded *>(data);
  const ElfW(Phdr) *begin = info->dlpi_phdr, *end = begin + info->dlpi_phnum;
  const bool covers = std::any_of(begin, end, [&](const ElfW(Phdr) & part) {
    const uintptr_t start = info->dlpi_addr + part.p_vaddr;
    return part.p_type == PT_LOAD && loaded.code >= start && loaded.code - start < part.p_memsz;
  });
  if (!covers) return 0;
  loaded = {loaded.code, info->dlpi_addr, begin, info->dlpi_phnum, info->dlpi_name};
  return 1;
}

std::string build_id_of(const Loaded &loaded) {
  for (size_t i = 0; i < loaded.count; ++i) {
    const ElfW(Phdr) &part = loaded.parts[i];
    if (part.p_type != PT_NOTE) continue;
    const auto notes = reinterpret_cast<const unsigned char *>(loaded.base + part.p_vaddr);
    const std::string id = build_id_in(notes, part.p_memsz, part.p_align == 8 ? 8 : 4);
    if (!id.empty()) return id;
  }
  return {};
}

std::string hash_of(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  Sha256 hash;
  std::string piece(1 << 16, '\0');
  while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())) || file.gcount() > 0) {
    hash.add(reinterpret_cast<const unsigned char *>(piece.data()),
             static_cast<size_t>(file.gcount()));
  }
  if (!file.eof()) return "unreadable";
  const auto digest = hash.end();
  return "sha256:" + hex(digest.data(), digest.size());
}

}  // namespace

const char *compiled_for() noexcept { return KF_MORI_IDENTITY; }

const char *compiled_at() noexcept { return KF_MORI_PATH; }

void check_loaded(const void *code) {
  Loaded loaded;
  loaded.code = reinterpret_cast<uintptr_t>(code);
  if (dl_iterate_phdr(visit, &loaded) == 0) refuse(KF_ABI, "no loaded library has MoRI's code");
  const std::string id = build_id_of(loaded);
  const std::string actual = id.empty() ? hash_of(loaded.path) : "build-id:" + id;
  if (actual == compiled_for()) return;
  refuse(KF_ABI, "the process has MoRI " + actual + " (" + loaded.path +
                     "), but the shim was compiled for " + compiled_for() + " (" + compiled_at() +
                     ")");
}

}  // namespace kf
