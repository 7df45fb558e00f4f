// The products of gemm.h, cut for speed: lanes over n with the weight turned into panels (many rows,
// or packed ahead of time), or lanes over m with the rows turned and the weight read where it lies.
// The bits are the same.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "amx.h"
#include "gemm.h"
#include "packing.h"
#include "products_amx.h"
#include "threads.h"
#include "tiles.h"
#include "tuning.h"

namespace tandem {
namespace {

// The tiles of sums that the processor's registers hold: how many rows beside 16, 32, 48 and 64
// columns.
#if defined(__AVX512F__)
constexpr int kMostRows[] = {0, 12, 12, 8, 6};
#else
constexpr int kMostRows[] = {0, 6, 0, 0, 0};
#endif

// Rows of a product that a panel passes at a time, and of a tile as wide as a panel.
constexpr int64_t kGroup = 48, kTileRows = kMostRows[kPanel / kLanes];

// Memory that will soon be read, shared among `tiles` tiles: each fetches, per k, `lines` cache
// lines that follow one another, `step` words after those of the last k.
struct Ahead {
  const word* data = nullptr;
  int64_t step = 0, part = 0;  // `part`: from what one tile fetches to what the next one does
  int64_t tiles = kPanel / kLanes;
  int lines = 1;
};

// ---- the tile: R rows by C vectors of sums in registers ----

template <class T, class P = word>
struct TileWork {
  const word* rows;  // R rows `row_stride` words apart, their words `row_step` apart
  int64_t row_stride, row_step;
  const P* panel;  // (words, 16 C), `panel_step` of them from k to k + 1
  int64_t panel_step;
  int64_t words;
  const float* before;  // sums so far (R, kPanel), or null: start at 0
  float* raw;           // where sums go as they are (R, kPanel), or null: finish them into y
  T* y;
  int64_t y_stride;
  int64_t width;  // columns of y, at most 16 C
  Epilogue<T> epilogue;
  Ahead ahead;  // fetched meanwhile
};

#if defined(__AVX512F__)

template <class T, class P, int R, int vectors>
void tile(const TileWork<T, P>& work) {
  constexpr int C = vectors * kLanes / kWide;
  if (!work.raw) {  // fetched while the sums are made; to be written, but PREFETCHW is slow on Zen 4
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < vectors; ++c)
        __builtin_prefetch(work.y + r * work.y_stride + c * kLanes, 0, 2);
  }
  wide sums[R][C];
  if (work.before) {
    for_sums<R, C>([&](int r, int c) {
      sums[r][c] = load_wide(work.before + r * kPanel + c * kWide);
    });
  } else {
    for_sums<R, C>([&](int r, int c) { sums[r][c] = wide{}; });
  }
  const word* row = work.rows;
  const P* panel = work.panel;
  const int64_t stride = work.row_stride, step = work.row_step, panel_step = work.panel_step;
  const word* ahead =
      work.ahead.data ? work.ahead.data : reinterpret_cast<const word*>(panel);
  const int64_t ahead_step = work.ahead.step;
  int64_t left = work.words;
  const bool two = work.ahead.lines > 1, more = work.ahead.lines > 2;
  for (; left > 0; --left, row += step, panel += panel_step) {
    __builtin_prefetch(ahead, 0, 2);
    if (two) __builtin_prefetch(ahead + kLanes, 0, 2);
    if (more) {
      __builtin_prefetch(ahead + 2 * kLanes, 0, 2);
      __builtin_prefetch(ahead + 3 * kLanes, 0, 2);
    }
    ahead += ahead_step;
    wide b[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) b[c] = load_wide(panel + c * kWide);
    // Three rows from one pointer: an offset for each would take more registers than there are.
    constexpr int together = 3;
    const word* some = row;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const wide a = splat_wide(some[r % together * stride]);
      if (r % together == together - 1) {
        some += together * stride;
        in_register(some);
      }
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = multiply_add<T>(a, b[c], sums[r][c]);
    }
  }
  if (work.raw) {
    for_sums<R, C>([&](int r, int c) { store_wide(work.raw + r * kPanel + c * kWide, sums[r][c]); });
    return;
  }
  const Epilogue<T>& epilogue = work.epilogue;
  if (work.width == kLanes * vectors) {
    const auto each = [&](auto finished) TANDEM_INLINED {
      for_sums<R, vectors>([&](int r, int c) {
        finished(r, c * kLanes, sixteen(sums[r] + c * (kLanes / kWide)));
      });
    };
    if (!epilogue.bias && !epilogue.residual) {
      each([&](int r, int n, v16 sum) TANDEM_INLINED { store(work.y + r * work.y_stride + n, sum); });
      return;
    }
  }
  float kept[R * kPanel];
  for_sums<R, C>([&](int r, int c) { store_wide(kept + r * kPanel + c * kWide, sums[r][c]); });
  for (int r = 0; r < R; ++r) {
    const Epilogue<T> e = epilogue.at(r, 0);
    for_columns(work.width, [&](int64_t n, int lanes) {
      finish(work.y + r * work.y_stride + n, load(kept + r * kPanel + n),
             epilogue.bias ? epilogue.bias + n : nullptr, e.residual ? e.residual + n : nullptr,
             lanes);
    });
  }
}

template <class T, class P>
using TileFunction = void (*)(const TileWork<T, P>&);

template <class T, class P, int C, int... R>
constexpr std::array<TileFunction<T, P>, sizeof...(R)> tiles_of(std::integer_sequence<int, R...>) {
  return {&tile<T, P, R + 1, C>...};
}

template <class T, class P>
TileFunction<T, P> tile_for(int C, int R) {
  static constexpr auto one = tiles_of<T, P, 1>(std::make_integer_sequence<int, kMostRows[1]>{});
  static constexpr auto two = tiles_of<T, P, 2>(std::make_integer_sequence<int, kMostRows[2]>{});
  static constexpr auto three = tiles_of<T, P, 3>(std::make_integer_sequence<int, kMostRows[3]>{});
  static constexpr auto four = tiles_of<T, P, 4>(std::make_integer_sequence<int, kMostRows[4]>{});
  switch (C) {
    case 1: return one[R - 1];
    case 2: return two[R - 1];
    case 3: return three[R - 1];
    default: return four[R - 1];
  }
}

