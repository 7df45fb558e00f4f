// A decode step of a Llama-like model, or its prompts, in one call: the arithmetic of its modules,
// operation by operation and in the same order, over buffers that are used again from layer to layer.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "coded_tensors.h"
#include "gemm.h"
#include "kv_memory.h"
#include "rows.h"
#include "threads.h"

namespace tandem {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

template <class F>
c10::TypedOperatorHandle<F> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

// Tensors of a layer in `weights`, an empty one where the layer has none.
enum Part {
  kInputNorm, kQKV, kQKVBias, kQNorm, kKNorm, kOut, kOutBias, kPostNorm, kGateUp, kGateUpBias,
  kDown, kDownBias,
  // Adapters (arXiv:2106.09685) of the four products above: A of those over one input below one
  // another, then B of each.
  kQKVA, kQB, kKB, kVB, kOutA, kOutB, kGateUpA, kGateB, kUpB, kDownA, kDownB, kParts
};
// Weights of a layer that may stay codes (coded.h), which then stand in place of the packed ones.
enum CodedPart { kCodedQ, kCodedK, kCodedV, kCodedOut, kCodedGate, kCodedUp, kCodedDown, kCodedParts };
// After the layers: the last norm, the vocabulary head and its bias.
enum Last { kLastNorm, kHead, kHeadBias, kLastParts };
// What is kept of a layer for a backward pass, a row for each token that has been run: queries, keys
// and values, turned; the sum behind attention; gate and up; what the layer gives.
enum State { kStateQKV, kStateHidden, kStateInner, kStateOut, kStates };

// body(row) on threads where rows of about `numbers` numbers are worth it.
template <class Body>
void for_each_row(int64_t rows, int64_t numbers, Body body) {
  parallel_for(0, rows, 1 + 32768 / numbers, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) body(i);
  });
}

// A model's weights and KV memory, held from step to step.
class LlamaDecoder : public torch::CustomClassHolder {
 public:
  // embedding (V, width); cos and sin (positions, D); per layer keys, values and window; shape:
  // query heads, key heads, head width D, inner width, outputs of the vocabulary head, and the rank of
  // adapters, whose outputs are multiplied by `adapter_scale`. stored: codes and scales of each of
  // kCodedParts of each layer and of the vocabulary head, empty where a packed weight is given; or
  // nothing at all; code: their kind and block.
  LlamaDecoder(Tensor embedding, Tensor cos, Tensor sin, Tensors weights, Tensors keys,
               Tensors values, std::vector<int64_t> shape, std::vector<int64_t> windows,
               double eps, double scale, double adapter_scale, Tensors stored,
               std::vector<int64_t> code)
      : embedding_(std::move(embedding)), cos_(std::move(cos)), sin_(std::move(sin)),
        weights_(std::move(weights)), keys_(std::move(keys)), values_(std::move(values)),
        windows_(std::move(windows)), scale_(scale), eps_(static_cast<float>(eps)),
        adapter_scale_(static_cast<float>(adapter_scale)), stored_(std::move(stored)) {
    TORCH_CHECK(shape.size() == 6, "LlamaDecoder's shape must be 6 numbers; got ", shape.size(),
                ".");
    Hq_ = shape[0], Hkv_ = shape[1], D_ = shape[2], I_ = shape[3], outputs_ = shape[4];
    rank_ = shape[5];
    const size_t layers = windows_.size();
    TORCH_CHECK(keys_.size() == layers && values_.size() == layers &&
                    weights_.size() == layers * kParts + kLastParts,
                "LlamaDecoder must get keys, values and ", static_cast<int>(kParts),
                " weights for each of ", layers, " layers; got ", keys_.size(), ", ",
                values_.size(), " and ", weights_.size(), ".");
    TORCH_CHECK(Hkv_ > 0 && Hq_ % Hkv_ == 0,
                "LlamaDecoder must get a multiple of the key heads as query heads; got ", Hq_,
                " and ", Hkv_, ".");
    for (size_t l = 0; l < layers; ++l)
      check_memory(Hkv_, D_, D_, embedding_.scalar_type(), keys_[l], values_[l], "LlamaDecoder");
    for (const Tensor* t : {&embedding_, &cos_, &sin_})
      TORCH_CHECK(t->dim() == 2 && t->is_contiguous() &&
                      t->scalar_type() == embedding_.scalar_type(),
                  "LlamaDecoder's embedding, cos and sin must be contiguous and of one type; got ",
                  t->sizes(), " ", t->scalar_type(), ".");
    TORCH_CHECK(cos_.sizes() == sin_.sizes() && cos_.size(1) <= D_ && cos_.size(1) % 2 == 0,
                "LlamaDecoder's cos and sin must be (positions, R), R even and at most ", D_,
                "; got ", cos_.sizes(), " and ", sin_.sizes(), ".");
    if (!stored_.empty()) read_codes(code);
  }

