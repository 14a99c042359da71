// Two layers that are linked into one program: what each makes of an x of ones, with weights of 0.1.
#include <ecornn.hpp>
#include <iostream>
#include <utility>

#include "gru9.h"
#include "lstm12.h"

static void Run(int32_t (*open)(ecornn_module*, ecornn_error*)) {
  const ecornn::Module module(open);
  const ecornn_description& d = module.description();
  alignas(64) static float memory[1 << 16];
  float* next = memory;
  const auto take = [&next](int64_t size, float value) {
    float* taken = std::exchange(next, next + (size + 15) / 16 * 16);
    for (int64_t i = 0; i < size; ++i) taken[i] = value;
    return taken;
  };
  ecornn::Named weights;
  for (int32_t n = 0; n < d.parameter_count; ++n) {
    const ecornn_parameter& p = d.parameters[n];
    const int64_t columns = p.ndim > 1 ? p.shape[1] : 1;
    float* values = take(p.shape[0] * columns, 0.1f);
    weights.emplace_back(p.name, p.ndim > 1 ? ecornn::Tensor(values, {p.shape[0], columns})
                                            : ecornn::Tensor(values, {p.shape[0]}));
  }
  ecornn::Layer layer = module.bind(weights, /*threads=*/2);
  const int64_t T = 7, B = 2;
  float *x = take(T * B * d.input, 1.0f), *y = take(T * B * d.hidden, -1.0f);
  layer.run(ecornn::Call(ecornn::Tensor(x, {T, B, d.input}), ecornn::Tensor(y, {T, B, d.hidden})));
  std::cout.precision(9);
  for (int64_t t = 0; t < T; ++t) std::cout << y[t * B * d.hidden] << ' ' << y[(t * B + 1) * d.hidden + d.hidden - 1] << '\n';
  try {
    layer.run(ecornn::Call(ecornn::Tensor(x, {T, B + 1, d.input}), ecornn::Tensor(y, {T, B, d.hidden})));
  } catch (const ecornn::Error& error) {
    std::cout << error.status() << ' ' << error.what() << '\n';
  }
}

int main() {
  Run(lstm12_open);
  Run(gru9_open);
}
