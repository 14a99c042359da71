// A call of an entry: what the caller gave, checked and laid out as the entry's arguments. Nothing here allocates, but for
// a workspace where the layer has none that fits.
#pragma once
#include <alloca.h>

#include <utility>

#include "c_layer.h"

namespace ecornn_c {

constexpr DLDataType kInt32{kDLInt, 32, 1}, kUint8{kDLUInt, 8, 1}, kBool{kDLBool, 8, 1};

// The caller's struct as this module knows it, a copy in `room` or itself: what an older program does not have is 0, and
// what a newer one has must be.
template <typename Struct>
int32_t Known(const Failure& fail, const Struct* given, const char* name, Struct* room, const Struct** out) {
  if (!given) return fail(ECORNN_ARGUMENT, "%s is NULL", name);
  *out = given;
  if (given->size == sizeof(Struct)) return ECORNN_OK;
  if (given->size < sizeof(size_t) + sizeof(void*)) {
    return fail(ECORNN_VERSION, "%s->size is %zu; expected sizeof(%s)", name, given->size, name);
  }
  *room = {};
  memcpy(static_cast<void*>(room), given, std::min(given->size, sizeof(Struct)));
  *out = room;
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t n = sizeof(Struct); n < given->size; ++n) {
    if (bytes[n]) return fail(ECORNN_VERSION, "%s has a member that the module file is too old for", name);
  }
  return ECORNN_OK;
}

class Invocation {
 public:
  Invocation(const Layer& layer, Name entry, const ecornn_call& call, const ecornn_gradients* gradients,
             const Failure& fail)
      : layer_(layer), tables_(layer.tables), entry_(entry), call_(call), gradients_(gradients), fail_(fail) {}

  // Of states that are not wanted, before the entry's own workspace.
  static int64_t StateBytes(const Tables& tables, int64_t rows) {
    return tables.count() * rows * tables.description.hidden * tables.itemsize();
  }

  static int64_t ScratchBytes(const Tables& tables, Name entry, int64_t steps) {
    int64_t total = 0;
    for (const Pointer& p : tables.entries[entry]) {
      if (p.kind == kWorkspace) total += Aligned(p.fixed + p.per_step * steps);
    }
    return total;
  }

  static int64_t WorkspaceBytes(const Tables& tables, Name entry, int64_t steps, int64_t rows) {
    return ScratchBytes(tables, entry, steps) +
           static_cast<int64_t>(tables.states.size()) * Aligned(StateBytes(tables, rows));
  }

  // For all entries.
  static int32_t MakeWorkspace(const Failure& fail, const Layer& layer, int64_t steps, int64_t rows, void* stream,
                               Workspace** out) {
    int64_t most = 0;
    for (const Name entry : {kRun, kForward, kBackward}) {
      most = std::max(most, WorkspaceBytes(layer.tables, entry, steps, rows));
    }
    auto made = std::make_unique<Workspace>(layer.tables.cuda(), layer.device, steps, rows, stream);
    if (const int32_t code = made->Make(fail, most)) return code;
    *out = made.release();
    return ECORNN_OK;
  }

  static int64_t KeptBytes(const Tables& tables, const Kept& kept, int64_t steps, int64_t batch) {
    const int64_t most = tables.description.batch;
    return ((kept.fixed + kept.per_step * steps) * batch + most - 1) / most * kept.itemsize;
  }

