/* MODULE FOLDER T B THREADS: runs a layer on the arrays of FOLDER, float32, and writes y and the last states there; then
 * asks for what is refused, and prints each code with its message. On a GPU, whose memory must be the host's, on stream 7,
 * with weights from both; in place of the rest weights that lie on the GPU are bound and, negated, packed anew there. */
#include <ecornn.h>
#include <math.h>
#include <stdlib.h>

#define MOST 32

static const char* folder;
static DLDevice place = {kDLCPU, 0};

static void fail(const char* what, const ecornn_error* error) {
  fprintf(stderr, "%s: %d %s\n", what, error->code, error->message);
  exit(1);
}

static FILE* opened(const char* name, const char* mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, mode);
  if (!file) exit(2);
  return file;
}

static DLTensor made(int32_t ndim, int64_t a, int64_t b, int64_t c, DLDataType type) {
  int64_t* shape = malloc(3 * sizeof *shape);
  shape[0] = a;
  shape[1] = b;
  shape[2] = c;
  size_t count = 1;
  for (int32_t n = 0; n < ndim; ++n) count *= (size_t)shape[n];
  void* data = aligned_alloc(64, (count * type.bits / 8 + 63) / 64 * 64);
  memset(data, 0xff, count * type.bits / 8); /* NaN */
  DLTensor tensor = {data, place, ndim, type, shape, NULL, 0};
  return tensor;
}

static void gone(DLTensor* tensor) {
  free(tensor->data);
  free(tensor->shape);
}

static size_t bytes(const DLTensor* tensor) {
  size_t count = 1;
  for (int32_t n = 0; n < tensor->ndim; ++n) count *= (size_t)tensor->shape[n];
  return count * tensor->dtype.bits / 8;
}

static void read_into(const char* name, DLTensor* tensor) {
  FILE* file = opened(name, "rb");
  if (fread(tensor->data, 1, bytes(tensor), file) != bytes(tensor)) exit(3);
  fclose(file);
}

static void written(const char* name, const DLTensor* tensor) {
  FILE* file = opened(name, "wb");
  if (fwrite(tensor->data, 1, bytes(tensor), file) != bytes(tensor)) exit(4);
  fclose(file);
}

static void refused(const char* what, int32_t code, const ecornn_error* error) {
  printf("%s: %d %s\n", what, code, error->message);
  if (code == ECORNN_OK || code != error->code) exit(5);
}

/* Each struct is as it was when this returns. */
static void ask_for_what_is_refused(const ecornn_module* module, ecornn_layer* layer, ecornn_call call,
                                    ecornn_named* weights, int32_t count) {
  ecornn_error error;
  ecornn_layer* none = NULL;
  DLTensor x = *call.x, *y = call.y, w = *weights[0].tensor;
  const DLTensor* weight = weights[0].tensor;
  int64_t shape[3] = {x.shape[0], x.shape[1], x.shape[2] + 1}, strides[3] = {x.shape[1] * x.shape[2] * 2, x.shape[2] * 2, 2};
  struct {
    ecornn_call call;
    void* later;
  } newer;

  call.x = &x;
  x.shape = shape;
  refused("shape", ecornn_run(layer, &call, &error), &error);
  x = *y;
  x.shape = shape;
  --shape[2];
  x.data = NULL;
  refused("memory", ecornn_run(layer, &call, &error), &error);
  x.data = y->data;
  x.dtype.bits = 64;
  refused("dtype", ecornn_run(layer, &call, &error), &error);
  x.dtype.bits = 32;
  x.byte_offset = 4;
  refused("alignment", ecornn_run(layer, &call, &error), &error);
  x.byte_offset = 0;
  x.strides = strides;
  refused("strides", ecornn_run(layer, &call, &error), &error);
  x.strides = NULL;
  x.device.device_type = kDLCUDA;
  refused("device", ecornn_run(layer, &call, &error), &error);
  x.device.device_type = kDLCPU;
  call.x = NULL;
  refused("no x", ecornn_run(layer, &call, &error), &error);
  call.x = &x;
  call.workspace = y->data;
  call.workspace_size = 16;
  refused("workspace", ecornn_run(layer, &call, &error), &error);
  call.workspace = NULL;
  call.threads = 2000;
  refused("threads", ecornn_run(layer, &call, &error), &error);
  call.threads = 0;
  call.size = 3;
  refused("size", ecornn_run(layer, &call, &error), &error);
  newer.call = call;
  newer.call.size = sizeof newer;
  newer.later = y;
  refused("newer program", ecornn_run(layer, &newer.call, &error), &error);

  refused("too few weights", ecornn_bind(module, weights, count - 1, NULL, &none, &error), &error);
  weights[0].name = "weight_of_another";
  refused("weight's name", ecornn_bind(module, weights, count, NULL, &none, &error), &error);
  weights[0].name = ecornn_describe(module, NULL)->parameters[0].name;
  weights[0].tensor = &w;
  w.dtype.code = kDLInt;
  refused("weight's dtype", ecornn_bind(module, weights, count, NULL, &none, &error), &error);
  w.dtype.code = kDLFloat;
  w.ndim = 1;
  refused("weight's shape", ecornn_bind(module, weights, count, NULL, &none, &error), &error);
  weights[0].tensor = weight;
  ecornn_bind_options options = {sizeof options, 1, 0, 0, NULL};
  refused("GPU", ecornn_bind(module, weights, count, &options, &none, &error), &error);
  if (none) exit(6);
  if (module->api->describe == NULL || ecornn_run(layer, NULL, NULL) != ECORNN_ARGUMENT) exit(7); /* error may be NULL */
}

