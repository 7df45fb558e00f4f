// Attention as torch operators: what a caller may ask, and the gradient.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "attention.h"
#include "gradient.h"
#include "kv_memory.h"
#include "segments.h"
#include "threads.h"

namespace tandem {
namespace {

using at::Tensor;

template <class T>
Rows<T> rows_of(const Tensor& x) {
  return {static_cast<T*>(x.data_ptr()), x.stride(0), x.stride(1)};
}

Sizes sizes_of(const Tensor& q, const Tensor& k, const Tensor& v) {
  return {q.size(1), k.size(1), q.size(1) / k.size(1), k.size(2), v.size(2)};
}

template <class F>
void by_type(const Tensor& x, const F& f) {
  if (x.scalar_type() == at::kFloat) {
    f(float{});
  } else {
    f(bf16{});
  }
}

// `num_tokens`: keys that there must be, as many as queries unless it is given.
void check_rows(const Tensor& q, const Tensor& k, const Tensor& v, const char* where,
                std::optional<int64_t> num_tokens = std::nullopt) {
  const int64_t tokens = num_tokens ? *num_tokens : q.dim() ? q.size(0) : 0;
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && k.size(0) == tokens &&
                  v.size(0) == tokens && k.size(1) == v.size(1) && k.size(2) == q.size(2),
              where, " must get q (N, Hq, Dk), k (N, Hkv, Dk), v (N, Hkv, Dv); got ", q.sizes(),
              ", ", k.sizes(), ", ", v.sizes(), ".");
  TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, where,
              " must get a multiple of the key heads as query heads; got ", q.size(1), " and ",
              k.size(1), ".");
  const auto type = q.scalar_type();
  TORCH_CHECK((type == at::kFloat || type == at::kBFloat16) && k.scalar_type() == type &&
                  v.scalar_type() == type,
              where, " must get float32 or bfloat16 of one kind; got ", type, ", ",
              k.scalar_type(), ", ", v.scalar_type(), ".");
}

Tensor dense_rows(const Tensor& x) {
  return x.stride(2) == 1 || x.size(2) <= 1 ? x : x.contiguous();
}

std::optional<Tensor> float_sinks(const std::optional<Tensor>& sinks, int64_t heads) {
  if (!sinks || !sinks->defined()) return std::nullopt;
  TORCH_CHECK(sinks->dim() == 1 && sinks->size(0) == heads,
              "sinks must have one number per query head, (", heads, "); got ", sinks->sizes(),
              ".");
  return sinks->to(at::kFloat).contiguous();
}

Kind kind_of(double scale, int64_t window, double softcap, const std::optional<Tensor>& sinks) {
  return {static_cast<float>(scale), window, static_cast<float>(softcap),
          sinks ? sinks->const_data_ptr<float>() : nullptr};
}

// The tokens that queries are given of, (K,) int64.
void check_asked(const Tensor& asked, const Tensor& q, int64_t tokens) {
  TORCH_CHECK(asked.dim() == 1 && asked.scalar_type() == at::kLong && asked.is_contiguous() &&
                  asked.size(0) == q.size(0),
              "varlen_attention's asked must be contiguous int64, a token for each of ", q.size(0),
              " queries; got ", asked.sizes(), " of ", asked.scalar_type(), ".");
  const int64_t* const at = asked.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < asked.size(0); ++i)
    TORCH_CHECK(at[i] > (i ? at[i - 1] : -1) && at[i] < tokens,
                "varlen_attention's asked must rise within [0, ", tokens, "); got ", at[i],
                " as number ", i, ".");
}

// As `Packed` takes them: null means all, and a tensor of none may be null too.
const int64_t* tokens_of(const std::optional<Tensor>& asked) {
  static const int64_t none = 0;
  if (!asked) return nullptr;
  return asked->numel() ? asked->const_data_ptr<int64_t>() : &none;
}

