// Loops on torch's threads. Not at::parallel_for itself: as a template it is compiled anew for every
// loop, a hundred and fifty times here.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tandem {

// Threads of a loop that begins here: within another one's there is one.
int64_t num_threads();

// body(from, to) over parts of [begin, end) of at least `grain`, on the threads that are free.
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t, int64_t)> body);

// body(i) for i < count, each by whichever of so many threads is free: the costliest should come
// first.
void share_out(int64_t count, int64_t threads, c10::function_ref<void(int64_t)> body);

}  // namespace tandem
