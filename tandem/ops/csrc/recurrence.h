// Token mixers that carry a state from token to token: causal convolutions of a few tokens, and
// linear recurrences of a matrix (gated delta rule, Mamba 2).
//
// A token's result comes from the state before it and from nothing else, one token after another,
// so it is the same to the last bit whether its sequence is computed at once, in parts or token by
// token, in whatever company. Sums have one fixed order: over keys in kChains chains.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace tandem {

// Where segments of tokens keep their states between calls; `state` null: nowhere.
template <class T>
struct Slots {
  T* state;               // (slots, numbers of one)
  const int64_t* of;      // (segments,), which is whose
  const int64_t* begins;  // (segments,), tokens before; 0: the state begins empty. Null: it never does
  int64_t numbers;

  T* at(int64_t segment) const { return state + of[segment] * numbers; }
  bool goes_on(int64_t segment) const { return state && (!begins || begins[segment] > 0); }
};

// y (N, C) = act(bias + sum over j of weight[W - 1 - j] * x[j tokens before]), channel by channel.
template <class T>
struct Convolution {
  const T* x;
  int64_t x_stride;
  const float* weight;  // (W, C)
  const float* bias;    // (C,) or null
  int64_t channels, width;
  bool silu;
  Slots<T> slots;  // of (W - 1, C), the oldest token first
};

template <class T>
void convolve(const Convolution<T>& in, const Segments& segments, T* y);
// grad_x (N, C), grad_weight (W, C) and, if not null, grad_bias (C,); all zero before.
template <class T>
void convolve_backward(const Convolution<T>& in, const Segments& segments, const T* grad_y,
                       float* grad_x, float* grad_weight, float* grad_bias);

// S (K, V) of each head: S = exp(decay) S + k u^T, out = S^T q, with u = v, or by the delta rule
// u = beta (v - exp(decay) S^T k).
struct Recurrence {
  const float *q, *k;  // (N, G, K); heads h to h + H / G - 1 share one of the G
  const float* v;      // (N, H, V)
  const float* decay;  // (N, H), at most 0
  const float* beta;   // (N, H), or null: not by the delta rule
  int64_t tokens, groups, heads, key_width, value_width;
  Slots<float> slots;  // of (H, K, V)
};

void recur(const Recurrence& in, const Segments& segments, float* out);
// Gradients of q and k for each head, (N, H, K), of v (N, H, V), of decay and beta (N, H).
void recur_backward(const Recurrence& in, const Segments& segments, const float* grad_out,
                    float* grad_q, float* grad_k, float* grad_v, float* grad_decay,
                    float* grad_beta);

}  // namespace tandem
