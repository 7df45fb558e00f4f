// Vectors of 16 floats: loads and stores of float and bfloat16, exp, tanh, horizontal sum and max.
//
// The same source runs on any processor; what a processor does better by an instruction of its own
// stands behind #ifdef beside the portable way. Every function treats each lane alone or in a fixed
// order, so results do not depend on the caller.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#include "wide.h"

namespace tandem {

using bf16 = c10::BFloat16;

// Whole vectors as they lie in memory. memcpy would carry them through the stack in halves where the
// compiler moves memory in smaller pieces than it computes (GCC's tuning for Intel): each such load
// waits for its own stores, which doubles the time of a training step.
template <class V>
struct There {  // a register or less
  typedef V type __attribute__((aligned(2), may_alias));
  static TANDEM_INLINE V load(const void* p) { return *static_cast<const type*>(p); }
  static TANDEM_INLINE void store(void* p, V x) { *static_cast<type*>(p) = x; }
};
template <class V>
struct There<Halves<V>> {
  static TANDEM_INLINE Halves<V> load(const void* p) {
    return {There<V>::load(p), There<V>::load(static_cast<const V*>(p) + 1)};
  }
  static TANDEM_INLINE void store(void* p, Halves<V> x) {
    There<V>::store(p, x.lo);
    There<V>::store(static_cast<V*>(p) + 1, x.hi);
  }
};

TANDEM_INLINE v16 load_whole(const void* p) { return There<v16>::load(p); }
TANDEM_INLINE v16h load_halves(const void* p) { return There<v16h>::load(p); }
TANDEM_INLINE void store_halves(void* p, v16h h) { There<v16h>::store(p, h); }

#if defined(__AVX512F__)
TANDEM_INLINE v16u bits(v16 x) { return reinterpret_cast<v16u>(x); }
TANDEM_INLINE v16 from_bits(v16u x) { return reinterpret_cast<v16>(x); }
#else
TANDEM_INLINE v4u bits(v4 x) { return reinterpret_cast<v4u>(x); }
TANDEM_INLINE v4 from_bits(v4u x) { return reinterpret_cast<v4>(x); }
#if defined(__AVX__)
TANDEM_INLINE v8u bits(v8 x) { return reinterpret_cast<v8u>(x); }
TANDEM_INLINE v8 from_bits(v8u x) { return reinterpret_cast<v8>(x); }
#else
TANDEM_INLINE v8u bits(v8 x) { return {bits(x.lo), bits(x.hi)}; }
TANDEM_INLINE v8 from_bits(v8u x) { return {from_bits(x.lo), from_bits(x.hi)}; }
#endif
TANDEM_INLINE v16u bits(v16 x) { return {bits(x.lo), bits(x.hi)}; }
TANDEM_INLINE v16 from_bits(v16u x) { return {from_bits(x.lo), from_bits(x.hi)}; }
#endif

// ---- float ----

TANDEM_INLINE v16 load(const float* p) { return load_whole(p); }
TANDEM_INLINE v4 load_four(const float* p) { return There<v4>::load(p); }
TANDEM_INLINE void store(float* p, v16 x) { There<v16>::store(p, x); }
TANDEM_INLINE void store(float* p, v8 x) { There<v8>::store(p, x); }

// The first n lanes of a vector of N, 0 < n < N; memory of the others is not touched, and loads make
// them 0. Of 16 it is mostly 8 that are wanted: one half.
#if !defined(__AVX512F__)
TANDEM_INLINE void load_first(const float* p, v4& x, int n) {
  x = n == 1 ? v4{p[0]} : n == 2 ? v4{p[0], p[1]} : v4{p[0], p[1], p[2]};
}
#if defined(__AVX__)
TANDEM_INLINE void load_first(const float* p, v8& x, int n) {
  alignas(32) static constexpr int32_t kMasks[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  x = _mm256_maskload_ps(p, There<__m256i>::load(kMasks + 8 - n));
}
#endif
template <class V>
TANDEM_INLINE void load_first(const float* p, Halves<V>& x, int n) {
  constexpr int half = sizeof(V) / sizeof(float);
  x = Halves<V>{};
  if (n < half) {
    load_first(p, x.lo, n);
  } else {
    x.lo = There<V>::load(p);
    if (n > half) load_first(p + half, x.hi, n - half);
  }
}

TANDEM_INLINE void store_first(float* p, v4 x, int n) {
  p[0] = x[0];
  if (n > 1) p[1] = x[1];
  if (n > 2) p[2] = x[2];
}
#if defined(__AVX__)
TANDEM_INLINE void store_first(float* p, v8 x, int n) {  // masks of stores are slow on AMD's processors
  if (n < 4) return store_first(p, lower(x), n);
  There<v4>::store(p, lower(x));
  if (n > 4) store_first(p + 4, upper(x), n - 4);
}
#endif
template <class V>
TANDEM_INLINE void store_first(float* p, Halves<V> x, int n) {
  constexpr int half = sizeof(V) / sizeof(float);
  if (n < half) return store_first(p, x.lo, n);
  There<V>::store(p, x.lo);
  if (n > half) store_first(p + half, x.hi, n - half);
}
#endif

TANDEM_INLINE v16 load(const float* p, int n) {
#if defined(__AVX512F__)
  return reinterpret_cast<v16>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
#else
  v16 x;
  load_first(p, x, n);
  return x;
#endif
}

TANDEM_INLINE void store(float* p, v16 x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m512>(x));
#else
  store_first(p, x, n);
#endif
}

// Eight times number i of 16, and eight times the next one.
template <int i>
TANDEM_INLINE v16 splat_two(const float* p) {
#if defined(__AVX512F__)
  const v16 x = load(p);
  constexpr int j = i + 1;
  return pick<i, i, i, i, i, i, i, i, j, j, j, j, j, j, j, j>(x, x);
#else
  v16 x;
  fill(x.lo, p[i]);
  fill(x.hi, p[i + 1]);
  return x;
#endif
}

// ---- bfloat16: the upper half of a float ----

// Written out where the compiler would take the conversion apart. `half` is of words below 2^16.
#if defined(__AVX512F__)
TANDEM_INLINE v16u whole(v16h h) {
  return reinterpret_cast<v16u>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(h)));
}
TANDEM_INLINE v16h half(v16u u) {
  return reinterpret_cast<v16h>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(u)));
}
#else
#if defined(__AVX2__)
TANDEM_INLINE v8u whole(v8h h) {
  return reinterpret_cast<v8u>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(h)));
}
TANDEM_INLINE v8h half(v8u u) {
  const __m256i all = reinterpret_cast<__m256i>(u);
  return reinterpret_cast<v8h>(
      _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}
#elif defined(__AVX__)
TANDEM_INLINE v8u whole(v8h h) { return __builtin_convertvector(h, v8u); }
TANDEM_INLINE v8h half(v8u u) { return __builtin_convertvector(u, v8h); }
#else
TANDEM_INLINE v8u whole(v8h h) {
  return {__builtin_convertvector(__builtin_shufflevector(h, h, 0, 1, 2, 3), v4u),
          __builtin_convertvector(__builtin_shufflevector(h, h, 4, 5, 6, 7), v4u)};
}
TANDEM_INLINE v8h half(v8u u) {
#if defined(__SSE4_1__)
  return reinterpret_cast<v8h>(
      _mm_packus_epi32(reinterpret_cast<__m128i>(u.lo), reinterpret_cast<__m128i>(u.hi)));
#else
  return __builtin_shufflevector(__builtin_convertvector(u.lo, v4h),
                                 __builtin_convertvector(u.hi, v4h), 0, 1, 2, 3, 4, 5, 6, 7);
#endif
}
#endif
TANDEM_INLINE v16u whole(v16h h) { return {whole(h.lo), whole(h.hi)}; }
TANDEM_INLINE v16h half(v16u u) { return {half(u.lo), half(u.hi)}; }
#endif

TANDEM_INLINE v16 widen(v16h h) { return from_bits(whole(h) << 16); }

// Rounded to nearest even as torch rounds, subnormal numbers too; NaN stays NaN.
TANDEM_INLINE v16h narrow_all(v16 x) {
  const v16u u = bits(x);
  const v16u rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const v16u nan = (u >> 16) | 0x40u;
  return half(select(x == x, rounded, nan));
}

// The same for results of arithmetic. The instruction of AVX512_BF16 takes a fifth off the time of a
// norm or an activation, but flushes subnormal numbers (below 1.2e-38) to 0, as the processor's
// bfloat16 products do with what they read: too small to change a sum. Numbers that are kept, such
// as decoded weights, go through narrow_all.
TANDEM_INLINE v16h narrow(v16 x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<v16h>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#else
  return narrow_all(x);
#endif
}

// 32 numbers of which the even ones are the lower halves of words, and the odd ones the upper.
TANDEM_INLINE void load_pairs(const bf16* p, v16& even, v16& odd) {
  const v16u u = There<v16u>::load(p);
  even = from_bits(u << 16);
  odd = from_bits(u & 0xFFFF0000u);
}

TANDEM_INLINE v16 load(const bf16* p) { return widen(load_halves(p)); }
TANDEM_INLINE void store(bf16* p, v16 x) { store_halves(p, narrow(x)); }

// The first n lanes, 0 < n < 16; often 8, which as a constant needs no call.
TANDEM_INLINE v16h load_halves(const bf16* p, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return reinterpret_cast<v16h>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
#else
  v16h h = {};
  if (n == 8) {
    __builtin_memcpy(&h, p, sizeof(bf16) * 8);
  } else {
    __builtin_memcpy(&h, p, sizeof(bf16) * n);
  }
  return h;
#endif
}
TANDEM_INLINE void store_halves(bf16* p, v16h h, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m256i>(h));
#else
  if (n == 8) {
    __builtin_memcpy(p, &h, sizeof(bf16) * 8);
  } else {
    __builtin_memcpy(p, &h, sizeof(bf16) * n);
  }
#endif
}

