// kf_mori.h for the shim's own sources: its functions are all that the library exports.
#pragma once

#pragma GCC visibility push(default)
#include "kf_mori.h"
#pragma GCC visibility pop
