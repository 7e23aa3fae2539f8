// Says what a model's training takes on a machine: memory, bytes sent and time of one setting, or the fastest setting that fits.
#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>
#include <absl/strings/match.h>
#include <absl/strings/str_join.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/base/error_text.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/plan/fit_machine.h>
#include <tessera/plan/model_folder.h>
#include <tessera/plan/search.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "choices.h"
#include "machines.h"
#include "report.h"

ABSL_FLAG(std::string, machine, "", "a file, or the name of a published machine (--machines lists them)");
ABSL_FLAG(bool, machines, false, "print the published machines");
ABSL_FLAG(bool, measure, false, "plan for this machine, measured with --ranks local processes");
ABSL_FLAG(std::string, save_machine, "",
          "write the machine to this file (- for the standard output), and plan only if a model is given");
ABSL_FLAG(int64_t, ranks, 0, "ranks of the job, on as many of the machine's hosts as it takes; 0: the machine's");
ABSL_FLAG(int64_t, sequence, 0, "tokens of a row; 0: as many as the model takes, at most 2,048");
ABSL_FLAG(bool, dropout, true, "with the dropout of the model's config");
ABSL_FLAG(bool, fused_attention, true,
          "attention of one operator; false: of two products and what is between them, as older models have it");
ABSL_FLAG(bool, fused_norms, true, "RMS norms of one operator; false: of plain ones in fp32, as older models have them");
ABSL_FLAG(bool, predict, false, "predict the one setting that the flags say, in place of a search");
ABSL_FLAG(
    double, took, 0,
    "seconds that a step of the setting of --predict took: fits the machine's rates and links to it, and predicts with these");
ABSL_FLAG(bool, progress, false, "print each setting that is stepped to the standard error");
ABSL_FLAG(std::string, json, "", "write the result as JSON to this file (- for the standard output, in place of the tables)");
ABSL_FLAG(std::string, config, "", "write a trainer's config of the best plan to this file (- for the standard output)");

namespace {

constexpr const char* kUsage = R"(tessera-plan MODEL --machine FILE or NAME | --measure [--ranks N] [--predict] …

MODEL is a folder as Hugging Face's (config.json, and maybe safetensors, whose names and shapes are checked), a config.json, or a
file of layers (docs/planning.md). Prints the fastest setting that fits, others, and what limits cost; with --predict what one
setting takes. Nothing of the model is allocated, and no rank but this one runs.)";

void write(const std::string& path, const std::string& text) {
  if (path == "-") {
    fmt::print("{}\n", text);
    return;
  }
  std::ofstream file(path);
  file << text << '\n';
  TORCH_CHECK(file.flush(), "cannot write ", path);
}

/// At once: what follows may fail.
void print(const std::string& text) {
  fmt::print("{}", text);
  std::fflush(stdout);
}

tessera::Machine named_machine() {
  const auto name = absl::GetFlag(FLAGS_machine);
  TORCH_CHECK(!name.empty(),
              "give --machine or --measure; the published machines are: ", absl::StrJoin(tools::machine_names(), ", "));
  return tools::with_ranks(tools::machine_of(name), absl::GetFlag(FLAGS_ranks));
}

void print_machines() {
  for (const auto& name : tools::machine_names()) fmt::print("{}\n", tools::machine_of(name).to_json());
}

std::string remark_on(const tessera::Machine& machine, const tessera::Prediction& prediction) {
  const auto given = tools::budget_of_flags(), budget = given > 0 ? given : machine.memory;
  if (prediction.peak() <= budget) return "";
  return fmt::format("does not fit: it takes {:.4g} GB of a rank, which has {:.4g}\n",
                     static_cast<double>(prediction.peak()) / 1e9, static_cast<double>(budget) / 1e9);
}

void predict(const tessera::PlannedModel& model, const tessera::Machine& machine) {
  const auto prediction = tessera::predict(model, machine, tools::settings_of_flags(machine.ranks()));
  const auto json = absl::GetFlag(FLAGS_json), config = absl::GetFlag(FLAGS_config);
  if (json != "-" && config != "-") print(tools::text_of(model, machine, prediction) + remark_on(machine, prediction));
  if (!json.empty()) write(json, tools::json_of(model, machine, prediction));
  if (!config.empty()) write(config, tessera::config_of(prediction));
}

