// The part of msgpack-c's interface that users of MoRI's descriptors need: positional arrays of
// integers, strings and fixed byte arrays. Lenient on an array's length, strict on types.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
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

class sbuffer {
 public:
  void write(const char* bytes, size_t len) { bytes_.append(bytes, len); }
  const char* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }

 private:
  std::string bytes_;
};

template <typename Stream>
class packer {
 public:
  explicit packer(Stream& out) : out_(out) {}

  template <typename T>
  void pack(const T& value) {
    if constexpr (std::is_enum_v<T>) {
      pack(static_cast<uint32_t>(value));
    } else if constexpr (std::is_integral_v<T>) {
      integer(static_cast<uint64_t>(value), std::is_signed_v<T> && value < T{0});
    } else {
      value.msgpack_pack(*this);
    }
  }
  void pack(const std::string& text) {
    size_t len = text.size();
    if (len < 32) {
      byte(0xa0 | len);
    } else {
      number(0xd9, width(len), len);
    }
    out_.write(text.data(), len);
  }
  template <size_t N>
  void pack(const std::array<char, N>& bytes) {
    number(0xc4, width(N), N);
    out_.write(bytes.data(), N);
  }
  template <typename... Fields>
  void pack_fields(const Fields&... fields) {
    static_assert(sizeof...(fields) < 16);
    byte(0x90 | sizeof...(fields));
    (pack(fields), ...);
  }

 private:
  void byte(uint64_t value) {
    char c = static_cast<char>(value & 0xff);
    out_.write(&c, 1);
  }
  // Of the bytes of a number: 0 for one, 1 for two, 2 for four, 3 for eight.
  static int width(uint64_t value) {
    return value <= 0xff ? 0 : value <= 0xffff ? 1 : value <= 0xffffffff ? 2 : 3;
  }
  void number(int tag, int width, uint64_t value) {
    byte(tag + width);
    for (int shift = 8 << width; shift > 0;) byte(value >> (shift -= 8));
  }
  void integer(uint64_t bits, bool negative) {
    if (negative ? ~bits < 32 : bits < 128) return byte(bits);
    if (negative) return number(0xd0, width(~bits << 1), bits);
    number(0xcc, width(bits), bits);
  }

  Stream& out_;
};

template <typename Stream, typename T>
void pack(Stream& out, const T& value) {
  packer<Stream>(out).pack(value);
}

// Points into what its handle owns.
struct object {
  enum Kind { Positive, Negative, Bytes, Array, Other };

  Kind kind = Other;
  uint64_t number = 0;  // or how many there are of the others
  const char* bytes = nullptr;
  const object* items = nullptr;

  template <typename T>
  T as() const {
    T value{};
    convert(value);
    return value;
  }
  template <typename T>
  void convert(T& out) const {
    if constexpr (std::is_enum_v<T>) {
      out = static_cast<T>(as<uint32_t>());
    } else if constexpr (std::is_integral_v<T>) {
      bool fits = kind == Positive && number <= uint64_t{std::numeric_limits<T>::max()};
      if constexpr (std::is_signed_v<T>) {
        auto least = int64_t{std::numeric_limits<T>::min()};
        fits = fits || (kind == Negative && static_cast<int64_t>(number) >= least);
      }
      if (!fits) throw type_error();
      out = static_cast<T>(number);
    } else {
      out.msgpack_unpack(*this);
    }
  }
  void convert(std::string& out) const {
    if (kind != Bytes) throw type_error();
    out.assign(bytes, number);
  }
  template <size_t N>
  void convert(std::array<char, N>& out) const {
    if (kind != Bytes || number > N) throw type_error();
    if (number > 0) std::memcpy(out.data(), bytes, number);
  }
  // Fields that the array lacks keep their values; elements past the last field are ignored.
  template <typename... Fields>
  void convert_fields(Fields&... fields) const {
    if (kind != Array) throw type_error();
    uint64_t at = 0;
    ((at < number ? items[at].convert(fields) : void(), ++at), ...);
  }
};

