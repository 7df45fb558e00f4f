// Vectors of 16 numbers, of 8 and of 4: their types, and what moves numbers between lanes.
//
// A vector that a register of the processor holds is the compiler's own type. A wider one is two
// halves of it: the compiler has wider types too, but keeps them in memory, and takes comparisons
// and conversions of theirs apart, number by number.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#define TANDEM_INLINED __attribute__((always_inline))  // behind a lambda's parameters
#define TANDEM_INLINE inline TANDEM_INLINED

namespace tandem {

constexpr int kLanes = 16;

template <class V>
struct Halves {
  V lo, hi;

  TANDEM_INLINED auto operator[](int i) const {
    constexpr int half = sizeof(V) / sizeof(lo[0]);
    return i < half ? lo[i] : hi[i - half];
  }
};

#define TANDEM_HALVES(op)                                                               \
  template <class V>                                                                    \
  TANDEM_INLINE auto operator op(Halves<V> a, Halves<V> b) {                            \
    return Halves<decltype(a.lo op b.lo)>{a.lo op b.lo, a.hi op b.hi};                  \
  }                                                                                     \
  template <class V, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>        \
  TANDEM_INLINE auto operator op(Halves<V> a, S b) {                                    \
    return Halves<decltype(a.lo op b)>{a.lo op b, a.hi op b};                           \
  }                                                                                     \
  template <class V, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>        \
  TANDEM_INLINE auto operator op(S a, Halves<V> b) {                                    \
    return Halves<decltype(a op b.lo)>{a op b.lo, a op b.hi};                           \
  }
TANDEM_HALVES(+)
TANDEM_HALVES(-)
TANDEM_HALVES(*)
TANDEM_HALVES(/)
TANDEM_HALVES(&)
TANDEM_HALVES(|)
TANDEM_HALVES(<<)
TANDEM_HALVES(>>)
TANDEM_HALVES(<)
TANDEM_HALVES(>)
TANDEM_HALVES(==)
#undef TANDEM_HALVES

template <class V>
TANDEM_INLINE Halves<V> operator-(Halves<V> x) {
  return {-x.lo, -x.hi};
}

// ---- the types ----

typedef float v4 __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef uint32_t v4u __attribute__((vector_size(16)));
typedef uint16_t v4h __attribute__((vector_size(8)));
typedef uint16_t v8h __attribute__((vector_size(16)));

#if defined(__AVX__)
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef double d4 __attribute__((vector_size(32)));
#else
using v8 = Halves<v4>;
using v8i = Halves<v4i>;
using v8u = Halves<v4u>;
typedef double d2 __attribute__((vector_size(16)));
using d4 = Halves<d2>;
#endif

#if defined(__AVX512F__)
typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4)));
typedef uint32_t v16u __attribute__((vector_size(64), aligned(4)));
typedef uint16_t v16h __attribute__((vector_size(32), aligned(2)));
typedef double d8 __attribute__((vector_size(64), aligned(8)));
#else
using v16 = Halves<v8>;
using v16i = Halves<v8i>;
using v16u = Halves<v8u>;
using v16h = Halves<v8h>;
using d8 = Halves<d4>;
#endif

// The vector that fills a register.
#if defined(__AVX512F__)
using wide = v16;
#elif defined(__AVX__)
using wide = v8;
#else
using wide = v4;
#endif
constexpr int kWide = sizeof(wide) / sizeof(float);

// ---- every lane the same, or its own number ----

