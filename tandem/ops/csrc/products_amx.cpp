// Products on the matrix unit: rows and columns become tiles, a number's parts beside one another,
// in copies that stay in the second cache while they are multiplied.
//
// Few rows are copied once, and the weight passes by 32 or 48 of them a step of k at a time: what is
// made of it stays in the first cache. More rows by a small weight: the weight is copied once, and passes
// by 32 rows after another. By a large one: as many rows as a part of the second cache holds are
// copied, and pass by one panel of the weight after another. What is passed by stays in the first
// cache, as what passes takes no place there. Making the next copies and finishing the last sums
// goes on between the unit's instructions.

#include "products_amx.h"

#include "amx.h"
#include "threads.h"

#if defined(TANDEM_AMX)

namespace tandem::amx {
namespace {

// ---- numbers in their parts ----

typedef uint16_t halves __attribute__((vector_size(64)));

// x = the sum of its parts, each a bfloat16 in the upper half: what is left after the first, rounded,
// has 16 bits, which the second and the third share.
TANDEM_INLINE void split(v16 x, v16u (&part)[3]) {
  part[0] = (bits(x) + 0x8000u) & 0xFFFF0000u;
  const v16 rest = x - from_bits(part[0]);
  part[1] = bits(rest) & 0xFFFF0000u;
  // What is too small for a bfloat16 is left out where words are made.
  part[2] = bits(rest - from_bits(part[1]));
}

// Lane by lane one word: the upper half of `even`, then that of `odd`.
TANDEM_INLINE v16 words_of_lanes(v16u even, v16u odd) {
#if defined(__AVX512F__)
  // One instruction after the shift: a | (b & c).
  return from_bits(reinterpret_cast<v16u>(_mm512_ternarylogic_epi32(
      reinterpret_cast<__m512i>(even >> 16), reinterpret_cast<__m512i>(odd),
      _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)), 0xF8)));
#else
  return from_bits((even >> 16) | (odd & 0xFFFF0000u));
#endif
}

// The upper halves of 32 lanes in a row.
TANDEM_INLINE v16 words_in_order(v16u first, v16u second) {
  return reinterpret_cast<v16>(
      __builtin_shufflevector(reinterpret_cast<halves>(first), reinterpret_cast<halves>(second), 1,
                              3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37,
                              39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63));
}

// 32 numbers of a row, k after k, as row `r` of the tiles of their parts.
TANDEM_INLINE void store_row(v16 first, v16 second, int64_t r, float* tiles) {
  v16u a[3], b[3];
  split(first, a);
  split(second, b);
#pragma GCC unroll 3
  for (int p = 0; p < 3; ++p) store(tiles + p * kTile + r * kSide, words_in_order(a[p], b[p]));
}

// Numbers from to from + 15 of a row of K; past its end they are 0.
TANDEM_INLINE v16 numbers(const float* row, int64_t from, int64_t K) {
  const int64_t left = K - from;
  if (left >= kLanes) return load(row + from);
  return left > 0 ? load(row + from, static_cast<int>(left)) : v16{};
}

// ---- where tiles are made from ----
//
// make(where, s, from, to) makes pieces `from` to `to` of `pieces(where.count)` of the tiles, a
// number's parts one after another, of rows or columns 16 where.first and after, and of numbers 32
// s to 32 s + 31 of k; past the last of either they are 0.

// Floats of a packed weight between what is taken apart and what is fetched meanwhile.
constexpr int64_t kSoon = 640;

struct Place {
  int64_t first, count;  // tiles
  float* out;
  int64_t beside;  // floats from one tile to the next
};

// Rows of x (M, K) as rows, four a piece.
template <class T>
struct RowsAsTheyLie {
  const T* x;
  int64_t stride, M, K;

  static constexpr bool kAlongK = true;
  static constexpr int64_t pieces(int64_t tiles) { return 4 * tiles; }

  TANDEM_INLINE void make(const Place& where, int64_t s, int64_t from, int64_t to) const {
    for (int64_t i = from; i < to; ++i) make(where, s, i);
  }
  TANDEM_INLINE void make(const Place& where, int64_t s, int64_t i) const {
    const int64_t tile = i / 4, r0 = i % 4 * 4, k = s * kStep;
    const int64_t first = (where.first + tile) * kSide + r0, count = M - first;
    float* const out = where.out + tile * where.beside + r0 * kSide;
    const T* row = x + first * stride;
    if (count >= 4 && k + kStep <= K) {
#pragma GCC unroll 4
      for (int64_t r = 0; r < 4; ++r, row += stride) {
        if constexpr (kParts<T> == 1)
          store(out + r * kSide, load_whole(row + k));
        else
          store_row(load(row + k), load(row + k + kLanes), r, out);
      }
      return;
    }
    for (int64_t r = 0; r < 4; ++r, row += stride) {
      if (r >= count) {
        for (int p = 0; p < kParts<T>; ++p) store(out + p * kTile + r * kSide, v16{});
      } else if constexpr (kParts<T> == 1) {
        store(out + r * kSide, row_words(row, k / 2, K));
      } else {
        store_row(numbers(row, k, K), numbers(row, k + kLanes, K), r, out);
      }
    }
  }
};

// Whether the tiles of all rows can be read where they lie: bfloat16 in whole tiles and steps.
template <class Rows>
bool lie_ready(const Rows& rows) {
  if constexpr (std::is_same_v<Rows, RowsAsTheyLie<bf16>>)
    return rows.M % kSide == 0 && rows.K % kStep == 0 && rows.stride % 2 == 0;
  return false;
}

template <class Rows>
Tiles where_they_lie(const Rows& rows, int64_t tile) {
  if constexpr (std::is_same_v<Rows, RowsAsTheyLie<bf16>>) {
    const word* const data = reinterpret_cast<const word*>(rows.x + tile * kSide * rows.stride);
    return {data, kSide * rows.stride / 2, kSide, rows.stride / 2};
  }
  return {};
}

// Columns of a (K, M) as rows, `stride` numbers from one k to the next; of floats four a piece, of
// bfloat16 a tile.
template <class T>
struct ColumnsAsRows {
  const T* a;
  int64_t stride, M, K;

  static constexpr bool kAlongK = false;
  static constexpr int64_t kPieces = kParts<T> > 1 ? 4 : 1;  // of a tile
  static constexpr int64_t pieces(int64_t tiles) { return kPieces * tiles; }

