#include "coded.h"

#include <algorithm>
#include <utility>

#include "code_columns.h"
#include "packing.h"
#include "threads.h"

namespace tandem {
namespace {

// body(kind tag, scales) of a weight's own types.
template <class Body>
TANDEM_INLINE void for_code(const Coded& weight, Body body) {
  const auto with = [&](auto kind) TANDEM_INLINED {
    weight.half_scales ? body(kind, static_cast<const bf16*>(weight.scales))
                       : body(kind, static_cast<const float*>(weight.scales));
  };
  switch (weight.kind) {
    case kInt8: return with(std::integral_constant<int64_t, kInt8>{});
    case kInt4: return with(std::integral_constant<int64_t, kInt4>{});
    case kNF4: return with(std::integral_constant<int64_t, kNF4>{});
  }
}

// Numbers `first` to first + count of the run.
template <int64_t kind, class T, class S>
void read(const Coded& weight, const S* scales, int64_t first, int64_t count, T* out) {
  const int64_t size = weight.block;
  for (int64_t at = first, end = first + count, b = first / size; at < end; ++b) {
    const int64_t n = std::min((b + 1) * size, end) - at;
    decode_block<kind>(weight.codes + at / kPerByte<kind>, 0, scales + b, 0, 1, out, n);
    at += n;
    out += n;
  }
}

// Codes of the rows that come next, which are fetched while those before them are multiplied: read
// row by row and part by part, they would be no stream that the processor foresees.
class Coming {
 public:
  // `count` rows of K numbers from row n on, in `times` parts.
  static Coming of(const Coded& weight, int64_t n, int64_t count, int64_t K, int64_t times) {
    if (count <= 0) return {};
    const int64_t per_byte = weight.kind == kInt8 ? 1 : 2;
    const uint8_t* const from = weight.codes + n * K / per_byte;
    const int64_t bytes = count * K / per_byte;
    return {from, from + bytes, (bytes + times - 1) / times};
  }
  void skip(int64_t parts) { at_ = std::min(end_, at_ + parts * part_); }
  TANDEM_INLINED void fetch() {
    const uint8_t* const to = std::min(end_, at_ + part_);
    for (; at_ < to; at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  Coming() = default;
  Coming(const uint8_t* at, const uint8_t* end, int64_t part) : at_(at), end_(end), part_(part) {}
  const uint8_t *at_ = nullptr, *end_ = nullptr;
  int64_t part_ = 0;
};

// ---- few rows: some rows of the weight by some of their numbers, in the first cache ----

constexpr int64_t kTile = 256;  // numbers of a row
constexpr int64_t kFewRows = 8;

// Words k to k + 15 of `count` <= 16 rows of a tile of `length` numbers: body(i, word k + i of
// all). `sorted` puts sums over such words in the order of the rows.
#if defined(__AVX2__) && !defined(__AVX512F__)
// Bfloat16 change places as they are, twice as many to a register, before they are widened.
template <class Body>
TANDEM_INLINE void for_turned(const bf16* tile, int64_t count, int64_t k, int64_t length,
                              Body body) {
#pragma GCC unroll 2
  for (int64_t half = 0; half < 2; ++half, k += 8) {
    __m256i x[8], y[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) {
      const auto* row = reinterpret_cast<const __m128i*>(tile + r * kTile + k);
      const auto* other = reinterpret_cast<const __m128i*>(tile + (r + 8) * kTile + k);
      x[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(row)),
                                     _mm_loadu_si128(other), 1);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      y[r] = _mm256_unpacklo_epi16(x[2 * r], x[2 * r + 1]);
      y[r + 4] = _mm256_unpackhi_epi16(x[2 * r], x[2 * r + 1]);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 8; h += 4) {  // columns 0 to 3, then 4 to 7
      const __m256i a = _mm256_unpacklo_epi32(y[h], y[h + 1]);
      const __m256i b = _mm256_unpacklo_epi32(y[h + 2], y[h + 3]);
      const __m256i c = _mm256_unpackhi_epi32(y[h], y[h + 1]);
      const __m256i d = _mm256_unpackhi_epi32(y[h + 2], y[h + 3]);
      const __m256i columns[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b),
                                  _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m256i zero = _mm256_setzero_si256();
        const __m256i lo = _mm256_unpacklo_epi16(zero, columns[i]);
        const __m256i hi = _mm256_unpackhi_epi16(zero, columns[i]);
        if (k + h + i < length)
          body(8 * half + h + i, v16{reinterpret_cast<v8>(lo), reinterpret_cast<v8>(hi)});
      }
    }
  }
}
TANDEM_INLINE v16 sorted(bf16, v16 sums) { return in_order(sums); }
#endif
template <class T, class Body>
TANDEM_INLINE void for_turned(const T* tile, int64_t count, int64_t k, int64_t length,
                              Body body) {
  v16 columns[kLanes];
  load_turned(Matrix<T>{tile, kTile, 1}, 0, count, k, length, columns);
  const int64_t some = std::min<int64_t>(kLanes, words_of<T>(length) - k);
  if (some == kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) body(i, columns[i]);
  } else {
    for (int i = 0; i < some; ++i) body(i, columns[i]);
  }
}
template <class T>
TANDEM_INLINE v16 sorted(T, v16 sums) {
  return sums;
}

// Sixteen rows of a weight or fewer, some of their numbers at a time: read into memory row by row,
// and taken from there as words of all.
template <class T>
struct ByRows {
  struct alignas(64) Tile {
    T numbers[kLanes * kTile];
  };

