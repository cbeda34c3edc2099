// The 16-bit types for the emulation; what the real file has for the GEMM is not emulated.
#pragma once
#include <cuda_runtime.h>

struct __nv_bfloat16 { uint16_t bits; };
struct __half { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half2 { __half x, y; };

inline float to_float(__nv_bfloat16 value) { return __int_as_float(static_cast<int>(static_cast<uint32_t>(value.bits) << 16)); }
inline float to_float(__half value) { _Float16 half; std::memcpy(&half, &value.bits, 2); return static_cast<float>(half); }
inline __nv_bfloat16 from_float(float value, __nv_bfloat16) {
    uint32_t bits = static_cast<uint32_t>(__float_as_int(value));
    if (std::isnan(value)) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __half from_float(float value, __half) {
    _Float16 half = static_cast<_Float16>(value);
    __half result;
    std::memcpy(&result.bits, &half, 2);
    return result;
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {to_float(pair.x), to_float(pair.y)}; }
inline float2 __half22float2(__half2 pair) { return {to_float(pair.x), to_float(pair.y)}; }

namespace tileoverlap {

template <typename T>
uint32_t pack(float low, float high, T) {
    return from_float(low, T{}).bits | static_cast<uint32_t>(from_float(high, T{}).bits) << 16;
}

inline uint8_t* aligned_shared(uint8_t* memory, uint32_t bytes) {
    return memory + (-reinterpret_cast<uintptr_t>(memory) & (bytes - 1));
}
inline int sm_index() { return blockIdx.x; }
inline void fence_async_global() {}
// A bulk copy is done when it is begun; all lanes of a warp wait for those of all.
inline void barrier_init(uint64_t*, uint32_t) {}
inline void barrier_init_fence() {}
inline void barrier_expect(uint64_t*, uint32_t) {}
inline void barrier_wait(uint64_t*, uint32_t) { __syncwarp(); }
template <typename Vector>
Vector load_shared_16(const void* pointer) { return *static_cast<const Vector*>(pointer); }
inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t*) { std::memcpy(to, from, bytes); }
inline void bulk_store(void* to, const void* from, uint32_t bytes) { std::memcpy(to, from, bytes); }
inline void bulk_stores_wait_read() {}
inline void load_16_async(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void loads_commit() {}
template <int PENDING>
void loads_wait() {}
template <int PENDING>
void bulk_stores_wait() {}

}  // namespace tileoverlap
