#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include <tessera/plan/machine.h>
#include <tessera/training/train_config.h>

#include "../plan/models/configs.h"
#include "../support/subprocess.h"
#include "../support/temporary_folder.h"

namespace tessera::tessera_plan_test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

testing::ProgramResult run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), TESSERA_PLAN_TOOL);
  return testing::run_program(arguments, {}, std::chrono::seconds(120), testing::Start::kForked);
}

json read_json(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);
}

class PlanTool : public ::testing::Test {
 protected:
  void SetUp() override { folder_.write("config.json", testing::configs::small().at("llama").dump()); }
  std::string model() const { return folder_.path().string(); }
  std::string error(std::vector<std::string> arguments) {
    const auto result = run(std::move(arguments));
    EXPECT_EQ(result.status, 1);
    return result.output;
  }

  testing::TemporaryFolder folder_;
};

TEST_F(PlanTool, FitsAMachineToAStep) {
  const auto path = folder_.file("out.json"), fitted = folder_.file("fitted.json");
  const std::vector<std::string> setting{model(), "--predict", "--ranks=4", "--sequence=16", "--rows=2", "--json=" + path};
  const auto seconds = [&](const std::vector<std::string>& more) {
    auto words = setting;
    words.insert(words.end(), more.begin(), more.end());
    const auto result = run(words);
    EXPECT_EQ(result.status, 0) << result.output;
    return read_json(path).at("seconds").get<double>();
  };
  const double before = seconds({"--machine=a100-selene"});
  const double took = 3 * before;
  EXPECT_NEAR(seconds({"--machine=a100-selene", "--took=" + std::to_string(took), "--save_machine=" + fitted}), took,
              1e-3 * took);
  EXPECT_NEAR(seconds({"--machine=" + fitted}), took, 1e-3 * took);
  EXPECT_THAT(error({model(), "--machine=a100-selene", "--took=1"}), HasSubstr("--took needs --predict"));
  EXPECT_THAT(error({"--machine=a100-selene", "--took=1", "--save_machine=" + fitted}), HasSubstr("--took needs a model"));
  EXPECT_THAT(error({model(), "--machine=a100-selene", "--predict", "--took=-1"}), HasSubstr("must be positive"));
}

TEST_F(PlanTool, PredictsOneSetting) {
  const auto path = folder_.file("out.json");
  const auto result = run({model(), "--machine=h100-sxm", "--predict", "--ranks=4", "--mesh=tp=2", "--sequence=16", "--rows=2",
                           "--recompute=on", "--json=" + path});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("full, shard 2 x tp 2, 2 rows"));
  EXPECT_THAT(result.output, HasSubstr("optimizer state"));
  EXPECT_THAT(result.output, HasSubstr("tokens/s"));
  const auto prediction = read_json(path);
  EXPECT_EQ(prediction.at("settings").at("mesh").at("tp"), 2);
  const double seconds = prediction.at("seconds"), tokens = prediction.at("tokens_per_second");
  EXPECT_NEAR(tokens, 2 * 2 * 16 / seconds, 1e-6 * tokens);
  EXPECT_GT(prediction.at("model_flops_utilization").get<double>(), 0);
  EXPECT_GT(prediction.at("peak").get<int64_t>(), prediction.at("memory").at("parameters").get<int64_t>());
}

