#include "../support/matchers.h"

#include <absl/flags/reflection.h>
#include <gmock/gmock.h>
#include <gpt/optimizer.h>
#include <gpt/options.h>

namespace gpt::options_test {
namespace {

using tessera::testing::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Options parse(std::vector<std::string> arguments) {
  const absl::FlagSaver restore_flags_afterwards;
  arguments.insert(arguments.begin(), "train_gpt");
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  return parse_options(static_cast<int>(arguments.size()), argv.data());
}

std::string parse_error(std::vector<std::string> arguments) {
  return error_of([&] { parse(std::move(arguments)); });
}

std::string world_error(std::vector<std::string> arguments, int world) {
  return error_of([&] { check_world(parse(std::move(arguments)), world); });
}

TEST(Options, Defaults) {
  const auto options = parse({});
  EXPECT_EQ(options.data, ".data/text.txt");
  EXPECT_EQ(options.strategy, Strategy::kFullShard);
  EXPECT_EQ(options.layout, tessera::BufferLayout::kRagged);
  EXPECT_EQ(options.precision, Precision::kFp32);
  EXPECT_EQ(options.reshard_after_forward, std::nullopt);
  EXPECT_EQ(options.rows_a_rank(3), options.batch);
}

TEST(Options, DashesAndUnderscoresAreTheSame) {
  for (const std::string flag : {"--weight-decay", "--weight_decay"}) {
    EXPECT_EQ(parse({flag + "=0.5"}).weight_decay, 0.5);
    EXPECT_EQ(parse({flag, "0.5"}).weight_decay, 0.5);
  }
  EXPECT_EQ(parse({"--strategy", "no-shard"}).strategy, Strategy::kNoShard);
  EXPECT_EQ(parse({"--strategy", "zero-2"}).strategy, Strategy::kZero2);
  EXPECT_EQ(parse({"--strategy", "none"}).strategy, std::nullopt);
  EXPECT_EQ(parse({"--checkpoint=my-run/with-dashes"}).checkpoint, "my-run/with-dashes");
}

TEST(Options, Values) {
  const auto options = parse({"--layers=2",
                              "--width=48",
                              "--heads=3",
                              "--sequence=10",
                              "--steps=5",
                              "--lr=1e-4",
                              "--warmup=2",
                              "--clip=0",
                              "--ranks=4",
                              "--mesh=2x2",
                              "--strategy=hybrid",
                              "--layout=per-parameter",
                              "--precision=bf16",
                              "--reduce-precision=bf16",
                              "--seed=9",
                              "--log=x.jsonl",
                              "--checkpoint=c",
                              "--save-every=3",
                              "--resume",
                              "--max-seconds=1.5",
                              "--reshard-after-forward=false"});
  EXPECT_EQ(options.model.layers, 2);
  EXPECT_EQ(options.model.width, 48);
  EXPECT_EQ(options.model.heads, 3);
  EXPECT_EQ(options.model.sequence, 10);
  EXPECT_EQ(options.steps, 5);
  EXPECT_EQ(options.learning_rate, 1e-4);
  EXPECT_EQ(options.warmup, 2);
  EXPECT_EQ(options.clip, 0);
  EXPECT_EQ(options.ranks, 4);
  EXPECT_THAT(options.mesh, ElementsAre(2, 2));
  EXPECT_EQ(options.strategy, Strategy::kHybridShard);
  EXPECT_EQ(options.layout, tessera::BufferLayout::kPerParameter);
  EXPECT_EQ(options.precision, Precision::kBf16);
  EXPECT_EQ(options.reduce_precision, Precision::kBf16);
  EXPECT_EQ(options.seed, 9u);
  EXPECT_EQ(options.log, "x.jsonl");
  EXPECT_EQ(options.checkpoint, "c");
  EXPECT_EQ(options.save_every, 3);
  EXPECT_TRUE(options.resume);
  EXPECT_EQ(options.max_seconds, 1.5);
  EXPECT_EQ(options.reshard_after_forward, false);
}

TEST(Options, GlobalBatchTakesThePlaceOfBatch) {
  const auto options = parse({"--global-batch=12"});
  EXPECT_EQ(options.rows_a_rank(1), 12);
  EXPECT_EQ(options.rows_a_rank(4), 3);
}

TEST(Options, ValuesOutOfRange) {
  EXPECT_EQ(parse_error({"--width=100", "--heads=3"}), "--width 100 is no multiple of --heads 3");
  EXPECT_EQ(parse_error({"--layers=0"}), "--layers is 0, but must be at least 1");
  EXPECT_EQ(parse_error({"--heads=-1"}), "--heads is -1, but must be at least 1");
  EXPECT_EQ(parse_error({"--steps=0"}), "--steps is 0, but must be at least 1");
  EXPECT_EQ(parse_error({"--batch=0"}), "--batch or --global-batch must be at least 1");
  EXPECT_EQ(parse_error({"--lr=0"}), "--lr is 0, but must be positive");
  EXPECT_EQ(parse_error({"--lr=nan"}), "--lr is nan, but must be positive");
  EXPECT_EQ(parse_error({"--clip=-1"}), "--clip is -1, but must be at least 0");
  EXPECT_EQ(parse_error({"--clip=nan"}), "--clip is nan, but must be at least 0");
  EXPECT_EQ(parse_error({"--ranks=-2"}), "--ranks is -2, but must be at least 0");
  EXPECT_EQ(parse_error({"--sequence=9223372036854775807"}), "--sequence is 9223372036854775807, but must be at most 1000000000");
  EXPECT_EQ(parse_error({"--batch=4000000000"}), "--batch is 4000000000, but must be at most 1000000000");
  EXPECT_EQ(parse_error({"--batch=-1", "--global-batch=4"}), "--batch is -1, but must be at least 0");
  EXPECT_EQ(parse_error({"--threads=100000"}), "--threads is 100000, but must be at most 1024");
  EXPECT_EQ(parse_error({"--max-seconds=inf"}), "--max-seconds is inf, but must be at most 1000000000");
  EXPECT_EQ(parse_error({"--prompt="}), "--prompt is empty");
}

TEST(Options, UnknownChoices) {
  EXPECT_EQ(parse_error({"--strategy=zero"}),
            "--strategy is 'zero', but must be one of: no-shard, zero-1, zero-2, full, hybrid, hierarchical, none");
  EXPECT_EQ(parse_error({"--layout=flat"}), "--layout is 'flat', but must be one of: ragged, per-parameter");
  EXPECT_EQ(parse_error({"--precision=fp8"}), "--precision is 'fp8', but must be one of: fp32, bf16, fp16");
  EXPECT_EQ(parse_error({"--reshard-after-forward=maybe"}),
            "--reshard-after-forward is 'maybe', but must be one of: auto, true, false");
}

TEST(Options, BadMeshes) {
  for (const char* mesh : {"2y2", "x", "2x", "0", "-1x2", "2x2x", "two", "2.5", "3000000000x3000000000"}) {
    EXPECT_EQ(parse_error({std::string("--mesh=") + mesh}),
              std::string("--mesh is '") + mesh + "', but must be sizes joined by x, such as 4 or 2x2");
  }
  EXPECT_THAT(parse_mesh("2x3x4"), ElementsAre(2, 3, 4));
}

TEST(Options, Contradictions) {
  EXPECT_EQ(parse_error({"--strategy=hybrid", "--mesh=4"}),
            "--strategy hybrid needs a mesh of two dims (between groups x inside a group), but --mesh has 1");
  EXPECT_EQ(parse_error({"--strategy=full", "--mesh=2x2"}), "--strategy full needs a mesh of one dim, but --mesh has 2");
  EXPECT_EQ(parse_error({"--strategy=none", "--mesh=1"}), "--mesh has no meaning under --strategy none");
  EXPECT_THAT(parse_error({"--strategy=none", "--precision=bf16"}), HasSubstr("--precision bf16 needs sharding"));
  EXPECT_THAT(parse_error({"--keep-last=1"}), HasSubstr("--keep-last is 1, but must be at least 2"));
  EXPECT_EQ(parse_error({"--save-every=5"}), "--save-every needs --checkpoint");
  EXPECT_EQ(parse_error({"--resume"}), "--resume needs --checkpoint");
  EXPECT_EQ(parse_error({"surplus"}), "the argument 'surplus' belongs to no flag (see --help)");
}

TEST(Options, World) {
  EXPECT_EQ(world_error({"--global-batch=10"}, 4), "--global-batch 10 does not divide among 4 ranks");
  EXPECT_EQ(world_error({"--strategy=none"}, 2), "--strategy none is for one process, but there are 2 ranks");
  EXPECT_EQ(world_error({"--mesh=3"}, 4), "--mesh 3 holds 3 ranks, but there are 4");
  EXPECT_EQ(world_error({"--strategy=hybrid", "--mesh=2x2"}, 3), "--mesh 2x2 holds 4 ranks, but there are 3");
  EXPECT_EQ(world_error({"--strategy=hybrid"}, 3), "--strategy hybrid on 3 ranks needs --mesh: its default has 2 groups");
  EXPECT_EQ(world_error({"--global-batch=12"}, 3), "no error");
}

TEST(Options, MeshShapes) {
  EXPECT_THAT(mesh_shape(parse({}), 3).shape, ElementsAre(3));
  EXPECT_THAT(mesh_shape(parse({}), 3).names, ElementsAre("shard"));
  EXPECT_THAT(mesh_shape(parse({"--strategy=no-shard"}), 2).names, ElementsAre("replicate"));
  EXPECT_THAT(mesh_shape(parse({"--strategy=hybrid"}), 6).shape, ElementsAre(2, 3));
  EXPECT_THAT(mesh_shape(parse({"--strategy=hybrid", "--mesh=3x2"}), 6).shape, ElementsAre(3, 2));
  EXPECT_THAT(mesh_shape(parse({"--strategy=hierarchical"}), 6).shape, ElementsAre(2, 3));
  EXPECT_THAT(mesh_shape(parse({"--strategy=hierarchical"}), 6).names, ElementsAre("outer", "shard"));
  EXPECT_THAT(mesh_shape(parse({"--strategy=hybrid"}), 4).names, ElementsAre("replicate", "shard"));
}

TEST(LearningRate, WarmsUpThenFollowsACosineDownToATenth) {
  const auto options = parse({"--lr=1", "--warmup=4", "--steps=24"});
  EXPECT_DOUBLE_EQ(learning_rate(options, 0), 0.25);
  EXPECT_DOUBLE_EQ(learning_rate(options, 3), 1.0);
  EXPECT_NEAR(learning_rate(options, 13), 0.55, 1e-12); // half way
  EXPECT_NEAR(learning_rate(options, 23), 0.1, 1e-12);
  for (int64_t step = 4; step + 1 < 24; ++step) EXPECT_GT(learning_rate(options, step), learning_rate(options, step + 1));
}

TEST(LearningRate, WithoutWarmUpAndShorterThanTheWarmUp) {
  EXPECT_LT(learning_rate(parse({"--lr=1", "--warmup=0", "--steps=10"}), 0), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(parse({"--lr=1", "--warmup=10", "--steps=2"}), 1), 0.2);
}

TEST(Optimizer, DecaysMatricesOnly) {
  const auto options = parse({"--weight-decay=0.3"});
  Gpt model(options.model);
  auto optimizer = make_optimizer(*model, options);
  size_t parameters = 0;
  for (const auto& group : optimizer->param_groups()) {
    const auto decay = static_cast<const torch::optim::AdamWOptions&>(group.options()).weight_decay();
    for (const auto& parameter : group.params()) EXPECT_EQ(decay, parameter.dim() > 1 ? 0.3 : 0.0);
    parameters += group.params().size();
  }
  EXPECT_EQ(parameters, model->parameters().size());
}

} // namespace
} // namespace gpt::options_test
