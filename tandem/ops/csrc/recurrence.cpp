#include "recurrence.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "lanes.h"
#include "rows.h"
#include "threads.h"

namespace tandem {
namespace {

// The token before each within its sequence, -1 where there is none.
std::vector<int64_t> tokens_before(const Segments& segments) {
  std::vector<int64_t> before(segments.bounds[segments.count]);
  for (int64_t b = 0; b < segments.count; ++b) {
    int64_t last = -1;
    for (int64_t p = b; segments.continues(p) && last < 0;) {  // of segments without tokens, on
      p = segments.prefixes[p];
      if (segments.bounds[p + 1] > segments.bounds[p]) last = segments.bounds[p + 1] - 1;
    }
    for (int64_t t = segments.bounds[b]; t < segments.bounds[b + 1]; ++t) {
      before[t] = last;
      last = t;
    }
  }
  return before;
}

// ---- convolution ----

constexpr int64_t kMostWidth = 8;
constexpr int64_t kChannelsAtOnce = 256;

// The rows that token t of segment b reads, the newest first; null: none is there.
template <class T>
TANDEM_INLINE void rows_read(const Convolution<T>& in, const Segments& segments,
                             const std::vector<int64_t>& before, int64_t b, int64_t t,
                             const T** rows) {
  int64_t at = t, reached = 0;
  for (; reached < in.width && at >= 0; ++reached) {
    rows[reached] = in.x + at * in.x_stride;
    at = before[at];
  }
  const bool goes_on = in.slots.goes_on(b);
  for (int64_t back = 1; reached < in.width; ++reached, ++back)
    rows[reached] = goes_on ? in.slots.at(b) + (in.width - 1 - back) * in.channels : nullptr;
}

template <class T>
TANDEM_INLINE v16 convolved(const Convolution<T>& in, const T* const* rows, int64_t i, int lanes) {
  v16 sum = in.bias ? load_lanes(in.bias + i, lanes) : v16{};
  for (int64_t j = in.width; j-- > 0;) {  // the oldest first
    if (!rows[j]) continue;
    const v16 w = load_lanes(in.weight + (in.width - 1 - j) * in.channels + i, lanes);
    sum = load_lanes(rows[j] + i, lanes) * w + sum;
  }
  return rounded<T>(sum);
}

// body(first channel, one behind the last) on threads; `tokens` decide whether that is worth it.
template <class Body>
void over_channels(int64_t channels, int64_t tokens, Body body) {
  const int64_t parts = (channels + kChannelsAtOnce - 1) / kChannelsAtOnce;
  const int64_t grain = 1 + 65536 / std::max<int64_t>(1, tokens * kChannelsAtOnce);
  parallel_for(0, parts, grain, [&](int64_t from, int64_t to) {
    for (int64_t part = from; part < to; ++part)
      body(part * kChannelsAtOnce, std::min(channels, (part + 1) * kChannelsAtOnce));
  });
}

// The last W - 1 tokens of every segment, for what comes behind it.
template <class T>
void keep_last(const Convolution<T>& in, const Segments& segments) {
  std::vector<T> kept((in.width - 1) * in.channels);
  for (int64_t b = 0; b < segments.count; ++b) {
    const int64_t from = segments.bounds[b], to = segments.bounds[b + 1];
    const int64_t missing = std::max<int64_t>(0, in.width - 1 - (to - from));
    T* const state = in.slots.at(b);
    for (int64_t row = 0; row < in.width - 1; ++row) {
      T* const target = kept.data() + row * in.channels;
      if (row >= missing) {
        const T* const source = in.x + (to - (in.width - 1) + row) * in.x_stride;
        std::copy(source, source + in.channels, target);
      } else if (in.slots.goes_on(b)) {
        const T* const source = state + (row + (to - from)) * in.channels;
        std::copy(source, source + in.channels, target);
      } else {
        std::fill(target, target + in.channels, T(0.0f));
      }
    }
    std::copy(kept.begin(), kept.end(), state);
  }
}

// ---- recurrence ----

constexpr int64_t kTile = 2 * kLanes;  // columns of a state at once: with K = 128, half of a cache
constexpr int64_t kChains = 4;
constexpr int64_t kChunk = 16;  // tokens whose states the backward pass holds side by side

// Some columns of one head's state, of rows of kTile numbers.
struct Tile {
  const Recurrence& in;
  int64_t head, column, columns;  // columns: below kTile in the last tile of a row

