// Memory that is read all over the place, in pages large enough that finding them costs little.
#include <ATen/ATen.h>
#include <torch/library.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace tandem {
namespace {

// Asks for pages of 2 MiB where the tensor covers them whole. Advice only: a system that has none,
// or refuses, leaves the pages as they are. What they hold does not change.
void large_pages(const at::Tensor& x) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  const uintptr_t from = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t to = (begin + x.nbytes()) / kPage * kPage;
  if (from >= to) return;
  void* at = reinterpret_cast<void*>(from);
  if (madvise(at, to - from, MADV_HUGEPAGE) != 0) return;
#if defined(MADV_COLLAPSE)
  madvise(at, to - from, MADV_COLLAPSE);  // those that are in use already
#endif
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) { m.def("large_pages(Tensor x) -> ()"); }

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("large_pages", &large_pages); }

}  // namespace tandem
