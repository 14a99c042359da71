/* MODULE FOLDER T B: runs a layer on a GPU, on the arrays of FOLDER, float32, of which y and the last states are written
 * there: with weights from both memories, on the caller's stream; with a workspace of the caller's and from zeros, as a
 * graph that is replayed on another x; and prints what the interface says of memory on the host. */
#include <cuda_runtime_api.h>
#include <ecornn.h>
#include <stdlib.h>

#define MOST 32
#define CUDA(call) do { cudaError_t status = (call); if (status) { \
  fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status)); exit(1); } } while (0)

static const char* folder;

static void must(const char* what, int32_t code, const ecornn_error* error) {
  if (!code) return;
  fprintf(stderr, "%s: %d %s\n", what, error->code, error->message);
  exit(2);
}

static FILE* opened(const char* name, const char* more, const char* mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s%s", folder, name, more);
  FILE* file = fopen(path, mode);
  if (!file) exit(3);
  return file;
}

static size_t bytes(const DLTensor* tensor) {
  size_t count = 1;
  for (int32_t n = 0; n < tensor->ndim; ++n) count *= (size_t)tensor->shape[n];
  return count * tensor->dtype.bits / 8;
}

/* On the GPU or the host, full of NaN. */
static DLTensor made(DLDeviceType where, int32_t ndim, int64_t a, int64_t b, int64_t c) {
  int64_t* shape = malloc(3 * sizeof *shape);
  shape[0] = a;
  shape[1] = b;
  shape[2] = c;
  DLTensor tensor = {NULL, {where, 0}, ndim, {kDLFloat, 32, 1}, shape, NULL, 0};
  if (where == kDLCUDA) CUDA(cudaMalloc(&tensor.data, bytes(&tensor)));
  else CUDA(cudaMallocHost(&tensor.data, bytes(&tensor)));
  CUDA(cudaMemset(tensor.data, 0xff, bytes(&tensor)));
  return tensor;
}

static void read_into(const char* name, const char* more, const DLTensor* tensor) {
  void* host = malloc(bytes(tensor));
  FILE* file = opened(name, more, "rb");
  if (fread(host, 1, bytes(tensor), file) != bytes(tensor)) exit(4);
  fclose(file);
  CUDA(cudaMemcpy(tensor->data, host, bytes(tensor), cudaMemcpyDefault));
  free(host);
}

static void written(const char* name, const char* more, const DLTensor* tensor) {
  void* host = malloc(bytes(tensor));
  CUDA(cudaMemcpy(host, tensor->data, bytes(tensor), cudaMemcpyDefault));
  FILE* file = opened(name, more, "wb");
  if (fwrite(host, 1, bytes(tensor), file) != bytes(tensor)) exit(5);
  fclose(file);
  free(host);
}

int main(int count, char** arguments) {
  if (count != 5) return 1;
  folder = arguments[2];
  const int64_t T = atoi(arguments[3]), B = atoi(arguments[4]);
  ecornn_error error = {0, ""};
  ecornn_module module;
  must("open", ecornn_open(arguments[1], &module, &error), &error);
  const ecornn_description* d = ecornn_describe(&module, &error);
  if (!d || d->device_type != kDLCUDA || d->parameter_count > MOST || d->state_count > 4) return 1;

  DLTensor weight[MOST];
  ecornn_named weights[MOST];
  for (int32_t n = 0; n < d->parameter_count; ++n) {
    const ecornn_parameter* p = &d->parameters[n];
    weight[n] = made(n % 2 ? kDLCPU : kDLCUDA, p->ndim, p->shape[0], p->shape[1], 1);
    read_into(p->name, "", &weight[n]);
    weights[n].name = p->name;
    weights[n].tensor = &weight[n];
  }
  ecornn_layer* layer;
  must("bind", ecornn_bind(&module, weights, d->parameter_count, NULL, &layer, &error), &error);

  const int64_t parts = d->layers * d->directions;
  DLTensor x = made(kDLCUDA, 3, T, B, d->input), y = made(kDLCUDA, 3, T, B, d->directions * d->hidden), in[4], out[4];
  const DLTensor* state_in[4];
  DLTensor* state_out[4];
  read_into("x", "", &x);
  for (int32_t n = 0; n < d->state_count; ++n) {
    in[n] = parts == 1 ? made(kDLCUDA, 2, B, d->hidden, 1) : made(kDLCUDA, 3, parts, B, d->hidden);
    out[n] = parts == 1 ? made(kDLCUDA, 2, B, d->hidden, 1) : made(kDLCUDA, 3, parts, B, d->hidden);
    read_into(d->states[n], "_in", &in[n]);
    state_in[n] = &in[n];
    state_out[n] = &out[n];
  }
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ecornn_call call = {0};
  call.size = sizeof call;
  call.x = &x;
  call.y = &y;
  call.state_in = state_in;
  call.state_out = state_out;
  call.stream = stream;
  must("run", ecornn_run(layer, &call, &error), &error);
  CUDA(cudaStreamSynchronize(stream));
  written("y", "", &y);
  for (int32_t n = 0; n < d->state_count; ++n) written(d->states[n], "_out", &out[n]);

  cudaGraph_t graph;
  cudaGraphExec_t executable;
  call.state_in = NULL;
  call.state_out = NULL;
  call.workspace_size = (size_t)ecornn_workspace_size(layer, T, B);
  CUDA(cudaMalloc(&call.workspace, call.workspace_size + 1));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  must("run in a graph", ecornn_run(layer, &call, &error), &error);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&executable, graph, 0));
  read_into("other_x", "", &x);
  CUDA(cudaMemset(y.data, 0xff, bytes(&y)));
  for (int32_t n = 0; n < 2; ++n) CUDA(cudaGraphLaunch(executable, stream));
  CUDA(cudaStreamSynchronize(stream));
  written("other_y", "", &y);

  must("repack", ecornn_repack(layer, weights, d->parameter_count, stream, &error), &error);
  CUDA(cudaMemset(y.data, 0xff, bytes(&y)));
  must("run after repack", ecornn_run(layer, &call, &error), &error);
  CUDA(cudaStreamSynchronize(stream));
  written("y_after_repack", "", &y);

  x.device.device_type = kDLCPU;
  printf("%d %s\n", ecornn_run(layer, &call, &error), error.message);
  ecornn_release(layer);
  ecornn_close(&module);
  return 0;
}
