// Schedules of pipelines as data: orders, checks, texts, simulated steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <tessera/parallel/pipeline_schedule.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::schedule_test {
namespace {

using Kind = PipelineScheduleKind;
using ::testing::HasSubstr;

int64_t chunks_of(Kind kind) { return kind == Kind::kGPipe || kind == Kind::k1F1B || kind == Kind::kZeroBubbleH1 ? 1 : 2; }

PipelineSchedule made(Kind kind, int64_t ranks, int64_t micro_batches) {
  return pipeline_schedule(kind, {.ranks = ranks, .micro_batches = micro_batches, .chunks = chunks_of(kind)});
}

std::string line(const PipelineSchedule& schedule, int64_t rank) {
  auto text = to_csv(schedule);
  for (; rank > 0; --rank) text.erase(0, text.find('\n') + 1);
  return text.substr(0, text.find('\n'));
}

TEST(PipelineSchedule, HasTheOrdersOfThePapers) {
  const auto one = made(Kind::k1F1B, 2, 4);
  EXPECT_EQ(line(one, 0), "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3");
  EXPECT_EQ(line(one, 1), "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3");
  const auto gpipe = made(Kind::kGPipe, 2, 2);
  EXPECT_EQ(line(gpipe, 0), "0F0,0F1,0B0,0B1");
  const auto zero = made(Kind::kZeroBubbleH1, 2, 4);
  EXPECT_EQ(line(zero, 0), "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3");
  EXPECT_EQ(line(zero, 1), "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3");
  EXPECT_TRUE(zero.splits_backward() && !one.splits_backward());
  EXPECT_EQ(line(made(Kind::kInterleaved1F1B, 2, 4), 0), "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3");
  EXPECT_EQ(line(made(Kind::kLoopedBFS, 2, 2), 1), "1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0");
  EXPECT_EQ(made(Kind::kZeroBubbleV, 3, 4).rank_of_stage, (std::vector<int64_t>{0, 1, 2, 2, 1, 0}));
}

/// Of docs and papers, in units of a forward of a stage, where input and weight gradients take as long.
TEST(PipelineSchedule, TakesTheTimeOfTheFormulas) {
  struct Row {
    Kind kind;
    double small, large; ///< 2 ranks with 4 micro-batches, 4 with 8
  };
  const std::vector<Row> rows{{Kind::kGPipe, 15, 33},       {Kind::k1F1B, 15, 33},         {Kind::kInterleaved1F1B, 27, 57},
                              {Kind::kLoopedBFS, 27, 57},   {Kind::kZeroBubbleH1, 13, 27}, {Kind::kInterleavedZeroBubble, 25, 51},
                              {Kind::kZeroBubbleV, 25, 51}, {Kind::kDualPipeV, 26, 54}};
  ASSERT_EQ(rows.size(), pipeline_schedule_names().size());
  for (const auto& row : rows) {
    EXPECT_EQ(simulate_pipeline(made(row.kind, 2, 4)).makespan, row.small) << static_cast<int>(row.kind);
    EXPECT_EQ(simulate_pipeline(made(row.kind, 4, 8)).makespan, row.large) << static_cast<int>(row.kind);
  }
}

TEST(PipelineSchedule, KeepsAsManyForwardsAsTheFormulasSay) {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (int64_t count = 1; count <= 12; ++count) {
      const auto live = [&](Kind kind, int64_t rank) {
        return simulate_pipeline(made(kind, ranks, count)).ranks[static_cast<size_t>(rank)].live_forwards;
      };
      for (int64_t rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(live(Kind::kGPipe, rank), count);
        EXPECT_EQ(live(Kind::k1F1B, rank), std::min(count, ranks - rank));
        EXPECT_LE(live(Kind::kZeroBubbleH1, rank), std::min(count, ranks));
        EXPECT_LE(live(Kind::kZeroBubbleV, rank), std::min(2 * count, 2 * ranks));
        if (count >= 2 * ranks) {
          EXPECT_EQ(live(Kind::kZeroBubbleH1, rank), ranks);
          EXPECT_EQ(live(Kind::kZeroBubbleV, rank), 2 * ranks);
          EXPECT_EQ(live(Kind::kDualPipeV, rank), 2 * ranks + 1);
        }
      }
    }
  }
}

