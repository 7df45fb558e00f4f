// Ways to cut a product that give the same bits, and which of them is fastest on this processor.
//
// The choice is made on the products of the run itself. The first calls of a shape take the cuts in
// turn, each several times, and from then on the one whose quickest call cost least per row is
// taken. Nothing is computed only to be timed, nothing is kept after the process, and as every cut
// sums in the same order, a choice never changes a number.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tandem {

struct Cut {
  int64_t words;    // of k at a time: whether a panel's part stays in the first cache
  int64_t columns;  // of a tile: 64 (by 6 rows), 48 (by 8), 32 (by 12); 16 (by 6) below AVX-512
  bool fetches_rows = false;  // whether a tile fetches the rows of the next one meanwhile
  bool across = false;        // lanes over the rows of x instead of the weight's (gemm.cpp)
  bool in_place = false;      // of a weight's gradient: the factors are read where they lie
};

// What is tried. The last of each list is for some products alone: of kCuts for `multiply` with few
// rows, of kGradientCuts where `multiply_turned` can read float32 rows in whole vectors. Where registers
// are narrower a gradient has one way.
#if defined(__AVX512F__)
constexpr Cut kCuts[] = {{1024, 64}, {128, 64},        {1024, 32},
                         {256, 32},  {1024, 64, true}, {1024, 64, true, true}};
constexpr Cut kGradientCuts[] = {{1024, 64}, {128, 64},        {1024, 32},
                                 {256, 32},  {1024, 64, true}, {1024, 64, false, false, true}};
constexpr int kNumCuts = 5;
#else
constexpr Cut kCuts[] = {{1024, 16}, {256, 16}, {1024, 16, true}, {1024, 16, true, true}};
constexpr int kNumCuts = 3;
#endif
constexpr int kNumCrossing = kNumCuts + 1;
constexpr int64_t kMostCrossing = 256;  // rows; beyond, packing a weight costs little

enum class Product { forward, backward, packed, gradient };

struct Tried;  // what is known of one shape

// One call of a product: which cut it takes, timed from construction to destruction while that is
// still open.
class Trial {
 public:
  Trial(Product product, bool half, int64_t M, int64_t N, int64_t K, const Cut* cuts, int count);
  ~Trial();
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  const Cut& cut() const { return *cut_; }

 private:
  const Cut* cut_;
  Tried* shape_ = nullptr;  // null: nothing to find out
  int index_ = 0;
  int64_t rows_;
  std::chrono::steady_clock::time_point began_;
};

// A line per shape: kind, type, most rows, N, K, then the cut (words, columns, fetches_rows,
// across, in_place), or "measuring".
std::string choices();

}  // namespace tandem
