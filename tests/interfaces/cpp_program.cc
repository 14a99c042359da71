// MODULE FOLDER T B: threads that share one layer all get the same y; then a training step, whose gradients of random
// gradients it writes. All arrays are float32, as of c_program.c.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <ecornn.hpp>
#include <iostream>
#include <map>
#include <new>
#include <thread>

namespace {

std::string folder;

struct alignas(256) Line {
  float values[64];
};

// Aligned to 256 bytes, NaN at first.
class Array {
 public:
  explicit Array(int64_t count) : count_(count), lines_(static_cast<size_t>(count / 64 + 1)) {
    std::memset(static_cast<void*>(lines_.data()), 0xff, lines_.size() * sizeof(Line));
  }
  float* data() { return lines_[0].values; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(float); }
  Array& read(const std::string& name) {
    std::ifstream(folder + "/" + name, std::ios::binary).read(reinterpret_cast<char*>(data()), static_cast<std::streamsize>(bytes()));
    return *this;
  }
  void write(const std::string& name) {
    std::ofstream(folder + "/" + name, std::ios::binary).write(reinterpret_cast<char*>(data()), static_cast<std::streamsize>(bytes()));
  }
  void clear() { std::memset(static_cast<void*>(data()), 0, bytes()); }
  bool operator==(const Array& other) const {
    return !std::memcmp(lines_.data(), other.lines_.data(), bytes());
  }

 private:
  int64_t count_;
  std::vector<Line> lines_;
};

}  // namespace

int main(int count, char** arguments) try {
  if (count != 5) return 1;
  folder = arguments[2];
  const int64_t T = std::atoi(arguments[3]), B = std::atoi(arguments[4]);
  const ecornn::Module module(arguments[1]);
  const ecornn_description& d = module.description();
  const int64_t I = d.input, H = d.hidden;

  std::map<std::string, Array> values, sums;
  ecornn::Named weights, gradients;
  for (int32_t n = 0; n < d.parameter_count; ++n) {
    const ecornn_parameter& p = d.parameters[n];
    const int64_t size = p.shape[0] * (p.ndim > 1 ? p.shape[1] : 1);
    Array& value = values.emplace(p.name, size).first->second.read(p.name);
    Array& sum = sums.emplace(p.name, size).first->second;
    sum.clear();
    const auto of = [&](Array& array) {
      return p.ndim > 1 ? ecornn::Tensor(array.data(), {p.shape[0], p.shape[1]}) : ecornn::Tensor(array.data(), {p.shape[0]});
    };
    weights.emplace_back(p.name, of(value));
    gradients.emplace_back(p.name, of(sum));
  }
  ecornn::Layer layer = module.bind(weights);

  Array x(T * B * I), first(T * B * H), h(B * H), c(B * H), h_out(B * H), c_out(B * H);
  x.read("x");
  h.read("h_in");
  c.read("c_in");
  const ecornn::Tensor X(x.data(), {T, B, I}), H0(h.data(), {B, H}), C0(c.data(), {B, H});
  layer.run(ecornn::Call(X, ecornn::Tensor(first.data(), {T, B, H})).state_in({H0, C0}));

  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      Array y(T * B * H), workspace(layer.workspace_size(T, B) / 4);
      ecornn::Call call(X, ecornn::Tensor(y.data(), {T, B, H}));
      call.state_in({H0, C0}).threads(number == 3 ? 2 : 1);
      if (number == 0) call.workspace(workspace.data(), workspace.bytes());
      for (int i = 0; i < 10; ++i) {
        std::memset(static_cast<void*>(y.data()), 0xff, y.bytes());
        layer.run(call);
        wrong += !(y == first);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (wrong) return std::cerr << wrong << " of 40 calls differ\n", 2;
  layer.repack(weights);

  Array y(T * B * H), dy(T * B * H), dx(T * B * I), dh(B * H), dc(B * H), dh_in(B * H), dc_in(B * H);
  dy.read("dy");
  dh.read("dh");
  dc.read("dc");
  Array kept(layer.kept_size(T, B) / 4);
  const auto state = [&](Array& array) { return ecornn::Tensor(array.data(), {B, H}); };
  ecornn::Call call(X, ecornn::Tensor(y.data(), {T, B, H}));
  call.state_in({H0, C0}).state_out({state(h_out), state(c_out)}).kept(kept.data(), kept.bytes());
  layer.forward(call);
  layer.backward(call, {ecornn::Tensor(dy.data(), {T, B, H}), ecornn::Tensor(dx.data(), {T, B, I}), {state(dh), state(dc)},
                        {state(dh_in), state(dc_in)}, gradients});
  y.write("y");
  dx.write("dx");
  dh_in.write("dh_in");
  dc_in.write("dc_in");
  for (auto& [name, sum] : sums) sum.write("gradient_" + name);

  try {
    layer.run(ecornn::Call(ecornn::Tensor(x.data(), {T, B, I + 1}), ecornn::Tensor(y.data(), {T, B, H})));
    return 3;
  } catch (const ecornn::Error& error) {
    if (error.status() != ECORNN_SHAPE) return 4;
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 5;
}
