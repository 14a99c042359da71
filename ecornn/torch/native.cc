// A training step of a layer as a node of PyTorch's graph: what RecurrentForward in operator.py does by Python, in a
// tenth of the time. A step is made by native.py for one T and B, of a description in numbers. It serves calls like the
// one that it was made for; for any other, train() returns None and a backward pass calls `backward` of the owner.
//
// Python's objects are used by the functions of its stable interface, which are declared here: few machines have its
// headers. All runs with Python's lock, which train() has and apply() takes, but for the entries of a CPU that take long.
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

struct _object;
using PyObject = _object;
PyObject* THPVariable_Wrap(const at::TensorBase&);
extern "C" {
extern char _Py_NoneStruct[], _Py_FalseStruct[];
PyObject* PyObject_GetAttrString(PyObject*, const char*);
PyObject* PyObject_CallMethod(PyObject*, const char*, const char*, ...);
PyObject* PyTuple_New(ssize_t);
int PyTuple_SetItem(PyObject*, ssize_t, PyObject*);
PyObject* PyTuple_GetItem(PyObject*, ssize_t);
ssize_t PyTuple_Size(PyObject*);
long long PyLong_AsLongLong(PyObject*);
PyObject* PyErr_Occurred();
void PyErr_Clear();
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
PyObject* PyObject_Str(PyObject*);
const char* PyUnicode_AsUTF8AndSize(PyObject*, ssize_t*);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
int Py_IsInitialized();
int PyGILState_Ensure();
void PyGILState_Release(int);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {
using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Numbers = std::vector<int64_t>;

struct Locked {  // has Python's lock
  int state = PyGILState_Ensure();
  ~Locked() { PyGILState_Release(state); }
};

struct Reference {  // to a Python object
  PyObject* object;
  explicit Reference(PyObject* given) : object(given) {}
  Reference(const Reference&) = delete;
  ~Reference() { if (object) Py_DecRef(object); }
  PyObject* release() { return std::exchange(object, nullptr); }
};

PyObject* none() {
  auto* object = reinterpret_cast<PyObject*>(_Py_NoneStruct);
  Py_IncRef(object);
  return object;
}

// The tensor of a Python object; undefined if it is none.
Tensor unwrapped(PyObject* object) {
  Reference number(PyObject_GetAttrString(object, "_cdata"));
  if (!number.object) {
    PyErr_Clear();
    return {};
  }
  auto* impl = reinterpret_cast<c10::TensorImpl*>(PyLong_AsLongLong(number.object));
  return Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
}

PyObject* wrapped(const Tensor& tensor) { return tensor.defined() ? THPVariable_Wrap(tensor) : none(); }

PyObject* tuple_of(const std::vector<Tensor>& tensors) {
  PyObject* made = PyTuple_New(static_cast<ssize_t>(tensors.size()));
  for (size_t n = 0; n < tensors.size(); ++n) PyTuple_SetItem(made, static_cast<ssize_t>(n), wrapped(tensors[n]));
  return made;
}

// -- what a module exports ------------------------------------------------------------------------
struct Any { int32_t type; uint32_t padding; int64_t value; };  // TVMFFIAny
using Entry = int (*)(void*, const Any*, int32_t, Any*);
constexpr int32_t INTEGER = 1;  // kTVMFFIInt
struct DataType { uint8_t code, bits; uint16_t lanes; };  // DLDataType
using Pack = int32_t (*)(void*, const int64_t*, DataType, const char*, int32_t, void*, void*);

struct Description {  // numbers, each list after its length
  const int64_t* at;
  int64_t next() { return *at++; }
  Numbers list() {
    int64_t count = next();
    const int64_t* begin = at;
    at += count;
    return {begin, at};
  }
};

// Addresses that differ from call to call, in this order; arguments are a number, or one of these and an offset.
enum Base { CONSTANT, QUEUE, WORKSPACE, KEPT, X, Y, DY, DX, SUMS, STATES };

struct Call {
  Entry entry;
  Numbers bases, offsets;

  explicit Call(Description& from)
      : entry(reinterpret_cast<Entry>(from.next())), bases(from.list()), offsets(from.list()) {}

  std::vector<Any> arguments(const Numbers& at) const {
    std::vector<Any> made(bases.size());
    for (size_t n = 0; n < bases.size(); ++n) made[n] = {INTEGER, 0, at[bases[n]] + offsets[n]};
    return made;
  }
};

// -- a step ---------------------------------------------------------------------------------------
// What Python and this file both know of a bound layer; each field has one writer, with Python's lock.
struct Shared {
  int64_t packs, busy;                // by Python: how often it has packed, and the calls under way
  int64_t packed_here, busy_here;     // by this file
  int64_t due;                        // weights for gradients of first states have not been packed
  int64_t given_up;                   // CUDA graphs have the layer
};

struct Part { int64_t begin; Numbers sizes, strides; };

struct Step {
  Shared* shared;
  PyObject* lock;  // which Python's threads have to take or pack a layer
  const int64_t* renewals;  // how often any weights were noted to be packed, see snapshot.py
  bool swaps, keeps_lock, writes, optional, sums_float, packs_later;
  int64_t kept_bytes, total, workspace, zeros;
  Numbers y, state;
  size_t states;
  Numbers weights, places;  // of each its TensorImpl and its memory
  std::vector<Part> parts;
  Pack pack;
  void* layer;
  DataType dtype;
  int32_t needed;
  Numbers packed;  // addresses, in the order of the manifest
  int (*capturing)(void*, int32_t*);
  Call forward, backward, backward_to_x;
  int64_t python_packs = -1, suspected = -1;

  explicit Step(Description d)
      : shared(reinterpret_cast<Shared*>(d.next())), lock(reinterpret_cast<PyObject*>(d.next())),
        renewals(reinterpret_cast<const int64_t*>(d.next())), swaps(d.next()), keeps_lock(d.next()), writes(d.next()), optional(d.next()),
        sums_float(d.next()), packs_later(d.next()), kept_bytes(d.next()), total(d.next()), workspace(d.next()),
        zeros(d.next()), y(d.list()), state(d.list()), states(static_cast<size_t>(d.next())), weights(d.list()),
        places(d.list()), parts(parts_of(d)), pack(reinterpret_cast<Pack>(d.next())),
        layer(reinterpret_cast<void*>(d.next())), dtype(dtype_of(d)), needed(static_cast<int32_t>(d.next())),
        packed(d.list()), capturing(reinterpret_cast<int (*)(void*, int32_t*)>(d.next())), forward(d), backward(d),
        backward_to_x(d) {}

  static std::vector<Part> parts_of(Description& d) {
    std::vector<Part> parts(static_cast<size_t>(d.next()));
    for (auto& part : parts) {
      part.begin = d.next();
      part.sizes = d.list();
      part.strides = d.list();
    }
    return parts;
  }

  static DataType dtype_of(Description& d) {
    auto code = static_cast<uint8_t>(d.next()), bits = static_cast<uint8_t>(d.next());
    return {code, bits, 1};
  }

  // Whether nobody takes the layer or packs its weights.
  bool free() const {
    if (shared->busy || shared->busy_here || shared->given_up) return false;
    Reference locked(PyObject_CallMethod(lock, "locked", nullptr));
    return locked.object == reinterpret_cast<PyObject*>(_Py_FalseStruct);
  }

  int64_t packs() const { return shared->packs + shared->packed_here; }

  bool run(const Call& call, const Numbers& at) const {
    auto arguments = call.arguments(at);
    Any result{};
    ++shared->busy_here;
    void* thread = keeps_lock ? nullptr : PyEval_SaveThread();
    bool well = call.entry(nullptr, arguments.data(), static_cast<int32_t>(arguments.size()), &result) == 0;
    if (thread) PyEval_RestoreThread(thread);
    --shared->busy_here;
    return well;
  }
};

// The memory of a tensor that an entry can read, in `kept` if that had to be made; 0 if there is none.
int64_t address_of(const Tensor& given, std::vector<Tensor>& kept) {
  Tensor tensor = given;
  if (tensor.is_neg() || tensor._is_zerotensor() || !tensor.has_storage() || !tensor.storage().data()) return 0;
  if (!tensor.is_contiguous() || reinterpret_cast<int64_t>(tensor.data_ptr()) % 16) {
    tensor = tensor.clone(at::MemoryFormat::Contiguous);
  }
  kept.push_back(tensor);
  return reinterpret_cast<int64_t>(tensor.data_ptr());
}

Tensor swapped(const Tensor& tensor, bool swaps) { return swaps ? tensor.transpose(0, 1) : tensor; }

struct RecurrentBackward : public Node {
  const Step* step = nullptr;
  PyObject* owner = nullptr;
  int64_t queue = 0, packs = 0;
  SavedVariable x, y, kept;
  std::vector<SavedVariable> states, weights;

  ~RecurrentBackward() override {
    if (owner && Py_IsInitialized()) {
      Locked lock;
      Py_DecRef(owner);
    }
  }

  void release_variables() override {
    for (auto* one : {&x, &y, &kept}) one->reset_data();
    for (auto* many : {&states, &weights}) for (auto& one : *many) one.reset_data();
  }

  std::string name() const override { return "RecurrentBackward"; }

  variable_list apply(variable_list&& gradients) override {
    Locked lock;
    bool plain = !at::GradMode::is_enabled();
    for (const auto& g : gradients) {
      plain = plain && (!g.defined() || !(g.key_set().has(c10::DispatchKey::FuncTorchBatched) ||
                                          g.key_set().has(c10::DispatchKey::Batched) || g.is_neg() ||
                                          g._is_zerotensor() || !g.has_storage() ||
                                          g.key_set().has(c10::DispatchKey::Python)));
    }
    std::vector<Tensor> all{x.unpack(), y.unpack(getptr()), kept.unpack()};
    for (const auto& one : states) all.push_back(one.unpack());
    for (const auto& one : weights) all.push_back(one.unpack());  // says whether one has changed
    bool wanted = false;
    for (size_t n = 0; n < states.size(); ++n) wanted = wanted || task_should_compute_output(1 + n);
    variable_list found;
    if (!plain || !computed(all, gradients, wanted, found)) found = by_owner(all, gradients, wanted);
    for (size_t n = 0; n < found.size(); ++n) if (!task_should_compute_output(n)) found[n] = Tensor();
    return found;
  }

  // Computes gradients of x, states and weights; false, and nothing done, where that takes more than an entry's call.
  bool computed(const std::vector<Tensor>& all, const variable_list& gradients, bool wanted, variable_list& found) {
    const Step& s = *step;
    int32_t status = 0;
    if (s.packs() != packs || !s.free() || (wanted && s.shared->due) ||
        (s.capturing && (s.capturing(reinterpret_cast<void*>(queue), &status) || status))) {
      return false;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    std::vector<Tensor> memory;
    size_t count = states.size();
    Numbers at(STATES + 4 * s.states);
    auto read = [&](const Tensor& tensor) { return address_of(tensor, memory); };
    Tensor rows = swapped(all[0], s.swaps);
    auto options = rows.options();
    at[QUEUE] = queue, at[WORKSPACE] = s.workspace;
    at[X] = read(rows), at[Y] = read(swapped(all[1], s.swaps)), at[KEPT] = read(all[2]);
    at[DY] = read(gradients[0].defined() ? swapped(gradients[0], s.swaps) : at::zeros(s.y, options));
    Tensor dx = at::empty(rows.sizes(), options);
    at[DX] = reinterpret_cast<int64_t>(dx.data_ptr());
    Tensor sums = at::empty({s.total}, s.sums_float ? options.dtype(at::kFloat) : options);
    if (!s.writes) sums.zero_();
    at[SUMS] = reinterpret_cast<int64_t>(sums.data_ptr());
    bool before = wanted || !s.optional;
    std::vector<Tensor> made;
    for (size_t n = 0; n < s.states; ++n) {
      const Tensor& g = gradients[1 + n];
      at[STATES + n] = count ? read(all[3 + n]) : s.zeros;
      at[STATES + 2 * s.states + n] = g.defined() ? read(g) : s.zeros;
      if (before) {
        made.push_back(at::empty(s.state, options));
        at[STATES + 3 * s.states + n] = reinterpret_cast<int64_t>(made.back().data_ptr());
      }
    }
    if (!at[X] || !at[Y] || !at[KEPT] || !at[DY] || !s.run(before ? s.backward : s.backward_to_x, at)) return false;
    auto dtype = all[3 + count].scalar_type();
    if (sums.scalar_type() != dtype) sums = sums.to(dtype);
    found.push_back(swapped(dx, s.swaps));
    for (size_t n = 0; n < count; ++n) found.push_back(wanted ? made[n] : Tensor());
    for (const auto& part : s.parts) found.push_back(at::as_strided(sums, part.sizes, part.strides, part.begin));
    if (s.suspected != *s.renewals) {  // an optimizer may come next
      Reference done(PyObject_CallMethod(owner, "suspect", nullptr));
      if (done.object) const_cast<Step&>(s).suspected = *s.renewals; else PyErr_Clear();
    }
    return true;
  }

  variable_list by_owner(const std::vector<Tensor>& all, const variable_list& gradients, bool wanted) {
    Reference tensors(tuple_of(all)), given(tuple_of(gradients));
    Reference result(PyObject_CallMethod(owner, "backward", "OOiL", tensors.object, given.object,
                                         static_cast<int>(wanted), static_cast<long long>(packs)));
    if (!result.object) raise();
    variable_list found;
    for (ssize_t n = 0; n < PyTuple_Size(result.object); ++n) {
      found.push_back(unwrapped(PyTuple_GetItem(result.object, n)));
    }
    return found;
  }

  [[noreturn]] static void raise() {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    Reference types(type), values(value), traces(trace), text(value ? PyObject_Str(value) : nullptr);
    const char* said = text.object ? PyUnicode_AsUTF8AndSize(text.object, nullptr) : nullptr;
    throw std::runtime_error(said ? said : "the backward pass of a layer failed");
  }
};

template <class Pointer>
Pointer node() {  // PyTorch has had std::shared_ptr, and has intrusive ones
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    auto end = [](auto* one) { deleteNode(one); };  // which newer versions do not have
    return Pointer(static_cast<Node*>(new RecurrentBackward()), end);
  } else {
    return c10::make_intrusive<RecurrentBackward>();
  }
}

// y and last states of a call with gradients as a tuple; None if it is not like the one that the step was made for.
PyObject* train(Step& s, PyObject* owner, PyObject* given_x, PyObject* given_states, PyObject* given_weights,
                int64_t queue) {
  std::vector<Tensor> states, weights, memory;
  size_t count = static_cast<size_t>(PyTuple_Size(given_states)), parts = s.weights.size();
  if (static_cast<size_t>(PyTuple_Size(given_weights)) != parts || (count && count != s.states)) return none();
  for (size_t n = 0; n < parts; ++n) {
    weights.push_back(unwrapped(PyTuple_GetItem(given_weights, static_cast<ssize_t>(n))));
    const Tensor& w = weights.back();
    if (reinterpret_cast<int64_t>(w.unsafeGetTensorImpl()) != s.weights[n] || !w.requires_grad() ||
        !w.is_contiguous() || reinterpret_cast<int64_t>(w.data_ptr()) != s.places[n]) {
      return none();
    }
  }
  Tensor x = unwrapped(given_x);
  for (size_t n = 0; n < count; ++n) states.push_back(unwrapped(PyTuple_GetItem(given_states, static_cast<ssize_t>(n))));
  if (!s.free()) return none();

  if (s.python_packs != s.shared->packs) {  // Python has noted weights as packed that are not any more
    Reference done(PyObject_CallMethod(owner, "outdate", nullptr));
    if (!done.object) return PyErr_Clear(), none();
    s.python_packs = s.shared->packs;
  }
  Tensor y, kept;
  std::vector<Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    Numbers at(STATES + 4 * s.states);
    auto options = x.options();
    y = at::empty(s.y, options);
    kept = at::empty({s.kept_bytes}, options.dtype(at::kByte));
    at[QUEUE] = queue, at[WORKSPACE] = s.workspace;
    at[X] = address_of(swapped(x, s.swaps), memory);
    at[Y] = reinterpret_cast<int64_t>(y.data_ptr()), at[KEPT] = reinterpret_cast<int64_t>(kept.data_ptr());
    results.push_back(swapped(y, s.swaps));
    bool well = at[X];
    for (size_t n = 0; n < s.states; ++n) {
      results.push_back(at::empty(s.state, options));
      at[STATES + n] = count ? address_of(states[n], memory) : s.zeros;
      at[STATES + s.states + n] = reinterpret_cast<int64_t>(results.back().data_ptr());
      well = well && at[STATES + n];
    }
    if (!well) return none();
    ++s.shared->packed_here;
    char said[512];
    if (s.pack(s.layer, s.packed.data(), s.dtype, nullptr, s.needed, reinterpret_cast<void*>(queue), said)) {
      s.shared->given_up = 1;
      return none();
    }
    s.shared->due = s.packs_later;
    if (!s.run(s.forward, at)) return none();
  }
  auto made = node<decltype(torch::autograd::Edge::function)>();
  auto* backward = static_cast<RecurrentBackward*>(made.get());
  backward->step = &s;
  backward->owner = owner;
  Py_IncRef(owner);
  backward->queue = queue;
  backward->packs = s.packs();
  backward->set_next_edges(torch::autograd::collect_next_edges(x, states, weights));
  for (auto& result : results) torch::autograd::create_gradient_edge(result, made);
  backward->x = SavedVariable(x, false);
  backward->y = SavedVariable(results[0], true);
  backward->kept = SavedVariable(kept, false);
  for (const auto& one : states) backward->states.emplace_back(one, false);
  for (const auto& one : weights) backward->weights.emplace_back(one, false);
  return tuple_of(results);
}
}  // namespace

#pragma GCC visibility push(default)
extern "C" {
void* ecornn_step(const int64_t* description) { return new Step(Description{description}); }

void ecornn_step_free(void* step) { delete static_cast<Step*>(step); }

PyObject* ecornn_train(void* step, PyObject* owner, PyObject* x, PyObject* states, PyObject* weights, int64_t queue) {
  try {
    return train(*static_cast<Step*>(step), owner, x, states, weights, queue);
  } catch (const std::exception&) {  // such as of memory: Python's way says which
    return none();
  }
}
}
#pragma GCC visibility pop
