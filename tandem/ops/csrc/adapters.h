// Low-rank adapters (arXiv:2106.09685) beside the weights of a layer, as blocks of rows pass by.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

#include "gemm.h"
#include "tensors.h"

namespace tandem {
namespace layers {

template <class T>
struct Buffer {
  at::Tensor held;
  T* data = nullptr;
  int64_t width = 0;

  Buffer(const at::Tensor& like, int64_t rows, int64_t width)
      : held(at::empty({rows, width}, like.options())), width(width) {
    data = held.mutable_data_ptr<T>();
  }
  T* row(int64_t i) const { return data + i * width; }
};

template <class T>
Matrix<T> as_it_lies(const at::Tensor& weight) {
  return {weight.const_data_ptr<T>(), weight.size(1), 1};
}

template <class T>
Matrix<T> across(const at::Tensor& weight) {
  return {weight.const_data_ptr<T>(), 1, weight.size(1)};
}

// A weight's gradient while it is summed: where it is kept, or in a tensor of its own.
class Gradient {
 public:
  float* at = nullptr;  // null: not wanted
  bool adds = false;

  Gradient() = default;
  // kept: as `kept_gradient` gives it, null for a gradient that is to be returned.
  Gradient(const at::Tensor& weight, at::Tensor* kept) : kept_(kept), dtype_(weight.scalar_type()) {
    adds = kept && kept->defined();
    if (!adds) made_ = at::empty(weight.sizes(), weight.options().dtype(at::kFloat));
    at = (adds ? *kept : made_).mutable_data_ptr<float>();
  }
  // Added to a sum that someone else keeps, or written over it.
  Gradient(const at::Tensor& sum, bool is_new) : at(sum.mutable_data_ptr<float>()), adds(!is_new) {}
  // What the backward pass returns for the weight.
  at::Tensor finish() {
    if (!kept_) return made_.defined() ? made_.to(dtype_) : at::Tensor();
    if (made_.defined()) *kept_ = made_;
    return {};
  }

 private:
  at::Tensor* kept_ = nullptr;
  at::Tensor made_;
  at::ScalarType dtype_ = at::kFloat;
};

// What a weight (N, K) has beside it: y += up (scale * down x).
struct Adapter {
  at::Tensor down, up;  // (r, K) and (N, r), contiguous; undefined: nothing
  float scale = 0;

  bool acts() const { return down.defined(); }
};

// The adapters of weights over one input, whose outputs lie side by side. down x, that times the scale,
// up of it and the sum with the weight's own output are rounded each, as in the layer itself
// (models/lora.py), so the numbers are the layer's to the last bit.
template <class T>
class Adapters {
 public:
  bool act = false, train = false;

  // gradients: of down and up of each in turn, null where there is no backward pass. held: rows of the
  // blocks that are computed at a time.
  Adapters(const Adapter* adapters, Gradient* gradients, const std::vector<at::Tensor>& weights,
           const at::Tensor& like, int64_t held)
      : inner_(like, held, ranks(adapters, weights.size())),
        of_inner_(like, gradients ? held : 0, inner_.width) {
    int64_t column = 0, inner = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      const Adapter& adapter = adapters[i];
      Gradient* const of = gradients ? gradients + 2 * i : nullptr;
      if (adapter.acts()) {
        parts_.push_back({&adapter, of, column, inner, adapter.down.size(0)});
        train = train || (of && (of[0].at || of[1].at));
        inner += adapter.down.size(0);
      }
      column += weights[i].size(0);
    }
    act = !parts_.empty();
  }

  // scale * down x for rows at `place` of the block, which `ascend` and `add_gradients` read.
  void descend(const T* x, int64_t x_stride, int64_t M, int64_t place) const {
    for (const Part& part : parts_) {
      const at::Tensor& down = part.adapter->down;
      T* const to = inner_.row(place) + part.inner;
      multiply(x, x_stride, M, as_it_lies<T>(down), part.rank, down.size(1), to, inner_.width,
               Epilogue<T>{});
      scale(to, M, part);
    }
  }

  // y (M, all N) += up of what `descend` left.
  void ascend(int64_t M, int64_t place, T* y, int64_t y_stride) const {
    for (const Part& part : parts_) {
      const at::Tensor& up = part.adapter->up;
      T* const to = y + part.column;
      multiply(inner_.row(place) + part.inner, inner_.width, M, as_it_lies<T>(up), up.size(0),
               part.rank, to, y_stride, Epilogue<T>{nullptr, to, y_stride});
    }
  }

  // From the gradient of the outputs (M, all N) that of down x, which `back` and `add_gradients` read.
  void descend_back(const T* given, int64_t stride, int64_t M, int64_t place) const {
    for (const Part& part : parts_) {
      const at::Tensor& up = part.adapter->up;
      T* const to = of_inner_.row(place) + part.inner;
      multiply(given + part.column, stride, M, across<T>(up), part.rank, up.size(0), to,
               of_inner_.width, Epilogue<T>{});
      scale(to, M, part);
    }
  }

  // to (M, K), the input's gradient by the weights, += that by the adapters.
  void back(int64_t M, int64_t place, T* to) const {
    for (const Part& part : parts_) {
      const at::Tensor& down = part.adapter->down;
      const int64_t K = down.size(1);
      multiply(of_inner_.row(place) + part.inner, of_inner_.width, M, across<T>(down), K, part.rank,
               to, K, Epilogue<T>{nullptr, to, K});
    }
  }

  void add_gradients(const T* given, int64_t given_stride, const T* x, int64_t x_stride, int64_t M,
                     int64_t place) const {
    for (const Part& part : parts_) {
      if (!part.of) continue;
      const auto add = [&](Gradient& of, int64_t rows, const T* a, int64_t a_stride, const T* b,
                           int64_t b_stride, int64_t columns) {
        if (!of.at) return;
        multiply_turned(a, a_stride, b, b_stride, M, columns, {of.at, rows, of.adds});
        of.adds = true;
      };
      const T *const inner = inner_.row(place) + part.inner,
              *const of_inner = of_inner_.row(place) + part.inner;
      const at::Tensor &down = part.adapter->down, &up = part.adapter->up;
      add(part.of[0], part.rank, of_inner, of_inner_.width, x, x_stride, down.size(1));
      add(part.of[1], up.size(0), given + part.column, given_stride, inner, inner_.width,
          part.rank);
    }
  }

 private:
  struct Part {
    const Adapter* adapter;
    Gradient* of;
    int64_t column, inner, rank;  // where its outputs and its inner numbers begin
  };

  static int64_t ranks(const Adapter* adapters, size_t count) {
    int64_t sum = 0;
    for (size_t i = 0; i < count; ++i)
      if (adapters[i].acts()) sum += adapters[i].down.size(0);
    return sum;
  }
  void scale(T* rows, int64_t M, const Part& part) const {
    const float by = part.adapter->scale;
    for (int64_t i = 0; i < M; ++i, rows += inner_.width)
      for (int64_t c = 0; c < part.rank; ++c)
        rows[c] = static_cast<T>(static_cast<float>(rows[c]) * by);
  }

  Buffer<T> inner_, of_inner_;
  std::vector<Part> parts_;
};

}  // namespace layers
}  // namespace tandem
