// The part of msgpack-c's interface that users of MoRI's descriptors need: positional arrays of
// integers, strings and fixed byte arrays. Lenient on an array's length, strict on types.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace msgpack {

class type_error : public std::bad_cast {
 public:
  const char* what() const noexcept override { return "std::bad_cast"; }
};

struct unpack_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct parse_error : unpack_error {
  using unpack_error::unpack_error;
};
struct insufficient_bytes : unpack_error {
  using unpack_error::unpack_error;
};

class sbuffer {
 public:
  void write(const char* bytes, size_t len) { bytes_.insert(bytes_.end(), bytes, bytes + len); }
  char* data() { return bytes_.data(); }
  const char* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  void clear() { bytes_.clear(); }

 private:
  std::vector<char> bytes_;
};

template <typename Stream>
class packer {
 public:
  explicit packer(Stream& out) : out_(out) {}

  template <typename T>
  packer& pack(const T& value) {
    if constexpr (std::is_enum_v<T>) {
      return pack(static_cast<uint32_t>(value));
    } else if constexpr (std::is_same_v<T, bool>) {
      return byte(value ? 0xc3 : 0xc2);
    } else if constexpr (std::is_integral_v<T>) {
      if constexpr (std::is_signed_v<T>) {
        if (value < 0) return negative(value);
      }
      return positive(static_cast<uint64_t>(value));
    } else {
      value.msgpack_pack(*this);
      return *this;
    }
  }

  packer& pack(const std::string& text) {
    size_t len = text.size();
    if (len < 32) {
      byte(0xa0 | len);
    } else {
      head(len, 0xd9, 0xda, 0xdb);
    }
    out_.write(text.data(), len);
    return *this;
  }

  template <size_t N>
  packer& pack(const std::array<char, N>& bytes) {
    pack_bin(N);
    return pack_bin_body(bytes.data(), N);
  }

  packer& pack_array(size_t len) {
    if (len < 16) return byte(0x90 | len);
    if (len <= 0xffff) return byte(0xdc).template big<2>(len);
    return byte(0xdd).template big<4>(len);
  }
  packer& pack_bin(size_t len) { return head(len, 0xc4, 0xc5, 0xc6); }
  packer& pack_bin_body(const char* bytes, size_t len) {
    out_.write(bytes, len);
    return *this;
  }

  template <typename... Fields>
  void pack_fields(const Fields&... fields) {
    pack_array(sizeof...(fields));
    (pack(fields), ...);
  }

 private:
  packer& byte(size_t value) {
    char c = static_cast<char>(value);
    out_.write(&c, 1);
    return *this;
  }
  template <int Width>
  packer& big(uint64_t value) {
    for (int shift = 8 * (Width - 1); shift >= 0; shift -= 8) byte((value >> shift) & 0xff);
    return *this;
  }
  packer& head(size_t len, uint8_t one, uint8_t two, uint8_t four) {
    if (len <= 0xff) return byte(one).template big<1>(len);
    if (len <= 0xffff) return byte(two).template big<2>(len);
    return byte(four).template big<4>(len);
  }
  packer& positive(uint64_t value) {
    if (value < 0x80) return byte(value);
    if (value <= 0xff) return byte(0xcc).template big<1>(value);
    if (value <= 0xffff) return byte(0xcd).template big<2>(value);
    if (value <= 0xffffffff) return byte(0xce).template big<4>(value);
    return byte(0xcf).template big<8>(value);
  }
  packer& negative(int64_t value) {
    uint64_t bits = static_cast<uint64_t>(value);
    if (value >= -32) return byte(bits & 0xff);
    if (value >= INT8_MIN) return byte(0xd0).template big<1>(bits);
    if (value >= INT16_MIN) return byte(0xd1).template big<2>(bits);
    if (value >= INT32_MIN) return byte(0xd2).template big<4>(bits);
    return byte(0xd3).template big<8>(bits);
  }

  Stream& out_;
};

template <typename Stream, typename T>
void pack(Stream& out, const T& value) {
  packer<Stream>(out).pack(value);
}

namespace type {
enum object_type {
  NIL,
  BOOLEAN,
  POSITIVE_INTEGER,
  NEGATIVE_INTEGER,
  FLOAT32 = 10,
  FLOAT64 = 4,
  FLOAT = 4,
  STR = 5,
  ARRAY = 6,
  MAP = 7,
  BIN = 8,
  EXT = 9
};
}  // namespace type