// The tiles of a group beside `lanes` columns, for each part of k.
int64_t tiles_of_group(int64_t count, int64_t lanes, const Cut& cut) {
  const int64_t piece = std::min<int64_t>(cut.columns, kPanel);
  int64_t tiles = 0;
  for (int64_t c = 0; c < lanes; c += piece) {
    const int64_t most = kMostRows[std::min(piece, lanes - c) / kLanes];
    tiles += (count + most - 1) / most;
  }
  return tiles;
}

// `count` rows (at most kGroup) by one panel of `lanes` columns in memory: tiles of nearly equal
// heights, cut as `cut` says. Sums start at `before` (count, kPanel) if given, and go to `raw`
// (count, kPanel) if given, else finished into y. `earlier`: tiles of the groups before it.
template <class T, class P>
void multiply_group(const TileWork<T, P>& work, int64_t count, int64_t lanes, const float* before,
                    float* raw, const Cut& cut, int64_t earlier = 0) {
  const int64_t words = work.words, piece = std::min<int64_t>(cut.columns, kPanel);
  float* partial = raw;
  if (!raw && words > cut.words) partial = scratch(Use::tile, kGroup * kPanel);
  for (int64_t k = 0; k < words; k += cut.words) {
    const bool last = k + cut.words >= words;
    const float* from = k ? partial : before;
    TileWork<T, P> one = work;
    one.words = last ? words - k : cut.words;
    one.panel_step = work.panel_step;
    int64_t done = earlier;
    for (int64_t c = 0; c < lanes; c += piece) {
      const int vectors = static_cast<int>(std::min(piece, lanes - c) / kLanes);
      const int64_t most = kMostRows[vectors], tiles = (count + most - 1) / most;
      one.panel = work.panel + k * work.panel_step + c;
      one.width = std::min(work.width - c, vectors * int64_t{kLanes});
      for (int64_t i = 0, m = 0; i < tiles; ++i, ++done) {
        const int64_t height = count / tiles + (i < count % tiles);
        one.rows = work.rows + m * work.row_stride + k * work.row_step;
        one.before = from ? from + m * kPanel + c : nullptr;
        one.raw = last && !raw ? nullptr : partial + m * kPanel + c;
        one.y = work.y + m * work.y_stride + c;
        one.epilogue = work.epilogue.at(m, c);
        one.ahead = {};
        if (work.ahead.data && done < work.ahead.tiles) {  // its share of the next panel
          one.ahead = work.ahead;
          one.ahead.data += done * work.ahead.part + k * work.ahead.step;
        } else if (cut.fetches_rows && work.row_step == 1) {  // the next tile's rows
          one.ahead.data = one.rows + height * work.row_stride;
          one.ahead.step = height;
        }
        tile_for<T, P>(vectors, static_cast<int>(height))(one);
        m += height;
      }
    }
  }
}

#else

// A tile of 6 rows by 16 columns is soon made there, so that what is done between two of them counts,
// and instructions that are no multiply-adds do, most where another process takes turns on the core:
// tiles below one another are made by one call, four words at a time at fixed distances.

// `count` tiles of R rows that lie as they are, below one another, by a panel of 16 columns.
template <class T, class P, int R>
void tiles_below(const TileWork<T, P>& work, int64_t count) {
  constexpr int64_t kFour = 4;
  const int64_t stride = work.row_stride, y_stride = work.y_stride, words = work.words;
  const int64_t residual_stride = work.epilogue.residual_stride, ahead_step = work.ahead.step;
  const int lanes = static_cast<int>(work.width);
  const bool spread = ahead_step > kLanes / kFour;
  const T *const bias = work.epilogue.bias, *residual = work.epilogue.residual;
  const word *rows = work.rows, *next = work.ahead.data;
  const float* before = work.before;
  float* raw = work.raw;
  T* y = work.y;
  for (; count > 0; --count) {
    if (!raw) {
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) __builtin_prefetch(y + r * y_stride, 0, 2);
    }
    TileSums<R> sums;
    if (before) {
      read_sums<R>(sums, before, kPanel);
      before += R * kPanel;
    } else {
      zero_sums<R>(sums);
    }
    const P* panel = work.panel;
    const word *row = rows, *low = rows + 3 * stride;  // two: an offset a row takes too many registers
    in_register(low);
    const word* ahead = next ? next : reinterpret_cast<const word*>(panel);
    const auto add = [&](int64_t i) TANDEM_INLINED {
      add_word<T, R>(sums, panel + i * kLanes, [&](int r) TANDEM_INLINED {
        return r < 3 ? row[r * stride + i] : low[(r - 3) * stride + i];
      });
    };
    int64_t left = words;
    for (; left >= kFour; left -= kFour) {
      __builtin_prefetch(ahead, 0, 2);
      if (spread)
        for (int i = 1; i < kFour; ++i) __builtin_prefetch(ahead + i * ahead_step, 0, 2);
      ahead += kFour * ahead_step;
#pragma GCC unroll 4
      for (int i = 0; i < kFour; ++i) add(i);
      row += kFour, low += kFour, panel += kFour * kLanes;
    }
    for (; left > 0; --left, ++row, ++low, panel += kLanes) add(0);
    rows += R * stride;
    if (next) next += work.ahead.part;
    if (raw) {
      write_sums<R>(sums, raw, kPanel);
      raw += R * kPanel;
      continue;
    }
    if (!bias && !residual) {
      finish_sums<R>(sums, lanes, [&](int r, v16 sum, int lanes) TANDEM_INLINED {
        store_lanes(y + r * y_stride, sum, lanes);
      });
    } else {
      finish_sums<R>(sums, lanes, [&](int r, v16 sum, int lanes) TANDEM_INLINED {
        finish(y + r * y_stride, sum, bias, residual ? residual + r * residual_stride : nullptr,
               lanes);
      });
      if (residual) residual += R * residual_stride;
    }
    y += R * y_stride;
  }
}

template <class T, class P>
void tiles_below(int64_t rows, const TileWork<T, P>& work, int64_t count) {
  switch (rows) {
    case 1: return tiles_below<T, P, 1>(work, count);
    case 2: return tiles_below<T, P, 2>(work, count);
    case 3: return tiles_below<T, P, 3>(work, count);
    case 4: return tiles_below<T, P, 4>(work, count);
    case 5: return tiles_below<T, P, 5>(work, count);
    default: return tiles_below<T, P, 6>(work, count);
  }
}