class object_handle {
 public:
  object_handle(const char* data, size_t len) : input_(data, len) { read(); }
  object_handle(const object_handle&) = delete;
  const object& get() const { return root_; }

 private:
  // Not by recursion: arrays may be as deep as the input is long.
  void read() {
    std::vector<std::pair<object*, size_t>> open;
    for (object* place = &root_;; place = open.back().first++) {
      size_t before = arrays_.size();
      *place = one();
      if (arrays_.size() > before) open.emplace_back(arrays_.back().data(), arrays_.back().size());
      while (!open.empty() && open.back().second == 0) open.pop_back();
      if (open.empty()) return;
      open.back().second -= 1;
      missing_ -= 1;
    }
  }

  object one() {
    uint8_t tag = static_cast<uint8_t>(*take(1));
    if (tag < 0x80) return {object::Positive, tag};
    if (tag < 0x90) return array(2 * (tag & 0x0f), object::Other);
    if (tag < 0xa0) return array(tag & 0x0f, object::Array);
    if (tag < 0xc0) return bytes(tag & 0x1f, object::Bytes);
    if (tag >= 0xe0) return integer(static_cast<int8_t>(tag));
    if (tag == 0xc1) throw std::runtime_error("parse error");
    if (tag < 0xc4) return {};
    if (tag < 0xc7) return bytes(big(1 << (tag - 0xc4)), object::Bytes);
    if (tag < 0xca) return bytes(1 + big(1 << (tag - 0xc7)), object::Other);
    if (tag < 0xcc) return bytes(4 << (tag - 0xca), object::Other);
    if (tag < 0xd0) return {object::Positive, big(1 << (tag - 0xcc))};
    if (tag < 0xd4) {
      int width = 1 << (tag - 0xd0), shift = 64 - 8 * width;
      return integer(static_cast<int64_t>(big(width) << shift) >> shift);
    }
    if (tag < 0xd9) return bytes(1 + (1 << (tag - 0xd4)), object::Other);
    if (tag < 0xdc) return bytes(big(1 << (tag - 0xd9)), object::Bytes);
    if (tag < 0xde) return array(big(2 << (tag - 0xdc)), object::Array);
    return array(2 * big(2 << (tag - 0xde)), object::Other);
  }

  const char* take(uint64_t len) {
    if (len > input_.size() - at_) throw std::runtime_error("insufficient bytes");
    const char* from = input_.data() + at_;
    at_ += len;
    return from;
  }
  uint64_t big(int width) {
    const char* from = take(width);
    uint64_t value = 0;
    for (int i = 0; i < width; ++i) value = value << 8 | static_cast<uint8_t>(from[i]);
    return value;
  }
  static object integer(int64_t value) {
    return {value < 0 ? object::Negative : object::Positive, static_cast<uint64_t>(value)};
  }
  object bytes(uint64_t len, object::Kind kind) { return {kind, len, take(len)}; }
  object array(uint64_t len, object::Kind kind) {
    // msgpack-c allocates before it looks whether the elements are there: this would be 48 GiB.
    if (len > uint64_t{1} << 31) throw std::bad_alloc();
    // Each element takes a byte at least.
    missing_ += len;
    if (missing_ > input_.size() - at_) throw std::runtime_error("insufficient bytes");
    return {kind, len, nullptr, arrays_.emplace_back(len).data()};
  }

  std::string input_;
  std::deque<std::vector<object>> arrays_;
  object root_;
  uint64_t at_ = 0;
  uint64_t missing_ = 0;  // elements of arrays that were not read yet
};

// Bytes after the first value are ignored.
inline object_handle unpack(const char* data, size_t len) { return {data, len}; }

}  // namespace msgpack

#define MSGPACK_DEFINE(...)                                                      \
  template <typename Packer>                                                     \
  void msgpack_pack(Packer& out) const {                                         \
    out.pack_fields(__VA_ARGS__);                                                \
  }                                                                              \
  void msgpack_unpack(const ::msgpack::object& from) { from.convert_fields(__VA_ARGS__); }
