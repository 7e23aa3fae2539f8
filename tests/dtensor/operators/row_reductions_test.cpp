// Reductions of tensors whose parts end inside a row: each rank reduces what it holds of a row, and the rest is put together
// where the reduction allows it.
#include <gtest/gtest.h>
#include <tessera/dtensor/debug.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::row_reductions_test {
namespace {

using at::Tensor;

struct Reduction {
  const char* name;
  std::function<Tensor(const Tensor& x, const std::vector<int64_t>& dims, bool keep)> run;
  bool combines = true; ///< what the ranks make of their parts of a row
};

std::vector<Reduction> reductions() {
  using Dims = const std::vector<int64_t>&;
  const auto norm = [](double p) {
    return [p](const Tensor& x, Dims d, bool k) { return torch::linalg_vector_norm(x, p, d, k); };
  };
  return {
      {"sum", [](const Tensor& x, Dims d, bool k) { return x.sum(d, k); }},
      {"sum in double", [](const Tensor& x, Dims d, bool k) { return x.sum(d, k, torch::kDouble); }},
      {"nansum", [](const Tensor& x, Dims d, bool k) { return x.nansum(d, k); }},
      {"mean", [](const Tensor& x, Dims d, bool k) { return x.mean(d, k); }},
      {"amax", [](const Tensor& x, Dims d, bool k) { return x.amax(d, k); }},
      {"amin", [](const Tensor& x, Dims d, bool k) { return x.amin(d, k); }},
      {"amax of whole numbers", [](const Tensor& x, Dims d, bool k) { return x.mul(4).to(torch::kInt).amax(d, k); }},
      {"prod", [](const Tensor& x, Dims d, bool k) { return x.prod(d[0], k); }},
      {"any", [](const Tensor& x, Dims d, bool k) { return x.clamp_min(0).any(d[0], k); }},
      {"all", [](const Tensor& x, Dims d, bool k) { return x.ne(-0.5).all(d[0], k); }},
      {"count_nonzero", [](const Tensor& x, Dims d, bool) { return x.clamp_min(0).count_nonzero(d); }},
      {"norm", norm(2)},
      {"norm 1", norm(1)},
      {"norm 3", norm(3)},
      {"norm 0", norm(0)},
      {"norm inf", norm(INFINITY)},
      {"norm -inf", norm(-INFINITY), false},
      {"var", [](const Tensor& x, Dims d, bool k) { return x.var(d, false, k); }, false},
      {"std", [](const Tensor& x, Dims d, bool k) { return x.std(d, false, k); }, false},
      {"logsumexp", [](const Tensor& x, Dims d, bool k) { return x.logsumexp(d, k); }, false},
      {"argmax", [](const Tensor& x, Dims d, bool k) { return x.argmax(d[0], k); }, false},
  };
}

/// Values of both signs.
Tensor numbers(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const auto numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return torch::arange(numel, torch::kDouble).mul(7).remainder(11).sub(5).div(2).view(sizes).to(dtype);
}

/// Splits of dims 0..`dim` that end inside rows, some of them with ranks that hold nothing.
std::vector<RaggedShard> cuts(const std::vector<int64_t>& sizes, int64_t dim) {
  const auto positions = std::accumulate(sizes.begin(), sizes.begin() + dim + 1, int64_t{1}, std::multiplies<>());
  std::vector<RaggedShard> result;
  for (const int64_t first : {int64_t{0}, int64_t{1}, positions / 2, positions}) {
    std::vector<int64_t> extents(world_size(), 0);
    extents[0] = world_size() == 1 ? positions : first;
    for (int64_t r = 1, left = positions - first; r < world_size(); ++r) {
      extents[r] = r == world_size() - 1 ? left : left / 2;
      left -= extents[r];
    }
    result.push_back({dim, extents});
  }
  return result;
}

void expect_as_plain(const Reduction& reduction, const Tensor& whole, const RaggedShard& cut, const std::vector<int64_t>& dims,
                     bool keep) {
  SCOPED_TRACE(c10::str(reduction.name, " over ", c10::IntArrayRef(dims), " of ", whole.dtype(), whole.sizes(), " as ",
                        to_string(Placement(cut)), keep ? ", kept" : ""));
  const Tensor x = make(whole, line_mesh(), {cut});
  const LogRedistributions log;
  const auto result = reduction.run(x, dims, keep);
  if (reduction.combines) EXPECT_TRUE(log.records().empty()) << log.to_string();
  const double tolerance = whole.scalar_type() == torch::kBFloat16 ? 2e-2 : 1e-5;
  EXPECT_TENSORS_CLOSE(whole_of(result), reduction.run(whole, dims, keep), tolerance, tolerance);
}

TEST(RowReductions, CombineWhatTheRanksHoldOfARow) {
  using Dims = std::vector<int64_t>;
  for (const Dims& sizes : {Dims{5, 3}, Dims{3, 4, 2}, Dims{1, 6}}) {
    std::vector<Dims> named{{0}, {1}, {-1}, {0, 1}};
    if (sizes.size() == 3) named.insert(named.end(), {{1, 2}, {0, 2}});
    for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
      for (const auto& cut : cuts(sizes, dim)) {
        for (const auto& reduction : reductions()) {
          for (const auto& dims : named) {
            for (const auto dtype : {torch::kFloat, torch::kBFloat16})
              expect_as_plain(reduction, numbers(sizes, dtype), cut, dims, dtype == torch::kFloat);
          }
        }
      }
    }
  }
}

TEST(RowReductions, OfTensorsWithoutElements) {
  std::vector<int64_t> extents(world_size(), 0);
  const auto whole = torch::zeros({3, 0});
  const Tensor x = make(whole, line_mesh(), {RaggedShard{1, extents}});
  EXPECT_TENSORS_EQUAL(whole_of(x.sum(1, true)), whole.sum(1, true));
  EXPECT_TENSORS_EQUAL(whole_of(x.norm(2, 1, true)), whole.norm(2, 1, true));
  EXPECT_TENSORS_EQUAL(whole_of(x.sum(0)), whole.sum(0));
}

TEST(RowReductions, WriteIntoWhatTheyAreGiven) {
  const auto whole = numbers({5, 3}, torch::kFloat);
  for (const auto& cut : cuts({5, 3}, 1)) {
    const Tensor x = make(whole, line_mesh(), {cut});
    Tensor sums = make(torch::zeros({5}), line_mesh(), {Replicate{}});
    at::sum_out(sums, x, {1});
    EXPECT_TENSORS_CLOSE(whole_of(sums), whole.sum(1));
  }
}

/// A sum that is reduced to be written is whole from then on.
TEST(RowReductions, TheirResultsAreWrittenInPlace) {
  const auto whole = numbers({5, 3}, torch::kFloat);
  for (const auto& cut : cuts({5, 3}, 1)) {
    const Tensor x = make(whole, line_mesh(), {cut});
    const auto norms = x.norm(2, 1, true), sums = x.sum(0, true);
    norms.clamp_(1.2, 2.5).sub_(3);
    sums.relu_().add_(1);
    EXPECT_TENSORS_CLOSE(whole_of(norms), whole.norm(2, 1, true).clamp(1.2, 2.5) - 3);
    EXPECT_TENSORS_CLOSE(whole_of(sums), whole.sum(0, true).relu() + 1);
  }
}

} // namespace
} // namespace tessera::testing::row_reductions_test
