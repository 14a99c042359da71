// What c_pack.h makes of weights, for test_c_pack.py.
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
