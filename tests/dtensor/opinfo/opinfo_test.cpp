// Replays the calls behind PyTorch's OpInfo samples (export_opinfo.py) on every product of Replicate and Shard over the tensor
// arguments, forward and backward, against the same call on plain tensors. The gradient of each result is Replicate, Shard or
// Partial, drawn anew for each product.
//
//   TESSERA_OPINFO_CALLS   the folder of the exported calls (set by ctest)
//   TESSERA_OPINFO_PRODUCTS  of a call in a full run: at most so many (default 256, and 64 on 2x2)
//   TESSERA_OPINFO_ONLY    names of OpInfos, separated by commas: only these
#include "opinfo_replay.h"

#include <ATen/record_function.h>
#include <fmt/format.h>
#include <tessera/base/error_text.h>
#include <tessera/dtensor/strict_sharding.h>

#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <set>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::opinfo_test {
namespace {

using at::Tensor;
using Names = std::set<std::string>;

/// While it lives, the operators that get a split DTensor are noted.
class SplitCalls {
 public:
  SplitCalls() {
    noted().clear();
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&note).needsInputs(true));
  }
  ~SplitCalls() { at::removeCallback(handle_); }
  SplitCalls(const SplitCalls&) = delete;
  SplitCalls& operator=(const SplitCalls&) = delete;
  static Names& noted() {
    thread_local Names names;
    return names;
  }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    const auto name = function.operator_name();
    if (!name) return nullptr;
    for (const auto& tensor : tensors_of(function.inputs())) {
      const auto* meta = internal::dtensor_meta(tensor);
      if (!meta) continue;
      for (const auto& placement : meta->spec->placements()) {
        if (is_sharded(placement)) noted().insert(c10::toString(*name));
      }
    }
    return nullptr;
  }
  at::CallbackHandle handle_;
};

/// What became of all calls.
struct Tally {
  Names working;
  std::map<std::string, int> missing, errors, wrong; ///< by operator and text
  int64_t calls = 0, products = 0, passed = 0;
  int64_t rounded = 0; ///< right by the bound of double alone, where the numbers are double
};

class Replay {
 public:
  explicit Replay(DeviceMesh mesh) : mesh_(std::move(mesh)), agreement_(mesh_) {}

  void replay(const OpCall& call, size_t limit) {
    OpResult expected;
    try {
      expected = run_call(call, plain_stage());
    } catch (const std::exception&) {
      return; // a sample that the operator refuses
    }
    ++tally.calls;
    for (const auto& product : products(call, limit)) replay({call, product, random_()}, expected);
  }

  Tally tally;

 private:
  /// One run of a call.
  struct Product {
    const OpCall& call;
    std::vector<Placements> placements; ///< of the tensor arguments
    uint64_t gradient_seed;             ///< what the placements of the results' gradients are drawn from
    std::vector<Placements> gradients = {};
  };

  static std::string text_of(const Product& product) {
    auto text = describe(product.call, product.placements);
    for (const auto& placements : product.gradients) text += " <- " + to_string(placements);
    return text;
  }