  // Numbers k to k + length of `count` rows from row n on.
  static void read(const Coded& weight, int64_t n, int64_t count, int64_t K, int64_t k,
                   int64_t length, Tile& tile) {
    for_code(weight, [&](auto kind, const auto* scales) {
      for (int64_t r = 0; r < count; ++r)
        tandem::read<kind.value>(weight, scales, (n + r) * K + k, length, tile.numbers + r * kTile);
    });
  }
  // body(i, word w + i of all): `sorted` puts what is made of them in the order of the rows.
  template <class Body>
  static TANDEM_INLINE void words(const Tile& tile, int64_t count, int64_t w, int64_t length,
                                  Body body) {
    for_turned(tile.numbers, count, w, length, body);
  }
  static TANDEM_INLINE v16 sorted(v16 x) { return tandem::sorted(T{}, x); }
};

#ifdef TANDEM_CODE_COLUMNS
// The same of sixteen whole rows, read as columns.
template <class Columns>
struct ByColumns {
  struct Tile {
    __m256i bytes[Columns::kRegisters * kTile / kLanes];
  };

  static void read(const Coded& weight, int64_t n, int64_t, int64_t K, int64_t k, int64_t length,
                   Tile& tile) {
    Columns::read(weight, n, K, k, length, tile.bytes);
  }
  template <class Body>
  static TANDEM_INLINE void words(const Tile& tile, int64_t, int64_t w, int64_t, Body body) {
    Columns::columns(tile.bytes, w, body);
  }
  static TANDEM_INLINE v16 sorted(v16 x) { return in_order(x); }
};
#endif

// body(the way to read rows of a weight, which are sixteen by sixteen if they are `whole`).
template <class T, class Body>
TANDEM_INLINE void for_way(const Coded& weight, int64_t K, bool whole, Body body) {
#ifdef TANDEM_CODE_COLUMNS
  if (whole && has_columns(weight, K)) {
    switch (weight.kind) {
      case kInt8: return body(ByColumns<ColumnsOf<T, kInt8>>{});
      case kInt4: return body(ByColumns<ColumnsOf<T, kInt4>>{});
      case kNF4: return body(ByColumns<ColumnsOf<T, kNF4>>{});
    }
  }
#endif
  body(ByRows<T>{});
}

// Rows m of x by `count` <= 16 G rows of the weight from row n on.
template <class T, int M, int G, class Way>
void multiply_few(const Words& x, const Coded& weight, int64_t n, int64_t count, int64_t K, T* y,
                  int64_t y_stride, const Epilogue<T>& epilogue, int64_t next) {
  typename Way::Tile tiles[G];
  v16 sums[G][M] = {};
  Coming coming = Coming::of(weight, n + count, next, K, (K + kTile - 1) / kTile);
  for (int64_t k = 0; k < K; k += kTile) {
    coming.fetch();
    const int64_t length = std::min(kTile, K - k), words = words_of<T>(length);
    for (int g = 0; g < G && g * kLanes < count; ++g)
      Way::read(weight, n + g * kLanes, std::min<int64_t>(kLanes, count - g * kLanes), K, k, length,
                tiles[g]);
    const word* row = x.data + k / kPerWord<T>;
    for (int64_t w = 0; w < words; w += kLanes, row += kLanes) {
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) {
        const int64_t some = std::min<int64_t>(kLanes, count - g * kLanes);
        if constexpr (M <= 3) {
          Way::words(tiles[g], some, w, length, [&](int64_t i, v16 column) TANDEM_INLINED {
#pragma GCC unroll 3
            for (int m = 0; m < M; ++m)
              sums[g][m] = multiply_add<T>(splat(row[m * x.stride + i]), column, sums[g][m]);
          });
        } else {  // there are no registers for both
          v16 columns[kLanes];
          Way::words(tiles[g], some, w, length,
                     [&](int64_t i, v16 column) TANDEM_INLINED { columns[i] = column; });
          asm("" : "+m"(columns));  // in memory, where the compiler would keep some in registers
          const int64_t last = std::min<int64_t>(kLanes, words - w);
          constexpr int kSome = M > kFewRows / 2 ? (M + 1) / 2 : M;
#pragma GCC unroll 2
          for (int first = 0; first < M; first += kSome) {
            v16 part[kSome];
#pragma GCC unroll 4
            for (int m = 0; m < kSome && first + m < M; ++m) part[m] = sums[g][first + m];
            for (int64_t i = 0; i < last; ++i)
#pragma GCC unroll 4
              for (int m = 0; m < kSome && first + m < M; ++m)
                part[m] = multiply_add<T>(splat(row[(first + m) * x.stride + i]), columns[i],
                                          part[m]);
#pragma GCC unroll 4
            for (int m = 0; m < kSome && first + m < M; ++m) sums[g][first + m] = part[m];
          }
        }
      }
    }
  }
  for (int g = 0; g < G && g * kLanes < count; ++g)
    for (int m = 0; m < M; ++m) {
      const Epilogue<T> e = epilogue.at(m, n + g * kLanes);
      finish(y + m * y_stride + n + g * kLanes, Way::sorted(sums[g][m]), e.bias, e.residual,
             static_cast<int>(std::min<int64_t>(kLanes, count - g * kLanes)));
    }
}

