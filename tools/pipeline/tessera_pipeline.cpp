// Makes, checks, simulates and draws the schedules of pipelines.
#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/base/error_text.h>
#include <tessera/base/text_table.h>
#include <tessera/parallel/pipeline_schedule.h>

#include <fstream>
#include <sstream>

ABSL_FLAG(std::string, schedule, "1f1b",
          "gpipe, 1f1b, interleaved-1f1b, looped-bfs, zb-h1, interleaved-zb, zb-v, dualpipe-v, or a CSV file of a schedule");
ABSL_FLAG(int64_t, ranks, 4, "ranks of the pipeline");
ABSL_FLAG(int64_t, micro_batches, 8, "micro-batches of a step");
ABSL_FLAG(int64_t, chunks, 0, "stages a rank; 0: 2 for zb-v, dualpipe-v, and what is interleaved or looped, 1 for the others");
ABSL_FLAG(int64_t, group, 0, "micro-batches that pass a stage before the rank's next stage takes them; 0: as PyTorch");
ABSL_FLAG(int64_t, active_stages, 0, "gather and free stages, at most so many of a rank at once; 0: they are always there");
ABSL_FLAG(double, forward, 1, "time of a stage's forward");
ABSL_FLAG(double, input_gradients, 1, "time of the first half of its backward");
ABSL_FLAG(double, weight_gradients, 1, "time of the second half");
ABSL_FLAG(double, message, 0, "time of a message between ranks");
ABSL_FLAG(double, overlap, 0, "share of the shorter of two overlapping actions that takes no time");
ABSL_FLAG(std::string, csv, "", "write the schedule to this file (- for the standard output)");
ABSL_FLAG(std::string, svg, "", "write a picture of the simulated step to this file");

namespace {

constexpr const char* kUsage = R"(tessera-pipeline [--schedule NAME or FILE] [--ranks N] [--micro_batches N] …

Prints what a step of the schedule takes: its time, the share of it in which ranks wait, and for each rank the forwards that it
keeps and the stages that it has gathered at once. Reads and writes the CSV of torch.distributed.pipelining.)";

bool is_name(const std::string& text) {
  const auto& names = tessera::pipeline_schedule_names();
  return std::any_of(names.begin(), names.end(), [&](const auto& each) { return each.name == text; });
}

int64_t own_chunks(tessera::PipelineScheduleKind kind) {
  using Kind = tessera::PipelineScheduleKind;
  return kind == Kind::kGPipe || kind == Kind::k1F1B || kind == Kind::kZeroBubbleH1 ? 1 : 2;
}

tessera::PipelineSchedule wanted_schedule() {
  const auto text = absl::GetFlag(FLAGS_schedule);
  std::ifstream file(text);
  if (!is_name(text) && file) {
    std::stringstream content;
    content << file.rdbuf();
    return tessera::schedule_from_csv(content.str(), text);
  }
  const auto kind = tessera::pipeline_schedule_kind(text);
  const auto chunks = absl::GetFlag(FLAGS_chunks);
  return tessera::pipeline_schedule(kind, {.ranks = absl::GetFlag(FLAGS_ranks),
                                           .micro_batches = absl::GetFlag(FLAGS_micro_batches),
                                           .chunks = chunks == 0 ? own_chunks(kind) : chunks,
                                           .group = absl::GetFlag(FLAGS_group)});
}

void write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  TORCH_CHECK(file.flush(), "cannot write ", path);
}

void print(const tessera::PipelineSchedule& schedule, const tessera::PipelineSimulation& simulation) {
  fmt::print("{}: {} ranks, {} stages, {} micro-batches\n", schedule.name, schedule.ranks(), schedule.stages(),
             schedule.micro_batches);
  fmt::print("step {:g}, {:.1f} % of it idle\n", simulation.makespan, 100 * simulation.idle_share());
  std::vector<tessera::internal::TextRow> rows{{"rank", "busy", "live forwards", "stages at once", "gathers"}};
  for (size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const auto& each = simulation.ranks[rank];
    rows.push_back({std::to_string(rank), fmt::format("{:g}", each.busy), std::to_string(each.live_forwards),
                    std::to_string(each.resident_stages), std::to_string(each.gathers)});
  }
  fmt::print("{}", tessera::internal::text_table(rows, {"rank", "busy", "live forwards", "stages at once", "gathers"}));
}

void run() {
  auto schedule = wanted_schedule();
  if (const auto active = absl::GetFlag(FLAGS_active_stages)) schedule = tessera::with_residency(std::move(schedule), active);
  const auto simulation = tessera::simulate_pipeline(schedule, {.forward = absl::GetFlag(FLAGS_forward),
                                                                .input_gradients = absl::GetFlag(FLAGS_input_gradients),
                                                                .weight_gradients = absl::GetFlag(FLAGS_weight_gradients),
                                                                .message = absl::GetFlag(FLAGS_message),
                                                                .overlap = absl::GetFlag(FLAGS_overlap)});
  const auto csv = absl::GetFlag(FLAGS_csv), svg = absl::GetFlag(FLAGS_svg);
  if (csv == "-") {
    fmt::print("{}", tessera::to_csv(schedule));
    return;
  }
  if (!csv.empty()) write(csv, tessera::to_csv(schedule));
  if (!svg.empty()) write(svg, tessera::to_svg(simulation));
  print(schedule, simulation);
}

} // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(kUsage);
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) { return file.find("tessera_pipeline") != absl::string_view::npos; };
  absl::SetFlagsUsageConfig(usage);
  const auto arguments = absl::ParseCommandLine(argc, argv);
  try {
    TORCH_CHECK(arguments.size() == 1, "unknown argument: ", arguments[1], " (see --help)");
    run();
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera-pipeline: {}\n", tessera::internal::error_text(error));
    return 1;
  }
  return 0;
}