  int64_t group() const { return head / (in.heads / in.groups); }
  const float* key(const float* x, int64_t t) const {
    return x + (t * in.groups + group()) * in.key_width;
  }
  int64_t gate(int64_t t) const { return t * in.heads + head; }
  const float* value(const float* x, int64_t t) const {
    return x + gate(t) * in.value_width + column;
  }
  int64_t size() const { return in.key_width * kTile; }

  // Numbers of a row, zeros behind its end.
  TANDEM_INLINED void load(const float* row, v16& low, v16& high) const {
    low = load_lanes(row, static_cast<int>(std::min<int64_t>(kLanes, columns)));
    high = columns > kLanes ? load_lanes(row + kLanes, static_cast<int>(columns - kLanes)) : v16{};
  }
  TANDEM_INLINED void store(float* row, v16 low, v16 high) const {
    store_lanes(row, low, static_cast<int>(std::min<int64_t>(kLanes, columns)));
    if (columns > kLanes) store_lanes(row + kLanes, high, static_cast<int>(columns - kLanes));
  }
};

float* of_head(const Tile& tile, int64_t segment) {
  return tile.in.slots.at(segment) + tile.head * tile.in.key_width * tile.in.value_width +
         tile.column;
}

void read_state(const Tile& tile, int64_t segment, float* state) {
  const float* from = of_head(tile, segment);
  for (int64_t k = 0; k < tile.in.key_width; ++k, from += tile.in.value_width) {
    v16 low, high;
    tile.load(from, low, high);
    store(state + k * kTile, low);
    store(state + k * kTile + kLanes, high);
  }
}

void write_state(const Tile& tile, int64_t segment, const float* state) {
  float* to = of_head(tile, segment);
  for (int64_t k = 0; k < tile.in.key_width; ++k, to += tile.in.value_width)
    tile.store(to, load(state + k * kTile), load(state + k * kTile + kLanes));
}

// x^T S for numbers x (K,).
TANDEM_INLINE void read_out(const float* x, const float* state, int64_t K, v16& low, v16& high) {
  v16 a[kChains] = {}, b[kChains] = {};
  int64_t k = 0;
  for (; k + kChains <= K; k += kChains)
    for (int64_t c = 0; c < kChains; ++c) {
      const v16 factor = splat(x[k + c]);
      a[c] = load(state + (k + c) * kTile) * factor + a[c];
      b[c] = load(state + (k + c) * kTile + kLanes) * factor + b[c];
    }
  for (int64_t c = 0; k < K; ++k, ++c) {
    const v16 factor = splat(x[k]);
    a[c] = load(state + k * kTile) * factor + a[c];
    b[c] = load(state + k * kTile + kLanes) * factor + b[c];
  }
  low = (a[0] + a[1]) + (a[2] + a[3]);
  high = (b[0] + b[1]) + (b[2] + b[3]);
}

// What the forward pass makes of a token besides the state.
struct Made {
  v16 read[2];     // S^T k of the state before, by the delta rule
  v16 written[2];  // u
};

// The part of a step that has no state yet: what is written into it.
TANDEM_INLINE Made to_write(const Tile& tile, int64_t t, float factor, const float* state) {
  Made made;
  tile.load(tile.value(tile.in.v, t), made.written[0], made.written[1]);
  if (!tile.in.beta) return made;
  read_out(tile.key(tile.in.k, t), state, tile.in.key_width, made.read[0], made.read[1]);
  const float beta = tile.in.beta[tile.gate(t)];
  for (int i = 0; i < 2; ++i) made.written[i] = (made.written[i] - made.read[i] * factor) * beta;
  return made;
}

// The state after token t from the state before it; they may be one. Reads it out if `out` is given.
TANDEM_INLINE void advance(const Tile& tile, int64_t t, float factor, const Made& made,
                           const float* before, float* after, float* out) {
  const float *k = tile.key(tile.in.k, t), *q = tile.key(tile.in.q, t);
  const int64_t K = tile.in.key_width;
  v16 a[kChains] = {}, b[kChains] = {};
  const auto row = [&](int64_t i, int64_t c) TANDEM_INLINED {
    const v16 key = splat(k[i]), query = splat(q[i]);
    const v16 low = load(before + i * kTile) * factor + made.written[0] * key;
    const v16 high = load(before + i * kTile + kLanes) * factor + made.written[1] * key;
    store(after + i * kTile, low);
    store(after + i * kTile + kLanes, high);
    a[c] = low * query + a[c];
    b[c] = high * query + b[c];
  };
  int64_t i = 0;
  for (; i + kChains <= K; i += kChains)
    for (int64_t c = 0; c < kChains; ++c) row(i + c, c);
  for (int64_t c = 0; i < K; ++i, ++c) row(i, c);
  if (out) tile.store(out, (a[0] + a[1]) + (a[2] + a[3]), (b[0] + b[1]) + (b[2] + b[3]));
}

// Segments that others continue: their last states, while those come.
struct Opened {
  std::vector<std::pair<int64_t, std::vector<float>>> states;

