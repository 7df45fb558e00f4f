// Memory of large tensors: kept when freed, used again whole or in parts, given back when asked;
// and pages large enough that finding them costs little.
//
// glibc either unmaps a large block when it is freed, so that every page faults again at the next
// step, or keeps it and, for aligned blocks, seldom finds a hole that the next of the same size
// fits. Here free neighbours become one block, and the smallest that fits is taken.
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#if defined(__linux__)
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tandem {
namespace {

constexpr uintptr_t kLargePage = uintptr_t{1} << 21;

#if defined(__linux__) && defined(MADV_HUGEPAGE)

// Blocks of this size and above are ours; below, glibc's own bins serve well.
constexpr size_t kLarge = size_t{1} << 16;
constexpr size_t kGrain = 256;

// One range of addresses, in blocks that are used or free; free neighbours are always one block.
class Arena final : public c10::Allocator {
 public:
  // Null where the system gives no such range.
  static Arena* get() {
    static Arena* const arena = [] {
      Arena* const made = new Arena();  // never deleted: tensors may outlive everything
      pthread_atfork([] { Arena::get()->mutex_.lock(); }, [] { Arena::get()->mutex_.unlock(); },
                     [] { Arena::get()->mutex_.unlock(); });
      return made;
    }();
    return arena->begin_ ? arena : nullptr;
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* const block = bytes < kLarge ? nullptr : take(bytes);
    if (!block) return other_->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // Gives the pages of free blocks back to the system.
  void give_back() {
    of_free_pages([](void* from, size_t bytes) { madvise(from, bytes, MADV_DONTNEED); });
  }

  // Bytes of the pages of free blocks that the system has not got back.
  size_t kept() {
    const size_t page = sysconf(_SC_PAGESIZE);
    std::vector<unsigned char> is_held;
    size_t pages = 0;
    of_free_pages([&](void* from, size_t bytes) {
      is_held.assign(bytes / page, 0);
      if (mincore(from, bytes, is_held.data()) != 0) return;
      for (const unsigned char held : is_held) pages += held & 1;
    });
    return pages * page;
  }

 private:
  Arena() : other_(c10::GetCPUAllocator()) {
    const size_t size = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    void* const range = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return;
    madvise(range, size, MADV_HUGEPAGE);
    begin_ = top_ =
        (reinterpret_cast<uintptr_t>(range) + kLargePage - 1) / kLargePage * kLargePage;
    end_ = reinterpret_cast<uintptr_t>(range) + size;
  }

  // Calls f(begin, bytes) for the whole pages of every free block.
  template <typename F>
  void of_free_pages(const F& f) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    for (const auto& [at, bytes] : free_) {
      const uintptr_t from = (at + page - 1) / page * page, to = (at + bytes) / page * page;
      if (from < to) f(reinterpret_cast<void*>(from), to - from);
    }
  }

  static void release(void* block) {
    Arena& arena = *get();
    const uintptr_t at = reinterpret_cast<uintptr_t>(block);
    if (at < arena.begin_ || at >= arena.end_) return arena.other_->raw_deleter()(block);
    c10::profiledCPUMemoryReporter().Delete(block);
    arena.put(at);
  }

  // The smallest free block that fits, or new addresses; null where there are none left.
  void* take(size_t asked) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t bytes = (asked + kGrain - 1) / kGrain * kGrain;
    uintptr_t at = 0;
    if (const auto fit = by_size_.lower_bound({bytes, 0}); fit != by_size_.end()) {
      const auto [size, from] = *fit;
      forget(from, size);
      if (size > bytes) keep(from + bytes, size - bytes);
      at = from;
    } else {
      const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
      const bool at_top = last != free_.end() && last->first + last->second == top_;
      const uintptr_t from = at_top ? last->first : top_;
      if (bytes > end_ - from) return nullptr;
      if (at_top) forget(last->first, last->second);
      top_ = from + bytes;
      at = from;
    }
    used_.emplace(at, bytes);
    return reinterpret_cast<void*>(at);
  }

  void put(uintptr_t at) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(at);
    size_t bytes = found->second;
    used_.erase(found);
    const auto next = free_.lower_bound(at);
    std::pair<uintptr_t, size_t> after{0, 0};
    if (next != free_.end()) after = *next;
    if (next != free_.begin()) {
      const auto [from, size] = *std::prev(next);
      if (from + size == at) {
        forget(from, size);
        at = from, bytes += size;
      }
    }
    if (after.first == at + bytes) {
      forget(after.first, after.second);
      bytes += after.second;
    }
    keep(at, bytes);
  }

  void keep(uintptr_t at, size_t bytes) {
    free_.emplace(at, bytes);
    by_size_.emplace(bytes, at);
  }

  void forget(uintptr_t at, size_t bytes) {
    free_.erase(at);
    by_size_.erase({bytes, at});
  }

  c10::Allocator* const other_;
  uintptr_t begin_ = 0, top_ = 0, end_ = 0;
  std::mutex mutex_;
  std::map<uintptr_t, size_t> free_;
  std::set<std::pair<size_t, uintptr_t>> by_size_;
  std::unordered_map<uintptr_t, size_t> used_;
};

bool keep_freed_memory() {
  Arena* const arena = Arena::get();
  if (arena) c10::SetCPUAllocator(arena, 255);
  return arena;
}

void give_back_memory() {
  if (c10::GetCPUAllocator() == Arena::get()) Arena::get()->give_back();
}

int64_t kept_memory() {
  return c10::GetCPUAllocator() == Arena::get() ? static_cast<int64_t>(Arena::get()->kept()) : 0;
}

#else

bool keep_freed_memory() { return false; }
void give_back_memory() {}
int64_t kept_memory() { return 0; }

#endif

// Asks for pages of 2 MiB where the tensor covers them whole. Advice only: a system that has none,
// or refuses, leaves the pages as they are. What they hold does not change.
void large_pages(const at::Tensor& x) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  const uintptr_t from = (begin + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t to = (begin + x.nbytes()) / kLargePage * kLargePage;
  if (from >= to) return;
  void* at = reinterpret_cast<void*>(from);
  if (madvise(at, to - from, MADV_HUGEPAGE) != 0) return;
#if defined(MADV_COLLAPSE)
  madvise(at, to - from, MADV_COLLAPSE);  // those that are in use already
#endif
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("large_pages(Tensor x) -> ()");
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("give_back_memory", &give_back_memory);
  m.def("kept_memory", &kept_memory);
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("large_pages", &large_pages); }

}  // namespace tandem
