// oneTBB's parallel_pipeline for the bench `reorder`: serial in order, parallel, serial in order.
//
// The bench compiles and starts this program and writes one line per run: threads, tokens, slots, items per slot, turns of the
// spinning loop per item, and 1 to take latencies. The answer is: seconds, checksum, and the median and 99th percentile of the time
// from a slot's number to its place in the output, in nanoseconds (0 where not taken). The same items, loop and checksum as ours.
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_pipeline.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/version.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

using u64 = std::uint64_t;
using Clock = std::chrono::steady_clock;

static const u64 FACTOR = 0x9E3779B97F4A7C15ull;

static u64 mixed(u64 number) {
    u64 z = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9ull;
    return z ^ (z >> 27);
}

static u64 spun(u64 number, u64 turns) {
    u64 x = number;
    for (u64 turn = 0; turn < turns; ++turn) {
        x = (x ^ (x >> 29)) * FACTOR;
        asm volatile("" : "+r"(x));
    }
    return mixed(number);
}

struct One {
    u64 value;
    void make(u64 t, u64, u64 turns) { value = spun(t, turns); }
    void fold(u64 &sum) const { sum = sum * 31 + value; }
};

struct Many {
    std::vector<u64> values;
    void make(u64 t, u64 batch, u64 turns) {
        values = {};
        values.reserve(batch);
        for (u64 k = 0; k < batch; ++k) values.push_back(spun(t * batch + k, turns));
    }
    void fold(u64 &sum) const {
        for (u64 value : values) sum = sum * 31 + value;
    }
};

// Two of them share no cache line, and none of the lines that are fetched in pairs.
template <class Payload>
struct alignas(128) Slot {
    u64 number;
    Clock::time_point begun;
    Payload payload;
};

template <class Payload>
static void run(int threads, u64 tokens, u64 slots, u64 batch, u64 turns, bool latency) {
    namespace tbb = oneapi::tbb;
    tbb::task_arena arena(threads);
    std::vector<u64> latencies;
    if (latency) latencies.reserve(slots);
    // The pipeline hands pointers on as they are, where it would allocate what is larger for each of the three filters. Slots end in
    // their order and are at most `tokens` at a time, so each has its place.
    std::vector<Slot<Payload>> places(tokens);
    u64 next = 0, sum = 0;
    auto begin = Clock::now();
    arena.execute([&] {
        using Held = Slot<Payload> *;
        tbb::parallel_pipeline(
            tokens, tbb::make_filter<void, Held>(tbb::filter_mode::serial_in_order,
                                                 [&](tbb::flow_control &control) -> Held {
                                                     if (next == slots) {
                                                         control.stop();
                                                         return nullptr;
                                                     }
                                                     Held slot = &places[next % tokens];
                                                     slot->number = next++;
                                                     if (latency) slot->begun = Clock::now();
                                                     return slot;
                                                 }) &
                        tbb::make_filter<Held, Held>(tbb::filter_mode::parallel,
                                                     [&](Held slot) {
                                                         slot->payload.make(slot->number, batch, turns);
                                                         return slot;
                                                     }) &
                        tbb::make_filter<Held, void>(tbb::filter_mode::serial_in_order, [&](Held slot) {
                            slot->payload.fold(sum);
                            if (latency) latencies.push_back(std::chrono::nanoseconds(Clock::now() - slot->begun).count());
                        }));
    });
    double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    std::sort(latencies.begin(), latencies.end());
    auto at = [&](double share) { return latencies.empty() ? 0 : latencies[(latencies.size() - 1) * share]; };
    std::printf("%.9f %llu %llu %llu\n", seconds, (unsigned long long)sum, (unsigned long long)at(0.5),
                (unsigned long long)at(0.99));
    std::fflush(stdout);
}

int main() {
    oneapi::tbb::global_control most(oneapi::tbb::global_control::max_allowed_parallelism, 64);
    std::printf("%d.%d\n", TBB_VERSION_MAJOR, TBB_VERSION_MINOR);
    std::fflush(stdout);
    unsigned long long threads, tokens, slots, batch, turns, latency;
    while (std::scanf("%llu %llu %llu %llu %llu %llu", &threads, &tokens, &slots, &batch, &turns, &latency) == 6) {
        if (batch == 1)
            run<One>((int)threads, tokens, slots, batch, turns, latency != 0);
        else
            run<Many>((int)threads, tokens, slots, batch, turns, latency != 0);
    }
}
