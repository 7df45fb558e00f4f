// A weight of codes (coded.h) from torch's tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "coded.h"

namespace tandem {

// A weight (N, K): `codes`, one run of them, and a scale for each `block` numbers; neither is
// copied.
inline Coded coded(const at::Tensor& codes, const at::Tensor& scales, int64_t kind, int64_t block,
                   int64_t N, int64_t K) {
  TORCH_CHECK(kind >= kInt8 && kind <= kNF4 && block > 0 && block <= kMaxBlock && block % 2 == 0,
              "a weight of codes must be of kind 0 to 2, its block even, to ", kMaxBlock, "; got ",
              kind, " and ", block, ".");
  const at::ScalarType type = scales.scalar_type();
  TORCH_CHECK(codes.scalar_type() == at::kByte && (type == at::kFloat || type == at::kBFloat16) &&
                  codes.is_contiguous() && scales.is_contiguous(),
              "a weight of codes must be contiguous uint8 and float32 or bfloat16 scales; got ",
              codes.scalar_type(), " and ", type, ".");
  const int64_t bytes = kind == kInt8 ? N * K : (N * K + 1) / 2;
  const int64_t blocks = (N * K + block - 1) / block;
  TORCH_CHECK(codes.numel() == bytes && scales.numel() == blocks, "a weight (", N, ", ", K,
              ") must have ", bytes, " bytes of codes and ", blocks, " scales; got ", codes.numel(),
              " and ", scales.numel(), ".");
  const Coded weight{codes.const_data_ptr<uint8_t>(), scales.const_data_ptr(),
                     type == at::kBFloat16, static_cast<Code>(kind), block};
  TORCH_CHECK(can_be_read(weight, K), "rows of half bytes must be of an even length; got ", K, ".");
  return weight;
}

}  // namespace tandem