/// The shape of every kind that can be made of 1 to 5 ranks, 1 to 13 micro-batches, 1 to 3 stages a rank, and groups.
std::vector<PipelineSchedule> all_that_there_are() {
  std::vector<PipelineSchedule> all;
  for (const auto& each : pipeline_schedule_names()) {
    for (int64_t ranks = 1; ranks <= 5; ++ranks) {
      for (int64_t count = 1; count <= 13; ++count) {
        for (int64_t chunks = 1; chunks <= 3; ++chunks) {
          for (const int64_t group : {int64_t{0}, ranks, ranks + 1}) {
            try {
              all.push_back(pipeline_schedule(each.kind, {ranks, count, chunks, group}));
            } catch (const c10::Error&) { // it has no such shape
            }
          }
        }
      }
    }
  }
  return all;
}

TEST(PipelineSchedule, PassesItsCheckInEveryShape) {
  const auto all = all_that_there_are();
  EXPECT_GT(all.size(), 2000);
  for (const auto& schedule : all) {
    EXPECT_EQ(error_of([&] { check_schedule(schedule); }), "no error") << schedule.name << '\n' << to_csv(schedule);
    auto again = schedule_from_csv(to_csv(schedule), schedule.name);
    EXPECT_EQ(again, schedule);
  }
}

TEST(PipelineSchedule, RefusesShapesWithTheNearestThatItCanTake) {
  EXPECT_THROWS_WITH(pipeline_schedule(Kind::kInterleaved1F1B, {.ranks = 4, .micro_batches = 9, .chunks = 2}),
                     "the schedule interleaved-1f1b on 4 ranks cannot take 9 micro-batches; the nearest that it can: 8 or 10");
  EXPECT_THROWS_WITH(pipeline_schedule(Kind::kInterleaved1F1B, {.ranks = 4, .micro_batches = 9, .chunks = 2, .group = 4}),
                     "the nearest that it can: 8 or 12");
  EXPECT_THROWS_WITH(pipeline_schedule(Kind::kDualPipeV, {.ranks = 3, .micro_batches = 4, .chunks = 2}),
                     "cannot take 4 micro-batches; the nearest that it can: 6");
  EXPECT_THROWS_WITH(pipeline_schedule(Kind::k1F1B, {.ranks = 2, .micro_batches = 0}), "the nearest that it can: 1");
  EXPECT_THROWS_WITH(pipeline_schedule(Kind::k1F1B, {.ranks = 2, .micro_batches = 4, .chunks = 2}),
                     "the schedule 1f1b has 1 stages a rank (chunks), and was given 2");
  EXPECT_THROWS_WITH(pipeline_schedule(Kind::kZeroBubbleV, {.ranks = 2, .micro_batches = 4, .chunks = 1}), "and was given 1");
  EXPECT_THROWS_WITH(pipeline_schedule(Kind::kInterleaved1F1B, {.ranks = 4, .micro_batches = 8, .chunks = 2, .group = 3}),
                     "a group of 3 micro-batches is fewer than the 4 ranks");
  EXPECT_THROWS_WITH(pipeline_schedule(Kind::k1F1B, {.ranks = 0, .micro_batches = 4}), "a pipeline of 0 ranks");
  constexpr auto kMost = std::numeric_limits<int64_t>::max();
  for (const auto& shape : {PipelineShape{.ranks = kMost, .micro_batches = 8, .chunks = 2},
                            {.ranks = 4, .micro_batches = kMost, .chunks = 2},
                            {.ranks = 4, .micro_batches = 8, .chunks = kMost}}) {
    EXPECT_THROWS_WITH(pipeline_schedule(Kind::kLoopedBFS, shape), c10::str(shape.micro_batches, " micro-batches has more than"));
  }
  EXPECT_THROWS_WITH(pipeline_schedule_kind("1f1"), "no schedule of a pipeline is called 1f1; there are gpipe, 1f1b");
  EXPECT_EQ(pipeline_schedule_kind("zb-h1"), Kind::kZeroBubbleH1);
}

