// Attention on the CPU: packed sequences (forward and backward) and one new token on KV memory.
//
// A query's result is the same to the last bit whether its sequence is computed at once or the
// token alone on top of KV memory, in whatever company, because its arithmetic is one fixed order:
//   scores   keys in blocks of 16 by absolute position, a lane per key; the product sums over the
//            width from first to last;
//   softmax  against the largest score (the sink among them); 16 sums, one per lane, over blocks;
//            then `sum` across lanes;
//   values   key j adds to chain j mod C, first to last; the chains are added in order. C depends
//            on the width of a value alone (`value_chains`).
// A key that a query must not see has weight exactly 0. Tiles of up to 4 queries share loaded keys
// and values, and sequences that begin alike share the keys of their beginning; that and the split
// over threads change who computes, never what.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace tandem {

constexpr int64_t kBlock = kLanes;  // tokens in a block of KV memory

// How scores become weights.
struct Kind {
  float scale;
  int64_t window;      // keys in sight, the query's own among them; 0: all
  float softcap;       // 0: none
  const float* sinks;  // one per query head, or null

  int64_t first_key(int64_t query) const {
    return window > 0 ? std::max<int64_t>(0, query - window + 1) : 0;
  }
};

inline int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

template <class T>
struct Rows {
  T* data;
  int64_t token, head;  // strides
  T* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

struct Sizes {
  int64_t query_heads, heads, groups, key_width, value_width;
};

// Segments of tokens side by side: segment b is tokens bounds[b] to bounds[b + 1]. With prefixes[b]
// < 0 it is a whole sequence. Otherwise it continues segment prefixes[b], as several may, and what
// that continues in turn: its positions and the keys in sight begin with theirs. It stands directly
// after the segment that it continues, or after others that continue that, however indirectly.
struct Segments {
  const int32_t* bounds;
  const int32_t* prefixes;  // null: all are whole sequences
  int64_t count;

  bool continues(int64_t b) const { return prefixes && prefixes[b] >= 0; }
};

// `asked`: which of the N tokens have a query, (num_asked), ascending; null: all. Rows of q, out and
// lse are those tokens' alone.
template <class T>
struct Packed {
  Rows<const T> q, k, v;
  T* out;      // (N, Hq, Dv)
  float* lse;  // (N, Hq), or null
  Sizes sizes;
  Kind kind;
  const int64_t* asked = nullptr;
  int64_t num_asked = 0;
};

template <class T>
struct Gradients {
  Packed<T> in;          // `out` is the forward's
  Rows<const T> output;  // gradient of `out`
  T *q, *k, *v;          // contiguous
  float* delta;          // as `lse`: sum of gradient times output, for the sinks
};

// One new token for each of n rows, on KV memory. Tokens of one sequence that are run at once stand
// side by side, in their order.
template <class T>
struct Paged {
  Rows<const T> q, k, v;
  T *k_memory, *v_memory, *out;
  const int32_t* tables;
  int64_t table_stride;
  const int64_t* positions;
  Sizes sizes;
  Kind kind;

  T* key_block(int64_t row, int64_t head, int64_t block) const {
    const int64_t at = tables[row * table_stride + block] * sizes.heads + head;
    return k_memory + at * sizes.key_width * kBlock;
  }
  T* value_block(int64_t row, int64_t head, int64_t block) const {
    const int64_t at = tables[row * table_stride + block] * sizes.heads + head;
    return v_memory + at * sizes.value_width * kBlock;
  }
};

// New tokens of `count` sequences on KV memory that holds their keys and values already, as it does
// those of the starts[b] tokens before: tokens bounds[b] to bounds[b + 1] of q and out.
template <class T>
struct Continued {
  Rows<const T> q;
  const T *k_memory, *v_memory;
  T* out;
  const int32_t* tables;
  int64_t table_stride;
  const int64_t* starts;
  const int32_t* bounds;
  int64_t count;
  Sizes sizes;
  Kind kind;
};

// Each writes what its argument points at.
template <class T>
void attend_continued(const Continued<T>& in);
template <class T>
void attend_packed(const Packed<T>& in, const Segments& segments);
template <class T>
void attend_packed_backward(const Gradients<T>& work, const Segments& segments);
template <class T>
void attend_paged(const Paged<T>& in, int64_t rows, int64_t threads);

// Keeps the keys and values of sequence b in the blocks that tables[b * table_stride ...] lists.
template <class T>
void keep_packed(const Rows<const T>& keys, const Rows<const T>& values, T* k_memory, T* v_memory,
                 const int32_t* tables, int64_t table_stride, const int32_t* bounds, int64_t count,
                 const Sizes& size);

}  // namespace tandem