Tensor run_forward(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& bounds,
                   double scale, int64_t window, double softcap,
                   const std::optional<Tensor>& sinks_, const std::optional<Tensor>& prefixes_,
                   const std::optional<Tensor>& asked, Tensor* lse) {
  const int64_t tokens = asked && k_.dim() ? k_.size(0) : q_.dim() ? q_.size(0) : 0;
  check_rows(q_, k_, v_, "varlen_attention", tokens);
  if (asked) check_asked(*asked, q_, tokens);
  check_bounds(bounds, tokens, "varlen_attention");
  const auto prefixes = checked_prefixes(prefixes_, bounds.size(0) - 1, "varlen_attention");
  const Tensor q = dense_rows(q_), k = dense_rows(k_), v = dense_rows(v_);
  const Sizes size = sizes_of(q, k, v);
  const auto sinks = float_sinks(sinks_, size.query_heads);
  Tensor out = at::empty({q.size(0), size.query_heads, size.value_width}, q.options());
  if (lse) *lse = at::empty({q.size(0), size.query_heads}, q.options().dtype(at::kFloat));
  if (q.size(0) == 0) return out;
  by_type(q, [&](auto zero) {
    using T = decltype(zero);
    const Packed<T> in{rows_of<const T>(q), rows_of<const T>(k), rows_of<const T>(v),
                       static_cast<T*>(out.data_ptr()), lse ? lse->data_ptr<float>() : nullptr,
                       size, kind_of(scale, window, softcap, sinks),
                       tokens_of(asked), q.size(0)};
    attend_packed(in, segments_of(bounds, prefixes));
  });
  return out;
}

// The sink takes the weight exp(sink - lse) and gives nothing for it.
Tensor sink_gradient(const Tensor& sinks, const Tensor& lse, const Tensor& delta) {
  const Tensor weight = (sinks.to(at::kFloat) - lse).exp();
  return -(weight * delta).sum(0, false, at::kDouble).to(sinks.scalar_type());
}

struct Grads {
  Tensor q, k, v, sinks;
};

Grads run_backward(const Tensor& grad_, const Tensor& q_, const Tensor& k_, const Tensor& v_,
                   const Tensor& bounds, const std::optional<Tensor>& prefixes,
                   const std::optional<Tensor>& asked, const std::optional<Tensor>& sinks_,
                   const Tensor& out, const Tensor& lse, double scale, int64_t window,
                   double softcap) {
  const Tensor q = dense_rows(q_), k = dense_rows(k_), v = dense_rows(v_);
  const Tensor grad = dense_rows(grad_.to(q.scalar_type()));
  const Sizes size = sizes_of(q, k, v);
  const auto sinks = float_sinks(sinks_, size.query_heads);
  Grads grads{at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
              at::empty(v.sizes(), v.options()), {}};
  Tensor delta = at::empty_like(lse);
  if (k.size(0) > 0) {
    by_type(q, [&](auto zero) {
      using T = decltype(zero);
      const Gradients<T> work{
          {rows_of<const T>(q), rows_of<const T>(k), rows_of<const T>(v),
           static_cast<T*>(out.data_ptr()), lse.data_ptr<float>(), size,
           kind_of(scale, window, softcap, sinks),
           tokens_of(asked), q.size(0)},
          rows_of<const T>(grad), static_cast<T*>(grads.q.data_ptr()),
          static_cast<T*>(grads.k.data_ptr()), static_cast<T*>(grads.v.data_ptr()),
          delta.data_ptr<float>()};
      attend_packed_backward(work, segments_of(bounds, prefixes));
    });
  }
  if (sinks) grads.sinks = sink_gradient(*sinks_, lse, delta);
  return grads;
}

Tensor varlen_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
                        double scale, int64_t window, double softcap,
                        const std::optional<Tensor>& sinks, const std::optional<Tensor>& prefixes,
                        const std::optional<Tensor>& asked) {
  return run_forward(q, k, v, cu_seqlens, scale, window, softcap, sinks, prefixes, asked, nullptr);
}

std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional<Tensor>(x) : std::nullopt;
}

class VarlenAttention : public torch::autograd::Function<VarlenAttention> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& cu_seqlens, double scale, int64_t window,
                        double softcap, const std::optional<Tensor>& sinks,
                        const std::optional<Tensor>& prefixes,
                        const std::optional<Tensor>& asked) {
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor lse;
    Tensor out =
        run_forward(q, k, v, cu_seqlens, scale, window, softcap, sinks, prefixes, asked, &lse);
    ctx->save_for_backward({q, k, v, cu_seqlens, sinks ? *sinks : Tensor(), saved_output(out), lse,
                            prefixes ? *prefixes : Tensor(), asked ? *asked : Tensor()});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["window"] = window;
    ctx->saved_data["softcap"] = softcap;
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "varlen_attention must be differentiated once; got create_graph=True.");
    const auto saved = ctx->get_saved_variables();
    const Grads done = run_backward(
        grads[0], saved[0], saved[1], saved[2], saved[3], if_defined(saved[7]),
        if_defined(saved[8]), if_defined(saved[4]), saved[5], saved[6],
        ctx->saved_data["scale"].toDouble(), ctx->saved_data["window"].toInt(),
        ctx->saved_data["softcap"].toDouble());
    return {done.q,   done.k,   done.v,     Tensor(), Tensor(),
            Tensor(), Tensor(), done.sinks, Tensor(), Tensor()};
  }
};

