// A model in a pipeline beside one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/collectives/process_context.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline.h>

#include <tessera/tests/parallel/pipeline_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::pipeline_test {
namespace {

using Kind = PipelineScheduleKind;

int64_t chunks_of(Kind kind) { return kind == Kind::kGPipe || kind == Kind::k1F1B || kind == Kind::kZeroBubbleH1 ? 1 : 2; }

/// Whether the kind can be made for so many micro-batches.
bool takes(Kind kind, int64_t micro_batches) {
  try {
    pipeline_schedule(kind, {.ranks = world_size(), .micro_batches = micro_batches, .chunks = chunks_of(kind)});
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

DeviceMesh pipeline_mesh() { return init_device_mesh(torch::kCPU, {world_size()}, {"pp"}); }

Pipeline make_pipeline(PipelineGpt& model, Kind kind, const PipelineOptions& options = {}) {
  const auto schedule =
      pipeline_schedule(kind, {.ranks = world_size(), .micro_batches = 2 * world_size(), .chunks = chunks_of(kind)});
  auto stages = split(layers_of(model), pipeline_mesh(), {.rank_of_stage = schedule.rank_of_stage});
  return {std::move(stages), kind, text_loss(), options};
}

struct Trained {
  Kind kind;
  int64_t micro_batches;
  bool uses_adamw;
};

std::vector<Trained> trainings() {
  std::vector<Trained> all;
  for (const auto& [kind, name] : pipeline_schedule_names()) {
    for (int64_t micro_batches = 2; micro_batches <= 8; ++micro_batches) {
      if (!takes(kind, micro_batches)) continue;
      for (const bool uses_adamw : {false, true}) all.push_back({kind, micro_batches, uses_adamw});
    }
  }
  return all;
}

/// 20 steps of SGD with clipping, or of AdamW.
TEST(Pipeline, TrainsAsOneProcess) {
  for (const auto& [kind, micro_batches, uses_adamw] : sweep(trainings(), 4)) {
    SCOPED_TRACE(c10::str("kind ", static_cast<int>(kind), ", m ", micro_batches, uses_adamw ? ", AdamW" : ", SGD"));
    const TrainingPlan plan{.micro_batches = micro_batches,
                            .max_norm = uses_adamw ? 0.0 : 0.5,
                            .optimizer = uses_adamw ? pipeline_adamw : pipeline_sgd};
    const auto expected = train_alone(seeded_pipeline_gpt({.depth = 6}), plan);
    auto model = seeded_pipeline_gpt({.depth = 6});
    auto pipeline = make_pipeline(model, kind);
    expect_same_training(train_in_pipeline(pipeline, plan), expected, 1e-5);
  }
}

TEST(Pipeline, TrainsAsOneProcessUnderEverySchedule) {
  for (const auto& [kind, name] : pipeline_schedule_names()) {
    const int64_t micro_batches = takes(kind, 3) ? 3 : takes(kind, 4) ? 4 : 2 * world_size();
    SCOPED_TRACE(c10::str(name, ", m ", micro_batches));
    const TrainingPlan plan{.steps = 2, .micro_batches = micro_batches};
    const auto expected = train_alone(seeded_pipeline_gpt({.depth = 6}), plan);
    auto model = seeded_pipeline_gpt({.depth = 6});
    auto pipeline = make_pipeline(model, kind);
    expect_same_training(train_in_pipeline(pipeline, plan), expected, 1e-5);
  }
}

TEST(Pipeline, IsBitwiseTheSameTwiceAndUnderSplitBackwards) {
  const TrainingPlan plan{.steps = 3};
  const auto train = [&](Kind kind) {
    auto model = seeded_pipeline_gpt();
    auto pipeline = make_pipeline(model, kind);
    return train_in_pipeline(pipeline, plan);
  };
  const auto first = train(Kind::kZeroBubbleH1), second = train(Kind::kZeroBubbleH1), plain = train(Kind::k1F1B);
  for (const auto* other : {&second, &plain}) { // whose micro-batches come in the same order
    EXPECT_EQ(first.losses, other->losses);
    EXPECT_EQ(first.norms, other->norms);
    for (const auto& [name, weight] : first.weights) EXPECT_TENSORS_EQUAL(other->weights.at(name), weight) << name;
  }
}

/// The actions of the schedule, one after another, and the same on all ranks.
TEST(Pipeline, MeasuresItsActions) {
  for (const auto kind : {Kind::k1F1B, Kind::kZeroBubbleH1, Kind::kInterleaved1F1B}) {
    auto model = seeded_pipeline_gpt({.depth = 6}), twin = seeded_pipeline_gpt({.depth = 6});
    auto pipeline = make_pipeline(model, kind), other = make_pipeline(twin, kind);
    const auto batches = text_batches({.micro_batches = 2 * world_size()}, /*step=*/0, /*data_rank=*/0);
    const auto [loss, times] = pipeline.measured_step(batches);
    EXPECT_TENSORS_EQUAL(loss, other.step(batches));
    const auto& schedule = pipeline.schedule(std::ssize(batches));
    ASSERT_EQ(times.ranks.size(), schedule.actions.size());
    for (size_t rank = 0; rank < times.ranks.size(); ++rank) {
      std::vector<PipelineAction> actions;
      double last = 0, busy = 0;
      for (const auto& [action, begin, end] : times.ranks[rank].spans) {
        EXPECT_GE(begin, last);
        EXPECT_GT(end, begin);
        actions.push_back(action);
        last = end;
        busy += end - begin;
      }
      EXPECT_EQ(actions, schedule.actions[rank]);
      EXPECT_NEAR(times.ranks[rank].busy, busy, 1e-9 * busy); // which is added in another order
      EXPECT_LE(last, times.makespan);
    }
    EXPECT_GE(times.idle_share(), 0);
    EXPECT_LT(times.idle_share(), 1);
    auto largest = torch::tensor({times.makespan, -times.makespan}, torch::kDouble);
    pipeline_mesh().communicator()->all_reduce(largest, ReduceOp::kMax, "times").wait();
    EXPECT_EQ(largest[0].item<double>(), -largest[1].item<double>());
  }
}

TEST(Pipeline, SaysWhatItDoesNotSplit) {
  auto model = seeded_pipeline_gpt();
  auto pipeline = make_pipeline(model, Kind::kZeroBubbleH1);
  pipeline.step(text_batches({}, 0, 0));
  EXPECT_FALSE(pipeline.not_split().empty());
  for (const auto& name : pipeline.not_split())
    EXPECT_TRUE(name.ends_with("bias") || name.find("norm.") != std::string::npos) << name;
}

TEST(Pipeline, Evaluates) {
  const TrainingPlan plan{.steps = 1};
  auto twin = seeded_pipeline_gpt({.depth = 6}), model = seeded_pipeline_gpt({.depth = 6});
  auto pipeline = make_pipeline(model, Kind::kZeroBubbleV);
  const auto expected = [&](int64_t count) {
    const torch::NoGradGuard no_grad;
    double sum = 0, terms = 0;
    for (int64_t i = 0; i < count; ++i) {
      const auto [text, targets] = draw_text(0, 0, i);
      sum += summed_loss(twin->forward(text), targets).item<double>();
      terms += counted(targets);
    }
    return sum / terms;
  };
  for (const int64_t count : {1, 3, 5}) { // of which the schedule takes any
    const auto batches = text_batches({.micro_batches = count}, 0, 0);
    EXPECT_NEAR(pipeline.evaluate(batches).item<double>(), expected(count), 1e-6);
    const auto outputs = pipeline.predict(batches);
    const bool has_last = pipeline.stages().rank_of_stage.back() == world_rank();
    ASSERT_EQ(outputs.size(), has_last ? static_cast<size_t>(count) : 0U);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const torch::NoGradGuard no_grad;
      EXPECT_TENSORS_CLOSE(outputs[i].toTensor(), twin->forward(std::get<0>(draw_text(0, 0, static_cast<int64_t>(i)))), 1e-5,
                           1e-6);
    }
  }
  for (const auto& each : pipeline.stages().parameters()) EXPECT_FALSE(each.grad().defined());
  const auto trained = train_in_pipeline(pipeline, plan), alone = train_alone(twin, plan); // between steps
  EXPECT_NEAR(pipeline.evaluate(text_batches({.micro_batches = 3}, 0, 0)).item<double>(), expected(3), 1e-6);
  expect_same_training(trained, alone, 1e-5);
}

TEST(Pipeline, AddsTheGradientsOfSeveralSteps) {
  auto twin = seeded_pipeline_gpt(), model = seeded_pipeline_gpt();
  auto pipeline = make_pipeline(model, Kind::kZeroBubbleH1);
  const TrainingPlan plan;
  double count = 0;
  for (int64_t step = 0; step < 2; ++step) {
    for (int64_t i = 0; i < plan.micro_batches; ++i) count += counted(std::get<1>(draw_text(step, 0, i)));
  }
  for (int64_t step = 0; step < 2; ++step) {
    pipeline.step(text_batches(plan, step, 0), {.is_last = step == 1, .count = count});
    for (int64_t i = 0; i < plan.micro_batches; ++i) {
      const auto [text, targets] = draw_text(step, 0, i);
      (summed_loss(twin->forward(text), targets) / count).backward();
    }
  }
  pipeline.step(text_batches(plan, 2, 0)); // onto what is there
  double more = 0;
  for (int64_t i = 0; i < plan.micro_batches; ++i) more += counted(std::get<1>(draw_text(2, 0, i)));
  for (int64_t i = 0; i < plan.micro_batches; ++i) {
    const auto [text, targets] = draw_text(2, 0, i);
    (summed_loss(twin->forward(text), targets) / more).backward();
  }
  const auto expected = twin->named_parameters();
  for (const auto& item : pipeline.stages().module->named_parameters())
    EXPECT_TENSORS_CLOSE(item.value().grad(), expected[item.key()].grad(), 1e-4, 1e-6) << item.key();
}

/// Each step sends the activations of each micro-batch once, and as much back.
TEST(Pipeline, SendsAsManyBytesAsItsActivationsHave) {
  auto model = seeded_pipeline_gpt({.depth = 6});
  auto pipeline = make_pipeline(model, Kind::kInterleaved1F1B);
  const TrainingPlan plan{.micro_batches = 2 * world_size(), .uneven = false};
  for (int64_t step = 0; step < 2; ++step) { // the first one sends headers too
    process_context().reset_counters();
    pipeline.step(text_batches(plan, step, 0));
  }
  int64_t messages = 0;
  const auto& ranks = pipeline.stages().rank_of_stage;
  for (size_t stage = 0; stage < ranks.size(); ++stage) {
    if (ranks[stage] != world_rank()) continue;
    if (stage + 1 < ranks.size() && ranks[stage + 1] != world_rank()) ++messages; // outputs
    if (stage > 0 && ranks[stage - 1] != world_rank()) ++messages;                // gradients
  }
  const auto sent = process_context().count(CollectiveKind::kSend);
  EXPECT_EQ(sent.calls, messages * plan.micro_batches);
  EXPECT_EQ(sent.bytes, messages * plan.micro_batches * 2 * PipelineGptImpl::kTime * PipelineGptImpl::kWidth * 4);
}

} // namespace
} // namespace tessera::testing::pipeline_test
