// The dense operations of a layer as torch operators, with gradients: linear, root-mean-square
// norm, embedding, rotation, activations, log-probs of chosen tokens, drawing tokens.
#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "coded_tensors.h"
#include "gemm.h"
#include "gradient.h"
#include "rows.h"
#include "sample.h"
#include "tensors.h"
#include "tuning.h"

namespace tandem {
namespace {

using at::Tensor;

// ---- linear ----

void check_linear(const Tensor& x, int64_t K, at::ScalarType dtype, const OptionalTensor& bias,
                  int64_t N) {
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == K && x.scalar_type() == dtype,
              "linear's input must be (..., ", K, ") ", dtype, "; got ", x.sizes(), " ",
              x.scalar_type(), ".");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == N && bias->scalar_type() == dtype),
              "linear's bias must be (", N, ",) ", dtype, "; got ", bias->sizes(), " ",
              bias->scalar_type(), ".");
}

// `run(x, rows, weight matrix's N and K, y)` into a new (..., N).
template <class Run>
Tensor product(const Tensor& x, int64_t N, Run run) {
  auto sizes = x.sizes().vec();
  sizes.back() = N;
  const RowsOf rows(x);
  Tensor y = at::empty(sizes, x.options());
  if (y.numel()) run(rows, y);
  return y;
}

Tensor linear_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(weight.dim() == 2, "linear's weight must be (N, K); got ", weight.sizes(), ".");
  const int64_t N = weight.size(0), K = weight.size(1);
  check_linear(x, K, weight.scalar_type(), bias, N);
  if (!x.numel()) return at::linear(x, weight, bias);
  const bool plain = weight.stride(0) == 1 || weight.stride(1) == 1;
  const Tensor w = plain ? weight : weight.contiguous();
  const Tensor b = bias ? bias->contiguous() : Tensor();
  return product(x, N, [&](const RowsOf& rows, Tensor& y) {
    for_dtype(x.scalar_type(), "linear's input", [&](auto tag) {
      using T = decltype(tag);
      const Matrix<T> matrix{w.const_data_ptr<T>(), w.stride(0), w.stride(1)};
      multiply(rows.data<T>(), rows.stride, rows.count, matrix, N, K, y.mutable_data_ptr<T>(), N,
               Epilogue<T>{bias ? b.const_data_ptr<T>() : nullptr});
    });
  });
}

Tensor pack_weight(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "a weight to pack must be (N, K); got ", weight.sizes(), ".");
  const int64_t N = weight.size(0), K = weight.size(1);
  const bool plain = weight.stride(0) == 1 || weight.stride(1) == 1;
  const Tensor w = plain ? weight : weight.contiguous();
  Tensor packed;
  for_dtype(w.scalar_type(), "a weight to pack", [&](auto tag) {
    using T = decltype(tag);
    packed = at::empty({packed_size<T>(N, K)}, w.options().dtype(at::kFloat));
    if (packed.numel())
      pack(Matrix<T>{w.const_data_ptr<T>(), w.stride(0), w.stride(1)}, N, K,
           packed.mutable_data_ptr<float>());
  });
  return packed;
}

Tensor linear_packed(const Tensor& x, const Tensor& packed, int64_t N, int64_t K,
                     const OptionalTensor& bias) {
  check_linear(x, K, x.scalar_type(), bias, N);
  if (!K) return at::linear(x, at::empty({N, 0}, x.options()), bias);
  const Tensor b = bias ? bias->contiguous() : Tensor();
  return product(x, N, [&](const RowsOf& rows, Tensor& y) {
    for_dtype(x.scalar_type(), "linear's input", [&](auto tag) {
      using T = decltype(tag);
      TORCH_CHECK(packed.numel() == packed_size<T>(N, K), "a packed weight must hold ",
                  packed_size<T>(N, K), " words; got ", packed.numel(), ".");
      multiply_packed(rows.data<T>(), rows.stride, rows.count, packed.const_data_ptr<float>(), N, K,
                      y.mutable_data_ptr<T>(), N,
                      Epilogue<T>{bias ? b.const_data_ptr<T>() : nullptr});
    });
  });
}

