// Loops over columns sixteen at a time, and the tail of a row as a shorter vector.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vec.h"

namespace tandem {

template <class T>
TANDEM_INLINE v16 load_lanes(const T* p, int lanes) {
  return lanes == kLanes ? load(p) : load(p, lanes);
}

template <class T>
TANDEM_INLINE void store_lanes(T* p, v16 v, int lanes) {
  if (lanes == kLanes) {
    store(p, v);
  } else {
    store(p, v, lanes);
  }
}

// The value that storing v as T and loading it again gives.
template <class T>
TANDEM_INLINE v16 rounded(v16 v) {
  if constexpr (std::is_same_v<T, bf16>) {
    return widen(narrow(v));
  } else {
    return v;
  }
}

// body(first column, lanes) over a row of `width` columns.
template <class Body>
TANDEM_INLINE void for_columns(int64_t width, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, kLanes);
  if (i < width) body(i, static_cast<int>(width - i));
}

// The largest |x|; an inf or a NaN is larger than any number, as the bits of floats are ordered.
TANDEM_INLINE float largest_magnitude(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t u;
    __builtin_memcpy(&u, x + i, sizeof u);
    largest = std::max(largest, u & 0x7FFFFFFFu);
  }
  float result;
  __builtin_memcpy(&result, &largest, sizeof result);
  return result;
}

}  // namespace tandem
