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

// What a call reads and writes, where the module runs.
class Tensors {
 public:
  explicit Tensors(DLDevice device) : device_(device) {}

  DLTensor* Read(Array array) {
    if (Misplaced(array)) {
      void* made = Room(array.bytes());
      std::memcpy(made, array.data, array.bytes());
      array.data = made;
    }
    return Keep(std::move(array));
  }
  DLTensor* Write(Array array) {
    if (Misplaced(array)) {
      void* made = Room(array.bytes());
      back_.push_back({array.data, made, array.bytes()});
      array.data = made;
    }
    return Keep(std::move(array));
  }
  // On a CPU.
  DLTensor* Zeros(Type type, std::vector<int64_t> shape) {
    Array array{type, std::move(shape), nullptr};
    array.data = Room(array.bytes());
    return Keep(std::move(array));
  }
  // After the call.
  void Finish() const {
    for (const Copy& copy : back_) std::memcpy(copy.to, copy.from, copy.bytes);
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };

  // Modules want 16 bytes; arrays of a caller's on the host may begin anywhere.
  bool Misplaced(const Array& array) const {
    return device_.device_type == kDLCPU && reinterpret_cast<uintptr_t>(array.data) % 16 != 0;
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
  std::deque<Array> arrays_;
  std::deque<DLTensor> tensors_;
  std::vector<std::unique_ptr<Line[]>> made_;
  std::vector<Copy> back_;
};

}  // namespace ort

#endif  // ECORNN_ORT_TENSORS_H_
