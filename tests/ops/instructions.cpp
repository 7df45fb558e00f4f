// What emulated_avx512.h writes out, each instruction on plain arrays, for
// tests/ops/test_emulated_instructions.py: built with the header and without.
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

template <class V>
V read(const void* from) {
  V x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
template <class V>
void write(void* to, V x) {
  std::memcpy(to, &x, sizeof x);
}

// The table is a part of the instruction: a function for each.
using Ternary = __m512i(const __m512i&, const __m512i&, const __m512i&);
template <int table>
__m512i by_table(const __m512i& a, const __m512i& b, const __m512i& c) {
  return _mm512_ternarylogic_epi32(a, b, c, table);
}
template <int... tables>
constexpr std::array<Ternary*, sizeof...(tables)> every_table(
    std::integer_sequence<int, tables...>) {
  return {by_table<tables>...};
}

}  // namespace

EXPORTED void load_some(int mask, const float* from, void* to) {
  write(to, _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from));
}
EXPORTED void store_some(int mask, const void* from, float* to) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>(mask), read<__m512>(from));
}
EXPORTED void load_some_halves(int mask, const void* from, void* to) {
  write(to, _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), from));
}
EXPORTED void store_some_halves(int mask, const void* from, void* to) {
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>(mask), read<__m256i>(from));
}
EXPORTED void larger(const void* a, const void* b, void* to) {
  write(to, _mm512_max_ps(read<__m512>(a), read<__m512>(b)));
}
EXPORTED void smaller(const void* a, const void* b, void* to) {
  write(to, _mm512_min_ps(read<__m512>(a), read<__m512>(b)));
}
EXPORTED void of_quarters(const char* from, void* to) {
  __m512 x = _mm512_castps128_ps512(read<__m128>(from));
  x = _mm512_insertf32x4(x, read<__m128>(from + 16), 1);
  x = _mm512_insertf32x4(x, read<__m128>(from + 32), 2);
  write(to, _mm512_insertf32x4(x, read<__m128>(from + 48), 3));
}
EXPORTED void looked_up(const void* places, const void* table, void* to) {
  write(to, _mm512_permutexvar_ps(read<__m512i>(places), read<__m512>(table)));
}
EXPORTED void signed_bytes(const void* from, void* to) {
  write(to, _mm512_cvtepi8_epi32(read<__m128i>(from)));
}
EXPORTED void bytes(const void* from, void* to) {
  write(to, _mm512_cvtepu8_epi32(read<__m128i>(from)));
}
EXPORTED void halves(const void* from, void* to) {
  write(to, _mm512_cvtepu16_epi32(read<__m256i>(from)));
}
EXPORTED void floats(const void* from, void* to) {
  write(to, _mm512_cvtepi32_ps(read<__m512i>(from)));
}
EXPORTED void lower_halves(const void* from, void* to) {
  write(to, _mm512_cvtepi32_epi16(read<__m512i>(from)));
}
EXPORTED void all(int x, void* to) { write(to, _mm512_set1_epi32(x)); }
EXPORTED void ternary(int table, const void* a, const void* b, const void* c, void* to) {
  static constexpr auto tables = every_table(std::make_integer_sequence<int, 256>());
  write(to, tables[static_cast<size_t>(table)](read<__m512i>(a), read<__m512i>(b),
                                               read<__m512i>(c)));
}
#if defined(__AVX512BF16__)
EXPORTED void narrow(const void* from, void* to) {
  write(to, _mm512_cvtneps_pbh(read<__m512>(from)));
}
EXPORTED void dot_pairs(const void* sums, const void* a, const void* b, void* to) {
  write(to, _mm512_dpbf16_ps(read<__m512>(sums), read<__m512bh>(a), read<__m512bh>(b)));
}
#endif
