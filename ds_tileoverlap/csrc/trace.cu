#include "trace.cuh"

namespace tileoverlap {
namespace {

__global__ void mark(const __grid_constant__ TileOverlapMark args) {
    bool begins = args.kind == STAGE_BEGAN;
    args.trace->stage = args.stage;
    record(args.trace, static_cast<TileOverlapMoment>(args.kind), 0, 0, -1, nanoseconds());
    if (!begins) args.trace->stage = args.outer;
}

// One thread. Rank 0 asks one peer after the other, each several times: the quickest answer tells most.
__global__ void compare_clocks(const __grid_constant__ TileOverlapClocks args) {
    auto come = [&](int peer, int round) {
        const uint32_t* word = args.answers + peer;
        uint32_t expected = round + 1;
        bool in_time = wait_until([&] { return reached(read_peer_signal(word), expected); }, args.failure, args.limit_ns, 0);
        if (!in_time) report(args.failure, PEER_BEGAN, peer, round, expected, read_peer_signal(word));
        return in_time;
    };
    bool asks = args.rank == 0;
    for (int peer = asks; peer < (asks ? args.num_peers : 1); peer++)
        for (int round = 0; round < args.rounds; round++) {
            uint64_t start = nanoseconds();
            if (asks) publish_to_peer(args.peer_answers[peer], round + 1);
            if (!come(peer, round)) return;
            record(args.trace, CLOCK, round, 0, peer, start);
            if (!asks) publish_to_peer(args.peer_answers[peer], round + 1);
        }
}

}  // namespace
}  // namespace tileoverlap

extern "C" int tileoverlap_mark(const TileOverlapMark* arguments, cudaStream_t stream) {
    tileoverlap::mark<<<1, 1, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

extern "C" int tileoverlap_compare_clocks(const TileOverlapClocks* arguments, cudaStream_t stream) {
    tileoverlap::compare_clocks<<<1, 1, 0, stream>>>(*arguments);
    return cudaGetLastError();
}
