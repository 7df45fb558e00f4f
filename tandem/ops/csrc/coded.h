// Products by weights that stay codes (codes.h): some rows of the weight at a time are read into
// the second cache and multiplied there, so that no copy of the weight is written to memory. The
// numbers are those of the product by the whole weight, read first, to the bit: every output is
// summed by itself, in gemm.h's order.
#pragma once

#include <cstdint>

#include "codes.h"
#include "gemm.h"

namespace tandem {

// A weight (N, K) as one run of codes, row after row; blocks may reach over the ends of rows.
struct Coded {
  const uint8_t* codes;
  const void* scales;  // float32, or bfloat16
  bool half_scales;
  Code kind;
  int64_t block;
};

// Whether rows of K numbers can be read one by one: each must start a byte.
constexpr bool can_be_read(const Coded& weight, int64_t K) {
  return weight.kind == kInt8 || K % 2 == 0;
}

// y (M, N) = x (M, K) by a weight of codes, each of its numbers rounded to T; can_be_read, K > 0.
// Rows of x are `x_stride` apart.
template <class T>
void multiply_coded(const T* x, int64_t x_stride, int64_t M, const Coded& weight, int64_t N,
                    int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue);

}  // namespace tandem
