// ONNX Runtime's way to modules: a library of operators, CpuRecurrent and CudaRecurrent of the domain ecornn. A node's
// attributes are `module`, the name of a module file beside this library, and `digest`, the one at the file's end.
// Inputs: X (T, B, I), sequence_lens (B,), initial_h and initial_c (D, B, H), then the weights in the order that the
// module has them, in PyTorch's layout. Outputs: y (T, B, D, H), or (T, 1, B, H) of one direction, which is the same in
// memory, and the last states (D, B, H).
#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cores.h"
#include "kernel.h"
#include "ort_api.h"
#include "status.h"

namespace ort {
namespace {

constexpr const char* kThreads = "ecornn.threads";  // an entry of a session's options
constexpr int kMostThreads = 1024;
constexpr size_t kMostWeights = 10;  // two directions of an LSTM with peepholes

struct Node {
  Api api;
  std::string title;  // before its errors
  std::unique_ptr<const Kernel> kernel;
};

// An operator for tensors of one type.
class Operator : public CustomOp {
 public:
  Operator(const Api& api, bool cuda, Type type, int threads) : api_(api), cuda_(cuda), type_(type), threads_(threads) {
    name = [](const CustomOp* op) { return Of(op).cuda_ ? "CudaRecurrent" : "CpuRecurrent"; };
    provider = [](const CustomOp* op) { return Of(op).cuda_ ? "CUDAExecutionProvider" : "CPUExecutionProvider"; };
    input_count = [](const CustomOp*) -> size_t { return kWeights + kMostWeights; };
    input_type = [](const CustomOp* op, size_t n) {
      return n == kLengths ? kInt32 : n >= kWeights && Of(op).type_ != kDouble ? kFloat : Of(op).type_;
    };
    input_presence = [](const CustomOp*, size_t n) { return n == kX ? kRequired : kOptional; };
    input_memory = [](const CustomOp* op, size_t n) { return Of(op).cuda_ && n >= kWeights ? kCpuInput : kDefault; };
    output_count = [](const CustomOp*) -> size_t { return 3; };
    output_type = [](const CustomOp* op, size_t) { return Of(op).type_; };
    output_presence = [](const CustomOp*, size_t n) { return n < 2 ? kRequired : kOptional; };  // GRU and RNN have no c
    create_with_status = [](const CustomOp* op, const void* const*, const KernelInfo* info, void** made) {
      return Of(op).Create(info, made);
    };
    compute_with_status = [](void* at, KernelContext* context) {
      const Node& node = *static_cast<const Node*>(at);
      return Guarded(node.api, node.title, [&] { node.kernel->Compute(context); });
    };
    destroy = [](void* at) { delete static_cast<Node*>(at); };
  }

 private:
  static const Operator& Of(const CustomOp* op) { return *static_cast<const Operator*>(op); }

  Status* Create(const KernelInfo* info, void** made) const {
    return Guarded(api_, "ecornn", [&] {
      auto node = std::make_unique<Node>(Node{api_, "ecornn's node " + NameOf(api_, info), nullptr});
      Must(Guarded(api_, node->title,
                   [&] { node->kernel = std::make_unique<Kernel>(api_, info, cuda_, threads_); }));
      *made = node.release();
    });
  }

  const Api api_;
  const bool cuda_;
  const Type type_;
  const int threads_;
};

// The operators of all sessions whose calls take as many threads, which live as long as the process.
struct Operators {
  Operators(const Api& api, int threads) {
    Must(api.make_domain("ecornn", &domain));
    for (const bool cuda : {false, true}) {
      for (const Type type : {kFloat, kDouble, kFloat16, kBfloat16}) {
        made.push_back(std::make_unique<Operator>(api, cuda, type, threads));
        Must(api.add(domain, made.back().get()));
      }
    }
  }

  Domain* domain = nullptr;
  std::vector<std::unique_ptr<const Operator>> made;
};

int ThreadsOf(const Api& api, const SessionOptions* options) {
  int given = 0;
  Must(api.has_entry(options, kThreads, &given));
  if (!given) return std::min(Cores(), kMostThreads);
  size_t size = 0;
  Must(api.entry(options, kThreads, nullptr, &size));
  std::string text(size, '\0');
  Must(api.entry(options, kThreads, text.data(), &size));
  text = text.c_str();
  char* end = nullptr;
  const long count = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || count < 1 || count > kMostThreads) {
    throw Refused(std::string(kThreads) + " is '" + text + "'; expected an integer from 1 to 1024");
  }
  return static_cast<int>(count);
}

void Register(const Api& api, SessionOptions* options) {
  static std::mutex mutex;
  static auto* const known = new std::map<int, std::unique_ptr<Operators>>;
  const int threads = ThreadsOf(api, options);
  const std::lock_guard<std::mutex> lock(mutex);
  auto& operators = (*known)[threads];
  if (!operators) operators = std::make_unique<Operators>(api, threads);
  Must(api.add(options, operators->domain));
}

}  // namespace
}  // namespace ort

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
  if (const void* const* table = base->get(ort::kVersion)) {
    const ort::Api api(table);
    return ort::Guarded(api, "ecornn", [&] { ort::Register(api, options); });
  }
  const ort::Api oldest(base->get(1));
  const std::string said = std::string("ecornn's operators need ONNX Runtime ") + ort::kFirst + " or newer; this is ";
  return oldest.make_status(ort::kFail, (said + base->release()).c_str());
}
