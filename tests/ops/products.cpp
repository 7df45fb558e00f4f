// The products of csrc/gemm.h for tests/ops/test_variants.py: without torch, so that they are built
// in seconds for any processor.
#include "coded.h"
#include "gemm.h"

using namespace tandem;

#if defined(EXPECT_AMX) && !(defined(__AMX_BF16__) && defined(__AVX512BF16__))
#error "this processor was to have AMX and AVX512_BF16"
#endif
static_assert(packed_size<float>(70, 33) == 80 * 33);
static_assert(packed_size<bf16>(70, 33) ==
              (kPairs ? 80 * 17 : 80 * 33 * int64_t{sizeof(Kept<bf16>)} / 4));

namespace {

template <class T>
void products(const T* x, int64_t M, const T* w, const T* bias, const T* residual, int64_t N,
              int64_t K, T* y, float* packed, int ahead) {
  const Epilogue<T> epilogue{bias, residual, N};
  const Matrix<T> weight{w, K, 1};
  if (ahead == 2) {
    make_ready(weight, N, K, packed);
    multiply_ready(x, K, M, packed, N, K, y, N, epilogue);
  } else if (ahead) {
    pack(weight, N, K, packed);
    multiply_packed(x, K, M, packed, N, K, y, N, epilogue);
  } else {
    multiply(x, K, M, weight, N, K, y, N, epilogue);
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int64_t packed_floats(bool half, int64_t N, int64_t K, int ahead) {
  if (ahead == 2) return half ? ready_size<bf16>(N, K) : ready_size<float>(N, K);
  return half ? packed_size<bf16>(N, K) : packed_size<float>(N, K);
}
EXPORTED bool in_pairs() { return kPairs; }
EXPORTED bool uses_amx(bool half) { return why_no_amx(half).empty(); }
EXPORTED void product(bool half, const void* x, int64_t M, const void* w, const void* bias,
                      const void* residual, int64_t N, int64_t K, void* y, float* packed,
                      int ahead) {  // 1: packed, 2: made ready
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    products(static_cast<const T*>(x), M, static_cast<const T*>(w), static_cast<const T*>(bias),
             static_cast<const T*>(residual), N, K, static_cast<T*>(y), packed, ahead);
  };
  half ? run(bf16{}) : run(float{});
}
// The same by a weight of codes, `half_scales` saying of which type its scales are.
EXPORTED void coded(bool half, const void* x, int64_t M, const uint8_t* codes, const void* scales,
                    bool half_scales, int64_t kind, int64_t block, const void* bias, int64_t N,
                    int64_t K, void* y) {
  const Coded weight{codes, scales, half_scales, static_cast<Code>(kind), block};
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    multiply_coded(static_cast<const T*>(x), K, M, weight, N, K, static_cast<T*>(y), N,
                   Epilogue<T>{static_cast<const T*>(bias)});
  };
  half ? run(bf16{}) : run(float{});
}
// y: so many matrices, one after another, of so many rows each: N in all.
EXPORTED void turned(bool half, const void* a, const void* b, int64_t M, int64_t N, int64_t K, float* y,
                     bool adds, const int64_t* rows, int pieces) {
  Stack stack;
  for (int i = 0; i < pieces; ++i, y += rows[i - 1] * K) stack.push(y, rows[i], adds);
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    multiply_turned(static_cast<const T*>(a), N, static_cast<const T*>(b), K, M, K, stack);
  };
  half ? run(bf16{}) : run(float{});
}