int64_t tiles_of_group(int64_t count, int64_t, const Cut&) {
  return (count + kMostRows[1] - 1) / kMostRows[1];
}

// `count` rows (at most kGroup where k has parts) by a panel of 16 columns in memory, otherwise as above.
template <class T, class P>
void multiply_group(const TileWork<T, P>& work, int64_t count, int64_t lanes, const float* before,
                    float* raw, const Cut& cut, int64_t earlier = 0) {
  const int64_t tiles = tiles_of_group(count, lanes, cut), tall = count % tiles;
  float* partial = raw;
  if (!raw && work.words > cut.words) partial = scratch(Use::tile, kGroup * kPanel);
  for (int64_t k = 0; k < work.words; k += cut.words) {
    const bool last = k + cut.words >= work.words;
    const float* const from = k ? partial : before;
    TileWork<T, P> one = work;
    one.words = last ? work.words - k : cut.words;
    one.panel += k * kLanes;
    for (int64_t i = 0, m = 0, same; i < tiles; i += same) {
      const int64_t height = count / tiles + (i < tall), shares = work.ahead.tiles - earlier - i;
      same = (i < tall ? tall : tiles) - i;
      one.rows = work.rows + m * work.row_stride + k;
      one.before = from ? from + m * kPanel : nullptr;
      one.raw = last && !raw ? nullptr : partial + m * kPanel;
      one.y = work.y + m * work.y_stride;
      one.epilogue = work.epilogue.at(m, 0);
      one.ahead = {};
      if (work.ahead.data && shares > 0) {  // their shares of the next panel
        same = std::min(same, shares);
        one.ahead = work.ahead;
        one.ahead.data += (earlier + i) * work.ahead.part + k * work.ahead.step;
      } else if (cut.fetches_rows) {  // the next tile's rows
        const int64_t rows = height * work.row_stride;
        one.ahead = {one.rows + rows, height, rows};
      }
      tiles_below(height, one, same);
      m += same * height;
    }
  }
}

#endif

// ---- whole products ----

// Where the sums of a panel's rows come from and go to, (rows, kPanel) each; null: from 0, into y.
struct Sums {
  const float* before = nullptr;
  float* after = nullptr;
};

// Rows m0 to m1 by `words` words of one panel of `width` columns; y, bias and residual point at
// row 0 and the panel's first column. The panel's words are `panel_step` apart; 0: without gaps.
template <class T, class P>
void multiply_panel(const Words& x, int64_t m0, int64_t m1, const P* panel, int64_t width,
                    int64_t words, T* y, int64_t y_stride, const Epilogue<T>& epilogue,
                    const Cut& cut, const Ahead& ahead = {}, const Sums& sums = {},
                    int64_t panel_step = 0) {
  const int64_t lanes = round_up(width, kLanes);
  // Sums of parts of k are held between them.
  const int64_t group = kWide < kLanes && words <= cut.words ? m1 - m0 : kGroup;
  int64_t earlier = 0;
  for (int64_t m = m0; m < m1; m += group) {
    TileWork<T, P> work{};
    work.rows = x.data + m * x.stride;
    work.row_stride = x.stride;
    work.row_step = x.step;
    work.panel = panel;
    work.panel_step = panel_step ? panel_step : lanes;
    work.words = words;
    work.y = y + m * y_stride;
    work.y_stride = y_stride;
    work.width = width;
    work.epilogue = epilogue.at(m, 0);
    work.ahead = ahead;
    const int64_t sum = (m - m0) * kPanel, count = std::min(group, m1 - m);
    multiply_group(work, count, lanes, sums.before ? sums.before + sum : nullptr,
                   sums.after ? sums.after + sum : nullptr, cut, earlier);
    earlier += tiles_of_group(count, lanes, cut);
  }
}

// Floats of a packed weight that stays in the second cache while rows pass by, and of rows that stay
// there while narrow registers pass all its panels: a panel then stays in the first cache.
constexpr int64_t kSmall = 1 << 18, kSmallRows = 1 << 16;

// Rows that pass all panels of a small weight together: as many as stay near, of which each thread has
// some. Fewer calls of tiles count where registers are narrow and tiles are soon made.
int64_t rows_together(int64_t M, int64_t words, int64_t panels) {
  if (kWide == kLanes) return kGroup;
  const int64_t threads = num_threads();
  const int64_t shared = threads > 1 ? M * panels / (4 * threads) : M;
  return std::max(kGroup, std::min(shared, kSmallRows / words) / kGroup * kGroup);
}

// Rows from which on the next panel is fetched: one or two are done sooner than it can come.
constexpr int64_t kFetching = 3;

// A packed panel of `words` by kPanel, shared among all tiles of `count` rows: memory brings no more
// than it can while all of them are made.
template <class P>
Ahead packed_ahead(const P* panel, int64_t words, int64_t count, const Cut& cut) {
  constexpr int64_t per_word = kPanel * sizeof(P) / sizeof(float);
  const int64_t groups = count / kGroup, rest = count % kGroup;
  const int64_t tiles =
      groups * tiles_of_group(kGroup, kPanel, cut) + (rest ? tiles_of_group(rest, kPanel, cut) : 0);
  const int64_t step = (per_word + tiles - 1) / tiles;
  return {reinterpret_cast<const word*>(panel), step, step * words, tiles,
          static_cast<int>((step + kLanes - 1) / kLanes)};
}

// What comes after a panel's numbers that are being read, for rows too few to fetch the next panel: a
// stream of half as many bytes asks the processor's own fetching for twice as many steps.
template <class P>
Ahead coming(const P* panel) {
  constexpr int64_t step = kPanel * sizeof(P) / sizeof(float), kBytes = 2048;
  return {reinterpret_cast<const word*>(panel) + kBytes / sizeof(float), step, 0, 1,
          static_cast<int>((step + kLanes - 1) / kLanes)};
}

const word* in_panels(const float* panel) { return reinterpret_cast<const word*>(panel); }
const bf16* in_panels(const bf16* panel) { return panel; }

