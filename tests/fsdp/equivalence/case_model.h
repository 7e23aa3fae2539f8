#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/fsdp/buffers/node_reference.h>

namespace tessera::testing {

constexpr int64_t kWidth = 6;

/// Rank `rank`'s input of step `step`, [4, kWidth]. Also seeds the default generator, so that dropout draws the same wherever the
/// forward of that rank's data runs.
inline torch::Tensor input_of(int64_t step, int64_t rank) {
  torch::manual_seed(static_cast<uint64_t>(1000 * step + rank));
  return torch::randn({4, kWidth});
}

/// A model of the tests of equivalence: trained sharded, each rank on its own data, and unsharded, on the data of all ranks.
struct CaseModel : torch::nn::Module {
  /// The same, where this model's parameters are.
  torch::Tensor input_of(int64_t step, int64_t rank) const { return testing::input_of(step, rank).to(device()); }
  c10::Device device() const { return parameters().at(0).device(); }

  /// The loss of one rank's input.
  virtual torch::Tensor loss(const torch::Tensor& x) = 0;

  /// One iteration up to the gradients, which are those of the mean loss over `ranks`. Returns that loss.
  virtual double iterate(int64_t step, const std::vector<int64_t>& ranks) {
    double total = 0;
    for (const int64_t rank : ranks) {
      const auto part = watched(loss(input_of(step, rank)) / static_cast<double>(ranks.size()));
      part.backward();
      total += part.template item<double>();
    }
    return total;
  }

  /// The modules that become groups of their own, before the model itself does.
  virtual std::vector<std::shared_ptr<torch::nn::Module>> units() {
    std::vector<std::shared_ptr<torch::nn::Module>> found;
    for (const auto& child : children()) {
      if (!child->parameters().empty()) found.push_back(child);
    }
    return found;
  }

  /// All-gathers a step above two a group, less the root's and the last one's second, and why.
  struct Allowance {
    int64_t all_gathers = 0;
    std::string reason;
  };
  virtual Allowance allowance() const { return {}; }

  /// Whether it can go to another device unsharded: a view that it keeps of a parameter would stay behind.
  virtual bool can_move() const { return true; }

  /// The eps is above the rounding of gradients that are zero in exact arithmetic (of a bias in front of a batch norm, of
  /// attention's key bias), which AdamW would otherwise blow up to whole steps.
  virtual std::unique_ptr<torch::optim::Optimizer> make_optimizer() {
    return std::make_unique<torch::optim::AdamW>(parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-4));
  }

  /// Remembers the graph behind `tensor`, which must be gone after the iteration.
  torch::Tensor watched(torch::Tensor tensor) {
    if (tensor.grad_fn()) graphs.push_back(internal::weak(tensor.grad_fn()));
    return tensor;
  }
  std::vector<internal::WeakNodeReference> graphs;
};

/// A model that all ranks give the same data.
struct SameDataEverywhere : CaseModel {
  double iterate(int64_t step, const std::vector<int64_t>&) override {
    const auto value = watched(loss(input_of(step, 0)));
    value.backward();
    return value.item<double>();
  }
};

/// A case of the table: `make` builds the model; the generator has been seeded.
struct EquivalenceCase {
  std::string name;
  std::function<std::shared_ptr<CaseModel>()> make;
};

template <typename Model>
EquivalenceCase equivalence_case(std::string name) {
  return {std::move(name), [] { return std::make_shared<Model>(); }};
}

} // namespace tessera::testing