  TANDEM_INLINE void make(const Place& where, int64_t s, int64_t from, int64_t to) const {
    for (int64_t i = from; i < to; ++i) make(where, s, i);
  }
  TANDEM_INLINE void make(const Place& where, int64_t s, int64_t i) const {
    const int64_t tile = i / kPieces, first = (where.first + tile) * kSide, k = s * kStep;
    const int count = static_cast<int>(std::min(kSide, M - first));
    float* const out = where.out + tile * where.beside;
    if constexpr (kParts<T> == 1) {
      make_words(first, count, k, out);
    } else {
      const int64_t r = i % kPieces * 4;
      v16 x[2][4];
      if (r + 4 <= count && k + kStep <= K) {
        const float* const from = a + k * stride + first;
        const float* const soon = from + (kStep + 2 * r) * stride;
#pragma GCC unroll 8
        for (int64_t j = 0; j < 8; ++j) __builtin_prefetch(soon + j * stride);
        load_four_turned(from + r, stride, x[0]);
        load_four_turned(from + kLanes * stride + r, stride, x[1]);
      } else {
        float numbers[kStep][4] = {};
        const int64_t some = std::clamp<int64_t>(count - r, 0, 4);
        for (int64_t j = 0; j < std::min(kStep, K - k); ++j)
          for (int64_t c = 0; c < some; ++c) numbers[j][c] = a[(k + j) * stride + first + r + c];
        load_four_turned(numbers[0], 4, x[0]);
        load_four_turned(numbers[kLanes], 4, x[1]);
      }
#pragma GCC unroll 4
      for (int64_t j = 0; j < 4; ++j) store_row(x[0][j], x[1][j], r + j, out);
    }
  }
  void make_words(int64_t first, int count, int64_t k, float* out) const {
    if (count <= 0) {
      std::fill_n(out, kTile, 0.0f);
      return;
    }
    const Matrix<T> turned{a, 1, stride};
    v16 x[16];
    for (int j = 0; j < 16; ++j)
      x[j] = k + 2 * j < K ? column_words(turned, first, count, k / 2 + j, K) : v16{};
    transpose(x);
    for (int j = 0; j < 16; ++j) store(out + j * kSide, x[j]);
  }
};

// Lanes of numbers 2 j and 2 j + 1 as row j of the tiles of their parts.
TANDEM_INLINE void store_pair(v16 even, v16 odd, int64_t j, float* out) {
  v16u a[3], b[3];
  split(even, a);
  split(odd, b);
#pragma GCC unroll 3
  for (int p = 0; p < 3; ++p) store(out + p * kTile + j * kSide, words_of_lanes(a[p], b[p]));
}

// Two whole tiles of columns and a whole step, rows of k `apart` floats apart; or nothing.
struct WholePairs {
  const float* from = nullptr;
  int64_t apart = 0;

  // Pairs `first` to `last`; `fetch(j)` with each.
  template <class Fetch>
  TANDEM_INLINE void make(int64_t first, int64_t last, float* out, Fetch fetch) const {
    const float* even = from + 2 * first * apart;
#pragma GCC unroll 4
    for (int64_t j = first; j < last; ++j, even += 2 * apart) {
      fetch(j);
      store_pair(load(even), load(even + apart), j, out);
      store_pair(load(even + kSide), load(even + apart + kSide), j, out + kParts<float> * kTile);
    }
  }
};

// Pairs `first` to `last` of k of columns whose rows k are `step` floats apart; rows from K on and
// columns past `width` are 0.
TANDEM_INLINE void split_pairs(const Place& where, const float* from, int64_t step, int64_t K,
                               int64_t width, int64_t first, int64_t last) {
  const float* even = from + 2 * first * step;
  if (2 * last <= K && where.count * kSide <= width) {
    for (int64_t j = first; j < last; ++j, even += 2 * step)
      for (int64_t c = 0; c < where.count; ++c)
        store_pair(load(even + c * kSide), load(even + step + c * kSide), j,
                   where.out + c * where.beside);
    return;
  }
  for (int64_t j = first; j < last; ++j, even += 2 * step)
    for (int64_t c = 0; c < where.count; ++c) {
      const int count = static_cast<int>(std::min(kSide, width - c * kSide));
      const float* const at = even + c * kSide;
      store_pair(2 * j < K ? load_lanes(at, count) : v16{},
                 2 * j + 1 < K ? load_lanes(at + step, count) : v16{}, j,
                 where.out + c * where.beside);
    }
}

// A weight (N, K) packed ahead of time (gemm.h) as columns, a pair of k a piece.
template <class T>
struct PackedColumns {
  const float* packed;
  int64_t N, K;

  static constexpr bool kAlongK = false;
  static constexpr int64_t pieces(int64_t) { return kSide; }

  // Two tiles of one step, where they are whole.
  WholePairs whole(int64_t first, int64_t s) const {
    if ((first + 2) * kSide > N || (s + 1) * kStep > K || first % 2) return {};
    return {packed + first * kSide * K + s * kStep * kPackedPanel, kPackedPanel};
  }

  void make(const Place& where, int64_t s, int64_t first, int64_t last) const {
    for (int64_t c = 0; c < where.count;) {  // panel by panel
      const int64_t n = (where.first + c) * kSide, panel = n / kPackedPanel * kPackedPanel;
      const int64_t lanes = round_up(std::min(kPackedPanel, N - panel), kLanes);
      const Place here{0, std::min(where.count - c, (panel + lanes - n) / kSide),
                       where.out + c * where.beside, where.beside};
      const float* const from =
          packed + panel * words_of<T>(K) + s * (kStep / kPerWord<T>)*lanes + n - panel;
      if constexpr (kParts<T> > 1) {
        const float* const soon = from + kSoon;
        for (int64_t i = 2 * first * lanes; i < 2 * last * lanes; i += kSide)
          __builtin_prefetch(soon + i, 0, 3);
        split_pairs(here, from, lanes, K - s * kStep, lanes, first, last);
      } else {
        for (int64_t j = first; j < last; ++j)
          for (int64_t t = 0; t < here.count; ++t)
            store(here.out + t * here.beside + j * kSide,
                  s * kSide + j < words_of<T>(K) ? load(from + j * lanes + t * kSide) : v16{});
      }
      c += here.count;
    }
  }
};

