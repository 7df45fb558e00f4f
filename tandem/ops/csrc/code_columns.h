// Sixteen rows of codes (codes.h) read as columns of numbers, where registers hold eight: what is
// turned is bytes, codes or halves of bfloat16, of which a register holds four times as many as of
// floats. The bits are those of decode_block.
#pragma once

#include <bit>

#include "coded.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define TANDEM_CODE_COLUMNS 1

namespace tandem {

// Rows r and r + 8 lie in the two halves of a register, and a column's sixteen numbers in the order
// 0 to 3, 8 to 11, 4 to 7, 12 to 15: instructions that mix two registers treat each half alone.
TANDEM_INLINE v16 in_order(v16 column) {
  return {joined(lower(column.lo), lower(column.hi)), joined(upper(column.lo), upper(column.hi))};
}

// Whether every row and every block is a whole number of the bytes that are read together.
constexpr bool has_columns(const Coded& weight, int64_t K) {
  return K % 32 == 0 && weight.block % 32 == 0;
}

// Sixteen bytes at `codes`, and sixteen that lie `far` bytes behind them.
TANDEM_INLINE __m256i two_rows(const uint8_t* codes, int64_t far) {
  const auto at = [&](int64_t i) TANDEM_INLINED {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
  };
  return _mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(far), 1);
}

// Half bytes: those of even places, which are the lower ones, and the others.
struct HalfBytes {
  __m256i even, odd;

  TANDEM_INLINED explicit HalfBytes(__m256i codes)
      : even(_mm256_and_si256(codes, _mm256_set1_epi8(15))),
        odd(_mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15))) {}
};

TANDEM_INLINE float scale_of(const Coded& weight, int64_t block) {
  if (weight.half_scales) return static_cast<float>(static_cast<const bf16*>(weight.scales)[block]);
  return static_cast<const float*>(weight.scales)[block];
}
// A scale whose products can be rounded by rounded_words: of a NaN only the upper half stays, from
// which nothing is carried over.
TANDEM_INLINE float without_carry(float scale) {
  if (scale == scale) return scale;
  uint32_t u;
  __builtin_memcpy(&u, &scale, sizeof u);
  u = (u | 0x00400000u) & 0xFFFF0000u;
  __builtin_memcpy(&scale, &u, sizeof u);
  return scale;
}

// Numbers rounded to bfloat16 in the upper halves of words; what is below means nothing.
TANDEM_INLINE v8u rounded_words(v8 x) {
  const v8u u = bits(x);
  return u + 0x7FFFu + ((u >> 16) & 1u);
}

// Numbers 0 to length of so many rows, `step` apart, the first of which begins with number `first`
// of the run: body(from, to) for those that lie in one block of each row; before it
// enter(row, block) for each row that enters one.
template <int rows, class Enter, class Body>
TANDEM_INLINE void for_blocks(int64_t size, int64_t first, int64_t step, int64_t length,
                              Enter enter, Body body) {
  const int64_t more = step / size, rest = step % size;
  int64_t block = first / size, inside = first % size;
  if (rest == 0) {  // they enter blocks together
    for (int64_t from = 0; from < length; ++block) {
      for (int r = 0; r < rows; ++r) enter(r, block + r * more);
      const int64_t to = std::min(length, from + size - inside);
      body(from, to);
      from = to;
      inside = 0;
    }
    return;
  }
  int64_t blocks[rows], ends[rows];
  for (int r = 0; r < rows; ++r) {
    enter(r, blocks[r] = block);
    ends[r] = size - inside;
    block += more;
    inside += rest;
    if (inside >= size) {
      inside -= size;
      ++block;
    }
  }
  for (int64_t from = 0;;) {
    int64_t to = length;
    for (int r = 0; r < rows; ++r) to = std::min(to, ends[r]);
    body(from, to);
    if (to == length) return;
    from = to;
    for (int r = 0; r < rows; ++r)
      if (ends[r] == from) {
        enter(r, ++blocks[r]);
        ends[r] += size;
      }
  }
}

