// What the operators use of ONNX Runtime's C interface, so that they compile without its headers: its Python packages
// have none. The interface is a table of functions that only grows at its end, and never changes what is there, so that
// a function is known by its place. Those below are there since version 18, of ONNX Runtime 1.18.
#ifndef ECORNN_ORT_API_H_
#define ECORNN_ORT_API_H_

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kVersion = 18;
constexpr const char* kFirst = "1.18";  // ONNX Runtime that has it

struct Allocator;
struct Domain;
struct KernelContext;
struct KernelInfo;
struct MemoryInfo;
struct SessionOptions;
struct Status;  // NULL: all is well
struct TensorInfo;
struct Value;

enum Code : int { kFail = 1, kInvalidArgument = 2, kNoSuchFile = 3 };
enum Type : int { kFloat = 1, kInt32 = 6, kFloat16 = 10, kDouble = 11, kBfloat16 = 16 };  // ONNX's numbers
enum Presence : int { kRequired, kOptional };
enum MemoryType : int { kCpuInput = -2, kCpuOutput, kDefault };  // on the host for a GPU's operator, where the operator runs

// An operator, as ONNX Runtime reads one that says it is of version 16. The functions get the struct itself back.
struct CustomOp {
  uint32_t version = 16;
  void* (*create)(const CustomOp*, const void* const* api, const KernelInfo*) = nullptr;  // create_with_status instead
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*provider)(const CustomOp*) = nullptr;
  Type (*input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*input_count)(const CustomOp*) = nullptr;
  Type (*output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*output_count)(const CustomOp*) = nullptr;
  void (*compute)(void*, KernelContext*) = nullptr;  // compute_with_status instead
  void (*destroy)(void*) = nullptr;
  Presence (*input_presence)(const CustomOp*, size_t) = nullptr;
  Presence (*output_presence)(const CustomOp*, size_t) = nullptr;
  MemoryType (*input_memory)(const CustomOp*, size_t) = nullptr;
  int (*least_variadic_inputs)(const CustomOp*) = nullptr;
  int (*variadic_inputs_alike)(const CustomOp*) = nullptr;
  int (*least_variadic_outputs)(const CustomOp*) = nullptr;
  int (*variadic_outputs_alike)(const CustomOp*) = nullptr;
  Status* (*create_with_status)(const CustomOp*, const void* const* api, const KernelInfo*, void** kernel) = nullptr;
  Status* (*compute_with_status)(void*, KernelContext*) = nullptr;
};

struct ApiBase {
  const void* const* (*get)(uint32_t version);  // NULL where it has no such version
  const char* (*release)();
};

class Api {
 public:
  explicit Api(const void* const* table) : table_(table) {}

  Status* make_status(Code code, const char* message) const { return At<0, Status*>(static_cast<int>(code), message); }
  Status* make_domain(const char* name, Domain** made) const { return At<26, Status*>(name, made); }
  Status* add(Domain* domain, const CustomOp* op) const { return At<27, Status*>(domain, op); }
  Status* add(SessionOptions* options, Domain* domain) const { return At<28, Status*>(options, domain); }

  Status* data(Value* value, void** at) const { return At<51, Status*>(value, at); }
  Status* type(const TensorInfo* info, Type* found) const { return At<60, Status*>(info, found); }
  Status* axes(const TensorInfo* info, size_t* count) const { return At<61, Status*>(info, count); }
  Status* shape(const TensorInfo* info, int64_t* to, size_t count) const { return At<62, Status*>(info, to, count); }
  Status* info(const Value* value, TensorInfo** made) const { return At<65, Status*>(value, made); }
  void release(TensorInfo* info) const { At<99, void>(info); }

  Status* number(const MemoryInfo* info, int* device) const { return At<72, Status*>(info, device); }
  Status* info(const Allocator* of, const MemoryInfo** found) const { return At<77, Status*>(of, found); }
  void release(Allocator* allocator) const { At<132, void>(allocator); }

  // of a text or a name: to NULL the size alone, with the 0 at its end
  Status* attribute(const KernelInfo* info, const char* name, char* to, size_t* size) const {
    return At<87, Status*>(info, name, to, size);
  }
  Status* input_count(const KernelInfo* info, size_t* count) const { return At<230, Status*>(info, count); }
  Status* name(const KernelInfo* info, char* to, size_t* size) const { return At<244, Status*>(info, to, size); }
  Status* constant(const KernelInfo* info, size_t input, int* is, const Value** value) const {
    return At<249, Status*>(info, input, is, value);
  }
  Status* allocator(const KernelInfo* info, MemoryType type, Allocator** made) const {
    return At<278, Status*>(info, static_cast<int>(type), made);
  }

  Status* input_count(const KernelContext* context, size_t* count) const { return At<88, Status*>(context, count); }
  Status* input(const KernelContext* context, size_t n, const Value** found) const {
    return At<90, Status*>(context, n, found);
  }
  Status* output(KernelContext* context, size_t n, const int64_t* shape, size_t axes, Value** made) const {
    return At<91, Status*>(context, n, shape, axes, made);
  }
  Status* stream(const KernelContext* context, void** found) const { return At<193, Status*>(context, found); }

  Status* has_entry(const SessionOptions* options, const char* key, int* has) const {
    return At<237, Status*>(options, key, has);
  }
  Status* entry(const SessionOptions* options, const char* key, char* to, size_t* size) const {
    return At<238, Status*>(options, key, to, size);
  }

 private:
  template <size_t place, typename Result, typename... Arguments>
  Result At(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(const_cast<void*>(table_[place]))(arguments...);
  }

  const void* const* table_;
};

}  // namespace ort

#endif  // ECORNN_ORT_API_H_
