// Vectors of 16 floats: loads and stores of float and bfloat16, exp, tanh, horizontal sum and max.
//
// The compiler's own vector types, so the same source runs on any processor; what a processor does
// better by an instruction of its own stands behind #ifdef beside the portable way. Every function
// treats each lane alone or in a fixed order, so results do not depend on the caller.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace tandem {

using bf16 = c10::BFloat16;

constexpr int kLanes = 16;

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef float v4 __attribute__((vector_size(16), aligned(4)));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4)));
typedef uint32_t v16u __attribute__((vector_size(64), aligned(4)));
typedef uint16_t v16h __attribute__((vector_size(32), aligned(2)));

#define TANDEM_INLINED __attribute__((always_inline))  // behind a lambda's parameters
#define TANDEM_INLINE inline TANDEM_INLINED

TANDEM_INLINE v16 splat(float x) { return v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

TANDEM_INLINE v16i lane_index() {
  return v16i{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

// a where mask is -1, b where it is 0; a NaN in the lane not taken does no harm.
TANDEM_INLINE v16 select(v16i mask, v16 a, v16 b) { return mask ? a : b; }

// Whole vectors as they lie in memory. memcpy would carry them through the stack in halves where the
// compiler moves memory in smaller pieces than it computes (GCC's tuning for Intel): each such load
// waits for its own stores, which doubles the time of a training step.
typedef float v16_there __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint32_t v16u_there __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t v16h_there __attribute__((vector_size(32), aligned(2), may_alias));
typedef float v8_there __attribute__((vector_size(32), aligned(2), may_alias));

TANDEM_INLINE v16 load_whole(const void* p) { return *static_cast<const v16_there*>(p); }
TANDEM_INLINE v16h load_halves(const void* p) { return *static_cast<const v16h_there*>(p); }
TANDEM_INLINE void store_halves(void* p, v16h h) { *static_cast<v16h_there*>(p) = h; }

TANDEM_INLINE v16u bits(v16 x) { return reinterpret_cast<v16u>(x); }
TANDEM_INLINE v16 from_bits(v16u x) { return reinterpret_cast<v16>(x); }

// ---- float ----

TANDEM_INLINE v16 load(const float* p) { return load_whole(p); }
TANDEM_INLINE void store(float* p, v16 x) { *reinterpret_cast<v16_there*>(p) = x; }
TANDEM_INLINE void store(float* p, v8 x) { *reinterpret_cast<v8_there*>(p) = x; }

// The first n lanes, 0 < n < 16; the others are 0 and their memory is not touched.
TANDEM_INLINE v16 load(const float* p, int n) {
#if defined(__AVX512F__)
  return reinterpret_cast<v16>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
#else
  v16 x = {};
  __builtin_memcpy(&x, p, sizeof(float) * n);
  return x;
#endif
}

TANDEM_INLINE void store(float* p, v16 x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m512>(x));
#else
  __builtin_memcpy(p, &x, sizeof(float) * n);
#endif
}

// ---- bfloat16: the upper half of a float ----

// Written out where the compiler would take the conversion apart.
TANDEM_INLINE v16u whole(v16h h) {
#if defined(__AVX512F__)
  return reinterpret_cast<v16u>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(h)));
#else
  return __builtin_convertvector(h, v16u);
#endif
}

TANDEM_INLINE v16h half(v16u u) {
#if defined(__AVX512F__)
  return reinterpret_cast<v16h>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(u)));
#else
  return __builtin_convertvector(u, v16h);
#endif
}

TANDEM_INLINE v16 widen(v16h h) { return from_bits(whole(h) << 16); }

// Rounded to nearest even; NaN stays NaN.
TANDEM_INLINE v16h narrow(v16 x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<v16h>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#else
  const v16u u = bits(x);
  const v16u rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const v16u nan = (u >> 16) | 0x40u;
  return half(x == x ? rounded : nan);
#endif
}

// 32 numbers of which the even ones are the lower halves of words, and the odd ones the upper.
TANDEM_INLINE void load_pairs(const bf16* p, v16& even, v16& odd) {
  const v16u u = *reinterpret_cast<const v16u_there*>(p);
  even = from_bits(u << 16);
  odd = from_bits(u & 0xFFFF0000u);
}