// ---- half bytes to bfloat16 ----

// Each row has its table, a block's sixteen numbers: bytes of them are looked up and turned.
template <int64_t kind>
class HalfByteColumns {
 public:
  static constexpr int64_t kRegisters = 16;  // for as many numbers of each row

  // Numbers k to k + length of rows n to n + 15.
  static void read(const Coded& weight, int64_t n, int64_t K, int64_t k, int64_t length,
                   __m256i* to) {
    for (int64_t r = 0; r < 8; ++r, to += 2) {
      const int64_t first = (n + r) * K + k;
      const uint8_t* const codes = weight.codes + first / 2;
      float scales[2];
      const auto enter = [&](int row, int64_t block) TANDEM_INLINED {
        scales[row] = without_carry(scale_of(weight, block));
      };
      const auto read_block = [&](int64_t from, int64_t end) {
        const Tables tables(scales[0], scales[1]);
        for (int64_t i = from; i < end; i += 32) {
          const HalfBytes x(two_rows(codes + i / 2, 4 * K));
          __m256i* const here = to + i;  // sixteen registers for sixteen numbers
          tables.put(_mm256_unpacklo_epi8(x.even, x.odd), here);
          tables.put(_mm256_unpackhi_epi8(x.even, x.odd), here + 16);
        }
      };
      for_blocks<2>(weight.block, first, 8 * K, length, enter, read_block);
    }
  }

  // Columns i to i + 15 of what was read.
  template <class Body>
  static TANDEM_INLINE void columns(const __m256i* tile, int64_t i, Body body) {
    const __m256i* const rows = tile + i;
    eight<false>(rows, 0, body);
    eight<true>(rows, 8, body);
  }

 private:
  // Of a row in each half: lower bytes and upper bytes of sixteen bfloat16.
  struct Tables {
    __m256i low, high;

    TANDEM_INLINED Tables(float scale, float other) {
      alignas(32) static constexpr auto all = [] {
        constexpr auto numbers = half_byte_numbers<kind>();
        std::array<std::array<float, 8>, 4> all{};
        for (int i = 0; i < 32; ++i)  // four of them, every other one, in each half
          all[i / 8][i % 8] = numbers[i / 16 * 8 + i % 4 * 2 + i / 8 % 2];
        return all;
      }();
      const __m256 both = _mm256_set_m128(_mm_set1_ps(other), _mm_set1_ps(scale));
      const v8 scales = reinterpret_cast<v8>(both);
      const auto eight = [&](int i) TANDEM_INLINED {
        const v8u a = rounded_words(There<v8>::load(all[i].data()) * scales) >> 16;
        const v8u b = rounded_words(There<v8>::load(all[i + 1].data()) * scales);
        const __m256i words = _mm256_blend_epi16(reinterpret_cast<__m256i>(a),
                                                 reinterpret_cast<__m256i>(b), 0xAA);
        const __m256i apart =
            _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
                             0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        return _mm256_shuffle_epi8(words, apart);
      };
      const __m256i first = eight(0), second = eight(2);
      low = _mm256_unpacklo_epi64(first, second);
      high = _mm256_unpackhi_epi64(first, second);
    }
    TANDEM_INLINED void put(__m256i codes, __m256i* to) const {
      to[0] = _mm256_shuffle_epi8(low, codes);
      to[1] = _mm256_shuffle_epi8(high, codes);
    }
  };

  // Columns 0 to 7 of sixteen, or those above.
  template <bool upper, class Body>
  static TANDEM_INLINE void eight(const __m256i* rows, int64_t first, Body body) {
    const auto bytes = [](__m256i a, __m256i b) TANDEM_INLINED {
      return upper ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b);
    };
    __m256i x[2][2][4];  // columns 0 to 3 and 4 to 7; bytes; rows 0 to 3 and 4 to 7
#pragma GCC unroll 2
    for (int byte = 0; byte < 2; ++byte)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i* const four = rows + 8 * half + byte;
        const __m256i a = bytes(four[0], four[2]), b = bytes(four[4], four[6]);
        x[0][half][byte] = _mm256_unpacklo_epi16(a, b);
        x[1][half][byte] = _mm256_unpackhi_epi16(a, b);
      }
