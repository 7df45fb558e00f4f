// What products by vectors (gemm.cpp) and on the matrix unit (products_amx.cpp) share: panels of
// weights, memory for copies, what becomes of a finished sum.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <new>

#include <c10/util/FunctionRef.h>

#include "gemm.h"
#include "threads.h"
#include "tiles.h"

namespace tandem {

// Columns of a panel of a packed weight.
#if defined(__AVX512F__)
constexpr int64_t kPanel = 64;
#else
constexpr int64_t kPanel = 16;
#endif

// How many multiply-adds are worth a thread.
constexpr int64_t kGrain = 1 << 17;

// Memory of one thread that grows and is kept: one per purpose, so that uses do not meet.
enum class Use { weights, rows, panel, tile, sums, read, count };

inline float* scratch(Use use, int64_t floats) {
  struct Memory {
    float* data = nullptr;
    int64_t size = 0;
    ~Memory() { std::free(data); }
  };
  thread_local std::array<Memory, static_cast<size_t>(Use::count)> all;
  Memory& memory = all[static_cast<size_t>(use)];
  if (memory.size < floats) {
    std::free(memory.data);
    memory.size = 0;
    memory.data = static_cast<float*>(std::aligned_alloc(64, round_up(floats, kLanes) * 4));
    if (!memory.data) throw std::bad_alloc();
    memory.size = round_up(floats, kLanes);
  }
  return memory.data;
}

// Finishes `lanes` sums of one row; y, bias and residual point at the first of them.
template <class T>
TANDEM_INLINE void finish(T* y, v16 sums, const T* bias, const T* residual, int lanes) {
  if (bias) sums = sums + load_lanes(bias, lanes);
  if (residual) sums = load_lanes(residual, lanes) + rounded<T>(sums);
  store_lanes(y, sums, lanes);
}

// Writes numbers k to k + length of rows `first` to first + width of a weight as words, a panel
// (words, round_up(width, 16)).
using MakePanel = c10::function_ref<void(int64_t first, int64_t width, int64_t k, int64_t length,
                                         float* panel)>;

// y (M, N) = x (M, K) by a weight that is made panel by panel, summed by vectors (gemm.h's rule without
// the matrix unit).
template <class T>
void multiply_made(const T* x, int64_t x_stride, int64_t M, int64_t N, int64_t K, T* y,
                   int64_t y_stride, const Epilogue<T>& epilogue, MakePanel make);

// ---- 16 rows of words become columns ----

// Four columns of 16 rows, `step` floats apart: x[i] is column i of all.
TANDEM_INLINE void load_four_turned(const float* rows, int64_t step, v16 (&x)[4]) {
#if !defined(__AVX512F__)
  v4 y[4][4];  // of four rows each, turned
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) y[g][r] = load_four(rows + (4 * g + r) * step);
    transpose(y[g]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    x[i] = joined(joined(y[0][i], y[1][i]), joined(y[2][i], y[3][i]));
#else
  v16 y[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // rows i, 4 + i, 8 + i and 12 + i, a quarter each
    const float* const row = rows + i * step;
    __m512 made = _mm512_castps128_ps512(_mm_loadu_ps(row));
    made = _mm512_insertf32x4(made, _mm_loadu_ps(row + 4 * step), 1);
    made = _mm512_insertf32x4(made, _mm_loadu_ps(row + 8 * step), 2);
    made = _mm512_insertf32x4(made, _mm_loadu_ps(row + 12 * step), 3);
    y[i] = reinterpret_cast<v16>(made);
  }
  const v16 a = pick<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(y[0], y[1]);
  const v16 b = pick<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(y[0], y[1]);
  const v16 c = pick<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(y[2], y[3]);
  const v16 d = pick<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(y[2], y[3]);
  x[0] = pick<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, c);
  x[1] = pick<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, c);
  x[2] = pick<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(b, d);
  x[3] = pick<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(b, d);
#endif
}

// The words k to k + 15 of a row.
template <class T>
TANDEM_INLINE v16 full_words(const T* row, int64_t k) {
  if constexpr (kPerWord<T> == 1) {
    return load(row + k);
  } else {
    return load_whole(row + 2 * k);
  }
}

