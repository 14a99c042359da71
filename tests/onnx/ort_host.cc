// Stands in for ONNX Runtime: calls a node of an operator library from threads that share it.
//   ort_host LIBRARY OPERATOR MODULE DIGEST FOLDER THREADS NAME:SHAPE ...
// Inputs are files of the folder, float32 but for `lens`, such as x:7,3,5, or - for none; outputs come into out0, ...
// There are two nodes of the same weights. It has GPU 1, stream 7, and with ORT_HOST_VERSION no newer version of the
// interface than that.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ort_api.h"

namespace ort {

struct Status { std::string message; };
struct Domain { std::vector<const CustomOp*> operators; };
struct SessionOptions { std::map<std::string, std::string> entries; std::vector<Domain*> domains; };
struct TensorInfo { Type type; std::vector<int64_t> shape; };
struct MemoryInfo {};
struct Value { TensorInfo info; std::unique_ptr<float[]> memory; };  // int32 has the same size
struct Allocator {};
struct KernelInfo { std::map<std::string, std::string> texts; std::vector<const Value*> inputs; };
struct KernelContext { std::vector<const Value*> inputs; std::vector<std::unique_ptr<Value>> outputs; };

namespace {

MemoryInfo of_the_provider;

size_t Count(const std::vector<int64_t>& shape) {
  size_t count = 1;
  for (const int64_t size : shape) count *= static_cast<size_t>(size);
  return count;
}

std::unique_ptr<Value> Make(Type type, std::vector<int64_t> shape) {
  const size_t count = Count(shape);
  return std::make_unique<Value>(Value{{type, std::move(shape)}, std::make_unique<float[]>(count)});
}

Status* Text(const std::string& text, char* to, size_t* size) {
  if (to) std::memcpy(to, text.c_str(), text.size() + 1);
  *size = text.size() + 1;
  return nullptr;
}

void Missing() {
  std::fprintf(stderr, "a function that the library has no business with\n");
  std::abort();
}

template <typename Function>
void Put(std::vector<const void*>* table, size_t place, Function function) {
  (*table)[place] = reinterpret_cast<const void*>(+function);
}

std::vector<const void*> Table() {
  std::vector<const void*> t(300, reinterpret_cast<const void*>(&Missing));
  Put(&t, 0, [](int, const char* message) { return new Status{message}; });
  Put(&t, 26, [](const char*, Domain** made) -> Status* { *made = new Domain; return nullptr; });
  Put(&t, 27, [](Domain* domain, const CustomOp* op) -> Status* { domain->operators.push_back(op); return nullptr; });
  Put(&t, 28, [](SessionOptions* to, Domain* domain) -> Status* { to->domains.push_back(domain); return nullptr; });
  Put(&t, 51, [](Value* value, void** data) -> Status* { *data = value->memory.get(); return nullptr; });
  Put(&t, 60, [](const TensorInfo* info, Type* type) -> Status* { *type = info->type; return nullptr; });
  Put(&t, 61, [](const TensorInfo* info, size_t* axes) -> Status* { *axes = info->shape.size(); return nullptr; });
  Put(&t, 62, [](const TensorInfo* info, int64_t* to, size_t count) -> Status* {
    std::copy(info->shape.begin(), info->shape.begin() + static_cast<ptrdiff_t>(count), to);
    return nullptr;
  });
  Put(&t, 65, [](const Value* value, TensorInfo** made) -> Status* {
    *made = new TensorInfo(value->info);
    return nullptr;
  });
  Put(&t, 99, [](TensorInfo* info) { delete info; });
  Put(&t, 72, [](const MemoryInfo*, int* number) -> Status* { *number = 1; return nullptr; });
  Put(&t, 77, [](const Allocator*, const MemoryInfo** found) -> Status* { *found = &of_the_provider; return nullptr; });
  Put(&t, 132, [](Allocator* allocator) { delete allocator; });
  Put(&t, 87, [](const KernelInfo* info, const char* name, char* to, size_t* size) -> Status* {
    return Text(info->texts.at(name), to, size);
  });
  Put(&t, 230, [](const KernelInfo* info, size_t* count) -> Status* { *count = info->inputs.size(); return nullptr; });
  Put(&t, 244, [](const KernelInfo*, char* to, size_t* size) { return Text("of the test", to, size); });
  Put(&t, 249, [](const KernelInfo* info, size_t n, int* is, const Value** value) -> Status* {
    *is = 1;
    *value = info->inputs[n];
    return nullptr;
  });
  Put(&t, 278, [](const KernelInfo*, int, Allocator** made) -> Status* { *made = new Allocator; return nullptr; });
  Put(&t, 90, [](const KernelContext* context, size_t n, const Value** found) -> Status* {
    *found = context->inputs[n];
    return nullptr;
  });
  Put(&t, 91, [](KernelContext* context, size_t n, const int64_t* shape, size_t axes, Value** made) -> Status* {
    if (context->outputs.size() <= n) context->outputs.resize(n + 1);
    context->outputs[n] = Make(kFloat, {shape, shape + axes});
    *made = context->outputs[n].get();
    return nullptr;
  });
  Put(&t, 193, [](const KernelContext*, void** stream) -> Status* {
    *stream = reinterpret_cast<void*>(7);
    return nullptr;
  });
  Put(&t, 237, [](const SessionOptions* options, const char* key, int* has) -> Status* {
    *has = options->entries.count(key) > 0;
    return nullptr;
  });
  Put(&t, 238, [](const SessionOptions* options, const char* key, char* to, size_t* size) -> Status* {
    return Text(options->entries.at(key), to, size);
  });
  return t;
}

const void* const* Get(uint32_t version) {
  static const std::vector<const void*> table = Table();
  const char* newest = std::getenv("ORT_HOST_VERSION");
  return !newest || version <= static_cast<uint32_t>(std::atoi(newest)) ? table.data() : nullptr;
}

void Must(Status* status) {
  if (!status) return;
  std::printf("%s\n", status->message.c_str());
  std::exit(3);
}

std::unique_ptr<Value> Read(const std::string& folder, const std::string& text) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return nullptr;
  const std::string name = text.substr(0, colon);
  std::vector<int64_t> shape;
  std::stringstream sizes(text.substr(colon + 1));
  for (std::string size; std::getline(sizes, size, ',');) shape.push_back(std::atoll(size.c_str()));
  auto value = Make(name == "lens" ? kInt32 : kFloat, shape);
  std::ifstream file(folder + "/" + name, std::ios::binary);
  file.read(reinterpret_cast<char*>(value->memory.get()), static_cast<std::streamsize>(4 * Count(shape)));
  return value;
}

int Main(char** arguments) {
  const std::string folder = arguments[5];
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  const auto add = reinterpret_cast<Status* (*)(SessionOptions*, const ApiBase*)>(dlsym(library, "RegisterCustomOps"));
  const ApiBase base{Get, [] { return "1.17.3"; }};
  SessionOptions options;
  options.entries["ecornn.threads"] = "2";
  for (int session = 0; session < 2; ++session) Must(add(&options, &base));  // the second gets what the first has made
  if (options.domains[0] != options.domains[1]) return 4;
  const CustomOp* found = nullptr;
  for (const CustomOp* op : options.domains[0]->operators) {
    if (!std::strcmp(op->name(op), arguments[2]) && op->input_type(op, 0) == kFloat) found = op;
  }
  if (!found) return 5;
  const bool gpu = !std::strcmp(arguments[2], "CudaRecurrent");
  std::vector<std::unique_ptr<Value>> values;
  KernelInfo info{{{"module", arguments[3]}, {"digest", arguments[4]}}, {}};
  for (char** text = arguments + 7; *text; ++text) {
    values.push_back(Read(folder, *text));
    info.inputs.push_back(values.back().get());
    const size_t n = values.size() - 1;  // the library reads weights where it packs them, on the host
    if (n >= found->input_count(found) || (gpu && (found->input_memory(found, n) == kDefault) != (n < 4))) return 7;
  }
  void* kernels[2] = {};  // two nodes that have the same weights
  for (void*& kernel : kernels) Must(found->create_with_status(found, Get(kVersion), &info, &kernel));
  std::vector<KernelContext> contexts(static_cast<size_t>(std::atoi(arguments[6])));
  std::vector<std::thread> threads;
  for (KernelContext& context : contexts) {
    context.inputs = info.inputs;
    threads.emplace_back([&context, found, &kernels] {
      for (int call = 0; call < 4; ++call) Must(found->compute_with_status(kernels[call % 2], &context));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (void* kernel : kernels) found->destroy(kernel);
  for (const KernelContext& context : contexts) {
    for (size_t n = 0; n < context.outputs.size(); ++n) {
      const Value &one = *context.outputs[n], &first = *contexts[0].outputs[n];
      const size_t bytes = 4 * Count(first.info.shape);
      if (std::memcmp(one.memory.get(), first.memory.get(), bytes)) return std::fprintf(stderr, "threads differ\n"), 6;
      std::ofstream(folder + "/out" + std::to_string(n), std::ios::binary)
          .write(reinterpret_cast<const char*>(first.memory.get()), static_cast<std::streamsize>(bytes));
    }
  }
  return 0;
}

}  // namespace
}  // namespace ort

int main(int, char** arguments) { return ort::Main(arguments); }
