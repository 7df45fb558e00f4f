// Token mixers with a state as torch operators: what a caller may ask, and the gradient.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>

#include "recurrence.h"
#include "segments.h"
#include "tensors.h"

namespace tandem {
namespace {

using at::Tensor;

// Which rows of a state memory the segments have; checked against what one of them holds.
template <class T>
Slots<T> slots_of(const OptionalTensor& state, const OptionalTensor& of,
                  const OptionalTensor& begins, int64_t segments, int64_t numbers,
                  at::ScalarType type, const char* where) {
  if (!state || !state->defined()) return {nullptr, nullptr, nullptr, numbers};
  TORCH_CHECK(state->dim() >= 1 && state->is_contiguous() && state->scalar_type() == type &&
                  state->size(0) > 0 && state->numel() / state->size(0) == numbers,
              where, " must get a contiguous memory of ", numbers, " numbers a sequence in ", type,
              "; got ", state->sizes(), " of ", state->scalar_type(), ".");
  const auto check = [&](const OptionalTensor& x) {
    TORCH_CHECK(x && x->dim() == 1 && x->size(0) == segments && x->is_contiguous() &&
                    x->scalar_type() == at::kLong,
                where, " must get int64 numbers for each of ", segments, " segments.");
  };
  check(of);
  if (begins && begins->defined()) check(begins);
  const int64_t* rows = of->const_data_ptr<int64_t>();
  for (int64_t b = 0; b < segments; ++b)
    TORCH_CHECK(rows[b] >= 0 && rows[b] < state->size(0), where, " must get slots below ",
                state->size(0), "; got ", rows[b], ".");
  return {static_cast<T*>(state->data_ptr()), rows,
          begins && begins->defined() ? begins->const_data_ptr<int64_t>() : nullptr, numbers};
}

// ---- convolution ----

// A weight (C, W) or (C, 1, W) as (W, C) in float32.
Tensor turned_weight(const Tensor& weight) {
  return weight.reshape({weight.size(0), weight.size(-1)}).t().to(at::kFloat).contiguous();
}

OptionalTensor wide(const OptionalTensor& x) {
  if (!x || !x->defined()) return {};
  return x->to(at::kFloat).contiguous();
}

struct Conv {
  Tensor x, weight;
  OptionalTensor bias;

  Conv(const Tensor& x_, const Tensor& weight_, const OptionalTensor& bias_)
      : x(x_.dim() == 2 && x_.stride(1) != 1 ? x_.contiguous() : x_) {
    TORCH_CHECK(x.dim() == 2 && weight_.dim() >= 2 && weight_.size(0) == x.size(1) &&
                    weight_.size(-1) >= 1 && weight_.size(-1) <= 8 &&
                    weight_.numel() == weight_.size(0) * weight_.size(-1),
                "causal_conv must get x (N, C) and a weight (C, W), W of 1 to 8; got ", x.sizes(),
                " and ", weight_.sizes(), ".");
    weight = turned_weight(weight_);
    bias = wide(bias_);
    TORCH_CHECK(!bias || bias->numel() == x.size(1), "causal_conv's bias must be (", x.size(1),
                ",); got ", bias->sizes(), ".");
  }

