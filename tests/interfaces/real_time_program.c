/* MODULE STEPS: how often steps of one row, T=1, allocate or lock, and prints both counts; malloc and
 * pthread_mutex_lock of all libraries are the ones here. Weights are small, x is a wave. */
#include <ecornn.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

static volatile int allocations, locks, freed;
static int (*next_lock)(pthread_mutex_t*);

void* malloc(size_t size) {
  ++allocations;
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  ++allocations;
  return __libc_calloc(count, size);
}
void* realloc(void* at, size_t size) {
  ++allocations;
  return __libc_realloc(at, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  ++allocations;
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** at, size_t alignment, size_t size) {
  ++allocations;
  *at = __libc_memalign(alignment, size);
  return *at ? 0 : 12;
}
void free(void* at) {
  ++freed;
  __libc_free(at);
}
int pthread_mutex_lock(pthread_mutex_t* mutex) {
  ++locks;
  if (!next_lock) {
    void* found = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    memcpy(&next_lock, &found, sizeof next_lock);
  }
  return next_lock(mutex);
}

int main(int count, char** arguments) {
  static float room[1 << 16] __attribute__((aligned(64)));
  float* free_room = room;
  ecornn_error error = {0, ""};
  ecornn_module module;
  ecornn_layer* layer;
  ecornn_named weights[16];
  DLTensor tensors[16];
  const DLDataType real = {kDLFloat, 32, 1};
  if (count != 3 || ecornn_open(arguments[1], &module, &error)) return 1;
  const ecornn_description* d = ecornn_describe(&module, &error);
  for (int32_t n = 0; n < d->parameter_count; ++n) {
    const ecornn_parameter* p = &d->parameters[n];
    const int64_t size = p->shape[0] * p->shape[1];
    for (int64_t i = 0; i < size; ++i) free_room[i] = (float)sin((double)(i + n)) / 4;
    tensors[n] = (DLTensor){free_room, {kDLCPU, 0}, p->ndim, real, (int64_t*)p->shape, NULL, 0};
    weights[n] = (ecornn_named){p->name, &tensors[n]};
    free_room += (size + 15) / 16 * 16;
  }
  if (ecornn_bind(&module, weights, d->parameter_count, NULL, &layer, &error)) return 2;

  int64_t x_shape[3] = {1, 1, d->input}, y_shape[3] = {1, 1, d->hidden}, state_shape[2] = {1, d->hidden};
  DLTensor x = {free_room, {kDLCPU, 0}, 3, real, x_shape, NULL, 0};
  DLTensor y = {free_room + 1024, {kDLCPU, 0}, 3, real, y_shape, NULL, 0};
  DLTensor states[2], *state[2] = {&states[0], &states[1]};
  for (int n = 0; n < 2; ++n) states[n] = (DLTensor){free_room + 2048 + 1024 * n, {kDLCPU, 0}, 2, real, state_shape, NULL, 0};
  ecornn_call call = {0};
  call.size = sizeof call;
  call.x = &x;
  call.y = &y;
  call.state_in = (const DLTensor* const*)state;
  call.state_out = state;
  if (ecornn_run(layer, &call, &error)) return 3; /* the thread's own storage in the module is made now */
  float sum = 0;
  allocations = locks = freed = 0;
  for (int step = 0; step < atoi(arguments[2]); ++step) {
    for (int64_t i = 0; i < d->input; ++i) free_room[i] = (float)(step % 7 - 3);
    if (ecornn_run(layer, &call, &error)) return 4;
    sum += ((float*)y.data)[0];
  }
  const int in_steps = allocations, freed_in_steps = freed, locks_in_steps = locks;
  if (isnan(sum) || sum == 0) return 5;
  /* that the counters count */
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&mutex);
  pthread_mutex_unlock(&mutex);
  ecornn_release(layer);
  if (ecornn_bind(&module, weights, d->parameter_count, NULL, &layer, &error)) return 6;
  if (locks == locks_in_steps || allocations == in_steps || freed == freed_in_steps) return 7;
  printf("%d %d %d\n", in_steps, freed_in_steps, locks_in_steps);
  return 0;
}
