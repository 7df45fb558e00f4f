// Codes of ops/blockwise.py read as numbers: int8, int4 and NF4, each block with a scale of its
// own.
#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "lanes.h"

namespace tandem {

constexpr int64_t kMaxBlock = 4096;
enum Code : int64_t { kInt8 = 0, kInt4 = 1, kNF4 = 2 };

// Numbers of a byte of codes.
template <int64_t kind>
constexpr int64_t kPerByte = kind == kInt8 ? 1 : 2;

// The table of QLoRA, appendix E; the same numbers stand in ops/blockwise.py.
constexpr std::array<float, 16> kNF4Numbers = {
    -1.0f,                -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f,  0.7229568362236023f,  1.0f};

// What each half byte stands for, without its scale; the code 0 is not written by int4.
template <int64_t kind>
constexpr std::array<float, 16> half_byte_numbers() {
  if (kind == kNF4) return kNF4Numbers;
  std::array<float, 16> numbers{};
  for (int i = 0; i < 16; ++i) numbers[i] = static_cast<float>(i - 8);
  return numbers;
}

// ---- floats to and from a buffer ----

template <class T>
TANDEM_INLINE void widen_block(const T* x, float* to, int64_t n) {
  for_columns(n, [&](int64_t i, int lanes) {
    store_lanes(to + i, load_lanes(x + i, lanes), lanes);
  });
}
template <>
TANDEM_INLINE void widen_block(const c10::Half* x, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(x[i]);
}

template <class T>
TANDEM_INLINE void narrow_block(const float* x, T* to, int64_t n) {
  for_columns(n, [&](int64_t i, int lanes) { store_all(to + i, load_lanes(x + i, lanes), lanes); });
}
template <>
TANDEM_INLINE void narrow_block(const float* x, c10::Half* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = c10::Half(x[i]);
}

// ---- one number after another ----

// What every byte stands for, two numbers of NF4.
inline const std::array<std::array<float, 2>, 256>& nf4_pairs() {
  static const auto pairs = [] {
    std::array<std::array<float, 2>, 256> all{};
    for (int i = 0; i < 256; ++i) all[i] = {kNF4Numbers[i & 15], kNF4Numbers[i >> 4]};
    return all;
  }();
  return pairs;
}

// Code numbers without their scale; writes n + 1 where n is odd.
template <int64_t kind>
TANDEM_INLINE void numbers_of(const uint8_t* codes, float* to, int64_t n) {
  if constexpr (kind == kInt8) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(static_cast<int8_t>(codes[i]));
  } else if constexpr (kind == kInt4) {
    for (int64_t i = 0; i < (n + 1) / 2; ++i) {
      to[2 * i] = static_cast<float>(static_cast<int32_t>(codes[i] & 15) - 8);
      to[2 * i + 1] = static_cast<float>(static_cast<int32_t>(codes[i] >> 4) - 8);
    }
  } else {
    const auto& pairs = nf4_pairs();
    for (int64_t i = 0; i < (n + 1) / 2; ++i)
      __builtin_memcpy(to + 2 * i, pairs[codes[i]].data(), 2 * sizeof(float));
  }
}

// ---- many at a time, where a table of sixteen numbers fits registers ----

#if defined(__AVX512F__) || defined(__AVX2__)
#define TANDEM_MANY_CODES 1

#if defined(__AVX512F__)
// Sixteen numbers of int8 codes.
TANDEM_INLINE v16 int8_numbers(const uint8_t* codes) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return reinterpret_cast<v16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(all)));
}

// Numbers of half bytes by a block's table.
struct Sixteen {
  __m512 table;

  TANDEM_INLINED explicit Sixteen(v16 numbers) : table(reinterpret_cast<__m512>(numbers)) {}
  TANDEM_INLINED v16 of(__m128i bytes) const {
    return reinterpret_cast<v16>(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(bytes), table));
  }
};
#else
TANDEM_INLINE v8 eight_int8_numbers(__m128i codes) {  // the lower eight bytes
  return reinterpret_cast<v8>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)));
}
TANDEM_INLINE v16 int8_numbers(const uint8_t* codes) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return {eight_int8_numbers(all), eight_int8_numbers(_mm_srli_si128(all, 8))};
}

// A permutation looks at three bits; the fourth chooses between two of them.
struct Sixteen {
  __m256 low, high;

  TANDEM_INLINED explicit Sixteen(v16 numbers)
      : low(reinterpret_cast<__m256>(numbers.lo)), high(reinterpret_cast<__m256>(numbers.hi)) {}
  TANDEM_INLINED v8 eight(__m128i bytes) const {
    const __m256i all = _mm256_cvtepu8_epi32(bytes);
    const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(all, 28));
    return reinterpret_cast<v8>(_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, all),
                                                 _mm256_permutevar8x32_ps(high, all), fourth));
  }
  TANDEM_INLINED v16 of(__m128i bytes) const {
    return {eight(bytes), eight(_mm_srli_si128(bytes, 8))};
  }
};
#endif

// Sixteen half bytes as bytes, the lower half of each first.
TANDEM_INLINE __m128i half_bytes(const uint8_t* codes) {
  const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i low = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low));
}

#if !defined(__AVX512F__)
// Eight numbers, none of them NaN, rounded to bfloat16: each in the lower half of a word.
TANDEM_INLINE __m256i upper_halves(v8 x) {
  const v8u u = bits(x);
  return reinterpret_cast<__m256i>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}
#endif

// A table of sixteen bfloat16 as two tables of bytes, for an instruction that looks up sixteen of
// them in each half of a register.
struct SixteenHalves {
  __m256i low, high;

