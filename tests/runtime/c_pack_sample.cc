// What c_pack.h makes of weights, and c_device_pack.h for a kernel that packs them, for test_runtime_packing.py.
#include "c_device_pack.h"
#include "c_pack.h"

// Packing number `number` of the tables; the parameters' data of this DLPack type. Returns the bytes written to `out`.
extern "C" int64_t pack(const unsigned char* tables, void* const* data, int code, int bits, int number, char* out) {
  const ecornn_c::Tables read(tables, "");
  std::vector<DLTensor> tensors;
  std::vector<ecornn_c::Weight> weights;
  tensors.reserve(read.parameters.size());
  for (size_t n = 0; n < read.parameters.size(); ++n) {
    auto& p = const_cast<ecornn_parameter&>(read.parameters[n]);
    tensors.push_back({data[n], {kDLCPU, 0}, p.ndim, {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1}, p.shape, nullptr, 0});
    weights.push_back({&tensors.back(), read.gates[n]});
  }
  const std::vector<char> made = ecornn_c::Packer(read.packings[static_cast<size_t>(number)], weights).Pack();
  std::copy(made.begin(), made.end(), out);
  return static_cast<int64_t>(made.size());
}

// Of each launch that packs all buffers, packing n to to[n]: its tables, and the numbers of its parameters.
extern "C" void launches(const unsigned char* tables, const int64_t* to, int count, void (*take)(const void*, int64_t)) {
  const ecornn_c::Tables read(tables, "");
  const auto each = [&](const auto& table) { take(table.data(), static_cast<int64_t>(table.size() * sizeof(table[0]))); };
  for (const ecornn_c::PackLaunch& launch : ecornn_c::PackLaunches(read, {to, to + count})) {
    each(launch.works);
    each(launch.jobs);
    each(launch.sources);
    each(launch.places);
    each(launch.parameters);
  }
}

// The kernel's number of a weight's data type.
extern "C" int kernel_type(int code, int bits) {
  return ecornn_c::KernelType({static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1});
}
