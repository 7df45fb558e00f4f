// One decode step of a Llama-like model in one call: the same operations, in the same order, that its
// modules would run one by one, without the way through Python between them.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace tandem {
namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

template <typename F>
c10::TypedOperatorHandle<F> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

Tensor linear(const Tensor& x, const Tensor& packed, int64_t N, const Tensor& bias) {
  static const auto f = op<Tensor(const Tensor&, const Tensor&, int64_t, int64_t, const Bias&)>(
      "tandem::linear_packed");
  return f.call(x, packed, N, x.size(-1), bias.numel() ? Bias(bias) : Bias());
}

Tensor rms_norm(const Tensor& x, const Tensor& w, double eps) {
  static const auto f = op<Tensor(const Tensor&, const Tensor&, double, bool)>("tandem::rms_norm");
  return f.call(x, w, eps, false);
}

// Tensors of a layer in `weights`, an empty one where the layer has none.
enum Part {
  kInputNorm, kQKV, kQKVBias, kQNorm, kKNorm, kOut, kOutBias, kPostNorm, kGateUp, kGateUpBias,
  kDown, kDownBias, kParts
};

// shape: query heads, key heads, head width, inner width, vocabulary.
Tensor llama_step(const Tensor& tokens, const Tensor& positions, const Tensor& tables,
                  const Tensor& embedding, const Tensor& cos, const Tensor& sin,
                  at::TensorList weights, at::TensorList keys, at::TensorList values,
                  at::IntArrayRef shape, at::IntArrayRef windows, double eps, double scale) {
  static const auto rotary = op<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&)>("tandem::rotary");
  static const auto attend =
      op<Tensor(const Tensor&, const Tensor&, const Tensor&, Tensor&, Tensor&, const Tensor&,
                const Tensor&, double, int64_t, double, const Bias&)>("tandem::paged_attention");
  static const auto swiglu =
      op<Tensor(const Tensor&, const Tensor&)>("tandem::swiglu");
  const int64_t n = tokens.size(0), Hq = shape[0], Hkv = shape[1], D = shape[2], I = shape[3];
  const int64_t layers = static_cast<int64_t>(keys.size());
  const Tensor c = cos.index_select(0, positions), s = sin.index_select(0, positions);
  Tensor h = embedding.index_select(0, tokens);
  for (int64_t l = 0; l < layers; l++) {
    const auto part = [&](Part p) -> const Tensor& { return weights[l * kParts + p]; };
    const Tensor qkv = linear(rms_norm(h, part(kInputNorm), eps), part(kQKV), (Hq + 2 * Hkv) * D,
                              part(kQKVBias));
    const auto head = [&](int64_t first, int64_t count) {
      return qkv.as_strided({n, count, D}, {qkv.size(1), D, 1}, first * D);
    };
    Tensor q = head(0, Hq), k = head(Hq, Hkv);
    if (part(kQNorm).numel()) {
      q = rms_norm(q.contiguous(), part(kQNorm), eps);
      k = rms_norm(k.contiguous(), part(kKNorm), eps);
    }
    std::tie(q, k) = rotary.call(q, k, c, s);
    Tensor key_memory = keys[l], value_memory = values[l];
    const Tensor mixed = attend.call(q, k, head(Hq + Hkv, Hkv), key_memory, value_memory, tables,
                                     positions, scale, windows[l], 0.0, Bias());
    h = h + linear(mixed.view({n, Hq * D}), part(kOut), h.size(1), part(kOutBias));
    const Tensor inner = linear(rms_norm(h, part(kPostNorm), eps), part(kGateUp), 2 * I,
                                part(kGateUpBias));
    const Tensor gated = swiglu.call(inner.narrow(1, 0, I), inner.narrow(1, I, I));
    h = h + linear(gated, part(kDown), h.size(1), part(kDownBias));
  }
  const Tensor last = rms_norm(h, weights[layers * kParts], eps);
  return linear(last, weights[layers * kParts + 1], shape[4], weights[layers * kParts + 2]);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "llama_step(Tensor tokens, Tensor positions, Tensor tables, Tensor embedding, Tensor cos, "
      "Tensor sin, Tensor[] weights, Tensor(a!)[] keys, Tensor(b!)[] values, int[] shape, "
      "int[] windows, float eps, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("llama_step", &llama_step); }

}  // namespace tandem
