// One trip between the blocks of a cluster, as benchmarks/floor.py has it: every block sends a word to every block by
// st.async, which counts its bytes at an mbarrier there, waits for those of all, and sends the next.
//
//   nvcc -arch=sm_90a -o cluster_exchange benchmarks/cluster_exchange.cu && ./cluster_exchange
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <cuda_runtime.h>

#define CHECK(call) do { cudaError_t e = (call); if (e != cudaSuccess) { \
  std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e)); std::exit(1); } } while (0)

__device__ unsigned address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__global__ void trips(int steps, unsigned* wrong) {
  __shared__ unsigned words[2][16];
  __shared__ alignas(8) unsigned long long barriers[2];
  unsigned rank, blocks, lane = threadIdx.x;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  if (lane == 0) {
    for (int i = 0; i < 2; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(&barriers[i])) : "memory");
      expect(address(&barriers[i]), 4 * blocks);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  unsigned value = 0;
  for (int t = 0; t < steps; ++t) {
    int slot = t % 2;
    if (lane < blocks) {
      unsigned to = address(&words[slot][rank]), barrier = address(&barriers[slot]);
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(to), "r"(lane));
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(barrier), "r"(lane));
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                   :: "r"(to), "r"(value + 1), "r"(barrier) : "memory");
    }
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; "
                 "@!done bra again; }" :: "r"(address(&barriers[slot])), "r"(t / 2 % 2) : "memory");
    if (lane < blocks) value = words[slot][lane];
    __syncwarp();
    if (lane == 0 && t + 2 < steps) expect(address(&barriers[slot]), 4 * blocks);
    __syncwarp();
  }
  if (lane < blocks && value != static_cast<unsigned>(steps)) atomicAdd(wrong, 1);
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

float microseconds(int blocks, int steps, unsigned* wrong) {
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = 32;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaEventRecord(begin));
  CHECK(cudaLaunchKernelEx(&config, trips, steps, wrong));
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  float ms;
  CHECK(cudaEventElapsedTime(&ms, begin, end));
  return ms * 1e3f;
}

int main() {
  CHECK(cudaFuncSetAttribute(trips, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  unsigned* wrong;
  CHECK(cudaMallocManaged(&wrong, 4));
  *wrong = 0;
  for (int blocks : {2, 4, 8, 16}) {
    std::vector<float> each;  // of a trip: the difference of two lengths, so that launches do not count
    for (int i = 0; i < 25; ++i)
      each.push_back((microseconds(blocks, 20002, wrong) - microseconds(blocks, 2, wrong)) / 20000);
    std::sort(each.begin(), each.end());
    std::printf("%2d blocks: %.4f us [%.4f, %.4f]\n", blocks, each[12], each[5], each[20]);
  }
  CHECK(cudaDeviceSynchronize());
  std::printf("%u wrong\n", *wrong);
  return *wrong != 0;
}
