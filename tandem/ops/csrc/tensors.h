// What operators over rows share: types, rows of a tensor, loops over them, what a backward
// refuses.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "lanes.h"
#include "threads.h"

namespace tandem {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

// body(type tag) for float or bfloat16.
template <class Body>
void for_dtype(at::ScalarType dtype, const char* what, Body body) {
  if (dtype == at::kFloat) {
    body(float{});
  } else {
    TORCH_CHECK(dtype == at::kBFloat16, what, " must be float32 or bfloat16; got ", dtype, ".");
    body(bf16{});
  }
}

// Rows of numbers, `stride` apart; or those that `places` names, in its order.
template <class T>
struct Reading {
  const T* first;
  int64_t stride;
  const int64_t* places = nullptr;

  const T* row(int64_t i) const { return first + (places ? places[i] : i) * stride; }
  // Of rows that lie apart the processor does not foresee the next: ask for `width` numbers of it.
  void fetch(int64_t i, int64_t width) const {
    if (!places) return;
    const T* const numbers = row(i);
    for (int64_t d = 0; d < width; d += 64 / static_cast<int64_t>(sizeof(T)))
      __builtin_prefetch(numbers + d, 0, 2);
  }
  // The same from row m on.
  Reading from(int64_t m) const {
    return places ? Reading{first, stride, places + m} : Reading{first + m * stride, stride};
  }
};

// A tensor (..., width) as (count, width), where width may be 0.
inline at::Tensor as_rows(const at::Tensor& x) {
  if (x.dim() == 2) return x;
  int64_t count = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) count *= x.size(d);
  return x.reshape({count, x.size(-1)});
}

// A tensor as rows of `width` contiguous numbers, copied where its strides allow no such view; or
// those of its rows that `chosen` (count,) int64 names.
struct RowsOf {
  at::Tensor held, places;
  int64_t count, width, stride;

  explicit RowsOf(const at::Tensor& x, const OptionalTensor& chosen = {})
      : held(as_rows(x)) {
    if (held.stride(1) != 1 && held.size(1) != 1) held = held.contiguous();
    count = held.size(0);
    width = held.size(1);
    stride = held.stride(0);
    if (!chosen) return;
    TORCH_CHECK(chosen->dim() == 1 && chosen->scalar_type() == at::kLong && chosen->is_cpu(),
                "chosen rows must be (count,) int64; got ", chosen->sizes(), " ",
                chosen->scalar_type(), ".");
    places = chosen->contiguous();
    const int64_t* const at = places.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < places.numel(); ++i)
      TORCH_CHECK(at[i] >= 0 && at[i] < count, "a chosen row must be in [0, ", count, "); got ",
                  at[i], ".");
    count = places.numel();
  }

  template <class T>
  T* data() const {
    return const_cast<T*>(held.const_data_ptr<T>());
  }
  template <class T>
  Reading<T> reading() const {
    return {held.const_data_ptr<T>(), stride,
            places.defined() ? places.const_data_ptr<int64_t>() : nullptr};
  }
};

// body(from, to) over rows of about `numbers` numbers each, on threads where that is worth it.
template <class Body>
void for_rows(int64_t rows, int64_t numbers, Body body) {
  parallel_for(0, rows, 1 + 32768 / std::max<int64_t>(1, numbers), body);
}

inline void check_first_derivative(const char* what) {
  TORCH_CHECK(!at::GradMode::is_enabled(), what,
              " must be differentiated once; got create_graph=True. Use TANDEM_NATIVE=off.");
}

inline bool records(const at::Tensor& x) { return x.requires_grad() && at::GradMode::is_enabled(); }

}  // namespace tandem