// a0 b0 a1 b1 ... in place: the first 16 in a, the others in b.
TANDEM_INLINE void interleave(v16& a, v16& b) {
  const v16 low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,
                                          23);
  b = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  a = low;
}

TANDEM_INLINE v16 load(const bf16* p) { return widen(load_halves(p)); }
TANDEM_INLINE void store(bf16* p, v16 x) { store_halves(p, narrow(x)); }

TANDEM_INLINE v16 load(const bf16* p, int n) {
  v16h h = {};
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  h = reinterpret_cast<v16h>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
#else
  __builtin_memcpy(&h, p, sizeof(bf16) * n);
#endif
  return widen(h);
}

TANDEM_INLINE void store(bf16* p, v16 x, int n) {
  const v16h h = narrow(x);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m256i>(h));
#else
  __builtin_memcpy(p, &h, sizeof(bf16) * n);
#endif
}

// The float is one of bfloat16's own values: no rounding, every bit pattern comes back.
TANDEM_INLINE void store_exact(bf16* p, v16 x) { store_halves(p, half(bits(x) >> 16)); }
TANDEM_INLINE void store_exact(float* p, v16 x) { store(p, x); }

TANDEM_INLINE void store_exact(bf16* p, v16 x, int n) {
  const v16h h = half(bits(x) >> 16);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m256i>(h));
#else
  __builtin_memcpy(p, &h, sizeof(bf16) * n);
#endif
}
TANDEM_INLINE void store_exact(float* p, v16 x, int n) { store(p, x, n); }

// Keeps x in a register where several products use it: the compiler would load it for each anew.
TANDEM_INLINE void in_register(v16& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
}

// The same of a pointer, which the compiler would otherwise compute from another.
template <class T>
TANDEM_INLINE void in_register(const T*& p) {
  asm("" : "+r"(p));
}

// ---- across and inside lanes ----

// b in a lane where a or b is NaN.
TANDEM_INLINE v16 max(v16 a, v16 b) {
#if defined(__AVX512F__)
  return reinterpret_cast<v16>(
      _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
  return a > b ? a : b;
#endif
}

TANDEM_INLINE v8 lower(v16 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
TANDEM_INLINE v8 upper(v16 x) {
  return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
}
TANDEM_INLINE v4 lower(v8 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
TANDEM_INLINE v4 upper(v8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }

// Lane i + lane i + 8, then + 4, + 2, + 1: always in this order.
TANDEM_INLINE float sum(v16 x) {
  const v8 a = lower(x) + upper(x);
  v4 b = lower(a) + upper(a);
  b = b + __builtin_shufflevector(b, b, 2, 3, 2, 3);
  return b[0] + b[1];
}

TANDEM_INLINE float max(v16 x) {
  const v8 lo = lower(x), hi = upper(x);
  const v8 a = lo > hi ? lo : hi;
  const v4 c = lower(a), d = upper(a);
  v4 b = c > d ? c : d;
  const v4 e = __builtin_shufflevector(b, b, 2, 3, 2, 3);
  b = b > e ? b : e;
  return b[0] > b[1] ? b[0] : b[1];
}

// e^x to 1 ulp for x in (-87.6, 88.3]; 0 below -87.6. Not for larger x. exp(0) is exactly 1.
TANDEM_INLINE v16 exp_below(v16 x) {
  const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = max(splat(-88.0f), x);             // keeps a NaN, which is the second argument
  const v16 shifted = x * 1.44269504f + magic;
  const v16 n = shifted - magic;
  const v16 r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
  v16 p = r * 0.0013814539987808024f + 0.008368745116376237f;
  p = p * r + 0.04166839078638745f;
  p = p * r + 0.1666652039896218f;
  p = p * r + 0.4999999343211048f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // 2^n, its exponent field put together by hand: n = -127 gives 0.
  return p * from_bits((bits(shifted) + (127u - 0x4B400000u)) << 23);
}

// The same for every x: held at e^88.3 above.
TANDEM_INLINE v16 exp(v16 x) {
#if defined(__AVX512F__)
  return exp_below(reinterpret_cast<v16>(
      _mm512_min_ps(_mm512_set1_ps(88.3f), reinterpret_cast<__m512>(x))));
#else
  return exp_below(x > 88.3f ? splat(88.3f) : x);
#endif
}

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