Tensor linear_coded(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t kind,
                    int64_t block, int64_t N, const OptionalTensor& bias) {
  const int64_t numbers = codes.numel() * (kind == kInt8 ? 1 : 2);
  const int64_t K = N > 0 && numbers % N == 0 ? numbers / N : x.dim() ? x.size(-1) : 0;
  const Coded weight = coded(codes, scales, kind, block, N, K);
  check_linear(x, K, x.scalar_type(), bias, N);
  if (!K) return at::linear(x, at::empty({N, 0}, x.options()), bias);
  const Tensor b = bias ? bias->contiguous() : Tensor();
  return product(x, N, [&](const RowsOf& rows, Tensor& y) {
    for_dtype(x.scalar_type(), "linear's input", [&](auto tag) {
      using T = decltype(tag);
      multiply_coded(rows.data<T>(), rows.stride, rows.count, weight, N, K, y.mutable_data_ptr<T>(),
                     N, Epilogue<T>{bias ? b.const_data_ptr<T>() : nullptr});
    });
  });
}

// total (N, K), float32, += a (..., N) turned, by b (..., K): a weight's gradient added where the
// weight's optimizer sums them; or written there, if `is_new`.
void add_turned_product(Tensor total, const Tensor& a, const Tensor& b, bool is_new) {
  const RowsOf left(a), right(b);
  TORCH_CHECK(total.dim() == 2 && total.is_contiguous() && total.scalar_type() == at::kFloat &&
                  total.size(0) == left.width && total.size(1) == right.width &&
                  left.count == right.count && a.scalar_type() == b.scalar_type(),
              "add_turned must be given a float32 (N, K), (M, N) and (M, K); got ", total.sizes(), " ",
              total.scalar_type(), ", ", a.sizes(), " and ", b.sizes(), ".");
  TORCH_CHECK(a.scalar_type() == at::kFloat || a.scalar_type() == at::kBFloat16,
              "add_turned's factors must be float32 or bfloat16; got ", a.scalar_type(), ".");
  if (!left.count) {
    if (is_new) total.zero_();
    return;
  }
  if (!total.numel()) return;
  float* const to = total.mutable_data_ptr<float>();
  for_dtype(a.scalar_type(), "add_turned's factors", [&](auto tag) {
    using T = decltype(tag);
    multiply_turned(left.data<T>(), left.stride, right.data<T>(), right.stride, left.count,
                    right.width, {to, left.width, !is_new});
  });
}

// a turned, by b, in bfloat16: each sum of float32 is rounded once. Some rows of the result at a time,
// so that no float32 of its size lies beside it: of a head that would be twice the gradient itself.
Tensor rounded_turned_product(const Tensor& a, const Tensor& b) {
  constexpr int64_t kFloats = 1 << 20, kFewest = 256;  // fewer would read b too often
  const RowsOf left(a), right(b);
  Tensor y = at::empty({left.width, right.width}, a.options());
  if (!left.count || !y.numel()) return y.zero_();
  const int64_t rows =
      std::min(left.width, std::max(kFewest, round_up(kFloats / right.width, kLanes)));
  const Tensor sums = at::empty({rows, right.width}, a.options().dtype(at::kFloat));
  for (int64_t n = 0; n < left.width; n += rows) {
    const int64_t some = std::min(rows, left.width - n);
    multiply_turned(left.data<bf16>() + n, left.stride, right.data<bf16>(), right.stride, left.count,
                    right.width, {sums.mutable_data_ptr<float>(), some, false});
    y.narrow(0, n, some).copy_(sums.narrow(0, 0, some));
  }
  return y;
}

// a (..., N) and b (..., K), M rows each, to (N, K), which is added to `sum` if that is given.
Tensor turned_product(const Tensor& a, const Tensor& b, const Tensor& sum = {}) {
  if (a.scalar_type() == at::kBFloat16) return rounded_turned_product(a, b);
  Tensor y = sum.defined() ? sum : at::empty({a.size(-1), b.size(-1)}, a.options());
  add_turned_product(y, a, b, !sum.defined());
  return y;
}

// In a backward pass: whether it computes the gradients of all leaves, nobody having named some.
bool is_whole_backward() {
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  return asked && asked->empty();
}

