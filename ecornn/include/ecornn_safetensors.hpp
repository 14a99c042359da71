// Weights of a safetensors file by their names, for C++17; a damaged file is refused with a word on what is wrong.
//
//   ecornn::Safetensors file("model.safetensors");
//   ecornn::Layer layer = module.bind(file.weights(module, "encoder."));
//
// The constructor checks the whole header: its JSON, types and shapes, and that the data of the tensors follow each other to
// the end of the file without holes or overlaps. A tensor's data are read when it is asked for, and live as long as the
// Safetensors. Throws ecornn::Error, of ECORNN_FILE for the file, of ECORNN_WEIGHTS or ECORNN_SHAPE for a tensor.
#ifndef ECORNN_SAFETENSORS_HPP_
#define ECORNN_SAFETENSORS_HPP_

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "ecornn.hpp"

namespace ecornn {
namespace detail {

[[noreturn]] inline void Refuse(ecornn_status code, const std::string& path, const std::string& what) {
  ecornn_error error{};
  ecornn_refuse_(&error, code, path.c_str(), what.c_str());
  throw Error(error);
}

struct Stored {
  const char* name;
  DLDataType type;
};
inline constexpr Stored kStored[] = {
    {"F64", {kDLFloat, 64, 1}}, {"F32", {kDLFloat, 32, 1}}, {"F16", {kDLFloat, 16, 1}}, {"BF16", {kDLBfloat, 16, 1}},
    {"I64", {kDLInt, 64, 1}}, {"I32", {kDLInt, 32, 1}}, {"I16", {kDLInt, 16, 1}}, {"I8", {kDLInt, 8, 1}},
    {"U64", {kDLUInt, 64, 1}}, {"U32", {kDLUInt, 32, 1}}, {"U16", {kDLUInt, 16, 1}}, {"U8", {kDLUInt, 8, 1}},
    {"BOOL", {kDLBool, 8, 1}}, {"C64", {kDLComplex, 64, 1}}, {"F8_E4M3", {kDLFloat8_e4m3fn, 8, 1}},
    {"F8_E5M2", {kDLFloat8_e5m2, 8, 1}}, {"F8_E8M0", {kDLFloat8_e8m0fnu, 8, 1}}};

// What a header says of one tensor; begin and end are bytes of the data, which are behind the header.
struct Entry {
  DLDataType type{};
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;
};

// Reads a header, which has no JSON but objects, strings, and lists of sizes.
class HeaderReader {
 public:
  HeaderReader(const std::string& path, const std::string& text) : path_(path), text_(text) {}

  std::map<std::string, Entry> Read() {
    std::map<std::string, Entry> entries;
    CheckUtf8();
    Object([&](const std::string& name) {
      if (name == "__metadata__") return Object([this](const std::string&) { String(); });
      entries[name] = ReadEntry(name);
    });
    Space();
    if (at_ != text_.size()) Fail("goes on behind its end, at byte " + std::to_string(at_));
    return entries;
  }

 private:
  [[noreturn]] void Fail(const std::string& what) const {
    Refuse(ECORNN_FILE, path_, "is no safetensors file, or a damaged one: its header " + what);
  }

  Entry ReadEntry(const std::string& name) {
    Entry entry;
    std::vector<int64_t> offsets;
    int members = 0;
    Object([&](const std::string& member) {
      ++members;
      if (member == "dtype") {
        const std::string type = String();
        const auto* found = std::find_if(std::begin(kStored), std::end(kStored),
                                         [&](const Stored& one) { return type == one.name; });
        if (found == std::end(kStored)) Fail("has " + name + " of type " + type + ", which is unknown here");
        entry.type = found->type;
      } else if (member == "shape") {
        entry.shape = Sizes();
      } else if (member == "data_offsets") {
        offsets = Sizes();
      } else {
        Fail("has a member " + member + " of " + name + "; expected dtype, shape and data_offsets");
      }
    });
    if (members != 3) Fail("lacks dtype, shape or data_offsets of " + name);
    if (offsets.size() != 2 || offsets[0] > offsets[1]) Fail("has no begin and end as data_offsets of " + name);
    entry.begin = offsets[0];
    entry.end = offsets[1];
    int64_t bytes = entry.type.bits / 8;
    for (int64_t size : entry.shape) {
      if (size != 0 && bytes > INT64_MAX / size) Fail("has a shape of " + name + " that is too large");
      bytes *= size;
    }
    if (entry.end - entry.begin != bytes) {
      Fail("has " + std::to_string(entry.end - entry.begin) + " bytes for " + name + ", whose shape and type take " +
           std::to_string(bytes));
    }
    return entry;
  }

