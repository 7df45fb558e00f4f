// The vectors of csrc/vec.h for tests/ops/test_vectors.py, each function on plain arrays.
#include "packing.h"
#include "sample.h"

using namespace tandem;

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

template <int N>
void load_rows(const float* from, v16 (&x)[N]) {
  for (int i = 0; i < N; ++i) x[i] = load(from + i * kLanes);
}
template <int N>
void store_rows(float* to, const v16 (&x)[N]) {
  for (int i = 0; i < N; ++i) store(to + i * kLanes, x[i]);
}

}  // namespace

EXPORTED int register_floats() { return kWide; }
EXPORTED void square_turned(const float* from, float* to) {
  v16 x[16];
  load_rows(from, x);
  transpose(x);
  store_rows(to, x);
}
EXPORTED void eights_turned(const float* from, float* to) {
  v16 x[8];
  load_rows(from, x);
  transpose_eights(x);
  store_rows(to, x);
}
EXPORTED void four_turned(const float* from, int64_t step, float* to) {
  v16 x[4];
  load_four_turned(from, step, x);
  store_rows(to, x);
}
EXPORTED void woven(const float* from, float* to) {
  v16 x[2];
  load_rows(from, x);
  interleave(x[0], x[1]);
  store_rows(to, x);
}
EXPORTED void unwoven(const float* from, float* to) {
  v16 x[2];
  load_rows(from, x);
  separate(x[0], x[1]);
  store_rows(to, x);
}
EXPORTED void swapped(const float* from, float* to) { store(to, fours_swapped(load(from))); }
EXPORTED void two_of(const float* from, float* to) { store(to, splat_two<6>(from)); }
EXPORTED void some(bool half, const void* from, int n, void* to) {
  if (half) {
    store(static_cast<bf16*>(to), load(static_cast<const bf16*>(from), n), n);
  } else {
    store(static_cast<float*>(to), load(static_cast<const float*>(from), n), n);
  }
}
EXPORTED void past_the_end(bool half, const void* from, int n, float* to) {
  store(to, half ? load(static_cast<const bf16*>(from), n) : load(static_cast<const float*>(from), n));
}
EXPORTED void narrowed(const float* from, bf16* to) { store(to, load(from)); }
EXPORTED void all_narrowed(const float* from, int n, bf16* to) { store_all(to, load(from), n); }
EXPORTED void widened(const bf16* from, float* to) { store(to, load(from)); }
EXPORTED void kept_bits(const bf16* from, bf16* to) { store_exact(to, load(from)); }
EXPORTED void pairs(const bf16* from, float* to) {
  v16 x[2];
  load_pairs(from, x[0], x[1]);
  store_rows(to, x);
}
EXPORTED void larger(const float* a, const float* b, float* to) { store(to, max(load(a), load(b))); }
EXPORTED void smaller(const float* a, const float* b, float* to) { store(to, min(load(a), load(b))); }
EXPORTED void first_of_a(const float* a, const float* b, int n, float* to) {
  store(to, select(lane_index() < n, load(a), load(b)));
}
EXPORTED void power(const float* from, float* to) { store(to, exp(load(from))); }
EXPORTED void bent(const float* from, float* to) { store(to, tanh(load(from))); }
EXPORTED float total(const float* from) { return sum(load(from)); }
EXPORTED float top(const float* from) { return max(load(from)); }
EXPORTED double total_as_doubles(const float* from) {
  const v16 x = load(from);
  return sum(as_double(lower(x)) + as_double(upper(x)));
}
