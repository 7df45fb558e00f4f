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

// A tensor as rows of `width` contiguous numbers; copied where its strides allow no such view.
struct RowsOf {
  at::Tensor held;
  int64_t count, width, stride;

  explicit RowsOf(const at::Tensor& x) : held(x.dim() == 2 ? x : x.reshape({-1, x.size(-1)})) {
    if (held.stride(1) != 1 && held.size(1) != 1) held = held.contiguous();
    count = held.size(0);
    width = held.size(1);
    stride = held.stride(0);
  }

  template <class T>
  T* data() const {
    return const_cast<T*>(held.const_data_ptr<T>());
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
