// Tensors that a caller gives, checked; and errors with messages.
#pragma once
#include <cinttypes>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "ecornn.h"

namespace ecornn_c {

// What went wrong, written at once to where the caller wants it.
class Failure {
 public:
  explicit Failure(ecornn_error* error) : error_(error) {}

  __attribute__((format(printf, 3, 4))) int32_t operator()(ecornn_status code, const char* format, ...) const {
    if (error_) {
      va_list rest;
      va_start(rest, format);
      error_->code = code;
      vsnprintf(error_->message, sizeof error_->message, format, rest);
      va_end(rest);
    }
    return code;
  }

 private:
  ecornn_error* const error_;
};

inline const char* NameOf(DLDataType type, char (&room)[32]) {
  static const char* const kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  snprintf(room, sizeof room, "%s%d", type.code < 7 ? kNames[type.code] : "type", type.bits);
  return room;
}

inline bool Same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

inline char* DataOf(const DLTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

inline const char* ShapeOf(const int64_t* shape, int32_t ndim, char (&room)[96]) {
  int at = snprintf(room, sizeof room, "(");
  for (int32_t i = 0; i < ndim && at < 70; ++i) {
    at += snprintf(room + at, sizeof room - static_cast<size_t>(at), i ? ", %" PRId64 : "%" PRId64, shape[i]);
  }
  snprintf(room + at, sizeof room - static_cast<size_t>(at), ")");
  return room;
}

inline bool Contiguous(const DLTensor& tensor) {
  if (!tensor.strides) return true;
  int64_t wanted = 1;
  for (int32_t axis = tensor.ndim - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != wanted) return false;
    wanted *= tensor.shape[axis];
  }
  return true;
}

// Where a tensor must be; a CUDA module also reads managed and pinned memory.
inline bool There(DLDevice device, DLDeviceType wanted, int32_t number) {
  if (wanted == kDLCPU) return device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
  return (device.device_type == kDLCUDA && device.device_id == number) || device.device_type == kDLCUDAManaged;
}

struct Wanted {
  const char* name;
  DLDataType type;
  int32_t ndim;
  int64_t shape[3];
  DLDeviceType device;
  int32_t number;
};

inline bool Fits(const DLTensor* tensor, const Wanted& wanted) {
  if (!tensor || tensor->ndim != wanted.ndim) return false;
  for (int32_t axis = 0; axis < wanted.ndim; ++axis) {
    if (tensor->shape[axis] != wanted.shape[axis]) return false;
  }
  return Same(tensor->dtype, wanted.type) && There(tensor->device, wanted.device, wanted.number) && Contiguous(*tensor) &&
         tensor->data && reinterpret_cast<uintptr_t>(DataOf(*tensor)) % 16 == 0;
}

// Of a tensor that does not fit; its name may have the number of a state. Apart from Fits: callers with deadlines are short
// of the time that its texts would take on the stack.
[[gnu::cold, gnu::noinline]] inline int32_t Refuse(const Failure& fail, const DLTensor* tensor, const Wanted& wanted,
                                                   int32_t number) {
  char name[48], shape[96], other[96], type[32], wanted_type[32];
  snprintf(name, sizeof name, number < 0 ? "%s" : "%s[%d]", wanted.name, number);
  if (!tensor) return fail(ECORNN_ARGUMENT, "%s is NULL", name);
  bool same = tensor->ndim == wanted.ndim;
  for (int32_t axis = 0; same && axis < wanted.ndim; ++axis) same = tensor->shape[axis] == wanted.shape[axis];
  if (!same) {
    return fail(ECORNN_SHAPE, "%s has shape %s; expected %s", name, ShapeOf(tensor->shape, tensor->ndim, shape),
                ShapeOf(wanted.shape, wanted.ndim, other));
  }
  if (!Same(tensor->dtype, wanted.type)) {
    return fail(ECORNN_DTYPE, "%s is of %s; expected %s", name, NameOf(tensor->dtype, type),
                NameOf(wanted.type, wanted_type));
  }
  if (!There(tensor->device, wanted.device, wanted.number)) {
    return fail(ECORNN_DEVICE, "%s is on DLPack's device (%d, %d); the layer runs on (%d, %d)", name,
                static_cast<int>(tensor->device.device_type), tensor->device.device_id,
                static_cast<int>(wanted.device), wanted.number);
  }
  if (!Contiguous(*tensor)) return fail(ECORNN_LAYOUT, "%s is not contiguous", name);
  if (!tensor->data) return fail(ECORNN_ARGUMENT, "%s has no memory", name);
  return fail(ECORNN_LAYOUT, "%s is not aligned to 16 bytes", name);
}

// 0 where the tensor is as it must be.
inline int32_t Check(const Failure& fail, const DLTensor* tensor, const Wanted& wanted, int32_t number = -1) {
  return Fits(tensor, wanted) ? ECORNN_OK : Refuse(fail, tensor, wanted, number);
}

}  // namespace ecornn_c
