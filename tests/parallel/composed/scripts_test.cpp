// Random programs that train in pipelines, with experts and without, beside one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/parallel/pipeline_schedule.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/parallel/composed/chosen_range.h>
#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

#include <cstdlib>
#include <iostream>
#include <numeric>

namespace tessera::testing::composed::scripts_test {
namespace {

using Kind = PipelineScheduleKind;

enum class Deed : uint8_t { kStep, kEvaluate, kResume, kFreeze, kOverflow, kChangeSchedule, kFail };

struct Action {
  Deed deed = Deed::kStep;
  StepPlan plan;
  Manner manner;    ///< from then on
  std::string part; ///< that is frozen, or trains again
  bool trains = false;
  int64_t block = 0; ///< that throws

  std::string text() const;
};

std::string Action::text() const {
  const auto step = c10::str("seed ", plan.seed, ", m ", plan.micro_batches, ", ", plan.calls, " calls",
                             plan.evaluates ? ", evaluated between" : "",
                             plan.nan_block < 0 ? "" : c10::str(", NaN in block ", plan.nan_block));
  switch (deed) {
    case Deed::kStep: return "step: " + step;
    case Deed::kEvaluate: return "evaluate: " + step;
    case Deed::kResume: return "resume: " + manner.text();
    case Deed::kFreeze: return c10::str(trains ? "unfreeze " : "freeze ", part);
    case Deed::kOverflow: return "overflow: " + step;
    case Deed::kChangeSchedule: return "schedule: " + manner.text();
    case Deed::kFail: return c10::str("fail in block ", block, ": ", step, ", then ", manner.text());
  }
  return "";
}

bool goes_round(Kind kind) { return kind != Kind::kZeroBubbleV && kind != Kind::kDualPipeV; }

/// Another schedule whose stages lie as those of `kind`.
Kind like(Kind kind, Draw& draw) {
  std::vector<Kind> all;
  for (const auto& [other, name] : pipeline_schedule_names()) {
    if (chunks_of(other) == chunks_of(kind) && goes_round(other) == goes_round(kind)) all.push_back(other);
  }
  return draw.of(all);
}

class Script {
 public:
  explicit Script(uint64_t seed) : draw_(seed) {
    ranks_ = draw_.of(std::vector<int64_t>{2, 2, 3, 4, 4, 4, 4});
    task_.net.ties = draw_.chance(70);
    task_.net.experts = draw_.chance(45) ? draw_.of(std::vector<int64_t>{4, 6}) : 0;
    task_.net.storage = draw_.chance(50) ? ExpertStorage::kStacked : ExpertStorage::kModules;
    task_.net.dtype = torch::kDouble;
    task_.seed = draw_.seed() % 1000;
    task_.uses_adamw = draw_.chance(40);
    task_.max_norm = draw_.chance(60) ? 0.5 : 0;
    task_.averages = draw_.chance(30);
    task_.scales = draw_.chance(30);
    if (draw_.chance(25)) task_.net.float8 = draw_.chance(50) ? Float8Scaling::kTensor : Float8Scaling::kRows;
    first_ = now_ = draw_manner();
    const auto count = 5 + draw_.below(6);
    for (int64_t i = 0; i < count; ++i) actions_.push_back(draw_action());
  }

  std::string text() const {
    auto text =
        c10::str(first_.text(), task_.net.ties ? ", tied" : "", ", ", task_.net.experts,
                 task_.net.storage == ExpertStorage::kStacked ? " stacked experts" : " experts", task_.net.float8 ? ", fp8" : "",
                 task_.uses_adamw ? ", AdamW" : ", SGD", task_.averages ? ", averages" : "", task_.scales ? ", scaled" : "");
    for (const auto& action : actions_) text += "\n  " + action.text();
    return text;
  }

  int64_t ranks() const { return ranks_; }

  void compare() const {
    if (traces()) std::cerr << text() << std::endl;
    const auto whole = make_whole(task_, first_);
    for (const auto& action : actions_) perform(action, *whole, {});
    const auto weights = whole->weights();
    const SharedFolder folder;
    run_as(ranks_, [&] {
      SplitTraining split(task_, first_);
      for (size_t i = 0; i < actions_.size(); ++i) {
        if (traces() && world_rank() == 0) std::cerr << "  " << i << ' ' << actions_[i].text() << std::endl;
        perform(actions_[i], split, folder.path() / std::to_string(i));
        if (traces() && world_rank() == 0 && !split.numbers.empty())
          std::cerr << "    " << split.numbers.back() - whole->numbers.at(split.numbers.size() - 1) << std::endl;
      }
      expect_same(split, whole->numbers, weights, 1e-8);
    });
  }

 private:
  static bool traces() { return std::getenv("TESSERA_SCRIPT") != nullptr; }

  static void perform(const Action& action, Training& training, const std::filesystem::path& folder) {
    auto* const split = dynamic_cast<SplitTraining*>(&training);
    switch (action.deed) {
      case Deed::kStep:
      case Deed::kOverflow: return training.step(action.plan);
      case Deed::kEvaluate: return training.evaluate(action.plan.seed, action.plan.micro_batches);
      case Deed::kResume: return training.resume(action.manner, folder);
      case Deed::kFreeze: return training.freeze(action.part, action.trains);
      case Deed::kFail:
        if (split) EXPECT_NE(split->fail(action.plan, action.block).find("out of luck"), std::string::npos);
        [[fallthrough]];
      case Deed::kChangeSchedule:
        if (split) split->change_schedule(action.manner.kind);
    }
  }