TANDEM_INLINE void fill(v4& v, float x) { v = v4{x, x, x, x}; }
TANDEM_INLINE void count_up(v4i& v, int32_t i) { v = v4i{i, i + 1, i + 2, i + 3}; }
#if defined(__AVX__)
TANDEM_INLINE void fill(v8& v, float x) { v = v8{x, x, x, x, x, x, x, x}; }
TANDEM_INLINE void count_up(v8i& v, int32_t i) {
  v = v8i{i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7};
}
#endif
#if defined(__AVX512F__)
TANDEM_INLINE void fill(v16& v, float x) { v = v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
TANDEM_INLINE v16i lane_index() {
  return v16i{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}
#else
template <class V>
TANDEM_INLINE void fill(Halves<V>& v, float x) {
  fill(v.lo, x);
  v.hi = v.lo;
}
template <class V>
TANDEM_INLINE void count_up(Halves<V>& v, int32_t i) {
  count_up(v.lo, i);
  count_up(v.hi, i + static_cast<int32_t>(sizeof(V) / sizeof(int32_t)));
}
TANDEM_INLINE v16i lane_index() {
  v16i v;
  count_up(v, 0);
  return v;
}
#endif

TANDEM_INLINE v16 splat(float x) {
  v16 v;
  fill(v, x);
  return v;
}

// ---- halves ----

#if defined(__AVX512F__)
TANDEM_INLINE v8 lower(v16 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
TANDEM_INLINE v8 upper(v16 x) {
  return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
}
TANDEM_INLINE v16 joined(v8 a, v8 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
#endif
#if defined(__AVX__)
TANDEM_INLINE v4 lower(v8 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
TANDEM_INLINE v4 upper(v8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }
TANDEM_INLINE v8 joined(v4 a, v4 b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7); }
#else
TANDEM_INLINE v8 joined(v4 a, v4 b) { return {a, b}; }
#endif
#if !defined(__AVX512F__)
TANDEM_INLINE v16 joined(v8 a, v8 b) { return {a, b}; }
#endif

// Registers one after another, of which the first 16 numbers are taken.
#if defined(__AVX512F__)
TANDEM_INLINE v16 sixteen(const wide* x) { return x[0]; }
#elif defined(__AVX__)
TANDEM_INLINE v16 sixteen(const wide* x) { return joined(x[0], x[1]); }
#else
TANDEM_INLINE v16 sixteen(const wide* x) { return joined(joined(x[0], x[1]), joined(x[2], x[3])); }
#endif

template <class V>
TANDEM_INLINE V lower(Halves<V> x) {
  return x.lo;
}
template <class V>
TANDEM_INLINE V upper(Halves<V> x) {
  return x.hi;
}

// ---- lane by lane ----

// a where mask is -1, b where it is 0; a NaN in the lane not taken does no harm.
template <class M, class V>
TANDEM_INLINE V select(M mask, V a, V b) {
  return mask ? a : b;
}
template <class M, class V>
TANDEM_INLINE Halves<V> select(Halves<M> mask, Halves<V> a, Halves<V> b) {
  return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
}

// The larger and the smaller; b in a lane where a or b is NaN.
#if defined(__SSE__)
TANDEM_INLINE v4 max(v4 a, v4 b) { return _mm_max_ps(a, b); }
TANDEM_INLINE v4 min(v4 a, v4 b) { return _mm_min_ps(a, b); }
#else
TANDEM_INLINE v4 max(v4 a, v4 b) { return a > b ? a : b; }
TANDEM_INLINE v4 min(v4 a, v4 b) { return a < b ? a : b; }
#endif
#if defined(__AVX__)
TANDEM_INLINE v8 max(v8 a, v8 b) { return _mm256_max_ps(a, b); }
TANDEM_INLINE v8 min(v8 a, v8 b) { return _mm256_min_ps(a, b); }
#endif
#if defined(__AVX512F__)
TANDEM_INLINE v16 max(v16 a, v16 b) {
  return reinterpret_cast<v16>(
      _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
TANDEM_INLINE v16 min(v16 a, v16 b) {
  return reinterpret_cast<v16>(
      _mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
#endif
template <class V>
TANDEM_INLINE Halves<V> max(Halves<V> a, Halves<V> b) {
  return {max(a.lo, b.lo), max(a.hi, b.hi)};
}
template <class V>
TANDEM_INLINE Halves<V> min(Halves<V> a, Halves<V> b) {
  return {min(a.lo, b.lo), min(a.hi, b.hi)};
}

// x as it is, in a register: what uses it neither loads it anew nor merges with what made it.
#if defined(TANDEM_EMULATE_AVX512)  // which no register holds
#define TANDEM_REGISTER "+m"
#elif defined(__AVX512F__)
#define TANDEM_REGISTER "+v"
#elif defined(__SSE__)
#define TANDEM_REGISTER "+x"
#elif defined(__aarch64__)
#define TANDEM_REGISTER "+w"
#else
#define TANDEM_REGISTER "+m"
#endif
TANDEM_INLINE void in_register(v4& x) { asm("" : TANDEM_REGISTER(x)); }
#if defined(__AVX__)
TANDEM_INLINE void in_register(v8& x) { asm("" : TANDEM_REGISTER(x)); }
#endif
#if defined(__AVX512F__)
TANDEM_INLINE void in_register(v16& x) { asm("" : TANDEM_REGISTER(x)); }
#endif
#undef TANDEM_REGISTER
template <class V>
TANDEM_INLINE void in_register(Halves<V>& x) {
  in_register(x.lo);
  in_register(x.hi);
}

// The same of a pointer, which the compiler would otherwise compute from another.
template <class T>
TANDEM_INLINE void in_register(const T*& p) {
  asm("" : "+r"(p));
}

// ---- across lanes ----

template <int... I, class V>
TANDEM_INLINE V pick(V a, V b) {
  return __builtin_shufflevector(a, b, I...);
}

// a0 b0 a1 b1 ... in place: the first half in a, the other in b.
TANDEM_INLINE void interleave(v4& a, v4& b) {
  const v4 low = pick<0, 4, 1, 5>(a, b);
  b = pick<2, 6, 3, 7>(a, b);
  a = low;
}
// The inverse: the even ones in a, the odd ones in b.
TANDEM_INLINE void separate(v4& a, v4& b) {
  const v4 even = pick<0, 2, 4, 6>(a, b);
  b = pick<1, 3, 5, 7>(a, b);
  a = even;
}
#if defined(__AVX__)
TANDEM_INLINE void interleave(v8& a, v8& b) {
  const v8 low = pick<0, 8, 1, 9, 2, 10, 3, 11>(a, b);
  b = pick<4, 12, 5, 13, 6, 14, 7, 15>(a, b);
  a = low;
}
TANDEM_INLINE void separate(v8& a, v8& b) {
  const v8 even = pick<0, 2, 4, 6, 8, 10, 12, 14>(a, b);
  b = pick<1, 3, 5, 7, 9, 11, 13, 15>(a, b);
  a = even;
}
#endif
#if defined(__AVX512F__)
TANDEM_INLINE void interleave(v16& a, v16& b) {
  const v16 low = pick<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b);
  b = pick<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b);
  a = low;
}
TANDEM_INLINE void separate(v16& a, v16& b) {
  const v16 even = pick<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(a, b);
  b = pick<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(a, b);
  a = even;
}
#endif
template <class V>
TANDEM_INLINE void interleave(Halves<V>& a, Halves<V>& b) {
  interleave(a.lo, b.lo);
  interleave(a.hi, b.hi);
  const V second = b.lo;
  b = {a.hi, b.hi};
  a.hi = second;
}
template <class V>
TANDEM_INLINE void separate(Halves<V>& a, Halves<V>& b) {
  separate(a.lo, a.hi);
  separate(b.lo, b.hi);
  const V odd = a.hi;
  a.hi = b.lo;
  b.lo = odd;
}

// The halves of each 8 numbers change places.
TANDEM_INLINE v8 fours_swapped(v8 x) { return joined(upper(x), lower(x)); }
#if defined(__AVX512F__)
TANDEM_INLINE v16 fours_swapped(v16 x) {
  return pick<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(x, x);
}
#else
TANDEM_INLINE v16 fours_swapped(v16 x) { return {fours_swapped(x.lo), fours_swapped(x.hi)}; }
#endif

// ---- squares: row i, lane j becomes row j, lane i ----

#if !defined(__AVX512F__)

TANDEM_INLINE void transpose(v4 (&x)[4]) {
  const v4 a = pick<0, 4, 1, 5>(x[0], x[1]), b = pick<2, 6, 3, 7>(x[0], x[1]);
  const v4 c = pick<0, 4, 1, 5>(x[2], x[3]), d = pick<2, 6, 3, 7>(x[2], x[3]);
  x[0] = pick<0, 1, 4, 5>(a, c);
  x[1] = pick<2, 3, 6, 7>(a, c);
  x[2] = pick<0, 1, 4, 5>(b, d);
  x[3] = pick<2, 3, 6, 7>(b, d);
}

#if defined(__AVX__)
TANDEM_INLINE void transpose(v8 (&x)[8]) {
  v8 y[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // each half of four rows by itself
    const v8 a = pick<0, 8, 1, 9, 4, 12, 5, 13>(x[i], x[i + 1]);
    const v8 b = pick<2, 10, 3, 11, 6, 14, 7, 15>(x[i], x[i + 1]);
    const v8 c = pick<0, 8, 1, 9, 4, 12, 5, 13>(x[i + 2], x[i + 3]);
    const v8 d = pick<2, 10, 3, 11, 6, 14, 7, 15>(x[i + 2], x[i + 3]);
    y[i] = pick<0, 1, 8, 9, 4, 5, 12, 13>(a, c);
    y[i + 1] = pick<2, 3, 10, 11, 6, 7, 14, 15>(a, c);
    y[i + 2] = pick<0, 1, 8, 9, 4, 5, 12, 13>(b, d);
    y[i + 3] = pick<2, 3, 10, 11, 6, 7, 14, 15>(b, d);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    x[j] = pick<0, 1, 2, 3, 8, 9, 10, 11>(y[j], y[4 + j]);
    x[4 + j] = pick<4, 5, 6, 7, 12, 13, 14, 15>(y[j], y[4 + j]);
  }
}
#endif

template <class V, int N>
TANDEM_INLINE void transpose(Halves<V> (&x)[N]) {
  constexpr int half = N / 2;
  V a[half], b[half], c[half], d[half];  // quarters: above, then below
#pragma GCC unroll 8
  for (int i = 0; i < half; ++i) {
    a[i] = x[i].lo, b[i] = x[i].hi;
    c[i] = x[half + i].lo, d[i] = x[half + i].hi;
  }
  transpose(a);
  transpose(b);
  transpose(c);
  transpose(d);
#pragma GCC unroll 8
  for (int i = 0; i < half; ++i) {
    x[i] = {a[i], c[i]};
    x[half + i] = {b[i], d[i]};
  }
}

// The first 8 lanes of 8 rows and the last 8, each a square.
TANDEM_INLINE void transpose_eights(v16 (&x)[8]) {
  v8 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = x[i].lo, b[i] = x[i].hi;
  transpose(a);
  transpose(b);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = {a[i], b[i]};
}

#else

TANDEM_INLINE void transpose(v16 (&x)[16]) {
  v16 y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = pick<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(x[i], x[i + 1]);
    y[i + 1] = pick<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const v16 a = y[i + j], b = y[i + j + 2];
      x[i + 2 * j] = pick<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b);
      x[i + 2 * j + 1] = pick<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b);
    }
  // x[4 g + j] now holds, in each quarter q, column 4 q + j of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const v16 a = x[j], b = x[4 + j], c = x[8 + j], d = x[12 + j];
    const v16 ab = pick<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(a, b);
    const v16 AB = pick<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(a, b);
    const v16 cd = pick<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(c, d);
    const v16 CD = pick<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(c, d);
    y[j] = pick<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(ab, cd);
    y[8 + j] = pick<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(ab, cd);
    y[4 + j] = pick<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(AB, CD);
    y[12 + j] = pick<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(AB, CD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// One step of a transposition: x[i] and x[i + S] exchange their off-diagonal S-blocks.
template <int S>
TANDEM_INLINE void exchange(v16& a, v16& b) {
#define TANDEM_LOW(l) ((l) & S ? 16 + (l)-S : (l))
#define TANDEM_HIGH(l) ((l) & S ? 16 + (l) : (l) + S)
#define TANDEM_LANES(f)                                                                         \
  f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), \
      f(15)
  const v16 low = __builtin_shufflevector(a, b, TANDEM_LANES(TANDEM_LOW));
  b = __builtin_shufflevector(a, b, TANDEM_LANES(TANDEM_HIGH));
  a = low;
#undef TANDEM_LOW
#undef TANDEM_HIGH
#undef TANDEM_LANES
}

template <int S, int Count>
TANDEM_INLINE void exchange_all(v16 (&x)[Count]) {
#pragma GCC unroll 16
  for (int i = 0; i < Count; ++i) {
    if (!(i & S)) exchange<S>(x[i], x[i + S]);
  }
}

// The first 8 lanes of 8 rows and the last 8, each a square.
TANDEM_INLINE void transpose_eights(v16 (&x)[8]) {
  exchange_all<4>(x);
  exchange_all<2>(x);
  exchange_all<1>(x);
}

#endif

}  // namespace tandem
