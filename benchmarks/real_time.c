/* MODULE FOLDER STEPS REPEATS: an LSTM or GRU of float32, B = 1, one step (T = 1) a call, as audio and control need it. FOLDER
 * has its weights and x (STEPS, I); y (STEPS, H) of the first run is written there. Prints nanoseconds a step of each
 * repetition, and at last the longest single step of one more. */
#include <ecornn.h>
#include <stdlib.h>
#include <time.h>

static float* array(const char* folder, const char* name, size_t count) {
  char path[4096];
  float* made = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, "rb");
  if (!made || !file || fread(made, sizeof(float), count, file) != count) exit(2);
  fclose(file);
  return made;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

int main(int count, char** arguments) {
  ecornn_error error = {0, ""};
  ecornn_module module;
  ecornn_layer* layer;
  ecornn_named weights[16];
  DLTensor tensors[16];
  const DLDataType real = {kDLFloat, 32, 1};
  const DLDevice host = {kDLCPU, 0};
  if (count != 5 || ecornn_open(arguments[1], &module, &error)) return 1;
  const char* folder = arguments[2];
  const int64_t steps = atoi(arguments[3]), repeats = atoi(arguments[4]);
  const ecornn_description* d = ecornn_describe(&module, &error);
  for (int32_t n = 0; n < d->parameter_count; ++n) {
    const ecornn_parameter* p = &d->parameters[n];
    float* data = array(folder, p->name, (size_t)(p->shape[0] * p->shape[1]));
    tensors[n] = (DLTensor){data, host, p->ndim, real, (int64_t*)p->shape, NULL, 0};
    weights[n] = (ecornn_named){p->name, &tensors[n]};
  }
  if (ecornn_bind(&module, weights, d->parameter_count, NULL, &layer, &error)) return 3;

  float* inputs = array(folder, "x", (size_t)(steps * d->input));
  float* outputs = aligned_alloc(64, (size_t)(steps * d->hidden + 16) / 16 * 64);
  static float memory[4][4096] __attribute__((aligned(64)));
  int64_t x_shape[3] = {1, 1, d->input}, y_shape[3] = {1, 1, d->hidden}, state_shape[2] = {1, d->hidden};
  DLTensor x = {memory[0], host, 3, real, x_shape, NULL, 0}, y = {memory[1], host, 3, real, y_shape, NULL, 0};
  DLTensor h = {memory[2], host, 2, real, state_shape, NULL, 0}, c = {memory[3], host, 2, real, state_shape, NULL, 0};
  DLTensor* states[2] = {&h, &c};
  ecornn_call call = {0};
  call.size = sizeof call;
  call.x = &x;
  call.y = &y;
  call.state_in = (const DLTensor* const*)states;
  call.state_out = states;
  double longest = 0;
  for (int64_t repeat = 0; repeat <= repeats; ++repeat) {
    memset(memory[2], 0, sizeof memory[2]);
    memset(memory[3], 0, sizeof memory[3]);
    double begin = now();
    for (int64_t step = 0; step < steps; ++step) {
      memcpy(memory[0], inputs + step * d->input, (size_t)d->input * sizeof(float));
      if (ecornn_run(layer, &call, &error)) return 4;
      memcpy(outputs + step * d->hidden, memory[1], (size_t)d->hidden * sizeof(float));
      if (repeat == repeats) { /* a look at the clock takes some 30 ns */
        const double end = now();
        longest = end - begin > longest ? end - begin : longest;
        begin = end;
      }
    }
    if (repeat < repeats) printf("%.1f\n", (now() - begin) / (double)steps);
  }
  printf("%.1f\n", longest);
  char path[4096];
  snprintf(path, sizeof path, "%s/y", folder);
  FILE* file = fopen(path, "wb");
  if (!file || fwrite(outputs, sizeof(float), (size_t)(steps * d->hidden), file) != (size_t)(steps * d->hidden)) return 5;
  fclose(file);
  ecornn_release(layer);
  ecornn_close(&module);
  return 0;
}