  int32_t Run() {
    if (const int32_t code = CheckSizes()) return code;
    if (const int32_t code = CheckStates()) return code;
    if (const int32_t code = CheckMasks()) return code;
    if (const int32_t code = CheckKept()) return code;
    if (const int32_t code = CheckGradients()) return code;
    if (call_.workspace) {
      const int64_t wanted = WorkspaceBytes(tables_, entry_, active_, rows_);
      if (Address(call_.workspace) % kAlignment || static_cast<int64_t>(call_.workspace_size) < wanted) {
        return fail_(ECORNN_WORKSPACE, "workspace has %zu bytes at %p; expected %" PRId64 ", aligned to 256",
                     call_.workspace_size, call_.workspace, wanted);
      }
      return Enter(Address(call_.workspace));
    }
    void* stream = tables_.cuda() ? call_.stream : nullptr;
    Workspace* own = layer_.idle.Take(active_, rows_, stream);
    if (!own) {
      if (const int32_t code = MakeWorkspace(fail_, layer_, active_, rows_, stream, &own)) return code;
    }
    const int32_t code = Enter(own->at());
    if (code && tables_.cuda()) {
      delete own;  // work that was begun may go on in it, which freeing waits for
    } else {
      layer_.idle.Give(own);
    }
    return code;
  }

 private:
  Wanted Of(const char* name, int32_t ndim, int64_t a, int64_t b = 0, int64_t c = 0) const {
    const auto& d = tables_.description;
    return {name, d.dtype, ndim, {a, b, c}, d.device_type, layer_.device};
  }

  int32_t CheckSizes() {
    const auto& d = tables_.description;
    const DLTensor* x = call_.x;
    if (!x) return fail_(ECORNN_ARGUMENT, "x is NULL");
    if (x->ndim != 3 || x->shape[2] != d.input || x->shape[1] < 1 || x->shape[1] > d.batch || x->shape[0] < 1 ||
        x->shape[0] > d.longest) {
      char shape[96];
      return fail_(ECORNN_SHAPE, "x has shape %s; expected (T, B, %" PRId64 ") with T from 1 to %" PRId64
                   " and B from 1 to %" PRId64, ShapeOf(x->shape, x->ndim, shape), d.input, d.longest, d.batch);
    }
    steps_ = active_ = x->shape[0];
    batch_ = rows_ = x->shape[1];
    if (call_.threads < 0 || call_.threads > 1024) {
      return fail_(ECORNN_ARGUMENT, "threads is %d; expected 1 to 1024, or 0 for those of the layer", call_.threads);
    }
    if (const int32_t code = Check(fail_, x, Of("x", 3, steps_, batch_, d.input))) return code;
    return Check(fail_, call_.y, Of("y", 3, steps_, batch_, tables_.y_width));
  }

  // One for each state.
  template <typename Tensor>
  int32_t CheckEach(const char* name, Tensor* const* each) const {
    const bool flat = tables_.count() == 1;
    const Wanted wanted = flat ? Of(name, 2, rows_, tables_.description.hidden)
                               : Of(name, 3, tables_.count(), rows_, tables_.description.hidden);
    for (int32_t n = 0; each && n < tables_.description.state_count; ++n) {
      if (const int32_t code = Check(fail_, each[n], wanted, n)) return code;
    }
    return ECORNN_OK;
  }

  int32_t CheckStates() {
    if (call_.sequences) {  // how many there are, the states say
      const DLTensor* some = call_.state_in ? call_.state_in[0] : call_.state_out ? call_.state_out[0] : nullptr;
      if (!some || some->ndim < 2) return fail_(ECORNN_ARGUMENT, "sequences need state_in or state_out, of S rows");
      rows_ = some->shape[some->ndim - 2];
      if (!call_.state_in && rows_ > tables_.description.batch) {
        return fail_(ECORNN_ARGUMENT, "state_in is NULL with more sequences than rows of a batch");
      }
    }
    if (const int32_t code = CheckEach("state_in", call_.state_in)) return code;
    return CheckEach("state_out", call_.state_out);
  }

