// What a layer does to one row at a time: root-mean-square norm, rotation, gated activations, each
// with its gradient. Rounding is Hugging Face's: where their modules round to the model's dtype
// between two operations, so does this.
#pragma once

#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace tandem {

// ---- root-mean-square norm ----

// 1 / rms of a row, summed in four chains of 16 lanes.
template <class T>
TANDEM_INLINE float inverse_rms(const T* x, int64_t D, float eps) {
  v16 a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= D; i += 4 * kLanes) {
    const v16 p = load(x + i), q = load(x + i + 16), r = load(x + i + 32), s = load(x + i + 48);
    a = p * p + a;
    b = q * q + b;
    c = r * r + c;
    d = s * s + d;
  }
  for (; i < D; i += kLanes) {
    const v16 p = load_lanes(x + i, static_cast<int>(std::min<int64_t>(kLanes, D - i)));
    a = p * p + a;
  }
  return 1.0f / std::sqrt(sum((a + b) + (c + d)) / static_cast<float>(D) + eps);
}

// y (D,) = x / rms(x) * weight, or Gemma's x / rms(x) * (1 + weight); returns 1 / rms(x).
// `offset` rounds once, at the end; the other rounds x / rms(x) to T first.
template <bool offset, class T, class W, class Y>
TANDEM_INLINE float rms_row(const T* x, const W* weight, Y* y, int64_t D, float eps) {
  const float scale = inverse_rms(x, D, eps);
  for_columns(D, [&](int64_t i, int lanes) {
    const v16 h = load_lanes(x + i, lanes) * scale, w = load_lanes(weight + i, lanes);
    if constexpr (offset) {
      store_lanes(y + i, h * (1.0f + w), lanes);
    } else {
      store_lanes(y + i, w * rounded<T>(h), lanes);
    }
  });
  return scale;
}

// grad_x from grad_y, rounded, plus `also` if that is given; grad_weight (D,), if wanted, is added to.
template <bool offset, class T, class W, class Y>
TANDEM_INLINE void rms_row_backward(const Y* grad_y, const T* x, const W* weight, float scale,
                                    T* grad_x, float* grad_weight, int64_t D,
                                    const T* also = nullptr) {
  const auto inner = [&](int64_t i, int lanes) {
    const v16 w = load_lanes(weight + i, lanes);
    return load_lanes(grad_y + i, lanes) * (offset ? 1.0f + w : w);
  };
  v16 dots = {};
  for_columns(D, [&](int64_t i, int lanes) {
    const v16 h = load_lanes(x + i, lanes) * scale;
    dots = inner(i, lanes) * h + dots;
    if (grad_weight) {
      const v16 g = load_lanes(grad_y + i, lanes) * (offset ? h : rounded<T>(h));
      store_lanes(grad_weight + i, load_lanes(grad_weight + i, lanes) + g, lanes);
    }
  });
  if (!grad_x) return;
  const float mean = sum(dots) / static_cast<float>(D);
  for_columns(D, [&](int64_t i, int lanes) {
    const v16 h = load_lanes(x + i, lanes) * scale;
    v16 made = (inner(i, lanes) - h * mean) * scale;
    if (also) made = load_lanes(also + i, lanes) + rounded<T>(made);
    store_lanes(grad_x + i, made, lanes);
  });
}

// ---- rotation ----

// A product that no neighbouring sum may swallow into a fused multiply-add, rounded to T.
template <class T>
TANDEM_INLINE v16 rounded_product(v16 a, v16 b) {
  v16 product = a * b;
  in_register(product);
  return rounded<T>(product);
}

// One head (D,) of a token: its first R columns turn by cos and sin (R,), the halves being the
// pairs; the rest is copied. `back` is the gradient: the turn's transpose. y may be x.
template <bool back, class T>
TANDEM_INLINE void rope_row(const T* x, const T* cos, const T* sin, T* y, int64_t D, int64_t R) {
  const int64_t half = R / 2;
  const T* sin_low = back ? sin + half : sin;
  const T* sin_high = back ? sin : sin + half;
  for_columns(half, [&](int64_t i, int lanes) {
    const v16 a = load_lanes(x + i, lanes), b = load_lanes(x + half + i, lanes);
    const v16 low = rounded_product<T>(a, load_lanes(cos + i, lanes));
    const v16 high = rounded_product<T>(b, load_lanes(cos + half + i, lanes));
    const v16 from_b = rounded_product<T>(b, load_lanes(sin_low + i, lanes));
    const v16 from_a = rounded_product<T>(a, load_lanes(sin_high + i, lanes));
    store_lanes(y + i, back ? low + from_b : low - from_b, lanes);
    store_lanes(y + half + i, back ? high - from_a : high + from_a, lanes);
  });
  if (y != x) std::copy(x + R, x + D, y + R);
}

// Halves of `width` numbers, 8 or 16, change places, in each `width` of a vector.
template <int width>
TANDEM_INLINE v16 halves_swapped(v16 x) {
  if constexpr (width == 16) {
    return joined(upper(x), lower(x));
  } else {
    static_assert(width == 8);
    return fours_swapped(x);
  }
}

// Heads that are no wider than a vector and turn whole: as many of them as whole vectors hold, which
// is returned. A difference is the sum with the second number's sign turned, to the bit.
template <bool back, int width, class T>
TANDEM_INLINE int64_t rope_narrow(const T* x, const T* cos, const T* sin, T* y, int64_t heads) {
  const auto each = [](const T* p) {
    const v16 once = load_lanes(p, width);
    if constexpr (width == 16) return once;
    else return joined(lower(once), lower(once));
  };
  const v16 c = each(cos), s = each(sin);
  const v16 signed_s = select((lane_index() & (width / 2)) == 0, -s, s);
  const v16 turns = back ? halves_swapped<width>(signed_s) : signed_s;
  constexpr int64_t together = kLanes / width;
  int64_t h = 0;
  for (; h + together <= heads; h += together) {
    const v16 a = load(x + h * width);
    store(y + h * width, rounded_product<T>(a, c) +
                             rounded_product<T>(halves_swapped<width>(a), turns));
  }
  return h;
}