/// Status 1 where nothing fits.
int search(const tessera::PlannedModel& model, const tessera::Machine& machine) {
  auto options = tools::search_options(machine.ranks());
  if (absl::GetFlag(FLAGS_progress)) {
    options.progress = [](const tessera::Prediction& each) {
      fmt::print(stderr, "{}: {:.2f} GB, {:.4g} rows/s\n", each.settings.to_string(), static_cast<double>(each.peak()) / 1e9,
                 each.rows_per_second());
    };
  }
  const auto plan = tessera::plan(model, machine, options);
  const auto json = absl::GetFlag(FLAGS_json), config = absl::GetFlag(FLAGS_config);
  if (json != "-" && config != "-") print(tools::text_of(model, plan));
  if (!json.empty()) write(json, tools::json_of(model, plan));
  if (!config.empty()) write(config, plan.to_config());
  return plan.best ? 0 : 1;
}

tessera::Machine fitted(const tessera::PlannedModel& model, const tessera::Machine& machine, double took) {
  TORCH_CHECK(absl::GetFlag(FLAGS_predict), "--took needs --predict and the setting whose step took so long");
  return tessera::fit_machine(machine, {{tessera::predict(model, machine, tools::settings_of_flags(machine.ranks())), took}});
}

/// Status 1 where nothing fits.
int plan_for(tessera::Machine machine, const std::vector<char*>& words) {
  const auto saved = absl::GetFlag(FLAGS_save_machine);
  const auto took = absl::GetFlag(FLAGS_took);
  TORCH_CHECK(words.size() == 2 || took == 0, "--took needs a model");
  if (words.size() == 1) {
    write(saved, machine.to_json());
    return 0;
  }
  const auto model = tessera::read_model(words[1], {.sequence = absl::GetFlag(FLAGS_sequence),
                                                    .dropout = absl::GetFlag(FLAGS_dropout),
                                                    .fused_norms = absl::GetFlag(FLAGS_fused_norms),
                                                    .fused_attention = absl::GetFlag(FLAGS_fused_attention)});
  if (took != 0) machine = fitted(model, machine, took);
  if (!saved.empty()) write(saved, machine.to_json());
  if (!absl::GetFlag(FLAGS_predict)) return search(model, machine);
  predict(model, machine);
  return 0;
}

/// Local ranks, which run this program again, measure together, and the first of them plans.
int measure_and_plan(const std::vector<char*>& words) {
  const auto ranks = absl::GetFlag(FLAGS_ranks);
  TORCH_CHECK(absl::GetFlag(FLAGS_machine).empty(), "--machine and --measure are both given");
  TORCH_CHECK(ranks >= 0 && ranks <= 1024, "--ranks: ", ranks, " local processes");
  if (ranks <= 1) return plan_for(tessera::measure_machine(), words);
  int status = 0;
  const int of_ranks = tessera::launch(static_cast<int>(ranks), [&] {
    tessera::init_process_group();
    const auto machine = tessera::measure_machine();
    const bool is_first = tessera::process_context().rank() == 0;
    tessera::destroy_process_group();
    if (is_first) status = plan_for(machine, words);
  });
  return std::max(status, of_ranks);
}

int run(const std::vector<char*>& words) {
  if (absl::GetFlag(FLAGS_machines)) {
    print_machines();
    return 0;
  }
  TORCH_CHECK(words.size() == 2 || (words.size() == 1 && !absl::GetFlag(FLAGS_save_machine).empty()),
              "give one model (see --help)");
  return absl::GetFlag(FLAGS_measure) ? measure_and_plan(words) : plan_for(named_machine(), words);
}

} // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(kUsage);
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) {
    return absl::StrContains(file, "tessera_plan") || absl::StrContains(file, "plan/choices");
  };
  absl::SetFlagsUsageConfig(usage);
  const auto words = absl::ParseCommandLine(argc, argv);
  try {
    return run(words);
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera-plan: {}\n", tessera::internal::error_text(error));
    return 1;
  }
}