// By a packed weight.
template <class T, class P>
void multiply_cut(const T* x, int64_t x_stride, int64_t M, const P* packed, int64_t N,
                  int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue,
                  const Cut& cut) {
  const Words rows = words_of_rows(x, x_stride, M, K);
  const int64_t words = words_of<T>(K), panels = (N + kPanel - 1) / kPanel;
  const bool small = panels_size<T>(N, K) <= kSmall;
  const bool fetches = !small && M >= kFetching;
  const auto one = [&](int64_t p, int64_t m, int64_t end, bool goes_on) {
    const int64_t n = p * kPanel, count = end - m;
    Ahead ahead;
    if (fetches && goes_on)
      ahead = packed_ahead(packed + (n + kPanel) * words, words, count, cut);
    if (sizeof(P) == 2 && !small && M < kFetching) ahead = coming(packed + n * words);
    multiply_panel(rows, m, end, in_panels(packed + n * words), std::min(kPanel, N - n), words, y + n,
                   y_stride, epilogue.at(0, n), cut, ahead);
  };
  const int64_t together = small ? rows_together(M, words, panels) : M;
  const Runs runs =
      even_runs(M, kTileRows, panels, M / std::max<int64_t>(1, together), kTileRows);
  const int64_t grain = kGrain / std::max<int64_t>(1, words * kPanel * std::min(M, runs.longest())) + 1;
  if (!small) return share_panels(panels, runs, grain, one);
  parallel_for(0, panels * runs.count, grain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      one(i % panels, runs.start(i / panels), runs.start(i / panels + 1), false);
  });
}

// What packing panel `first` reads from word `k` on, shared between the tiles before it.
template <class T>
Ahead source_ahead(const Matrix<T>& m, int64_t first, int64_t k, int64_t words) {
  const auto in_words = [](int64_t values) { return values * int64_t{sizeof(T)} / 4; };
  const word* data = reinterpret_cast<const word*>(m.data + first * m.row_stride +
                                                   k * kPerWord<T> * m.column_stride);
  if (m.column_stride != 1)
    return {data, in_words(kPerWord<T> * m.column_stride), in_words(kLanes)};
  const int64_t part = in_words(kLanes * m.row_stride);
  return {data, part / words, part};
}

// Words of a panel beyond which it is packed and multiplied in parts, so that it stays in the second
// cache and the weight is read once, from first to last. Rows that have to be copied are, for as long
// a part: a copy of all of a vocabulary's would be large, and would come back from memory.
constexpr int64_t kDeep = 1024;

template <class T>
void multiply_deep(const T* x, int64_t x_stride, int64_t M, const Matrix<T>& weight, int64_t N,
                   int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue, const Cut& cut) {
  const int64_t words = words_of<T>(K), panels = (N + kPanel - 1) / kPanel;
  const Runs runs = even_runs(M, kTileRows, panels, 1, kGroup);
  float* sums = scratch(Use::sums, panels * M * kPanel);
  for (int64_t k = 0; k < words; k += kDeep) {
    const int64_t part = std::min(kDeep, words - k), column = k * kPerWord<T>;
    const int64_t length = std::min(kDeep * kPerWord<T>, K - column);
    const Matrix<T> matrix{weight.data + column * weight.column_stride, weight.row_stride,
                           weight.column_stride};
    const Words some = words_of_rows(x + column, x_stride, M, length);
    share_panels(panels, runs, 1, [&](int64_t p, int64_t m, int64_t end, bool) {
      float* panel = scratch(Use::panel, kPanel * kDeep);
      const int64_t n = p * kPanel, width = std::min(kPanel, N - n);
      float* all = sums + n * M + m * kPanel;
      pack_panel(matrix, n, width, length, panel);
      multiply_panel(some, m, end, reinterpret_cast<const word*>(panel), width, part, y + n,
                     y_stride, epilogue.at(0, n), cut, {},
                     {k ? all : nullptr, k + part < words ? all : nullptr});
    });
  }
}

// By a weight as it lies, each panel packed when its turn comes.
template <class T>
void multiply_packing(const T* x, int64_t x_stride, int64_t M, const Matrix<T>& weight, int64_t N,
                      int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue,
                      const Cut& cut) {
  if (panels_size<T>(N, K) <= kSmall) {
    float* packed = scratch(Use::weights, panels_size<T>(N, K));
    pack_panels(weight, N, K, kPanel, packed);
    multiply_cut(x, x_stride, M, packed, N, K, y, y_stride, epilogue, cut);
    return;
  }
  const int64_t panels = (N + kPanel - 1) / kPanel, words = words_of<T>(K);
  if (words > kDeep) {
    multiply_deep(x, x_stride, M, weight, N, K, y, y_stride, epilogue, cut);
    return;
  }
  const Words rows = words_of_rows(x, x_stride, M, K);
  // Threads that share a panel pack it twice: not for a few rows.
  const Runs runs = even_runs(M, kTileRows, panels, 1, kGroup);
  share_panels(panels, runs, 1, [&](int64_t p, int64_t m, int64_t end, bool goes_on) {
    float* panel = scratch(Use::panel, kPanel * words);
    const int64_t n = p * kPanel, width = std::min(kPanel, N - n);
    pack_panel(weight, n, width, K, panel);
    multiply_panel(rows, m, end, reinterpret_cast<const word*>(panel), width, words, y + n, y_stride,
                   epilogue.at(0, n), cut,
                   goes_on ? source_ahead(weight, n + kPanel, 0, words) : Ahead{});
  });
}

}  // namespace

template <class T>
void multiply_made(const T* x, int64_t x_stride, int64_t M, int64_t N, int64_t K, T* y,
                   int64_t y_stride, const Epilogue<T>& epilogue, MakePanel make) {
  // Rows at a time: making a panel costs little beside so many, and their copies stay small.
  constexpr int64_t kMany = 256;
  const int64_t words = words_of<T>(K), panels = (N + kPanel - 1) / kPanel;
  for (int64_t m = 0; m < M; m += kMany) {
    const int64_t some = std::min(kMany, M - m);
    const Trial trial(Product::packed, std::is_same_v<T, bf16>, some, N, K, kCuts, kNumCuts);
    const Words rows = words_of_rows(x + m * x_stride, x_stride, some, K);
    const Runs runs = even_runs(some, kTileRows, panels, 1, kGroup);
    const int64_t grain = kGrain / (words * kPanel * std::min(some, runs.longest())) + 1;
    share_panels(panels, runs, grain, [&](int64_t p, int64_t first, int64_t end, bool) {
      float* const panel = scratch(Use::panel, kPanel * std::min(kDeep, words));
      float* const sums = words > kDeep ? scratch(Use::sums, (end - first) * kPanel) : nullptr;
      const int64_t n = p * kPanel, width = std::min(kPanel, N - n);
      for (int64_t k = 0; k < words; k += kDeep) {
        const int64_t part = std::min(kDeep, words - k), column = k * kPerWord<T>;
        make(n, width, column, std::min(kDeep * kPerWord<T>, K - column), panel);
        multiply_panel(Words{rows.data + k, rows.stride}, first, end,
                       reinterpret_cast<const word*>(panel), width, part, y + m * y_stride + n,
                       y_stride, epilogue.at(m, n), trial.cut(), {},
                       {k ? sums : nullptr, k + part < words ? sums : nullptr});
      }
    });
  }
}

