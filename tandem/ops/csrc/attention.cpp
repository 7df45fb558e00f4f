// The arithmetic of attention.h.

#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "lanes.h"
#include "threads.h"
#include "tiles.h"

namespace tandem {
namespace {

constexpr int64_t kTile = 4;        // queries that share what is loaded
constexpr int64_t kBackTile = 16;   // queries whose weights the backward holds at once
constexpr int64_t kTogether = 16;   // rows by key heads that decode works on stage by stage
constexpr int64_t kTogetherScores = 8192;  // and how many scores of theirs it holds, roughly
constexpr int64_t kAhead = 8;       // blocks that decode fetches before their turn
constexpr int64_t kRowsAhead = 8;   // rows whose new key's place it fetches before their turn
constexpr float kHidden = -1e30f;   // the score of a key out of sight: its exp is 0

// How much is computed at once of Q queries, so that all sums stay in the processor's registers: blocks
// of keys at most, and where there are more; columns of values; and vectors of sums in all, which
// several chains share.
#if defined(__AVX512F__)
constexpr int kMostBlocks[] = {0, 8, 8, 6, 6}, kBlocks[] = {0, 8, 8, 4, 4};
constexpr int kColumns[] = {0, 8, 4, 4, 4}, kOuter = 4, kNarrow = 8;
constexpr int kSums = 16;
constexpr bool kSoftenTogether = true;
#else
constexpr int kMostBlocks[] = {0, 6, 3, 2, 1}, kBlocks[] = {0, 4, 2, 2, 1};
constexpr int kColumns[] = {0, 4, 2, 2, 1}, kOuter = 1, kNarrow = 4;
constexpr int kSums = 6;
constexpr bool kSoftenTogether = false;
#endif

// Memory that grows and stays, aligned to a cache line.
template <class T>
class Buffer {
 public:
  T* take(int64_t count) {
    if (count > room_) {
      const size_t bytes = (static_cast<size_t>(count) * sizeof(T) * 5 / 4 + 127) / 64 * 64;
      memory_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
      if (!memory_) throw std::bad_alloc();
      room_ = static_cast<int64_t>(bytes / sizeof(T));
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t room_ = 0;
};

struct Normaliser {
  float inverse;  // of the sum of weights
  float largest, total;
  float lse() const { return largest + std::log(total); }
};

struct Scratch {
  Buffer<float> queries, scores, outputs, keys, values, seen;
  Buffer<float> key_rows, grad_keys, grad_values, grad_outputs, grad_scores;
  Buffer<const void*> key_blocks, value_blocks, row_blocks, seen_blocks;
  Buffer<Normaliser> norms;
};

Scratch& scratch() {
  static thread_local Scratch mine;
  return mine;
}

// Numbers from one row to the next in scratch: whole vectors, and 8 for the narrowest heads.
int64_t row_width(int64_t width) { return width == 8 ? 8 : (width + kLanes - 1) / kLanes * kLanes; }

// Independent sums per output number; enough of them to hide the latency of a multiply-add.
int64_t value_chains(int64_t width) {
  const int64_t vectors = (width + kLanes - 1) / kLanes;
  return vectors == 1 ? 8 : vectors == 2 ? 4 : vectors < 8 ? 2 : 1;
}

// How many of `left` to take next, at most `most`, so that the last share is not a small one.
int64_t share(int64_t left, int64_t most) {
  return left <= most ? left : left < 2 * most ? (left + 1) / 2 : most;
}

// ---- rows in, rows out ----

template <class T>
TANDEM_INLINE void copy_row(const T* from, int64_t width, float factor, float* to) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) store(to + d, load(from + d) * factor);
  if (d == width) return;
  const v16 last = load(from + d, static_cast<int>(width - d)) * factor;
  if (width == 8) {
    store(to, last, 8);
  } else {
    store(to + d, last);
  }
}

template <class T>
TANDEM_INLINE void write_row(const float* from, int64_t width, float factor, T* to) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) store(to + d, load(from + d) * factor);
  if (d == width) return;
  const int rest = static_cast<int>(width - d);
  store(to + d, load(from + d, rest) * factor, rest);
}

template <class T>
TANDEM_INLINE v16 load_some(const T* p, int64_t count) {
  return count >= kLanes ? load(p) : load(p, static_cast<int>(count));
}

// Up to 16 rows of T, `stride` apart, to (width, 16) of Out; rows that are not there become 0.
template <class T, class Out>
void transpose_block(const T* rows, int64_t stride, int64_t count, int64_t width, Out* to) {
  int64_t d = 0;
  for (; width - d > 8; d += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, width - d);
    v16 x[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) x[j] = j < count ? load_some(rows + j * stride + d, some) : v16{};
    transpose(x);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      if (j < some) store_exact(to + (d + j) * kLanes, x[j]);
    }
  }
  if (d >= width) return;
  const int rest = static_cast<int>(width - d);
  v16 x[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const v16 a = j < count ? load(rows + j * stride + d, rest) : v16{};
    const v16 b = j + 8 < count ? load(rows + (j + 8) * stride + d, rest) : v16{};
    x[j] = joined(lower(a), lower(b));
  }
  transpose_eights(x);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    if (j < rest) store_exact(to + (d + j) * kLanes, x[j]);
  }
}

// ---- scores ----

// Q queries (rows of floats) against NB blocks of transposed keys. Fetches: the blocks kAhead
// entries further on in `keys` are fetched meanwhile. Blocks of KV memory lie anywhere, and one is
// over before the processor has seen that it is read in order.
template <int Q, int NB, bool Fetches, class T>
TANDEM_INLINE void score_blocks(const float* q, int64_t q_stride, const T* const* keys,
                                int64_t width, float* s, int64_t stride) {
  v16 sums[Q][NB] = {};
  const T *at[NB], *ahead[NB];
#pragma GCC unroll 8
  for (int b = 0; b < NB; ++b) {
    at[b] = keys[b];
    if constexpr (Fetches) ahead[b] = keys[b + kAhead];
  }
  const auto add = [&](int64_t d) __attribute__((always_inline)) {
    if constexpr (Fetches) {
#pragma GCC unroll 8
      for (int b = 0; b < NB; ++b) __builtin_prefetch(ahead[b] + d * kLanes, 0, 2);
    }
    v16 x[Q];
#pragma GCC unroll 4
    for (int r = 0; r < Q; ++r) x[r] = splat(q[r * q_stride + d]);
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) {
      v16 key = load(at[b] + d * kLanes);
      if constexpr (Q > 1) in_register(key);
#pragma GCC unroll 4
      for (int r = 0; r < Q; ++r) sums[r][b] = x[r] * key + sums[r][b];
    }
  };
  int64_t d = 0;
  for (; d + 4 <= width; d += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) add(d + i);
  }
  for (; d < width; ++d) add(d);
#pragma GCC unroll 4
  for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) store(s + r * stride + b * kLanes, sums[r][b]);
  }
}

template <int Q, bool Fetches, int NB = 1, class T>
TANDEM_INLINE void score_last(const float* q, int64_t q_stride, const T* const* keys,
                              int64_t blocks, int64_t width, float* s, int64_t stride) {
  if (blocks == NB) return score_blocks<Q, NB, Fetches>(q, q_stride, keys, width, s, stride);
  if constexpr (NB < kMostBlocks[Q])
    score_last<Q, Fetches, NB + 1>(q, q_stride, keys, blocks, width, s, stride);
}

template <int Q, bool Fetches = false, class T>
void score_keys(const float* q, int64_t q_stride, const T* const* keys, int64_t blocks,
                int64_t width, float* s, int64_t stride) {
  constexpr int some = kBlocks[Q];
  for (; blocks > kMostBlocks[Q]; blocks -= some, keys += some, s += some * kLanes)
    score_blocks<Q, some, Fetches>(q, q_stride, keys, width, s, stride);
  score_last<Q, Fetches>(q, q_stride, keys, blocks, width, s, stride);
}

// ---- softmax of one row ----

// s holds the blocks from first_block on. Applies the soft cap, hides what is out of sight.
TANDEM_INLINE void see(float* s, int64_t blocks, int64_t first_block, int64_t query,
                       const Kind& kind) {
  if (kind.softcap != 0) {
    const float inverse = 1.0f / kind.softcap;
    for (int64_t b = 0; b < blocks; ++b) {
      store(s + b * kLanes, tanh(load(s + b * kLanes) * inverse) * kind.softcap);
    }
  }
  const int64_t last = query - first_block * kBlock;
  const int64_t first = kind.first_key(query) - first_block * kBlock;
  for (int64_t b = 0; b * kBlock < first; ++b) {
    const v16i out = lane_index() < static_cast<int32_t>(first - b * kBlock);
    store(s + b * kLanes, select(out, splat(kHidden), load(s + b * kLanes)));
  }
  for (int64_t b = (last + 1) / kBlock; b < blocks; ++b) {
    const v16i out = lane_index() > static_cast<int32_t>(last - b * kBlock);
    store(s + b * kLanes, select(out, splat(kHidden), load(s + b * kLanes)));
  }
}