// The same of bfloat16 in whole steps, whose words are tiles as they lie: pieces are only fetched.
struct PackedTiles {
  const float* packed;
  int64_t N, K;

  static constexpr bool kAlongK = false;
  static constexpr int64_t kRows = 8;  // of a tile a piece
  static constexpr int64_t pieces(int64_t) { return kSide / kRows; }

  Tiles at(int64_t first, int64_t s) const {
    constexpr int64_t panel = kPackedPanel;
    const int64_t n = first * kSide, begin = n / panel * panel;
    const int64_t lanes = round_up(std::min(panel, N - begin), kLanes);
    return {packed + begin * words_of<bf16>(K) + s * kSide * lanes + n - begin, kSide,
            kSide * lanes, lanes};
  }

  void make(const Place& where, int64_t s, int64_t first, int64_t last) const {
    const Tiles tiles = at(where.first, s);
    for (int64_t j = first * kRows; j < last * kRows; ++j)
      for (int64_t t = 0; t < where.count; ++t)
        __builtin_prefetch(tiles.data + j * tiles.row + t * tiles.beside, 0, 2);
  }
};

// Words of 32 numbers and of the 32 that lie `next` behind them: those of the first 16, of the
// others.
TANDEM_INLINE void store_words(const bf16* row, int64_t next, float* first, float* second) {
  const v16u above = bits(load_whole(row)), below = bits(load_whole(row + next));
  v16 even = from_bits((above & 0xFFFFu) | (below << 16));
  v16 odd = from_bits((above >> 16) | (below & 0xFFFF0000u));
  interleave(even, odd);
  store(first, even);
  store(second, odd);
}

// Rows of k fetched before their turn: they lie too far apart for the processor to guess.
constexpr int64_t kRowsAhead = 16;

// A part of a row that will be read.
template <class T>
TANDEM_INLINE void fetch(const T* row, int64_t count) {
  constexpr int64_t line = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += line) __builtin_prefetch(row + i);
}

// A weight (N, K) as it lies, its columns contiguous, as columns: a pair of k a piece.
template <class T>
struct ColumnsAsTheyLie {
  const T* data;
  int64_t stride, N, K;

  static constexpr bool kAlongK = false;
  static constexpr int64_t pieces(int64_t) { return kSide; }

  // Two tiles of one step, where they are whole.
  WholePairs whole(int64_t first, int64_t s) const {
    if constexpr (kParts<T> > 1)
      if ((first + 2) * kSide <= N && (s + 1) * kStep <= K)
        return {data + first * kSide + s * kStep * stride, stride};
    return {};
  }

  void make(const Place& where, int64_t s, int64_t first, int64_t last) const {
    const int64_t n = where.first * kSide, k = s * kStep;
    if constexpr (kParts<T> > 1) {
      const T* const soon = data + n + (k + kRowsAhead) * stride;
      for (int64_t j = 2 * first; j < 2 * last; ++j) fetch(soon + j * stride, where.count * kSide);
      split_pairs(where, data + n + k * stride, stride, K - k, N - n, first, last);
    } else {
      const Matrix<T> weight{data, 1, stride};
      for (int64_t j = first; j < last; ++j) {
        int64_t c = 0;
        if (k + 2 * j + 1 < K) {  // two tiles of columns at once
          const T* const row = data + n + (k + 2 * j) * stride;
          fetch(row + kRowsAhead * stride, where.count * kSide);
          fetch(row + (kRowsAhead + 1) * stride, where.count * kSide);
          for (; c + 2 <= where.count && n + (c + 2) * kSide <= N; c += 2) {
            float* const out = where.out + c * where.beside + j * kSide;
            store_words(row + c * kSide, stride, out, out + where.beside);
          }
        }
        for (; c < where.count; ++c)
          store(where.out + c * where.beside + j * kSide,
                k + 2 * j < K ? column_words(weight, n + c * kSide,
                                             std::min(kSide, N - n - c * kSide), k / 2 + j, K)
                              : v16{});
      }
    }
  }
};

// The same, its rows contiguous: 16 words of k of 16 columns a piece.
template <class T>
struct RowsAsColumns {
  const T* data;
  int64_t stride, N, K;

  static constexpr bool kAlongK = true;
  static constexpr int64_t pieces(int64_t tiles) { return tiles * kPerStep; }
  static constexpr int64_t kPerStep = kParts<T> > 1 ? 2 : 1;

  void make(const Place& where, int64_t s, int64_t from, int64_t to) const {
    for (int64_t i = from; i < to; ++i) make(where, s, i);
  }
  void make(const Place& where, int64_t s, int64_t i) const {
    const int64_t c = i / kPerStep, half = i % kPerStep, first = (where.first + c) * kSide;
    const int64_t words = s * kStep / kPerWord<T> + half * kLanes;
    float* const out = where.out + c * where.beside;
    v16 x[16];
    if (words < words_of<T>(K)) {
      load_turned(Matrix<T>{data, stride, 1}, first, std::min(kSide, N - first), words, K, x);
    } else {
      for (v16& row : x) row = v16{};  // as a template's argument v16 would lose its alignment
    }
    if constexpr (kParts<T> > 1) {
      for (int64_t j = 0; j < kSide / 2; ++j)
        store_pair(x[2 * j], x[2 * j + 1], j + half * kSide / 2, out);
    } else {
      for (int64_t j = 0; j < kSide; ++j) store(out + j * kSide, x[j]);
    }
  }
};

// Of floats side by side so little work makes tiles that it fits between 32 rows' products: several
// times 32 rows take what is made for each of them anew from the first cache.
template <class Columns>
constexpr bool are_packed_floats = std::is_same_v<Columns, PackedColumns<float>>;
template <class Columns>
constexpr bool are_floats_abreast =
    are_packed_floats<Columns> || std::is_same_v<Columns, ColumnsAsTheyLie<float>>;

constexpr int64_t steps_of(int64_t K) { return (K + kStep - 1) / kStep; }

// Tiles of some rows or columns and steps; those of one row tile follow one another in memory.
template <class From, int P>
struct Batch {
  const From* from;
  int64_t first, tiles, step, steps;
  float* out;

  int64_t made = 0, piece = 0;  // steps, and pieces of the next one

