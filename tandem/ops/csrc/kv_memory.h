// What attention over KV memory may be asked: checks of tensors, for the operators and for the
// one-call decoder.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>

#include "attention.h"
#include "threads.h"

namespace tandem {

inline void check_memory(int64_t heads, int64_t key_width, int64_t value_width,
                         at::ScalarType dtype, const at::Tensor& keys, const at::Tensor& values,
                         const char* where) {
  TORCH_CHECK(keys.dim() == 4 && values.dim() == 4 && keys.is_contiguous() &&
                  values.is_contiguous() && keys.size(0) == values.size(0) &&
                  keys.size(1) == heads && values.size(1) == heads && keys.size(2) == key_width &&
                  keys.size(3) == kBlock && values.size(2) == kBlock &&
                  values.size(3) == value_width,
              where, " must get memory (blocks, Hkv, Dk, 16) and (blocks, Hkv, 16, Dv); got ",
              keys.sizes(), " and ", values.sizes(), ".");
  TORCH_CHECK(keys.scalar_type() == dtype && values.scalar_type() == dtype, where,
              " must get memory of the keys' dtype ", dtype, "; got ", keys.scalar_type(), ".");
}

inline void check_tables(const at::Tensor& tables, const char* where) {
  TORCH_CHECK(tables.dim() == 2 && tables.scalar_type() == at::kInt &&
                  (tables.stride(1) == 1 || tables.size(1) <= 1),
              where, " must get block_tables (n, max_blocks) int32; got ", tables.sizes(), " of ",
              tables.scalar_type(), ".");
}

// The blocks of one row's tokens from `first` on, of `blocks` that there are.
inline void check_blocks(const at::Tensor& tables, int64_t row, int64_t first, int64_t tokens,
                         int64_t blocks, const char* where) {
  const int32_t* table = tables.const_data_ptr<int32_t>() + row * tables.stride(0);
  TORCH_CHECK(blocks_of(tokens) <= tables.size(1), where, " must get a block for each of row ", row,
              "'s ", tokens, " tokens; got ", tables.size(1), " blocks.");
  for (int64_t j = first / kBlock; j < blocks_of(tokens); ++j) {
    TORCH_CHECK(table[j] >= 0 && table[j] < blocks, where, " must get blocks below ", blocks,
                "; got ", table[j], " in row ", row, ".");
  }
}

// One new token for each row of the tables, at these positions.
inline void check_decoding(const at::Tensor& tables, const at::Tensor& positions, int64_t rows,
                           const Kind& kind, int64_t blocks, const char* where) {
  TORCH_CHECK(positions.dim() == 1 && positions.size(0) == rows && tables.size(0) == rows &&
                  positions.scalar_type() == at::kLong && positions.is_contiguous(),
              where, " must get positions (n,) int64 and a table row for each; got ",
              positions.sizes(), " of ", positions.scalar_type(), ".");
  const int64_t* const at = positions.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i) {
    TORCH_CHECK(at[i] >= 0, "positions must not be negative; got ", at[i], " in row ", i, ".");
    check_blocks(tables, i, kind.first_key(at[i]), at[i] + 1, blocks, where);
  }
}

// Threads that decoding at these positions is worth: below about 10 us of work, waking them costs
// more than it saves.
inline int64_t decoding_threads(const int64_t* positions, int64_t rows, const Sizes& size) {
  int64_t tokens = 0;
  for (int64_t i = 0; i < rows; ++i) tokens += positions[i] + 1;
  const int64_t work = tokens * size.query_heads * (size.key_width + size.value_width);
  return work > (int64_t{1} << 20) ? num_threads() : 1;
}

}  // namespace tandem
