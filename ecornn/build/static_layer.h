/* A recurrent layer that is linked into the program, by lib$name.a or $name.a: $what. */
#ifndef ECORNN_LAYER_${upper}_H_
#define ECORNN_LAYER_${upper}_H_

#include <ecornn.h>

#ifdef __cplusplus
extern "C" {
#endif

const ecornn_api* ${name}_module_api(int32_t version);

/* The layer as a module that is open, as ecornn_open() opens files. */
static inline int32_t ${name}_open(ecornn_module* module, ecornn_error* error) {
  module->library = NULL;
  module->api = ${name}_module_api(ECORNN_ABI_VERSION);
  return module->api ? (int32_t)ECORNN_OK
                     : ecornn_refuse_(error, ECORNN_VERSION, "${name}", "has another version of the C interface");
}

$bind#ifdef __cplusplus
}
#endif

#endif
