// What the host has to know of the exchanged counts: sizes of tensors, of receive buffers and of the schedule's lists.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule.cuh"

namespace tileoverlap {

// As Tally in layout.py.
struct Tally {
    int64_t num_rows, num_sent, num_received, own_sent, own_received, own_rows;
    int64_t remote_routes, remote_sends;
    int64_t most_received, most_arriving, most_sent_away, most_routed_away, most_routed;
    bool all_can_overlap;
    std::vector<int> expert_counts;
};

// Of counts [num_ranks, num_experts + num_ranks + 1].
inline Tally tally_of(const int* counts, int num_ranks, int rank, int num_experts) {
    int stride = num_experts + num_ranks + 1, local = num_experts / num_ranks;
    Tally all{};
    all.all_can_overlap = true;
    all.expert_counts.resize(local);
    std::vector<int64_t> received(num_ranks);
    for (int from = 0; from < num_ranks; from++) {
        const int *routes = counts + from * stride, *sends = routes + num_experts;
        all.all_can_overlap &= !sends[num_ranks];
        int64_t routed = 0, routed_away = 0, sent = 0;
        for (int to = 0; to < num_ranks; to++) {
            int64_t here = 0;
            for (int e = 0; e < local; e++) {
                int rows = routes[to * local + e];
                here += rows;
                if (to == rank) all.expert_counts[e] += rows;
            }
            routed += here, sent += sends[to], received[to] += sends[to];
            if (to != from) routed_away += here;
            if (to == rank) all.num_rows += here;
            if (from == rank && to < rank) all.own_sent += sends[to];
            if (to == rank && from < rank) all.own_received += sends[to];
        }
        int64_t own = sends[from];
        all.remote_routes += routed_away, all.remote_sends += sent - own;
        all.most_routed = std::max(all.most_routed, routed);
        all.most_routed_away = std::max(all.most_routed_away, routed_away);
        all.most_sent_away = std::max(all.most_sent_away, sent - own);
        if (from == rank) all.num_sent = sent, all.own_rows = own;
    }
    for (int to = 0; to < num_ranks; to++) {
        int64_t own = counts[to * stride + num_experts + to];
        all.most_received = std::max(all.most_received, received[to]);
        all.most_arriving = std::max(all.most_arriving, received[to] - own);
    }
    all.num_received = received[rank];
    return all;
}

// Places the lists of a tiling one after the other, each at 16 bytes, from a number of words on; returns the number of
// words after them. Addresses are offsets until they are moved to where the words lie.
inline int64_t place_lists(TileOverlapTiling& tiling, int64_t num_words, int64_t num_rows, int num_ranks, int num_local) {
    // Every run of rows with tiles of its own may end in a tile that is not full; every owner's rows of an expert may
    // begin and end within a band.
    int64_t num_bands = num_rows / BAND + num_local * (tiling.aligns_owners ? num_ranks : 1);
    int64_t num_items = num_bands * ((tiling.n + TILE_N - 1) / TILE_N) + 1;
    int64_t num_segments = num_rows / BAND + 2 * num_local * num_ranks + 1;
    auto place = [&](auto*& list, int64_t count) {
        list = reinterpret_cast<std::remove_reference_t<decltype(list)>>(num_words * 4);
        num_words += (count * static_cast<int64_t>(sizeof(*list)) / 4 + 3) / 4 * 4;
    };
    // Rows that arrive are counted by band; the last counter is for nothing: there is always one.
    tiling.num_bands = static_cast<int>(num_bands);
    tiling.num_left = static_cast<int>(tiling.local_first ? num_bands + 1 : tiling.num_panels);
    place(tiling.items, num_items), place(tiling.num_items, 1);
    place(tiling.segments, num_segments), place(tiling.num_segments, 1);
    place(tiling.panel_tiles_to_do, tiling.num_panels);
    tiling.band_parts_to_do = nullptr;
    if (tiling.local_first) place(tiling.band_parts_to_do, num_bands + 1);
    place(tiling.sum_runs, num_ranks), place(tiling.send_runs, num_ranks);
    place(tiling.left, tiling.num_left);
    return num_words;
}

inline void move_lists(TileOverlapTiling& tiling, uintptr_t words) {
    auto move = [&](auto*& list) {
        list = reinterpret_cast<std::remove_reference_t<decltype(list)>>(reinterpret_cast<uintptr_t>(list) + words);
    };
    move(tiling.items), move(tiling.num_items), move(tiling.segments), move(tiling.num_segments);
    move(tiling.panel_tiles_to_do), move(tiling.sum_runs), move(tiling.send_runs), move(tiling.left);
    if (tiling.local_first) move(tiling.band_parts_to_do);
}

}  // namespace tileoverlap
