// Intel's matrix unit (AMX): tiles of 16 rows of 16 words, and blocks of sums made of them.
//
// One instruction multiplies 16 rows of 32 bfloat16 by 16 columns of 32 and adds to 16 x 16 sums,
// in an order of its own. A row's sums depend on nothing but the row here too: k goes from first to
// last in steps of 32 numbers, whatever the rows beside it, and past the end of rows, columns and k
// everything is 0. TANDEM_EMULATE_AMX compiles the same code with the unit written out, for tests
// on any processor.
//
// float32 numbers go through it in three parts, each a bfloat16: x = x0 + x1 + x2 exactly, as 3
// times 8 bits hold the 24 of a float. Of the nine products of parts six are made; the others, x1
// w2, x2 w1 and x2 w2, are below 2^-24 of the product, less than a float's own rounding (G. Henry,
// P. Tang, A. Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
// Higher-Precision Computations", 2019). Parts below 2^-126 count as 0, and what rounds to an
// infinity, from 3.396e38 on, becomes a NaN.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "packing.h"

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

constexpr int64_t kSide = 16;             // rows of a tile; words (pairs of bfloat16) of its rows
constexpr int64_t kStep = 2 * kSide;      // numbers of k that a tile holds
constexpr int64_t kTile = kSide * kSide;  // words of a tile

// In how many parts a number goes through the unit.
template <class T>
constexpr int kParts = std::is_same_v<T, bf16> ? 1 : 3;

#if defined(TANDEM_EMULATE_AMX)

struct Unit {
  word tiles[8][16][16];
};
inline thread_local Unit unit;

inline bool permitted() { return true; }
struct Session {
  explicit Session(int64_t) {}
};
inline float half_of(word pair, int upper) {
  uint32_t bits;
  std::memcpy(&bits, &pair, 4);
  bits = upper ? bits & 0xFFFF0000u : bits << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void load_tile(int tile, const word* from, int64_t stride) {
  for (int i = 0; i < 16; ++i) std::memcpy(unit.tiles[tile][i], from + i * stride, 64);
}
// As Intel states it: the sums of the lower and of the upper halves' products, then both, then
// added.
inline void dot_tiles(int sum, int a, int b) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      float made[2] = {};
      for (int k = 0; k < 16; ++k)
        for (int upper = 0; upper < 2; ++upper)
          made[upper] += half_of(unit.tiles[a][i][k], upper) * half_of(unit.tiles[b][k][j], upper);
      unit.tiles[sum][i][j] += made[0] + made[1];
    }
}
inline void store_tile(int tile, float* to, int64_t stride) {
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * stride, unit.tiles[tile][i], 64);
}
// To the line in which `to` lies: elsewhere than at its beginning the processor would fault.
inline void store_past(bf16* to, const float* from) {
  to = reinterpret_cast<bf16*>(reinterpret_cast<uintptr_t>(to) / 64 * 64);
  store(to, load(from));
  store(to + kLanes, load(from + kLanes));
}
#define TANDEM_TILE_ZERO(t) std::memset(unit.tiles[t], 0, sizeof unit.tiles[t])
#define TANDEM_TILE_LOAD(t, from, stride) load_tile(t, from, stride)
#define TANDEM_TILE_PASS(t, from, stride) load_tile(t, from, stride)
#define TANDEM_TILE_DOT(t, a, b) dot_tiles(t, a, b)
#define TANDEM_TILE_STORE(t, to, stride) store_tile(t, to, stride)

#else

// Linux gives the unit's registers to a process that asks for them.
inline bool permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Eight tiles of rows of 64 bytes, while it lives, on this thread: 16 rows, of rows' tiles and sums
// (tiles 0 to 5) only `rows` where a product has fewer, which takes less time.
struct Session {
  explicit Session(int64_t rows) {
    const uint8_t some = static_cast<uint8_t>(std::min(kSide, rows));
    struct alignas(64) Config {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = t < 6 ? some : 16;
    // The compiler's own function lets it believe that the first 8 bytes are all that is read.
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Session() {
    _tile_release();
    _mm_sfence();  // what went past the caches is there for other threads
  }
};
// A line of 64 bytes of y, past the caches; `to` is a multiple of 64.
inline void store_past(bf16* to, const float* from) {
  const __m512bh line = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(line));
}
#define TANDEM_TILE_ZERO(t) _tile_zero(t)
#define TANDEM_TILE_LOAD(t, from, stride) _tile_loadd(t, from, (stride) * 4)
// The same, without a place in the first cache, which keeps what is used again instead.
#define TANDEM_TILE_PASS(t, from, stride) _tile_stream_loadd(t, from, (stride) * 4)
#define TANDEM_TILE_DOT(t, a, b) _tile_dpbf16ps(t, a, b)
#define TANDEM_TILE_STORE(t, to, stride) _tile_stored(t, to, (stride) * 4)

#endif

// The compiler does not know that tiles are memory: what was stored before is there, and what is read
// after is read from there.
#define TANDEM_TILE_FENCE() asm volatile("" ::: "memory")

// A block of a product: rows from m and columns from n on.
struct Area {
  int64_t m = 0, n = 0, rows = 0, columns = 0;
};

// A block's sums, kPanel floats from row to row, which `finish` takes to y line by line.
struct Unfinished {
  void (*finish)(const void* done, const Area& area, const float* sums, int64_t from,
                 int64_t to) = nullptr;
  const void* done = nullptr;
  Area area;
  const float* sums = nullptr;
  int64_t next = 0, lines = 0;

