// The two halves of a decoder layer as an operation each, with gradients: norm, projections and
// rotation before attention; norm, gated MLP and residual after it. Between their products a block
// of rows stays in the second cache, where one operation after another would carry whole tensors
// through memory; weights are made ready once for all blocks. Numbers are those of the operations
// one by one (dense.cpp), gradients to rounding.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "adapters.h"
#include "gemm.h"
#include "gradient.h"
#include "rows.h"
#include "tensors.h"

namespace tandem {
namespace layers {
namespace {

using at::Tensor;

// ---- blocks of rows ----

constexpr int64_t kBlock = 256;     // rows whose intermediate numbers stay in the second cache
constexpr int64_t kMostRows = 512;  // of a block where weights are too large for that
constexpr int64_t kTogether = 1024;  // rows on which all threads work where pieces are too few
constexpr int64_t kReadyFloats = 1 << 19;  // of weights made ready that stay there too, or nearby
constexpr int64_t kRun = 128;  // rows whose sums for a norm's weight or a bias are made apart

// How rows are cut. Gradients are summed block by block, whatever the number of threads. Of weights
// that are ready each thread takes pieces of blocks of its own, if there are enough that none waits
// long; else all threads work on one product after another.
struct Blocks {
  int64_t M, rows;  // of a block
  int64_t held;     // rows whose intermediate numbers are held at a time: whole blocks
  int64_t piece;    // rows of a piece
  bool ready;

  Blocks(int64_t M, int64_t ready_floats)
      : M(M), ready(M > kBlock && ready_floats <= kReadyFloats) {
    rows = std::min(ready ? kBlock : kMostRows, round_up(std::max<int64_t>(M, 1), kRun));
    held = piece = rows;
    const int64_t threads = num_threads();
    if (!ready || threads == 1) return;
    held = piece = round_up(std::min(M, kTogether), rows);
    for (const int64_t size : {kBlock, kRun}) {
      const int64_t pieces = (M + size - 1) / size, rounds = (pieces + threads - 1) / threads;
      if (5 * pieces < 4 * rounds * threads) continue;  // a fifth of the time for nothing
      const int64_t both = size < rows && threads % 2 ? 2 : 1;  // pieces of as many whole blocks
      held = round_up(std::min(M, both * threads * size), rows);
      piece = size;
      return;
    }
  }

  // each(first row, rows, their place among those that are held); once all that are held are done
  // then(first row, rows).
  template <class Each, class Then>
  void run(Each each, Then then) const {
    for (int64_t m = 0; m < M; m += held) {
      const int64_t count = std::min(held, M - m);
      const auto one = [&](int64_t place) { each(m + place, std::min(piece, count - place), place); };
      if (piece >= count) {
        one(0);
      } else {
        parallel_for(0, (count + piece - 1) / piece, 1, [&](int64_t from, int64_t to) {
          for (int64_t i = from; i < to; ++i) one(i * piece);
        });
      }
      then(m, count);
    }
  }
};

// ---- products by several weights ----

// Contiguous weights (N_i, K) over one input; some may have no rows.
template <class T>
class Weights {
 public:
  const std::vector<Tensor> all;
  int64_t N = 0, K;

  explicit Weights(std::vector<Tensor> weights) : all(std::move(weights)), K(all[0].size(1)) {
    for (const Tensor& weight : all) N += weight.size(0);
  }

  int64_t ready_floats() const {
    int64_t floats = 0;
    for (const Tensor& weight : all) floats += ready_size<T>(weight.size(0), K);
    return floats;
  }
  int64_t ready_floats_back() const {
    int64_t floats = 0;
    for (const Tensor& weight : all) floats += ready_size<T>(K, weight.size(0));
    return floats;
  }

  void make_forward_ready() {
    int64_t column = 0, floats = 0;
    held_ = at::empty({ready_floats()}, all[0].options().dtype(at::kFloat));
    float* const store = held_.template mutable_data_ptr<float>();
    for (const Tensor& weight : all) {
      const int64_t count = weight.size(0);
      if (!count) continue;
      make_ready(as_it_lies<T>(weight), count, K, store + floats);
      if (!parts_.empty() && parts_.back().count % ready_columns<T>() == 0) {
        parts_.back().count += count;
      } else {
        parts_.push_back({store + floats, column, count});
      }
      column += count;
      floats += ready_size<T>(count, K);
    }
  }
  void make_back_ready() {
    int64_t column = 0, floats = 0;
    held_ = at::empty({ready_floats_back()}, all[0].options().dtype(at::kFloat));
    float* const store = held_.template mutable_data_ptr<float>();
    for (const Tensor& weight : all) {
      const int64_t count = weight.size(0);
      if (!count) continue;
      make_ready(across<T>(weight), K, count, store + floats);
      parts_.push_back({store + floats, column, count});
      column += count;
      floats += ready_size<T>(K, count);
    }
  }

  // y (M, N) = x (M, K) by all of them, side by side.
  void forward(const T* x, int64_t x_stride, int64_t M, T* y, int64_t y_stride,
               const Epilogue<T>& epilogue) const {
    for (const Part& part : parts_)
      multiply_ready(x, x_stride, M, part.ready, part.count, K, y + part.column, y_stride,
                     epilogue.at(0, part.column));
    if (!parts_.empty()) return;
    int64_t column = 0;
    for (const Tensor& weight : all) {
      if (!weight.size(0)) continue;
      multiply(x, x_stride, M, as_it_lies<T>(weight), weight.size(0), K, y + column, y_stride,
               epilogue.at(0, column));
      column += weight.size(0);
    }
  }

  // y (M, K) = given (M, N), side by side, by all of them: their input's gradient.
  void back(const T* given, int64_t stride, int64_t M, T* y) const {
    for (const Part& part : parts_)
      multiply_ready(given + part.column, stride, M, part.ready, K, part.count, y, K,
                     Epilogue<T>{nullptr, part.column ? y : nullptr, K});
    if (!parts_.empty()) return;
    int64_t column = 0;
    for (const Tensor& weight : all) {
      if (!weight.size(0)) continue;
      multiply(given + column, stride, M, across<T>(weight), K, weight.size(0), y, K,
               Epilogue<T>{nullptr, column ? y : nullptr, K});
      column += weight.size(0);
    }
  }

 private:
  struct Part {
    const float* ready;
    int64_t column, count;
  };
  Tensor held_;
  std::vector<Part> parts_;
};

// ---- gradients ----

// Gradients of weights (N_i, K), += given (M, sum of N_i) turned, by x (M, K).
template <class T>
void add_gradients(std::vector<Gradient>& gradients, const std::vector<Tensor>& weights,
                   const T* given, int64_t given_stride, const T* x, int64_t x_stride, int64_t M) {
  const int64_t K = weights[0].size(1);
  for (size_t i = 0; i < weights.size();) {
    if (!gradients[i].at) {
      given += weights[i++].size(0);
      continue;
    }
    Stack stack;
    int64_t columns = 0;
    for (; i < weights.size() && gradients[i].at && stack.count < Stack::kMost; ++i) {
      stack.push(gradients[i].at, weights[i].size(0), gradients[i].adds);
      columns += weights[i].size(0);
      gradients[i].adds = true;
    }
    multiply_turned(given, given_stride, x, x_stride, M, K, stack);
    given += columns;
  }
}

// ---- the norm ----

struct Norm {
  static constexpr int64_t kAhead = 4;  // rows that are fetched before they are read
  Tensor weight;  // contiguous, of x's type
  float eps;
  bool offset;