TEST_F(PlanTool, PredictsSelectiveRecomputationAndFp8) {
  const auto path = folder_.file("out.json");
  const auto predicted = [&](const std::string& recompute, const std::string& float8) {
    const auto result = run({model(), "--machine=h100-sxm", "--predict", "--ranks=2", "--sequence=16", "--rows=2",
                             "--recompute=" + recompute, "--float8=" + float8, "--json=" + path});
    EXPECT_EQ(result.status, 0) << result.output;
    return read_json(path);
  };
  const auto some = predicted("selective", "rows"), all = predicted("on", "rows");
  const auto gathers = run({model(), "--machine=h100-sxm", "--predict", "--ranks=2", "--sequence=16", "--float8=tensor",
                            "--float8_gather=on", "--json=" + path});
  EXPECT_EQ(gathers.status, 0) << gathers.output;
  EXPECT_TRUE(read_json(path).at("settings").at("float8_gather").get<bool>());
  // Ranks that do not divide the rows of the weights.
  const auto uneven =
      run({model(), "--machine=h100-sxm", "--predict", "--ranks=5", "--sequence=16", "--float8=tensor", "--float8_gather=on"});
  EXPECT_EQ(uneven.status, 0) << uneven.output;
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--predict", "--float8_gather=on"}), HasSubstr("but float8 is unset"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--predict", "--float8_gather=yes"}),
              HasSubstr("--float8_gather: \"yes\" is unknown; known are on, off, both"));
  EXPECT_EQ(some.at("settings").at("keeps"), "second products");
  EXPECT_EQ(some.at("settings").at("float8"), "rows");
  EXPECT_LT(some.at("flops").get<double>(), all.at("flops").get<double>());
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--predict", "--float8=e4m3"}), HasSubstr("--float8: \"e4m3\" is unknown"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--predict", "--recompute=most"}),
              HasSubstr("--recompute: \"most\" is unknown; known are on, off, both, selective"));
}

/// What comes in is in the dtype of the model.
TEST_F(PlanTool, PredictsPicturesInEveryPrecision) {
  const auto pictures = folder_.write("pictures.json", R"({"format": "tessera layers", "version": 1, "name": "pictures",
      "input": {"features": [3, 8, 8]}, "loss": "mean_square", "layers": [
        {"kind": "conv2d", "in": 3, "out": 4, "kernel": 3, "padding": 1}, {"kind": "relu"},
        {"kind": "conv2d", "in": 4, "out": 2, "kernel": 3, "padding": 1}]})");
  for (const std::string precision : {"fp32", "bf16_mixed", "deepspeed", "bf16_full"}) {
    for (const std::string mesh : {"shard=2", "pp=2"}) {
      const auto result = run({pictures, "--machine=h100-sxm", "--ranks=2", "--predict", "--mesh=" + mesh, "--accumulation=2",
                               "--precision=" + precision});
      EXPECT_EQ(result.status, 0) << precision << " " << mesh << " " << result.output;
    }
  }
}

TEST_F(PlanTool, SearchesAndWritesAConfig) {
  const auto config = folder_.file("config-of-plan.json"), path = folder_.file("plan.json");
  const auto result = run({model(), "--machine=a100-selene", "--ranks=2", "--sequence=16", "--max_rows=4",
                           "--strategy=full,zero-1", "--runners_up=2", "--config=" + config, "--json=" + path});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("best"));
  EXPECT_THAT(result.output, HasSubstr("model FLOPS utilization"));
  const auto plan = read_json(path);
  EXPECT_EQ(plan.at("format"), "tessera plan");
  EXPECT_GT(plan.at("best").at("tokens_per_second").get<double>(), 0);
  const auto read = TrainConfig::read(config, {.ranks = 2});
  EXPECT_EQ(read.batch.micro, plan.at("best").at("settings").at("rows").get<int64_t>());
}

TEST_F(PlanTool, MeasuresThisMachine) {
  const auto path = folder_.file("machine.json");
  const auto result = run({"--measure", "--ranks=2", "--save_machine=" + path});
  EXPECT_EQ(result.status, 0) << result.output;
  const auto machine = Machine::read(path);
  EXPECT_EQ(machine.ranks(), 2);
  EXPECT_GT(machine.fp32_flops, 0);
}

TEST_F(PlanTool, ListsPublishedMachines) {
  const auto result = run({"--machines"});
  EXPECT_EQ(result.status, 0);
  for (const auto* name : {"a100-selene", "h100-sxm", "h100-titan"}) EXPECT_THAT(result.output, HasSubstr(name));
}