struct object;

struct object_array {
  uint32_t size;
  object* ptr;
};
struct object_bytes {
  uint32_t size;
  const char* ptr;
};

// Points into what its handle owns, as msgpack-c's does into its zone.
struct object {
  type::object_type type = type::NIL;
  union {
    bool boolean;
    uint64_t u64;
    int64_t i64;
    double f64;
    object_array array;
    object_bytes str;
    object_bytes bin;
  } via = {};

  template <typename T>
  T as() const {
    T value{};
    convert(value);
    return value;
  }

  template <typename T>
  T& convert(T& out) const {
    if constexpr (std::is_enum_v<T>) {
      out = static_cast<T>(as<uint32_t>());
    } else if constexpr (std::is_same_v<T, bool>) {
      if (type != type::BOOLEAN) throw type_error();
      out = via.boolean;
    } else if constexpr (std::is_integral_v<T>) {
      out = integer<T>();
    } else {
      out.msgpack_unpack(*this);
    }
    return out;
  }

  std::string& convert(std::string& out) const {
    object_bytes b = bytes();
    out.assign(b.ptr, b.size);
    return out;
  }

  template <size_t N>
  std::array<char, N>& convert(std::array<char, N>& out) const {
    object_bytes b = bytes();
    if (b.size > N) throw type_error();
    if (b.size > 0) std::memcpy(out.data(), b.ptr, b.size);
    return out;
  }

  // Fields that the array lacks keep their values; elements past the last field are ignored.
  template <typename... Fields>
  void convert_fields(Fields&... fields) const {
    if (type != type::ARRAY) throw type_error();
    uint32_t at = 0;
    ((at < via.array.size ? (void)via.array.ptr[at].convert(fields) : (void)0, ++at), ...);
  }

 private:
  object_bytes bytes() const {
    if (type == type::STR) return via.str;
    if (type == type::BIN) return via.bin;
    throw type_error();
  }

  template <typename T>
  T integer() const {
    if (type == type::POSITIVE_INTEGER) {
      if (via.u64 > static_cast<uint64_t>(std::numeric_limits<T>::max())) throw type_error();
      return static_cast<T>(via.u64);
    }
    if constexpr (std::is_signed_v<T>) {
      if (type == type::NEGATIVE_INTEGER &&
          via.i64 >= static_cast<int64_t>(std::numeric_limits<T>::min())) {
        return static_cast<T>(via.i64);
      }
    }
    throw type_error();
  }
};

struct zone {
  std::deque<std::vector<object>> arrays;
  std::string input;
};

class object_handle {
 public:
  object_handle() = default;
  object_handle(const object& root, std::unique_ptr<zone> owner)
      : root_(root), zone_(std::move(owner)) {}
  const object& get() const { return root_; }
  const object& operator*() const { return root_; }
  const object* operator->() const { return &root_; }

 private:
  object root_;
  std::unique_ptr<zone> zone_;
};

namespace detail {

class reader {
 public:
  explicit reader(zone& z) : zone_(z) {}

  // Not by recursion: arrays may be as deep as the input is long.
  object value() {
    object root;
    std::vector<std::pair<object*, size_t>> open;
    for (object* place = &root;; place = open.back().first++) {
      size_t arrays = zone_.arrays.size();
      *place = one();
      if (zone_.arrays.size() > arrays) {
        open.emplace_back(zone_.arrays.back().data(), zone_.arrays.back().size());
      }
      while (!open.empty() && open.back().second == 0) open.pop_back();
      if (open.empty()) return root;
      open.back().second -= 1;
      missing_ -= 1;
    }
  }