  template <class T>
  void rows(const Reading<T>& x, int64_t count, int64_t D, T* y) const {
    const T* const w = weight.const_data_ptr<T>();
    for_rows(count, D, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        if (i + kAhead < to) x.fetch(i + kAhead, D);
        offset ? rms_row<true>(x.row(i), w, y + i * D, D, eps)
               : rms_row<false>(x.row(i), w, y + i * D, D, eps);
      }
    });
  }

  // to = also + the norm's gradient by `given`; sums of the weight's gradient, a row of D for every
  // kRun rows, if wanted.
  template <class T>
  void rows_back(const T* given, const Reading<T>& x, const T* also, int64_t count, int64_t D,
                 T* to, float* sums) const {
    const T* const w = weight.const_data_ptr<T>();
    parallel_for(0, (count + kRun - 1) / kRun, 1, [&](int64_t from, int64_t last) {
      for (int64_t i = from * kRun; i < std::min(count, last * kRun); ++i) {
        const T* const row = x.row(i);
        const float scale = inverse_rms(row, D, eps);
        float* const sum = sums ? sums + i / kRun * D : nullptr;
        T* const out = to ? to + i * D : nullptr;
        const T* const more = also ? also + i * D : nullptr;
        offset ? rms_row_backward<true>(given + i * D, row, w, scale, out, sum, D, more)
               : rms_row_backward<false>(given + i * D, row, w, scale, out, sum, D, more);
      }
    });
  }
};

Tensor run_sums(bool wanted, int64_t M, int64_t width, const Tensor& like) {
  if (!wanted) return {};
  return at::zeros({(M + kRun - 1) / kRun, width}, like.options().dtype(at::kFloat));
}

float* at_run(const Tensor& sums, int64_t first) {
  return sums.defined() ? sums.mutable_data_ptr<float>() + first / kRun * sums.size(1) : nullptr;
}

// A bias' gradient: columns of rows that follow one another, as `rows_back` sums the norm's.
template <class T>
void add_columns(const T* rows, int64_t count, int64_t width, float* sums) {
  parallel_for(0, (count + kRun - 1) / kRun, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from * kRun; i < std::min(count, to * kRun); ++i)
      for_columns(width, [&](int64_t c, int lanes) {
        float* const sum = sums + i / kRun * width + c;
        store_lanes(sum, load_lanes(sum, lanes) + load_lanes(rows + i * width + c, lanes), lanes);
      });
  });
}

Tensor total(const Tensor& sums, at::ScalarType dtype) {
  return sums.defined() ? sums.sum(0).to(dtype) : Tensor();
}

// ---- before attention ----

struct Rotation {
  Tensor cos, sin;        // (N, R), contiguous
  int64_t Hq, Hkv, D, J;  // heads, their width; columns of all projections

  Rotation(const Tensor& c, const Tensor& s, const std::vector<Tensor>& weights, int64_t D)
      : cos(c.contiguous()),
        sin(s.contiguous()),
        Hq(weights[0].size(0) / D),
        Hkv(weights[1].size(0) / D),
        D(D),
        J((Hq + 2 * Hkv) * D) {}

  // One token's queries, keys and values out of a row of J, or gradients back into it.
  template <class T>
  void out(const T* row, int64_t token, T* q, T* k, T* v) const {
    const int64_t R = cos.size(1);
    const T *c = cos.const_data_ptr<T>() + token * R, *s = sin.const_data_ptr<T>() + token * R;
    rope_heads<false>(row, c, s, q + token * Hq * D, Hq, D, R);
    row += Hq * D;
    rope_heads<false>(row, c, s, k + token * Hkv * D, Hkv, D, R);
    row += Hkv * D;
    std::copy_n(row, Hkv * D, v + token * Hkv * D);
  }
  template <class T>
  void back(const T* q, const T* k, const T* v, int64_t token, T* row) const {
    const int64_t R = cos.size(1);
    const T *c = cos.const_data_ptr<T>() + token * R, *s = sin.const_data_ptr<T>() + token * R;
    const auto turn = [&](const T* from, int64_t heads) {
      if (from) rope_heads<true>(from + token * heads * D, c, s, row, heads, D, R);
      else std::fill_n(row, heads * D, T{});
      row += heads * D;
    };
    turn(q, Hq);
    turn(k, Hkv);
    if (v) std::copy_n(v + token * Hkv * D, Hkv * D, row);
    else std::fill_n(row, Hkv * D, T{});
  }
};

struct Before {
  Norm norm;
  std::vector<Tensor> weights;  // of queries, keys and values
  Tensor bias;                  // all three, one after another, or undefined
  Rotation rotation;
  std::vector<Adapter> adapters;  // of the three
};

template <class T>
void before_forward(const Tensor& x, const Before& in, const Tensor& q, const Tensor& k,
                    const Tensor& v) {
  const RowsOf rows(x);
  Weights<T> weights(in.weights);
  const Blocks blocks(rows.count, weights.ready_floats());
  if (blocks.ready) weights.make_forward_ready();
  const Buffer<T> normed(x, blocks.held, rows.width);
  const Buffer<T> made(x, blocks.held, in.rotation.J);
  const Adapters<T> adapters(in.adapters.data(), nullptr, in.weights, x, made.held.size(0));
  const Epilogue<T> epilogue{in.bias.defined() ? in.bias.const_data_ptr<T>() : nullptr};
  T *const to_q = q.mutable_data_ptr<T>(), *const to_k = k.mutable_data_ptr<T>(),
           *const to_v = v.mutable_data_ptr<T>();
  blocks.run(
      [&](int64_t m, int64_t count, int64_t place) {
        T *const y = normed.row(place), *const j = made.row(place);
        in.norm.rows(rows.reading<T>().from(m), count, rows.width, y);
        weights.forward(y, rows.width, count, j, made.width, epilogue);
        if (adapters.act) {
          adapters.descend(y, rows.width, count, place);
          adapters.ascend(count, place, j, made.width);
        }
        for_rows(count, made.width, [&](int64_t from, int64_t to) {
          for (int64_t i = from; i < to; ++i)
            in.rotation.out(j + i * made.width, m + i, to_q, to_k, to_v);
        });
      },
      [](int64_t, int64_t) {});
}