  int32_t CheckMasks() {
    const auto& d = tables_.description;
    if (!(call_.lengths || call_.resets || call_.sequences || d.lengths || d.resets || d.sequences)) return ECORNN_OK;
    const std::pair<const DLTensor*, bool> given[] = {
        {call_.lengths, d.lengths != 0}, {call_.resets, d.resets != 0}, {call_.sequences, d.sequences != 0}};
    const char* const names[] = {"lengths", "resets", "sequences"};
    for (int n = 0; n < 3; ++n) {
      const auto [tensor, taken] = given[n];
      if (tensor && !taken) return fail_(ECORNN_UNSUPPORTED, "%s: the module was compiled without them", names[n]);
      if (!tensor && taken) return fail_(ECORNN_ARGUMENT, "%s is NULL, of a module that takes them", names[n]);
      if (!tensor) continue;
      Wanted wanted = n == 0 ? Of(names[n], 1, batch_) : Of(names[n], 2, steps_, batch_);
      wanted.type = n != 1 ? kInt32 : Same(tensor->dtype, kBool) ? kBool : kUint8;
      if (const int32_t code = Check(fail_, tensor, wanted)) return code;
    }
    return call_.lengths && !tables_.cuda() ? CheckLengths() : ECORNN_OK;
  }

  // The sequence ends after the longest row; what is behind it is zero.
  int32_t CheckLengths() {
    const auto* lengths = reinterpret_cast<const int32_t*>(DataOf(*call_.lengths));
    const auto [least, most] = std::minmax_element(lengths, lengths + batch_);
    if (*least < 0 || *most > steps_) {
      return fail_(ECORNN_ARGUMENT, "lengths go from %d to %d; expected 0 to T=%" PRId64, *least, *most, steps_);
    }
    if (entry_ == kRun) active_ = std::max(1, *most);
    return ECORNN_OK;
  }

  int32_t CheckKept() {
    if (entry_ == kRun) return ECORNN_OK;
    int64_t wanted = 0;
    for (const Kept& kept : tables_.kept) wanted += Aligned(KeptBytes(tables_, kept, steps_, batch_));
    if (wanted && (!call_.kept || static_cast<int64_t>(call_.kept_size) < wanted || Address(call_.kept) % 16)) {
      return fail_(ECORNN_WORKSPACE, "kept has %zu bytes at %p; expected %" PRId64 ", aligned to 16", call_.kept_size,
                   call_.kept, wanted);
    }
    return ECORNN_OK;
  }

  int32_t CheckGradients() {
    if (!gradients_) return ECORNN_OK;
    const auto& d = tables_.description;
    if (!gradients_->dstate_out && rows_ > d.batch) {
      return fail_(ECORNN_ARGUMENT, "dstate_out is NULL with more sequences than rows of a batch");
    }
    if (const int32_t code = Check(fail_, gradients_->dy, Of("dy", 3, steps_, batch_, tables_.y_width))) return code;
    if (const int32_t code = Check(fail_, gradients_->dx, Of("dx", 3, steps_, batch_, d.input))) return code;
    if (const int32_t code = CheckEach("dstate_out", gradients_->dstate_out)) return code;
    if (const int32_t code = CheckEach("dstate_in", gradients_->dstate_in)) return code;
    if (gradients_->weight_count != d.parameter_count || !gradients_->weights) {
      return fail_(ECORNN_WEIGHTS, "gradients of %d weights; expected those of all %d", gradients_->weight_count,
                   d.parameter_count);
    }
    for (int32_t n = 0; n < d.parameter_count; ++n) {
      const ecornn_parameter& p = d.parameters[n];
      const DLTensor* tensor = Gradient(n);
      if (!tensor) return fail_(ECORNN_WEIGHTS, "there is no gradient of %s", p.name);
      Wanted wanted = Of(p.name, p.ndim, p.shape[0], p.shape[1]);
      wanted.type = d.gradient_dtype;
      if (const int32_t code = Check(fail_, tensor, wanted)) return code;
    }
    return ECORNN_OK;
  }