  // The state that segment b begins with, copied.
  void begin(const Segments& segments, int64_t b, float* state, int64_t size) {
    while (!states.empty() && (!segments.continues(b) || states.back().first != segments.prefixes[b]))
      states.pop_back();
    if (states.empty()) {
      std::fill(state, state + size, 0.0f);
    } else {
      std::copy(states.back().second.begin(), states.back().second.end(), state);
    }
  }
  void end(int64_t b, const float* state, int64_t size) {
    states.emplace_back(b, std::vector<float>(state, state + size));
  }
};

std::vector<bool> continued(const Segments& segments) {
  std::vector<bool> is(segments.count, false);
  for (int64_t b = 0; b < segments.count; ++b)
    if (segments.continues(b)) is[segments.prefixes[b]] = true;
  return is;
}

std::vector<float> factors_of(const Recurrence& in) {
  std::vector<float> factors(in.tokens * in.heads);
  for (size_t i = 0; i < factors.size(); ++i) factors[i] = std::exp(in.decay[i]);
  return factors;
}

Tile tile_of(const Recurrence& in, int64_t head, int64_t number) {
  const int64_t column = number * kTile;
  return {in, head, column, std::min(kTile, in.value_width - column)};
}

// Adds the sum of each of `count` vectors' lanes to `to`; 16 of them are summed side by side.
TANDEM_INLINE void add_sums(const v16* x, float* to, int64_t count) {
#if defined(__AVX512F__)
  if (count == kLanes) {
    v16 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) {
      const v16 l = x[2 * i], r = x[2 * i + 1];
      a[i] = pick<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(l, r) +
             pick<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(l, r);
    }
    for (int i = 0; i < 4; ++i) {
      const v16 l = a[2 * i], r = a[2 * i + 1];
      b[i] = pick<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(l, r) +
             pick<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(l, r);
    }
    for (int i = 0; i < 2; ++i) {
      const v16 l = b[2 * i], r = b[2 * i + 1];
      c[i] = pick<0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29>(l, r) +
             pick<2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31>(l, r);
    }
    const v16 sums = pick<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(c[0], c[1]) +
                     pick<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(c[0], c[1]);
    return store(to, load(to) + sums);
  }
#endif
  for (int64_t i = 0; i < count; ++i) to[i] += sum(x[i]);
}

// What the backward pass of one tile holds.
struct Backward {
  const Tile& tile;
  const std::vector<float>& factors;
  const float* grad_out;
  float *grad_q, *grad_k, *grad_v, *grad_decay, *grad_beta;
  std::vector<float> chunk;  // states before the tokens of a chunk
  Made made[kChunk];

  // Tokens from to to - 1, from the state before them; `slope` is of the state behind them, and of
  // the one before them afterwards.
  void run(int64_t from, int64_t to, const float* begin, float* slope) {
    const int64_t size = tile.size();
    chunk.resize((kChunk + 1) * size);
    std::copy(begin, begin + size, chunk.data());
    for (int64_t t = from; t < to; ++t) {
      const float* const before = chunk.data() + (t - from) * size;
      const float factor = factors[tile.gate(t)];
      made[t - from] = to_write(tile, t, factor, before);
      if (t + 1 < to) advance(tile, t, factor, made[t - from], before,
                              chunk.data() + (t - from + 1) * size, nullptr);
    }
    for (int64_t t = to; t-- > from;) token(t, made[t - from], chunk.data() + (t - from) * size, slope);
  }

