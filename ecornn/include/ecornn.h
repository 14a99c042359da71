/* Compiled recurrent layers, called from C.
 *
 * A module file that ecornn.compile() or ecornn-compile wrote is a shared library. It exports one C function,
 * ecornn_module_api, which gives the functions below by a table; ecornn_open() loads the file and finds it. Beside the file
 * a program needs this header, DLPack's, libdl and libtvm_ffi.so: `ecornn config --cflags --libs` has the flags.
 *
 * Arrays are DLTensors where the module runs (CPU or GPU), contiguous, their first element aligned to 16 bytes. T steps, B
 * rows of a batch (1 to the compiled one), I inputs, H hidden units, L layers, D directions. Functions return ECORNN_OK or
 * another ecornn_status, with a message in `error`, which may be NULL; nothing has run then.
 *
 * ABI: structs that a program fills begin with their size, structs that a module fills may grow at their end, and so may the
 * table. What has version 1 of the ABI stays as it is: a program that was compiled with a header of version 1 runs with
 * every module file that has version 1, older or newer. Where a file is too old for a function or a member that the program
 * uses, that is ECORNN_VERSION. Files from before there was a C interface are refused by ecornn_open(); compile them again.
 */
#ifndef ECORNN_H_
#define ECORNN_H_

#include <dlfcn.h>
#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "ecornn_checksum.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ECORNN_ABI_VERSION 1

typedef enum ecornn_status {
  ECORNN_OK = 0,
  ECORNN_ARGUMENT = 1,   /* a value that is not allowed */
  ECORNN_SHAPE = 2,      /* a tensor of another shape */
  ECORNN_DTYPE = 3,      /* a tensor of another data type */
  ECORNN_LAYOUT = 4,     /* a tensor that is strided or not aligned to 16 bytes */
  ECORNN_DEVICE = 5,     /* a tensor elsewhere than the layer; a CPU that lacks instructions; no such GPU */
  ECORNN_WEIGHTS = 6,    /* names that are missing or unexpected */
  ECORNN_NOT_FINITE = 7, /* an infinite weight, of a module whose products need finite ones */
  ECORNN_WORKSPACE = 8,  /* the caller's memory is too small or not aligned as it must be */
  ECORNN_UNSUPPORTED = 9, /* the module was compiled without it */
  ECORNN_FILE = 10,      /* no module or weights file, or a damaged one */
  ECORNN_VERSION = 11,   /* of the ABI */
  ECORNN_MEMORY = 12,    /* there is not enough */
  ECORNN_FAILED = 13     /* of the CUDA driver, or a thread that cannot be started */
} ecornn_status;

typedef struct ecornn_error {
  int32_t code; /* an ecornn_status */
  char message[508];
} ecornn_error;

/* A parameter of the layer as PyTorch names, shapes and stores it: (G*H, K) or (G*H,), gates in PyTorch's order. */
typedef struct ecornn_parameter {
  const char* name; /* such as weight_ih_l0 */
  int32_t ndim;
  int64_t shape[2];
} ecornn_parameter;

/* What a module is. */
typedef struct ecornn_description {
  size_t size;              /* of this struct as the module file knows it */
  DLDeviceType device_type; /* kDLCPU or kDLCUDA */
  DLDataType dtype;         /* of x, y and the states */
  DLDataType gradient_dtype; /* of gradients of weights */
  int64_t input, hidden;    /* I, H */
  int64_t batch;            /* the largest B */
  int64_t longest;          /* the largest T of a call */
  int32_t layers, directions;
  int32_t lengths, resets, sequences, training; /* whether it was compiled with them: 0 or 1 */
  const char* cell;
  int32_t state_count;
  const char* const* states; /* names, such as h and c */
  int32_t parameter_count;
  const ecornn_parameter* parameters;
  const char* manifest; /* all that the file says about itself, JSON */
} ecornn_description;

/* A tensor by its parameter's name. */
typedef struct ecornn_named {
  const char* name;
  const DLTensor* tensor;
} ecornn_named;

typedef struct ecornn_bind_options {
  size_t size;      /* sizeof(ecornn_bind_options) */
  int32_t device;   /* number of the GPU; 0 for a CPU */
  int32_t threads;  /* CPU threads of a call, 1 to 1024; 0: one */
  int64_t reserve;  /* T for which the layer makes a workspace now; 0: 1. A call within it allocates nothing. -1: the layer
                       only packs, for a caller of the file's entries, and cannot be called */
  void* stream;     /* cudaStream_t that weights on the GPU are read on, and waited for; NULL: the default stream */
} ecornn_bind_options;