#pragma GCC unroll 2
    for (int four = 0; four < 2; ++four) {
      const auto& y = x[four];
      two(_mm256_unpacklo_epi32(y[0][0], y[0][1]), _mm256_unpacklo_epi32(y[1][0], y[1][1]),
          first + 4 * four, body);
      two(_mm256_unpackhi_epi32(y[0][0], y[0][1]), _mm256_unpackhi_epi32(y[1][0], y[1][1]),
          first + 4 * four + 2, body);
    }
  }
  // Each half of a register: lower bytes of four numbers of a column, upper ones; the next column.
  template <class Body>
  static TANDEM_INLINE void two(__m256i a, __m256i b, int64_t i, Body body) {
    const __m256i first = _mm256_setr_epi8(-1, -1, 0, 4, -1, -1, 1, 5, -1, -1, 2, 6, -1, -1, 3, 7,
                                           -1, -1, 0, 4, -1, -1, 1, 5, -1, -1, 2, 6, -1, -1, 3, 7);
    const __m256i second =
        _mm256_setr_epi8(-1, -1, 8, 12, -1, -1, 9, 13, -1, -1, 10, 14, -1, -1, 11, 15,
                         -1, -1, 8, 12, -1, -1, 9, 13, -1, -1, 10, 14, -1, -1, 11, 15);
    const auto by = [&](__m256i places) TANDEM_INLINED {
      return v16{reinterpret_cast<v8>(_mm256_shuffle_epi8(a, places)),
                 reinterpret_cast<v8>(_mm256_shuffle_epi8(b, places))};
    };
    body(i, by(first));
    body(i + 1, by(second));
  }
};

// ---- all others ----

// Codes are turned; then columns of them are looked up and multiplied by the rows' scales.
template <class T, int64_t kind>
class CodeColumns {
  static constexpr bool kInHalves = kind != kInt8;
  static constexpr int64_t kCodes = kInHalves ? 4 : 8;  // registers, behind two of scales

 public:
  static constexpr int64_t kRegisters = 2 + kCodes;