  int64_t count() const { return From::pieces(tiles) * steps; }
  void make_next() {
    from->make({first, tiles, out + made * P * kTile, steps * P * kTile}, step + made, piece,
               piece + 1);
    if (++piece == From::pieces(tiles)) piece = 0, ++made;
  }
  void all() const {
    // Whichever lies side by side in memory is read side by side.
    const int64_t together = From::kAlongK ? 1 : tiles;
    for (int64_t t = 0; t < tiles; t += together)
      for (int64_t s = 0; s < steps; ++s)
        from->make({first + t, together, out + (t * steps + s) * P * kTile, steps * P * kTile},
                   step + s, 0, From::pieces(together));
  }
  Tiles where() const { return {out, steps * P * kTile, P * kTile, kSide}; }

  // To be made by `meanwhile` within `uses` steps.
  void spread(Meanwhile& meanwhile, int64_t uses) {
    meanwhile.make = [](void* what) { static_cast<Batch*>(what)->make_next(); };
    meanwhile.what = this;
    made = piece = 0;
    meanwhile.left = count();
    meanwhile.share = count() * 65536 / (uses * kTurns<P>) + 1;
  }
};

// ---- what becomes of the sums ----

// What is written past the caches takes half the time of what is fetched, changed and written back,
// and is read again from memory: for results that would not stay in the second cache anyway, and
// not for float32's, whose products take so long that memory keeps up. In lines of bfloat16 only.
constexpr int64_t kPastCaches = 1 << 20;  // bytes
constexpr int64_t kLine = 64 / sizeof(bf16);

// Where a whole block of sums may be left as it is, or null.
struct Spot {
  float* at = nullptr;
  int64_t row = 0;  // floats
};

// y = residual + (sum + bias), as gemm.h's Epilogue says.
template <class T>
struct Finish {
  T* y;
  int64_t stride;
  Epilogue<T> epilogue;
  bool past;  // the caches

  Finish(T* y, int64_t stride, const Epilogue<T>& epilogue, int64_t M, int64_t N)
      : y(y),
        stride(stride),
        epilogue(epilogue),
        past(std::is_same_v<T, bf16> && !epilogue.bias && !epilogue.residual &&
             M * N * static_cast<int64_t>(sizeof(T)) >= kPastCaches &&
             reinterpret_cast<uintptr_t>(y) % 64 == 0 && stride % kLine == 0 && N % kLine == 0) {}

  Spot spot(const Area& at) const {
    if constexpr (std::is_same_v<T, float>)
      if (!epilogue.bias && !epilogue.residual) return {y + at.m * stride + at.n, stride};
    return {};
  }
  static int64_t lines(const Area& area) { return area.rows; }
  void fetch(const Area& at, Meanwhile& meanwhile) const {
    meanwhile.fetch_rows(y + at.m * stride + at.n, stride, past ? 0 : at.rows, at.columns);
  }

  void operator()(const Area& at, const float* sums, int64_t from, int64_t last) const {
    for (int64_t r = from; r < last; ++r) {
      const float* const sum = sums + r * kPanel;
      T* const to = y + (at.m + r) * stride + at.n;
      if constexpr (std::is_same_v<T, bf16>) {
        if (past) {
          for (int64_t c = 0; c < at.columns; c += kLine) store_past(to + c, sum + c);
          continue;
        }
      }
      const Epilogue<T> e = epilogue.at(at.m + r, at.n);
      if (!e.bias && !e.residual && at.columns % kLanes == 0) {
        for (int64_t c = 0; c < at.columns; c += kLanes) store(to + c, load(sum + c));
        continue;
      }
      for_columns(at.columns, [&](int64_t c, int lanes) {
        finish(to + c, load(sum + c), e.bias ? e.bias + c : nullptr,
               e.residual ? e.residual + c : nullptr, lanes);
      });
    }
  }
};

// y = sums, or y + sums.
struct Add {
  Stack y;
  int64_t stride;

  // Row m of y, and whether it is added to; a block's rows are in one place.
  struct Row {
    float* at;
    bool adds;
  };
  TANDEM_INLINE Row row(int64_t m) const {
    int i = 0;
    for (; i + 1 < y.count && m >= y.pieces[i].rows; ++i) m -= y.pieces[i].rows;
    return {y.pieces[i].y + m * stride, y.pieces[i].adds};
  }

  Spot spot(const Area& at) const {
    const Row to = row(at.m);
    return to.adds ? Spot{} : Spot{to.at + at.n, stride};
  }
  static int64_t lines(const Area& area) { return area.rows; }
  void fetch(const Area& at, Meanwhile& meanwhile) const {
    meanwhile.fetch_rows(row(at.m).at + at.n, stride, at.rows, at.columns);
  }

  void operator()(const Area& at, const float* sums, int64_t from, int64_t last) const {
    const Row to = row(at.m);
    for (int64_t r = from; r < last; ++r)
      for_columns(at.columns, [&](int64_t c, int lanes) {
        put(to.at + r * stride + at.n + c, load(sums + r * kPanel + c), lanes, to.adds);
      });
  }
  static TANDEM_INLINE void put(float* to, v16 made, int lanes, bool adds) {
    store_lanes(to, adds ? load_lanes(to, lanes) + made : made, lanes);
  }
};

// The same with rows and columns of y exchanged; four of its rows a line.
struct AddTurned {
  Add into;

  static Spot spot(const Area&) { return {}; }
  static int64_t lines(const Area& area) { return (area.columns + 3) / 4; }
  void fetch(const Area& at, Meanwhile& meanwhile) const {
    into.fetch({at.n, at.m, at.columns, at.rows}, meanwhile);
  }

  void operator()(const Area& at, const float* sums, int64_t from, int64_t last) const {
    const Add::Row first = into.row(at.n);
    for (int64_t c = 4 * from; c < 4 * last; c += 4)
      for (int64_t r = 0; r < at.rows; r += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, at.rows - r));
        v16 x[4];
        load_four_turned(sums + r * kPanel + c, kPanel, x);
        float* const to = first.at + c * into.stride + at.m + r;
        for (int64_t i = 0; i < std::min<int64_t>(4, at.columns - c); ++i)
          Add::put(to + i * into.stride, x[i], lanes, first.adds);
      }
  }
};

// ---- the product ----

// Sums that wait for the next part of k, from row m and column n on; nothing where one part is all.
struct Waiting {
  float* data = nullptr;
  int64_t stride = 0, m = 0, n = 0;
  bool goes_on = false, stops = false;  // from what waits; until the next part

