// A shim without MoRI: its check and what is asked of HIP are real, of the rest only the names are there.
#include "device.cpp"
#include "identity.cpp"

extern "C" void method_of_mori() __asm__("_ZN4mori2io8IOEngine7WaitAllEv");

int32_t kf_mori_info(kf_info *out) noexcept {
  *out = {STUB_ABI, STUB_LAYOUT, 1, 2, 3, 4, 5, kf::compiled_for(), kf::compiled_at()};
  return KF_OK;
}

int32_t kf_mori_check(kf_text *error) noexcept {
  const auto code = reinterpret_cast<const void *>(&method_of_mori);
  return kf::guarded(error, [&] { kf::check_loaded(code); });
}

#define STUB(name) asm(".globl " name "\n.set " name ", kf_mori_check");
#include "names.inc"
