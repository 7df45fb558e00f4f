// Numbers in few bits, block by block: int8, int4 and NF4 codes, each block with its own scale
// (ops/blockwise.py says what they mean; its plain torch functions give the same bits).
#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "codes.h"
#include "threads.h"

namespace tandem {
namespace {

using at::Tensor;

// ---- one block to codes ----

template <int64_t kind>
constexpr float largest_code() {
  return kind == kInt8 ? 127.0f : kind == kInt4 ? 7.0f : 1.0f;
}

// Codes 0 to 15 of n units, one in a byte. The edges lie halfway between neighbours.
template <int64_t kind>
TANDEM_INLINE void nibbles(const float* units, uint8_t* to, int64_t n) {
  if constexpr (kind == kInt4) {
    for (int64_t i = 0; i < n; ++i) {
      const float q = std::min(std::max(std::rint(units[i]), -7.0f), 7.0f);
      to[i] = static_cast<uint8_t>(static_cast<int32_t>(q) + 8);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      int32_t index = 0;
      for (int k = 0; k < 15; ++k)
        index += units[i] > (kNF4Numbers[k + 1] + kNF4Numbers[k]) * 0.5f;
      to[i] = static_cast<uint8_t>(index);
    }
  }
}

template <int64_t kind, class T, class S>
void encode_block(const T* x, uint8_t* codes, S* scale_out, int64_t n) {
  alignas(64) float buffer[kMaxBlock];
  alignas(64) uint8_t small[kMaxBlock];
  widen_block(x, buffer, n);
  S scale(largest_magnitude(buffer, n) / largest_code<kind>());
  float wide = static_cast<float>(scale);
  if (!std::isfinite(wide)) {
    scale = S(std::numeric_limits<float>::quiet_NaN());
    wide = 0.0f;
  }
  *scale_out = scale;
  if (wide > 0.0f) {
    for (int64_t i = 0; i < n; ++i) buffer[i] = buffer[i] / wide;
  } else {
    std::fill_n(buffer, n, 0.0f);
  }
  if constexpr (kind == kInt8) {
    for (int64_t i = 0; i < n; ++i) {
      const float q = std::min(std::max(std::rint(buffer[i]), -127.0f), 127.0f);
      codes[i] = static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>(q)));
    }
  } else {
    if (n % 2) buffer[n] = 0.0f;  // the half byte behind the last: a zero
    nibbles<kind>(buffer, small, n + n % 2);
    for (int64_t i = 0; i < (n + 1) / 2; ++i)
      codes[i] = static_cast<uint8_t>(small[2 * i] | (small[2 * i + 1] << 4));
  }
}

// ---- all blocks ----

// Where the runs of a row begin, in numbers, bytes and blocks.
struct Runs {
  std::vector<int64_t> number, byte, block;
  int64_t size;

  Runs(at::IntArrayRef numels, int64_t block_size, int64_t kind) : size(block_size) {
    TORCH_CHECK(size % 2 == 0 && size > 0 && size <= kMaxBlock, "block must be even, to ",
                kMaxBlock, "; got ", size, ".");
    number = byte = block = {0};
    for (const int64_t n : numels) {
      number.push_back(number.back() + n);
      byte.push_back(byte.back() + (kind == kInt8 ? n : (n + 1) / 2));
      block.push_back(block.back() + (n + size - 1) / size);
    }
  }

  int64_t blocks() const { return block.back(); }

  // body(row, first number, first byte, block of the row, numbers) for every block of every row.
  template <class Body>
  void for_blocks(int64_t rows, int64_t per_byte, Body body) const {
    const int64_t each = blocks();
    parallel_for(0, rows * each, 1 + 32768 / size, [&](int64_t from, int64_t to) {
      int64_t row = from / each, b = from % each, run = 0;
      for (int64_t i = from; i < to; ++i) {
        while (b >= block[run + 1]) ++run;
        const int64_t inside = (b - block[run]) * size;
        const int64_t n = std::min(size, number[run + 1] - number[run] - inside);
        body(row, number[run] + inside, byte[run] + inside / per_byte, b, n);
        if (++b == each) {
          b = run = 0;
          ++row;
        }
      }
    });
  }
};

