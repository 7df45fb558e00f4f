// AdamW's moments rounded at random to 8 bits or bf16, and read back (parallel/moments.py says what
// the codes mean; its plain torch functions give the same bits).
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lanes.h"
#include "threads.h"

namespace tandem {
namespace {

using at::Tensor;

constexpr int64_t kMomentBlock = 256;  // elements of a row that share a scale
constexpr int32_t kDroppedBits = 20;   // mantissa bits of a float32 that a code leaves out
constexpr int32_t kOneBits = 127 << 3;  // the bits of 1.0 that remain
constexpr int32_t kLowestSigned = kOneBits - 127, kLowestUnsigned = kOneBits - 255;
constexpr int64_t kElementsOfThread = 16384;

template <class To, class From>
TANDEM_INLINE To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// 32 random bits of an element; the mixing is that of MurmurHash3.
TANDEM_INLINE uint32_t random_bits(uint32_t element, uint32_t key) {
  uint32_t x = element * 0x9E3779B1u + key;
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Codes of at most kMomentBlock values; their scale is the largest of them.
template <bool kSigned>
float encode_moments(const float* x, uint8_t* codes, int64_t n, uint32_t first, uint32_t key,
                     int shift) {
  const float scale = largest_magnitude(x, n);
  const float divisor = std::max(scale, std::numeric_limits<float>::min());
  const float smallest = bits_as<float>((kLowestSigned + 1) << kDroppedBits);
  for (int64_t i = 0; i < n; ++i) {
    const float size = std::fabs(x[i]) / divisor;
    const int32_t chance =
        static_cast<int32_t>(random_bits(first + static_cast<uint32_t>(i), key) >> shift & 0xFFFFu);
    int32_t code = (bits_as<int32_t>(size) + (chance << (kDroppedBits - 16))) >> kDroppedBits;
    if constexpr (kSigned) {
      const int32_t normal = std::min(std::max(code - kLowestSigned, 1), 127);
      // Below the smallest number: zero or that number.
      const int32_t small = static_cast<float>(chance) * (smallest / 65536.0f) < size;
      code = (size < smallest ? small : normal) + (x[i] < 0.0f ? 128 : 0);
    } else {
      code = std::min(std::max(code - kLowestUnsigned, 0), 255);
    }
    codes[i] = static_cast<uint8_t>(code);
  }
  return scale;
}

template <bool kSigned>
void decode_moments(const uint8_t* codes, float scale, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int32_t code = codes[i];
    int32_t bits = (code + kLowestUnsigned) << kDroppedBits;
    if constexpr (kSigned) {
      const int32_t magnitude = code & 127;
      bits = (magnitude ? (magnitude + kLowestSigned) << kDroppedBits : 0) | (code & 128) << 24;
    }
    to[i] = bits_as<float>(bits) * scale;
  }
}

void check_flat(const Tensor& tensor, const char* name, int64_t numel, at::ScalarType dtype) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == numel && tensor.scalar_type() == dtype,
              name, " must be ", numel, " contiguous numbers of ", dtype, "; got ", tensor.numel(),
              " of ", tensor.scalar_type(), ".");
}

// body(row, block of the row, its first element, elements) for every block of every row.
template <class Body>
void for_moment_blocks(int64_t numel, int64_t row_size, Body body) {
  const int64_t each = (row_size + kMomentBlock - 1) / kMomentBlock;
  parallel_for(0, numel / row_size * each, kElementsOfThread / kMomentBlock,
               [&](int64_t from, int64_t to) {
                 for (int64_t i = from; i < to; ++i) {
                   const int64_t begin = i % each * kMomentBlock;
                   body(i, i / each * row_size + begin, std::min(kMomentBlock, row_size - begin));
                 }
               });
}

int64_t num_moment_scales(int64_t numel, int64_t row_size) {
  TORCH_CHECK(row_size > 0 && numel % row_size == 0, "rows of ", row_size,
              " must divide the elements; got ", numel, ".");
  return numel / row_size * ((row_size + kMomentBlock - 1) / kMomentBlock);
}

void pack_8bit(const Tensor& values, Tensor& codes, Tensor& scales, int64_t row_size, int64_t first,
               int64_t key, int64_t shift, bool is_signed) {
  const int64_t numel = values.numel(), num_scales = num_moment_scales(numel, row_size);
  check_flat(values, "values", numel, at::kFloat);
  check_flat(codes, "codes", numel, at::kByte);
  check_flat(scales, "scales", num_scales, at::kFloat);
  const float* from = values.const_data_ptr<float>();
  uint8_t* to = codes.mutable_data_ptr<uint8_t>();
  float* scale_to = scales.mutable_data_ptr<float>();
  const auto encode = is_signed ? encode_moments<true> : encode_moments<false>;
  for_moment_blocks(numel, row_size, [&](int64_t block, int64_t at, int64_t n) {
    scale_to[block] = encode(from + at, to + at, n, static_cast<uint32_t>(first + at),
                             static_cast<uint32_t>(key), static_cast<int>(shift));
  });
}

void unpack_8bit(const Tensor& codes, const Tensor& scales, Tensor& out, int64_t row_size,
                 bool is_signed) {
  const int64_t numel = codes.numel(), num_scales = num_moment_scales(numel, row_size);
  check_flat(codes, "codes", numel, at::kByte);
  check_flat(scales, "scales", num_scales, at::kFloat);
  check_flat(out, "out", numel, at::kFloat);
  const uint8_t* from = codes.const_data_ptr<uint8_t>();
  const float* scale_from = scales.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const auto decode = is_signed ? decode_moments<true> : decode_moments<false>;
  for_moment_blocks(numel, row_size, [&](int64_t block, int64_t at, int64_t n) {
    decode(from + at, scale_from[block], to + at, n);
  });
}

void pack_bf16(const Tensor& values, Tensor& out, int64_t first, int64_t key, int64_t shift) {
  const int64_t numel = values.numel();
  check_flat(values, "values", numel, at::kFloat);
  check_flat(out, "out", numel, at::kBFloat16);
  const float* from = values.const_data_ptr<float>();
  auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  parallel_for(0, numel, kElementsOfThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t bits =
          random_bits(static_cast<uint32_t>(first + i), static_cast<uint32_t>(key));
      to[i] = static_cast<uint16_t>((bits_as<uint32_t>(from[i]) + (bits >> shift & 0xFFFFu)) >> 16);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("pack_8bit_(Tensor values, Tensor(a!) codes, Tensor(b!) scales, int row_size, int first,"
        " int key, int shift, bool is_signed) -> ()");
  m.def("unpack_8bit_(Tensor codes, Tensor scales, Tensor(a!) out, int row_size, bool is_signed)"
        " -> ()");
  m.def("pack_bf16_(Tensor values, Tensor(a!) out, int first, int key, int shift) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("pack_8bit_", &pack_8bit);
  m.impl("unpack_8bit_", &unpack_8bit);
  m.impl("pack_bf16_", &pack_bf16);
}

}  // namespace tandem