TEST(CheckSchedule, NamesWhatIsWrong) {
  const auto error_in = [](std::string text) { return error_of([&] { schedule_from_csv(text, "mine"); }); };
  EXPECT_EQ(error_in("0F0,0B0\n1F0,1B0\n"), "no error");
  EXPECT_EQ(error_in("0F0,0B0,,\n ,1F0, 1B0"), "no error"); // empty columns, in which a rank waits
  EXPECT_THAT(error_in("0F0,0B0\n1F0,1F0,1B0\n"),
              HasSubstr("there are 2 forwards of micro-batch 0 in stage 1 of the schedule mine"));
  EXPECT_THAT(error_in("0F0\n1F0,1B0\n"), HasSubstr("there are 0 backwards (B or I) of micro-batch 0 in stage 0"));
  EXPECT_THAT(error_in("0F0,0I0\n1F0,1B0\n"),
              HasSubstr("there are 0 weight gradients (W) for 1 input gradients (I) of micro-batch 0"));
  EXPECT_THAT(error_in("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1,0F1\n"), HasSubstr("stage 0 is on rank 0, and rank 1 does 0F1"));
  EXPECT_THAT(error_in("0F0,0B0\n2F0,2B0\n"), HasSubstr("has a stage 2 and no stage 1"));
  EXPECT_THAT(error_in("0F0,0X0\n"), HasSubstr("the schedule mine, rank 0, column 2: \"0X0\" is no action of a pipeline"));
  EXPECT_THAT(error_in("0F,0B0\n"), HasSubstr("column 1: \"0F\" is no action"));
  EXPECT_THAT(error_in("0F99999999999999999999,0B0\n"), HasSubstr("is no action"));
  EXPECT_THAT(error_in("(0F0;0B0\n"), HasSubstr("is no overlap of two actions"));
  EXPECT_THAT(error_in("(0F0;0B0;0F1)OVERLAP_F_B\n"), HasSubstr("overlaps 3 actions, and not two"));
  EXPECT_EQ(error_in(""), "the schedule mine has 1 ranks and 0 micro-batches");
}

TEST(CheckSchedule, FindsDeadlocksBeforeTheFirstMessage) {
  EXPECT_EQ(error_of([] { schedule_from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "mine"); }),
            "the schedule mine deadlocks, where these wait for ever:\n"
            "  rank 0 in 0B0 for the gradients of the inputs of micro-batch 0 in stage 1\n"
            "  rank 1 in 1F1 for the outputs of micro-batch 1 in stage 0");
  EXPECT_THROWS_WITH(schedule_from_csv("0B0,0F0\n"), "rank 0 in 0B0 for the outputs of micro-batch 0 in stage 0");
  EXPECT_THROWS_WITH(schedule_from_csv("(0F0;0B0)OVERLAP_F_B\n"), "deadlocks"); // none of the two may need the other
}

TEST(CheckSchedule, FindsMessagesThatOvertake) {
  EXPECT_THROWS_WITH(
      schedule_from_csv("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n"),
      "rank 1 takes the outputs of micro-batch 1 in stage 0 from rank 0, which sends the outputs of micro-batch 0");
}

TEST(CheckSchedule, FindsWorkOnStagesThatAreNotGathered) {
  const auto error_in = [](std::string text) { return error_of([&] { schedule_from_csv(text, "mine"); }); };
  EXPECT_EQ(error_in("0UNSHARD,0F0,0B0,0RESHARD\n"), "no error");
  EXPECT_THAT(error_in("0UNSHARD,0F0,0RESHARD,0B0\n"), HasSubstr("rank 0 does 0B0 while stage 0 is not gathered"));
  EXPECT_THAT(error_in("0F0,0UNSHARD,0B0,0RESHARD\n"), HasSubstr("rank 0 does 0F0 while stage 0 is not gathered"));
  EXPECT_THAT(error_in("0UNSHARD,0F0,0B0\n"), HasSubstr("rank 0 leaves stage 0 gathered"));
  EXPECT_THAT(error_in("0UNSHARD,0UNSHARD,0F0,0B0,0RESHARD\n"), HasSubstr("rank 0 gathers stage 0 twice"));
  EXPECT_THAT(error_in("0F0,0B0,0RESHARD\n"), HasSubstr("rank 0 does 0RESHARD while stage 0 is not gathered"));
}

TEST(SchedulesCsv, TakesWhatPyTorchWritesForItsRuntime) {
  const auto schedule =
      schedule_from_csv("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0\n");
  EXPECT_EQ(to_csv(schedule), "0UNSHARD,0F0,0B0,0RESHARD\n1F0,1B0\n");
}

