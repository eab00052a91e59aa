// Which libmori_io.so the shim was compiled for, and which one it runs with: MoRI's names are the
// same over versions whose objects are not, so a mismatch loads well and then corrupts memory.
#pragma once

namespace kf {

const char *compiled_for() noexcept;
const char *compiled_at() noexcept;

/// Throws a Refusal unless the library that contains `code` is the one of `compiled_for`.
void check_loaded(const void *code);

}  // namespace kf