// Q rows of scores, `stride` apart, to weights exp(score - largest), not yet divided by their sum.
// The rows' queries are `step` apart, 1 or 0, and end in the same block.
template <int Q>
TANDEM_INLINE void soften(float* s, int64_t stride, int64_t blocks, int64_t first_block,
                          int64_t query, int64_t step, const float* sinks, int64_t sink_step,
                          const Kind& kind, Normaliser* norms) {
  if (kind.softcap != 0 || kind.window != 0) {
    for (int r = 0; r < Q; ++r) see(s + r * stride, blocks, first_block, query + r * step, kind);
  } else {
    const int64_t last = query % kBlock;
#pragma GCC unroll 4
    for (int r = 0; r < Q; ++r) {
      float* end = s + r * stride + (blocks - 1) * kLanes;
      const v16i out = lane_index() > static_cast<int32_t>(last + r * step);
      store(end, select(out, splat(kHidden), load(end)));
    }
  }
  v16 top[Q], totals[Q] = {};
#pragma GCC unroll 4
  for (int r = 0; r < Q; ++r) top[r] = load(s + r * stride);
  for (int64_t b = 1; b < blocks; ++b) {
#pragma GCC unroll 4
    for (int r = 0; r < Q; ++r) top[r] = max(top[r], load(s + r * stride + b * kLanes));
  }
  float largest[Q];
#pragma GCC unroll 4
  for (int r = 0; r < Q; ++r) largest[r] = max(top[r]);
  if (sinks) {
    for (int r = 0; r < Q; ++r) largest[r] = std::max(largest[r], sinks[r * sink_step]);
  }
  constexpr int together = kSoftenTogether ? Q : 1;
#pragma GCC unroll 4
  for (int from = 0; from < Q; from += together) {
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 4
      for (int r = from; r < from + together; ++r) {
        float* at = s + r * stride + b * kLanes;
        const v16 weight = exp_below(load(at) - largest[r]);
        store(at, weight);
        totals[r] = totals[r] + weight;
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Q; ++r) {
    float total = sum(totals[r]);
    if (sinks) total += exp_below(splat(sinks[r * sink_step] - largest[r]))[0];
    norms[r] = {1.0f / total, largest[r], total};
  }
}

// ---- weighted sums of rows ----

// What a tile adds up: weights (Q rows, `stride` apart) of the rows in `blocks` blocks, the last
// with `last_count` rows, to `out` (Q rows, out_stride apart). A sum may be cut between two blocks:
// the first call leaves its chains in `chains` (Q rows, chains_stride apart) instead of adding them
// to `out`, and the second goes on from there.
template <class T>
struct Sum {
  const float* weights;
  int64_t stride;
  const T* const* rows;
  int64_t blocks, last_count, width;
  float* out;
  int64_t out_stride;
  float* chains = nullptr;
  int64_t chains_stride = 0;
  bool goes_on = false, stops = false;

  float* chain(int64_t row, int64_t chain, int64_t column, int64_t wide) const {
    return chains + row * chains_stride + chain * wide + column;
  }
};

// NC vectors from column d on; NP chains of `chains` at a time. Vectors of bfloat16 are widened two
// by two, which leaves the even and the odd columns apart until the end.
template <int Q, int NC, int NP, bool Fetches, class T>
TANDEM_INLINE void add_columns(const Sum<T>& work, int64_t d, int64_t chains) {
  const int64_t stride = work.stride, width = work.width, blocks = work.blocks;
  const T* const* rows = work.rows;
  constexpr bool paired = std::is_same_v<T, bf16> && NC % 2 == 0;
  const int64_t wide = work.chains_stride / chains;
  for (int64_t chain = 0; chain < chains; chain += NP) {
    v16 sums[Q][NC][NP] = {};
    if (work.goes_on) {
#pragma GCC unroll 4
      for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < NP; ++i) {
#pragma GCC unroll 8
          for (int c = 0; c < NC; ++c)
            sums[r][c][i] = load(work.chain(r, chain + i, d + c * kLanes, wide));
          if constexpr (paired) {
#pragma GCC unroll 4
            for (int c = 0; c < NC; c += 2) separate(sums[r][c][i], sums[r][c + 1][i]);
          }
        }
      }
    }
    int64_t ahead = 0;  // how far from a row the one to fetch is
    const auto add = [&](const T* row, const float* weight, int i) __attribute__((always_inline)) {
      if constexpr (Fetches) {
#pragma GCC unroll 8
        for (int c = 0; c < NC; ++c)
          __builtin_prefetch(reinterpret_cast<const char*>(row + c * kLanes) + ahead, 0, 2);
      }
      v16 x[Q];
#pragma GCC unroll 4
      for (int r = 0; r < Q; ++r) x[r] = splat(weight[r * stride]);
      v16 value[NC];
#pragma GCC unroll 8
      for (int c = 0; c < NC; ++c) {
        if constexpr (!paired) {
          value[c] = load(row + c * kLanes);
        } else if (c % 2 == 0) {
          load_pairs(row + c * kLanes, value[c], value[c + 1]);
        }
        if constexpr (Q > 1) in_register(value[c]);
#pragma GCC unroll 4
        for (int r = 0; r < Q; ++r) sums[r][c][i] = x[r] * value[c] + sums[r][c][i];
      }
    };
    const float* weights = work.weights + chain;
    for (int64_t b = 0; b < blocks; ++b, weights += kLanes) {
      const T* row = rows[b] + d + chain * width;
      const float* weight = weights;
      if constexpr (Fetches) {
        ahead = reinterpret_cast<intptr_t>(rows[b + kAhead]) - reinterpret_cast<intptr_t>(rows[b]);
      }
      int64_t left = (b + 1 == blocks ? work.last_count : kBlock) - chain;
      for (; left >= NP; left -= chains, weight += chains) {
#pragma GCC unroll 8
        for (int i = 0; i < NP; ++i, row += width) add(row, weight + i, i);
        row += (chains - NP) * width;
      }
#pragma GCC unroll 8
      for (int i = 0; i < NP; ++i, row += width) {
        if (i < left) add(row, weight + i, i);
      }
    }
    if constexpr (paired) {
#pragma GCC unroll 4
      for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < NC; c += 2) {
#pragma GCC unroll 8
          for (int i = 0; i < NP; ++i) interleave(sums[r][c][i], sums[r][c + 1][i]);
        }
      }
    }
    if (work.stops) {
#pragma GCC unroll 4
      for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < NC; ++c) {
#pragma GCC unroll 8
          for (int i = 0; i < NP; ++i)
            store(work.chain(r, chain + i, d + c * kLanes, wide), sums[r][c][i]);
        }
      }
      continue;
    }
#pragma GCC unroll 4
    for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < NC; ++c) {
        float* out = work.out + r * work.out_stride + d + c * kLanes;
        v16 total = chain ? load(out) + sums[r][c][0] : sums[r][c][0];
#pragma GCC unroll 8
        for (int i = 1; i < NP; ++i) total = total + sums[r][c][i];
        store(out, total);
      }
    }
  }
}

// As many chains at a time as there are and the registers hold: 8 of one vector, 4 of two, 2 of more.
template <int Q, int NC, bool Fetches, int NP = NC == 1 ? 8 : NC == 2 ? 4 : 2, class T>
void add_vectors(const Sum<T>& work, int64_t d, int64_t chains) {
  if constexpr (NP == 1) {
    add_columns<Q, NC, 1, Fetches>(work, d, chains);
  } else if constexpr (Q * NC * NP > kSums) {
    add_vectors<Q, NC, Fetches, NP / 2>(work, d, chains);
  } else {
    if (chains >= NP) return add_columns<Q, NC, NP, Fetches>(work, d, chains);
    add_vectors<Q, NC, Fetches, NP / 2>(work, d, chains);
  }
}

// Rows of 8 numbers, two to a vector: 8 chains in 4 vectors.
template <int Q, class T>
void add_pairs(const Sum<T>& work) {
  v16 sums[Q][4] = {};
  if (work.goes_on) {
#pragma GCC unroll 4
    for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = load(work.chain(r, 0, i * kLanes, 0));
    }
  }
  const auto add = [&](const T* row, const float* weights, auto pair, bool both)
                       __attribute__((always_inline)) {
    constexpr int i = decltype(pair)::value;
    const v16 value = both ? load(row + i * kLanes) : load(row + i * kLanes, 8);
#pragma GCC unroll 4
    for (int r = 0; r < Q; ++r) {
      const v16 x = splat_two<2 * i>(weights + r * work.stride);
      sums[r][i % 4] = x * value + sums[r][i % 4];
    }
  };
  const auto each = [&](auto f) __attribute__((always_inline)) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
      (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, 8>{});
  };
  const float* weight = work.weights;
  for (int64_t b = 0; b < work.blocks; ++b, weight += kLanes) {
    const T* row = work.rows[b];
    const int64_t count = b + 1 == work.blocks ? work.last_count : kBlock;
    if (count == kBlock) {
      each([&](auto pair) __attribute__((always_inline)) { add(row, weight, pair, true); });
    } else {
      each([&](auto pair) __attribute__((always_inline)) {
        constexpr int first = 2 * decltype(pair)::value;
        if (first < count) add(row, weight, pair, first + 1 < count);
      });
    }
  }
  if (work.stops) {
#pragma GCC unroll 4
    for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) store(work.chain(r, 0, i * kLanes, 0), sums[r][i]);
    }
    return;
  }
#pragma GCC unroll 4
  for (int r = 0; r < Q; ++r) {
    const v16 total = ((sums[r][0] + sums[r][1]) + sums[r][2]) + sums[r][3];
    store(work.out + r * work.out_stride, lower(total) + upper(total));
  }
}

template <int Q, bool Fetches, int NC = 1, class T>
TANDEM_INLINE void add_some(const Sum<T>& work, int64_t d, int64_t vectors, int64_t chains) {
  if (vectors == NC) return add_vectors<Q, NC, Fetches>(work, d, chains);
  if constexpr (NC < kColumns[Q]) add_some<Q, Fetches, NC + 1>(work, d, vectors, chains);
}

template <int Q, bool Fetches = false, class T>
void add_rows(const Sum<T>& work, int64_t width) {
  if (width == 8) return add_pairs<Q>(work);
  const int64_t chains = value_chains(width), vectors = (width + kLanes - 1) / kLanes;
  for (int64_t done = 0, now; done < vectors; done += now) {
    now = share(vectors - done, kColumns[Q]);
    add_some<Q, Fetches>(work, done * kLanes, now, chains);
  }
}

// ---- tiles of packed sequences, whose keys and values are held as floats ----

#if defined(__AVX512F__)

constexpr int64_t kPackedTile = kTile;

// Queries of the next tile, of those from position t on up to `end`, none of them past a multiple of kTile.
int64_t tile_at(int64_t t, int64_t end, int64_t) { return std::min(kTile - t % kTile, end - t); }

// The same of `left` queries whose keys end in one block.
int64_t tile_of(int64_t left, int64_t) { return std::min(kTile, left); }

template <int Q>
TANDEM_INLINE void score_tile(const float* q, int64_t q_stride, const float* const* keys,
                              int64_t blocks, int64_t width, float* s, int64_t stride) {
  score_keys<Q>(q, q_stride, keys, blocks, width, s, stride);
}

template <int Q>
TANDEM_INLINE void value_tile(const Sum<float>& work, int64_t width) {
  add_rows<Q>(work, width);
}

