#include <tessera/parallel/stages/balance.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace tessera::internal::pipeline {

namespace {

constexpr double kNoCut = std::numeric_limits<double>::infinity();

/// Sums over ranges of layers.
struct Sums {
  explicit Sums(const std::vector<LayerSize>& layers) : cost(1, 0), parameters(1, 0) {
    for (const auto& each : layers) {
      cost.push_back(cost.back() + each.cost);
      parameters.push_back(parameters.back() + each.parameters);
    }
  }
  /// What the stage of layers [begin, end) costs; no stage is without parameters.
  double of_stage(size_t begin, size_t end) const {
    return parameters[end] > parameters[begin] ? cost[end] - cost[begin] : kNoCut;
  }
  std::vector<double> cost;
  std::vector<int64_t> parameters;
};

/// The least of the dearest stage where the first `end` layers are cut into the stages so far, and where the last one begins.
struct Cut {
  double dearest = kNoCut;
  size_t begin = 0;
};

} // namespace

std::vector<int64_t> balanced_bounds(const std::vector<LayerSize>& layers, int64_t stages) {
  const Sums sums(layers);
  const auto count = layers.size();
  std::vector<std::vector<Cut>> cuts(1, std::vector<Cut>(count + 1));
  cuts[0][0].dearest = 0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    std::vector<Cut> next(count + 1);
    for (size_t end = 1; end <= count; ++end) {
      for (size_t begin = 0; begin < end; ++begin) {
        const double dearest = std::max(cuts.back()[begin].dearest, sums.of_stage(begin, end));
        if (dearest < next[end].dearest) next[end] = {dearest, begin};
      }
    }
    cuts.push_back(std::move(next));
  }
  const auto with_parameters = std::count_if(layers.begin(), layers.end(), [](const auto& each) { return each.parameters > 0; });
  TORCH_CHECK_VALUE(cuts.back()[count].dearest < kNoCut, "split: ", stages, " stages need parameters each, and of the ", count,
                    " layers ", with_parameters, " have some");
  std::vector<int64_t> bounds(static_cast<size_t>(stages) + 1);
  auto end = count;
  for (auto stage = static_cast<size_t>(stages); stage > 0; --stage) {
    bounds[stage] = static_cast<int64_t>(end);
    end = cuts[stage][end].begin;
  }
  return bounds;
}

std::vector<int64_t> given_bounds(const std::vector<int64_t>& inner, const std::vector<LayerSize>& layers, int64_t stages) {
  const auto count = static_cast<int64_t>(layers.size());
  TORCH_CHECK_VALUE(std::ssize(inner) == stages - 1, "split: ", inner.size(), " bounds for ", stages, " stages, which need ",
                    stages - 1);
  std::vector<int64_t> bounds{0};
  bounds.insert(bounds.end(), inner.begin(), inner.end());
  bounds.push_back(count);
  const Sums sums(layers);
  for (size_t stage = 0; stage + 1 < bounds.size(); ++stage) {
    const auto begin = bounds[stage], end = bounds[stage + 1];
    TORCH_CHECK_VALUE(begin < end && end <= count, "split: stage ", stage, " would have the layers ", begin, " to ", end,
                      " (without the last) of ", count, ": bounds must rise from stage to stage");
    TORCH_CHECK_VALUE(sums.parameters[static_cast<size_t>(end)] > sums.parameters[static_cast<size_t>(begin)], "split: stage ",
                      stage, " (layers ", begin, " to ", end - 1, ") has no parameters; move its bounds");
  }
  return bounds;
}

} // namespace tessera::internal::pipeline
