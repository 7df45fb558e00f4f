// One row of vocabulary logits: log-prob, entropy, and drawing a token, all from one pass of sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "lanes.h"

namespace tandem {

constexpr int64_t kSumBlock = 256;  // logits whose probabilities are summed before blocks are

TANDEM_INLINE double sum(d8 x) {
  return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

// z = logits / temperature, without a division where the temperature is 1.
template <class T>
TANDEM_INLINE v16 scaled(const T* logits, int lanes, float temperature) {
  const v16 x = load_lanes(logits, lanes);
  return temperature == 1.0f ? x : x / temperature;
}

// Of z under a softmax: the largest, total = sum e^(z - top), weighted = sum e^(z - top) (z - top).
struct RowSums {
  float top;
  double total, weighted;

  float logsumexp() const { return static_cast<float>(top + std::log(total)); }
  float logprob(float z) const {
    return static_cast<float>(static_cast<double>(z) - top - std::log(total));
  }
  float entropy() const { return static_cast<float>(std::log(total) - weighted / total); }
};

template <class T>
TANDEM_INLINE float largest(const T* logits, int64_t V) {
  const v16 lowest = splat(-std::numeric_limits<float>::infinity());
  v16 a = lowest, b = lowest, c = lowest, d = lowest;
  int64_t i = 0;
  for (; i + 4 * kLanes <= V; i += 4 * kLanes) {
    a = max(a, load(logits + i));
    b = max(b, load(logits + i + 16));
    c = max(c, load(logits + i + 32));
    d = max(d, load(logits + i + 48));
  }
  for (; i + kLanes <= V; i += kLanes) a = max(a, load(logits + i));
  float top = max(max(max(a, b), max(c, d)));
  for (; i < V; ++i) top = std::max(top, static_cast<float>(logits[i]));
  return top;
}

// What a lane past the row's end reads as: a probability of 0.
TANDEM_INLINE v16 only(v16 x, int lanes) {
  return lanes == kLanes ? x
                         : select(lane_index() < lanes, x,
                                  splat(-std::numeric_limits<float>::infinity()));
}

// e^(z - top) of 16 logits, and z - top, held above the point where e^ is 0.
template <class T>
TANDEM_INLINE v16 weights(const T* logits, int lanes, float temperature, float top, v16* distance) {
  const v16 d = max(splat(-88.0f), only(scaled(logits, lanes, temperature), lanes) - top);
  *distance = d;
  return exp(d);
}

// Adds what the columns [from, to) have; `from` is the start of a block. `blocks`, if given, gets each
// block's sum.
template <bool entropy, class T>
inline void add_sums(RowSums& sums, const T* logits, int64_t from, int64_t to, float temperature,
                     double* blocks) {
  if (blocks) blocks += from / kSumBlock;
  for (int64_t first = from; first < to; first += kSumBlock) {
    d8 low = {}, high = {};
    v16 weighted = {};
    for_columns(std::min(kSumBlock, to - first), [&](int64_t i, int lanes) {
      v16 distance;
      const v16 e = weights(logits + first + i, lanes, temperature, sums.top, &distance);
      low = low + as_double(lower(e));
      high = high + as_double(upper(e));
      if constexpr (entropy) weighted = e * distance + weighted;
    });
    const double block = sum(low + high);
    sums.total += block;
    if constexpr (entropy)
      sums.weighted += sum(as_double(lower(weighted)) + as_double(upper(weighted)));
    if (blocks) *blocks++ = block;
  }
}

template <bool entropy, class T>
inline RowSums row_sums(const T* logits, int64_t V, float temperature) {
  RowSums sums{largest(logits, V) / temperature, 0.0, 0.0};
  add_sums<entropy>(sums, logits, 0, V, temperature, nullptr);
  return sums;
}

// The gradient of one row: (g_logprob (onehot - p) + g_entropy d entropy / dz) / temperature.
template <class T>
inline void logprob_row_backward(const T* logits, int64_t V, float temperature, float logsumexp,
                                 float entropy, int64_t target, float g_logprob, float g_entropy,
                                 T* grad) {
  const float inverse = 1.0f / temperature;
  for_columns(V, [&](int64_t i, int lanes) {
    const v16 logp = max(splat(-88.0f), scaled(logits + i, lanes, temperature) - logsumexp);
    v16 pull = splat(g_logprob);
    if (g_entropy != 0.0f) pull = (logp + entropy) * g_entropy + pull;
    v16 g = -exp(logp) * pull;
    if (static_cast<uint64_t>(target - i) < kLanes)
      g = g + select(lane_index() == static_cast<int>(target - i), splat(g_logprob), v16{});
    store_lanes(grad + i, g * inverse, lanes);
  });
}

// splitmix64's finaliser (G. Steele et al., OOPSLA 2014) of a sequence's key and a token's number:
// a double in [0, 1).
TANDEM_INLINE double keyed_uniform(int64_t key, int64_t token_number) {
  uint64_t x = static_cast<uint64_t>(key) +
               0x9E3779B97F4A7C15ull * (static_cast<uint64_t>(token_number) + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-53;
}

// logprob, entropy: among all columns; sampled: the log-prob among those that may be drawn.
struct Drawn {
  int64_t token;
  float logprob, sampled, entropy;
};

// Of the first C of V columns, the first token whose cumulative probability is above uniform * total:
// the block by the blocks' sums, in it the 16 by theirs, then the token. Where rounding leaves nothing
// above the goal, it is the last one with any probability. `blocks` is room for C / 256, rounded up,
// doubles.
template <class T>
inline Drawn sample_row(const T* logits, int64_t V, int64_t C, float temperature, double uniform,
                        double* blocks) {
  RowSums sums{largest(logits, C) / temperature, 0.0, 0.0}, all = sums;
  if (C < V) all.top = std::max(all.top, largest(logits + C, V - C) / temperature);
  // Up to C's block both add up the same numbers, unless the others' largest is above those before C.
  const int64_t alike = all.top == sums.top ? C / kSumBlock * kSumBlock : 0;
  add_sums<true>(sums, logits, 0, alike, temperature, blocks);
  if (alike > 0) all = sums;
  add_sums<true>(sums, logits, alike, C, temperature, blocks);
  if (C < V) add_sums<true>(all, logits, alike, V, temperature, nullptr);
  else all = sums;
  const double goal = uniform * sums.total;
  double reached = 0.0;  // by what comes before the part in hand
  // The start of the part of `count`, each `width` tokens from `first` on, that holds the goal.
  const auto find = [&](int64_t first, int64_t count, int64_t width, const auto& part_sum) {
    int64_t found = first;
    double before_found = reached;
    for (int64_t i = 0; i < count; ++i) {
      const double part = part_sum(i);
      if (part > 0.0) found = first + i * width, before_found = reached;
      reached += part;
      if (reached > goal) break;
    }
    reached = before_found;
    return found;
  };
  const int64_t block = find(0, (C + kSumBlock - 1) / kSumBlock, kSumBlock,
                             [&](int64_t i) { return blocks[i]; });
  const int64_t end = std::min(C, block + kSumBlock);
  const auto probabilities = [&](int64_t first) {
    v16 distance;
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, end - first));
    return weights(logits + first, lanes, temperature, sums.top, &distance);
  };
  const int64_t sixteen =
      find(block, (end - block + kLanes - 1) / kLanes, kLanes, [&](int64_t i) {
        const v16 e = probabilities(block + i * kLanes);
        return sum(as_double(lower(e)) + as_double(upper(e)));
      });
  float e[kLanes];
  store(e, probabilities(sixteen));
  const int64_t token =
      find(sixteen, std::min<int64_t>(kLanes, end - sixteen), 1, [&](int64_t i) { return e[i]; });
  const float z = static_cast<float>(logits[token]) / temperature;
  const float logprob = all.logprob(z);
  // A NaN shows in both, wherever it is.
  return {token, logprob, std::isnan(logprob) ? logprob : sums.logprob(z), all.entropy()};
}

}  // namespace tandem
