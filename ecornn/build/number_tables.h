// Reads the tables that generated.py writes: 64-bit integers and strings, one after the other.
#pragma once
#include <cstdint>
#include <cstring>

namespace ecornn {

class NumberTables {
 public:
  explicit NumberTables(const unsigned char* data) : at_(data) {}

  int64_t Number() {
    int64_t value;
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return value;
  }

  const char* String() {
    const int64_t length = Number();
    const char* text = reinterpret_cast<const char*>(at_);
    at_ += length / 8 * 8 + 8;
    return text;
  }

 protected:
  const unsigned char* at_;
};

}  // namespace ecornn
