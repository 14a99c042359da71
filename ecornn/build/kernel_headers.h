// What generated kernels use of CUDA's headers, of which nvcc takes longer to read all than to compile most kernels.
// Declared and computed as there, so that the machine code is the same. A source that needs more is compiled
// with CUDA's headers.
typedef decltype(sizeof(0)) size_t;
#include "crt/host_defines.h"
#include "device_launch_parameters.h"

#define ECORNN_BUILTIN extern "C" __device__ __device_builtin__
ECORNN_BUILTIN void __syncthreads(void);
ECORNN_BUILTIN int __float_as_int(float);
ECORNN_BUILTIN float __int_as_float(int);
ECORNN_BUILTIN float __uint_as_float(unsigned int);
ECORNN_BUILTIN int min(int, int);
ECORNN_BUILTIN int max(int, int);
ECORNN_BUILTIN unsigned int umin(unsigned int, unsigned int);
ECORNN_BUILTIN unsigned int umax(unsigned int, unsigned int);
ECORNN_BUILTIN long long int llmin(long long int, long long int);
ECORNN_BUILTIN long long int llmax(long long int, long long int);
ECORNN_BUILTIN float fabsf(float);
ECORNN_BUILTIN float fminf(float, float);
ECORNN_BUILTIN float fmaxf(float, float);
ECORNN_BUILTIN float fmaf(float, float, float);
ECORNN_BUILTIN float expf(float);
ECORNN_BUILTIN float exp2f(float);
ECORNN_BUILTIN float logf(float);
ECORNN_BUILTIN float powf(float, float);
ECORNN_BUILTIN float sqrtf(float);
ECORNN_BUILTIN float sinf(float);
ECORNN_BUILTIN float cosf(float);
ECORNN_BUILTIN float tanhf(float);
ECORNN_BUILTIN float erff(float);
#undef ECORNN_BUILTIN
__device__ __forceinline__ unsigned int min(unsigned int a, unsigned int b) { return umin(a, b); }
__device__ __forceinline__ unsigned int max(unsigned int a, unsigned int b) { return umax(a, b); }
__device__ __forceinline__ long int min(long int a, long int b) { return (long int)llmin(a, b); }
__device__ __forceinline__ long int max(long int a, long int b) { return (long int)llmax(a, b); }
__device__ __forceinline__ float min(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }

#include "sm_20_intrinsics.h"  // __cvta_generic_to_shared
#include "sm_30_intrinsics.h"  // __shfl_sync and the like

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int int64_t;
typedef unsigned long int uint64_t;
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
#define INFINITY __int_as_float(0x7f800000)

struct __attribute__((aligned(2))) half {
  unsigned short bits;
  half() = default;
  __device__ half(float value) { asm("{cvt.rn.f16.f32 %0, %1;}" : "=h"(bits) : "f"(value)); }
  __device__ operator float() const {
    float value;
    asm("{cvt.f32.f16 %0, %1;}" : "=f"(value) : "h"(bits));
    return value;
  }
};

struct __attribute__((aligned(2))) nv_bfloat16 {
  unsigned short bits;
  nv_bfloat16() = default;
  __device__ nv_bfloat16(float value) { asm("{cvt.rn.bf16.f32 %0, %1;}" : "=h"(bits) : "f"(value)); }
  __device__ operator float() const {
    float value;
#if __CUDA_ARCH__ >= 900
    asm("{cvt.f32.bf16 %0, %1;}" : "=f"(value) : "h"(bits));
#else
    asm("{mov.b32 %0, {0, %1};}" : "=f"(value) : "h"(bits));
#endif
    return value;
  }
};

// constants
__device__ __forceinline__ half __float2half_rn(float value) { return half(value); }
__device__ __forceinline__ nv_bfloat16 __float2bfloat16_rn(float value) { return nv_bfloat16(value); }