TEST(Residency, OfAllStagesIsOneGatherAStage) {
  for (const auto& schedule : all_that_there_are()) {
    const auto simulation = simulate_pipeline(with_residency(schedule, schedule.stages()));
    const auto of_rank = schedule.stages() / schedule.ranks();
    for (const auto& rank : simulation.ranks) {
      EXPECT_EQ(rank.gathers, of_rank);
      EXPECT_EQ(rank.resident_stages, of_rank);
    }
    EXPECT_EQ(simulation.makespan, simulate_pipeline(schedule).makespan);
  }
}

TEST(Residency, HoldsNoMoreStagesThanItMay) {
  const auto schedule = pipeline_schedule(Kind::kInterleaved1F1B, {.ranks = 2, .micro_batches = 4, .chunks = 3});
  int64_t before = 0;
  for (const int64_t active : {3, 2, 1}) {
    const auto limited = with_residency(schedule, active);
    EXPECT_EQ(error_of([&] { check_schedule(limited); }), "no error");
    for (const auto& rank : simulate_pipeline(limited).ranks) EXPECT_LE(rank.resident_stages, active);
    const auto gathers = simulate_pipeline(limited).ranks[0].gathers;
    EXPECT_GT(gathers, before);
    before = gathers;
  }
  EXPECT_EQ(with_residency(with_residency(schedule, 1), 3), with_residency(schedule, 3)); // what was there is left out
  EXPECT_THROWS_WITH(with_residency(schedule, 0), "at least 1 gathered stage, and was given 0");
}

TEST(SimulatePipeline, CountsWhatRanksWait) {
  const auto simulation = simulate_pipeline(made(Kind::kGPipe, 4, 4));
  EXPECT_DOUBLE_EQ(simulation.idle_share(), 3.0 / 7); // (p - 1) / (m + p - 1)
  EXPECT_EQ(simulation.ranks[0].busy, 12);
  EXPECT_EQ(simulation.ranks[3].spans.front().begin, 3);
  EXPECT_EQ(simulate_pipeline(made(Kind::k1F1B, 1, 3)).idle_share(), 0);
}

TEST(SimulatePipeline, TakesCosts) {
  const auto one = made(Kind::k1F1B, 2, 1);
  EXPECT_EQ(simulate_pipeline(one, {.forward = 2, .input_gradients = 3, .weight_gradients = 4, .message = 10}).makespan,
            2 * 2 + 2 * 7 + 2 * 10);
  EXPECT_EQ(simulate_pipeline(one, {.stage_factors = {1, 5}}).makespan, 3 + 15);
  EXPECT_THROWS_WITH(simulate_pipeline(one, {.stage_factors = {1}}), "there are 1 stage_factors for 2 stages");
  EXPECT_THROWS_WITH(simulate_pipeline(one, {.forward = -1}), "a cost of a pipeline's work is -1");
  EXPECT_THROWS_WITH(simulate_pipeline(one, {.message = INFINITY}), "a cost of a pipeline's work is inf");
  EXPECT_THROWS_WITH(simulate_pipeline(one, {.stage_factors = {1, NAN}}), "a factor of a pipeline's stage is nan");
  EXPECT_THROWS_WITH(simulate_pipeline(one, {.overlap = 2}), "a share of 0 to 1");
}

TEST(SimulatePipeline, OverlapsOnlyWhatMay) {
  const auto dual = made(Kind::kDualPipeV, 4, 16);
  const auto apart = simulate_pipeline(dual).makespan, beside = simulate_pipeline(dual, {.overlap = 1}).makespan;
  EXPECT_LT(beside, apart);
  const auto one = made(Kind::k1F1B, 4, 16);
  EXPECT_EQ(simulate_pipeline(one).makespan, simulate_pipeline(one, {.overlap = 1}).makespan);
}

TEST(PictureOfAStep, HasABoxAnAction) {
  const auto svg = to_svg(simulate_pipeline(with_residency(made(Kind::kDualPipeV, 2, 4), 1)));
  size_t boxes = 0;
  for (auto at = svg.find("<rect"); at != std::string::npos; at = svg.find("<rect", at + 1)) ++boxes;
  int64_t actions = 0;
  for (const auto& rank : made(Kind::kDualPipeV, 2, 4).actions) actions += std::ssize(rank);
  EXPECT_EQ(boxes, actions);
  EXPECT_THAT(svg, HasSubstr("rank 1"));
  EXPECT_THAT(svg, ::testing::EndsWith("</svg>\n"));
}

} // namespace
} // namespace tessera::testing::schedule_test
