// Tensors of ONNX Runtime as modules take them.
#ifndef ECORNN_ORT_TENSORS_H_
#define ECORNN_ORT_TENSORS_H_

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ecornn.h"
#include "ort_api.h"
#include "status.h"

namespace ort {

struct Array {
  Type type;
  std::vector<int64_t> shape;
  void* data;

  static Array Of(const Api& api, const Value* value) {
    Array array{};
    TensorInfo* info = nullptr;
    Must(api.info(value, &info));
    size_t axes = 0;
    Status* status = api.type(info, &array.type);
    if (!status) status = api.axes(info, &axes);
    array.shape.resize(axes);
    if (!status) status = api.shape(info, array.shape.data(), axes);
    api.release(info);
    Must(status);
    Must(api.data(const_cast<Value*>(value), &array.data));
    return array;
  }

  DLDataType dl_type() const {
    switch (type) {
      case kFloat: return {kDLFloat, 32, 1};
      case kDouble: return {kDLFloat, 64, 1};
      case kFloat16: return {kDLFloat, 16, 1};
      case kBfloat16: return {kDLBfloat, 16, 1};
      case kInt32: return {kDLInt, 32, 1};
    }
    throw Refused("a tensor of ONNX's type " + std::to_string(type));
  }
  size_t bytes() const {
    size_t count = dl_type().bits / 8;
    for (const int64_t size : shape) count *= static_cast<size_t>(size);
    return count;
  }
};

// Rows of a batch, which are the second axis of X, y and states, and the only one of lengths.
struct Rows {
  int64_t all, first, count;
};

// What a call of a module reads and writes, where the module runs.
class Tensors {
 public:
  Tensors(DLDevice device, Rows rows) : device_(device), rows_(rows) {}

  DLTensor* Read(const Array& array) {
    if (InPlace(array)) return Keep(array);
    Copied copy = Part(array);
    copy.ToPart();
    return Keep(std::move(copy.part));
  }
  DLTensor* Write(const Array& array) {
    if (InPlace(array)) return Keep(array);
    back_.push_back(Part(array));
    return Keep(back_.back().part);
  }
  // On a CPU.
  DLTensor* Zeros(Type type, std::vector<int64_t> shape) {
    Array array{type, std::move(shape), nullptr};
    array.data = Room(array.bytes());
    return Keep(std::move(array));
  }
  // After the call.
  void Finish() const {
    for (const Copied& copy : back_) copy.ToWhole();
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };

  // Rows of an array, and a copy of them by themselves: `outer` pieces of `bytes`, in the whole `stride` apart.
  struct Copied {
    Array part;
    char* whole;
    size_t outer, stride, bytes;

    void ToPart() const {
      for (size_t n = 0; n < outer; ++n) std::memcpy(At(n), whole + n * stride, bytes);
    }
    void ToWhole() const {
      for (size_t n = 0; n < outer; ++n) std::memcpy(whole + n * stride, At(n), bytes);
    }
    char* At(size_t n) const { return static_cast<char*>(part.data) + n * bytes; }
  };

  // Modules want 16 bytes; arrays of a caller's on the host may begin anywhere.
  bool InPlace(const Array& array) const {
    const bool all = rows_.count == rows_.all;
    if (device_.device_type != kDLCPU) {
      if (!all) throw Refused("on a GPU a call must have no more rows than its module was compiled for");
      return true;
    }
    return all && reinterpret_cast<uintptr_t>(array.data) % 16 == 0;
  }
  Copied Part(const Array& array) {
    const size_t axis = array.shape.size() > 1;
    if (array.shape.empty() || array.shape[axis] != rows_.all) {
      throw Refused("an input has other rows than X, which has " + std::to_string(rows_.all));
    }
    Copied copy{array, nullptr, 1, array.bytes(), 0};
    if (axis) copy.outer = static_cast<size_t>(array.shape[0]);
    copy.stride = copy.outer ? array.bytes() / copy.outer : 0;
    const size_t row = copy.stride / static_cast<size_t>(rows_.all);
    copy.bytes = row * static_cast<size_t>(rows_.count);
    copy.whole = static_cast<char*>(array.data) + row * static_cast<size_t>(rows_.first);
    copy.part.shape[axis] = rows_.count;
    copy.part.data = Room(copy.part.bytes());
    return copy;
  }
  void* Room(size_t bytes) {
    made_.push_back(std::make_unique<Line[]>(bytes / sizeof(Line) + 1));
    return made_.back().get();
  }
  DLTensor* Keep(Array array) {
    arrays_.push_back(std::move(array));
    Array& kept = arrays_.back();
    tensors_.push_back({kept.data, device_, static_cast<int32_t>(kept.shape.size()), kept.dl_type(), kept.shape.data(),
                        nullptr, 0});
    return &tensors_.back();
  }

  const DLDevice device_;
  const Rows rows_;
  std::deque<Array> arrays_;
  std::deque<DLTensor> tensors_;
  std::vector<std::unique_ptr<Line[]>> made_;
  std::vector<Copied> back_;
};

}  // namespace ort

#endif  // ECORNN_ORT_TENSORS_H_