TANDEM_INLINE v16 load(const bf16* p, int n) { return widen(load_halves(p, n)); }
TANDEM_INLINE void store(bf16* p, v16 x, int n) { store_halves(p, narrow(x), n); }

TANDEM_INLINE void store_all(float* p, v16 x, int n) { n == kLanes ? store(p, x) : store(p, x, n); }
TANDEM_INLINE void store_all(bf16* p, v16 x, int n) {
  n == kLanes ? store_halves(p, narrow_all(x)) : store_halves(p, narrow_all(x), n);
}

// The float is one of bfloat16's own values: no rounding, every bit pattern comes back.
TANDEM_INLINE void store_exact(bf16* p, v16 x) { store_halves(p, half(bits(x) >> 16)); }
TANDEM_INLINE void store_exact(float* p, v16 x) { store(p, x); }
TANDEM_INLINE void store_exact(bf16* p, v16 x, int n) { store_halves(p, half(bits(x) >> 16), n); }
TANDEM_INLINE void store_exact(float* p, v16 x, int n) { store(p, x, n); }

// ---- across and inside lanes ----

#if defined(__AVX512F__)
TANDEM_INLINE d8 as_double(v8 x) { return __builtin_convertvector(x, d8); }
#elif defined(__AVX__)
TANDEM_INLINE d4 as_double(v4 x) { return __builtin_convertvector(x, d4); }
TANDEM_INLINE d8 as_double(v8 x) { return {as_double(lower(x)), as_double(upper(x))}; }
#else
TANDEM_INLINE d4 as_double(v4 x) {
  return {d2{x[0], x[1]}, d2{x[2], x[3]}};
}
TANDEM_INLINE d8 as_double(v8 x) { return {as_double(lower(x)), as_double(upper(x))}; }
#endif