// The same of a row of K values; past its end they are 0.
template <class T>
TANDEM_INLINE v16 row_words(const T* row, int64_t k, int64_t K) {
  const int64_t values = std::min<int64_t>(kLanes * kPerWord<T>, K - k * kPerWord<T>);
  if (values == kLanes * kPerWord<T>) return full_words(row, k);
  if constexpr (kPerWord<T> == 1) {
    return load(row + k, static_cast<int>(values));
  } else {
    v16 x = {};
    __builtin_memcpy(&x, row + 2 * k, values * sizeof(T));
    return x;
  }
}

// Rows (M, K) in words that are broadcast: where they lie, or a copy.
struct Words {
  const word* data;
  int64_t stride, step = 1;
};

template <class T>
Words words_of_rows(const T* x, int64_t x_stride, int64_t M, int64_t K) {
  if constexpr (std::is_same_v<T, float>) {
    return {x, x_stride};
  } else {
    if (kPairs && K % 2 == 0 && x_stride % 2 == 0)
      return {reinterpret_cast<const word*>(x), x_stride / 2};
    const int64_t words = words_of<T>(K);
    float* copy = scratch(Use::rows, M * words);
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < words; k += kLanes)
        store_lanes(copy + m * words + k, row_words(x + m * x_stride, k, K),
                    static_cast<int>(std::min<int64_t>(kLanes, words - k)));
    return {copy, words};
  }
}

constexpr int64_t kAhead = 2 * kLanes;  // words fetched before their turn: rows lie far apart

// Words k to k + 15 of `count` <= 16 contiguous rows from row `first`: x[i] is word k + i of all.
template <class T>
TANDEM_INLINE void load_turned(const Matrix<T>& m, int64_t first, int64_t count, int64_t k,
                               int64_t K, v16 (&x)[16]) {
  const T* rows = m.data + first * m.row_stride;
  if (count == kLanes && (k + kLanes) * kPerWord<T> <= K) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const T* row = rows + i * m.row_stride;
      x[i] = full_words(row, k);
      __builtin_prefetch(row + (k + kAhead) * kPerWord<T>);
    }
  } else {
    for (int i = 0; i < 16; ++i)
      x[i] = i < count ? row_words(rows + i * m.row_stride, k, K) : v16{};
  }
  transpose(x);
}

// Words k of `count` <= 16 rows from row `first`, where it is the columns that are contiguous.
template <class T>
TANDEM_INLINE v16 column_words(const Matrix<T>& m, int64_t first, int64_t count, int64_t k,
                               int64_t K) {
  const auto values = [&](int64_t column) {
    const T* p = m.data + column * m.column_stride + first * m.row_stride;
    return load_lanes(p, static_cast<int>(count));
  };
  if constexpr (kPerWord<T> == 1) {
    return values(k);
  } else if (count == kLanes && 2 * k + 1 < K) {
    const T* p = m.data + 2 * k * m.column_stride + first * m.row_stride;
    return from_bits(whole(load_halves(p)) | whole(load_halves(p + m.column_stride)) << 16);
  } else {
    const v16u low = bits(values(2 * k)) >> 16;
    const v16u high = 2 * k + 1 < K ? bits(values(2 * k + 1)) & 0xFFFF0000u : v16u{};
    return from_bits(low | high);
  }
}

