// What a kernel is told of its node: the module's file, the number of weights, the GPU.
#ifndef ECORNN_ORT_NODE_H_
#define ECORNN_ORT_NODE_H_

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "ecornn.hpp"
#include "ort_api.h"
#include "status.h"

namespace ort {

// The folder that this library is in.
inline const std::string& Folder() {
  static const std::string folder = [] {
    Dl_info found{};
    dladdr(reinterpret_cast<void*>(&Folder), &found);
    char* whole = realpath(found.dli_fname, nullptr);
    const std::string path = whole ? whole : found.dli_fname;
    std::free(whole);
    return path.substr(0, path.rfind('/'));
  }();
  return folder;
}

inline std::string Attribute(const Api& api, const KernelInfo* info, const char* name) {
  size_t size = 0;
  Must(api.attribute(info, name, nullptr, &size));
  std::string text(size, '\0');
  Must(api.attribute(info, name, text.data(), &size));
  return text.c_str();
}

inline std::string NameOf(const Api& api, const KernelInfo* info) {
  size_t size = 0;
  Must(api.name(info, nullptr, &size));
  std::string text(size, '\0');
  Must(api.name(info, text.data(), &size));
  return text.c_str();
}

// The digest at the end of a module file, in hexadecimal digits.
inline std::string DigestOf(const std::string& path) {
  constexpr int kSize = 32, kMark = 16;
  unsigned char digest[kSize] = {};
  std::ifstream file(path, std::ios::binary);
  file.seekg(-(kSize + kMark), std::ios::end);
  file.read(reinterpret_cast<char*>(digest), kSize);
  std::string said;
  for (const unsigned char byte : digest) {
    for (const int digit : {byte >> 4, byte & 15}) said += "0123456789abcdef"[digit];
  }
  return said;
}

// Opens the node's module.
inline ecornn::Module ModuleOf(const Api& api, const KernelInfo* info) {
  const std::string name = Attribute(api, info, "module"), path = Folder() + "/" + name;
  if (name.empty() || name.find('/') != std::string::npos) {
    throw Refused("its attribute module must be the name of a file beside the library");
  }
  if (!std::ifstream(path)) {
    throw Refused("its module " + path + " is missing: it belongs beside the library", kNoSuchFile);
  }
  if (!ecornn_damage_(path.c_str()) && DigestOf(path) != Attribute(api, info, "digest")) {
    throw Refused(path + " is another module than the one that the model was rewritten for", kFail);
  }
  return ecornn::Module(path);  // which refuses a damaged one
}

inline size_t WeightsOf(const Api& api, const KernelInfo* info, size_t before) {
  size_t count = 0;
  Must(api.input_count(info, &count));
  if (count < before) throw Refused("it has too few inputs");
  return count - before;
}

// The number of the GPU that the node runs on.
inline int DeviceOf(const Api& api, const KernelInfo* info) {
  Allocator* allocator = nullptr;
  const MemoryInfo* memory = nullptr;
  int number = 0;
  Must(api.allocator(info, kDefault, &allocator));
  Status* status = api.info(allocator, &memory);
  if (!status) status = api.number(memory, &number);
  api.release(allocator);
  Must(status);
  return number;
}

// Whether a tensor's memory is a GPU's, of an operator there. It has the first of its weights on the host, as it asks for:
// ONNX Runtime counts all of these as one input there, and has the others where the operator runs.
inline bool OnGpu(const Api& api, const Value* value) {
  const MemoryInfo* memory = nullptr;
  const char* name = nullptr;
  MemoryType kind = kDefault;
  Must(api.info(value, &memory));
  Must(api.name(memory, &name));
  Must(api.kind(memory, &kind));
  return std::strcmp(name, "Cpu") != 0 && kind == kDefault;  // else it is pinned memory
}

}  // namespace ort

#endif  // ECORNN_ORT_NODE_H_