/* y of weights that all lie on the GPU, and after they have been negated, which a layer of other weights must have, too;
 * when it asks for what is on stderr. */
static void pack_there(const ecornn_module* module, ecornn_layer* other, ecornn_call call, DLTensor* weight,
                       const ecornn_named* weights, int32_t count) {
  const ecornn_bind_options options = {sizeof options, 0, 0, call.x->shape[0], (void*)7};
  ecornn_error error;
  ecornn_layer* layer;
  for (int32_t n = 0; n < count; ++n) weight[n].device.device_type = kDLCUDA;
  fprintf(stderr, "bind there\n");
  if (ecornn_bind(module, weights, count, &options, &layer, &error)) fail("bind there", &error);
  memset(call.y->data, 0xff, bytes(call.y));
  if (ecornn_run(layer, &call, &error)) fail("run", &error);
  written("y_of_there", call.y);
  for (int32_t n = 0; n < count; ++n) {
    for (size_t i = 0; i < bytes(&weight[n]) / sizeof(float); ++i) ((float*)weight[n].data)[i] *= -1;
  }
  for (int32_t again = 0; again < 2; ++again) {
    fprintf(stderr, "repack there\n");
    if (ecornn_repack(layer, weights, count, call.stream, &error)) fail("repack there", &error);
  }
  fprintf(stderr, "repacked\n");
  memset(call.y->data, 0xff, bytes(call.y));
  if (ecornn_run(layer, &call, &error)) fail("run of negated", &error);
  written("y_of_negated", call.y);
  void* wanted = malloc(bytes(call.y));
  memcpy(wanted, call.y->data, bytes(call.y));
  memset(call.y->data, 0xff, bytes(call.y));
  if (ecornn_repack(other, weights, count, call.stream, &error)) fail("repack of another layer", &error);
  if (ecornn_run(other, &call, &error)) fail("run of another layer", &error);
  if (memcmp(wanted, call.y->data, bytes(call.y))) exit(11);
  free(wanted);
  ecornn_release(layer);
}

