// One translation unit: most of the compiler's work is MoRI's headers.
#include "engine.cpp"
#include "device.cpp"
#include "identity.cpp"
#include "last.cpp"
#include "post.cpp"