  // `numbers` by a scale that is no NaN, rounded to nearest even.
  TANDEM_INLINED SixteenHalves(const float* numbers, float scale) {
#if defined(__AVX512F__)
    const v16 scaled = load(numbers) * splat(scale);
    const __m256i words = reinterpret_cast<__m256i>(narrow(scaled));
#else
    // Of each half of a register packing takes four words, so numbers 4 to 7 and 8 to 11 change
    // places.
    const auto rounded = [&](int64_t first) TANDEM_INLINED {
      const v8 some = joined(load_four(numbers + first), load_four(numbers + first + 8));
      return upper_halves(some * scale);
    };
    const __m256i words = _mm256_packus_epi32(rounded(0), rounded(4));
#endif
    const auto both = [](__m256i bytes) TANDEM_INLINED {  // the table in each half
      return _mm256_permute4x64_epi64(_mm256_packus_epi16(bytes, bytes), _MM_SHUFFLE(2, 0, 2, 0));
    };
    low = both(_mm256_and_si256(words, _mm256_set1_epi16(255)));
    high = both(_mm256_srli_epi16(words, 8));
  }

  // 32 codes, of which those 0 to 15 are in the lower half.
  TANDEM_INLINED void put(__m256i codes, bf16* first, bf16* second) const {
    const __m256i l = _mm256_shuffle_epi8(low, codes), h = _mm256_shuffle_epi8(high, codes);
    const __m256i a = _mm256_unpacklo_epi8(l, h), b = _mm256_unpackhi_epi8(l, h);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), _mm256_permute2x128_si256(a, b, 0x31));
  }
  // 64 numbers.
  TANDEM_INLINED void read(const uint8_t* codes, bf16* out) const {
    const __m256i all = _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i half = _mm256_set1_epi8(15);
    const __m256i even = _mm256_and_si256(all, half),
                  odd = _mm256_and_si256(_mm256_srli_epi16(all, 4), half);
    put(_mm256_unpacklo_epi8(even, odd), out, out + 16);
    put(_mm256_unpackhi_epi8(even, odd), out + 32, out + 48);
  }
};

// Whole sixteens of one block's n numbers; returns how many.
template <int64_t kind, class T>
TANDEM_INLINE int64_t decode_sixteens(const uint8_t* codes, float scale, T* out, int64_t n) {
  // Products with so small a scale (NF4's least code is 0.08) may be subnormal: `store` flushes them.
  if (std::is_same_v<T, bf16> && std::fabs(scale) < 0x1p-122f && scale != 0.0f) return 0;
  const v16 scales = splat(scale);
  int64_t i = 0;
  if constexpr (kind == kInt8) {
#if !defined(__AVX512F__)
    if constexpr (std::is_same_v<T, bf16>)
      for (; i + kLanes <= n && scale == scale; i += kLanes) {
        const v16 x = int8_numbers(codes + i) * scales;
        const __m256i words = _mm256_packus_epi32(upper_halves(x.lo), upper_halves(x.hi));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                            _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0)));
      }
#endif
    for (; i + kLanes <= n; i += kLanes) store(out + i, int8_numbers(codes + i) * scales);
  } else {
    alignas(64) static constexpr auto numbers = half_byte_numbers<kind>();
    if constexpr (std::is_same_v<T, bf16>) {
      constexpr int64_t many = 64;
      if (n >= many && scale == scale) {
        const SixteenHalves halves(numbers.data(), scale);
        for (; i + many <= n; i += many) halves.read(codes + i / 2, out + i);
        if (i == n) return n;
      }
    }
    const Sixteen sixteen(load(numbers.data()) * scales);
    for (; i + kLanes <= n; i += kLanes) store(out + i, sixteen.of(half_bytes(codes + i / 2)));
  }
  return i;
}
#endif

// ---- a block ----

// The same number by number, or their sum over several `parts`, from the first on. Its buffers are
// large, so it is no part of what calls it.
template <int64_t kind, class T, class S>
__attribute__((noinline)) void decode_one_by_one(const uint8_t* codes, int64_t code_stride,
                                                 const S* scales, int64_t scale_stride,
                                                 int64_t parts, T* out, int64_t n) {
  alignas(64) float numbers[kMaxBlock + 2], total[kMaxBlock];
  for (int64_t part = 0; part < parts; ++part) {
    numbers_of<kind>(codes + part * code_stride, numbers, n);
    const float scale = static_cast<float>(scales[part * scale_stride]);
    if (part == 0) {
      for (int64_t i = 0; i < n; ++i) total[i] = numbers[i] * scale;
    } else {
      for (int64_t i = 0; i < n; ++i) total[i] += numbers[i] * scale;
    }
  }
  narrow_block(total, out, n);
}

// n numbers of one block; of several `parts`, their sum, from the first on.
template <int64_t kind, class T, class S>
TANDEM_INLINE void decode_block(const uint8_t* codes, int64_t code_stride, const S* scales,
                                int64_t scale_stride, int64_t parts, T* out, int64_t n) {
#ifdef TANDEM_MANY_CODES
  if constexpr (!std::is_same_v<T, c10::Half>) {
    if (parts == 1) {
      const int64_t done = decode_sixteens<kind>(codes, static_cast<float>(*scales), out, n);
      codes += done / kPerByte<kind>;
      out += done;
      n -= done;
      if (n == 0) return;
    }
  }
#endif
  decode_one_by_one<kind>(codes, code_stride, scales, scale_stride, parts, out, n);
}

}  // namespace tandem
