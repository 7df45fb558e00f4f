#include "threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>

#if AT_PARALLEL_OPENMP
// What every OpenMP runtime exports, GNU's and LLVM's, on Linux as on macOS: torch's own is found in
// the process. A compiler asked for OpenMP would link its own: clang a second runtime beside torch's
// on Linux, Apple's none at all.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}
#endif

namespace tandem {

int64_t num_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

#if AT_PARALLEL_OPENMP
namespace {

struct Loop {
  int64_t begin, end, grain;
  c10::function_ref<void(int64_t, int64_t)> body;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error = nullptr;

  void part(int64_t from, int64_t to, int thread) {
    at::internal::ThreadIdGuard id(thread);
    c10::ParallelGuard inside(true);
    body(from, to);
  }

  // This thread's part of it; an error must not leave a thread of the runtime's.
  void share() {
    const int64_t most = at::divup(end - begin, std::max<int64_t>(1, grain));
    const int64_t size = at::divup(end - begin, std::min<int64_t>(omp_get_num_threads(), most));
    const int thread = omp_get_thread_num();
    const int64_t from = begin + thread * size;
    if (from >= end) return;
    try {
      part(from, std::min(end, from + size), thread);
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
    }
  }
};

}  // namespace

void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t, int64_t)> body) {
  if (begin >= end) return;
  at::internal::lazy_init_num_threads();
  Loop loop{begin, end, grain, body};
  if (end - begin <= std::max<int64_t>(1, grain) || at::in_parallel_region() ||
      at::get_num_threads() == 1) {
    return loop.part(begin, end, 0);
  }
  // 0: as many threads as torch has set for its own loops.
  GOMP_parallel([](void* of) { static_cast<Loop*>(of)->share(); }, &loop, 0, 0);
  if (loop.error) std::rethrow_exception(loop.error);
}
#else
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t, int64_t)> body) {
  at::parallel_for(begin, end, grain, body);
}
#endif

}  // namespace tandem