// `heads` heads of a token, one after another.
template <bool back, class T>
TANDEM_INLINE void rope_heads(const T* x, const T* cos, const T* sin, T* y, int64_t heads, int64_t D,
                              int64_t R) {
  int64_t h = 0;
  if (R == D && D == 8) h = rope_narrow<back, 8>(x, cos, sin, y, heads);
  if (R == D && D == 16) h = rope_narrow<back, 16>(x, cos, sin, y, heads);
  for (; h < heads; ++h) rope_row<back>(x + h * D, cos, sin, y + h * D, D, R);
}

// ---- activations ----

struct Silu {
  static TANDEM_INLINE v16 value(v16 x) { return x / (1.0f + exp(-x)); }
  static TANDEM_INLINE v16 slope(v16 x) {
    const v16 s = 1.0f / (1.0f + exp(-x));
    return s * (1.0f + x * (1.0f - s));
  }
};

// 0.5 x (1 + tanh u) is x / (1 + e^-2u), which does not cancel where tanh nears -1.
struct GeluTanh {
  static constexpr float kTwice = 2 * 0.79788456080286536f, kCubic = 0.044715f;

  static TANDEM_INLINE v16 minus_2u(v16 x) { return -kTwice * (x * x * x * kCubic + x); }
  static TANDEM_INLINE v16 value(v16 x) { return x / (1.0f + exp(minus_2u(x))); }
  static TANDEM_INLINE v16 slope(v16 x) {
    const v16 s = 1.0f / (1.0f + exp(minus_2u(x)));
    const v16 inner = kTwice * (1.0f + x * x * (3.0f * kCubic));
    return s * (1.0f + x * (1.0f - s) * inner);
  }
};

// x Phi(x), with Phi(-s) as e^(-s^2 / 2) w(s): no difference of nearly equal numbers. w falls from
// 1/2 as 1/s; a quotient of two polynomials is fitted to it within 2^-30 (1 + s^2 / 2) of its value,
// since for large s rounding s^2 costs more than that.
struct Gelu {
  static constexpr float kDensity = 0.39894228040143268f;  // of a normal at 0

  // |x|, capped where e^(-s^2 / 2) is 0.
  static TANDEM_INLINE v16 size(v16 x) {
    return min(splat(13.26f), from_bits(bits(x) & 0x7FFFFFFFu));
  }
  static TANDEM_INLINE v16 bell(v16 s) { return exp_of<-2>(s * s); }
  static TANDEM_INLINE v16 below(v16 s, v16 bell) {
    v16 p = s * 0.00612998335f + 0.0643196777f, q = s * 0.0153650334f + 0.161250502f;
    p = p * s + 0.303013027f;
    p = p * s + 0.751027524f;
    p = p * s + 0.896359026f;
    q = q * s + 0.774417162f;
    q = q * s + 2.04941201f;
    q = q * s + 2.93243718f;
    q = q * s + 1.79271805f;
    return bell * p / q;
  }
  static TANDEM_INLINE v16 value(v16 x) {
    const v16 s = size(x);
    // min is x where x < 0, beyond the cap of s too: -inf gives NaN, as by the formula.
    return min(x, -s) * below(s, bell(s)) + max(splat(0.0f), x);
  }
  static TANDEM_INLINE v16 slope(v16 x) {
    const v16 s = size(x), density = bell(s), under = below(s, density);
    return select(x < 0.0f, under, 1.0f - under) + x * density * kDensity;
  }
};

// y (I,) = act(x).
template <class Act, class T>
TANDEM_INLINE void active_row(const T* x, T* y, int64_t I) {
  for_columns(I, [&](int64_t i, int lanes) {
    store_lanes(y + i, Act::value(load_lanes(x + i, lanes)), lanes);
  });
}

// The gradient of x.
template <class Act, class T>
TANDEM_INLINE void active_row_backward(const T* grad_y, const T* x, T* grad_x, int64_t I) {
  for_columns(I, [&](int64_t i, int lanes) {
    const v16 slope = Act::slope(load_lanes(x + i, lanes));
    store_lanes(grad_x + i, load_lanes(grad_y + i, lanes) * slope, lanes);
  });
}

// y (I,) = act(gate) * up; act(gate) is rounded to T before the product. y may be gate or up.
template <class Act, class T>
TANDEM_INLINE void gated_row(const T* gate, const T* up, T* y, int64_t I) {
  for_columns(I, [&](int64_t i, int lanes) {
    const v16 active = rounded<T>(Act::value(load_lanes(gate + i, lanes)));
    store_lanes(y + i, active * load_lanes(up + i, lanes), lanes);
  });
}

// Gradients of gate and up; y itself once more into `y`, if given, which may be grad_y.
template <class Act, class T>
TANDEM_INLINE void gated_row_backward(const T* grad_y, const T* gate, const T* up, T* grad_gate,
                                      T* grad_up, int64_t I, T* y = nullptr) {
  for_columns(I, [&](int64_t i, int lanes) {
    const v16 g = load_lanes(grad_y + i, lanes), x = load_lanes(gate + i, lanes);
    const v16 other = load_lanes(up + i, lanes), active = rounded<T>(Act::value(x));
    store_lanes(grad_up + i, g * active, lanes);
    store_lanes(grad_gate + i, g * other * Act::slope(x), lanes);
    if (y) store_lanes(y + i, active * other, lanes);
  });
}

}  // namespace tandem