// Lane i + lane i + 8, then + 4, + 2, + 1: always in this order.
TANDEM_INLINE float sum(v16 x) {
  const v8 a = lower(x) + upper(x);
  v4 b = lower(a) + upper(a);
  b = b + pick<2, 3, 2, 3>(b, b);
  return b[0] + b[1];
}

TANDEM_INLINE float max(v16 x) {
  const v8 a = max(lower(x), upper(x));
  v4 b = max(lower(a), upper(a));
  b = max(b, pick<2, 3, 2, 3>(b, b));
  return b[0] > b[1] ? b[0] : b[1];
}

// e^(x / K) for x / K in [-88, 88.3], K a power of 2 or minus one: the bits are those of K = 1.
template <int K>
TANDEM_INLINE v16 exp_of(v16 x) {
  const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const v16 shifted = x * (1.44269504f / K) + magic;
  const v16 n = shifted - magic;
  const v16 r = (x - n * (0.693145752f * K)) - n * (1.42860677e-6f * K);  // ln 2 in two parts
  constexpr float cube = K * K * K;
  v16 p = r * (0.0013814539987808024f / (cube * cube)) + 0.008368745116376237f / (cube * K * K);
  p = p * r + 0.04166839078638745f / (cube * K);
  p = p * r + 0.1666652039896218f / cube;
  p = p * r + 0.4999999343211048f / (K * K);
  p = p * r + 1.0f / K;
  p = p * r + 1.0f;
  // 2^n, its exponent field put together by hand: n = -127 gives 0.
  return p * from_bits((bits(shifted) + (127u - 0x4B400000u)) << 23);
}

// e^x to 1 ulp for x in (-87.6, 88.3]; 0 below -87.6. Not for larger x. exp(0) is exactly 1.
TANDEM_INLINE v16 exp_below(v16 x) {
  return exp_of<1>(max(splat(-88.0f), x));  // keeps a NaN, which is the second argument
}

// The same for every x: held at e^88.3 above.
TANDEM_INLINE v16 exp(v16 x) { return exp_below(min(splat(88.3f), x)); }

// tanh to 3 ulp (a polynomial near 0, where 1 - e^-2x would cancel).
TANDEM_INLINE v16 tanh(v16 x) {
  const v16 size = from_bits(bits(x) & 0x7FFFFFFFu);
  const v16 e = exp(size * -2.0f);
  const v16 far = from_bits(bits((1.0f - e) / (1.0f + e)) | (bits(x) & 0x80000000u));
  const v16 z = x * x;
  v16 p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  return select(size < 0.625f, p * z * x + x, far);
}

}  // namespace tandem
