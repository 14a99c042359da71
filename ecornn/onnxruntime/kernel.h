// A node of a session: a module, and the layer of it that has the node's weights.
#ifndef ECORNN_ORT_KERNEL_H_
#define ECORNN_ORT_KERNEL_H_

#include <optional>
#include <string>
#include <vector>

#include "ecornn.hpp"
#include "node.h"
#include "ort_api.h"
#include "status.h"
#include "tensors.h"

namespace ort {

// Inputs; weights are the last ones. Outputs are y, then the last states.
enum Input : size_t { kX, kLengths, kStates, kWeights = 4 };

class Kernel {
 public:
  // Raises Refused, Raised or ecornn::Error. `threads`: of a CPU, for each call.
  Kernel(const Api& api, const KernelInfo* info, bool cuda, int threads)
      : api_(api), threads_(threads), module_(ModuleOf(api, info)), weights_(WeightsOf(api, info, kWeights)),
        device_(cuda ? DeviceOf(api, info) : 0) {
    const ecornn_description& d = module_.description();
    if ((d.device_type == kDLCUDA) != cuda) throw Refused(cuda ? "its module is for CPUs" : "its module is for GPUs");
    if (weights_ != static_cast<size_t>(d.parameter_count)) {
      throw Refused("it has " + std::to_string(weights_) + " weights; its module has " +
                    std::to_string(d.parameter_count));
    }
    std::vector<const Value*> values(weights_);
    for (size_t n = 0; n < weights_; ++n) {
      int constant = 0;
      Must(api.constant(info, kWeights + n, &constant, &values[n]));
      if (constant) continue;
      if (cuda) throw Refused("on a GPU its weights must be constants");
      return;  // they come with each call
    }
    layer_.emplace(Bind(values));
  }

  // Several threads may do so at a time.
  void Compute(KernelContext* context) const {
    const ecornn_description& d = module_.description();
    const std::optional<Array> x = Find(context, kX);
    if (!x || x->shape.size() != 3) throw Refused("X must have three axes");
    const int64_t rows = x->shape[1], directions = d.directions;
    if (rows > d.batch) {
      throw Refused("X has " + std::to_string(rows) + " rows; its module was compiled for " + std::to_string(d.batch) +
                    ": rewrite the model with --batch");
    }
    const std::vector<int64_t> state{directions, rows, d.hidden};
    Tensors tensors({d.device_type, device_});
    std::vector<const DLTensor*> before;
    std::vector<DLTensor*> after;
    for (size_t n = 0; n < static_cast<size_t>(d.state_count); ++n) {
      after.push_back(Own(tensors.Write(Make(context, 1 + n, state)), directions));
      if (const std::optional<Array> given = Find(context, kStates + n)) {
        before.resize(n + 1);
        before[n] = Own(tensors.Read(*given), directions);
      }
    }
    if (!before.empty()) {
      before.resize(after.size());
      for (const DLTensor*& one : before) {
        if (one) continue;
        if (d.device_type == kDLCUDA) throw Refused("on a GPU it must have both initial_h and initial_c, or none");
        one = Own(tensors.Zeros(x->type, state), directions);
      }
    }
    ecornn_call call{};
    call.size = sizeof call;
    call.x = tensors.Read(*x);
    call.y = tensors.Write(Make(context, 0, {x->shape[0], rows, directions * d.hidden}));
    call.state_in = before.empty() ? nullptr : before.data();
    call.state_out = after.data();
    if (const std::optional<Array> lengths = Find(context, kLengths)) call.lengths = tensors.Read(*lengths);
    if (d.device_type == kDLCUDA) Must(api_.stream(context, &call.stream));
    if (layer_) {
      Run(*layer_, call);
    } else {
      std::vector<const Value*> values(weights_);
      for (size_t n = 0; n < weights_; ++n) Must(api_.input(context, kWeights + n, &values[n]));
      Run(Bind(values), call);
    }
    tensors.Finish();
  }

 private:
  static void Run(const ecornn::Layer& layer, const ecornn_call& call) {
    ecornn_error error{};
    ecornn::detail::Throw(ecornn_run(layer.get(), &call, &error), error);
  }

  // A state (D, B, H), which modules of one direction have as (B, H).
  static DLTensor* Own(DLTensor* state, int64_t directions) {
    if (directions == 1 && state->ndim == 3 && state->shape[0] == 1) {
      ++state->shape;
      --state->ndim;
    }
    return state;
  }

  ecornn::Layer Bind(const std::vector<const Value*>& values) const {
    const ecornn_description& d = module_.description();
    ecornn::Named named;
    for (size_t n = 0; n < values.size(); ++n) {
      const Array array = Array::Of(api_, values[n]);
      const std::vector<int64_t>& shape = array.shape;
      if (shape.empty() || shape.size() > 2) throw Refused("a weight must have one axis or two");
      const ecornn::Tensor tensor = shape.size() == 1
                                        ? ecornn::Tensor(array.data, {shape[0]}, array.dl_type())
                                        : ecornn::Tensor(array.data, {shape[0], shape[1]}, array.dl_type());
      named.emplace_back(d.parameters[n].name, tensor);
    }
    return module_.bind(named, threads_, device_);
  }

  std::optional<Array> Find(const KernelContext* context, size_t number) const {
    const Value* value = nullptr;
    Must(api_.input(context, number, &value));
    if (!value) return std::nullopt;
    return Array::Of(api_, value);
  }

  Array Make(KernelContext* context, size_t number, const std::vector<int64_t>& shape) const {
    Value* value = nullptr;
    Must(api_.output(context, number, shape.data(), shape.size(), &value));
    if (!value) throw Refused("its output " + std::to_string(number) + " must have a name");
    return Array::Of(api_, value);
  }

  const Api api_;
  const int threads_;
  const ecornn::Module module_;
  const size_t weights_;  // their number
  const int device_;
  std::optional<ecornn::Layer> layer_;  // where weights are constants
};

}  // namespace ort

#endif  // ECORNN_ORT_KERNEL_H_
