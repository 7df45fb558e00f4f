// What backward passes share: outputs they read, and weights' gradients added where they are kept.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace tandem {

// An output as a Function's `save_for_backward` may take it: the same numbers and version counter in
// a tensor without history. The output itself would own the node that owns it, should saving throw
// midway, and a checkpoint's recomputation ends so at the last tensor that it needs: such a cycle
// keeps everything else that was saved for as long as the process lives.
inline at::Tensor saved_output(const at::Tensor& output) { return output.tensor_data(); }

// In a forward pass: remembers a weight that may have a gradient of its own. What is saved for the
// backward may come back from there as another object over the same numbers.
// One of several under a name of its own.
inline void keep_leaf(torch::autograd::AutogradContext* ctx, const at::Tensor& weight,
                      const char* name = "leaf") {
  if (weight.is_leaf() && weight.requires_grad()) ctx->saved_data[name] = weight;
}

// In a backward pass: the `grad` of a weight (undefined at first) if adding to it here means what
// returning a gradient would, and null where it does not: someone asks for gradients themselves
// (`torch.autograd.grad`), looks at them through a hook, or keeps them in another form. A large
// weight's gradient is then not written, read and added to another for every micro-batch.
inline at::Tensor* kept_gradient(torch::autograd::AutogradContext* ctx, const at::Tensor& weight,
                                 const char* name = "leaf") {
  namespace autograd = torch::autograd;
  const auto kept = ctx->saved_data.find(name);
  if (kept == ctx->saved_data.end() || !weight.defined() || !weight.requires_grad() ||
      !weight.is_leaf() || !weight.is_contiguous() || weight.scalar_type() != at::kFloat)
    return nullptr;
  const auto* const asked = autograd::get_current_graph_task_exec_info();
  if (!asked || !asked->empty()) return nullptr;
  const at::Tensor& leaf = kept->second.toTensor();
  const auto adder = autograd::impl::try_get_grad_accumulator(leaf);
  if (!adder || !adder->pre_hooks().empty() || !adder->post_hooks().empty()) return nullptr;
  if (!leaf.is_leaf() || leaf.const_data_ptr() != weight.const_data_ptr() ||
      leaf.sizes() != weight.sizes() || !autograd::impl::hooks(leaf).empty() ||
      autograd::impl::post_acc_grad_hooks(leaf))
    return nullptr;
  at::Tensor& grad = leaf.mutable_grad();
  if (grad.defined()) {
    if (grad.layout() != at::kStrided || !grad.is_cpu() || !grad.is_contiguous() ||
        grad.scalar_type() != at::kFloat || grad.requires_grad() ||
        grad.unsafeGetTensorImpl()->is_python_dispatch())
      return nullptr;
    grad.unsafeGetTensorImpl()->bump_version();
  }
  return &grad;
}

}  // namespace tandem