// body(count tag) for a count of 1 to kFewRows.
template <class Body, int... M>
TANDEM_INLINE void for_rows(int64_t count, Body body, std::integer_sequence<int, M...>) {
  ((count == M + 1 ? body(std::integral_constant<int, M + 1>{}) : void()), ...);
}

template <class T>
void multiply_by_tiles(const T* x, int64_t x_stride, int64_t M, const Coded& weight, int64_t N,
                       int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  const Words rows = words_of_rows(x, x_stride, M, K);
  const int64_t groups = (N + kLanes - 1) / kLanes, grain = kGrain / (kLanes * K) + 1;
  parallel_for(0, groups, grain, [&](int64_t from, int64_t to) {
    for_rows(M, [&](auto m) {
      constexpr int G = m.value == 1 ? 2 : 1;
      const int64_t end = std::min(N, to * kLanes), step = G * kLanes;
      for (int64_t n = from * kLanes; n < end; n += step) {
        const int64_t count = std::min(step, end - n), next = std::min(step, end - n - count);
        for_way<T>(weight, K, count % kLanes == 0, [&](auto way) {
          multiply_few<T, m.value, G, decltype(way)>(rows, weight, n, count, K, y, y_stride,
                                                     epilogue, next);
        });
      }
    }, std::make_integer_sequence<int, kFewRows>{});
  });
}