TEST_F(PlanTool, NamesWhatIsWrong) {
  EXPECT_THAT(error({model()}), HasSubstr("give --machine or --measure; the published machines are: a100-selene, h100-sxm"));
  EXPECT_THAT(error({"--machine=h100-sxm"}), HasSubstr("give one model"));
  EXPECT_THAT(error({model(), "--machine=h100-sxn"}), HasSubstr("no machine of this name; the nearest is h100-sxm"));
  EXPECT_THAT(error({folder_.file("none"), "--machine=h100-sxm"}), HasSubstr("there is no "));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--predict", "--mesh=tq=2"}), HasSubstr("--mesh: \"tq\" is unknown"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--predict", "--mesh=tp=three"}), HasSubstr("tp=three is no dim"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--predict", "--mesh=tp=3"}), HasSubstr("3 ranks do not divide 8"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--predict", "--strategy=zero-4"}),
              HasSubstr("--strategy: \"zero-4\" is unknown"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--predict", "--precision=fp32,bf16_mixed"}),
              HasSubstr("--precision names 2"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--rows=2"}), HasSubstr("--rows is for --predict"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--mesh=shard=4"}), HasSubstr("--mesh has 4 ranks, but the machine has 8"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--mesh=shard=8,shard=8"}), HasSubstr("--mesh names shard twice"));
  EXPECT_THAT(error({model(), "--machine=h100-sxm", "--budget=inf"}), HasSubstr("--budget: inf GB"));
  const auto machine = folder_.write(
      "bad.json", R"({"name": "bad", "memory_bytes": 1e9, "flops_per_second": {"fp32": 1e12}, "memory_bytes_per_second": 0})");
  EXPECT_THAT(error({model(), "--machine=" + machine}), HasSubstr("memory_bytes_per_second"));
}

/// The lines of the page that call the tool.
std::vector<std::vector<std::string>> commands_of(const std::string& page) {
  std::vector<std::vector<std::string>> commands;
  std::ifstream file(page);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::vector<std::string> command{std::istream_iterator<std::string>(words), {}};
    if (!command.empty() && command.front() == "tessera-plan") commands.emplace_back(command.begin() + 1, command.end());
  }
  return commands;
}

TEST_F(PlanTool, RunsTheCommandsOfItsPage) {
  const std::filesystem::path root = TESSERA_ROOT;
  const auto commands = commands_of(root / "docs" / "planning.md");
  EXPECT_GE(commands.size(), 5u);
  for (auto command : commands) {
    for (auto& word : command) {
      if (word.starts_with("tools/")) word = root / word;
      if (word == "config.json" || word == "plan.json" || word == "machine.json") word = folder_.file(word);
    }
    const auto result = run(command);
    EXPECT_EQ(result.status, 0) << result.output;
  }
}

// docs/planning.md has these rows.
TEST_F(PlanTool, IsNearPublishedFigures) {
  const std::filesystem::path models = std::filesystem::path(TESSERA_ROOT) / "tools" / "plan" / "models";
  const auto predicted = [&](const std::string& model, std::vector<std::string> arguments) {
    const auto path = folder_.file("out.json");
    arguments.insert(arguments.begin(), {(models / model).string(), "--predict", "--recompute=on", "--json=" + path});
    EXPECT_EQ(run(arguments).status, 0);
    return read_json(path);
  };
  const auto titan = predicted("llama-3-70b.json", {"--machine=h100-titan", "--ranks=256", "--mesh=tp=8", "--sequence_parallel",
                                                    "--sequence=8192", "--rows=16", "--float8=tensor"});
  EXPECT_NEAR(titan.at("tokens_per_second").get<double>() / 256, 829, 0.25 * 829);
  constexpr double kGiB = 1024.0 * 1024 * 1024;
  EXPECT_NEAR(titan.at("peak").get<double>() / kGiB, 71.9, 0.1 * 71.9);
  const auto selene = predicted("megatron-18b.json", {"--machine=a100-selene", "--ranks=256", "--mesh=tp=8",
                                                      "--strategy=no-shard", "--rows=4", "--accumulation=8"});
  EXPECT_NEAR(selene.at("seconds").get<double>(), 9.40, 0.25 * 9.40);
}

TEST_F(PlanTool, SaysWhatWouldFit) {
  const auto result =
      run({model(), "--machine=h100-sxm", "--ranks=2", "--sequence=16", "--max_rows=1", "--strategy=full", "--budget=0.00001"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("the smallest needs"));
  const auto one = run({model(), "--machine=h100-sxm", "--ranks=2", "--sequence=16", "--predict", "--budget=0.00001"});
  EXPECT_EQ(one.status, 0);
  EXPECT_THAT(one.output, HasSubstr("does not fit"));
}

} // namespace
} // namespace tessera::tessera_plan_test