// Gradients of queries, keys, values (undefined: 0) and of x by other ways, to those of x, the
// norm's weight, the weights (`gradients`), their adapters and the biases.
template <class T>
void before_backward(const Tensor (&given)[3], const Tensor& also, const RowsOf& rows,
                     const Before& in, std::vector<Gradient>& gradients,
                     std::vector<Gradient>& of_adapters, const Tensor& of_x, const Tensor& of_norm,
                     const Tensor& of_bias) {
  const Tensor& x = rows.held;
  Weights<T> weights(in.weights);
  const Blocks blocks(rows.count, weights.ready_floats_back());
  const bool reaches_norm = of_x.defined() || of_norm.defined();
  if (blocks.ready && reaches_norm) weights.make_back_ready();
  const int64_t D = rows.width, held = blocks.held;
  const Buffer<T> normed(x, held, D), of_normed(x, held, D), joined(x, held, in.rotation.J);
  const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<T>() : nullptr; };
  const T *const q = data(given[0]), *const k = data(given[1]), *const v = data(given[2]);
  const T* const more = data(also);
  T* const to_x = of_x.defined() ? of_x.mutable_data_ptr<T>() : nullptr;
  const Adapters<T> adapters(in.adapters.data(), of_adapters.empty() ? nullptr : of_adapters.data(),
                             in.weights, x, held);
  bool any = adapters.train;
  for (const Gradient& gradient : gradients) any = any || gradient.at;
  const auto each = [&](int64_t m, int64_t count, int64_t place) {
    T* const j = joined.row(place);
    for_rows(count, joined.width, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) in.rotation.back(q, k, v, m + i, j + i * joined.width);
    });
    if (of_bias.defined()) add_columns(j, count, joined.width, at_run(of_bias, m));
    const Reading<T> from = rows.reading<T>().from(m);
    if (any) in.norm.rows(from, count, D, normed.row(place));
    if (adapters.train) adapters.descend(normed.row(place), D, count, place);
    if (adapters.act) adapters.descend_back(j, joined.width, count, place);
    if (!reaches_norm) return;
    T* const g = of_normed.row(place);
    weights.back(j, joined.width, count, g);
    if (adapters.act) adapters.back(count, place, g);
    in.norm.rows_back(g, from, more ? more + m * D : nullptr, count, D,
                      to_x ? to_x + m * D : nullptr, at_run(of_norm, m));
  };
  blocks.run(each, [&](int64_t, int64_t count) {
    for (int64_t m = 0; any && m < count; m += blocks.rows) {
      const int64_t some = std::min(blocks.rows, count - m);
      const T *const given_rows = joined.row(m), *const inputs = normed.row(m);
      add_gradients(gradients, in.weights, given_rows, joined.width, inputs, D, some);
      adapters.add_gradients(given_rows, joined.width, inputs, D, some, m);
    }
  });
}

// ---- after attention ----

struct After {
  Tensor out, bias;  // the projection of what attention gave; its bias, or undefined
  Norm norm;
  std::vector<Tensor> in;  // of gate and up
  Tensor down;
  bool tanh;
  std::vector<Adapter> adapters;  // of out, gate, up and down

  const Adapter* adapter(size_t i) const { return adapters.data() + i; }
};

// y (M, N) = residual + what a weight and its adapter make of x.
template <class T>
void add_projected(const Weights<T>& weight, const Adapters<T>& adapters, const T* x,
                   int64_t x_stride, int64_t M, int64_t place, T* y, int64_t N, const T* bias,
                   const T* residual, int64_t residual_stride) {
  if (!adapters.act)
    return weight.forward(x, x_stride, M, y, N, Epilogue<T>{bias, residual, residual_stride});
  weight.forward(x, x_stride, M, y, N, Epilogue<T>{bias});
  adapters.descend(x, x_stride, M, place);
  adapters.ascend(M, place, y, N);
  for_rows(M, N, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      for_columns(N, [&](int64_t c, int lanes) {
        const v16 sum = load_lanes(residual + i * residual_stride + c, lanes) +
                        load_lanes(y + i * N + c, lanes);
        store_lanes(y + i * N + c, sum, lanes);
      });
  });
}

// What the backward pass reads, where it is kept (else undefined).
struct Kept {
  Tensor hidden;         // (M, D), between attention and MLP
  Tensor both;           // (M, 2 I), gate and up side by side; or computed again
  OptionalTensor rows;  // (M,) int64: which of theirs are read, if they hold more
};

// hidden = residual + out(attended); y = hidden + down(act(gate) * up) of its norm.
template <class T, class Act>
void after_forward(const Tensor& attended, const Tensor& residual, const After& after,
                   const Kept& kept, const Tensor& y) {
  const RowsOf from(attended), rows(residual);
  Weights<T> out({after.out}), in(after.in), down({after.down});
  const int64_t D = rows.width, I = down.K;
  const Blocks blocks(rows.count, out.ready_floats() + in.ready_floats() + down.ready_floats());
  if (blocks.ready) {
    out.make_forward_ready();
    in.make_forward_ready();
    down.make_forward_ready();
  }
  const int64_t held = blocks.held;
  const Buffer<T> normed(residual, held, D), active(residual, held, I);
  const Buffer<T> hiddens(residual, kept.hidden.defined() ? 0 : held, D);
  const Buffer<T> boths(residual, kept.both.defined() ? 0 : held, 2 * I);
  T* const all_hidden = kept.hidden.defined() ? kept.hidden.mutable_data_ptr<T>() : nullptr;
  T* const all_both = kept.both.defined() ? kept.both.mutable_data_ptr<T>() : nullptr;
  const Adapters<T> with_out(after.adapter(0), nullptr, out.all, y, held),
      with_in(after.adapter(1), nullptr, in.all, y, held),
      with_down(after.adapter(3), nullptr, down.all, y, held);
  T* const to = y.mutable_data_ptr<T>();
  const T* const bias = after.bias.defined() ? after.bias.const_data_ptr<T>() : nullptr;
  blocks.run(
      [&](int64_t m, int64_t count, int64_t place) {
        T *const n = normed.row(place), *const a = active.row(place);
        T* const hidden = all_hidden ? all_hidden + m * D : hiddens.row(place);
        T* const both = all_both ? all_both + m * 2 * I : boths.row(place);
        const T *const x = from.data<T>() + m * from.stride,
                *const before = rows.data<T>() + m * rows.stride;
        add_projected(out, with_out, x, from.stride, count, place, hidden, D, bias, before,
                      rows.stride);
        after.norm.rows(Reading<T>{hidden, D}, count, D, n);
        in.forward(n, D, count, both, 2 * I, {});
        if (with_in.act) {
          with_in.descend(n, D, count, place);
          with_in.ascend(count, place, both, 2 * I);
        }
        for_rows(count, 4 * I, [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i)
            gated_row<Act>(both + 2 * i * I, both + (2 * i + 1) * I, a + i * I, I);
        });
        add_projected<T>(down, with_down, a, I, count, place, to + m * D, D, nullptr, hidden, D);
      },
      [](int64_t, int64_t) {});
}

// Gradients that `after_backward` makes: of tensors where they are defined, of the weights of
// `out`, gate, up and `down` in this order, and of their adapters.
struct AfterGradients {
  Tensor attended, hidden, bias, norm;
  std::vector<Gradient> weights, adapters;
};