  float* at(int64_t row, int64_t column) const {
    return data ? data + (row - m) * stride + column - n : nullptr;
  }
};

// Where a block's sums go when all of k is done.
template <class Done>
struct Goal {
  const Done* done;
  Area area;
  bool straight = false;  // to their place, where nothing is left to finish

  // Where the sums of R tiles of rows over `steps` of k start and end.
  template <int R>
  Sums begin(const float* before, int64_t before_row, int64_t steps, Meanwhile& meanwhile) {
    meanwhile.per_step = (area.rows + steps - 1) / steps;
    done->fetch(area, meanwhile);
    const Spot spot = done->spot(area);
    straight = spot.at && area.columns % kSide == 0 && area.rows == R * kSide;
    if (straight) return {before, before_row, spot.at, spot.row};
    return {before, before_row, meanwhile.kept[meanwhile.turn], kPanel};
  }
  // After it: the rest is done during the next block.
  void end(Meanwhile& meanwhile) const {
    meanwhile.finish_rest();
    if (straight) return;
    meanwhile.late = {
        [](const void* to, const Area& at, const float* sums, int64_t from, int64_t last) {
          (*static_cast<const Done*>(to))(at, sums, from, last);
        },
        done,
        area,
        meanwhile.kept[meanwhile.turn],
        0,
        done->lines(area)};
    meanwhile.turn = 1 - meanwhile.turn;
  }
};

// Row tiles `rows` by one panel: `count` rows from row m on, `width` columns from n on; the tiles
// of side S pass by the others.
template <int P, Side S, class Done>
void multiply_panel(const Tiles& rows, const Tiles& panel, int64_t steps, int64_t m, int64_t count,
                    int64_t n, int64_t width, const Waiting& waiting, const Done& done,
                    Meanwhile& meanwhile) {
  const auto multiply = [&](auto R, auto C, int64_t r, int64_t c, int64_t height, int64_t some) {
    float* const wait = waiting.at(m + r, n + c);
    const float* const before = waiting.goes_on ? wait : nullptr;
    Goal<Done> goal{&done, {m + r, n + c, height, some}};
    Sums sums{before, waiting.stride, wait, waiting.stride};
    if (waiting.stops) {
      meanwhile.per_step = (height + steps - 1) / steps;
    } else {
      sums = goal.template begin<decltype(R)::value>(before, waiting.stride, steps, meanwhile);
    }
    block<P, decltype(R)::value, decltype(C)::value, S>(
        {rows.data + r / kSide * rows.beside, rows.beside, rows.deeper, rows.row},
        {panel.data + c / kSide * panel.beside, panel.beside, panel.deeper, panel.row}, steps, sums,
        meanwhile);
    waiting.stops ? meanwhile.finish_rest() : goal.end(meanwhile);
  };
  constexpr std::integral_constant<int, 1> i1;
  constexpr std::integral_constant<int, 2> i2;
  constexpr std::integral_constant<int, 3> i3;
  constexpr std::integral_constant<int, 4> i4;
  const int64_t rest = count % (2 * kSide) <= kSide ? count % (2 * kSide) : 0;
  for (int64_t c = 0; c < width; c += 2 * kSide) {
    const int64_t some = std::min(2 * kSide, width - c);
    for (int64_t r = 0; r < count - rest; r += 2 * kSide) {
      const int64_t height = std::min(2 * kSide, count - r);
      some > kSide ? multiply(i2, i2, r, c, height, some) : multiply(i2, i1, r, c, height, some);
    }
  }
  for (int64_t c = 0; rest && c < width; c += 4 * kSide) {
    const int64_t r = count - rest, some = std::min(4 * kSide, width - c);
    switch ((some + kSide - 1) / kSide) {
      case 1:
        multiply(i1, i1, r, c, rest, some);
        break;
      case 2:
        multiply(i1, i2, r, c, rest, some);
        break;
      case 3:
        multiply(i1, i3, r, c, rest, some);
        break;
      default:
        multiply(i1, i4, r, c, rest, some);
    }
  }
}

constexpr int64_t kInCache = 19 << 14;     // words of tiles that stay in the second cache
constexpr int64_t kFewInCache = 1 << 19;   // the same where little else has to
constexpr int64_t kSomeInCache = 1 << 17;  // and where what passes by is used again
constexpr int64_t kSmallWeight = 3 << 16;  // words of a weight's tiles that do, beside some rows
constexpr int64_t kWaitingColumns = 8192;  // of sums that wait, at most, at a time

// Steps of k at a time.
template <class T>
constexpr int64_t kDeepest = 54 / kParts<T>;

// ---- few rows ----

// Tiles of two columns made a step ahead of their use, those of step i at i % 2: for a group of rows,
// from first to last of k, for the next group, then for the next columns.
template <class Columns, int P>
struct Feed {
  const Columns* columns;
  int64_t tile, end, steps, groups;  // column tiles; of rows
  float* ring;
  int64_t step = 0, group = 0, slot = 0;  // what is made now, and where
  WholePairs whole{};
  const float* soon = nullptr;  // fetched meanwhile: so many lines of 64 bytes with each pair
  int64_t lines = 0;

  static constexpr int64_t kTiles = 2, kRoom = kTiles * P * kTile;
  static constexpr int64_t kPieces = Columns::pieces(kTiles);

