// What a kernel is told of its node: the module's file, the number of weights, the GPU.
#ifndef ECORNN_ORT_NODE_H_
#define ECORNN_ORT_NODE_H_

#include <dlfcn.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <tuple>

#include "ecornn.hpp"
#include "ort_api.h"
#include "shared.h"
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

// The node's module, which is opened once as long as its file stays what it is.
inline std::shared_ptr<const ecornn::Module> ModuleOf(const Api& api, const KernelInfo* info) {
  const std::string name = Attribute(api, info, "module"), path = Folder() + "/" + name;
  if (name.empty() || name.find('/') != std::string::npos) {
    throw Refused("its attribute module must be the name of a file beside the library");
  }
  struct stat file{};
  if (stat(path.c_str(), &file) != 0) {
    throw Refused("its module " + path + " is missing: it belongs beside the library", kNoSuchFile);
  }
  using Key = std::tuple<std::string, dev_t, ino_t, off_t, time_t, int64_t>;
  static auto* const modules = new Shared<Key, ecornn::Module>;
  const Key key{path, file.st_dev, file.st_ino, file.st_size, file.st_mtim.tv_sec, file.st_mtim.tv_nsec};
  auto module = modules->Of(key, [&] { return new ecornn::Module(path); });  // which refuses a damaged one
  if (DigestOf(path) != Attribute(api, info, "digest")) {
    throw Refused(path + " is another module than the one that the model was rewritten for", kFail);
  }
  return module;
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

}  // namespace ort

#endif  // ECORNN_ORT_NODE_H_