template <class T, class Act>
void after_backward(const Tensor& given, const Tensor& attended, const After& after,
                    const Kept& kept, AfterGradients& of) {
  const RowsOf from(attended);
  Weights<T> out({after.out}), in(after.in), down({after.down}), again(after.in);
  const int64_t M = from.count, A = from.width, D = in.K, I = down.K;
  const bool recomputes = !kept.both.defined();
  // Cut alike whether it computes again or not: gradients are summed block by block.
  const Blocks blocks(M,
                      out.ready_floats_back() + in.ready_floats_back() + down.ready_floats_back());
  std::vector<Gradient> of_out{of.weights[0]}, of_in{of.weights[1], of.weights[2]},
      of_down{of.weights[3]};
  const int64_t held = blocks.held;
  const auto of_adapter = [&](size_t i) {
    return of.adapters.empty() ? nullptr : &of.adapters[2 * i];
  };
  const Adapters<T> with_out(after.adapter(0), of_adapter(0), out.all, given, held),
      with_in(after.adapter(1), of_adapter(1), in.all, given, held),
      with_down(after.adapter(3), of_adapter(3), down.all, given, held);
  const bool any_in = of_in[0].at || of_in[1].at || with_in.train;
  const bool reaches_out = of.hidden.defined();
  const bool reaches_norm = reaches_out || of.norm.defined(), reaches_in = reaches_norm || any_in;
  if (blocks.ready) {
    if (of.attended.defined()) out.make_back_ready();
    if (reaches_norm) in.make_back_ready();
    if (reaches_in) down.make_back_ready();
    if (recomputes) again.make_forward_ready();
  }
  const Buffer<T> normed(given, held, D), of_normed(given, held, D), active(given, held, I),
      joined(given, held, 2 * I), boths(given, recomputes ? held : 0, 2 * I);
  const T* const g = given.const_data_ptr<T>();
  const RowsOf hiddens(kept.hidden, kept.rows);
  const std::optional<RowsOf> inner =
      recomputes ? std::nullopt : std::optional(RowsOf(kept.both, kept.rows));
  T* const of_hidden = reaches_out ? of.hidden.mutable_data_ptr<T>() : nullptr;
  T* const of_attended = of.attended.defined() ? of.attended.mutable_data_ptr<T>() : nullptr;
  const auto each = [&](int64_t m, int64_t count, int64_t place) {
    T *const a = active.row(place), *const j = joined.row(place), *const y = normed.row(place);
    const Reading<T> hidden = hiddens.reading<T>().from(m);
    const Reading<T> both =
        inner ? inner->template reading<T>().from(m) : Reading<T>{boths.row(place), 2 * I};
    if (any_in || recomputes) after.norm.rows(hidden, count, D, y);
    if (with_in.act && (with_in.train || recomputes)) with_in.descend(y, D, count, place);
    if (recomputes) {
      again.forward(y, D, count, boths.row(place), 2 * I, {});
      if (with_in.act) with_in.ascend(count, place, boths.row(place), 2 * I);
    }
    if (with_down.act) with_down.descend_back(g + m * D, D, count, place);
    if (reaches_in) {
      down.back(g + m * D, D, count, a);
      if (with_down.act) with_down.back(count, place, a);
    }
    for_rows(count, 8 * I, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        if (i + 1 < last) both.fetch(i + 1, 2 * I);
        const T *const gate = both.row(i), *const up = gate + I;
        T* const row = j + 2 * i * I;
        if (reaches_in) gated_row_backward<Act>(a + i * I, gate, up, row, row + I, I, a + i * I);
        else gated_row<Act>(gate, up, a + i * I, I);
      }
    });
    if (with_down.train) with_down.descend(a, I, count, place);
    if (with_in.act && reaches_in) with_in.descend_back(j, 2 * I, count, place);
    if (!reaches_norm) return;
    T *const n = of_normed.row(place), *const h = of_hidden ? of_hidden + m * D : nullptr;
    in.back(j, 2 * I, count, n);
    if (with_in.act) with_in.back(count, place, n);
    after.norm.rows_back(static_cast<const T*>(n), hidden, g + m * D, count, D, h,
                         at_run(of.norm, m));
    if (with_out.act && h) {
      const T* const x = from.data<T>() + m * from.stride;
      if (with_out.train) with_out.descend(x, from.stride, count, place);
      with_out.descend_back(h, D, count, place);
    }
    if (of_attended) {
      out.back(h, D, count, of_attended + m * A);
      if (with_out.act) with_out.back(count, place, of_attended + m * A);
    }
    if (of.bias.defined()) add_columns(h, count, D, at_run(of.bias, m));
  };
  blocks.run(each, [&](int64_t first, int64_t count) {
    for (int64_t m = 0; m < count; m += blocks.rows) {
      const int64_t some = std::min(blocks.rows, count - m), row = first + m;
      const auto read = [](const Buffer<T>& buffer, int64_t i) -> const T* {
        return buffer.row(i);
      };
      const T* const x = from.data<T>() + row * from.stride;
      with_down.add_gradients(g + row * D, D, read(active, m), I, some, m);
      with_in.add_gradients(read(joined, m), 2 * I, read(normed, m), D, some, m);
      if (with_out.train)
        with_out.add_gradients(of_hidden + row * D, D, x, from.stride, some, m);
      if (of_down[0].at)
        add_gradients(of_down, {after.down}, g + row * D, D, read(active, m), I, some);
      if (any_in) add_gradients(of_in, after.in, read(joined, m), 2 * I, read(normed, m), D, some);
      if (of_out[0].at)
        add_gradients(of_out, {after.out}, static_cast<const T*>(of_hidden) + row * D, D, x,
                      from.stride, some);
    }
  });
}

// ---- as torch operators ----

Tensor plain(const Tensor& weight) { return weight.contiguous(); }

void check_weights(const char* what, const Tensor& x, const Tensor& norm,
                   const std::vector<Tensor>& weights) {
  const int64_t D = x.dim() ? x.size(-1) : 0;
  TORCH_CHECK(norm.dim() == 1 && norm.size(0) == D && norm.scalar_type() == x.scalar_type(), what,
              "'s norm must be (", D, ",) ", x.scalar_type(), "; got ", norm.sizes(), " ",
              norm.scalar_type(), ".");
  for (const Tensor& weight : weights)
    TORCH_CHECK(weight.dim() == 2 && weight.size(1) == D && weight.scalar_type() == x.scalar_type(),
                what, "'s weights must be (..., ", D, ") ", x.scalar_type(), "; got ",
                weight.sizes(), " ", weight.scalar_type(), ".");
}

// What operators are given of adapters: down and up of each weight's in turn, None where it has none.
using OptionalTensors = c10::List<OptionalTensor>;
using Scales = c10::ArrayRef<double>;