Tensor varlen_attention_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& cu_seqlens, double scale, int64_t window,
                                 double softcap, const std::optional<Tensor>& sinks,
                                 const std::optional<Tensor>& prefixes,
                                 const std::optional<Tensor>& asked) {
  const bool learned = q.requires_grad() || k.requires_grad() || v.requires_grad() ||
                       (sinks && sinks->requires_grad());
  if (at::GradMode::is_enabled() && learned) {
    return VarlenAttention::apply(q, k, v, cu_seqlens, scale, window, softcap, sinks, prefixes,
                                  asked);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return varlen_attention(q, k, v, cu_seqlens, scale, window, softcap, sinks, prefixes, asked);
}

// Memory for keys and values like these.
void check_memory_of(const Tensor& k, const Tensor& v, const Tensor& k_memory,
                     const Tensor& v_memory, const Tensor& tables, const char* where) {
  check_memory(k.size(1), k.size(2), v.size(2), k.scalar_type(), k_memory, v_memory, where);
  check_tables(tables, where);
}

Tensor paged_attention(const Tensor& q_, const Tensor& k_, const Tensor& v_, Tensor& k_memory,
                       Tensor& v_memory, const Tensor& block_tables, const Tensor& positions_,
                       double scale, int64_t window, double softcap,
                       const std::optional<Tensor>& sinks_) {
  check_rows(q_, k_, v_, "paged_attention");
  check_memory_of(k_, v_, k_memory, v_memory, block_tables, "paged_attention");
  const Tensor q = dense_rows(q_), k = dense_rows(k_), v = dense_rows(v_);
  const Tensor positions = positions_.contiguous();
  const Sizes size = sizes_of(q, k, v);
  const auto sinks = float_sinks(sinks_, size.query_heads);
  const int64_t n = q.size(0), *at = positions.const_data_ptr<int64_t>();
  Tensor out = at::empty({n, size.query_heads, size.value_width}, q.options());
  const Kind kind = kind_of(scale, window, softcap, sinks);
  check_decoding(block_tables, positions, n, kind, k_memory.size(0), "paged_attention");
  by_type(q, [&](auto zero) {
    using T = decltype(zero);
    const Paged<T> in{rows_of<const T>(q), rows_of<const T>(k), rows_of<const T>(v),
                      static_cast<T*>(k_memory.data_ptr()), static_cast<T*>(v_memory.data_ptr()),
                      static_cast<T*>(out.data_ptr()), block_tables.const_data_ptr<int32_t>(),
                      block_tables.stride(0), at, size, kind};
    attend_paged(in, n, decoding_threads(at, n, size));
  });
  return out;
}

void store_kv(const Tensor& k_, const Tensor& v_, Tensor& k_memory, Tensor& v_memory,
              const Tensor& block_tables, const Tensor& cu_seqlens) {
  check_rows(k_, k_, v_, "store_kv");
  check_memory_of(k_, v_, k_memory, v_memory, block_tables, "store_kv");
  check_bounds(cu_seqlens, k_.size(0), "store_kv");
  const int64_t count = cu_seqlens.size(0) - 1;
  TORCH_CHECK(block_tables.size(0) == count, "store_kv must get a table row per sequence, ", count,
              "; got ", block_tables.size(0), ".");
  const Tensor k = dense_rows(k_), v = dense_rows(v_);
  const int32_t* bounds = cu_seqlens.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < count; ++b) {
    check_blocks(block_tables, b, 0, bounds[b + 1] - bounds[b], k_memory.size(0), "store_kv");
  }
  by_type(k, [&](auto zero) {
    using T = decltype(zero);
    keep_packed<T>(rows_of<const T>(k), rows_of<const T>(v), static_cast<T*>(k_memory.data_ptr()),
                   static_cast<T*>(v_memory.data_ptr()), block_tables.const_data_ptr<int32_t>(),
                   block_tables.stride(0), bounds, count, sizes_of(k, k, v));
  });
}

