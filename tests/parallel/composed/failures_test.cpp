// What a program does after an exception in a step.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::composed::failures_test {
namespace {

using Kind = PipelineScheduleKind;

/// Ranks that are threads: processes would connect no more. Those of tensor parallelism would stop at different collectives.
std::vector<Shape> shapes() {
  if (world_size() > 1) return {};
  return {{.pipeline = 3}, {.pipeline = 2, .shards = 2}};
}

void expect_goes_on(const Shape& shape, const std::function<std::string(SplitTraining&)>& fail) {
  const Task task{.net = {.dtype = torch::kDouble}};
  const auto whole = make_whole(task, {.shape = shape});
  for (uint64_t step = 0; step < 4; ++step) whole->step({.seed = step});
  const auto weights = whole->weights();
  run_as(shape.ranks(), [&] {
    SplitTraining split(task, {.shape = shape, .kind = Kind::kZeroBubbleH1});
    for (uint64_t step = 0; step < 4; ++step) {
      if (step > 0) {
        const auto error = fail(split);
        EXPECT_NE(error.find("out of luck"), std::string::npos) << "on rank " << world_rank() << ": " << error;
        split.change_schedule(step == 1 ? Kind::kGPipe : Kind::kZeroBubbleH1);
      }
      split.step({.seed = step});
    }
    expect_same(split, whole->numbers, weights, 1e-9);
  });
}

TEST(AfterAnException, ANewPipelineGoesOn) {
  for (const auto& shape : shapes()) {
    for (const int64_t block : {0, 5}) // of the first stage, and of the last one
      expect_goes_on(shape, [block](SplitTraining& split) { return split.fail({.seed = 70}, block); });
  }
}

/// The last action of the first rank throws: the others have done all of theirs.
TEST(AfterAnException, TheOthersHearOfItAtTheEndOfAStep) {
  for (const auto& shape : shapes()) {
    if (shape.ranks() > shape.pipeline) continue; // where data ranks reduce before the hook
    expect_goes_on(shape, [](SplitTraining& split) { return split.fail_in_backward({.seed = 70}); });
  }
}

TEST(AfterAnException, TheOldPipelineIsAnError) {
  for (const auto& shape : shapes()) {
    run_as(shape.ranks(), [&] {
      SplitTraining split({}, {.shape = shape});
      split.fail({.seed = 1}, 0);
      EXPECT_THROWS_WITH(split.step({.seed = 2}), "this pipeline had an error in an earlier step");
    });
  }
}

} // namespace
} // namespace tessera::testing::composed::failures_test