 private:
  object one() {
    uint8_t tag = static_cast<uint8_t>(*take(1));
    object o;
    if (tag < 0x80) return number(tag);
    if (tag >= 0xe0) return number(static_cast<int64_t>(static_cast<int8_t>(tag)));
    if (tag < 0x90) return array(2 * (tag & 0x0f), type::MAP);
    if (tag < 0xa0) return array(tag & 0x0f, type::ARRAY);
    if (tag < 0xc0) return bytes(tag & 0x1f, type::STR);
    switch (tag) {
      case 0xc0: return o;
      case 0xc2:
      case 0xc3:
        o.type = type::BOOLEAN;
        o.via.boolean = tag == 0xc3;
        return o;
      case 0xc4: return bytes(big(1), type::BIN);
      case 0xc5: return bytes(big(2), type::BIN);
      case 0xc6: return bytes(big(4), type::BIN);
      case 0xc7: return bytes(1 + big(1), type::EXT);
      case 0xc8: return bytes(1 + big(2), type::EXT);
      case 0xc9: return bytes(1 + big(4), type::EXT);
      case 0xca: return bytes(4, type::FLOAT32);
      case 0xcb: return bytes(8, type::FLOAT64);
      case 0xcc: return number(big(1));
      case 0xcd: return number(big(2));
      case 0xce: return number(big(4));
      case 0xcf: return number(big(8));
      case 0xd0: return number(static_cast<int64_t>(static_cast<int8_t>(big(1))));
      case 0xd1: return number(static_cast<int64_t>(static_cast<int16_t>(big(2))));
      case 0xd2: return number(static_cast<int64_t>(static_cast<int32_t>(big(4))));
      case 0xd3: return number(static_cast<int64_t>(big(8)));
      case 0xd4:
      case 0xd5:
      case 0xd6:
      case 0xd7:
      case 0xd8: return bytes(1 + (uint64_t{1} << (tag - 0xd4)), type::EXT);
      case 0xd9: return bytes(big(1), type::STR);
      case 0xda: return bytes(big(2), type::STR);
      case 0xdb: return bytes(big(4), type::STR);
      case 0xdc: return array(big(2), type::ARRAY);
      case 0xdd: return array(big(4), type::ARRAY);
      case 0xde: return array(2 * big(2), type::MAP);
      case 0xdf: return array(2 * big(4), type::MAP);
      default: throw parse_error("parse error");
    }
  }
  const char* take(uint64_t len) {
    if (len > zone_.input.size() - at_) throw insufficient_bytes("insufficient bytes");
    const char* p = zone_.input.data() + at_;
    at_ += len;
    return p;
  }
  uint64_t big(int width) {
    const char* p = take(width);
    uint64_t value = 0;
    for (int i = 0; i < width; ++i) value = value << 8 | static_cast<uint8_t>(p[i]);
    return value;
  }
  static object number(uint64_t value) {
    object o;
    o.type = type::POSITIVE_INTEGER;
    o.via.u64 = value;
    return o;
  }
  static object number(uint8_t value) { return number(uint64_t{value}); }
  static object number(int64_t value) {
    if (value >= 0) return number(static_cast<uint64_t>(value));
    object o;
    o.type = type::NEGATIVE_INTEGER;
    o.via.i64 = value;
    return o;
  }
  object bytes(uint64_t len, type::object_type kind) {
    object o;
    o.type = kind;
    o.via.bin = {static_cast<uint32_t>(len), take(len)};
    return o;
  }
  object array(uint64_t len, type::object_type kind) {
    // msgpack-c allocates before it looks whether the elements are there: so much, no machine gives.
    if (len * sizeof(object) > uint64_t{1} << 36) throw std::bad_alloc();
    // Each element takes a byte at least.
    missing_ += len;
    if (missing_ > zone_.input.size() - at_) throw insufficient_bytes("insufficient bytes");
    object o;
    o.type = kind;
    uint32_t size = static_cast<uint32_t>(kind == type::MAP ? len / 2 : len);
    o.via.array = {size, zone_.arrays.emplace_back(len).data()};
    return o;
  }

  zone& zone_;
  uint64_t at_ = 0;
  uint64_t missing_ = 0;  // elements of arrays that were not read yet
};

}  // namespace detail

// Bytes after the first value are ignored.
inline object_handle unpack(const char* data, size_t len) {
  auto owner = std::make_unique<zone>();
  owner->input.assign(data, len);
  object root = detail::reader(*owner).value();
  return object_handle(root, std::move(owner));
}

inline void unpack(object_handle& out, const char* data, size_t len) { out = unpack(data, len); }

}  // namespace msgpack

#define MSGPACK_DEFINE(...)                                                      \
  template <typename Packer>                                                     \
  void msgpack_pack(Packer& out) const {                                         \
    out.pack_fields(__VA_ARGS__);                                                \
  }                                                                              \
  void msgpack_unpack(const ::msgpack::object& from) { from.convert_fields(__VA_ARGS__); }