  // What was made before.
  const float* ready() const { return ring + (1 - slot) * kRoom; }
  // Calls f(work) where work(turn) makes part `turn` of a step's tiles.
  template <class F>
  TANDEM_INLINE void with(F f) const {
    float* const out = ring + slot * kRoom;
    if constexpr (are_floats_abreast<Columns>) {
      if (whole.from) {
        switch (lines) {
          case 0:
            return f(of_whole<0>(out));
          case 1:
            return f(of_whole<1>(out));
          case 2:
            return f(of_whole<2>(out));
          default:
            return f(of_whole<4>(out));
        }
      }
    }
    f([this, out](int64_t turn) {
      if (tile < end)
        columns->make({tile, std::min(kTiles, end - tile), out, P * kTile}, step, begin_of(turn),
                      begin_of(turn + 1));
    });
  }
  // Pieces of a step before those of `turn`.
  static constexpr int64_t begin_of(int64_t turn) { return turn * kPieces / kTurns<P>; }
  // The same of whole tiles, `Lines` lines fetched with each pair. It keeps copies: members would be read
  // again after every store, which might have changed them.
  template <int Lines>
  TANDEM_INLINE auto of_whole(float* out) const {
    return [whole = whole, soon = soon, out](int64_t turn) TANDEM_INLINED {
      whole.make(begin_of(turn), begin_of(turn + 1), out, [&](int64_t pair) TANDEM_INLINED {
#pragma GCC unroll 4
        for (int64_t i = pair * Lines; i < (pair + 1) * Lines; ++i)
          __builtin_prefetch(soon + at(i, whole.apart), 0, 2);  // to the second cache
      });
    };
  }
  // Where line i of a step lies, of rows `apart` floats apart.
  static TANDEM_INLINE int64_t at(int64_t i, int64_t apart) {
    if constexpr (are_packed_floats<Columns>) return i * kSide;
    return i / 2 * apart + i % 2 * kSide;
  }
  // At what is made now, and what to fetch meanwhile: what is to come soon for one group of rows; for
  // several, all of them together the next columns, as these are in the second cache after the first.
  void look() {
    if constexpr (are_floats_abreast<Columns>) {
      constexpr int64_t kStepFloats = kTiles * kSide * kStep, kDistance = 1 << 13;
      whole = tile < end ? columns->whole(tile, step) : WholePairs{};
      if (!whole.from) return;
      lines = groups == 1 ? 4 : groups == 2 ? 2 : 1;
      if constexpr (are_packed_floats<Columns>) {
        const int64_t ahead = (steps - step) * kStepFloats + (group * steps + step) * lines * kTile;
        soon = whole.from + (groups == 1 ? kDistance : ahead);
      } else if (groups == 1) {
        soon = whole.from + kStep * whole.apart;
      } else {
        constexpr int64_t kLines = kTiles * kStep;  // of a step
        if (group * lines * kSide >= kLines) lines = 0;
        soon = whole.from + kTiles * kSide + at(group * lines * kSide, whole.apart);
      }
    }
  }
  void next() {
    slot = 1 - slot;
    if (++step == steps) {
      step = 0;
      if (++group == groups) group = 0, tile += kTiles;
    }
    look();
  }
};

// What is made of the weight is used once for a group of rows, and stays in the first cache till then.
template <class T, class Rows, class Columns, class Done>
void multiply_few(const Rows& rows, const Columns& columns, int64_t M, int64_t N, int64_t K,
                  const Done& done) {
  constexpr int P = kParts<T>;
  typedef Feed<Columns, P> Feed;
  constexpr int64_t kWidth = Feed::kTiles * kSide;
  // Row tiles that pass by together, at most.
  constexpr int64_t kMost = are_packed_floats<Columns> ? 3 : 2;
  const int64_t steps = steps_of(K), tiles = (N + kSide - 1) / kSide, part = steps * P * kTile;
  const int64_t row_tiles = (M + kSide - 1) / kSide, groups = (row_tiles + kMost - 1) / kMost;
  const int64_t group_rows = (row_tiles + groups - 1) / groups * kSide;
  float* const left = scratch(Use::rows, row_tiles * part);
  parallel_for(0, row_tiles, kGrain / (kSide * K * 16) + 1, [&](int64_t from, int64_t to) {
    Batch<Rows, P>{&rows, from, to - from, 0, steps, left + from * part}.all();
  });
  parallel_for(
      0, (N + kWidth - 1) / kWidth, kGrain / (kWidth * M * K) + 1, [&](int64_t from, int64_t to) {
        const Session session(M);
        Feed feed{&columns, Feed::kTiles * from, std::min(Feed::kTiles * to, tiles),
                  steps,    groups,              scratch(Use::panel, 2 * Feed::kRoom)};
        feed.look();
        feed.with([&](const auto& work) {
          for (int64_t turn = 0; turn < kTurns<P>; ++turn) work(turn);
        });
        feed.next();
        Meanwhile meanwhile;
        for (int64_t i = from; i < to; ++i)
          for (int64_t m = 0; m < M; m += group_rows) {
            const int64_t n = i * kWidth, width = std::min(kWidth, N - n);
            const int64_t height = std::min(group_rows, M - m);
            Goal<Done> goal{&done, {m, n, height, width}};
            const auto run = [&](auto R, auto C) {
              constexpr int r = decltype(R)::value, c = decltype(C)::value;
              const Tiles here{left + m / kSide * part, part, P * kTile, kSide};
              const Sums sums = goal.template begin<r>(nullptr, 0, steps, meanwhile);
              stream<P, r, c>(here, feed, steps, sums, meanwhile);
            };
            constexpr std::integral_constant<int, 1> i1;
            constexpr std::integral_constant<int, 2> i2;
            if constexpr (kMost > 2) {
              constexpr std::integral_constant<int, 3> i3;
              if (height > 2 * kSide) {
                width > kSide ? run(i3, i2) : run(i3, i1);
                goal.end(meanwhile);
                continue;
              }
            }
            if (height > kSide) {
              width > kSide ? run(i2, i2) : run(i2, i1);
            } else {
              width > kSide ? run(i1, i2) : run(i1, i1);
            }
            goal.end(meanwhile);
          }
        meanwhile.finish_rest();
      });
}

// ---- many rows ----

// Blocks' steps of a product of `count` rows by `width` columns over `steps` of k.
constexpr int64_t uses_of(int64_t count, int64_t width, int64_t steps) {
  const int64_t pairs = count / (2 * kSide), rest = count % (2 * kSide);
  const int64_t twos = (width + 2 * kSide - 1) / (2 * kSide),
                fours = (width + 4 * kSide - 1) / (4 * kSide);
  return steps * (rest > kSide ? (pairs + 1) * twos : pairs * twos + (rest ? fours : 0));
}

// The tiles of a whole weight, those of 16 columns one after another.
template <int P, class Columns>
void make_tiles(const Columns& columns, int64_t N, int64_t K, float* out) {
  const int64_t steps = steps_of(K), tiles = (N + kSide - 1) / kSide, part = steps * P * kTile;
  parallel_for(0, tiles, kGrain / (kSide * K) + 1, [&](int64_t from, int64_t to) {
    Batch<Columns, P>{&columns, from, to - from, 0, steps, out + from * part}.all();
  });
}

