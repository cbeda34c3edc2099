// The shared memory of a warp that moves rows.
#pragma once
#include <cstdint>

#include "ptx.cuh"

namespace tileoverlap {

// Shared memory of one warp: pieces of rows are loaded into one half while those in the other one are worked on.
template <int HALF>
struct CourierMemory {
    static constexpr int HALF_BYTES = HALF;
    alignas(128) uint8_t halves[2][HALF];
    uint64_t loaded[2];
    // What the first lane has to know of a piece later.
    struct Note { int64_t place; int bytes, band; } notes[4];
};

// A warp's way to use it. The bulk copy engine loads: every instruction of a warp alone takes as long as many bytes travel,
// so pieces are large and lanes load their shares of one at once. All lanes call all of it.
template <typename Memory>
class Pieces {
public:
    using Note = typename Memory::Note;

    __device__ explicit Pieces(Memory& memory) : memory(memory) {
        if (threadIdx.x % 32 == 0) {
            for (int i = 0; i < 2; i++) barrier_init(&memory.loaded[i], 1);
            barrier_init_fence();
        }
        __syncwarp();
    }

    // Begun and not taken, at most two.
    __device__ int size() const { return begun - taken; }
    __device__ int num_taken() const { return taken; }  // of all
    __device__ const Note& note_of(int piece) const { return memory.notes[piece % 4]; }

    // The next piece, of so many bytes. Addresses and shares are multiples of 16 bytes; a lane may have none.
    __device__ void load(const Note& note, const void* from, int to_byte, int share) {
        int half = begun++ % 2;
        if (threadIdx.x % 32 == 0) {
            memory.notes[(begun - 1) % 4] = note;
            barrier_expect(&memory.loaded[half], note.bytes);
        }
        __syncwarp();
        if (share > 0) bulk_load(memory.halves[half] + to_byte, from, share, &memory.loaded[half]);
    }

    // Waits for the oldest piece.
    __device__ uint8_t* front() {
        barrier_wait(&memory.loaded[taken % 2], taken / 2 % 2);
        return memory.halves[taken % 2];
    }
    // No lane reads the oldest piece any more.
    __device__ void pop() {
        __syncwarp();
        taken++;
    }

private:
    Memory& memory;
    int begun = 0, taken = 0;
};

}  // namespace tileoverlap