struct Linear : Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, bool wants_x, bool wants_weight,
                        bool wants_bias) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["wants"] = std::vector<bool>{wants_x, wants_weight, wants_bias};
    ctx->saved_data["turned"] = weight.stride(0) == 1 && weight.stride(1) != 1;
    ctx->save_for_backward({wants_weight ? x : Tensor(), weight});
    keep_leaf(ctx, weight);
    return linear_cpu(x, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("linear");
    const auto wants = ctx->saved_data["wants"].toBoolList();
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const Tensor g = as_rows(grads[0].contiguous());
    Tensor grad_x, grad_weight, grad_bias;
    if (wants[0]) {
      auto sizes = grads[0].sizes().vec();
      sizes.back() = weight.size(1);
      grad_x = linear_cpu(g, weight.t(), std::nullopt).view(sizes);
    }
    if (wants[1]) {
      // In the weight's own layout, so that nothing is copied when it becomes the gradient.
      const bool turned = ctx->saved_data["turned"].toBool();
      Tensor* const kept = g.scalar_type() == at::kFloat ? kept_gradient(ctx, weight) : nullptr;
      if (kept) {
        *kept = turned_product(g, x, *kept);
      } else {
        grad_weight = turned ? turned_product(x, g).t() : turned_product(g, x);
      }
    }
    if (wants[2]) grad_bias = g.sum(0);
    return {grad_x, grad_weight, grad_bias, Tensor(), Tensor(), Tensor()};
  }
};

Tensor linear_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const bool wants_x = records(x), wants_weight = records(weight);
  const bool wants_bias = bias && records(*bias);
  if (wants_x || wants_weight || wants_bias)
    return Linear::apply(x, weight, bias, wants_x, wants_weight, wants_bias);
  at::AutoDispatchBelowADInplaceOrView below;
  return linear_cpu(x, weight, bias);
}

// ---- embedding ----

// total (V, D), float32, += rows (..., D), each to the one of its id; padding's are dropped.
void add_rows(Tensor total, const Tensor& ids, const Tensor& rows, int64_t padding) {
  TORCH_CHECK(total.dim() == 2 && total.is_contiguous() && total.scalar_type() == at::kFloat &&
                  rows.numel() == ids.numel() * total.size(1),
              "add_rows must be given a float32 (V, D), ids (...) and rows (..., D); got ",
              total.sizes(), " ", total.scalar_type(), ", ", ids.sizes(), " and ", rows.sizes(), ".");
  const Tensor places = ids.to(at::kLong).contiguous(), given = rows.contiguous();
  const int64_t V = total.size(0), D = total.size(1), *id = places.const_data_ptr<int64_t>();
  float* const table = total.mutable_data_ptr<float>();
  for_dtype(given.scalar_type(), "add_rows' rows", [&](auto tag) {
    using T = decltype(tag);
    const T* from = given.const_data_ptr<T>();
    for (int64_t i = 0; i < places.numel(); ++i, from += D) {
      if (id[i] == padding) continue;
      TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < V, "an id must be in [0, ", V, "); got ", id[i], ".");
      float* const row = table + id[i] * D;
      for_columns(D, [&](int64_t j, int lanes) {
        store_lanes(row + j, load_lanes(row + j, lanes) + load_lanes(from + j, lanes), lanes);
      });
    }
  });
}

struct Embedding : Function<Embedding> {
  static Tensor forward(AutogradContext* ctx, const Tensor& ids, const Tensor& weight,
                        int64_t padding) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["padding"] = padding;
    ctx->save_for_backward({ids, weight});
    keep_leaf(ctx, weight);
    return at::embedding(weight, ids, padding);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("embedding");
    const auto saved = ctx->get_saved_variables();
    const Tensor ids = saved[0].contiguous(), &weight = saved[1];
    const int64_t padding = ctx->saved_data["padding"].toInt(), V = weight.size(0);
    Tensor* const kept = kept_gradient(ctx, weight);
    if (!kept)
      return {Tensor(), at::embedding_dense_backward(grads[0], ids, V, padding, false), Tensor()};
    if (!kept->defined()) *kept = at::zeros_like(weight);
    add_rows(*kept, ids, grads[0], padding);
    return {Tensor(), Tensor(), Tensor()};
  }
};

Tensor embedding_cpu(const Tensor& ids, const Tensor& weight, int64_t padding) {
  return at::embedding(weight, ids, padding);
}

Tensor embedding_autograd(const Tensor& ids, const Tensor& weight, int64_t padding) {
  if (records(weight)) return Embedding::apply(ids, weight, padding);
  at::AutoDispatchBelowADInplaceOrView below;
  return embedding_cpu(ids, weight, padding);
}

// ---- root-mean-square norm ----