  template <class T>
  Convolution<T> of(bool silu, Slots<T> slots) const {
    return {x.const_data_ptr<T>(), x.stride(0), weight.const_data_ptr<float>(),
            bias ? bias->const_data_ptr<float>() : nullptr, x.size(1), weight.size(0), silu, slots};
  }
};

Tensor run_convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool silu,
                       const Tensor& bounds, const OptionalTensor& prefixes_,
                       const OptionalTensor& state, const OptionalTensor& of,
                       const OptionalTensor& begins) {
  const Conv conv(x, weight, bias);
  check_bounds(bounds, x.size(0), "causal_conv");
  const int64_t count = bounds.size(0) - 1;
  const auto prefixes = checked_prefixes(prefixes_, count, "causal_conv");
  Tensor y = at::empty(x.sizes(), x.options());
  for_dtype(x.scalar_type(), "causal_conv's input", [&](auto tag) {
    using T = decltype(tag);
    const auto slots = slots_of<T>(state, of, begins, count, (conv.weight.size(0) - 1) * x.size(1),
                                   x.scalar_type(), "causal_conv");
    convolve(conv.of<T>(silu, slots), segments_of(bounds, prefixes), y.mutable_data_ptr<T>());
  });
  return y;
}

Tensor causal_conv(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool silu,
                   const Tensor& bounds, const OptionalTensor& prefixes) {
  return run_convolution(x, weight, bias, silu, bounds, prefixes, {}, {}, {});
}

Tensor causal_conv_on(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool silu,
                      const Tensor& bounds, Tensor& state, const Tensor& slots,
                      const OptionalTensor& begins) {
  return run_convolution(x, weight, bias, silu, bounds, {}, state, slots, begins);
}

struct CausalConv : Function<CausalConv> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, bool silu, const Tensor& bounds,
                        const OptionalTensor& prefixes) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["silu"] = silu;
    ctx->save_for_backward({x, weight, bias ? *bias : Tensor(), bounds,
                            prefixes ? *prefixes : Tensor()});
    return causal_conv(x, weight, bias, silu, bounds, prefixes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("causal_conv");
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &bounds = saved[3];
    const OptionalTensor bias = saved[2].defined() ? OptionalTensor(saved[2]) : OptionalTensor();
    const OptionalTensor prefixes =
        saved[4].defined() ? OptionalTensor(saved[4]) : OptionalTensor();
    const Conv conv(x, weight, bias);
    const auto floats = x.options().dtype(at::kFloat);
    Tensor grad_x = at::zeros(x.sizes(), floats), grad_weight = at::zeros(conv.weight.sizes(), floats);
    Tensor grad_bias = bias ? at::zeros({x.size(1)}, floats) : Tensor();
    const Tensor grad = grads[0].to(x.scalar_type()).contiguous();
    for_dtype(x.scalar_type(), "causal_conv's input", [&](auto tag) {
      using T = decltype(tag);
      convolve_backward(conv.of<T>(ctx->saved_data["silu"].toBool(), Slots<T>{}),
                        segments_of(bounds, prefixes), grad.const_data_ptr<T>(),
                        grad_x.mutable_data_ptr<float>(), grad_weight.mutable_data_ptr<float>(),
                        bias ? grad_bias.mutable_data_ptr<float>() : nullptr);
    });
    return {grad_x.to(x.scalar_type()),
            grad_weight.t().reshape(weight.sizes()).to(weight.scalar_type()),
            bias ? grad_bias.to(bias->scalar_type()) : Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor causal_conv_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            bool silu, const Tensor& bounds, const OptionalTensor& prefixes) {
  if (records(x) || records(weight) || (bias && records(*bias)))
    return CausalConv::apply(x, weight, bias, silu, bounds, prefixes);
  at::AutoDispatchBelowADInplaceOrView below;
  return causal_conv(x, weight, bias, silu, bounds, prefixes);
}

// ---- recurrence ----

// The operands, contiguous in float32.
struct Operands {
  Tensor q, k, v, decay;
  OptionalTensor beta;

  Operands(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& decay_,
           const OptionalTensor& beta_)
      : q(q_.to(at::kFloat).contiguous()),
        k(k_.to(at::kFloat).contiguous()),
        v(v_.to(at::kFloat).contiguous()),
        decay(decay_.to(at::kFloat).contiguous()),
        beta(wide(beta_)) {
    TORCH_CHECK(q.dim() == 3 && v.dim() == 3 && decay.dim() == 2 && q.sizes() == k.sizes() &&
                    v.size(0) == q.size(0) && q.size(1) > 0 && v.size(1) % q.size(1) == 0 &&
                    decay.size(0) == v.size(0) && decay.size(1) == v.size(1) &&
                    (!beta || beta->sizes() == decay.sizes()),
                "recurrence must get q and k (N, G, K), v (N, H, V) with H a multiple of G, decay "
                "and beta (N, H); got ", q.sizes(), ", ", k.sizes(), ", ", v.sizes(), ", ",
                decay.sizes(), ".");
  }

  int64_t numbers() const { return v.size(1) * q.size(2) * v.size(2); }
  Recurrence of(Slots<float> slots) const {
    return {q.const_data_ptr<float>(), k.const_data_ptr<float>(), v.const_data_ptr<float>(),
            decay.const_data_ptr<float>(), beta ? beta->const_data_ptr<float>() : nullptr, q.size(0),
            q.size(1), v.size(1), q.size(2), v.size(2), slots};
  }
};

Tensor run_recurrence(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
                      const OptionalTensor& beta, const Tensor& bounds,
                      const OptionalTensor& prefixes_, const OptionalTensor& state,
                      const OptionalTensor& of, const OptionalTensor& begins) {
  const Operands given(q, k, v, decay, beta);
  check_bounds(bounds, v.size(0), "recurrence");
  const int64_t count = bounds.size(0) - 1;
  const auto prefixes = checked_prefixes(prefixes_, count, "recurrence");
  Tensor out = at::empty(given.v.sizes(), given.v.options());
  const auto slots =
      slots_of<float>(state, of, begins, count, given.numbers(), at::kFloat, "recurrence");
  recur(given.of(slots), segments_of(bounds, prefixes), out.mutable_data_ptr<float>());
  return out;
}

Tensor recurrence(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
                  const OptionalTensor& beta, const Tensor& bounds,
                  const OptionalTensor& prefixes) {
  return run_recurrence(q, k, v, decay, beta, bounds, prefixes, {}, {}, {});
}

Tensor recurrence_on(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
                     const OptionalTensor& beta, const Tensor& bounds, Tensor& state,
                     const Tensor& slots, const OptionalTensor& begins) {
  return run_recurrence(q, k, v, decay, beta, bounds, {}, state, slots, begins);
}

struct Recurred : Function<Recurred> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& decay, const OptionalTensor& beta, const Tensor& bounds,
                        const OptionalTensor& prefixes) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward(
        {q, k, v, decay, beta ? *beta : Tensor(), bounds, prefixes ? *prefixes : Tensor()});
    return recurrence(q, k, v, decay, beta, bounds, prefixes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("recurrence");
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &decay = saved[3], &bounds = saved[5];
    const OptionalTensor beta = saved[4].defined() ? OptionalTensor(saved[4]) : OptionalTensor();
    const OptionalTensor prefixes =
        saved[6].defined() ? OptionalTensor(saved[6]) : OptionalTensor();
    const Operands given(q, k, v, decay, beta);
    const int64_t N = v.size(0), H = v.size(1), G = q.size(1), K = q.size(2);
    const auto floats = given.v.options();
    Tensor grad_q = at::zeros({N, H, K}, floats), grad_k = at::zeros({N, H, K}, floats);
    Tensor grad_v = at::empty(v.sizes(), floats), grad_decay = at::zeros({N, H}, floats);
    Tensor grad_beta = beta ? at::zeros({N, H}, floats) : Tensor();
    const Tensor grad = grads[0].to(at::kFloat).contiguous();
    recur_backward(given.of({}), segments_of(bounds, prefixes), grad.const_data_ptr<float>(),
                   grad_q.mutable_data_ptr<float>(), grad_k.mutable_data_ptr<float>(),
                   grad_v.mutable_data_ptr<float>(), grad_decay.mutable_data_ptr<float>(),
                   beta ? grad_beta.mutable_data_ptr<float>() : nullptr);
    if (G < H) {
      grad_q = grad_q.view({N, G, H / G, K}).sum(2);
      grad_k = grad_k.view({N, G, H / G, K}).sum(2);
    }
    return {grad_q.to(q.scalar_type()), grad_k.to(k.scalar_type()), grad_v.to(v.scalar_type()),
            grad_decay.to(decay.scalar_type()),
            beta ? grad_beta.to(beta->scalar_type()) : Tensor(), Tensor(), Tensor()};
  }
};

