// Products on the matrix unit (amx.h), with the signatures of gemm.h. Only for processes that may use
// it: `permitted` in amx.h.
#pragma once

#include "gemm.h"

namespace tandem::amx {

// Columns of a panel of a packed weight: as many as are multiplied at a time, so that it is read
// from first to last.
constexpr int64_t kPackedPanel = 32;

template <class T>
void pack(const Matrix<T>& m, int64_t N, int64_t K, float* out);

template <class T>
void multiply_packed(const T* x, int64_t x_stride, int64_t M, const float* packed, int64_t N,
                     int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue);

template <class T>
void multiply(const T* x, int64_t x_stride, int64_t M, const Matrix<T>& weight, int64_t N,
              int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue);

template <class T>
int64_t ready_size(int64_t N, int64_t K);

template <class T>
void make_ready(const Matrix<T>& weight, int64_t N, int64_t K, float* out);

template <class T>
void multiply_ready(const T* x, int64_t x_stride, int64_t M, const float* ready, int64_t N,
                    int64_t K, T* y, int64_t y_stride, const Epilogue<T>& epilogue);

// Into float32, without a rounding between.
template <class T>
void multiply_turned(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t M,
                     int64_t K, const Stack& y);

}  // namespace tandem::amx
