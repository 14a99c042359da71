/* The digest at the end of a module file, which ecornn_open() checks: SHA-256 (FIPS 180-4) of all before it, then a mark. */
#ifndef ECORNN_CHECKSUM_H_
#define ECORNN_CHECKSUM_H_

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static inline uint32_t ecornn_turned_(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

/* One block of 64 bytes. */
static inline void ecornn_sha256_block_(uint32_t state[8], const unsigned char* block) {
  static const uint32_t kRound[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t w[64], v[8];
  int t;
  for (t = 0; t < 16; ++t) {
    w[t] = (uint32_t)block[4 * t] << 24 | (uint32_t)block[4 * t + 1] << 16 | (uint32_t)block[4 * t + 2] << 8 |
           (uint32_t)block[4 * t + 3];
  }
  for (; t < 64; ++t) {
    const uint32_t a = w[t - 15], b = w[t - 2];
    w[t] = w[t - 16] + (ecornn_turned_(a, 7) ^ ecornn_turned_(a, 18) ^ (a >> 3)) + w[t - 7] +
           (ecornn_turned_(b, 17) ^ ecornn_turned_(b, 19) ^ (b >> 10));
  }
  memcpy(v, state, sizeof v);
  for (t = 0; t < 64; ++t) {
    const uint32_t e = v[4], a = v[0];
    const uint32_t one = v[7] + (ecornn_turned_(e, 6) ^ ecornn_turned_(e, 11) ^ ecornn_turned_(e, 25)) +
                         ((e & v[5]) ^ (~e & v[6])) + kRound[t] + w[t];
    const uint32_t two = (ecornn_turned_(a, 2) ^ ecornn_turned_(a, 13) ^ ecornn_turned_(a, 22)) +
                         ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
    memmove(v + 1, v, 7 * sizeof *v);
    v[4] += one;
    v[0] = one + two;
  }
  for (t = 0; t < 8; ++t) state[t] += v[t];
}

/* What is wrong with a file, for a message, or NULL: that it cannot be read, has no mark, or another digest than it says. */
static inline const char* ecornn_damage_(const char* path) {
  static const char kMark[] = "ecornn checksum\n";
  enum { kMarkSize = sizeof kMark - 1, kEnd = 32 + kMarkSize };
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  unsigned char end[kEnd], block[128];
  const char* wrong = NULL;
  FILE* file = fopen(path, "rb");
  long size, left;
  int i, last;
  if (!file) return "cannot be read";
  if (fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < (long)kEnd || fseek(file, size - kEnd, SEEK_SET) != 0 ||
      fread(end, 1, kEnd, file) != kEnd || memcmp(end + 32, kMark, kMarkSize) != 0 || fseek(file, 0, SEEK_SET) != 0) {
    fclose(file);
    return "is no module file, or a damaged one";
  }
  size -= kEnd;
  for (left = size; left >= 64 && !wrong; left -= 64) {
    if (fread(block, 1, 64, file) != 64) wrong = "cannot be read";
    else ecornn_sha256_block_(state, block);
  }
  if (!wrong && fread(block, 1, (size_t)left, file) != (size_t)left) wrong = "cannot be read";
  fclose(file);
  if (wrong) return wrong;
  last = left < 56 ? 64 : 128;
  memset(block + left, 0, (size_t)(last - left));
  block[left] = 0x80;
  for (i = 0; i < 8; ++i) block[last - 1 - i] = (unsigned char)((uint64_t)size * 8 >> 8 * i);
  for (i = 0; i < last; i += 64) ecornn_sha256_block_(state, block + i);
  for (i = 0; i < 32; ++i) {
    if (end[i] != (unsigned char)(state[i / 4] >> (24 - i % 4 * 8))) {
      return "has changed since it was written, as its checksum says: compile or copy it again";
    }
  }
  return NULL;
}

#endif /* ECORNN_CHECKSUM_H_ */