Tensor recurrence_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
                           const OptionalTensor& beta, const Tensor& bounds,
                           const OptionalTensor& prefixes) {
  if (records(q) || records(k) || records(v) || records(decay) || (beta && records(*beta)))
    return Recurred::apply(q, k, v, decay, beta, bounds, prefixes);
  at::AutoDispatchBelowADInplaceOrView below;
  return recurrence(q, k, v, decay, beta, bounds, prefixes);
}

// ---- gates: few numbers, so one after another ----

// f of every number of x (N, H), in x's type or in float32.
template <class F>
Tensor each(const Tensor& x_, bool in_float, const F& f) {
  const Tensor x = x_.contiguous();
  Tensor y = at::empty(x.sizes(), in_float ? x.options().dtype(at::kFloat) : x.options());
  const int64_t count = x.numel(), columns = x.dim() ? x.size(-1) : 1;
  for_dtype(x.scalar_type(), "a gate's input", [&](auto tag) {
    using T = decltype(tag);
    const T* from = x.const_data_ptr<T>();
    for_dtype(y.scalar_type(), "a gate", [&](auto to_tag) {
      using Y = decltype(to_tag);
      Y* to = y.mutable_data_ptr<Y>();
      for (int64_t i = 0; i < count; ++i)
        to[i] = static_cast<Y>(f(static_cast<float>(from[i]), i % columns));
    });
  });
  return y;
}

