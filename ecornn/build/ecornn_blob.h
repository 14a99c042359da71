// Data of a module: its manifest, and the tables of its C interface.
#pragma once
#include <stdint.h>

struct ecornn_blob {
  const unsigned char* data;  // with a zero behind it
  uint64_t size;
};

extern "C" {
extern __attribute__((visibility("hidden"))) ecornn_blob ecornn_manifest, ecornn_c_tables;
}
