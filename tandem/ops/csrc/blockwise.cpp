// Numbers in few bits, block by block: int8, int4 and NF4 codes, each block with its own scale
// (ops/blockwise.py says what they mean; its plain torch functions give the same bits).
#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "threads.h"

namespace tandem {
namespace {

using at::Tensor;

constexpr int64_t kMaxBlock = 4096;
enum Code : int64_t { kInt8 = 0, kInt4 = 1, kNF4 = 2 };

// The table of QLoRA, appendix E; the same numbers stand in ops/blockwise.py.
constexpr std::array<float, 16> kNF4Numbers = {
    -1.0f,                -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f,  0.7229568362236023f,  1.0f};

// ---- floats to and from a buffer ----

template <class T>
TANDEM_INLINE void widen_block(const T* x, float* to, int64_t n) {
  for_columns(n, [&](int64_t i, int lanes) { store_lanes(to + i, load_lanes(x + i, lanes), lanes); });
}
template <>
TANDEM_INLINE void widen_block(const c10::Half* x, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(x[i]);
}

template <class T>
TANDEM_INLINE void narrow_block(const float* x, T* to, int64_t n) {
  for_columns(n, [&](int64_t i, int lanes) { store_lanes(to + i, load_lanes(x + i, lanes), lanes); });
}
template <>
TANDEM_INLINE void narrow_block(const float* x, c10::Half* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = c10::Half(x[i]);
}

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

// ---- one block from codes ----

// What every byte stands for, two numbers of NF4.
const std::array<std::array<float, 2>, 256>& nf4_pairs() {
  static const auto pairs = [] {
    std::array<std::array<float, 2>, 256> all{};
    for (int i = 0; i < 256; ++i) all[i] = {kNF4Numbers[i & 15], kNF4Numbers[i >> 4]};
    return all;
  }();
  return pairs;
}

// Code numbers without their scale; writes n + 1 where n is odd.
template <int64_t kind>
TANDEM_INLINE void numbers_of(const uint8_t* codes, float* to, int64_t n) {
  if constexpr (kind == kInt8) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(static_cast<int8_t>(codes[i]));
  } else if constexpr (kind == kInt4) {
    for (int64_t i = 0; i < (n + 1) / 2; ++i) {
      to[2 * i] = static_cast<float>(static_cast<int32_t>(codes[i] & 15) - 8);
      to[2 * i + 1] = static_cast<float>(static_cast<int32_t>(codes[i] >> 4) - 8);
    }
  } else {
    const auto& pairs = nf4_pairs();
    for (int64_t i = 0; i < (n + 1) / 2; ++i)
      __builtin_memcpy(to + 2 * i, pairs[codes[i]].data(), 2 * sizeof(float));
  }
}

// ---- sixteen codes at a time, where a table of sixteen numbers fits registers ----

#if defined(__AVX512F__) || defined(__AVX2__)
#define TANDEM_SIXTEEN_CODES 1

// Sixteen half bytes as bytes, the lower half of each first.
TANDEM_INLINE __m128i half_bytes(const uint8_t* codes) {
  const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i low = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low));
}

#if defined(__AVX512F__)
template <int64_t kind>
TANDEM_INLINE v16 sixteen_numbers(const uint8_t* codes) {
  if constexpr (kind == kInt8) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return reinterpret_cast<v16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(all)));
  } else {
    const __m512i all = _mm512_cvtepu8_epi32(half_bytes(codes));
    if constexpr (kind == kInt4)
      return reinterpret_cast<v16>(_mm512_cvtepi32_ps(_mm512_sub_epi32(all, _mm512_set1_epi32(8))));
    else
      return reinterpret_cast<v16>(
          _mm512_permutexvar_ps(all, _mm512_loadu_ps(kNF4Numbers.data())));
  }
}
#else
template <int64_t kind>
TANDEM_INLINE v8 eight_numbers(__m128i codes) {  // the lower eight bytes
  if constexpr (kind == kInt8) {
    return reinterpret_cast<v8>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)));
  } else {
    const __m256i all = _mm256_cvtepu8_epi32(codes);
    if constexpr (kind == kInt4) {
      const __m256i signed_ = _mm256_sub_epi32(all, _mm256_set1_epi32(8));
      return reinterpret_cast<v8>(_mm256_cvtepi32_ps(signed_));
    } else {  // a permutation looks at three bits; the fourth chooses between two of them
      const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kNF4Numbers.data()), all);
      const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kNF4Numbers.data() + 8), all);
      const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(all, 28));
      return reinterpret_cast<v8>(_mm256_blendv_ps(low, high, fourth));
    }
  }
}
template <int64_t kind>
TANDEM_INLINE v16 sixteen_numbers(const uint8_t* codes) {
  const __m128i all = kind == kInt8 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))
                                    : half_bytes(codes);
  return {eight_numbers<kind>(all), eight_numbers<kind>(_mm_srli_si128(all, 8))};
}
#endif

// Whole sixteens of one block's n numbers; returns how many.
template <int64_t kind, class T>
TANDEM_INLINE int64_t decode_sixteens(const uint8_t* codes, float scale, T* out, int64_t n) {
  constexpr int64_t per_byte = kind == kInt8 ? 1 : 2;
  const v16 scales = splat(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(out + i, sixteen_numbers<kind>(codes + i / per_byte) * scales);
  return i;
}
#endif

template <int64_t kind, class T, class S>
void decode_block(const uint8_t* codes, int64_t code_stride, const S* scales, int64_t scale_stride,
                  int64_t parts, T* out, int64_t n) {
#ifdef TANDEM_SIXTEEN_CODES
  if constexpr (!std::is_same_v<T, c10::Half>) {
    if (parts == 1) {
      const int64_t done = decode_sixteens<kind>(codes, static_cast<float>(*scales), out, n);
      codes += done / (kind == kInt8 ? 1 : 2);
      out += done;
      n -= done;
      if (n == 0) return;
    }
  }
#endif
  alignas(64) float numbers[kMaxBlock + 2], total[kMaxBlock];
  for (int64_t part = 0; part < parts; ++part) {
    numbers_of<kind>(codes + part * code_stride, numbers, n);
    const float scale = static_cast<float>(scales[part * scale_stride]);
    if (part == 0) {
      for (int64_t i = 0; i < n; ++i) total[i] = numbers[i] * scale;
    } else {
      for (int64_t i = 0; i < n; ++i) total[i] += numbers[i] * scale;
    }
  }
  narrow_block(total, out, n);
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
                  (width <= 1 || tensor.stride(-1) == 1),
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
      runs.for_blocks(x.size(0), kind == kInt8 ? 1 : 2, [&](int64_t row, int64_t first,
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
      runs.for_blocks(out.size(0), kind == kInt8 ? 1 : 2, [&](int64_t row, int64_t first,
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