int main(int count, char** arguments) {
  if (count != 6) return 1;
  folder = arguments[2];
  const int64_t T = atoi(arguments[3]), B = atoi(arguments[4]);
  const DLDataType real = {kDLFloat, 32, 1}, whole = {kDLInt, 32, 1};
  ecornn_error error;
  ecornn_module module;
  if (ecornn_open(arguments[1], &module, &error)) fail("open", &error);
  const ecornn_description* d = ecornn_describe(&module, &error);
  if (!d) fail("describe", &error);
  const int gpu = d->device_type == kDLCUDA;
  place.device_type = d->device_type;

  DLTensor weight[MOST], in[4], out[4], x = made(3, T, B, d->input, real);
  ecornn_named weights[MOST];
  if (d->parameter_count > MOST || d->state_count > 4) return 1;
  for (int32_t n = 0; n < d->parameter_count; ++n) {
    const ecornn_parameter* p = &d->parameters[n];
    weight[n] = made(p->ndim, p->shape[0], p->shape[1], 1, real);
    read_into(p->name, &weight[n]);
    if (n % 2) weight[n].device.device_type = kDLCPU;
    /* as Module.bind, in any order; and NULL strides or not */
    weights[d->parameter_count - 1 - n].name = p->name;
    weights[d->parameter_count - 1 - n].tensor = &weight[n];
  }
  ecornn_named first = weights[0];
  weights[0] = weights[d->parameter_count - 1];
  weights[d->parameter_count - 1] = first;

  ecornn_bind_options options = {sizeof options, 0, atoi(arguments[5]), T, NULL};
  ecornn_layer* layer;
  if (ecornn_bind(&module, weights, d->parameter_count, &options, &layer, &error)) fail("bind", &error);

  const int64_t parts = d->layers * d->directions;
  const DLTensor* state_in[4];
  DLTensor* state_out[4];
  DLTensor y = made(3, T, B, d->directions * d->hidden, real), lengths = made(1, B, 1, 1, whole);
  read_into("x", &x);
  for (int32_t n = 0; n < d->state_count; ++n) {
    char name[64];
    in[n] = parts == 1 ? made(2, B, d->hidden, 1, real) : made(3, parts, B, d->hidden, real);
    out[n] = parts == 1 ? made(2, B, d->hidden, 1, real) : made(3, parts, B, d->hidden, real);
    snprintf(name, sizeof name, "%s_in", d->states[n]);
    read_into(name, &in[n]);
    state_in[n] = &in[n];
    state_out[n] = &out[n];
  }
  ecornn_call call = {0};
  call.size = sizeof call;
  call.x = &x;
  call.y = &y;
  call.state_in = state_in;
  call.state_out = state_out;
  if (d->lengths) {
    read_into("lengths", &lengths);
    call.lengths = &lengths;
  }
  call.workspace_size = (size_t)ecornn_workspace_size(layer, T, B);
  call.workspace = aligned_alloc(256, (call.workspace_size + 255) / 256 * 256);
  memset(call.workspace, 0xff, call.workspace_size);
  if (gpu) call.stream = (void*)7;
  if (ecornn_run(layer, &call, &error)) fail("run", &error);
  written("y", &y);
  for (int32_t n = 0; n < d->state_count; ++n) {
    char name[64];
    snprintf(name, sizeof name, "%s_out", d->states[n]);
    written(name, &out[n]);
  }

  /* with a workspace of the layer's, states in place, then none wanted and from zeros */
  free(call.workspace);
  call.workspace = NULL;
  for (int32_t n = 0; n < d->state_count && !gpu; ++n) state_out[n] = &in[n];
  if (ecornn_run(layer, &call, &error)) fail("run in place", &error);
  for (int32_t n = 0; n < d->state_count && !gpu; ++n) {
    if (memcmp(in[n].data, out[n].data, bytes(&in[n]))) return 8;
  }
  /* a program that was compiled when the struct ended earlier: what is behind it may be anything */
  ecornn_call older = call;
  older.size = offsetof(ecornn_call, threads);
  older.threads = -1;
  if (ecornn_run(layer, &older, &error)) fail("run of an older program", &error);

  call.state_in = NULL;
  call.state_out = NULL;
  memset(y.data, 0xff, bytes(&y));
  if (ecornn_run(layer, &call, &error)) fail("run from zeros", &error);
  written("y_from_zeros", &y);
  if (ecornn_repack(layer, weights, d->parameter_count, NULL, &error)) fail("repack", &error);

  if (gpu) pack_there(&module, layer, call, weight, weights, d->parameter_count);
  if (!gpu) ask_for_what_is_refused(&module, layer, call, weights, d->parameter_count);

  ecornn_release(layer);
  ecornn_close(&module);
  if (module.api) return 9;
  if (ecornn_open(arguments[0], &module, &error) == ECORNN_OK) return 10;
  refused("no module", error.code, &error);
  gone(&x);
  gone(&y);
  gone(&lengths);
  return 0;
}