#else

// Six queries by sixteen numbers fill narrow registers: a block of keys, or sixteen columns of values in
// one chain.
constexpr int64_t kPackedTile = 6;

// Queries of the next tile, of `left` <= 16 whose keys end in one block: tiles of nearly equal heights.
// Values `width` wide: two rows of 8 lie in a vector, of which fewer queries fill the registers.
int64_t tile_of(int64_t left, int64_t width) {
  if (width == 8) return std::min(kTile, left);
  return left <= kPackedTile ? left : left <= 2 * kPackedTile ? (left + 1) / 2 : (left + 2) / 3;
}

// The same of those from position t on up to `end`.
int64_t tile_at(int64_t t, int64_t end, int64_t width) {
  return tile_of(std::min(kBlock - t % kBlock, end - t), width);
}

// Number i of row r, of which the first three lie from `row` on and others from `low` on: an offset for
// each row would take more registers than there are.
TANDEM_INLINE float of_row(const float* row, const float* low, int64_t stride, int r, int64_t i) {
  return r < 3 ? row[r * stride + i] : low[(r - 3) * stride + i];
}

template <int Q>
void score_tile(const float* q, int64_t q_stride, const float* const* keys, int64_t blocks,
                int64_t width, float* s, int64_t stride) {
  constexpr int64_t kFour = 4;
  for (int64_t b = 0; b < blocks; ++b, s += kLanes) {
    const float *key = keys[b], *row = q, *low = q + 3 * q_stride;
    in_register(low);
    TileSums<Q> sums;
    zero_sums<Q>(sums);
    const auto add = [&](int64_t i) TANDEM_INLINED {
      add_word<float, Q>(sums, reinterpret_cast<const word*>(key + i * kLanes),
                         [&](int r) TANDEM_INLINED { return of_row(row, low, q_stride, r, i); });
    };
    int64_t left = width;
    for (; left >= kFour; left -= kFour, key += kFour * kLanes, row += kFour, low += kFour) {
#pragma GCC unroll 4
      for (int i = 0; i < kFour; ++i) add(i);
    }
    for (; left > 0; --left, key += kLanes, ++row, ++low) add(0);
    write_sums<Q>(sums, s, stride);
  }
}

// Sixteen columns of values from column d on, of which there are C chains.
template <int Q, int C>
void value_columns(const Sum<float>& work, int64_t d) {
  const int64_t stride = work.stride, width = work.width;
  for (int64_t chain = 0; chain < C; ++chain) {
    TileSums<Q> sums;
    zero_sums<Q>(sums);
    const float* weight = work.weights + chain;
    for (int64_t b = 0; b < work.blocks; ++b) {
      const float *value = work.rows[b] + d + chain * width, *low = weight + 3 * stride;
      in_register(low);
      const auto add = [&](int64_t i) TANDEM_INLINED {
        add_word<float, Q>(sums, reinterpret_cast<const word*>(value),
                           [&](int r) TANDEM_INLINED { return of_row(weight, low, stride, r, i); });
        value += C * width;
      };
      if (b + 1 < work.blocks || work.last_count == kBlock) {
#pragma GCC unroll 16
        for (int i = 0; i < kBlock; i += C) add(i);
        weight += kBlock;
      } else {
        for (int64_t left = work.last_count - chain; left > 0; left -= C, weight += C, low += C) add(0);
      }
    }
    float* const out = work.out + d;
    if (chain) {
      for_sums<Q, kRegisters>([&](int r, int c) TANDEM_INLINED {
        word* const to = reinterpret_cast<word*>(out + r * work.out_stride + c * kWide);
        store_wide(to, load_wide(to) + sums[r][c]);
      });
    } else {
      write_sums<Q>(sums, out, work.out_stride);
    }
  }
}

template <int Q>
void value_tile(const Sum<float>& work, int64_t width) {
  if constexpr (Q <= kTile) {
    if (width == 8) return add_pairs<Q>(work);
  }
  for (int64_t d = 0; d < width; d += kLanes) {
    switch (value_chains(width)) {
      case 8: value_columns<Q, 8>(work, d); break;
      case 4: value_columns<Q, 4>(work, d); break;
      case 2: value_columns<Q, 2>(work, d); break;
      default: value_columns<Q, 1>(work, d);
    }
  }
}

#endif

// ---- sums that are no numbers ----

bool are_finite(const float* x, int64_t count) {
  v16 total = {};  // 0 times a number is 0, times an inf or a NaN it is a NaN
  for (int64_t i = 0; i < count; i += kLanes)
    total = total + load_lanes(x + i, static_cast<int>(std::min<int64_t>(kLanes, count - i))) * 0.0f;
  return sum(total) == 0.0f;
}

// A weight of 0 does not hide an inf or a NaN: where a query's sum is no number, this makes it again
// of what the query sees, and zeros; a finite sum would keep its bits. weights: of the blocks from
// first_block on, whose rows are `stride` apart.
template <class T>
void add_seen(const float* weights, const T* const* rows, int64_t stride, int64_t blocks,
              int64_t first_block, int64_t query, const Kind& kind, int64_t width, float* out) {
  const int64_t wide = row_width(width), first = kind.first_key(query) - first_block * kBlock;
  Scratch& mine = scratch();
  float* to = mine.seen.take(blocks * kBlock * wide);
  const float** at = reinterpret_cast<const float**>(mine.seen_blocks.take(blocks));
  const int64_t last = query - first_block * kBlock;
  for (int64_t j = 0; j < blocks * kBlock; ++j, to += wide) {
    if (j % kBlock == 0) at[j / kBlock] = to;
    if (j < first || j > last) {
      std::fill(to, to + wide, 0.0f);
    } else {
      copy_row(rows[j / kBlock] + j % kBlock * stride, width, 1.0f, to);
    }
  }
  value_tile<1>(Sum<float>{weights, 0, at, blocks, last % kBlock + 1, wide, out, wide}, width);
}

// ---- one tile of queries ----

// f(queries as a constant), of at most as many as a tile holds.
template <int Q = kPackedTile, class F>
TANDEM_INLINE void by_height(int64_t queries, const F& f) {
  if (queries == Q) return f(std::integral_constant<int, Q>{});
  if constexpr (Q > 1) by_height<Q - 1>(queries, f);
}

// Q queries and the blocks of keys and values that any of them sees.
struct Tile {
  const float* queries;  // scaled, q_stride apart
  int64_t q_stride;
  const float* const* keys;    // from first_block on
  const float* const* values;  // rows v_stride apart
  int64_t v_stride, blocks, first_block;
  int64_t query, head;  // position of the first query in its sequence
  int64_t key_width, value_width;
};

// Weighted values, not divided by the weights' sum, to scratch `out` (Q, row_width(value_width)).
template <int Q>
void attend_tile(const Tile& tile, const Kind& kind, float* out, Normaliser (&norms)[kPackedTile]) {
  const int64_t stride = tile.blocks * kLanes;
  float* s = scratch().scores.take(stride * Q);
  score_tile<Q>(tile.queries, tile.q_stride, tile.keys, tile.blocks, tile.key_width, s, stride);
  soften<Q>(s, stride, tile.blocks, tile.first_block, tile.query, 1,
            kind.sinks ? kind.sinks + tile.head : nullptr, 0, kind, norms);
  const int64_t last = (tile.query + Q - 1) % kBlock + 1;
  value_tile<Q>(Sum<float>{s, stride, tile.values, tile.blocks, last, tile.v_stride, out,
                           row_width(tile.value_width)},
                tile.value_width);
  const int64_t wide = row_width(tile.value_width);
  if (are_finite(out, Q * wide)) return;
  for (int r = 0; r < Q; ++r)
    add_seen(s + r * stride, tile.values, tile.v_stride, tile.blocks, tile.first_block,
             tile.query + r, kind, tile.value_width, out + r * wide);
}

void attend(const Tile& tile, int64_t queries, const Kind& kind, float* out,
            Normaliser (&norms)[kPackedTile]) {
  by_height(queries, [&](auto q) { attend_tile<decltype(q)::value>(tile, kind, out, norms); });
}

// ---- packed sequences, forward ----

// Rows [start, start + count) of the input: positions [first, first + count) of their sequence,
// whose earlier ones are those of `before` and of what that continues in turn.
struct Segment {
  int64_t start, first, count;
  const Segment* before;  // null: none

  int64_t end() const { return first + count; }

  // Of position t, which this segment or one that it continues holds.
  int64_t row(int64_t t) const {
    const Segment* at = this;
    while (t < at->first) at = at->before;
    return at->start + t - at->first;
  }
};

// f(segment) for what a segment continues, the sequence's beginning first.
template <class F>
void each_before(const Segment& segment, const F& f) {
  if (!segment.before) return;
  each_before(*segment.before, f);
  f(*segment.before);
}

// Queries at positions [begin, end) of the segments [from, to), under one key head: one segment, or
// a whole sequence with what continues it, or some of that. In the backward, `sums` is where the
// piece leaves what it adds to the gradients of that sequence; null: nothing else adds to them.
struct Piece {
  const Segment *from, *to;
  int64_t head, begin, end;
  float* sums = nullptr;

  int64_t longest() const {
    int64_t length = 0;
    for (const Segment* s = from; s < to; ++s) length = std::max(length, std::min(end, s->end()));
    return length;
  }
  int64_t cost() const {
    int64_t sum = 0;
    for (const Segment* s = from; s < to; ++s) {
      const int64_t last = std::min(end, s->end()), first = std::max(begin, s->first);
      sum += last * last - first * first;
    }
    return sum;
  }
};

std::vector<Segment> segments_of(const Segments& of) {
  std::vector<Segment> found(of.count);
  for (int64_t b = 0; b < of.count; ++b) {
    const Segment* before = of.continues(b) ? &found[of.prefixes[b]] : nullptr;
    found[b] = {of.bounds[b], before ? before->end() : 0, of.bounds[b + 1] - of.bounds[b], before};
  }
  return found;
}

