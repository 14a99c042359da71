/* The weights that the library has, of which ${name}_bind() makes a layer, as ecornn_bind() does of others. */
extern const struct ${name}_weights_in_it {
  const unsigned char* data;
  uint64_t size;
} ${name}_weights;

static inline int32_t ${name}_bind(const ecornn_module* module, const ecornn_bind_options* options, ecornn_layer** layer,
                                   ecornn_error* error) {
  static int64_t shapes[][2] = {$shapes};
  DLTensor tensors[] = {
      $tensors};
  const ecornn_named weights[] = {$named};
  return ecornn_bind(module, weights, $count, options, layer, error);
}

