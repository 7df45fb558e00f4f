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
  float sums[4][16][16];         // tiles 0 to 3
  uint32_t words[8][16][16];     // tiles 4 to 7
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
  for (int i = 0; i < 16; ++i) {
    void* const to = tile < 4 ? static_cast<void*>(unit.sums[tile][i]) : unit.words[tile][i];
    std::memcpy(to, from + i * stride, 64);
  }
}
inline void dot_tiles(int sum, int a, int b) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 16; ++j)
        for (int upper = 0; upper < 2; ++upper)
          unit.sums[sum][i][j] += half_of(unit.words[a][i][k], upper) *
                                  half_of(unit.words[b][k][j], upper);
}
inline void store_tile(int tile, float* to, int64_t stride) {
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * stride, unit.sums[tile][i], 64);
}
#define TANDEM_TILE_ZERO(t) std::memset(unit.sums[t], 0, sizeof unit.sums[t])
#define TANDEM_TILE_LOAD(t, from, stride) load_tile(t, from, stride)
#define TANDEM_TILE_DOT(t, a, b) dot_tiles(t, a, b)
#define TANDEM_TILE_STORE(t, to, stride) store_tile(t, to, stride)

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
#define TANDEM_TILE_STORE(t, to, stride) _tile_stored(t, to, (stride) * 4)

#endif

// Memory that will soon be read, fetched by and by: so many cache lines with every tile's words.
struct Ahead {
  const char* next = nullptr;
  int64_t lines = 0;