// One piece per head and sequence with its continuations, or more where threads would stand idle;
// the costliest first.
std::vector<Piece> pieces_of(const std::vector<Segment>& segments, const Segments& of,
                             int64_t heads) {
  const int64_t threads = num_threads(), count = of.count;
  const int64_t parts = threads > 1 ? (2 * threads + count * heads - 1) / (count * heads) : 1;
  const bool together = threads <= 1;
  std::vector<Piece> pieces;
  pieces.reserve(count * heads * parts);
  for (int64_t b = 0, next; b < count; b = next) {
    const Segment* segment = &segments[b];
    next = b + 1;
    while (together && next < count && of.continues(next)) ++next;
    const Segment* const to = segments.data() + next;
    // A piece prepares all keys before it, so it should have work enough to pay for that.
    const int64_t part = blocks_of((segment->count + parts - 1) / parts) * kBlock;
    const int64_t size = parts > 1 ? std::max<int64_t>(128, part) : INT64_MAX / 2;
    for (int64_t h = 0; h < heads; ++h) {
      if (together) {
        pieces.push_back({segment, to, h, 0, INT64_MAX});
        continue;
      }
      for (int64_t t = segment->first; t < segment->end(); t += size) {
        pieces.push_back({segment, to, h, t, std::min(t + size, segment->end())});
      }
    }
  }
  if (threads > 1) {
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.cost() > b.cost(); });
  }
  return pieces;
}

// The piece that whoever computes piece `i` will probably take next; null: none.
const Piece* piece_after(const std::vector<Piece>& pieces, int64_t i, int64_t threads) {
  const size_t next = i + threads;
  return next < pieces.size() ? &pieces[next] : nullptr;
}

// Whether to fetch what the next piece reads: rows of narrow heads share lines, and tokens that the
// second cache holds are there anyway.
template <class T>
bool fetches_ahead(const Packed<T>& in, const Segments& of) {
  constexpr int64_t kLeastRow = 128, kSecondCache = 1 << 20;  // bytes
  const Sizes& size = in.sizes;
  const int64_t token =
      size.query_heads * size.key_width + size.heads * (size.key_width + size.value_width);
  return size.key_width * int64_t{sizeof(T)} >= kLeastRow &&
         of.bounds[of.count] * token * int64_t{sizeof(T)} > kSecondCache;
}

// What the piece that comes next will probably read, fetched to the second cache while this one is
// computed. A piece reads a head's share of every token's row, which no processor sees coming, and
// works too long on a few rows to have asked for the next ones.
template <class T>
class Upcoming {
 public:
  Upcoming() = default;

  // `piece`: null where none comes.
  Upcoming(const Packed<T>& in, const Piece* piece) {
    if (!piece) return;
    row_ = piece->from->start, end_ = piece->to[-1].start + piece->to[-1].count;
    const Sizes& size = in.sizes;
    if (!in.asked) add(in.q, piece->head * size.groups, size.groups, size.key_width);
    add(in.k, piece->head, 1, size.key_width);
    add(in.v, piece->head, 1, size.value_width);
  }

  // `count` heads of width `width`, from `head` on, that the piece reads of `rows`.
  void add(const Rows<const T>& rows, int64_t head, int64_t count, int64_t width) {
    parts_[size_++] = {rows, head, count, width};
  }

  // The next `count` tokens.
  void fetch(int64_t count) {
    for (const int64_t end = std::min(end_, row_ + count); row_ < end; ++row_)
      for (int i = 0; i < size_; ++i)
        for (int64_t h = 0; h < parts_[i].count; ++h) fetch(parts_[i], parts_[i].head + h);
  }

 private:
  struct Part {
    Rows<const T> rows;
    int64_t head, count, width;
  };

  void fetch(const Part& part, int64_t head) const {
    const T* const row = part.rows.at(row_, head);
    for (int64_t d = 0; d < part.width; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
  }

  Part parts_[5];
  int size_ = 0;
  int64_t row_ = 0, end_ = 0;
};

// Blocks of transposed rows, floats (width, 16): those of a sequence's beginning, and behind them
// those of one continuation after the other. Positions count from block `skipped` on. As each
// segment is put directly after what it continues, or after others that continue that, what lies
// before its positions is that beginning.
template <class T>
class Columns {
 public:
  Columns(const Rows<const T>& rows, int64_t head, int64_t width, int64_t skipped, int64_t longest,
          Buffer<float>& memory, Buffer<const void*>& pointers)
      : rows_(rows), head_(head), width_(width), skipped_(skipped) {
    const int64_t blocks = blocks_of(longest) - skipped;
    to_ = memory.take(blocks * width * kLanes);
    at_ = reinterpret_cast<const float**>(pointers.take(blocks));
    for (int64_t b = 0; b < blocks; ++b) at_[b] = to_ + b * width * kLanes;
  }

  // The rows of a segment up to position `end`, after those before it, which are there already.
  void put(const Segment& segment, int64_t end) {
    end = std::min(end, segment.end());
    int64_t t = std::max(segment.first / kBlock, skipped_) * kBlock;
    if (t < segment.first) {  // a block of what it continues, too
      T mixed[kBlock * kWidest];
      const int64_t last = std::min(end, t + kBlock), wide = std::min(width_, kWidest);
      for (int64_t d = 0; d < width_; d += wide) {
        const int64_t some = std::min(wide, width_ - d);
        for (int64_t j = t; j < last; ++j) {
          std::copy_n(rows_.at(segment.row(j), head_) + d, some, mixed + (j - t) * some);
        }
        transpose_block(mixed, some, last - t, some, block(t) + d * kLanes);
      }
      t += kBlock;
    }
    for (; t < end; t += kBlock) {
      transpose_block(rows_.at(segment.start + t - segment.first, head_), rows_.token,
                      std::min(kBlock, end - t), width_, block(t));
    }
  }

  const float* const* from(int64_t block) const { return at_ + (block - skipped_); }

 private:
  static constexpr int64_t kWidest = 128;
  float* block(int64_t t) { return to_ + (t / kBlock - skipped_) * width_ * kLanes; }

  Rows<const T> rows_;
  int64_t head_, width_, skipped_;
  float* to_;
  const float** at_;
};

// The same of rows as they are, as floats, row_width apart; the last block is filled up with 0.
template <class T>
class Copies {
 public:
  Copies(const Rows<const T>& rows, int64_t head, int64_t width, int64_t skipped, int64_t longest,
         Buffer<float>& memory, Buffer<const void*>& pointers)
      : rows_(rows), head_(head), width_(width), wide_(row_width(width)), skipped_(skipped) {
    const int64_t blocks = blocks_of(longest) - skipped;
    to_ = memory.take(blocks * kBlock * wide_);
    at_ = reinterpret_cast<const float**>(pointers.take(blocks));
    for (int64_t b = 0; b < blocks; ++b) at_[b] = to_ + b * kBlock * wide_;
  }

  void put(const Segment& segment, int64_t end) {
    end = std::min(end, segment.end());
    int64_t t = std::max(segment.first, skipped_ * kBlock);
    float* to = to_ + (t - skipped_ * kBlock) * wide_;
    for (; t < end; ++t, to += wide_) {
      copy_row(rows_.at(segment.start + t - segment.first, head_), width_, 1.0f, to);
    }
    std::fill(to, to_ + (blocks_of(t) - skipped_) * kBlock * wide_, 0.0f);
  }

  const float* const* from(int64_t block) const { return at_ + (block - skipped_); }

 private:
  Rows<const T> rows_;
  int64_t head_, width_, wide_, skipped_;
  float* to_;
  const float** at_;
};

// Queries of a segment from position t on, up to `most`, none of them past a multiple of `most`.
int64_t tile_of(int64_t t, int64_t end, int64_t most) { return std::min(most - t % most, end - t); }

// f(position, queries, their first row) for tiles of a segment's queries at positions [begin, end).
// height(position, end): how many queries a tile takes from there on, at most kBlock.
template <class T, class Height, class F>
TANDEM_INLINE void each_tile(const Packed<T>& in, const Segment& segment, int64_t begin, int64_t end,
                             const Height& height, const F& f) {
  const int64_t start = segment.start - segment.first;  // the row of position 0
  if (!in.asked) {
    for (int64_t t = begin, count; t < end; t += count) {
      count = height(t, end);
      f(t, count, start + t);
    }
    return;
  }
  const int64_t* const all = in.asked + in.num_asked;
  const int64_t* at = std::lower_bound(in.asked, all, start + begin);
  const int64_t* const last = std::lower_bound(at, all, start + std::max(begin, end));
  for (int64_t count; at < last; at += count) {
    int64_t run = 1;  // tokens that follow one another
    while (run < kBlock && at + run < last && at[run] == *at + run) ++run;
    const int64_t t = *at - start;
    count = height(t, t + run);
    f(t, count, at - in.asked);
  }
}

template <class T, class Keys, class Values>
void forward_segment(const Packed<T>& in, const Piece& piece, const Segment& segment,
                     const Keys& keys, const Values& values, Upcoming<T>& next) {
  const Sizes& size = in.sizes;
  const int64_t key_width = row_width(size.key_width), value_width = row_width(size.value_width);
  Scratch& mine = scratch();
  float* queries = mine.queries.take(kPackedTile * key_width);
  float* out = mine.outputs.take(kPackedTile * value_width);
  Normaliser norms[kPackedTile];
  const int64_t begin = std::max(piece.begin, segment.first);
  const int64_t end = std::min(piece.end, segment.end());
  for (int64_t g = 0; g < size.groups; ++g) {
    const int64_t head = piece.head * size.groups + g;
    const auto height = [&](int64_t t, int64_t to) { return tile_at(t, to, size.value_width); };
    each_tile(in, segment, begin, end, height, [&](int64_t t, int64_t count, int64_t row) {
      for (int64_t r = 0; r < count; ++r) {
        copy_row(in.q.at(row + r, head), size.key_width, in.kind.scale, queries + r * key_width);
      }
      const int64_t first = in.kind.first_key(t) / kBlock;
      const Tile tile{queries, key_width, keys.from(first), values.from(first), value_width,
                      t / kBlock - first + 1, first, t, head, size.key_width, size.value_width};
      if (g == 0) next.fetch(count);
      attend(tile, count, in.kind, out, norms);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = (row + r) * size.query_heads + head;
        write_row(out + r * value_width, size.value_width, norms[r].inverse,
                  in.out + at * size.value_width);
        if (in.lse) in.lse[at] = norms[r].lse();
      }
    });
  }
}