namespace {

// The same with lanes over m: the rows of x become panels and the weight's rows are broadcast from
// where they lie, so each of its words is read once per panel and nothing of it is copied.
template <class T>
void multiply_across(const T* x, int64_t x_stride, int64_t M, const Matrix<T>& weight, int64_t N,
                     int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue,
                     const Cut& cut) {
  const int64_t words = words_of<T>(K), panels = (M + kPanel - 1) / kPanel;
  float* packed = scratch(Use::rows, panels_size<T>(M, K));
  pack_panels(Matrix<T>{x, x_stride, 1}, M, K, kPanel, packed);
  const int64_t groups = (N + kGroup - 1) / kGroup;
  const int64_t grain = kGrain / (words * kPanel * kGroup) + 1;
  const word* weights = reinterpret_cast<const word*>(weight.data);
  const int64_t stride = weight.row_stride / kPerWord<T>;
  parallel_for(0, panels * groups, grain, [&](int64_t from, int64_t to) {
    float* raw = scratch(Use::tile, kGroup * kPanel);
    for (int64_t i = from; i < to; ++i) {
      const int64_t m = i / groups * kPanel, n = i % groups * kGroup;
      const int64_t width = std::min(kPanel, M - m), count = std::min(kGroup, N - n);
      TileWork<T> work{};
      work.rows = weights + n * stride;
      work.row_stride = stride;
      work.row_step = 1;
      work.panel = reinterpret_cast<const word*>(packed + m * words);
      work.panel_step = round_up(width, kLanes);
      work.words = words;
      work.width = width;
      multiply_group(work, count, round_up(width, kLanes), nullptr, raw, cut);
      for (int64_t c = 0; c < count; c += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - c));
        const T* bias = epilogue.bias ? epilogue.bias + n + c : nullptr;
        for (int64_t r = 0; r < width; r += kLanes) {
          v16 sums[16];
#pragma GCC unroll 16
          for (int j = 0; j < 16; ++j) sums[j] = load(raw + (c + j) * kPanel + r);
          transpose(sums);
          const int64_t some = std::min<int64_t>(kLanes, width - r);
          for (int64_t j = 0; j < some; ++j) {
            const Epilogue<T> e = epilogue.at(m + r + j, n + c);
            finish(y + (m + r + j) * y_stride + n + c, sums[j], bias, e.residual, lanes);
          }
        }
      }
    }
  });
}

// The same for so few rows that a packed panel would hardly be used: 16 by 16 words of the weight
// are turned in registers and multiplied there.
#if defined(__AVX512F__)
constexpr int64_t kFew = 8;
#else
constexpr int64_t kFew = 1;
#endif

template <class T>
void multiply_few(const T* x, int64_t x_stride, int64_t M, const Matrix<T>& weight, int64_t N,
                  int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  const Words rows = words_of_rows(x, x_stride, M, K);
  const int64_t words = words_of<T>(K), panels = (N + kPanel - 1) / kPanel;
  parallel_for(0, panels, kGrain / (words * kPanel * M) + 1, [&](int64_t from, int64_t to) {
    alignas(64) float sums[kFew * kPanel];
    for (int64_t p = from; p < to; ++p) {
      const int64_t first = p * kPanel, width = std::min(kPanel, N - first);
      std::fill_n(sums, M * kPanel, 0.0f);
      for (int64_t k = 0; k < words; k += kLanes) {
        const int64_t some = std::min<int64_t>(kLanes, words - k);
        for (int64_t n = 0; n < width; n += kLanes) {
          v16 columns[16];
          load_turned(weight, first + n, std::min<int64_t>(kLanes, width - n), k, K, columns);
          for (int64_t m = 0; m < M; ++m) {
            const word* row = rows.data + m * rows.stride + k;
            v16 sum = load(sums + m * kPanel + n);
            if (some == kLanes) {
#pragma GCC unroll 16
              for (int i = 0; i < 16; ++i) sum = multiply_add<T>(splat(row[i]), columns[i], sum);
            } else {
              for (int i = 0; i < some; ++i) sum = multiply_add<T>(splat(row[i]), columns[i], sum);
            }
            store(sums + m * kPanel + n, sum);
          }
        }
      }
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < width; n += kLanes) {
          const Epilogue<T> e = epilogue.at(m, first + n);
          finish(y + m * y_stride + first + n, load(sums + m * kPanel + n), e.bias, e.residual,
                 static_cast<int>(std::min<int64_t>(kLanes, width - n)));
        }
    }
  });
}

// Whether the weight's rows are words that `multiply_across` can broadcast.
template <class T>
bool can_cross(const Matrix<T>& weight, int64_t K) {
  constexpr bool own_words = std::is_same_v<T, float> || kPairs;
  return own_words && weight.column_stride == 1 && K % kPerWord<T> == 0 &&
         weight.row_stride % kPerWord<T> == 0;
}

#if defined(__AVX512F__)

// y (width columns) = sums, kPanel apart, or that added to y.
void put_sums(const float* sums, int64_t rows, int64_t width, bool adds, float* y, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r, sums += kPanel, y += stride)
    for_columns(width, [&](int64_t c, int lanes) {
      const v16 sum = load(sums + c);
      store_lanes(y + c, adds ? load_lanes(y + c, lanes) + sum : sum, lanes);
    });
}

