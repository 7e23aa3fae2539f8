// Replays the in-place calls behind PyTorch's OpInfo samples (export_opinfo.py) on tensors whose parts end inside a row, forward
// and backward, against the same call on plain tensors. None may be refused but as `refusal_of` says.
//
//   TESSERA_OPINFO_CALLS   the folder of the exported calls (set by ctest)
//   TESSERA_OPINFO_ONLY    names of OpInfos, separated by commas: only these
#include <absl/algorithm/container.h>
#include <absl/strings/match.h>
#include <fmt/format.h>
#include <tessera/base/error_text.h>

#include <iostream>
#include <map>
#include <random>
#include <set>

#include <tessera/tests/dtensor/layouts.h>
#include "opinfo_replay.h"

namespace tessera::testing::opinfo_in_place_test {
namespace {

using at::Tensor;

/// Operators without a rule: they change the strides or the storage of a tensor.
constexpr const char* kWithoutRule[]{"aten::as_strided_"};

/// What other in-place operators refuse on a DTensor, for another reason than its placement.
constexpr const char* kRefusals[]{
    "the written tensor has shape",                             // it is not resized to that of the result
    "the data would have to move between ranks, away from the", // squeeze_ and the like become views
};

/// Why `op` may give this error; nothing where it may not.
std::string refusal_of(const std::string& op, const std::string& error) {
  constexpr const char* kNoRule = "no sharding rule for this operator";
  if (absl::c_linear_search(kWithoutRule, op) && absl::StrContains(error, kNoRule)) return kNoRule;
  for (const auto* refusal : kRefusals) {
    if (absl::StrContains(error, refusal)) return refusal;
  }
  return "";
}

bool is_in_place(const OpCall& call) {
  const auto& first = call.op.schema().arguments()[0];
  return first.alias_info() && first.alias_info()->isWrite() && !first.is_out() && !tensors_of({call.arguments[0]}).empty();
}

/// Splits of the first dims, most of which end inside a row; one of them as an operator may make it, by rows.
std::vector<Placements> cuts(const Tensor& tensor) {
  std::vector<Placements> result;
  int64_t positions = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    positions *= tensor.size(dim);
    for (const int64_t first : {int64_t{0}, positions / 2 + 1, int64_t{1}}) {
      RaggedShard ragged{dim, {}};
      for (int64_t r = 0, left = positions; r < world_size(); ++r) {
        ragged.extents.push_back(r == world_size() - 1 ? left : std::min(left, r == 0 ? first : (left + 2) / 2));
        left -= ragged.extents.back();
      }
      result.push_back({ragged});
    }
  }
  if (result.empty()) result.push_back({Replicate{}});
  return result;
}

std::vector<Placements> placements_beside(const Tensor& tensor) {
  std::vector<Placements> result{{Replicate{}}};
  for (const auto& shard : shards(tensor.sizes().vec())) result.push_back({shard});
  if (tensor.dim() > 0) result.push_back(cuts(tensor).back());
  return result;
}

class InPlaceReplay {
 public:
  explicit InPlaceReplay(DeviceMesh mesh) : mesh_(std::move(mesh)), agreement_(mesh_) {}

  void replay(const OpCall& call, size_t limit) {
    OpResult expected;
    try {
      expected = run_call(call, plain_stage());
    } catch (const std::exception&) {
      return; // a sample that the operator refuses
    }
    std::vector<std::vector<Placements>> options;
    for (const auto& tensor : tensors_of({call.arguments[0]})) options.push_back(cuts(tensor));
    const auto written = options.size();
    const auto all = tensors_of(call.arguments);
    for (size_t i = written; i < all.size(); ++i) options.push_back(placements_beside(all[i]));
    for (const auto& picked : pick_products(options, limit, random_)) {
      std::vector<Placements> placements;
      for (size_t i = 0; i < picked.size(); ++i) placements.push_back(options[i][picked[i]]);
      ++products;
      const auto text = difference_of(call, placements, written, expected);
      if (!text.empty()) ++wrong[describe(call, placements) + ": " + text];
    }
  }

  int64_t products = 0;
  std::set<std::string> operators;
  std::map<std::string, int> wrong, refused;

 private:
  std::string difference_of(const OpCall& call, const std::vector<Placements>& placements, size_t written,
                            const OpResult& expected) {
    OpResult actual;
    try {
      actual =
          run_call(call, {[&](const Tensor& tensor, size_t i) -> Tensor { return make(tensor.detach(), mesh_, placements[i]); },
                          [&] { TORCH_CHECK(agreement_.everyone(true), "another rank failed"); }});
    } catch (const std::exception& failure) {
      auto error = internal::error_text(failure);
      if (!absl::StrContains(error, "another rank failed")) agreement_.everyone(false);
      const auto refusal = refusal_of(name_of(call.op), error);
      if (refusal.empty()) return error.substr(0, error.find('\n'));
      ++refused[name_of(call.op) + ": " + refusal];
      return "";
    }
    operators.insert(name_of(call.op));
    auto text = difference(actual, expected, true);
    for (size_t i = 0; i < written && text.empty(); ++i) {
      const bool becomes_view = call.op.hasTag(at::Tag::inplace_view); // squeeze_ and the like
      if (!becomes_view && DTensor(actual.written[i]).placements() != placements[i]) text = "another placement";
    }
    return text;
  }

  DeviceMesh mesh_;
  Agreement agreement_;
  std::mt19937 random_{1};
};

TEST(OpInfoInPlace, PartsThatEndInsideARow) {
  if (opinfo_files().empty()) GTEST_SKIP() << "no exported calls";
  InPlaceReplay replay(line_mesh());
  const bool is_even = world_size() % 2 == 0;
  for (const auto& file : sweep(opinfo_files(), is_even ? 150 : 40)) {
    std::map<std::string, size_t> taken;
    for (const auto& call : load_calls(file)) {
      if (is_in_place(call) && taken[name_of(call.op)]++ < (full_run() ? 400U : 3U)) replay.replay(call, full_run() ? 64 : 6);
    }
  }
  for (const auto& [text, count] : replay.wrong) ADD_FAILURE() << text;
  EXPECT_GT(replay.products, 0);
  if (process_context().rank() != 0) return;
  std::cout << fmt::format("{} in-place operators, {} products, {} wrong, {} refused\n", replay.operators.size(), replay.products,
                           replay.wrong.size(), replay.refused.size());
  for (const auto& [text, count] : replay.refused) std::cout << "  refused " << count << " x " << text << "\n";
}

} // namespace
} // namespace tessera::testing::opinfo_in_place_test
