// Matrix products, y[m, n] = sum over k of x[m, k] * w[n, k], whose every element is summed in one
// order, so that a row's bits depend on nothing but the row: not on its neighbours or their number,
// on threads, or on whether the weight was packed ahead of time.
//
// The rule of summation, one per instruction set; each starts at +0 in float32 and rounds to the
// operands' type once, at the end:
//   float32                        s = fma(x[k], w[k], s), k from first to last. Where the processor
//                                  has no fused multiply-add, s = s + x[k] * w[k], both rounded.
//   bfloat16, AVX512_BF16          s = vdpbf16ps(s, x[2 j .. 2 j + 1], w[2 j .. 2 j + 1]), j from
//                                  first to last: two products a step, denormals flushed. An odd K
//                                  ends in a pair whose second numbers are 0.
//   either, AMX (amx.h)            the unit's own order, 32 numbers at a time from first to last, where
//                                  it passes its self-test for the type; float32 in three parts. The
//                                  vectors above and below where it does not.
//   bfloat16, all others           widened to float32, then as float32: a product is exact.
//
// Because the order is fixed per element, how the work is cut is free, and chosen for speed
// (gemm.cpp). Nothing here or there includes torch's tensors: they take longer to compile than the
// products do.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "lanes.h"

namespace tandem {

// Whether two bfloat16 travel as one 32-bit word wherever float32 has one number.
#if defined(__AVX512BF16__)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// Values of T in one word: K values of a row are words_of<T>(K) words.
template <class T>
constexpr int64_t kPerWord = std::is_same_v<T, bf16> && kPairs ? 2 : 1;

template <class T>
constexpr int64_t words_of(int64_t K) {
  return (K + kPerWord<T> - 1) / kPerWord<T>;
}

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Floats of a weight (N, K) in panels of words.
template <class T>
constexpr int64_t panels_size(int64_t N, int64_t K) {
  return round_up(N, kLanes) * words_of<T>(K);
}

// What a weight that is packed ahead of time is kept as. Bfloat16 whose words are floats stays as it
// is: decoding a few answers takes as long as its weights take from memory. Not where registers hold 4
// numbers (SSE; ARM, not measured): from 4 rows on widening takes a quarter more time there.
#if defined(__AVX2__)
template <class T>
using Kept = std::conditional_t<kPerWord<T> == 1, T, float>;
#else
template <class T>
using Kept = float;
#endif

// Floats of a packed weight (N, K): what `pack` writes and `multiply_packed` reads.
template <class T>
constexpr int64_t packed_size(int64_t N, int64_t K) {
  return panels_size<T>(N, K) * sizeof(Kept<T>) / sizeof(float);
}

// A matrix (rows, K) as its strides have it: rows contiguous, or columns.
template <class T>
struct Matrix {
  const T* data;
  int64_t row_stride, column_stride;
};

// What happens to a finished sum: y = residual + (sum + bias), each rounded to T.
template <class T>
struct Epilogue {
  const T* bias = nullptr;      // (N,)
  const T* residual = nullptr;  // (M, N), rows `residual_stride` apart; may be y itself
  int64_t residual_stride = 0;

  Epilogue at(int64_t m, int64_t n) const {
    return {bias ? bias + n : nullptr,
            residual ? residual + m * residual_stride + n : nullptr, residual_stride};
  }
};

// Packs a weight (N, K) into `out` (packed_size<T>(N, K) floats) for multiply_packed.
template <class T>
void pack(const Matrix<T>& m, int64_t N, int64_t K, float* out);

// y (M, N) = x (M, K) by a weight packed ahead of time. Rows of x are `x_stride` apart.
template <class T>
void multiply_packed(const T* x, int64_t x_stride, int64_t M, const float* packed, int64_t N,
                     int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue);

// The same by a weight as it lies.
template <class T>
void multiply(const T* x, int64_t x_stride, int64_t M, const Matrix<T>& weight, int64_t N,
              int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue);

// Floats of a weight (N, K) made ready for rows that come block by block: `make_ready` writes and
// `multiply_ready` reads it. What it costs to make is paid once, and it may be larger than the weight.
template <class T>
int64_t ready_size(int64_t N, int64_t K);

// Weights over one input may follow one another in such memory, to be read as one, if each but the last
// has a multiple of so many columns.
template <class T>
int64_t ready_columns();

template <class T>
void make_ready(const Matrix<T>& weight, int64_t N, int64_t K, float* out);

// The product by a weight made ready: the same bits.
template <class T>
void multiply_ready(const T* x, int64_t x_stride, int64_t M, const float* ready, int64_t N,
                    int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue);

// Sums (N, K) that lie in several places, some rows in each: matrices without gaps between rows, each
// written over or added to.
struct Stack {
  struct Piece {
    float* y = nullptr;
    int64_t rows = 0;
    bool adds = false;
  };
  static constexpr int kMost = 3;
  Piece pieces[kMost];
  int count = 0;

  Stack() = default;
  Stack(float* y, int64_t rows, bool adds) { push(y, rows, adds); }
  void push(float* y, int64_t rows, bool adds) { pieces[count++] = {y, rows, adds}; }
};

// y (N, K) = a (M, N) turned, by b (M, K), or that added to y: what a weight's gradient is, or those of
// several weights over one input. Sums over M stay in float32, of bfloat16 too; their order is not
// that of the rule above, but where pairs of bfloat16 are multiplied denormals are flushed as there.
template <class T>
void multiply_turned(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t M,
                     int64_t K, const Stack& y);

// Why products of bfloat16 (`half`) or float32 do not use the processor's matrix unit (AMX); empty
// where they do.
std::string why_no_amx(bool half);

// Where the last bits of numbers come from: the instruction set, and the unit where it is used.
std::string arithmetic();

}  // namespace tandem