// A run of rows at a time, whose copies stay in the second cache, added up in y.
template <class T>
void multiply_turned_piece(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t M,
                           int64_t K, const Stack::Piece& piece) {
  const int64_t N = piece.rows;
  float* const y = piece.y;
  constexpr int64_t kRun = 512 * kPerWord<T>;  // rows of a run
  const int64_t right = (K + kPanel - 1) / kPanel, longest = std::min(M, kRun);
  // Columns of a that become rows together: whole tiles of them, or where they are long as many as
  // leave room in the first cache; and those that are packed at a time.
  const int64_t together = kPanel > kLanes || longest > 128 * kPerWord<T> ? kPanel : kGroup;
  constexpr int64_t kMostSlabs = 16;  // of several threads at once: 8 MiB
  const int64_t slabs = std::min(kMostSlabs, num_threads());
  const int64_t slab_width = together * (together == kPanel ? 4 : 2) * slabs;
  float* columns = scratch(Use::weights, panels_size<T>(K, longest));
  float* slab = scratch(Use::rows, panels_size<T>(std::min(N, slab_width), longest));
  // Pairs of bfloat16 have to be put together; vectors past the end of the last row may not be read;
  // and a panel's words that are 0 apart, one row given many times, would be taken for a packed one's.
  const bool can_lie = std::is_same_v<T, float> && K % kLanes == 0 && b_stride != 0;
  const Trial trial(Product::gradient, std::is_same_v<T, bf16>, M, N, K, kGradientCuts,
                    can_lie ? kNumCuts + 1 : kNumCuts);
  const bool lies = trial.cut().in_place;
  for (int64_t m = 0; m < M; m += kRun) {
    const int64_t run = std::min(kRun, M - m), words = words_of<T>(run);
    const bool adds = m || piece.adds;
    if (!lies) pack_panels(Matrix<T>{b + m * b_stride, 1, b_stride}, K, run, kPanel, columns);
    for (int64_t first = 0; first < N; first += slab_width) {
      const int64_t width = std::min(slab_width, N - first), left = (width + together - 1) / together;
      if (!lies)
        pack_panels(Matrix<T>{a + m * a_stride + first, 1, a_stride}, width, run, together, slab);
      const Runs runs = even_runs(together, kTileRows, left * right, 1, 2 * kTileRows);
      const int64_t grain = kGrain / (words * runs.longest() * kPanel) + 1;
      share_panels(left * right, runs, grain, [&](int64_t i, int64_t begin, int64_t end, bool) {
        const int64_t n = i / right * together, k = i % right * kPanel;
        const int64_t rows = std::min(together, width - n), wide = std::min(kPanel, K - k);
        const auto at = [](const auto* p) { return reinterpret_cast<const word*>(p); };
        const Words turned = lies ? Words{at(a + m * a_stride + first + n), 1, a_stride}
                                  : Words{at(slab + n * words), 1, round_up(rows, kLanes)};
        const word* const panel = lies ? at(b + m * b_stride + k) : at(columns + k * words);
        float* const to_y = y + (first + n) * K + k;
        const int64_t last = std::min(end, rows), some = last - begin;
        if (some <= 0) return;
        if constexpr (kPerWord<T> == 1) {  // words are floats
          multiply_panel<float>(turned, begin, last, panel, wide, words, to_y, K,
                                {nullptr, adds ? to_y : nullptr, K}, trial.cut(), {}, {},
                                lies ? b_stride : 0);
        } else {  // sums that are not rounded to T
          float *const sums = scratch(Use::sums, together * kPanel), *const to = to_y + begin * K;
          for (int64_t r = 0; r < some; ++r)  // fetched while the sums are made
            for (int64_t c = 0; c < wide; c += kLanes) __builtin_prefetch(to + r * K + c, 0, 2);
          multiply_panel<T>(turned, begin, last, panel, wide, words, reinterpret_cast<T*>(sums),
                            kPanel, {}, trial.cut(), {}, {nullptr, sums});  // y is not written
          put_sums(sums, some, wide, adds, to, K);
        }
      });
    }
  }
}

#else

// Columns of a that become a tile's rows.
constexpr int64_t kSix = kMostRows[1];

// Floats from one packed panel to the next: an odd number of lines, so that what is written to many of
// them in turn lies in different sets of the first cache; two more than they hold may be written.
constexpr int64_t apart(int64_t floats) { return (round_up(floats + 2, kLanes) / kLanes | 1) * kLanes; }

// Columns of `words` rows of which `readable` may be read, six to a panel (words, 6) of `whole`: what
// lies in a row is read together.
template <class T>
void pack_sixes(const T* a, int64_t stride, int64_t width, int64_t readable, int64_t words,
                int64_t whole, float* out) {
  constexpr int kEight = 8;
  for (int64_t k = 0; k < words; ++k, a += stride, out += kSix) {
    float* to = out;
    for (int64_t n = 0; n < width; n += kSix, to += apart(kSix * whole)) {
      const int64_t left = readable - n;
      const auto row = lower(left >= kEight ? load(a + n, kEight) : load(a + n, static_cast<int>(left)));
      if (k + 1 < words) {
        store(to, row);
      } else {  // what follows may be another thread's
        std::memcpy(to, &row, kSix * sizeof(float));
      }
    }
  }
}

// The same, sixteen to a panel.
template <class T>
void pack_sixteens(const T* b, int64_t stride, int64_t width, int64_t words, int64_t whole,
                   float* out) {
  for (int64_t k = 0; k < words; ++k, b += stride, out += kLanes) {
    float* to = out;
    for_columns(width, [&](int64_t n, int lanes) {
      store(to, load_lanes(b + n, lanes));
      to += apart(kLanes * whole);
    });
  }
}

// y (R, `lanes`) = R columns of a panel of six, turned, by a panel of sixteen, or that added to y.
template <int R>
void turned_tile(const float* a, const float* b, int64_t words, float* y, int64_t stride, int lanes,
                 bool adds) {
  constexpr int64_t kFour = 4;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) __builtin_prefetch(y + r * stride, 0, 3);
  TileSums<R> sums;
  zero_sums<R>(sums);
  const auto add = [&](int64_t i) TANDEM_INLINED {
    add_word<float, R>(sums, in_panels(b + i * kLanes),
                    [&](int r) TANDEM_INLINED { return a[i * kSix + r]; });
  };
  for (; words >= kFour; words -= kFour, a += kFour * kSix, b += kFour * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kFour; ++i) add(i);
  }
  for (; words > 0; --words, a += kSix, b += kLanes) add(0);
  finish_sums<R>(sums, lanes, [&](int r, v16 sum, int lanes) TANDEM_INLINED {
    float* const to = y + r * stride;
    store_lanes(to, adds ? load_lanes(to, lanes) + sum : sum, lanes);
  });
}