// body(x, weight and y type tags): y has x's type, or float32 where only the weight has it.
template <class Body>
void for_norm_dtypes(const Tensor& x, const Tensor& weight, bool offset, Body body) {
  for_dtype(x.scalar_type(), "rms_norm's input", [&](auto x_tag) {
    for_dtype(weight.scalar_type(), "rms_norm's weight", [&](auto weight_tag) {
      using T = decltype(x_tag);
      using W = decltype(weight_tag);
      using Wider = std::conditional_t<std::is_same_v<T, W>, T, float>;
      if (offset) {
        body(std::true_type{}, x_tag, weight_tag, x_tag);
      } else {
        body(std::false_type{}, x_tag, weight_tag, Wider{});
      }
    });
  });
}

// y and, if `scales` is given, 1 / rms of each row.
Tensor rms_norm_rows(const Tensor& x, const Tensor& weight, double eps, bool offset,
                     Tensor* scales) {
  TORCH_CHECK(weight.dim() == 1 && x.dim() >= 1 && x.size(-1) == weight.size(0),
              "rms_norm's weight must be (", x.dim() ? x.size(-1) : 0, ",); got ", weight.sizes(),
              ".");
  const RowsOf rows(x);
  const Tensor w = weight.contiguous();
  Tensor y;
  if (scales) *scales = at::empty({rows.count}, x.options().dtype(at::kFloat));
  float* scale = scales ? scales->mutable_data_ptr<float>() : nullptr;
  for_norm_dtypes(x, w, offset, [&](auto kind, auto x_tag, auto weight_tag, auto y_tag) {
    using T = decltype(x_tag);
    using W = decltype(weight_tag);
    using Y = decltype(y_tag);
    y = at::empty(x.sizes(), x.options().dtype(c10::CppTypeToScalarType<Y>::value));
    const int64_t D = rows.width;
    const W* weights = w.const_data_ptr<W>();
    Y* out = y.mutable_data_ptr<Y>();
    for_rows(rows.count, D, [&, from_x = rows.data<T>()](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const float s = rms_row<decltype(kind)::value>(from_x + i * rows.stride, weights,
                                                       out + i * D, D, static_cast<float>(eps));
        if (scale) scale[i] = s;
      }
    });
  });
  return y;
}

Tensor rms_norm_cpu(const Tensor& x, const Tensor& weight, double eps, bool unit_offset) {
  return rms_norm_rows(x, weight, eps, unit_offset, nullptr);
}

// Rows whose weight gradients are summed one after another; the sums of such runs are then added
// in order, whatever the threads.
constexpr int64_t kGradientRows = 128;

