// Programs that are drawn at random give on DTensors what they give on plain tensors: values, and gradients to the second order.
//
//   TESSERA_TEST_PROGRAM   a seed: only that program
#include "random_programs.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include <tessera/tests/dtensor/agreement.h>
#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::random_programs_test {
namespace {

using at::Tensor;

/// What a DTensor may refuse where a plain tensor does not, as its errors and docs/dtensor.md say.
bool is_documented(const std::string& error) {
  constexpr const char* kRefusals[]{
      "this view of a DTensor could not alias it, because its data had to move between ranks",
      "the DTensor behind this view was written after the view was taken",
      "would have to be reduced, which a tensor whose memory another one shares cannot be in place",
  };
  return std::any_of(std::begin(kRefusals), std::end(kRefusals),
                     [&](const char* text) { return error.find(text) != std::string::npos; });
}

std::string difference(const Tensor& plain, const Tensor& distributed, double tolerance, bool gradient) {
  const at::NoGradGuard no_grad;
  if (!plain.defined() && !distributed.defined()) return "";
  if (!plain.defined() || !distributed.defined()) {
    const auto& some = plain.defined() ? plain : distributed;
    const auto whole = is_dtensor(some) ? DTensor(some).full_tensor() : some;
    return gradient && whole.count_nonzero().item<int64_t>() == 0 ? "" : "one is undefined"; // none is a gradient of zeros
  }
  if (!is_dtensor(distributed)) return "it is no DTensor";
  Tensor whole;
  try {
    whole = DTensor(distributed.detach()).full_tensor();
  } catch (const c10::Error& error) {
    return is_documented(error.what()) ? "" : error.what_without_backtrace();
  }
  const auto same = tensors_close(whole, plain.detach(), tolerance, tolerance);
  return same ? "" : fmt::format("{}, placed {}", same.message(), to_string(DTensor(distributed).placements()));
}

/// Runs programs both ways.
class Comparison {
 public:
  explicit Comparison(const std::vector<int64_t>& shape)
      : mesh_(init_device_mesh(test_device_type(), shape)), agreement_(mesh_), shape_(shape) {
    std::vector<int64_t> backwards(world_size());
    std::iota(backwards.rbegin(), backwards.rend(), 0);
    stage_ = {mesh_, make_device_mesh(test_device_type(), {world_size()}, backwards)};
  }

  /// Fails with the shortest program that still differs.
  void check(uint64_t seed) {
    const auto program = draw_program(seed, shape_);
    std::vector<bool> left_out(program.steps.size());
    auto found = difference_of(program, left_out);
    if (agreement_.everyone(found.empty())) return;
    const auto first = found;
    for (size_t i = program.steps.size(); i-- > 0;) {
      auto shorter = left_out;
      if (shorter[i]) continue;
      shorter[i] = true;
      const auto still = difference_of(program, shorter);
      if (agreement_.everyone(still.empty())) continue;
      left_out = shorter;
      found = still;
    }
    ADD_FAILURE() << "mesh " << c10::str(shape_) << ", " << to_string(program, left_out) << (found.empty() ? first : found);
  }

  int64_t compared = 0, refused = 0;

 private:
  /// Empty where both runs agree on this rank. A step that a DTensor may refuse is left out of both.
  std::string difference_of(const Program& program, std::vector<bool> left_out) {
    Outcome distributed;
    for (;;) {
      distributed = run_program(program, stage_, left_out);
      const bool fine = !distributed.failed_step;
      if (agreement_.everyone(fine)) break;
      if (fine) return "another rank failed alone";
      if (!is_documented(distributed.error)) return step_error(program, distributed);
      left_out[*distributed.failed_step] = true;
      ++refused;
    }
    const auto plain = run_program(program, {.device = twin_device()}, left_out);
    if (plain.failed_step) return ""; // it needs what was left out, in memory it shares
    if (plain.error.empty() != distributed.error.empty()) {
      if (is_documented(distributed.error)) return "";
      return fmt::format("gradients: plain tensors say '{}', DTensors '{}'", plain.error, distributed.error);
    }
    ++compared;
    std::string text;
    for (size_t slot = 0; slot < program.slots; ++slot) { // every rank compares all: that communicates
      const auto found = difference(plain.values[slot], distributed.values[slot], program.tolerance, false);
      if (text.empty() && !found.empty()) text = fmt::format("v{}: {}", slot, found);
    }
    if (!plain.error.empty()) return text;
    if (plain.gradients.size() != distributed.gradients.size()) return text + "another number of gradients";
    for (size_t i = 0; i < plain.gradients.size(); ++i) {
      const auto found = difference(plain.gradients[i], distributed.gradients[i], 10 * program.tolerance, true);
      if (text.empty() && !found.empty()) text = fmt::format("gradient {}: {}", i, found);
    }
    return text;
  }

  static std::string step_error(const Program& program, const Outcome& outcome) {
    const auto& step = program.steps[*outcome.failed_step];
    return fmt::format("v{} <- {}: {}", step.first, step.name, outcome.error);
  }

  DeviceMesh mesh_;
  Agreement agreement_;
  std::vector<int64_t> shape_;
  Stage stage_;
};

/// 20,000 programs over the world sizes 1 to 4 in a full run.
std::vector<uint64_t> seeds() {
  if (const char* one = std::getenv("TESSERA_TEST_PROGRAM")) return {std::strtoull(one, nullptr, 10)};
  std::vector<uint64_t> all(5000);
  std::iota(all.begin(), all.end(), 10000 * static_cast<uint64_t>(world_size()));
  return sweep(all, 60);
}

void compare_all(const std::vector<int64_t>& shape, const std::function<bool(uint64_t)>& takes) {
  Comparison comparison(shape);
  int64_t programs = 0;
  for (const auto seed : seeds()) {
    if (!takes(seed)) continue;
    ++programs;
    comparison.check(seed);
    if (::testing::Test::HasFatalFailure()) return;
  }
  ::testing::Test::RecordProperty("programs", static_cast<int>(programs));
  EXPECT_GE(comparison.compared, programs * 9 / 10) << comparison.refused << " steps refused";
}

TEST(RandomPrograms, EqualPlainTensorsOnOneMeshDim) {
  compare_all({world_size()}, [](uint64_t seed) { return world_size() != 4 || seed % 2 == 0; });
}

TEST(RandomPrograms, EqualPlainTensorsOnTwoMeshDims) {
  if (world_size() != 4) GTEST_SKIP() << "one mesh dim has all ranks";
  compare_all({2, 2}, [](uint64_t seed) { return seed % 2 == 1; });
}

} // namespace
} // namespace tessera::testing::random_programs_test
