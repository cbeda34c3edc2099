// What launches of kernels share.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace tileoverlap {

// Lets a kernel have so many bytes of dynamic shared memory; once for each device, as the runtime takes its time.
template <auto KERNEL>
int allow_shared_memory(int bytes) {
    static std::atomic<uint64_t> devices{0};
    int device;
    if (int error = cudaGetDevice(&device)) return error;
    uint64_t mine = uint64_t{1} << device % 64;
    if (devices.load(std::memory_order_relaxed) & mine) return 0;
    if (int error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    devices.fetch_or(mine, std::memory_order_relaxed);
    return 0;
}

}  // namespace tileoverlap