  // From now on every token's states are kept, in the order in which tokens are run: `states` are
  // kStates matrices of each layer with room for all tokens to come; none: keeps nothing any more.
  // Behind the last layer's attention only the rows of tokens whose logits are made are written.
  void keep(Tensors states) {
    const int64_t width = embedding_.size(1);
    const int64_t widths[kStates] = {(Hq_ + 2 * Hkv_) * D_, width, 2 * I_, width};
    TORCH_CHECK(states.empty() || states.size() == windows_.size() * kStates,
                "keep must get ", static_cast<int>(kStates), " matrices for each of ",
                windows_.size(), " layers, or none; got ", states.size(), ".");
    for (size_t i = 0; i < states.size(); ++i)
      TORCH_CHECK(states[i].dim() == 2 && states[i].size(0) == states[0].size(0) &&
                      states[i].size(1) == widths[i % kStates] && states[i].is_contiguous() &&
                      states[i].scalar_type() == embedding_.scalar_type() && states[i].is_cpu(),
                  "keep must get contiguous matrices of the weights' type, as many rows each, and ",
                  widths[i % kStates], " columns as number ", i, "; got ", states[i].sizes(), " ",
                  states[i].scalar_type(), ".");
    states_ = std::move(states);
    num_kept_ = 0;
  }

  // tokens and positions (n,) int64, tables (n, W) int32; logits (n, outputs) of what follows.
  Tensor step(const Tensor& tokens, const Tensor& positions, const Tensor& tables) {
    const Tensor at = positions.contiguous();
    const int64_t n = at.numel();
    const Sizes size{Hq_, Hkv_, Hq_ / Hkv_, D_, D_};
    const auto kind = [&](size_t layer) {
      return Kind{static_cast<float>(scale_), windows_[layer], 0.0f, nullptr};
    };
    check_tables(tables, "LlamaDecoder");
    for (size_t l = 0; l < windows_.size(); ++l)
      if (l == 0 || windows_[l] != windows_[l - 1] || keys_[l].size(0) != keys_[l - 1].size(0))
        check_decoding(tables, at, n, kind(l), keys_[l].size(0), "LlamaDecoder");
    const int64_t threads = decoding_threads(at.const_data_ptr<int64_t>(), n, size);
    const Tensor mixed = at::empty({n, Hq_ * D_}, embedding_.options());
    return by_type(tokens, at, std::nullopt, [&](const Tensor& qkv, size_t layer, auto zero) {
      using T = decltype(zero);
      const T* const made = qkv.const_data_ptr<T>();
      const auto rows = [&](int64_t head) {
        return Rows<const T>{made + head * D_, qkv.size(1), D_};
      };
      attend_paged(Paged<T>{rows(0), rows(Hq_), rows(Hq_ + Hkv_),
                            keys_[layer].mutable_data_ptr<T>(),
                            values_[layer].mutable_data_ptr<T>(), mixed.mutable_data_ptr<T>(),
                            tables.const_data_ptr<int32_t>(), tables.stride(0),
                            at.const_data_ptr<int64_t>(), size, kind(layer)},
                   n, threads);
      return mixed;
    });
  }