std::vector<Adapter> adapters_of(const char* what, const OptionalTensors& given, Scales scales,
                                 const std::vector<Tensor>& weights) {
  std::vector<Adapter> all(weights.size());
  if (given.empty()) return all;
  TORCH_CHECK(given.size() == 2 * weights.size() && scales.size() == weights.size(), what,
              " must be given two adapter weights and a scale for each of ", weights.size(),
              " weights; got ", given.size(), " and ", scales.size(), ".");
  for (size_t i = 0; i < weights.size(); ++i) {
    const OptionalTensor down = given.get(2 * i), up = given.get(2 * i + 1);
    TORCH_CHECK(down.has_value() == up.has_value(), what, "'s adapter must have both weights.");
    if (!down) continue;
    const int64_t N = weights[i].size(0), K = weights[i].size(1);
    const auto dtype = weights[i].scalar_type();
    TORCH_CHECK(down->dim() == 2 && down->size(0) > 0 && down->size(1) == K && up->dim() == 2 &&
                    up->size(0) == N && up->size(1) == down->size(0) &&
                    down->scalar_type() == dtype && up->scalar_type() == dtype,
                what, "'s adapter must be (r, ", K, ") and (", N, ", r) ", dtype, "; got ",
                down->sizes(), " ", down->scalar_type(), " and ", up->sizes(), " ",
                up->scalar_type(), ".");
    all[i] = {plain(*down), plain(*up), static_cast<float>(scales[i])};
  }
  return all;
}

// down and up of all, undefined where there are none.
std::vector<Tensor> tensors_of(const std::vector<Adapter>& adapters) {
  std::vector<Tensor> all;
  for (const Adapter& adapter : adapters) {
    all.push_back(adapter.down);
    all.push_back(adapter.up);
  }
  return all;
}

void finish(std::vector<Gradient>& gradients, std::vector<Tensor>& result) {
  for (Gradient& gradient : gradients) result.push_back(gradient.finish());
}

// What a node remembers: which of its inputs want a gradient, one bit each.
bool wants(int64_t bits, int64_t input) { return bits >> input & 1; }

int64_t wanted(std::initializer_list<const Tensor*> inputs) {
  int64_t bits = 0, input = 0;
  for (const Tensor* t : inputs) bits |= int64_t{t->defined() && records(*t)} << input++;
  return bits;
}

constexpr const char* kLeaves[] = {"leaf0", "leaf1", "leaf2", "leaf3"};

void keep_leaves(AutogradContext* ctx, const std::vector<Tensor>& weights) {
  for (size_t i = 0; i < weights.size(); ++i) keep_leaf(ctx, weights[i], kLeaves[i]);
}

// Where the gradients go of weights of which `bits` wants some, from bit `first` on.
std::vector<Gradient> gradients_of(AutogradContext* ctx, const std::vector<Tensor>& weights,
                                   int64_t bits, int64_t first) {
  std::vector<Gradient> all(weights.size());
  std::vector<Tensor*> taken;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!wants(bits, first + static_cast<int64_t>(i))) continue;
    Tensor* kept = weights[i].scalar_type() == at::kFloat
                       ? kept_gradient(ctx, weights[i], kLeaves[i])
                       : nullptr;
    if (std::find(taken.begin(), taken.end(), kept) != taken.end())
      kept = nullptr;  // one weight twice
    taken.push_back(kept);
    all[i] = Gradient(weights[i], kept);
  }
  return all;
}

// The same where sums are given, those of these weights from the one of number `place` on; `are_new`
// says which hold nothing yet. A weight that is undefined has none.
std::vector<Gradient> gradients_into(const OptionalTensors& totals, int64_t are_new, size_t place,
                                     const std::vector<Tensor>& weights, int64_t bits,
                                     int64_t first) {
  TORCH_CHECK(totals.size() >= place + weights.size(),
              "a backward of a layer must be given a sum or None for each of ",
              place + weights.size(), " weights; got ", totals.size(), ".");
  std::vector<Gradient> all(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].defined()) continue;
    const OptionalTensor sum = totals.get(place + i);
    TORCH_CHECK(!sum || (sum->sizes() == weights[i].sizes() && sum->is_contiguous() &&
                         sum->scalar_type() == at::kFloat),
                "a weight's sum must be a contiguous float32 ", weights[i].sizes(), "; got ",
                sum->sizes(), " ", sum->scalar_type(), ".");
    if (sum) all[i] = Gradient(*sum, wants(are_new, static_cast<int64_t>(place + i)));
    else if (wants(bits, first + static_cast<int64_t>(i))) all[i] = Gradient(weights[i], nullptr);
  }
  return all;
}

// Gradients through adapters are asked for by name (ops/layer.py): weights may be unpacked for that.
void check_no_adapters(int64_t bits, const OptionalTensors& adapters, const char* what) {
  bool trains = bits;
  for (size_t i = 0; i < adapters.size(); ++i)
    if (const OptionalTensor one = adapters.get(i)) trains = trains || records(*one);
  TORCH_CHECK(adapters.empty() || !trains, what,
              " has no gradients of its own through adapters. Call tandem.ops.layer.", what, ".");
}

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What is to be done to M rows of x's width and type.
Before before_of(const Tensor& x, int64_t M, const Tensor& norm, double eps, bool offset,
                 const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                 const Tensor& cos, const Tensor& sin, int64_t D) {
  check_weights("before_attention", x, norm, weights);
  TORCH_CHECK(
      weights.size() == 3 && weights[0].size(0) % D == 0 && weights[1].size(0) % D == 0 &&
          weights[1].size(0) == weights[2].size(0) && weights[0].size(0) + weights[1].size(0) > 0,
      "before_attention must be given three weights of whole heads, as many for keys as for "
      "values, of ",
      D, " columns each; those of queries or those of keys and values may have none.");
  TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(0) == M &&
                  cos.size(1) <= D && cos.size(1) % 2 == 0 &&
                  cos.scalar_type() == x.scalar_type() && sin.scalar_type() == x.scalar_type(),
              "before_attention's cos and sin must be (", M, ", R) ", x.scalar_type(),
              ", R even and at most ", D, "; got ", cos.sizes(), " ", cos.scalar_type(), " and ",
              sin.sizes(), " ", sin.scalar_type(), ".");
  for (size_t i = 0; i < biases.size(); ++i)
    TORCH_CHECK(biases[i].dim() == 1 && biases[i].size(0) == weights[i].size(0) &&
                    biases[i].scalar_type() == x.scalar_type(),
                "before_attention's bias must be (", weights[i].size(0), ",) ", x.scalar_type(),
                "; got ", biases[i].sizes(), " ", biases[i].scalar_type(), ".");
  std::vector<Tensor> plain_weights;
  for (const Tensor& weight : weights) plain_weights.push_back(plain(weight));
  return {{plain(norm), static_cast<float>(eps), offset},
          plain_weights,
          biases.empty() ? Tensor() : at::cat(biases),
          Rotation(cos, sin, weights, D),
          std::vector<Adapter>(3)};
}