// Rows first to first + width (at most kPanel) into out (words, round_up(width, 16)): words, or the
// bfloat16 that they are made from.
template <class T, class P>
void pack_panel(const Matrix<T>& m, int64_t first, int64_t width, int64_t K, P* out) {
  const int64_t words = words_of<T>(K), lanes = round_up(width, kLanes);
  if (m.column_stride != 1) {
    // What follows in memory is read together; the next words are far, so they are fetched ahead: to
    // the second cache, whose lines can be on their way in greater number than the first's.
    constexpr int64_t kSoon = 32;
    for (int64_t k = 0; k < words; ++k) {
      const T* soon =
          m.data + first * m.row_stride + (k + kSoon) * kPerWord<T> * m.column_stride;
      for (int64_t n = 0; n < width; n += kLanes) {
        __builtin_prefetch(soon + n, 0, 2);
        if constexpr (kPerWord<T> == 2) __builtin_prefetch(soon + n + m.column_stride, 0, 2);
        store_exact(out + k * lanes + n,
                    column_words(m, first + n, std::min<int64_t>(kLanes, width - n), k, K));
      }
    }
    return;
  }
  for (int64_t n = 0; n < width; n += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, width - n);
    for (int64_t k = 0; k < words; k += kLanes) {
      v16 x[16];
      load_turned(m, first + n, count, k, K, x);
      const int64_t some = std::min<int64_t>(kLanes, words - k);
      for (int64_t i = 0; i < some; ++i) store_exact(out + (k + i) * lanes + n, x[i]);
    }
  }
}

// ---- work for each thread ----

// Rows cut into runs of whole tiles, about as many in each.
struct Runs {
  int64_t rows, tile, count;

  // The first row of a run; that of the one behind the last is the end of all rows.
  int64_t start(int64_t run) const {
    return std::min(rows, (rows + tile - 1) / tile * run / count * tile);
  }
  int64_t longest() const { return ((rows + tile - 1) / tile + count - 1) / count * tile; }
};

// Runs of the rows that pass each of `panels`, so that every thread has as much to do: 9 panels would
// keep 8 threads half idle. The fewest that do, from `least` on, of `shortest` rows or more.
inline Runs even_runs(int64_t rows, int64_t tile, int64_t panels, int64_t least, int64_t shortest) {
  constexpr double kEven = 0.92, kWorthIt = 1.05;
  const int64_t threads = num_threads();
  const auto busy = [&](int64_t runs) {  // share of the threads' time
    const int64_t each = (panels * runs + threads - 1) / threads;
    return static_cast<double>(panels * runs) / static_cast<double>(threads * each);
  };
  int64_t best = std::max<int64_t>(1, least);
  for (int64_t runs = best + 1; runs <= rows / shortest && busy(best) < kEven; ++runs)
    if (busy(runs) > kWorthIt * busy(best)) best = runs;
  return {rows, tile, best};
}

// body(panel, first row, end of rows, whether a next panel follows) for runs `from` to `to` of all
// panels', one panel's after another's: those of one panel come together.
template <class Body>
void for_panels(const Runs& runs, int64_t from, int64_t to, const Body& body) {
  for (int64_t i = from, end; i < to; i = end) {
    const int64_t panel = i / runs.count, first = panel * runs.count;
    end = std::min(to, first + runs.count);
    body(panel, runs.start(i - first), runs.start(end - first), end < to);
  }
}

// The same for all rows of all panels, on threads; what follows is what is this thread's too.
template <class Body>
void share_panels(int64_t panels, const Runs& runs, int64_t grain, const Body& body) {
  parallel_for(0, panels * runs.count, grain,
               [&](int64_t from, int64_t to) { for_panels(runs, from, to, body); });
}

// The whole weight (N, K), panel after panel of so many columns.
template <class T, class P>
void pack_panels(const Matrix<T>& m, int64_t N, int64_t K, int64_t panel, P* out) {
  const int64_t panels = (N + panel - 1) / panel, words = words_of<T>(K);
  const Runs runs = even_runs(words, kLanes, panels, 1, 2 * kLanes);
  const int64_t grain = std::max<int64_t>(1, 32768 * runs.count / std::max<int64_t>(1, panel * words));
  share_panels(panels, runs, grain, [&](int64_t p, int64_t k, int64_t end, bool) {
    const int64_t n = p * panel, width = std::min(panel, N - n), column = k * kPerWord<T>;
    const Matrix<T> part{m.data + column * m.column_stride, m.row_stride, m.column_stride};
    pack_panel(part, n, width, std::min(K, end * kPerWord<T>) - column,
               out + n * words + k * round_up(width, kLanes));
  });
}

}  // namespace tandem
