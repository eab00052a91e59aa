// Errors on their way out: nothing that is thrown gets past `guarded`.
#pragma once

#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "header.hpp"

namespace kf {

/// Copies `from` into a caller's buffer, cut at the start of a character where it does not fit.
inline void put(kf_text *text, std::string_view from) noexcept {
  if (text == nullptr || text->data == nullptr || text->room == 0) return;
  size_t len = from.size();
  if (len > text->room - 1) {
    len = text->room - 1;
    while (len > 0 && (static_cast<unsigned char>(from[len]) & 0xC0) == 0x80) --len;
  }
  std::memcpy(text->data, from.data(), len);
  text->data[len] = '\0';
}

inline int32_t fail(kf_text *error, int32_t kind, std::string_view why) noexcept {
  put(error, why);
  return kind;
}

/// What the shim itself says no to.
struct Refusal {
  int32_t kind;
  std::string why;
};

[[noreturn]] inline void refuse(int32_t kind, std::string why) {
  throw Refusal{kind, std::move(why)};
}

inline void require(bool holds, const char *why) {
  if (!holds) refuse(KF_ARGUMENT, why);
}

/// Runs `body`; what it throws becomes a kind and a text.
template <class Body>
int32_t guarded(kf_text *error, Body &&body) noexcept {
  try {
    body();
    return KF_OK;
  } catch (const Refusal &refusal) {
    return fail(error, refusal.kind, refusal.why);
  } catch (const std::system_error &thrown) {
    return fail(error, KF_SYSTEM, thrown.what());
  } catch (const std::exception &thrown) {
    return fail(error, KF_EXCEPTION, thrown.what());
  } catch (...) {
    return fail(error, KF_EXCEPTION, "MoRI threw something that is no std::exception");
  }
}

}  // namespace kf
