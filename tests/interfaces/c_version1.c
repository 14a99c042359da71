/* What programs and module files of version 1 of ecornn.h have in them. It may grow at ends; nothing here may change. */
#include <ecornn.h>

#define AT(type, member, place) _Static_assert(offsetof(type, member) == (place), #type "." #member)
#define IS(name, number) _Static_assert(name == (number), #name)

IS(ECORNN_ABI_VERSION, 1);
IS(ECORNN_OK, 0);
IS(ECORNN_ARGUMENT, 1);
IS(ECORNN_SHAPE, 2);
IS(ECORNN_DTYPE, 3);
IS(ECORNN_LAYOUT, 4);
IS(ECORNN_DEVICE, 5);
IS(ECORNN_WEIGHTS, 6);
IS(ECORNN_NOT_FINITE, 7);
IS(ECORNN_WORKSPACE, 8);
IS(ECORNN_UNSUPPORTED, 9);
IS(ECORNN_FILE, 10);
IS(ECORNN_VERSION, 11);
IS(ECORNN_MEMORY, 12);
IS(ECORNN_FAILED, 13);

AT(ecornn_error, code, 0);
AT(ecornn_error, message, 4);
_Static_assert(sizeof(ecornn_error) == 512, "a program gives its own");

AT(ecornn_parameter, name, 0);
AT(ecornn_parameter, ndim, 8);
AT(ecornn_parameter, shape, 16);
_Static_assert(sizeof(ecornn_parameter) == 32, "there is an array of them");
AT(ecornn_named, name, 0);
AT(ecornn_named, tensor, 8);
_Static_assert(sizeof(ecornn_named) == 16, "there is an array of them");

AT(ecornn_description, size, 0);
AT(ecornn_description, device_type, 8);
AT(ecornn_description, dtype, 12);
AT(ecornn_description, gradient_dtype, 16);
AT(ecornn_description, input, 24);
AT(ecornn_description, hidden, 32);
AT(ecornn_description, batch, 40);
AT(ecornn_description, longest, 48);
AT(ecornn_description, layers, 56);
AT(ecornn_description, directions, 60);
AT(ecornn_description, lengths, 64);
AT(ecornn_description, resets, 68);
AT(ecornn_description, sequences, 72);
AT(ecornn_description, training, 76);
AT(ecornn_description, cell, 80);
AT(ecornn_description, state_count, 88);
AT(ecornn_description, states, 96);
AT(ecornn_description, parameter_count, 104);
AT(ecornn_description, parameters, 112);
AT(ecornn_description, manifest, 120);

AT(ecornn_bind_options, size, 0);
AT(ecornn_bind_options, device, 8);
AT(ecornn_bind_options, threads, 12);
AT(ecornn_bind_options, reserve, 16);
AT(ecornn_bind_options, stream, 24);

AT(ecornn_call, size, 0);
AT(ecornn_call, x, 8);
AT(ecornn_call, y, 16);
AT(ecornn_call, state_in, 24);
AT(ecornn_call, state_out, 32);
AT(ecornn_call, lengths, 40);
AT(ecornn_call, resets, 48);
AT(ecornn_call, sequences, 56);
AT(ecornn_call, workspace, 64);
AT(ecornn_call, workspace_size, 72);
AT(ecornn_call, stream, 80);
AT(ecornn_call, threads, 88);
AT(ecornn_call, kept, 96);
AT(ecornn_call, kept_size, 104);

AT(ecornn_gradients, size, 0);
AT(ecornn_gradients, dy, 8);
AT(ecornn_gradients, dstate_out, 16);
AT(ecornn_gradients, dx, 24);
AT(ecornn_gradients, dstate_in, 32);
AT(ecornn_gradients, weights, 40);
AT(ecornn_gradients, weight_count, 48);

AT(ecornn_layer, api, 0);
AT(ecornn_api, version, 0);
AT(ecornn_api, size, 4);
AT(ecornn_api, describe, 8);
AT(ecornn_api, bind, 16);
AT(ecornn_api, repack, 24);
AT(ecornn_api, release, 32);
AT(ecornn_api, workspace_size, 40);
AT(ecornn_api, kept_size, 48);
AT(ecornn_api, run, 56);
AT(ecornn_api, forward, 64);
AT(ecornn_api, backward, 72);

int main(void) { return 0; }