  // Mostly in the parameters' order.
  const DLTensor* Gradient(int64_t parameter) const {
    const char* name = tables_.parameters[static_cast<size_t>(parameter)].name;
    const auto is = [&](int64_t n) { return gradients_->weights[n].name && !strcmp(gradients_->weights[n].name, name); };
    if (is(parameter)) return gradients_->weights[parameter].tensor;
    for (int32_t n = 0; n < gradients_->weight_count; ++n) {
      if (is(n)) return gradients_->weights[n].tensor;
    }
    return nullptr;
  }

  // Of one state and sequence: the caller's, or else what stands in for it.
  template <typename Tensor>
  int64_t State(Tensor* const* given, const Pointer& p, int64_t other) const {
    const int64_t part = p.part * rows_ * tables_.description.hidden * tables_.itemsize();
    return (given ? Address(DataOf(*given[p.index])) : other) + part;
  }

  int32_t Enter(int64_t workspace) const {
    const size_t count = layer_.arguments[entry_].size();
    auto* args = static_cast<TVMFFIAny*>(alloca(count * sizeof(TVMFFIAny)));
    std::copy_n(layer_.arguments[entry_].data(), count, args);
    const int32_t threads = call_.threads ? call_.threads : layer_.threads;
    args[0].v_int64 = active_;
    args[1].v_int64 = batch_;
    args[2].v_int64 = layer_.device;
    args[3].v_int64 = tables_.cuda() ? Address(call_.stream) : threads;
    const int64_t zeros = layer_.zeros.at(), each = Aligned(StateBytes(tables_, rows_));
    const int64_t dropped = workspace;
    int64_t free = workspace + static_cast<int64_t>(tables_.states.size()) * each;
    for (const auto& [position, p] : layer_.given[entry_]) {
      int64_t& at = args[position].v_int64;
      switch (p.kind) {
        case kX: at = Address(DataOf(*call_.x)); break;
        case kY: at = Address(DataOf(*call_.y)); break;
        case kStateIn: at = State(call_.state_in, p, zeros); break;
        case kStateOut: at = State(call_.state_out, p, dropped + p.index * each); break;
        case kLengths: at = Address(DataOf(*call_.lengths)); break;
        case kResets: at = Address(DataOf(*call_.resets)); break;
        case kSequences: at = Address(DataOf(*call_.sequences)); break;
        case kDy: at = Address(DataOf(*gradients_->dy)); break;
        case kDx: at = Address(DataOf(*gradients_->dx)); break;
        case kDstateOut: at = State(gradients_->dstate_out, p, zeros); break;
        case kDstateIn: at = State(gradients_->dstate_in, p, dropped + p.index * each); break;
        case kGradient: at = Address(DataOf(*Gradient(p.index))); break;
        case kExisting: at = 1; break;  // gradients are added to
        case kKept: at = KeptAt(p.index); break;
        case kPacked: break;
        case kWorkspace:
          at = free;
          free += Aligned(p.fixed + p.per_step * active_);
          break;
      }
    }
    TVMFFIAny none{};
    static const char* const kNames[] = {"run", "forward", "backward"};
    if (ecornn_functions[entry_](nullptr, args, static_cast<int32_t>(count), &none)) return Raised(fail_, kNames[entry_]);
    if (active_ < steps_) {
      const int64_t row = batch_ * tables_.y_width * tables_.itemsize();
      memset(DataOf(*call_.y) + active_ * row, 0, static_cast<size_t>((steps_ - active_) * row));
    }
    return ECORNN_OK;
  }

  int64_t KeptAt(int64_t index) const {
    int64_t at = Address(call_.kept);
    for (int64_t n = 0; n < index; ++n) at += Aligned(KeptBytes(tables_, tables_.kept[static_cast<size_t>(n)], steps_, batch_));
    return at;
  }

  const Layer& layer_;
  const Tables& tables_;
  const Name entry_;
  const ecornn_call& call_;
  const ecornn_gradients* const gradients_;
  const Failure& fail_;
  int64_t steps_ = 0, active_ = 0, batch_ = 0, rows_ = 0;  // active_: steps that are worth running
};

}  // namespace ecornn_c