/* One call. States are one tensor for each state of the cell, (B, H), or (L*D, B, H) where L*D > 1; with `sequences` they
 * have S rows. Of run on a CPU the same memory may be
 * state_in and state_out; x must not overlap with y. */
typedef struct ecornn_call {
  size_t size;                      /* sizeof(ecornn_call) */
  const DLTensor* x;                /* (T, B, I) */
  DLTensor* y;                      /* (T, B, D*H) */
  const DLTensor* const* state_in;  /* NULL: zeros */
  DLTensor* const* state_out;       /* NULL: not wanted */
  const DLTensor* lengths;          /* (B,) int32, 0 to T; y is zero beyond. This and the next two: if and only if the */
  const DLTensor* resets;           /* (T, B) uint8 or bool, where a new sequence starts   module was compiled with them */
  const DLTensor* sequences;        /* (T, B) int32, as ecornn.Columns marks them; not checked */
  void* workspace;                  /* of ecornn_workspace_size(), aligned to 256 bytes; NULL: the layer's own */
  size_t workspace_size;
  void* stream;                     /* cudaStream_t; ignored on a CPU */
  int32_t threads;                  /* CPU threads of this call; 0: as bound */
  void* kept;                       /* forward and backward: ecornn_kept_size() bytes, aligned to 16 */
  size_t kept_size;
} ecornn_call;

/* What backward reads and writes besides x, y, state_in, lengths, resets and kept, which are those of the call of forward. */
typedef struct ecornn_gradients {
  size_t size;                      /* sizeof(ecornn_gradients) */
  const DLTensor* dy;               /* (T, B, D*H) */
  const DLTensor* const* dstate_out; /* as state_out; NULL: zeros */
  DLTensor* dx;                     /* (T, B, I) */
  DLTensor* const* dstate_in;       /* as state_in; NULL: not wanted */
  const ecornn_named* weights;      /* all of them, of gradient_dtype and the weights' shapes: gradients are ADDED */
  int32_t weight_count;
} ecornn_gradients;

typedef struct ecornn_layer ecornn_layer;

/* The functions of a module file; `size` is of this struct as the file knows it. */
typedef struct ecornn_api {
  int32_t version; /* ECORNN_ABI_VERSION */
  int32_t size;
  const ecornn_description* (*describe)(ecornn_error* error);
  int32_t (*bind)(const ecornn_named* weights, int32_t count, const ecornn_bind_options* options, ecornn_layer** layer,
                  ecornn_error* error);
  int32_t (*repack)(ecornn_layer* layer, const ecornn_named* weights, int32_t count, void* stream, ecornn_error* error);
  void (*release)(ecornn_layer* layer);
  int64_t (*workspace_size)(const ecornn_layer* layer, int64_t steps, int64_t rows);
  int64_t (*kept_size)(const ecornn_layer* layer, int64_t steps, int64_t batch);
  int32_t (*run)(ecornn_layer* layer, const ecornn_call* call, ecornn_error* error);
  int32_t (*forward)(ecornn_layer* layer, const ecornn_call* call, ecornn_error* error);
  int32_t (*backward)(ecornn_layer* layer, const ecornn_call* call, const ecornn_gradients* gradients,
                      ecornn_error* error);
  /* For callers of the file's entries, as the Python package is: the address of each packed buffer, in the order in which
   * the manifest's buffers first have its packing. They stay as long as the layer. */
  const int64_t* (*packed)(const ecornn_layer* layer);
  /* Packs contiguous weights of one type, where the layer runs, at these addresses in the parameters' order. On a CPU
   * float32 with the layer's threads, those alone that have a 1 in `changed`, one byte a parameter, unless it is NULL. On a
   * GPU float16, bfloat16 or float32 on the stream, without waiting; address 0 stands for zeros; `parts` as ecornn_parts.
   * Nothing of these is checked. ECORNN_UNSUPPORTED where the module's own code cannot: ecornn_repack() does it then. */
  int32_t (*pack_at)(ecornn_layer* layer, const int64_t* weights, DLDataType type, const uint8_t* changed, int32_t parts,
                     void* stream, ecornn_error* error);
} ecornn_api;

typedef enum ecornn_parts {
  ECORNN_NEEDED = 1,  /* buffers that every call reads */
  ECORNN_OPTIONAL = 2 /* buffers that are read for gradients of first states alone */
} ecornn_parts;

/* The beginning of every layer, whose rest is the module's own. */
struct ecornn_layer {
  const ecornn_api* api;
};

/* The one function that a module file exports for C; NULL where it does not have that version. */
typedef const ecornn_api* (*ecornn_module_api_function)(int32_t version);

/* A module file that is open. */
typedef struct ecornn_module {
  void* library;
  const ecornn_api* api;
} ecornn_module;

