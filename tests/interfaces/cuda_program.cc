// MODULE FOLDER T B: threads that share a layer on a GPU, each on its own stream, all get the same y, and so does a graph
// that packs the weights, once these are what they were; then a training step, whose gradients of random gradients it
// writes. All arrays are float32, as of cuda_program.c.
#include <cuda_runtime_api.h>

#include <atomic>
#include <ecornn.hpp>
#include <fstream>
#include <iostream>
#include <map>
#include <thread>

namespace {

std::string folder;

void Must(cudaError_t status) {
  if (status) throw std::runtime_error(cudaGetErrorString(status));
}

// Floats on the GPU, NaN at first.
class Array {
 public:
  explicit Array(int64_t count) : host_(static_cast<size_t>(count)) {
    Must(cudaMalloc(&data_, bytes()));
    Must(cudaMemset(data_, 0xff, bytes()));
  }
  Array(Array&& other) noexcept : host_(std::move(other.host_)), data_(std::exchange(other.data_, nullptr)) {}
  ~Array() { cudaFree(data_); }

  float* data() const { return static_cast<float*>(data_); }
  size_t bytes() const { return host_.size() * sizeof(float); }
  void clear() { Must(cudaMemset(data_, 0, bytes())); }
  void restore() { Must(cudaMemcpy(data_, host_.data(), bytes(), cudaMemcpyHostToDevice)); }  // what was read or asked for
  Array& read(const std::string& name) {
    const auto size = static_cast<std::streamsize>(bytes());
    if (!std::ifstream(folder + "/" + name, std::ios::binary).read(reinterpret_cast<char*>(host_.data()), size)) {
      throw std::runtime_error(name);
    }
    restore();
    return *this;
  }
  const std::vector<float>& host() {
    Must(cudaMemcpy(host_.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return host_;
  }
  void write(const std::string& name) {
    std::ofstream(folder + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(host().data()), static_cast<std::streamsize>(bytes()));
  }

 private:
  std::vector<float> host_;
  void* data_ = nullptr;
};

struct Stream {
  Stream() { Must(cudaStreamCreateWithFlags(&at, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(at); }
  void wait() const { Must(cudaStreamSynchronize(at)); }
  cudaStream_t at = nullptr;
};

}  // namespace

int main(int count, char** arguments) try {
  if (count != 5) return 1;
  folder = arguments[2];
  const int64_t T = std::atoi(arguments[3]), B = std::atoi(arguments[4]);
  const ecornn::Module module(arguments[1]);
  const ecornn_description& d = module.description();
  const int64_t I = d.input, H = d.hidden;
  const auto on = [](const Array& array, std::initializer_list<int64_t> shape) {
    return ecornn::Tensor(array.data(), shape, DLDevice{kDLCUDA, 0});
  };

  std::map<std::string, Array> values, sums;
  ecornn::Named weights, gradients;
  for (int32_t n = 0; n < d.parameter_count; ++n) {
    const ecornn_parameter& p = d.parameters[n];
    const int64_t size = p.shape[0] * (p.ndim > 1 ? p.shape[1] : 1);
    Array& value = values.emplace(p.name, size).first->second.read(p.name);
    Array& sum = sums.emplace(p.name, size).first->second;
    sum.clear();
    const auto of = [&](Array& a) { return p.ndim > 1 ? on(a, {p.shape[0], p.shape[1]}) : on(a, {p.shape[0]}); };
    weights.emplace_back(p.name, of(value));
    gradients.emplace_back(p.name, of(sum));
  }
  ecornn::Layer layer = module.bind(weights);

  Array x(T * B * I), y(T * B * H), h(B * H), c(B * H), h_out(B * H), c_out(B * H);
  const ecornn::Tensor X = on(x.read("x"), {T, B, I});
  const auto state = [&](const Array& array) { return on(array, {B, H}); };
  h.read("h_in");
  c.read("c_in");
  Must(cudaDeviceSynchronize());
  const Stream stream;
  ecornn::Call call(X, on(y, {T, B, H}));
  call.state_in({state(h), state(c)}).state_out({state(h_out), state(c_out)}).stream(stream.at);
  layer.run(call);
  stream.wait();
  const std::vector<float> first = y.host();

  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      Array own(T * B * H);
      const Stream mine;
      ecornn::Call again(X, on(own, {T, B, H}));
      again.state_in({state(h), state(c)}).stream(mine.at);
      for (int i = 0; i < 10; ++i) {
        Must(cudaMemsetAsync(own.data(), 0xff, own.bytes(), mine.at));
        layer.run(again);
        mine.wait();
        wrong += own.host() != first;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (wrong) return std::cerr << wrong << " of 40 calls differ\n", 2;

  Array workspace(layer.workspace_size(T, B) / 4 + 1);
  layer.repack(weights, stream.at);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  Must(cudaStreamBeginCapture(stream.at, cudaStreamCaptureModeGlobal));
  layer.repack(weights, stream.at);
  layer.run(call.workspace(workspace.data(), workspace.bytes()));
  Must(cudaStreamEndCapture(stream.at, &graph));
  Must(cudaGraphInstantiate(&executable, graph, 0));
  for (const bool known : {false, true}) {
    for (auto& [name, value] : values) known ? value.restore() : value.clear();
    Must(cudaMemset(y.data(), 0xff, y.bytes()));
    Must(cudaDeviceSynchronize());
    Must(cudaGraphLaunch(executable, stream.at));
    stream.wait();
    if ((y.host() == first) != known) return 6;
  }
  call.workspace(nullptr, 0);

  Array dy(T * B * H), dx(T * B * I), dh(B * H), dc(B * H), dh_in(B * H), dc_in(B * H);
  Array kept(layer.kept_size(T, B) / 4 + 1);
  dy.read("dy");
  dh.read("dh");
  dc.read("dc");
  layer.repack(weights, stream.at);
  layer.forward(call.kept(kept.data(), kept.bytes()));
  layer.backward(call, {on(dy, {T, B, H}), on(dx, {T, B, I}), {state(dh), state(dc)}, {state(dh_in), state(dc_in)},
                        gradients});
  stream.wait();
  y.write("y");
  dx.write("dx");
  dh_in.write("dh_in");
  dc_in.write("dc_in");
  for (auto& [name, sum] : sums) sum.write("gradient_" + name);

  try {
    layer.run(ecornn::Call(ecornn::Tensor(x.data(), {T, B, I}), on(y, {T, B, H})));
    return 3;  // x is said to be on the host
  } catch (const ecornn::Error& error) {
    if (error.status() != ECORNN_DEVICE) return 4;
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 5;
}