// `after`: the piece that comes next, or null.
template <class T>
void forward_piece(const Packed<T>& in, const Piece& piece, const Piece* after) {
  const Sizes& size = in.sizes;
  Scratch& mine = scratch();
  Upcoming<T> next(in, after);
  const int64_t longest = piece.longest();
  const int64_t skipped =
      in.kind.first_key(std::max(piece.begin, piece.from->first)) / kBlock;
  if (longest <= skipped * kBlock) return;
  Columns<T> keys(in.k, piece.head, size.key_width, skipped, longest, mine.keys, mine.key_blocks);
  Copies<T> values(in.v, piece.head, size.value_width, skipped, longest, mine.values,
                   mine.value_blocks);
  const auto put = [&](const Segment& segment) {
    keys.put(segment, piece.end);
    values.put(segment, piece.end);
  };
  each_before(*piece.from, put);
  for (const Segment* segment = piece.from; segment < piece.to; ++segment) {
    put(*segment);
    forward_segment(in, piece, *segment, keys, values, next);
  }
}

// ---- new tokens of sequences in KV memory ----

// Lists of blocks, positions counted from block `skipped` on.
struct Listed {
  const float** at;
  int64_t skipped;
  const float* const* from(int64_t block) const { return at + (block - skipped); }
};

// A piece over KV memory. Floats are read where they lie; others, and values whose width is no whole
// number of vectors, are copied once for all the piece's queries.
template <class T>
void continued_piece(const Continued<T>& in, const Packed<T>& packed, const Piece& piece,
                     int64_t sequence) {
  const Sizes& size = in.sizes;
  const Segment& segment = *piece.from;
  const int64_t begin = std::max(piece.begin, segment.first);
  const int64_t end = std::min(piece.end, segment.end());
  if (end <= begin) return;
  const int64_t skipped = in.kind.first_key(begin) / kBlock, blocks = blocks_of(end) - skipped;
  const int64_t key_width = size.key_width, width = size.value_width, wide = row_width(width);
  constexpr bool floats = std::is_same_v<T, float>;
  const bool lies = floats && wide == width;
  Scratch& mine = scratch();
  const Listed keys{reinterpret_cast<const float**>(mine.key_blocks.take(blocks)), skipped};
  const Listed values{reinterpret_cast<const float**>(mine.value_blocks.take(blocks)), skipped};
  float* key_to = floats ? nullptr : mine.keys.take(blocks * key_width * kLanes);
  float* value_to = lies ? nullptr : mine.values.take(blocks * kBlock * wide);
  const int32_t* table = in.tables + sequence * in.table_stride;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = int64_t{table[skipped + b]} * size.heads + piece.head;
    const T* key = in.k_memory + at * key_width * kBlock;
    const T* value = in.v_memory + at * width * kBlock;
    if constexpr (floats) {
      keys.at[b] = key;
      if (lies) values.at[b] = value;
    } else {
      keys.at[b] = key_to;
      for (int64_t d = 0; d < key_width; ++d, key_to += kLanes) {
        store(key_to, load(key + d * kLanes));
      }
    }
    if (lies) continue;
    values.at[b] = value_to;
    const int64_t count = std::min(kBlock, end - (skipped + b) * kBlock);
    for (int64_t j = 0; j < count; ++j) copy_row(value + j * width, width, 1.0f, value_to + j * wide);
    value_to += kBlock * wide;
  }
  Upcoming<T> nothing;
  forward_segment(packed, piece, segment, keys, values, nothing);
}

// ---- packed sequences, backward ----

// to (keys, 8) += weights^T rows over `count` queries, with `to` in transposed blocks: lanes along the
// keys.
void add_outer_narrow(const float* weights, int64_t stride, const float* rows, int64_t count,
                      int64_t keys, float* to) {
  for (int64_t j = 0; j < keys; j += kBlock) {
    for (int64_t first = 0; first < 8; first += kNarrow, to += kNarrow * kLanes) {
      v16 sums[kNarrow];
#pragma GCC unroll 8
      for (int d = 0; d < kNarrow; ++d) sums[d] = load(to + d * kLanes);
      for (int64_t r = 0; r < count; ++r) {
        const v16 x = load(weights + r * stride + j);
#pragma GCC unroll 8
        for (int d = 0; d < kNarrow; ++d) sums[d] = x * rows[r * 8 + first + d] + sums[d];
      }
#pragma GCC unroll 8
      for (int d = 0; d < kNarrow; ++d) store(to + d * kLanes, sums[d]);
    }
  }
}

#if defined(__AVX512F__)

// The same of wider rows, where query r sees keys up to `diagonal` + r: lanes along the width.
template <int NC>
TANDEM_INLINE void add_outer(const float* weights, int64_t stride, const float* rows, int64_t width,
                             int64_t count, int64_t keys, int64_t diagonal, float* to) {
  for (int64_t j = 0; j < keys; j += 4) {
    v16 sums[4][NC];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c) sums[i][c] = load(to + (j + i) * width + c * kLanes);
    }
    for (int64_t r = std::max<int64_t>(0, j - diagonal); r < count; ++r) {
      v16 x[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) x[i] = splat(weights[r * stride + j + i]);
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c) {
        v16 row = load(rows + r * width + c * kLanes);
        in_register(row);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[i][c] = x[i] * row + sums[i][c];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c) store(to + (j + i) * width + c * kLanes, sums[i][c]);
    }
  }
}

template <int NC = 1>
TANDEM_INLINE void add_outer_some(int64_t vectors, const float* weights, int64_t stride,
                                  const float* rows, int64_t width, int64_t count, int64_t keys,
                                  int64_t diagonal, float* to) {
  if (vectors == NC) return add_outer<NC>(weights, stride, rows, width, count, keys, diagonal, to);
  if constexpr (NC < kOuter)
    add_outer_some<NC + 1>(vectors, weights, stride, rows, width, count, keys, diagonal, to);
}

// All vectors of keys' rows.
void add_outer_wide(const float* weights, int64_t stride, const float* rows, int64_t width,
                    int64_t count, int64_t keys, int64_t diagonal, float* to) {
  const int64_t vectors = width / kLanes;
  for (int64_t done = 0, now; done < vectors; done += now) {
    now = share(vectors - done, kOuter);
    const int64_t d = done * kLanes;
    add_outer_some(now, weights, stride, rows + d, width, count, keys, diagonal, to + d);
  }
}

#else

// The same, sixteen columns of R keys' rows at a time: where query r sees keys up to `diagonal` + r.
template <int R>
void add_outer_tile(const float* weights, int64_t stride, const float* rows, int64_t width,
                    int64_t count, float* to) {
  constexpr int64_t kFour = 4;
  TileSums<R> sums;
  read_sums<R>(sums, to, width);
  const auto add = [&]() TANDEM_INLINED {
    add_word<float, R>(sums, reinterpret_cast<const word*>(rows),
                       [&](int r) TANDEM_INLINED { return weights[r]; });
    weights += stride, rows += width;
  };
  for (; count >= kFour; count -= kFour) {
#pragma GCC unroll 4
    for (int i = 0; i < kFour; ++i) add();
  }
  for (; count > 0; --count) add();
  write_sums<R>(sums, to, width);
}

void add_outer_wide(const float* weights, int64_t stride, const float* rows, int64_t width,
                    int64_t count, int64_t keys, int64_t diagonal, float* to) {
  const int64_t tiles = (keys + kPackedTile - 1) / kPackedTile;
  for (int64_t i = 0, j = 0, now; i < tiles; ++i, j += now, to += now * width) {
    now = keys / tiles + (i < keys % tiles);
    const int64_t r = std::max<int64_t>(0, j - diagonal);  // queries before see none of these keys
    by_height(now, [&](auto height) {
      for (int64_t d = 0; d < width; d += kLanes)
        add_outer_tile<decltype(height)::value>(weights + r * stride + j, stride, rows + r * width + d,
                                                width, count - r, to + d);
    });
  }
}

#endif

void add_outer(const float* weights, int64_t stride, const float* rows, int64_t width,
               int64_t count, int64_t keys, int64_t diagonal, float* to) {
  if (width == 8) return add_outer_narrow(weights, stride, rows, count, keys, to);
  add_outer_wide(weights, stride, rows, width, count, keys, diagonal, to);
}

// Scores and products with the output's gradient, in place, to weights and gradients of scores.
TANDEM_INLINE void differentiate(float* s, float* g, int64_t blocks, float lse, float delta,
                                 float softcap) {
  for (int64_t b = 0; b < blocks; ++b) {
    const v16 score = load(s + b * kLanes);
    const v16 weight = exp_below(score - lse);
    v16 grad = weight * (load(g + b * kLanes) - delta);
    if (softcap != 0) {
      const v16 bent = score * (1.0f / softcap);
      grad = grad * (1.0f - bent * bent);
    }
    store(s + b * kLanes, weight);
    // A hidden key has weight 0 and a score far off; neither that nor its value may make this a NaN.
    store(g + b * kLanes, select(score < 0.5f * kHidden, v16{}, grad));
  }
}

template <int Q>
void backward_scores(const float* q, int64_t q_width, const float* dout, int64_t out_width,
                     const float* const* keys, const float* const* values, int64_t blocks,
                     const Sizes& size, float* s, float* g) {
  const int64_t stride = blocks * kLanes;
  score_tile<Q>(q, q_width, keys, blocks, size.key_width, s, stride);
  score_tile<Q>(dout, out_width, values, blocks, size.value_width, g, stride);
}

// Up to 16 queries, ready for `backward_tile`.
struct BackTile {
  const float *queries, *grads;  // scaled queries and output gradients, rows row_width apart
  const float *lse, *delta;      // per query
  int64_t query, count, blocks, first_block;
  const float* const* keys;    // transposed, from first_block on
  const float* const* values;  // the same of values
  const float* const* rows;    // keys as rows
  float *scores, *grad_scores;  // (16, blocks * 16)
};