// (M, K) by (N, K) turned, whose tiles were made, into `done`.
template <class T, class Rows, class Done>
void multiply_made(const Rows& rows, const float* weight, int64_t M, int64_t N, int64_t K,
                   const Done& done) {
  constexpr int P = kParts<T>;
  constexpr int64_t kRows = 2 * kSide;
  const int64_t steps = steps_of(K), part = steps * P * kTile;
  const Tiles right{weight, part, P * kTile, kSide};
  const int64_t chunks = (M + kRows - 1) / kRows;
  parallel_for(0, chunks, kGrain / (kRows * N * K) + 1, [&](int64_t from, int64_t to) {
    const Session session(M);
    float* const room = scratch(Use::rows, 4 * part);
    const bool ready = lie_ready(rows);
    Batch<Rows, P> here{&rows, 2 * from, 2, 0, steps, room};
    if (!ready) here.all();
    Meanwhile meanwhile;
    for (int64_t i = from; i < to; ++i) {
      const int64_t m = i * kRows, height = std::min(kRows, M - m);
      Batch<Rows, P> next = here;
      next.first += 2;
      next.out = here.out == room ? room + 2 * part : room;
      if (i + 1 < to && !ready) next.spread(meanwhile, uses_of(height, N, steps));
      multiply_panel<P, Side::right>(ready ? where_they_lie(rows, 2 * i) : here.where(), right,
                                     steps, m, height, 0, N, {}, done, meanwhile);
      meanwhile.make_rest();
      here = next;
    }
    meanwhile.finish_rest();
  });
}


template <class T, class Rows, class Columns, class Done>
void multiply_small(const Rows& rows, const Columns& columns, int64_t M, int64_t N, int64_t K,
                    const Done& done) {
  constexpr int P = kParts<T>;
  const int64_t tiles = (N + kSide - 1) / kSide;
  float* const weight = scratch(Use::weights, tiles * steps_of(K) * P * kTile);
  make_tiles<P>(columns, N, K, weight);
  multiply_made<T>(rows, weight, M, N, K, done);
}

template <class T, class Rows, class Columns, class Done>
void multiply_large(const Rows& rows, const Columns& columns, int64_t M, int64_t N, int64_t K,
                    const Done& done) {
  constexpr int P = kParts<T>;
  constexpr bool ready = std::is_same_v<Columns, PackedTiles>;
  constexpr int64_t kWide = ready ? kPackedPanel : kPanel, kSides = kWide / kSide;
  const int64_t steps = steps_of(K), depths = (steps + kDeepest<T> - 1) / kDeepest<T>;
  const int64_t deepest = (steps + depths - 1) / depths;
  const int64_t part = deepest * P * kTile, all = (M + kSide - 1) / kSide;
  const int64_t most =
      std::max<int64_t>(2, (kInCache / part - 2 * kSides) / 2 * 2);  // beside two panels
  const int64_t blocks = (all + most - 1) / most;
  const int64_t height = round_up((all + blocks - 1) / blocks, 2);  // row tiles of a block
  const bool waits = depths > 1;
  const int64_t slab = waits ? std::min(N, kWaitingColumns) : N, sum_row = round_up(slab, kPanel);
  float* const left = scratch(Use::rows, height * part);
  float* const sums = waits ? scratch(Use::sums, height * kSide * sum_row) : nullptr;
  for (int64_t first = 0; first < N; first += slab)
    for (int64_t t = 0; t < all; t += height) {
      const int64_t here = std::min(height, all - t), m = t * kSide;
      const int64_t count = std::min(here * kSide, M - m), width = std::min(slab, N - first);
      for (int64_t k = 0; k < steps; k += deepest) {
        const int64_t some = std::min(deepest, steps - k), size = some * P * kTile;
        parallel_for(
            0, here, kGrain / (kSide * some * kStep * 16) + 1, [&](int64_t from, int64_t to) {
              Batch<Rows, P>{&rows, t + from, to - from, k, some, left + from * size}.all();
            });
        const Waiting waiting{sums, sum_row, m, first, k > 0, k + some < steps};
        const int64_t panels = (width + kWide - 1) / kWide;
        // Threads that share a panel make its tiles twice: not for a few rows.
        const Runs runs = even_runs(count, 2 * kSide, panels, 1, 4 * kSide);
        const int64_t grain = kGrain / (some * kStep * kWide * std::min(count, runs.longest())) + 1;
        parallel_for(0, panels * runs.count, grain, [&](int64_t from, int64_t to) {
          const Session session(M);
          float* const room = scratch(Use::panel, 2 * kSides * part);
          const auto batch = [&](int64_t p) {
            const int64_t n = p * kWide, columns_here = std::min(kWide, width - n);
            return Batch<Columns, P>{
                &columns, (first + n) / kSide,         (columns_here + kSide - 1) / kSide, k,
                some,     room + p % 2 * kSides * part};
          };
          if constexpr (!ready) batch(from / runs.count).all();
          Meanwhile meanwhile;
          for_panels(runs, from, to, [&](int64_t p, int64_t row, int64_t end, bool goes_on) {
            const int64_t n = p * kWide, columns_here = std::min(kWide, width - n);
            const int64_t rows_here = end - row;
            Batch<Columns, P> next = batch(goes_on ? p + 1 : p);
            if (goes_on) next.spread(meanwhile, uses_of(rows_here, columns_here, some));
            Tiles right = batch(p).where();
            if constexpr (ready) right = columns.at((first + n) / kSide, k);
            const Tiles tiles{left + row / kSide * size, size, P * kTile, kSide};
            multiply_panel<P, Side::left>(tiles, right, some, m + row, rows_here, first + n,
                                          columns_here, waiting, done, meanwhile);
            meanwhile.make_rest();
          });
          meanwhile.finish_rest();
        });
      }
    }
}

template <class T>
bool is_small(int64_t N, int64_t K) {
  return round_up(N, kSide) * steps_of(K) * kSide * kParts<T> <= kSmallWeight;
}

template <class T, class Rows, class Columns, class Done>
void multiply_tiles(const Rows& rows, const Columns& columns, int64_t M, int64_t N, int64_t K,
                    const Done& done) {
  const int64_t tiles = (M + kSide - 1) / kSide;
  constexpr int64_t kFewTiles = are_packed_floats<Columns> ? 8 : are_floats_abreast<Columns> ? 16 : 2;
  const int64_t room = tiles <= 2 || are_packed_floats<Columns> ? kFewInCache : kSomeInCache;
  const bool fits = tiles * steps_of(K) * kParts<T> * kTile <= room;
  if (tiles <= kFewTiles && fits) {
    multiply_few<T>(rows, columns, M, N, K, done);
  } else if (is_small<T>(N, K)) {
    multiply_small<T>(rows, columns, M, N, K, done);
  } else {
    multiply_large<T>(rows, columns, M, N, K, done);
  }
}

}  // namespace