  void token(int64_t t, const Made& made, const float* before, float* slope) {
    const Recurrence& in = tile.in;
    const int64_t K = in.key_width, gate = tile.gate(t);
    const float *k = tile.key(in.k, t), *q = tile.key(in.q, t), factor = factors[gate];
    v16 grad[2];
    tile.load(tile.value(grad_out, t), grad[0], grad[1]);
    float *to_q = grad_q + gate * K, *to_k = grad_k + gate * K;
    v16 a[2] = {}, products[kLanes];
    for (int64_t i = 0; i < K; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, K - i);
      for (int64_t r = 0; r < count; ++r) {
        const float *state = before + (i + r) * kTile, key = k[i + r], query = q[i + r];
        float* const down = slope + (i + r) * kTile;
        v16 product = {};
        for (int h = 0; h < 2; ++h) {
          const v16 after = load(state + h * kLanes) * factor + made.written[h] * splat(key);
          const v16 s = grad[h] * splat(query) + load(down + h * kLanes);
          store(down + h * kLanes, s);
          a[h] = s * splat(key) + a[h];
          product = after * grad[h] + product;
        }
        products[r] = product;
      }
      add_sums(products, to_q + i, count);
    }
    v16 read_slope[2] = {};  // of exp(decay) S^T k
    v16 of_factor = {};
    if (in.beta) {
      const float beta = in.beta[gate];
      v16 value[2], of_beta = {};
      tile.load(tile.value(in.v, t), value[0], value[1]);
      for (int h = 0; h < 2; ++h) {
        of_beta = a[h] * (value[h] - made.read[h] * factor) + of_beta;
        a[h] = a[h] * beta;
        read_slope[h] = -a[h];
        of_factor = read_slope[h] * made.read[h] + of_factor;
      }
      grad_beta[gate] += sum(of_beta);
    }
    tile.store(grad_v + gate * in.value_width + tile.column, a[0], a[1]);
    for (int64_t i = 0; i < K; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, K - i);
      for (int64_t r = 0; r < count; ++r) {
        const float *state = before + (i + r) * kTile, key = k[i + r];
        float* const down = slope + (i + r) * kTile;
        v16 product = {};
        for (int h = 0; h < 2; ++h) {
          const v16 old = load(state + h * kLanes), s = load(down + h * kLanes);
          product = s * made.written[h] + product;
          if (in.beta) product = old * factor * read_slope[h] + product;
          of_factor = s * old + of_factor;
          store(down + h * kLanes, (read_slope[h] * splat(key) + s) * factor);
        }
        products[r] = product;
      }
      add_sums(products, to_k + i, count);
    }
    grad_decay[gate] += sum(of_factor) * factor;
  }
};

// One tile's gradients over all segments; what the tile has of q, k, decay and beta is added.
void tile_backward(const Tile& tile, const Segments& segments, const std::vector<bool>& is_continued,
                   const std::vector<float>& factors, const float* grad_out, float* grad_q,
                   float* grad_k, float* grad_v, float* grad_decay, float* grad_beta) {
  const int64_t size = tile.size();
  // The state at the beginning of every chunk.
  std::vector<float> begins, state(size);
  std::vector<int64_t> first(segments.count);
  Opened opened;
  for (int64_t b = 0, chunks = 0; b < segments.count; ++b) {
    first[b] = chunks;
    opened.begin(segments, b, state.data(), size);
    for (int64_t t = segments.bounds[b]; t < segments.bounds[b + 1]; ++t) {
      if ((t - segments.bounds[b]) % kChunk == 0) {
        begins.insert(begins.end(), state.begin(), state.end());
        ++chunks;
      }
      const float factor = factors[tile.gate(t)];
      advance(tile, t, factor, to_write(tile, t, factor, state.data()), state.data(), state.data(),
              nullptr);
    }
    if (is_continued[b]) opened.end(b, state.data(), size);
  }
  std::vector<std::vector<float>> slopes(segments.count);  // of last states, from what goes on there
  Backward backward{tile, factors, grad_out, grad_q, grad_k, grad_v, grad_decay, grad_beta};
  for (int64_t b = segments.count; b-- > 0;) {
    std::vector<float> slope = std::move(slopes[b]);
    slope.resize(size, 0.0f);
    const int64_t from = segments.bounds[b], to = segments.bounds[b + 1];
    const int64_t chunks = (to - from + kChunk - 1) / kChunk;
    for (int64_t c = chunks; c-- > 0;)
      backward.run(from + c * kChunk, std::min(to, from + (c + 1) * kChunk),
                   begins.data() + (first[b] + c) * size, slope.data());
    if (!segments.continues(b)) continue;
    auto& target = slopes[segments.prefixes[b]];
    target.resize(size, 0.0f);
    for (int64_t i = 0; i < size; i += kLanes)
      store(target.data() + i, load(target.data() + i) + load(slope.data() + i));
  }
}

}  // namespace

template <class T>
void convolve(const Convolution<T>& in, const Segments& segments, T* y) {
  const std::vector<int64_t> before = tokens_before(segments);
  over_channels(in.channels, before.size(), [&](int64_t first, int64_t end) {
    const T* rows[kMostWidth];
    for (int64_t b = 0; b < segments.count; ++b)
      for (int64_t t = segments.bounds[b]; t < segments.bounds[b + 1]; ++t) {
        rows_read(in, segments, before, b, t, rows);
        for_columns(end - first, [&](int64_t i, int lanes) TANDEM_INLINED {
          const v16 sum = convolved(in, rows, first + i, lanes);
          store_lanes(y + t * in.channels + first + i, in.silu ? Silu::value(sum) : sum, lanes);
        });
      }
  });
  if (in.slots.state) keep_last(in, segments);
}