  /// Products in fp8 have other scales where tokens are split, and sums of terms that may fall between other codes. So have
  /// gradients that one process divides by 3, before they are coded, and three ranks afterwards.
  std::vector<Shape> shapes() const {
    auto all = shapes_of(ranks_, task_.net.experts);
    if (task_.net.float8)
      std::erase_if(all, [](const Shape& shape) { return shape.parts * shape.tensor > 1 || shape.data_ranks() == 3; });
    return all;
  }

  Manner draw_manner() {
    Manner manner{.shape = draw_.of(shapes())};
    if (manner.shape.pipeline == 0 && draw_.chance(60)) manner.shape.pipeline = 1;
    manner.kind = draw_.of(pipeline_schedule_names()).kind;
    manner.recomputes = draw_.chance(30);
    manner.residency = draw_.chance(70) ? Residency::kStage : Residency::kMicroBatch;
    manner.resident_stages = draw_.below(3);
    manner.scheme = draw_.of(std::vector{ContextParallel::kAllGather, ContextParallel::kRing});
    manner.order = draw_.chance(50) ? PartOrder::kHeadTail : PartOrder::kContiguous;
    if (manner.shape.replicas == 1 && draw_.chance(40))
      manner.strategy = draw_.of(std::vector{Strategy::kNoShard, Strategy::kZero1, Strategy::kZero2});
    return manner;
  }

  StepPlan draw_plan() {
    StepPlan plan{.seed = draw_.seed() % 100000, .micro_batches = 1 + draw_.below(6), .calls = draw_.chance(25) ? 2 : 1};
    plan.evaluates = plan.calls > 1 && draw_.chance(50);
    const auto ranks = std::max<int64_t>(1, now_.shape.pipeline);
    while (!takes(now_.kind, ranks, plan.micro_batches)) ++plan.micro_batches;
    return plan;
  }

  Action draw_action() {
    Action action{.plan = draw_plan()};
    const auto number = draw_.below(100);
    if (number < 35) return action;
    if (number < 50) {
      action.deed = Deed::kEvaluate;
    } else if (number < 65) {
      action.deed = Deed::kResume;
      action.manner = now_ = draw_manner();
    } else if (number < 78) {
      action.deed = Deed::kFreeze;
      action.part = draw_.of(std::vector<std::string>{"blocks.0.", "blocks.1.", "query", "norm", "places", "down", "router"});
      action.trains = draw_.chance(40);
    } else if (number < 85 && task_.scales) {
      action.deed = Deed::kOverflow;
      action.plan.overflows = task_.net.experts > 0 || draw_.chance(50); // a router refuses NaN
      if (!action.plan.overflows) action.plan.nan_block = draw_.below(task_.net.depth);
    } else if (now_.shape.pipeline > 0) {
      // Else the ranks of a stage would stop at different collectives.
      const auto& shape = now_.shape;
      const bool gathers_between = now_.residency != Residency::kStage || now_.resident_stages > 0;
      const bool may_fail = shape.parts * shape.tensor * shape.experts == 1 && (!gathers_between || shape.data_ranks() == 1);
      action.deed = may_fail && draw_.chance(60) ? Deed::kFail : Deed::kChangeSchedule;
      action.block = draw_.below(task_.net.depth);
      now_.kind = like(now_.kind, draw_);
      action.manner = now_;
    }
    return action;
  }

  Draw draw_;
  int64_t ranks_ = 4;
  Task task_;
  Manner first_, now_;
  std::vector<Action> actions_;
};

/// Those of as many ranks as there are processes; all, in a world of one, where ranks are threads.
std::vector<uint64_t> that_run_here(std::vector<uint64_t> numbers) {
  if (world_size() > 1) std::erase_if(numbers, [](uint64_t number) { return Script(number).ranks() != world_size(); });
  return numbers;
}

/// TESSERA_SCRIPT alone, those of TESSERA_SCRIPTS, or a drawn part of all.
std::vector<uint64_t> numbers() {
  if (const char* one = std::getenv("TESSERA_SCRIPT")) return {std::strtoull(one, nullptr, 10)};
  if (const auto range = chosen_range("TESSERA_SCRIPTS")) {
    std::vector<uint64_t> some(static_cast<size_t>(range->second - range->first + 1));
    std::iota(some.begin(), some.end(), static_cast<uint64_t>(range->first));
    return some;
  }
  std::vector<uint64_t> all(300);
  std::iota(all.begin(), all.end(), uint64_t{1});
  return sweep(that_run_here(all), world_size() == 1 ? 4 : 2);
}

TEST(PipelineScripts, TrainAsOneProcess) {
  for (const auto number : that_run_here(numbers())) {
    const Script script(number);
    SCOPED_TRACE(c10::str("script ", number, ": ", script.text()));
    script.compare();
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "script " << number; // with the script as the trace; ranks that are threads have none
      return;
    }
  }
}

} // namespace
} // namespace tessera::testing::composed::scripts_test