struct RmsNorm : Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps,
                        bool offset, bool wants_x, bool wants_weight) {
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor scales;
    Tensor y = rms_norm_rows(x, weight, eps, offset, &scales);
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["wants"] = std::vector<bool>{wants_x, wants_weight};
    ctx->save_for_backward({x, weight, scales});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("rms_norm");
    const auto saved = ctx->get_saved_variables();
    const auto wants = ctx->saved_data["wants"].toBoolList();
    const Tensor &x = saved[0], w = saved[1].contiguous(), &scales = saved[2];
    const RowsOf rows(x), g(grads[0]);
    const int64_t D = rows.width, runs = (rows.count + kGradientRows - 1) / kGradientRows;
    Tensor grad_x = wants[0] ? at::empty(x.sizes(), x.options()) : Tensor();
    Tensor sums = wants[1] ? at::zeros({runs, D}, scales.options()) : Tensor();
    const float* scale = scales.const_data_ptr<float>();
    float* run_sums = wants[1] ? sums.mutable_data_ptr<float>() : nullptr;
    for_norm_dtypes(x, w, ctx->saved_data["offset"].toBool(), [&](auto kind, auto x_tag,
                                                                  auto weight_tag, auto y_tag) {
      using T = decltype(x_tag);
      using W = decltype(weight_tag);
      using Y = decltype(y_tag);
      const W* weights = w.const_data_ptr<W>();
      T* out = wants[0] ? grad_x.mutable_data_ptr<T>() : nullptr;
      const T* xs = rows.data<T>();
      const Y* gs = g.data<Y>();
      parallel_for(0, runs, 1, [&](int64_t from, int64_t to) {
        for (int64_t run = from; run < to; ++run)
          for (int64_t i = run * kGradientRows; i < std::min(rows.count, (run + 1) * kGradientRows);
               ++i)
            rms_row_backward<decltype(kind)::value>(
                gs + i * g.stride, xs + i * rows.stride, weights, scale[i],
                out ? out + i * D : nullptr, run_sums ? run_sums + run * D : nullptr, D);
      });
    });
    Tensor grad_weight = wants[1] ? sums.sum(0).to(w.scalar_type()) : Tensor();
    return {grad_x, grad_weight, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor rms_norm_autograd(const Tensor& x, const Tensor& weight, double eps, bool unit_offset) {
  const bool wants_x = records(x), wants_weight = records(weight);
  if (wants_x || wants_weight)
    return RmsNorm::apply(x, weight, eps, unit_offset, wants_x, wants_weight);
  at::AutoDispatchBelowADInplaceOrView below;
  return rms_norm_cpu(x, weight, eps, unit_offset);
}

// ---- rotation ----

// x (N, H, D) turned by cos and sin (N, R).
template <bool back>
Tensor turned(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(x.dim() == 3 && cos.dim() == 2 && cos.sizes() == sin.sizes() &&
                  cos.size(0) == x.size(0) && cos.size(1) <= x.size(2) && cos.size(1) % 2 == 0,
              "rotary's cos and sin must be (", x.dim() ? x.size(0) : 0,
              ", R), R even and at most the head's width; got ", cos.sizes(), " and ", sin.sizes(),
              " for ", x.sizes(), ".");
  TORCH_CHECK(cos.scalar_type() == x.scalar_type() && sin.scalar_type() == x.scalar_type(),
              "rotary's cos and sin must be ", x.scalar_type(), "; got ", cos.scalar_type(), ".");
  const Tensor source = x.stride(2) == 1 ? x : x.contiguous();
  const Tensor c = cos.contiguous(), s = sin.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  const int64_t heads = x.size(1), D = x.size(2), R = c.size(1);
  for_dtype(x.scalar_type(), "rotary's input", [&](auto tag) {
    using T = decltype(tag);
    const T *from_x = source.const_data_ptr<T>(), *cosines = c.const_data_ptr<T>(),
            *sines = s.const_data_ptr<T>();
    T* out = y.mutable_data_ptr<T>();
    for_rows(x.size(0), heads * D, [&](int64_t from, int64_t to) {
      for (int64_t n = from; n < to; ++n)
        for (int64_t h = 0; h < heads; ++h)
          rope_row<back>(from_x + n * source.stride(0) + h * source.stride(1), cosines + n * R,
                         sines + n * R, out + (n * heads + h) * D, D, R);
    });
  });
  return y;
}

using TwoTensors = std::tuple<Tensor, Tensor>;

TwoTensors rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  return {turned<false>(q, cos, sin), turned<false>(k, cos, sin)};
}

struct Rotary : Function<Rotary> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& cos, const Tensor& sin) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({cos, sin});
    return {turned<false>(q, cos, sin), turned<false>(k, cos, sin)};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("rotary");
    const auto saved = ctx->get_saved_variables();
    return {turned<true>(grads[0], saved[0], saved[1]), turned<true>(grads[1], saved[0], saved[1]),
            Tensor(), Tensor()};
  }
};

TwoTensors rotary_autograd(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  if (records(q) || records(k)) {
    const auto both = Rotary::apply(q, k, cos, sin);
    return {both[0], both[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return rotary(q, k, cos, sin);
}

// ---- activations ----

template <class Act>
Tensor active(const Tensor& x) {
  TORCH_CHECK(x.dim() >= 1, "an activation's input must be (..., I); got ", x.sizes(), ".");
  const RowsOf rows(x);
  Tensor y = at::empty(x.sizes(), x.options());
  for_dtype(x.scalar_type(), "an activation's input", [&](auto tag) {
    using T = decltype(tag);
    T* out = y.mutable_data_ptr<T>();
    for_rows(rows.count, 4 * rows.width, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i)
        active_row<Act>(rows.data<T>() + i * rows.stride, out + i * rows.width, rows.width);
    });
  });
  return y;
}

template <class Act>
struct Active : Function<Active<Act>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x});
    return active<Act>(x);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("an activation");
    const Tensor x = ctx->get_saved_variables()[0];
    const RowsOf g(grads[0]), rows(x);
    Tensor grad = at::empty(x.sizes(), x.options());
    for_dtype(x.scalar_type(), "an activation's input", [&](auto tag) {
      using T = decltype(tag);
      T* out = grad.mutable_data_ptr<T>();
      for_rows(rows.count, 4 * rows.width, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i)
          active_row_backward<Act>(g.data<T>() + i * g.stride, rows.data<T>() + i * rows.stride,
                                   out + i * rows.width, rows.width);
      });
    });
    return {grad};
  }
};