  // Calls `each` with the name of every member, to read its value.
  template <typename Each>
  void Object(Each each) {
    std::set<std::string> seen;
    Expect('{');
    if (Take('}')) return;
    do {
      const std::string name = String();
      if (!seen.insert(name).second) Fail("has " + name + " twice");
      Expect(':');
      each(name);
    } while (Take(','));
    Expect('}');
  }

  std::vector<int64_t> Sizes() {
    std::vector<int64_t> sizes;
    Expect('[');
    if (Take(']')) return sizes;
    do sizes.push_back(Size());
    while (Take(','));
    Expect(']');
    return sizes;
  }

  int64_t Size() {
    Space();
    const size_t first = at_;
    int64_t value = 0;
    for (; Peek() >= '0' && Peek() <= '9'; ++at_) {
      const int digit = Peek() - '0';
      if (value > (INT64_MAX - digit) / 10) Fail("has a number that is too large");
      value = 10 * value + digit;
    }
    if (at_ == first || (text_[first] == '0' && at_ > first + 1)) Fail(Where("a number of digits", first));
    return value;
  }

  std::string String() {
    Expect('"');
    std::string made;
    while (Peek() != '"') {
      if (Peek() >= 0 && Peek() < 0x20) Fail(Where("no control character", at_));
      if (Peek() != '\\') {
        made += Next();
        continue;
      }
      ++at_;
      static const char kEscapes[] = "\"\"\\\\//b\bf\fn\nr\rt\t";  // each with what it stands for
      const char escape = Next();
      const char* found = kEscapes;
      while (*found && *found != escape) found += 2;
      if (escape == 'u') {
        AppendUtf8(Escaped(), &made);
      } else if (*found && escape) {
        made += found[1];
      } else {
        Fail(Where("an escape of JSON", at_ - 1));
      }
    }
    ++at_;
    return made;
  }

  // The character of \uXXXX, of which there are two where it takes more than 16 bits.
  uint32_t Escaped() {
    const uint32_t first = Hexadecimal();
    if (first < 0xD800 || first > 0xDFFF) return first;
    if (first > 0xDBFF || Next() != '\\' || Next() != 'u') Fail(Where("a pair of surrogates", at_));
    const uint32_t second = Hexadecimal();
    if (second < 0xDC00 || second > 0xDFFF) Fail(Where("a pair of surrogates", at_));
    return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
  }

  uint32_t Hexadecimal() {
    static const std::string kDigits = "0123456789abcdef";
    uint32_t value = 0;
    for (int n = 0; n < 4; ++n) {
      const char c = Next();
      const size_t digit = kDigits.find(c >= 'A' && c <= 'F' ? static_cast<char>(c + 'a' - 'A') : c);
      if (digit == std::string::npos) Fail(Where("a hexadecimal digit", at_ - 1));
      value = value << 4 | static_cast<uint32_t>(digit);
    }
    return value;
  }

  static void AppendUtf8(uint32_t code, std::string* to) {
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const uint32_t kFirst[] = {0, 0xC0, 0xE0, 0xF0};
    *to += static_cast<char>(kFirst[more] | code >> 6 * more);
    for (int n = more - 1; n >= 0; --n) *to += static_cast<char>(0x80 | (code >> 6 * n & 0x3F));
  }

  void CheckUtf8() const {
    for (size_t i = 0; i < text_.size();) {
      const auto byte = [&](size_t n) { return static_cast<uint32_t>(static_cast<unsigned char>(text_[n])); };
      const uint32_t first = byte(i);
      const size_t more = first < 0x80 ? 0 : first < 0xC2 ? 4 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : first < 0xF5 ? 3 : 4;
      bool right = more < 4 && more < text_.size() - i;
      uint32_t code = more == 0 ? first : first & (0x3Fu >> more);
      for (size_t n = 1; right && n <= more; ++n) {
        right = (byte(i + n) & 0xC0) == 0x80;
        code = code << 6 | (byte(i + n) & 0x3F);
      }
      right = right && (more != 2 || (code >= 0x800 && (code < 0xD800 || code > 0xDFFF)));
      if (!right || (more == 3 && (code < 0x10000 || code > 0x10FFFF))) Fail(Where("UTF-8", i));
      i += more + 1;
    }
  }

  // The byte that is next, -1 at the end.
  int Peek() const { return at_ < text_.size() ? static_cast<unsigned char>(text_[at_]) : -1; }
  char Next() {
    if (Peek() < 0) Fail("ends too early");
    return text_[at_++];
  }
  void Space() {
    while (Peek() == ' ' || Peek() == '\n' || Peek() == '\r' || Peek() == '\t') ++at_;
  }
  bool Take(char c) {
    Space();
    if (Peek() != c) return false;
    ++at_;
    return true;
  }
  void Expect(char c) {
    if (!Take(c)) Fail(Where(std::string("'") + c + "'", at_));
  }
  static std::string Where(const std::string& expected, size_t at) {
    return "has no " + expected + " at its byte " + std::to_string(at) + ", where one must be";
  }