  static void read(const Coded& weight, int64_t n, int64_t K, int64_t k, int64_t length,
                   __m256i* to) {
    const int64_t row = K / kPerByte<kind>, numbers = 16 * kPerByte<kind>;
    const uint8_t* const codes = weight.codes + n * row + k / kPerByte<kind>;
    alignas(32) float scales[kLanes];
    const auto enter = [&](int r, int64_t block) TANDEM_INLINED {
      float& scale = scales[r < 4 || r > 11 ? r : r ^ 12];
      scale = scale_of(weight, block);
      if constexpr (std::is_same_v<T, bf16>) scale = without_carry(scale);
    };
    const auto read_block = [&](int64_t from, int64_t end) {
      const auto first = There<__m256i>::load(scales), second = There<__m256i>::load(scales + 8);
      for (int64_t i = from; i < end; i += numbers) {
        __m256i x[8];
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r)
          x[r] = two_rows(codes + i / kPerByte<kind> + r * row, 8 * row);
        turn(x);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          if (j % kCodes == 0) {
            *to++ = first;
            *to++ = second;
          }
          *to++ = x[j];
        }
      }
    };
    for_blocks<kLanes>(weight.block, n * K + k, K, length, enter, read_block);
  }

  template <class Body>
  static TANDEM_INLINE void columns(const __m256i* tile, int64_t i, Body body) {
    const __m256i* const from = tile + i / kLanes * kRegisters;
    const v16 scales{reinterpret_cast<v8>(from[0]), reinterpret_cast<v8>(from[1])};
    if constexpr (kInHalves) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const HalfBytes x(from[2 + j]);
        v16 even[2], odd[2];
        look_up(x.even, even);
        look_up(x.odd, odd);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
          body(4 * j + 2 * c, even[c] * scales);
          body(4 * j + 2 * c + 1, odd[c] * scales);
        }
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        const __m256i zero = _mm256_setzero_si256(), x = from[2 + j];
        body(2 * j, rounded_column(integers(_mm256_unpacklo_epi8(zero, x)) * scales));
        body(2 * j + 1, rounded_column(integers(_mm256_unpackhi_epi8(zero, x)) * scales));
      }
    }
  }

 private:
  // Sixteen bytes of eight registers' halves become bytes 2 i and 2 i + 1 of all, eight and eight.
  static TANDEM_INLINE void turn(__m256i (&x)[8]) {
    __m256i y[2][4];  // lower and upper bytes
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      y[0][i] = _mm256_unpacklo_epi8(x[2 * i], x[2 * i + 1]);
      y[1][i] = _mm256_unpackhi_epi8(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto& z = y[half];
      const __m256i a = _mm256_unpacklo_epi16(z[0], z[1]), b = _mm256_unpacklo_epi16(z[2], z[3]);
      const __m256i c = _mm256_unpackhi_epi16(z[0], z[1]), d = _mm256_unpackhi_epi16(z[2], z[3]);
      x[4 * half] = _mm256_unpacklo_epi32(a, b);
      x[4 * half + 1] = _mm256_unpackhi_epi32(a, b);
      x[4 * half + 2] = _mm256_unpacklo_epi32(c, d);
      x[4 * half + 3] = _mm256_unpackhi_epi32(c, d);
    }
  }

  // What two columns of half bytes stand for, from tables of one byte each of sixteen floats.
  static TANDEM_INLINE void look_up(__m256i codes, v16 (&columns)[2]) {
    alignas(32) static constexpr auto tables = [] {
      constexpr auto numbers = half_byte_numbers<kind>();
      std::array<std::array<uint8_t, 32>, 4> all{};
      for (int i = 0; i < 128; ++i)
        all[i / 32][i % 32] =
            static_cast<uint8_t>(std::bit_cast<uint32_t>(numbers[i % 16]) >> (i / 32 * 8));
      return all;
    }();
    const auto bytes = [&](int i) TANDEM_INLINED {
      return _mm256_shuffle_epi8(There<__m256i>::load(tables[i].data()), codes);
    };
    const __m256i a = bytes(0), b = bytes(1), c = bytes(2), d = bytes(3);
    columns[0] = words(_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d));
    columns[1] = words(_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d));
  }
  static TANDEM_INLINE v16 words(__m256i lower, __m256i upper) {
    return {reinterpret_cast<v8>(_mm256_unpacklo_epi16(lower, upper)),
            reinterpret_cast<v8>(_mm256_unpackhi_epi16(lower, upper))};
  }

  // Integers that are the upper bytes of halves of words.
  static TANDEM_INLINE v16 integers(__m256i x) {
    const auto eight = [](__m256i words) TANDEM_INLINED {
      return reinterpret_cast<v8>(_mm256_cvtepi32_ps(_mm256_srai_epi32(words, 24)));
    };
    const __m256i zero = _mm256_setzero_si256();
    return {eight(_mm256_unpacklo_epi16(zero, x)), eight(_mm256_unpackhi_epi16(zero, x))};
  }

  static TANDEM_INLINE v16 rounded_column(v16 x) {
    if constexpr (std::is_same_v<T, bf16>) {
      return {from_bits(rounded_words(x.lo) & 0xFFFF0000u),
              from_bits(rounded_words(x.hi) & 0xFFFF0000u)};
    }
    return x;
  }
};

// Whichever is quicker.
template <class T, int64_t kind>
using ColumnsOf = std::conditional_t<std::is_same_v<T, bf16> && kind != kInt8,
                                     HalfByteColumns<kind>, CodeColumns<T, kind>>;

}  // namespace tandem
#endif