template <int Q>
void backward_rows(const BackTile& tile, int64_t r, const Sizes& size, const Kind& kind,
                   float* grad_queries) {
  const int64_t key_width = row_width(size.key_width), value_width = row_width(size.value_width);
  const int64_t stride = tile.blocks * kLanes;
  float *s = tile.scores + r * stride, *g = tile.grad_scores + r * stride;
  backward_scores<Q>(tile.queries + r * key_width, key_width, tile.grads + r * value_width,
                     value_width, tile.keys, tile.values, tile.blocks, size, s, g);
  for (int i = 0; i < Q; ++i) {
    see(s + i * stride, tile.blocks, tile.first_block, tile.query + r + i, kind);
    differentiate(s + i * stride, g + i * stride, tile.blocks, tile.lse[r + i], tile.delta[r + i],
                  kind.softcap);
  }
  const int64_t last = (tile.query + r + Q - 1) % kBlock + 1;
  value_tile<Q>(Sum<float>{g, stride, tile.rows, tile.blocks, last, key_width, grad_queries,
                           key_width},
                size.key_width);
  if (are_finite(grad_queries, Q * key_width)) return;
  for (int i = 0; i < Q; ++i)
    add_seen(g + i * stride, tile.rows, key_width, tile.blocks, tile.first_block, tile.query + r + i,
             kind, size.key_width, grad_queries + i * key_width);
}

template <class T>
void backward_tile(const BackTile& tile, const Sizes& size, const Kind& kind, float* grad_queries,
                   Upcoming<T>* next) {
  const int64_t key_width = row_width(size.key_width);
  for (int64_t r = 0, count; r < tile.count; r += count) {
    count = tile_of(tile.count - r, size.key_width);
    if (next) next->fetch(kPackedTile);
    by_height(count, [&](auto q) {
      backward_rows<decltype(q)::value>(tile, r, size, kind, grad_queries + r * key_width);
    });
  }
}

float dot(const float* a, const float* b, int64_t width) {
  if (width == 8) return sum(load(a, 8) * load(b, 8));
  v16 total = {};
  for (int64_t d = 0; d < width; d += kLanes) total = load(a + d) * load(b + d) + total;
  return sum(total);
}

// Gradients of the rows of one head, added up by position: as rows, row_width apart, or as
// transposed blocks where rows are 8 wide.
class Sums {
 public:
  Sums(Buffer<float>& memory, int64_t longest, int64_t width)
      : to_(memory.take(blocks_of(longest) * kBlock * row_width(width))), width_(width) {}

  // Positions [begin, end), and those behind them in the last block, become 0.
  void clear(int64_t begin, int64_t end) {
    const int64_t wide = row_width(width_), last = blocks_of(end) * kBlock;
    if (width_ != 8) return std::fill(to_ + begin * wide, to_ + last * wide, 0.0f);
    for (; begin < last && begin % kBlock; ++begin) {
      for (int64_t d = 0; d < 8; ++d) at(begin)[d * kLanes] = 0.0f;
    }
    std::fill(at(begin), at(last), 0.0f);
  }

  float* block(int64_t index) { return to_ + index * kBlock * row_width(width_); }

  // The segment's, as T, `stride` apart.
  template <class T>
  void write(const Segment& segment, T* to, int64_t stride) {
    for (int64_t t = segment.first; t < segment.end(); ++t, to += stride) {
      if (width_ != 8) {
        write_row(to_ + t * row_width(width_), width_, 1.0f, to);
      } else {
        for (int64_t d = 0; d < 8; ++d) to[d] = static_cast<T>(at(t)[d * kLanes]);
      }
    }
  }

 private:
  float* at(int64_t t) { return to_ + t / kBlock * 8 * kLanes + t % kBlock; }  // rows of 8 alone
  float* to_;
  int64_t width_;
};

// `count` queries of one head from token `row` on: what a tile needs of them. Fills in their delta.
template <class T>
void load_tile(const Gradients<T>& work, int64_t row, int64_t count, int64_t head, float* queries,
               float* grads, float* lse, float* delta) {
  const Sizes& size = work.in.sizes;
  const int64_t key_width = row_width(size.key_width), value_width = row_width(size.value_width);
  float* out = scratch().outputs.take(value_width);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t at = (row + r) * size.query_heads + head;
    copy_row(work.in.q.at(row + r, head), size.key_width, work.in.kind.scale,
             queries + r * key_width);
    copy_row(work.output.at(row + r, head), size.value_width, 1.0f, grads + r * value_width);
    copy_row(work.in.out + at * size.value_width, size.value_width, 1.0f, out);
    lse[r] = work.in.lse[at];
    work.delta[at] = delta[r] = dot(grads + r * value_width, out, value_width);
  }
}

template <class T>
void backward_segment(const Gradients<T>& work, const Piece& piece, const Segment& segment,
                      const Columns<T>& keys, const Columns<T>& values, const Copies<T>& rows,
                      Sums& grad_keys, Sums& grad_values, Upcoming<T>& next) {
  const Packed<T>& in = work.in;
  const Sizes& size = in.sizes;
  const int64_t key_width = row_width(size.key_width), value_width = row_width(size.value_width);
  Scratch& mine = scratch();
  float* queries = mine.queries.take(2 * kBackTile * key_width);
  float* grad_queries = queries + kBackTile * key_width;
  float* grads = mine.grad_outputs.take(kBackTile * value_width);
  float lse[kBackTile], delta[kBackTile];
  for (int64_t g = 0; g < size.groups; ++g) {
    const int64_t head = piece.head * size.groups + g;
    const auto height = [](int64_t t, int64_t to) { return tile_of(t, to, kBackTile); };
    each_tile(in, segment, segment.first, segment.end(), height,
              [&](int64_t t, int64_t count, int64_t row) {
      load_tile(work, row, count, head, queries, grads, lse, delta);
      const int64_t first = in.kind.first_key(t) / kBlock, blocks = t / kBlock - first + 1;
      const BackTile tile{queries, grads, lse, delta, t, count, blocks, first,
                          keys.from(first), values.from(first), rows.from(first),
                          mine.scores.take(kBackTile * blocks * kLanes),
                          mine.grad_scores.take(kBackTile * blocks * kLanes)};
      backward_tile(tile, size, in.kind, grad_queries, g == 0 ? &next : nullptr);
      for (int64_t r = 0; r < count; ++r) {
        write_row(grad_queries + r * key_width, size.key_width, in.kind.scale,
                  work.q + ((row + r) * size.query_heads + head) * size.key_width);
      }
      const int64_t stride = blocks * kLanes, diagonal = t - first * kBlock;
      add_outer(tile.scores, stride, grads, value_width, count, stride, diagonal,
                grad_values.block(first));
      add_outer(tile.grad_scores, stride, queries, key_width, count, stride, diagonal,
                grad_keys.block(first));
    });
  }
}

template <class T>
void backward_piece(const Gradients<T>& work, const Piece& piece, const Piece* after) {
  const Packed<T>& in = work.in;
  const Sizes& size = in.sizes;
  Upcoming<T> next(in, after);
  if (after && !in.asked) {
    const int64_t head = after->head * size.groups, width = size.value_width;
    next.add(work.output, head, size.groups, width);
    next.add({in.out, size.query_heads * width, width}, head, size.groups, width);
  }
  const int64_t longest = piece.longest();
  Scratch& mine = scratch();
  Columns<T> keys(in.k, piece.head, size.key_width, 0, longest, mine.keys, mine.key_blocks);
  Columns<T> values(in.v, piece.head, size.value_width, 0, longest, mine.values,
                    mine.value_blocks);
  Copies<T> rows(in.k, piece.head, size.key_width, 0, longest, mine.key_rows, mine.row_blocks);
  Sums grad_keys(mine.grad_keys, longest, size.key_width);
  Sums grad_values(mine.grad_values, longest, size.value_width);
  const auto write = [&](const Segment& segment) {
    if (piece.sums && !segment.before) {
      grad_keys.write(segment, piece.sums, size.key_width);
      grad_values.write(segment, piece.sums + segment.count * size.key_width, size.value_width);
      return;
    }
    const int64_t at = segment.start * size.heads + piece.head;
    grad_keys.write(segment, work.k + at * size.key_width, size.heads * size.key_width);
    grad_values.write(segment, work.v + at * size.value_width, size.heads * size.value_width);
  };
  const auto put = [&](const Segment& segment) {
    keys.put(segment, piece.end);
    values.put(segment, piece.end);
    rows.put(segment, piece.end);
    grad_keys.clear(segment.first, segment.end());
    grad_values.clear(segment.first, segment.end());
  };
  each_before(*piece.from, put);
  const Segment* open = piece.from->before;  // the last segment; others may continue and add to it
  for (const Segment* segment = piece.from; segment < piece.to; ++segment) {
    for (; open != segment->before; open = open->before) write(*open);
    put(*segment);
    backward_segment(work, piece, *segment, keys, values, rows, grad_keys, grad_values, next);
    open = segment;
  }
  for (; open; open = open->before) write(*open);
}

// A sequence whose continuations are divided between pieces: what `parts` of them left, one behind
// the other, for its gradients under one key head.
struct Divided {
  const Segment* root;
  int64_t head, parts, width;  // keys' and values'
  Buffer<float> sums;

  float* part(int64_t i) { return sums.take(parts * root->count * width) + i * root->count * width; }
};

// One piece per head and sequence with its continuations, or several of about as many tokens, so
// that threads share what many rows begin with alike. How they are cut does not depend on threads.
std::vector<Piece> backward_pieces_of(const std::vector<Segment>& segments, const Sizes& size,
                                      std::vector<Divided>& divided) {
  constexpr int64_t kLeast = 1024;  // tokens; each piece prepares the keys of the beginning
  std::vector<Piece> pieces;
  const Segment* const last = segments.data() + segments.size();
  for (const Segment *root = segments.data(), *next; root < last; root = next) {
    std::vector<const Segment*> cuts{root};
    int64_t tokens = 0;
    for (next = root + 1; next < last && next->before; ++next) {
      if (next->before == root && tokens >= std::max(kLeast, 4 * root->count)) {
        cuts.push_back(next);
        tokens = 0;
      }
      tokens += next->count;
    }
    cuts.push_back(next);
    const int64_t parts = cuts.size() - 1;
    for (int64_t h = 0; h < size.heads; ++h) {
      if (parts > 1) divided.push_back({root, h, parts, size.key_width + size.value_width, {}});
      for (int64_t i = 0; i < parts; ++i) {
        float* sums = parts > 1 ? divided.back().part(i) : nullptr;
        pieces.push_back({cuts[i], cuts[i + 1], h, 0, INT64_MAX, sums});
      }
    }
  }
  if (num_threads() > 1) {
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.cost() > b.cost(); });
  }
  return pieces;
}

