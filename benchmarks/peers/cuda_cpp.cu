// The CUDA C++ kernel that the package is measured against: four warps per block, a warp per part of a row, K copied
// and then V. STORE_CASES(X) and STORE_EARLY_LAUNCH are put before this text by cuda_cpp.py.

#include <cassert>
#include <cstdint>

#include <cuda_runtime.h>

namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 4;

struct Arguments {
  const char* k;
  const char* v;
  char* k_cache;
  char* v_cache;
  const void* indices;
  int64_t k_stride, v_stride, k_cache_stride, v_cache_stride;  // bytes
  int64_t index_stride;                                        // elements
  uint32_t batch;
  int64_t size_limit;
};

template <int kBytes> struct VectorOf;
template <> struct VectorOf<16> { using type = uint4; };
template <> struct VectorOf<8> { using type = uint2; };
template <> struct VectorOf<4> { using type = uint32_t; };

template <int kPartBytes>
__device__ __forceinline__ void copy_part(const char* source, char* target, uint32_t lane) {
  constexpr int kVector = kPartBytes % (16 * kWarp) == 0 ? 16 : kPartBytes % (8 * kWarp) == 0 ? 8 : 4;
  constexpr int kVectors = kPartBytes / kVector;
  using Vector = typename VectorOf<kVector>::type;
  const auto from = reinterpret_cast<const Vector*>(source);
  const auto to = reinterpret_cast<Vector*>(target);
#pragma unroll
  for (int i = 0; i < kVectors / kWarp; ++i) to[i * kWarp + lane] = from[i * kWarp + lane];
  if constexpr (kVectors % kWarp != 0) {
    constexpr int kDone = kVectors / kWarp * kWarp;
    if (lane < kVectors % kWarp) to[kDone + lane] = from[kDone + lane];
  }
}

template <int kRowBytes, int kSplit, bool kEarly, typename Index>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) store_kvcache(const __grid_constant__ Arguments a) {
  static_assert(kRowBytes > 0 && kRowBytes % (4 * kSplit) == 0);
  constexpr int kPartBytes = kRowBytes / kSplit;
  const uint32_t warp = blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t item = warp / kSplit;
  const int64_t part = static_cast<int64_t>(warp % kSplit) * kPartBytes;
  if (item >= a.batch) return;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kEarly) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int64_t index = static_cast<const Index*>(a.indices)[item * a.index_stride];
  assert(0 <= index && index < a.size_limit);
  copy_part<kPartBytes>(a.k + item * a.k_stride + part, a.k_cache + index * a.k_cache_stride + part, lane);
  copy_part<kPartBytes>(a.v + item * a.v_stride + part, a.v_cache + index * a.v_cache_stride + part, lane);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kEarly) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <int kRowBytes, int kSplit>
void launch(const Arguments& arguments, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((arguments.batch * kSplit + kWarpsPerBlock - 1) / kWarpsPerBlock);
  config.blockDim = dim3(kWarp * kWarpsPerBlock);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = STORE_EARLY_LAUNCH ? 1 : 0;
  const auto status =
      cudaLaunchKernelEx(&config, store_kvcache<kRowBytes, kSplit, STORE_EARLY_LAUNCH, int64_t>, arguments);
  TVM_FFI_CHECK(status == cudaSuccess, RuntimeError) << cudaGetErrorString(status);
}

int64_t item_bytes(const tvm::ffi::TensorView& tensor) { return tensor.dtype().bits * tensor.dtype().lanes / 8; }

void check_rows(const tvm::ffi::TensorView& tensor, const tvm::ffi::TensorView& like, const char* name) {
  TVM_FFI_CHECK(tensor.ndim() == 2 && tensor.stride(1) == 1, ValueError) << name << " must have dense rows";
  TVM_FFI_CHECK(tensor.size(1) == like.size(1), ValueError) << name << " must be as wide as k";
  TVM_FFI_CHECK(tensor.dtype() == like.dtype(), TypeError) << name << " must have k's dtype";
  TVM_FFI_CHECK(tensor.device().device_id == like.device().device_id, ValueError) << name << " must be on k's device";
}

void run(tvm::ffi::TensorView k, tvm::ffi::TensorView v, tvm::ffi::TensorView k_cache, tvm::ffi::TensorView v_cache,
         tvm::ffi::TensorView indices, int64_t num_split, int64_t size_limit) {
  check_rows(k, k, "k");
  check_rows(v, k, "v");
  check_rows(k_cache, k, "k_cache");
  check_rows(v_cache, k, "v_cache");
  TVM_FFI_CHECK(indices.ndim() == 1 && indices.dtype().code == kDLInt && indices.dtype().bits == 64, TypeError)
      << "indices must be int64, (B,)";
  TVM_FFI_CHECK(k.size(0) == indices.size(0) && v.size(0) == indices.size(0), ValueError)
      << "k, v and indices must have one row count";
  const int64_t item = item_bytes(k);
  const int64_t row_bytes = k.size(1) * item;
  const Arguments arguments{
      static_cast<const char*>(k.data_ptr()),   static_cast<const char*>(v.data_ptr()),
      static_cast<char*>(k_cache.data_ptr()),   static_cast<char*>(v_cache.data_ptr()),
      indices.data_ptr(),                       k.stride(0) * item,
      v.stride(0) * item,                       k_cache.stride(0) * item,
      v_cache.stride(0) * item,                 indices.stride(0),
      static_cast<uint32_t>(indices.size(0)),   size_limit,
  };
  const auto device = k.device();
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
#define STORE_CASE(ROW_BYTES, SPLIT) \
  if (row_bytes == ROW_BYTES && num_split == SPLIT) return launch<ROW_BYTES, SPLIT>(arguments, stream);
  STORE_CASES(STORE_CASE)
#undef STORE_CASE
  TVM_FFI_THROW(ValueError) << "num_split=" << num_split << " was not built for rows of " << row_bytes << " bytes";
}

}  // namespace
