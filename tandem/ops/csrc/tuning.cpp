#include "tuning.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <tuple>

namespace tandem {
namespace {

constexpr int kMostCuts = kNumCrossing;
constexpr int kRounds = 6;  // calls of each cut
constexpr double kGain = 0.97;  // of the first cut's time: what another must at least save, 3 %
// Multiply-adds below which a call takes no longer than finding out about it.
constexpr int64_t kLeast = 1 << 19;

// Shapes differ by the power of two of their rows too: kind, half, rows, N, K.
using Key = std::tuple<int, bool, int, int64_t, int64_t>;

int power_of_two(int64_t rows) {
  int power = 0;
  while ((int64_t{1} << power) < rows) ++power;
  return power;
}

}  // namespace

struct Tried {
  const Cut* cuts;
  int count;
  int calls = 0;
  int chosen = -1;
  std::array<double, kMostCuts> best;  // nanoseconds per row of the quickest call

  Tried(const Cut* cuts, int count) : cuts(cuts), count(count) { best.fill(1e300); }
};

namespace {

struct Table {
  std::mutex mutex;
  std::map<Key, Tried> shapes;
};

Table& table() {
  static Table* const all = new Table;  // autograd's threads may outlive static objects
  return *all;
}

}  // namespace

Trial::Trial(Product product, bool half, int64_t M, int64_t N, int64_t K, const Cut* cuts, int count)
    : cut_(cuts), rows_(M) {
  if (M * N * K < kLeast) return;
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  const Key key{static_cast<int>(product), half, power_of_two(M), N, K};
  Tried& shape = all.shapes.try_emplace(key, cuts, count).first->second;
  if (shape.chosen >= 0 && shape.chosen < count) {
    cut_ = &cuts[shape.chosen];
    return;
  }
  index_ = shape.calls++ % count;
  cut_ = &cuts[index_];
  shape_ = &shape;
  began_ = std::chrono::steady_clock::now();
}

Trial::~Trial() {
  if (!shape_) return;
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began_;
  const std::lock_guard lock(table().mutex);
  double& best = shape_->best[index_];
  best = std::min(best, took.count() / static_cast<double>(rows_));
  if (shape_->calls < kRounds * shape_->count) return;
  int fastest = 0;
  for (int i = 1; i < shape_->count; ++i)
    if (shape_->best[i] < shape_->best[fastest]) fastest = i;
  shape_->chosen = shape_->best[fastest] < kGain * shape_->best[0] ? fastest : 0;
}

std::string choices() {
  static const char* const kinds[] = {"forward", "backward", "packed", "gradient"};
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  std::string text;
  for (const auto& [key, shape] : all.shapes) {
    const auto& [kind, half, rows, N, K] = key;
    text += std::string(kinds[kind]) + (half ? " bf16 " : " fp32 ") +
            std::to_string(int64_t{1} << rows) + " " + std::to_string(N) + " " + std::to_string(K);
    if (shape.chosen < 0) {
      text += " measuring\n";
    } else {
      const Cut& cut = shape.cuts[shape.chosen];
      text += " " + std::to_string(cut.words) + " " + std::to_string(cut.columns) + " " +
              std::to_string(cut.fetches_rows) + " " + std::to_string(cut.across) + " " +
              std::to_string(cut.in_place) + "\n";
    }
  }
  return text;
}

}  // namespace tandem