  void fetch() {
    for (int64_t i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// 16 R rows by 16 C columns of sums, `out_step` floats from row to row, over `words` of k; from where
// `before` left them, or from 0. Words past the last whole 16 lie in `tail`, padded with rows of 0.
template <int R, int C>
inline void block(const word* rows, int64_t row_step, const word* panel, const word* tail,
                  int64_t panel_step, int64_t words, const float* before, float* out,
                  int64_t out_step, Ahead& ahead) {
  const int64_t down = kSide * out_step;
  if (before) {
    TANDEM_TILE_LOAD(0, reinterpret_cast<const word*>(before), out_step);
    if constexpr (C > 1) TANDEM_TILE_LOAD(1, reinterpret_cast<const word*>(before + kSide), out_step);
    if constexpr (R > 1) TANDEM_TILE_LOAD(2, reinterpret_cast<const word*>(before + down), out_step);
    if constexpr (R > 1 && C > 1)
      TANDEM_TILE_LOAD(3, reinterpret_cast<const word*>(before + down + kSide), out_step);
  } else {
    TANDEM_TILE_ZERO(0);
    if constexpr (C > 1) TANDEM_TILE_ZERO(1);
    if constexpr (R > 1) TANDEM_TILE_ZERO(2);
    if constexpr (R > 1 && C > 1) TANDEM_TILE_ZERO(3);
  }
  for (int64_t k = 0; k < words; k += kSide) {
    ahead.fetch();
    const word* columns = k + kSide <= words ? panel + k * panel_step : tail;
    TANDEM_TILE_LOAD(4, rows + k, row_step);
    TANDEM_TILE_LOAD(6, columns, panel_step);
    if constexpr (C > 1) TANDEM_TILE_LOAD(7, columns + kSide, panel_step);
    if constexpr (R > 1) TANDEM_TILE_LOAD(5, rows + kSide * row_step + k, row_step);
    TANDEM_TILE_DOT(0, 4, 6);
    if constexpr (C > 1) TANDEM_TILE_DOT(1, 4, 7);
    if constexpr (R > 1) TANDEM_TILE_DOT(2, 5, 6);
    if constexpr (R > 1 && C > 1) TANDEM_TILE_DOT(3, 5, 7);
  }
  TANDEM_TILE_STORE(0, out, out_step);
  if constexpr (C > 1) TANDEM_TILE_STORE(1, out + kSide, out_step);
  if constexpr (R > 1) TANDEM_TILE_STORE(2, out + down, out_step);
  if constexpr (R > 1 && C > 1) TANDEM_TILE_STORE(3, out + down + kSide, out_step);
}

// M rows of words as whole tiles can be read from them: those before `whole`, a multiple of 32, where
// they lie, the others in a copy padded with 0 below and to the right.
struct Rows {
  const word* data;
  int64_t step, whole;
  const word* rest;
  int64_t rest_step;

  const word* at(int64_t m) const { return m < whole ? data + m * step : rest + (m - whole) * rest_step; }
  int64_t step_at(int64_t m) const { return m < whole ? step : rest_step; }
};

inline int64_t padded_words(int64_t words) { return round_up(words, kSide); }

// How many of M rows of K numbers, `stride` apart, can be read where they lie.
inline int64_t whole_rows(int64_t M, int64_t K, int64_t stride) {
  return K % (2 * kSide) == 0 && stride % 2 == 0 ? M / kBlock * kBlock : 0;
}

// Floats of the copy that `rows_of` makes of the others.
inline int64_t room_for_rows(int64_t M, int64_t K, int64_t stride) {
  return round_up(M - whole_rows(M, K, stride), kBlock) * padded_words(words_of<bf16>(K));
}

// Rows (M, K), `stride` numbers apart; `room` as `room_for_rows` says.
inline Rows rows_of(const bf16* x, int64_t stride, int64_t M, int64_t K, float* room) {
  const int64_t whole = whole_rows(M, K, stride), step = padded_words(words_of<bf16>(K));
  std::memset(room, 0, room_for_rows(M, K, stride) * sizeof(float));
  for (int64_t m = whole; m < M; ++m)
    std::memcpy(room + (m - whole) * step, x + m * stride, K * sizeof(bf16));
  return {reinterpret_cast<const word*>(x), stride / 2, whole,
          reinterpret_cast<const word*>(room), step};
}

// `words` of k, from word `from` on, of M rows by one panel of `lanes` columns in memory. Sums go on
// from `sums` (M rounded up to 32, kPanelSums) if `goes_on`, and are left there if `stops`; else
// finish(first row, first column, rows, columns, sums, floats from row to row) takes them, block by
// block, after fetch(first row, first column, rows), which may fetch what it will write. `next`, if
// given: a panel as large as this one that is read after it.
constexpr int64_t kPanelSums = 64;

template <class Fetch, class Finish>
void multiply_panel(const Rows& rows, int64_t M, int64_t from, int64_t words, const word* panel,
                    int64_t lanes, int64_t width, float* sums, bool goes_on, bool stops,
                    const word* next, Fetch fetch, Finish finish) {
  alignas(64) float tail[kSide * kPanelSums], out[kBlock * kBlock];
  const int64_t whole = words / kSide * kSide;
  if (whole < words) {
    std::memset(tail, 0, kSide * lanes * 4);
    std::memcpy(tail, panel + whole * lanes, (words - whole) * lanes * 4);
  }
  Ahead ahead;
  if (next) {
    const int64_t blocks = round_up(M, kBlock) / kBlock * (round_up(lanes, kBlock) / kBlock);
    const int64_t steps = blocks * (padded_words(words) / kSide);
    ahead = {reinterpret_cast<const char*>(next), (words * lanes * 4 / 64 + steps - 1) / steps};
  }
  for (int64_t m = 0; m < M; m += kBlock) {
    const word* const row = rows.at(m) + from;
    const int64_t step = rows.step_at(m), count = std::min(kBlock, M - m);
    for (int64_t c = 0; c < lanes; c += kBlock) {
      const word *columns = panel + c, *end = tail + c;
      const bool held = goes_on || stops;
      float* const to = held ? sums + m * kPanelSums + c : out;
      const int64_t to_step = held ? kPanelSums : kBlock;
      const float* const before = goes_on ? to : nullptr;
      const bool wide = lanes - c > kSide;
      if (!stops) fetch(m, c, count);
      if (count > kSide) {
        if (wide) {
          block<2, 2>(row, step, columns, end, lanes, words, before, to, to_step, ahead);
        } else {
          block<2, 1>(row, step, columns, end, lanes, words, before, to, to_step, ahead);
        }
      } else if (wide) {
        block<1, 2>(row, step, columns, end, lanes, words, before, to, to_step, ahead);
      } else {
        block<1, 1>(row, step, columns, end, lanes, words, before, to, to_step, ahead);
      }
      if (!stops) finish(m, c, count, std::min(kBlock, width - c), to, to_step);
    }
  }
}

}  // namespace tandem::amx
#endif