float sigmoid_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

Tensor sigmoid(const Tensor& x) {
  return each(x, false, [](float v, int64_t) { return sigmoid_of(v); });
}

Tensor softplus(const Tensor& x, const Tensor& bias_) {
  TORCH_CHECK(x.dim() >= 1 && bias_.dim() == 1 && bias_.size(0) == x.size(-1),
              "gate_softplus must get a bias (", x.size(-1), ",); got ", bias_.sizes(), ".");
  const Tensor bias = bias_.to(at::kFloat).contiguous();
  const float* b = bias.const_data_ptr<float>();
  return each(x, true, [b](float v, int64_t column) {
    const float z = v + b[column];
    return std::max(z, 0.0f) + std::log1p(std::exp(-std::abs(z)));
  });
}

struct Sigmoid : Function<Sigmoid> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor y = sigmoid(x);
    ctx->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor y = ctx->get_saved_variables()[0];
    return {grads[0] * y * (1 - y)};
  }
};

struct Softplus : Function<Softplus> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& bias) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x, bias});
    return softplus(x, bias);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor slope = sigmoid(saved[0].to(at::kFloat) + saved[1].to(at::kFloat)) * grads[0];
    const Tensor rows = as_rows(slope);
    return {slope.to(saved[0].scalar_type()), rows.sum(0).to(saved[1].scalar_type())};
  }
};

Tensor sigmoid_autograd(const Tensor& x) {
  if (records(x)) return Sigmoid::apply(x);
  at::AutoDispatchBelowADInplaceOrView below;
  return sigmoid(x);
}

Tensor softplus_autograd(const Tensor& x, const Tensor& bias) {
  if (records(x) || records(bias)) return Softplus::apply(x, bias);
  at::AutoDispatchBelowADInplaceOrView below;
  return softplus(x, bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "causal_conv(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor cu_seqlens, "
      "Tensor? prefixes) -> Tensor");
  m.def(
      "causal_conv_on(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor cu_seqlens, "
      "Tensor(a!) state, Tensor slots, Tensor? begins) -> Tensor");
  m.def(
      "recurrence(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor cu_seqlens, "
      "Tensor? prefixes) -> Tensor");
  m.def(
      "recurrence_on(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor cu_seqlens, "
      "Tensor(a!) state, Tensor slots, Tensor? begins) -> Tensor");
  m.def("gate_sigmoid(Tensor x) -> Tensor");
  m.def("gate_softplus(Tensor x, Tensor bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("causal_conv", &causal_conv);
  m.impl("causal_conv_on", &causal_conv_on);
  m.impl("recurrence", &recurrence);
  m.impl("recurrence_on", &recurrence_on);
  m.impl("gate_sigmoid", &sigmoid);
  m.impl("gate_softplus", &softplus);
}

TORCH_LIBRARY_IMPL(tandem, Autograd, m) {
  m.impl("causal_conv", &causal_conv_autograd);
  m.impl("causal_conv_on", torch::CppFunction::makeFallthrough());
  m.impl("recurrence", &recurrence_autograd);
  m.impl("recurrence_on", torch::CppFunction::makeFallthrough());
  m.impl("gate_sigmoid", &sigmoid_autograd);
  m.impl("gate_softplus", &softplus_autograd);
}

TORCH_LIBRARY_IMPL(tandem, ADInplaceOrView, m) {
  m.impl("causal_conv_on", torch::CppFunction::makeFallthrough());
  m.impl("recurrence_on", torch::CppFunction::makeFallthrough());
}

}  // namespace tandem
