#pragma once

#include <memory>

#include "knobs.hpp"
#include "mori/io/engine.hpp"

namespace dbl {

std::unique_ptr<mori::io::Backend> make_xgmi(const mori::io::EngineDesc& self, Gate& gate);
#if MORI_DOUBLE_CLASS >= 15
// Serves scale-up domains of several nodes, which the double has none of: handles nothing.
std::unique_ptr<mori::io::Backend> make_fabric();
#endif

}  // namespace dbl