  void some(int64_t count) {
    const int64_t from = next;
    next = std::min(lines, from + count);
    finish(done, area, sums, from, next);
  }
};

// Work done between the unit's instructions, which leave the rest of the core free: finishing the
// block before, fetching what will be written, and making tiles that are multiplied later.
struct Meanwhile {
  // Sums of this block and of the one before, in turns.
  alignas(64) float kept[2][3 * kSide * kPanel];
  int64_t turn = 0;
  Unfinished late;

  const char* target = nullptr;  // lines of 64 bytes: `lines` of each of `rows` rows, `row` bytes apart
  int64_t row = 0, rows = 0, lines = 0, per_step = 0;

  void (*make)(void* what) = nullptr;
  void* what = nullptr;
  int64_t left = 0;  // pieces
  int64_t share = 0, owed = 0;  // of a piece with every turn, in 1 / 65536

  // Rows of y that will be written, or none.
  template <class T>
  void fetch_rows(const T* y, int64_t stride, int64_t count, int64_t columns) {
    target = reinterpret_cast<const char*>(y);
    row = stride * static_cast<int64_t>(sizeof(T));
    rows = count;
    lines = (columns * static_cast<int64_t>(sizeof(T)) + 63) / 64;
  }
  void step() {
    if (late.next < late.lines) late.some(per_step);
    for (int64_t i = std::min(per_step, rows); i > 0; --i, --rows, target += row)
      for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(target + 64 * line, 1, 3);
  }
  void work(int64_t) {
    for (owed += share; owed >= 65536 && left; owed -= 65536, --left) make(what);
  }
  void make_rest() {
    for (; left; --left) make(what);
    owed = 0;
  }
  void finish_rest() {
    if (late.next < late.lines) late.some(late.lines);
  }
};

// Where tiles lie, in words: from one to the tile beside it and to the next of k, and from row to
// row of a tile. Parts of the same numbers follow one another.
struct Tiles {
  const word* data;
  int64_t beside, deeper, row;
};

// Where a block's sums start, or null for 0, and where they go; floats from row to row.
struct Sums {
  const float* before;
  int64_t before_row;
  float* after;
  int64_t after_row;
};

#define TANDEM_FACTOR(side, t, from, row)                                 \
  if constexpr (S == Side::side) { TANDEM_TILE_PASS(t, from, row); }      \
  else { TANDEM_TILE_LOAD(t, from, row); }
#define TANDEM_LEFT(part)                                                 \
  TANDEM_FACTOR(left, 4, a + (part) * kTile, left.row)                    \
  if constexpr (R > 1) {                                                  \
    TANDEM_FACTOR(left, 5, a + left.beside + (part) * kTile, left.row)    \
  }
#define TANDEM_RIGHT(part)                                                \
  if constexpr (R > 1 || C < 3) {                                         \
    TANDEM_FACTOR(right, 6, b + (part) * kTile, right.row)                \
    if constexpr (C > 1) {                                                \
      TANDEM_FACTOR(right, 7, b + right.beside + (part) * kTile, right.row)\
    }                                                                     \
  }
// Half of a turn's other work stands between its products, and half after them: the core looks some
// 500 operations ahead, and must find products among them.
#define TANDEM_DOTS(part, turn, work)                                        \
  if constexpr (R > 1 || C < 3) {                                            \
    TANDEM_TILE_DOT(0, 4, 6);                                                \
    if constexpr (C > 1) TANDEM_TILE_DOT(1, 4, 7);                           \
    work(2 * (turn));                                                        \
    if constexpr (R > 1) TANDEM_TILE_DOT(2, 5, 6);                           \
    if constexpr (R > 1 && C > 1) TANDEM_TILE_DOT(3, 5, 7);                  \
  } else {                                                                   \
    TANDEM_TILE_LOAD(6, b + (part) * kTile, right.row);                      \
    TANDEM_TILE_DOT(0, 4, 6);                                                \
    TANDEM_TILE_LOAD(7, b + right.beside + (part) * kTile, right.row);       \
    TANDEM_TILE_DOT(1, 4, 7);                                                \
    work(2 * (turn));                                                        \
    TANDEM_TILE_LOAD(6, b + 2 * right.beside + (part) * kTile, right.row);   \
    TANDEM_TILE_DOT(2, 4, 6);                                                \
    if constexpr (C > 3) {                                                   \
      TANDEM_TILE_LOAD(7, b + 3 * right.beside + (part) * kTile, right.row); \
      TANDEM_TILE_DOT(3, 4, 7);                                              \
    }                                                                        \
  }                                                                          \
  work(2 * (turn) + 1);

// Calls of `work` in a step of k.
template <int P>
constexpr int64_t kTurns = P > 1 ? 12 : 2;

// One step of k. Of the six products of parts every two neighbours share a factor, which stays
// loaded.
#define TANDEM_STEP(work)    \
  TANDEM_TILE_FENCE();       \
  if constexpr (P == 1) {    \
    TANDEM_LEFT(0);          \
    TANDEM_RIGHT(0);         \
    TANDEM_DOTS(0, 0, work); \
  } else {                   \
    TANDEM_LEFT(1);          \
    TANDEM_RIGHT(1);         \
    TANDEM_DOTS(1, 0, work); \
    TANDEM_RIGHT(0);         \
    TANDEM_DOTS(0, 1, work); \
    TANDEM_LEFT(2);          \
    TANDEM_DOTS(0, 2, work); \
    TANDEM_LEFT(0);          \
    TANDEM_DOTS(0, 3, work); \
    TANDEM_RIGHT(1);         \
    TANDEM_DOTS(1, 4, work); \
    TANDEM_RIGHT(2);         \
    TANDEM_DOTS(2, 5, work); \
  }

// The same of three tiles of rows, whose sums take six tiles and leave one for either factor: every
// product but the first goes on with the last one's left or right tile.
#define TANDEM_TALL_LEFT(r, part) TANDEM_TILE_LOAD(6, a + (r)*left.beside + (part) * kTile, left.row)
#define TANDEM_TALL_RIGHT(c, part) \
  TANDEM_TILE_LOAD(7, b + (c)*right.beside + (part) * kTile, right.row)
#define TANDEM_TALL_DOTS(l, r, turn, work)   \
  TANDEM_TALL_LEFT(0, l);                    \
  TANDEM_TALL_RIGHT(0, r);                   \
  TANDEM_TILE_DOT(0, 6, 7);                  \
  if constexpr (C > 1) {                     \
    TANDEM_TALL_RIGHT(1, r);                 \
    TANDEM_TILE_DOT(1, 6, 7);                \
  }                                          \
  TANDEM_TALL_LEFT(1, l);                    \
  if constexpr (C > 1) {                     \
    TANDEM_TILE_DOT(3, 6, 7);                \
    TANDEM_TALL_RIGHT(0, r);                 \
  }                                          \
  work(2 * (turn));                          \
  TANDEM_TILE_DOT(2, 6, 7);                  \
  TANDEM_TALL_LEFT(2, l);                    \
  TANDEM_TILE_DOT(4, 6, 7);                  \
  if constexpr (C > 1) {                     \
    TANDEM_TALL_RIGHT(1, r);                 \
    TANDEM_TILE_DOT(5, 6, 7);                \
  }                                          \
  work(2 * (turn) + 1);
#define TANDEM_TALL_STEP(work)     \
  TANDEM_TILE_FENCE();             \
  TANDEM_TALL_DOTS(1, 1, 0, work); \
  TANDEM_TALL_DOTS(1, 0, 1, work); \
  TANDEM_TALL_DOTS(2, 0, 2, work); \
  TANDEM_TALL_DOTS(0, 0, 3, work); \
  TANDEM_TALL_DOTS(0, 1, 4, work); \
  TANDEM_TALL_DOTS(0, 2, 5, work);

// Which tiles pass by those that stay in the first cache.
enum class Side { left, right, neither };

// Sums of R tiles of rows by C of columns: two by two, one by up to four, or three by two.
template <int R, int C>
inline void zero_sums() {
  if constexpr (R > 2) {
    TANDEM_TILE_ZERO(4);
    if constexpr (C > 1) TANDEM_TILE_ZERO(5);
  }
  TANDEM_TILE_ZERO(0);
  if constexpr (C > 1) TANDEM_TILE_ZERO(1);
  if constexpr (R > 1 || C > 2) TANDEM_TILE_ZERO(2);
  if constexpr ((R > 1 && C > 1) || C > 3) TANDEM_TILE_ZERO(3);
}

template <int R, int C>
inline void store_sums(float* after, int64_t row) {
  if constexpr (R > 2) {
    TANDEM_TILE_STORE(4, after + 2 * kSide * row, row);
    if constexpr (C > 1) TANDEM_TILE_STORE(5, after + 2 * kSide * row + kSide, row);
  }
  TANDEM_TILE_STORE(0, after, row);
  if constexpr (C > 1) TANDEM_TILE_STORE(1, after + kSide, row);
  if constexpr (R > 1) TANDEM_TILE_STORE(2, after + kSide * row, row);
  if constexpr (R > 1 && C > 1) TANDEM_TILE_STORE(3, after + kSide * row + kSide, row);
  if constexpr (C > 2) TANDEM_TILE_STORE(2, after + 2 * kSide, row);
  if constexpr (C > 3) TANDEM_TILE_STORE(3, after + 3 * kSide, row);
  TANDEM_TILE_FENCE();
}

// The sums over `steps` of k.
template <int P, int R, int C, Side S>
inline void block(const Tiles& left, const Tiles& right, int64_t steps, const Sums& sums,
                  Meanwhile& meanwhile) {
  static_assert(R == 1 ? C <= 4 : R == 2 && C <= 2);
  TANDEM_TILE_FENCE();
  if (sums.before) {
    const auto from = [&](int64_t r, int64_t c) {
      return reinterpret_cast<const word*>(sums.before + r * kSide * sums.before_row + c * kSide);
    };
    TANDEM_TILE_LOAD(0, from(0, 0), sums.before_row);
    if constexpr (C > 1) TANDEM_TILE_LOAD(1, from(0, 1), sums.before_row);
    if constexpr (R > 1) TANDEM_TILE_LOAD(2, from(1, 0), sums.before_row);
    if constexpr (R > 1 && C > 1) TANDEM_TILE_LOAD(3, from(1, 1), sums.before_row);
    if constexpr (C > 2) TANDEM_TILE_LOAD(2, from(0, 2), sums.before_row);
    if constexpr (C > 3) TANDEM_TILE_LOAD(3, from(0, 3), sums.before_row);
  } else {
    zero_sums<R, C>();
  }
  const word *a = left.data, *b = right.data;
  for (int64_t k = 0; k < steps; ++k, a += left.deeper, b += right.deeper) {
    meanwhile.step();
    TANDEM_STEP(meanwhile.work);
  }
  store_sums<R, C>(sums.after, sums.after_row);
}

// The same of columns whose tiles `feed` makes ahead, while others are multiplied, so that they stay
// in the first cache.
template <int P, int R, int C, class Feed>
inline void stream(const Tiles& rows, Feed& feed, int64_t steps, const Sums& sums,
                   Meanwhile& meanwhile) {
  static_assert(C <= 2 && (R <= 2 || (R == 3 && P > 1)));
  constexpr Side S = Side::neither;
  TANDEM_TILE_FENCE();
  zero_sums<R, C>();
  const word* a = rows.data;
  const Tiles left = rows;  // a copy that nothing else can reach stays in registers
  const Tiles right{nullptr, P * kTile, 0, kSide};
  for (int64_t k = 0; k < steps; ++k, a += left.deeper) {
    meanwhile.step();
    const word* const b = reinterpret_cast<const word*>(feed.ready());
    feed.with([&](const auto& work) TANDEM_INLINED {
      if constexpr (R > 2) {
        TANDEM_TALL_STEP(work);
      } else {
        TANDEM_STEP(work);
      }
    });
    feed.next();
  }
  store_sums<R, C>(sums.after, sums.after_row);
}
#undef TANDEM_FACTOR
#undef TANDEM_LEFT
#undef TANDEM_RIGHT
#undef TANDEM_DOTS
#undef TANDEM_STEP
#undef TANDEM_TALL_LEFT
#undef TANDEM_TALL_RIGHT
#undef TANDEM_TALL_DOTS
#undef TANDEM_TALL_STEP

}  // namespace tandem::amx
#endif
