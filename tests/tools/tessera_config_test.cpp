#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "../support/subprocess.h"
#include "../support/temporary_folder.h"

namespace tessera::tessera_config_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

testing::ProgramResult run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), TESSERA_CONFIG_TOOL);
  return testing::run_program(arguments, {}, std::chrono::seconds(60), testing::Start::kForked);
}

class ConfigTool : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) const {
    const std::string path = folder_.path() / name;
    std::ofstream(path) << text;
    return path;
  }
  const testing::TemporaryFolder folder_;
};

constexpr auto* kConfig = R"({
  "train_micro_batch_size_per_gpu": "auto", # filled by --micro_batch_size
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
  "zero_optimization": {"stage": 3, "overlap_comm": true},
  "bf16": {"enabled": true},
})";

TEST_F(ConfigTool, ShowsWhatEachKeyDoes) {
  const auto path = write("ds.json", kConfig);
  const auto result = run({"check", path, "--ranks=8", "--micro_batch_size=4"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(
      result.output,
      HasSubstr(
          "8 ranks: shard 8; strategy full; precision deepspeed\n32 rows a step: micro-batches of 4, 1 of them on each rank\n"));
  EXPECT_THAT(result.output, ContainsRegex("train_micro_batch_size_per_gpu +4 +auto: micro_batch_size +rows of a forward"));
  EXPECT_THAT(result.output, ContainsRegex("gradient_clipping +1.0 +default "));
  EXPECT_THAT(result.output,
              HasSubstr("note: zero_optimization.overlap_comm has no effect here: communication always overlaps\n"));
  const auto error = run({"check", path, "--ranks=8"});
  EXPECT_EQ(error.status, 1);
  EXPECT_THAT(error.output, HasSubstr("tessera-config: " + path +
                                      ": train_micro_batch_size_per_gpu is \"auto\", and the argument micro_batch_size"));
}

TEST_F(ConfigTool, PredictsTheMemoryOfARank) {
  const auto path = write("ds.json", kConfig);
  const auto result = run({"check", path, "--ranks=8", "--micro_batch_size=4", "--parameters=536870912", "--blocks=16"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, ContainsRegex("parameters +0.25\n")) << "fp32, an eighth of 2 GiB";
  EXPECT_THAT(result.output, ContainsRegex("optimizer state +0.50\n"));
  EXPECT_THAT(result.output, ContainsRegex("peak, in the .* +1.[0-9]+\n"));
  EXPECT_THAT(run({"check", path, "--micro_batch_size=4", "--parameters=2"}).output,
              HasSubstr("there must be a parameter for each block"));
}

TEST_F(ConfigTool, ConvertsAccelerates) {
  const auto yaml =
      write("a.yaml",
            "distributed_type: FSDP\nmixed_precision: 'bf16'\nnum_processes: 4 # in all\nmain_process_ip: ~\nfsdp_config:\n"
            "  fsdp_version: 2\n  fsdp_reshard_after_forward: no\n  fsdp_backward_prefetch: BACKWARD_PRE\n");
  const auto result = run({"convert", yaml});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("note: fsdp_config.fsdp_backward_prefetch has no effect here"));
  EXPECT_THAT(result.output, HasSubstr("\"precision\": \"bf16_mixed\""));
  const auto json = write("a.json", result.output.substr(result.output.find('{')));
  EXPECT_THAT(run({"check", json, "--ranks=4", "--micro_batch_size=1"}).output,
              ContainsRegex("tessera.reshard_after_forward +false +file"));
  EXPECT_THAT(run({"check", yaml}).output, HasSubstr("tessera-config convert " + yaml));
  const auto error = [&](const std::string& text) {
    const auto failed = run({"convert", write("b.yaml", text)});
    EXPECT_EQ(failed.status, 1);
    return failed.output;
  };
  EXPECT_THAT(error("a: [1\nb: 2"), HasSubstr("b.yaml: line "));
  EXPECT_THAT(error("debug: false\ndebug: true\n"), HasSubstr("line 2: the key debug appears twice"));
  EXPECT_THAT(error(""), HasSubstr("b.yaml: the file has no keys"));
  std::string nested = "a0: &a0 [1, 1, 1, 1]\n"; // ten lines that name a million values
  for (int i = 1; i < 10; ++i) nested += fmt::format("a{0}: &a{0} [*a{1}, *a{1}, *a{1}, *a{1}]\n", i, i - 1);
  EXPECT_THAT(error(nested), HasSubstr("b.yaml: YAML of more than 100000 values"));
  EXPECT_THAT(error("mixed_precision: no\n"), HasSubstr("distributed_type is not given"));
  EXPECT_THAT(run({"convert", "/nowhere/a.yaml"}).output, HasSubstr("cannot read /nowhere/a.yaml"));
}

/// What follows "# name: " in a file.
std::vector<std::string> words_after(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto start = "# " + name + ": ";
    if (!line.starts_with(start)) continue;
    std::istringstream words(line.substr(start.size()));
    if (name == "says") return {line.substr(start.size())};
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

/// Files as their users write them. Each begins with the arguments, and what the tool says.
TEST_F(ConfigTool, ReadsFilesOfUsers) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_CONFIG_FILES)) {
    std::string path = entry.path();
    SCOPED_TRACE(path);
    auto arguments = words_after(path, "arguments");
    auto result = testing::ProgramResult();
    if (path.ends_with(".yaml")) {
      result = run({"convert", path});
      if (result.status == 0) path = write("converted.json", result.output.substr(result.output.find("{\n")));
    }
    if (path.ends_with(".json")) {
      arguments.insert(arguments.begin(), {"check", path});
      result = run(arguments);
    }
    const auto says = words_after(entry.path(), "says").at(0);
    EXPECT_THAT(result.output, HasSubstr(says));
    EXPECT_EQ(result.status, says.find("; precision ") == std::string::npos ? 1 : 0);
    ++files;
  }
  EXPECT_GT(files, 10);
}

TEST_F(ConfigTool, ResolvesAndListsKeys) {
  const auto result = run({"resolve", write("ds.json", kConfig), "--micro_batch_size=2", "--ranks=4"});
  EXPECT_THAT(result.output, HasSubstr("\"train_batch_size\":8,\"train_micro_batch_size_per_gpu\":2"));
  EXPECT_THAT(run({"keys"}).output, HasSubstr("| `fp16.hysteresis` | integer | 2 |"));
  EXPECT_THAT(run({"keys", "accelerate"}).output, HasSubstr("| `num_machines` | integer | 1 |"));
}

TEST_F(ConfigTool, NamesWhatIsWrong) {
  EXPECT_THAT(run({}).output, HasSubstr("no command given"));
  EXPECT_THAT(run({"chek", "a"}).output, HasSubstr("unknown command: chek; did you mean \"check\"?"));
  EXPECT_THAT(run({"check"}).output, HasSubstr("check takes one file"));
  EXPECT_THAT(run({"check", "/nowhere/ds.json"}).output, HasSubstr("cannot read the config /nowhere/ds.json: No such file"));
  EXPECT_THAT(run({"check", folder_.path()}).output, HasSubstr(": it is a folder"));
}

} // namespace
} // namespace tessera::tessera_config_test
