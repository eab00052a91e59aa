#include "check.hpp"

template <typename Desc>
constexpr bool kHasOffset = requires(Desc desc) { desc.ipcOffset; };
// The newer of the two layouts.
constexpr bool kFull = kHasOffset<MemoryDesc>;

static_assert(sizeof(EngineDesc) == 136);
static_assert(sizeof(MemoryDesc) == (kFull ? 288 : 160));
static_assert(sizeof(TransferStatus) == 192);
static_assert(sizeof(RdmaBackendConfig) == 64);

namespace {

std::string repeat(const std::string& text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

MemoryDesc small() {
  MemoryDesc out;
  out.engineKey = "k";
  out.data = 0x56244056f930;
  out.size = 65536;
  out.loc = MemoryLocationType::CPU;
  out.numaNode = 0;
  return out;
}

// What MoRI itself packed.
const std::string kHead = "a16b00ffa0cf000056244056f930ce0001000001c440";
const std::string kTail = "00c440" + repeat("00", 64) + "ffa00000";

const std::string kEngine =
    "96be70726f64756365723a31302e302e302e313a363330313a7470303a647030a66e6f64652d61a6686f73742d61a8"
    "31302e302e302e31cdb043cd1092";
const std::string kGpuHead =
    "be70726f64756365723a31302e302e302e313a363330313a7470303a6470300703ac303030303a63313a30302e30cf"
    "00007f0000001000ce4000000002c440";
const std::string kGpuIpc =
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e"
    "2f303132333435363738393a3b3c3d3e3f";
const std::string kGpuTail = "cd1000c440" + repeat("00", 64) + "ffa00000";

std::string bad(const std::string& text) {
  return thrown([&] { unpacked<MemoryDesc>(unhex(text)); });
}

}  // namespace

CASE(golden_bytes) {
  std::string head = kFull ? "9f" : "99", numa = "00";
  std::string expected = head + kHead + repeat("00", 64) + numa + (kFull ? kTail : "");
  CHECK_EQ(hex(packed(small())), expected);
  if (kFull) CHECK_EQ(expected.size() / 2, size_t{159});
  MemoryDesc back = unpacked<MemoryDesc>(unhex(expected));
  CHECK(back == small());

  EngineDesc engine = unpacked<EngineDesc>(unhex(kEngine));
  CHECK_EQ(engine.key, std::string("producer:10.0.0.1:6301:tp0:dp0"));
  CHECK(engine.nodeId == "node-a" && engine.hostname == "host-a" && engine.host == "10.0.0.1");
  CHECK(engine.port == 45123 && engine.pid == 4242);
  CHECK_EQ(hex(packed(engine)), kEngine);

  std::string gpu = head + kGpuHead + kGpuIpc + "01" + (kFull ? kGpuTail : "");
  MemoryDesc memory = unpacked<MemoryDesc>(unhex(gpu));
  CHECK(memory.id == 7 && memory.deviceId == 3 && memory.deviceBusId == "0000:c1:00.0");
  CHECK(memory.data == 139637976731648 && memory.size == 1073741824 && memory.numaNode == 1);
  CHECK(memory.loc == MemoryLocationType::GPU && memory.ipcHandle[63] == 0x3f);
  CHECK_EQ(hex(packed(memory)), gpu);
}

CASE(lenient_on_length_strict_on_type) {
  std::string body = kHead + repeat("00", 64) + "00";
  // Nine fields decode in both classes, and a longer array than the class has is cut.
  CHECK_EQ(unpacked<MemoryDesc>(unhex("99" + body)).size, size_t{65536});
  CHECK_EQ(unpacked<MemoryDesc>(unhex("dc0010" + body + kTail + "c0")).size, size_t{65536});
  MemoryDesc shorter = unpacked<MemoryDesc>(unhex("92a16b07"));
  CHECK(shorter.id == 7 && shorter.numaNode == -1 && shorter.size == 0);
  CHECK(unpacked<EngineDesc>(unhex("90")).key.empty());
  // Bytes behind the value are ignored.
  CHECK_EQ(unpacked<MemoryDesc>(unhex("92a16b0700ff")).id, uint32_t{7});

  CHECK_EQ(bad("9207a16b"), std::string("type_error std::bad_cast"));
  CHECK_EQ(bad("92a16bff"), std::string("type_error std::bad_cast"));
  CHECK_EQ(bad("92a16bcf0000000100000000"), std::string("type_error std::bad_cast"));
  CHECK_EQ(bad("92a16bc3"), std::string("type_error std::bad_cast"));
  CHECK_EQ(bad("92a16bca00000000"), std::string("type_error std::bad_cast"));
  CHECK_EQ(bad("a16b"), std::string("type_error std::bad_cast"));
  CHECK_EQ(bad("81a16b07"), std::string("type_error std::bad_cast"));
  CHECK_EQ(bad(("98a16b00ffa0000001c441" + repeat("00", 65))),
           std::string("type_error std::bad_cast"));
  // v0.1.0's, that has no bus id: the address is where a text has to be.
  CHECK_EQ(bad(("97a16b00ffcf000056244056f930ce0001000001c440" + repeat("00", 64))),
           std::string("type_error std::bad_cast"));
  CHECK(has(bad("9fa1"), "insufficient bytes"));
  CHECK(has(bad("c1"), "parse error"));
  CHECK(has(bad(repeat("91", 1'000'000)), "insufficient bytes"));
  CHECK_EQ(bad(("92" + repeat("91", 100) + "c000")), std::string("type_error std::bad_cast"));
}

// On a machine with as much memory MoRI says that there are not enough bytes.
CASE(more_elements_than_memory) { CHECK_EQ(bad("ddffffffff"), std::string("bad_alloc")); }

CASE(integers_are_shortest) {
  auto bytes = [](auto value) {
    msgpack::sbuffer out;
    msgpack::pack(out, value);
    return hex({out.data(), out.size()});
  };
  CHECK_EQ(bytes(127), std::string("7f"));
  CHECK_EQ(bytes(128), std::string("cc80"));
  CHECK_EQ(bytes(256), std::string("cd0100"));
  CHECK_EQ(bytes(65536u), std::string("ce00010000"));
  CHECK_EQ(bytes(uint64_t{1} << 32), std::string("cf0000000100000000"));
  CHECK_EQ(bytes(-32), std::string("e0"));
  CHECK_EQ(bytes(-33), std::string("d0df"));
  CHECK_EQ(bytes(-129), std::string("d1ff7f"));
  CHECK_EQ(bytes(-32769), std::string("d2ffff7fff"));
  CHECK_EQ(bytes(int64_t{-2147483649}), std::string("d3ffffffff7fffffff"));
  for (int64_t value : {int64_t{-1}, int64_t{-33}, int64_t{-129}, int64_t{-32769}, INT64_MIN}) {
    msgpack::sbuffer out;
    msgpack::pack(out, value);
    CHECK_EQ(msgpack::unpack(out.data(), out.size()).get().as<int64_t>(), value);
  }
}
