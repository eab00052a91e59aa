// One translation unit, as the double itself.
#include <fcntl.h>

#include "check.hpp"
//
#include "descriptors.cpp"
#include "ends.cpp"
#include "errors.cpp"
#include "faults.cpp"
#include "load.cpp"
#include "peer.cpp"
#include "processes.cpp"
#include "transfers.cpp"
#include "xgmi.cpp"

int main(int argc, char** argv) {
  // A process that hangs ends, and says so by that.
  alarm(900);
  signal(SIGPIPE, SIG_IGN);
  if (argc == 4 && std::string(argv[1]) == "--process") return be_process(argv[2], argv[3]);
  auto found = cases().find(argc == 2 ? argv[1] : "");
  if (found == cases().end()) {
    for (auto& [name, body] : cases()) std::printf("%s\n", name.c_str());
    return 2;
  }
  found->second();
  return 0;
}
