#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "../support/subprocess.h"
#include "../support/temporary_folder.h"

namespace tessera::tessera_pipeline_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

testing::ProgramResult run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), TESSERA_PIPELINE_TOOL);
  return testing::run_program(arguments, {}, std::chrono::seconds(60), testing::Start::kForked);
}

std::string content_of(const std::string& path) {
  std::stringstream content;
  content << std::ifstream(path).rdbuf();
  return content.str();
}

TEST(PipelineTool, TellsWhatAStepTakes) {
  const auto result = run({"--schedule=zb-h1", "--ranks=4", "--micro_batches=8"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.output, HasSubstr("zb-h1: 4 ranks, 4 stages, 8 micro-batches\nstep 27, 11.1 % of it idle\n"));
  EXPECT_THAT(result.output, ContainsRegex("\n +3 +24 +4 +1 +0\n"));
}

TEST(PipelineTool, WritesAndReadsSchedules) {
  const testing::TemporaryFolder folder;
  const std::string csv = folder.path() / "s.csv", svg = folder.path() / "s.svg";
  EXPECT_EQ(
      run({"--schedule=zb-v", "--ranks=2", "--micro_batches=4", "--active_stages=1", "--csv=" + csv, "--svg=" + svg}).status, 0);
  EXPECT_THAT(content_of(csv), ::testing::StartsWith("0UNSHARD,0F0,0F1,0F2,0RESHARD,3UNSHARD,3F0,"));
  EXPECT_THAT(content_of(svg), ::testing::StartsWith("<svg "));
  EXPECT_EQ(run({"--schedule=" + csv, "--csv=-"}).output, content_of(csv));
}

TEST(PipelineTool, NamesWhatIsWrong) {
  const testing::TemporaryFolder folder;
  const std::string csv = folder.path() / "bad.csv";
  std::ofstream(csv) << "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n";
  const auto error = [](const std::vector<std::string>& arguments) {
    const auto result = run(arguments);
    EXPECT_EQ(result.status, 1);
    return result.output;
  };
  EXPECT_THAT(error({"--schedule=" + csv}), HasSubstr("rank 1 takes the outputs of micro-batch 1"));
  EXPECT_THAT(error({"--schedule=2f2b"}), HasSubstr("no schedule of a pipeline is called 2f2b"));
  EXPECT_THAT(error({"--schedule=dualpipe-v", "--micro_batches=7"}), HasSubstr("the nearest that it can: 8"));
  EXPECT_THAT(error({"--svg=/nowhere/a.svg"}), HasSubstr("cannot write /nowhere/a.svg"));
  EXPECT_THAT(error({"gpipe"}), HasSubstr("unknown argument: gpipe"));
}

} // namespace
} // namespace tessera::tessera_pipeline_test