  std::vector<Placements> choices(const Tensor& tensor) const {
    std::vector<Placements> result{{}};
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      std::vector<Placements> longer;
      for (const auto& placements : result) {
        longer.push_back(placements);
        longer.back().push_back(Replicate{});
        for (int64_t d = 0; d < tensor.dim(); ++d) {
          longer.push_back(placements);
          longer.back().push_back(Shard{d});
        }
      }
      result = std::move(longer);
    }
    return result;
  }

  /// Products of placements of the tensors: all of them, or `limit` that are drawn so that every pair of placements of two
  /// tensors comes early.
  std::vector<std::vector<Placements>> products(const OpCall& call, size_t limit) {
    std::vector<std::vector<Placements>> options;
    for (const auto& tensor : tensors_of(call.arguments)) options.push_back(choices(tensor));
    std::vector<std::vector<Placements>> result;
    for (const auto& picked : pick_products(options, limit, random_)) {
      result.emplace_back();
      for (size_t i = 0; i < picked.size(); ++i) result.back().push_back(options[i][picked[i]]);
    }
    return result;
  }

  struct Outcome {
    std::string error, found; ///< what this rank sees
    bool agreed = false;      ///< no rank found a difference
  };

  /// The gradient of a result of the shape of `whole`: Replicate, a Shard or a sum on each mesh dim.
  Tensor draw_gradient(const Tensor& whole, std::mt19937& random) {
    Placements parts; // MaskPartial stands for the sum: its parts do not round
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      const auto pick = static_cast<int64_t>(random() % (whole.dim() + 2));
      parts.push_back(pick < whole.dim() ? Placement(Shard{pick}) : pick == whole.dim() ? Placement(Replicate{}) : kMask);
    }
    auto placements = parts;
    for (auto& placement : placements) {
      if (placement == kMask) placement = Partial{};
    }
    return from_local(lay_out(whole, mesh_, parts), mesh_, placements, whole.sizes().vec());
  }

  Outcome run(Product& product, const OpResult& expected) {
    Outcome outcome;
    OpResult actual;
    std::mt19937 random(product.gradient_seed);
    product.gradients.clear();
    const StrictSharding strict;
    try {
      actual =
          run_call(product.call,
                   {[&](const Tensor& tensor, size_t i) -> Tensor { return make(tensor.detach(), mesh_, product.placements[i]); },
                    [&] {
                      if (!agreement_.everyone(true)) throw std::runtime_error("another rank failed");
                    },
                    [&](const Tensor& whole, const DTensor&) {
                      auto gradient = draw_gradient(whole, random);
                      product.gradients.push_back(DTensor(gradient).placements());
                      return gradient;
                    }});
    } catch (const std::exception& failure) {
      outcome.error = internal::error_text(failure); // what() would look up the names of a stack
      if (outcome.error == "another rank failed") return outcome;
      try {
        agreement_.everyone(false);
      } catch (const std::exception&) { // the others wait in another collective: nobody can go on
        throw std::runtime_error("the ranks are out of step after " + text_of(product) + ": " + outcome.error);
      }
      return outcome;
    }
    const bool defined = name_of(product.call.op).find("empty") == std::string::npos;
    outcome.found = difference(actual, expected, defined);
    outcome.agreed = agreement_.everyone(outcome.found.empty());
    return outcome;
  }

  void replay(Product product, const OpResult& expected) {
    ++tally.products;
    const SplitCalls calls;
    const auto outcome = run(product, expected);
    const auto noted = SplitCalls::noted();
    if (!outcome.error.empty()) return fail(product, outcome.error);
    const bool rounded = !outcome.agreed && expected.narrow && agrees_in_double(product);
    if (!outcome.agreed && !rounded) {
      ++tally.wrong[text_of(product) + ": " + outcome.found];
    } else {
      ++(rounded ? tally.rounded : tally.passed);
      tally.working.insert(noted.begin(), noted.end());
    }
  }

  /// What differs only by the rounding of a narrow type agrees, by the closer bound of double, where all numbers are double.
  bool agrees_in_double(const Product& product) {
    const OpCall wide{product.call.op, with_tensors(product.call.arguments, [](const Tensor& tensor) {
                        if (!at::isFloatingType(tensor.scalar_type())) return tensor;
                        return tensor.detach().to(torch::kDouble).set_requires_grad(tensor.requires_grad());
                      })};
    OpResult expected;
    try {
      expected = run_call(wide, plain_stage());
    } catch (const std::exception&) {
      return false; // it takes no doubles
    }
    Product same{wide, product.placements, product.gradient_seed};
    const auto outcome = run(same, expected);
    return outcome.error.empty() && outcome.agreed;
  }

  void fail(const Product& product, std::string error) {
    error = error.substr(0, std::min(error.find('\n'), size_t{300}));
    const auto at = error.find(": no sharding rule");
    const auto name = name_of(product.call.op);
    if (at != std::string::npos) {
      ++tally.missing[error.substr(0, at)];
    } else if (error.find("would have to change its placement") != std::string::npos) {
      ++tally.errors[name + ": out=, would need another placement"];
    } else {
      ++tally.errors[name + ": " + error];
    }
  }

  static inline const Placement kMask = Partial{Partial::Op::kMask};

  DeviceMesh mesh_;
  Agreement agreement_;
  std::mt19937 random_{1};
};

void print(const std::map<std::string, int>& counts, const char* title, std::ostream& out) {
  out << title << ": " << counts.size() << "\n";
  for (const auto& [text, count] : counts) out << "  " << count << " x " << text << "\n";
}

void report(const Tally& tally, const std::string& mesh) {
  if (process_context().rank() != 0) return;
  std::ofstream file(fmt::format("{}/report-{}.txt", std::getenv("TESSERA_OPINFO_CALLS"), mesh));
  print(tally.wrong, "Wrong", file);
  print(tally.missing, "Operators without a rule", file);
  print(tally.errors, "Errors", file);
  file << "Working overloads: " << tally.working.size() << "\n";
  for (const auto& name : tally.working) file << "  " << name << "\n";
  std::cout << fmt::format(
      "{}: {} calls, {} products, {} passed, {} more in double; {} overloads work; {} wrong, {} operators without a rule, {} "
      "errors\n",
      mesh, tally.calls, tally.products, tally.passed, tally.rounded, tally.working.size(), tally.wrong.size(),
      tally.missing.size(), tally.errors.size());
}

/// Replays, reports also where it cannot go on, and expects that nothing was wrong.
void replay_all(const DeviceMesh& mesh, const std::string& name, size_t calls, size_t products) {
  Replay replay(mesh);
  std::string broken;
  try {
    for (const auto& file : sweep(opinfo_files(), 120)) {
      broken = file.stem();
      std::map<std::string, size_t> taken;
      for (const auto& call : load_calls(file)) {
        if (taken[name_of(call.op)]++ < calls) replay.replay(call, products);
      }
    }
    broken.clear();
  } catch (const std::exception& error) {
    broken += std::string(": ") + error.what();
  }
  report(replay.tally, name);
  for (const auto& [text, count] : replay.tally.wrong) ADD_FAILURE() << text;
  ASSERT_EQ(broken, "");
}

size_t most_products(size_t otherwise) {
  const char* most = std::getenv("TESSERA_OPINFO_PRODUCTS");
  return most ? std::min<size_t>(std::stoul(most), otherwise) : otherwise;
}

TEST(OpInfo, OneMeshDim) {
  if (opinfo_files().empty()) GTEST_SKIP() << "no exported calls";
  replay_all(line_mesh(), "1d", full_run() ? 400 : 2, full_run() ? most_products(256) : 6);
}

TEST(OpInfo, TwoMeshDims) {
  if (opinfo_files().empty() || world_size() != 4) GTEST_SKIP() << "no exported calls, or not 4 ranks";
  replay_all(init_device_mesh(at::kCPU, {2, 2}, {"a", "b"}), "2x2", full_run() ? 400 : 1, full_run() ? most_products(64) : 4);
}

} // namespace
} // namespace tessera::testing::opinfo_test
