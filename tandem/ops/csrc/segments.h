// Segments of tokens as torch tensors name them, checked (see Segments in attention.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "attention.h"

namespace tandem {

inline void check_bounds(const at::Tensor& bounds, int64_t tokens, const char* where) {
  TORCH_CHECK(bounds.dim() == 1 && bounds.size(0) > 0 && bounds.scalar_type() == at::kInt &&
                  bounds.is_contiguous(),
              where, " must get cu_seqlens (B + 1,) int32; got ", bounds.sizes(), " of ",
              bounds.scalar_type(), ".");
  const int32_t* at = bounds.const_data_ptr<int32_t>();
  const int64_t count = bounds.size(0) - 1;
  TORCH_CHECK(at[0] == 0 && at[count] == tokens && std::is_sorted(at, at + count + 1), where,
              " must get cu_seqlens that rise from 0 to the number of tokens ", tokens, "; got ",
              at[0], " to ", at[count], ".");
}

// Which segment each continues, if any (see Segments).
inline std::optional<at::Tensor> checked_prefixes(const std::optional<at::Tensor>& prefixes,
                                                 int64_t segments, const char* where) {
  if (!prefixes || !prefixes->defined()) return std::nullopt;
  TORCH_CHECK(prefixes->dim() == 1 && prefixes->size(0) == segments &&
                  prefixes->scalar_type() == at::kInt && prefixes->is_contiguous(),
              where, " must get prefixes (", segments, ") int32; got ", prefixes->sizes(),
              " of ", prefixes->scalar_type(), ".");
  const int32_t* at = prefixes->const_data_ptr<int32_t>();
  for (int64_t b = 0; b < segments; ++b) {
    int64_t open = b - 1;  // the last segment, and what it continues
    while (open > at[b] && open >= 0) open = at[open];
    TORCH_CHECK(at[b] < 0 || open == at[b],
                "a continuation must stand directly after its sequence; got prefix ", at[b],
                " of segment ", b, ", which segment ", b - 1, " does not continue.");
  }
  return prefixes;
}

inline Segments segments_of(const at::Tensor& bounds, const std::optional<at::Tensor>& prefixes) {
  return {bounds.const_data_ptr<int32_t>(),
          prefixes ? prefixes->const_data_ptr<int32_t>() : nullptr, bounds.size(0) - 1};
}

}  // namespace tandem