std::vector<Tensor> some(const OptionalTensors& given) {
  std::vector<Tensor> all;
  for (size_t i = 0; i < given.size(); ++i)
    if (const OptionalTensor one = given.get(i)) all.push_back(*one);
  TORCH_CHECK(all.empty() || all.size() == given.size(),
              "before_attention must be given a bias for each weight or for none; got ", all.size(),
              " of ", given.size(), ".");
  return all;
}

int64_t num_rows(const Tensor& x) { return x.numel() / std::max<int64_t>(1, x.size(-1)); }

FourTensors made_before(const Tensor& x, const Before& in) {
  const int64_t M = num_rows(x), D = in.rotation.D;
  Tensor q = at::empty({M, in.rotation.Hq, D}, x.options());
  Tensor k = at::empty({M, in.rotation.Hkv, D}, x.options()), v = at::empty_like(k);
  for_dtype(x.scalar_type(), "before_attention' x", [&](auto tag) {
    if (M) before_forward<decltype(tag)>(x, in, q, k, v);
  });
  return {q, k, v, x};
}

FourTensors before_attention(const Tensor& x, const Tensor& norm, double eps, bool offset,
                             const std::vector<Tensor>& weights,
                             const OptionalTensors& biases, const Tensor& cos, const Tensor& sin,
                             int64_t D, const OptionalTensors& adapters, Scales scales) {
  Before before = before_of(x, num_rows(x), norm, eps, offset, weights, some(biases), cos, sin, D);
  before.adapters = adapters_of("before_attention", adapters, scales, weights);
  return made_before(x, before);
}

// Gradients of the rows of x that were read (M, D), the norm's weight, the weights and the biases, as
// `bits` wants them in this order, and of the adapters; a weight's is undefined where it is kept
// elsewhere.
std::vector<Tensor> before_gradients(const std::vector<Tensor>& grads, const Tensor& of_residual,
                                     const RowsOf& from, const Before& before, int64_t bits,
                                     std::vector<Gradient> gradients,
                                     std::vector<Gradient> of_adapters) {
  const auto whole = [](const Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const Tensor given[3] = {whole(grads[0]), whole(grads[1]), whole(grads[2])};
  const Tensor& x = from.held;
  const int64_t M = from.count;
  std::vector<Tensor> result(8);
  if (wants(bits, 0)) result[0] = at::empty({M, from.width}, x.options());
  const Tensor of_norm = run_sums(wants(bits, 1), M, from.width, x);
  const bool of_biases = wants(bits, 5) || wants(bits, 6) || wants(bits, 7);
  const Tensor of_bias = run_sums(of_biases, M, before.rotation.J, x);
  for_dtype(x.scalar_type(), "before_attention's x", [&](auto tag) {
    before_backward<decltype(tag)>(given, whole(of_residual), from, before, gradients,
                                   of_adapters, result[0], of_norm, of_bias);
  });
  result[1] = total(of_norm, x.scalar_type());
  for (size_t i = 0; i < 3; ++i) result[2 + i] = gradients[i].finish();
  finish(of_adapters, result);
  if (!of_biases) return result;
  int64_t column = 0;
  const Tensor biases = total(of_bias, x.scalar_type());
  for (size_t i = 0; i < 3; ++i) {
    const int64_t count = before.weights[i].size(0);
    if (wants(bits, 5 + static_cast<int64_t>(i))) result[5 + i] = biases.narrow(0, column, count);
    column += count;
  }
  return result;
}

// The same where a weight's optimizer keeps its gradients' sum (`totals`, float32): it is added to,
// or written over if it is new. `rows`: those of x, if it holds more.
std::vector<Tensor> before_attention_backward(
    const OptionalTensor& of_q, const OptionalTensor& of_k, const OptionalTensor& of_v,
    const OptionalTensor& of_residual, const Tensor& x, const Tensor& norm, double eps, bool offset,
    const std::vector<Tensor>& weights, const Tensor& cos, const Tensor& sin, int64_t D,
    const OptionalTensors& adapters, Scales scales, int64_t bits, const OptionalTensors& totals,
    int64_t are_new, const OptionalTensor& rows) {
  const auto or_none = [](const OptionalTensor& t) { return t ? *t : Tensor(); };
  const RowsOf from(x, rows);
  Before before = before_of(x, from.count, norm, eps, offset, weights, {}, cos, sin, D);
  before.adapters = adapters_of("before_attention", adapters, scales, weights);
  std::vector<Gradient> of_adapters;
  if (!adapters.empty())
    of_adapters =
        gradients_into(totals, are_new, weights.size(), tensors_of(before.adapters), bits, 8);
  auto made = before_gradients({or_none(of_q), or_none(of_k), or_none(of_v)},
                               or_none(of_residual), from, before, bits,
                               gradients_into(totals, are_new, 0, weights, bits, 2),
                               std::move(of_adapters));
  if (made[0].defined() && !rows) made[0] = made[0].view(x.sizes());
  return made;
}

struct BeforeAttention : Function<BeforeAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& norm,
                               double eps, bool offset, const Tensor& of_q, const Tensor& of_k,
                               const Tensor& of_v, const OptionalTensor& bias_q,
                               const OptionalTensor& bias_k, const OptionalTensor& bias_v,
                               const Tensor& cos, const Tensor& sin, int64_t D, int64_t bits) {
    at::AutoDispatchBelowADInplaceOrView below;
    const std::vector<Tensor> weights{of_q, of_k, of_v};
    std::vector<Tensor> biases;
    if (bias_q) biases = {*bias_q, *bias_k, *bias_v};
    const Before in = before_of(x, num_rows(x), norm, eps, offset, weights, biases, cos, sin, D);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["D"] = D;
    ctx->saved_data["bits"] = bits;
    ctx->save_for_backward({x, norm, of_q, of_k, of_v, cos, sin});
    ctx->set_materialize_grads(false);
    keep_leaves(ctx, weights);
    const auto [q, k, v, residual] = made_before(x, in);
    return {q, k, v, residual};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("before_attention");
    const auto saved = ctx->get_saved_variables();
    const std::vector<Tensor> weights{saved[2], saved[3], saved[4]};
    const int64_t bits = ctx->saved_data["bits"].toInt();
    variable_list result(14);
    if (!grads[0].defined() && !grads[1].defined() && !grads[2].defined()) {
      result[0] = grads[3];
      return result;
    }
    const Tensor& x = saved[0];
    const Before before = before_of(x, num_rows(x), saved[1], ctx->saved_data["eps"].toDouble(),
                                    ctx->saved_data["offset"].toBool(), weights, {}, saved[5],
                                    saved[6], ctx->saved_data["D"].toInt());
    const auto made =
        before_gradients({grads[0], grads[1], grads[2]}, grads[3], RowsOf(x), before, bits,
                         gradients_of(ctx, weights, bits, 2), {});
    if (made[0].defined()) result[0] = made[0].view(x.sizes());
    result[1] = made[1];
    for (size_t i = 2; i < made.size(); ++i) result[2 + i] = made[i];
    return result;
  }
};

