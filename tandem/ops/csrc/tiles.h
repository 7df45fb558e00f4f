// Tiles of sums that stay in registers, for products and attention: how their numbers are loaded,
// multiplied, added and stored.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace tandem {

// One 32-bit word of an operand: a float, or two bfloat16.
typedef float word __attribute__((may_alias, aligned(2)));

// A vector as it lies in memory, as in vec.h.
typedef wide wide_word __attribute__((may_alias, aligned(2)));

TANDEM_INLINE wide load_wide(const word* p) { return *reinterpret_cast<const wide_word*>(p); }
#if defined(__AVX512F__)
TANDEM_INLINE wide load_wide(const bf16* p) { return widen(load_halves(p)); }
#elif defined(__AVX2__)  // others keep no bfloat16 (gemm.h)
TANDEM_INLINE wide load_wide(const bf16* p) {
  return from_bits(whole(There<v8h>::load(p)) << 16);
}
#endif
TANDEM_INLINE void store_wide(word* p, wide x) { *reinterpret_cast<wide_word*>(p) = x; }

TANDEM_INLINE wide splat_wide(float x) {
  wide v;
  fill(v, x);
  return v;
}

template <class T, class V>
TANDEM_INLINE V multiply_add(V a, V b, V sum) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    return reinterpret_cast<V>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                reinterpret_cast<__m512bh>(a),
                                                reinterpret_cast<__m512bh>(b)));
  }
#endif
#if defined(__FMA__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<V, wide>) {
    // GCC would read b from memory for every row, or move sums there and back.
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
  } else {
    return {multiply_add<T>(a.lo, b.lo, sum.lo), multiply_add<T>(a.hi, b.hi, sum.hi)};
  }
#endif
#if defined(TANDEM_EMULATE_AVX512)
  // One rounding at any level of optimization, as one instruction of AVX-512 makes.
  if constexpr (std::is_same_v<V, v16>)
    return joined(_mm256_fmadd_ps(lower(a), lower(b), lower(sum)),
                  _mm256_fmadd_ps(upper(a), upper(b), upper(sum)));
#endif
  return a * b + sum;
}

// body(r, c) for every vector of sums of a tile, written out: were their address taken, they would
// not stay in registers.
template <int R, int C, class Body>
TANDEM_INLINE void for_sums(Body body) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) body(r, c);
}

// ---- of 16 columns, by registers that hold fewer ----

constexpr int kRegisters = kLanes / kWide;  // that hold 16 numbers

template <int R>
using TileSums = wide[R][kRegisters];

template <int R>
TANDEM_INLINE void zero_sums(TileSums<R>& sums) {
  for_sums<R, kRegisters>([&](int r, int c) TANDEM_INLINED { sums[r][c] = wide{}; });
}

// Rows `stride` apart.
template <int R>
TANDEM_INLINE void read_sums(TileSums<R>& sums, const float* from, int64_t stride) {
  for_sums<R, kRegisters>([&](int r, int c) TANDEM_INLINED {
    sums[r][c] = load_wide(reinterpret_cast<const word*>(from + r * stride + c * kWide));
  });
}
template <int R>
TANDEM_INLINE void write_sums(const TileSums<R>& sums, float* to, int64_t stride) {
  for_sums<R, kRegisters>([&](int r, int c) TANDEM_INLINED {
    store_wide(reinterpret_cast<word*>(to + r * stride + c * kWide), sums[r][c]);
  });
}

// put(r, row r, lanes) for every row, of which there are `lanes` columns.
template <int R, class Put>
TANDEM_INLINE void finish_sums(const TileSums<R>& sums, int lanes, Put put) {
  if (lanes == kLanes) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) put(r, sixteen(sums[r]), kLanes);
    return;
  }
  float kept[R * kLanes];
  write_sums<R>(sums, kept, kLanes);
  for (int r = 0; r < R; ++r) put(r, load(kept + r * kLanes), lanes);
}

// sums += one word of each row, `row(r)`, by 16 of a panel.
template <class T, int R, class P, class Row>
TANDEM_INLINE void add_word(TileSums<R>& sums, const P* panel, Row row) {
  wide b[kRegisters];
#pragma GCC unroll 4
  for (int c = 0; c < kRegisters; ++c) b[c] = load_wide(panel + c * kWide);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const wide a = splat_wide(row(r));
#pragma GCC unroll 4
    for (int c = 0; c < kRegisters; ++c) sums[r][c] = multiply_add<T>(a, b[c], sums[r][c]);
  }
}

}  // namespace tandem
