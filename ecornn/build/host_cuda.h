// What a CUDA module does, as host_cuda.py wrote it behind the library's sections: kernels, the shapes of launches, and the
// calls of each entry. It is read once, when the library is loaded.
#pragma once
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <vector>

#include "ecornn_blob.h"
#include "number_tables.h"

namespace ecornn {

using Pointer = uint64_t;  // CUdeviceptr
using Stream = struct StreamHandle*;

enum : int {
  kLaunchCooperative = 2,  // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
  kLaunchCluster = 4,      // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
  kLaunchEarly = 6,        // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
};

// CUlaunchAttribute: an id, padding to 8 bytes, and a union of 64 bytes.
struct LaunchAttribute {
  int id;
  int padding;
  unsigned value[16];
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute");

struct Kernel {
  const char* name;
  const char* symbol;
  int64_t image;    // number of the cubin that has it
  int64_t shared;   // the most dynamic shared memory of any of its launches, bytes
  int64_t cluster;  // the largest cluster, blocks
};

struct Shape {
  unsigned grid, threads, shared;
  unsigned attribute_count;
  LaunchAttribute attributes[3];

  void Add(int id, unsigned value) {
    attributes[attribute_count++] = {id, 0, {value, id == kLaunchCluster, id == kLaunchCluster}};
  }
};

// The calls of an entry: words as host_cuda.py lists them.
struct EntryCalls {
  int64_t pointers = -1;  // that it takes; -1: the module has no such entry
  int64_t existing = -1;  // the pointer that says whether gradients are added to; -1: it takes none
  const int64_t *begin = nullptr, *end = nullptr;
};

class HostProgram : NumberTables {
 public:
  HostProgram() : NumberTables(nullptr) {}

  // What is wrong with the file, or null.
  const char* Read() {
    Dl_info library;
    static const char anchor = 0;
    if (!dladdr(&anchor, &library) || !library.dli_fname) return "it is not known where the module's file is";
    FILE* file = fopen(library.dli_fname, "rb");
    if (!file) return "the module's file cannot be read";
    struct stat status {};
    const bool known = fstat(fileno(file), &status) == 0;
    void* mapped = known ? mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, fileno(file), 0)
                         : MAP_FAILED;
    fclose(file);
    if (mapped == MAP_FAILED) return "the module's file cannot be read";
    constexpr int64_t kChecksum = 48;  // bytes behind what we read, see checksum.py
    const auto* begin = static_cast<const unsigned char*>(mapped);
    const int64_t end = status.st_size - kChecksum;
    int64_t parts[2];  // how long all of it is, and a mark
    if (end < static_cast<int64_t>(sizeof parts)) return "the module's file is incomplete";
    memcpy(parts, begin + end - sizeof parts, sizeof parts);
    if (parts[1] != kMark || parts[0] > end) return "the module's file is incomplete";
    at_ = begin + end - parts[0];
    ReadBlobs(at_);
    return nullptr;
  }

  const char* arch = "";
  std::vector<const unsigned char*> images;
  std::vector<Kernel> kernels;
  std::vector<Shape> shapes;
  std::vector<const char*> names;  // of buffers, for messages
  EntryCalls entries[3];           // run, forward, backward
  int64_t pack = -1;               // the kernel that packs weights
  int64_t most = 0;                // pointers that an entry takes

 private:
  static constexpr int64_t kMark = 0x6e72726f63652e31;  // "1.ecornn"

  // Places and sizes of the manifest, the C interface's tables, the program and the cubins.
  void ReadBlobs(const unsigned char* begin) {
    std::vector<ecornn_blob> blobs(static_cast<size_t>(Number()));
    for (ecornn_blob& blob : blobs) {
      blob.data = begin + Number();
      blob.size = static_cast<uint64_t>(Number());
    }
    ecornn_manifest = blobs[0], ecornn_c_tables = blobs[1];
    for (size_t n = 3; n < blobs.size(); ++n) images.push_back(blobs[n].data);
    at_ = blobs[2].data;
    arch = String();
    for (int64_t n = Number(); n > 0; --n) {
      Kernel kernel{String(), String(), 0, 0, 0};
      for (int64_t* field : {&kernel.image, &kernel.shared, &kernel.cluster}) *field = Number();
      kernels.push_back(kernel);
    }
    pack = Number();
    for (int64_t n = Number(); n > 0; --n) {
      Shape shape{};
      for (unsigned* field : {&shape.grid, &shape.threads, &shape.shared}) *field = static_cast<unsigned>(Number());
      if (Number()) shape.Add(kLaunchCooperative, 1);
      if (const int64_t cluster = Number(); cluster > 1) shape.Add(kLaunchCluster, static_cast<unsigned>(cluster));
      if (Number()) shape.Add(kLaunchEarly, 1);
      shapes.push_back(shape);
    }
    for (int64_t n = Number(); n > 0; --n) names.push_back(String());
    for (EntryCalls& entry : entries) {
      entry.pointers = Number();
      entry.existing = Number();
      const int64_t words = Number();
      entry.begin = reinterpret_cast<const int64_t*>(at_);
      entry.end = entry.begin + words;
      at_ += words * 8;
      if (entry.pointers > most) most = entry.pointers;
    }
  }
};

#define ECORNN_TRY(expression)   \
  do {                           \
    if ((expression)) return -1; \
  } while (0)

}  // namespace ecornn
