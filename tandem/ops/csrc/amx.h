// bfloat16 products on Intel's matrix unit (AMX), which sums 32 numbers of a row per instruction in an
// order of its own: on a processor that uses it, all bfloat16 products go through it.
//
// A row's sums depend on nothing but the row here too: k goes from first to last in steps of 16 pairs,
// whatever the rows beside it, and past the end of rows, columns and k everything is 0. It is used
// after `usable` has checked this on the processor itself, and that it is faster.
// TANDEM_EMULATE_AMX compiles the same code with the unit written out, for tests on any processor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gemm.h"

#if defined(TANDEM_EMULATE_AMX) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && \
                                    defined(__AVX512BF16__) && defined(__linux__))
#define TANDEM_AMX 1
#endif

#if defined(TANDEM_AMX)
#if !defined(TANDEM_EMULATE_AMX)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tandem::amx {

constexpr int64_t kSide = 16;        // rows of a tile; words (pairs of bfloat16) of its rows
constexpr int64_t kBlock = 2 * kSide;  // rows and columns of four tiles of sums

typedef float word __attribute__((may_alias, aligned(2)));

#if defined(TANDEM_EMULATE_AMX)

struct Unit {
  float sums[8][16][16];
  uint32_t words[8][16][16];
};
inline thread_local Unit unit;

inline bool permitted() { return true; }
struct Session {};
inline float half_of(uint32_t pair, int upper) {
  const uint32_t bits = upper ? pair & 0xFFFF0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void load_tile(int tile, const word* from, int64_t stride) {
  for (int i = 0; i < 16; ++i) std::memcpy(unit.words[tile][i], from + i * stride, 64);
}
inline void dot_tiles(int sum, int a, int b) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 16; ++j)
        for (int upper = 0; upper < 2; ++upper)
          unit.sums[sum][i][j] += half_of(unit.words[a][i][k], upper) *
                                  half_of(unit.words[b][k][j], upper);
}
inline void store_tile(int tile, float* to) {
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * kBlock, unit.sums[tile][i], 64);
}
#define TANDEM_TILE_ZERO(t) std::memset(unit.sums[t], 0, sizeof unit.sums[t])
#define TANDEM_TILE_LOAD(t, from, stride) load_tile(t, from, stride)
#define TANDEM_TILE_DOT(t, a, b) dot_tiles(t, a, b)
#define TANDEM_TILE_STORE(t, to) store_tile(t, to)

#else

// Linux gives the unit's registers to a process that asks for them.
inline bool permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Eight tiles of 16 rows of 64 bytes, while it lives, on this thread.
struct Session {
  Session() {
    struct alignas(64) Config {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = 16;
    _tile_loadconfig(&config);
  }
  ~Session() { _tile_release(); }
};
#define TANDEM_TILE_ZERO(t) _tile_zero(t)
#define TANDEM_TILE_LOAD(t, from, stride) _tile_loadd(t, from, (stride) * 4)
#define TANDEM_TILE_DOT(t, a, b) _tile_dpbf16ps(t, a, b)
#define TANDEM_TILE_STORE(t, to) _tile_stored(t, to, kBlock * 4)

#endif

// out (32, 32) = 32 rows by 32 columns of a panel; `words`, all but the last `rest` of which lie in
// `panel` and the others, padded with rows of 0, in `tail`. `second`: from one 16 columns to the next.
inline void block(const word* rows, int64_t row_stride, const word* panel, const word* tail,
                  int64_t panel_step, int64_t words, int64_t second, float* out) {
  TANDEM_TILE_ZERO(0);
  TANDEM_TILE_ZERO(1);
  TANDEM_TILE_ZERO(2);
  TANDEM_TILE_ZERO(3);
  for (int64_t k = 0; k < words; k += kSide) {
    const word* columns = k + kSide <= words ? panel + k * panel_step : tail;
    TANDEM_TILE_LOAD(4, rows + k, row_stride);
    TANDEM_TILE_LOAD(5, rows + kSide * row_stride + k, row_stride);
    TANDEM_TILE_LOAD(6, columns, panel_step);
    TANDEM_TILE_LOAD(7, columns + second, panel_step);
    TANDEM_TILE_DOT(0, 4, 6);
    TANDEM_TILE_DOT(1, 4, 7);
    TANDEM_TILE_DOT(2, 5, 6);
    TANDEM_TILE_DOT(3, 5, 7);
  }
  TANDEM_TILE_STORE(0, out);
  TANDEM_TILE_STORE(1, out + kSide);
  TANDEM_TILE_STORE(2, out + kSide * kBlock);
  TANDEM_TILE_STORE(3, out + kSide * kBlock + kSide);
}

// Rows of x, `stride` words apart, as whole tiles: padded with 0 below and to the right.
inline int64_t padded_words(int64_t words) { return round_up(words, kSide); }
inline int64_t padded_rows(int64_t M) { return round_up(M, kBlock); }

inline void pad_rows(const bf16* x, int64_t x_stride, int64_t M, int64_t K, float* out) {
  const int64_t stride = padded_words(words_of<bf16>(K));
  std::memset(out, 0, padded_rows(M) * stride * 4);
  for (int64_t m = 0; m < M; ++m) std::memcpy(out + m * stride, x + m * x_stride, K * sizeof(bf16));
}

// sum(row, column, 16 sums, lanes) for all rows by one panel of `width` columns in memory `lanes`
// apart; rows as `pad_rows` left them.
template <class Finish>
void multiply_panel(const word* rows, int64_t M, const word* panel, int64_t lanes, int64_t width,
                    int64_t words, Finish finish) {
  alignas(64) float tail[kSide * 64], out[kBlock * kBlock];
  const int64_t stride = padded_words(words), whole = words / kSide * kSide;
  std::memset(tail, 0, kSide * lanes * 4);
  std::memcpy(tail, panel + whole * lanes, (words - whole) * lanes * 4);
  for (int64_t m = 0; m < M; m += kBlock)
    for (int64_t c = 0; c < width; c += kBlock) {
      const int64_t second = c + kSide < lanes ? kSide : 0;  // a panel may end after 16 columns
      block(rows + m * stride, stride, panel + c, tail + c, lanes, words, second, out);
      for (int64_t r = 0; r < std::min(kBlock, M - m); ++r)
        for (int64_t n = c; n < std::min(c + kBlock, width); n += kLanes)
          finish(m + r, n, load(out + r * kBlock + n - c),
                 static_cast<int>(std::min<int64_t>(kLanes, width - n)));
    }
}

}  // namespace tandem::amx
#endif