// The gradients of a sequence whose pieces are done.
template <class T>
void add_up(const Gradients<T>& work, Divided& divided) {
  const Sizes& size = work.in.sizes;
  const Segment& root = *divided.root;
  float* const total = divided.part(0);
  for (int64_t i = 1; i < divided.parts; ++i) {
    const float* some = divided.part(i);
    for (int64_t j = 0; j < root.count * divided.width; ++j) total[j] += some[j];
  }
  const auto write = [&](const float* from, int64_t width, T* to) {
    to += (root.start * size.heads + divided.head) * width;
    for (int64_t t = 0; t < root.count; ++t, from += width, to += size.heads * width) {
      write_row(from, width, 1.0f, to);
    }
  };
  write(total, size.key_width, work.k);
  write(total + root.count * size.key_width, size.value_width, work.v);
}

// ---- one new token per row, on KV memory ----

template <class T>
void keep_token(const Paged<T>& in, int64_t row, int64_t head) {
  const int64_t block = in.positions[row] / kBlock, place = in.positions[row] % kBlock;
  T* to = in.key_block(row, head, block) + place;
  const T* key = in.k.at(row, head);
  for (int64_t d = 0; d < in.sizes.key_width; ++d) to[d * kBlock] = key[d];
  std::copy_n(in.v.at(row, head), in.sizes.value_width,
              in.value_block(row, head, block) + place * in.sizes.value_width);
}

// The lines that `keep_token` writes to.
template <class T>
void fetch_token(const Paged<T>& in, int64_t row, int64_t head) {
  const int64_t block = in.positions[row] / kBlock, place = in.positions[row] % kBlock;
  const T* const key = in.key_block(row, head, block) + place;
  for (int64_t d = 0; d < in.sizes.key_width; ++d) __builtin_prefetch(key + d * kBlock, 1, 2);
}

// Rows whose first `shared` blocks of KV memory are the same, under one key head: samples of one
// prompt. What those blocks hold is read once for up to 4 queries of any of the rows.
struct Company {
  const int64_t* rows;
  int64_t count, head, shared;
};

// One row and key head: the blocks in sight behind the shared ones, and its part of the scratch.
template <class T, class V>
struct Item {
  int64_t row, query, own;
  const T** keys;
  const V** values;  // rows v_stride apart
};

// A company, the blocks that its rows share, and its part of the scratch: `queries`, `scores`,
// `out`, `chains` and `norms` for each of its rows' queries in turn.
template <class T, class V>
struct Decoded {
  Item<T, V> items[kTogether];
  int64_t count, head, shared, first;
  const T** keys;
  const V** values;
  float *queries, *scores, *out, *chains;
  int64_t stride;  // of scores
  Normaliser* norms;
};

// The values of `blocks` blocks of a row as floats, where their width is no whole number of vectors.
template <class T>
float* copy_values(const Paged<T>& in, int64_t row, int64_t head, int64_t first, int64_t blocks,
                   const float** values, float* to) {
  const int64_t width = in.sizes.value_width, wide = row_width(width);
  for (int64_t b = 0; b < blocks; ++b, to += kBlock * wide) {
    const T* from = in.value_block(row, head, first + b);
    const int64_t count = std::min(kBlock, in.positions[row] + 1 - (first + b) * kBlock);
    values[b] = to;
    for (int64_t j = 0; j < count; ++j) copy_row(from + j * width, width, 1.0f, to + j * wide);
  }
  return to;
}

// f(first query, how many as a constant): `count` queries, up to 4 at a time.
template <class F>
TANDEM_INLINE void by_tiles(int64_t count, const F& f) {
  for (int64_t done = 0, now; done < count; done += now) {
    now = share(count - done, kTile);
    switch (now) {
      case 1: f(done, std::integral_constant<int, 1>{}); break;
      case 2: f(done, std::integral_constant<int, 2>{}); break;
      case 3: f(done, std::integral_constant<int, 3>{}); break;
      default: f(done, std::integral_constant<int, 4>{});
    }
  }
}

template <class T, class V>
void decode_scores(const Paged<T>& in, const Decoded<T, V>& x) {
  const Sizes& size = in.sizes;
  const int64_t key_width = row_width(size.key_width), groups = size.groups;
  const auto score = [&](int64_t q, int64_t count, const T* const* keys, int64_t skip,
                         int64_t blocks) {
    by_tiles(count, [&](int64_t g, auto tile) {
      score_keys<decltype(tile)::value, true>(
          x.queries + (q + g) * key_width, key_width, keys, blocks, size.key_width,
          x.scores + (q + g) * x.stride + skip * kLanes, x.stride);
    });
  };
  for (int64_t i = 0; i < x.count; ++i) {
    for (int64_t g = 0; g < groups; ++g) {
      copy_row(in.q.at(x.items[i].row, x.head * groups + g), size.key_width, in.kind.scale,
               x.queries + (i * groups + g) * key_width);
    }
  }
  if (x.shared) score(0, x.count * groups, x.keys, 0, x.shared);
  for (int64_t i = 0; i < x.count; ++i) {
    score(i * groups, groups, x.items[i].keys, x.shared, x.items[i].own);
  }
}

template <class T, class V>
void decode_weights(const Paged<T>& in, const Decoded<T, V>& x) {
  const int64_t groups = in.sizes.groups;
  const float* sinks = in.kind.sinks ? in.kind.sinks + x.head * groups : nullptr;
  for (int64_t i = 0; i < x.count; ++i) {
    by_tiles(groups, [&](int64_t g, auto tile) {
      const int64_t q = i * groups + g;
      soften<decltype(tile)::value>(x.scores + q * x.stride, x.stride, x.shared + x.items[i].own,
                                    x.first, x.items[i].query, 0, sinks ? sinks + g : nullptr, 1,
                                    in.kind, x.norms + q);
    });
  }
}

template <class T, class V>
void decode_values(const Paged<T>& in, const Decoded<T, V>& x, int64_t v_stride) {
  const Sizes& size = in.sizes;
  const int64_t value_width = row_width(size.value_width), groups = size.groups;
  const int64_t chains = value_chains(size.value_width) * value_width;
  const auto add = [&](int64_t q, int64_t count, const V* const* values, int64_t skip,
                       int64_t blocks, int64_t last_count, bool stops) {
    by_tiles(count, [&](int64_t g, auto tile) {
      add_rows<decltype(tile)::value, true>(
          Sum<V>{x.scores + (q + g) * x.stride + skip * kLanes, x.stride, values, blocks,
                 last_count, v_stride, x.out + (q + g) * value_width, value_width,
                 x.chains + (q + g) * chains, chains, skip > 0, stops},
          size.value_width);
    });
  };
  if (x.shared) add(0, x.count * groups, x.values, 0, x.shared, kBlock, true);
  for (int64_t i = 0; i < x.count; ++i) {
    const Item<T, V>& item = x.items[i];
    add(i * groups, groups, item.values, x.shared, item.own, item.query % kBlock + 1, false);
    if (in.kind.first_key(item.query) % kBlock == 0) continue;  // sees all that has been added
    if (are_finite(x.out + i * groups * value_width, groups * value_width)) continue;
    for (int64_t q = i * groups; q < (i + 1) * groups; ++q)
      add_seen(x.scores + q * x.stride, item.values, v_stride, item.own, x.first, item.query,
               in.kind, size.value_width, x.out + q * value_width);
  }
}

template <class T, class V>
void decode_write(const Paged<T>& in, const Decoded<T, V>& x) {
  const Sizes& size = in.sizes;
  const int64_t value_width = row_width(size.value_width);
  for (int64_t q = 0; q < x.count * size.groups; ++q) {
    const int64_t head = x.head * size.groups + q % size.groups;
    write_row(x.out + q * value_width, size.value_width, x.norms[q].inverse,
              in.out + (x.items[q / size.groups].row * size.query_heads + head) * size.value_width);
  }
}

// How much of the scratch some companies take.
struct Demand {
  int64_t items = 0, blocks = 0, scores = 0;

  template <class T>
  void add(const Paged<T>& in, const Company& company) {
    int64_t longest = 0;
    for (int64_t i = 0; i < company.count; ++i) {
      const int64_t query = in.positions[company.rows[i]];
      const int64_t seen = query / kBlock - in.kind.first_key(query) / kBlock + 1;
      blocks += seen - company.shared;
      longest = std::max(longest, seen);
    }
    items += company.count;
    blocks += company.shared;
    scores += company.count * in.sizes.groups * longest * kLanes;
  }
};