FourTensors before_attention_autograd(const Tensor& x, const Tensor& norm, double eps, bool offset,
                                      const std::vector<Tensor>& weights,
                                      const OptionalTensors& biases, const Tensor& cos,
                                      const Tensor& sin, int64_t D, const OptionalTensors& adapters,
                                      Scales scales) {
  const std::vector<Tensor> b = some(biases);
  const Tensor none;
  const auto bias = [&](size_t i) -> const Tensor* { return b.empty() ? &none : &b[i]; };
  TORCH_CHECK(weights.size() == 3 && (b.empty() || b.size() == 3),
              "before_attention must be given three weights; got ", weights.size(), ".");
  const int64_t bits =
      wanted({&x, &norm, &weights[0], &weights[1], &weights[2], bias(0), bias(1), bias(2)});
  if (!bits || !x.numel() || !adapters.empty()) {
    check_no_adapters(bits, adapters, "before_attention");
    at::AutoDispatchBelowADInplaceOrView below;
    return before_attention(x, norm, eps, offset, weights, biases, cos, sin, D, adapters, scales);
  }
  const auto optional = [&](size_t i) {
    return b.empty() ? OptionalTensor() : OptionalTensor(b[i]);
  };
  const auto made =
      BeforeAttention::apply(x, norm, eps, offset, weights[0], weights[1], weights[2], optional(0),
                             optional(1), optional(2), cos, sin, D, bits);
  return {made[0], made[1], made[2], made[3]};
}

After after_of(const Tensor& attended, const Tensor& residual, const Tensor& out,
               const OptionalTensor& bias, const Tensor& norm, double eps, bool offset,
               const Tensor& gate, const Tensor& up, const Tensor& down, bool tanh) {
  const auto dtype = residual.scalar_type();
  const int64_t D = residual.dim() ? residual.size(-1) : 0;
  check_weights("after_attention", residual, norm, {gate, up});
  TORCH_CHECK(gate.sizes() == up.sizes() && down.dim() == 2 && down.size(0) == D &&
                  down.size(1) == gate.size(0) && down.scalar_type() == dtype,
              "after_attention's MLP must be (I, D), (I, D) and (D, I) ", dtype, "; got ",
              gate.sizes(), ", ", up.sizes(), " and ", down.sizes(), " ", down.scalar_type(), ".");
  TORCH_CHECK(out.dim() == 2 && out.size(0) == D && attended.dim() &&
                  attended.size(-1) == out.size(1) &&
                  attended.numel() / std::max<int64_t>(1, out.size(1)) ==
                      residual.numel() / std::max<int64_t>(1, D) &&
                  attended.scalar_type() == dtype && out.scalar_type() == dtype,
              "after_attention must be given (..., A), (..., D) and a weight (D, A), all ", dtype,
              "; got ", attended.sizes(), " ", attended.scalar_type(), ", ", residual.sizes(),
              " and ", out.sizes(), " ", out.scalar_type(), ".");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == D && bias->scalar_type() == dtype),
              "after_attention's bias must be (", D, ",) ", dtype, "; got ", bias->sizes(), " ",
              bias->scalar_type(), ".");
  return {plain(out),
          bias ? plain(*bias) : Tensor(),
          {plain(norm), static_cast<float>(eps), offset},
          {plain(gate), plain(up)},
          plain(down),
          tanh,
          std::vector<Adapter>(4)};
}

Tensor made_after(const Tensor& attended, const Tensor& residual, const After& after,
                  const Kept& kept) {
  Tensor y = at::empty(residual.sizes(), residual.options());
  for_dtype(residual.scalar_type(), "after_attention's residual", [&](auto tag) {
    using T = decltype(tag);
    if (residual.numel())
      after.tanh ? after_forward<T, GeluTanh>(attended, residual, after, kept, y)
                 : after_forward<T, Silu>(attended, residual, after, kept, y);
  });
  return y;
}

Tensor after_attention(const Tensor& attended, const Tensor& residual, const Tensor& out,
                       const OptionalTensor& bias, const Tensor& norm, double eps, bool offset,
                       const Tensor& gate, const Tensor& up, const Tensor& down, bool tanh, bool,
                       const OptionalTensors& adapters, Scales scales) {
  After after = after_of(attended, residual, out, bias, norm, eps, offset, gate, up, down, tanh);
  after.adapters = adapters_of("after_attention", adapters, scales, {out, gate, up, down});
  return made_after(attended, residual, after, {});
}

// y, and what the backward pass reads.
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

ThreeTensors after_attention_kept(const Tensor& attended, const Tensor& residual, const Tensor& out,
                                  const OptionalTensor& bias, const Tensor& norm, double eps,
                                  bool offset, const Tensor& gate, const Tensor& up,
                                  const Tensor& down, bool tanh, bool recomputes,
                                  const OptionalTensors& adapters, Scales scales) {
  After after = after_of(attended, residual, out, bias, norm, eps, offset, gate, up, down, tanh);
  after.adapters = adapters_of("after_attention", adapters, scales, {out, gate, up, down});
  Kept kept{at::empty(residual.sizes(), residual.options())};
  if (!recomputes)
    kept.both =
        at::empty({residual.numel() / residual.size(-1), 2 * gate.size(0)}, residual.options());
  return {made_after(attended, residual, after, kept), kept.hidden, kept.both};
}

// Gradients of what attention gave, the residual, the bias, the norm's weight, `out`, gate, up and
// `down`, as `bits` wants them in this order, and of the adapters; a weight's is undefined where it is
// kept elsewhere.
std::vector<Tensor> after_gradients(const Tensor& given, const Tensor& attended, const After& after,
                                    const Kept& kept, int64_t bits, std::vector<Gradient> gradients,
                                    std::vector<Gradient> of_adapters) {
  const Tensor g = given.contiguous();
  const int64_t D = after.out.size(0), M = g.numel() / D;
  AfterGradients of;
  of.weights = std::move(gradients);
  of.adapters = std::move(of_adapters);
  if (wants(bits, 0)) of.attended = at::empty(attended.sizes(), attended.options());
  const bool adapts_out = !of.adapters.empty() && (of.adapters[0].at || of.adapters[1].at);
  if (wants(bits, 0) || wants(bits, 1) || wants(bits, 2) || of.weights[0].at || adapts_out)
    of.hidden = at::empty(g.sizes(), g.options());
  of.bias = run_sums(wants(bits, 2), M, D, g);
  of.norm = run_sums(wants(bits, 3), M, D, g);
  for_dtype(g.scalar_type(), "after_attention's residual", [&](auto tag) {
    using T = decltype(tag);
    after.tanh ? after_backward<T, GeluTanh>(g, attended, after, kept, of)
               : after_backward<T, Silu>(g, attended, after, kept, of);
  });
  std::vector<Tensor> result(8);
  result[0] = of.attended;
  if (wants(bits, 1)) result[1] = of.hidden;
  result[2] = total(of.bias, g.scalar_type());
  result[3] = total(of.norm, g.scalar_type());
  for (size_t i = 0; i < 4; ++i) result[4 + i] = of.weights[i].finish();
  finish(of.adapters, result);
  return result;
}

