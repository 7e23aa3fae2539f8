#pragma once

#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/training/loop/token_training.h>
#include <tessera/training/lr_schedule.h>

namespace tessera::testing {

/// What a run of trainer_program has printed.
struct ProgramRun {
  int status = 0;
  std::string output;
  std::map<int64_t, double> losses, evaluations; ///< by step
  std::vector<int64_t> saved, best;
  std::string end; ///< the reason; empty where it did not come to its end
  int64_t last_step() const { return losses.empty() ? 0 : losses.rbegin()->first; }
  int64_t first_step() const { return losses.empty() ? 0 : losses.begin()->first; }
};

inline ProgramRun run_trainer(int ranks, const std::filesystem::path& folder, const std::map<std::string, std::string>& arguments,
                              Start start = Start::kForked) {
  std::vector<std::string> words{program_folder() + "/trainer_program", "--ranks", std::to_string(ranks),
                                 "folder=" + folder.string()};
  for (const auto& [name, value] : arguments) words.push_back(name + "=" + value);
  const auto result = run_program(words, {{"OMP_NUM_THREADS", "1"}}, std::chrono::seconds(120), start);
  ProgramRun run{.status = result.status, .output = result.output};
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words_of_line(line);
    std::string kind;
    int64_t step = 0;
    double value = 0;
    words_of_line >> kind;
    if (kind == "end") words_of_line >> run.end;
    if (kind == "saved" && words_of_line >> step) run.saved.push_back(step);
    if (kind == "best" && words_of_line >> step) run.best.push_back(step);
    if (kind == "loss" && words_of_line >> step >> value) run.losses[step] = value;
    if (kind == "valid" && words_of_line >> step >> value) run.evaluations[step] = value;
  }
  return run;
}

/// The losses of trainer_program's training, from step 1: a hand-written loop in one process.
inline std::vector<double> plain_losses(int64_t steps, int64_t micro_batches) {
  auto net = double_net();
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  WarmupCosineLR schedule(optimizer, {.warmup_steps = 2, .total_steps = 40, .start_ratio = 0.1});
  TokenSource whole(41, 12, 0, 1);
  std::vector<double> losses;
  for (int64_t step = 0; step < steps; ++step) {
    losses.push_back(plain_step(net, optimizer, rows_of_step(whole, micro_batches), 0.5).loss);
    schedule.step();
  }
  return losses;
}

/// The largest difference of losses by step from those of the plain loop.
inline double largest_difference(const std::map<int64_t, double>& losses, const std::vector<double>& expected) {
  double worst = 0;
  for (const auto& [step, loss] : losses) worst = std::max(worst, std::abs(loss - expected[static_cast<size_t>(step - 1)]));
  return worst;
}

} // namespace tessera::testing