void turned_tile(int64_t rows, const float* a, const float* b, int64_t words, float* y,
                 int64_t stride, int lanes, bool adds) {
  switch (rows) {
    case 1: return turned_tile<1>(a, b, words, y, stride, lanes, adds);
    case 2: return turned_tile<2>(a, b, words, y, stride, lanes, adds);
    case 3: return turned_tile<3>(a, b, words, y, stride, lanes, adds);
    case 4: return turned_tile<4>(a, b, words, y, stride, lanes, adds);
    case 5: return turned_tile<5>(a, b, words, y, stride, lanes, adds);
    default: return turned_tile<6>(a, b, words, y, stride, lanes, adds);
  }
}

// A run of rows at a time, added up in y: so many that a panel of b stays in the first cache beside six
// columns of a, of which a slab is packed at a time.
template <class T>
void multiply_turned_piece(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t M,
                           int64_t K, const Stack::Piece& piece) {
  constexpr int64_t kRun = 256;
  const int64_t slab_width = 8 * kSix * num_threads();
  const int64_t N = piece.rows, longest = std::min(M, kRun), right = (K + kLanes - 1) / kLanes;
  const int64_t panels = (std::min(N, slab_width) + kSix - 1) / kSix;
  float* const columns = scratch(Use::weights, right * apart(kLanes * longest));
  float* const slab = scratch(Use::rows, panels * apart(kSix * longest));
  for (int64_t m = 0; m < M; m += kRun) {
    const int64_t run = std::min(kRun, M - m);
    const bool adds = m || piece.adds;
    parallel_for(0, run, 32768 / K + 1, [&](int64_t from, int64_t to) {
      pack_sixteens(b + (m + from) * b_stride, b_stride, K, to - from, run, columns + from * kLanes);
    });
    for (int64_t first = 0; first < N; first += slab_width) {
      const int64_t width = std::min(slab_width, N - first);
      parallel_for(0, run, 32768 / width + 1, [&](int64_t from, int64_t to) {
        pack_sixes(a + (m + from) * a_stride + first, a_stride, width, N - first, to - from, run,
                   slab + from * kSix);
      });
      const Runs runs = even_runs(width, kSix, right, 1, kSix);
      const int64_t grain = kGrain / (run * std::min(width, runs.longest()) * kLanes) + 1;
      share_panels(right, runs, grain, [&](int64_t p, int64_t from, int64_t to, bool) {
        const int64_t k = p * kLanes;
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, K - k));
        float* const to_y = piece.y + first * K + k;
        for (int64_t n = from; n < to; n += kSix)
          turned_tile(std::min(kSix, width - n), slab + n / kSix * apart(kSix * run),
                      columns + p * apart(kLanes * run), run, to_y + n * K, K, lanes, adds);
      });
    }
  }
}

#endif

// ---- whether the matrix unit takes over ----

#if defined(TANDEM_AMX)

// The largest distance from the exact product of x (M, K) and w (N, K), over the sum of magnitudes.
template <class T>
double error_of(const std::vector<T>& x, const std::vector<T>& w, const std::vector<T>& y, int64_t M,
                int64_t N, int64_t K) {
  double worst = 0;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      double exact = 0, size = 0;
      for (int64_t k = 0; k < K; ++k) {
        const double product = static_cast<double>(x[m * K + k]) * static_cast<double>(w[n * K + k]);
        exact += product;
        size += std::abs(product);
      }
      const double error = std::abs(static_cast<double>(y[m * N + n]) - exact) / size;
      worst = error <= worst ? worst : error;  // a NaN stays
    }
  return worst;
}

// Why the unit is not used for numbers of type T, or nothing: rows must be the same alone, in any
// company and place, and no further from the exact product than the vectors'. How fast they are made is
// not asked: time depends on who else runs, and a run that goes on must get the same bits.
template <class T>
std::string why_not_amx() {
  const char* const asked = std::getenv("TANDEM_AMX");
  if (asked && std::string(asked) == "off") return "TANDEM_AMX is off";
  if (asked && std::string(asked) == "bf16" && !std::is_same_v<T, bf16>) return "TANDEM_AMX is bf16";
  if (!amx::permitted()) return "the system does not give its registers to this process";
  constexpr int64_t M = 70, N = 200, K = 330;
  std::vector<T> x(M * K), w(N * K), whole(M * N), part(M * N);
  uint32_t state = 1;
  for (auto* numbers : {&x, &w})
    for (T& number : *numbers) {
      state = state * 1664525u + 1013904223u;
      number = static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
    }
  const Matrix<T> weight{w.data(), K, 1};
  amx::multiply<T>(x.data(), K, M, weight, N, K, whole.data(), N, {});
  for (const int64_t count : {1, 2, 15, 16, 17, 31, 33, 48, 69})
    for (const int64_t first : {int64_t{0}, M - count}) {
      amx::multiply<T>(x.data() + first * K, K, count, weight, N, K, part.data(), N, {});
      if (std::memcmp(part.data(), whole.data() + first * N, count * N * sizeof(T)))
        return "a row's bits depend on the rows beside it";
    }
  std::vector<float> packed(panels_size<T>(N, K));
  amx::pack(weight, N, K, packed.data());
  for (const int64_t count : {int64_t{1}, M}) {
    amx::multiply_packed<T>(x.data(), K, count, packed.data(), N, K, part.data(), N, {});
    if (std::memcmp(part.data(), whole.data(), count * N * sizeof(T)))
      return "a row's bits depend on how the weight lies";
  }
  pack_panels(weight, N, K, kPanel, packed.data());
  multiply_cut<T>(x.data(), K, M, packed.data(), N, K, part.data(), N, {}, kCuts[0]);
  const double far = error_of(x, w, part, M, N, K);
  if (!(error_of(x, w, whole, M, N, K) <= 1.5 * far)) return "its numbers are less exact than vectors'";
  return "";
}