// Several companies, stage by stage: one's softmax is a chain of waits that another's can fill.
// Copies: values cannot be read as they lie.
template <bool Copies, class T>
void decode_range(const Paged<T>& in, const Company* companies, int64_t count,
                  const Demand& demand) {
  using V = std::conditional_t<Copies, float, T>;
  const Sizes& size = in.sizes;
  const int64_t key_width = row_width(size.key_width), value_width = row_width(size.value_width);
  const int64_t queries = demand.items * size.groups, blocks = demand.blocks;
  const int64_t chains = value_chains(size.value_width) * value_width;
  Scratch& mine = scratch();
  // Both lists go on for as many blocks as are fetched ahead.
  const T** keys = reinterpret_cast<const T**>(mine.key_blocks.take(blocks + kAhead));
  const V** values = reinterpret_cast<const V**>(mine.value_blocks.take(blocks + kAhead));
  float* query = mine.queries.take(queries * key_width);
  float* out = mine.outputs.take(queries * (value_width + chains));
  float* scores = mine.scores.take(demand.scores);
  Normaliser* norms = mine.norms.take(queries);
  float* copied = Copies ? mine.values.take(blocks * kBlock * value_width) : nullptr;
  const auto list = [&](int64_t row, int64_t head, int64_t first, int64_t some) {
    for (int64_t b = 0; b < some; ++b) keys[b] = in.key_block(row, head, first + b);
    if constexpr (Copies) {
      copied = copy_values(in, row, head, first, some, values, copied);
    } else {
      for (int64_t b = 0; b < some; ++b) values[b] = in.value_block(row, head, first + b);
    }
    keys += some, values += some;
  };
  Decoded<T, V> all[kTogether];
  for (int64_t c = 0; c < count; ++c) {
    const Company& company = companies[c];
    Decoded<T, V>& x = all[c];
    const int64_t shared = company.shared;
    x.count = company.count, x.head = company.head, x.shared = shared;
    x.keys = keys, x.values = values;
    list(company.rows[0], company.head, 0, shared);
    int64_t longest = 0;
    for (int64_t i = 0; i < company.count; ++i) {
      const int64_t row = company.rows[i], at = in.positions[row];
      x.first = in.kind.first_key(at) / kBlock;  // 0 wherever blocks are shared
      const int64_t own = at / kBlock - x.first + 1 - shared;
      x.items[i] = {row, at, own, keys, values};
      list(row, company.head, x.first + shared, own);
      longest = std::max(longest, shared + own);
    }
    x.stride = longest * kLanes;
    const int64_t some = company.count * size.groups;
    x.queries = query, x.scores = scores, x.norms = norms;
    x.out = out, x.chains = out + some * value_width;
    query += some * key_width, scores += some * x.stride, norms += some;
    out += some * (value_width + chains);
  }
  const void** after_keys = reinterpret_cast<const void**>(keys);
  for (int64_t i = 0; i < kAhead; ++i) {
    after_keys[i] = values[std::min(i, blocks - 1) - blocks];  // the first ones that come next
    values[i] = values[-1];
  }
  const int64_t v_stride = Copies ? value_width : size.value_width;
  for (int64_t c = 0; c < count; ++c) decode_scores(in, all[c]);
  for (int64_t c = 0; c < count; ++c) decode_weights(in, all[c]);
  for (int64_t c = 0; c < count; ++c) decode_values(in, all[c], v_stride);
  for (int64_t c = 0; c < count; ++c) decode_write(in, all[c]);
}

// Stores the keys and values that companies' rows bring.
template <class T>
void keep_tokens(const Paged<T>& in, const Company* companies, int64_t count) {
  // Each key lies in as many lines as it has numbers, so those of rows to come are fetched meanwhile.
  const Company* const last = companies + count;
  const Company* soon = companies;
  int64_t row = 0, ahead = 0;  // of `soon`; rows that have been fetched and not yet stored
  for (const Company* company = companies; company < last; ++company) {
    for (int64_t i = 0; i < company->count; ++i, --ahead) {
      for (; soon < last && ahead < kRowsAhead; ++ahead) {
        fetch_token(in, soon->rows[row], soon->head);
        if (++row == soon->count) ++soon, row = 0;
      }
      keep_token(in, company->rows[i], company->head);
    }
  }
}

// Companies of up to kTogether rows by key heads, whose keys and values are in memory.
template <class T>
void decode(const Paged<T>& in, const Company* companies, int64_t count) {
  const Sizes& size = in.sizes;
  while (count > 0) {
    Demand demand;
    int64_t some = 0;
    do {
      demand.add(in, companies[some++]);
    } while (some < count && demand.scores < kTogetherScores);
    if (size.value_width % kLanes == 0 || size.value_width == 8) {
      decode_range<false>(in, companies, some, demand);
    } else {
      decode_range<true>(in, companies, some, demand);
    }
    companies += some, count -= some;
  }
}

// Blocks at the beginning of two rows' tables that are the same, of those that both have filled.
template <class T>
int64_t common_blocks(const Paged<T>& in, int64_t a, int64_t b) {
  const int32_t *left = in.tables + a * in.table_stride, *right = in.tables + b * in.table_stride;
  const int64_t most = std::min(in.positions[a], in.positions[b]) / kBlock;
  return std::mismatch(left, left + most, right).first - left;
}

// Whether a row is a later token of the sequence of the row before it, whose key it sees then.
template <class T>
bool has_later_tokens(const Paged<T>& in, int64_t rows) {
  for (int64_t i = 1; i < rows; ++i) {
    const int32_t* const table = in.tables + i * in.table_stride;
    const int64_t block = in.positions[i - 1] / kBlock;
    if (in.positions[i] > in.positions[i - 1] && table[block] == (table - in.table_stride)[block])
      return true;
  }
  return false;
}

// All rows under all heads. Rows of one prompt keep company where they see it from its beginning;
// `order` is where the companies' rows are listed.
template <class T>
std::vector<Company> companies_of(const Paged<T>& in, int64_t rows, std::vector<int64_t>& order) {
  order.resize(rows);
  for (int64_t i = 0; i < rows; ++i) order[i] = i;
  const auto first_block = [&](int64_t row) { return in.tables[row * in.table_stride]; };
  const auto sees_all = [&](int64_t row) { return in.kind.first_key(in.positions[row]) == 0; };
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return first_block(a) != first_block(b) ? first_block(a) < first_block(b) : a < b;
  });
  std::vector<Company> companies;
  companies.reserve(rows * in.sizes.heads);
  for (int64_t i = 0, count; i < rows; i += count) {
    int64_t shared = 0;
    count = 1;
    while (i + count < rows && count < kTogether && sees_all(order[i])) {
      const int64_t next = order[i + count];
      const int64_t common = sees_all(next) ? common_blocks(in, order[i], next) : 0;
      if (common == 0) break;
      shared = count == 1 ? common : std::min(shared, common);
      ++count;
    }
    for (int64_t h = 0; h < in.sizes.heads; ++h) {
      companies.push_back({order.data() + i, count, h, shared});
    }
  }
  return companies;
}

}  // namespace

// ---- what attention.h declares ----

template <class T>
void attend_packed(const Packed<T>& in, const Segments& of) {
  const auto segments = segments_of(of);
  const auto pieces = pieces_of(segments, of, in.sizes.heads);
  const bool fetches = fetches_ahead(in, of);
  const int64_t threads = num_threads();
  share_out(pieces.size(), threads, [&](int64_t i) {
    forward_piece(in, pieces[i], fetches ? piece_after(pieces, i, threads) : nullptr);
  });
}

template <class T>
void attend_continued(const Continued<T>& in) {
  const Segments of{in.bounds, nullptr, in.count};
  auto segments = segments_of(of);
  for (int64_t b = 0; b < in.count; ++b) segments[b].first = in.starts[b];
  const Packed<T> packed{in.q, {}, {}, in.out, nullptr, in.sizes, in.kind};
  const auto pieces = pieces_of(segments, of, in.sizes.heads);
  share_out(pieces.size(), num_threads(), [&](int64_t i) {
    continued_piece(in, packed, pieces[i], pieces[i].from - segments.data());
  });
}

template <class T>
void attend_packed_backward(const Gradients<T>& work, const Segments& of) {
  const auto segments = segments_of(of);
  std::vector<Divided> divided;
  const auto pieces = backward_pieces_of(segments, work.in.sizes, divided);
  const bool fetches = fetches_ahead(work.in, of);
  const int64_t threads = num_threads();
  share_out(pieces.size(), threads, [&](int64_t i) {
    backward_piece(work, pieces[i], fetches ? piece_after(pieces, i, threads) : nullptr);
  });
  share_out(divided.size(), num_threads(), [&](int64_t i) { add_up(work, divided[i]); });
}

template <class T>
void attend_paged(const Paged<T>& in, int64_t rows, int64_t threads) {
  std::vector<int64_t> order;
  const auto companies = companies_of(in, rows, order);
  std::vector<int64_t> begins;  // of shares of up to kTogether items
  int64_t items = kTogether;
  for (size_t c = 0; c < companies.size(); ++c) {
    if (items + companies[c].count > kTogether) {
      begins.push_back(c);
      items = 0;
    }
    items += companies[c].count;
  }
  begins.push_back(companies.size());
  const int64_t shares = begins.size() - 1;
  const auto share = [&](int64_t i, auto body) {
    body(in, companies.data() + begins[i], begins[i + 1] - begins[i]);
  };
  // Keys just stored one number at a time cannot be loaded as vectors at once: stored well before,
  // those of all shares where one may see another's.
  const bool at_first = has_later_tokens(in, rows);
  if (at_first) share_out(shares, threads, [&](int64_t i) { share(i, keep_tokens<T>); });
  share_out(shares, threads, [&](int64_t i) {
    if (!at_first) share(i, keep_tokens<T>);
    share(i, decode<T>);
  });
}

template <class T>
void keep_packed(const Rows<const T>& keys, const Rows<const T>& values, T* k_memory, T* v_memory,
                 const int32_t* tables, int64_t table_stride, const int32_t* bounds, int64_t count,
                 const Sizes& size) {
  parallel_for(0, count, 8, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; ++b) {
      const int32_t* table = tables + b * table_stride;
      const int64_t length = bounds[b + 1] - bounds[b];
      for (int64_t t = 0; t < length; t += kBlock) {
        const int64_t some = std::min(kBlock, length - t), row = bounds[b] + t;
        for (int64_t h = 0; h < size.heads; ++h) {
          const int64_t at = (int64_t{table[t / kBlock]} * size.heads + h) * kBlock;
          transpose_block(keys.at(row, h), keys.token, some, size.key_width,
                          k_memory + at * size.key_width);
          for (int64_t j = 0; j < some; ++j) {
            std::copy_n(values.at(row + j, h), size.value_width,
                        v_memory + (at + j) * size.value_width);
          }
        }
      }
    }
  });
}

#define TANDEM_ATTENTION(T)                                                                     \
  template void attend_continued(const Continued<T>&);                                          \
  template void attend_packed(const Packed<T>&, const Segments&);                               \
  template void attend_packed_backward(const Gradients<T>&, const Segments&);                   \
  template void attend_paged(const Paged<T>&, int64_t, int64_t);                                \
  template void keep_packed(const Rows<const T>&, const Rows<const T>&, T*, T*, const int32_t*, \
                            int64_t, const int32_t*, int64_t, const Sizes&);
TANDEM_ATTENTION(float)
TANDEM_ATTENTION(bf16)
#undef TANDEM_ATTENTION

}  // namespace tandem
