// AVX-512 for processors without it, read before everything else (-include): the code of csrc that
// is written for AVX-512 runs on any processor with AVX2, in halves. With TANDEM_EMULATE_BF16 the
// instructions of AVX512_BF16 too, as Intel's manual states them: numbers below 2^-126 count as 0.
//
// GCC makes two registers of a vector of 64 bytes by itself; here is what csrc asks for by name.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__)
#error "this processor has AVX-512: nothing is to be emulated"
#endif
#define TANDEM_EMULATE_AVX512 1
// Not before: of these names the compiler's own header makes what it declares.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512CD__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if defined(TANDEM_EMULATE_BF16)
#define __AVX512BF16__ 1
#endif

namespace emulated {

// The lanes of a register, or of a part of one.
template <class T, int n>
struct Lanes {
  T at[n];
  template <class V>
  static Lanes of(V v) {
    static_assert(sizeof(V) == sizeof(Lanes));
    Lanes x;
    std::memcpy(&x, &v, sizeof x);
    return x;
  }
  template <class V>
  V as() const {
    static_assert(sizeof(V) == sizeof(Lanes));
    V v;
    std::memcpy(&v, at, sizeof v);
    return v;
  }
};
using F16 = Lanes<float, 16>;
using I16 = Lanes<int32_t, 16>;
using H16 = Lanes<uint16_t, 16>;
using H32 = Lanes<uint16_t, 32>;

template <class To, class Body>
To each(Body body) {
  To y;
  for (int i = 0; i < static_cast<int>(sizeof y.at / sizeof y.at[0]); ++i) y.at[i] = body(i);
  return y;
}

inline float normal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float widened(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return normal(x);
}
inline uint16_t narrowed(float x) {
  x = normal(x);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

inline __m512 load_some(__mmask16 mask, const float* p) {
  return each<F16>([&](int i) { return mask >> i & 1 ? p[i] : 0.0f; }).as<__m512>();
}
inline void store_some(float* p, __mmask16 mask, __m512 x) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) p[i] = F16::of(x).at[i];
}
inline __m256i load_some_halves(__mmask16 mask, const void* p) {
  const uint16_t* const from = static_cast<const uint16_t*>(p);
  return each<H16>([&](int i) { return static_cast<uint16_t>(mask >> i & 1 ? from[i] : 0); })
      .as<__m256i>();
}
inline void store_some_halves(void* p, __mmask16 mask, __m256i x) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) static_cast<uint16_t*>(p)[i] = H16::of(x).at[i];
}

// The second where one is NaN, as the instructions do.
inline __m512 larger(__m512 a, __m512 b) {
  const F16 x = F16::of(a), y = F16::of(b);
  return each<F16>([&](int i) { return x.at[i] > y.at[i] ? x.at[i] : y.at[i]; }).as<__m512>();
}
inline __m512 smaller(__m512 a, __m512 b) {
  const F16 x = F16::of(a), y = F16::of(b);
  return each<F16>([&](int i) { return x.at[i] < y.at[i] ? x.at[i] : y.at[i]; }).as<__m512>();
}

inline __m512 low_quarter(__m128 x) {  // what lies above is not to be relied on
  const auto from = Lanes<float, 4>::of(x);
  return each<F16>([&](int i) { return i < 4 ? from.at[i] : NAN; }).as<__m512>();
}
inline __m512 with_quarter(__m512 x, __m128 quarter, int which) {
  F16 y = F16::of(x);
  std::memcpy(y.at + 4 * which, &quarter, sizeof quarter);
  return y.as<__m512>();
}
inline __m512 looked_up(__m512i places, __m512 table) {
  const I16 from = I16::of(places);
  const F16 numbers = F16::of(table);
  return each<F16>([&](int i) { return numbers.at[from.at[i] & 15]; }).as<__m512>();
}

template <class From, class V>
__m512i integers(V x) {
  const auto from = Lanes<From, 16>::of(x);
  return each<I16>([&](int i) { return static_cast<int32_t>(from.at[i]); }).template as<__m512i>();
}
inline __m512 floats(__m512i x) {
  const I16 from = I16::of(x);
  return each<F16>([&](int i) { return static_cast<float>(from.at[i]); }).as<__m512>();
}
inline __m256i lower_halves(__m512i x) {
  const I16 from = I16::of(x);
  return each<H16>([&](int i) { return static_cast<uint16_t>(from.at[i]); }).as<__m256i>();
}
inline __m512i all(int x) {
  return each<I16>([&](int) { return x; }).as<__m512i>();
}
// Bit by bit entry 4 a + 2 b + c of a table of eight.
inline __m512i by_table(__m512i a, __m512i b, __m512i c, int table) {
  const I16 x = I16::of(a), y = I16::of(b), z = I16::of(c);
  return each<I16>([&](int i) {
           uint32_t made = 0;
           for (int bit = 0; bit < 32; ++bit) {
             const auto is_set = [&](const I16& v) { return uint32_t(v.at[i]) >> bit & 1; };
             const uint32_t entry = 4 * is_set(x) + 2 * is_set(y) + is_set(z);
             made |= (uint32_t(table) >> entry & 1) << bit;
           }
           return static_cast<int32_t>(made);
         })
      .as<__m512i>();
}

// The upper of a pair first, each product and sum rounded once.
inline __m512 dot_pairs(__m512 sums, __m512bh a, __m512bh b) {
  const F16 before = F16::of(sums);
  const H32 x = H32::of(a), y = H32::of(b);
  return each<F16>([&](int i) {
           float sum = normal(before.at[i]);
           for (int k : {2 * i + 1, 2 * i})
             sum = normal(std::fma(widened(x.at[k]), widened(y.at[k]), sum));
           return sum;
         })
      .as<__m512>();
}
inline __m256bh narrow(__m512 x) {
  const F16 from = F16::of(x);
  return each<H16>([&](int i) { return narrowed(from.at[i]); }).as<__m256bh>();
}

}  // namespace emulated

#define _mm512_maskz_loadu_ps emulated::load_some
#define _mm512_mask_storeu_ps emulated::store_some
#define _mm256_maskz_loadu_epi16 emulated::load_some_halves
#define _mm256_mask_storeu_epi16 emulated::store_some_halves
#undef _mm512_insertf32x4
#undef _mm512_ternarylogic_epi32
#define _mm512_max_ps emulated::larger
#define _mm512_min_ps emulated::smaller
#define _mm512_castps128_ps512 emulated::low_quarter
#define _mm512_insertf32x4 emulated::with_quarter
#define _mm512_permutexvar_ps emulated::looked_up
#define _mm512_cvtepi8_epi32 emulated::integers<int8_t>
#define _mm512_cvtepu8_epi32 emulated::integers<uint8_t>
#define _mm512_cvtepu16_epi32 emulated::integers<uint16_t>
#define _mm512_cvtepi32_ps emulated::floats
#define _mm512_cvtepi32_epi16 emulated::lower_halves
#define _mm512_set1_epi32 emulated::all
#define _mm512_ternarylogic_epi32 emulated::by_table
#if defined(TANDEM_EMULATE_BF16)
#define _mm512_dpbf16_ps emulated::dot_pairs
#define _mm512_cvtneps_pbh emulated::narrow
#endif