  // Columns of a row, of which token, position, number and place change as it draws.
  enum Column { kKey, kLimit, kToken, kPosition, kNumber, kPlace, kColumns };

  // Again and again a step, and a draw for each row from softmax(logits / temperature): no token from
  // `num_ids` on, and none of `banned` as one of an answer's first `least`. Rows whose answer ends, by
  // one of `stops` or by its limit, leave, and the last take their places in `columns` (kColumns, n)
  // int64 and `tables` (n, W) int32. It ends after `most` steps, or when an answer has ended and at
  // most `until` rows go on. Returns the steps; of each draw the token that was run, the place and the
  // token drawn (3, m) int64, its log-prob, the same among what could be drawn, and the entropy (3, m)
  // float32; of each end the row, the step from 1 and whether it was a stop (e, 3); and the rows that
  // are left, as they were numbered before.
  std::tuple<int64_t, Tensor, Tensor, Tensor, Tensor> advance(
      const Tensor& columns, const Tensor& tables, std::vector<int64_t> stops,
      std::vector<int64_t> banned, int64_t least, double temperature, int64_t num_ids, int64_t most,
      int64_t until) {
    static const auto draw = op<std::tuple<Tensor, Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, double, int64_t)>("tandem::sample");
    static const auto read = op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double,
                                                           bool, bool)>("tandem::token_logprobs");
    check_tables(tables, "LlamaDecoder");
    TORCH_CHECK(columns.dim() == 2 && columns.size(0) == kColumns && columns.stride(1) == 1 &&
                    columns.scalar_type() == at::kLong && columns.is_cpu() &&
                    columns.size(1) == tables.size(0),
                "advance must get ", static_cast<int>(kColumns),
                " int64 numbers of each row of tables, a column each; got ", columns.sizes(), " ",
                columns.scalar_type(), " for ", tables.size(0), " rows.");
    int64_t* const first = columns.mutable_data_ptr<int64_t>();
    int32_t* const blocks = tables.mutable_data_ptr<int32_t>();
    const auto column = [&](Column which) { return first + which * columns.stride(0); };
    int64_t n = columns.size(1), steps = 0;
    std::vector<int64_t> live(n), ids[3], ended;
    std::vector<float> numbers[3];
    std::iota(live.begin(), live.end(), 0);
    for (bool enough = false; n > 0 && steps < most && !enough;) {
      const Tensor now = columns.narrow(1, 0, n);
      const Tensor logits = step(now[kToken], now[kPosition], tables.narrow(0, 0, n));
      const Tensor allowed = without(logits, banned, column(kNumber), least);
      const auto [drawn, likely, sampled, chance] =
          draw.call(allowed, now[kKey], now[kNumber], temperature, num_ids);
      const auto [logprob, entropy] = allowed.is_same(logits)
                                          ? std::tuple(likely, chance)
                                          : read.call(logits, drawn, temperature, true, true);
      ++steps;
      const auto append = [&](auto& to, const auto* from) { to.insert(to.end(), from, from + n); };
      append(ids[0], column(kToken));
      append(ids[1], column(kPlace));
      append(ids[2], drawn.const_data_ptr<int64_t>());
      append(numbers[0], logprob.const_data_ptr<float>());
      append(numbers[1], sampled.const_data_ptr<float>());
      append(numbers[2], entropy.const_data_ptr<float>());
      std::copy_n(drawn.const_data_ptr<int64_t>(), n, column(kToken));
      for (const Column counting : {kPosition, kNumber, kPlace})
        for (int64_t i = 0; i < n; ++i) ++column(counting)[i];
      for (int64_t i = 0; i < n;) {
        const bool stopped =
            std::find(stops.begin(), stops.end(), column(kToken)[i]) != stops.end();
        if (!stopped && column(kNumber)[i] < column(kLimit)[i]) {
          ++i;
          continue;
        }
        ended.insert(ended.end(), {live[i], steps, stopped});
        --n;
        for (int c = 0; c < kColumns; ++c) {
          int64_t* const of_all = column(static_cast<Column>(c));
          of_all[i] = of_all[n];
        }
        std::copy_n(blocks + n * tables.stride(0), tables.size(1), blocks + i * tables.stride(0));
        live[i] = live[n];
        enough = n <= until;
      }
    }
    live.resize(n);
    const auto made = [](const auto* parts, int64_t count, at::ScalarType type) {
      const int64_t m = static_cast<int64_t>(parts[0].size());
      Tensor all = at::empty({count, m}, at::TensorOptions(type));
      auto* to = static_cast<std::decay_t<decltype(parts[0][0])>*>(all.mutable_data_ptr());
      for (int64_t i = 0; i < count; ++i) std::copy_n(parts[i].data(), m, to + i * m);
      return all;
    };
    return {steps, made(ids, 3, at::kLong), made(numbers, 3, at::kFloat),
            made(&ended, 1, at::kLong).view({-1, 3}), made(&live, 1, at::kLong).view({-1})};
  }

  // Prompts side by side, or parts of prompts: tokens and positions (n,) int64, cu_seqlens (G + 1,)
  // int32; tables (G, W) int32, the blocks of the tokens here; lasts (m,) int64, the tokens whose
  // logits (m, outputs) are made. all_tables and starts, if memory holds what comes before: the
  // blocks of the whole sequences, and how many tokens are before.
  Tensor prefill(const Tensor& tokens, const Tensor& positions, const Tensor& lasts,
                 const Tensor& cu_seqlens, const Tensor& tables,
                 const std::optional<Tensor>& all_tables, const std::optional<Tensor>& starts) {
    TORCH_CHECK(all_tables.has_value() == starts.has_value(),
                "prefill must get both all_tables and starts, or neither.");
    return by_type(tokens, positions, lasts, [&](const Tensor& qkv, size_t layer, auto) {
      static const auto store = op<void(const Tensor&, const Tensor&, Tensor&, Tensor&,
                                        const Tensor&, const Tensor&)>("tandem::store_kv");
      static const auto attention =
          op<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, int64_t,
                    double, const std::optional<Tensor>&, const std::optional<Tensor>&,
                    const std::optional<Tensor>&)>(
              "tandem::varlen_attention");
      static const auto continued =
          op<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                    const Tensor&, double, int64_t, double, const std::optional<Tensor>&)>(
              "tandem::continued_attention");
      store.call(keys(qkv), values(qkv), keys_[layer], values_[layer], tables, cu_seqlens);
      if (starts)
        return continued.call(queries(qkv), keys_[layer], values_[layer], *all_tables, *starts,
                              cu_seqlens, scale_, windows_[layer], 0.0, std::nullopt);
      return attention.call(queries(qkv), keys(qkv), values(qkv), cu_seqlens, scale_,
                            windows_[layer], 0.0, std::nullopt, std::nullopt, std::nullopt);
    });
  }

 private:
  void read_codes(const std::vector<int64_t>& code) {
    const size_t layers = windows_.size(), count = layers * kCodedParts + 1;
    TORCH_CHECK(stored_.size() == 2 * count && code.size() == 2, "LlamaDecoder must get codes and scales of ",
                count, " weights, their kind and block; got ", stored_.size(), " and ", code.size(), ".");
    const int64_t width = embedding_.size(1), q = Hq_ * D_, kv = Hkv_ * D_;
    const int64_t shapes[kCodedParts][2] = {{q, width},  {kv, width}, {kv, width}, {width, q},
                                            {I_, width}, {I_, width}, {width, I_}};
    for (size_t i = 0; i < count; ++i) {
      const Tensor &codes = stored_[2 * i], &scales = stored_[2 * i + 1];
      const bool is_head = i + 1 == count;
      const int64_t N = is_head ? outputs_ : shapes[i % kCodedParts][0];
      const int64_t K = is_head ? width : shapes[i % kCodedParts][1];
      codes_.push_back(codes.numel() ? std::optional(coded(codes, scales, code[0], code[1], N, K))
                                     : std::nullopt);
    }
  }

  // The weights whose outputs lie side by side behind a packed weight's place: the first of them in
  // codes_, and how many outputs each has.
  struct Beside {
    size_t first;
    std::vector<int64_t> widths;
  };
  Beside beside(size_t weight) const {
    const size_t layer = weight / kParts;
    if (layer == windows_.size()) return {layer * kCodedParts, {outputs_}};
    const size_t first = layer * kCodedParts;
    switch (weight % kParts) {
      case kQKV: return {first + kCodedQ, {Hq_ * D_, Hkv_ * D_, Hkv_ * D_}};
      case kOut: return {first + kCodedOut, {embedding_.size(1)}};
      case kGateUp: return {first + kCodedGate, {I_, I_}};
      default: return {first + kCodedDown, {embedding_.size(1)}};
    }
  }

  template <class Attend>
  Tensor by_type(const Tensor& tokens, const Tensor& positions, const std::optional<Tensor>& lasts,
                 const Attend& attend) {
    if (embedding_.scalar_type() == at::kFloat) return run<float>(tokens, positions, lasts, attend);
    TORCH_CHECK(embedding_.scalar_type() == at::kBFloat16,
                "LlamaDecoder's weights must be float32 or bfloat16; got ",
                embedding_.scalar_type(), ".");
    return run<bf16>(tokens, positions, lasts, attend);
  }

  // Logits of all tokens, or of `lasts`; attend(qkv, layer, type tag) is n rows of Hq * D.
  template <class T, class Attend>
  Tensor run(const Tensor& tokens_, const Tensor& positions_, const std::optional<Tensor>& lasts,
             const Attend& attend) {
    const Tensor tokens = tokens_.contiguous(), positions = positions_.contiguous();
    check_rows(tokens, positions);
    int64_t n = tokens.size(0);
    const int64_t width = embedding_.size(1), qkv_width = (Hq_ + 2 * Hkv_) * D_;
    const auto options = embedding_.options();
    Tensor h = at::empty({n, width}, options), normed = at::empty({n, width}, options);
    Tensor inner, gated, qkv;
    const bool keeps = !states_.empty();
    if (!keeps) qkv = at::empty({n, qkv_width}, options);
    const int64_t first = num_kept_;
    TORCH_CHECK(!keeps || first + n <= states_[0].size(0), "states must be kept of at most ",
                keeps ? states_[0].size(0) : 0, " tokens; got ", first + n, ".");
    const auto kept = [&](size_t layer, State which) {
      return states_[layer * kStates + which].narrow(0, first, n);
    };
    T* const x = normed.mutable_data_ptr<T>();
    const int64_t* ids = tokens.const_data_ptr<int64_t>();
    const T* table = embedding_.const_data_ptr<T>();
    T* const embedded = h.mutable_data_ptr<T>();
    for (int64_t i = 0; i < n; ++i)
      std::copy_n(table + ids[i] * width, width, embedded + i * width);
    for (size_t l = 0; l < windows_.size(); ++l) {
      norm(h.const_data_ptr<T>(), l * kParts + kInputNorm, n, width, width, x);
      if (keeps) qkv = kept(l, kStateQKV);
      linear(x, width, n, width, l * kParts + kQKV, qkv_width, qkv.mutable_data_ptr<T>());
      adapt(x, width, n, width, l * kParts + kQKVA, {Hq_ * D_, Hkv_ * D_, Hkv_ * D_},
            qkv.mutable_data_ptr<T>());
      turn(qkv.mutable_data_ptr<T>(), l, positions);
      Tensor mixed = attend(qkv, l, T{});
      const bool narrows = lasts && l + 1 == windows_.size(), writes = keeps && !narrows;
      if (narrows) {  // nothing reads the other tokens any more
        mixed = mixed.index_select(0, *lasts);
        h = h.index_select(0, *lasts);
        n = h.size(0);
      }
      // What is not kept is added in place.
      Tensor sum = writes ? kept(l, kStateHidden) : h;
      add_linear(mixed.const_data_ptr<T>(), Hq_ * D_, n, Hq_ * D_, l * kParts + kOut,
                 l * kParts + kOutA, width, sum.mutable_data_ptr<T>(), h.const_data_ptr<T>());
      norm(sum.const_data_ptr<T>(), l * kParts + kPostNorm, n, width, width, x);
      if (writes) inner = kept(l, kStateInner);
      else if (keeps || !inner.defined()) inner = at::empty({n, 2 * I_}, options);
      T* const gate = inner.mutable_data_ptr<T>();
      linear(x, width, n, width, l * kParts + kGateUp, 2 * I_, gate);
      adapt(x, width, n, width, l * kParts + kGateUpA, {I_, I_}, gate);
      if (keeps && narrows) {
        states_[l * kStates + kStateHidden].index_copy_(0, *lasts + first, sum);
        states_[l * kStates + kStateInner].index_copy_(0, *lasts + first, inner);
      }
      if (keeps && !gated.defined()) gated = at::empty({n, I_}, options);
      T* const product = keeps ? gated.mutable_data_ptr<T>() : gate;
      const int64_t stride = keeps ? I_ : 2 * I_;
      for_each_row(n, 4 * I_, [&](int64_t i) {
        const T* const row = gate + i * 2 * I_;
        gated_row<Silu>(row, row + I_, product + i * stride, I_);
      });
      h = writes ? kept(l, kStateOut) : sum;
      add_linear(product, stride, n, I_, l * kParts + kDown, l * kParts + kDownA, width,
                 h.mutable_data_ptr<T>(), sum.const_data_ptr<T>());
      if (keeps && narrows) states_[l * kStates + kStateOut].index_copy_(0, *lasts + first, h);
    }
    if (keeps) num_kept_ = first + tokens.size(0);
    const size_t last = windows_.size() * kParts;
    norm(h.const_data_ptr<T>(), last + kLastNorm, n, width, width, x);
    Tensor logits = at::empty({n, outputs_}, options);
    linear(x, width, n, width, last + kHead, outputs_, logits.mutable_data_ptr<T>());
    return logits;
  }

  // The logits, without `banned` for rows that have drawn fewer than `least` tokens.
  Tensor without(const Tensor& logits, const std::vector<int64_t>& banned, const int64_t* drawn,
                 int64_t least) const {
    const int64_t n = logits.size(0);
    if (std::all_of(drawn, drawn + n, [&](int64_t count) { return count >= least; }))
      return logits;
    Tensor left = at::empty(logits.sizes(), logits.options().dtype(at::kFloat));
    left.copy_(logits);
    float* const row = left.mutable_data_ptr<float>();
    for (int64_t i = 0; i < n; ++i)
      for (const int64_t token : banned) {
        TORCH_CHECK(token >= 0 && token < outputs_, "a banned token must be in [0, ", outputs_,
                    "); got ", token, ".");
        if (drawn[i] < least) row[i * outputs_ + token] = -std::numeric_limits<float>::infinity();
      }
    return left;
  }

  void check_rows(const Tensor& tokens, const Tensor& positions) const {
    TORCH_CHECK(tokens.dim() == 1 && tokens.sizes() == positions.sizes() &&
                    tokens.scalar_type() == at::kLong && positions.scalar_type() == at::kLong,
                "tokens and positions must be (n,) int64; got ", tokens.sizes(), " and ",
                positions.sizes(), ".");
    const int64_t *id = tokens.const_data_ptr<int64_t>(), *at = positions.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < tokens.size(0); ++i) {
      TORCH_CHECK(id[i] >= 0 && id[i] < embedding_.size(0), "a token must be in [0, ",
                  embedding_.size(0), "); got ", id[i], ".");
      TORCH_CHECK(at[i] >= 0 && at[i] < cos_.size(0), "a position must be in [0, ", cos_.size(0),
                  "); got ", at[i], ".");
    }
  }

  // y (rows, D) = x / rms(x) * weight; rows of x and y are `stride` apart and may be the same.
  template <class T>
  void norm(const T* x, size_t weight, int64_t rows, int64_t D, int64_t stride, T* y) const {
    const T* w = weights_[weight].const_data_ptr<T>();
    for_each_row(rows, D,
                 [&](int64_t i) { rms_row<false>(x + i * stride, w, y + i * stride, D, eps_); });
  }

  // y (n, N) = x (n, K) by the packed weight, or by codes, and the bias after it, added to `residual` if
  // given.
  template <class T>
  void linear(const T* x, int64_t x_stride, int64_t n, int64_t K, size_t weight, int64_t N, T* y,
              const T* residual = nullptr) const {
    const Tensor &packed = weights_[weight], &bias = weights_[weight + 1];
    if (!packed.numel() && !codes_.empty()) {
      auto [at, widths] = beside(weight);
      Epilogue<T> epilogue{bias.numel() ? bias.const_data_ptr<T>() : nullptr, residual, N};
      for (const int64_t some : widths) {
        TORCH_CHECK(codes_[at], "weight ", at, " must be packed or codes; got neither.");
        multiply_coded(x, x_stride, n, *codes_[at++], some, K, y, N, epilogue);
        y += some;
        epilogue = epilogue.at(0, some);
      }
      return;
    }
    TORCH_CHECK(packed.numel() == packed_size<T>(N, K) && (!bias.numel() || bias.numel() == N),
                "a packed weight must hold ", packed_size<T>(N, K), " words; got ", packed.numel(),
                ".");
    multiply_packed(x, x_stride, n, packed.const_data_ptr<float>(), N, K, y, N,
                    Epilogue<T>{bias.numel() ? bias.const_data_ptr<T>() : nullptr, residual, N});
  }

  // y (n, all widths) += scale B A x of the products side by side that have an adapter: A x, that times
  // the scale, B of it and the sum are rounded each, as in the adapted layer. `first`: where A is.
  template <class T>
  void adapt(const T* x, int64_t x_stride, int64_t n, int64_t K, size_t first,
             c10::ArrayRef<int64_t> widths, T* y) const {
    const Tensor& down = weights_[first];
    if (!down.numel()) return;
    int64_t inputs = 0, stride = 0;
    for (size_t i = 0; i < widths.size(); ++i) {
      const int64_t words = weights_[first + 1 + i].numel();
      TORCH_CHECK(!words || words == packed_size<T>(widths[i], rank_),
                  "an adapter's packed B must hold ", packed_size<T>(widths[i], rank_),
                  " words; got ", words, ".");
      inputs += words ? rank_ : 0;
      stride += widths[i];
    }
    TORCH_CHECK(down.numel() == packed_size<T>(inputs, K), "adapters' packed A must hold ",
                packed_size<T>(inputs, K), " words; got ", down.numel(), ".");
    Tensor inner = at::empty({n, inputs}, embedding_.options());
    T* const scaled = inner.mutable_data_ptr<T>();
    multiply_packed(x, x_stride, n, down.const_data_ptr<float>(), inputs, K, scaled, inputs,
                    Epilogue<T>{});
    for (int64_t i = 0; i < n * inputs; ++i)
      scaled[i] = static_cast<T>(static_cast<float>(scaled[i]) * adapter_scale_);
    const T* part = scaled;
    for (size_t i = 0; i < widths.size(); y += widths[i], ++i) {
      const Tensor& up = weights_[first + 1 + i];
      if (!up.numel()) continue;
      multiply_packed(part, inputs, n, up.const_data_ptr<float>(), widths[i], rank_, y, stride,
                      Epilogue<T>{nullptr, y, stride});
      part += rank_;
    }
  }

  // y (n, N) = residual + `linear` and the adapter whose A is at `adapter`.
  template <class T>
  void add_linear(const T* x, int64_t x_stride, int64_t n, int64_t K, size_t weight, size_t adapter,
                  int64_t N, T* y, const T* residual) const {
    if (!weights_[adapter].numel()) {
      linear(x, x_stride, n, K, weight, N, y, residual);
      return;
    }
    Tensor made = at::empty({n, N}, embedding_.options());
    T* const adapted = made.mutable_data_ptr<T>();
    linear(x, x_stride, n, K, weight, N, adapted);
    adapt(x, x_stride, n, K, adapter, {N}, adapted);
    for_each_row(n, N, [&](int64_t i) {
      for_columns(N, [&](int64_t c, int lanes) {
        const int64_t at = i * N + c;
        store_lanes(y + at, load_lanes(residual + at, lanes) + load_lanes(adapted + at, lanes),
                    lanes);
      });
    });
  }

  // Queries and keys, each head normed where the layer does that, then turned by their positions.
  template <class T>
  void turn(T* qkv, size_t layer, const Tensor& positions) const {
    const int64_t *at = positions.const_data_ptr<int64_t>(), R = cos_.size(1);
    const int64_t stride = (Hq_ + 2 * Hkv_) * D_;
    const Tensor &q_norm = weights_[layer * kParts + kQNorm],
                 &k_norm = weights_[layer * kParts + kKNorm];
    const bool norms = q_norm.numel();
    const T *const cos = cos_.const_data_ptr<T>(), *const sin = sin_.const_data_ptr<T>();
    for_each_row(positions.size(0), stride, [&](int64_t i) {
      const T *const cosines = cos + at[i] * R, *const sines = sin + at[i] * R;
      T* const row = qkv + i * stride;
      for (int64_t j = 0; norms && j < Hq_ + Hkv_; ++j) {
        const T* w = (j < Hq_ ? q_norm : k_norm).const_data_ptr<T>();
        rms_row<false>(row + j * D_, w, row + j * D_, D_, eps_);
      }
      rope_heads<false>(row, cosines, sines, row, Hq_ + Hkv_, D_, R);
    });
  }

  // Heads of qkv (n, (Hq + 2 Hkv) D), as (n, count, D).
  Tensor heads(const Tensor& qkv, int64_t first, int64_t count) const {
    return qkv.as_strided({qkv.size(0), count, D_}, {qkv.size(1), D_, 1},
                          qkv.storage_offset() + first * D_);
  }
  Tensor queries(const Tensor& qkv) const { return heads(qkv, 0, Hq_); }
  Tensor keys(const Tensor& qkv) const { return heads(qkv, Hq_, Hkv_); }
  Tensor values(const Tensor& qkv) const { return heads(qkv, Hq_ + Hkv_, Hkv_); }

  Tensor embedding_, cos_, sin_;
  Tensors weights_, keys_, values_, states_;
  int64_t num_kept_ = 0;
  std::vector<int64_t> windows_;
  Tensors stored_;
  std::vector<std::optional<Coded>> codes_;
  int64_t Hq_, Hkv_, D_, I_, outputs_, rank_;
  double scale_;
  float eps_, adapter_scale_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.class_<LlamaDecoder>("LlamaDecoder")
      .def(torch::init<Tensor, Tensor, Tensor, Tensors, Tensors, Tensors, std::vector<int64_t>,
                       std::vector<int64_t>, double, double, double, Tensors,
                       std::vector<int64_t>>())
      .def("step", &LlamaDecoder::step)
      .def("advance", &LlamaDecoder::advance)
      .def("keep", &LlamaDecoder::keep)
      .def("prefill", &LlamaDecoder::prefill);
}

}  // namespace tandem