// Of (M, D) gradients and what was kept for them.
void check_kept(const char* what, const Tensor& kept, int64_t width, const Tensor& given,
                const OptionalTensor& rows) {
  TORCH_CHECK(kept.dim() && kept.size(-1) == width && kept.scalar_type() == given.scalar_type() &&
                  (rows ? rows->numel() : num_rows(kept)) == num_rows(given),
              "after_attention_backward's ", what, " must be (", num_rows(given), ", ", width, ") ",
              given.scalar_type(), ", or hold as many chosen rows; got ", kept.sizes(), " ",
              kept.scalar_type(), rows ? " and " : "", rows ? std::to_string(rows->numel()) : "",
              rows ? " chosen rows." : ".");
}

// The same into sums, as `before_attention_backward`; `rows` are those of hidden and both.
std::vector<Tensor> after_attention_backward(const Tensor& given, const Tensor& attended,
                                             const Tensor& hidden, const OptionalTensor& both,
                                             const Tensor& out, const Tensor& norm, double eps,
                                             bool offset, const Tensor& gate, const Tensor& up,
                                             const Tensor& down, bool tanh,
                                             const OptionalTensors& adapters, Scales scales,
                                             int64_t bits, const OptionalTensors& totals,
                                             int64_t are_new, const OptionalTensor& rows) {
  const std::vector<Tensor> weights{out, gate, up, down};
  After after =
      after_of(attended, given, out, std::nullopt, norm, eps, offset, gate, up, down, tanh);
  check_kept("hidden", hidden, given.size(-1), given, rows);
  if (both) check_kept("both", *both, 2 * gate.size(0), given, rows);
  after.adapters = adapters_of("after_attention", adapters, scales, weights);
  std::vector<Gradient> of_adapters;
  if (!adapters.empty())
    of_adapters =
        gradients_into(totals, are_new, weights.size(), tensors_of(after.adapters), bits, 8);
  return after_gradients(given, attended, after, {hidden, both ? *both : Tensor(), rows}, bits,
                         gradients_into(totals, are_new, 0, weights, bits, 4),
                         std::move(of_adapters));
}

struct AfterAttention : Function<AfterAttention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& attended, const Tensor& residual,
                        const Tensor& out, const OptionalTensor& bias, const Tensor& norm,
                        double eps, bool offset, const Tensor& gate, const Tensor& up,
                        const Tensor& down, bool tanh, bool recomputes, int64_t bits) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [y, hidden, both] =
        after_attention_kept(attended, residual, out, bias, norm, eps, offset, gate, up, down, tanh,
                             recomputes, OptionalTensors(), Scales());
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["tanh"] = tanh;
    ctx->saved_data["bits"] = bits;
    ctx->save_for_backward({attended, out, norm, gate, up, down, hidden, both});
    keep_leaves(ctx, {out, gate, up, down});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("after_attention");
    const auto saved = ctx->get_saved_variables();
    const std::vector<Tensor> weights{saved[1], saved[3], saved[4], saved[5]};
    const int64_t bits = ctx->saved_data["bits"].toInt();
    const After after =
        after_of(saved[0], saved[6], saved[1], std::nullopt, saved[2],
                 ctx->saved_data["eps"].toDouble(), ctx->saved_data["offset"].toBool(), saved[3],
                 saved[4], saved[5], ctx->saved_data["tanh"].toBool());
    const auto made = after_gradients(grads[0], saved[0], after, {saved[6], saved[7]}, bits,
                                      gradients_of(ctx, weights, bits, 4), {});
    variable_list result(13);
    for (size_t i = 0; i < 2; ++i) result[i] = made[i];
    result[2] = made[4];
    result[3] = made[2];
    result[4] = made[3];
    for (size_t i = 0; i < 3; ++i) result[7 + i] = made[5 + i];
    return result;
  }
};

Tensor after_attention_autograd(const Tensor& attended, const Tensor& residual, const Tensor& out,
                                const OptionalTensor& bias, const Tensor& norm, double eps,
                                bool offset, const Tensor& gate, const Tensor& up,
                                const Tensor& down, bool tanh, bool recomputes,
                                const OptionalTensors& adapters, Scales scales) {
  const Tensor none;
  const int64_t bits =
      wanted({&attended, &residual, bias ? &*bias : &none, &norm, &out, &gate, &up, &down});
  check_no_adapters(bits, adapters, "after_attention");
  if (bits && residual.numel())
    return AfterAttention::apply(attended, residual, out, bias, norm, eps, offset, gate, up, down,
                                 tanh, recomputes, bits);
  at::AutoDispatchBelowADInplaceOrView below;
  return after_attention(attended, residual, out, bias, norm, eps, offset, gate, up, down, tanh,
                         recomputes, adapters, scales);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "before_attention(Tensor x, Tensor norm, float eps, bool unit_offset, Tensor[] weights,"
      " Tensor?[] biases, Tensor cos, Tensor sin, int width, Tensor?[] adapters, float[] scales)"
      " -> (Tensor q, Tensor k, Tensor v, Tensor residual)");
  m.def(
      "before_attention_backward(Tensor? q, Tensor? k, Tensor? v, Tensor? residual, Tensor x,"
      " Tensor norm, float eps, bool unit_offset, Tensor[] weights, Tensor cos, Tensor sin,"
      " int width, Tensor?[] adapters, float[] scales, int wanted, Tensor(a!)?[] totals,"
      " int are_new, Tensor? rows) -> Tensor[]");
  m.def(
      "after_attention(Tensor attended, Tensor residual, Tensor out, Tensor? bias, Tensor norm,"
      " float eps, bool unit_offset, Tensor gate, Tensor up, Tensor down, bool tanh,"
      " bool recomputes, Tensor?[] adapters, float[] scales) -> Tensor");
  m.def(
      "after_attention_kept(Tensor attended, Tensor residual, Tensor out, Tensor? bias,"
      " Tensor norm, float eps, bool unit_offset, Tensor gate, Tensor up, Tensor down, bool tanh,"
      " bool recomputes, Tensor?[] adapters, float[] scales)"
      " -> (Tensor y, Tensor hidden, Tensor both)");
  m.def(
      "after_attention_backward(Tensor given, Tensor attended, Tensor hidden, Tensor? both,"
      " Tensor out, Tensor norm, float eps, bool unit_offset, Tensor gate, Tensor up, Tensor down,"
      " bool tanh, Tensor?[] adapters, float[] scales, int wanted, Tensor(a!)?[] totals,"
      " int are_new, Tensor? rows) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("before_attention", &before_attention);
  m.impl("after_attention", &after_attention);
  m.impl("before_attention_backward", &before_attention_backward);
  m.impl("after_attention_kept", &after_attention_kept);
  m.impl("after_attention_backward", &after_attention_backward);
}

TORCH_LIBRARY_IMPL(tandem, Autograd, m) {
  m.impl("before_attention", &before_attention_autograd);
  m.impl("after_attention", &after_attention_autograd);
}

}  // namespace layers
}  // namespace tandem