template <class T>
void pack(const Matrix<T>& m, int64_t N, int64_t K, float* out) {
  pack_panels(m, N, K, kPackedPanel, out);
}

template <class T>
void multiply_packed(const T* x, int64_t x_stride, int64_t M, const float* packed, int64_t N,
                     int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  const RowsAsTheyLie<T> rows{x, x_stride, M, K};
  const Finish<T> done{y, y_stride, epilogue, M, N};
  if constexpr (kParts<T> == 1) {
    constexpr int64_t kMany = 256;  // rows that are worth a copy of a small weight
    if (K % kStep == 0 && (M < kMany || !is_small<T>(N, K))) {
      multiply_large<T>(rows, PackedTiles{packed, N, K}, M, N, K, done);
      return;
    }
  }
  multiply_tiles<T>(rows, PackedColumns<T>{packed, N, K}, M, N, K, done);
}

template <class T>
void multiply(const T* x, int64_t x_stride, int64_t M, const Matrix<T>& weight, int64_t N,
              int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  const RowsAsTheyLie<T> rows{x, x_stride, M, K};
  const Finish<T> done{y, y_stride, epilogue, M, N};
  if (weight.column_stride == 1) {
    multiply_tiles<T>(rows, RowsAsColumns<T>{weight.data, weight.row_stride, N, K}, M, N, K, done);
  } else {
    multiply_tiles<T>(rows, ColumnsAsTheyLie<T>{weight.data, weight.column_stride, N, K}, M, N, K,
                      done);
  }
}

template <class T>
int64_t ready_size(int64_t N, int64_t K) {
  return round_up(N, kSide) * steps_of(K) * kSide * kParts<T>;
}

template <class T>
void make_ready(const Matrix<T>& weight, int64_t N, int64_t K, float* out) {
  constexpr int P = kParts<T>;
  if (weight.column_stride == 1) {
    make_tiles<P>(RowsAsColumns<T>{weight.data, weight.row_stride, N, K}, N, K, out);
  } else {
    make_tiles<P>(ColumnsAsTheyLie<T>{weight.data, weight.column_stride, N, K}, N, K, out);
  }
}

template <class T>
void multiply_ready(const T* x, int64_t x_stride, int64_t M, const float* ready, int64_t N,
                    int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  multiply_made<T>(RowsAsTheyLie<T>{x, x_stride, M, K}, ready, M, N, K,
                   Finish<T>{y, y_stride, epilogue, M, N});
}

// A product whose sums go to one piece of y, or to several.
template <class T>
void multiply_turned_together(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t M,
                              int64_t N, int64_t K, Stack y) {
  constexpr int64_t kNarrow = 256;
  const int64_t narrow = std::min(N, K);
  const bool passes = kParts<T> > 1 && narrow <= kNarrow;
  // Rows whose sums are made apart, so that errors do not grow with M; fewer where tiles of `narrow`
  // shall leave room in the second cache for what passes by.
  constexpr int64_t kRun = 1024, kRoom = 3 << 15;  // words
  const int64_t fit = kRoom / (round_up(narrow, kSide) * kParts<T> / 2);
  const int64_t most = passes ? std::min(kRun, fit) : kRun, runs = (M + most - 1) / most;
  const int64_t length = round_up((M + runs - 1) / runs, kStep);
  for (int64_t m = 0; m < M; m += length) {
    const int64_t run = std::min(length, M - m);
    const T *const left = a + m * a_stride, *const right = b + m * b_stride;
    for (int i = 0; m && i < y.count; ++i) y.pieces[i].adds = true;
    const Add into{y, K};
    // What becomes rows is turned first: the narrower one, where the other can pass by it.
    if (passes && K < N) {
      multiply_tiles<T>(ColumnsAsRows<T>{right, b_stride, K, run},
                        ColumnsAsTheyLie<T>{left, a_stride, N, run}, K, N, run, AddTurned{into});
    } else {
      multiply_tiles<T>(ColumnsAsRows<T>{left, a_stride, N, run},
                        ColumnsAsTheyLie<T>{right, b_stride, K, run}, N, K, run, into);
    }
  }
}

template <class T>
void multiply_turned(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t M,
                     int64_t K, const Stack& y) {
  int64_t N = 0;
  bool fits = true;  // whether no block of sums, 64 by 64 at most, reaches into the next piece
  for (int i = 0; i < y.count; ++i) {
    N += y.pieces[i].rows;
    if (i + 1 < y.count && N % (4 * kSide) && (N % (2 * kSide) || K % (2 * kSide))) fits = false;
  }
  if (fits) {
    multiply_turned_together(a, a_stride, b, b_stride, M, N, K, y);
    return;
  }
  for (int i = 0; i < y.count; a += y.pieces[i++].rows) {
    const Stack::Piece& piece = y.pieces[i];
    multiply_turned_together(a, a_stride, b, b_stride, M, piece.rows, K,
                             Stack(piece.y, piece.rows, piece.adds));
  }
}

#define TANDEM_PRODUCTS(T)                                                                       \
  template void pack(const Matrix<T>&, int64_t, int64_t, float*);                                \
  template void multiply_packed(const T*, int64_t, int64_t, const float*, int64_t, int64_t, T*,  \
                                int64_t, const Epilogue<T>&);                                    \
  template void multiply(const T*, int64_t, int64_t, const Matrix<T>&, int64_t, int64_t, T*,     \
                         int64_t, const Epilogue<T>&);                                           \
  template int64_t ready_size<T>(int64_t, int64_t);                                              \
  template void make_ready(const Matrix<T>&, int64_t, int64_t, float*);                          \
  template void multiply_ready(const T*, int64_t, int64_t, const float*, int64_t, int64_t, T*,   \
                               int64_t, const Epilogue<T>&);                                     \
  template void multiply_turned(const T*, int64_t, const T*, int64_t, int64_t, int64_t,          \
                                const Stack&);
TANDEM_PRODUCTS(float)
TANDEM_PRODUCTS(bf16)
#undef TANDEM_PRODUCTS

}  // namespace tandem::amx
#endif
