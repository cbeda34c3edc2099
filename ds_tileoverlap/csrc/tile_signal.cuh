// How a finished tile is announced and awaited. A signal is a word that holds the epoch of its last use: it is never
// reset, so nothing has to be cleared between uses, and an old signal is never taken for a new one.
#pragma once
#include <cstdint>

namespace tileoverlap {

// After all threads that wrote the data have met at a barrier, one of them publishes.
__device__ __forceinline__ void publish(uint32_t* signal, uint32_t epoch) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(signal), "r"(epoch) : "memory");
}

__device__ __forceinline__ uint32_t read_signal(const uint32_t* signal) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(signal) : "memory");
    return value;
}

}  // namespace tileoverlap