#else

template <class T>
std::string why_not_amx() {
  return "this processor has none";
}

#endif

// Once per process and type.
template <class T>
const std::string& amx_refusal() {
  static const std::string reason = why_not_amx<T>();
  return reason;
}

}  // namespace

std::string why_no_amx(bool half) { return half ? amx_refusal<bf16>() : amx_refusal<float>(); }

std::string arithmetic() {
  std::string text =
#if defined(__AVX512BF16__)
      "AVX-512 with BF16";
#elif defined(__AVX512F__)
      "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
      "AVX2";
#elif defined(__x86_64__)
      "x86 without FMA";
#else
      "ARM";
#endif
  const bool full = why_no_amx(false).empty(), half = why_no_amx(true).empty();
#if defined(TANDEM_EMULATE_AMX)
  if (full || half) text += ", emulated AMX for ";
#else
  if (full || half) text += ", AMX for ";
#endif
  if (full) text += "fp32";
  if (full && half) text += " and ";
  if (half) text += "bf16";
  return text;
}

// ---- what gemm.h declares ----

template <class T>
void pack(const Matrix<T>& m, int64_t N, int64_t K, float* out) {
#if defined(TANDEM_AMX)
  if (amx_refusal<T>().empty()) {
    amx::pack(m, N, K, out);
    return;
  }
#endif
  pack_panels(m, N, K, kPanel, reinterpret_cast<Kept<T>*>(out));
}

template <class T>
void multiply_packed(const T* x, int64_t x_stride, int64_t M, const float* packed, int64_t N,
                     int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  if (!M) return;
#if defined(TANDEM_AMX)
  if (amx_refusal<T>().empty()) {
    amx::multiply_packed(x, x_stride, M, packed, N, K, y, y_stride, epilogue);
    return;
  }
#endif
  const Trial trial(Product::packed, std::is_same_v<T, bf16>, M, N, K, kCuts, kNumCuts);
  multiply_cut(x, x_stride, M, reinterpret_cast<const Kept<T>*>(packed), N, K, y, y_stride, epilogue,
               trial.cut());
}

template <class T>
void multiply(const T* x, int64_t x_stride, int64_t M, const Matrix<T>& weight, int64_t N,
              int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  if (!M) return;
#if defined(TANDEM_AMX)
  if (amx_refusal<T>().empty()) {
    amx::multiply(x, x_stride, M, weight, N, K, y, y_stride, epilogue);
    return;
  }
#endif
  if (M <= kFew && weight.column_stride == 1) {
    multiply_few(x, x_stride, M, weight, N, K, y, y_stride, epilogue);
    return;
  }
  const bool crosses = M <= kMostCrossing && can_cross(weight, K);
  const Trial trial(weight.column_stride == 1 ? Product::forward : Product::backward,
                    std::is_same_v<T, bf16>, M, N, K, kCuts, crosses ? kNumCrossing : kNumCuts);
  if (trial.cut().across) {
    multiply_across(x, x_stride, M, weight, N, K, y, y_stride, epilogue, trial.cut());
  } else {
    multiply_packing(x, x_stride, M, weight, N, K, y, y_stride, epilogue, trial.cut());
  }
}

template <class T>
void multiply_turned(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t M,
                     int64_t K, const Stack& y) {
#if defined(TANDEM_AMX)
  if (amx_refusal<T>().empty()) {
    amx::multiply_turned(a, a_stride, b, b_stride, M, K, y);
    return;
  }
#endif
  for (int i = 0; i < y.count; a += y.pieces[i++].rows)
    multiply_turned_piece(a, a_stride, b, b_stride, M, K, y.pieces[i]);
}

template <class T>
int64_t ready_size(int64_t N, int64_t K) {
#if defined(TANDEM_AMX)
  if (amx_refusal<T>().empty()) return amx::ready_size<T>(N, K);
#endif
  return panels_size<T>(N, K);
}

template <class T>
int64_t ready_columns() {
#if defined(TANDEM_AMX)
  if (amx_refusal<T>().empty()) return amx::kSide;
#endif
  return kPanel;
}

template <class T>
void make_ready(const Matrix<T>& weight, int64_t N, int64_t K, float* out) {
#if defined(TANDEM_AMX)
  if (amx_refusal<T>().empty()) {
    amx::make_ready(weight, N, K, out);
    return;
  }
#endif
  pack_panels(weight, N, K, kPanel, out);
}

template <class T>
void multiply_ready(const T* x, int64_t x_stride, int64_t M, const float* ready, int64_t N,
                    int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  if (!M) return;
#if defined(TANDEM_AMX)
  if (amx_refusal<T>().empty()) {
    amx::multiply_ready(x, x_stride, M, ready, N, K, y, y_stride, epilogue);
    return;
  }
#endif
  const Trial trial(Product::packed, std::is_same_v<T, bf16>, M, N, K, kCuts, kNumCuts);
  multiply_cut(x, x_stride, M, ready, N, K, y, y_stride, epilogue, trial.cut());
}

#define TANDEM_PRODUCTS(T)                                                                        \
  template void pack(const Matrix<T>&, int64_t, int64_t, float*);                                 \
  template void multiply_packed(const T*, int64_t, int64_t, const float*, int64_t, int64_t, T*,   \
                                int64_t, const Epilogue<T>&);                                     \
  template void multiply(const T*, int64_t, int64_t, const Matrix<T>&, int64_t, int64_t, T*,      \
                         int64_t, const Epilogue<T>&);                                            \
  template void multiply_turned(const T*, int64_t, const T*, int64_t, int64_t, int64_t,           \
                                const Stack&);                                                    \
  template int64_t ready_size<T>(int64_t, int64_t);                                               \
  template int64_t ready_columns<T>();                                                            \
  template void make_ready(const Matrix<T>&, int64_t, int64_t, float*);                           \
  template void multiply_made(const T*, int64_t, int64_t, int64_t, int64_t, T*, int64_t,           \
                              const Epilogue<T>&, MakePanel);                                     \
  template void multiply_ready(const T*, int64_t, int64_t, const float*, int64_t, int64_t, T*,    \
                               int64_t, const Epilogue<T>&);
TANDEM_PRODUCTS(float)
TANDEM_PRODUCTS(bf16)
#undef TANDEM_PRODUCTS

}  // namespace tandem