template <class T>
void convolve_backward(const Convolution<T>& in, const Segments& segments, const T* grad_y,
                       float* grad_x, float* grad_weight, float* grad_bias) {
  const std::vector<int64_t> before = tokens_before(segments);
  const int64_t C = in.channels;
  over_channels(C, before.size(), [&](int64_t first, int64_t end) {
    const T* rows[kMostWidth];
    for (int64_t b = 0; b < segments.count; ++b)
      for (int64_t t = segments.bounds[b]; t < segments.bounds[b + 1]; ++t) {
        rows_read(in, segments, before, b, t, rows);
        for_columns(end - first, [&](int64_t column, int lanes) TANDEM_INLINED {
          const int64_t i = first + column;
          v16 slope = load_lanes(grad_y + t * C + i, lanes);
          if (in.silu) slope = slope * Silu::slope(convolved(in, rows, i, lanes));
          if (grad_bias) store_lanes(grad_bias + i, load_lanes(grad_bias + i, lanes) + slope, lanes);
          int64_t at = t;
          for (int64_t j = 0; j < in.width && at >= 0; ++j, at = before[at]) {
            float* const weight = grad_weight + (in.width - 1 - j) * C + i;
            const v16 w = load_lanes(in.weight + (in.width - 1 - j) * C + i, lanes);
            store_lanes(weight, load_lanes(rows[j] + i, lanes) * slope + load_lanes(weight, lanes),
                        lanes);
            float* const x = grad_x + at * C + i;
            store_lanes(x, w * slope + load_lanes(x, lanes), lanes);
          }
        });
      }
  });
}

void recur(const Recurrence& in, const Segments& segments, float* out) {
  const int64_t tiles = (in.value_width + kTile - 1) / kTile;
  const std::vector<float> factors = factors_of(in);
  const std::vector<bool> is_continued = continued(segments);
  const int64_t work = in.tokens * in.key_width * kTile;
  parallel_for(0, in.heads * tiles, 1 + 65536 / std::max<int64_t>(1, work), [&](int64_t from,
                                                                               int64_t to) {
    std::vector<float> buffer(in.key_width * kTile + kLanes);
    float* const state = buffer.data();
    for (int64_t task = from; task < to; ++task) {
      const Tile tile = tile_of(in, task / tiles, task % tiles);
      Opened opened;
      for (int64_t b = 0; b < segments.count; ++b) {
        if (in.slots.goes_on(b)) {
          read_state(tile, b, state);
        } else {
          opened.begin(segments, b, state, tile.size());
        }
        for (int64_t t = segments.bounds[b]; t < segments.bounds[b + 1]; ++t) {
          const float factor = factors[tile.gate(t)];
          advance(tile, t, factor, to_write(tile, t, factor, state), state, state,
                  out + tile.gate(t) * in.value_width + tile.column);
        }
        if (in.slots.state) write_state(tile, b, state);
        if (is_continued[b]) opened.end(b, state, tile.size());
      }
    }
  });
}

void recur_backward(const Recurrence& in, const Segments& segments, const float* grad_out,
                    float* grad_q, float* grad_k, float* grad_v, float* grad_decay,
                    float* grad_beta) {
  const int64_t tiles = (in.value_width + kTile - 1) / kTile;
  const std::vector<float> factors = factors_of(in);
  const std::vector<bool> is_continued = continued(segments);
  // A head's tiles one after another: they add to the same gradients of q, k and the gates.
  parallel_for(0, in.heads, 1, [&](int64_t from, int64_t to) {
    for (int64_t head = from; head < to; ++head)
      for (int64_t number = 0; number < tiles; ++number)
        tile_backward(tile_of(in, head, number), segments, is_continued, factors, grad_out, grad_q,
                      grad_k, grad_v, grad_decay, grad_beta);
  });
}

template void convolve(const Convolution<float>&, const Segments&, float*);
template void convolve(const Convolution<bf16>&, const Segments&, bf16*);
template void convolve_backward(const Convolution<float>&, const Segments&, const float*, float*,
                                float*, float*);
template void convolve_backward(const Convolution<bf16>&, const Segments&, const bf16*, float*,
                                float*, float*);

}  // namespace tandem