static inline int32_t ecornn_refuse_(ecornn_error* error, ecornn_status code, const char* path, const char* what) {
  if (error) {
    error->code = (int32_t)code;
    snprintf(error->message, sizeof error->message, "%s %s", path, what);
  }
  return (int32_t)code;
}

/* Loads a module file, whose code runs in this process: open only files that you trust. One whose bytes have changed since
 * it was written, as its checksum says, is ECORNN_FILE before the dynamic loader has it. */
static inline int32_t ecornn_open(const char* path, ecornn_module* module, ecornn_error* error) {
  const char* damage = ecornn_damage_(path);
  char name[4096];
  ecornn_module_api_function function;
  void* found;
  module->library = NULL;
  module->api = NULL;
  if (damage) return ecornn_refuse_(error, ECORNN_FILE, path, damage);
  /* without a slash the loader would look elsewhere */
  if (snprintf(name, sizeof name, "%s%s", strchr(path, '/') ? "" : "./", path) >= (int)sizeof name) {
    return ecornn_refuse_(error, ECORNN_FILE, path, "is too long a name");
  }
  module->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!module->library) return ecornn_refuse_(error, ECORNN_FILE, path, dlerror());
  found = dlsym(module->library, "ecornn_module_api");
  memcpy(&function, &found, sizeof function);
  if (!function || !(module->api = function(ECORNN_ABI_VERSION))) {
    dlclose(module->library);
    module->library = NULL;
    return ecornn_refuse_(error, ECORNN_VERSION, path, function ?
        "has another version of the C interface: compile it again, or the program with its version's header" :
        "was compiled before modules had a C interface: compile it again");
  }
  return ECORNN_OK;
}

/* After the last layer has been released. */
static inline void ecornn_close(ecornn_module* module) {
  if (module->library) dlclose(module->library);
  module->library = NULL;
  module->api = NULL;
}

/* Sizes, names and types; they live as long as the module is open. NULL where the file is no layer. */
static inline const ecornn_description* ecornn_describe(const ecornn_module* module, ecornn_error* error) {
  return module->api->describe(error);
}

/* Packs weights, as PyTorch stores them, of float16, bfloat16, float32 or float64, on the host, with any strides, or
 * contiguous on the module's GPU; they are not needed afterwards. A module that trains packs by its own kernel what lies on
 * the GPU, all of one type and not float64; others are packed on the host. `options` may be NULL. Several threads may call
 * one layer at a time. */
static inline int32_t ecornn_bind(const ecornn_module* module, const ecornn_named* weights, int32_t count,
                                  const ecornn_bind_options* options, ecornn_layer** layer, ecornn_error* error) {
  return module->api->bind(weights, count, options, layer, error);
}

/* Packs all weights anew, where they were. No call of the layer may be under way, on a GPU unless it is on `stream`, in
 * whose order this is. Where the module's kernel packs it is not waited for, and once it has run a CUDA graph may have it. */
static inline int32_t ecornn_repack(ecornn_layer* layer, const ecornn_named* weights, int32_t count, void* stream,
                                    ecornn_error* error) {
  return layer->api->repack(layer, weights, count, stream, error);
}

/* Frees the layer; NULL is allowed. */
static inline void ecornn_release(ecornn_layer* layer) {
  if (layer) layer->api->release(layer);
}

/* Bytes of workspace of any call with T = `steps` and states of `rows` rows: B, or S with `sequences`. */
static inline int64_t ecornn_workspace_size(const ecornn_layer* layer, int64_t steps, int64_t rows) {
  return layer->api->workspace_size(layer, steps, rows);
}

/* Bytes that forward keeps for backward besides x, y and state_in; 0 for a module that does not train. */
static inline int64_t ecornn_kept_size(const ecornn_layer* layer, int64_t steps, int64_t batch) {
  return layer->api->kept_size(layer, steps, batch);
}

/* Runs a sequence. On a GPU it is put on the stream, and is not waited for. */
static inline int32_t ecornn_run(ecornn_layer* layer, const ecornn_call* call, ecornn_error* error) {
  return layer->api->run(layer, call, error);
}

/* As ecornn_run(), and keeps what backward reads; state_in must be given or NULL for both. */
static inline int32_t ecornn_forward(ecornn_layer* layer, const ecornn_call* call, ecornn_error* error) {
  return layer->api->forward(layer, call, error);
}

/* The gradients of a call of forward. */
static inline int32_t ecornn_backward(ecornn_layer* layer, const ecornn_call* call, const ecornn_gradients* gradients,
                                      ecornn_error* error) {
  return layer->api->backward(layer, call, gradients, error);
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ECORNN_H_ */