  const std::string& path_;
  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace detail

class Safetensors {
 public:
  explicit Safetensors(const std::string& path) : path_(path), file_(path, std::ios::binary) {
    unsigned char length[8];
    file_.seekg(0, std::ios::end);
    const int64_t size = static_cast<int64_t>(file_.tellg());
    file_.seekg(0);
    if (!file_) Refuse("cannot be read");
    if (size < 8) Damaged("it has " + std::to_string(size) + " bytes, fewer than the 8 that say how long its header is");
    Bytes(length, 8);
    uint64_t header = 0;
    for (int n = 7; n >= 0; --n) header = header << 8 | length[n];
    if (header > static_cast<uint64_t>(size) - 8 || header > kLongest) {
      Damaged("its header would have " + std::to_string(header) + " bytes; expected " +
              std::to_string(std::min<uint64_t>(static_cast<uint64_t>(size) - 8, kLongest)) + " at most");
    }
    std::string text(header, '\0');
    Bytes(text.data(), text.size());
    entries_ = detail::HeaderReader(path_, text).Read();
    data_ = 8 + static_cast<int64_t>(header);
    CheckPlaces(size - data_);
  }

  // Names of all tensors, in alphabetical order.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, entry] : entries_) all.push_back(name);
    return all;
  }

  // A tensor of up to three axes, read from the file.
  Tensor tensor(const std::string& name) {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
      std::string has;
      for (const auto& [other, entry] : entries_) has += (has.empty() ? "" : ", ") + other;
      Refuse("has no tensor " + name + "; it has " + (has.empty() ? "none" : has), ECORNN_WEIGHTS);
    }
    const detail::Entry& entry = found->second;
    if (entry.shape.size() > 3) {
      Refuse("has " + name + " with " + std::to_string(entry.shape.size()) + " axes; expected 3 at most", ECORNN_SHAPE);
    }
    auto memory = memory_.find(name);
    if (memory == memory_.end()) {
      std::vector<unsigned char> bytes(static_cast<size_t>(entry.end - entry.begin));
      file_.clear();
      file_.seekg(data_ + entry.begin);
      Bytes(bytes.data(), bytes.size());
      memory = memory_.emplace(name, std::move(bytes)).first;
    }
    return Tensor(memory->second.data(), entry.shape.data(), entry.shape.size(), entry.type);
  }

  // The weights that a module's layer has, from tensors of `prefix` and their names: what Module::bind takes.
  Named weights(const Module& module, const std::string& prefix = "") {
    const ecornn_description& layer = module.description();
    Named found;
    for (int32_t n = 0; n < layer.parameter_count; ++n) {
      found.emplace_back(layer.parameters[n].name, tensor(prefix + layer.parameters[n].name));
    }
    return found;
  }

 private:
  static constexpr uint64_t kLongest = 100000000;  // bytes of a header, as the format has it

  [[noreturn]] void Refuse(const std::string& what, ecornn_status code = ECORNN_FILE) const {
    detail::Refuse(code, path_, what);
  }
  [[noreturn]] void Damaged(const std::string& what) const { Refuse("is no safetensors file, or a damaged one: " + what); }

  void Bytes(void* to, size_t count) {
    if (!file_.read(static_cast<char*>(to), static_cast<std::streamsize>(count))) Refuse("cannot be read");
  }

  void CheckPlaces(int64_t size) const {
    std::vector<std::pair<std::pair<int64_t, int64_t>, const std::string*>> places;
    for (const auto& [name, entry] : entries_) places.push_back({{entry.begin, entry.end}, &name});
    std::sort(places.begin(), places.end());
    int64_t next = 0;
    for (const auto& [place, name] : places) {
      if (place.first != next) {
        Damaged(*name + " begins at byte " + std::to_string(place.first) + " of the data; expected " +
                std::to_string(next) + ", where the one before it ends");
      }
      next = place.second;
    }
    if (next != size) {
      Damaged("its tensors end at byte " + std::to_string(next) + " of the data, of which there are " +
              std::to_string(size));
    }
  }

  std::string path_;
  std::ifstream file_;
  std::map<std::string, detail::Entry> entries_;
  std::map<std::string, std::vector<unsigned char>> memory_;
  int64_t data_ = 0;
};

}  // namespace ecornn

#endif  // ECORNN_SAFETENSORS_HPP_