Tensor continued_attention(const Tensor& q_, const Tensor& k_memory, const Tensor& v_memory,
                           const Tensor& block_tables, const Tensor& starts_,
                           const Tensor& cu_seqlens, double scale, int64_t window, double softcap,
                           const std::optional<Tensor>& sinks_) {
  const char* where = "continued_attention";
  TORCH_CHECK(q_.dim() == 3 && k_memory.dim() == 4 && v_memory.dim() == 4, where,
              " must get q (N, Hq, Dk) and memory of 4 dimensions; got ", q_.sizes(), ", ",
              k_memory.sizes(), ", ", v_memory.sizes(), ".");
  // Rows as the memory's would be, to be checked against it.
  const Tensor k = k_memory.select(3, 0), v = v_memory.select(2, 0);
  check_rows(q_, k.narrow(0, 0, 1).expand({q_.size(0), -1, -1}),
             v.narrow(0, 0, 1).expand({q_.size(0), -1, -1}), where);
  check_memory_of(k, v, k_memory, v_memory, block_tables, where);
  check_bounds(cu_seqlens, q_.size(0), where);
  const int64_t count = cu_seqlens.size(0) - 1;
  TORCH_CHECK(starts_.dim() == 1 && starts_.size(0) == count && block_tables.size(0) == count &&
                  starts_.scalar_type() == at::kLong,
              where, " must get starts (B,) int64 and a table row for each of ", count,
              " sequences; got ", starts_.sizes(), " of ", starts_.scalar_type(), " and ",
              block_tables.sizes(), ".");
  const Tensor q = dense_rows(q_), starts = starts_.contiguous();
  const Sizes size = sizes_of(q, k, v);
  const auto sinks = float_sinks(sinks_, size.query_heads);
  const Kind kind = kind_of(scale, window, softcap, sinks);
  const int32_t* bounds = cu_seqlens.const_data_ptr<int32_t>();
  const int64_t* at = starts.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < count; ++b) {
    TORCH_CHECK(at[b] >= 0, "starts must not be negative; got ", at[b], " in row ", b, ".");
    check_blocks(block_tables, b, kind.first_key(at[b]), at[b] + bounds[b + 1] - bounds[b],
                 k_memory.size(0), where);
  }
  Tensor out = at::empty({q.size(0), size.query_heads, size.value_width}, q.options());
  if (q.size(0) == 0) return out;
  by_type(q, [&](auto zero) {
    using T = decltype(zero);
    attend_continued(Continued<T>{rows_of<const T>(q), static_cast<const T*>(k_memory.data_ptr()),
                                  static_cast<const T*>(v_memory.data_ptr()),
                                  static_cast<T*>(out.data_ptr()),
                                  block_tables.const_data_ptr<int32_t>(), block_tables.stride(0),
                                  at, bounds, count, size, kind});
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "continued_attention(Tensor q, Tensor k_memory, Tensor v_memory, Tensor block_tables, "
      "Tensor starts, Tensor cu_seqlens, float scale, int window, float softcap, Tensor? sinks) "
      "-> Tensor");
  m.def(
      "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale, int window, "
      "float softcap, Tensor? sinks, Tensor? prefixes=None, Tensor? asked=None) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_memory, Tensor(b!) v_memory, "
      "Tensor block_tables, Tensor positions, float scale, int window, float softcap, "
      "Tensor? sinks) -> Tensor");
  m.def(
      "store_kv(Tensor k, Tensor v, Tensor(a!) k_memory, Tensor(b!) v_memory, "
      "Tensor block_tables, Tensor cu_seqlens) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("varlen_attention", &varlen_attention);
  m.impl("paged_attention", &paged_attention);
  m.impl("store_kv", &store_kv);
  m.impl("continued_attention", &continued_attention);
}

TORCH_LIBRARY_IMPL(tandem, Autograd, m) {
  m.impl("varlen_attention", &varlen_attention_autograd);
  m.impl("paged_attention", torch::CppFunction::makeFallthrough());
  m.impl("store_kv", torch::CppFunction::makeFallthrough());
  m.impl("continued_attention", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(tandem, ADInplaceOrView, m) {
  m.impl("paged_attention", torch::CppFunction::makeFallthrough());
  m.impl("store_kv", torch::CppFunction::makeFallthrough());
}

}  // namespace tandem