void check_rows(const Tensor& tensor, const char* name, int64_t dim, int64_t width) {
  TORCH_CHECK(tensor.dim() == dim && tensor.size(-1) == width &&
                  (width <= 1 || tensor.stride(-1) == 1 || !tensor.numel()),
              name, " must be ", dim, "-dimensional rows of ", width, " numbers one behind another");
}

// body(kind tag, scale type tag) for what is asked.
template <class Body>
void for_kind(int64_t kind, at::ScalarType scale, Body body) {
  TORCH_CHECK(scale == at::kFloat || scale == at::kBFloat16, "scales must be float32 or bfloat16");
  const auto with_scale = [&](auto tag) {
    scale == at::kFloat ? body(tag, float{}) : body(tag, bf16{});
  };
  switch (kind) {
    case kInt8: return with_scale(std::integral_constant<int64_t, kInt8>{});
    case kInt4: return with_scale(std::integral_constant<int64_t, kInt4>{});
    case kNF4: return with_scale(std::integral_constant<int64_t, kNF4>{});
    default: TORCH_CHECK(false, "kind must be 0 to 2; got ", kind, ".");
  }
}

template <class Body>
void for_numbers(at::ScalarType dtype, Body body) {
  switch (dtype) {
    case at::kFloat: return body(float{});
    case at::kBFloat16: return body(bf16{});
    case at::kHalf: return body(c10::Half{});
    default: TORCH_CHECK(false, "numbers must be float32, bfloat16 or float16; got ", dtype, ".");
  }
}

void quantize(const Tensor& x, Tensor& codes, Tensor& scales, int64_t kind, int64_t block,
              at::IntArrayRef numels) {
  const Runs runs(numels, block, kind);
  check_rows(x, "x", 2, runs.number.back());
  check_rows(codes, "codes", 2, runs.byte.back());
  check_rows(scales, "scales", 2, runs.blocks());
  if (x.numel() == 0) return;
  for_numbers(x.scalar_type(), [&](auto number) {
    for_kind(kind, scales.scalar_type(), [&](auto tag, auto scale) {
      using T = decltype(number);
      using S = decltype(scale);
      const T* from = x.const_data_ptr<T>();
      uint8_t* to = codes.mutable_data_ptr<uint8_t>();
      S* scale_to = scales.mutable_data_ptr<S>();
      const int64_t xs = x.stride(0), cs = codes.stride(0), ss = scales.stride(0);
      runs.for_blocks(x.size(0), kPerByte<tag.value>, [&](int64_t row, int64_t first,
                                                          int64_t byte, int64_t b, int64_t n) {
        encode_block<tag.value>(from + row * xs + first, to + row * cs + byte,
                                scale_to + row * ss + b, n);
      });
    });
  });
}

void dequantize(const Tensor& codes, const Tensor& scales, Tensor& out, int64_t kind,
                int64_t block, at::IntArrayRef numels) {
  const Runs runs(numels, block, kind);
  check_rows(codes, "codes", 3, runs.byte.back());
  check_rows(scales, "scales", 3, runs.blocks());
  check_rows(out, "out", 2, runs.number.back());
  if (out.numel() == 0) return;
  for_numbers(out.scalar_type(), [&](auto number) {
    for_kind(kind, scales.scalar_type(), [&](auto tag, auto scale) {
      using T = decltype(number);
      using S = decltype(scale);
      const uint8_t* from = codes.const_data_ptr<uint8_t>();
      const S* scale_from = scales.const_data_ptr<S>();
      T* to = out.mutable_data_ptr<T>();
      const int64_t os = out.stride(0), cs = codes.stride(1), ss = scales.stride(1);
      runs.for_blocks(out.size(0), kPerByte<tag.value>, [&](int64_t row, int64_t first,
                                                                int64_t byte, int64_t b, int64_t n) {
        decode_block<tag.value>(from + row * cs + byte, codes.stride(0), scale_from + row * ss + b,
                                scales.stride(0), codes.size(0), to + row * os + first, n);
      });
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("blockwise_quantize_(Tensor x, Tensor(a!) codes, Tensor(b!) scales, int kind, int block,"
        " int[] numels) -> ()");
  m.def("blockwise_dequantize_(Tensor codes, Tensor scales, Tensor(a!) out, int kind, int block,"
        " int[] numels) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("blockwise_quantize_", &quantize);
  m.impl("blockwise_dequantize_", &dequantize);
}

}  // namespace tandem
