// A checkpoint saved at any world size, under any strategy and layout, loads bit for bit at any other.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::resharding_test {
namespace {

constexpr int kLargestWorld = 4;

struct Job {
  int ranks;
  std::string strategy;
  std::string name() const { return c10::str(ranks, "-", strategy); }
  bool operator<(const Job& other) const { return std::tie(ranks, strategy) < std::tie(other.ranks, other.strategy); }
};

struct Case {
  Job saved, loaded;
};

std::vector<Case> all_cases() {
  std::vector<Job> jobs;
  for (int ranks = 1; ranks <= kLargestWorld; ++ranks) {
    for (const auto& strategy : testing::strategies_and_layouts()) jobs.push_back({ranks, strategy});
  }
  std::vector<Case> cases;
  for (const auto& saved : jobs) {
    for (const auto& loaded : jobs) cases.push_back({saved, loaded});
  }
  return cases;
}

std::string run_job(int ranks, const std::filesystem::path& root, const std::string& command,
                    const std::vector<std::string>& arguments) {
  if (arguments.empty()) return "";
  std::vector<std::string> line{testing::program_folder() + "/checkpoint_resharding_helper", "--ranks", std::to_string(ranks),
                                root, command};
  line.insert(line.end(), arguments.begin(), arguments.end());
  const auto result = testing::run_program(line, {}, std::chrono::seconds(900), testing::Start::kForked);
  EXPECT_EQ(result.status, 0) << result.output;
  return result.output;
}

int count(const std::string& text, const std::string& line) {
  int found = 0;
  for (auto at = text.find(line); at != std::string::npos; at = text.find(line, at + 1)) ++found;
  return found;
}

// How many of the loads of a row and column gave the same bits on every rank.
struct Cell {
  int same = 0, tried = 0;
};

void print(const std::map<Job, std::map<int, Cell>>& table) {
  std::printf("%-30s loaded at %2d rank %8d ranks %8d ranks %8d ranks\n", "saved at", 1, 2, 3, 4);
  for (const auto& [saved, row] : table) {
    std::printf("%d rank%s %-22s", saved.ranks, saved.ranks > 1 ? "s" : " ", saved.strategy.c_str());
    for (int ranks = 1; ranks <= kLargestWorld; ++ranks) {
      const auto cell = row.find(ranks);
      const auto text = cell == row.end() ? std::string("-") : c10::str(cell->second.same, " of ", cell->second.tried);
      std::printf(" %14s", text.c_str());
    }
    std::printf("\n");
  }
}

TEST(Resharding, EverySizeStrategyAndLayoutLoadsAtEveryOtherBitForBit) {
  const auto cases = testing::sweep(all_cases(), 40, [](const Case& each) {
    return each.saved.ranks == kLargestWorld && testing::are_default(each.saved.strategy, each.loaded.strategy);
  });
  const testing::TemporaryFolder root;
  for (int ranks = 1; ranks <= kLargestWorld; ++ranks) {
    std::set<std::string> strategies;
    for (const auto& [saved, loaded] : cases) {
      if (saved.ranks == ranks) strategies.insert(saved.strategy);
    }
    run_job(ranks, root.path(), "save", {strategies.begin(), strategies.end()});
  }
  std::map<Job, std::map<int, Cell>> table;
  for (int ranks = 1; ranks <= kLargestWorld; ++ranks) {
    std::vector<std::string> arguments;
    for (const auto& [saved, loaded] : cases) {
      if (loaded.ranks == ranks) arguments.insert(arguments.end(), {saved.name(), loaded.strategy});
    }
    const auto output = run_job(ranks, root.path(), "load", arguments);
    for (const auto& [saved, loaded] : cases) {
      if (loaded.ranks != ranks) continue;
      const auto line = saved.name() + " " + loaded.strategy + " ";
      const bool same = count(output, line + "same\n") == ranks && count(output, line) == ranks;
      EXPECT_TRUE(same) << "saved as " << saved.name() << ", loaded as " << loaded.name() << ":\n" << output;
      table[saved][ranks].tried += 1;
      table[saved][ranks].same += same ? 1 : 0;
    }
  }
  print(table);
}

} // namespace
} // namespace tessera::resharding_test