template <class Act>
Tensor active_autograd(const Tensor& x) {
  if (records(x)) return Active<Act>::apply(x);
  at::AutoDispatchBelowADInplaceOrView below;
  return active<Act>(x);
}


template <class Act>
Tensor gated(const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(gate.dim() >= 1 && gate.sizes() == up.sizes() && gate.dtype() == up.dtype(),
              "gate and up must agree in shape and dtype; got ", gate.sizes(), " ",
              gate.scalar_type(), " and ", up.sizes(), " ", up.scalar_type(), ".");
  const RowsOf gates(gate), ups(up);
  Tensor y = at::empty(gate.sizes(), gate.options());
  for_dtype(gate.scalar_type(), "gate", [&](auto tag) {
    using T = decltype(tag);
    T* out = y.mutable_data_ptr<T>();
    for_rows(gates.count, 4 * gates.width, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i)
        gated_row<Act>(gates.data<T>() + i * gates.stride, ups.data<T>() + i * ups.stride,
                       out + i * gates.width, gates.width);
    });
  });
  return y;
}

template <class Act>
struct Gated : Function<Gated<Act>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({gate, up});
    return gated<Act>(gate, up);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("a gated activation");
    const auto saved = ctx->get_saved_variables();
    const RowsOf g(grads[0]), gates(saved[0]), ups(saved[1]);
    Tensor grad_gate = at::empty(grads[0].sizes(), saved[0].options());
    Tensor grad_up = at::empty(grads[0].sizes(), saved[0].options());
    for_dtype(saved[0].scalar_type(), "gate", [&](auto tag) {
      using T = decltype(tag);
      const int64_t I = gates.width;
      T *to_gate = grad_gate.mutable_data_ptr<T>(), *to_up = grad_up.mutable_data_ptr<T>();
      for_rows(gates.count, 4 * I, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i)
          gated_row_backward<Act>(g.data<T>() + i * g.stride, gates.data<T>() + i * gates.stride,
                                  ups.data<T>() + i * ups.stride, to_gate + i * I, to_up + i * I,
                                  I);
      });
    });
    return {grad_gate, grad_up};
  }
};

template <class Act>
Tensor gated_autograd(const Tensor& gate, const Tensor& up) {
  if (records(gate) || records(up)) return Gated<Act>::apply(gate, up);
  at::AutoDispatchBelowADInplaceOrView below;
  return gated<Act>(gate, up);
}

// ---- log-probs and drawing ----

void check_logits(const Tensor& logits, const Tensor& of_rows, const char* what) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && of_rows.dim() == 1 &&
                  of_rows.size(0) == logits.size(0) && of_rows.scalar_type() == at::kLong,
              what, " must be (n,) int64 for logits (n, V); got ", of_rows.sizes(), " ",
              of_rows.scalar_type(), " for ", logits.sizes(), ".");
}

// Log-probs, entropies (0 unless wanted) and, for the gradient, log of the sum of e^z.
std::tuple<Tensor, Tensor, Tensor> logprob_rows(const Tensor& logits, const Tensor& targets,
                                                double temperature, bool with_entropy) {
  check_logits(logits, targets, "targets");
  const RowsOf rows(logits);
  const Tensor chosen = targets.contiguous();
  const auto floats = logits.options().dtype(at::kFloat);
  const int64_t n = rows.count, V = rows.width;
  Tensor logprobs = at::empty({n}, floats), logsumexps = at::empty({n}, floats);
  Tensor entropies = at::zeros({n}, floats);
  const int64_t* tokens = chosen.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i)
    TORCH_CHECK(tokens[i] >= 0 && tokens[i] < V, "a target must be in [0, ", V, "); got ",
                tokens[i], ".");
  float* logprob = logprobs.mutable_data_ptr<float>();
  float* logsumexp = logsumexps.mutable_data_ptr<float>();
  float* entropy = entropies.mutable_data_ptr<float>();
  const float T = static_cast<float>(temperature);
  for_dtype(logits.scalar_type(), "logits", [&](auto tag) {
    using Logit = decltype(tag);
    for_rows(n, 4 * V, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const Logit* row = rows.data<Logit>() + i * rows.stride;
        const RowSums sums = with_entropy ? row_sums<true>(row, V, T)
                                          : row_sums<false>(row, V, T);
        logprob[i] = sums.logprob(static_cast<float>(row[tokens[i]]) / T);
        logsumexp[i] = sums.logsumexp();
        if (with_entropy) entropy[i] = sums.entropy();
      }
    });
  });
  return {logprobs, entropies, logsumexps};
}

