#include "threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>
#if defined(TANDEM_MEASURE_LOOPS)
#include <ctime>
#include <numeric>
#include <vector>
#endif

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

#if defined(TANDEM_MEASURE_LOOPS)

// For bench/cores.py: what threads spend on their parts of loops tells how long each loop would take
// if every thread had a core.
struct Measured {
  double all = 0, slowest = 0, own = 0;  // CPU seconds: of all parts, the longest, this thread's
};
Measured measured;

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

class Parts {
 public:
  void add(int thread, double seconds) { seconds_[thread] += seconds; }
  // `evenly`: where whoever is free takes what comes next, threads that share one core do not show
  // how cores would.
  void done(bool evenly) const {
    const double all = std::accumulate(seconds_.begin(), seconds_.end(), 0.0);
    measured.all += all;
    measured.own += seconds_[0];
    measured.slowest += evenly ? all / static_cast<double>(seconds_.size())
                               : *std::max_element(seconds_.begin(), seconds_.end());
  }

 private:
  std::vector<double> seconds_ = std::vector<double>(at::get_num_threads());
};

#else

double cpu_seconds() { return 0; }

struct Parts {
  void add(int, double) {}
  void done(bool) const {}
};

#endif

struct Loop {
  int64_t begin, end, grain;
  c10::function_ref<void(int64_t, int64_t)> body;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error = nullptr;
  Parts parts = {};

  void part(int64_t from, int64_t to, int thread) {
    at::internal::ThreadIdGuard id(thread);
    c10::ParallelGuard inside(true);
    const double began = cpu_seconds();
    body(from, to);
    parts.add(thread, cpu_seconds() - began);
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

void run(int64_t begin, int64_t end, int64_t grain, c10::function_ref<void(int64_t, int64_t)> body,
         bool evenly) {
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
  loop.parts.done(evenly);
}

}  // namespace
#else
namespace {

void run(int64_t begin, int64_t end, int64_t grain, c10::function_ref<void(int64_t, int64_t)> body,
         bool) {
  at::parallel_for(begin, end, grain, body);
}

}  // namespace
#endif

void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t, int64_t)> body) {
  run(begin, end, grain, body, false);
}

void share_out(int64_t count, int64_t threads, c10::function_ref<void(int64_t)> body) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  const auto take = [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) body(i);
  };
  run(0, std::min(threads, count), 1, take, true);
}

}  // namespace tandem

#if defined(TANDEM_MEASURE_LOOPS)
// CPU seconds in loops since the last call: of all threads, of each loop's slowest part, of this
// thread.
extern "C" __attribute__((visibility("default"))) void tandem_take_measured(double* out) {
  out[0] = tandem::measured.all, out[1] = tandem::measured.slowest, out[2] = tandem::measured.own;
  tandem::measured = {};
}
#endif