// ---- many: a panel of the weight at a time, in the second cache ----

// Numbers k to k + length of `width` rows of the weight from row `first`, as pack_panel writes
// them.
template <class T>
void make_panel(const Coded& weight, int64_t first, int64_t width, int64_t k, int64_t length,
                int64_t N, int64_t K, float* panel) {
  const int64_t lanes = round_up(width, kLanes);
  for_way<T>(weight, K, width == lanes, [&](auto way) {
    using Way = decltype(way);
    const int64_t groups = lanes / kLanes, tiles = (K + kTile - 1) / kTile;
    const int64_t next = std::min(kPanel, N - first - width);
    Coming coming = Coming::of(weight, first + width, next, K, tiles * groups);
    coming.skip(k / kTile * groups);
    typename Way::Tile tile;
    for (int64_t n = 0; n < width; n += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, width - n);
      float* to = panel + n;
      for (int64_t at = 0; at < length; at += kTile) {
        coming.fetch();
        const int64_t some = std::min(kTile, length - at), words = words_of<T>(some);
        Way::read(weight, first + n, count, K, k + at, some, tile);
        for (int64_t w = 0; w < words; w += kLanes, to += kLanes * lanes)
          Way::words(tile, count, w, some, [&](int64_t i, v16 column) TANDEM_INLINED {
            store(to + i * lanes, Way::sorted(column));
          });
      }
    }
  });
}

// Where the order of sums is not that of vectors: parts of the weight as they would lie.
template <class T>
void multiply_by_parts(const T* x, int64_t x_stride, int64_t M, const Coded& weight, int64_t N,
                       int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  constexpr int64_t kRead = 1 << 17;  // bytes
  const int64_t most = kRead / (K * static_cast<int64_t>(sizeof(T)));
  const int64_t rows = std::min(N, std::max<int64_t>(kLanes, most / kPanel * kPanel));
  parallel_for(0, (N + rows - 1) / rows, kGrain / (rows * K) + 1, [&](int64_t from, int64_t to) {
    T* const numbers = reinterpret_cast<T*>(
        scratch(Use::read, (rows * K * static_cast<int64_t>(sizeof(T)) + 3) / 4));
    for (int64_t i = from; i < to; ++i) {
      const int64_t n = i * rows, count = std::min(rows, N - n);
      for_code(weight, [&](auto kind, const auto* scales) {
        read<kind.value>(weight, scales, n * K, count * K, numbers);
      });
      multiply(x, x_stride, M, Matrix<T>{numbers, K, 1}, count, K, y + n, y_stride,
               epilogue.at(0, n));
    }
  });
}

}  // namespace

template <class T>
void multiply_coded(const T* x, int64_t x_stride, int64_t M, const Coded& weight, int64_t N,
                    int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue) {
  static const bool by_vectors = why_no_amx(std::is_same_v<T, bf16>).empty() == false;
  if (!by_vectors) {
    multiply_by_parts(x, x_stride, M, weight, N, K, y, y_stride, epilogue);
  } else if (M <= kFewRows) {
    multiply_by_tiles(x, x_stride, M, weight, N, K, y, y_stride, epilogue);
  } else {
    multiply_made(x, x_stride, M, N, K, y, y_stride, epilogue,
                  [&](int64_t first, int64_t width, int64_t k, int64_t length, float* panel) {
                    make_panel<T>(weight, first, width, k, length, N, K, panel);
                  });
  }
}

template void multiply_coded(const float*, int64_t, int64_t, const Coded&, int64_t, int64_t, float*,
                             int64_t, const Epilogue<float>&);
template void multiply_coded(const bf16*, int64_t, int64_t, const Coded&, int64_t, int64_t, bf16*,
                             int64_t, const Epilogue<bf16>&);

}  // namespace tandem