TwoTensors token_logprobs(const Tensor& logits, const Tensor& targets, double temperature,
                          bool with_entropy, bool) {
  auto [logprobs, entropies, logsumexps] = logprob_rows(logits, targets, temperature, with_entropy);
  return {logprobs, entropies};
}

// Whether no backward pass but our own looks at these logits: `linear` made them.
bool made_by_linear(const Tensor& logits) {
  const torch::autograd::Node* node = logits.grad_fn().get();
  while (node && (node->name().find("SqueezeBackward") == 0 || node->name() == "ViewBackward0"))
    node = node->next_edge(0).function.get();  // the same numbers in another shape
  return dynamic_cast<const torch::autograd::CppNode<Linear>*>(node) ||
         (node && node->name() == "SummedLinearBackward");
}

struct TokenLogprobs : Function<TokenLogprobs> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& targets,
                               double temperature, bool with_entropy, bool gives_up) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["gives_up"] = gives_up && logits.is_contiguous();
    auto [logprobs, entropies, logsumexps] =
        logprob_rows(logits, targets, temperature, with_entropy);
    ctx->saved_data["temperature"] = temperature;
    ctx->saved_data["with_entropy"] = with_entropy;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({logits, targets, logsumexps, saved_output(entropies)});
    return {logprobs, entropies};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_derivative("token_logprobs");
    const auto saved = ctx->get_saved_variables();
    const RowsOf rows(saved[0]);
    const Tensor chosen = saved[1].contiguous(), &logsumexps = saved[2], &entropies = saved[3];
    const int64_t n = rows.count, V = rows.width;
    const auto given = [&](const Tensor& grad) {
      return grad.defined() ? grad.to(at::kFloat).contiguous() : Tensor();
    };
    const bool with_entropy = ctx->saved_data["with_entropy"].toBool();
    const Tensor of_logprobs = given(grads[0]);
    const Tensor of_entropies = with_entropy ? given(grads[1]) : Tensor();
    const bool in_place = ctx->saved_data["gives_up"].toBool() &&
                          !torch::autograd::get_current_graph_task_keep_graph();
    Tensor grad = in_place ? saved[0].detach() : at::empty(saved[0].sizes(), saved[0].options());
    const float T = static_cast<float>(ctx->saved_data["temperature"].toDouble());
    const auto at_row = [](const Tensor& t, int64_t i) {
      return t.defined() ? t.const_data_ptr<float>()[i] : 0.0f;
    };
    for_dtype(saved[0].scalar_type(), "logits", [&](auto tag) {
      using Logit = decltype(tag);
      Logit* out = grad.mutable_data_ptr<Logit>();
      for_rows(n, 4 * V, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i)
          logprob_row_backward(rows.data<Logit>() + i * rows.stride, V, T,
                               logsumexps.const_data_ptr<float>()[i],
                               at_row(entropies, i), chosen.const_data_ptr<int64_t>()[i],
                               at_row(of_logprobs, i), at_row(of_entropies, i), out + i * V);
      });
    });
    return {grad, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

TwoTensors token_logprobs_autograd(const Tensor& logits, const Tensor& targets, double temperature,
                                   bool with_entropy, bool keep_logits) {
  if (records(logits)) {
    const bool gives_up = !keep_logits && made_by_linear(logits);
    const auto both = TokenLogprobs::apply(logits, targets, temperature, with_entropy, gives_up);
    return {both[0], both[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return token_logprobs(logits, targets, temperature, with_entropy, keep_logits);
}

// Columns from `num_ids` on, if there are any, are not drawn.
std::tuple<Tensor, Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& keys,
                                                  const Tensor& token_numbers, double temperature,
                                                  int64_t num_ids) {
  check_logits(logits, keys, "keys");
  check_logits(logits, token_numbers, "token_numbers");
  TORCH_CHECK(num_ids > 0, "num_ids must be above 0; got ", num_ids, ".");
  const RowsOf rows(logits);
  const Tensor seeds = keys.contiguous(), numbers = token_numbers.contiguous();
  const int64_t n = rows.count, V = rows.width, C = std::min(V, num_ids);
  const auto floats = logits.options().dtype(at::kFloat);
  Tensor tokens = at::empty({n}, seeds.options());
  Tensor logprobs = at::empty({n}, floats), samples = at::empty({n}, floats);
  Tensor entropies = at::empty({n}, floats);
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  float* logprob = logprobs.mutable_data_ptr<float>();
  float* sampled = samples.mutable_data_ptr<float>();
  float* entropy = entropies.mutable_data_ptr<float>();
  for_dtype(logits.scalar_type(), "logits", [&](auto tag) {
    using Logit = decltype(tag);
    for_rows(n, 4 * V, [&](int64_t from, int64_t to) {
      std::vector<double> blocks((C + kSumBlock - 1) / kSumBlock);
      for (int64_t i = from; i < to; ++i) {
        const double u = keyed_uniform(seeds.const_data_ptr<int64_t>()[i],
                                       numbers.const_data_ptr<int64_t>()[i]);
        const Drawn drawn = sample_row(rows.data<Logit>() + i * rows.stride, V, C,
                                       static_cast<float>(temperature), u, blocks.data());
        token[i] = drawn.token;
        logprob[i] = drawn.logprob;
        sampled[i] = drawn.sampled;
        entropy[i] = drawn.entropy;
      }
    });
  });
  return {tokens, logprobs, samples, entropies};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("linear_coded(Tensor x, Tensor codes, Tensor scales, int kind, int block, int N,"
        " Tensor? bias) -> Tensor");
  m.def("linear_packed(Tensor x, Tensor packed, int N, int K, Tensor? bias) -> Tensor");
  m.def("add_turned(Tensor(a!) total, Tensor left, Tensor right, bool is_new) -> ()");
  m.def("embedding(Tensor ids, Tensor weight, int padding) -> Tensor");
  m.def("add_rows(Tensor(a!) total, Tensor ids, Tensor rows, int padding) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset) -> Tensor");
  m.def("rotary(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def("silu(Tensor x) -> Tensor");
  m.def("gelu(Tensor x) -> Tensor");
  m.def("gelu_tanh(Tensor x) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("geglu_tanh(Tensor gate, Tensor up) -> Tensor");
  m.def("token_logprobs(Tensor logits, Tensor targets, float temperature, bool with_entropy,"
        " bool keep_logits) -> (Tensor, Tensor)");
  m.def("product_choices() -> str", &choices);
  m.def("why_no_amx(bool half) -> str", &why_no_amx);
  m.def("arithmetic() -> str", &arithmetic);
  m.def("is_whole_backward() -> bool", &is_whole_backward);
  m.def("sample(Tensor logits, Tensor keys, Tensor token_numbers, float temperature, int num_ids)"
        " -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("linear", &linear_cpu);
  m.impl("pack_weight", &pack_weight);
  m.impl("linear_coded", &linear_coded);
  m.impl("linear_packed", &linear_packed);
  m.impl("add_turned", &add_turned_product);
  m.impl("embedding", &embedding_cpu);
  m.impl("add_rows", &add_rows);
  m.impl("rms_norm", &rms_norm_cpu);
  m.impl("rotary", &rotary);
  m.impl("silu", &active<Silu>);
  m.impl("gelu", &active<Gelu>);
  m.impl("gelu_tanh", &active<GeluTanh>);
  m.impl("swiglu", &gated<Silu>);
  m.impl("geglu_tanh", &gated<GeluTanh>);
  m.impl("token_logprobs", &token_logprobs);
  m.impl("sample", &sample);
}

TORCH_LIBRARY_IMPL(tandem, Autograd, m) {
  m.impl("linear", &linear_autograd);
  m.impl("embedding", &embedding_autograd);
  m.impl("rms_norm", &rms_norm_autograd);
  m.impl("rotary", &rotary_autograd);
  m.impl("silu", &active_autograd<Silu>);
  m.impl("gelu", &active_autograd<Gelu>);
  m.impl("gelu_tanh", &active_autograd<GeluTanh>);
  m.impl("swiglu", &gated_autograd<Silu>);
  m.impl("geglu_tanh", &gated_autograd<GeluTanh>);
  m.impl("token_logprobs", &token_logprobs_autograd);
}

}  // namespace tandem
