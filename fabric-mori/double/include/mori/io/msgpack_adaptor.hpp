#pragma once

// Enums are packed as their numbers by msgpack.hpp, so nothing has to be adapted.
#include "mori/io/enum.hpp"
#include "msgpack.hpp"
