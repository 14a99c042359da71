// How many bytes a nanosecond L2 gives to multiprocessors, by bulk copies into shared memory and by wide loads.
//
//     nvcc -O3 -arch=sm_90a benchmarks/l2_rate.cu -o build/l2_rate && build/l2_rate
//
// Each block, one a multiprocessor, reads a region again and again: its own, or one that all share; of kernels with few
// and with many turns the difference is taken, so that launches and first reads do not count. Median of 15.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

constexpr int STAGES = 4, STAGE = 32 << 10, LOADERS = 1024;

__device__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void wait(uint64_t *barrier, uint32_t phase) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n}" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}

__global__ void bulk(const char *data, long apart, int region, int turns) {
  extern __shared__ __align__(128) char buffer[];
  __shared__ uint64_t full[STAGES];
  if (threadIdx.x) return;
  for (auto &one : full) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&one)));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const char *mine = data + blockIdx.x * apart;
  int pieces = region / STAGE * turns;
  auto copy = [&](int n) {
    uint32_t barrier = shared_address(&full[n % STAGES]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(STAGE) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(buffer + n % STAGES * STAGE)),
                 "l"(mine + (long)n * STAGE % region), "r"(STAGE), "r"(barrier) : "memory");
  };
  for (int n = 0; n < STAGES; n++) copy(n);
  for (int n = 0; n < pieces; n++) {
    wait(&full[n % STAGES], n / STAGES & 1);
    if (n + STAGES < pieces) copy(n + STAGES);
  }
}

__global__ void loads(const char *data, long apart, int region, int turns, float *sink) {
  const float4 *mine = (const float4 *)(data + blockIdx.x * apart);
  float sum = 0;
  for (int turn = 0; turn < turns; turn++)
#pragma unroll 8
    for (int n = threadIdx.x; n < region / 16; n += LOADERS) {
      float4 got = __ldcg(mine + n);
      sum += got.x + got.y + got.z + got.w;
    }
  if (sum == 1e30f) *sink = sum;
}

int main() {
  cudaDeviceProp chip;
  cudaGetDeviceProperties(&chip, 0);
  char *data;
  float *sink;
  cudaMalloc(&data, 64 << 20);
  cudaMalloc(&sink, 4);
  cudaMemset(data, 0, 64 << 20);
  cudaFuncSetAttribute(bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * STAGE);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  printf("%s, %d multiprocessors\n", chip.name, chip.multiProcessorCount);
  for (int wide = 0; wide < 2; wide++)
    for (int common = 0; common < 2; common++)
      for (int region : {128 << 10, 192 << 10, 256 << 10})
        for (int blocks : {1, 16, 66, chip.multiProcessorCount}) {
          long apart = common ? 0 : region;
          std::vector<float> found;
          for (int again = 0; again < 15; again++) {
            float times[2];
            for (int longer = 0; longer < 2; longer++) {
              int turns = longer ? 220 : 20;
              cudaEventRecord(begin);
              if (wide) loads<<<blocks, LOADERS>>>(data, apart, region, turns, sink);
              else bulk<<<blocks, 32, STAGES * STAGE>>>(data, apart, region, turns);
              cudaEventRecord(end);
              cudaEventSynchronize(end);
              cudaEventElapsedTime(&times[longer], begin, end);
            }
            found.push_back((double)region * blocks * 200 / ((times[1] - times[0]) * 1e6));
          }
          std::sort(found.begin(), found.end());
          printf("%-6s %-6s %4d KiB %4d blocks: %6.0f bytes/ns, %5.1f a multiprocessor\n", wide ? "loads" : "bulk",
                 common ? "common" : "own", region >> 10, blocks, found[7], found[7] / blocks);
        }
  printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
